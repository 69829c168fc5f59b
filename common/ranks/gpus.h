/// \file
/// Ranks on GPUs: one host thread, a compute stream and a communication stream per GPU.
#pragma once

#include <algorithm>
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
  /// By rank, of a traced round: how long messages were under way, and how long the launches waited
  /// for them.
  std::vector<double> under_way, waited;
  /// The share of the messages' time behind which a rank computed: of the rank with the least.
  double overlap() const {
    double least = 1;
    for (std::size_t r = 0; r < waited.size(); ++r)
      if (under_way[r] > 0) least = std::min(least, 1 - waited[r] / under_way[r]);
    return least;
  }
  double slowest() const { return *std::ranges::max_element(seconds); }
  double skew() const { return slowest() - *std::ranges::min_element(seconds); }
};

/// What a round leaves out, to see what a step's transfers and its launches take alone; or the
/// whole with events around messages and waits.
enum class Variant { whole, launches_only, transfers_only, traced };

/// Asks run_on_gpus() to time a program after it has run once.
struct Measuring {
  int warmup = 2, most_rounds = 20;
  double most_s = 2;                       ///< at least 5 rounds, and no more than this takes
  std::vector<RoundTime> rounds[4] = {};   ///< by variant
  std::vector<int64_t> buffer_bytes = {};  ///< allocated, by rank
};
inline Measuring* measuring = nullptr;

/// Memory that the ranks write together.
struct Output {
  void* data;
  int64_t bytes;
};
/// One rank of several processes. In an ordinary process, which has all ranks: rank -1.
struct Process {
  int rank = -1;
  std::string id_file = {};          ///< where the ranks meet (meeting.h)
  std::string run = {};              ///< the problem, the same of all ranks
  std::vector<Output> outputs = {};  ///< that this process has the rows of its rank of
};

class GpuRanks {
 public:
  /// Connects the GPUs. Throws DeviceError.
  GpuRanks(const std::vector<int>& devices, Transport, double timeout_s, const Process&);
  ~GpuRanks();
  GpuRanks(const GpuRanks&) = delete;

  /// Frees the buffers of the last program and prepares this one.
  Status prepare(const Program&);
  /// Runs the launches without messages, so that all kernels are loaded. Results mean nothing.
  Status load();
  /// One round. If it fails, the ranks cannot be used again: a rank that waits longer than the
  /// time-out ends all, with an error that names rank, peer, exchange and bytes.
  Status run();
  /// One round with L2 flushed on all GPUs, timed from a common release.
  Status time(RoundTime&, Variant = Variant::whole);
  std::vector<int64_t> buffer_bytes() const;
  /// Calls `finish` for each rank, with its GPU in use.
  Status finish(const std::function<void(Rank&)>&, const std::vector<Output>& shared);
  bool usable() const;
  void set_timeout(double seconds);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Runs a program on these GPUs, then `finish` for each rank. Connections are kept for later calls.
Status run_on_gpus(const std::vector<int>& devices, Transport, const Program&,
                   const std::function<void(Rank&)>& finish, double timeout_s, const Process&);

void copy_rows_on_gpus(void* to, int64_t to_pitch, const void* from, int64_t from_pitch,
                       int64_t width, int64_t rows);

}  // namespace attn::ranks
