// Code keys, and an evidence folder compared with them.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "report/containers.h"
#include "report/evidence.h"
#include "report/test_files.h"
#include "tests/catch.h"

namespace {

using namespace attn::report;
using namespace attn::report::test;

const std::string kKernel = R"(// v1_one: an idea
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
std::string with(std::string text, const std::string& from, const std::string& to) {
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

bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

}  // namespace

TEST_CASE("a key knows code from comments, words and names", "[evidence]") {
  const std::string key = key_of_text(kKernel, "v1_one");
  CHECK(key.size() == 16);
  const auto same = [&](const std::string& from, const std::string& to) {
    REQUIRE(has(kKernel, from));
    return key_of_text(with(kKernel, from, to), "v1_one") == key;
  };
  CHECK(same("// who I am", "/* whoever I am */"));
  CHECK(same("  float row_sum = 0;", "\n\tfloat row_sum   = 0;\n"));
  CHECK(same("row_sum", "l"));
  CHECK(same("kernel(", "attention_kernel("));
  CHECK(same("head dims 64 alone", "only head dim 64"));
  CHECK(same("emulator::note(i);", "emulator::record(i, 3);"));
  CHECK(key_of_text(with(kKernel, "v1_one", "v9_other"), "v9_other") == key);

  CHECK_FALSE(same("n < 4", "n < 8"));
  CHECK_FALSE(same("logf(", "__log2f("));  // a name that is not declared here
  CHECK_FALSE(same("1 / row_sum", "1 / gX[i]"));
  CHECK_FALSE(same("fence.proxy.async", "fence.proxy.alias"));
  CHECK_FALSE(same("n * count + i", "i * count + n"));  // two names swapped
  CHECK_FALSE(same("row_sum +=", "row_sum -="));
  CHECK_FALSE(same("#pragma unroll", "#pragma nounroll"));
  CHECK_FALSE(same("int64_t", "int32_t"));
  CHECK_FALSE(same("float4", "float2"));
  CHECK_FALSE(same("gridDim", "blockDim"));
}

TEST_CASE("every step of the suite has keys of its own", "[evidence]") {
  CodeKeys code(ATTN_SOURCE_DIR);
  std::map<std::string, std::string> first;
  int steps = 0;
  for (const std::string& chapter : code.chapters())
    for (const std::string& step : code.steps(chapter)) {
      // Two steps may have the same kernel but different launches.
      const std::string keys = code.kernel(chapter, step) + code.launch(chapter, step);
      INFO(chapter << "/" << step << " and " << first[keys]);
      CHECK(first[keys].empty());
      first[keys] = chapter + "/" + step;
      ++steps;
    }
  CHECK(steps > 100);
  CHECK(code.kernel("03_flash_v1", "v1_half_m") == code.kernel("03_flash_v1", "v1_scalar"));
  CHECK(code.launch("03_flash_v1", "v1_half_m") != code.launch("03_flash_v1", "v1_scalar"));
  CHECK(code.kernel("03_flash_v1", "v99_nosuch") == "-");
}

TEST_CASE("steps for Hopper alone have the key of its flags", "[evidence]") {
  const fs::path root = fs::temp_directory_path() / "attn_hopper_steps";
  const auto keys_with = [&](const std::string& cmake) {
    fs::remove_all(root);
    fs::create_directories(root / "05_some");
    fs::create_directories(root / "common/cmake");
    const auto write = [&](const std::string& file, const std::string& text) {
      std::ofstream(root / file) << text;
    };
    write("common/cmake/AttnChapter.cmake",
          "$<$<COMPILE_LANGUAGE:CUDA>:-ftz=true> CUDA_ARCHITECTURES 90a-real)");
    write("05_some/CMakeLists.txt", "attn_add_chapter(05_some " + cmake + ")");
    write("05_some/chapter.cpp", "");
    for (const char* step : {"v1_a", "v2_b"})
      write("05_some/" + std::string(step) + ".cu", "int x;");
    CodeKeys keys(root);
    return std::pair(keys.kernel("05_some", "v1_a"), keys.kernel("05_some", "v2_b"));
  };
  const auto none = keys_with("STEPS v1_a v2_b"), all = keys_with("STEPS v1_a v2_b HOPPER"),
             second = keys_with("STEPS v1_a v2_b HOPPER_STEPS v2_b SHARED decode/more");
  CHECK(none.first == none.second);
  CHECK(all.first == all.second);
  CHECK(all.first != none.first);
  CHECK(second.first == none.first);
  CHECK(second.second == all.second);
  fs::remove_all(root);
}

TEST_CASE("a launch key is of host functions, the row in the table and what both use",
          "[evidence]") {
  Project p;
  const auto keys = [&] {
    CodeKeys code(p.root);
    return std::vector{code.kernel("01_first", "v1_one"), code.launch("01_first", "v1_one"),
                       code.launch("01_first", "v2_two")};
  };
  const auto before = keys();
  // Whether an edit of the table or of v1 changes the kernel, v1's launch, and v2's launch.
  const auto changed = [&](const std::string& file, const std::string& from,
                           const std::string& to) {
    const std::string text = read_all(p.root / file);
    REQUIRE(has(text, from));
    p.write(file, with(text, from, to));
    const auto after = keys();
    p.write(file, text);
    std::string all;
    for (std::size_t n = 0; n < before.size(); ++n) all += before[n] == after[n] ? '-' : "k12"[n];
    return all;
  };
  const std::string table = "01_first/chapter.cpp", step = "01_first/v1_one.cu";
  CHECK(changed(table, "\"v1_one\", 64", "\"v1_one\", 128") == "-1-");
  CHECK(changed(table, "large = 1024", "large = 2048") == "--2");
  CHECK(changed(table, "two.deterministic = false", "two.deterministic = true") == "--2");
  CHECK(changed(table, "bytes + 4", "bytes + 8") == "-12");
  CHECK(changed(table, "costs(p, 1)", "costs(p, 2)") == "---");  // cost model
  CHECK(changed(table, "return {n}", "return {n, n}") == "---");
  CHECK(changed(table, "\"anything\"", "\"all\"") == "---");
  CHECK(changed(step, "return Status::unsupported(\"head dims 64 alone\")",
                "return Status::success()") == "-1-");
  CHECK(changed(step, "head dims 64 alone", "only 64") == "---");
  CHECK(changed(step, "n < 4", "n < 5") == "k--");
  // Wherever its file is in the chapter.
  fs::create_directories(p.root / "01_first/host");
  p.write("01_first/chapter.cpp", "");
  p.write("01_first/host/table.cpp", Project::kTable);
  CHECK(keys() == before);
}

TEST_CASE("what is as it was measured passes, what was edited does not", "[evidence]") {
  Project p;
  const std::string file = "01_first.forward.jsonl";
  CHECK(p.wrong() == "");
  CHECK(p.stale() == "");
  const std::string lines = read_all(p.reports / file);
  CHECK(std::ranges::count(lines, '\n') == 3);
  p.report(file, with(lines, "\"median_s\":1.5", "\"median_s\":1.2"));
  CHECK(p.wrong() == file + ": not as it was measured\n" + file + ": 01_first.n64: was edited\n");
  // The checksum of the file detects a removed line.
  p.report(file, lines.substr(lines.find('\n') + 1));
  CHECK(p.wrong() == file + ": not as it was measured\n");
  p.report(file, lines);
  CHECK(p.wrong() == "");
  // ... and the checksum of its line detects an edited checksum.
  const std::string parts = read_all(p.reports / "parts.jsonl");
  p.report("parts.jsonl", with(parts, "\"seconds\":7", "\"seconds\":8"));
  CHECK(p.wrong() == "parts.jsonl: times 01_first: was edited\n");
  p.report("parts.jsonl", parts);
  // Added and removed files, and failed parts.
  p.report("extra.json", "{}");
  CHECK(p.wrong() == "extra.json: no part has such a file\n");
  fs::remove(p.reports / "extra.json");
  fs::remove(p.reports / "tests.01_first.txt");
  CHECK(p.wrong() == "tests.01_first.txt: gone since it was measured\n");
  p.log("tests", "1 failed\n", "failed");
  CHECK(p.wrong() == "parts.jsonl: tests 01_first: failed\n");
  // Keys of another version are not compared; a damaged line is not a pass.
  p.report(file, with(lines, "\"version\":2", "\"version\":1"));
  CHECK(has(refusal_of([&] { return p.stale(); }), "keys of version 1, this attn_report makes 2"));
  p.report(file, "0123\n");
  CHECK(has(refusal_of([&] { return p.wrong(); }), file + ":1: is not a line of evidence"));
}

TEST_CASE("lines are the document that a program wrote, and cannot be recorded again",
          "[evidence]") {
  Project p;
  const auto document = [&] {
    return nlohmann::json::parse(contained_document(p.reports / "01_first.n64.json"));
  };
  CHECK(document() == nlohmann::json::parse(p.results(4)));
  CHECK(contained_document(p.reports / "01_first.n65.json").empty());
  CHECK(document_names(p.reports, "01_first.n", ".json") ==
        std::vector<std::string>{"01_first.n64"});
  const nlohmann::json line = read_lines(p.reports / "01_first.forward.jsonl")[0].json();
  CHECK(line.at("measured").at("gpu") == "a GPU");
  CHECK(line.at("measured").at("checked") == true);
  CHECK(line.at("options") == "--seqlen 64");
  p.write("result.json", line.dump());
  CodeKeys code(p.root);
  CHECK(has(refusal_of([&] {
              record(p.reports, code, {"times", "01_first"}, "01_first.n64", p.root / "result.json",
                     {}, {});
              return 0;
            }),
            "is evidence, not what a program wrote"));
}

TEST_CASE("counters of all steps are one file, and each step an export", "[evidence]") {
  Project p;
  const std::string rows = read_all(recorded("01_naive.v1_global.ncu.csv"));
  p.write("export.csv", rows);
  CodeKeys code(p.root);
  for (const char* step : {"v2_two", "v1_one"})
    record(p.reports, code, {"counters", "01_first"}, std::string("01_first.") + step,
           p.root / "export.csv", {"--seqlen 64"}, Project::kMeasured);
  CHECK(has(p.wrong(), "parts.jsonl: counters 01_first: not finished"));
  finish(p.reports, code, {"counters", "01_first"}, "passed", 7, {}, Project::kMeasured);
  CHECK(p.wrong() == "");
  CHECK(contained_document(p.reports / "01_first.v2_two.ncu.csv") == rows);
  const std::string all = read_all(p.reports / "01_first.counters.csv");
  CHECK(all.starts_with("\"Step\",\"ID\","));
  CHECK(all.find("\n\"v1_one\",") < all.find("\n\"v2_two\","));
  p.report("01_first.counters.csv", with(all, "\"v1_one\",\"0\"", "\"v1_one\",\"1\""));
  CHECK(has(p.wrong(), "01_first.counters.csv: 01_first.v1_one: was edited"));
}

TEST_CASE("two steps exchange their names in lines, counters and keys of logs", "[evidence]") {
  Project project;
  project.write("rows.csv", "\"ID\",\"Kernel Name\"\n\"0\",\"kernel\"\n");
  CodeKeys code(project.root);
  for (const char* name : {"01_first.v1_one", "01_first.v2_two"})
    record(project.reports, code, {"counters", "01_first"}, name, project.root / "rows.csv",
           {"--seqlen 64"}, Project::kMeasured);
  finish(project.reports, code, {"counters", "01_first"}, "passed", 1, {}, Project::kMeasured);
  const auto lines = [&](const char* file) { return read_lines(project.reports / file); };
  const auto times = lines("01_first.forward.jsonl");
  const auto log = lines("parts.jsonl");
  CHECK(rename_steps(project.reports, "01_first", {{"v1_one", "v2_two"}, {"v2_two", "v1_one"}}) ==
        std::vector<std::string>{"01_first.counters.csv", "01_first.forward.jsonl"});
  CHECK(project.wrong() == "");
  const auto after = lines("01_first.forward.jsonl");
  REQUIRE(after.size() == 3);
  // In ladder order: the line of the step now named v1_one comes first.
  CHECK(after[0].json()["steps"][0]["name"] == "v1_one");
  CHECK(after[0].json()["steps"][0]["time"] == times[1].json()["steps"][0]["time"]);
  CHECK(after[0].json()["keys"]["kernel"]["v1_one"] == times[1].json()["keys"]["kernel"]["v2_two"]);
  CHECK(after[0].json()["keys"]["launch"]["v1_one"] == times[1].json()["keys"]["launch"]["v2_two"]);
  CHECK(after[0].json()["measured"] == times[1].json()["measured"]);
  CHECK(after[2].text == times[2].text);  // the line of v3_three, unchanged
  const auto counters = lines("01_first.counters.csv");
  REQUIRE(counters.size() == 2);
  CHECK(counters[0].name == "01_first.v1_one");
  CHECK(counters[0].rows == "\"v1_one\",\"0\",\"kernel\"\n");
  // The log's key of v1_one now belongs to v2_two.
  const auto key = [](const std::vector<EvidenceLine>& parts, const std::string& step) {
    for (const EvidenceLine& line : parts)
      if (line.name == "tests 01_first") return line.json()["keys"]["launch"][step];
    return nlohmann::json();
  };
  CHECK(key(lines("parts.jsonl"), "v2_two") == key(log, "v1_one"));
  CHECK(key(lines("parts.jsonl"), "v1_one") == key(log, "v2_two"));
  CHECK(key(log, "v1_one") != key(log, "v2_two"));
}

TEST_CASE("a name that no line has, or that another step has, is refused", "[evidence]") {
  Project project;
  const auto all = [&] {
    std::string text;
    for (const auto& entry : fs::directory_iterator(project.reports))
      text += read_all(entry.path());
    return text;
  };
  const std::string before = all();
  const auto refusal = [&](const std::vector<Renamed>& names, const char* chapter = "01_first") {
    return refusal_of([&] { rename_steps(project.reports, chapter, names); });
  };
  CHECK(has(refusal({{"v9_nosuch", "v4_new"}}), "v9_nosuch: no line is of this step of 01_first"));
  CHECK(has(refusal({{"v1_one", "v4_new"}}, "02_second"), "v1_one: no line"));
  CHECK(has(refusal({{"v1_one", "v2_two"}}), "v2_two: 01_first has a step of this name already"));
  CHECK(has(refusal({{"v1_one", "v4_new"}, {"v2_two", "v4_new"}}), "v4_new: two steps would get"));
  CHECK(has(refusal({{"v1_one", "v4_new"}, {"v1_one", "v5_new"}}), "v1_one: is renamed twice"));
  CHECK(has(refusal({{"v1_one", "no name"}}), "no name: is not the name of a step"));
  CHECK(all() == before);
  // New checksums would hide the edit of this line.
  const fs::path file = project.reports / "01_first.forward.jsonl";
  const std::string edited = with(read_all(file), "1.5", "1.4");
  project.report("01_first.forward.jsonl", edited);
  CHECK(has(refusal({{"v1_one", "v4_new"}}), "not as it was measured; nothing was renamed"));
  CHECK(read_all(file) == edited);
}

TEST_CASE("a rename changes nothing but names and checksums", "[evidence]") {
  Project project;
  project.write("peers.json", R"({"schema": "attn-peers-1", "problems": [{"peers": [
      {"name": "01_first:v1_one"}, {"name": "flash"}], "ratios": [
      {"peer": "01_first:v1_one", "step": "v1_one"}], "runs": [
      {"chapter": "02_second", "steps": [{"name": "v1_one", "outcome": "pass", "time": null}]},
      {"chapter": "01_first", "steps": [{"name": "v1_one", "outcome": "pass", "time": null}]}
      ]}]})");
  CodeKeys code(project.root);
  record(project.reports, code, {"peers", "02_second"}, "peers.02_second",
         project.root / "peers.json", {"--backends flash,01_first:v1_one --seqlen 64"},
         Project::kMeasured);
  finish(project.reports, code, {"peers", "02_second"}, "passed", 1, {}, Project::kMeasured);
  const auto text_of = [&](const char* file) { return read_all(project.reports / file); };
  const std::string times = text_of("01_first.forward.jsonl"), log = text_of("tests.01_first.txt");
  rename_steps(project.reports, "01_first", {{"v1_one", "v8_first"}});
  CHECK(project.wrong() == "");
  CHECK(text_of("tests.01_first.txt") == log);
  const nlohmann::json peers = read_lines(project.reports / "peers.02_second.jsonl")[0].json();
  const nlohmann::json& problem = peers["problems"][0];
  CHECK(problem["peers"][0]["name"] == "01_first:v8_first");
  CHECK(problem["ratios"][0]["peer"] == "01_first:v8_first");
  // A step of the same name in another chapter keeps its name.
  CHECK(problem["ratios"][0]["step"] == "v1_one");
  CHECK(problem["runs"][0]["steps"][0]["name"] == "v1_one");
  CHECK(problem["runs"][1]["steps"][0]["name"] == "v8_first");
  CHECK(peers["options"] == "--backends flash,01_first:v8_first --seqlen 64");
  CHECK(peers["keys"]["kernel"].contains("v1_one"));
  // Renaming there and back restores every byte.
  rename_steps(project.reports, "01_first", {{"v8_first", "v1_one"}});
  CHECK(text_of("01_first.forward.jsonl") == times);
}

