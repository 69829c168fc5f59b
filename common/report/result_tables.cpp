// Tables of chapter program results.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "device/roofline.h"
#include "report/table_kinds.h"
#include "report/table_text.h"

namespace attn::report {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

std::string roofs_text(const json& roofs) {
  const auto tera = [&](const char* roof) {
    return roofs.at(roof).is_null() ? 0 : roofs.at(roof).at("per_second").get<double>() * 1e-12;
  };
  return fmt::format(
      "measured roofs: copy {:.2f} TB/s, FP32 {:.1f} TFLOP/s, tensor {:.0f} TFLOP/s, "
      "exp {:.2f} T/s",
      tera("hbm_copy"), tera("fp32"), tera("tensor_bf16"), tera("exp"));
}

// The common part of all columns of a table of lengths: "softmax bf16", "forward d=128 bf16
// causal".
std::string without_lengths(const json& j) {
  const json& p = j.at("problem");
  std::string type = p.at("dtype").get<std::string>();
  if (p.contains("varlen_q")) type += " varlen, N the longest";
  if (p.at("causal").get<bool>()) type += " causal";
  const std::string operation = j.at("operation").get<std::string>();
  return is_matrix(p) ? fmt::format("{} {}", operation, type)
                      : fmt::format("{} d={} {}", operation, p.at("head_dim").get<int64_t>(), type);
}

std::string device_of(const json& j) { return j.at("device").at("name").get<std::string>(); }
std::string operation_of(const json& j) { return j.at("operation").get<std::string>(); }
std::string name_of(const json& step) { return step.at("name").get<std::string>(); }

std::string quartiles(const json& time) {
  return fmt::format("{} ({} .. {})", milliseconds(time.at("median_s").get<double>()),
                     milliseconds(time.at("q1_s").get<double>()),
                     milliseconds(time.at("q3_s").get<double>()));
}

// The modelled bytes of a step per second.
double bytes_per_s(const json& step) {
  return step.at("modelled_bytes").get<double>() / step.at("time").at("median_s").get<double>();
}
std::string share_of_copy(const json& step, const json& roofs) {
  const double copy = measured_copy(roofs);
  return copy > 0 ? fmt::format("{:.1f}", 100 * bytes_per_s(step) / copy) : "n/a";
}

// Adds "\nAbove 100 % of the tensor roof: ..." for each roof that a share exceeds.
class AboveRoof {
 public:
  void add(double share, const std::string& binding) {
    if (share > 1) bindings_.insert(binding);
  }
  std::string text() const {
    std::string text;
    for (const std::string& b : bindings_)
      text += fmt::format("\nAbove 100 % of the {} roof: {}.\n", b, above_roof(b));
    return text;
  }

 private:
  std::set<std::string> bindings_;
};

}  // namespace

std::string steps_table(const fs::path& path) {
  const json j = read_json(path);
  Grid grid;
  AboveRoof above;
  int count = 0;
  bool bytes = false;
  for (const json& s : j.at("steps")) {
    if (s.at("time").is_null()) continue;
    const json& t = s.at("time");
    count = t.at("count").get<int>();
    grid.add_row();
    grid.add("step", "step", code(name_of(s)));
    grid.add("ms", "ms (quartiles)", quartiles(t));
    if (const double seconds = t.at("median_s").get<double>(); rated_by_use(s)) {
      grid.add("rate", "GB/s of use", useful_rate(s, seconds));
      grid.add("share", "% of read", share_of_read(s, seconds));
    } else if (rated_in_bytes(s)) {
      bytes = true;
      grid.add("rate", "GB/s", gigabytes_per_s(bytes_per_s(s)));
      grid.add("share", "% of copy", share_of_copy(s, j.at("roofs")));
    } else {
      grid.add("rate", "TFLOP/s", rate(s.at("flop_per_s").get<double>()));
      above.add(s.at("share_of_roof").get<double>(), s.at("binding").get<std::string>());
      grid.add("share", "% of roof",
               fmt::format("{:.1f} {}", 100 * s.at("share_of_roof").get<double>(),
                           s.at("binding").get<std::string>()));
    }
    grid.add("bytes", "modelled GB", gigabytes(s.at("modelled_bytes").get<double>()));
  }
  return fmt::format("{}, {}: {}, medians of {} launches; {}.{}\n\n{}{}", device_of(j),
                     operation_of(j), problem_text(j.at("problem")), count,
                     roofs_text(j.at("roofs")), bytes ? " GB/s: modelled bytes over time." : "",
                     grid.markdown(), above.text());
}

