/// \file
/// Ranks on GPUs: one host thread, a compute stream and a communication stream per GPU.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "ranks/rank.h"

namespace attn::ranks {

/// How messages travel: by NCCL's kernels, or by the copy engines, which need no SM.
enum class Transport { nccl, copies };

/// Seconds of one round of all ranks, from the release of all GPUs to the end of each.
struct RoundTime {
  std::vector<double> seconds;  ///< by rank
  double slowest() const;
  double skew() const;  ///< slowest - fastest
};

class GpuRanks {
 public:
  /// Connects the GPUs. Throws DeviceError.
  GpuRanks(const std::vector<int>& devices, Transport, double timeout_s);
  ~GpuRanks();
  GpuRanks(const GpuRanks&) = delete;

  /// Frees the buffers of the last program and prepares this one.
  Status prepare(const Program&);
  /// One round. If it fails, the ranks cannot be used again: a rank that waits longer than the
  /// time-out ends all, with an error that names rank, peer, exchange and bytes.
  Status run();
  /// One round with L2 flushed on all GPUs, timed from a common release.
  Status time(RoundTime&);
  /// Calls `finish` for each rank, with its GPU in use.
  Status finish(const std::function<void(Rank&)>&);
  bool usable() const;
  void set_timeout(double seconds);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Runs a program on these GPUs, then `finish` for each rank. Connections are kept for later calls.
Status run_on_gpus(const std::vector<int>& devices, Transport, const Program&,
                   const std::function<void(Rank&)>& finish, double timeout_s);

void copy_rows_on_gpus(void* to, int64_t to_pitch, const void* from, int64_t from_pitch,
                       int64_t width, int64_t rows);

}  // namespace attn::ranks
