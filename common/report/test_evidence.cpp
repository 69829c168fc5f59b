// Keys of kernels, and the manifest of a folder of measurements.
#include <cstdlib>

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
    for (const char* folder : {"common/attn", "01_first", "docs/reports/gpu"})
      fs::create_directories(root / folder);
    write("common/attn/kernel.h", "constexpr int kWarp = 32;\n");
    write("01_first/chapter.cpp", "");
    write("01_first/v1_one.cu", kKernel);
    write("01_first/v2_two.cu", with(kKernel, "v1_one", "v2_two"));
    write_report("01_first.n64.json", 3);
    report("tests.01_first.txt", "All tests passed\n");
    record(reports, root, "times", "01_first", "passed", 7, {"01_first.n64.json"});
    record(reports, root, "tests", "01_first", "passed", 3, {"tests.01_first.txt"});
  }
  ~Project() { fs::remove_all(root); }
  void write(const std::string& path, const std::string& text) {
    std::ofstream(root / path) << text;
  }
  void report(const std::string& name, const std::string& text) {
    std::ofstream(reports / name) << text;
  }
  void write_report(const std::string& name, int method, const std::string& median = "1.5") {
    report(name, R"({"timing_method": )" + std::to_string(method) +
                     R"(, "steps": [{"name": "v1_one", "outcome": "pass", "time": {"median_s": )" +
                     median +
                     R"(}}, {"name": "v2_two", "outcome": "unchecked", "time": {"median_s": 2}},
                         {"name": "v3_three", "outcome": "unsupported", "time": null}]})");
  }
  // All that is wrong, as one text.
  std::string wrong() {
    std::string all;
    for (const std::string& line : check_evidence(reports, root)) all += line + "\n";
    return all;
  }
  std::string state(const std::string& file) { return state_of(reports, {file}, root); }
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
  CHECK_FALSE(same("logf(", "__log2f("));  // a name that is not ours
  CHECK_FALSE(same("1 / row_sum", "1 / gX[i]"));
  CHECK_FALSE(same("fence.proxy.async", "fence.proxy.alias"));
  CHECK_FALSE(same("n * count + i", "i * count + n"));  // two names exchanged
  CHECK_FALSE(same("row_sum +=", "row_sum -="));
  CHECK_FALSE(same("#pragma unroll", "#pragma nounroll"));
  CHECK_FALSE(same("int64_t", "int32_t"));
  CHECK_FALSE(same("float4", "float2"));
  CHECK_FALSE(same("gridDim", "blockDim"));
}

TEST_CASE("every step of the suite has a key of its own", "[evidence]") {
  const Keys keys = kernel_keys(ATTN_SOURCE_DIR);
  std::map<std::string, std::string> first;
  for (const auto& [step, key] : keys) {
    INFO(step << " and " << first[key]);
    CHECK(first[key].empty());
    first[key] = step;
  }
  int steps = 0;
  for (const auto& chapter : fs::directory_iterator(ATTN_SOURCE_DIR))
    for (const auto& file : chapter.is_directory() ? fs::directory_iterator(chapter.path())
                                                   : fs::directory_iterator()) {
      const std::string folder = chapter.path().filename(), step = file.path().stem();
      const bool is_step = std::isdigit(folder[0]) && file.path().extension() == ".cu" &&
                           step.size() > 1 && std::isdigit(step[1]);
      if (!is_step) continue;
      ++steps;
      INFO(folder << "/" << step);
      CHECK(keys.contains(folder + "/" + step));
    }
  CHECK(steps > 100);
  CHECK(key_of(keys, "03_flash_v1", "v1_half_m") == keys.at("03_flash_v1/v1_scalar"));
  CHECK(key_of(keys, "03_flash_v1", "v99_nosuch") == "-");
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
    return kernel_keys(root);
  };
  const Keys none = keys_with("STEPS v1_a v2_b"), all = keys_with("STEPS v1_a v2_b HOPPER"),
             second = keys_with("STEPS v1_a v2_b HOPPER_STEPS v2_b KERNELS more.cu");
  const auto key = [](const Keys& keys, const char* step) {
    return keys.at(std::string("05_some/") + step);
  };
  CHECK(key(none, "v1_a") == key(none, "v2_b"));
  CHECK(key(all, "v1_a") == key(all, "v2_b"));
  CHECK(key(all, "v1_a") != key(none, "v1_a"));
  CHECK(key(second, "v1_a") == key(none, "v1_a"));
  CHECK(key(second, "v2_b") == key(all, "v2_b"));
  fs::remove_all(root);
}

