// attn_report: turns the output of the chapter programs and ncu into tables, comparisons and pages.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "attn/error.h"
#include "device/device.h"  // kTimingMethod
#include "report/containers.h"
#include "report/climb_svg.h"
#include "report/density_svg.h"
#include "report/fences.h"
#include "report/diff.h"
#include "report/evidence.h"
#include "report/json_object.h"
#include "report/page.h"
#include "report/profile.h"
#include "report/referee.h"
#include "report/result_file.h"
#include "report/roofline_svg.h"
#include "report/summary.h"
#include "report/prose_figures.h"
#include "report/tables.h"
#include "report/timeline.h"
#include "report/timeline_svg.h"
#include "report/which.h"

namespace attn::report {
namespace {

// Reads all files before anything is written, so that a damaged file leaves no partial output.
std::vector<ResultFile> read_all(const std::vector<std::string>& paths) {
  std::vector<ResultFile> files;
  for (const std::string& path : paths) files.push_back(read_result_file(path));
  return files;
}

// Resolves document names; NAME* matches all names with that prefix.
std::vector<std::string> named_documents(const std::vector<std::string>& words) {
  std::vector<std::string> paths;
  for (const std::string& word : words) {
    const std::filesystem::path path = word;
    if (!word.ends_with('*')) {
      paths.push_back(named_document(path));
      continue;
    }
    const std::string begin = path.filename().string();
    for (const std::string& name :
         document_names(path.parent_path(), begin.substr(0, begin.size() - 1), ".json"))
      paths.push_back(path.parent_path() / (name + ".json"));
  }
  return paths;
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw InputError(fmt::format("{}: cannot be read", path));
  return {std::istreambuf_iterator<char>(file), {}};
}

// Writes to a file, or to stdout if `path` is empty.
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

// Fills the tables of Markdown pages, or reports pages that differ from the generated tables.
// Returns the exit status: 1 if a page differs.
int tables(const std::vector<std::string>& pages, const std::string& reports, bool check_only) {
  int status = 0;
  for (const std::string& page : pages) {
    std::vector<std::string> missing;
    const std::string before = read_text(page),
                      after =
                          fill_fences(fill_tables(before, page, reports, &missing), page);
    for (const std::string& line : missing) fmt::print("{}\n", line);
    if (before == after) continue;
    if (check_only) {
      fmt::print("{}: its tables or its code differ from {}: run attn_report tables\n", page,
                 reports);
      status = 1;
      continue;
    }
    write_text(page, after);
  }
  return status;
}

// Compares A with B. Returns the exit status; for several comparisons, the one that a script must
// handle.
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

// Whether a page is unchanged since it was written. Returns the exit status: 1 if not.
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

// The evidence commands of verify_on_gpu.sh, and `evidence check`. Sets the exit status.
struct EvidenceArguments {
  std::string folder, root = ".", name, file, verdict, measured, unchanged;
  Unit unit;
  int seconds = 0;
  bool all = false, current = false;
  std::vector<std::string> words;  // logs, units or steps
  std::vector<std::string> options;
};

// All keys of the current sources, one per line; `only` selects a chapter.
std::string keys_text(CodeKeys& code, const std::string& only) {
  std::string text = "kernel            launch\n";
  for (const std::string& chapter : code.chapters())
    for (const std::string& step : code.steps(chapter))
      if (only.empty() || only == chapter)
        text += fmt::format("{}  {}  {}/{}\n", code.kernel(chapter, step),
                            code.launch(chapter, step), chapter, step);
  for (const char* part : {"times", "peers", "counters", "calls"})
    text += fmt::format("{}  method of {}\n", code.method(part, only), part);
  for (const std::string& chapter : code.chapters())
    if (only.empty() || only == chapter)
      text += fmt::format("{}  method of sanitizer {}\n", code.method("sanitizer", chapter),
                          chapter);
  return text;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);)
    if (!line.empty()) lines.push_back(line);
  return lines;
}

void print_lines(const std::vector<std::string>& lines) {
  for (const std::string& line : lines) fmt::print("{}\n", line);
}

int check(const EvidenceArguments& a) {
  CodeKeys code(a.root);
  const auto edited = edited_evidence(a.folder), stale = stale_evidence(a.folder, code);
  print_lines(edited);
  print_lines(stale);
  if (stale.empty())
    fmt::print("{}: all of the code as it is, timing method {}\n", a.folder, kTimingMethod);
  return !edited.empty() || (a.current && !stale.empty()) ? 1 : 0;
}

