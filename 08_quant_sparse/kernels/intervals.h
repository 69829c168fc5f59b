// Column interval masks (FlashMask, arXiv 2410.01359): block lists made on the device, and the
// element mask.
#pragma once

#include "kernels/hopper/fragments.h"
#include "kernels/sparse.h"
#include "kernels/visits.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// Rows [begin, end) of a column are masked, by one interval or two. A stride of 0: shared by all.
struct Intervals {
  const int *gBegin, *gEnd;  // [B or 1, Hq or 1, count, seqlen_k]
  int count;
  int64_t batch_stride, head_stride;  // in elements
  explicit Intervals(const Arguments& args)
      : gBegin(args.in<int>("hidden_begin")),
        gEnd(args.in<int>("hidden_end")),
        count(intervals_of(args.problem)) {
    const int64_t of_head = count * args.problem.seqlen_k, tiles = tiles_of_queries(args.problem);
    const ListStrides strides = list_strides(args.problem);
    batch_stride = strides.batch / tiles * of_head, head_stride = strides.head / tiles * of_head;
  }
  __device__ int64_t first(const Shape& shape, int bh) const {
    return bh / shape.heads * batch_stride + bh % shape.heads * head_stride;
  }
};

// gBounds [lists, key blocks, count]: one warp per block and interval.
//! [bounds]
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    bounds_kernel(Bounds* gBounds, const int* gBegin, const int* gEnd, int64_t warps, int count,
                  int n_blocks, int block_n, int seqlen_k) {
  const int64_t warp = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  if (warp >= warps) return;
  const int interval = static_cast<int>(warp % count), lane = threadIdx.x % kWarp;
  const int key0 = static_cast<int>(warp / count % n_blocks) * block_n;
  const int64_t row = (warp / count / n_blocks * count + interval) * seqlen_k;
  Bounds b{2147483647, 0, 2147483647, 0};
  for (int key = key0 + lane; key < min(key0 + block_n, seqlen_k); key += kWarp) {
    const int begin = gBegin[row + key], end = gEnd[row + key];
    b.begin_min = min(b.begin_min, begin), b.begin_max = max(b.begin_max, begin);
    b.end_min = min(b.end_min, end), b.end_max = max(b.end_max, end);
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    b.begin_min = min(b.begin_min, __shfl_xor_sync(~0u, b.begin_min, distance));
    b.begin_max = max(b.begin_max, __shfl_xor_sync(~0u, b.begin_max, distance));
    b.end_min = min(b.end_min, __shfl_xor_sync(~0u, b.end_min, distance));
    b.end_max = max(b.end_max, __shfl_xor_sync(~0u, b.end_max, distance));
  }
  if (lane == 0) gBounds[warp] = b;
}
//! [bounds]

// gVisits [lists, query tiles], gVisited [lists, query tiles, key blocks]: one warp per query tile.
// It goes through the blocks twice, first for the unmasked ones, then for the masked ones. Each
// lane classifies one block of 32, and a ballot gives its position in the list.
//! [lists]
template <class Config, int kThreads>
__global__ void __launch_bounds__(kThreads)
    lists_kernel(BlockList* gVisits, int* gVisited, const Bounds* gBounds, Shape shape,
                 int64_t warps, int count, int n_blocks) {
  const int64_t warp = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  if (warp >= warps) return;
  const int lane = threadIdx.x % kWarp, m_blocks = ceil_div(shape.seqlen_q, Config::kBlockM);
  const int row0 = static_cast<int>(warp % m_blocks) * Config::kBlockM;
  const int last_row = min(row0 + Config::kBlockM, shape.seqlen_q) - 1;
  const Bounds* const gOfList = gBounds + warp / m_blocks * n_blocks * count;
  const KvBlockRange kv_range =
      kv_block_range(shape, shape.seqlen_q, shape.seqlen_k, row0, Config::kBlockM, Config::kBlockN);
  BlockList visits{static_cast<int>(warp * n_blocks), 0, 0};
  int idx = visits.first;
  for (const BlockClass wanted : {kUnmasked, kMasked}) {
    for (int n0 = kv_range.begin; n0 < kv_range.end; n0 += kWarp) {
      const int n = n0 + lane;
      BlockClass is =
          n < kv_range.end ? classify(gOfList + n * count, count, row0, last_row) : kHidden;
      if (is == kUnmasked && (n < kv_range.unmasked_begin || n >= kv_range.unmasked_end))
        is = kMasked;
      const unsigned taken = __ballot_sync(~0u, is == wanted);
      if (is == wanted) gVisited[idx + __popc(taken & ((1u << lane) - 1))] = n;
      idx += __popc(taken);
    }
    (wanted == kUnmasked ? visits.masked : visits.end) = idx;
  }
  if (lane == 0) gVisits[warp] = visits;
}
//! [lists]

