// The ladder of a chapter: steps below their parents, and the counter that changed.
#include <map>
#include <string>

#include "report/test_reports.h"

using namespace attn::report::test;

TEST_CASE("a ladder is a tree: each step over its parent, branches before the trunk") {
  Reports reports;
  reports.step("09_x", "v1_a", "// parent    08_w/v3_old, whose loop it keeps");
  reports.step("09_x", "v2_b", "// parent    v1_a");
  reports.step("09_x", "v3_c", "// parent    v2_b");
  reports.step("09_x", "v4_d", "// parent    v2_b (not v3_c: that is a branch)");
  reports.step("09_x", "v10_e", "// parent    v4_d");
  reports.write("09_x.run", run("09_x", "forward", problem("bf16", 1024),
                                {step("v1_a", 4e11, 1, 2e-3), step("v2_b", 4e11, 1, 1e-3),
                                 step("v3_c", 4e11, 1, 4e-3), step("v4_d", 4e11, 1, 1e-3),
                                 step("v10_e", 4e11, 1, 5e-4)}));
  const std::string table = reports.table("ladder 09_x.run");
  has(table, "`x parent`: how many times faster than the parent.");
  has_line(table, "| step | parent | ms | x parent | counter that moved |");
  has(table,
      "| `v1_a` | - | 2.000 | - | - |\n"
      "| `v2_b` | `v1` | 1.000 | 2.00 | - |\n"
      "| &emsp;\u2514 `v3_c` | `v2` | 4.000 | 0.25 | - |\n"
      "| `v4_d` | `v2` | 1.000 | 1.00 | - |\n"
      "| `v10_e` | `v4` | 0.500 | 2.00 | - |\n");
  CHECK(reports.table("tree 09_x") ==
        "A step's parent is the step of the trunk above it, unless (parent: ...) follows its name. "
        "├─ starts a branch below its parent, │ continues it.\n\n"
        "```text\n"
        "v1_a  (parent: 08_w/v3_old, whose loop it keeps)\n"
        "v2_b\n"
        "\u251c\u2500 v3_c\n"
        "v4_d\n"
        "v10_e\n"
        "```\n");
  // A branch that has a branch and goes on.
  reports.step("09_x", "v5_f", "// parent    v3_c");
  reports.step("09_x", "v6_g", "// parent    v3_c");
  reports.step("09_x", "v11_h", "// parent    v10_e");
  reports.step("09_x", "v12_i", "// parent    v11_h");
  reports.step("09_x", "w1_own", "// parent    none: an operation of its own");
  CHECK(reports.table("tree 09_x").find("\nw1_own  (parent: none)\n") != std::string::npos);
  has(reports.table("tree 09_x"),
      "v2_b\n"
      "\u251c\u2500 v3_c\n"
      "\u2502  \u251c\u2500 v5_f\n"
      "\u2502  v6_g\n"
      "v4_d\n");
  // Two problems: column titles show how they differ.
  json other = problem("bf16", 4096);
  other["batch"] = 16;
  reports.write("09_x.other", run("09_x", "forward", other, {step("v1_a", 4e11, 1, 4e-3)}));
  const std::string two = reports.table("ladder 09_x.run 09_x.other");
  has_line(two,
           "| step | parent | B=1 N=1024 ms | B=1 N=1024 x parent | B=16 N=4096 ms | "
           "B=16 N=4096 x parent | counter that moved |");
  has_line(two, "| `v1_a` | - | 2.000 | - | 4.000 | - | - |");
  other = problem("bf16", 1024);
  other["causal"] = true;
  reports.write("09_x.causal", run("09_x", "forward", other, {step("v1_a", 4e11, 1, 4e-3)}));
  has(reports.table("ladder 09_x.run 09_x.causal"),
      "| step | parent | ms | x parent | causal ms | causal x parent |");
  reports.step("09_x", "v1_a", "// parent    v10_e");
  has(reports.refusal("ladder 09_x.run"), "its parents go in a circle");
  has(reports.refusal("tree 07_y"), "no folder 07_y with step files");
}

TEST_CASE("a ladder's counter moved by 10 %, is no launch attribute, is the expected one") {
  Reports reports;
  const auto counted = [&](const char* name, std::map<std::string, double> values,
                           const std::string& head = "") {
    std::string csv =
        head + "\"ID\",\"Kernel Name\",\"Metric Name\",\"Metric Unit\",\"Metric Value\"\n";
    for (const auto& [metric, value] : values)
      csv += fmt::format("\"0\",\"k(int)\",\"{}\",\"{}\",\"{}\"\n", metric,
                         metric.starts_with("gpu__time") ? "ns"
                         : metric.starts_with("dram__")  ? "byte"
                                                         : "",
                         value);
    reports.write(fmt::format("09_x.{}.ncu.csv", name), csv);
  };
  reports.write("09_x.run", run("09_x", "forward", problem("bf16", 1024),
                                {step("v1_a", 4e11, 1, 2e-3), step("v2_b", 4e11, 1, 1e-3)}));
  reports.step("09_x", "v1_a", "// parent    none");
  const auto moved = [&](const char* expect) {
    reports.step("09_x", "v2_b", std::string("// parent    v1_a\n// expect    ") + expect);
    const std::string table = reports.table("ladder 09_x.run"), row = "| `v2_b` | `v1` | ";
    const auto at = table.find("2.00 | ", table.find(row)) + 7;
    return table.substr(at, table.find(" |", at) - at);
  };
  const char* kLong = "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio";
  const char* kShort = "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio";
  // Noise, and counters fixed by the launch.
  counted("v1_a", {{"gpu__time_duration.sum", 2e6},
                   {kLong, 0.30},
                   {kShort, 0.05},
                   {"sm__inst_executed.sum", 1000},
                   {"launch__registers_per_thread", 64}});
  counted("v2_b", {{"gpu__time_duration.sum", 1e6},
                   {kLong, 0.31},
                   {kShort, 0.13},
                   {"sm__inst_executed.sum", 1090},
                   {"launch__registers_per_thread", 255}});
  CHECK(moved("sm__inst_executed.sum") == "-");
  counted("v2_b", {{"gpu__time_duration.sum", 1e6},
                   {kLong, 3.1},
                   {kShort, 0.45},
                   {"sm__inst_executed.sum", 500},
                   {"launch__registers_per_thread", 255}});
  CHECK(moved("nothing that is counted") == "stall long scoreboard: 0.30 to 3.10");
  CHECK(moved("sm__inst_executed.sum falls by half") == "instructions: 1.00 kinst to 500 inst");
  CHECK(moved("fewer stalls (smsp__average_warps_issue_stalled_short_scoreboard...)") ==
        "stall short scoreboard: 0.05 to 0.45");
  CHECK(moved("sm__inst_executed_pipe_xu.sum") == "stall long scoreboard: 0.30 to 3.10");
  CHECK(moved("of many things\n//           instructions fall") ==
        "instructions: 1.00 kinst to 500 inst");
  CHECK(moved("fewer stalls on the short scoreboard") == "stall short scoreboard: 0.05 to 0.45");
  // Counters of two problems are not compared.
  const std::string longer = "==profile.sh== problem: forward N=2048\n";
  counted("v2_b", {{"gpu__time_duration.sum", 1e6}, {kLong, 3.1}}, longer);
  CHECK(moved("nothing that is counted") == "-");
  counted("v1_a", {{"gpu__time_duration.sum", 2e6}, {kLong, 0.30}}, longer);
  CHECK(moved("nothing that is counted") == "stall long scoreboard: 0.30 to 3.10");
}
