// attn_report: what the chapter programs and ncu wrote, as tables, comparisons and pages.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "attn/error.h"
#include "report/density_svg.h"
#include "report/diff.h"
#include "report/evidence.h"
#include "report/json_object.h"
#include "report/page.h"
#include "report/profile.h"
#include "report/referee.h"
#include "report/result_file.h"
#include "report/roofline_svg.h"
#include "report/summary.h"
#include "report/tables.h"

namespace attn::report {
namespace {

// All files are read before anything is written, so that a damaged one leaves no half of it.
std::vector<ResultFile> read_all(const std::vector<std::string>& paths) {
  std::vector<ResultFile> files;
  for (const std::string& path : paths) files.push_back(read_result_file(path));
  return files;
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw InputError(fmt::format("{}: cannot be read", path));
  return {std::istreambuf_iterator<char>(file), {}};
}

// To a file, or to stdout where none is named.
void write_text(const std::string& path, const std::string& text) {
  if (path.empty()) {
    fmt::print("{}", text);
    return;
  }
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file) throw InputError(fmt::format("{}: cannot be written", path));
}

// Fills the tables of Markdown pages, or says which page is not what the reports give. Returns the
// exit status: 1 if a page differs.
int tables(const std::vector<std::string>& pages, const std::string& reports, bool check_only) {
  int status = 0;
  for (const std::string& page : pages) {
    std::vector<std::string> missing;
    const std::string before = read_text(page),
                      after = fill_tables(before, page, reports, &missing);
    for (const std::string& line : missing) fmt::print("{}\n", line);
    if (before == after) continue;
    if (check_only) {
      fmt::print("{}: its tables differ from {}: run attn_report tables\n", page, reports);
      status = 1;
      continue;
    }
    write_text(page, after);
  }
  return status;
}

// Compares A with B. Returns the exit status: of several comparisons the one that a script must
// look at.
int diff(const std::string& a, const std::string& b, const std::string& step_a,
         const std::string& step_b, bool force) {
  bool slow = false, ambiguous = false;
  std::string text;
  for (const Diff& d : compare_files(read_steps(a, step_a), read_steps(b, step_b), force)) {
    slow |= d.judgement == Judgement::slow;
    ambiguous |= d.judgement == Judgement::ambiguous;
    text += (text.empty() ? "" : "\n") + attn::report::text(d);
  }
  fmt::print("{}", text);
  return slow ? 1 : ambiguous ? 3 : 0;
}

int referee(const std::string& result, const std::string& counters, const std::string& own) {
  const auto found = objections(read_counter_file(counters).kernels, read_required(result), own);
  for (const std::string& objection : found) fmt::print("{}\n", objection);
  return found.empty() ? 0 : 1;
}

// Whether a page is as it was written. Returns the exit status: 1 if not.
int verify(const std::string& path) {
  const std::string file = printable(path);
  const Verification v = verify_page(read_bytes(path), file);
  if (v.intact) {
    fmt::print("{}: as it was written, sha256 {}\n", file, v.found);
    return 0;
  }
  fmt::print("{}: ALTERED: its content has sha256 {}, it says {}\n", file, v.found, v.said);
  return 1;
}

// What verify_on_gpu.sh and manifest.sh do with the evidence. Returns the exit status: 1 if
// something is wrong.
struct EvidenceArguments {
  std::string folder, root = ".", part, chapter, verdict;
  int seconds = 0;
  bool all = false;
  std::vector<std::string> words;  // files, or units
};
void add_evidence_commands(CLI::App& app, EvidenceArguments& a, int& status) {
  CLI::App* evidence =
      app.add_subcommand("evidence", "which kernels a folder of measurements is true of");
  evidence->require_subcommand(1);
  const auto command = [&](const char* name, const char* what) {
    CLI::App* c = evidence->add_subcommand(name, what);
    c->add_option("--root", a.root, "the project's folder (.)");
    if (std::string(name) != "keys")
      c->add_option("DIR", a.folder, "folder, as docs/reports/h200")->required();
    return c;
  };
  command("keys", "the key of each step's kernels")->callback([&a] {
    for (const auto& [step, key] : kernel_keys(a.root)) fmt::print("{}  {}\n", key, step);
  });
  command("check", "is every file as it was measured, and what has changed since?")
      ->callback([&a, &status] {
        const auto wrong = check_evidence(a.folder, a.root);
        for (const std::string& line : wrong) fmt::print("{}\n", line);
        fmt::print("{}", evidence_summary(a.folder, a.root));
        status = wrong.empty() ? 0 : 1;
      });
  CLI::App* record_command = command("record", "notes what a part of verify_on_gpu.sh wrote");
  record_command->add_option("PART", a.part)->required();
  record_command->add_option("CHAPTER", a.chapter)->required();
  record_command->add_option("VERDICT", a.verdict)->required();
  record_command->add_option("SECONDS", a.seconds)->required();
  record_command->add_option("FILE", a.words);
  record_command->callback(
      [&a] { record(a.folder, a.root, a.part, a.chapter, a.verdict, a.seconds, a.words); });
  CLI::App* current =
      command("current", "the files of a PART and CHAPTER that need not be measured again");
  current->add_option("PART CHAPTER", a.words)->required()->expected(2);
  current->callback([&a] {
    for (const std::string& name : current_files(a.folder, a.root, a.words[0], a.words[1]))
      fmt::print("{}\n", name);
  });
  CLI::App* stale =
      command("stale", "of \"PART CHAPTER\"s those that should be measured, the stalest first");
  stale->add_flag("--all", a.all, "the others after them");
  stale->add_option("UNIT", a.words)->required();
  stale->callback([&a] {
    for (const std::string& unit : stalest_first(a.folder, a.root, a.words, a.all))
      fmt::print("{}\n", unit);
  });
}

int run(int argc, const char* const* argv) {
  CLI::App app("reads what the chapter programs write with --json and what ncu exports as CSV",
               "attn_report");
  app.require_subcommand(1);
  std::vector<std::string> files;
  CLI::App* summary_command =
      app.add_subcommand("summary", "one row a step: verdict, time, share of the binding roof");
  summary_command->add_option("FILE", files, "results of chapter programs")->required();
  std::vector<std::string> pages;
  std::string reports;
  bool check_only = false;
  CLI::App* tables_command = app.add_subcommand(
      "tables",
      "generates the tables between the markers of Markdown pages from a folder of reports");
  tables_command->add_option("PAGE", pages, "Markdown pages")->required();
  tables_command->add_option("--reports", reports, "folder, as docs/reports/h200")->required();
  tables_command->add_flag("--check", check_only, "change nothing; exit 1 if a page differs");
  std::string results, counters, output;
  ImportOptions import_options;
  CLI::App* import_command =
      app.add_subcommand("import", "joins a step's results and its ncu export to one profile");
  import_command->add_option("RESULTS", results, "results of a chapter program")->required();
  import_command->add_option("NCU", counters, "what profile.sh or ncu --csv wrote")->required();
  import_command->add_option("-o,--output", output, "the profile; stdout if not given");
  import_command->add_option("--step", import_options.step,
                             "the step; if not given, the one in the name CHAPTER.STEP.ncu.csv");
  import_command
      ->add_option("--clocks", import_options.clocks,
                   "ncu's --clock-control, where the export does not say it: none or base")
      ->check(CLI::IsMember({"none", "base"}));
  import_command->add_flag("--force", import_options.force,
                           "join files that do not seem to belong together");
  std::string a, b, step_a, step_b;
  bool force = false;
  CLI::App* diff_command =
      app.add_subcommand("diff", "compares two steps: verdict of B against A, counters that moved");
  diff_command->add_option("A", a, "a profile, an ncu CSV or results of a chapter program")
      ->required();
  diff_command->add_option("B", b, "the same, for what is judged")->required();
  diff_command->add_option("--step-a", step_a, "the step of A, where A holds several");
  diff_command->add_option("--step-b", step_b, "the step of B");
  diff_command->add_flag(
      "--force", force, "compare different GPUs, element types, problems or clock controls");
  diff_command->footer(
      "FAST or SLOW: the quartile ranges are apart. SAME: medians within 1 %. AMBIGUOUS: neither,\n"
      "or a time without quartiles and less than 3 % of difference.\n"
      "Counters: ratios (causes) first, then counts, then rates; what moved most first. Sectors a\n"
      "load or a store count as much as loads or stores are of all sectors.\n"
      "Exit status: 0 SAME or FAST, 1 SLOW, 3 AMBIGUOUS (of several steps: SLOW before\n"
      "AMBIGUOUS), 2 a file that cannot be read or two that cannot be compared.");
  CLI::App* roofline_command = app.add_subcommand(
      "roofline", "draws steps below the roofs of their GPU, as an SVG file");
  roofline_command->add_option("RESULTS", files, "results of chapter programs, of one GPU")
      ->required();
  roofline_command->add_option("-o,--output", output, "the SVG file; stdout if not given");
  CLI::App* density_command = app.add_subcommand(
      "density", "draws a step's time over the share of scores that masks leave, as an SVG file");
  density_command->add_option("RESULTS", files, "results of one step and GPU, a mask each")
      ->required();
  density_command->add_option("-o,--output", output, "the SVG file; stdout if not given");
  CLI::App* referee_command = app.add_subcommand(
      "referee", "did a launch do the work that its outputs need? Exit 1 with the reasons if not");
  std::string own = "_student";
  referee_command->add_option("RESULT", results, "what an exercise wrote with --result")
      ->required();
  referee_command->add_option("NCU", counters, "ncu's CSV, with --print-kernel-base mangled")
      ->required();
  referee_command->add_option("--own", own, "what the names of the exercise's own kernels hold");
  std::vector<std::string> profiles;
  std::string log, student, verified;
  CLI::App* page_command =
      app.add_subcommand("page", "one HTML file to hand in: checks, times, roofline, work log");
  CLI::Option* page_files =
      page_command->add_option("RESULTS", files, "results of chapter programs");
  page_command->add_option("--profile", profiles,
                           "profiles, or ncu exports, of steps in these results");
  page_command->add_option("--log", log, "the work log, in Markdown");
  page_command->add_option("--name", student, "whose page it is");
  page_command->add_option("-o,--output", output, "the HTML file; stdout if not given");
  page_command
      ->add_option("--verify", verified,
                   "instead: is this page as it was written? Exit 1 if not. Guards against "
                   "accidents, not against intent")
      ->excludes(page_files);
  EvidenceArguments evidence;
  int evidence_status = 0;
  add_evidence_commands(app, evidence, evidence_status);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    const auto chosen = app.get_subcommands();
    fmt::print("{}", chosen.empty() ? app.help() : chosen[0]->help());
    return 0;
  } catch (const CLI::ParseError& e) {
    throw InputError(fmt::format("{} (--help lists the commands)", e.what()));
  }
  if (*summary_command) fmt::print("{}", summary_text(read_all(files)));
  if (*tables_command) return tables(pages, reports, check_only);
  if (*import_command) write_text(output, import_profile(results, counters, import_options));
  if (*diff_command) return diff(a, b, step_a, step_b, force);
  if (*referee_command) return referee(results, counters, own);
  if (*roofline_command) write_text(output, roofline_svg(read_all(files)).text);
  if (*density_command) write_text(output, density_svg(read_all(files)));
  if (*page_command) {
    if (!verified.empty()) return verify(verified);
    if (files.empty()) throw InputError("page: RESULTS is required, or --verify FILE");
    PageInput in{read_all(files), {}, std::nullopt, student};
    for (const std::string& path : profiles) in.profiles.push_back(read_profile(path, in.results));
    if (!log.empty()) in.log = read_bytes(log);
    write_text(output, page(in));
  }
  return evidence_status;
}

}  // namespace
}  // namespace attn::report

int main(int argc, char** argv) {
  try {
    return attn::report::run(argc, argv);
  } catch (const attn::InputError& e) {
    fmt::print(stderr, "attn_report: {}\n", e.what());
    return 2;
  }
}
