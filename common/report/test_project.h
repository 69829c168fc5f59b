/// \file
/// A small project with an evidence folder, for the tests of evidence.
#pragma once

#include <fmt/format.h>

#include <cstdlib>

#include "report/containers.h"
#include "report/evidence.h"
#include "report/test_files.h"

namespace attn::report::test {

inline const std::string kKernel = R"(// v1_one: an idea
#include "attn/kernel.h"
namespace ATTN_BACKEND::v1_one {
__global__ void kernel(const float* gX, float* gY, int count) {
  const int i = blockIdx.x * kWarp + threadIdx.x;  // who I am
#ifdef ATTN_EMULATED
  emulator::note(i);
#else
  asm volatile("fence.proxy.async;");
#endif
  float row_sum = 0;
  const int64_t stride = gridDim.x;
  const float4* const rows = reinterpret_cast<const float4*>(gX + stride);
#pragma unroll
  for (int n = 0; n < 4; ++n) row_sum += logf(gX[n * count + i]);
  gY[i] = 1 / row_sum + rows[0].x;
}
Status launch(const Arguments& args) { return Status::unsupported("head dims 64 alone"); }
}  // namespace ATTN_BACKEND::v1_one
)";
inline std::string with(std::string text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != text.npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

// A project with two steps, and a folder of reports.
class Project {
 public:
  Project() {
    std::string name = (fs::temp_directory_path() / "attn_evidence_XXXXXX").string();
    root = ::mkdtemp(name.data());
    reports = root / "docs/reports/gpu";
    for (const char* folder : {"common/attn", "common/device", "01_first", "docs/reports/gpu"})
      fs::create_directories(root / folder);
    write("common/attn/kernel.h", "constexpr int kWarp = 32;\n");
    write("common/device/spin.cu", "void spin() {}\n");
    write("01_first/chapter.cpp", kTable);
    write("01_first/v1_one.cu", kKernel);
    write("01_first/v2_two.cu", with(kKernel, "v1_one", "v2_two"));
    times("01_first.n64", 4);
    log("tests", "All tests passed\n");
  }
  ~Project() { fs::remove_all(root); }
  void write(const std::string& path, const std::string& text) {
    std::ofstream(root / path) << text;
  }
  void report(const std::string& name, const std::string& text) {
    std::ofstream(reports / name) << text;
  }
  // A program's results for two steps; a third one refuses the problem.
  std::string results(int method, double median = 1.5) const {
    return fmt::format(R"({{"timing_method": {}, "operation": "forward", "steps": [
        {{"name": "v1_one", "outcome": "pass", "time": {{"median_s": {}}}}},
        {{"name": "v2_two", "outcome": "unchecked", "time": {{"median_s": 2}}}},
        {{"name": "v3_three", "outcome": "unsupported", "time": null}}]}})",
                       method, median);
  }
  void times(const std::string& name, int method) {
    write("result.json", results(method));
    CodeKeys code(root);
    record(reports, code, {"times", "01_first"}, name, root / "result.json", {"--seqlen 64"},
           kMeasured);
    finish(reports, code, {"times", "01_first"}, "passed", 7, {}, kMeasured);
  }
  void log(const std::string& part, const std::string& text, const char* verdict = "passed") {
    report(part + ".01_first.txt", text);
    CodeKeys code(root);
    finish(reports, code, {part, "01_first"}, verdict, 3, {part + ".01_first.txt"}, kMeasured);
  }
  // All edits, as one text; and all stale lines.
  std::string wrong() const { return joined(edited_evidence(reports)); }
  std::string stale() const {
    CodeKeys code(root);
    std::vector<std::string> lines = stale_evidence(reports, code);
    std::erase_if(lines, [](const std::string& line) { return !has(line, " stale: "); });
    return joined(lines);
  }
  std::string missing() const {
    CodeKeys code(root);
    std::vector<std::string> lines = stale_evidence(reports, code);
    std::erase_if(lines, [](const std::string& line) { return has(line, " stale: "); });
    return joined(lines);
  }
  std::string state(const std::string& name, const std::string& table = "") const {
    CodeKeys code(root);
    return state_of(reports, {name}, table, &code);
  }
  std::string todo(const std::vector<std::string>& steps = {}) const {
    CodeKeys code(root);
    return joined(to_measure(reports, code, {"times", "01_first"}, "01_first.n64", steps), " ");
  }
  static bool has(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  }
  static std::string joined(const std::vector<std::string>& lines, const char* end = "\n") {
    std::string all;
    for (const std::string& line : lines) all += line + end;
    return all;
  }
  static inline const nlohmann::json kMeasured{{"commit", "0123"}, {"gpu", "a GPU"}};
  static constexpr const char* kTable = R"(
const char* kSupport = "anything";
Step builder(std::string name, int64_t bytes, Launch launch) {
  return {.name = name, .refuses = refuse, .workspaces = [=] { return room(bytes); },
          .cost = [](const Problem& p) { return costs(p, 1); }, .launch = launch};
}
int64_t room(int64_t bytes) { return bytes + 4; }
Cost costs(const Problem& p, int n) { return {n}; }
Chapter make_chapter() {
  Chapter c{"01_first", "a chapter", {}};
  const int64_t large = 1024;
  c.steps.push_back(builder("v1_one", 64, ATTN_LAUNCH(v1_one)));
  Step two = builder("v2_two", large, ATTN_LAUNCH(v2_two));
  two.deterministic = false;
  c.steps.push_back(two);
  return c;
}
)";
  fs::path root, reports;
};

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != text.npos;
}

}  // namespace attn::report::test
