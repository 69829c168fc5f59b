#include "report/tables.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <vector>

#include "attn/error.h"
#include "report/counters.h"
#include "report/diff.h"

namespace attn::report {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw InputError(fmt::format("{}: cannot be read", path.string()));
  return {std::istreambuf_iterator<char>(file), {}};
}

json read_json(const fs::path& path) {
  const json j = json::parse(read_text(path), nullptr, false);
  if (j.is_discarded() || !j.is_object())
    throw InputError(fmt::format("{}: is not a JSON object", path.string()));
  return j;
}

// ---- Markdown -------------------------------------------------------------------------------
using Row = std::vector<std::string>;

std::string markdown(const std::vector<Row>& rows) {
  std::string text;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    text += fmt::format("| {} |\n", fmt::join(rows[i], " | "));
    if (i > 0) continue;
    text += "|---|";
    for (std::size_t c = 1; c < rows[i].size(); ++c) text += "---:|";
    text += "\n";
  }
  return text;
}

std::string milliseconds(double s) {
  const double ms = s * 1e3;
  return fmt::format("{:.{}f}", ms, ms < 10 ? 3 : ms < 100 ? 2 : 1);
}
std::string rate(double flop_per_s) {
  const double tera = flop_per_s * 1e-12;
  return fmt::format("{:.{}f}", tera, tera < 10 ? 2 : 1);
}
std::string gigabytes(double bytes) {
  return fmt::format("{:.{}f}", bytes * 1e-9, bytes < 1e10 ? 2 : 1);
}

std::string problem_text(const json& p) {
  return fmt::format("B={} Hq={} Hkv={} N={} d={} {}{}", p.at("batch").get<int>(),
                     p.at("heads").get<int>(), p.at("kv_heads").get<int>(),
                     p.at("seqlen_q").get<int>(), p.at("head_dim").get<int>(),
                     p.at("dtype").get<std::string>(), p.at("causal").get<bool>() ? " causal" : "");
}

std::string roofs_text(const json& roofs) {
  const auto tera = [&](const char* roof) {
    return roofs.at(roof).is_null() ? 0 : roofs.at(roof).at("per_second").get<double>() * 1e-12;
  };
  return fmt::format("measured roofs: copy {:.2f} TB/s, FP32 {:.1f} TFLOP/s, tensor {:.0f} TFLOP/s, "
                     "exp {:.2f} T/s",
                     tera("hbm_copy"), tera("fp32"), tera("tensor_bf16"), tera("exp"));
}

// ---- the kinds ------------------------------------------------------------------------------
std::string steps_table(const fs::path& path) {
  const json j = read_json(path);
  std::vector<Row> rows{{"step", "ms (quartiles)", "TFLOP/s", "% of roof", "modelled GB"}};
  int count = 0;
  for (const json& s : j.at("steps")) {
    if (s.at("time").is_null()) continue;
    const json& t = s.at("time");
    count = t.at("count").get<int>();
    rows.push_back({fmt::format("`{}`", s.at("name").get<std::string>()),
                    fmt::format("{} ({} .. {})", milliseconds(t.at("median_s").get<double>()),
                                milliseconds(t.at("q1_s").get<double>()),
                                milliseconds(t.at("q3_s").get<double>())),
                    rate(s.at("flop_per_s").get<double>()),
                    fmt::format("{:.1f} {}", 100 * s.at("share_of_roof").get<double>(),
                                s.at("binding").get<std::string>()),
                    gigabytes(s.at("modelled_bytes").get<double>())});
  }
  return fmt::format("{}, {}: {}, medians of {} launches; {}.\n\n{}",
                     j.at("device").at("name").get<std::string>(),
                     j.at("operation").get<std::string>(), problem_text(j.at("problem")), count,
                     roofs_text(j.at("roofs")), markdown(rows));
}

std::string phases_table(const fs::path& path) {
  const json j = read_json(path);
  std::vector<Row> rows{{"step", "phase", "measured ms", "predicted ms", "% of roof"}};
  for (const json& s : j.at("steps"))
    for (const json& p : s.at("phases")) {
      if (p.at("time").is_null()) continue;
      const double measured = p.at("time").at("median_s").get<double>();
      const double predicted = p.at("predicted_s").get<double>();
      rows.push_back({fmt::format("`{}`", s.at("name").get<std::string>()),
                      p.at("name").get<std::string>(), milliseconds(measured),
                      milliseconds(predicted),
                      fmt::format("{:.1f} {}", 100 * predicted / measured,
                                  p.at("binding").get<std::string>())});
    }
  return fmt::format("{}, {}: {}.\n\n{}", j.at("device").at("name").get<std::string>(),
                     j.at("operation").get<std::string>(), problem_text(j.at("problem")),
                     markdown(rows));
}

