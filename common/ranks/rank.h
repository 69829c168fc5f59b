/// \file
/// A rank: one of the GPUs of a step that works on several, or an emulated one. A step describes
/// what each rank does: launches, exchanges of messages, and waits for them. On GPUs the calls
/// queue that work in streams. The emulator records it, and runs the ranks one after the other.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "attn/step.h"

namespace attn::ranks {

/// One side of a transfer. Messages between two ranks match in the order in which both post them.
struct Message {
  bool sends = false;
  int peer = 0;
  void* data = nullptr;
  int64_t bytes = 0;  ///< 0: no message, on both sides
};
inline Message send_to(int peer, const void* data, int64_t bytes) {
  return {true, peer, const_cast<void*>(data), bytes};
}
inline Message receive_from(int peer, void* data, int64_t bytes) {
  return {false, peer, data, bytes};
}

enum class Reduction { sum, max };

/// The number of an exchange of a rank.
using Ticket = int;

class Rank {
 public:
  Rank(int index, int world, Device device) : index_(index), world_(world), device_(device) {}
  virtual ~Rank() = default;
  Rank(const Rank&) = delete;

  int index() const { return index_; }
  int world() const { return world_; }
  Device device() const { return device_; }
  int next() const { return (index_ + 1) % world_; }
  int previous() const { return (index_ + world_ - 1) % world_; }

  /// A buffer of this rank, by name: allocated in the set-up of a step, not while ranks run,
  /// because an allocation may wait for a kernel that waits for a peer.
  virtual void* allocate(const std::string& name, int64_t bytes, bool zero = false) = 0;
  virtual void* buffer(const std::string& name) const = 0;
  /// SMs that a launch should leave to transfers which run next to it.
  virtual int transfer_sms() const { return 0; }
  /// Another rank, for the addresses of its buffers. Ranks of one process only.
  virtual Rank& peer(int index) const = 0;

  /// Queues a launch in the compute stream.
  virtual void compute(const std::string& what, std::function<Status(Stream)> launch) = 0;
  /// Starts sends and receives, as one group: none of them waits for another. They begin when the
  /// work queued so far is complete, so a buffer that an earlier launch reads may be received into.
  /// Ungrouped messages follow one another: if all ranks send before they receive, none progresses.
  virtual Ticket exchange(const std::string& what, const std::vector<Message>& messages,
                          bool grouped = true) = 0;
  /// Later launches wait for an exchange. Until then what it sends must not change.
  virtual void wait(Ticket) = 0;
  /// Reduces `count` floats over all ranks, in place: later launches of each rank see the same
  /// result. With NCCL, and emulated.
  virtual void all_reduce(const std::string& what, float* data, int64_t count, Reduction) = 0;
  /// Queues one launch per rank. They exchange data themselves, by writes to peers and flags.
  /// `launch` of rank 0 launches the kernels of all emulated ranks, as one grid; on GPUs each rank
  /// launches its own.
  virtual void compute_with_peers(const std::string& what,
                                  std::function<Status(Stream)> launch) = 0;

 private:
  int index_, world_;
  Device device_;
};

/// What the ranks of a step do: `prepare` allocates and fills buffers, once; `run` may be called
/// repeatedly. Both throw DeviceError.
struct Program {
  std::function<void(Rank&)> prepare, run;
};

}  // namespace attn::ranks
