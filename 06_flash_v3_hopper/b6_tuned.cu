// b6_tuned: buffers, stages and the exchange of dS per head dim.
//
// parent    b5_whole_heads
// change    At d=64 K and V have two buffers, dS is handed over by an mbarrier (a warp arrives when
//           its dS is stored, issues dV, and waits then), and masked and unmasked tiles share one
//           loop body, with a branch around the mask. At d=128 nothing changes.
// why       At d=64 there are twice as many exponentials per MMA as at d=128, so a warpgroup waits
//           longer for dS of the other one; a key tile has half as many bytes, so that shared
//           memory has room for the next one; and a tile of 128 rows has twice as many scores per
//           thread, so that two bodies are twice as much code. At d=128 each of these was slower.
// expect    gpu__time_duration.sum falls at d=64, most with a causal mask: key tiles of few visits
// supports  fp16, bf16; head dims 64, 128; any lengths, masks, GQA
#include <algorithm>

#include "device/device.h"
#include "attn/kernel.h"
#include "ptx/mbarrier.h"
#include "ptx/named_barrier.h"
#include "ptx/reduce_add.h"
#include "ptx/setmaxnreg.h"
#include "ptx/stmatrix.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"
#include "kernels/backward_tiles.h"
#include "kernels/whole_heads.h"

namespace ATTN_BACKEND::b6_tuned {
using namespace attn;
using namespace hopper;

// Named barriers. 0 is used by __syncthreads; kScores: all consumers have stored dS.
enum NamedBarrier { kBlock = 0, kScores = 1 };

//! [config]
struct Tuning {
  int block_m, stages;  // B_r; stages of Q, and of dO
  int kv_buffers;       // of K and V; 2: the next key tile is loaded during this one
  bool early_arrival;   // dS by mbarrier: arrive, issue dV, wait; else by named barrier
  bool one_body;        // masked and unmasked tiles: a branch around the mask; else a body for each
};
// From BackwardTile, in kernels/backward_tiles.h: kBlockN = 128 keys for two warpgroups, kFragments
// (float4 of dQ per thread), kTileBytes (of Q or dO), kKeyTileBytes (of K or V).
template <int kHeadDim, Tuning kTuning>
struct Tuned : BackwardTile<kHeadDim, kTuning.block_m> {
  static constexpr int kThreads = Tuned::kConsumerThreads + kWarpgroup;  // plus a producer
  static constexpr int kStages = kTuning.stages, kKvBuffers = kTuning.kv_buffers;
  static constexpr bool kEarlyArrival = kTuning.early_arrival, kOneBody = kTuning.one_body;
  static constexpr int kDsBuffers = 2;  // of dS: one is read while the next is written
  // Registers per thread: at launch 65536 / threads, rounded down to a multiple of 8 (168 for 384
  // threads). setmaxnreg moves these between warpgroups; asking for more than are free deadlocks.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(kProducerRegisters + Tuned::kNumConsumers * kConsumerRegisters <=
                    (Tuned::kNumConsumers + 1) * (65536 / kThreads / 8 * 8),
                "more registers than a block of so many threads has");
};
// clang-format off
//                                                   M  stages  K, V  early  one body
template <int kHeadDim> struct Config;
template <> struct Config<64>  : Tuned<64,  Tuning{128,      2,    2, true,  true}> {};
template <> struct Config<128> : Tuned<128, Tuning{ 64,      2,    1, false, false}> {};
// clang-format on
//! [config]

