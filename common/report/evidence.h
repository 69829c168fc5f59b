/// \file
/// A folder of measurements, docs/reports/GPU: lines in containers (containers.h), logs, and
/// parts.jsonl, which has a line for each part of verify_on_gpu.sh and chapter: did it pass, on
/// which files, in how many seconds.
///
/// Each line says under "measured" when and on which GPU it was measured, and under "keys" which
/// code it is true of (code_keys.h). "unknown" means that it was not recorded. A line is stale
/// where a key is not that of the sources: nothing but record() and finish(), which
/// verify_on_gpu.sh calls when it has measured, writes keys.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "report/code_keys.h"

namespace attn::report {

/// A part of verify_on_gpu.sh ("times", "peers", "counters", "tests" ...) for a chapter.
struct Unit {
  std::string part, chapter;
};

/// Writes what was just measured into the container of `unit`: the elements that `file` has replace
/// those of the document `name`. `options`: those of the problem; of peers one
/// for each problem. `measured`: the provenance. Throws InputError where `file` is evidence
/// already.
void record(const std::filesystem::path& folder, CodeKeys&, const Unit&, const std::string& name,
            const std::filesystem::path& file, const std::vector<std::string>& options,
            const nlohmann::json& measured);

/// Notes how a part ended. Takes out lines of problems and steps that there are no more, if it
/// passed. `logs` are files that it wrote beside containers.
void finish(const std::filesystem::path& folder, CodeKeys&, const Unit&, const std::string& verdict,
            int seconds, const std::vector<std::string>& logs, const nlohmann::json& measured);

/// A step's old and new name.
struct Renamed {
  std::string from, to;
};
/// Renames steps of a chapter in all lines of the folder, all at once: names of documents, of steps
/// in results and keys, and in options. Figures, keys and provenance stay; lines and files get new
/// checksums. Logs stay as they were written. Returns the containers that changed. Throws
/// InputError, and changes nothing, where no line has an old name, where a new name is another
/// step's, or where something was edited.
std::vector<std::string> rename_steps(const std::filesystem::path& folder,
                                      const std::string& chapter,
                                      const std::vector<Renamed>& names);

/// What is not as it was measured: files and lines that were edited, added or removed, parts that
/// did not pass. Empty: all is well.
std::vector<std::string> edited_evidence(const std::filesystem::path& folder);

/// What is stale, a line for each part and chapter; then what a chapter must have and lacks. Empty:
/// all is current.
std::vector<std::string> stale_evidence(const std::filesystem::path& folder, CodeKeys&);

/// One sentence for the end of a table that is made of these documents; empty where the folder has
/// no parts.jsonl, or lies in no project. `table`: its text; if it names steps, others are left
/// out. `keys` defaults to those of the project that the folder lies in.
std::string state_of(const std::filesystem::path& folder, const std::vector<std::string>& documents,
                     const std::string& table = "", CodeKeys* keys = nullptr);

/// A Markdown table of the same: a row for each chapter and part, and what is missing.
std::string state_table(const std::filesystem::path& folder, CodeKeys* keys = nullptr);

/// What of the document `name` must be measured again: nothing, {"all"}, or some of its steps. Of a
/// log, where `name` is empty, nothing or {"all"}. `steps`: those that the list of problems names;
/// none if it leaves that to the program.
std::vector<std::string> to_measure(const std::filesystem::path& folder, CodeKeys&, const Unit&,
                                    const std::string& name, const std::vector<std::string>& steps);

/// Of the problems of a document of peers those that must be measured again.
std::vector<std::string> peers_to_measure(const std::filesystem::path& folder, CodeKeys&,
                                          const Unit&, const std::string& name,
                                          const std::vector<std::string>& options);

/// A unit, and how many seconds it took the last time; a minute where it never ran.
struct TimedUnit {
  Unit unit;
  int seconds = 60;
};
/// `units` in the order in which they should be measured: never passed, or lacks a problem; other
/// kernels; other launch code, way of measuring or method number. Those that are current come last
/// if `all`, else not at all.
std::vector<TimedUnit> stalest_first(const std::filesystem::path& folder, CodeKeys&,
                                     const std::vector<Unit>& units, bool all);

}  // namespace attn::report
