// v5_warp_specialised: a producer warp copies, two consumer warpgroups compute.
//
// parent    v4_tma
// change    The producer runs up to two stages of K and V ahead. Consumer warps wait for their
//           wgmma groups and then arrive on the stage's `empty` mbarrier; TMA bytes complete its
//           `full` one. The producer releases registers to the consumers (setmaxnreg). The consumer
//           warpgroups never wait for each other.
// why       In v4 a computing thread issues the copies, and two barriers per key block keep all
//           threads in step.
// expect    stalls on barriers fall a little: __syncthreads is gone, but warps still wait for their
//           wgmma groups and for full stages (v6, v7 overlap these). The warpgroups drift apart, so
//           that by chance one computes its softmax while the other's MMAs run.
// supports  fp16, bf16; head dims 64, 128, 256; any lengths, masks, GQA
// source    FlashAttention-3 (arXiv 2407.08608), section 3.1
#include <algorithm>

#include "attn/kernel.h"
#include "attn/span.h"
#include "ptx/mbarrier.h"
#include "ptx/mma.h"
#include "ptx/setmaxnreg.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"
#include "kernels/hopper/fragments.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::v5_warp_specialised {
using namespace attn;
using namespace hopper;

//! [config]
template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kNumConsumers = 2;                            // consumer warpgroups
  static constexpr int kThreads = kWarpgroup * (kNumConsumers + 1);  // plus a producer
  static constexpr int kBlockM = 64 * kNumConsumers;                 // B_r
  static constexpr int kBlockN = kHeadDim == 256 ? 64 : 128;         // B_c
  static constexpr int kStages = 2;                                  // buffers for K, and for V
  static constexpr int kQStages = 1;                                 // buffers for Q
  // Registers per thread: at launch 65536 / threads, rounded down to a multiple of 8 (168 for 384
  // threads). setmaxnreg moves these between warpgroups; asking for more than are free deadlocks.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(kProducerRegisters + kNumConsumers * kConsumerRegisters <=
                    (kNumConsumers + 1) * (65536 / kThreads / 8 * 8),
                "more registers than a block of so many threads has");
};
//! [config]

// Tiles are panels of 64 columns, [d / 64][rows, 64], with TMA's 128-byte swizzle. It repeats every
// 1024 bytes and is computed from the address, so a tile begins at a multiple of 1024.
template <class Element, class Config>
struct SharedStorage {
  alignas(1024) Element sQ[Config::kQStages][Config::kBlockM * Config::kHeadDim];
  alignas(1024) Element sK[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(1024) Element sV[Config::kStages][Config::kBlockN * Config::kHeadDim];
  // mbarriers: TMA bytes have landed
  uint64_t q_full[Config::kQStages], k_full[Config::kStages], v_full[Config::kStages];
  // mbarriers: all consumer warps have released the tile
  uint64_t q_empty[Config::kQStages], k_empty[Config::kStages], v_empty[Config::kStages];
  ATTN_MEMBERS(SharedStorage, sQ, sK, sV, q_full, k_full, v_full, q_empty, k_empty, v_empty)
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

// (3) S = Q K^T for the 64 rows of this warpgroup, both K-major (the `false`). Issues only; does
// not wait. `q + n`: n bytes further. The first wgmma overwrites s, the others add to it.
//! [issue_qk]
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

// One producer thread. (1) Loads Q_i when the consumers have released the previous Q, then K_j and
// V_j into empty stages. Corner of a box: column in the panel, row, panel, head.
//! [producer]
template <class Element, class Config>
__device__ __forceinline__ void produce(SharedStorage<Element, Config>& smem, const TensorMap& mapQ,
                                        const TensorMap& mapK, const TensorMap& mapV,
                                        const Shape& shape, const TileScheduler& scheduler) {
  constexpr int kBlockN = Config::kBlockN, kTileBytes = kBlockN * Config::kHeadDim * 2;
  PipelineState<Config::kQStages> q;
  PipelineState<Config::kStages> kv;
  for (unsigned index = scheduler.first(); index < scheduler.count();
       index = scheduler.next(index)) {
    ATTN_SPAN("producer: one tile")
    const WorkTile work = work_of<Config>(shape, scheduler.at<Config::kBlockM>(index));
    mbarrier_wait(&smem.q_empty[q.index()], q.phase() ^ 1);  // previous Q released
    mbarrier_arrive_expect_tx(&smem.q_full[q.index()], Config::kBlockM * Config::kHeadDim * 2);
    tma_load(smem.sQ[q.index()], mapQ, &smem.q_full[q.index()], {0, work.row0, 0, work.q_head});
    q.advance();
    //! [ex06a]
    for (int n_block = work.kv_range.begin; n_block < work.kv_range.end; ++n_block, kv.advance()) {
      const auto load = [&](Element* tile, const TensorMap& map, uint64_t* full, uint64_t* empty) {
        mbarrier_wait(empty, kv.phase() ^ 1);  // passes at once the first time
        mbarrier_arrive_expect_tx(full, kTileBytes);
        tma_load(tile, map, full, {0, n_block * kBlockN, 0, work.kv_head});
      };
      const int stage = kv.index();
      load(smem.sK[stage], mapK, &smem.k_full[stage], &smem.k_empty[stage]);
      load(smem.sV[stage], mapV, &smem.v_full[stage], &smem.v_empty[stage]);
    }
    //! [ex06a]
  }
}
//! [producer]

template <class Element, class Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Element, Config>& smem) {
  constexpr int kWarps = 4 * Config::kNumConsumers;  // arrivals: full 1 (producer), empty kWarps
  for (int i = 0; i < Config::kQStages; ++i) mbarrier_init(&smem.q_full[i], 1);
  for (int i = 0; i < Config::kQStages; ++i) mbarrier_init(&smem.q_empty[i], kWarps);
  for (int i = 0; i < Config::kStages; ++i) {
    mbarrier_init(&smem.k_full[i], 1), mbarrier_init(&smem.v_full[i], 1);
    mbarrier_init(&smem.k_empty[i], kWarps), mbarrier_init(&smem.v_empty[i], kWarps);
  }
  mbarrier_init_fence();
}

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_kernel(const __grid_constant__ TensorMap mapQ,  // [B Hq, d / 64, seqlen_q, 64]
                     const __grid_constant__ TensorMap mapK,  // [B Hkv, d / 64, seqlen_k, 64]
                     const __grid_constant__ TensorMap mapV,  // as K
                     Element* __restrict__ gO,                // [B, Hq, seqlen_q, d]
                     float* __restrict__ gLse,                // [B, Hq, seqlen_q]
                     Shape shape, TileScheduler scheduler) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  // Broadcast from lane 0, so that the compiler knows it is warp-uniform. Then tile addresses stay
  // in uniform registers, which wgmma requires.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const float softmax_scale_log2 = shape.softmax_scale * kLog2e;
  if (threadIdx.x == 0) init_barriers(smem);
  __syncthreads();  // barriers are initialised

