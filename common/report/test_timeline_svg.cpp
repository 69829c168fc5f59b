// The picture of a made-up timeline.
#include <filesystem>
#include <fstream>
#include <string>

#include "attn/error.h"
#include "report/test_files.h"
#include "report/timeline_svg.h"
#include "tests/catch.h"

using namespace attn;
using namespace attn::report;

namespace {

// Two blocks of 10 us. Block 0: a mark with a wait in it, a copy to sK[0], a wgmma that reads it.
std::string made_up(const std::string& what, const std::string& name) {
  static const test::TemporaryFile folder;
  const auto path = folder.path().parent_path() / (name + ".json");
  std::ofstream(path) << R"({"otherData":{"what":")" << what
                      << R"(","chapter":"06_c","step":"v1_<a>","problem":"N=1"},"traceEvents":[
{"ph":"X","pid":1,"tid":1,"ts":2,"cat":"mark","name":"QK","dur":6},
{"ph":"X","pid":1,"tid":1,"ts":4,"cat":"wait","name":"k_full[0]","dur":2},
{"ph":"X","pid":1,"tid":1,"ts":10,"cat":"exit","name":"exit","dur":0},
{"ph":"X","pid":1,"tid":6,"ts":0,"cat":"wait","name":"k_empty[0]","dur":1},
{"ph":"X","pid":1,"tid":1001,"ts":6,"cat":"unit","name":"warpgroup 1","dur":2,
 "args":{"source":"a:1"}},
{"ph":"b","pid":1,"tid":0,"ts":1,"cat":"tma","name":"TMA k_full[0]","id":1,
 "args":{"issuer":6,"writes":"sK[0]"}},
{"ph":"e","pid":1,"tid":0,"ts":5,"cat":"tma","name":"TMA k_full[0]","id":1},
{"ph":"b","pid":1,"tid":0,"ts":6,"cat":"wgmma","name":"wgmma of warpgroup 1","id":2,
 "args":{"issuer":5,"reads":"sQ, sK[0]","source":"a:1"}},
{"ph":"e","pid":1,"tid":0,"ts":8,"cat":"wgmma","name":"wgmma of warpgroup 1","id":2},
{"ph":"X","pid":2,"tid":1,"ts":0,"cat":"wait","name":"other","dur":10}]})";
  return path.string();
}
const char* const kModel = "a model of an H100 or H200, not a measurement (docs/timelines.md)";

bool has(const std::string& text, const std::string& what) {
  INFO(text);
  return text.find(what) != text.npos;
}
std::string refusal(const std::vector<std::string>& files, const TimelinePicture& picture) {
  try {
    timeline_svg(files, picture);
  } catch (const InputError& e) {
    return e.what();
  }
  return "done";
}

}  // namespace

TEST_CASE("lanes of a timeline: units, first warps of warpgroups, and tiles by name") {
  const std::string file = made_up(kModel, "lanes");
  std::string svg = timeline_svg({file}, {});
  CHECK(has(svg, ">06_c: v1_&lt;a&gt;</text>"));
  CHECK(has(svg, ">a model of an H100 or H200, not a measurement</text>"));
  CHECK(has(svg, "N=1</text>"));
  // x = 140 to 856 is 10 us. The wait is pale, below its mark; warp 5 is not a first one.
  CHECK(has(svg, "<rect class=\"g0\" x=\"283.2\" y=\"99.5\" width=\"429.6\" height=\"18\"/>"));
  CHECK(has(svg, "<rect class=\"g0 p\" x=\"426.4\" y=\"119.5\" width=\"143.2\" height=\"18\"/>"));
  CHECK(has(svg, "<rect class=\"g1\" x=\"569.6\" y=\"74.5\" width=\"143.2\" height=\"18\"/>"));
  CHECK(has(svg, ">sK[0]</text>"));  // the tile that the MMAs read
  CHECK(has(svg, ">k_full[0]</text>"));
  CHECK_FALSE(has(svg, "k_empty"));
  CHECK_FALSE(has(svg, "other"));
  svg = timeline_svg({file}, {{0}, {}, 0, {"smem sK[0]", "warp 5=producer"}, "Title"});
  CHECK(has(svg, ">Title</text>"));
  CHECK(has(svg, ">producer</text>"));
  CHECK(has(svg, "<rect class=\"n p\" x=\"211.6\" y=\"74.5\" width=\"286.4\" height=\"18\"/>"));
  CHECK(has(svg, "<rect class=\"g1\" x=\"569.6\" y=\"74.5\""));
  CHECK(has(svg, ">copy</text>"));
  CHECK(has(svg, ">read</text>"));
  std::filesystem::remove(file);
}

TEST_CASE("a window, several blocks, and a recorded file below a model") {
  const std::string file = made_up(kModel, "window");
  const std::string gpu = made_up("measured on NVIDIA X1 (docs/timelines.md)", "gpu");
  std::string svg = timeline_svg({file}, {{0, 1}, {4}, 2, {"warp 0="}, ""});
  CHECK(has(svg, ">block 0</text>"));
  CHECK(has(svg, ">block 1</text>"));
  // Cut at both ends: 4 to 6 us of the mark, all of the wait, and of block 1's.
  CHECK(has(svg, "<rect class=\"g0\" x=\"140.0\" y=\"74.5\" width=\"716.0\" height=\"18\"/>"));
  CHECK(has(svg, "<rect class=\"g0 p\" x=\"140.0\" y=\"119.5\" width=\"716.0\" height=\"18\"/>"));
  CHECK_FALSE(has(svg, "sK[0]"));
  svg = timeline_svg({file, gpu}, {{0}, {2, 3}, 5, {}, ""});
  CHECK(has(svg, ">recorded on NVIDIA X1</text>"));
  CHECK(has(svg, ">2.0</text>"));  // the first file's axis
  CHECK(has(svg, ">8.0</text>"));  // the second one's
  for (const auto& path : {file, gpu}) std::filesystem::remove(path);
}

TEST_CASE("a picture that cannot be drawn is refused") {
  const std::string file = made_up(kModel, "refused");
  CHECK(has(refusal({file}, {{2}, {}, 0, {}, ""}), "--block 2: "));
  CHECK(has(refusal({file}, {{0}, {11}, 0, {}, ""}), "--from 11: "));
  CHECK(has(refusal({file}, {{0}, {1, 2}, 0, {}, ""}), "--from: 2 times for 1 files"));
  CHECK(has(refusal({file}, {{0}, {}, 0, {"warp 9=x"}, ""}), "--lanes warp 9: "));
  std::filesystem::remove(file);
}
