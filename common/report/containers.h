/// \file
/// Containers: store many documents of an evidence folder in a few files, with one line per step
/// and problem.
///
/// | file | a line is | the document of all lines of one name |
/// |---|---|---|
/// | CHAPTER.OPERATION.jsonl | a step of a problem | what a chapter program writes with --json |
/// | peers.NAME.jsonl, others.NAME.jsonl | a problem | what peers.py writes |
/// | CHAPTER.counters.csv | rows of ncu below a line "# {...}" | an export of ncu |
///
/// A JSON line is a document whose array has one element, with additional fields: "name",
/// "options", "keys", "measured" and, over everything before it, a checksum "sum". If
/// FOLDER/NAME.json or FOLDER/NAME.ncu.csv does not exist, reading it returns the original
/// document, joined from the lines of that name.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace attn::report {

/// A line of a container, or of parts.jsonl.
struct EvidenceLine {
  /// The name of its document: "04_flash_v2.forward_gqa_n4096", "01_naive.v1_global".
  std::string name;
  std::string text;  ///< without the line break; for counters without "# "
  std::string rows;  ///< for counters: the rows of ncu, each with the step in front

  nlohmann::json json() const;
  /// Whether its checksum matches the line.
  bool intact() const;
};

/// `line` with its name first and a checksum at its end.
EvidenceLine make_line(const std::string& name, const nlohmann::json& line,
                       const std::string& rows = "");

/// The lines of a container; empty if there is no such file. Throws InputError for a malformed
/// line.
const std::vector<EvidenceLine>& read_lines(const std::filesystem::path&);
void write_lines(const std::filesystem::path&, const std::vector<EvidenceLine>&);

/// The containers of a folder, by name, without parts.jsonl.
std::vector<std::string> containers(const std::filesystem::path& folder);

/// The name of the array of which each line holds one element: "steps", "problems" or "rows".
/// Throws InputError if the document has none of them.
std::string array_of(const nlohmann::json& document);

/// The contents of a document such as FOLDER/NAME.json, from a container; empty if no line has that
/// name.
std::string contained_document(const std::filesystem::path&);

/// Whether a container has lines of that name.
bool is_contained(const std::filesystem::path&);

/// The documents of a folder with a given prefix and `suffix` (".json", ".ncu.csv"), without the
/// suffix: both files and documents in containers.
std::vector<std::string> document_names(const std::filesystem::path& folder,
                                        const std::string& begin, const std::string& suffix);

/// `path`, or if there is no such file, the document it abbreviates: FOLDER/NAME stands for
/// FOLDER/NAME.json or FOLDER/NAME.ncu.csv. For CHAPTER.counters.csv the export of `step`; throws
/// InputError if no step is given.
std::filesystem::path named_document(const std::filesystem::path& path,
                                     const std::string& step = "");

}  // namespace attn::report
