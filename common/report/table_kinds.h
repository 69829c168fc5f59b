/// \file
/// The kinds of tables of tables.h, one function each: Markdown from files in a folder of reports.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace attn::report {

using Words = std::vector<std::string>;

// From results of chapter programs: result_tables.cpp.
std::string steps_table(const std::filesystem::path&);
std::string phases_table(const std::filesystem::path&);
std::string lengths_table(const std::filesystem::path& folder, Words names);
std::string problems_table(const std::filesystem::path& folder, const Words& names);
std::string accuracy_table(const std::filesystem::path& folder, const Words& names);
/// Words like "01_naive|Paper|A_sentence=DOCUMENT:FIRST:LAST", underscores for blanks: a row per
/// chapter with the times of an early and a late step on one problem.
std::string chapters_table(const std::filesystem::path& folder, const Words& specs);
/// The names of their documents, without duplicates.
Words chapter_files(const Words& specs);
/// "step=A,B" and a word per column, "Its_title=VALUE:DOCUMENT,DOCUMENT": a row per step, with its
/// time or rate from the first of these documents that has it. VALUE: ms, us, or the phase whose
/// TFLOP/s are meant.
std::string compare_table(const std::filesystem::path& folder, const Words& specs);
/// The names of their documents, without duplicates.
Words compared_files(const Words& specs);
std::string memory_table(const std::filesystem::path& folder, const Words& names);

// From results, exports and the step files of the chapter of `page`: ladder.cpp.
std::string ladder_table(const std::filesystem::path& folder, const Words& names,
                         const std::filesystem::path& page);
std::string tree_figure(const std::string& chapter, const std::filesystem::path& page);

// From documents of peers.py: peer_tables.cpp.
std::string peers_table(const std::filesystem::path&);
std::string ratios_table(const std::filesystem::path& folder, const Words& names);
std::string means_table(const std::filesystem::path& folder, const Words& names);

// From documents of peers.py and third parties (others.*.json): headlines.cpp.
std::string others_table(const std::filesystem::path& folder, const Words& names);
std::string headline_table(const std::filesystem::path& folder, const Words& specs);
/// The names of the files in its specs, without duplicates.
Words headline_files(const Words& specs);

// From ncu exports: counter_tables.cpp.
std::string counters_table(const std::filesystem::path& folder, const std::string& chapter);
std::string diff_table(const std::filesystem::path& folder, const Words& names);
std::string traffic_table(const std::filesystem::path& folder, const Words& names);

}  // namespace attn::report
