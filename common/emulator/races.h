/// \file
/// Finds races: two accesses to one byte, one of them a write, that no barrier has put in order;
/// and reads of shared memory that nobody has written.
///
/// Accesses of ordinary code come from the compiler (accesses.cpp); instructions report their own.
/// Each byte's cell remembers who wrote it last, who changed it last by an atomic since, and all
/// who have read it since.
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
  /// Threads of one warpgroup, a bit each.
  struct Threads {
    static constexpr std::uint32_t kNumber = 128;
    std::array<std::uint64_t, 2> bits{};
    static Threads one(std::uint32_t t) {
      Threads threads;
      threads.bits[t / 64] = std::uint64_t{1} << t % 64;
      return threads;
    }
    bool any(const Threads& of) const {
      return ((bits[0] & of.bits[0]) | (bits[1] & of.bits[1])) != 0;
    }
    bool none() const { return (bits[0] | bits[1]) == 0; }
    void add(const Threads& more) { bits[0] |= more.bits[0], bits[1] |= more.bits[1]; }
    void remove(const Threads& some) { bits[0] &= ~some.bits[0], bits[1] &= ~some.bits[1]; }
  };
  /// Threads that have read the same bytes in one epoch, at one place; or, alone, an instruction
  /// that goes on by itself.
  struct Reader {
    std::uint32_t number = 0;  // of an event: one of the threads'
    std::uint32_t first = 0;   // the number of the first bit (order.h)
    std::uint32_t epoch = 0;
    std::uint32_t place_and_bytes = 0;  // places that differ have, but for luck, other numbers
    Threads threads;
    unsigned bytes() const { return place_and_bytes & 0xF; }  // which of the cell's, a bit each
    bool operator==(const Reader& other) const {
      return first == other.first && epoch == other.epoch &&
             place_and_bytes == other.place_and_bytes;
    }
  };
  /// Mostly one or two, which lie in the cell.
  class Readers {
   public:
    Reader* begin() { return more_ ? more_->data() : few_.data(); }
    Reader* end() { return begin() + count_; }
    const Reader* begin() const { return more_ ? more_->data() : few_.data(); }
    const Reader* end() const { return begin() + count_; }
    void add(const Reader& reader) {
      if (!more_ && count_ == few_.size())
        more_ = std::make_unique<std::vector<Reader>>(few_.begin(), few_.end());
      if (more_ && count_ == more_->size()) more_->resize(2 * count_);
      begin()[count_++] = reader;
    }
    template <class Which>
    void remove(Which which) {
      count_ = static_cast<std::uint32_t>(std::remove_if(begin(), end(), which) - begin());
    }
    void clear() { count_ = 0; }
    std::size_t size() const { return count_; }
    std::uint32_t since = 0;  ///< the meeting of all before them

   private:
    std::uint32_t count_ = 0;
    std::unique_ptr<std::vector<Reader>> more_;
    std::array<Reader, 2> few_;
  };
  /// Four bytes of memory. Numbers are those of events; 0 is none. To load cells takes most of the
  /// time: they are small.
  struct Cell {
    static constexpr std::size_t kBytes = 4;
    static constexpr unsigned kWhole = 0xF, kMaxEvents = (1u << 28) - 1;
    /// Who wrote them last; null if it is one for all, `writer`.
    std::unique_ptr<std::array<std::uint32_t, kBytes>> writers;
    std::uint32_t writer = 0;
    std::uint32_t atomic : 28 = 0;       // the last one since that write has seen those before it
    std::uint32_t atomic_bytes : 4 = 0;  // a bit each
    Readers readers;                     // since the last write, and since all have met
    std::uint32_t writer_of(std::size_t byte) const { return writers ? (*writers)[byte] : writer; }
  };
  Cell& at(std::size_t cell) {
    const std::size_t page = cell / kPage;
    if (page >= pages_.size()) pages_.resize(page + 1);
    if (!pages_[page]) pages_[page] = std::make_unique<std::array<Cell, kPage>>();
    return (*pages_[page])[cell % kPage];
  }
  /// Global memory holds something in the beginning, shared memory nothing. And of the entries of
  /// global memory's readers, of whom there is no end, some are remembered.
  static constexpr std::size_t kMaxGlobal = 8;
  const bool global = false;
  explicit Shadow(bool is_global) : global(is_global) {}

  /// The last event before the threads that use this memory have all met, but for that of an
  /// instruction that goes on by itself; and how often they have.
  std::uint32_t all_know = 0, meetings = 0;

  void clear() {
    for (auto& page : pages_)
      if (page) page = std::make_unique<std::array<Cell, kPage>>();
  }

 private:
  static constexpr std::size_t kPage = 512;
  std::vector<std::unique_ptr<std::array<Cell, kPage>>> pages_;
};

