#include "check/failure_shape.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <tuple>

#include "attn/tiling.h"

namespace attn {
namespace {

// A place is reported only if scattered errors would all fall into an equally simple place with
// less than this probability.
constexpr double kChance = 1e-3;
// A place counts as wrong nearly everywhere if at least this share of it is wrong: a wrong element
// may happen to be close to the right value.
constexpr double kNearlyAll = 0.75;

// Counts for one value of an index: how many rows (for a column: elements of wrong rows) are
// compared, and how many are wrong.
struct Count {
  int64_t all = 0, wrong = 0;
};
using Axis = std::map<int64_t, Count>;

struct Place {
  std::string text;  // "only rows 16 to 31 of every 64"
  std::function<bool(int64_t)> holds = {};
  double fill = 0;  // share of its elements that are wrong
};

double log_choose(double n, double k) {
  return std::lgamma(n + 1) - std::lgamma(k + 1) - std::lgamma(n - k + 1);
}

std::string listed(const std::vector<int64_t>& values) {
  if (values.size() == 1) return std::to_string(values.front());
  return fmt::format("{} and {}", fmt::join(values.begin(), values.end() - 1, ", "), values.back());
}

// Searches one index: finds the simplest place of a small family that contains every wrong element.
// `alike`: the probability assumes that all rows with one value are wrong together, as when a fault
// in a row of a tile occurs in all heads.
class Search {
 public:
  Search(const Axis& axis, std::string one, std::string many, bool alike,
         std::optional<int64_t> tile = {})
      : axis_(axis), one_(std::move(one)), many_(std::move(many)), alike_(alike), tile_(tile) {
    for (const auto& [value, count] : axis)
      if (count.wrong > 0) wrong_.push_back(value);
    all_ = sum([](int64_t) { return true; });
  }

  std::optional<Place> place() {
    if (wrong_.empty() || wrong_.size() == axis_.size()) return std::nullopt;
    const int64_t first = wrong_.front(), last = wrong_.back();
    consider(
        range_text(first, last), [=](int64_t x) { return first <= x && x <= last; },
        static_cast<double>(axis_.size()), wrong_.size() <= 4);
    std::set<int64_t> periods{2, 4, 8, 16, 32, 64, 128};
    if (tile_) periods.insert(*tile_);
    for (const int64_t period : periods) {
      if (last - first < period) break;
      const auto residue = [period](int64_t x) { return x % period; };
      const auto [low, high] = std::ranges::minmax(wrong_, {}, residue);
      const int64_t from = residue(low), to = residue(high);
      consider(
          period_text(from, to, period),
          [=](int64_t x) { return from <= x % period && x % period <= to; },
          static_cast<double>(period) * static_cast<double>(periods.size()), false);
    }
    if (wrong_.size() <= 4)
      consider(
          fmt::format("only {} {}", wrong_.size() == 1 ? one_ : many_, listed(wrong_)),
          [set = std::set(wrong_.begin(), wrong_.end())](int64_t x) { return set.contains(x); },
          std::exp(
              log_choose(static_cast<double>(axis_.size()), static_cast<double>(wrong_.size()))),
          true);
    return best_;
  }

 private:
  struct Sum {
    double values = 0, wrong_values = 0, all = 0, wrong = 0;
  };
  template <class Holds>
  Sum sum(Holds holds) const {
    Sum s;
    for (const auto& [value, count] : axis_) {
      if (!holds(value)) continue;
      ++s.values, s.wrong_values += count.wrong > 0;
      s.all += static_cast<double>(count.all), s.wrong += static_cast<double>(count.wrong);
    }
    return s;
  }

  // `positions`: number of sets of this kind. A list of a few values that are all wrong is `named`
  // even if it could be chance: it is a list then, not a pattern.
  void consider(std::string text, std::function<bool(int64_t)> holds, double positions,
                bool named) {
    const Sum here = sum(holds);
    if (here.values == all_.values) return;
    const double fill = here.wrong / here.all;
    const double log_chance =
        std::log(positions) +
        (alike_ ? log_choose(here.values, here.wrong_values) -
                      log_choose(all_.values, here.wrong_values)
                : log_choose(here.all, here.wrong) - log_choose(all_.all, here.wrong));
    if (!(named && fill >= kNearlyAll && (alike_ || here.wrong >= 8)) &&
        log_chance > std::log(kChance))
      return;
    // Simpler sets come first. A later one replaces them only if it fits clearly better.
    if (!best_ || fill > best_->fill + 0.1) best_ = {std::move(text), std::move(holds), fill};
  }

