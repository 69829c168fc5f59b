#include "run/gpu_timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "emulator/timeline.h"

namespace attn {
namespace {

using emulator::Cycles;

constexpr std::size_t kHeader = 2;  // records before a warp's first event
constexpr std::size_t kWarpsPerGroup = 4;
constexpr std::uint32_t kLongest = 1u << 31;  // cycles of a block, a second

struct Event {
  RecordKind kind;
  int line, extra;
  std::uint32_t what, destination;
  Cycles begin, end;
};
struct Warp {
  std::vector<Event> events;
  bool full = false;  // what came after the last event is lost
};
struct Block {
  std::size_t kernel = 0, number = 0;  // of the launch; in the grid
  std::uint32_t sm = 0, shared = 0;
  Cycles begin = 0, end = 0;
  std::vector<Warp> warps;
};

RecordKind kind_of(const Record& r) { return static_cast<RecordKind>(r.tag & 0xFF); }
std::uint64_t wide(std::uint32_t low, std::uint32_t high) {
  return low | static_cast<std::uint64_t>(high) << 32;
}

bool is_wait(RecordKind kind) {
  return kind == RecordKind::mbarrier_wait || kind == RecordKind::named_wait ||
         kind == RecordKind::block_wait || kind == RecordKind::wgmma_wait ||
         kind == RecordKind::copy_wait;
}
// Marks and issues of copies have one clock.
bool is_point(RecordKind kind) {
  return kind == RecordKind::mark || kind == RecordKind::mark_end || kind == RecordKind::tma;
}

// Reads blocks of a launch, on a common clock whose 0 is the first begin.
class Blocks {
 public:
  explicit Blocks(const RecordedLaunch& launch) : launch_(launch), clocks(launch.samples) {
    // Lines of SMs go through the timers that the warps read at their begin.
    std::map<std::uint32_t, std::vector<double>> off;
    for_each_begin([&](std::size_t, std::size_t, const Record* ring) {
      off[ring[1].what].push_back(clocks.since_base(timer_of(ring)) - begin_ns(ring));
    });
    for (auto& [sm, some] : off) {
      const auto middle = some.begin() + static_cast<std::ptrdiff_t>(some.size() / 2);
      std::ranges::nth_element(some, middle);
      moved_ns = std::max(moved_ns, std::abs(*middle));
      clocks.shift(sm, *middle);
    }
    for_each_begin([&](std::size_t kernel, std::size_t number, const Record* ring) {
      const double ns = begin_ns(ring);
      origin_ = order.empty() ? ns : std::min(origin_, ns);
      order.push_back({ns, kernel, number});
      off_ns = std::max(off_ns, std::abs(ns - clocks.since_base(timer_of(ring))));
    });
    std::ranges::sort(order);
  }

  Block read(std::size_t kernel, std::size_t number) const {
    const RecordedKernel& k = launch_.kernels[kernel];
    Block b;
    b.kernel = kernel, b.number = number;
    b.warps.resize(k.warps);
    for (std::size_t w = 0; w < k.warps; ++w) read_warp(b, w);
    return b;
  }

  struct Begin {
    double ns;
    std::size_t kernel, number;
    auto operator<=>(const Begin&) const = default;
  };
  std::vector<Begin> order;
  double off_ns = 0;    ///< farthest begin of a block from its SM's line
  double moved_ns = 0;  ///< most that a line was moved

 private:
  const RecordedLaunch& launch_;

 public:
  SmClocks clocks;

 private:
  template <class Each>  // (kernel, block, ring of warp 0) of each block that was recorded
  void for_each_begin(Each each) const {
    for (std::size_t k = 0; k < launch_.kernels.size(); ++k)
      for (std::size_t n = 0; n < launch_.kernels[k].count(); ++n)
        if (const Record* ring = ring_of(k, n, 0); kind_of(ring[0]) == RecordKind::begin)
          each(k, n, ring);
  }
  const Record* ring_of(std::size_t kernel, std::size_t block, std::size_t warp) const {
    const RecordedKernel& k = launch_.kernels[kernel];
    return k.records.data() + (block * k.warps + warp) * k.capacity;
  }
  // ring[0]: base of shared memory and clock64; ring[1]: SM and %globaltimer
  double begin_ns(const Record* ring) const { return ns(ring, 0); }
  double ns(const Record* ring, std::uint64_t cycles) const {
    const std::uint64_t clock = wide(ring[0].begin, ring[0].end);
    return clocks.ns(ring[1].what, clock + cycles, clock, timer_of(ring));
  }
  static std::uint64_t timer_of(const Record* ring) { return wide(ring[1].begin, ring[1].end); }

