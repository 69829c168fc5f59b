// In which order sums over all keys of a head are formed where blocks of keys are added up first:
// what the kernels of two_readings.h do and the reference repeats.
#pragma once

#include <cstdint>

namespace attn {

// A column of a block has so many threads, of which each adds up every so-manyth row; then one of
// them adds up their sums. As pool_kernel has it (choose_blocks.h), with 64 threads of eight
// columns.
constexpr int column_owners(int64_t head_dim) { return static_cast<int>(512 / head_dim); }

// And a column of a head so many, of which each adds up every so-manyth block.
constexpr int kReduceThreads = 1024;
constexpr int block_owners(int64_t head_dim) { return static_cast<int>(kReduceThreads / head_dim); }

}  // namespace attn
