// s9_tuned: s8's lists and order on the loop of q8, with fewer passes before.
//
// parent    q8_tuned
// change    The tensor core accumulates 4096 keys: 32 visited blocks (d=256: 64), wherever they
//           are. So one mean per head is subtracted from V, and the epilogue adds it back with the
//           scales, before the division by l. Three kernels precede the choice instead of seven:
//           the block means of K, which the choice needs, give the mean of all keys, and V is
//           measured in the same launch (two_readings.h).
// why       s8's attention is q5's, with P V added to O per block, and its passes take as long as
//           the choice saves at short lengths.
// expect    time of phases "measure" to "order" and of "attention" shorter than s8's
// supports  --dtype e4m3, inputs in bf16; head dims 64, 128, 256; any lengths, causal and windows,
//           GQA; --scale at least 1e-10
#include <algorithm>

#include "device/device.h"
#include "attn/kernel.h"
#include "ptx/mbarrier.h"
#include "ptx/setmaxnreg.h"
#include "ptx/tma.h"
#include "ptx/wgmma_e4m3.h"
#include "ptx/wgmma_s8.h"
#include "kernels/fp8_fragments.h"
#include "kernels/lpt_order.h"
#include "kernels/two_readings.h"
#include "kernels/visits.h"

namespace ATTN_BACKEND::s9_tuned {
using namespace attn;
using namespace hopper;

using Element = __nv_bfloat16;    // type of the inputs and of O
using Descales = ThreadDescales;  // of Q and K: scales of a lane's part of a tile

constexpr float kPScale = 8;               // log2 units: P is scaled by 256
constexpr float kRescaleThreshold = 0.8f;  // P <= 2^8.8 = 446, below e4m3's largest, 448
constexpr int kPrefetchBlocks = 4;  // the next tile is taken this many key blocks before the end
// Ring of query tiles. Up to five are in use: the one whose O is being stored, the current one, two
// whose Q is loaded or loading, and the one whose WorkTile is being written.
constexpr int kWorkRing = 8;

//! [config]
template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kNumConsumers = 2;                            // consumer warpgroups
  static constexpr int kThreads = kWarpgroup * (kNumConsumers + 1);  // plus a producer
  static constexpr int kBlockM = 64 * kNumConsumers;                 // B_r
  static constexpr int kBlockN = kHeadDim == 256 ? 64 : 128;         // B_c
  static constexpr int kChunkBlocks = kChunkKeys / kBlockN;          // key blocks per chunk
  static_assert(kBlockM == kScaleRows && kScaleRows % kBlockN == 0);
  static constexpr int kStages = 3;               // buffers for K, and for V
  static constexpr int kQStages = 2;              // buffers for Q
  // block indices: softmax reads them after K's stage has been released, so there are twice as many
  // slots as stages
  static constexpr int kVisitRing = 2 * kStages;
  // Wait for V after its block's softmax. Earlier, ptxas waits for P V before the exponentials: 5 %
  // at d=128.
  static constexpr bool kAwaitsVLate = kHeadDim == 128;
  // Registers per thread: at launch 65536 / threads, rounded down to a multiple of 8 (168 for 384
  // threads). setmaxnreg moves these between warpgroups; asking for more than are free deadlocks.
  static constexpr int kProducerRegisters = kHeadDim == 256 ? 24 : 40;
  static constexpr int kConsumerRegisters = kHeadDim == 256 ? 240 : 232;
  static_assert(kProducerRegisters + kNumConsumers * kConsumerRegisters <=
                    (kNumConsumers + 1) * (65536 / kThreads / 8 * 8),
                "more registers than a block of so many threads has");
};
//! [config]