TEST_CASE("what is as it was measured passes, what was edited does not", "[evidence]") {
  Project p;
  CHECK(p.wrong() == "");
  // A figure, its file alone.
  p.write_report("01_first.n64.json", 3, "1.2");
  CHECK(p.wrong() == "01_first.n64.json: not as it was measured\n");
  // ... and the checksum as well: the part did not pass with this.
  Manifest m = read_manifest(p.reports);
  Project other;
  other.write_report("01_first.n64.json", 3, "1.2");
  record(other.reports, other.root, "times", "01_first", "passed", 7, {"01_first.n64.json"});
  m.files["01_first.n64.json"].sha256 =
      read_manifest(other.reports).files["01_first.n64.json"].sha256;
  write_manifest(p.reports, m);
  CHECK(p.wrong() == "parts.txt: times 01_first: its files are not those that it passed with\n");
  // Files that come and go.
  Project q;
  q.report("extra.json", "{}");
  CHECK(q.wrong() == "extra.json: the manifest has no such file\n");
  fs::remove(q.reports / "extra.json");
  fs::remove(q.reports / "tests.01_first.txt");
  CHECK(q.wrong() == "tests.01_first.txt: gone since it was measured\n");
  // Keys made in another way are not compared.
  const std::string text = read_all(q.reports / "manifest.txt");
  q.report("manifest.txt", with(text, "key version 1\n", "key version 0\n"));
  CHECK(has(refusal_of([&] { return q.wrong(); }),
            "key version 0, this attn_report makes 1: build it anew"));
  // A damaged manifest is no pass.
  q.report("manifest.txt", "0123  file\n");
  CHECK(has(refusal_of([&] { return q.wrong(); }), "manifest.txt:1: cannot be read"));
}

TEST_CASE("what others measured has checksum and keys, and no verdict of ours", "[evidence]") {
  Project p;
  const std::string name = "others.01_first.forward.json";
  p.report(name, R"({"rows": [{"us": {"fa3": 2, "v1_one": 1}}]})");
  CHECK(p.wrong() == name + ": the manifest has no such file\n");
  record(p.reports, p.root, "others", "01_first", "passed", 0, {name});
  CHECK(p.wrong() == "");
  CHECK(read_manifest(p.reports).files[name].keys.size() == 1);
  CHECK(p.state(name) == "State: measured on the kernels as they are.");
  // A kernel that changes is told in the table, and is no file of ours to measure again.
  p.write("01_first/v1_one.cu", with(kKernel, "n < 4", "n < 5"));
  CHECK(p.state(name) == "State: `v1_one` has changed since.");
  p.write("01_first/v1_one.cu", kKernel);
  p.report(name, R"({"rows": [{"us": {"fa3": 3, "v1_one": 1}}]})");
  CHECK(p.wrong() == name + ": not as it was measured\n");
  // A folder of nothing else claims nothing of the other steps.
  fs::create_directories(p.root / "docs/reports/other");
  std::ofstream(p.root / "docs/reports/other" / name) << R"({"rows": []})";
  record(p.root / "docs/reports/other", p.root, "others", "01_first", "passed", 0, {name});
  CHECK(check_evidence(p.root / "docs/reports/other", p.root).empty());
}