// Tiles are panels of 64 columns, [d / 64][rows, 64], with TMA's 128-byte swizzle. It repeats every
// 1024 bytes and is computed from the address, so a tile begins at a multiple of 1024.
template <class Element, class Config>
struct SharedStorage {
  alignas(1024) Element sK[Config::kKvBuffers][Config::kBlockN * Config::kHeadDim];
  alignas(1024) Element sV[Config::kKvBuffers][Config::kBlockN * Config::kHeadDim];
  alignas(1024) Element sQ[Config::kStages][Config::kBlockM * Config::kHeadDim];
  alignas(1024) Element sdO[Config::kStages][Config::kBlockM * Config::kHeadDim];
  // dS: a panel per warpgroup
  alignas(1024) Element sdS[Config::kDsBuffers][Config::kBlockM * Config::kBlockN];
  alignas(128) float sLse[Config::kStages][Config::kBlockM];  // lse / log(2), per row
  alignas(128) float sD[Config::kStages][Config::kBlockM];    // rowsum(dO . O)
  // mbarriers: TMA bytes have landed. Q with lse, dO with D.
  uint64_t kv_full[Config::kKvBuffers], q_full[Config::kStages], do_full[Config::kStages];
  // mbarriers: all consumer warps have released the tile
  uint64_t kv_empty[Config::kKvBuffers], q_empty[Config::kStages], do_empty[Config::kStages];
  uint64_t ds_full[Config::kDsBuffers];  // mbarriers: all consumer warps have stored dS
  unsigned index[Config::kKvBuffers];    // of the key tile; guarded by kv_full and kv_empty
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sdO, sdS, sLse, sD, kv_full, q_full, do_full, kv_empty,
               q_empty, do_empty, ds_full, index)
};

// Dynamic persistent: a block starts with unit blockIdx.x, a key tile or a whole KV head. Further
// units come from a counter, which dot_kernel clears. Sections of KV heads in turn; within a
// section longest tiles first (the first keys, under a causal mask), across all its heads. With
// whole heads a section is one head.
//! [tiles]
struct KeyTileScheduler {
  unsigned num_n_blocks, num_kv_heads, section;
  unsigned* counter;
  bool whole_heads;
  KeyTileScheduler(const Problem& p, int block_n, unsigned* tile_counter, const Machine& machine)
      : num_n_blocks(static_cast<unsigned>(ceil_div(p.seqlen_k, block_n))),
        num_kv_heads(static_cast<unsigned>(p.batch * p.kv_heads)),
        counter(tile_counter),
        whole_heads(owns_whole_heads(p, machine)) {
    // 32 MB of an H200's 60 MB
    const auto section_bytes = static_cast<int64_t>(machine.l2_bytes * 8 / 15);
    const int64_t heads = num_kv_heads, head_bytes = p.group() * p.seqlen_q * p.head_dim * 8;
    // Balance the sections: a short last section would leave most SMs idle.
    const int64_t sections = ceil_div(heads, std::max<int64_t>(1, section_bytes / head_bytes));
    section = whole_heads ? 1 : static_cast<unsigned>(ceil_div(heads, sections));
  }
  __host__ __device__ unsigned count() const { return num_n_blocks * num_kv_heads; }
  __host__ __device__ unsigned tiles_per_unit() const { return whole_heads ? num_n_blocks : 1; }
  __device__ unsigned first() const { return blockIdx.x * tiles_per_unit(); }
  __device__ unsigned next(unsigned index) const {
    if ((index + 1) % tiles_per_unit() != 0) return index + 1;  // of the same head
    return (gridDim.x + atomicAdd(counter, 1u)) * tiles_per_unit();
  }
  template <class Config>
  __device__ KeyTile at(unsigned index, const Shape& shape) const {
    const unsigned first_head = index / (section * num_n_blocks) * section;
    const unsigned heads = min(section, num_kv_heads - first_head);
    const unsigned in_section = index - first_head * num_n_blocks;
    return key_tile_of<Config>(shape, static_cast<int>(first_head + in_section % heads),
                               static_cast<int>(in_section / heads));
  }
};
//! [tiles]

// (3) S^T = K Q^T, or (4) dP^T = V dO^T, for the 64 keys of this warpgroup, both K-major (the
// `false`). Issues only; does not wait. `keys + n`: n bytes further. The first wgmma overwrites s.
//! [issue_scores]
template <class Config, class Element>
__device__ __forceinline__ void issue_scores(float (&s)[Config::kBlockM / 8][4],
                                             const Element* sKeys, const Element* sRows) {
  const SmemDescriptor keys = smem_descriptor(sKeys), rows = smem_descriptor(sRows);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kHeadDim / 16; ++i) {  // 16 of a panel's 64 columns, 32 bytes
    const int panel = i / 4, inside = i % 4 * 32;
    wgmma<Element, false>(s, keys + (panel * Config::kBlockN * 128 + inside),
                          rows + (panel * Config::kBlockM * 128 + inside), i > 0);
  }
  wgmma_commit();
}
//! [issue_scores]

