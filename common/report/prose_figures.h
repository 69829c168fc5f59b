/// \file
/// Figures in the prose of pages: a list of passages whose figures are computed from the reports,
/// so that a new measurement finds the sentences that it makes untrue.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace attn::report {

/// What a page of `list` does not say: "PAGE: must say: TEXT" for each such passage, with what it
/// says instead if the words before the first figure are there; and how many passages there are.
struct ProseFigures {
  std::vector<std::string> missing;
  int passages = 0;
};
/// `list` has the names of pages, relative to `root`, and below each its passages, indented, with
/// fields in braces for the figures. A page is compared without regard to line breaks.
///
///     {ms DOCUMENT STEP [PHASE]}  {us ...}  {tflops ...}  {gbs ...}  median of a launch or phase
///     {faster DOCUMENT STEP DOCUMENT STEP [PHASE]}   how many times as fast the second is
///     {less DOCUMENT STEP DOCUMENT STEP [PHASE]}     % less time of the second; {more ...};
///                                                    {saved ...}: us less
///     {pace DOCUMENT STEP DOCUMENT STEP [PHASE]}     the first one's FLOP/s in % of the second's
///     {share DOCUMENT STEP}  {roof DOCUMENT NAME}    % of its roof, or of the read roof if it is
///                                                    rated by use; a roof in TB/s or TFLOP/s
///     {mean DOCUMENT STEP PEER [PROBLEM...]}         of peers: geometric mean of the ratios of all
///                                                    problems with these words ("-causal": not)
///     {least ...}  {most ...}  {points ...}          the extremes; the number of problems
///
/// PHASE may be a sum, "pool+choose". ".N" after the first word: N decimals. A document may be
/// written with its chapter's number, "05.decode_b1_n8192", "peers.05.fa3"; a step by its number,
/// "v13"; "_" stands for a blank before "graph" in PEER. Throws InputError for what cannot be
/// computed, with the line of `list`.
ProseFigures check_prose(const std::filesystem::path& list, const std::filesystem::path& root,
                         const std::filesystem::path& reports);

}  // namespace attn::report