std::string phases_table(const fs::path& path) {
  const json j = read_json(path);
  Grid grid;
  AboveRoof above;
  for (const json& s : j.at("steps"))
    for (const json& p : s.at("phases")) {
      if (p.at("time").is_null()) continue;
      const double measured = p.at("time").at("median_s").get<double>();
      const double predicted = p.at("predicted_s").get<double>();
      grid.add_row();
      grid.add("step", "step", code(name_of(s)));
      grid.add("phase", "phase", p.at("name").get<std::string>());
      grid.add("measured", "measured ms", milliseconds(measured));
      grid.add("predicted", "predicted ms", milliseconds(predicted));
      above.add(predicted / measured, p.at("binding").get<std::string>());
      grid.add(
          "share", "% of roof",
          fmt::format("{:.1f} {}", 100 * predicted / measured, p.at("binding").get<std::string>()));
    }
  return fmt::format("{}, {}: {}.\n\n{}{}", device_of(j), operation_of(j),
                     problem_text(j.at("problem")), grid.markdown(), above.text());
}

namespace {
// Removes a word phase=NAME and returns NAME; "" if there is none.
std::string take_phase(Words& words) {
  constexpr std::string_view kPhase = "phase=";
  const auto word = std::find_if(words.begin(), words.end(),
                                 [&](const auto& w) { return w.starts_with(kPhase); });
  if (word == words.end()) return "";
  const std::string phase = word->substr(kPhase.size());
  words.erase(word);
  return phase;
}
// Median of a step, or of one of its phases; nothing if it was not timed.
std::optional<double> seconds_of(const json& step, const std::string& phase) {
  if (step.at("time").is_null()) return std::nullopt;
  if (phase.empty()) return step.at("time").at("median_s").get<double>();
  for (const json& p : step.at("phases"))
    if (p.at("name") == phase && p.contains("time"))
      return p.at("time").at("median_s").get<double>();
  return std::nullopt;
}
}  // namespace

// One row per step, one column per file. With phase=NAME only that phase: all of the step's
// operations over its time.
std::string lengths_table(const fs::path& folder, Words names) {
  const std::string phase = take_phase(names);
  std::vector<std::string> steps;
  // title, cells by step
  std::vector<std::pair<std::string, std::map<std::string, std::string>>> columns;
  std::string device, problem;
  bool bytes = false, use = false;
  for (const std::string& name : names) {
    const json j = read_json(folder / (name + ".json"));
    if (device.empty()) device = device_of(j), problem = without_lengths(j);
    if (device_of(j) != device || without_lengths(j) != problem)
      throw InputError(fmt::format("table lengths: {} is of {} on {}, not of {} on {}", name,
                                   without_lengths(j), device_of(j), problem, device));
    const bool rows = is_matrix(j.at("problem"));
    columns.emplace_back(
        fmt::format("{}={}", rows ? "cols" : "N", j.at("problem").at("seqlen_k").get<int64_t>()),
        std::map<std::string, std::string>());
    for (const json& s : j.at("steps")) {
      const std::optional<double> seconds = seconds_of(s, phase);
      // A step without operations has no rate for a phase.
      if (!seconds || (!phase.empty() && rated_in_bytes(s))) continue;
      const std::string step = name_of(s);
      if (std::find(steps.begin(), steps.end(), step) == steps.end()) steps.push_back(step);
      bytes |= rated_in_bytes(s);
      use |= phase.empty() && rated_by_use(s);
      columns.back().second[step] =
          !phase.empty() ? rate(s.at("flop").get<double>() / *seconds)
          : rated_by_use(s)
              ? fmt::format("{} ({})", useful_rate(s, *seconds), share_of_read(s, *seconds))
          : rated_in_bytes(s) ? fmt::format("{} ({})", gigabytes_per_s(bytes_per_s(s)),
                                            share_of_copy(s, j.at("roofs")))
                              : rate(s.at("flop_per_s").get<double>());
    }
  }
  if (!phase.empty() && steps.empty())
    throw InputError(fmt::format("table lengths: no step of {} has a phase {}",
                                 fmt::join(names, ", "), phase));
  Grid grid;
  grid.add_column("step", use ? "GB/s of use (% of read)" : bytes ? "GB/s (% of copy)" : "TFLOP/s");
  // Two files of the same length are separate columns.
  for (std::size_t n = 0; n < columns.size(); ++n)
    grid.add_column(std::to_string(n), columns[n].first);
  for (const std::string& step : steps) {
    grid.add_row();
    grid.put("step", code(step));
    for (std::size_t n = 0; n < columns.size(); ++n)
      if (const auto cell = columns[n].second.find(step); cell != columns[n].second.end())
        grid.put(std::to_string(n), cell->second);
  }
  return fmt::format(
      "{}, {}{}.{}\n\n{}", device, problem, phase.empty() ? "" : ", the phase " + phase + " alone",
      bytes && phase.empty()
          ? " GB/s: modelled bytes over time; in brackets, % of the copy measured in the same run."
          : "",
      grid.markdown());
}