// Tiles are panels of 128 columns, [d / 128][rows, 128], or of 64 at d=64, with a TMA swizzle of as
// many bytes; V^T is [d, keys]. The swizzle is computed from the address, so a tile begins at a
// multiple of 1024.
template <class Config>
struct SharedStorage {
  alignas(1024) uint8_t sQ[Config::kQStages][Config::kBlockM * Config::kHeadDim];
  alignas(1024) uint8_t sK[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(1024) uint8_t sV[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(16) float q_descale[Config::kQStages][Config::kBlockM / 2];
  alignas(16) float k_descale[Config::kStages][ThreadGroups::kK];
  // mbarriers: TMA bytes have landed
  uint64_t q_full[Config::kQStages], k_full[Config::kStages], v_full[Config::kStages];
  // mbarriers: all consumer warps have released the tile
  uint64_t q_empty[Config::kQStages], k_empty[Config::kStages], v_empty[Config::kStages];
  // mbarriers. work_full: a WorkTile is written. prefetch: take the next tile. Two work_full
  // suffice: the Q producer waits for prefetch, so it is at most one tile ahead of K and V.
  uint64_t work_full[2], prefetch;
  WorkTile work[kWorkRing];
  int n_block[Config::kVisitRing];
  ATTN_MEMBERS(SharedStorage, sQ, sK, sV, q_descale, k_descale, q_full, k_full, v_full, q_empty,
               k_empty, v_empty, work_full, prefetch, work, n_block)
};

using TileScheduler = DynamicPersistent;

// (3) S = Q K^T for the 64 rows of this warpgroup, both K-major. Issues only; does not wait.
// `q + n`: n bytes further. The first wgmma overwrites s, the others add to it.
//! [issue_qk]
template <class Config>
__device__ __forceinline__ void issue_qk(int (&s)[Config::kBlockN / 8][4], const uint8_t* sQ,
                                         const uint8_t* sK) {
  constexpr int kRow = kPanelBytes<Config::kHeadDim>;
  const SmemDescriptor q = smem_descriptor_e4m3<kRow>(sQ), k = smem_descriptor_e4m3<kRow>(sK);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kHeadDim / 32; ++i) {  // 32 of a panel's 128 columns, 32 bytes
    const int panel = i / 4, inside = i % 4 * 32;
    wgmma_s8(s, q + (panel * Config::kBlockM * 128 + inside),
             k + (panel * Config::kBlockN * 128 + inside), i > 0);
  }
  wgmma_commit();
}
//! [issue_qk]

// (5) O += P V: P from registers, V transposed, [d, k]. Issues only; does not wait.
//! [issue_pv]
template <class Config>
__device__ __forceinline__ void issue_pv(float (&o)[Config::kHeadDim / 8][4],
                                         const uint32_t (&p)[Config::kBlockN / 32][4],
                                         const uint8_t* sV) {
  constexpr int kKeys = kPanelKeys<Config::kBlockN>;
  const SmemDescriptor v = smem_descriptor_e4m3<kKeys>(sV);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 32; ++i) {  // 32 keys are 32 bytes
    const int panel = i * 32 / kKeys, inside = i * 32 % kKeys;
    wgmma_e4m3(o, p[i], v + (panel * Config::kHeadDim * kKeys + inside), true);
  }
  wgmma_commit();
}
//! [issue_pv]

// Merges O of a chunk, relative to row_max, with the O of the previous chunks. l is in fp32 and
// continues through all chunks.
//! [merge]
template <class Config>
__device__ __forceinline__ void merge_partials(float (&o)[Config::kHeadDim / 8][4],
                                              const float (&row_max)[2], const float4* gSums) {
  constexpr int kStride = kWarpgroup * Config::kNumConsumers;
  const float4 before = gSums[Config::kHeadDim / 8 * kStride];
  const float factor[2] = {exp2f(before.x - row_max[0]), exp2f(before.y - row_max[1])};
#pragma unroll
  for (int n = 0; n < Config::kHeadDim / 8; ++n) {
    const float4 sum = gSums[n * kStride];
    o[n][0] = fmaf(sum.x, factor[0], o[n][0]), o[n][1] = fmaf(sum.y, factor[0], o[n][1]);
    o[n][2] = fmaf(sum.z, factor[1], o[n][2]), o[n][3] = fmaf(sum.w, factor[1], o[n][3]);
  }
}

