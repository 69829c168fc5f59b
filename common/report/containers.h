/// \file
/// Containers: many documents of a folder of measurements in a few files, a line for each step of
/// each problem.
///
/// | file | a line is | the document of all lines of one name |
/// |---|---|---|
/// | CHAPTER.OPERATION.jsonl | a step of a problem | what a chapter program writes with --json |
/// | peers.NAME.jsonl, others.NAME.jsonl | a problem | what peers.py writes |
/// | CHAPTER.counters.csv | rows of ncu below a line "# {...}" | an export of ncu |
///
/// A line of JSON is a document whose array has one element, and what only evidence has: "name",
/// "options", "keys", "measured" and, over all before it, a checksum "sum". Whoever reads
/// FOLDER/NAME.json or FOLDER/NAME.ncu.csv, where there is no such file, reads the document that
/// the lines of that name make: as it was before they were lines.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace attn::report {

/// A line of a container, or of parts.jsonl.
struct EvidenceLine {
  std::string name;  ///< of its document: "04_flash_v2.forward_gqa_n4096", "01_naive.v1_global"
  std::string text;  ///< without the line break; of counters without "# "
  std::string rows;  ///< of counters: the rows of ncu, each with the step in front

  nlohmann::json json() const;
  /// Is its checksum that of the line?
  bool intact() const;
};

/// `line` with its name first and a checksum at its end.
EvidenceLine make_line(const std::string& name, const nlohmann::json& line,
                       const std::string& rows = "");

/// The lines of a container; none where there is no such file. Throws InputError for a line that is
/// no such line.
const std::vector<EvidenceLine>& read_lines(const std::filesystem::path&);
void write_lines(const std::filesystem::path&, const std::vector<EvidenceLine>&);

/// The containers of a folder, by name; parts.jsonl is none.
std::vector<std::string> containers(const std::filesystem::path& folder);

/// The name of the array that a document has an element of in each line: "steps", "problems",
/// "rows". Throws InputError where it has none of them.
std::string array_of(const nlohmann::json& document);

/// What a file like FOLDER/NAME.json would hold; empty where no line has that name.
std::string contained_document(const std::filesystem::path&);

/// Is there a line of that name?
bool is_contained(const std::filesystem::path&);

/// The documents of a folder whose names begin so and end in `suffix` (".json", ".ncu.csv"),
/// without the suffix: files of their own, and those in containers.
std::vector<std::string> document_names(const std::filesystem::path& folder,
                                        const std::string& begin, const std::string& suffix);

/// `path`, or where there is no such file the document that is meant: FOLDER/NAME stands for
/// FOLDER/NAME.json, or for FOLDER/NAME.ncu.csv. Of CHAPTER.counters.csv the export of `step`;
/// throws InputError where none is named.
std::filesystem::path named_document(const std::filesystem::path& path,
                                     const std::string& step = "");

}  // namespace attn::report
