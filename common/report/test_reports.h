// Shared by the tests of tables: a folder of small reports, and JSON of a chapter program, reduced
// to the fields that a table reads.
#pragma once

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "report/tables.h"
#include "report/test_files.h"
#include "tests/catch.h"

namespace attn::report::test {

using nlohmann::json;

// A folder of reports.
class Reports {
 public:
  void write(const std::string& name, const std::string& text) { folder_.write(text, name); }
  void write(const std::string& name, const json& j) { write(name + ".json", j.dump()); }
  fs::path path() const { return folder_.path().parent_path(); }
  // Writes a step file of a chapter next to the reports.
  void step(const std::string& chapter, const std::string& name, const std::string& header) {
    fs::create_directories(path() / chapter);
    write(chapter + "/" + name + ".cu", "// " + name + ": a step.\n//\n" + header + "\n");
  }
  // The text between the markers of `table`.
  std::string table(const std::string& table) {
    const std::string begin = "<!-- table: " + table + " -->\n", end = "<!-- end table -->\n";
    missing.clear();
    const std::string page =
        fill_tables(begin + "old\n" + end, (path() / "page.md").string(), path(), &missing);
    REQUIRE(page.starts_with(begin));
    REQUIRE(page.ends_with(end));
    return page.substr(begin.size(), page.size() - begin.size() - end.size());
  }
  std::string refusal(const std::string& words) {
    return refusal_of([&] { return table(words); });
  }
  std::vector<std::string> missing;

 private:
  TemporaryFile folder_;
};

// Checks that `text` contains this complete line.
inline void has_line(const std::string& text, const std::string& line) {
  INFO(text);
  CHECK(("\n" + text).find("\n" + line + "\n") != std::string::npos);
}
inline void has(const std::string& text, const std::string& part) {
  INFO(text);
  CHECK(text.find(part) != std::string::npos);
}

inline json problem(const char* dtype, int n, int heads = 16) {
  return {{"batch", 1},         {"heads", heads},       {"kv_heads", heads},  {"seqlen_q", n},
          {"seqlen_k", n},      {"head_dim", 128},      {"dtype", dtype},     {"causal", false},
          {"window", {-1, -1}}, {"softmax_scale", 1.0}, {"inputs", "random"}, {"seed", 1}};
}
inline json rows_problem(const char* dtype, int64_t rows, int64_t cols) {
  json p = problem(dtype, 1);
  p.update(
      {{"heads", 1}, {"kv_heads", 1}, {"seqlen_q", rows}, {"seqlen_k", cols}, {"head_dim", 1}});
  return p;
}
inline json time_of(double s) {
  return s > 0 ? json{{"median_s", s}, {"q1_s", s}, {"q3_s", s}, {"min_s", s}, {"count", 20}}
               : json(nullptr);
}
inline json step(const char* name, double flop, double bytes, double s) {
  return {{"name", name},
          {"operation", "forward"},
          {"outcome", "unchecked"},
          {"reason", ""},
          {"verdicts", json::array()},
          {"flop", flop},
          {"modelled_bytes", bytes},
          {"predicted_s", s},
          {"binding", "HBM"},
          {"time", time_of(s)},
          {"flop_per_s", s > 0 ? json(flop / s) : json(nullptr)},
          {"share_of_roof", s > 0 ? json(0.5) : json(nullptr)},
          {"phases", json::array()}};
}
inline json run(const char* chapter, const char* operation, const json& p,
                const std::vector<json>& steps) {
  const json roof = {{"per_second", 4e12}, {"source", "measured"}};
  json all = steps;
  for (json& s : all) s["operation"] = operation;
  return {{"schema", "attn-results-1"},
          {"chapter", chapter},
          {"operation", operation},
          {"problem", p},
          {"device",
           {{"backend", "gpu"},
            {"text", "NVIDIA H200 (sm_90)"},
            {"name", "NVIDIA H200"},
            {"compute_capability", {9, 0}},
            {"cuda_driver", 13000},
            {"cuda_runtime", 13000}}},
          {"roofs",
           {{"gpu", "NVIDIA H200"},
            {"hbm_copy", roof},
            {"hbm_read", roof},
            {"l2", nullptr},
            {"fp32", roof},
            {"tensor_fp16", roof},
            {"tensor_bf16", roof},
            {"exp", roof}}},
          {"steps", all}};
}

}  // namespace attn::report::test