  std::string range_text(int64_t first, int64_t last) const {
    if (first == last) return fmt::format("only {} {}", one_, first);
    const int64_t end = axis_.rbegin()->first + 1;
    if (last + 1 == end) {
      const bool tail = tile_ && first % *tile_ == 0 && end - first < *tile_;
      return fmt::format("only {} {} and on{}", many_, first,
                         tail ? fmt::format(" (in the tile of {} that is not full)", *tile_) : "");
    }
    if (first == axis_.begin()->first) return fmt::format("only {} up to {}", many_, last);
    return fmt::format("only {} {} to {}", many_, first, last);
  }

  std::string period_text(int64_t from, int64_t to, int64_t period) const {
    if (period == 2) return fmt::format("only {} {}", from == 1 ? "odd" : "even", many_);
    if (from == to) return fmt::format("only {} {} of every {}", one_, from, period);
    return fmt::format("only {} {} to {} of every {}", many_, from, to, period);
  }

  const Axis& axis_;
  std::string one_, many_;
  bool alike_;
  std::optional<int64_t> tile_;
  std::vector<int64_t> wrong_;
  Sum all_;
  std::optional<Place> best_;
};

class Pattern {
 public:
  Pattern(const Verdict& v, const HostTensor& out, const Expected& e, const Problem& p,
          const std::optional<Tiling>& t)
      : wrong_(v.wrong),
        out_(out),
        e_(e),
        p_(p),
        columns_(static_cast<std::size_t>(e.spec.columns())),
        keys_(e.spec.name == "dk" || e.spec.name == "dv") {
    if (t) tile_ = keys_ ? t->block_n : t->block_m;
    wrong_in_row_.resize(e.rows.size());
    for (std::size_t r = 0; r < e.rows.size(); ++r) {
      for (std::size_t c = 0; c < columns_; ++c)
        if (wrong_[r * columns_ + c]) ++wrong_in_row_[r], ++column_[static_cast<int64_t>(c)].wrong;
      wrong_elements_ += wrong_in_row_[r];
      wrong_rows_ += wrong_in_row_[r] > 0;
    }
  }

  std::vector<std::string> lines() {
    std::vector<std::string> all{counts()};
    if (std::string where = place(); !where.empty()) all.push_back("where: " + where);
    if (std::string value = values(); !value.empty()) all.push_back("value: " + value);
    return all;
  }

 private:
  std::string rows_word() const { return keys_ ? "keys" : "rows"; }

  std::string counts() const {
    std::set<std::tuple<int64_t, int64_t, int64_t>> tiles, wrong_tiles;
    for (std::size_t r = 0; tile_ && r < e_.rows.size(); ++r) {
      const auto [b, h, i] = e_.rows[r];
      tiles.emplace(b, h, i / *tile_);
      if (wrong_in_row_[r] > 0) wrong_tiles.emplace(b, h, i / *tile_);
    }
    std::string text = fmt::format("wrong: {} of {} elements, {} of {} {}", wrong_elements_,
                                   wrong_.size(), wrong_rows_, e_.rows.size(), rows_word());
    if (columns_ > 1) text += fmt::format(", {} of {} columns", column_.size(), columns_);
    if (tile_)
      text += fmt::format(", {} of {} tiles of {} {}", wrong_tiles.size(), tiles.size(), *tile_,
                          rows_word());
    return text;
  }

  // How many of its keys are visible to a query. For tensors with one row per key: all.
  enum class Seen { nothing, some, all };
  Seen seen(const Expected::Row& row) {
    if (keys_) return Seen::all;
    if (row.b != sequence_) sequence_ = row.b, of_sequence_ = p_.sequence(row.b);
    const int64_t keys = of_sequence_.visible(row.i).size();
    return keys == 0 ? Seen::nothing : keys < of_sequence_.seqlen_k ? Seen::some : Seen::all;
  }