// Spills O and the max to this thread's workspace for the next chunk. No other thread reads it.
template <class Config>
__device__ __forceinline__ void store_partial(const float (&o)[Config::kHeadDim / 8][4],
                                              const float (&row_max)[2], float4* gSums) {
  constexpr int kStride = kWarpgroup * Config::kNumConsumers;
  gSums[Config::kHeadDim / 8 * kStride] = make_float4(row_max[0], row_max[1], 0, 0);
#pragma unroll
  for (int n = 0; n < Config::kHeadDim / 8; ++n)
    gSums[n * kStride] = make_float4(o[n][0], o[n][1], o[n][2], o[n][3]);
}

// Restores V's scales and mean in an O not yet divided by l. `gChannel`: means and descales of the
// head, from this lane's first column on.
template <class Config>
__device__ __forceinline__ void restore_v(float (&o)[Config::kHeadDim / 8][4],
                                          const float (&row_sum)[2], const float4* gChannel) {
  const float sum[2] = {quad_sum(row_sum[0]), quad_sum(row_sum[1])};
#pragma unroll
  for (int n = 0; n < Config::kHeadDim / 8; ++n) {
    const float4 v = gChannel[4 * n];  // of two columns
#pragma unroll
    for (int i = 0; i < 4; ++i)
      o[n][i] = fmaf(o[n][i], i % 2 == 0 ? v.y : v.w, sum[i / 2] * (i % 2 == 0 ? v.x : v.z));
  }
}
//! [merge]

// (4) Online softmax in fp32, within the quad of lanes that share a row: S becomes P. Returns
// whether O must be multiplied by `rescale`: only if a maximum has grown by more than the
// threshold. The max is taken over the int32 scores; each is converted where its exponential needs
// it.
//! [softmax]
template <class Config, bool kMasked>
__device__ __forceinline__ bool online_softmax(int (&s)[Config::kBlockN / 8][4],
                                               float (&row_max)[2], float (&row_sum)[2],
                                               float (&rescale)[2], float softmax_scale_log2) {
  const auto score = [](int acc) {
    return kMasked && acc == kMaskedScore<int> ? -INFINITY : static_cast<float>(acc);
  };
  float max[2];
  bool grown = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int largest = s[0][2 * r];
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; ++n)
      largest = ::max(largest, ::max(s[n][2 * r], s[n][2 * r + 1]));
    max[r] = fmaxf(row_max[r], quad_max(score(largest) * softmax_scale_log2));
    grown = grown || max[r] > row_max[r] + kRescaleThreshold;
  }
  // Warp-uniform branch: a warp rescales all of its rows or none.
  const bool rescaled = __any_sync(~0u, grown);
  if (rescaled) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rescale[r] = exp2f(row_max[r] - max[r]);
      row_max[r] = max[r];
      row_sum[r] *= rescale[r];
    }
  }
#pragma unroll
  for (int n = 0; n < Config::kBlockN / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = score(s[n][i]);
      const float e = exp2f(fmaf(x, softmax_scale_log2, kPScale - row_max[i / 2]));
      row_sum[i / 2] += e;
      s[n][i] = __float_as_int(e);
    }
  return rescaled;
}
//! [softmax]

