/// \file
/// Ranks in processes of their own, on one host or several, meet at a file that all of them see.
#pragma once

#include <string>

namespace attn::ranks {

/// What rank 0 leaves for the others.
struct Invitation {
  std::string id;        ///< of NCCL, any bytes
  int world = 0;         ///< ranks, with rank 0
  int version = 0;       ///< of rank 0's NCCL: 22803 is 2.28.3
  std::string run = {};  ///< what the ranks compute, in words: the same of all
};

/// Writes the file, at once as a whole. Throws DeviceError if it exists: it would be of another
/// run.
void invite(const std::string& file, const Invitation&);
/// Waits for the file, at most so long, and reads it. Throws DeviceError if it does not come, is
/// not such a file, or is for another number of ranks, version or run than `mine`.
Invitation accept(const std::string& file, int rank, const Invitation& mine, double seconds);

}  // namespace attn::ranks
