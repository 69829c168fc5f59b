#include "emulator/races.h"

#include <algorithm>
#include <bit>

namespace attn::emulator {

Races::Races(std::size_t threads, ThreadName thread)
    : thread_(std::move(thread)),
      block_(threads),
      order_(threads),
      threads_(threads),
      events_(1),
      recent_(threads) {}

void Races::fence_proxy(std::size_t t) {
  if (proxies_ == 0) proxies_ = order_.add(threads_);
  order_.repeat(t, proxies_);
}

void Races::copies_done(std::size_t t, std::size_t who, std::uint32_t done) {
  order_.learn(t, who, done);
  auto& epochs = copies_[who];
  if (epochs.size() < done) epochs.resize(done, order_.now(t));
}

// The number of its event, which threads that come by the same place again have already.
std::uint32_t Races::number_of(Access& now) {
  if (now.number != 0) return now.number;
  Recent* recent = nullptr;
  if (!by_itself(now)) {
    const std::uintptr_t key = now.where.key() * 4 + static_cast<std::uintptr_t>(now.kind);
    recent = &recent_[now.thread][(key ^ key >> 6) % Recents::kNumber];
    if (recent->key == key && recent->epoch == now.epoch) return now.number = recent->event;
    *recent = {key, now.epoch, 0};
  }
  events_.push_back({now, block_[now.thread]});
  now.number = static_cast<std::uint32_t>(events_.size() - 1) | (by_itself(now) ? kAsync : 0);
  if (recent) recent->event = now.number;
  return now.number;
}

inline Shadow::Reader Races::reader_of(const Access& now, unsigned bytes) const {
  const std::uintptr_t key = now.where.key() * 4 + static_cast<std::uintptr_t>(now.kind);
  const auto who = static_cast<std::uint32_t>(now.who);
  const std::uint32_t lane = by_itself(now) ? 0 : who % kLanes;
  return {0, who - lane, 1u << lane, now.epoch, static_cast<std::uint32_t>(key),
          static_cast<std::uint8_t>(bytes)};
}

bool Races::ordered(const Access& before, const Access& now) const {
  return order_.knows(now.thread, before.who, before.epoch);
}

// Instructions that go on by themselves see what ordinary code and cp.async have written after a
// fence only. PTX ISA, "Async proxy".
bool Races::unfenced(const Access& before, const Access& now) const {
  if (!now.proxy) return false;
  std::size_t who = before.who;
  std::uint32_t epoch = before.epoch;
  if (by_itself(before)) {
    const auto copies = copies_.find(who);
    if (copies == copies_.end() || epoch > copies->second.size()) return false;
    who = before.thread;
    epoch = copies->second[epoch - 1];
  }
  return proxies_ == 0 || !order_.knows(now.thread, proxies_ + who, epoch);
}

inline bool Races::conflicts_with(std::uint32_t number, const Access& now) const {
  if (number == 0 || number == now.number) return false;
  if (number < all_know_ && !by_itself(now)) return false;  // most of them
  return !ordered(event(number), now) || unfenced(event(number), now);
}

// The access before this one that nothing puts in order with it, or nothing; and to which of `bytes`.
inline std::optional<Races::Event> Races::conflict(const Cell& cell, const Access& now,
                                                   unsigned& bytes) const {
  if (!cell.mixed) {
    if (conflicts_with(cell.writer[0], now)) return event(cell.writer[0]);
  } else {
    for (std::size_t b = 0; b < Cell::kBytes; ++b)
      if ((bytes >> b & 1) && conflicts_with(cell.writer[b], now)) {
        bytes = 1u << b;
        return event(cell.writer[b]);
      }
  }
  if ((cell.atomic_bytes & bytes) && !is_atomic(now.kind) && conflicts_with(cell.atomic, now)) {
    bytes &= cell.atomic_bytes;
    return event(cell.atomic);
  }
  return reads_only(now.kind) ? std::nullopt : reading(cell, now, bytes);
}

// The read before this write that nothing puts in order with it.
std::optional<Races::Event> Races::reading(const Cell& cell, const Access& now,
                                           unsigned& bytes) const {
  for (const Reader& r : cell.readers) {
    if (!(r.bytes & bytes) || (r.number < all_know_ && !by_itself(now))) continue;
    Event before = event(r.number);
    if (is_atomic(before.kind) && is_atomic(now.kind)) continue;
    for (std::uint32_t lanes = r.lanes; lanes != 0; lanes &= lanes - 1) {
      before.who = r.first + static_cast<std::uint32_t>(std::countr_zero(lanes));
      if (!by_itself(before)) before.thread = before.who;
      if (ordered(before, now)) continue;
      bytes &= r.bytes;
      return before;
    }
  }
  return std::nullopt;
}

// Whether nothing is to be done: in this epoch the thread has read these bytes at this place
// before, or another lane of its warp has, and all know of what was written.
inline bool Races::read_before(Cell& cell, const Access& now, const Reader& reader) const {
  for (Reader& r : cell.readers) {
    if (!(r == reader)) continue;
    if (r.lanes & reader.lanes) return true;
    if (by_itself(now) || cell.since != barriers_ || cell.mixed || cell.atomic != 0 ||
        !all_know(cell.writer[0]))
      return false;
    r.lanes |= reader.lanes;
    return true;
  }
  return false;
}

inline void Races::note_read(Cell& cell, Access& now, Reader reader) {
  if (cell.since != barriers_) {
    // The threads' reads are known to all; a read by an instruction that goes on by itself is not.
    std::erase_if(cell.readers, [](const Reader& r) { return !(r.number & kAsync); });
    cell.since = barriers_;
  }
  for (Reader& r : cell.readers) {
    if (r == reader) {
      r.lanes |= reader.lanes;
      return;
    }
    // Who knows of a thread's last read knows of those before.
    if (r.first == reader.first && r.bytes == reader.bytes && event(r.number).kind == now.kind)
      r.lanes &= ~reader.lanes;
  }
  std::erase_if(cell.readers, [](const Reader& r) { return r.lanes == 0; });
  reader.number = number_of(now);
  cell.readers.push_back(reader);
}

inline void Races::note_write(Cell& cell, std::uint32_t number, unsigned bytes) {
  if (bytes == Cell::kWhole) {
    cell.writer[0] = number;
    cell.mixed = false;
    cell.atomic = cell.atomic_bytes = 0;
    cell.readers.clear();
    return;
  }
  if (!cell.mixed) cell.writer.fill(cell.writer[0]);
  cell.mixed = true;
  for (std::size_t b = 0; b < Cell::kBytes; ++b)
    if (bytes >> b & 1) cell.writer[b] = number;
  cell.atomic_bytes = static_cast<std::uint8_t>(cell.atomic_bytes & ~bytes);
  for (Reader& r : cell.readers) r.bytes = static_cast<std::uint8_t>(r.bytes & ~bytes);
  std::erase_if(cell.readers, [](const Reader& r) { return r.bytes == 0; });
}

const std::string* Races::touch(Access& now, const Memory& memory, std::size_t first,
                                std::size_t bytes) {
  constexpr std::size_t kBytes = Cell::kBytes;
  const std::size_t end = first + bytes;
  Reader reader = reader_of(now, Cell::kWhole);
  for (std::size_t at = first / kBytes; at * kBytes < end; ++at) {
    Cell& cell = memory.shadow.at(at);
    const std::size_t begin = at * kBytes;
    unsigned mask = Cell::kWhole;
    if (begin < first) mask &= mask << (first - begin);
    if (begin + kBytes > end) mask &= Cell::kWhole >> (begin + kBytes - end);
    reader.bytes = static_cast<std::uint8_t>(mask);
    if (reads_only(now.kind) && read_before(cell, now, reader)) continue;
    unsigned both = mask;
    if (const auto before = conflict(cell, now, both)) {
      error_ = text(*before, {now, block_[now.thread]},
                    memory.name(begin + static_cast<std::size_t>(std::countr_zero(both))));
      return &error_;
    }
    if (!memory.starts_written && now.kind != Kind::write)
      for (std::size_t b = 0; b < kBytes && !never_written_; ++b)
        if ((mask >> b & 1) && cell.writer[cell.mixed ? b : 0] == 0)
          never_written_ = memory.name(begin + b) + " was " + done({now, block_[now.thread]}) +
                           ", where nobody had written";
    if (reads_only(now.kind)) {
      note_read(cell, now, reader);
    } else if (is_atomic(now.kind)) {
      cell.atomic = number_of(now);
      cell.atomic_bytes = static_cast<std::uint8_t>(mask);
    } else {
      note_write(cell, number_of(now), mask);
    }
  }
  return nullptr;
}

// "read by thread (0,0,0) at v1_a.cu:5", "written by cp_async_16 of thread (0,0,0) at v1_a.cu:5".
std::string Races::done(const Event& event) const {
  std::string s = reads_only(event.kind)      ? "read by "
                  : event.kind == Kind::write ? "written by "
                                              : "changed by ";
  if (event.what) s.append(event.what).append(" of ");
  return s.append(thread_(event.thread, event.block)).append(" at ").append(event.where.text());
}

std::string Races::text(const Event& before, const Event& now, const std::string& where) const {
  std::string s = "race: " + where + " was " + done(before) + " and then " + done(now);
  if (ordered(before, now)) return s + " with no shared_write_fence between";
  if (before.unwaited)
    return s + ": tma_store_wait waits until shared memory has been read, and no longer";
  // Who issued it goes on at once, and knows that it is done after a wait.
  if (before.who >= threads_ && !order_.knows(before.thread, before.who, before.epoch))
    return s + " before a wait for it";
  if (before.block != now.block) return s + " with no release and acquire between";
  return s + " with no barrier between";
}

}  // namespace attn::emulator
