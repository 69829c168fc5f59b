/// \file
/// Finds races: two accesses to one byte, one of them a write, that no barrier has put in order;
/// and reads of shared memory that nobody has written.
///
/// Accesses of ordinary code come from the compiler (accesses.cpp); instructions report their own.
/// Each byte's cell remembers who wrote it last, who changed it last by an atomic since, and all who
/// have read it since.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
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
  /// Lanes of one warp that have read the same bytes in one epoch, at one place; or, alone, an
  /// instruction that goes on by itself.
  struct Reader {
    std::uint32_t number;         // of an event: one of the lanes'
    std::uint32_t first, lanes;   // the number of lane 0 among those who do things, and a bit each
    std::uint32_t epoch, place;   // places that differ have, but for luck, different numbers
    std::uint8_t bytes;           // which of the cell's, a bit each
    bool operator==(const Reader& other) const {
      return first == other.first && epoch == other.epoch && place == other.place &&
             bytes == other.bytes;
    }
  };
  /// Four bytes of memory. Numbers are those of events; 0 is none.
  struct Cell {
    static constexpr std::size_t kBytes = 4;
    static constexpr unsigned kWhole = 0xF;
    std::array<std::uint32_t, kBytes>
        writer{};                // of each byte if they are mixed; else the first is all bytes'
    std::uint32_t atomic = 0;    // the last one since that write: it has seen those before it
    std::uint32_t since = 0;     // the readers' barrier of the whole block
    std::vector<Reader> readers;  // since the last write, and since that barrier
    std::uint8_t atomic_bytes = 0;
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
  /// One access, or what an instruction does piece by piece.
  struct Access {
    std::size_t who;     // does it: the thread, or a number of the instruction's (order.h)
    std::size_t thread;  // has issued it
    std::uint32_t epoch;
    Kind kind;
    const char* what;  // an instruction, or null: ordinary code
    Where where;
    bool proxy = false;      // reads by itself what ordinary code may have written: after a fence
    bool unwaited = false;   // no wait says that it is done
    std::uint32_t number = 0;  // of its event, once there is one
  };
  /// Of thread t.
  Access by_thread(std::size_t t, Kind kind, const char* what, const Where& where) const {
    return {t, t, order_.now(t), kind, what, where};
  }
  /// A line of what is wrong, if it is, or null.
  const std::string* touch(Access& now, const Memory& memory, std::size_t first,
                           std::size_t bytes);
  /// Thread t has waited for its cp.async, number `who`, up to group `done`. They count as ordinary
  /// code of that moment.
  void copies_done(std::size_t t, std::size_t who, std::uint32_t done);

  /// The first read, or atomic, of shared memory that nobody had written, or nothing. A write that
  /// comes after it is a race, or not.
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
  using Cell = Shadow::Cell;
  using Reader = Shadow::Reader;
  struct Event : Access {
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
  static constexpr std::uint32_t kLanes = 32;

  bool by_itself(const Access& a) const { return a.who >= threads_; }
  const Event& event(std::uint32_t number) const { return events_[number & ~kAsync]; }
  std::uint32_t number_of(Access& now);
  Reader reader_of(const Access& now, unsigned bytes) const;
  bool all_know(std::uint32_t number) const { return number - 1 < all_know_ - 1; }
  bool conflicts_with(std::uint32_t before, const Access& now) const;
  std::optional<Event> conflict(const Cell& cell, const Access& now, unsigned& bytes) const;
  std::optional<Event> reading(const Cell& cell, const Access& now, unsigned& bytes) const;
  bool read_before(Cell& cell, const Access& now, const Reader& reader) const;
  void note_read(Cell& cell, Access& now, Reader reader);
  static void note_write(Cell& cell, std::uint32_t number, unsigned bytes);
  bool ordered(const Access& before, const Access& now) const;
  bool unfenced(const Access& before, const Access& now) const;
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
  // Of cp.async by number: in which epoch of its thread each group was waited for.
  std::map<std::size_t, std::vector<std::uint32_t>> copies_;
};

}  // namespace attn::emulator