  void read_warp(Block& b, std::size_t w) const {
    const Record* ring = ring_of(b.kernel, b.number, w);
    const std::size_t capacity = launch_.kernels[b.kernel].capacity;
    if (kind_of(ring[0]) != RecordKind::begin) return;
    const auto time = [&](std::uint32_t clock) {
      const double at = ns(ring, clock - ring[0].begin) - origin_;
      return at > 0 ? static_cast<Cycles>(std::llround(at)) : Cycles{0};
    };
    const Cycles begin = time(ring[0].begin);
    if (w == 0) b.sm = ring[1].what, b.shared = ring[0].what, b.begin = b.end = begin;
    b.begin = std::min(b.begin, begin);
    Warp& warp = b.warps[w];
    // The last record of a full ring has been overwritten until the end.
    warp.full = kind_of(ring[capacity - 1]) != RecordKind::none;
    for (std::size_t n = kHeader; n + 1 < capacity; ++n) {
      const Record& r = ring[n];
      const RecordKind kind = kind_of(r);
      // Not written; or, after its launch was repeated, left from the one before.
      if (kind == RecordKind::none || r.end - ring[0].begin > kLongest) break;
      const Cycles end = time(r.end);
      warp.events.push_back({kind, static_cast<int>(r.tag >> 8 & 0xFFFF),
                             static_cast<int>(r.tag >> 24), r.what, r.begin,
                             is_point(kind) ? end : time(r.begin), end});
      b.end = std::max(b.end, end);
    }
  }

  double origin_ = 0;
};

std::string grid_index(const RecordedKernel& k, std::size_t number) {
  return fmt::format("({},{},{})", number % k.blocks[0], number / k.blocks[0] % k.blocks[1],
                     number / k.blocks[0] / k.blocks[1]);
}

// ---- one block ----------------------------------------------------------------------------------

class BlockWriter {
 public:
  BlockWriter(const RecordedLaunch& launch, const emulator::Members& members, const Block& block,
              const char* file, emulator::Trace& trace)
      : launch_(launch), members_(members), block_(block), file_(file), trace_(trace) {
    const RecordedKernel& k = launch.kernels[block.kernel];
    number_ = trace.add_block(
        (block.kernel > 0 ? fmt::format("launch {}, ", block.kernel + 1) : std::string()) +
            fmt::format("block {} on SM {}", grid_index(k, block.number), block.sm),
        k.warps);
    for (std::size_t w = 0; w < block.warps.size(); ++w)
      for (const Event& e : block.warps[w].events) note(w, e);
    for (auto& [barrier, some] : arrivals_) std::ranges::sort(some);
    for (auto& [barrier, some] : waits_end_) std::ranges::sort(some);
    for (std::size_t w = 0; w < block.warps.size(); ++w) write(w);
  }

 private:
  struct Arrival {
    Cycles at;
    std::size_t warp;
    auto operator<=>(const Arrival&) const = default;
  };
  using Barrier = std::pair<bool, std::uint32_t>;  // named or mbarrier; number or address

  static bool of_named(RecordKind kind) {
    return kind == RecordKind::named_wait || kind == RecordKind::named_arrive;
  }

  void note(std::size_t w, const Event& e) {
    if (e.kind == RecordKind::mbarrier_arrive || e.kind == RecordKind::named_arrive)
      arrivals_[{of_named(e.kind), e.what}].push_back({e.begin, w});
    if (e.kind == RecordKind::mbarrier_wait) waits_end_[e.what].push_back(e.end);
  }

  std::string barrier_name(const Event& e) const {
    if (of_named(e.kind)) return "named barrier " + std::to_string(e.what);
    const std::size_t byte = e.what - block_.shared;
    for (const emulator::Member& m : members_)
      if (byte - m.offset < m.bytes) return m.element(byte - m.offset);
    return fmt::format("mbarrier at byte {}", byte);
  }
  std::string wait_name(const Event& e) const {
    switch (e.kind) {
      case RecordKind::block_wait: return "__syncthreads";
      case RecordKind::wgmma_wait: return "wgmma_wait";
      case RecordKind::copy_wait: return "cp_async_wait";
      default: return barrier_name(e);
    }
  }
  emulator::Details at(const Event& e) const {
    emulator::Details details;
    if (e.line > 0) details.source = {file_, e.line};
    return details;
  }

