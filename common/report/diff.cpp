#include "report/diff.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "attn/error.h"

namespace attn::report {
namespace {

constexpr double kSame = 0.01;  // medians this close are equal
constexpr double kTold = 1.1;  // smaller changes are no headline
constexpr double kSingleNoise = 0.03;  // difference between two single times that is noise

// Weights load counters by their share of the traffic: 1 % of the sectors explains no time.
double weight_of(std::string_view key, const KernelCounters& a, const KernelCounters& b) {
  const bool loads = key.starts_with("ld_sectors"), stores = key.starts_with("st_sectors");
  if (!loads && !stores) return 1;
  double weight = 0;
  for (const KernelCounters* k : {&a, &b}) {
    const auto ld = k->value("ld_sectors"), st = k->value("st_sectors");
    if (!ld || !st || *ld + *st == 0) return 1;
    weight = std::max(weight, (loads ? *ld : *st) / (*ld + *st));
  }
  return weight;
}

// Whether the sectors per request changed because of the access width: the number of requests
// changed, but the sectors did not change in the same direction. Stores of 16 bytes per lane touch
// 16 sectors per request, as they should.
bool by_width(std::string_view key, double factor, const KernelCounters& a,
              const KernelCounters& b) {
  if (!key.ends_with("_sectors_per_request")) return false;
  const std::string sectors = fmt::format("{}_sectors", key.substr(0, 2));
  const auto before = a.value(sectors), after = b.value(sectors);
  if (!before || !after || *before <= 0 || *after <= 0) return false;
  const double moved = std::log(*after / *before);
  return std::abs(moved) <= kSame || (moved > 0) != (factor > 1);
}

// Pairs kernels by name if the name is unique, the others by position if their numbers agree.
void pair_kernels(Diff& d) {
  const auto count = [](const std::vector<KernelCounters>& all, const std::string& name) {
    return std::count_if(all.begin(), all.end(), [&](auto& k) { return k.name == name; });
  };
  std::vector<const KernelCounters*> partner(d.a.kernels.size());
  std::vector<bool> taken(d.b.kernels.size());
  for (std::size_t i = 0; i < d.a.kernels.size(); ++i)
    for (std::size_t j = 0; j < d.b.kernels.size(); ++j) {
      const std::string& name = d.a.kernels[i].name;
      if (name != d.b.kernels[j].name || count(d.a.kernels, name) != 1 ||
          count(d.b.kernels, name) != 1)
        continue;
      partner[i] = &d.b.kernels[j];
      taken[j] = true;
    }
  if (d.a.kernels.size() == d.b.kernels.size()) {
    std::size_t next = 0;
    for (auto& p : partner) {
      if (p) continue;
      while (taken[next]) ++next;
      p = &d.b.kernels[next];
      taken[next] = true;
    }
  }
  for (std::size_t i = 0; i < partner.size(); ++i) {
    const KernelCounters& a = d.a.kernels[i];
    if (!partner[i]) {
      d.unmatched.push_back("A: " + a.name);
      continue;
    }
    const KernelCounters& b = *partner[i];
    d.kernels.push_back({a.name == b.name ? a.name : fmt::format("{} / {}", a.name, b.name),
                         a.value("time_s"), b.value("time_s"), rank_counters(a, b)});
  }
  for (std::size_t j = 0; j < taken.size(); ++j)
    if (!taken[j]) d.unmatched.push_back("B: " + d.b.kernels[j].name);
}

// Refuses two files that differ in `what`; adds a note if one of them lacks it.
void must_agree(Diff& d, bool force, std::string_view what, const std::string& a,
                const std::string& b) {
  if (a.empty() || b.empty()) {
    d.notes.push_back(fmt::format("{}: not stated by {}", what,
                                  !a.empty()   ? "B"
                                  : !b.empty() ? "A"
                                               : "either side"));
  } else if (a != b) {
    if (!force)
      throw InputError(fmt::format("{}: another {} than {}: '{}', not '{}' (--force compares them)",
                                   d.b.file, what, d.a.file, b, a));
    d.notes.push_back(fmt::format("FORCED: another {}: A '{}', B '{}'", what, a, b));
  }
}

Time single(double s) { return {s, s, s, 1}; }

// Prefers times that were taken in the same way on both sides.
void choose_times(Diff& d) {
  const auto ncu_a = d.a.ncu_s(), ncu_b = d.b.ncu_s();
  if (d.a.time && d.b.time) {
    d.time_a = *d.a.time, d.time_b = *d.b.time;
    d.time_source = "medians of the chapter program";
  } else if (ncu_a && ncu_b) {
    d.time_a = single(*ncu_a), d.time_b = single(*ncu_b);
    d.time_source = fmt::format("sums of launches under ncu: {} of A, {} of B",
                                d.a.kernels.size(), d.b.kernels.size());
  } else {
    for (const auto& [side, ncu] : {std::pair(&d.a, ncu_a), std::pair(&d.b, ncu_b)})
      if (!side->time && !ncu)
        throw InputError(fmt::format("{}: {} has no time: run it on a GPU with --time", side->file,
                                     side->step.empty() ? "the step" : side->step));
    d.time_a = d.a.time ? *d.a.time : single(*ncu_a);
    d.time_b = d.b.time ? *d.b.time : single(*ncu_b);
    d.time_source = d.a.time ? "A's median of the chapter program, B's single launches under ncu"
                             : "A's single launches under ncu, B's median of the chapter program";
    d.notes.push_back("the two times were taken in different ways");
  }
}

bool single_time(const Time& t) { return t.count < 2; }

// Explains the meaning of a counter once, where it is listed first.
class Tables {
 public:
  std::string table(const std::vector<Moved>& counters) {
    std::string rows;
    std::vector<std::string_view> still;
    for (const Moved& m : counters)
      if (moved(m))
        rows += row(m);
      else
        still.push_back(m.counter->label);
    if (!rows.empty())
      rows = fmt::format("  {:<24}{:>14}{:>14}   {}\n", "counter", "A", "B", "B / A") + rows;
    if (!still.empty()) rows += fmt::format("  within 1 %: {}\n", fmt::join(still, "; "));
    return rows;
  }

