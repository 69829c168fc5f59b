/// \file
/// Finds races: two accesses to one byte, one of them a write, that no barrier has put in order;
/// and reads of shared memory that no thread has written.
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
#include <utility>
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
    bool operator==(const Threads&) const = default;
    void add(const Threads& more) { bits[0] |= more.bits[0], bits[1] |= more.bits[1]; }
    void remove(const Threads& some) { bits[0] &= ~some.bits[0], bits[1] &= ~some.bits[1]; }
  };
  /// Threads that have read the same bytes in one epoch, at one place; or instructions that go on
  /// by themselves, by their numbers.
  struct Reader {
    std::uint32_t number = 0;  // of an event: one of the threads'
    // Mixed of the place, the epoch and the number of the first bit (order.h): if one of them
    // differs, this differs, but for luck.
    std::uint32_t place_and_bytes = 0;
    Threads threads;
    unsigned bytes() const { return place_and_bytes & 0xF; }  // which of the cell's, a bit each
    bool operator==(const Reader& other) const { return place_and_bytes == other.place_and_bytes; }
  };
  /// Four bytes of memory. Numbers are those of events; 0 is none. To load cells takes most of the
  /// time: one is a line of the cache.
  struct alignas(64) Cell {
    static constexpr std::size_t kBytes = 4, kFew = 2;
    static constexpr unsigned kWhole = 0xF;
    /// What few cells have.
    struct More {
      std::array<std::uint32_t, kBytes> writers{};  // if they are not one for all
      std::uint32_t atomic = 0;     // the last one since that write has seen those before it
      unsigned atomic_bytes = 0;    // a bit each
      std::vector<Reader> readers;  // if they are more than a few
      std::size_t count = 0;        // of them
    };
    std::uint32_t writer = 0;      // who wrote them last, if it is one for all
    std::uint32_t since : 28 = 0;  // all have met so often before these readers
    std::uint32_t few_readers : 2 = 0;
    std::uint32_t written_apart : 1 = 0;
    std::uint32_t many_readers : 1 = 0;
    std::unique_ptr<More> more;
    std::array<Reader, kFew> few;  // readers since the last write, and since all have met

    std::uint32_t writer_of(std::size_t byte) const {
      return written_apart ? more->writers[byte] : writer;
    }
    unsigned atomic_bytes() const { return more ? more->atomic_bytes : 0; }
    More& with_more() {
      if (!more) more = std::make_unique<More>();
      return *more;
    }
    Reader* begin() { return many_readers ? more->readers.data() : few.data(); }
    Reader* end() { return begin() + readers(); }
    const Reader* begin() const { return many_readers ? more->readers.data() : few.data(); }
    const Reader* end() const { return begin() + readers(); }
    std::size_t readers() const { return many_readers ? more->count : few_readers; }
    void add(const Reader& reader) {
      if (!many_readers && few_readers < kFew) {
        few[few_readers] = reader;
        ++few_readers;
        return;
      }
      More& m = with_more();
      if (!many_readers) {
        m.readers.assign(few.begin(), few.end());
        m.count = kFew;
        many_readers = 1;
      }
      if (m.count == m.readers.size()) m.readers.resize(2 * m.count);
      m.readers[m.count++] = reader;
    }
    template <class Which>
    void remove(Which which) {
      const auto left = static_cast<std::size_t>(std::remove_if(begin(), end(), which) - begin());
      if (many_readers)
        more->count = left;
      else
        few_readers = left & 3;
    }
    /// Nothing is known but who wrote it last.
    void begin_with(std::uint32_t number) {
      writer = number;
      written_apart = few_readers = many_readers = 0;
      if (more) more->atomic_bytes = 0;
    }
    /// The state of another one.
    void take(const Cell& other) {
      writer = other.writer, since = other.since, few_readers = other.few_readers;
      written_apart = other.written_apart, many_readers = other.many_readers, few = other.few;
      more = other.more ? std::make_unique<More>(*other.more) : nullptr;
    }
  };
  /// 16 bytes of memory. Until an access is to a part of them, the first cell is for all: copies
  /// and tensor-core operands are of whole ones.
  static constexpr std::size_t kCells = 4, kGroup = kCells * Cell::kBytes;
  class Group;
  /// Instead of the last writer of a cell's bytes: look it up in the cell.
  static constexpr std::uint32_t kLook = ~std::uint32_t{0};
  /// Reads that no cell knows of yet, of shared memory since its threads have last met. Mostly the
  /// threads meet again before one of them writes there, and the reads can be forgotten. Inputs in
  /// global memory are not written at all.
  struct Read {
    std::uint32_t site, first : 24, bytes : 8;
  };
  struct Turn {  // of one thread of a block: its reads from `begin` on
    std::uint32_t who, epoch, block;
    std::size_t begin;
  };
  std::vector<Read> reads;
  std::vector<Turn> turns;
  static constexpr std::size_t kMaxReads = 1 << 18;
  bool has_reads(std::size_t first, std::size_t bytes) {
    if (reads.empty()) return false;
    for (std::size_t p = first / kPageBytes; p * kPageBytes < first + bytes; ++p)
      if (page(p).reads == reads_number_) return true;
    return false;
  }
  /// Whether all of the bytes are of one page, where known(writer) holds of each; then they are
  /// about to be read.
  template <class Known>
  bool may_put_off(std::size_t first, std::size_t bytes, Known known) {
    Page& p = page(first / kPageBytes);
    const std::size_t begin = first % kPageBytes / Cell::kBytes;
    const std::size_t end = (first % kPageBytes + bytes + Cell::kBytes - 1) / Cell::kBytes;
    if (end > kOfPage) return false;
    for (std::size_t cell = begin; cell < end; ++cell)
      if (!known(p.writers[cell])) return false;
    p.reads = reads_number_;
    return true;
  }
  void forget_reads() {
    reads.clear(), turns.clear();
    ++reads_number_;
  }
  /// Whether the threads' meeting does not settle them: a proxy fence is missing still before a TMA
  /// load. A block that has no mbarrier has no TMA loads.
  bool keeps_reads = false;
  /// Whether they may be put off. Those of a cluster's blocks do not all meet.
  bool puts_off = false;
  /// An instruction that goes on by itself, which those who know the second know of.
  std::uint32_t async = 0;
  std::shared_ptr<const Epochs> know_async;

  /// Global memory holds something in the beginning, shared memory nothing. And of the entries of
  /// global memory's readers, of whom there is no end, some are remembered.
  static constexpr std::size_t kMaxGlobal = 8;
  const bool global = false;
  explicit Shadow(bool is_global) : puts_off(is_global), global(is_global) {}

  /// The last event before the threads that use this memory have all met, but for that of an
  /// instruction that goes on by itself; and how often they have.
  std::uint32_t all_know = 0, meetings = 0;  // meetings: modulo 2^28

  void clear() {
    for (auto& page : pages_) page = nullptr;
    forget_reads();
  }

 private:
  static constexpr std::size_t kGroups = 128;  // of a page
  static constexpr std::size_t kOfPage = kGroups * kCells, kPageBytes = kOfPage * Cell::kBytes;
  // The first cells of all groups come first. Those of one group are to lie in other sets of the
  // cache: hence a few more.
  static constexpr std::size_t kApart = 16;
  struct Page {
    using Cells = std::array<std::array<Cell, kGroups + kApart>, kCells>;
    std::unique_ptr<Cells> cells;
    std::array<std::uint32_t, kOfPage> writers{};  // who wrote each cell's bytes last, or kLook
    std::array<bool, kOfPage> used{};
    std::array<bool, kGroups> split{};
    std::uint32_t reads = 0;
  };
  std::uint32_t reads_number_ = 1;
  Page& page(std::size_t number) {
    if (number >= pages_.size()) pages_.resize(number + 1);
    std::unique_ptr<Page>& p = pages_[number];
    if (!p) p = std::make_unique<Page>();
    return *p;
  }
  std::vector<std::unique_ptr<Page>> pages_;
};

