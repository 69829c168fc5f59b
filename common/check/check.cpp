#include "check/check.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "check/inputs.h"

namespace attn {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Half a unit in the last place at the magnitude of x: the error of the best possible rounding.
double half_place(DType dtype, double x) {
  const int digits = dtype == DType::bf16 ? 8 : dtype == DType::fp16 ? 11 : 24;
  int exponent = 0;
  std::frexp(x, &exponent);  // x = 0.5 to 1 times 2^exponent
  return x == 0 ? 0 : std::ldexp(0.5, exponent - digits);
}

// Integers are right or wrong; the error of a row is the share of its columns that are wrong.
Verdict check_numbers(const HostTensor& out, const Expected& e) {
  Verdict v;
  v.tensor = e.spec.name;
  v.rows_checked = static_cast<int64_t>(e.rows.size());
  const int64_t columns = e.spec.columns();
  const int64_t* expected = e.numbers.data();
  int64_t never_written = 0;
  std::string first_never_written;
  for (const auto& [b, h, i] : e.rows) {
    const int64_t* got = out.numbers_of_row(b, h, i);
    int64_t wrong = 0;
    for (int64_t c = 0; c < columns; ++c) {
      v.wrong.push_back(got[c] != expected[c]);
      if (got[c] == expected[c]) continue;
      ++wrong;
      const std::string place =
          fmt::format("{} (b {}, h {}, row {}, column {})", v.tensor, b, h, i, c);
      if (v.pass) v.failure = fmt::format("{}: expected {}, got {}", place, expected[c], got[c]);
      if (unwritten(e.spec.dtype, got[c]) && never_written++ == 0) first_never_written = place;
      v.pass = false;
    }
    if (const double share = static_cast<double>(wrong) / static_cast<double>(columns);
        share > v.worst_row_error)
      v.worst_row_error = share, v.b = b, v.h = h, v.row = i;
    expected += columns;
  }
  v.max_error = v.worst_row_error;
  if (never_written > 0)
    v.failure = fmt::format("{} was never written; {} of {} elements were not", first_never_written,
                            never_written, v.wrong.size());
  if (v.pass) v.wrong.clear();
  return v;
}

// Whether `got` is correct where `ref` or `got` is not finite.
bool same_not_finite(double ref, float got) {
  return std::isnan(ref) ? std::isnan(got) && !unwritten(got)
                         : std::isinf(ref) && ref == double{got};
}

// Whether a NaN comes from poisoned memory (all bits 1). x86 arithmetic keeps the payload, and
// copies keep at least 16 bits of it. A NaN that x86 generates has only the highest fraction bit
// set, and a NaN that a GPU generates is positive.
bool from_poison(float nan) { return std::bit_cast<std::uint32_t>(nan) >> 16 == 0xFFFF; }

// The origin of a NaN: x86 arithmetic keeps the payload of the poison that caused it.
std::string origin(float nan) {
  if (from_poison(nan)) return "read from uninitialised memory";
  const auto bits = std::bit_cast<std::uint32_t>(nan);
  const std::uint32_t code = bits >> 16 & 63;
  if (code == 0 || code > kNoSequenceCode || (bits & 0xFFFF) != 0) return "computed";
  if (code == kUnwrittenCode) return "read from an output that was never written";
  if (code == kNoSequenceCode) return "read from a page that no sequence uses";
  if (code == kAnySequenceCode) return "read past the last key of its sequence";
  return fmt::format("read past the last key of sequence {}", code - 1);
}

// Compared elements of one kind: their number, and the first.
struct Found {
  int64_t count = 0;
  std::size_t row = 0, column = 0;
  void add(std::size_t r, std::size_t c) {
    if (count++ == 0) row = r, column = c;
  }
};

// The elements to report as wrong: those that are not finite where they should be, and those that
// break rule 2 on their own. In a row that breaks rule 1, also the elements with more than four
// times their share of the row's bound, or if there are none, with more than their share.
std::vector<bool> wrong_elements(const HostTensor& out, const Expected& e,
                                 const std::vector<double>& allowed, double max_bound) {
  const auto columns = static_cast<std::size_t>(e.spec.columns());
  std::vector<bool> wrong(e.rows.size() * columns);
  for (std::size_t r = 0; r < e.rows.size(); ++r) {
    const auto [b, h, i] = e.rows[r];
    const float* got = out.row(b, h, i);
    double error2 = 0, largest = 0;
    for (std::size_t c = 0; c < columns; ++c) {
      const double error = std::abs(got[c] - e.reference[r * columns + c]);
      if (std::isfinite(error)) error2 += error * error, largest = std::max(largest, error);
    }
    const double share = allowed[r] / std::sqrt(static_cast<double>(columns));
    const double least = std::sqrt(error2) <= allowed[r] ? kInfinity
                         : largest > 4 * share           ? 4 * share
                                                         : share;
    for (std::size_t c = 0; c < columns; ++c) {
      const double ref = e.reference[r * columns + c], error = std::abs(got[c] - ref);
      wrong[r * columns + c] = same_not_finite(ref, got[c])     ? false
                               : !std::isfinite(error)          ? true
                               : e.field_rule && error > max_bound ? true
                                                                : error > least;
    }
  }
  return wrong;
}

}  // namespace

