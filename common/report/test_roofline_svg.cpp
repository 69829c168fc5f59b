// The roofline chart: its contents, labels that do not overlap, valid XML for all names.
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "report/markup.h"
#include "report/roofline_svg.h"
#include "report/short_list.h"
#include "report/test_files.h"
#include "tests/catch.h"

namespace {

using namespace attn::report;
using namespace attn::report::test;
using nlohmann::json;

std::vector<ResultFile> read(std::initializer_list<fs::path> paths) {
  std::vector<ResultFile> files;
  for (const fs::path& p : paths) files.push_back(read_result_file(p));
  return files;
}

std::size_t count(const std::string& text, const std::string& what) {
  std::size_t n = 0;
  for (std::size_t at = text.find(what); at != text.npos; at = text.find(what, at + 1)) ++n;
  return n;
}

double height(const RooflineSvg& svg) {
  const std::string start = "viewBox=\"0 0 960 ";
  return std::stod(svg.text.substr(svg.text.find(start) + start.size()));
}

void check_labels(const RooflineSvg& svg) {
  for (std::size_t i = 0; i < svg.labels.size(); ++i) {
    const Box& b = svg.labels[i];
    CHECK(b.left >= 0);
    CHECK(b.top >= 0);
    CHECK(b.right <= 960);
    CHECK(b.bottom <= height(svg));
    for (std::size_t j = 0; j < i; ++j) CHECK_FALSE(overlap(b, svg.labels[j]));
  }
}

// Whether all elements are closed in order and attributes have matching quotes.
bool well_formed(const std::string& text) {
  std::vector<std::string> open;
  for (std::size_t at = 0; (at = text.find('<', at)) != text.npos;) {
    const std::size_t end = text.find('>', at);
    if (end == text.npos) return false;
    const std::string tag = text.substr(at + 1, end - at - 1);
    if (count(tag, "\"") % 2 != 0 || tag.find('<') != tag.npos) return false;
    const std::string name = tag.substr(0, tag.find_first_of(" /", 1));
    if (tag[0] == '/') {
      if (open.empty() || "/" + open.back() != tag) return false;
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
    at = end;
  }
  return open.empty();
}

}  // namespace

TEST_CASE("the roofline of chapter 01 holds its roofs, predictions, measurements and arrows") {
  const RooflineSvg svg = roofline_svg(read({recorded("01_naive.forward_n4096.json")}));
  CHECK(well_formed(svg.text));
  for (const char* text :
       {"HBM 4.27 TB/s", "L2 7.92 TB/s", "FP32 62.5 TFLOP/s", "tensor bf16 801 TFLOP/s",
        "exponentials 4.16 T/s: at 512 operations each, 2.13 PFLOP/s", "v1_global: 484 GFLOP/s",
        "v5_cublas: 168 TFLOP/s", "v3_tiled: at most 50.9 TFLOP/s", "operations per byte",
        "operations per second", "prefers-color-scheme: dark"}) {
    INFO(text);
    CHECK(svg.text.find(std::string(text)) != std::string::npos);
  }
  CHECK(count(svg.text, "class=\"filled\"") == 6);  // five steps and the legend
  CHECK(count(svg.text, "class=\"hollow\"") == 4);  // v1 and v2, v4 and v5 share a position
  CHECK(svg.text.find("nan") == std::string::npos);
  CHECK(svg.text.find("inf") == std::string::npos);
  check_labels(svg);
}

TEST_CASE("labels overlap nowhere, whatever is drawn") {
  // A later chapter on the same problem: other bytes, other times, ten steps in total.
  json later = json::parse(read_all(recorded("01_naive.forward_n4096.json")));
  double factor = 0.5;
  for (json& s : later["steps"]) {
    s["name"] = s["name"].get<std::string>() + "_fused";
    for (const char* key : {"median_s", "q1_s", "q3_s"})
      s["time"][key] = factor * s["time"][key].get<double>();
    for (json& p : s["phases"]) p["hbm_read"] = factor * p["hbm_read"].get<double>();
    factor *= 0.8;
  }
  TemporaryFile file;
  const fs::path many = file.write(later.dump());
  for (const auto& files :
       {read({many, recorded("01_naive.forward_n4096.json")}),
        read({recorded("01_naive.backward_b1_n2048.json")}),
        read({recorded("01_naive.forward_fp32_n4096.json")}),
        read({recorded("01_naive.forward_causal_n4096.json")}), read({fixture("gpu_forward.json")}),
        read({fixture("emulated_forward.json")})}) {
    INFO(files[0].path.string());
    const RooflineSvg svg = roofline_svg(files);
    CHECK(well_formed(svg.text));
    check_labels(svg);
  }
}

TEST_CASE("before and after are two points of each step, with an arrow from one to the other") {
  json after = json::parse(read_all(recorded("01_naive.forward_n4096.json")));
  for (json& s : after["steps"])  // 1 % less time: within a pixel of the previous run
    for (const char* key : {"median_s", "q1_s", "q3_s"})
      s["time"][key] = (s["name"] == "v3_tiled" ? 0.5 : 0.99) * s["time"][key].get<double>();
  TemporaryFile file;
  const fs::path path = file.write(after.dump(), "after.json");
  const RooflineSvg svg = roofline_svg(read({recorded("01_naive.forward_n4096.json"), path}));
  CHECK(well_formed(svg.text));
  check_labels(svg);
  CHECK(count(svg.text, "class=\"filled\"") == 11);  // five steps in two runs, and the legend
  for (const char* text : {"v1_global A: 484 GFLOP/s", "v1_global B: 489 GFLOP/s",
                           "v3_tiled A: ", "v3_tiled B: ", "v1, v2 A, v1, v2 B: at most ",
                           "from run to run", "after.json"}) {
    INFO(text);
    CHECK(svg.text.find(std::string(text)) != std::string::npos);
  }
  CHECK(count(svg.text, "class=\"arrow\"") == 2);  // of v3, and the legend
}

TEST_CASE("more labels than fit are numbers with a key below the plot") {
  json many = json::parse(read_all(recorded("01_naive.forward_n4096.json")));
  const json step = many["steps"][3];
  many["steps"] = json::array();
  for (int n = 1; n <= 27; ++n) {
    json s = step;
    s["name"] = "v" + std::to_string(n) + "_a_step";
    for (const char* key : {"median_s", "q1_s", "q3_s"})
      s["time"][key] = (1 + 0.05 * n) * s["time"][key].get<double>();
    many["steps"].push_back(s);
  }
  TemporaryFile file;
  const RooflineSvg svg = roofline_svg(read({file.write(many.dump())}));
  CHECK(well_formed(svg.text));
  check_labels(svg);
  CHECK(height(svg) > 640);
  CHECK(svg.text.find(">1  v1_a_step: ") != std::string::npos);
  CHECK(svg.text.find(">27  v27_a_step: ") != std::string::npos);
  CHECK(svg.text.find(">27</text>") != std::string::npos);
}

TEST_CASE("names of several steps are numbers, where that says which") {
  CHECK(short_list({"v1_global"}) == "v1_global");
  CHECK(short_list({"v1_global", "v2_coalesced"}) == "v1, v2");
  CHECK(short_list({"v1_a", "v2_b", "v3_c", "v9_d", "v10_e", "b1_f"}) == "v1 to v3, v9, v10, b1");
  CHECK(short_list({"v1_a", "v3_b", "v3_c"}) == "v1_a, v3_b, v3_c");  // from two chapters
  CHECK(short_list({"v2_a", "v1_b"}) == "v2_a, v1_b");
  CHECK(short_list({"v1_a", "flash"}) == "v1_a, flash");
}

TEST_CASE("what nobody measured has no filled marker, and the head says so") {
  const RooflineSvg svg = roofline_svg(read({fixture("emulated_forward.json")}));
  CHECK(count(svg.text, "class=\"filled\"") == 0);
  CHECK(svg.text.find("no GPU was measured") != std::string::npos);
  CHECK(svg.text.find("roofs: datasheet") != std::string::npos);
}

TEST_CASE("the tensor roof is drawn for 16 bits alone") {
  const RooflineSvg fp32 = roofline_svg(read({recorded("01_naive.forward_fp32_n4096.json")}));
  CHECK(fp32.text.find("tensor bf16") == std::string::npos);
  CHECK(fp32.text.find("FP32 62.6") != std::string::npos);
}

TEST_CASE("names from a file cannot break the picture") {
  json document = json::parse(read_all(recorded("01_naive.forward_n4096.json")));
  document["steps"][0]["name"] = "</text><script>alert(1)</script>\"'&";
  document["device"]["name"] = "<GPU>";
  TemporaryFile file;
  const RooflineSvg svg = roofline_svg(read({file.write(document.dump())}));
  CHECK(well_formed(svg.text));
  CHECK(svg.text.find("<script") == std::string::npos);
  CHECK(svg.text.find("&lt;GPU&gt;") != std::string::npos);
}

TEST_CASE("what shares no roofs, or holds nothing to draw, is refused") {
  json document = json::parse(read_all(recorded("01_naive.forward_n4096.json")));
  TemporaryFile file;
  const auto refused = [&](const char* pointer, const json& value) {
    json changed = document;
    changed[json::json_pointer(pointer)] = value;
    const fs::path path = file.write(changed.dump());
    return refusal_of([&] {
      return roofline_svg(read({recorded("01_naive.forward_n4096.json"), path}));
    });
  };
  CHECK(refused("/roofs/gpu", "NVIDIA A100").find("another GPU") != std::string::npos);
  CHECK(refused("/problem/dtype", "fp16").find("another element type") != std::string::npos);
  CHECK(refused("/operation", "backward").find("another operation") != std::string::npos);
  CHECK(refused("/problem/seqlen_q", 17).find("another problem") != std::string::npos);
  CHECK(refused("/problem/seed", 17).empty());
  // Axes beyond the limits.
  for (const double extreme : {5e-324, 1e-300, 1e300}) {
    json changed = document;
    changed["steps"][1]["predicted_s"] = extreme;
    const fs::path path = file.write(changed.dump());
    CHECK(refusal_of([&] { return roofline_svg(read({path})); }).find("are no GPU's") !=
          std::string::npos);
  }
  document["steps"] = json::array();
  const fs::path empty = file.write(document.dump());
  CHECK(refusal_of([&] { return roofline_svg(read({empty})); }).find("no step") !=
        std::string::npos);
  CHECK(refusal_of([&] { return roofline_svg({}); }) == "roofline: no results");
}

TEST_CASE("text is escaped, and what is no UTF-8 replaced") {
  CHECK(escaped("a<b>&\"'") == "a&lt;b&gt;&amp;&quot;&#39;");
  CHECK(escaped("\xc3\xa9\n\t") == "\xc3\xa9\n\t");
  CHECK(escaped(std::string("\x01\0", 2)) == "\xef\xbf\xbd\xef\xbf\xbd");
  CHECK(escaped("\xff") == "\xef\xbf\xbd");
  CHECK(escaped("\xc3") == "\xef\xbf\xbd");  // truncated
  CHECK(escaped("\xc0\xbc").find('\xbc') == std::string::npos);  // '<' in two bytes
  CHECK(escaped("\xed\xa0\x80").find('\xed') == std::string::npos);
}