// One row per problem and step: the cost of a feature.
std::string problems_table(const fs::path& folder, const Words& names) {
  Grid grid;
  std::string device, operation;
  for (const std::string& name : names) {
    const json j = read_json(folder / (name + ".json"));
    if (device.empty()) device = device_of(j), operation = operation_of(j);
    if (device_of(j) != device || operation_of(j) != operation)
      throw InputError(fmt::format("table problems: {} is {} on {}, not {} on {}", name,
                                   operation_of(j), device_of(j), operation, device));
    for (const json& s : j.at("steps")) {
      if (s.at("time").is_null()) continue;
      grid.add_row();
      grid.add("problem", "problem", problem_text(j.at("problem")));
      grid.add("step", "step", code(name_of(s)));
      grid.add("ms", "ms (quartiles)", quartiles(s.at("time")));
      grid.add("rate",
               rated_by_use(s)     ? "GB/s of use"
               : rated_in_bytes(s) ? "GB/s"
                                   : "TFLOP/s",
               rated_by_use(s)     ? useful_rate(s, s.at("time").at("median_s").get<double>())
               : rated_in_bytes(s) ? gigabytes_per_s(bytes_per_s(s))
                                   : rate(s.at("flop_per_s").get<double>()));
    }
  }
  return fmt::format("{}, {}.\n\n{}", device, operation, grid.markdown());
}

// One row per step and tensor: the distance of outputs from those of the original inputs, for
// inputs stored in fewer bits.
std::string accuracy_table(const fs::path& folder, const Words& names) {
  Grid grid;
  for (const std::string& name : names) {
    const json j = read_json(folder / (name + ".json"));
    for (const json& s : j.at("steps"))
      for (const json& v : s.at("verdicts")) {
        if (!v.contains("to_originals")) continue;
        const json& d = v.at("to_originals");
        const auto number = [&](const char* key, const char* format) {
          return d.at(key).is_null() ? "n/a"
                                     : fmt::format(fmt::runtime(format), d.at(key).get<double>());
        };
        grid.add_row();
        grid.add("problem", "problem",
                 fmt::format("{} {}", operation_of(j), problem_text(j.at("problem"))));
        grid.add("inputs", "inputs", j.at("problem").at("inputs").get<std::string>());
        grid.add("step", "step", code(name_of(s)));
        grid.add("tensor", "tensor", v.at("tensor").get<std::string>());
        grid.add("cosine", "cosine", number("cosine", "{:.6f}"));
        grid.add("l1", "relative L1", number("relative_l1", "{:.2e}"));
        grid.add("rmse", "RMSE", number("rmse", "{:.2e}"));
      }
  }
  if (grid.empty())
    throw InputError(fmt::format("table accuracy {}: no step stores its inputs in fewer bits",
                                 fmt::join(names, " ")));
  return "Outputs against those of the inputs before they were stored in fewer bits.\n\n" +
         grid.markdown();
}

