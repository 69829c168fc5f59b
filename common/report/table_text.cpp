#include "report/table_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <sstream>

#include "report/containers.h"
#include "report/json_object.h"

namespace attn::report {

using nlohmann::json;
namespace fs = std::filesystem;

const fs::path& existing(const fs::path& path) {
  if (!fs::exists(path) && !is_contained(path))
    throw NotMeasured(fmt::format("{}: not there yet", printable(path.string())));
  return path;
}

json read_json(const fs::path& path) {
  const json j = json::parse(read_bytes(existing(path)), nullptr, false);
  if (j.is_discarded() || !j.is_object())
    throw InputError(fmt::format("{}: is not a JSON object", printable(path.string())));
  return j;
}

void Grid::add_column(const std::string& key, const std::string& title) {
  const auto same = [&](const auto& column) { return column.first == key; };
  if (std::none_of(columns_.begin(), columns_.end(), same)) columns_.emplace_back(key, title);
}

std::string Grid::markdown() const {
  // Figures begin with a digit or a sign.
  const auto is_text = [&](const std::string& key) {
    return std::ranges::any_of(rows_, [&](const auto& row) {
      const auto cell = row.find(key);
      return cell != row.end() && cell->second != "-" &&
             cell->second.find_first_of("+-.0123456789") != 0;
    });
  };
  std::string head, rule, body;
  for (const auto& [key, title] : columns_) {
    head += fmt::format("| {} ", title);
    rule += rule.empty() ? "|---|" : is_text(key) ? "---|" : "---:|";
  }
  for (const auto& row : rows_) {
    for (const auto& [key, title] : columns_) {
      const auto cell = row.find(key);
      body += fmt::format("| {} ", cell == row.end() ? "-" : cell->second);
    }
    body += "|\n";
  }
  return fmt::format("{}|\n{}\n{}", head, rule, body);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> words;
  std::istringstream stream(text);
  for (std::string word; std::getline(stream, word, separator);) words.push_back(word);
  return words;
}
std::string milliseconds(double s) {
  const double ms = s * 1e3;
  if (ms < 0.1) return fmt::format("{:.3g}", ms);
  return fmt::format("{:.{}f}", ms, ms < 10 ? 3 : ms < 100 ? 2 : 1);
}
std::string rate(double flop_per_s) {
  const double tera = flop_per_s * 1e-12;
  return fmt::format("{:.{}f}", tera, tera < 10 ? 2 : 1);
}
std::string gigabytes(double bytes) {
  return fmt::format("{:.{}f}", bytes * 1e-9, bytes < 1e10 ? 2 : 1);
}
std::string gigabytes_per_s(double bytes_per_s) {
  return fmt::format("{:.0f}", bytes_per_s * 1e-9);
}
std::string code(const std::string& name) { return fmt::format("`{}`", name); }

namespace {

// A short description of lengths: for a varlen batch the number of tokens and the longest sequence.
std::string lengths_text(const json& p) {
  const int64_t queries = p.at("seqlen_q").get<int64_t>(), keys = p.at("seqlen_k").get<int64_t>();
  if (p.contains("seqused_k")) {
    const auto used = p.at("seqused_k").get<std::vector<int64_t>>();
    const auto [least, most] = std::ranges::minmax(used);
    return fmt::format("seqlen_q={} keys in use {} to {}, {} together,", queries, least, most,
                       std::accumulate(used.begin(), used.end(), int64_t{0}));
  }
  if (!p.contains("varlen_q"))
    return queries == keys ? fmt::format("N={}", keys)
                           : fmt::format("seqlen_q={} seqlen_k={}", queries, keys);
  const auto tokens = [&](const char* key) {
    int64_t sum = 0;
    for (const json& length : p.at(key)) sum += length.get<int64_t>();
    return sum;
  };
  if (p.at("varlen_q") == p.at("varlen_k"))
    return fmt::format("varlen {} tokens, longest {},", tokens("varlen_q"), queries);
  return fmt::format("varlen {} queries, longest {}, {} keys, longest {},", tokens("varlen_q"),
                     queries, tokens("varlen_k"), keys);
}

}  // namespace

bool is_matrix(const json& problem) {
  return problem.contains("matrix") ? problem.at("matrix").get<bool>()
                                    : problem.at("head_dim") == 1;
}

std::string problem_text(const json& p) {
  const auto number = [&](const char* key) { return p.at(key).get<int64_t>(); };
  std::string text;
  if (is_matrix(p)) {
    text = fmt::format("{} rows x {} columns",
                       number("batch") * number("heads") * number("seqlen_q"), number("seqlen_k"));
  } else {
    text = fmt::format("B={} Hq={} Hkv={} {} d={}", number("batch"), number("heads"),
                       number("kv_heads"), lengths_text(p), number("head_dim"));
  }
  text += fmt::format(" {}", p.at("dtype").get<std::string>());
  const bool causal = p.at("causal").get<bool>();
  if (causal) text += " causal";
  if (p.contains("window")) {
    const int64_t left = p.at("window").at(0).get<int64_t>(),
                  right = p.at("window").at(1).get<int64_t>();
    if (left >= 0 || (right >= 0 && !causal)) text += fmt::format(" window={},{}", left, right);
  }
  if (p.contains("softcap")) text += fmt::format(" softcap={}", p.at("softcap").get<double>());
  if (p.value("alibi", false)) text += " alibi";
  if (p.contains("dropout")) text += fmt::format(" dropout={}", p.at("dropout").get<double>());
  if (p.contains("mask")) text += fmt::format(" mask={}", p.at("mask").get<std::string>());
  if (p.contains("own"))
    for (const auto& [option, values] : p.at("own").items())
      text += fmt::format(" {}={}", option, fmt::join(values.get<std::vector<double>>(), ","));
  if (p.contains("top_k")) text += fmt::format(" k={}", number("top_k"));
  return text;
}

double measured_copy(const json& roofs) {
  const json& copy = roofs.at("hbm_copy");
  if (copy.is_null() || copy.at("source") != "measured") return 0;
  return copy.at("per_second").get<double>();
}

bool rated_by_use(const json& step) { return step.contains("useful_read_s"); }
std::string useful_rate(const json& step, double seconds) {
  return gigabytes_per_s(step.at("compulsory_bytes").get<double>() / seconds);
}
std::string share_of_read(const json& step, double seconds) {
  return fmt::format("{:.1f}", 100 * step.at("useful_read_s").get<double>() / seconds);
}

bool rated_in_bytes(const json& step) { return step.at("flop").get<double>() == 0; }

}  // namespace attn::report