// Q producer: takes query tiles and (1) loads Q_i. It takes the next tile kPrefetchBlocks key
// blocks before the current one ends: in time to load Q; no earlier, because an idle SM may need
// the tile. Corner of a box: column in the panel, row, panel, head.
//! [producer]
template <class Config>
__device__ __forceinline__ void produce_q(SharedStorage<Config>& smem, const TensorMap& mapQ,
                                          const Shape& shape, const TileScheduler& scheduler,
                                          const Descales& descales, const BlockLists& lists,
                                          const int* gOrder) {
  PipelineState<Config::kQStages> q;
  // q.count also indexes work_full (2 slots), prefetch (1) and the ring of WorkTiles
  const auto ring = [&] { return PipelineState<2>{q.count}; };
  const auto prefetch = [&] { return PipelineState<1>{q.count}; };
  for (unsigned index = scheduler.first(); index < scheduler.count();
       index = scheduler.next(index)) {
    const WorkTile work =
        listed_work_of<Config>(shape, scheduler.at<Config::kBlockM>(gOrder[index]), lists);
    smem.work[q.count % kWorkRing] = work;
    mbarrier_arrive(&smem.work_full[ring().index()]);
    mbarrier_wait(&smem.q_empty[q.index()], q.phase() ^ 1);  // previous Q released
    // As in q8, whose tiles of 192 rows may extend past the last scales; tiles of 128 do not.
    const float4* const gScales = reinterpret_cast<const float4*>(descales.q(work.q_head, 0));
    const int last = descales.tiles_q * (ThreadGroups::kQ / 4) - 1;
#pragma unroll 1  // more at once would exceed the producer's registers
    for (int i = 0; i < Config::kBlockM / 8; ++i)
      reinterpret_cast<float4*>(smem.q_descale[q.index()])[i] =
          gScales[min(work.row0 / 8 + i, last)];
    mbarrier_arrive_expect_tx(&smem.q_full[q.index()], Config::kBlockM * Config::kHeadDim);
    tma_load(smem.sQ[q.index()], mapQ, &smem.q_full[q.index()], {0, work.row0, 0, work.q_head});
    mbarrier_wait(&smem.prefetch, prefetch().phase());
    q.advance();
  }
  smem.work[q.count % kWorkRing] = WorkTile{};  // end of work
  mbarrier_arrive(&smem.work_full[ring().index()]);
  mbarrier_wait(&smem.q_empty[q.index()], q.phase() ^ 1);
  mbarrier_arrive(&smem.q_full[q.index()]);  // no Q: wakes the consumers, which read the end mark
}

// K/V producer: another thread loads the listed K_j and V_j as stages become free, and publishes
// the block's index.
template <class Config>
__device__ __forceinline__ void produce_kv(SharedStorage<Config>& smem, const TensorMap& mapK,
                                           const TensorMap& mapV, const Descales& descales,
                                           const BlockLists& lists) {
  constexpr int kBlockN = Config::kBlockN, kTileBytes = kBlockN * Config::kHeadDim;
  PipelineState<Config::kStages> kv;
  for (PipelineState<2> ring;; ring.advance()) {
    mbarrier_wait(&smem.work_full[ring.index()], ring.phase());
    const WorkTile& work = smem.work[ring.count % kWorkRing];
    if (work.row0 < 0) break;
    const int count = max(1, work.visits.count());
    const auto block = [&](int i) {  // the i-th listed block; block 0 if the list is empty
      return i < work.visits.count() ? lists.gBlocks[work.visits.first + i] : 0;
    };
    int ahead = block(0);  // read one block ahead
    for (int i = 0; i < count; ++i, kv.advance()) {
      const int n_block = ahead, stage = kv.index(), key0 = n_block * kBlockN;
      ahead = block(i + 1);
      if (i == max(0, count - kPrefetchBlocks)) mbarrier_arrive(&smem.prefetch);
      mbarrier_wait(&smem.k_empty[stage], kv.phase() ^ 1);  // passes at once the first time
      smem.n_block[kv.count % Config::kVisitRing] = n_block;
      *reinterpret_cast<float4*>(smem.k_descale[stage]) =
          *reinterpret_cast<const float4*>(descales.k(work.kv_head, key0));
      mbarrier_arrive_expect_tx(&smem.k_full[stage], kTileBytes);
      tma_load(smem.sK[stage], mapK, &smem.k_full[stage], {0, key0, 0, work.kv_head});
      mbarrier_wait(&smem.v_empty[stage], kv.phase() ^ 1);
      mbarrier_arrive_expect_tx(&smem.v_full[stage], kTileBytes);
#pragma unroll
      for (int key = 0; key < kBlockN; key += kPanelKeys<kBlockN>)  // one panel after another
        tma_load(smem.sV[stage] + key * Config::kHeadDim, mapV, &smem.v_full[stage],
                 {key0 + key, 0, work.kv_head});
    }
  }
}
//! [producer]

