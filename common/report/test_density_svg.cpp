// Time against density: points lie at their shares, and invalid input is refused.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "attn/error.h"
#include "report/density_svg.h"
#include "tests/catch.h"

namespace {

using namespace attn;
using namespace attn::report;

ResultFile file(int64_t d, double flop, double seconds, const char* step = "s1_block_mask") {
  ResultFile f;
  f.path = "file.json";
  f.gpu = "NVIDIA H200", f.operation = "forward";
  f.problem.head_dim = d;
  StepRow s;
  s.name = step, s.flop = flop;
  if (seconds > 0) s.median_s = seconds;
  f.steps = {s};
  return f;
}
std::string refusal(const std::vector<ResultFile>& files) {
  try {
    density_svg(files);
  } catch (const InputError& e) {
    return e.what();
  }
  return "drawn";
}
bool has(const std::string& text, const std::string& what) {
  INFO(text);
  return text.find(what) != text.npos;
}

}  // namespace

TEST_CASE("a curve of time over density: shares of its densest run, rates beside its points") {
  const std::string svg =
      density_svg({file(64, 4e9, 4e-3), file(64, 1e9, 2e-3), file(64, 2e9, 2e-3),
                   file(128, 8e9, 1e-3), file(128, 4e9, 1e-3)});
  // x from 84 to 680 is no work to all of it, y from 484 to 76 no time to all of it.
  CHECK(has(svg, "<path class=\"curve k0\" d=\"M233.0 280.0 L382.0 280.0 L680.0 76.0\"/>"));
  CHECK(has(svg, "<path class=\"curve k1\" d=\"M382.0 76.0 L680.0 76.0\"/>"));
  CHECK(has(svg, ">50</text>"));   // a quarter of the work in half of the time
  CHECK(has(svg, ">100</text>"));  // half in half
  CHECK(has(svg, "d=64, 4.000 ms in full"));
  CHECK(has(svg, "d=128, 1.000 ms in full"));
}

TEST_CASE("what has no curve is refused") {
  CHECK(refusal({}) == "density: RESULTS is required");
  CHECK(refusal({file(64, 1e9, 1e-3)}) == "density: one file with d=64, must be two or more");
  CHECK(refusal({file(64, 1e9, 1e-3), file(64, 2e9, 0)}) ==
        "file.json: has no time, or no operations");
  CHECK(refusal({file(64, 1e9, 1e-3), file(64, 2e9, 1e-3, "s2")}) ==
        "file.json: s2, not s1_block_mask");
  ResultFile other = file(64, 1e9, 1e-3);
  other.gpu = "NVIDIA A100";
  CHECK(refusal({file(64, 1e9, 1e-3), other}) ==
        "file.json: forward on NVIDIA A100, not forward on NVIDIA H200");
  ResultFile two = file(64, 1e9, 1e-3);
  two.steps.push_back(two.steps[0]);
  CHECK(refusal({two}) == "file.json: 2 steps, must be of one");
}