  // The arrival that ended a wait: the last one before its end, if the wait has begun by then.
  void arrow(std::size_t track, const Event& wait) {
    const auto found = arrivals_.find({of_named(wait.kind), wait.what});
    if (found == arrivals_.end() || wait.end <= wait.begin) return;
    const auto next = std::ranges::upper_bound(found->second, wait.end, {}, &Arrival::at);
    if (next == found->second.begin()) return;
    const Arrival& last = *std::prev(next);
    if (last.at < wait.begin || last.at >= wait.end || last.warp + 1 == track) return;
    trace_.flow({number_, last.warp + 1, last.at, true}, number_, track, wait.end);
  }

  void write(std::size_t w) {
    const std::vector<Event>& events = block_.warps[w].events;
    const std::size_t track = w + 1;
    std::deque<const Event*> groups, copies;  // in flight
    std::vector<const Event*> marks;          // open
    const auto end_marks = [&](std::size_t open, Cycles now) {
      for (; marks.size() > open; marks.pop_back())
        trace_.span(number_, track, "mark", mark_name(*marks.back()), marks.back()->begin, now);
    };
    const auto land = [&](std::deque<const Event*>& in_flight, const Event& wait,
                          const char* kind, const std::string& name) {
      for (; in_flight.size() > static_cast<std::size_t>(wait.extra); in_flight.pop_front())
        if (!name.empty())
          trace_.flight(number_, track, kind, name, in_flight.front()->begin, wait.end);
    };
    for (const Event& e : events) switch (e.kind) {
        case RecordKind::mark: marks.push_back(&e); break;
        case RecordKind::mark_end:
          for (std::size_t n = marks.size(); n-- > 0;)
            if (marks[n]->what == e.what) {
              end_marks(n, e.end);
              break;
            }
          break;
        case RecordKind::mbarrier_arrive:
        case RecordKind::named_arrive:
          trace_.span(number_, track, "arrive", barrier_name(e), e.begin, e.end, at(e));
          break;
        case RecordKind::tma: {
          const auto waits = waits_end_.find(e.what);
          if (waits == waits_end_.end()) break;
          const auto end = std::ranges::upper_bound(waits->second, e.begin);
          if (end == waits->second.end()) break;  // its wait is lost
          emulator::Details details = at(e);
          details.writes = emulator::tile_name(&members_, e.destination - block_.shared);
          trace_.flight(number_, track, "tma", "TMA " + barrier_name(e) + ", at most", e.begin,
                        *end, details);
          break;
        }
        case RecordKind::wgmma_group: groups.push_back(&e); break;
        case RecordKind::copy_group: copies.push_back(&e); break;
        default:
          if (!is_wait(e.kind)) break;
          trace_.span(number_, track, "wait", wait_name(e), e.begin, e.end, at(e));
          if (e.kind == RecordKind::mbarrier_wait || e.kind == RecordKind::named_wait)
            arrow(track, e);
          // Of a warpgroup's products the first warp draws the flight.
          if (e.kind == RecordKind::wgmma_wait)
            land(groups, e, "wgmma",
                 w % kWarpsPerGroup > 0
                     ? std::string()
                     : fmt::format("wgmma of warpgroup {}, at most", w / kWarpsPerGroup));
          if (e.kind == RecordKind::copy_wait)
            land(copies, e, "cp.async", fmt::format("cp.async of warp {}, at most", w));
      }
    if (!events.empty()) end_marks(0, events.back().end);
  }

  std::string mark_name(const Event& e) const {
    const auto name = launch_.marks.find(e.what);
    return name == launch_.marks.end() ? fmt::format("mark {:08x}", e.what) : name->second;
  }

  const RecordedLaunch& launch_;
  const emulator::Members& members_;
  const Block& block_;
  const char* file_;
  emulator::Trace& trace_;
  std::size_t number_ = 0;
  std::map<Barrier, std::vector<Arrival>> arrivals_;
  std::map<std::uint32_t, std::vector<Cycles>> waits_end_;
};

// ---- all SMs ------------------------------------------------------------------------------------

// The time of an SM by what it did, added to the parts of the launch in which it lies.
class SmTimes {
 public:
  SmTimes(Cycles end, std::vector<SmShares>& parts) : end_(end), parts_(parts) {}