 private:
  std::string row(const Moved& m) {
    const bool first =
        std::find(explained_.begin(), explained_.end(), m.counter) == explained_.end();
    if (first) explained_.push_back(m.counter);
    std::string line = fmt::format("  {:<24}{:>14}{:>14}   {:<9}{:<9}{}", m.counter->label,
                                   value_text(*m.counter, m.a), value_text(*m.counter, m.b),
                                   factor_text(m), better_text(m), first ? m.counter->meaning : "");
    line.erase(line.find_last_not_of(' ') + 1);
    return line + "\n";
  }
  std::vector<const Counter*> explained_;
};

}  // namespace

std::string_view name(Judgement j) {
  switch (j) {
    case Judgement::fast: return "FAST";
    case Judgement::slow: return "SLOW";
    case Judgement::same: return "SAME";
    case Judgement::ambiguous: return "AMBIGUOUS";
  }
  return "?";
}

Judgement judge(const Time& a, const Time& b) {
  const double factor = b.median / a.median;
  if (single_time(a) || single_time(b)) {
    if (std::abs(factor - 1) < kSingleNoise) return Judgement::ambiguous;
  } else if (std::abs(factor - 1) <= kSame) {
    return Judgement::same;
  }
  if (b.q3 < a.q1) return Judgement::fast;
  if (b.q1 > a.q3) return Judgement::slow;
  return Judgement::ambiguous;
}

bool moved(const Moved& m) { return !m.a || !m.b || std::abs(std::log(m.factor)) > kSame; }

std::vector<Moved> rank_counters(const KernelCounters& a, const KernelCounters& b) {
  std::vector<Moved> all;
  for (const Counter& c : all_counters()) {
    if (c.key == "time_s") continue;
    Moved m{&c, a.value(c.key), b.value(c.key)};
    if (!m.a && !m.b) continue;
    if (m.a && m.b) {
      m.factor = std::max(*m.b, c.floor) / std::max(*m.a, c.floor);
      m.weight = weight_of(c.key, a, b);
      m.rank = std::abs(std::log(m.factor)) * m.weight;
      m.width = by_width(c.key, m.factor, a, b);
    }
    all.push_back(m);
  }
  std::stable_sort(all.begin(), all.end(), [](const Moved& x, const Moved& y) {
    return x.counter->kind != y.counter->kind ? x.counter->kind < y.counter->kind : x.rank > y.rank;
  });
  return all;
}

Diff compare(StepData a, StepData b, bool force) {
  Diff d;
  d.a = std::move(a), d.b = std::move(b);
  // A name is more specific than a compute capability; an export may state only the latter.
  if (d.a.gpu.empty() || d.b.gpu.empty())
    must_agree(d, force, "compute capability", d.a.compute_capability, d.b.compute_capability);
  else
    must_agree(d, force, "GPU", d.a.gpu, d.b.gpu);
  must_agree(d, force, "element type", d.a.dtype, d.b.dtype);
  must_agree(d, force, "problem", d.a.problem, d.b.problem);
  // A chapter program does not control the clocks; only ncu may lock them.
  if (!d.a.kernels.empty() && !d.b.kernels.empty())
    must_agree(d, force, "clock control", d.a.clocks, d.b.clocks);
  else if (d.a.clocks == "base" || d.b.clocks == "base")
    must_agree(d, force, "clock control", d.a.clocks.empty() ? "none" : d.a.clocks,
               d.b.clocks.empty() ? "none" : d.b.clocks);
  choose_times(d);
  d.judgement = judge(d.time_a, d.time_b);
  if (!d.a.kernels.empty() && !d.b.kernels.empty()) {
    d.total = rank_counters(step_total(d.a.kernels), step_total(d.b.kernels));
    pair_kernels(d);
    // An unmatched kernel may be one the step no longer needs, or one missing from the export.
    if (!d.unmatched.empty())
      d.notes.push_back(fmt::format("without a partner: {}; the times are the whole steps' only if "
                                    "both exports are complete",
                                    fmt::join(d.unmatched, ", ")));
    for (const auto& [side, data] : {std::pair("A", &d.a), std::pair("B", &d.b)})
      if (data->processes > 1)
        d.notes.push_back(fmt::format("{} sums launches of {} processes", side, data->processes));
  } else {
    const char* lacking = d.a.kernels.empty() ? d.b.kernels.empty() ? "A and B" : "A" : "B";
    d.notes.push_back(
        fmt::format("counters: n/a in {}, which is no profile and no ncu export", lacking));
  }
  return d;
}

std::vector<Diff> compare_files(std::vector<StepData> a, std::vector<StepData> b, bool force) {
  std::vector<Diff> all;
  if (a.size() == 1 && b.size() == 1) {
    all.push_back(compare(std::move(a[0]), std::move(b[0]), force));
    return all;
  }
  for (const StepData& x : a)
    for (const StepData& y : b)
      // Steps without GPU times cannot be compared; it is no error if both files lack the step's
      // time.
      if (x.step == y.step && (x.time || x.ncu_s()) && (y.time || y.ncu_s()))
        all.push_back(compare(x, y, force));
  if (!all.empty()) return all;
  std::vector<std::string> names_a, names_b;
  for (const StepData& x : a) names_a.push_back(x.step);
  for (const StepData& y : b) names_b.push_back(y.step);
  throw InputError(
      fmt::format("{} and {}: no step that both timed (A: {}; B: {}); --step-a and --step-b pick "
                  "two",
                  a.at(0).file, b.at(0).file, fmt::join(names_a, ", "), fmt::join(names_b, ", ")));
}

std::string factor_text(const Moved& m) {
  if (!m.a || !m.b) return "n/a";
  if (*m.a == 0 && *m.b != 0) return "from 0";
  if (*m.a != 0 && *m.b == 0) return "to 0";
  if (m.factor >= 0.995 && m.factor < 1.005) return "x 1.00";
  return fmt::format("x {:.3g}", m.factor);
}

std::string better_text(const Moved& m) {
  if (m.counter->better == Better::neither || !m.a || !m.b || !moved(m)) return "";
  if (m.width) return m.factor > 1 ? "wider" : "narrower";
  return (m.factor < 1) == (m.counter->better == Better::lower) ? "better" : "worse";
}

std::string headline(const Diff& d) {
  for (const Moved& m : d.total)
    if (m.a && m.b && std::abs(std::log(m.factor)) >= std::log(kTold))
      return fmt::format("what moved most: {}, {} -> {} ({}): {}", m.counter->label,
                         value_text(*m.counter, m.a), value_text(*m.counter, m.b), factor_text(m),
                         m.counter->meaning);
  return "";
}

std::string times_text(const Diff& d, const std::string& a, const std::string& b) {
  const Counter& time = *find_counter("time_s");
  return fmt::format("{} takes {:.3g} of {}'s time: {} -> {}", b, d.time_b.median / d.time_a.median,
                     a, value_text(time, d.time_a.median), value_text(time, d.time_b.median));
}

std::string text(const Diff& d) {
  const Counter& time = *find_counter("time_s");
  const auto quartiles = [&](const Time& t) {
    return single_time(t) ? std::string("no quartiles")
                          : fmt::format("quartiles {} .. {} of {}", value_text(time, t.q1),
                                        value_text(time, t.q3), t.count);
  };
  std::string out = fmt::format("A: {}\nB: {}\n", d.a.title(), d.b.title());
  for (const auto& [what, a, b] :
       {std::tuple("GPU", &d.a.gpu, &d.b.gpu), std::tuple("problem", &d.a.problem, &d.b.problem)})
    if (!a->empty() && *a == *b) out += fmt::format("{}: {}\n", what, *a);
  for (const std::string& note : d.notes) out += fmt::format("note: {}\n", note);
  out += fmt::format("\n{}: {} ({})\n", name(d.judgement), times_text(d), d.time_source);
  out += fmt::format("  A: {}\n  B: {}\n", quartiles(d.time_a), quartiles(d.time_b));
  if (d.total.empty()) return out;
  if (const std::string most = headline(d); !most.empty()) out += "\n" + most + "\n";
  Tables tables;
  out += "\nthe whole step\n" + tables.table(d.total);
  std::vector<std::string_view> absent;
  for (const Counter& c : all_counters())
    if (c.key != "time_s" && std::none_of(d.total.begin(), d.total.end(),
                                          [&](const Moved& m) { return m.counter == &c; }))
      absent.push_back(c.label);
  if (!absent.empty()) out += fmt::format("  n/a on both sides: {}\n", fmt::join(absent, "; "));
  // Kernels with the largest change in time come first: the cause is there.
  std::vector<const KernelPair*> order;
  for (const KernelPair& k : d.kernels) order.push_back(&k);
  const auto change = [](const KernelPair& k) {
    return k.a_s && k.b_s ? std::abs(*k.b_s - *k.a_s) : 0.0;
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](auto* x, auto* y) { return change(*x) > change(*y); });
  for (const KernelPair* k : order)
    out += fmt::format("\n{}: {} -> {}\n{}", k->name, value_text(time, k->a_s),
                       value_text(time, k->b_s), tables.table(k->counters));
  return out;
}

}  // namespace attn::report
