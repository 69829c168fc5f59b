// Lines of an evidence folder: checksums, counters, renamed steps, lines of another folder.
#include <algorithm>
#include <fstream>

#include "report/json_object.h"
#include "report/test_project.h"
#include "tests/catch.h"

using namespace attn::report;
using namespace attn::report::test;

TEST_CASE("what was measured into another folder is taken over, and nothing else", "[evidence]") {
  Project project, other;  // the same sources
  project.times("01_first.n128", 4);
  const auto lines = [&] { return read_lines(project.reports / "01_first.forward.jsonl"); };
  const auto texts = [&](const std::string& name) {
    std::string all;
    for (const EvidenceLine& line : lines())
      if (line.name == name) all += line.text + "\n";
    return all;
  };
  const std::string kept = texts("01_first.n128"), old = texts("01_first.n64");
  other.write("result.json", other.results(4, 9.5));
  CodeKeys code(project.root);
  record(other.reports, code, {"times", "01_first"}, "01_first.n64", other.root / "result.json",
         {"--seqlen 64"}, {{"commit", "4567"}, {"gpu", "a GPU"}});  // the part was interrupted
  other.log("sanitizer", "all clean\n");
  other.log("large", "1 failed\n", "failed");
  merge(project.reports, code, other.reports);
  CHECK(project.wrong() == "parts.jsonl: large 01_first: failed\n");
  CHECK(texts("01_first.n128") == kept);
  CHECK(texts("01_first.n64") != old);
  CHECK(lines().size() == 6);
  CHECK(has(texts("01_first.n64"), "9.5"));
  CHECK(has(texts("01_first.n64"), "4567"));
  CHECK(fs::exists(project.reports / "sanitizer.01_first.txt"));
  CHECK(has(read_bytes(project.reports / "parts.jsonl"), R"("merged":{"measured")"));

  // A line of older code does not replace a current one.
  Project older;
  older.write("01_first/v1_one.cu", with(kKernel, "1 / row_sum", "2 / row_sum"));
  older.times("01_first.n128", 4);
  merge(project.reports, code, older.reports);
  CHECK(has(texts("01_first.n128"), kept.substr(0, kept.find('\n'))));

  // What was edited is refused, and nothing is changed.
  const std::string before = read_bytes(project.reports / "parts.jsonl");
  const auto refused = [&](const std::string& file, const std::string& from, const std::string& to,
                           const std::string& reason) {
    INFO(file);
    const std::string text = read_bytes(other.reports / file);
    other.report(file, with(text, from, to));
    CHECK_THROWS_WITH(merge(project.reports, code, other.reports), ContainsSubstring(reason));
    other.report(file, text);
    CHECK(read_bytes(project.reports / "parts.jsonl") == before);
  };
  refused("01_first.forward.jsonl", "9.5", "0.5", "not as it was measured; nothing was merged");
  refused("parts.jsonl", "failed", "passed", "was edited; nothing was merged");
  refused("sanitizer.01_first.txt", "all", "not", "not as it was measured; nothing was merged");
  CHECK_THROWS_WITH(merge(project.reports, code, project.reports),
                    ContainsSubstring("into itself"));
}

TEST_CASE("two copies of a folder, each measured in part, are merged one after the other",
          "[evidence]") {
  Project project, one, two;  // the same sources
  const auto log = [](Project& p, const std::string& part, const std::string& text,
                      const std::string& date) {
    p.report(part + ".01_first.txt", text);
    CodeKeys code(p.root);
    finish(p.reports, code, {part, "01_first"}, "passed", 3, {part + ".01_first.txt"},
           {{"date", date}});
  };
  for (Project* p : {&project, &one, &two})
    for (const char* part : {"tests", "sanitizer"}) log(*p, part, "old\n", "2026-11-01T10:00:00Z");
  log(one, "tests", "by one\n", "2026-11-02T10:00:00Z");
  log(two, "sanitizer", "by two\n", "2026-11-02T11:00:00Z");
  CodeKeys code(project.root);
  merge(project.reports, code, one.reports);
  merge(project.reports, code, two.reports);
  CHECK(read_bytes(project.reports / "tests.01_first.txt") == "by one\n");
  CHECK(read_bytes(project.reports / "sanitizer.01_first.txt") == "by two\n");
  CHECK(project.wrong() == "");
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

TEST_CASE("peers of problems that were not recorded do not come back with a merge", "[evidence]") {
  const auto measure = [](Project& project, const std::vector<std::string>& options) {
    project.write("peers.json", R"({"schema": "attn-peers-1", "problems": [{"peers": [
        {"name": "flash"}], "runs": [{"chapter": "01_first", "steps": [
        {"name": "v1_one", "outcome": "pass", "time": null}]}]}]})");
    CodeKeys code(project.root);
    record(project.reports, code, {"peers", "01_first"}, "peers.01_first",
           project.root / "peers.json", options, Project::kMeasured);
    finish(project.reports, code, {"peers", "01_first"}, "passed", 1, {}, Project::kMeasured);
  };
  const auto options_of = [](const Project& project) {
    std::string all;
    for (const EvidenceLine& line : read_lines(project.reports / "peers.01_first.jsonl"))
      all += line.json().at("options").get<std::string>() + "\n";
    return all;
  };
  Project project, older;
  measure(project, {"--backends flash --seqlen 64"});
  measure(older, {});
  CHECK(options_of(older) == "unknown\n");
  CodeKeys code(project.root), code_of_older(older.root);
  merge(project.reports, code, older.reports);
  CHECK(options_of(project) == "--backends flash --seqlen 64\n");
  merge(older.reports, code_of_older, project.reports);
  CHECK(options_of(older) == "--backends flash --seqlen 64\n");
  // A part that was interrupted replaces the lines of its problems.
  Project oldest;
  measure(oldest, {});
  finish(project.reports, code, {"peers", "01_first"}, "failed", 1, {}, Project::kMeasured);
  CodeKeys code_of_oldest(oldest.root);
  merge(oldest.reports, code_of_oldest, project.reports);
  CHECK(options_of(oldest) == "--backends flash --seqlen 64\n");
}

