// v3_wgmma: wgmma replaces mma.sync and ldmatrix.
//
// parent    v2_separate_phases
// change    A warpgroup's four warps multiply together, asynchronously, with operands from shared
//           memory. Tiles are panels of 128-byte rows. wgmma reads them through the async proxy, so
//           each thread fences its copies first.
// why       mma.sync does not reach the rate of a Hopper tensor core.
// expect    no ldmatrix: sm__inst_executed.sum falls. Threads still copy tiles, and compute an
//           address per 16 bytes.
// supports  fp16, bf16; head dims 64, 128, 256; any lengths, masks, GQA
#include <algorithm>

#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "ptx/mma.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"
#include "kernels/hopper/fragments.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::v3_wgmma {
using namespace attn;
using namespace hopper;

//! [config]
template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kNumConsumers = 2;  // warpgroups; from v5 on a producer joins them
  static constexpr int kThreads = kWarpgroup * kNumConsumers;
  static constexpr int kBlockM = 64 * kNumConsumers;          // B_r
  static constexpr int kBlockN = kHeadDim == 256 ? 64 : 128;  // B_c
  static constexpr int kStages = 1;                           // buffers for K, and for V
  static constexpr int kQStages = 1;                          // buffers for Q
};
//! [config]

// XOR swizzle: offset of (row, col). The 16-byte chunks of a panel row are permuted.
//! [swizzle]
template <int kRows>
__host__ __device__ constexpr int swizzled_offset(int row, int col) {
  return (col / 64 * kRows + row) * 64 + ((col / 8) ^ row) % 8 * 8 + col % 8;
}
//! [swizzle]

// Tiles are panels of 64 columns, [d / 64][rows, 64], with TMA's 128-byte swizzle. It repeats every
// 1024 bytes and is computed from the address, so a tile begins at a multiple of 1024.
template <class Element, class Config>
struct SharedStorage {
  alignas(1024) Element sQ[Config::kQStages][Config::kBlockM * Config::kHeadDim];
  alignas(1024) Element sK[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(1024) Element sV[Config::kStages][Config::kBlockN * Config::kHeadDim];
  ATTN_MEMBERS(SharedStorage, sQ, sK, sV)
};

// One query tile per block.
//! [tiles]
struct SingleTile : TileOrder {
  using TileOrder::TileOrder;
  __device__ unsigned first() const { return blockIdx.x; }
  __device__ unsigned next(unsigned) const { return count(); }
};
using TileScheduler = SingleTile;
//! [tiles]

// Issues the copies of kRows rows of a [heads, rows, d] tensor; rows past the end become zeros.
template <int kRows, class Config, class Element>
__device__ void load_tile(Element* tile, const Element* g, int head, int row0, int rows) {
#pragma unroll
  for (int i = 8 * thread_index(); i < kRows * Config::kHeadDim; i += 8 * Config::kThreads) {
    const int r = i / Config::kHeadDim, c = i % Config::kHeadDim, row = min(row0 + r, rows - 1);
    cp_async_16(tile + swizzled_offset<kRows>(r, c),
                g + (int64_t{head} * rows + row) * Config::kHeadDim + c, row0 + r < rows ? 16 : 0);
  }
}

// (3) S = Q K^T for the 64 rows of this warpgroup, both K-major (the `false`). Issues only; does
// not wait. `q + n`: n bytes further. The first wgmma overwrites s, the others add to it.
//! [issue_qk]
//! [ex06b]
template <class Config, class Element>
__device__ __forceinline__ void issue_qk(float (&s)[Config::kBlockN / 8][4], const Element* sQ,
                                         const Element* sK) {
  const SmemDescriptor q = smem_descriptor(sQ), k = smem_descriptor(sK);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kHeadDim / 16; ++i) {  // 16 of a panel's 64 columns, 32 bytes
    const int panel = i / 4, inside = i % 4 * 32;
    wgmma<Element, false>(s, q + (panel * Config::kBlockM * 128 + inside),
                          k + (panel * Config::kBlockN * 128 + inside), i > 0);
  }
  wgmma_commit();
}
//! [issue_qk]

// (5) O += P V: P from registers, V MN-major, [k, d]. Issues only; does not wait. The descriptor's
// second argument: bytes from panel to panel.
//! [issue_pv]
template <class Config, class Element>
__device__ __forceinline__ void issue_pv(float (&o)[Config::kHeadDim / 8][4],
                                         const uint32_t (&p)[Config::kBlockN / 16][4],
                                         const Element* sV) {
  const SmemDescriptor v = smem_descriptor(sV, Config::kBlockN * 128);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 16; ++i)  // 16 keys are 16 rows of 128 bytes
    wgmma<Element, true>(o, p[i], v + 16 * 128 * i, true);
  wgmma_commit();
}
//! [ex06b]
//! [issue_pv]

// (4) Online softmax in fp32, within the quad of lanes that share a row: S becomes P. The caller
// multiplies O by `rescale`.
//! [softmax]
template <class Config>
__device__ __forceinline__ void online_softmax(float (&s)[Config::kBlockN / 8][4],
                                               float (&row_max)[2], float (&row_sum)[2],
                                               float (&rescale)[2], float softmax_scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float max = s[0][2 * r];
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; ++n)
      max = fmaxf(max, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    max = fmaxf(row_max[r], quad_max(max) * softmax_scale_log2);
    rescale[r] = exp2f(row_max[r] - max);
    row_max[r] = max;
    row_sum[r] *= rescale[r];
  }