// (5) dV += P^T dO, or dK += dS^T Q: A from registers, dO or Q MN-major, [k, d]. Issues only.
//! [issue_gradient]
template <class Config, class Element>
__device__ __forceinline__ void issue_gradient(float (&grad)[Config::kHeadDim / 8][4],
                                               const uint32_t (&a)[Config::kBlockM / 16][4],
                                               const Element* sRows) {
  const SmemDescriptor rows = smem_descriptor(sRows, Config::kBlockM * 128);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kBlockM / 16; ++i)  // 16 query rows are 16 rows of 128 bytes
    wgmma<Element, true>(grad, a[i], rows + 16 * 128 * i, true);
  wgmma_commit();
}
//! [issue_gradient]

// (6) This warpgroup's part of dQ = dS K, 64 rows and 64 columns, over the keys of both
// warpgroups. dS is K-major, [rows, keys]; K is MN-major, [keys, d]. Issues only.
//! [issue_dq]
template <class Config, class Element>
__device__ __forceinline__ void issue_dq(float (&dq)[Config::kFragments][4], const Element* sdS,
                                         const Element* sK, int warpgroup) {
  const SmemDescriptor ds = smem_descriptor(sdS + dq_row<Config>(warpgroup) * 64);
  const SmemDescriptor k = smem_descriptor(sK + dq_col<Config>(warpgroup) * Config::kBlockN);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 16; ++i) {
    const int panel = i / 4, inside = i % 4 * 32;
    wgmma<Element, true>(dq, ds + (panel * Config::kBlockM * 128 + inside), k + 16 * 128 * i,
                         i > 0);
  }
  wgmma_commit();
}
//! [issue_dq]

// (4) S^T becomes P^T = exp(scale S^T - lse). `sLse`: at this lane's first row.
//! [recompute]
template <class Config>
__device__ __forceinline__ void probabilities(float (&s)[Config::kBlockM / 8][4], const float* sLse,
                                              float softmax_scale_log2) {
#pragma unroll
  for (int n = 0; n < Config::kBlockM / 8; ++n) {
    const float2 lse_log2 = *reinterpret_cast<const float2*>(sLse + 8 * n);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      s[n][i] = exp2f(fmaf(s[n][i], softmax_scale_log2, i % 2 == 0 ? -lse_log2.x : -lse_log2.y));
  }
}
// dP^T becomes dS^T = P^T (dP^T - D). `sD`: at this lane's first row.
template <class Config>
__device__ __forceinline__ void score_gradients(float (&dp)[Config::kBlockM / 8][4],
                                                const float (&p)[Config::kBlockM / 8][4],
                                                const float* sD) {
#pragma unroll
  for (int n = 0; n < Config::kBlockM / 8; ++n) {
    const float2 d = *reinterpret_cast<const float2*>(sD + 8 * n);
#pragma unroll
    for (int i = 0; i < 4; ++i) dp[n][i] = p[n][i] * (dp[n][i] - (i % 2 == 0 ? d.x : d.y));
  }
}
//! [recompute]

// Stores dS^T of this warp's 16 keys transposed: rows of dS, [rows, 64 keys] with the swizzle that
// wgmma expects. Lanes 0-15 have the addresses of rows 0-7, the others of rows 8-15; of each 16
// lanes the first 8 have the chunk of keys 0-7, the others of keys 8-15.
//! [store_ds]
template <class Config, class Element>
__device__ __forceinline__ void store_ds(Element* sdS,
                                         const uint32_t (&ds)[Config::kBlockM / 16][4]) {
  const int lane_id = thread_index() % kWarp, warp_id = thread_index() / kWarp;
  const int row = lane_id / 16 * 8 + lane_id % 8, chunk = warp_id % 4 * 2 + lane_id / 8 % 2;
  Element* const to = sdS + warp_id / 4 * Config::kBlockM * 64 + row * 64 + (chunk ^ row % 8) * 8;
#pragma unroll
  for (int i = 0; i < Config::kBlockM / 16; ++i) stmatrix_x4_trans(to + 16 * 64 * i, ds[i]);
}
//! [store_ds]

