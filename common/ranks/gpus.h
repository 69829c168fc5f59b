/// \file
/// Ranks on GPUs: one host thread, a compute stream and a communication stream per GPU.
#pragma once

#include <vector>

#include "ranks/rank.h"

namespace attn::ranks {

/// How messages travel: by NCCL's kernels, or by the copy engines, which need no SM.
enum class Transport { nccl, copies };

/// Runs a program on these GPUs, and `finish` for each rank after all of them. A rank that waits
/// longer than `timeout_s` ends all of them, with an error that names rank, peer, exchange, bytes.
Status run_on_gpus(const std::vector<int>& devices, Transport, const Program&,
                   const std::function<void(Rank&)>& finish, double timeout_s);

void copy_rows_on_gpus(void* to, int64_t to_pitch, const void* from, int64_t from_pitch,
                       int64_t width, int64_t rows);

}  // namespace attn::ranks
