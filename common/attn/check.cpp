#include "attn/check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace attn {
namespace {

// Half of the last place of numbers as large as x: how far off the best of them may be.
double half_place(DType dtype, double x) {
  const int digits = dtype == DType::bf16 ? 8 : dtype == DType::fp16 ? 11 : 24;
  int exponent = 0;
  std::frexp(x, &exponent);  // x = 0.5 to 1 times 2^exponent
  return x == 0 ? 0 : std::ldexp(0.5, exponent - digits);
}

}  // namespace

Verdict check(const HostTensor& out, const Expected& e) {
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
  const auto fail = [&](std::size_t r, std::size_t c, const char* why) {
    if (!v.pass) return;
    v.pass = false;
    const auto [b, h, i] = e.rows[r];
    v.failure = fmt::format("{} (b {}, h {}, row {}, column {}): expected {:.7g}, got {:.7g} ({})",
                            v.tensor, b, h, i, c, e.reference[r * columns + c],
                            out.row(b, h, i)[c], why);
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
        const bool same = std::isnan(ref) ? std::isnan(got[c]) : ref == double{got[c]};
        if (!same) fail(r, c, "not finite where the reference is, or the other way round");
        continue;
      }
      const double error = std::abs(got[c] - ref);
      const double low = std::abs(e.low[r * columns + c] - ref);
      error2 += error * error;
      low2 += low * low;
      low_max = std::max(low_max, low);
      const float shifted = round_to(e.spec.dtype, static_cast<float>(ref) + 0.3f);
      // In a small tensor no large number may happen to lie between two of the type's; so what could be counts.
      rounding_max = std::max({rounding_max, std::abs(round_to(e.spec.dtype, shifted - 0.3f) - ref),
                               half_place(e.spec.dtype, ref)});
      if (error > worst_in_row) worst_in_row = error, worst_column = c;
      if (error > worst_element.error) worst_element = {r, c, error};
    }
    const double error = std::sqrt(error2);
    slack_max = std::max(slack_max, e.slack[r]);
    given_max = std::max(given_max, e.given[r]);
    const double allowed = std::max({e.row_bound * e.scale[r], 2 * std::sqrt(low2), e.given[r]}) + e.slack[r];
    if (error > allowed) fail(r, worst_column, "row error above its bound");
    const double share = allowed > 0 ? error / allowed : (error > 0 ? 1e30 : 0);
    if (share > worst_share) {
      worst_share = share;
      const double size = e.scale[r] > 0 ? e.scale[r] : 1;
      v.worst_row_error = error / size;
      v.bound = allowed / size;
      v.b = b, v.h = h, v.row = i;
    }
  }
  v.max_error = std::max(0.0, worst_element.error);
  v.max_bound = std::max(2 * low_max + 2 * rounding_max, given_max) + slack_max;
  if (e.field_rule && v.max_error > v.max_bound)
    fail(worst_element.row, worst_element.column, "largest error above twice the type's own");
  return v;
}

}  // namespace attn
