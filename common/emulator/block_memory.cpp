// What a block's threads do to memory: ordinary accesses, atomics, and copies in flight.
#include <algorithm>
#include <cstring>

#include "emulator/simt.h"
#include "emulator/timeline.h"

namespace attn::emulator {

// ---- accesses ---------------------------------------------------------------------------------

// Bytes of the __shared__ variables come first, then those of dynamic shared memory.
std::optional<std::size_t> Block::shared_byte(const void* at) const {
  const auto* const byte = static_cast<const std::byte*>(at);
  const auto offset = static_cast<std::size_t>(byte - shared_.get());
  if (offset < shared_bytes_) return variables_.size() + offset;
  std::size_t first = 0;
  for (const StaticShared& v : grid_.variables) {
    if (static_cast<std::size_t>(byte - v.data) < v.bytes)
      return first + static_cast<std::size_t>(byte - v.data);
    first += v.bytes;
  }
  return std::nullopt;
}

// "full[1]", or "at byte 8 of shared memory" of a word that has no name.
std::string Block::word_name(std::size_t byte) const {
  if (byte >= variables_.size() && members_)
    for (const Member& m : *members_)
      if (const std::size_t inside = byte - variables_.size() - m.offset; inside < m.bytes)
        return m.element(inside);
  return "at byte " + std::to_string(byte) + " of shared memory";
}

std::string Block::shared_name(std::size_t byte) const {
  for (const StaticShared& v : grid_.variables) {
    if (byte < v.bytes)
      return "byte " + std::to_string(byte) + " of " + v.name + " of block " + index_.text();
    byte -= v.bytes;
  }
  std::string text = "byte " + std::to_string(byte) + " of shared memory of block " + index_.text();
  if (members_)
    for (const Member& m : *members_)
      if (byte - m.offset < m.bytes) return text + " (" + m.element(byte - m.offset) + ")";
  return text;
}

void Block::access_shared(Kind kind, const char* what, const Where& where, const void* at,
                          std::size_t byte, std::size_t bytes) noexcept {
  if (internal_) return;
  if (timeline) [[unlikely]]
    timeline->shared_access(slot_, running_, kind, what, where, byte, bytes);
  // Stores by ordinary code and stmatrix use the generic proxy.
  if (kind == Kind::write && (!what || std::string_view(what).starts_with("stmatrix")))
    fences_ |= 1;
  if (failure_) return;
  try {
    if (kind == Kind::write && !what && !mbarriers_.empty()) {
      const auto* const from = static_cast<const std::byte*>(at);
      const auto next = mbarriers_.lower_bound(from - (sizeof(std::uint64_t) - 1));
      if (next != mbarriers_.end() && next->first < static_cast<const void*>(from + bytes))
        return fail_later(running_name() + " writes at " + where.text() + " over " +
                          barrier_text(next->first) + ": only instructions of mbarriers may");
    }
    if (!races_) return;
    const std::size_t size = std::min(bytes, variables_.size() + shared_bytes_ - byte);
    if (kind == Kind::read && races_->put_off(number(running_), what, where, shadow_, byte, size))
      return;
    Races::Access now = races_->by_thread(number(running_), kind, what, where, at);
    if (races_->note_quickly(now, shadow_, byte, size)) return;
    if (const std::string* race = races_->touch(now, {shadow_, shared_name_}, byte, size))
      fail_later(*race);
  } catch (const std::exception& e) {
    fail_later(e.what());
  }
}

// Locals of the thread that runs.
void Block::access_register(Kind kind, const Where& where, const void* at,
                            std::size_t bytes) noexcept {
  if (internal_ || failure_) return;
  AsyncWork& mine = threads_[running_].work;
  const auto* const first = static_cast<const std::byte*>(at);
  try {
    if (first < mine.held_end && first + bytes > mine.held_first)
      check_registers(kind, where, at, bytes);
    if (kind == Kind::write && mine.registers_fenced && mine.writes.size() < AsyncWork::kMaxWrites)
      mine.writes.push_back({first, bytes, where});
  } catch (const std::exception& e) {
    fail_later(e.what());
  }
}

void Block::access_other(Kind kind, const char* what, const Where& where, const void* at,
                         std::size_t bytes) noexcept {
  if (internal_ || failure_) return;
  try {
    if (!grid_.variables.empty())
      if (const auto byte = shared_byte(at))
        return access_shared(kind, what, where, at, *byte, bytes);
    if (kind != Kind::read && grid_.statics.hold(at))
      if (const std::string variable = local_variable(at); !variable.empty())
        return fail_later(running_name() + " writes to " + variable + " at " + where.text() +
                          ", a __shared__ variable of a function that the kernel calls: it has to "
                          "be one of the kernel");
    const auto past =
        static_cast<std::size_t>(static_cast<const std::byte*>(at) - shared_.get()) - shared_bytes_;
    if (past < kGuardBytes)
      return fail_later(running_name() + (kind == Kind::read ? " reads " : " writes ") +
                        std::to_string(past) + " bytes past the end of its " +
                        std::to_string(shared_bytes_) + " bytes of dynamic shared memory, at " +
                        where.text());
    if (timeline) [[unlikely]] {
      const int left = reads_left;
      if (GlobalBuffer::find(at)) timeline->count_global(bytes, kind == Kind::read);
      reads_left = left;
    }
    if (kind != Kind::write && !grid_.races) return;
    GlobalBuffer* const buffer = GlobalBuffer::find(at);
    if (!buffer) {
      if (GlobalBuffer::known_to_be_none(at)) return;
      const GlobalBuffer* const near = GlobalBuffer::nearest(at);
      if (near && near->guards(at))
        fail_later(running_name() + (kind == Kind::read ? " reads " : " writes ") +
                   near->place_of(at) + ", at " + where.text());
      return;
    }
    if (const void* const last = static_cast<const std::byte*>(at) + bytes - 1;
        bytes > 1 && GlobalBuffer::find(last) != buffer && buffer->guards(last))
      return fail_later(running_name() + (kind == Kind::read ? " reads to " : " writes to ") +
                        buffer->place_of(static_cast<const std::byte*>(last) + 1) + ", at " +
                        where.text());
    // Drawn for stores to global memory alone: what else is watched does not change the schedule.
    const bool pauses = kind == Kind::write && random_.below(8) == 0 && !timeline;
    // What this thread has loaded may be old when it stores. A pause after the race check would let
    // another lane compare its value with the old one.
    if (pauses) pause();
    if (failure_) return;
    if (grid_.races) {
      const std::size_t first = buffer->offset(at);
      if (kind == Kind::read &&
          races_->put_off(number(running_), what, where, buffer->shadow(), first, bytes))
        return;
      Races::Access now = races_->by_thread(number(running_), kind, what, where, at);
      if (!races_->note_quickly(now, buffer->shadow(), first, bytes))
        if (const std::string* race =
                races_->touch(now, {buffer->shadow(), buffer->byte_name()}, first, bytes))
          fail_later(*race);
    }
  } catch (const std::exception& e) {
    fail_later(e.what());
  }
}

// What an instruction does that goes on by itself, as number `who` and in its epoch `epoch`.
Races::Access Block::async(std::size_t& who, std::uint32_t epoch, Kind kind, const char* what,
                           Place place) {
  if (who == AsyncQueue::kNone) who = races_->order().add();
  return {{who, number(running_), epoch, kind, what, place}};
}

void Block::async_access(Races::Access& access, const void* at, std::size_t bytes) {
  if (failure_) return;
  const std::string* race = nullptr;
  if (const auto byte = shared_byte(at)) {
    const std::size_t size = std::min(bytes, variables_.size() + shared_bytes_ - *byte);
    race = races_->touch(access, {shadow_, shared_name_}, *byte, size);
  } else if (grid_.races) {
    const void* const last = static_cast<const std::byte*>(at) + bytes - 1;
    GlobalBuffer* const buffer = GlobalBuffer::find(at);
    for (const void* const end : {at, last}) {
      if (GlobalBuffer::find(end)) continue;
      const GlobalBuffer* const near = buffer ? buffer : GlobalBuffer::nearest(end);
      if (near && near->guards(end))
        throw KernelError(thread_name(access.thread - first_number_) + " " +
                          (access.kind == Kind::read ? "reads " : "writes ") + near->place_of(end) +
                          " by " + access.what + ", at " + access.where.text());
    }
    if (buffer)
      race =
          races_->touch(access, {buffer->shadow(), buffer->byte_name()}, buffer->offset(at), bytes);
  }
  if (race) throw KernelError(*race);
}

// Registers of a wgmma in flight: its accumulators may not be touched, its operands may be read.
void Block::check_registers(Kind kind, const Where& where, const void* at, std::size_t bytes) {
  const auto* const first = static_cast<const std::byte*>(at);
  for (const AsyncWork::Held& h : threads_[running_].work.held)
    if (first < h.at + h.bytes && h.at < first + bytes && (h.written || kind != Kind::read))
      return fail_later(thread_name(running_) + (kind == Kind::read ? " reads" : " writes") +
                        " a register of " + (h.written ? "the accumulators" : "an operand") +
                        " at " + where.text() + ", which wgmma at " + h.place.text() +
                        (h.group == threads_[running_].work.products.open_group()
                             ? " has: it has no wgmma_commit, so that no wgmma_wait is for it"
                             : " has before its wgmma_wait"));
}

void Block::require_aligned(const char* what, Place place, const char* which, const void* at,
                            std::size_t bytes) const {
  if (const std::size_t past = reinterpret_cast<std::uintptr_t>(at) % bytes; past != 0)
    fail(what, place,
         std::string("with ") + which + " " + std::to_string(past) + " bytes past a multiple of " +
             std::to_string(bytes));
}

void Block::require_shared(const char* what, Place place, const char* which, const void* at,
                           std::size_t bytes) const {
  std::size_t size = shared_bytes_;
  auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(at) - shared_.get());
  for (const StaticShared& v : grid_.variables)
    if (const auto inside = static_cast<std::size_t>(static_cast<const std::byte*>(at) - v.data);
        inside < v.bytes)
      offset = inside, size = v.bytes;
  if (offset < size && bytes <= size - offset) return;
  if (offset >= size && grid_.statics.hold(at)) {
    const std::string variable = local_variable(at);
    if (variable.empty()) return;  // of a program without symbols: its end is unknown
    fail(what, place,
         std::string("with ") + which + " in " + variable +
             ", a __shared__ variable of a function that the kernel calls: it has to be one of "
             "the kernel");
  }
  const bool near = offset < size + kGuardBytes;
  fail(what, place,
       std::string("with ") + which + " of " + std::to_string(bytes) + " bytes " +
           (near ? "at byte " + std::to_string(offset) : std::string("outside")) +
           " of the block's " + std::to_string(size) + " bytes of shared memory");
}

