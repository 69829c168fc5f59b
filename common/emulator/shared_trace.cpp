// Records what warps do to shared memory: joins the accesses of lanes to instructions of warps.
#include "emulator/shared_trace.h"

#include <algorithm>

#include "emulator/warp_access.h"

namespace attn::emulator {

constexpr Cycles kIssue = 8;  // from the issue of asynchronous work to the next instruction

// shared_access() alone knows the rules: a lane joins the first wavefront that stays one with it.
BankRows bank_rows(const std::array<std::int64_t, 32>& address, int bytes) {
  constexpr int kWord = 4;
  BankRows banks;
  const int size = std::max(bytes, kWord);
  const auto at = [&](int lane) {
    const std::int64_t byte = address[static_cast<std::size_t>(lane)];
    return byte < 0 || bytes >= kWord ? byte : byte / kWord * kWord;
  };
  const SharedAccess all = shared_access(at, size);
  banks.wavefronts = all.wavefronts, banks.ideal = all.ideal;
  std::vector<std::array<bool, 32>> in;  // each wavefront's lanes
  for (int lane = 0; lane < 32; ++lane) {
    if (at(lane) < 0) continue;
    std::size_t row = 0;
    for (;; ++row) {
      if (row == in.size()) in.push_back({}), banks.rows.emplace_back();
      in[row][static_cast<std::size_t>(lane)] = true;
      const auto of_row = [&](int l) {
        return in[row][static_cast<std::size_t>(l)] ? at(l) : std::int64_t{-1};
      };
      if (shared_access(of_row, size).wavefronts == 1) break;
      in[row][static_cast<std::size_t>(lane)] = false;
    }
    banks.rows[row].push_back(lane);
  }
  for (std::size_t row = 0; row < in.size(); ++row)
    banks.extra.push_back(std::any_of(in.begin(), in.begin() + static_cast<long>(row),
                                      [&](const std::array<bool, 32>& before) {
                                        const auto both = [&](int lane) {
                                          const auto l = static_cast<std::size_t>(lane);
                                          return in[row][l] || before[l] ? at(lane) : -1;
                                        };
                                        return shared_access(both, size).ideal == 1;
                                      }));
  return banks;
}

void SharedTrace::add_block(std::size_t block, std::size_t threads) {
  if (blocks_.size() <= block) blocks_.resize(block + 1);
  Block& b = blocks_[block];
  b.warps.resize((threads + 31) / 32);
  for (std::size_t w = 0; w < b.warps.size(); ++w)
    b.warps[w].lanes = static_cast<int>(std::min<std::size_t>(32, threads - 32 * w));
}

void SharedTrace::layout(std::size_t block, const std::vector<StaticShared>& variables,
                         std::size_t dynamic_bytes, const Members* members) {
  Block& b = blocks_[block];
  b.variables = variables;
  b.dynamic_bytes = dynamic_bytes;
  if (members) b.members = *members;
}

std::uint32_t SharedTrace::site_of(const Instruction& i) {
  const auto [site, is_new] =
      site_ids_.try_emplace({i.where.key(), static_cast<int>(i.kind), i.what, i.bytes},
                            static_cast<std::uint32_t>(sites_.size()));
  if (is_new) sites_.push_back({i, {}});
  return site->second;
}

const std::string& SharedTrace::source_of(std::uint32_t site) {
  Site& s = sites_[site];
  if (s.source.empty()) s.source = s.of.where.text();
  return s.source;
}

// Whole blocks go first, the last ones; the first one keeps what it has so far.
void SharedTrace::make_room(std::size_t block) {
  for (std::size_t last = blocks_.size(); last-- > 1;) {
    Block& b = blocks_[last];
    if (!b.kept || !b.races.empty()) continue;
    count_ -= b.accesses.size() + b.flights.size();
    b = {};
    b.kept = false;
    if (count_ < most_) return;
  }
  blocks_[block].cut = true;
}

void SharedTrace::access(std::size_t block, std::size_t t, const Instruction& instruction,
                         std::size_t byte, const Moment& moment, std::int64_t group) {
  if (blocks_[block].kept && count_ >= most_) make_room(block);
  Block& b = blocks_[block];
  if (!b.kept) return;
  const std::uint32_t site = site_of(instruction);
  const std::size_t lane = t % 32;
  Warp& w = b.warps[t / 32];
  Count& count = w.counts[site][lane];
  if (count.passed != w.passed[lane]) count = {w.passed[lane], 0};
  const auto key = std::tuple(site, w.passed[lane], count.n++);
  auto open = w.open.find(key);
  if (open == w.open.end()) {
    if (b.cut) return;
    open = w.open.emplace(key, Open{b.accesses.size(), {}, 0}).first;
    open->second.address.fill(-1);
    b.accesses.push_back({moment, 0, 0, group, static_cast<std::uint32_t>(t / 32), site, 0, 0});
    ++count_;
  }
  b.touched = open->second.access;
  open->second.address[lane] = static_cast<std::int64_t>(byte);
  if (++open->second.lanes < w.lanes) return;
  close(b, open->second);
  w.open.erase(open);
}

void SharedTrace::close(Block& b, Open& open) {
  std::int64_t base = -1;
  for (const std::int64_t a : open.address)
    if (a >= 0 && (base < 0 || a < base)) base = a;
  Pattern p;
  for (std::size_t lane = 0; lane < p.size(); ++lane)
    p[lane] = open.address[lane] < 0 ? -1 : static_cast<std::int32_t>(open.address[lane] - base);
  const auto [id, is_new] =
      pattern_ids_.try_emplace(p, static_cast<std::uint32_t>(patterns_.size()));
  if (is_new) patterns_.push_back(p);
  b.accesses[open.access].pattern = id->second;
  b.accesses[open.access].base = static_cast<std::uint32_t>(base);
}

void SharedTrace::close_all(Block& b, Warp& w) {
  for (auto& [key, open] : w.open) close(b, open);
  w.open.clear();
}

void SharedTrace::passed(std::size_t block, std::size_t t, std::uint64_t number) {
  Block& b = blocks_[block];
  if (!b.kept) return;
  Warp& w = b.warps[t / 32];
  if (std::exchange(w.passed[t % 32], number) == number) return;
  w.together = std::exchange(w.last, number) == number ? w.together + 1 : 1;
  if (w.together == w.lanes) close_all(b, w);
}

void SharedTrace::flight(std::size_t block, std::size_t warp, bool writes, const char* what,
                         Place place, Cycles begin, Cycles end, std::vector<Range> ranges) {
  if (blocks_[block].kept && count_ >= most_) make_room(block);
  Block& b = blocks_[block];
  if (!b.kept || b.cut || ranges.empty()) return;
  std::ranges::sort(ranges);
  std::vector<Range> joined;
  for (const auto& [first, bytes] : ranges)
    if (!joined.empty() && first <= joined.back().first + joined.back().second)
      joined.back().second = std::max(joined.back().second, first + bytes - joined.back().first);
    else
      joined.emplace_back(first, bytes);
  b.flights.push_back({begin, end, warp, writes, what, place, std::move(joined)});
  ++count_;
}

void SharedTrace::race(std::size_t block, Race race) {
  race.access = blocks_[block].touched;
  blocks_[block].races.push_back(std::move(race));
}

bool SharedTrace::covers(const Access& a, std::size_t byte) const {
  return std::ranges::any_of(patterns_[a.pattern], [&](std::int32_t offset) {
    return offset >= 0 && byte - a.base - static_cast<std::size_t>(offset) <
                              sites_[a.site].of.bytes;
  });
}

namespace {
bool covers(const std::vector<SharedTrace::Range>& ranges, std::size_t byte) {
  return std::ranges::any_of(
      ranges, [&](const SharedTrace::Range& range) { return byte - range.first < range.second; });
}
}  // namespace

// When the second access of a race was, if it was recorded: it is the one that ended the launch.
const void* SharedTrace::find_second(const Block& b, Race& r) {
  RaceSide& second = r.second;
  const auto byte = static_cast<std::size_t>(r.byte);
  if (r.access < b.accesses.size()) {
    const Access& a = b.accesses[r.access];
    if (a.warp == second.thread / 32 && covers(a, byte) && source_of(a.site) == second.source) {
      second.at = a.at;
      return &a;
    }
  }
  for (const Flight& f : b.flights)
    if (f.begin + kIssue >= second.at && f.place.text() == second.source &&
        emulator::covers(f.ranges, byte)) {
      second.at = f.begin;
      return &f;
    }
  return nullptr;
}

// When the first one was: the last one of its warp there, at its line.
void SharedTrace::find_first(const Block& b, Race& r, const void* second) {
  RaceSide& first = r.first;
  const auto byte = static_cast<std::size_t>(r.byte);
  const auto consider = [&](const void* which, Cycles at) {
    if (which == second || (first.known && at < first.at)) return;
    first.known = true, first.at = at;
  };
  for (const Flight& f : b.flights)
    if (f.place.text() == first.source && emulator::covers(f.ranges, byte)) consider(&f, f.begin);
  for (const Access& a : b.accesses)
    if (a.warp == first.thread / 32 && covers(a, byte) && source_of(a.site) == first.source)
      consider(&a, a.at);
}

void SharedTrace::end_block(
    std::size_t block, const std::function<Cycles(std::size_t warp, const Moment&)>& when,
    const std::function<Cycles(std::size_t warp, std::size_t group)>& landed) {
  Block& b = blocks_[block];
  if (std::exchange(b.ended, true)) return;
  for (Warp& w : b.warps) close_all(b, w);
  for (Access& a : b.accesses) {
    a.at = when(a.warp, a.moment);
    if (a.group >= 0) a.until = std::max(a.at, landed(a.warp, static_cast<std::size_t>(a.group)));
  }
  for (Race& r : b.races) {
    if (r.byte < 0) continue;
    const void* const second = find_second(b, r);
    if (r.first.in_block) find_first(b, r, second);
  }
  std::ranges::stable_sort(b.accesses, {}, &Access::at);
  b.warps.clear();
}

}  // namespace attn::emulator