// Sets scores hidden by the intervals to -inf. Each lane loads the interval of one key of 32, and
// shuffles distribute it to the lanes with scores of that key. 32 keys that hide nothing from the
// warp's 16 rows are skipped. `first`: offset of the head; `tile_row0`: the tile's first query.
//! [mask]
template <class Config>
__device__ __forceinline__ void apply_intervals(float (&s)[Config::kBlockN / 8][4],
                                                const Intervals& intervals, int64_t first,
                                                int n_block, int tile_row0, int seqlen_k) {
  const int row = tile_row0 + first_row(), warp_row = tile_row0 + thread_index() / kWarp * 16;
  for (int interval = 0; interval < intervals.count; ++interval) {
    const int64_t of_head = first + int64_t{interval} * seqlen_k;
#pragma unroll
    for (int n0 = 0; n0 < Config::kBlockN / 8; n0 += 4) {
      // Keys past the end are masked already.
      const int key =
          min(n_block * Config::kBlockN + 8 * n0 + thread_index() % kWarp, seqlen_k - 1);
      const int begin = intervals.gBegin[of_head + key], end = intervals.gEnd[of_head + key];
      if (!__any_sync(~0u, begin < warp_row + 16 && end > warp_row)) continue;
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int lane = 8 * n + quad_col() + i;
          const int hidden = __shfl_sync(~0u, begin, lane), until = __shfl_sync(~0u, end, lane);
#pragma unroll
          for (int r = 0; r < 2; ++r)
            if (row + 8 * r >= hidden && row + 8 * r < until) s[n0 + n][2 * r + i] = -INFINITY;
        }
    }
  }
}
//! [mask]

// Phases "bounds" and "lists"; returns the lists for the attention kernel.
//! [launch]
template <class Config>
Status find_visits(const Arguments& args, const Intervals& intervals, BlockLists& lists) {
  constexpr int kThreads = 256;
  const Problem& p = args.problem;
  const auto n_blocks = static_cast<int>(ceil_div(p.seqlen_k, Config::kBlockN));
  const int64_t m_blocks = ceil_div(p.seqlen_q, Config::kBlockM), of = lists_of(p);
  const auto blocks = [](int64_t warps) {
    return dim3(static_cast<unsigned>(ceil_div(warps, kThreads / kWarp)));
  };
  Bounds* const gBounds = args.out<Bounds>("bounds");
  const int64_t of_bounds = of * n_blocks * intervals.count;
  args.phase("bounds");
  if (const Status done =
          launch_kernel(bounds_kernel<kThreads>, blocks(of_bounds), dim3(kThreads), 0, args.stream,
                        gBounds, intervals.gBegin, intervals.gEnd, of_bounds, intervals.count,
                        n_blocks, Config::kBlockN, static_cast<int>(p.seqlen_k));
      !done.ok())
    return done;
  args.phase("lists");
  if (const Status done =
          launch_kernel(lists_kernel<Config, kThreads>, blocks(of * m_blocks), dim3(kThreads), 0,
                        args.stream, args.out<BlockList>("visits"), args.out<int>("visited"),
                        gBounds, shape_of(p), of * m_blocks, intervals.count, n_blocks);
      !done.ok())
    return done;
  const ListStrides strides = list_strides(p);
  lists = {args.out<BlockList>("visits"), args.out<int>("visited"), strides.batch, strides.head};
  return Status::success();
}
//! [launch]

}  // namespace ATTN_BACKEND::hopper