bool Block::is_kernels(const void* at) const { return shared_byte(at) || GlobalBuffer::find(at); }

void Block::fence(Races::Scope scope) {
  if (races_) races_->fence(number(running_), scope);
}

void Block::check_shared_guard() const {
  for (std::size_t i = 0; i < kGuardBytes; ++i)
    if (shared_[shared_bytes_ + i] != std::byte{0xFF})
      throw KernelError("block " + index_.text() + " wrote at offset " +
                        std::to_string(shared_bytes_ + i) + " of its " +
                        std::to_string(shared_bytes_) + " bytes of dynamic shared memory");
}

// ---- copies -----------------------------------------------------------------------------------

void Block::copy_async(const char* what, Place place, void* to, const void* from, std::size_t bytes,
                       std::function<void()> work) {
  const Uncounted uncounted;
  require_shared(what, place, "a destination", to, 16);
  AsyncQueue& copies = threads_[running_].work.copies;
  if (timeline)
    timeline->copy_async(slot_, running_, bytes, place,
                         tile_name(members_, shared_byte(to).value_or(0) - variables_.size()),
                         shared_byte(to));
  if (races_) {
    Races::Access writes = async(copies.who, copies.open_group(), Kind::write, what, place);
    async_access(writes, to, 16);
    Races::Access reads = async(copies.who, copies.open_group(), Kind::read, what, place);
    if (grid_.races && bytes > 0) async_access(reads, from, bytes);
  }
  const Internal internal(internal_);
  copies.add(copies.early(), std::move(work));
}
void Block::copy_commit() {
  const Uncounted uncounted;
  if (timeline) {
    let_others_run("cp_async_commit", {});
    timeline->copy_commit(slot_, running_);
  }
  threads_[running_].work.copies.commit();
}
void Block::copy_wait(std::size_t pending) {
  const Uncounted uncounted;
  if (timeline) {
    let_others_run("cp_async_wait", {});
    timeline->copy_wait(slot_, running_, pending);
  }
  AsyncQueue& copies = threads_[running_].work.copies;
  const Internal internal(internal_);
  const std::uint32_t done = copies.wait(pending);
  if (races_ && copies.who != AsyncQueue::kNone)
    races_->copies_done(number(running_), copies.who, done);
}