Distance distance(const HostTensor& out, const Expected& e) {
  double dot = 0, out2 = 0, ref2 = 0, off1 = 0, ref1 = 0, off2 = 0, count = 0;
  const auto columns = static_cast<std::size_t>(e.spec.columns());
  for (std::size_t r = 0; r < e.rows.size(); ++r) {
    const float* row = out.row(e.rows[r].b, e.rows[r].h, e.rows[r].i);
    for (std::size_t c = 0; c < columns; ++c) {
      const double got = row[c], ref = e.reference[r * columns + c];
      if (got == ref && !std::isfinite(ref)) continue;  // lse of a fully masked row
      dot += got * ref, out2 += got * got, ref2 += ref * ref;
      off1 += std::abs(got - ref), ref1 += std::abs(ref), off2 += (got - ref) * (got - ref),
          ++count;
    }
  }
  if (count == 0) return {};
  const double sizes = std::sqrt(out2 * ref2);
  const double cosine = sizes > 0 ? dot / sizes : out2 == ref2 ? 1 : 0;  // zero equals only zero
  return {cosine, ref1 > 0 ? off1 / ref1 : off1, std::sqrt(off2 / count)};
}

Verdict check(const HostTensor& out, const Expected& e) {
  if (is_index(e.spec.dtype)) return check_numbers(out, e);
  Verdict v;
  v.tensor = e.spec.name;
  v.rows_checked = static_cast<int64_t>(e.rows.size());
  const auto columns = static_cast<std::size_t>(e.spec.columns());
  double low_max = 0, rounding_max = 0, slack_max = 0, given_max = 0;
  double worst_share = -1;  // error / bound of the worst row
  struct Worst {
    std::size_t row, column;
    double error;
  } worst_element{0, 0, -1};
  std::vector<double> allowed(e.rows.size());
  Found never_written, nan;
  const auto place = [&](std::size_t r, std::size_t c) {
    const auto [b, h, i] = e.rows[r];
    return fmt::format("{} (b {}, h {}, row {}, column {})", v.tensor, b, h, i, c);
  };
  const auto at = [&](const Found& f) {
    const auto [b, h, i] = e.rows[f.row];
    return out.row(b, h, i)[f.column];
  };
  const auto fail = [&](std::size_t r, std::size_t c, const std::string& why) {
    if (!v.pass) return;
    v.pass = false;
    const auto [b, h, i] = e.rows[r];
    v.failure = fmt::format("{}: expected {:.7g}, got {:.7g} ({})", place(r, c),
                            e.reference[r * columns + c], out.row(b, h, i)[c], why);
  };

  for (std::size_t r = 0; r < e.rows.size(); ++r) {
    const auto [b, h, i] = e.rows[r];
    const float* got = out.row(b, h, i);
    double error2 = 0, low2 = 0;
    std::size_t worst_column = 0;
    double worst_in_row = -1;
    for (std::size_t c = 0; c < columns; ++c) {
      const double ref = e.reference[r * columns + c];
      if (!std::isfinite(ref) || !std::isfinite(got[c])) {
        if (same_not_finite(ref, got[c])) continue;
        if (std::isnan(got[c])) (unwritten(got[c]) ? never_written : nan).add(r, c);
        fail(r, c, "not finite where the reference is, or the other way round");
        continue;
      }
      const double error = std::abs(got[c] - ref);
      const double low = std::abs(e.low[r * columns + c] - ref);
      error2 += error * error;
      low2 += low * low;
      low_max = std::max(low_max, low);
      const float shifted = round_to(e.spec.dtype, static_cast<float>(ref) + 0.3f);
      // In a small tensor, no large value may happen to lie halfway between two values of the type.
      // So this takes the largest possible rounding error.
      rounding_max = std::max({rounding_max, std::abs(round_to(e.spec.dtype, shifted - 0.3f) - ref),
                               half_place(e.spec.dtype, ref)});
      if (error > worst_in_row) worst_in_row = error, worst_column = c;
      if (error > worst_element.error) worst_element = {r, c, error};
    }
    const double error = std::sqrt(error2);
    slack_max = std::max(slack_max, e.slack[r]);
    given_max = std::max(given_max, e.given[r]);
    allowed[r] = std::max({e.row_bound * e.scale[r], 2 * std::sqrt(low2), e.given[r]}) + e.slack[r];
    if (error > allowed[r]) fail(r, worst_column, "row error above its bound");
    const double share = allowed[r] > 0 ? error / allowed[r] : (error > 0 ? 1e30 : 0);
    if (share > worst_share) {
      worst_share = share;
      const double size = e.scale[r] > 0 ? e.scale[r] : 1;
      v.worst_row_error = error / size;
      v.bound = allowed[r] / size;
      v.b = b, v.h = h, v.row = i;
    }
  }
  v.max_error = std::max(0.0, worst_element.error);
  v.max_bound =
      std::max(std::max(2 * low_max, e.field_least) + 2 * rounding_max, given_max) + slack_max;
  if (e.field_rule && v.max_error > v.max_bound)
    fail(worst_element.row, worst_element.column, "largest error above twice the type's own");
  if (v.pass) return v;
  // An explanation of the failure comes before its first wrong element.
  if (never_written.count > 0)
    v.failure = fmt::format("{} was never written; {} of {} elements were not",
                            place(never_written.row, never_written.column), never_written.count,
                            allowed.size() * columns);
  else if (nan.count > 0)
    v.failure =
        fmt::format("{}: expected {:.7g}, got nan (NaN that was {}; {} of {} elements are NaN)",
                    place(nan.row, nan.column), e.reference[nan.row * columns + nan.column],
                    origin(at(nan)), nan.count, allowed.size() * columns);
  v.wrong = wrong_elements(out, e, allowed, v.max_bound);
  return v;
}

}  // namespace attn