std::string lengths_table(const fs::path& folder, const std::vector<std::string>& names) {
  Row head{"TFLOP/s"};
  std::vector<std::string> steps;
  std::map<std::string, std::map<std::size_t, std::string>> cells;
  std::string device;
  for (std::size_t n = 0; n < names.size(); ++n) {
    const json j = read_json(folder / (names[n] + ".json"));
    device = j.at("device").at("name").get<std::string>();
    head.push_back(fmt::format("N={}", j.at("problem").at("seqlen_q").get<int>()));
    for (const json& s : j.at("steps")) {
      if (s.at("time").is_null()) continue;
      const auto step = s.at("name").get<std::string>();
      if (std::find(steps.begin(), steps.end(), step) == steps.end()) steps.push_back(step);
      cells[step][n] = rate(s.at("flop_per_s").get<double>());
    }
  }
  std::vector<Row> rows{head};
  for (const std::string& step : steps) {
    Row row{fmt::format("`{}`", step)};
    for (std::size_t n = 0; n < names.size(); ++n)
      row.push_back(cells[step].contains(n) ? cells[step][n] : "-");
    rows.push_back(std::move(row));
  }
  return fmt::format("{}.\n\n{}", device, markdown(rows));
}

std::string peers_table(const fs::path& path) {
  const json j = read_json(path);
  std::vector<Row> rows;
  for (const json& p : j.at("problems")) {
    Row head{"problem"}, row{problem_text(p.at("problem"))};
    for (const json& peer : p.at("peers")) {
      head.push_back(fmt::format("{} ms", peer.at("name").get<std::string>()));
      row.push_back(peer.contains("time")
                        ? milliseconds(peer.at("time").at("median_s").get<double>())
                        : "-");
    }
    // A step's time is the median over the runs that took turns with the peers.
    for (const json& s : p.at("runs").at(0).at("steps")) {
      const auto step = s.at("name").get<std::string>();
      std::vector<double> medians;
      for (const json& run : p.at("runs"))
        for (const json& again : run.at("steps"))
          if (again.at("name") == step && !again.at("time").is_null())
            medians.push_back(again.at("time").at("median_s").get<double>());
      if (medians.empty()) continue;
      std::sort(medians.begin(), medians.end());
      const double median = medians[(medians.size() - 1) / 2];
      head.push_back(fmt::format("`{}` ms", step));
      row.push_back(milliseconds(median));
      for (const json& peer : p.at("peers")) {
        if (!peer.contains("time")) continue;
        head.push_back(fmt::format("x {}", peer.at("name").get<std::string>()));
        row.push_back(fmt::format("{:.2f}", peer.at("time").at("median_s").get<double>() / median));
      }
    }
    if (rows.empty()) rows.push_back(head);
    rows.push_back(std::move(row));
  }
  return fmt::format("{}, PyTorch {}, cuDNN {}; `x name`: how many times faster than that peer.\n\n{}",
                     j.at("gpu").get<std::string>(), j.at("torch").get<std::string>(),
                     j.at("cudnn").get<int>(), markdown(rows));
}

std::string counters_table(const fs::path& folder, const std::string& chapter) {
  std::vector<Row> rows{{"step", "kernel", "ms", "load sectors/request", "store sectors/request",
                         "HBM read GB", "HBM write GB", "L2 GB"}};
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string file = entry.path().filename().string();
    if (file.rfind(chapter + ".", 0) == 0 && file.ends_with(".ncu.csv")) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end(), [](const fs::path& a, const fs::path& b) {
    const std::string x = a.filename().string(), y = b.filename().string();
    const auto family = [](const std::string& s) { return s.substr(s.find('.') + 1, 1); };
    return family(x) != family(y) ? family(x) > family(y) : x < y;  // v steps before b steps
  });
  // n/a where a counter is absent, or where the kernel made no such request.
  const auto text = [](std::optional<double> x, const auto& format) {
    return x ? format(*x) : std::string("n/a");
  };
  const auto one_digit = [](double x) { return fmt::format("{:.1f}", x); };
  for (const fs::path& path : files) {
    const CounterFile file = read_counter_file(path);
    const std::string step =
        file.file.substr(chapter.size() + 1, file.file.size() - chapter.size() - 9);
    for (const KernelCounters& k : file.kernels)
      rows.push_back({fmt::format("`{}`", step), k.name, text(k.value("time_s"), milliseconds),
                      text(k.value("ld_sectors_per_request"), one_digit),
                      text(k.value("st_sectors_per_request"), one_digit),
                      text(k.value("hbm_read_bytes"), gigabytes),
                      text(k.value("hbm_write_bytes"), gigabytes),
                      text(k.value("l2_bytes"), gigabytes)});
  }
  if (rows.size() == 1)
    throw InputError(fmt::format("{}: has no {}.*.ncu.csv", folder.string(), chapter));
  return markdown(rows);
}

