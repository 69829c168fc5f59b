#include "emulator/races.h"

#include <algorithm>

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

std::uint32_t Races::event_of(const Event& event) {
  events_.push_back(event);
  events_.back().block = block_[event.thread];
  return static_cast<std::uint32_t>(events_.size() - 1) | (event.who >= threads_ ? kAsync : 0);
}

bool Races::ordered(const Event& before, const Event& now) const {
  return order_.knows(now.thread, before.who, before.epoch);
}

// Instructions that go on by themselves see what ordinary code has written after a fence only. PTX
// ISA, "Async proxy".
bool Races::unfenced(const Event& before, const Event& now) const {
  const bool by_itself = now.who >= threads_ && now.kind == Kind::read;
  return by_itself && before.who < threads_ &&
         (proxies_ == 0 || !order_.knows(now.thread, proxies_ + before.who, before.epoch));
}

inline bool Races::conflicts_with(std::uint32_t number, const Touch& now) const {
  if (number == 0 || number == now.number) return false;
  if (number < all_know_ && !(now.number & kAsync)) return false;  // most of them
  const Event& before = event(number);
  if (is_atomic(before.kind) && is_atomic(now.kind)) return false;
  return !ordered(before, event(now.number)) || unfenced(before, event(now.number));
}

// The access before this one that nothing puts in order with it, or 0.
inline std::uint32_t Races::conflict(const Shadow::Cell& cell, const Touch& now) const {
  if (!cell.mixed) {
    if (conflicts_with(cell.writer[0], now)) return cell.writer[0];
  } else {
    for (std::size_t b = 0; b < Shadow::Cell::kBytes; ++b)
      if ((now.bytes >> b & 1) && conflicts_with(cell.writer[b], now)) return cell.writer[b];
  }
  if (!reads_only(now.kind))
    for (std::size_t r = 0; r < cell.readers; ++r)
      if ((cell.read[r] & now.bytes) && conflicts_with(cell.reader[r], now)) return cell.reader[r];
  return 0;
}

inline void Races::note_read(Shadow::Cell& cell, const Touch& now) {
  if (cell.since != barriers_) {
    // The threads' reads are known to all; a read by an instruction that goes on by itself is not.
    std::size_t left = 0;
    for (std::size_t r = 0; r < cell.readers; ++r)
      if (cell.reader[r] & kAsync)
        cell.read[left] = cell.read[r], cell.reader[left++] = cell.reader[r];
    cell.readers = static_cast<std::uint8_t>(left);
    cell.since = barriers_;
  }
  std::size_t slot = 0;
  while (slot < cell.readers && cell.reader[slot] != now.number) ++slot;
  if (slot < cell.readers) {
    cell.read[slot] = static_cast<std::uint8_t>(cell.read[slot] | now.bytes);
    return;
  }
  if (slot == Shadow::Cell::kReaders)
    slot = replaced_++ % Shadow::Cell::kReaders;
  else
    ++cell.readers;
  cell.reader[slot] = now.number;
  cell.read[slot] = static_cast<std::uint8_t>(now.bytes);
}

inline void Races::note_write(Shadow::Cell& cell, const Touch& now) {
  if (now.bytes == Shadow::Cell::kWhole) {
    cell.writer[0] = now.number;
    cell.mixed = false;
    cell.readers = 0;
    return;
  }
  if (!cell.mixed) cell.writer.fill(cell.writer[0]);
  cell.mixed = true;
  for (std::size_t b = 0; b < Shadow::Cell::kBytes; ++b)
    if (now.bytes >> b & 1) cell.writer[b] = now.number;
  std::size_t left = 0;
  for (std::size_t r = 0; r < cell.readers; ++r)
    if (const unsigned others = cell.read[r] & ~now.bytes)
      cell.read[left] = static_cast<std::uint8_t>(others), cell.reader[left++] = cell.reader[r];
  cell.readers = static_cast<std::uint8_t>(left);
}

// An atomic right after a plain write by its thread: who knows of one knows of the other, and the
// plain write is the one that other atomics may race with.
inline bool Races::stands_for(const Shadow::Cell& cell, const Touch& now) const {
  if (now.kind != Kind::atomic || cell.mixed || cell.writer[0] == 0) return false;
  const Event &before = event(cell.writer[0]), &atomic = event(now.number);
  return before.kind == Kind::write && before.who == atomic.who && before.epoch == atomic.epoch;
}

const std::string* Races::touch(std::uint32_t number, const Memory& memory, std::size_t first,
                                std::size_t bytes) {
  constexpr std::size_t kBytes = Shadow::Cell::kBytes;
  const std::size_t end = first + bytes;
  const Kind kind = event(number).kind;
  for (std::size_t at = first / kBytes; at * kBytes < end; ++at) {
    Shadow::Cell& cell = memory.shadow.at(at);
    const std::size_t begin = at * kBytes;
    unsigned mask = Shadow::Cell::kWhole;
    if (begin < first) mask &= mask << (first - begin);
    if (begin + kBytes > end) mask &= Shadow::Cell::kWhole >> (begin + kBytes - end);
    const Touch now{number, kind, mask};
    if (const std::uint32_t before = conflict(cell, now)) {
      error_ = text(event(before), event(number), memory.name(std::max(first, begin)));
      return &error_;
    }
    if (!memory.starts_written && kind != Kind::write)
      for (std::size_t b = 0; b < kBytes && !never_written_; ++b)
        if ((mask >> b & 1) && cell.writer[cell.mixed ? b : 0] == 0)
          never_written_ =
              memory.name(begin + b) + " was " + done(event(number)) + ", where nobody had written";
    if (reads_only(kind))
      note_read(cell, now);
    else if (!stands_for(cell, now))
      note_write(cell, now);
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
  // Who issued it goes on at once, and knows that it is done after a wait.
  if (before.who >= threads_ && !order_.knows(before.thread, before.who, before.epoch))
    return s + " before a wait for it";
  if (before.block != now.block) return s + " with no release and acquire between";
  return s + " with no barrier between";
}

}  // namespace attn::emulator