  std::string place() {
    std::vector<std::string> clauses;
    std::vector<bool> here(e_.rows.size(), true);  // rows selected by the clauses
    const auto keep = [&](auto holds) {
      for (std::size_t r = 0; r < here.size(); ++r) here[r] = here[r] && holds(r);
    };
    if (wrong_rows_ > 1) take_seen(clauses, keep);
    const auto look = [&](auto index, const char* one, const char* many, bool alike) {
      Axis axis;
      for (std::size_t r = 0; r < here.size(); ++r) {
        if (!here[r]) continue;
        Count& count = axis[index(e_.rows[r])];
        ++count.all, count.wrong += wrong_in_row_[r] > 0;
      }
      return Search(axis, one, many, alike, alike ? tile_ : std::nullopt).place();
    };
    const auto take = [&](const std::optional<Place>& found, auto index) {
      if (!found) return false;
      clauses.push_back(found->text);
      keep([&](std::size_t r) { return found->holds(index(e_.rows[r])); });
      return true;
    };
    if (wrong_rows_ > 1) {
      const auto sequence = [](const Expected::Row& row) { return row.b; };
      const auto head = [](const Expected::Row& row) { return row.h; };
      const auto number = [](const Expected::Row& row) { return row.i; };
      take(look(sequence, "sequence", "sequences", false), sequence);
      take_heads(look, take, head);
      if (const auto found = look(number, keys_ ? "key" : "row", keys_ ? "keys" : "rows", true);
          take(found, number))
        clauses.back() += visible_keys(*found);
    }
    std::string text = fmt::format("{}", fmt::join(clauses, ", "));
    if (const auto named = std::ranges::count(here, true); !clauses.empty())
      text += fmt::format("; {}{} such {} are wrong",
                          named == wrong_rows_ ? "all " : fmt::format("{} of ", wrong_rows_), named,
                          rows_word());
    if (columns_ == 1) return text;
    for (std::size_t c = 0; c < columns_; ++c) column_[static_cast<int64_t>(c)].all = wrong_rows_;
    const std::optional<Place> found = Search(column_, "column", "columns", true).place();
    int64_t named = 0;  // columns
    for (const auto& [c, count] : column_) named += !found || found->holds(c);
    const double fill =
        static_cast<double>(wrong_elements_) / static_cast<double>(named * wrong_rows_);
    if (found && wrong_elements_ > 1) {
      if (!text.empty()) text += ", ";
      text += found->text;
      if (fill < 1)
        text += fmt::format(" ({} of {} elements there)", wrong_elements_, named * wrong_rows_);
    } else if (!text.empty() && !found && fill >= kNearlyAll) {
      text += ", in all columns";
    }
    return text;
  }

  // Fully masked rows are mostly right, or wrong for a reason of their own. The same holds for rows
  // without any masked key.
  void take_seen(std::vector<std::string>& clauses, auto keep) {
    std::vector<Seen> of_row(e_.rows.size());
    std::map<Seen, Count> rows;
    for (std::size_t r = 0; r < e_.rows.size(); ++r) {
      Count& count = rows[of_row[r] = seen(e_.rows[r])];
      ++count.all, count.wrong += wrong_in_row_[r] > 0;
    }
    const Count nothing = rows[Seen::nothing], some = rows[Seen::some], all = rows[Seen::all];
    if (nothing.all > 0 && nothing.wrong == wrong_rows_ && some.all + all.all > 0) {
      clauses.emplace_back("only fully masked rows");
      keep([&](std::size_t r) { return of_row[r] == Seen::nothing; });
    } else if (all.all > 0 && all.wrong == 0 && some.wrong == some.all &&
               (nothing.wrong == 0 || nothing.wrong == nothing.all)) {
      clauses.emplace_back(nothing.wrong > 0
                               ? "only rows with a masked key"
                               : "only partially masked rows");
      keep([&](std::size_t r) {
        return of_row[r] == Seen::some || (of_row[r] == Seen::nothing && nothing.wrong > 0);
      });
    } else if (nothing.all > 0 && nothing.wrong == 0) {
      if (some.wrong + all.wrong == some.all + all.all)
        clauses.emplace_back("only rows with a visible key");
      keep([&](std::size_t r) { return of_row[r] != Seen::nothing; });
    }
  }

