// What a timeline records of shared memory: accesses of ordinary code, and when they were.
#include <algorithm>

#include "emulator/simt.h"
#include "emulator/timeline.h"

namespace attn::emulator {
namespace {

// Functions of the standard library may be the kernels' copies: what they access is none of a
// kernel's, and does not count as its code.
struct Unseen {
  int left = reads_left;
  Block* running = std::exchange(running_block, nullptr);
  Block* reading = std::exchange(reading_block, nullptr);
  Unseen() = default;
  Unseen(const Unseen&) = delete;
  ~Unseen() { running_block = running, reading_block = reading, reads_left = left; }
};

}  // namespace

void Timeline::shared_access(std::size_t slot, std::size_t t, Kind kind, const char* what,
                             const Where& where, std::size_t byte, std::size_t bytes) {
  if (!shared_) return;
  const Unseen unseen;
  const Lane& l = lane(slot, t);
  const Cycles code = l.ordinary + static_cast<Cycles>(kSlice - unseen.left);
  shared_->access(block(slot).number, t, {kind, what, where, bytes}, byte,
                  {l.clock, code, l.batch});
}

void Timeline::race(SharedTrace::Race race) {
  if (!shared_) return;
  const Unseen unseen;
  const Lane& l = lane(running_.slot, running_.t);
  race.second.at = l.clock + l.ordinary + static_cast<Cycles>(kSlice - unseen.left);
  race.second.known = true;
  shared_->race(block(running_.slot).number, std::move(race));
}

SharedTrace::RaceSide race_side(const Races::Facts& access, std::size_t index, bool in_block) {
  return {index, false, in_block, access.kind, access.what ? access.what : "",
          access.where.text(), 0};
}

// Ordinary code is spread over the time that its batch took.
void Timeline::end_block(Running& b) {
  if (!shared_ || std::exchange(b.ended, true)) return;
  const auto when = [&](std::size_t w, const SharedTrace::Moment& moment) {
    const Cycles at = moment.from + moment.code;
    if (moment.batch >= b.warps[w].batches.size()) return at;
    const Batch& batch = *b.warps[w].batches[moment.batch];
    if (!batch.done || moment.from < batch.from || moment.from > batch.end) return at;
    const double share = std::min(1.0, static_cast<double>(moment.code) /
                                           static_cast<double>(std::max<Cycles>(batch.code, 1)));
    const auto time = static_cast<double>(batch.end - batch.begin);
    return batch.begin + static_cast<Cycles>(share * time);
  };
  const auto landed = [&](std::size_t w, std::size_t group) {
    const std::vector<Group>& groups = b.warps[w].copies;
    return group < groups.size() ? groups[group].end : ~Cycles{0} >> 1;  // without a commit: never
  };
  shared_->end_block(b.number, when, landed);
}

void Timeline::end_blocks() {
  for (const auto& b : blocks_)
    if (b) end_block(*b);
}

}  // namespace attn::emulator
