/// \file
/// Comparison of two steps: which is faster, and which counters changed.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "report/profile.h"

namespace attn::report {

enum class Judgement { fast, slow, same, ambiguous };
std::string_view name(Judgement);

/// Judges B against A. With quartiles on both sides: `same` if the medians differ by at most 1 %,
/// else `fast` or `slow` if the quartile ranges do not overlap, else `ambiguous`. With a single
/// time on either side: `ambiguous` below 3 %. A single time has `q1` = `q3` = `median` and `count`
/// = 1.
Judgement judge(const Time& a, const Time& b);

/// A counter on both sides; empty if a side lacks it.
struct Moved {
  const Counter* counter = nullptr;
  std::optional<double> a, b;
  double factor = 1;  ///< b / a, with both raised to the counter's floor
  double weight = 1;  ///< for load (store) sectors: the share of loads (stores) in all sectors
  double rank = 0;    ///< |ln factor| x weight
  bool width = false;  ///< sectors per request changed, sectors did not: access width
};

/// The counters of both sides: causes (ratios) first, then counts, then rates, each sorted by
/// change. Omits the time, which is the effect, and counters missing on both sides.
std::vector<Moved> rank_counters(const KernelCounters& a, const KernelCounters& b);

struct KernelPair {
  std::string name;  ///< "scores_kernel", or "scores_kernel / cuBLAS"
  std::optional<double> a_s, b_s;
  std::vector<Moved> counters;
};

struct Diff {
  StepData a, b;
  Judgement judgement = Judgement::ambiguous;
  Time time_a, time_b;
  std::string time_source;         ///< how both times were taken
  std::vector<std::string> notes;  ///< what the files lack, what was forced
  std::vector<Moved> total;        ///< of the whole step
  std::vector<KernelPair> kernels;
  std::vector<std::string> unmatched;  ///< "A: scores_kernel"
};

/// Compares two steps. Throws InputError if one has no time and, unless forced, if the GPUs,
/// element types, problems or clocks differ.
Diff compare(StepData a, StepData b, bool force);

/// Selects the steps of two files to compare: one with one, else those with equal names. Throws
/// InputError if there are none.
std::vector<Diff> compare_files(std::vector<StepData> a, std::vector<StepData> b, bool force);

/// The largest change in one line; empty if no counter of both sides changed by 10 %.
std::string headline(const Diff&);
/// A formatted factor: "x 0.55", "from 0", "n/a".
std::string factor_text(const Moved&);
/// "better" or "worse"; empty for a counter that is neither. If sectors per request changed but the
/// sectors did not, accesses are "wider" or "narrower": the traffic is the same.
std::string better_text(const Moved&);
/// Whether it changed by more than 1 %, or is missing on one side.
bool moved(const Moved&);
/// "B takes 0.555 of A's time: 285.582 ms -> 158.621 ms", or with other names for A and B.
std::string times_text(const Diff&, const std::string& a = "A", const std::string& b = "B");
/// The whole comparison, for a terminal.
std::string text(const Diff&);

}  // namespace attn::report