TEST_CASE("a kernel that changed is told, and needs a reason", "[evidence]") {
  Project p;
  CHECK(p.state("01_first.n64.json") ==
        "State: measured on the kernels as they are, timing method 3.");
  CHECK(p.state("tests.01_first.txt") == "State: measured on the kernels as they are.");
  p.write("01_first/v1_one.cu", with(kKernel, "// who I am", "// nobody"));
  CHECK(p.wrong() == "");
  p.write("01_first/v1_one.cu", with(kKernel, "n < 4", "n < 5"));
  CHECK(p.wrong() ==
        "01_first/v1_one: changed since it was measured, and not listed as unverified\n");
  CHECK(p.state("01_first.n64.json") == "State: `v1_one` has changed since, timing method 3.");
  CHECK(has(evidence_summary(p.reports, p.root), "01_first: changed since: v1_one"));
  // A file of another step would stay.
  CHECK(current_files(p.reports, p.root, "times", "01_first").empty());
  Manifest m = read_manifest(p.reports);
  m.unverified["01_first/v1_one"] = "one more number a thread";
  write_manifest(p.reports, m);
  CHECK(p.wrong() == "");
  CHECK(p.state("01_first.n64.json") == "State: `v1_one` has changed since, timing method 3.");
  // Measured again in part: the reason stays as long as a file is of the old kernel.
  record(p.reports, p.root, "times", "01_first", "passed", 7, {"01_first.n64.json"});
  CHECK(p.state("01_first.n64.json") ==
        "State: measured on the kernels as they are, timing method 3.");
  CHECK(read_manifest(p.reports).unverified.size() == 1);
  const std::vector<std::string> measured{"01_first.n64.json"};
  CHECK(current_files(p.reports, p.root, "times", "01_first") == measured);
  CHECK(current_files(p.reports, p.root, "tests", "01_first").empty());
  record(p.reports, p.root, "tests", "01_first", "passed", 7, {"tests.01_first.txt"});
  CHECK(read_manifest(p.reports).unverified.empty());
  // a step that no file has may belong into any
  p.write("01_first/v3_new.cu", with(kKernel, "v1_one", "v3_new"));
  m = read_manifest(p.reports);
  m.unverified["01_first/v3_new"] = "never on a GPU";
  write_manifest(p.reports, m);
  record(p.reports, p.root, "times", "01_first", "passed", 7, measured);
  CHECK(read_manifest(p.reports).unverified.size() == 1);  // it still was not
  m = read_manifest(p.reports);
  m.unverified.clear();
  write_manifest(p.reports, m);
  CHECK(current_files(p.reports, p.root, "times", "01_first").empty());
  fs::remove(p.root / "01_first/v3_new.cu");
  CHECK(p.wrong() == "");
  m = read_manifest(p.reports);
  m.unverified["01_first/v1_one"] = "a reason for nothing";
  write_manifest(p.reports, m);
  CHECK(p.wrong() == "01_first/v1_one: listed as unverified, but as it was measured\n");
  // A header that kernels include, and a step that nobody has measured.
  Project q;
  q.write("common/attn/kernel.h", "constexpr int kWarp = 64;\n");
  CHECK(has(q.wrong(), "01_first/v2_two: changed since"));
  // Of a kernel's parameter what the kernel reads.
  const std::string shape =
      "struct Shape {\n  static constexpr int kNoWindow = 1 << 30;\n  int heads, stride;\n};\n";
  q.write("common/attn/kernel.h", "constexpr int kWarp = 32;\n");
  q.write("common/attn/problem.h", shape);
  CHECK(has(q.wrong(), "01_first/v1_one: changed since"));  // it has a `stride`
  record(q.reports, q.root, "times", "01_first", "passed", 7, {"01_first.n64.json"});
  record(q.reports, q.root, "tests", "01_first", "passed", 3, {"tests.01_first.txt"});
  CHECK(q.wrong() == "");
  q.write("common/attn/problem.h",
          with(shape, "int heads", "float softcap;\n  int heads") + "struct Problem { int x; };\n");
  CHECK(q.wrong() == "");
  q.write("common/attn/problem.h", with(shape, "int heads", "int64_t heads"));
  CHECK(has(q.wrong(), "01_first/v1_one: changed since"));
  q.write("common/attn/problem.h", shape);
  q.write("common/attn/kernel.h",
          "#define ATTN_NOTHING\nconstexpr int kWarp = 32;  // lanes\nconstexpr int kMore = 1;\n"
          "template <class T> struct Unused { T x; };\n");
  CHECK(q.wrong() == "");
  q.write("01_first/v3_new.cu", with(kKernel, "v1_one", "v3_new"));
  CHECK(p.wrong() != "");
  CHECK(q.wrong() ==
        "01_first/v3_new: changed since it was measured, and not listed as unverified\n");
}