// One producer thread. (2) Takes a key tile and loads K_j and V_j when the consumers have released
// the previous ones; then Q and dO of every visit into empty stages, Q with lse and dO with D.
// Corner of a box: column in the panel, row, panel, head.
//! [producer]
template <class Element, class Config>
__device__ __forceinline__ void produce(SharedStorage<Element, Config>& smem, const TensorMap& mapQ,
                                        const TensorMap& mapdO, const TensorMap& mapK,
                                        const TensorMap& mapV, const TensorMap& mapRows,
                                        const Shape& shape, const KeyTileScheduler& scheduler,
                                        int num_m_blocks) {
  constexpr int kRowsBytes = Config::kTileBytes + 4 * Config::kBlockM;
  PipelineState<Config::kStages> rows;
  PipelineState<Config::kKvBuffers> kv;
  for (unsigned index = scheduler.first();; index = scheduler.next(index), kv.advance()) {
    uint64_t* const kv_full = &smem.kv_full[kv.index()];
    mbarrier_wait(&smem.kv_empty[kv.index()], kv.phase() ^ 1);  // passes at once the first time
    smem.index[kv.index()] = index;
    if (index >= scheduler.count()) break;
    const KeyTile work = scheduler.at<Config>(index, shape);
    mbarrier_arrive_expect_tx(kv_full, 2 * Config::kKeyTileBytes);
    tma_load(smem.sK[kv.index()], mapK, kv_full, {0, work.key0, 0, work.kv_head});
    tma_load(smem.sV[kv.index()], mapV, kv_full, {0, work.key0, 0, work.kv_head});
    for (int head = work.first_head; head < work.end; ++head)
#pragma unroll 1  // few registers
      for (int m_block = work.q_range.begin; m_block < work.q_range.end;
           ++m_block, rows.advance()) {
        const int stage = rows.index(), tile = head * num_m_blocks + m_block;
        const int row0 = m_block * Config::kBlockM;
        mbarrier_wait(&smem.q_empty[stage], rows.phase() ^ 1);
        mbarrier_arrive_expect_tx(&smem.q_full[stage], kRowsBytes);
        tma_load(smem.sQ[stage], mapQ, &smem.q_full[stage], {0, row0, 0, head});
        tma_load(smem.sLse[stage], mapRows, &smem.q_full[stage], {0, 0, tile});
        mbarrier_wait(&smem.do_empty[stage], rows.phase() ^ 1);
        mbarrier_arrive_expect_tx(&smem.do_full[stage], kRowsBytes);
        tma_load(smem.sdO[stage], mapdO, &smem.do_full[stage], {0, row0, 0, head});
        tma_load(smem.sD[stage], mapRows, &smem.do_full[stage], {0, 1, tile});
      }
  }
  mbarrier_arrive(&smem.kv_full[kv.index()]);  // end of work
}
//! [producer]

template <class Element, class Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Element, Config>& smem) {
  constexpr int kWarps = 4 * Config::kNumConsumers;  // arrivals: full 1 (producer), empty kWarps
  for (int i = 0; i < Config::kKvBuffers; ++i)
    mbarrier_init(&smem.kv_full[i], 1), mbarrier_init(&smem.kv_empty[i], kWarps);
  for (int i = 0; i < Config::kDsBuffers; ++i) mbarrier_init(&smem.ds_full[i], kWarps);
  for (int i = 0; i < Config::kStages; ++i) {
    mbarrier_init(&smem.q_full[i], 1), mbarrier_init(&smem.do_full[i], 1);
    mbarrier_init(&smem.q_empty[i], kWarps), mbarrier_init(&smem.do_empty[i], kWarps);
  }
  mbarrier_init_fence();
}

