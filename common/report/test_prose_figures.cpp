// Figures in prose: a page, a list of its passages, and small reports.
#include "report/prose_figures.h"

#include "report/test_reports.h"

using namespace attn::report::test;
namespace test = attn::report::test;
using attn::report::check_prose;
using attn::report::ProseFigures;

namespace {
struct Pages : Reports {
  Pages() {
    fs::create_directories(path() / "09_last");
    json one = test::step("v1_one", 4e9, 0, 2e-3), two = test::step("v12_two", 4e9, 0, 1.5e-3);
    one["compulsory_bytes"] = two["compulsory_bytes"] = 2e9;
    two["phases"] = {{{"name", "attention"}, {"time", time_of(1e-3)}},
                     {{"name", "pool"}, {"time", time_of(2e-4)}}};
    for (const char* name : {"09_last.a", "09_last.a_0.09"})
      write(name, run("09_last", "forward", problem("bf16", 512), {one, two}));
    json p = {{"problems", json::array()}};
    for (const double ratio : {2.0, 8.0}) {
      json of = problem("bf16", 512);
      of["causal"] = ratio > 2;
      p["problems"].push_back(
          {{"problem", of},
           {"ratios", {{{"step", "v1_one"}, {"peer", "fa3 graph"}, {"median", ratio}}}}});
    }
    write("peers.09_last", p);
  }
  ProseFigures check(const std::string& page, const std::string& passages) {
    write("page.md", page);
    write("list", "# passages\npage.md\n" + passages);
    return check_prose(path() / "list", path(), path());
  }
  // The figure of a field.
  std::string figure(const std::string& field) {
    const std::string text = check("", "  <{" + field + "}>\n").missing.at(0);
    return text.substr(text.find('<'));
  }
};
}  // namespace

TEST_CASE("a figure in prose is computed from the reports") {
  Pages p;
  CHECK(p.figure("ms 09.a v1") == "<2.00>");
  CHECK(p.figure("ms 09.a_0.09 v1") == "<2.00>");
  CHECK(p.figure("us.1 09_last.a v12") == "<1500.0>");
  CHECK(p.figure("us 09.a v12 attention") == "<1000>");
  CHECK(p.figure("us 09.a v12 attention+pool") == "<1200>");
  CHECK(p.figure("pace 09.a v1 09.a v12") == "<75>");
  CHECK(p.figure("share 09.a v1") == "<50>");
  CHECK(p.figure("roof 09.a hbm_read") == "<4.00>");
  CHECK(p.figure("tflops 09.a v1") == "<2>");
  CHECK(p.figure("gbs 09.a v1") == "<1000>");
  CHECK(p.figure("faster 09.a v1 09.a v12") == "<1.33>");
  CHECK(p.figure("less 09.a v1 09.a v12") == "<25>");
  CHECK(p.figure("more 09.a v12 09.a v1") == "<33>");
  CHECK(p.figure("saved 09.a v1 09.a v12") == "<500>");
  CHECK(p.figure("mean peers.09 v1 fa3_graph") == "<4.00>");
  CHECK(p.figure("least.1 peers.09 v1 fa3_graph") == "<2.0>");
  CHECK(p.figure("most peers.09 v1 fa3_graph -causal") == "<2.00>");
  CHECK(p.figure("least peers.09 v1 fa3_graph causal N=512") == "<8.00>");
  CHECK(p.figure("points peers.09 v1 fa3_graph") == "<2>");
}

TEST_CASE("a page that does not say a passage is named, with the passage") {
  Pages p;
  const std::string passage = "  `v1` takes {ms 09.a v1} ms, `v12` {ms 09.a v12}.\n";
  ProseFigures found = p.check("And `v1` takes\n2.00 ms, `v12`  1.50.\n", passage);
  CHECK(found.missing.empty());
  CHECK(found.passages == 1);
  found = p.check("And `v1` takes 2.00 ms, `v12` 1.49.", passage + passage);
  REQUIRE(found.missing.size() == 2);
  CHECK(found.missing[0] ==
        "page.md: must say: `v1` takes 2.00 ms, `v12` 1.50.\n"
        "    it says: `v1` takes 2.00 ms, `v12` 1.49.");
  found = p.check("`v2` takes 2.00 ms, `v12` 1.49.", passage);
  CHECK(found.missing.at(0) == "page.md: must say: `v1` takes 2.00 ms, `v12` 1.50.");
}

TEST_CASE("a field that cannot be computed is refused with its line") {
  Pages p;
  const auto refused = [&](const std::string& field, const std::string& reason) {
    const std::string text =
        refusal_of([&] { return p.check("", "\n  {" + field + "}\n").missing.at(0); });
    has(text, "list:4: ");
    has(text, reason);
  };
  refused("ms 09.a v2", "09.a has no time of v2");
  refused("ms 09.a v1 attention", "09.a has no time of v1 attention");
  refused("us 09.a v12 attention+chunks", "09.a has no time of v12 chunks");
  refused("roof 09.a l2", "09.a has no roof l2");
  refused("ms 09.b v1", "09_last.b.json: not there yet");
  refused("mean peers.09 v1 cudnn", "peers.09 has no ratio of v1 cudnn");
  refused("mean peers.09 v1 fa3_graph N=7", "has no ratio");
  refused("speed 09.a v1", "speed is no kind of figure");
  refused("faster 09.a v1 09.a", "needs two steps");
  refused("ms 09.a", "too few words");
  has(refusal_of([&] { return p.check("", "  {ms 09.a v1\n").missing.at(0); }),
      "list:3: a brace is not closed");
}