TEST_CASE("what others measured has checksum and kernel keys, and no launch of ours",
          "[evidence]") {
  Project p;
  const std::string name = "others.01_first.forward";
  const auto others = [&](const char* rows) {
    p.write("others.json", rows);
    CodeKeys code(p.root);
    record(p.reports, code, {"others", "01_first"}, name, p.root / "others.json", {}, {});
    finish(p.reports, code, {"others", "01_first"}, "passed", 0, {}, {});
  };
  others(R"({"rows": [{"us": {"fa3": 2, "v1_one": 1}}]})");
  CHECK(p.wrong() == "");
  CHECK(p.state(name) == "Measured on the present kernels.");
  p.write("01_first/v1_one.cu", with(kKernel, "n < 4", "n < 5"));
  CHECK(p.state(name) == "Measured before the latest change to `v1_one`.");
  CHECK(has(p.stale(), "others 01_first: 1 of 1 lines stale: `v1_one` has changed since\n"));
}

TEST_CASE("a state says which key differs", "[evidence]") {
  Project p;
  const std::string n64 = "01_first.n64";
  CHECK(p.state(n64) == "Measured on the present code.");
  p.write("01_first/v1_one.cu", with(kKernel, "// who I am", "// another comment"));
  CHECK(p.state(n64) == "Measured on the present code.");
  p.write("01_first/v1_one.cu", with(kKernel, "n < 4", "n < 5"));
  CHECK(p.state(n64) == "Measured before the latest change to `v1_one`.");
  CHECK(p.state(n64, "| `v2_two` | 2 |") == "Measured on the present code.");
  CHECK(p.stale() ==
        "tests 01_first: 1 of 1 lines stale: `v1_one` has changed since\n"
        "times 01_first: 1 of 3 lines stale: `v1_one` has changed since\n");
  p.write("01_first/v1_one.cu", kKernel);
  p.write("01_first/chapter.cpp", with(Project::kTable, "bytes + 4", "bytes + 8"));
  CHECK(p.state(n64) == "Measured before the latest change to the launch code.");
  p.write("01_first/chapter.cpp", Project::kTable);
  p.write("common/device/spin.cu", "void spin() { spin(); }\n");
  CHECK(p.state(n64) == "Measured before the latest change to the way of measuring.");
  CHECK(has(p.stale(), "times 01_first: 2 of 3 lines stale: the way of measuring"));
  CHECK_FALSE(has(p.stale(), "tests 01_first"));
  p.write("common/device/spin.cu", "void spin() {}\n");
  CHECK(p.stale() == "");
  CHECK(p.state("01_first.n65") == "No stored measurement is called 01_first.n65.");
  // A key that was not recorded is unknown, and stale.
  std::vector<EvidenceLine> lines = read_lines(p.reports / "01_first.forward.jsonl");
  for (EvidenceLine& line : lines) {
    nlohmann::json j = line.json();
    for (auto& [step, key] : j["keys"]["launch"].items()) key = "unknown";
    line = make_line(line.name, j);
  }
  write_lines(p.reports / "01_first.forward.jsonl", lines);
  CHECK(p.state(n64) ==
        "Measured on the present kernels; whether the launch code has changed since is not "
        "recorded.");
  CHECK(has(p.stale(), "times 01_first: 2 of 3 lines stale: launch code unknown"));
}

