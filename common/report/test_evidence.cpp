// Code keys, and an evidence folder compared with them.
#include <algorithm>

#include "report/test_project.h"
#include "tests/catch.h"

using namespace attn::report;
using namespace attn::report::test;

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
  const TemporaryFile own;
  const fs::path root = own.path().parent_path() / "root";
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
}

TEST_CASE("the method of the sanitizer knows the problems of its chapter alone", "[evidence]") {
  Project p;
  fs::create_directories(p.root / "common/scripts");
  const std::string script = R"sh(sanitizer_problems() {  # CHAPTER OPERATION
  case $1/$2 in
    01_first/*)
      echo "--seqlen 8" ;;
    02_second/forward|03_third/*)
      echo "--seqlen 9"
  esac
}
)sh";
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::vector<std::string> methods;
    for (const std::string& text : {script, with(script, from, to)}) {
      p.write("common/scripts/gpu_problems.sh", text);
      CodeKeys code(p.root);
      for (const char* chapter : {"01_first", "02_second", "03_third"})
        methods.push_back(code.method("sanitizer", chapter));
    }
    std::string all;
    for (std::size_t n = 0; n < 3; ++n) all += methods[n] == methods[n + 3] ? '-' : "123"[n];
    return all;
  };
  CHECK(changed("seqlen 8", "seqlen 7") == "1--");
  CHECK(changed("seqlen 9", "seqlen 7") == "-23");
  CHECK(changed("|03_third/*", "") == "-23");

  // Some files of peers have a script more.
  const std::vector<std::string> documents = {"", "peers.01_first", "peers.01_first.fp8",
                                              "peers.01_first.pages", "peers.01_first.fa3"};
  std::vector<std::string> methods;
  for (const char* line : {"page = 16\n", "page = 32\n"}) {
    p.write("common/scripts/peers_formats.py", line);
    CodeKeys code(p.root);
    for (const std::string& document : documents)
      methods.push_back(code.method("peers", "01_first", document));
  }
  for (const std::size_t n : {0, 1}) CHECK(methods[n] == methods[n + 5]);
  for (const std::size_t n : {2, 3, 4}) CHECK(methods[n] != methods[n + 5]);
  CHECK(changed("case $1/$2 in", "case $2/$1 in") == "123");
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

TEST_CASE("marks of timelines are no part of a key", "[evidence]") {
  Project p;
  const std::filesystem::path span = std::filesystem::path(ATTN_SOURCE_DIR) / "common/attn/span.h";
  std::filesystem::copy_file(span, p.root / "common/attn/span.h");
  CodeKeys before(p.root);
  const std::string kernel = before.kernel("01_first", "v1_one"),
                    launch = before.launch("01_first", "v1_one");
  const std::string marked =
      with(with(kKernel, "#include \"attn/kernel.h\"\n",
                "#include \"attn/kernel.h\"\n#include \"attn/span.h\"\n"),
           "#pragma unroll\n", "ATTN_SPAN(\"sum\")\n#pragma unroll\n");
  p.write("01_first/v1_one.cu", with(marked, "  gY[i]", "  ATTN_SPAN_END(\"sum\")\n  gY[i]"));
  CodeKeys after(p.root);
  CHECK(after.kernel("01_first", "v1_one") == kernel);
  CHECK(after.launch("01_first", "v1_one") == launch);
  // Another macro is.
  p.write("01_first/v1_one.cu", with(marked, "ATTN_SPAN(", "ATTN_OTHER("));
  CodeKeys other(p.root);
  CHECK(other.kernel("01_first", "v1_one") != kernel);
}

TEST_CASE("stamps and code of the recorded build are no part of a key", "[evidence]") {
  Project p;
  const std::filesystem::path span = std::filesystem::path(ATTN_SOURCE_DIR) / "common/attn/span.h";
  std::filesystem::copy_file(span, p.root / "common/attn/span.h");
  const std::string included =
      with(kKernel, "#include \"attn/kernel.h\"\n",
           "#include \"attn/kernel.h\"\n#include \"attn/span.h\"\n");
  p.write("01_first/v1_one.cu", included);
  CodeKeys before(p.root);
  const std::string kernel = before.kernel("01_first", "v1_one"),
                    launch = before.launch("01_first", "v1_one");
  const auto key_with = [&](const std::string& guard) {
    p.write("01_first/v1_one.cu",
            with(included, "#pragma unroll\n",
                 guard + "\n  record(1);\n#else\n#endif\n#pragma unroll\n"));
    CodeKeys after(p.root);
    CHECK(after.launch("01_first", "v1_one") == launch);
    return after.kernel("01_first", "v1_one");
  };
  CHECK(key_with("#ifdef ATTN_RECORD_TIMELINE") == kernel);
  CHECK(key_with("#ifndef ATTN_RECORD_TIMELINE") != kernel);
  CHECK(key_with("#ifdef ATTN_OTHER") != kernel);
}

TEST_CASE("what a chapter lacks is listed", "[evidence]") {
  Project p;
  CHECK(p.missing() == "01_first: has no counters, sanitizer, large, peers\n");
  p.write("01_first/v3_new.cu", with(kKernel, "v1_one", "v3_new"));
  CHECK(p.missing() ==
        "01_first: has no counters, sanitizer, large, peers\n"
        "01_first: steps without times: v3_new\n");
  CHECK(has(p.stale(), "tests 01_first: 1 of 1 lines stale: `v3_new` is new\n"));
  // Steps on several GPUs are measured by a part of their own, and have no counters.
  p.write("01_first/p1_ring.cu", with(kKernel, "v1_one", "p1_ring"));
  CHECK(has(p.missing(), "steps without times: p1_ring, v3_new\n"));
  CodeKeys code(p.root);
  p.report("ranks.01_first.txt", "two GPUs\n");
  finish(p.reports, code, {"ranks", "01_first"}, "passed", 1, {"ranks.01_first.txt"},
         Project::kMeasured);
  CHECK(has(p.missing(), "steps without times: v3_new\n"));
  CHECK_FALSE(has(p.stale(), "ranks"));
  fs::create_directories(p.root / "01_first/host");
  p.write("01_first/host/measure.cpp", "double seconds(float ms) { return ms * 1e-4; }\n");
  CHECK(has(p.stale(), "ranks 01_first: 1 of 1 lines stale: the way of measuring has changed"));
  fs::remove(p.root / "01_first/host/measure.cpp");
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
  // One of another ladder does not, if that ladder has other documents.
  p.write("01_first/b1_back.cu", with(kKernel, "v1_one", "b1_back"));
  CHECK(p.todo() == "all ");
  p.write("result.json", with(p.results(4, 9.5), R"("v1_one")", R"("b1_back")"));
  CodeKeys again(p.root);
  record(p.reports, again, {"times", "01_first"}, "01_first.back", p.root / "result.json", {}, {});
  p.write("01_first/b2_new.cu", with(kKernel, "v1_one", "b2_new"));
  CHECK(p.todo() == "");
  fs::remove(p.root / "01_first/b2_new.cu");
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