  // Heads by number, by the K/V head they share, or by their position within the group of a K/V
  // head.
  void take_heads(auto look, auto take, auto head) {
    const int64_t group = p_.group();
    const std::optional<Place> by_number = look(head, "head", "heads", false);
    if (!keys_ && group > 1 && p_.kv_heads > 1) {
      const auto kv_head = [=](const Expected::Row& row) { return row.h / group; };
      const auto in_group = [=](const Expected::Row& row) { return row.h % group; };
      const auto better = [&](const std::optional<Place>& other) {
        return other && (!by_number || other->fill >= by_number->fill);
      };
      if (auto found = look(kv_head, "K/V head", "K/V heads", false); better(found)) {
        found->text.replace(0, 4, "only the query heads of");
        take(found, kv_head);
        return;
      }
      if (auto found = look(in_group, "query head", "query heads", false); better(found)) {
        found->text += fmt::format(" of each K/V head's {}", group);
        take(found, in_group);
        return;
      }
    }
    take(by_number, head);
  }

  // For rows of a masked problem: the keys that are visible to each of these rows and to no other
  // row.
  std::string visible_keys(const Place& rows) const {
    if (keys_ || p_.varlen() || !p_.masked()) return "";
    int64_t others_end = 0, least_end = p_.seqlen_k;
    for (const Expected::Row& row : e_.rows) {
      const int64_t end = p_.visible(row.i).end;
      if (rows.holds(row.i))
        least_end = std::min(least_end, end);
      else
        others_end = std::max(others_end, end);
    }
    return others_end > 0 && others_end < least_end
               ? fmt::format(" (those to which keys from {} on are visible)", others_end)
               : "";
  }

  // Names factors with a meaning, such as "log2 e".
  std::string meaning(double factor) const {
    const double d = static_cast<double>(p_.head_dim), keep = 1 - p_.dropout,
                 group = static_cast<double>(p_.group());
    const std::pair<double, std::string> known[] = {
        {M_LOG2E, "log2 e: base 2 in place of e"},
        {M_LN2, "ln 2"},
        {-1, "the sign"},
        {p_.softmax_scale, "softmax_scale"},
        {1 / p_.softmax_scale, "1 / softmax_scale"},
        {std::sqrt(d), "sqrt(d)"},
        {1 / std::sqrt(d), "1 / sqrt(d)"},
        {keep, "1 - dropout"},
        {1 / keep, "1 / (1 - dropout)"},
        {group, "the query heads of a K/V head"},
        {1 / group, "1 / the query heads of a K/V head"}};
    for (const auto& [x, words] : known)
      if (x != 1 && std::abs(factor / x - 1) < 2e-3) return " (" + words + ")";
    return "";
  }

  // Names a constant offset of lse: "ln 2: a row's sum is 2 times what it should be".
  std::string offset_meaning(double offset) const {
    if (e_.spec.name != "lse") return "";
    const double ratio = std::exp(std::abs(offset)), whole = std::round(ratio);
    if (whole >= 2 && whole <= 4096 && std::abs(ratio / whole - 1) < 1e-4 &&
        (whole <= 16 || std::exp2(std::round(std::log2(whole))) == whole))
      return offset > 0 ? fmt::format(" (ln {}: the sum of each row is {} times what it should be)",
                                      whole, whole)
                        : fmt::format(" (ln {}: the sum of each row is 1/{} of what it should be)",
                                      whole, whole);
    if (p_.dropout > 0 && std::abs(ratio * (1 - p_.dropout) - 1) < 1e-4)
      return " (ln of 1 - dropout: lse is of all keys, dropped or not)";
    return "";
  }