TEST_CASE("steps that were never measured are one list", "[evidence]") {
  Project p;
  const auto told = [&] {
    const std::string text = state_table(p.reports, p.root);
    const auto end = text.find("\n\n");  // of the table
    return end == text.npos ? "" : text.substr(end + 2);
  };
  CHECK(told() == "");
  Manifest m = read_manifest(p.reports);
  m.unverified = {{"01_first/v1_one", "a barrier more"},
                  {"01_first/v3_new", "a new step"},
                  {"01_first/v4_new", "a new step"},
                  {"02_second/v1_one", "a new chapter"}};
  write_manifest(p.reports, m);
  CHECK(told() ==
        "`01_first/v1_one`: not measured again: a barrier more.\n\n"
        "Not measured yet: 01_first: `v3_new`, `v4_new`; 02_second: `v1_one`.\n");
}

TEST_CASE("a state names the steps that changed, and says every step where all did", "[evidence]") {
  Project p;
  p.write("01_first/v3_three.cu", with(kKernel, "v1_one", "v3_three"));
  p.report("01_first.n64.json",
           R"({"timing_method": 3, "steps": [
               {"name": "v1_one", "outcome": "pass", "time": {"median_s": 1}},
               {"name": "v2_two", "outcome": "pass", "time": {"median_s": 1}},
               {"name": "v3_three", "outcome": "pass", "time": {"median_s": 1}}]})");
  record(p.reports, p.root, "times", "01_first", "passed", 7, {"01_first.n64.json"});
  for (const char* step : {"v1_one", "v2_two", "v3_three"}) {
    INFO(step);
    CHECK(has(p.state("01_first.n64.json"), "every step") == false);
    p.write(std::string("01_first/") + step + ".cu",
            with(with(kKernel, "v1_one", step), "n < 4", "n < 5"));
  }
  CHECK(p.state("01_first.n64.json") == "State: every step has changed since, timing method 3.");
}

TEST_CASE("older methods are told, and the stalest part comes first", "[evidence]") {
  Project p;
  p.write_report("01_first.n64.json", 1);
  record(p.reports, p.root, "times", "01_first", "passed", 7, {"01_first.n64.json"});
  CHECK(p.state("01_first.n64.json") ==
        "State: measured on the kernels as they are, timing method 1; method 1 counts the host's "
        "time to launch.");
  p.write_report("01_first.n128.json", 3);
  record(p.reports, p.root, "times", "01_first", "passed", 7,
         {"01_first.n64.json", "01_first.n128.json"});
  CHECK(has(state_of(p.reports, {"01_first.n64.json", "01_first.n128.json"}, p.root),
            "timing methods 1 and 3;"));
  const std::vector<std::string> units{"tests 01_first", "times 01_first", "counters 01_first"};
  CHECK(stalest_first(p.reports, p.root, units, false) ==
        std::vector<std::string>{"counters 01_first", "times 01_first"});
  CHECK(stalest_first(p.reports, p.root, units, true).back() == "tests 01_first");
  p.write("01_first/v1_one.cu", with(kKernel, "n < 4", "n < 5"));
  CHECK(stalest_first(p.reports, p.root, {"times 01_first", "tests 01_first"}, false) ==
        std::vector<std::string>{"times 01_first", "tests 01_first"});
  record(p.reports, p.root, "tests", "01_first", "failed", 7, {"tests.01_first.txt"});
  CHECK(stalest_first(p.reports, p.root, {"times 01_first", "tests 01_first"}, false).front() ==
        "tests 01_first");
}
