/// \file
/// Tables in Markdown pages, generated from the evidence in docs/reports.
///
/// A page says what it wants between two markers, and everything between them is replaced:
///
///     <!-- table: steps 01_naive.forward_n4096 -->
///     ...
///     <!-- end table -->
///
/// | kind | arguments | rows |
/// |---|---|---|
/// | steps | one result file | a step: time, rate, share of the roof, modelled bytes |
/// | ladder | result files | a step, as a tree: time, ratio to its parent, a counter that moved |
/// | tree | a chapter | its steps as the tree that `parent` in their headers makes |
/// | phases | one result file | a phase of a step: measured, predicted |
/// | lengths | result files | a step, a column for each length or columns: TFLOP/s, or GB/s |
/// | problems | result files of one operation | a problem and step: time, rate |
/// | memory | result files, of any chapters | a length, a column a step: the memory that it needs |
/// | peers | one file of peers.py | a problem: times of the peers, and how much faster a step is |
/// | ratios | files of peers.py | a problem: the step's rate, its ratio to each peer |
/// | means | files of peers.py | a head dim and mask: geometric mean over all lengths |
/// | others | one file others.* | a problem: times of peers and steps, and ratios |
/// | headline | LABEL=FILE:STEP:PEER,PEER ... | a step and peer: mean, least, most, problems |
/// | counters | a chapter | a kernel of a step: what ncu counted |
/// | traffic | a result file, its chapter, STEP,STEP | a step: bytes of L2 and HBM |
/// | chapters | see chapters_table | a chapter: times of its first and its last step |
/// | diff | two exports, maybe a kernel | a counter that moved by more than 1 % |
/// | state | all | a chapter and part: are its files of the kernels as they are? |
///
/// step=NAME,NAME and peers=NAME,NAME choose (ratios, means, others; for others also ratios=).
///
/// Operations that count no arithmetic have their rate in GB/s: the bytes that the step's model
/// counts, over time. A name is that of a file, NAME.json or NAME.ncu.csv, or of lines in a
/// container (containers.h). Below each table stands the state of its lines (evidence.h). A name
/// that ends in * stands for all that begin so (lengths, problems, memory). A headline must name
/// the strongest peer of its file: the one with the lowest mean. Files of another card are
/// ../h100/NAME. Where a name is not there yet, the table is one line: "not measured yet".
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace attn::report {

/// `page` with every table generated anew from the files in `reports`. `name` is its path: it
/// stands in messages, and ladders read the step files next to it. `missing`, if given, gets a line
/// for each table that is not measured yet. Throws InputError, in one line, for an unknown kind, a
/// damaged file or an unclosed marker.
std::string fill_tables(const std::string& page, const std::string& name,
                        const std::filesystem::path& reports,
                        std::vector<std::string>* missing = nullptr);

}  // namespace attn::report