TEST_CASE("a state says every step where all kernels changed, and older methods", "[evidence]") {
  Project p;
  p.write("01_first/v3_three.cu", with(kKernel, "v1_one", "v3_three"));
  p.write("result.json", with(with(p.results(2), "unsupported", "pass"), "null", "{}"));
  CodeKeys code(p.root);
  record(p.reports, code, {"times", "01_first"}, "01_first.n64", p.root / "result.json", {}, {});
  CHECK(p.state("01_first.n64") ==
        "Measured on the present code. Step times include timing events before and between "
        "kernels, up to 1.6 µs each (timing method 2: docs/results_schema.md).");
  CHECK(has(p.stale(), "times 01_first: 3 of 3 lines stale: timing method 2\n"));
  p.write("common/attn/kernel.h", "constexpr int kWarp = 64;\n");
  CHECK(has(p.state("01_first.n64"),
            "Measured before the latest change to the kernels of all steps. Step times"));
}

TEST_CASE("of a kernel's parameter what the kernel reads counts", "[evidence]") {
  Project p;
  const std::string shape =
      "struct Shape {\n  static constexpr int kNoWindow = 1 << 30;\n  int heads, stride;\n};\n";
  p.write("common/attn/problem.h", shape);
  CHECK(has(p.stale(), "`v1_one`, `v2_two` have changed since"));  // they have a `stride`
  p.times("01_first.n64", 4);
  p.log("tests", "All tests passed\n");
  CHECK(p.stale() == "");
  p.write("common/attn/problem.h",
          with(shape, "int heads", "float softcap;\n  int heads") + "struct Problem { int x; };\n");
  CHECK(p.stale() == "");
  p.write("common/attn/problem.h", with(shape, "int heads", "int64_t heads"));
  CHECK(p.stale() != "");
  p.write("common/attn/problem.h", shape);
  p.write("common/attn/kernel.h",
          "#define ATTN_NOTHING\nconstexpr int kWarp = 32;  // lanes\nconstexpr int kMore = 1;\n"
          "template <class T> struct Unused { T x; };\n");
  CHECK(p.stale() == "");
}

