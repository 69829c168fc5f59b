/// \file
/// Finds races: two accesses to one byte, one of them a write, that no barrier has put in order;
/// and reads of shared memory that nobody has written.
///
/// Accesses of ordinary code come from the compiler (accesses.cpp); instructions report their own.
/// Each byte's cell remembers who wrote it last, and some of those who have read it since.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "emulator/order.h"
#include "emulator/place.h"

namespace attn::emulator {

enum class Kind : std::uint8_t { read, write, atomic, atomic_read };
inline bool reads_only(Kind kind) { return kind == Kind::read || kind == Kind::atomic_read; }
inline bool is_atomic(Kind kind) { return kind == Kind::atomic || kind == Kind::atomic_read; }

/// The cells of one piece of memory, a page of them at a time.
class Shadow {
 public:
  /// Four bytes of memory. Numbers are those of events; 0 is none. Of the readers since the last
  /// write, and since the last barrier of the whole block, there are some.
  struct Cell {
    static constexpr std::size_t kBytes = 4, kReaders = 4;
    static constexpr unsigned kWhole = 0xF;
    std::array<std::uint32_t, kBytes>
        writer{};  // of each byte if they are mixed; else the first is all bytes'
    std::array<std::uint32_t, kReaders> reader{};
    std::array<std::uint8_t, kReaders> read{};  // which of the bytes, a bit each
    std::uint32_t since = 0;                    // the readers' barrier of the whole block
    std::uint8_t readers = 0;
    bool mixed = false;
  };
  Cell& at(std::size_t cell) {
    const std::size_t page = cell / kPage;
    if (page >= pages_.size()) pages_.resize(page + 1);
    if (!pages_[page]) pages_[page] = std::make_unique<std::array<Cell, kPage>>();
    return (*pages_[page])[cell % kPage];
  }
  void clear() {
    for (auto& page : pages_)
      if (page) page->fill(Cell{});
  }

 private:
  static constexpr std::size_t kPage = 512;
  std::vector<std::unique_ptr<std::array<Cell, kPage>>> pages_;
};

class Races {
 public:
  /// What is said of a byte of some memory, "byte 8 of shared memory", and of a thread by number
  /// and by the block that had it, "thread (3,0,0) of block (1,0,0)".
  using Name = std::function<std::string(std::size_t)>;
  using ThreadName = std::function<std::string(std::size_t thread, std::uint32_t block)>;
  Races(std::size_t threads, ThreadName thread);
  Order& order() { return order_; }
  /// From here on these threads are those of another block.
  void start_block(std::size_t first, std::size_t count, std::uint32_t block) {
    std::fill_n(block_.begin() + static_cast<std::ptrdiff_t>(first), count, block);
    for (std::size_t t = first; t < first + count; ++t) order_.start_again(t);
  }

  struct Memory {
    Shadow& shadow;
    const Name& name;     // of a byte
    bool starts_written;  // shared memory holds nothing in the beginning
  };
  /// A line of what is wrong, if this access of thread t is, or null. `what`: an instruction, or
  /// null of ordinary code.
  const std::string* access(std::size_t t, Kind kind, const char* what, const Where& where,
                            const Memory& memory, std::size_t first, std::size_t bytes) {
    if (kind == Kind::read && one_more(memory.shadow, first, bytes)) return nullptr;
    const std::uint32_t epoch = order_.now(t);
    const std::uintptr_t key = where.key() * 4 + static_cast<std::uintptr_t>(kind);
    Recent& recent = recent_[t][(key ^ key >> 6) % Recents::kNumber];
    if (recent.key != key || recent.epoch != epoch)
      recent = {key, epoch, event_of({t, epoch, t, kind, what, where})};
    return touch(recent.event, memory, first, bytes);
  }
  /// The same by an instruction that goes on by itself, as number `who` and in its epoch `epoch`,
  /// issued by thread t.
  const std::string* async(std::size_t t, std::size_t who, std::uint32_t epoch, Kind kind,
                           const char* what, const Where& where, const Memory& memory,
                           std::size_t first, std::size_t bytes) {
    return touch(event_of({who, epoch, t, kind, what, where}), memory, first, bytes);
  }

  /// The first read, or atomic, of shared memory that nobody had written, or nothing. A write that comes after
  /// it is a race, or not.
  std::optional<std::string> never_written() const { return never_written_; }

  /// All threads have met: whatever threads did before is in order before all that follows.
  void all_met() {
    all_know_ = static_cast<std::uint32_t>(events_.size());
    ++barriers_;
  }
  /// `fence.proxy.async` of thread t: what it knows of, instructions that go on by themselves may
  /// read.
  void fence_proxy(std::size_t t);

 private:
  struct Event {
    std::size_t who;
    std::uint32_t epoch;
    std::size_t thread;
    Kind kind;
    const char* what;  // an instruction, or nullptr: ordinary code
    Where where;
    std::uint32_t block = 0;
  };
  struct Recent {
    std::uintptr_t key = 0;
    std::uint32_t epoch = 0, event = 0;
  };
  struct Recents
      : std::array<Recent, 16> {  // a thread's last events: a loop comes by the same places again
    static constexpr std::size_t kNumber = 16;
  };
  // Numbers of events of instructions that go on by themselves have this bit: `all_know_` says
  // nothing of them.
  static constexpr std::uint32_t kAsync = 1u << 31;
  struct Touch {
    std::uint32_t number;
    Kind kind;
    unsigned bytes;  // which of the cell's, a bit each
  };
  const std::string* touch(std::uint32_t number, const Memory& memory, std::size_t first,
                           std::size_t bytes);
  // Fast path: all threads know of the write, and the reader slots are full; one reader in eight
  // takes another's slot.
  bool one_more(Shadow& shadow, std::size_t first, std::size_t bytes) {
    if (first % Shadow::Cell::kBytes + bytes > Shadow::Cell::kBytes) return false;
    const Shadow::Cell& cell = shadow.at(first / Shadow::Cell::kBytes);
    return !cell.mixed && cell.writer[0] - 1 < all_know_ - 1 && cell.since == barriers_ &&
           cell.readers == Shadow::Cell::kReaders && ++passed_ % 8 != 0;
  }
  const Event& event(std::uint32_t number) const { return events_[number & ~kAsync]; }
  std::uint32_t conflict(const Shadow::Cell& cell, const Touch& now) const;
  bool conflicts_with(std::uint32_t before, const Touch& now) const;
  bool stands_for(const Shadow::Cell& cell, const Touch& now) const;
  void note_read(Shadow::Cell& cell, const Touch& now);
  static void note_write(Shadow::Cell& cell, const Touch& now);
  std::uint32_t event_of(const Event& event);
  bool ordered(const Event& before, const Event& now) const;
  bool unfenced(const Event& before, const Event& now) const;
  std::string done(const Event& event) const;
  std::string text(const Event& before, const Event& now, const std::string& where) const;

  ThreadName thread_;
  std::vector<std::uint32_t> block_;  // of each thread
  Order order_;
  std::size_t threads_;
  std::size_t proxies_ = 0;  // the number of thread 0's proxy, once there is one
  std::vector<Event> events_;
  // Events before this one, of threads; barriers of the whole block.
  std::uint32_t all_know_ = 1, barriers_ = 0;
  std::vector<Recents> recent_;
  std::optional<std::string> never_written_;
  std::string error_;
  std::uint32_t replaced_ = 0;  // which reader makes room next
  std::uint32_t passed_ = 0;    // readers that did not have to be remembered, and some that had
};

}  // namespace attn::emulator