template <class Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Config>& smem) {
  constexpr int kWarps = 4 * Config::kNumConsumers;  // arrivals: full 1 (producer), empty kWarps
  for (int i = 0; i < Config::kQStages; ++i) mbarrier_init(&smem.q_full[i], 1);
  for (int i = 0; i < Config::kQStages; ++i) mbarrier_init(&smem.q_empty[i], kWarps);
  for (int i = 0; i < Config::kStages; ++i) {
    mbarrier_init(&smem.k_full[i], 1), mbarrier_init(&smem.v_full[i], 1);
    mbarrier_init(&smem.k_empty[i], kWarps), mbarrier_init(&smem.v_empty[i], kWarps);
  }
  mbarrier_init(&smem.work_full[0], 1), mbarrier_init(&smem.work_full[1], 1);
  mbarrier_init(&smem.prefetch, 1);
  mbarrier_init_fence();
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_kernel(const __grid_constant__ TensorMap mapQ,  // [B Hq, d / 128, seqlen_q, 128]
                     const __grid_constant__ TensorMap mapK,  // [B Hkv, d / 128, seqlen_k, 128]
                     const __grid_constant__ TensorMap mapV,  // [B Hkv, d, padded keys]
                     Descales descales,
                     const float* gLseShift,                // [B, Hq, seqlen_q]
                     const float4* __restrict__ gVChannel,  // [B Hkv, d / 2]
                     float4* __restrict__ gSums,  // [blocks, d / 8 + 1, threads of consumers]
                     Element* __restrict__ gO,    // [B, Hq, seqlen_q, d]
                     float* __restrict__ gLse,    // [B, Hq, seqlen_q]
                     BlockLists lists,
                     const int* gOrder,  // [tiles]
                     Shape shape, TileScheduler scheduler) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN;
  constexpr int kChunkBlocks = Config::kChunkBlocks;
  auto& smem = dynamic_shared<SharedStorage<Config>>();
  // Broadcast from lane 0, so that the compiler knows it is warp-uniform. Then tile addresses stay
  // in uniform registers, which wgmma requires.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) init_barriers(smem);
  __syncthreads();  // barriers are initialised

  if (warpgroup == Config::kNumConsumers) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x % kWarpgroup == 0)
      produce_q<Config>(smem, mapQ, shape, scheduler, descales, lists, gOrder);
    if (threadIdx.x % kWarpgroup == kWarp) produce_kv<Config>(smem, mapK, mapV, descales, lists);
    return;
  }
  setmaxnreg_inc<Config::kConsumerRegisters>();

  // q: pipeline state of the current Q tile; the others describe that tile.
  PipelineState<Config::kQStages> q{-1};
  int count = 0, unmasked = 0;  // key blocks that it visits; how many need no mask
  float q_scale_log2 = 0, scale_log2 = 0;  // with Q's scale; with Q's and K's scales
  const auto next_work_tile = [&] {
    q.advance();
    mbarrier_wait(&smem.q_full[q.index()], q.phase());
    const WorkTile& work = smem.work[q.count % kWorkRing];
    count = max(1, work.visits.count());
    unmasked = work.visits.masked - work.visits.first;
    const bool more = work.row0 >= 0;
    if (more)
      q_scale_log2 = shape.softmax_scale * kLog2e *
                     smem.q_descale[q.index()][ThreadGroups::of_q(first_row())];
    __syncwarp();  // all lanes have read `work` before lane 0 arrives
    return more;
  };
  const auto release_q = [&] {  // one arrival per warp
    if (thread_index() % kWarp == 0) mbarrier_arrive(&smem.q_empty[q.index()]);
  };
  // Pipeline state of the current K/V tile, counted through all tiles of this block. It stays
  // provably warp-uniform as long as no `if` changes it and no consumer returns from the loop.
  // Otherwise every wgmma descriptor is first copied to uniform registers.
  using KvState = PipelineState<Config::kStages>;
  KvState kv;
  const auto consumer_wait = [&](uint64_t* full, KvState state) {
    mbarrier_wait(full + state.index(), state.phase());
  };
  const auto consumer_release = [&](uint64_t* empty, KvState state) {  // one arrival per warp
    if (thread_index() % kWarp == 0) mbarrier_arrive(empty + state.index());
  };

  float o[kHeadDim / 8][4] = {};  // of one chunk, unnormalised
  // row_max: the reference, which may lag the row max (log2 units); row_sum: of this lane's keys
  float row_max[2] = {kLowest, kLowest}, row_sum[2] = {};
  // S in int32, then the fp32 bits of P. With a float array for P, ptxas schedules 12 of the 66
  // exponentials after the wait for P V instead of 6, which costs up to 6 % at d=128.
  int s[kBlockN / 8][4];
  uint32_t p[kBlockN / 32][4];
  float rescale[2];
  bool rescaled;
  // Softmax of one key block. `masked` is a type, so the unmasked body contains no mask code.
  const auto softmax = [&](auto masked) {
    if constexpr (masked.value) {
      // Reread: variables would occupy registers in the loop.
      const WorkTile& work = smem.work[q.count % kWorkRing];
      apply_mask<Config>(s, shape, work.kv_range, smem.n_block[kv.count % Config::kVisitRing],
                         work.row0 + work.seqlen_k - work.seqlen_q, work.last_key);
    }
    rescaled =
        online_softmax<Config, masked.value>(s, row_max, row_sum, rescale, scale_log2);
    if (Config::kAwaitsVLate) consumer_wait(smem.v_full, kv);
  };
  const auto round_p = [&] {
    float p_fp32[kBlockN / 8][4];
    as_floats(p_fp32, s);
    round_p_e4m3<kBlockN>(p, p_fp32);
  };
  //! [mmas]
  const auto issue_s = [&] {
    issue_qk<Config>(s, smem.sQ[q.index()] + warpgroup * 64 * kPanelBytes<kHeadDim>,
                     smem.sK[kv.index()]);
  };
  const auto issue_o = [&](KvState state) { issue_pv<Config>(o, p, smem.sV[state.index()]); };
  // Waits for P V of the previous block.
  const auto wait_o = [&] {
    wgmma_wait<0>(o);
    consumer_release(smem.v_empty, kv.previous());
  };
  const auto own_sums = [&] {  // this thread's workspace for O and the max of previous chunks
    constexpr int kConsumers = Config::kThreads - kWarpgroup;
    return gSums + blockIdx.x * (kHeadDim / 8 + 1) * kConsumers + thread_index();
  };
  // Waits for K of this block and reads its scale.
  const auto wait_k = [&] {
    consumer_wait(smem.k_full, kv);
    scale_log2 = q_scale_log2 * smem.k_descale[kv.index()][ThreadGroups::of_k(quad_col())];
    __syncwarp();  // all lanes have read it before lane 0 releases K
  };
  // Issues (3) S of this key block, then (5) P V of the previous block; waits for S only.
  const auto mmas = [&](int nth) {
    wait_k();
    issue_s();
    if (!Config::kAwaitsVLate) consumer_wait(smem.v_full, kv.previous());
    issue_o(kv.previous());
    wgmma_wait<1>(s);  // S complete, P V in flight
    consumer_release(smem.k_empty, kv);
    if (nth == count - 1) release_q();
  };
  const auto process_kv_block = [&](int nth, auto masked) {
    mmas(nth);
    softmax(masked);
    wait_o();
    round_p();
    if (rescaled) rescale_rows<kHeadDim>(o, rescale);
    kv.advance();
  };
  //! [mmas]

  //! [loops]
  if (!next_work_tile()) return;
  // The very first S has no P V to overlap with.
  wait_k();
  issue_s();
  wgmma_wait<0>(s);
  consumer_release(smem.k_empty, kv);
  if (count == 1) release_q();
  softmax(std::true_type{});
  round_p();
  kv.advance();
  bool more = true;
  int nth = 1;  // index of the next of the tile's blocks
  do {
    // The blocks of this chunk: the unmasked ones first, in list order.
    const int begin = (nth - 1) / kChunkBlocks * kChunkBlocks;
    const int end = min(count, begin + kChunkBlocks);
    for (; nth < min(unmasked, end); ++nth) process_kv_block(nth, std::false_type{});
    for (; nth < end; ++nth) process_kv_block(nth, std::true_type{});
    const WorkTile& last = smem.work[q.count % kWorkRing];
    float last_max[2] = {row_max[0], row_max[1]};
    float last_sum[2] = {row_sum[0], row_sum[1]};
    const bool tile_ends = nth == count;
    if (tile_ends) {
      more = next_work_tile();
      nth = 0;
    }
    if (more) {  // this chunk's last P V overlaps with the next chunk's first S and softmax
      mmas(nth);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (tile_ends) row_max[r] = kLowest, row_sum[r] = 0;
      softmax(std::true_type{});
      ++nth;
    } else {
      if (!Config::kAwaitsVLate) consumer_wait(smem.v_full, kv.previous());
      issue_o(kv.previous());
    }
    wait_o();
    round_p();
    kv.advance();
    if (begin > 0) merge_partials<Config>(o, last_max, own_sums());
    if (tile_ends) {
      restore_v<Config>(o, last_sum, gVChannel + (last.kv_head * kHeadDim + quad_col()) / 2);
      // P's scale of 2^kPScale cancels in O / l. It is in l, too: it is taken from lse here.
#pragma unroll
      for (int r = 0; r < 2; ++r) last_max[r] -= kPScale;
      store_o<Element, kHeadDim>(gO, gLse, last, kHeadDim, o, last_max, last_sum, gLseShift);
    } else {
      store_partial<Config>(o, last_max, own_sums());
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0;
  } while (more);
  //! [loops]
}