TEST_CASE("what a chapter lacks is listed", "[evidence]") {
  Project p;
  CHECK(p.missing() == "01_first: has no counters, sanitizer, large, peers\n");
  p.write("01_first/v3_new.cu", with(kKernel, "v1_one", "v3_new"));
  CHECK(p.missing() ==
        "01_first: has no counters, sanitizer, large, peers\n"
        "01_first: steps without times: v3_new\n");
  CHECK(has(p.stale(), "tests 01_first: 1 of 1 lines stale: `v3_new` has changed since"));
  fs::create_directories(p.root / "common/scripts");
  p.write(
      "common/scripts/gpu_problems.sh",
      "problems_of() { echo n64 --step $(steps_like x ^v) --seqlen 64; echo n128 --seqlen 128; }\n"
      "profiled_problem() { :; }\npeers_of() { :; }\n");
  CHECK(has(p.missing(), "01_first: problems without times: n128\n"));
  CHECK_FALSE(has(p.stale(), "launch code"));  // its own problem is unchanged
  p.write("common/scripts/gpu_problems.sh",
          with(read_all(p.root / "common/scripts/gpu_problems.sh"), "seqlen 64", "seqlen 65"));
  CHECK(has(p.stale(), "times 01_first: 3 of 3 lines stale: launch code has changed since"));
}