// A line about a command that there is not, or that is missing; "" if neither. CLI11 says "A
// subcommand is required" of both.
std::string wrong_command(const CLI::App& app, int argc, const char* const* argv) {
  const CLI::App* at = &app;
  for (int n = 1;; ++n) {
    const auto commands = at->get_subcommands([](const CLI::App*) { return true; });
    if (commands.empty()) return "";
    std::vector<std::string> names;
    for (const CLI::App* c : commands) names.push_back(c->get_name());
    const auto found = n < argc ? std::ranges::find(names, argv[n]) : names.end();
    if (found == names.end())
      return fmt::format("{}must be one of {}",
                         n < argc ? std::string(argv[n]) + ": " : "a command is missing: ",
                         fmt::join(names, ", "));
    at = commands[static_cast<std::size_t>(found - names.begin())];
  }
}

void add_evidence_commands(CLI::App& app, EvidenceArguments& a, int& status) {
  CLI::App* evidence = app.add_subcommand(
      "evidence", "records and checks which code a folder of measurements belongs to");
  evidence->require_subcommand(1);
  const auto command = [&](const char* name, const char* what) {
    CLI::App* c = evidence->add_subcommand(name, what);
    c->add_option("--root", a.root, "the project's folder (.)");
    if (std::string(name) != "keys")
      c->add_option("DIR", a.folder, "folder, as docs/reports/h200")->required();
    return c;
  };
  const auto unit_command = [&](const char* name, const char* what) {
    CLI::App* c = command(name, what);
    c->add_option("PART", a.unit.part)->required();
    c->add_option("CHAPTER", a.unit.chapter)->required();
    return c;
  };
  // The measured program must be built from the sources whose keys are recorded.
  const auto writes = [&](CLI::App* c) {
    c->add_option("--measured", a.measured, "JSON file: when, where and on which GPU")->required();
    c->add_option("--unchanged-since", a.unchanged,
                  "earlier output of `evidence keys`; exit 1 if the keys have changed since");
  };
  const auto unchanged = [&](CodeKeys& code) {
    if (a.unchanged.empty() || read_text(a.unchanged) == keys_text(code, a.unit.chapter))
      return true;
    fmt::print("the code changed meanwhile\n");
    status = 1;
    return false;
  };
  const auto measured = [&] { return parse_json(read_bytes(a.measured), a.measured); };
  CLI::App* keys = command("keys", "prints the key of each step and of each way of measuring");
  keys->add_option("CHAPTER", a.unit.chapter, "only this chapter");
  keys->callback([&a] {
    CodeKeys code(a.root);
    fmt::print("{}", keys_text(code, a.unit.chapter));
  });
  CLI::App* check_command = command(
      "check",
      "exit 1 if a line was edited, added or removed, or a part failed; lists what is stale");
  check_command->add_flag("--current", a.current, "exit 1 if anything is stale or missing, too");
  check_command->callback([&a, &status] { status = check(a); });
  CLI::App* record_command = unit_command("record", "records what was measured just now");
  record_command->add_option("NAME", a.name, "the document's name, without .json")->required();
  record_command->add_option("FILE", a.file, "what the program, peers.py or ncu wrote")->required();
  record_command->add_option("--options", a.options,
                             "the problem's options; of peers one for each");
  writes(record_command);
  record_command->callback([&a, unchanged, measured] {
    CodeKeys code(a.root);
    if (unchanged(code)) record(a.folder, code, a.unit, a.name, a.file, a.options, measured());
  });
  CLI::App* merge_command =
      command("merge", "takes over what verify_on_gpu.sh measured into another folder (--out)");
  merge_command->add_option("FROM", a.file, "the other folder")->required();
  merge_command->callback([&a] {
    CodeKeys code(a.root);
    merge(a.folder, code, a.file);
  });
  CLI::App* rename_command = command(
      "rename",
      "renames steps of a chapter in all lines, with new checksums; what was measured stays");
  rename_command->add_option("CHAPTER", a.unit.chapter)->required();
  rename_command->add_option("NAMES", a.words, "pairs of names, all renamed at once")->required();
  rename_command->callback([&a] {
    if (a.words.size() % 2 != 0)
      throw InputError(fmt::format("rename: {} has no new name", a.words.back()));
    std::vector<Renamed> names;
    for (std::size_t n = 0; n < a.words.size(); n += 2)
      names.push_back({a.words[n], a.words[n + 1]});
    print_lines(rename_steps(a.folder, a.unit.chapter, names));
  });
  CLI::App* finish_command = unit_command("finish", "notes how a part of verify_on_gpu.sh ended");
  finish_command->add_option("VERDICT", a.verdict)->required();
  finish_command->add_option("SECONDS", a.seconds)->required();
  finish_command->add_option("LOG", a.words, "files that the part wrote");
  writes(finish_command);
  finish_command->callback([&a, unchanged, measured] {
    CodeKeys code(a.root);
    const std::string verdict = unchanged(code) ? a.verdict : "failed";
    finish(a.folder, code, a.unit, verdict, a.seconds, a.words, measured());
  });
  CLI::App* todo = unit_command(
      "todo",
      "prints what must be measured again of a document: nothing, \"all\" or steps; of peers "
      "those of the problems on stdin");
  todo->add_option("NAME", a.name,
                   "the document; none for a log; - for the \"NAME [STEPS]\" on stdin, each "
                   "printed before its answer");
  todo->add_option("--steps", a.words, "steps that the list of problems names")->delimiter(',');
  todo->callback([&a] {
    CodeKeys code(a.root);
    if (a.unit.part == "peers") {
      const std::string problems{std::istreambuf_iterator<char>(std::cin), {}};
      print_lines(peers_to_measure(a.folder, code, a.unit, a.name, lines_of(problems)));
    } else if (a.name == "-") {
      for (std::string line; std::getline(std::cin, line);) {
        const std::size_t space = line.find(' ');
        const std::string name = line.substr(0, space);
        std::vector<std::string> steps;
        if (space != std::string::npos && space + 1 < line.size())
          steps = CLI::detail::split(line.substr(space + 1), ',');
        fmt::print("{} {}\n", name,
                   fmt::join(to_measure(a.folder, code, a.unit, name, steps), ","));
      }
    } else {
      fmt::print("{}\n", fmt::join(to_measure(a.folder, code, a.unit, a.name, a.words), ","));
    }
  });
  CLI::App* stale = command(
      "stale",
      "prints those \"PART CHAPTER\"s that must be measured, stalest first, and their seconds");
  stale->add_flag("--all", a.all, "print the others, too, after them");
  stale->add_option("UNIT", a.words)->required();
  stale->callback([&a] {
    CodeKeys code(a.root);
    std::vector<Unit> units;
    for (const std::string& word : a.words)
      units.push_back({word.substr(0, word.find(' ')), word.substr(word.find(' ') + 1)});
    for (const auto& [unit, seconds] : stalest_first(a.folder, code, units, a.all))
      fmt::print("{} {} {}\n", unit.part, unit.chapter, seconds);
  });
}

