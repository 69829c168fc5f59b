/// \file
/// An evidence folder, docs/reports/GPU: lines in containers (containers.h), logs, and parts.jsonl.
/// The latter has a line per part of verify_on_gpu.sh and chapter: whether it passed, its files,
/// its duration in seconds.
///
/// Each line records under "measured" when and on which GPU it was measured, and under "keys" the
/// code that it depends on (code_keys.h). "unknown" means that this was not recorded. A line is
/// stale if a key differs from that of the sources. Only record() and finish() write keys;
/// verify_on_gpu.sh calls them after measuring.
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

/// Writes a new measurement into the container of `unit`: the elements in `file` replace those of
/// the document `name`. `options`: the options of the problem; for peers one per problem.
/// `measured`: the provenance. Throws InputError if `file` is already evidence.
void record(const std::filesystem::path& folder, CodeKeys&, const Unit&, const std::string& name,
            const std::filesystem::path& file, const std::vector<std::string>& options,
            const nlohmann::json& measured);

/// Records how a part ended. If it passed, removes lines of problems and steps that no longer
/// exist. `logs` are files that it wrote besides containers.
void finish(const std::filesystem::path& folder, CodeKeys&, const Unit&, const std::string& verdict,
            int seconds, const std::vector<std::string>& logs, const nlohmann::json& measured);

/// Takes over what was measured into another folder, on another GPU or in an interrupted run: a
/// line replaces that of the same problem and step, and a part that passed there with its logs.
/// A part that did not pass there keeps its verdict here, and names that run as "merged". A line
/// whose keys are current is not replaced by one whose keys are not. If peers passed there, lines
/// of problems that are listed no more go. Throws InputError, and changes nothing, if a line or a
/// file of either folder was edited.
void merge(const std::filesystem::path& folder, CodeKeys&, const std::filesystem::path& from);

/// A step's old and new name.
struct Renamed {
  std::string from, to;
};
/// Renames steps of a chapter in all lines of the folder, all at once: in names of documents, in
/// steps of results and keys, and in options. Figures, keys and provenance are kept; lines and
/// files get new checksums. Logs are not changed. Returns the changed containers. Throws
/// InputError, and changes nothing, if no line has an old name, if a new name belongs to another
/// step, or if a line was edited.
std::vector<std::string> rename_steps(const std::filesystem::path& folder,
                                      const std::string& chapter,
                                      const std::vector<Renamed>& names);

/// Differences from the measured state: files and lines that were edited, added or removed, and
/// parts that did not pass. Empty if there are none.
std::vector<std::string> edited_evidence(const std::filesystem::path& folder);

/// Stale measurements, one line per part and chapter; then required measurements that a chapter
/// lacks. Empty if everything is current.
std::vector<std::string> stale_evidence(const std::filesystem::path& folder, CodeKeys&);

/// Sentences below a table: what changed since its documents were measured. Empty if the folder has
/// no parts.jsonl, or is not inside a project. `table`: its text; if it names steps, only those
/// count. `keys` defaults to those of the project that contains the folder.
std::string state_of(const std::filesystem::path& folder, const std::vector<std::string>& documents,
                     const std::string& table = "", CodeKeys* keys = nullptr);

/// The same as a Markdown table: a row per chapter and part, and missing measurements.
std::string state_table(const std::filesystem::path& folder, CodeKeys* keys = nullptr);

/// The parts of the document `name` to measure again: nothing, {"all"}, or some of its steps. For a
/// log (`name` is empty): nothing or {"all"}. `steps`: the steps in the list of problems; empty if
/// the program chooses them.
std::vector<std::string> to_measure(const std::filesystem::path& folder, CodeKeys&, const Unit&,
                                    const std::string& name, const std::vector<std::string>& steps);

/// The problems of a document of peers that must be measured again.
std::vector<std::string> peers_to_measure(const std::filesystem::path& folder, CodeKeys&,
                                          const Unit&, const std::string& name,
                                          const std::vector<std::string>& options);

/// A unit, and its duration in seconds in the last run; a minute if it never ran.
struct TimedUnit {
  Unit unit;
  int seconds = 60;
};
/// `units` in the order in which they should be measured: never passed, or lacking a problem;
/// changed kernels; changed launch code, measurement method or method number. Current units come
/// last if `all`, else they are left out.
std::vector<TimedUnit> stalest_first(const std::filesystem::path& folder, CodeKeys&,
                                     const std::vector<Unit>& units, bool all);

}  // namespace attn::report
