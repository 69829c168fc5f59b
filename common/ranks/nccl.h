/// \file
/// NCCL, loaded when it is first used: programs start without it.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "ranks/rank.h"

namespace attn::ranks {

/// Thread blocks of NCCL's kernels, of which each occupies an SM: 8, or ATTN_NCCL_CTAS.
int nccl_ctas();

/// One rank's communicator. It never blocks the host for long: calls that are in progress are asked
/// for their state until a deadline, then the communicator is aborted.
class NcclComm {
 public:
  /// The id of a new communicator, made by one rank. Throws DeviceError if there is no library, or
  /// an old one.
  static std::string unique_id();
  static int version();
  /// Joins the other ranks. All ranks must call it at the same time.
  NcclComm(const std::string& id, int rank, int world, double timeout_s,
           std::function<bool()> ended);
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;

  /// How long later calls may take, and what ends them earlier.
  void limit(double timeout_s, std::function<bool()> ended);
  /// Queues messages in a stream, as one group.
  Status group(const std::string& what, const Message* messages, std::size_t count, Stream);
  /// Queues a reduction over all ranks of floats, in place.
  Status all_reduce(const std::string& what, float* data, int64_t count, Reduction, Stream);
  /// Queues a sum over all ranks of bytes, in place: of which all but one rank have 0, in any type.
  Status sum_bytes(const std::string& what, void* data, int64_t bytes, Stream);
  /// Ends kernels that wait for a peer. Nothing can be sent afterwards.
  void abort();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace attn::ranks