class Races {
 public:
  /// What is said of a byte of some memory, "byte 8 of shared memory", and of thread t of a block,
  /// "thread (3,0,0) of block (1,0,0)".
  using Name = std::function<std::string(std::size_t)>;
  using ThreadName = std::function<std::string(std::size_t thread, std::uint32_t block)>;
  Races() : events_(1) {}
  Order& order() { return order_; }
  /// What the threads that are added from here on are called: those of a launch.
  void name_threads(ThreadName name) { names_.push_back(std::move(name)); }
  /// The threads of one more resident block: the number of the first.
  std::size_t add_threads(std::size_t count);
  /// From here on these threads are those of another block.
  void start_block(std::size_t first, std::size_t count, std::uint32_t block);

  struct Memory {
    Shadow& shadow;
    const Name& name;  // of a byte
  };
  /// One access, or what an instruction does piece by piece.
  struct Access {
    std::size_t who;     // does it: the thread, or a number of the instruction's (order.h)
    std::size_t thread;  // has issued it
    std::uint32_t epoch;
    Kind kind;
    const char* what;  // an instruction, or null: ordinary code
    Where where;
    std::optional<Space> proxy = {};  // of the async proxy: after ordinary code, a fence is needed
    bool unwaited = false;            // a wait with `.read` does not say that it is done
    const void* at = nullptr;         // of ordinary code: the first byte
    std::uint32_t number = 0;         // of its event, once there is one
  };
  /// Of thread t.
  Access by_thread(std::size_t t, Kind kind, const char* what, const Where& where,
                   const void* at) const {
    return {t, t, order_.now(t), kind, what, where, {}, false, at};
  }
  /// Whether a read by thread t needs no more than this: in this epoch it has read these bytes at
  /// this place before, or another thread has, and all know of what was written.
  bool read_before(std::size_t t, const Where& where, Shadow& shadow, std::size_t first,
                   std::size_t bytes) const {
    const std::size_t past = first % Shadow::Cell::kBytes;
    if (past + bytes > Shadow::Cell::kBytes) return false;
    Shadow::Cell& cell = shadow.at(first / Shadow::Cell::kBytes);
    const auto who = static_cast<std::uint32_t>(t);
    const unsigned mask = ((1u << bytes) - 1) << past;
    const Shadow::Reader reader = reader_at(who, order_.now(t), Kind::read, where, mask);
    for (Shadow::Reader& r : cell.readers) {
      if (!(r == reader)) continue;
      if (!r.threads.any(reader.threads)) {
        if (cell.readers.since != shadow.meetings || cell.writers || cell.atomic != 0 ||
            (cell.writer - 1 >= shadow.all_know && !(shadow.global && cell.writer == 0)))
          return false;
        r.threads.add(reader.threads);
      }
      return true;
    }
    return false;
  }
  /// A line of what is wrong, if it is, or null.
  const std::string* touch(Access& now, const Memory& memory, std::size_t first, std::size_t bytes);
  /// Thread t has waited for its cp.async, number `who`, up to group `done`. They count as ordinary
  /// code of that moment.
  void copies_done(std::size_t t, std::size_t who, std::uint32_t done);

  /// The first read, or atomic, of uninitialised shared memory, or nothing. A write that
  /// comes after it is a race, or not.
  std::optional<std::string> never_written() const { return never_written_; }