TEST_CASE("peers of problems that are listed no more go when others are merged", "[evidence]") {
  const auto list = [](Project& project, const std::string& problems) {
    fs::create_directories(project.root / "common/scripts");
    project.write("common/scripts/gpu_problems.sh",
                  "problems_of() { :; }\nprofiled_problem() { :; }\n"
                  "peers_of() { echo peers.$1 --steps v1_one; echo peers.$1.b --steps v1_one; }\n"
                  "peer_problems() { case $1 in *.b) echo --seqlen 8;; *) printf '%s\\n' " +
                      problems + ";; esac; }\n");
  };
  const auto measure = [](Project& project, const std::string& name, const std::string& options,
                          const std::string& verdict) {
    project.write("peers.json", R"({"schema": "attn-peers-1", "problems": [{"peers": [
        {"name": "flash"}], "runs": [{"chapter": "01_first", "steps": [
        {"name": "v1_one", "outcome": "pass", "time": null}]}]}]})");
    CodeKeys code(project.root);
    record(project.reports, code, {"peers", "01_first"}, name, project.root / "peers.json",
           {"--steps v1_one " + options}, Project::kMeasured);
    finish(project.reports, code, {"peers", "01_first"}, verdict, 1, {}, Project::kMeasured);
  };
  const auto lines_of = [](const Project& project, const std::string& name) {
    std::string all;
    for (const EvidenceLine& line : read_lines(project.reports / (name + ".jsonl")))
      all += line.json().at("options").get<std::string>() + "\n";
    return all;
  };
  // The problem of 64 becomes one of 8, which another document has, too.
  Project project;
  list(project, "'--seqlen 64' '--seqlen 32'");
  measure(project, "peers.01_first", "--seqlen 64", "passed");
  measure(project, "peers.01_first", "--seqlen 32", "passed");
  measure(project, "peers.01_first.b", "--seqlen 8", "passed");
  const std::string now = "'--seqlen 8' '--seqlen 32'";
  list(project, now);
  const auto merged = [&](const std::string& verdict) {
    Project other;
    list(other, now);
    measure(other, "peers.01_first", "--seqlen 8", verdict);
    CodeKeys code(project.root);
    merge(project.reports, code, other.reports);
    return lines_of(project, "peers.01_first");
  };
  CHECK(merged("failed") == "--seqlen 8\n--seqlen 32\n--seqlen 64\n");
  CHECK(merged("passed") == "--seqlen 8\n--seqlen 32\n");
  CHECK(lines_of(project, "peers.01_first.b") == "--seqlen 8\n");
}

TEST_CASE("peers are measured again when the list of problems names another step", "[evidence]") {
  Project project;
  project.write("peers.json", R"({"schema": "attn-peers-1", "timing_method": 4, "problems": [
      {"peers": [{"name": "flash"}], "runs": [{"chapter": "01_first", "steps": [
      {"name": "v1_one", "outcome": "pass", "time": null}]}]},
      {"peers": [{"name": "flash"}], "runs": [{"chapter": "01_first", "steps": [
      {"name": "v1_one", "outcome": "pass", "time": null},
      {"name": "v2_two", "outcome": "unsupported", "time": null}]}]}]})");
  CodeKeys code(project.root);
  record(project.reports, code, {"peers", "01_first"}, "peers.01_first",
         project.root / "peers.json", {"--steps v1_one --seqlen 64", "--steps v1_one --seqlen 32"},
         Project::kMeasured);
  const auto again = [&](const std::vector<std::string>& problems) {
    return peers_to_measure(project.reports, code, {"peers", "01_first"}, "peers.01_first",
                            problems);
  };
  CHECK(again({"--steps v1_one --seqlen 64"}).empty());
  CHECK(again({"--steps v1_one,v2_two --seqlen 32"}).empty());  // refused is an answer
  CHECK(again({"--steps v1_one,v2_two --seqlen 64", "--steps v1_one --seqlen 64",
               "--steps v1_one --seqlen 128"}) ==
        std::vector<std::string>{"--steps v1_one,v2_two --seqlen 64",
                                 "--steps v1_one --seqlen 128"});
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