void Block::store_async(const char* what, Place place, std::function<Write()> read,
                        Kind results_kind, const BlockList& operands, const BlockList& results) {
  const Uncounted uncounted;
  AsyncWork& mine = threads_[running_].work;
  if (timeline) {
    let_others_run(what, place);
    std::size_t sum = 0;
    std::string tiles;
    std::vector<SharedTrace::Range> ranges;
    operands([&](const void* first, std::size_t bytes) {
      sum += bytes;
      if (const auto byte = shared_byte(first)) ranges.emplace_back(*byte, bytes);
      add_name(tiles, tile_name(members_, shared_byte(first).value_or(0) - variables_.size()));
    });
    timeline->store(slot_, running_, sum, tiles, std::move(ranges));
  }
  // Between ordinary stores and this one there is a fence: races_ knows of which. Else, where
  // ordinary code has stored since the last fence, there is at least one since this thread's last
  // group.
  if (!races_ && fences_ % 2 != 0 && mine.fences == fences_ / 2)
    fail(what, place, "without fence_proxy_async since the last group of stores");
  if (races_) {
    const std::uint32_t group = mine.stores.open_group();
    Races::Access reads = async(mine.stores.who, group, Kind::read, what, place);
    reads.proxy = Space::shared;
    operands([&](const void* first, std::size_t bytes) { async_access(reads, first, bytes); });
    Races::Access writes = async(mine.written, group, results_kind, what, place);
    writes.proxy = Space::global;
    writes.unwaited = true;
    if (grid_.races)
      results([&](const void* first, std::size_t bytes) { async_access(writes, first, bytes); });
  }
  const Internal internal(internal_);
  const bool early = mine.stores.early();
  mine.stores.add(early, [&mine, early, group = mine.stores.open_group(), read = std::move(read)] {
    Write write = read();
    if (early)
      write();
    else
      mine.results.emplace_back(group, std::move(write));
  });
}
void Block::store_commit() {
  const Uncounted uncounted;
  if (timeline) timeline->store_commit(slot_, running_);
  threads_[running_].work.stores.commit();
  threads_[running_].work.fences = fences_ / 2;
}
void Block::store_wait(std::size_t pending, bool written) {
  const Uncounted uncounted;
  AsyncWork& mine = threads_[running_].work;
  if (timeline) {
    let_others_run("tma_store_wait", {});
    timeline->store_wait(slot_, running_, pending, written);
  }
  const Internal internal(internal_);
  const std::uint32_t done = mine.stores.wait(pending);
  if (written)
    std::erase_if(mine.results, [&](const auto& result) {
      if (result.first <= done) result.second();
      return result.first <= done;
    });
  if (!races_) return;
  Order& order = races_->order();
  if (mine.stores.who != AsyncQueue::kNone) order.learn(number(running_), mine.stores.who, done);
  if (written && mine.written != AsyncQueue::kNone)
    order.learn(number(running_), mine.written, done);
}

void Block::fence_proxy(Space space) {
  if (space == Space::shared) fences_ = (fences_ / 2 + 1) * 2;
  if (races_) races_->order().fence_proxy(number(running_), space);
}

}  // namespace attn::emulator
