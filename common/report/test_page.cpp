// The HTML page: its parts, untrusted text, its checksum.
#include <nlohmann/json.hpp>
#include <string>

#include "report/page.h"
#include "report/sha256.h"
#include "report/test_files.h"
#include "tests/catch.h"

namespace {

using namespace attn::report;
using namespace attn::report::test;
using nlohmann::json;

const fs::path kResults = recorded("01_naive.forward_n2048.json");

PageInput input() { return {{read_result_file(kResults)}, {}, std::nullopt, ""}; }

Profile profile(TemporaryFile& file, const std::string& step) {
  return read_profile(file.write(
      import_profile(kResults, recorded("01_naive." + step + ".ncu.csv"), {"", "none", false}),
      step + ".json"));
}

bool has(const std::string& text, const std::string& what) {
  return text.find(what) != std::string::npos;
}

}  // namespace

TEST_CASE("SHA-256 of known texts") {
  CHECK(sha256("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(sha256("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(sha256(std::string(1000000, 'a')) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("a page holds its parts and needs nothing else") {
  TemporaryFile file;
  PageInput in = input();
  in.name = "Ada";
  in.profiles = {profile(file, "v1_global"), profile(file, "v2_coalesced")};
  const std::string text = page(in);
  for (const char* part :
       {"<h2>Environment</h2>", "NVIDIA H200 (sm_90)", "<h2>Correctness</h2>",
        "pass: 2.3e-03 of 6.0e-03, 131072 rows", "<h2>Prediction and measurement</h2>",
        "285.5 (285.5 .. 285.5)", "<h2>Roofline</h2>", "<svg ", "v1_global to v2_coalesced",
        "What moved most: load sectors/request, 16.59 -&gt; 9.13", "<h2>Work log</h2>",
        "What did you predict", "By Ada", "not against intent"}) {
    INFO(part);
    CHECK(has(text, part));
  }
  // Only steps with a profile show counters.
  CHECK(has(text, "No counters: no profile of both steps."));
  for (const char* outside :
       {"http://", "https://", "<script", "<link", "<img", "url(h", "@import"}) {
    std::string rest = text;
    // The only address is the SVG namespace, which is never fetched.
    for (std::size_t at; (at = rest.find("http://www.w3.org/2000/svg")) != rest.npos;)
      rest.erase(at, 26);
    INFO(outside);
    CHECK_FALSE(has(rest, outside));
  }
}

TEST_CASE("a page shows failures, refusals and what nobody measured") {
  PageInput in{{read_result_file(fixture("emulated_fail.json")),
                read_result_file(fixture("emulated_forward.json"))},
               {},
               std::nullopt,
               ""};
  const std::string text = page(in);
  CHECK(has(text, "<td class=\"bad\">fail</td>"));
  CHECK(has(text, "dq (b 0, h 0, row 13, column 12)"));
  CHECK(has(text, "<td class=\"warn\">unsupported</td>"));
  CHECK(has(text, "not measured"));
  CHECK(has(text, "Nothing to compare"));
  // The ids of two charts differ.
  CHECK(has(text, "id=\"roofline0-t\""));
  CHECK(has(text, "id=\"roofline1-t\""));
}

TEST_CASE("an export is a profile of the results that it belongs to") {
  PageInput in = input();
  const fs::path other = recorded("01_naive.forward_n4096.json");
  in.results.insert(in.results.begin(), read_result_file(other));
  for (const char* step : {"v1_global", "v2_coalesced"})
    in.profiles.push_back(
        read_profile(recorded("01_naive." + std::string(step) + ".ncu.csv"), in.results));
  CHECK(has(page(in), "What moved most: load sectors/request, 16.59 -&gt; 9.13"));
  in.results.pop_back();
  std::string said;
  try {
    read_profile(recorded("01_naive.v1_global.ncu.csv"), in.results);
  } catch (const std::exception& e) {
    said = e.what();
  }
  CHECK(has(said, "01_naive.v1_global.ncu.csv: belongs to none of the results: "));
}

TEST_CASE("a page shows what wrong elements have in common, and what the failure needs") {
  json document = json::parse(read_all(fixture("emulated_fail.json")));
  json& step = document["steps"][0];
  step["verdicts"][0]["shape"] = {"wrong: 3 of 64 elements", "where: only rows 16 to 31"};
  step["variations"] = {
      {{"change", "with one head"}, {"outcome", "pass"}, {"reason", ""}},
      {{"change", "with whole tiles (128, 128)"}, {"outcome", "fail"}, {"reason", "<o>"}}};
  TemporaryFile file;
  const std::string text =
      page({{read_result_file(file.write(document.dump()))}, {}, std::nullopt, ""});
  CHECK(has(text,
            "<br>dq wrong: 3 of 64 elements<br>dq where: only rows 16 to 31<br>varied: pass with "
            "one head; fail with whole tiles (128, 128)</td>"));
}

TEST_CASE("text from elsewhere stays text") {
  json document = json::parse(read_all(kResults));
  const std::string evil = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>";
  for (const char* place :
       {"/chapter", "/device/text", "/device/name", "/roofs/gpu", "/roofs/l2/source",
        "/steps/0/name", "/steps/0/reason", "/steps/0/binding", "/steps/0/phases/0/name",
        "/steps/0/verdicts/0/tensor"})
    document[json::json_pointer(place)] = evil;
  TemporaryFile file;
  PageInput in{{read_result_file(file.write(document.dump()))}, {}, evil + "\xff", evil};
  const std::string text = page(in);
  CHECK_FALSE(has(text, "<script"));
  CHECK_FALSE(has(text, "<img"));
  CHECK(has(text, "&lt;script&gt;"));
  CHECK(has(text, "\xef\xbf\xbd"));
  CHECK(verify_page(text, "x").intact);
}

TEST_CASE("a work log is Markdown") {
  PageInput in = input();
  in.log =
      "# Week 2\r\n\r\nSectors fell, *not* the `time`.\n\n| step | ms |\n|---|---:|\n| v1 | 285 "
      "|\n\n- one\n- two\n\n"
      "```\na < b\n```\n<b onclick=x>bold</b>\n";
  const std::string text = page(in);
  for (const char* part : {"<h3>Week 2</h3>", "<em>not</em> the <code>time</code>", "<th>step</th>",
                           "<td align=\"right\">285</td>", "<li>one</li>", "a &lt; b",
                           "&lt;b onclick=x&gt;bold&lt;/b&gt;"}) {
    INFO(part);
    CHECK(has(text, part));
  }
  CHECK(verify_page(text, "x").intact);
}

TEST_CASE("a changed page does not verify, wherever the change is") {
  PageInput in = input();
  in.log = "a log with <!-- sha256 in it\n<!-- sha256 " + std::string(64, '0') + " of all";
  const std::string text = page(in);
  CHECK(verify_page(text, "x").intact);
  for (std::size_t at = 0; at < text.size(); at += 97) {
    std::string changed = text;
    changed[at] = changed[at] == 'x' ? 'y' : 'x';
    bool intact = false;
    (void)refusal_of([&] { return intact = verify_page(changed, "x").intact; });
    INFO(at);
    CHECK_FALSE(intact);
  }
  CHECK_FALSE(verify_page(text + " ", "x").intact);
  for (const std::string& other : {std::string(), std::string("<!DOCTYPE html>"), text.substr(9),
                                   text.substr(0, text.size() / 2)})
    CHECK(has(refusal_of([&] { return verify_page(other, "x"); }), "x: is no page"));
}

TEST_CASE("a profile that the results do not hold is refused") {
  TemporaryFile file;
  PageInput in{{read_result_file(recorded("01_naive.forward_n4096.json"))},
               {profile(file, "v1_global")},
               std::nullopt,
               ""};
  CHECK(has(refusal_of([&] { return page(in); }), "which none of the results hold"));
}