  std::string values() const {
    if (is_index(e_.spec.dtype)) return "";  // an index has no magnitude
    int64_t finite = 0, zeros = 0, multiples = 0, rows = 0;
    double rr = 0, or_ = 0, oo = 0, sum = 0, sum2 = 0, least = 0, most = 0;
    for (std::size_t r = 0; r < e_.rows.size(); ++r) {
      const auto [b, h, i] = e_.rows[r];
      const float* got = out_.row(b, h, i);
      double row_rr = 0, row_or = 0, row_oo = 0;
      for (std::size_t c = 0; c < columns_; ++c) {
        const double ref = e_.reference[r * columns_ + c], o = got[c];
        if (!wrong_[r * columns_ + c] || !std::isfinite(o) || !std::isfinite(ref)) continue;
        ++finite, zeros += o == 0;
        row_rr += ref * ref, row_or += o * ref, row_oo += o * o;
        sum += o - ref, sum2 += (o - ref) * (o - ref);
      }
      rr += row_rr, or_ += row_or, oo += row_oo;
      if (wrong_in_row_[r] < 8 || row_rr == 0) continue;
      const double factor = row_or / row_rr;
      ++rows;
      if (!proportional(row_rr, row_or, row_oo)) continue;
      least = multiples == 0 ? factor : std::min(least, factor),
      most = multiples == 0 ? factor : std::max(most, factor);
      ++multiples;
    }
    if (finite < 2 || finite < wrong_elements_) return "";
    if (zeros == finite) return "all are 0";
    if (columns_ == 1) {
      const double mean = sum / static_cast<double>(finite),
                   spread = sum2 / static_cast<double>(finite) - mean * mean;
      const double factor = or_ / rr, off = (oo - factor * or_) / static_cast<double>(finite);
      const double alike = 1e-8 * mean * mean;
      if (spread <= alike && spread <= off)
        return fmt::format("each is {:.4g} too {}{}", std::abs(mean), mean > 0 ? "large" : "small",
                           offset_meaning(mean));
      if (off > 1e-8 * oo / static_cast<double>(finite)) return "";
    }
    if (columns_ > 1 && finite < 8) return "";  // so few may be multiples by chance
    if (proportional(rr, or_, oo))
      return fmt::format("each is {:.4g} times what is expected{}", or_ / rr, meaning(or_ / rr));
    if (rows > 1 && rows == multiples)
      return fmt::format("each {0} is the expected {0} times a factor, {1:.2g} to {2:.2g}",
                         keys_ ? "key" : "row", least, most);
    return "";
  }

  // Whether o = f r up to the rounding of the type: the part of o that is not a multiple of r is
  // within the bound.
  bool proportional(double rr, double o_r, double oo) const {
    return rr > 0 && oo > 0 && oo - o_r * o_r / rr <= std::pow(2 * e_.row_bound, 2) * oo;
  }

  const std::vector<bool>& wrong_;
  const HostTensor& out_;
  const Expected& e_;
  const Problem& p_;
  std::size_t columns_;
  bool keys_;  // rows of dk and dv are keys
  std::optional<int64_t> tile_;
  std::vector<int64_t> wrong_in_row_;
  Axis column_;
  int64_t wrong_elements_ = 0, wrong_rows_ = 0;
  int64_t sequence_ = -1;  // sequence that of_sequence_ holds
  Problem of_sequence_;
};

}  // namespace

std::vector<std::string> failure_shape(const Verdict& v, const HostTensor& out, const Expected& e,
                                       const Problem& p, const std::optional<Tiling>& tiling) {
  if (v.pass) return {};
  return Pattern(v, out, e, p, tiling).lines();
}

Verdict examine(const HostTensor& out, const Expected& e, const Problem& p, const Step& step) {
  Verdict v = check(out, e);
  if (!v.pass) v.shape = failure_shape(v, out, e, p, tiling_of(step, p));
  return v;
}

std::string failure_text(const Verdict& v, std::string_view indent) {
  std::string text = v.failure;
  for (const std::string& line : v.shape) text += fmt::format("\n{}{}", indent, line);
  return text;
}

}  // namespace attn
