// Summation order of sums over all keys of a head that are formed from block sums: used by the
// kernels of two_readings.h and by the reference.
#pragma once

#include <cstdint>

namespace attn {

// Threads per column of a block. Each adds every n-th row; then one of them adds the partial sums.
// As in pool_kernel (choose_blocks.h), with 64 threads of eight columns.
constexpr int column_owners(int64_t head_dim) { return static_cast<int>(512 / head_dim); }

// Threads per column of a head. Each adds every n-th block.
constexpr int kReduceThreads = 1024;
constexpr int block_owners(int64_t head_dim) { return static_cast<int>(kReduceThreads / head_dim); }

}  // namespace attn