TEST_CASE("what is stale is measured again, and nothing else", "[evidence]") {
  Project p;
  CHECK(p.todo() == "");
  p.write("01_first/v1_one.cu", with(kKernel, "n < 4", "n < 5"));
  CHECK(p.todo() == "v1_one ");
  CHECK(p.todo({"v2_two"}) == "");
  CHECK(p.todo({"v1_one", "v2_two"}) == "v1_one ");
  CHECK(p.todo({"v2_two", "v4_new"}) == "v4_new ");
  // After a change of one step only, the others are unchanged.
  p.write("result.json", with(p.results(4, 9.5), R"("v2_two")", R"("v9_other")"));
  CodeKeys code(p.root);
  record(p.reports, code, {"times", "01_first"}, "01_first.n64", p.root / "result.json", {}, {});
  const std::string all = contained_document(p.reports / "01_first.n64.json");
  CHECK(has(all, "9.5"));
  CHECK(has(all, "v2_two"));
  // A step without any document may belong to any.
  p.write("01_first/v3_new.cu", with(kKernel, "v1_one", "v3_new"));
  CHECK(p.todo() == "all ");
  fs::remove(p.root / "01_first/v3_new.cu");
  p.write("common/attn/kernel.h", "constexpr int kWarp = 64;\n");
  CHECK(p.todo({"v1_one", "v2_two"}) == "all ");
}