  if (warpgroup == Config::kNumConsumers) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x % kWarpgroup == 0)
      produce<Element, Config>(smem, mapQ, mapK, mapV, shape, scheduler);
    return;
  }
  setmaxnreg_inc<Config::kConsumerRegisters>();

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
    mbarrier_wait(&smem.q_full[q.index()], q.phase());
    work = work_of<Config>(shape, scheduler.at<Config::kBlockM>(index));
    index = scheduler.next(index);
    row0 = work.row0 + work.seqlen_k - work.seqlen_q;  // key on the diagonal of row work.row0
    last_key = work.seqlen_k - 1;
    kv_range = work.kv_range;  // never empty: a fully masked tile has one block, all of it masked
    return true;
  };
  const auto release_q = [&] {  // one arrival per warp
    if (thread_index() % kWarp == 0) mbarrier_arrive(&smem.q_empty[q.index()]);
  };
  // Pipeline state of the current K/V tile, counted through all tiles of this block.
  using KvState = PipelineState<Config::kStages>;
  KvState kv;
  const auto consumer_wait = [&](uint64_t* full, KvState state) {
    mbarrier_wait(full + state.index(), state.phase());
  };
  const auto consumer_release = [&](uint64_t* empty, KvState state) {  // one arrival per warp
    if (thread_index() % kWarp == 0) mbarrier_arrive(empty + state.index());
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
    ATTN_SPAN("QK")
    consumer_wait(smem.k_full, kv);
    issue_s();
    wgmma_wait<0>(s);
    ATTN_SPAN_END("QK")
    consumer_release(smem.k_empty, kv);
    if (n_block + 1 == kv_range.end) release_q();
    ATTN_SPAN("softmax")
    softmax(n_block, masked);
    rescale_rows<kHeadDim>(o, rescale);
    round_p<Element, kBlockN>(p, s);
    ATTN_SPAN_END("softmax")
    ATTN_SPAN("PV")
    consumer_wait(smem.v_full, kv);
    issue_o(kv);
    wgmma_wait<0>(o);
    ATTN_SPAN_END("PV")
    consumer_release(smem.v_empty, kv);
    kv.advance();
  };
  //! [mmas]

  //! [loops]
  if (!next_work_tile()) return;
  do {
    int n_block = kv_range.begin;
    // Left window edge; unmasked blocks; diagonal, right window edge, sequence end.
    for (; n_block < kv_range.unmasked_begin; ++n_block)
      process_kv_block(n_block, std::true_type{});
    for (; n_block < kv_range.unmasked_end; ++n_block) process_kv_block(n_block, std::false_type{});
    for (; n_block < kv_range.end; ++n_block) process_kv_block(n_block, std::true_type{});
    ATTN_SPAN("epilogue")
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
  TensorMaps maps;
  if (const Status made = maps.make<Element>(args, Config::kBlockM, Config::kBlockN); !made.ok())
    return made;
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config>, dim3(scheduler.count()),
                       dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), args.stream,
                       maps.q, maps.k, maps.v, params.o, params.lse, shape_of(args.problem),
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

}  // namespace ATTN_BACKEND::v5_warp_specialised
