/// \file
/// Two steps beside each other: which is faster, and which counters moved.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "report/profile.h"

namespace attn::report {

enum class Judgement { fast, slow, same, ambiguous };
std::string_view name(Judgement);

/// Of B against A. With quartiles on both sides: `same` if the medians differ by at most 1 %, else
/// `fast` or `slow` if the quartile ranges are apart, else `ambiguous`. A single time on either
/// side: `ambiguous` below 3 %. `q1` = `q3` = `median` and `count` = 1 stand for a single time.
Judgement judge(const Time& a, const Time& b);

/// One counter on both sides; nothing where a side lacks it.
struct Moved {
  const Counter* counter = nullptr;
  std::optional<double> a, b;
  double factor = 1;  ///< b / a, with both raised to the counter's floor
  double weight = 1;  ///< of sectors a load (store): the share of loads (stores) in all sectors
  double rank = 0;    ///< |ln factor| x weight
  bool width = false;  ///< sectors a request that moved without the sectors: wider accesses
};

/// Counters of both sides, causes (ratios) first, then counts, then rates; within each what moved
/// most first. Without the time, which is the effect, and without what neither side has.
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
  std::vector<std::string> notes;  ///< what the files do not say, what was forced
  std::vector<Moved> total;        ///< of the whole step
  std::vector<KernelPair> kernels;
  std::vector<std::string> unmatched;  ///< "A: scores_kernel"
};

/// Compares two steps. Throws InputError where one has no time, and, unless forced, where the GPUs,
/// element types, problems or clocks differ.
Diff compare(StepData a, StepData b, bool force);

/// Which steps of two files are compared: one with one, else those of the same name. Throws
/// InputError where there are none.
std::vector<Diff> compare_files(std::vector<StepData> a, std::vector<StepData> b, bool force);

/// What moved most, in one line; empty where no counter in both moved by 10 %.
std::string headline(const Diff&);
/// A factor for people: "x 0.55", "from 0", "n/a".
std::string factor_text(const Moved&);
/// "better", "worse"; empty for a counter that is neither. Sectors a request that moved while the
/// sectors did not move along are "wider" or "narrower" accesses: no more and no less is moved.
std::string better_text(const Moved&);
/// More than 1 % of a change, or a side without it.
bool moved(const Moved&);
/// "B takes 0.555 of A's time: 285.582 ms -> 158.621 ms", or with other names for A and B.
std::string times_text(const Diff&, const std::string& a = "A", const std::string& b = "B");
/// All of it, for a terminal.
std::string text(const Diff&);

}  // namespace attn::report