/// See kGroup.
class Shadow::Group {
 public:
  Group(Shadow& shadow, std::size_t number)
      : page_(shadow.page(number / kGroups)), group_(number % kGroups) {}
  bool split() const { return page_.split[group_]; }
  /// Whether there is more to know of cell c than who wrote it last.
  bool used(std::size_t c) const { return page_.used[kCells * group_ + c]; }
  /// The same, kLook included, of a cell that is used.
  std::uint32_t writer(std::size_t c) const { return page_.writers[kCells * group_ + c]; }
  Cell& cell(std::size_t c) {
    if (!page_.cells) page_.cells = std::make_unique<typename Page::Cells>();
    Cell& cell = (*page_.cells)[c][group_];
    if (!std::exchange(page_.used[kCells * group_ + c], true)) cell.begin_with(writer(c));
    return cell;
  }
  /// From here on each cell is for itself.
  void to_cells() {
    if (std::exchange(page_.split[group_], true) || !used(0)) return;
    for (std::size_t c = 1; c < kCells; ++c) cell(c).take(cell(0));
  }
  /// From here on there is no more to know of `count` cells from c on than who wrote them.
  void write(std::size_t c, std::size_t count, std::uint32_t number) {
    for (std::size_t i = kCells * group_ + c; count > 0; ++i, --count)
      page_.writers[i] = number, page_.used[i] = false;
  }
  /// Readers of cell c have to look at it.
  void look(std::size_t c, std::size_t count) {
    for (std::size_t i = kCells * group_ + c; count > 0; ++i, --count) page_.writers[i] = kLook;
  }
  void join() { page_.split[group_] = false; }

