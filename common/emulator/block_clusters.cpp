// Clusters: addresses in the shared memory of other blocks, and the barrier of a cluster.
#include "emulator/simt.h"
#include "emulator/timeline.h"

namespace attn::emulator {

Block& Block::owner_of(const char* what, Place place, const void* at) const {
  for (Block* block : cluster_->blocks)
    if (const auto offset =
            static_cast<std::size_t>(static_cast<const std::byte*>(at) - block->shared_.get());
        offset < block->shared_bytes_) {
      if (block != this && block->over())
        fail(what, place,
             "on shared memory of a block of the cluster that has ended: cluster_sync keeps it");
      return *block;
    }
  fail(what, place, "on an address outside of the cluster's dynamic shared memory");
}

void* Block::map_shared(const char* what, Place place, const void* at, unsigned rank) const {
  if (rank >= cluster_->blocks.size())
    fail(what, place,
         "of rank " + std::to_string(rank) + " in a cluster of " +
             std::to_string(cluster_->blocks.size()));
  const Block& owner = owner_of(what, place, at);
  return cluster_->blocks[rank]->shared_.get() +
         (static_cast<const std::byte*>(at) - owner.shared_.get());
}

void Block::access_cluster(Kind kind, const char* what, Place place, const void* at,
                           std::size_t bytes) {
  leave_if_failed();
  Block& owner = owner_of(what, place, at);
  owner.require_shared(what, place, "an address", at, bytes);
  if (&owner == this) return access(kind, what, place, at, bytes);
  if (!races_ || internal_) return;
  const std::size_t byte = *owner.shared_byte(at);
  Races::Access now = races_->by_thread(number(running_), kind, what, place, at);
  if (const std::string* race =
          races_->touch(now, {owner.shadow_, owner.shared_name_}, byte, bytes))
    throw KernelError(*race);
}

void Block::cluster_arrive(const char* what, Place place) {
  const Uncounted uncounted;
  leave_if_failed();
  Thread& self = threads_[running_];
  if (self.cluster_phase != 0) fail(what, place, "twice without cluster_wait between");
  if (timeline) {
    let_others_run(what, place);
    timeline->arrive(cluster_.get(), slot_, running_, "");
  }
  self.cluster_phase = cluster_->phase + 1;
  arrive(cluster_->meeting, running_);
  ++cluster_->arrived;
  const std::size_t all = cluster_->blocks.size() * threads_.size();
  if (cluster_->arrived + cluster_->left == all) end_cluster_phase();
  let_others_run(what, place);
}

void Block::end_cluster_phase() {
  cluster_->known = std::make_shared<const Epochs>(std::exchange(cluster_->meeting, {}).known);
  cluster_->arrived = 0;
  ++cluster_->phase;
  if (timeline) timeline->complete(cluster_.get());
  for (auto& [block, t] : std::exchange(cluster_->waiting, {})) {
    if (timeline) timeline->resume(cluster_.get(), block->slot_, t);
    block->make_ready(t);
  }
}

void Block::cluster_wait(const char* what, Place place) {
  const Uncounted uncounted;
  leave_if_failed();
  const std::size_t phase = threads_[running_].cluster_phase;
  if (phase == 0) fail(what, place, "without cluster_arrive before it");
  if (timeline) let_others_run(what, place);
  while (cluster_->phase < phase) {
    cluster_->waiting.emplace_back(this, running_);
    suspend(what, place);
  }
  threads_[running_].cluster_phase = 0;
  if (timeline) timeline->end_wait(cluster_.get(), slot_, running_, what);
  go_on(cluster_->known, running_);
}

// Threads that have left do not count, as at the barrier of a block. The end of the block comes
// after all that other blocks do to its shared memory, and after what bulk copies read there: a
// thread of the block has to know of it.
void Block::leave_cluster() {
  if (races_ && !failure_ && cluster_->blocks.size() > 1) {
    Meeting& of_threads = shared_words_[this];  // no word has this address
    arrive(of_threads, running_);
    if (exited_ == threads_.size()) {
      go_on(std::make_shared<const Epochs>(of_threads.known), running_);
      Races::Access end =
          races_->by_thread(number(running_), Kind::write, "the end of the block", {}, nullptr);
      if (const std::string* race = races_->touch(end, {shadow_, shared_name_}, 0,
                                                  variables_.size() + shared_bytes_))
        fail_later(*race);
    }
  }
  ++cluster_->left;
  if (threads_[running_].cluster_phase > cluster_->phase) --cluster_->arrived;  // counts once
  const std::size_t all = cluster_->blocks.size() * threads_.size();
  if (!failure_ && cluster_->left < all && cluster_->arrived + cluster_->left == all)
    end_cluster_phase();
}

void Block::mbarrier_arrive_cluster(const char* what, Place place, const void* at) {
  const Uncounted uncounted;
  leave_if_failed();
  Block& owner = owner_of(what, place, at);
  MBarrier& barrier = owner.mbarrier_of(what, place, at);
  if (timeline) let_others_run(what, place);
  access_cluster(Kind::atomic, what, place, at, sizeof(std::uint64_t));
  if (barrier.all_arrived()) end_phase(owner, barrier);
  if (barrier.all_arrived())
    fail(what, place, "once more than the barrier counts in a phase: " + owner.barrier_text(at));
  if (timeline)
    timeline->arrive(&barrier, slot_, running_,
                     owner.word_name(owner.shared_byte(at).value_or(0)));
  arrive(barrier.meeting, running_);
  if (barrier.arrive(0)) end_phase(owner, barrier);
  let_others_run(what, place);
}

}  // namespace attn::emulator
