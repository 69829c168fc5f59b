#include "emulator/races.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "emulator/timeline.h"

namespace attn::emulator {

std::size_t Races::add_threads(std::size_t count) {
  const std::size_t first = order_.add_threads(count);
  block_.resize(first + count);
  named_by_.resize(first + count, static_cast<std::uint32_t>(names_.size()));
  recent_.resize(first + count);
  recent_reads_.resize((first + count) / Shadow::Threads::kNumber + 1);
  fences_.resize(first + count);
  return first;
}

std::string Races::thread_name(std::size_t t, std::uint32_t block) const {
  const std::string name = names_[named_by_[t] - 1](order_.index_in_block(t), block);
  return named_by_[t] < names_.size() ? name + " of the launch before" : name;
}

void Races::start_block(std::size_t first, std::size_t count, std::uint32_t block) {
  for (std::size_t t = first; t < first + count; ++t) {
    block_[t] = block;
    fences_[t] = {};
    order_.start_again(t);
  }
}

void Races::fence(std::size_t t, Scope scope) {
  Fences& mine = fences_[t];
  order_.take(t, std::make_shared<const Epochs>(mine.seen.known));
  Meeting all;
  order_.give(t, all);
  mine.block = std::make_shared<const Epochs>(std::move(all.known));
  if (scope == Scope::gpu) mine.gpu = mine.block;
}

void Races::atomic(std::size_t t, Meeting& place, Scope scope, bool releases, bool acquires) {
  Fences& mine = fences_[t];
  Order::join(mine.seen.known, place.known);
  if (acquires) order_.take(t, std::make_shared<const Epochs>(place.known));
  if (acquires && !releases) return;               // a load releases nothing
  if (releases && !acquires) place.known.clear();  // a store: what was released before is gone
  if (const auto& fenced = scope == Scope::gpu ? mine.gpu : mine.block)
    Order::join(place.known, *fenced);
  if (releases) order_.give(t, place);
  place.last = nullptr;
}

void Races::copies_done(std::size_t t, std::size_t who, std::uint32_t done) {
  order_.learn(t, who, done);
  auto& epochs = copies_[who];
  if (epochs.size() < done) epochs.resize(done, order_.now(t));
}

// The number of its event, which threads that come by the same place again have already. Readers
// are told apart by their bits (Shadow::Reader).
std::uint32_t Races::number_of(Access& now) {
  if (now.number != 0) return now.number;
  Recent* recent = nullptr;
  if (!by_itself(now)) {
    const std::uintptr_t key = now.where.key() * 4 + static_cast<std::uintptr_t>(now.kind);
    const std::uintptr_t mixed = key ^ key >> 6;
    recent = reads_only(now.kind)
                 ? &recent_reads_[now.thread / Shadow::Threads::kNumber][mixed % kRecentReads]
                 : &recent_[now.thread][mixed % kRecent];
    if (recent->key == key && recent->epoch == now.epoch &&
        event(recent->event).block == block_[now.thread])
      return now.number = recent->event;
    *recent = {key, now.epoch, 0};
  }
  events_.push_back({now, block_[now.thread]});
  now.number = static_cast<std::uint32_t>(events_.size() - 1) | (by_itself(now) ? kAsync : 0);
  if (recent) recent->event = now.number;
  return now.number;
}

bool Races::ordered(const Facts& before, const Facts& now) const {
  return order_.knows(now.thread, before.who, before.epoch);
}

// Between ordinary code, or cp.async, and what the async proxy does to the same bytes, there has to
// be a fence. PTX ISA, "Async proxy".
bool Races::unfenced(const Facts& before, const Facts& now) const {
  if (!now.proxy) return false;
  // After the end of a launch nothing of it is in any proxy.
  if (named_by_[before.thread] != named_by_[now.thread]) return false;
  std::size_t who = before.who;
  std::uint32_t epoch = before.epoch;
  if (by_itself(before)) {
    const auto copies = copies_.find(who);
    if (copies == copies_.end() || epoch > copies->second.size()) return false;
    who = before.thread;
    epoch = copies->second[epoch - 1];
  }
  return !order_.knows_fenced(now.thread, who, epoch, *now.proxy);
}

// Lanes of a warp that execute one store. PTX ISA, "Memory consistency model", leaves open which of
// them is the last; that matters only if their values differ.
bool Races::one_store(const Facts& before, const Access& now) const {
  return before.kind == Kind::write && now.kind == Kind::write && now.at &&
         before.where.key() == now.where.key() && order_.one_warp(before.who, now.who);
}

const std::string* Races::different_values() {
  if (!stored_) return nullptr;
  const Stored s = *std::exchange(stored_, std::nullopt);
  if (std::memcmp(s.at, s.value.data(), s.bytes) == 0) return nullptr;
  error_ = "race: " + (*s.name)(s.byte) + " was " + done(s.before) + " and then " + done(s.now) +
           ": two lanes store different values";
  if (timeline)
    timeline->race({error_, static_cast<std::int64_t>(s.byte),
                    race_side(s.before, order_.index_in_block(s.before.thread), true),
                    race_side(s.now, order_.index_in_block(s.now.thread), true)});
  return &error_;
}

inline bool Races::conflicts_with(std::uint32_t number, Access& now, const Shadow& shadow) const {
  if (number == 0 || number == now.number || number == now.after) return false;
  if (number <= shadow.all_know && !by_itself(now)) return false;  // most of them
  if (!ordered(event(number), now) || unfenced(event(number), now)) return true;
  now.after = number;
  return false;
}

// The access before this one that nothing puts in order with it, or nothing; and which of `bytes`
// both are to.
inline std::optional<Races::Event> Races::conflict(const Shadow& shadow, Shadow::Group& group,
                                                   std::size_t c, Access& now, unsigned& bytes,
                                                   std::optional<Event>& same) const {
  if (!group.used(c) && !conflicts_with(group.writer(c), now, shadow)) return std::nullopt;
  Cell& cell = group.cell(c);
  // By lanes of one warp; the next block in a slot has the same thread numbers.
  const auto same_store = [&](const Event& before) {
    return before.block == block_[now.thread] && one_store(before, now);
  };
  if (!cell.written_apart) {
    if (conflicts_with(cell.writer, now, shadow)) {
      if (!same_store(event(cell.writer))) return event(cell.writer);
      same = event(cell.writer);
    }
  } else {
    for (std::size_t b = 0; b < Cell::kBytes; ++b)
      if ((bytes >> b & 1) && conflicts_with(cell.writer_of(b), now, shadow)) {
        if (same_store(event(cell.writer_of(b)))) {
          same = event(cell.writer_of(b));
          continue;
        }
        bytes = 1u << b;
        return event(cell.writer_of(b));
      }
  }
  if ((cell.atomic_bytes() & bytes) && !is_atomic(now.kind) &&
      conflicts_with(cell.more->atomic, now, shadow)) {
    bytes &= cell.atomic_bytes();
    return event(cell.more->atomic);
  }
  return reads_only(now.kind) ? std::nullopt : reading(shadow, cell, now, bytes);
}

// The read before this write that nothing puts in order with it.
std::optional<Races::Event> Races::reading(const Shadow& shadow, const Cell& cell, Access& now,
                                           unsigned& bytes) const {
  for (const Reader& r : cell) {
    if (!(r.bytes() & bytes) || (r.number <= shadow.all_know && !by_itself(now))) continue;
    if (r.number == now.after_reads.number && r.threads == now.after_reads.threads) continue;
    Event before = event(r.number);
    const std::size_t noted = before.who;
    const std::size_t first = noted - noted % Shadow::Threads::kNumber;
    if (is_atomic(before.kind) && is_atomic(now.kind)) continue;
    for (std::uint32_t half = 0; half < 2; ++half)
      for (std::uint64_t bits = r.threads.bits[half]; bits != 0; bits &= bits - 1) {
        before.who = first + 64 * half + static_cast<std::uint32_t>(std::countr_zero(bits));
        before.thread = before.who == noted ? event(r.number).thread
                        : by_itself(before) ? issuer_[before.who]
                                            : before.who;
        if (ordered(before, now) && !unfenced(before, now)) continue;
        bytes &= r.bytes();
        return before;
      }
    now.after_reads = r;
  }
  return std::nullopt;
}

inline void Races::note_read(const Shadow& shadow, Cell& cell, Access& now, Reader reader) {
  if (cell.since != shadow.meetings) {
    // The threads' reads are known to all; a read by an instruction that goes on by itself is not.
    cell.remove([](const Reader& r) { return !(r.number & kAsync); });
    cell.since = shadow.meetings & 0xFFFFFFF;
  }
  bool gone = false;
  for (Reader& r : cell) {
    if (r == reader && ((r.number & kAsync) != 0) == by_itself(now)) {
      r.threads.add(reader.threads);
      return;
    }
    // Who knows of a thread's last read knows of those before.
    const auto of_same = [&] {
      const Event& e = event(r.number);
      const auto of = [](std::size_t who) { return who / Shadow::Threads::kNumber; };
      return of(e.who) == of(now.who) && e.kind == now.kind;
    };
    if (r.bytes() == reader.bytes() && r.threads.any(reader.threads) && of_same())
      r.threads.remove(reader.threads), gone |= r.threads.none();
  }
  if (gone) cell.remove([](const Reader& r) { return r.threads.none(); });
  reader.number = number_of(now);
  if (shadow.global && cell.readers() == Shadow::kMaxGlobal)
    cell.begin()[replaced_++ % Shadow::kMaxGlobal] = reader;
  else
    cell.add(reader);
}

// Cell c of a group that is split, or all of it.
inline void Races::note_write(Shadow::Group& group, std::size_t c, std::uint32_t number,
                              unsigned bytes) {
  const std::size_t count = group.split() ? 1 : Shadow::kCells;
  if (bytes == Cell::kWhole) return group.write(c, count, number);
  Cell& cell = group.cell(c);
  group.look(c, count);
  Cell::More& more = cell.with_more();
  if (!cell.written_apart) more.writers.fill(cell.writer);
  cell.written_apart = 1;
  for (std::size_t b = 0; b < Cell::kBytes; ++b)
    if (bytes >> b & 1) more.writers[b] = number;
  more.atomic_bytes &= ~bytes;
  for (Reader& r : cell) r.place_and_bytes &= ~bytes;
  cell.remove([](const Reader& r) { return r.bytes() == 0; });
}

namespace {
// visit(cell, mask) for all cells with some of these bytes, and which they are.
template <class Visit>
void for_cells(Shadow& shadow, std::size_t first, std::size_t bytes, Visit visit) {
  using Cell = Shadow::Cell;
  const std::size_t end = first + bytes;
  for (std::size_t at = first; at < end;) {
    Shadow::Group group(shadow, at / Shadow::kGroup);
    if (!group.split() && at % Shadow::kGroup == 0 && at + Shadow::kGroup <= end) {
      visit(group.cell(0), Cell::kWhole);
      at += Shadow::kGroup;
      continue;
    }
    group.to_cells();
    const std::size_t past = at % Cell::kBytes, size = std::min(Cell::kBytes - past, end - at);
    visit(group.cell(at / Cell::kBytes % Shadow::kCells), ((1u << size) - 1) << past);
    at += size;
  }
}
}  // namespace

inline bool Races::knows_writer(std::size_t t, Shadow& shadow, std::uint32_t number) const {
  if (number == 0) return shadow.global;
  if (number == Shadow::kLook) return false;
  if (number <= shadow.all_know) return true;
  const auto& known = order_.known(t);
  if (number == shadow.async && known == shadow.know_async) return true;
  const Event& e = event(number);
  if (!order_.knows(t, e.who, e.epoch)) return false;
  if (number & kAsync) shadow.async = number, shadow.know_async = known;
  return true;
}

bool Races::put_off(std::size_t t, const char* what, const Where& where, Shadow& shadow,
                    std::size_t first, std::size_t bytes) {
  constexpr std::size_t kMaxBytes = 255, kMaxFirst = (1 << 24) - 1;
  if (!shadow.puts_off || bytes > kMaxBytes || first > kMaxFirst) return false;
  // Most of global memory is never written, so its reads may wait longer. This comes before the
  // page is marked: note_put_off() clears the marks.
  if (shadow.reads.size() >= (shadow.global ? 16 : 1) * Shadow::kMaxReads) note_put_off(shadow);
  if (!shadow.may_put_off(first, bytes,
                          [&](std::uint32_t number) { return knows_writer(t, shadow, number); }))
    return false;
  std::uint64_t key = where.at * 0x9e3779b97f4a7c15ull;
  key ^= reinterpret_cast<std::uintptr_t>(where.file) * 0xbf58476d1ce4e5b9ull;
  key += reinterpret_cast<std::uintptr_t>(what);
  RecentSite& recent = recent_sites_[key * 0x94d049bb133111ebull >> 54];
  if (recent.key != key) {
    recent = {key, static_cast<std::uint32_t>(sites_.size())};
    sites_.push_back({what, where});
  }
  const auto who = static_cast<std::uint32_t>(t);
  const std::uint32_t epoch = order_.now(t);
  if (shadow.turns.empty() || shadow.turns.back().who != who || shadow.turns.back().epoch != epoch)
    shadow.turns.push_back({who, epoch, block_[t], shadow.reads.size()});
  else if (Shadow::Read& last = shadow.reads.back();
           last.site == recent.site && std::size_t{last.first} + last.bytes == first &&
           last.bytes + bytes <= kMaxBytes) {  // a thread that reads its row: one entry for many
    last.bytes += static_cast<std::uint32_t>(bytes) & 0xFF;
    return true;
  }
  shadow.reads.push_back({recent.site, static_cast<std::uint32_t>(first) & 0xFFFFFF,
                          static_cast<std::uint32_t>(bytes) & 0xFF});
  return true;
}

// A write is about to come where there are reads that no cell knows of.
void Races::note_put_off(Shadow& shadow) {
  for (std::size_t n = 0; n < shadow.turns.size(); ++n) {
    const Shadow::Turn& turn = shadow.turns[n];
    // Perhaps another block runs in its place by now.
    const std::uint32_t block = std::exchange(block_[turn.who], turn.block);
    const std::size_t end =
        n + 1 < shadow.turns.size() ? shadow.turns[n + 1].begin : shadow.reads.size();
    for (std::size_t r = turn.begin; r < end; ++r) {
      const Shadow::Read& read = shadow.reads[r];
      const Site& site = sites_[read.site];
      Access before{{turn.who, turn.who, turn.epoch, Kind::read, site.what, site.where}};
      const Reader anywhere = reader_at(turn.who, turn.epoch, Kind::read, site.where, 0);
      for_cells(shadow, read.first, read.bytes, [&](Cell& cell, unsigned mask) {
        Reader reader = anywhere;
        reader.place_and_bytes |= mask;
        note_read(shadow, cell, before, reader);
      });
    }
    block_[turn.who] = block;
  }
  shadow.forget_reads();
}

bool Races::note_quickly(Access& now, Shadow& shadow, std::size_t first, std::size_t bytes) {
  constexpr std::size_t kBytes = Cell::kBytes, kGroup = Shadow::kGroup;
  const bool reads = now.kind == Kind::read;
  if (!reads && (stored_ || now.kind != Kind::write)) return false;
  if (shadow.has_reads(first, bytes)) note_put_off(shadow);
  const auto who = static_cast<std::uint32_t>(now.who);
  const Reader anywhere = reader_at(who, now.epoch, now.kind, now.where, 0);
  const std::size_t end = first + bytes;
  for (std::size_t at = first; at < end;) {
    Shadow::Group group(shadow, at / kGroup);
    const bool whole = at % kGroup == 0 && at + kGroup <= end;
    if (group.split() ? whole && !reads : !whole) return false;
    const std::size_t past = group.split() ? at % kBytes : 0;
    const std::size_t size = group.split() ? std::min(kBytes - past, end - at) : kGroup;
    const unsigned mask = group.split() ? ((1u << size) - 1) << past : Cell::kWhole;
    const std::size_t c = group.split() ? at / kBytes % Shadow::kCells : 0;
    at += size;
    const std::uint32_t writer = group.writer(c);
    if (writer == Shadow::kLook || (reads && writer == 0 && !shadow.global)) return false;
    if (conflicts_with(writer, now, shadow)) return false;
    if (!reads) {
      if (mask != Cell::kWhole) return false;
      if (group.used(c))
        for (const Reader& r : group.cell(c))
          if (r.number > shadow.all_know) return false;
      note_write(group, c, number_of(now), mask);
      continue;
    }
    Cell& cell = group.cell(c);
    Reader reader = anywhere;
    reader.place_and_bytes |= mask;
    const bool noted =
        cell.since == shadow.meetings && std::any_of(cell.begin(), cell.end(), [&](Reader& r) {
          const bool same = r == reader && !(r.number & kAsync);
          if (same) r.threads.add(reader.threads);
          return same;
        });
    if (!noted) note_read(shadow, cell, now, reader);
  }
  return true;
}

// Of the cell whose first byte is byte `begin`, those of `mask`.
inline const std::string* Races::touch_cell(Access& now, const Memory& memory, Shadow::Group& group,
                                            std::size_t c, std::size_t begin, unsigned mask,
                                            const Reader& anywhere, std::optional<Event>& same) {
  unsigned both = mask;
  if (const auto before = conflict(memory.shadow, group, c, now, both, same)) {
    const std::size_t byte = begin + static_cast<std::size_t>(std::countr_zero(both));
    error_ = text(*before, {now, block_[now.thread]}, memory.name(byte));
    if (timeline)
      timeline->race({error_, memory.shadow.global ? -1 : static_cast<std::int64_t>(byte),
                      race_side(*before, order_.index_in_block(before->thread),
                                before->block == block_[now.thread]),
                      race_side(now, order_.index_in_block(now.thread), true)});
    return &error_;
  }
  if (!memory.shadow.global && now.kind != Kind::write)
    for (std::size_t b = 0; b < Cell::kBytes && !never_written_; ++b)
      if ((mask >> b & 1) && group.cell(c).writer_of(b) == 0) {
        never_written_ = memory.name(begin + b) + " was " + done({now, block_[now.thread]}) +
                         ", where no thread had written";
        if (timeline)
          timeline->race({*never_written_, static_cast<std::int64_t>(begin + b), {},
                          race_side(now, order_.index_in_block(now.thread), true)});
      }
  if (reads_only(now.kind)) {
    Reader reader = anywhere;
    reader.place_and_bytes |= mask;
    note_read(memory.shadow, group.cell(c), now, reader);
  } else if (is_atomic(now.kind)) {
    Cell::More& more = group.cell(c).with_more();
    more.atomic = number_of(now);
    more.atomic_bytes = mask;
    group.look(c, group.split() ? 1 : Shadow::kCells);
  } else {
    note_write(group, c, number_of(now), mask);
  }
  return nullptr;
}

const std::string* Races::touch(Access& now, const Memory& memory, std::size_t first,
                                std::size_t bytes) {
  constexpr std::size_t kBytes = Cell::kBytes, kGroup = Shadow::kGroup;
  if (const std::string* race = different_values()) return race;
  if (!(by_itself(now) && reads_only(now.kind)) && memory.shadow.has_reads(first, bytes))
    note_put_off(memory.shadow);
  std::optional<Event> same;  // a copy: events_ grows while it is needed
  if (by_itself(now)) {
    if (issuer_.size() <= now.who) issuer_.resize(now.who + 1);
    issuer_[now.who] = static_cast<std::uint32_t>(now.thread);
  }
  const std::size_t end = first + bytes;
  const Reader anywhere =
      reader_at(static_cast<std::uint32_t>(now.who), now.epoch, now.kind, now.where, 0);
  for (std::size_t at = first / kGroup; at * kGroup < end; ++at) {
    Shadow::Group group(memory.shadow, at);
    const std::size_t begin = at * kGroup;
    const bool whole = begin >= first && begin + kGroup <= end;
    if (whole && !group.split()) {
      if (const std::string* race =
              touch_cell(now, memory, group, 0, begin, Cell::kWhole, anywhere, same))
        return race;
      continue;
    }
    group.to_cells();
    for (std::size_t c = 0; c < Shadow::kCells; ++c) {
      const std::size_t cell = begin + c * kBytes;
      if (cell + kBytes <= first || cell >= end) continue;
      unsigned mask = Cell::kWhole;
      if (cell < first) mask &= mask << (first - cell);
      if (cell + kBytes > end) mask &= Cell::kWhole >> (cell + kBytes - end);
      if (const std::string* race = touch_cell(now, memory, group, c, cell, mask, anywhere, same))
        return race;
    }
    // All of them have the same writer, and no reader since.
    if (whole && now.kind == Kind::write) group.join();
  }
  if (same && bytes <= sizeof(Stored::value)) {
    stored_ = Stored{*same, {now, block_[now.thread]}, &memory.name, now.at, first, bytes, {}};
    std::memcpy(stored_->value.data(), now.at, bytes);
  }
  return nullptr;
}

// "read by thread (0,0,0) at v1_a.cu:5", "written by cp_async_16 of thread (0,0,0) at v1_a.cu:5".
std::string Races::done(const Event& event) const {
  std::string s = reads_only(event.kind)      ? "read by "
                  : event.kind == Kind::write ? "written by "
                                              : "changed by ";
  if (event.what) s.append(event.what).append(" of ");
  return s.append(thread_name(event.thread, event.block)).append(" at ").append(event.where.text());
}

std::string Races::text(const Event& before, const Event& now, const std::string& where) const {
  if (now.what && now.what == std::string_view("the end of the block"))
    return "race: " + where + " was " + done(before) +
           ", and its block may have ended before: cluster_sync keeps it";
  std::string s = "race: " + where + " was " + done(before) + " and then " + done(now);
  if (ordered(before, now))
    return s + (now.proxy == Space::global ? " with no fence_proxy_async_global between"
                                           : " with no fence_proxy_async between");
  if (before.unwaited)
    return s +
           ": tma_store_wait waits until shared memory has been read, bulk_wait_group until "
           "the result has been written";
  // Who issued it goes on at once, and knows that it is done after a wait.
  if (by_itself(before) && !order_.knows(before.thread, before.who, before.epoch))
    return s + " before a wait for it";
  if (named_by_[before.thread] != named_by_[now.thread])
    return s + " with no wait_for_launch_before between";
  if (before.block != now.block) return s + " with no release and acquire between";
  return s + " with no barrier between";
}

}  // namespace attn::emulator
