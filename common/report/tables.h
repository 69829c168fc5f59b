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
/// | phases | one result file | a phase of a step: measured, predicted |
/// | lengths | result files | a step, a column for each file's seqlen_q: TFLOP/s |
/// | peers | one file of peers.py | a problem: times of the peers, and how much faster a step is |
/// | counters | a chapter | a kernel of a step: what ncu counted |
/// | diff | two exports, maybe a kernel | a counter that moved by more than 1 % |
#pragma once

#include <filesystem>
#include <string>

namespace attn::report {

/// `page` with every table generated anew from the files in `reports`. `name` stands in messages.
/// Throws InputError, in one line, for an unknown kind, a missing file or an unclosed marker.
std::string fill_tables(const std::string& page, const std::string& name,
                        const std::filesystem::path& reports);

}  // namespace attn::report