// What moved between two exports: in the whole step, or in the kernel that is named.
std::string diff_table(const fs::path& folder, const std::vector<std::string>& names) {
  const auto read = [&](const std::string& name) {
    return read_steps(folder / (name + ".ncu.csv"), "");
  };
  const Diff d = compare_files(read(names.at(0)), read(names.at(1)), false).at(0);
  const std::vector<Moved>* counters = &d.total;
  std::optional<double> time_a = d.time_a.median, time_b = d.time_b.median;
  std::string what = "whole step";
  if (names.size() > 2) {
    counters = nullptr;
    for (const KernelPair& k : d.kernels)
      if (k.name == names[2]) counters = &k.counters, time_a = k.a_s, time_b = k.b_s;
    if (!counters) throw InputError(fmt::format("table diff: no kernel {} in both", names[2]));
    what = fmt::format("`{}`", names[2]);
  }
  std::vector<Row> rows{{what, d.a.step, d.b.step, "factor"}};
  const Counter& time = *find_counter("time_s");
  const Moved of_time{&time, time_a, time_b, *time_b / *time_a};
  rows.push_back({"time", value_text(time, time_a), value_text(time, time_b), factor_text(of_time)});
  for (const Moved& m : *counters)
    if (moved(m))
      rows.push_back({std::string(m.counter->label), value_text(*m.counter, m.a),
                      value_text(*m.counter, m.b), factor_text(m)});
  return markdown(rows);
}

std::string table(const std::vector<std::string>& words, const fs::path& reports) {
  const std::string& kind = words.at(0);
  const std::vector<std::string> names(words.begin() + 1, words.end());
  const auto file = [&] { return reports / (names.at(0) + ".json"); };
  if (kind == "steps") return steps_table(file());
  if (kind == "phases") return phases_table(file());
  if (kind == "lengths") return lengths_table(reports, names);
  if (kind == "peers") return peers_table(file());
  if (kind == "counters") return counters_table(reports, names.at(0));
  if (kind == "diff") {
    if (names.size() < 2) throw InputError("table: diff: needs two exports");
    return diff_table(reports, names);
  }
  throw InputError(
      fmt::format("table: {}: must be steps, phases, lengths, peers, counters or diff", kind));
}

}  // namespace

std::string fill_tables(const std::string& page, const std::string& name, const fs::path& reports) {
  static const std::string kBegin = "<!-- table: ", kClose = " -->", kEnd = "<!-- end table -->";
  std::string out;
  std::size_t at = 0;
  while (true) {
    const std::size_t begin = page.find(kBegin, at);
    if (begin == page.npos) break;
    const std::size_t close = page.find(kClose, begin), end = page.find(kEnd, begin);
    if (close == page.npos || end == page.npos || end < close)
      throw InputError(fmt::format("{}: a table marker without its {}", name, kEnd));
    std::istringstream text(page.substr(begin + kBegin.size(), close - begin - kBegin.size()));
    std::vector<std::string> words;
    for (std::string word; text >> word;) words.push_back(word);
    if (words.size() < 2)
      throw InputError(fmt::format("{}: a table marker needs a kind and a file", name));
    out += page.substr(at, close + kClose.size() - at) + "\n";
    try {
      out += table(words, reports);
    } catch (const json::exception& e) {
      throw InputError(fmt::format("{}: table {}: {}", name, fmt::join(words, " "), e.what()));
    }
    at = end;
  }
  return out + page.substr(at);
}

}  // namespace attn::report