  void add(const Block& b) {
    resident(b.begin, 1), resident(b.end, -1);
    for (const Warp& w : b.warps) {
      if (w.events.empty()) continue;  // left at once
      running(b.begin, 1), running(w.events.back().end, -1);
      for (const Event& e : w.events)
        if (is_wait(e.kind)) running(e.begin, -1), running(e.end, 1);
    }
  }
  void finish() {
    std::ranges::sort(changes_);
    Cycles last = 0;
    int running = 0, resident = 0;
    changes_.emplace_back(end_, 0, 0);
    for (const auto& [at, run, stay] : changes_) {
      spend(last, std::min(at, end_),
            running > 0    ? &SmShares::busy
            : resident > 0 ? &SmShares::waiting
                           : &SmShares::idle);
      last = std::min(at, end_);
      running += run, resident += stay;
    }
    changes_.clear();
  }

 private:
  void running(Cycles at, int change) { changes_.emplace_back(at, change, 0); }
  void resident(Cycles at, int change) { changes_.emplace_back(at, 0, change); }
  void spend(Cycles begin, Cycles end, double SmShares::*what) {
    const double part = static_cast<double>(end_) / static_cast<double>(parts_.size());
    while (begin < end) {
      const auto n = std::min(parts_.size() - 1,
                              static_cast<std::size_t>(static_cast<double>(begin) / part));
      const auto until = static_cast<Cycles>(std::ceil(part * static_cast<double>(n + 1)));
      const Cycles here = std::max(begin + 1, std::min(end, until));
      parts_[n].*what += static_cast<double>(here - begin);
      begin = here;
    }
  }
  Cycles end_;
  std::vector<SmShares>& parts_;
  std::vector<std::tuple<Cycles, int, int>> changes_;
};

void normalise(SmShares& s) {
  const double all = s.busy + s.waiting + s.idle;
  if (all > 0) s.busy /= all, s.waiting /= all, s.idle /= all;
}

}  // namespace

GpuTimeline add_to_trace(const RecordedLaunch& launch, const char* step_file,
                         std::size_t most_bytes, emulator::Trace& trace) {
  constexpr std::size_t kEventBytes = 40;  // of a file, at least
  constexpr std::size_t kParts = 64;
  const Blocks blocks(launch);
  GpuTimeline result;
  result.blocks = blocks.order.size();
  result.begins_off_ns = blocks.off_ns;
  result.moved_ns = blocks.moved_ns;

  std::vector<emulator::Members> members;
  for (const RecordedKernel& k : launch.kernels) {
    emulator::Members& all = members.emplace_back();
    for (const RecordedMember& m : k.members)
      if (const auto name = launch.texts.find(m.name); name != launch.texts.end())
        all.push_back({name->second.c_str(), m.offset, m.bytes, m.element_bytes,
                       {m.extents[0], m.extents[1], 0, 0, 0}});
  }
  std::size_t events = 0, full = 0;
  std::map<std::uint32_t, std::vector<std::pair<std::size_t, std::size_t>>> of_sm;
  for (const auto& [ns, kernel, number] : blocks.order) {
    const Block block = blocks.read(kernel, number);
    of_sm[block.sm].emplace_back(kernel, number);
    result.end_ns = std::max(result.end_ns, block.end);
    for (std::size_t w = 0; w < block.warps.size(); ++w)
      if (const Warp& warp = block.warps[w]; warp.full && full++ == 0)
        result.lost = fmt::format(
            "warp {} of block {} after {:.1f} us", w,
            grid_index(launch.kernels[kernel], number),
            static_cast<double>(warp.events.empty() ? block.begin : warp.events.back().end) / 1000);
    if (trace.blocks() == 0 || events * kEventBytes < most_bytes) {
      BlockWriter(launch, members[kernel], block, step_file, trace);
      for (const Warp& w : block.warps) events += w.events.size();
    } else {
      trace.omit_block();
    }
  }
  if (full > 0)
    result.lost = fmt::format("rings of {} warps were full; lost is the last part of their time, "
                              "first of {}",
                              full, result.lost);
  result.sms = of_sm.size();
  if (result.end_ns == 0) return result;
  result.over_time.resize(kParts);
  SmTimes times(result.end_ns, result.over_time);
  for (const auto& [sm, some] : of_sm) {
    for (const auto& [kernel, number] : some) times.add(blocks.read(kernel, number));
    times.finish();
  }
  for (SmShares& part : result.over_time) {
    result.shares.busy += part.busy, result.shares.waiting += part.waiting;
    result.shares.idle += part.idle;
    normalise(part);
  }
  normalise(result.shares);
  return result;
}

}  // namespace attn