template <class Config>
Status launch(const Arguments& args) {
  TileScheduler scheduler(args.problem, Config::kBlockM);
  scheduler.section = section_of_codes(args.problem, scheduler.num_m_blocks);
  if (args.report_tiling({Config::kBlockM, Config::kBlockN, scheduler.section}))
    return Status::success();
  const ForwardParams<Element> params(args);
  scheduler.counter = args.out<unsigned>("tile_counter");
  Fp8TensorMaps maps;
  if (const Status made = maps.make(args, Config::kBlockM, Config::kBlockN); !made.ok())
    return made;
  BlockLists lists{};
  if (const Status done = read_twice<Config, ThreadGroups>(args, rule_of(args.problem), lists);
      !done.ok())
    return done;
  if (const Status done = longest_first<Config>(args, scheduler, lists); !done.ok()) return done;
  const int num_sms = args.backend == Backend::gpu ? gpu_info().num_sms : kEmulatedSms;
  args.phase("attention");
  return launch_kernel(attention_kernel<Config>,
                       dim3(std::min<unsigned>(scheduler.count(), num_sms)), dim3(Config::kThreads),
                       sizeof(SharedStorage<Config>), args.stream, maps.q, maps.k, maps.v,
                       Descales(args), args.out<float>("lse_shift"),
                       reinterpret_cast<const float4*>(args.out<float>("v_channel")),
                       reinterpret_cast<float4*>(args.out<float>("sums")), params.o, params.lse,
                       lists, args.out<int>("tile_order"), shape_of(args.problem), scheduler);
}

Status launch(const Arguments& args) {
  switch (args.problem.head_dim) {
    case 64: return launch<Config<64>>(args);
    case 128: return launch<Config<128>>(args);
    case 256: return launch<Config<256>>(args);
  }
  return Status::unsupported("only head dims 64, 128 and 256");
}

}  // namespace ATTN_BACKEND::s9_tuned