int run(int argc, const char* const* argv) {
  CLI::App app("reads what the chapter programs write with --json and what ncu exports as CSV",
               "attn_report");
  app.require_subcommand(1);
  std::vector<std::string> files;
  CLI::App* summary_command = app.add_subcommand(
      "summary", "prints one row per step: verdict, time, share of the binding roof");
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
  CLI::App* prose_command = app.add_subcommand(
      "prose", "compares figures in the text of pages with the reports; exit 1 if one differs");
  std::string list, pages_root = ".";
  prose_command->add_option("LIST", list, "passages by page (prose_figures.h)")->required();
  prose_command->add_option("--reports", reports, "folder, as docs/reports/h200")->required();
  prose_command->add_option("--root", pages_root, "what names of pages are relative to");
  std::string results, counters, output;
  ImportOptions import_options;
  CLI::App* import_command =
      app.add_subcommand("import", "joins a step's results and its ncu export into one profile");
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
  diff_command->add_flag("--force", force,
                         "compare different GPUs, element types, problems or clock controls");
  diff_command->footer(
      "FAST or SLOW: the quartile ranges are apart. SAME: medians within 1 %. AMBIGUOUS: neither,\n"
      "or a time without quartiles and less than 3 % of difference.\n"
      "Counters: ratios (causes) first, then counts, then rates; what moved most first. Sectors "
      "per\n"
      "load or store are weighted by the share of loads or stores in all sectors.\n"
      "Exit status: 0 SAME or FAST, 1 SLOW, 3 AMBIGUOUS (of several steps: SLOW before\n"
      "AMBIGUOUS), 2 a file that cannot be read or two that cannot be compared.");
  CLI::App* roofline_command =
      app.add_subcommand("roofline", "draws steps below the roofs of their GPU, as an SVG file");
  roofline_command->add_option("RESULTS", files, "results of chapter programs, of one GPU")
      ->required();
  roofline_command->add_option("-o,--output", output, "the SVG file; stdout if not given");
  CLI::App* density_command = app.add_subcommand(
      "density", "draws a step's time over the share of scores that masks leave, as an SVG file");
  density_command->add_option("RESULTS", files, "results of one step and GPU, one mask per file")
      ->required();
  density_command->add_option("-o,--output", output, "the SVG file; stdout if not given");
  std::vector<std::string> lines;
  CLI::App* climb_command = app.add_subcommand(
      "climb", "draws the forward steps of several chapters on one problem, as an SVG file");
  climb_command
      ->add_option("RESULTS", files, "results of one problem and GPU, one chapter per file")
      ->required();
  climb_command->add_option("--line", lines,
                            "NAME=FILE:PEER: a library, from what peers.py wrote");
  climb_command->add_option("-o,--output", output, "the SVG file; stdout if not given");
  CLI::App* referee_command = app.add_subcommand(
      "referee",
      "checks that a launch did the work that its outputs need; exit 1 with the reasons if not");
  std::string own = "_student";
  referee_command->add_option("RESULT", results, "what an exercise wrote with --result")
      ->required();
  referee_command->add_option("NCU", counters, "ncu's CSV, with --print-kernel-base mangled")
      ->required();
  referee_command->add_option("--own", own,
                              "text that the names of the exercise's own kernels contain");
  std::vector<std::string> profiles;
  std::string log, student, verified;
  CLI::App* page_command = app.add_subcommand(
      "page", "writes one HTML file to hand in: checks, times, roofline, work log");
  CLI::Option* page_files =
      page_command->add_option("RESULTS", files, "results of chapter programs");
  page_command->add_option("--profile", profiles,
                           "profiles, or ncu exports, of steps in these results");
  page_command->add_option("--log", log, "the work log, in Markdown");
  page_command->add_option("--name", student, "the student's name");
  page_command->add_option("-o,--output", output, "the HTML file; stdout if not given");
  page_command
      ->add_option("--verify", verified,
                   "instead: check that this page is unchanged; exit 1 if not (guards against "
                   "accidents, not against intent)")
      ->excludes(page_files);
  WhichArguments which_arguments;
  CLI::App* which_command = add_which_command(app, which_arguments);
  std::vector<std::string> timelines;
  CLI::App* timeline_command = app.add_subcommand(
      "timeline", "summarises a timeline (--timeline), or compares two: waits, units, chains");
  TimelinePicture picture;
  timeline_command->add_option("FILES", timelines, "one file, or two; with --svg any number")
      ->required();
  CLI::Option* svg =
      timeline_command->add_option("--svg", output, "instead: draws blocks, as an SVG file");
  const auto of_picture = [&](const char* name, auto& value, const char* what) {
    return timeline_command->add_option(name, value, what)->needs(svg);
  };
  of_picture("--block", picture.blocks, "which ones, from 0 on (0)")
      ->delimiter(',')
      ->check(CLI::Range(0, 1'000'000));
  of_picture("--from", picture.from, "begin in us: of all files, or one per file (0)")
      ->delimiter(',');
  of_picture("--us", picture.us, "length of the window in us (0: all)");
  of_picture("--lanes", picture.lanes,
             "NAME or NAME=LABEL: a unit, \"warp 8\", \"smem sK[0]\", \"cp.async of warp 0\" "
             "(units, first warps of warpgroups)")
      ->delimiter(',');
  of_picture("--title", picture.title, "first line of the picture (chapter and steps)");
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
    const std::string wrong = wrong_command(app, argc, argv);
    throw InputError(wrong.empty() ? fmt::format("{} (--help lists the commands)", e.what())
                                   : wrong);
  }
  files = named_documents(files);
  profiles = named_documents(profiles);
  for (const auto& [file, step] :
       {std::pair(&results, std::string()), std::pair(&counters, import_options.step),
        std::pair(&a, step_a), std::pair(&b, step_b)})
    if (!file->empty()) *file = named_document(*file, step);
  if (*summary_command) fmt::print("{}", summary_text(read_all(files)));
  if (*tables_command) return tables(pages, reports, check_only);
  if (*prose_command) {
    const ProseFigures prose = check_prose(list, pages_root, reports);
    for (const std::string& line : prose.missing) fmt::print("{}\n", line);
    fmt::print("{} passages, {} missing\n", prose.passages, prose.missing.size());
    return prose.missing.empty() ? 0 : 1;
  }
  if (*import_command) write_text(output, import_profile(results, counters, import_options));
  if (*diff_command) return diff(a, b, step_a, step_b, force);
  if (*which_command) fmt::print("{}", which(which_arguments));
  if (*svg)
    write_text(output, timeline_svg(timelines, picture));
  else if (*timeline_command && timelines.size() > 2)
    throw InputError("timeline: one file, or two; with --svg any number");
  else if (*timeline_command)
    fmt::print("{}", timelines.size() == 1
                         ? text(read_timeline(timelines[0]))
                         : text(read_timeline(timelines[0]), read_timeline(timelines[1])));
  if (*referee_command) return referee(results, counters, own);
  if (*roofline_command) write_text(output, roofline_svg(read_all(files)).text);
  if (*density_command) write_text(output, density_svg(read_all(files)));
  if (*climb_command) {
    const std::vector<ResultFile> all = read_all(files);
    std::vector<ClimbLine> libraries;
    for (const std::string& line : lines) libraries.push_back(read_climb_line(line, all[0]));
    write_text(output, climb_svg(all, libraries));
  }
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