#pragma unroll
  for (int n = 0; n < Config::kBlockN / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[n][i] = exp2f(fmaf(s[n][i], softmax_scale_log2, -row_max[i / 2]));
      row_sum[i / 2] += s[n][i];
    }
}
//! [softmax]

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_kernel(const Element* gQ,         // [B, Hq, seqlen_q, d]
                     const Element* gK,         // [B, Hkv, seqlen_k, d]
                     const Element* gV,         // [B, Hkv, seqlen_k, d]
                     Element* __restrict__ gO,  // [B, Hq, seqlen_q, d]
                     float* __restrict__ gLse,  // [B, Hq, seqlen_q]
                     Shape shape, TileScheduler scheduler) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  // Broadcast from lane 0, so that the compiler knows it is warp-uniform. Then tile addresses stay
  // in uniform registers, which wgmma requires.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const float softmax_scale_log2 = shape.softmax_scale * kLog2e;

  // q: pipeline state of the current Q tile; index: the next tile; the others describe the current
  // tile.
  PipelineState<Config::kQStages> q{-1};
  unsigned index = scheduler.first();
  WorkTile work{};
  int row0 = 0, last_key = 0;
  KvBlockRange kv_range{};
  const auto next_work_tile = [&] {
    if (index >= scheduler.count()) return false;
    q.advance();
    work = work_of<Config>(shape, scheduler.at<Config::kBlockM>(index));
    index = scheduler.next(index);
    row0 = work.row0 + work.seqlen_k - work.seqlen_q;  // key on the diagonal of row work.row0
    last_key = work.seqlen_k - 1;
    kv_range = work.kv_range;  // never empty: a fully masked tile has one block, all of it masked
    return true;
  };
  // Pipeline state of the current K/V tile, counted through all tiles of this block.
  using KvState = PipelineState<Config::kStages>;
  KvState kv;
  //! [wait]
  const auto consumer_wait = [] {
    cp_async_wait<1>();   // the newest copy group, one tile, may be in flight
    fence_proxy_async();  // this thread's copies are visible to wgmma (async proxy)
    __syncthreads();      // the copies of all threads are visible
  };
  //! [wait]
  const auto load = [&](Element* tile, const Element* g, int n_block) {
    if (n_block < kv_range.end)
      load_tile<kBlockN, Config>(tile, g, work.kv_head, n_block * kBlockN, work.seqlen_k);
    cp_async_commit();
  };

  float o[kHeadDim / 8][4] = {};  // unnormalised
  // max in log2 units; sum over this lane's keys
  float row_max[2] = {kLowest, kLowest}, row_sum[2] = {};
  float s[kBlockN / 8][4];
  uint32_t p[kBlockN / 16][4];
  float rescale[2];
  // Softmax of one key block. `masked` is a type, so the unmasked body contains no mask code.
  const auto softmax = [&](int n_block, auto masked) {
    if constexpr (masked.value) apply_mask<Config>(s, shape, kv_range, n_block, row0, last_key);
    online_softmax<Config>(s, row_max, row_sum, rescale, softmax_scale_log2);
  };
  //! [mmas]
  const auto issue_s = [&] {
    // this warpgroup's 64 rows of the first panel; issue_qk advances to the other panels
    issue_qk<Config>(s, smem.sQ[q.index()] + warpgroup * 64 * 64, smem.sK[kv.index()]);
  };
  const auto issue_o = [&](KvState state) { issue_pv<Config>(o, p, smem.sV[state.index()]); };
  const auto process_kv_block = [&](int n_block, auto masked) {
    consumer_wait();
    issue_s();
    wgmma_wait<0>(s);
    __syncthreads();  // K_j is no longer read
    load(smem.sK[0], gK, n_block + 1);
    softmax(n_block, masked);
    rescale_rows<kHeadDim>(o, rescale);
    round_p<Element, kBlockN>(p, s);
    consumer_wait();
    issue_o(kv);
    wgmma_wait<0>(o);
    __syncthreads();  // V_j is no longer read
    load(smem.sV[0], gV, n_block + 1);
    kv.advance();
  };
  //! [mmas]

  //! [loops]
  if (!next_work_tile()) return;
  do {
    // (1) Load Q_i, which stays, and the first K_j and V_j. Q is in K's copy group.
    load_tile<Config::kBlockM, Config>(smem.sQ[0], gQ, work.q_head, work.row0, work.seqlen_q);
    load(smem.sK[0], gK, kv_range.begin);
    load(smem.sV[0], gV, kv_range.begin);
    int n_block = kv_range.begin;
    // Left window edge; unmasked blocks; diagonal, right window edge, sequence end.
    for (; n_block < kv_range.unmasked_begin; ++n_block)
      process_kv_block(n_block, std::true_type{});
    for (; n_block < kv_range.unmasked_end; ++n_block) process_kv_block(n_block, std::false_type{});
    for (; n_block < kv_range.end; ++n_block) process_kv_block(n_block, std::true_type{});
    store_o<Element, kHeadDim>(gO, gLse, work, kHeadDim, o, row_max, row_sum);
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max[r] = kLowest, row_sum[r] = 0;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0;
  } while (next_work_tile());
  //! [loops]
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const TileScheduler scheduler(args.problem, Config::kBlockM);
  if (args.report_tiling({Config::kBlockM, Config::kBlockN, scheduler.section}))
    return Status::success();
  const ForwardParams<Element> params(args);
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config>, dim3(scheduler.count()),
                       dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), args.stream,
                       params.q, params.k, params.v, params.o, params.lse, shape_of(args.problem),
                       scheduler);
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    switch (args.problem.head_dim) {
      case 64: return launch<Element, Config<64>>(args);
      case 128: return launch<Element, Config<128>>(args);
      case 256: return launch<Element, Config<256>>(args);
    }
    return Status::unsupported("only head dims 64, 128 and 256");
  });
}

}  // namespace ATTN_BACKEND::v3_wgmma