// Phases: (1) is dot_kernel, (2) to (7) are here, (8) is convert_kernel, or here.
template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) attention_backward_kernel(
    const __grid_constant__ TensorMap mapQ,     // [B Hq, d / 64, seqlen_q, 64]
    const __grid_constant__ TensorMap mapdO,    // as Q
    const __grid_constant__ TensorMap mapK,     // [B Hkv, d / 64, seqlen_k, 64]
    const __grid_constant__ TensorMap mapV,     // as K
    const __grid_constant__ TensorMap mapRows,  // [tiles, 2, kBlockM floats]: lse, D
    Element* __restrict__ gdK,                  // [B, Hkv, seqlen_k, d]
    Element* __restrict__ gdV,                  // as dK
    float4* gAccum,                             // [tiles, kFragments, threads]: dQ
    Element* __restrict__ gdQ,                  // [B, Hq, seqlen_q, d]
    Shape shape, KeyTileScheduler scheduler, int num_m_blocks) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM;
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
      produce<Element, Config>(smem, mapQ, mapdO, mapK, mapV, mapRows, shape, scheduler,
                               num_m_blocks);
    return;
  }
  setmaxnreg_inc<Config::kConsumerRegisters>();

  KeyTile work{};
  PipelineState<Config::kStages> rows;   // pipeline state of the current Q and dO
  PipelineState<Config::kKvBuffers> kv;  // of K and V
  float dk[kHeadDim / 8][4] = {}, dv[kHeadDim / 8][4] = {};
  // Here although no value is kept: declared in the loop body, ptxas spills 16 of them at d=64.
  float s[kBlockM / 8][4];
  // One arrival per warp, after its lanes have read lse or D.
  const auto consumer_release = [&](uint64_t* empty) {
    __syncwarp();
    if (thread_index() % kWarp == 0) mbarrier_arrive(empty);
  };
  // One query tile of one head. `masked`: a bool, or a type with its value; then the unmasked body
  // contains no mask code.
  //! [visit]
  const auto process_q_block = [&](int head, int m_block, auto masked) {
    const int stage = rows.index();
    const PipelineState<Config::kDsBuffers> exchange{rows.count};
    Element* const sdS = smem.sdS[exchange.index()];
    const Element *const sK = smem.sK[kv.index()], *const sV = smem.sV[kv.index()];
    float dp[kBlockM / 8][4], dq[Config::kFragments][4];
    uint32_t p[kBlockM / 16][4], ds[kBlockM / 16][4];

    mbarrier_wait(&smem.q_full[stage], rows.phase());
    // this warpgroup's 64 keys of the first panel; issue_scores advances to the other panels
    issue_scores<Config>(s, sK + warpgroup * 64 * 64, smem.sQ[stage]);
    mbarrier_wait(&smem.do_full[stage], rows.phase());
    issue_scores<Config>(dp, sV + warpgroup * 64 * 64, smem.sdO[stage]);
    wgmma_wait<1>(s);  // dP is in flight
    if (masked)
      apply_mask<Config>(s, shape, m_block * kBlockM + shape.seqlen_k - shape.seqlen_q, work.key0);
    probabilities<Config>(s, smem.sLse[stage] + quad_col(), softmax_scale_log2);
    wgmma_wait<0>(dp);
    score_gradients<Config>(dp, s, smem.sD[stage] + quad_col());
    round_p<Element, kBlockM>(p, s);  // not earlier: S and dP take the most registers
    round_p<Element, kBlockM>(ds, dp);
    store_ds<Config>(sdS, ds);

    // When all warps have arrived, dS is visible to wgmma and the other buffer is no longer read.
    // The fence: dS before wgmma reads it; lse and D before TMA overwrites them.
    if constexpr (Config::kEarlyArrival) {
      fence_proxy_async();
      consumer_release(&smem.ds_full[exchange.index()]);
      issue_gradient<Config>(dv, p, smem.sdO[stage]);
      mbarrier_wait(&smem.ds_full[exchange.index()], exchange.phase());
    } else {
      issue_gradient<Config>(dv, p, smem.sdO[stage]);
      fence_proxy_async();
      named_barrier_sync(kScores, Config::kConsumerThreads);
    }
    issue_dq<Config>(dq, sdS, sK, warpgroup);
    wgmma_wait<1>(dv);  // dQ is in flight
    consumer_release(&smem.do_empty[stage]);
    issue_gradient<Config>(dk, ds, smem.sQ[stage]);
    wgmma_wait<1>(dq);  // dK is in flight
    float4* const accum =
        gAccum + (int64_t{head} * num_m_blocks + m_block) * (kBlockM * kHeadDim / 4);
    const bool first = scheduler.whole_heads &&
                       first_visible_key(shape, m_block * kBlockM) >= work.key0;  // first visit
#pragma unroll
    for (int f = 0; f < Config::kFragments; ++f) {
      float4* const to = accum + f * Config::kConsumerThreads + thread_index();
      const float4 x = make_float4(dq[f][0], dq[f][1], dq[f][2], dq[f][3]);
      if (first)
        *to = x;
      else
        reduce_add(to, x);
    }
    wgmma_wait<0>(dk);
    consumer_release(&smem.q_empty[stage]);
    rows.advance();
  };
  //! [visit]

  //! [loops]
  for (;; kv.advance()) {
    mbarrier_wait(&smem.kv_full[kv.index()], kv.phase());
    const unsigned index = smem.index[kv.index()];
    if (index >= scheduler.count()) return;
    work = scheduler.at<Config>(index, shape);
    const KvBlockRange& q_range = work.q_range;
    for (int head = work.first_head; head < work.end; ++head)
      for (int m_block = q_range.begin; m_block < q_range.end; ++m_block) {
        // diagonal, window edges, or past the last key
        const bool masked = m_block < q_range.unmasked_begin || m_block >= q_range.unmasked_end;
        if constexpr (Config::kOneBody)
          process_q_block(head, m_block, masked);
        else if (masked)
          process_q_block(head, m_block, std::true_type{});
        else
          process_q_block(head, m_block, std::false_type{});
      }
    consumer_release(&smem.kv_empty[kv.index()]);

    // (7) Store dK_j and dV_j: zeros if these keys are visible to no row.
    const int key = work.key0 + first_row(), keys = shape.seqlen_k - key;
    const int64_t first = (int64_t{work.kv_head} * shape.seqlen_k + key) * kHeadDim;
    store_gradient(gdK + first, kHeadDim, keys, dk, shape.softmax_scale);
    store_gradient(gdV + first, kHeadDim, keys, dv, 1);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) dk[n][i] = dv[n][i] = 0;

    // (8) At the end of a head that this block owns: dQ of its query heads.
    if (!scheduler.whole_heads || work.key0 + Config::kBlockN < shape.seqlen_k) continue;
    for (int head = work.first_head; head < work.end; ++head)
      for (int m_block = 0; m_block < num_m_blocks; ++m_block)
        convert_tile<Element, Config>(
            is_visited(shape, m_block * kBlockM, kBlockM) ? gAccum : nullptr, gdQ, shape,
            int64_t{head} * num_m_blocks + m_block, num_m_blocks);
  }
  //! [loops]
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const BackwardParams<Element> params(args);
  const Problem& p = args.problem;
  const Shape shape = shape_of(p);
  const int num_m_blocks = static_cast<int>(ceil_div(p.seqlen_q, Config::kBlockM));
  const dim3 q_tiles(static_cast<unsigned>(num_m_blocks * p.batch * p.heads));
  const Machine machine = args.backend == Backend::gpu ? this_machine() : Machine{kEmulatedSms};
  const KeyTileScheduler scheduler(p, Config::kBlockN, args.out<unsigned>("tile_counter"), machine);
  const dim3 grid(
      std::min<unsigned>(scheduler.count() / scheduler.tiles_per_unit(), machine.num_sms));
  float4* const accum = args.out<float4>("accum");
  BackwardMaps maps;
  if (const Status made = maps.make<Element, Config>(args); !made.ok()) return made;
  args.phase("dot");
  Status status = launch_kernel(dot_kernel<Element, Config>, q_tiles, dim3(256), 0, args.stream,
                                params.o, params.dout, params.lse, args.out<float>("rows"),
                                scheduler.whole_heads ? nullptr : accum, scheduler.counter, shape,
                                num_m_blocks);
  if (!status.ok()) return status;
  args.phase("attention_backward");
  status = launch_kernel(attention_backward_kernel<Element, Config>, grid, dim3(Config::kThreads),
                         sizeof(SharedStorage<Element, Config>), args.stream, maps.q, maps.dout,
                         maps.k, maps.v, maps.rows, params.dk, params.dv, accum, params.dq, shape,
                         scheduler, num_m_blocks);
  if (!status.ok() || scheduler.whole_heads) return status;
  args.phase("convert");
  return launch_kernel(convert_kernel<Element, Config>, q_tiles, dim3(Config::kConsumerThreads), 0,
                       args.stream, args.in<float4>("accum"), params.dq, shape, num_m_blocks);
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    switch (args.problem.head_dim) {
      case 64: return launch<Element, Config<64>>(args);
      case 128: return launch<Element, Config<128>>(args);
    }
    return Status::unsupported("only head dims 64 and 128");
  });
}

}  // namespace ATTN_BACKEND::b6_tuned