 private:
  Page& page_;
  std::size_t group_;
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
  /// What is remembered of an access.
  struct Facts {
    std::size_t who;     // does it: the thread, or a number of the instruction's (order.h)
    std::size_t thread;  // has issued it
    std::uint32_t epoch;
    Kind kind;
    const char* what;  // an instruction, or null: ordinary code
    Where where;
    std::optional<Space> proxy = {};  // of the async proxy: after ordinary code, a fence is needed
    bool unwaited = false;            // a wait with `.read` does not say that it is done
  };
  /// One access, or what an instruction does piece by piece.
  struct Access : Facts {
    const void* at = nullptr;  // of ordinary code: the first byte
    std::uint32_t number = 0;  // of its event, once there is one
    // What it has found in order before it: neighbouring cells have mostly the same.
    std::uint32_t after = 0;  // the number of a write
    Shadow::Reader after_reads = {};
  };
  /// Of thread t.
  Access by_thread(std::size_t t, Kind kind, const char* what, const Where& where,
                   const void* at) const {
    return {{t, t, order_.now(t), kind, what, where}, at};
  }
  /// Puts off a read by thread t, and says so, if nothing is wrong with it.
  bool put_off(std::size_t t, const char* what, const Where& where, Shadow& shadow,
               std::size_t first, std::size_t bytes);
  /// Notes the access, and says so, if that takes no more than a look at each cell: whoever wrote
  /// it last is known to all, and a write has only reads before it that are. Else nothing is wrong
  /// yet, and touch() has to look.
  bool note_quickly(Access& now, Shadow& shadow, std::size_t first, std::size_t bytes);
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
  void all_met(Shadow& shadow) {
    if (shadow.keeps_reads) note_put_off(shadow);
    shadow.forget_reads();
    shadow.all_know = static_cast<std::uint32_t>(events_.size() - 1);
    shadow.meetings = (shadow.meetings + 1) % (1u << 28);
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
  struct Event : Facts {
    std::uint32_t block = 0;
  };
  struct Recent {
    std::uintptr_t key = 0;
    std::uint32_t epoch = 0, event = 0;
  };
  static constexpr std::size_t kRecent = 16, kRecentReads = 64;
  // Numbers of events of instructions that go on by themselves have this bit: `all_know` says
  // nothing of them.
  static constexpr std::uint32_t kAsync = 1u << 31;

  bool by_itself(const Facts& a) const { return !order_.is_thread(a.who); }
  const Event& event(std::uint32_t number) const { return events_[number & ~kAsync]; }
  std::uint32_t number_of(Access& now);
  static Reader reader_at(std::uint32_t who, std::uint32_t epoch, Kind kind, const Where& where,
                          unsigned bytes) {
    const std::uint32_t bit = who % Shadow::Threads::kNumber;
    std::uint64_t mixed = where.key() * 4 + static_cast<std::uint64_t>(kind);
    mixed = (mixed ^ std::uint64_t{epoch} << 32) * 0x9e3779b97f4a7c15ull ^ (who - bit);
    mixed *= 0xbf58476d1ce4e5b9ull;
    return {0, static_cast<std::uint32_t>(mixed >> 36) << 4 | bytes, Shadow::Threads::one(bit)};
  }
  bool conflicts_with(std::uint32_t before, Access& now, const Shadow& shadow) const;
  std::optional<Event> conflict(const Shadow& shadow, Shadow::Group& group, std::size_t c,
                                Access& now, unsigned& bytes, std::optional<Event>& same) const;
  std::optional<Event> reading(const Shadow& shadow, const Cell& cell, Access& now,
                               unsigned& bytes) const;
  const std::string* touch_cell(Access& now, const Memory& memory, Shadow::Group& group,
                                std::size_t c, std::size_t begin, unsigned mask,
                                const Reader& anywhere, std::optional<Event>& same);
  void note_put_off(Shadow& shadow);
  bool knows_writer(std::size_t t, Shadow& shadow, std::uint32_t number) const;
  void note_read(const Shadow& shadow, Cell& cell, Access& now, Reader reader);
  static void note_write(Shadow::Group& group, std::size_t c, std::uint32_t number, unsigned bytes);
  bool ordered(const Facts& before, const Facts& now) const;
  bool unfenced(const Facts& before, const Facts& now) const;
  bool one_store(const Facts& before, const Access& now) const;
  std::string done(const Event& event) const;
  std::string text(const Event& before, const Event& now, const std::string& where) const;

  struct Stored {  // by a lane of a warp; another one stores to it by the same instruction
    Event before, now;
    const Name* name;
    const void* at;
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
  // By the number of an instruction that goes on by itself: the thread that issued the last one.
  std::vector<std::uint32_t> issuer_;
  std::vector<Event> events_;
  // The last events of each thread, and of each group of threads, which read at the same places: a
  // loop comes by them again.
  std::vector<std::array<Recent, kRecent>> recent_;
  std::vector<std::array<Recent, kRecentReads>> recent_reads_;
  // Of reads that are put off: which instruction, and where.
  struct Site {
    const char* what;
    Where where;
  };
  std::vector<Site> sites_;
  struct RecentSite {
    std::uint64_t key = 0;
    std::uint32_t site = 0;
  };
  std::array<RecentSite, 1024> recent_sites_;
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
