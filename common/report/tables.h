/// \file
/// Tables in Markdown pages, generated from the evidence in docs/reports.
///
/// A page requests a table with two markers; the text between them is replaced:
///
///     <!-- table: steps 01_naive.forward_n4096 -->
///     ...
///     <!-- end table -->
///
/// | kind | arguments | rows |
/// |---|---|---|
/// | steps | one result file | a step: time, rate, share of the roof, modelled bytes |
/// | ladder | result files | a step, as a tree: time, ratio to its parent, a counter that changed |
/// | tree | a chapter | its steps as the tree of the `parent` fields in their headers |
/// | phases | one result file | a phase of a step: measured, predicted |
/// | lengths | result files | a step, a column per length: TFLOP/s, or GB/s |
/// | problems | result files of one operation | a problem and step: time, rate |
/// | memory | result files, of any chapters | a length, a column per step: the memory it needs |
/// | peers | one file of peers.py | a problem: times of the peers, and speedup of a step |
/// | ratios | files of peers.py | a problem: the step's rate, its ratio to each peer |
/// | means | files of peers.py | a head dim and mask: geometric mean over all lengths |
/// | others | one file others.* | a problem: times of peers and steps, and ratios |
/// | headline | LABEL=FILE:STEP:PEER,PEER ... | a step and peer: mean, least, most, problems |
/// | counters | a chapter | a kernel of a step: its ncu counters |
/// | traffic | a result file, its chapter, STEP,STEP | a step: bytes of L2 and HBM |
/// | chapters | see chapters_table | a chapter: times of an early and a late step |
/// | diff | two exports, maybe a kernel | a counter that changed by more than 1 % |
/// | state | all | a chapter and part: whether its files match the current kernels |
///
/// step=NAME,NAME and peers=NAME,NAME select rows (ratios, means, others; for others also ratios=).
///
/// Operations that count no arithmetic have their rate in GB/s: the modelled bytes of the step over
/// its time. A name is that of a file, NAME.json or NAME.ncu.csv, or of lines in a container
/// (containers.h). The state of its lines (evidence.h) is added below each table. A name that ends
/// in * matches all names with that prefix (lengths, problems, memory). A headline must name the
/// strongest peer of its file: the one with the lowest mean. Files of another GPU are ../h100/NAME.
/// If a name does not exist yet, the table is one line: "not measured yet".
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace attn::report {

/// `page` with every table regenerated from the files in `reports`. `name` is its path, for
/// messages and for ladders, which read the step files next to it. `missing`, if given, gets a line
/// for each table that is not measured yet. Throws InputError, with one line, for an unknown kind,
/// a damaged file or an unclosed marker.
std::string fill_tables(const std::string& page, const std::string& name,
                        const std::filesystem::path& reports,
                        std::vector<std::string>* missing = nullptr);

}  // namespace attn::report