TEST_CASE("the stalest part comes first", "[evidence]") {
  Project p;
  const auto order = [&](const std::vector<Unit>& units, bool all) {
    CodeKeys code(p.root);
    std::string text;
    for (const auto& [unit, seconds] : stalest_first(p.reports, code, units, all))
      text += fmt::format("{} {} ", unit.part, seconds);
    return text;
  };
  const Unit tests{"tests", "01_first"}, times{"times", "01_first"},
      counters{"counters", "01_first"};
  CHECK(order({tests, times, counters}, false) == "counters 60 ");
  CHECK(order({tests, times, counters}, true) == "counters 60 tests 3 times 7 ");
  p.times("01_first.n64", 2);
  CHECK(order({tests, times, counters}, false) == "counters 60 times 7 ");
  p.write("01_first/v1_one.cu", with(kKernel, "n < 4", "n < 5"));
  CHECK(order({times, tests}, false) == "times 7 tests 3 ");
  p.log("tests", "1 failed\n", "failed");
  CHECK(order({times, tests}, false) == "tests 3 times 7 ");
}

TEST_CASE("the table of states has a row for each chapter and part", "[evidence]") {
  Project p;
  p.write("01_first/v1_one.cu", with(kKernel, "n < 4", "n < 5"));
  CodeKeys code(p.root);
  CHECK(state_table(p.reports, &code) ==
        "| chapter | part | lines | kernels changed since | launch code | way of measuring | "
        "timing method |\n|---|---|---:|---|---|---|---:|\n"
        "| 01_first | tests | 1 | `v1_one` | current | current | - |\n"
        "| 01_first | times | 3 | `v1_one` | current | current | 4 |\n"
        "\n* 01_first: has no counters, sanitizer, large, peers\n");
}