// "01_naive|Paper|A_sentence=DOCUMENT:FIRST:LAST".
struct ChapterSpec {
  std::string chapter, paper, sentence, document, first, last;
};
static ChapterSpec chapter_spec(const std::string& word) {
  std::string text = word;
  Words parts;
  for (const char separator : {'|', '|', '=', ':', ':'}) {
    const auto at = text.find(separator);
    if (at == text.npos)
      throw InputError(fmt::format("table chapters: {}: must be "
                                   "CHAPTER|PAPER|SENTENCE=DOCUMENT:FIRST:LAST, _ for a blank",
                                   word));
    parts.push_back(text.substr(0, at));
    text.erase(0, at + 1);
  }
  for (std::size_t n : {1, 2}) std::ranges::replace(parts[n], '_', ' ');
  return {parts[0], parts[1], parts[2], parts[3], parts[4], text};
}
Words chapter_files(const Words& specs) {
  Words files;
  for (const std::string& word : specs)
    if (const std::string file = chapter_spec(word).document;
        std::ranges::find(files, file) == files.end())
      files.push_back(file);
  return files;
}
std::string chapters_table(const fs::path& folder, const Words& specs) {
  Grid grid;
  std::string device;
  for (const std::string& word : specs) {
    const ChapterSpec spec = chapter_spec(word);
    const json j = read_json(folder / (spec.document + ".json"));
    device = device_of(j);
    grid.add_row();
    const std::string name = fs::path(spec.chapter).filename().string();
    grid.add("chapter", "chapter", fmt::format("[{}]({}/README.md)", name, spec.chapter));
    grid.add("paper", "paper", spec.paper);
    grid.add("sentence", "what it teaches", spec.sentence);
    grid.add("problem", "one problem", problem_text(j.at("problem")));
    for (const auto& [column, step] :
         {std::pair("an early step", spec.first), {"a late step", spec.last}}) {
      std::optional<double> seconds;
      for (const json& s : j.at("steps"))
        if (name_of(s) == step) seconds = seconds_of(s, "");
      if (!seconds)
        throw InputError(
            fmt::format("table chapters: {} has no time of {}", spec.document, step));
      grid.add(column, column, fmt::format("{}: {} ms", code(step), milliseconds(*seconds)));
    }
  }
  return fmt::format(
      "Medians on an {}; not every step of a chapter was timed on its problem.\n\n{}", device,
      grid.markdown());
}

namespace {

// A column of compare_table, from "Its_title=VALUE:DOCUMENT,DOCUMENT".
struct Compared {
  std::string title, value;
  Words documents;
};
Compared compared(const std::string& word) {
  const auto equals = word.find('='), colon = word.find(':', equals);
  if (equals == word.npos || colon == word.npos)
    throw InputError(fmt::format("table compare: {}: must be TITLE=VALUE:DOCUMENT,...", word));
  Compared c{word.substr(0, equals), word.substr(equals + 1, colon - equals - 1),
             split(word.substr(colon + 1), ',')};
  std::ranges::replace(c.title, '_', ' ');
  return c;
}
std::string compared_value(const json& step, const std::string& value) {
  const bool time = value == "ms" || value == "us";
  const std::optional<double> seconds = seconds_of(step, time ? "" : value);
  if (!seconds) return "-";
  if (!time) return rate(step.at("flop").get<double>() / *seconds);
  if (value == "ms") return milliseconds(*seconds);
  const double us = *seconds * 1e6;
  return fmt::format("{:.{}f}", us, us < 100 ? 1 : 0);
}

}  // namespace

