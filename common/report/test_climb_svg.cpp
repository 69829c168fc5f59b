// The climb chart: points lie at their rates, and invalid input is refused.
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "attn/error.h"
#include "report/climb_svg.h"
#include "report/test_files.h"
#include "tests/catch.h"

namespace {

using namespace attn;
using namespace attn::report;

ResultFile file(const char* chapter, std::vector<std::pair<std::string, double>> seconds) {
  ResultFile f;
  f.path = std::string(chapter) + ".json";
  f.chapter = chapter, f.gpu = "NVIDIA H200", f.operation = "forward";
  f.problem.batch = 4, f.problem.heads = f.problem.kv_heads = 16, f.problem.head_dim = 128;
  f.problem.seqlen_q = f.problem.seqlen_k = 4096;
  for (auto& [name, s] : seconds) {
    StepRow step;
    step.name = name, step.flop = 1e12;
    if (s > 0) step.median_s = s;
    f.steps.push_back(step);
  }
  return f;
}
template <class Do>
std::string refusal(Do what) {
  try {
    what();
  } catch (const InputError& e) {
    return e.what();
  }
  return "done";
}
bool has(const std::string& text, const std::string& what) {
  INFO(text);
  return text.find(what) != text.npos;
}

}  // namespace

TEST_CASE("every timed step is a point on a logarithmic axis, libraries are lines") {
  const ResultFile first = file("01_first", {{"v1_one", 1}, {"v2_two", 0}, {"v3_three", 0.1}});
  const ResultFile second = file("02_second", {{"v1_other", 0.01}});
  const std::string svg = climb_svg({first, second}, {{"cuDNN", 50e12}, {"flash", 49e12}});
  // y = 386 is 1 TFLOP/s and 84 is 100: two decades; three points share x = 64 to 790.
  CHECK(has(svg, "<path class=\"curve k0\" d=\"M185.0 386.0 L427.0 235.0\"/>"));
  CHECK(has(svg, "<path class=\"curve k1\" d=\"M669.0 84.0\"/>"));
  CHECK(has(svg, "<title>v3_three: 10 TFLOP/s</title>"));
  CHECK_FALSE(has(svg, "v2"));  // it has no time
  CHECK(has(svg, ">cuDNN 50</text>"));
  CHECK(has(svg, "y=\"133.5\">cuDNN"));
  CHECK(has(svg, "y=\"149.5\">flash"));  // below, where their lines nearly meet
}

TEST_CASE("a climb of two problems, or without times, is refused") {
  const ResultFile one = file("01_first", {{"v1_one", 1}});
  ResultFile other = one;
  other.problem.seqlen_k = 8192;
  CHECK(refusal([] { climb_svg({}, {}); }) == "climb: RESULTS is required");
  CHECK(has(refusal([&] { climb_svg({one, other}, {}); }), "01_first.json: forward"));
  CHECK(refusal([&] { climb_svg({file("01_first", {{"v1_one", 0}})}, {}); }) ==
        "01_first.json: no step has a time");
}

TEST_CASE("the line of a library comes from a document of peers or of others") {
  const attn::report::test::TemporaryFile own;
  const auto folder = own.path().parent_path();
  const auto write = [&](const char* name, const std::string& text) {
    std::ofstream(folder / name) << text;
  };
  write("peers.json", R"({"problems": [{"problem": {"batch": 4, "heads": 16, "kv_heads": 16,
    "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 128, "causal": true},
    "peers": [{"name": "cudnn", "time": {"median_s": 0.5}}]},
    {"problem": {"batch": 4, "heads": 16, "kv_heads": 16, "seqlen_q": 4096, "seqlen_k": 4096,
    "head_dim": 128, "causal": false},
    "peers": [{"name": "cudnn", "time": {"median_s": 0.25}}]}]})");
  write("others.json", R"({"rows": [{"name": "fwd d128c n4096", "rate": {"fa3": 500}},
    {"name": "fwd d128  n4096", "rate": {"fa3": 600}}]})");
  const ResultFile run = file("01_first", {{"v1_one", 1}});
  CHECK(read_climb_line("cuDNN=" + (folder / "peers").string() + ":cudnn", run).flop_per_s ==
        4e12);
  CHECK(read_climb_line("FA3=" + (folder / "others").string() + ":fa3", run).flop_per_s == 6e14);
  CHECK(has(refusal([&] {
              read_climb_line("F=" + (folder / "peers").string() + ":flash", run);
            }),
            "has no flash on"));
  CHECK(refusal([&] { read_climb_line("cuDNN", run); }) ==
        "--line cuDNN: must be NAME=FILE:PEER");
}