  /// A line if two lanes of a warp have stored different values to one word by one instruction, or
  /// null. The same value is no race.
  const std::string* different_values();

  /// All threads have met that use this memory: whatever they did before is in order before all
  /// that follows.
  void all_met(Shadow& shadow) const {
    shadow.all_know = static_cast<std::uint32_t>(events_.size() - 1);
    ++shadow.meetings;
  }

  /// `__threadfence_block` and `__threadfence` of thread t: what it knows before is known to
  /// whoever reads, and then fences, what it stores after it by an atomic. Source: CUDA C++
  /// Programming Guide, "Memory Fence Functions".
  enum class Scope { block, gpu };
  void fence(std::size_t t, Scope scope);
  /// Thread t reads and changes a word in one go, or only loads it (acquires alone) or only stores
  /// it (releases alone). `place`: what is known to whoever acquires there; `scope`: from which
  /// fence on an atomic without order of its own makes known. PTX ISA, "Release and acquire
  /// patterns": the fence and the atomic are of one thread, so that others' fences before a barrier
  /// do not count.
  void atomic(std::size_t t, Meeting& place, Scope scope, bool releases, bool acquires);
  /// Of words in global memory.
  Meeting& place(const void* at) { return places_[at]; }

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
  // Numbers of events of instructions that go on by themselves have this bit: `all_know` says
  // nothing of them.
  static constexpr std::uint32_t kAsync = 1u << 31;

  bool by_itself(const Access& a) const { return !order_.is_thread(a.who); }
  const Event& event(std::uint32_t number) const { return events_[number & ~kAsync]; }
  std::uint32_t number_of(Access& now);
  static Reader reader_at(std::uint32_t who, std::uint32_t epoch, Kind kind, const Where& where,
                          unsigned bytes) {
    const std::uint32_t bit = who % Shadow::Threads::kNumber;
    const std::uintptr_t place = where.key() * 4 + static_cast<std::uintptr_t>(kind);
    return {0, who - bit, epoch, static_cast<std::uint32_t>(place) << 4 | bytes,
            Shadow::Threads::one(bit)};
  }
  bool conflicts_with(std::uint32_t before, const Access& now, const Shadow& shadow) const;
  std::optional<Event> conflict(const Shadow& shadow, const Cell& cell, const Access& now,
                                unsigned& bytes, const Event*& same) const;
  std::optional<Event> reading(const Shadow& shadow, const Cell& cell, const Access& now,
                               unsigned& bytes) const;
  void note_read(const Shadow& shadow, Cell& cell, Access& now, Reader reader);
  static void note_write(Cell& cell, std::uint32_t number, unsigned bytes);
  bool ordered(const Access& before, const Access& now) const;
  bool unfenced(const Access& before, const Access& now) const;
  bool one_store(const Access& before, const Access& now) const;
  std::string done(const Event& event) const;
  std::string text(const Event& before, const Event& now, const std::string& where) const;

  struct Stored {  // by a lane of a warp; another one stores to it by the same instruction
    Event before, now;
    const Name* name;
    std::size_t byte, bytes;
    std::array<std::byte, 16> value;
  };
  struct Fences {
    std::shared_ptr<const Epochs> block, gpu;  // what it knew at its last fence of that scope
    Meeting seen;                              // what it will know at its next one
  };
  std::string thread_name(std::size_t t, std::uint32_t block) const;

  std::vector<ThreadName> names_;
  Order order_;
  // The vectors are by a thread's number.
  std::vector<std::uint32_t> block_;
  std::vector<std::uint32_t> named_by_;  // 1 + the index in names_
  std::vector<Event> events_;
  std::vector<Recents> recent_;
  std::vector<Fences> fences_;
  std::map<const void*, Meeting> places_;
  std::optional<std::string> never_written_;
  std::optional<Stored> stored_;
  std::string error_;
  std::size_t replaced_ = 0;  // which reader of global memory makes room next
  // Of cp.async by number: in which epoch of its thread each group was waited for.
  std::map<std::size_t, std::vector<std::uint32_t>> copies_;
};

}  // namespace attn::emulator