Words compared_files(const Words& specs) {
  Words files;
  for (const std::string& word : specs)
    if (!word.starts_with("step="))
      for (const std::string& file : compared(word).documents)
        if (std::ranges::find(files, file) == files.end()) files.push_back(file);
  return files;
}
std::string compare_table(const fs::path& folder, const Words& specs) {
  if (specs.size() < 2 || !specs[0].starts_with("step="))
    throw InputError("table compare: must be step=A,B and a word per column");
  std::map<std::string, json> read;
  for (const std::string& file : compared_files(specs))
    read[file] = read_json(folder / (file + ".json"));
  Grid grid;
  grid.add_column("step", "step"), grid.add_column("type", "type");
  for (const std::string& step : split(specs[0].substr(5), ',')) {
    grid.add_row();
    grid.put("step", code(step));
    bool any = false;
    for (std::size_t n = 1; n < specs.size(); ++n) {
      const Compared column = compared(specs[n]);
      grid.add_column(specs[n], column.title);
      for (const std::string& file : column.documents) {
        const json& steps = read.at(file).at("steps");
        const auto found = std::ranges::find_if(steps, [&](const json& s) {
          return name_of(s) == step && !s.at("time").is_null();
        });
        if (found == steps.end()) continue;
        grid.put("type", read.at(file).at("problem").at("dtype").get<std::string>());
        grid.put(specs[n], compared_value(*found, column.value));
        any = true;
        break;
      }
    }
    if (!any) throw InputError(fmt::format("table compare: no document has a time of {}", step));
  }
  return fmt::format("Medians on an {}.\n\n{}", device_of(read.begin()->second), grid.markdown());
}

// One row per length, one column per step of a chapter.
std::string memory_table(const fs::path& folder, const Words& names) {
  std::map<int64_t, std::map<std::string, std::string>> lengths;
  Words steps;
  std::string problem;
  double least_free = 0;
  for (const std::string& name : names) {
    const json j = read_json(folder / (name + ".json"));
    const json& device = j.at("device");
    json p = j.at("problem");
    if (is_matrix(j.at("problem")))
      throw InputError(fmt::format("table memory: {} is of rows, must be of attention", name));
    if (p.contains("varlen_q"))
      throw InputError(fmt::format("table memory: {} is of several lengths, must be of one", name));
    const int64_t length = p.at("seqlen_k").get<int64_t>();
    p["seqlen_q"] = p["seqlen_k"] = 0;  // everything except the length must match
    const std::string rest = fmt::format("{}: {}", operation_of(j), problem_text(p));
    if (problem.empty()) problem = rest;
    if (rest != problem)
      throw InputError(
          fmt::format("table memory: {} is of another problem than {}", name, names.front()));
    const double free = device.value("memory_free_bytes", 0.0);
    least_free = least_free > 0 ? std::min(least_free, free) : free;
    for (const json& s : j.at("steps")) {
      const std::string step =
          fmt::format("{} {}", j.at("chapter").get<std::string>(), code(name_of(s)));
      if (std::find(steps.begin(), steps.end(), step) == steps.end()) steps.push_back(step);
      const json need = s.value("memory_bytes", json(nullptr));
      // As make_plan() of the chapter program decides: a problem that does not fit is refused.
      lengths[length][step] =
          !s.contains("memory_bytes") ? "n/a"  // older programs did not record it
          : need.is_null()            ? "refused"
                                      : fmt::format("{:.2f}{}", need.get<double>() / (1 << 30),
                                       free > 0 && need.get<double>() > free ? " (refused)" : "");
    }
  }
  Grid grid;
  grid.add_column("N", "N");
  for (const std::string& step : steps) grid.add_column(step, step + " GiB");
  for (const auto& [length, cells] : lengths) {
    grid.add_row();
    grid.put("N", std::to_string(length));
    for (const auto& [step, cell] : cells) grid.put(step, cell);
  }
  problem.replace(problem.find("N=0 "), 4, "");
  return fmt::format(
      "Device memory that a step needs, {}: tensors and workspaces, as the program counts them "
      "before it "
      "allocates.{}\n\n{}",
      problem,
      least_free > 0 ? fmt::format(" Refused: more than the {:.1f} GiB that were free.",
                                   least_free / (1 << 30))
                     : "",
      grid.markdown());
}

}  // namespace attn::report
