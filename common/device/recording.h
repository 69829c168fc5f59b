/// \file
/// Recording of a launch on a GPU (`--timeline`): what the kernels of a recorded build write
/// (attn/record.h), the memory that they write it to, and the clocks of SMs.
///
/// Each warp has a ring of 16-byte records in global memory. A warp stops at the last record of its
/// ring and overwrites it from then on: what is lost is the last part of the warp's time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "attn/status.h"
#include "attn/step.h"

namespace attn {

/// What a record is about.
enum class RecordKind : std::uint32_t {
  none,            // not written
  begin,           // of a warp: `extra` unused, `what` base of shared memory, clock64
  timer,           // after it: `what` SM, %globaltimer
  mbarrier_wait,   // `what` address of the barrier
  mbarrier_arrive,
  named_wait,      // `what` number of the barrier
  named_arrive,
  block_wait,      // __syncthreads
  tma,             // `what` address of the barrier, `begin` destination, `end` clock
  wgmma_group,     // from wgmma_fence to wgmma_commit
  wgmma_wait,      // `extra` groups that may stay in flight
  copy_group,      // cp_async_commit
  copy_wait,       // `extra` groups that may stay in flight
  mark,            // `what` hash of the name, `end` clock
  mark_end,
};

/// `tag`: kind in bits 0 to 7, source line in bits 8 to 23, `extra` above. Clocks are the low 32
/// bits of the SM's.
struct alignas(16) Record {
  std::uint32_t tag, what, begin, end;
};
constexpr std::uint32_t record_tag(RecordKind kind, int line = 0, int extra = 0) {
  return static_cast<std::uint32_t>(kind) | (static_cast<std::uint32_t>(line) & 0xFFFF) << 8 |
         static_cast<std::uint32_t>(extra) << 24;
}

/// FNV-1a, which names a mark.
constexpr std::uint32_t record_hash(const char* name) {
  std::uint32_t hash = 2166136261;
  for (; *name; ++name) hash = (hash ^ static_cast<unsigned char>(*name)) * 16777619;
  return hash;
}

/// A member of a kernel's SharedStorage, as the kernel stores it. The name is a device address.
struct RecordedMember {
  std::uint64_t name;
  std::uint32_t offset, bytes, element_bytes, extents[2];
};
inline constexpr std::size_t kMostMembers = 64;

/// Where a kernel records: in constant memory of its file, found by the size of its dynamic shared
/// memory, which differs from kernel to kernel (Recording::add).
struct RecordTarget {
  std::uint32_t shared_bytes, mask, warps, unused;  // bytes of a ring - 1; warps per block
  std::uint64_t rings, members;                     // addresses
};
inline constexpr std::size_t kRecordTargets = 4;  // kernels per file

/// A point of an SM's clock: clock64 just after %globaltimer has changed to `ns`.
struct SmSample {
  std::uint32_t sm, resolution_ns;  // least change of %globaltimer that was observed
  std::uint64_t clock, ns;
};

/// The records of one kernel launch, on the host.
struct RecordedKernel {
  std::size_t blocks[3]{}, warps = 0, capacity = 0;  // grid; per block; records per ring
  std::vector<Record> records;                       // [block][warp][capacity]
  std::vector<RecordedMember> members;
  std::size_t count() const { return blocks[0] * blocks[1] * blocks[2]; }
};

/// The records of a step's launch.
struct RecordedLaunch {
  std::vector<RecordedKernel> kernels;
  std::map<std::uint64_t, std::string> texts;  // names of members by device address
  std::map<std::uint32_t, std::string> marks;  // by the hash of the name
  std::vector<SmSample> samples;               // before and after the launch
};

/// While one lives, launches of recorded kernels of this thread write records. GPU only.
class Recording {
 public:
  explicit Recording(Device device);
  ~Recording();
  Recording(const Recording&) = delete;
  static Recording* current();

  /// A kernel is about to be launched with `shared_bytes`: makes rings for it if it has none, and
  /// adds to `shared_bytes` if another kernel has the same. `index`, `target`: what belongs into
  /// its file's table of targets; `fresh` if it is not there yet.
  /// `marks`: names of the marks of the step.
  Status add(const void* kernel, const unsigned (&grid)[3], unsigned threads,
             const std::vector<const char*>& marks, std::size_t& shared_bytes,
             std::size_t& index, RecordTarget& target, bool& fresh);
  /// Erases all records: the next launch is the one to look at.
  Status clear();
  /// Samples the clocks of all SMs. It is queued before and after the launch.
  Status sample_clocks();
  /// Waits for the device and copies everything to the host.
  Status read(RecordedLaunch& launch);

 private:
  struct Impl;
  Impl* impl_;
};

}  // namespace attn
