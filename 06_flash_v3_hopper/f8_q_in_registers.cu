// f8_q_in_registers: at d=128, Q is in registers, as wgmma's A operand.
//
// parent    f6_smooth_v_chunks
// change    A warpgroup loads its 64 rows of Q by ldmatrix, once per query tile: 16 registers per
//           thread. It releases the buffer at once. The passes are those of f7.
// why       With both operands in shared memory, a warpgroup's S = Q K^T reads its rows of Q again
//           for every key block: 8 KB next to 16 KB of K. P V reads 16 KB of V.
// expect    a fifth less shared memory traffic per key block, and higher speed at d=128. At d=64
//           the sweep of f1 gained nothing; at d=256, where O has 128 registers, none are left.
// supports  --dtype e4m3, inputs in bf16; head dims 64, 128, 256; any lengths, masks, GQA; --rotary
// source    PTX ISA, "wgmma.mma_async": operand A in registers
#include <algorithm>

#include "device/device.h"
#include "attn/kernel.h"
#include "ptx/ldmatrix.h"
#include "ptx/bulk.h"
#include "ptx/mbarrier.h"
#include "ptx/setmaxnreg.h"
#include "ptx/tma.h"
#include "ptx/wgmma_e4m3.h"
#include "kernels/fp8_fragments.h"
#include "kernels/quantise_turned.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::f8_q_in_registers {
using namespace attn;
using namespace hopper;

using Element = __nv_bfloat16;  // type of the inputs and of O
using Descales = RowDescales;   // Q and K: one scale per tile

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
  // Tile sizes are from the sweep of f1 (host/sweep_fp8.cu).
  static constexpr int kNumConsumers = kHeadDim == 64 ? 3 : 2;       // consumer warpgroups
  static constexpr int kThreads = kWarpgroup * (kNumConsumers + 1);  // plus a producer
  static constexpr int kBlockM = 64 * kNumConsumers;                 // B_r
  static constexpr int kBlockN = 128;                                // B_c
  static constexpr int kChunkBlocks = kChunkKeys / kBlockN;          // key blocks per chunk
  // The 64 rows of a warpgroup share one scale of Q, a key block shares one of K.
  static_assert(kScaleRows % 64 == 0 && kScaleRows % kBlockN == 0);
  static constexpr int kStages = kHeadDim == 256 ? 2 : 3;  // buffers for K, and for V
  static constexpr int kQStages = 2;                       // buffers for Q
  // Buffers for means and descales of a chunk. Consumers read them after they release the chunk's
  // last V, and before they release the next V. Meanwhile the producer may load V of kStages
  // further blocks, each the last of a chunk.
  static constexpr int kChunkBuffers = kStages + 1;
  static constexpr bool kQInRegisters = kHeadDim == 128;
  // Registers per thread: at launch 65536 / threads, rounded down to a multiple of 8 (168 for 384
  // threads, 128 for 512). setmaxnreg moves these between warpgroups; asking for more than are free
  // deadlocks.
  static constexpr int kProducerRegisters = kHeadDim == 64 ? 32 : kHeadDim == 128 ? 40 : 24;
  static constexpr int kConsumerRegisters = kHeadDim == 64 ? 160 : kHeadDim == 128 ? 232 : 240;
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
  float4 sChunk[Config::kChunkBuffers][Config::kHeadDim / 2];  // mean and descale of two columns
  float q_descale[Config::kQStages][Config::kNumConsumers], k_descale[Config::kStages];
  // mbarriers: TMA bytes have landed
  uint64_t q_full[Config::kQStages], k_full[Config::kStages], v_full[Config::kStages];
  // mbarriers: all consumer warps have released the tile
  uint64_t q_empty[Config::kQStages], k_empty[Config::kStages], v_empty[Config::kStages];
  // mbarriers. work_full: a WorkTile is written. prefetch: take the next tile. Two work_full
  // suffice: the Q producer waits for prefetch, so it is at most one tile ahead of K and V.
  uint64_t work_full[2], prefetch;
  WorkTile work[kWorkRing];
  ATTN_MEMBERS(SharedStorage, sQ, sK, sV, sChunk, q_descale, k_descale, q_full, k_full, v_full,
               q_empty, k_empty, v_empty, work_full, prefetch, work)
};

using TileScheduler = DynamicPersistent;

// This warp's 16 rows of a tile of Q as A operands, one per 32 columns. To ldmatrix, two e4m3 codes
// are a 16-bit element.
//! [load_q]
template <class Config>
__device__ __forceinline__ void load_q(uint32_t (&q)[Config::kHeadDim / 32][4], const uint8_t* sQ) {
  static_assert(kPanelBytes<Config::kHeadDim> == 128);
  const int lane = thread_index() % kWarp, row = thread_index() / kWarp * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < Config::kHeadDim / 32; ++i) {
    const int panel = i / 4, sixteen = i % 4 * 2 + lane / 16;  // of eight per row; swizzled
    ldmatrix_x4(q[i], sQ + (panel * Config::kBlockM + row) * 128 + (sixteen ^ row % 8) * 16);
  }
  fence_proxy_async();  // the next Q, loaded by TMA, overwrites what ldmatrix has read
}
//! [load_q]

// (3) S = Q K^T for the 64 rows of this warpgroup, both K-major; Q from registers, if there, else
// from shared memory. Issues only; does not wait. `k + n`: n bytes further. The first wgmma
// overwrites s, the others add to it.
//! [issue_qk]
template <class Config>
__device__ __forceinline__ void issue_qk(float (&s)[Config::kBlockN / 8][4],
                                         const uint32_t (&q)[Config::kHeadDim / 32][4],
                                         const uint8_t* sQ, const uint8_t* sK) {
  constexpr int kRow = kPanelBytes<Config::kHeadDim>;
  const SmemDescriptor q_rows = smem_descriptor_e4m3<kRow>(sQ);
  const SmemDescriptor k = smem_descriptor_e4m3<kRow>(sK);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kHeadDim / 32; ++i) {  // 32 of a panel's 128 columns, 32 bytes
    const int panel = i / 4, inside = i % 4 * 32;
    const SmemDescriptor b = k + (panel * Config::kBlockN * 128 + inside);
    if constexpr (Config::kQInRegisters)
      wgmma_e4m3(s, q[i], b, i > 0);
    else
      wgmma_e4m3(s, q_rows + (panel * Config::kBlockM * 128 + inside), b, i > 0);
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

// Merges O of a chunk, relative to row_max, with O, l and max of the previous chunks, if any
// (not `first`). Applies V's descales and adds l times V's mean.
//! [merge]
template <class Config>
__device__ __forceinline__ void merge_partials(float (&o)[Config::kHeadDim / 8][4],
                                               const float (&row_max)[2], float (&row_sum)[2],
                                               const float4* gSums, const float4* chunk,
                                               bool first) {
  constexpr int kStride = kWarpgroup * Config::kNumConsumers;
  const float chunk_sum[2] = {quad_sum(row_sum[0]), quad_sum(row_sum[1])};
#pragma unroll
  for (int n = 0; n < Config::kHeadDim / 8; ++n) {
    const float4 v = chunk[4 * n];  // mean and descale of two columns
#pragma unroll
    for (int i = 0; i < 4; ++i)
      o[n][i] = fmaf(o[n][i], i % 2 == 0 ? v.y : v.w, chunk_sum[i / 2] * (i % 2 == 0 ? v.x : v.z));
  }
  if (first) return;
  const float4 before = gSums[Config::kHeadDim / 8 * kStride];
  const float factor[2] = {exp2f(before.z - row_max[0]), exp2f(before.w - row_max[1])};
  row_sum[0] = fmaf(before.x, factor[0], row_sum[0]);
  row_sum[1] = fmaf(before.y, factor[1], row_sum[1]);
#pragma unroll
  for (int n = 0; n < Config::kHeadDim / 8; ++n) {
    const float4 sum = gSums[n * kStride];
    o[n][0] = fmaf(sum.x, factor[0], o[n][0]), o[n][1] = fmaf(sum.y, factor[0], o[n][1]);
    o[n][2] = fmaf(sum.z, factor[1], o[n][2]), o[n][3] = fmaf(sum.w, factor[1], o[n][3]);
  }
}

// Spills O, l and the maximum to this thread's workspace, for the merge with the next chunk.
template <class Config>
__device__ __forceinline__ void store_partial(const float (&o)[Config::kHeadDim / 8][4],
                                              const float (&row_max)[2], const float (&row_sum)[2],
                                              float4* gSums) {
  constexpr int kStride = kWarpgroup * Config::kNumConsumers;
  gSums[Config::kHeadDim / 8 * kStride] =
      make_float4(row_sum[0], row_sum[1], row_max[0], row_max[1]);
#pragma unroll
  for (int n = 0; n < Config::kHeadDim / 8; ++n)
    gSums[n * kStride] = make_float4(o[n][0], o[n][1], o[n][2], o[n][3]);
}
//! [merge]

// (4) Online softmax in fp32, within the quad of lanes that share a row: S becomes P. Returns
// whether O must be multiplied by `rescale`: only if a maximum has grown by more than the
// threshold.
//! [softmax]
template <class Config>
__device__ __forceinline__ bool online_softmax(float (&s)[Config::kBlockN / 8][4],
                                               float (&row_max)[2], float (&row_sum)[2],
                                               float (&rescale)[2], float softmax_scale_log2) {
  float max[2];
  bool grown = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    max[r] = s[0][2 * r];
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; ++n)
      max[r] = fmaxf(max[r], fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    max[r] = fmaxf(row_max[r], quad_max(max[r]) * softmax_scale_log2);
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
      s[n][i] = exp2f(fmaf(s[n][i], softmax_scale_log2, kPScale - row_max[i / 2]));
      row_sum[i / 2] += s[n][i];
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
                                          const Descales& descales) {
  PipelineState<Config::kQStages> q;
  // q.count also indexes work_full (2 slots), prefetch (1) and the ring of WorkTiles
  const auto ring = [&] { return PipelineState<2>{q.count}; };
  const auto prefetch = [&] { return PipelineState<1>{q.count}; };
  for (unsigned index = scheduler.first(); index < scheduler.count();
       index = scheduler.next(index)) {
    const WorkTile work = work_of<Config>(shape, scheduler.at<Config::kBlockM>(index));
    smem.work[q.count % kWorkRing] = work;
    mbarrier_arrive(&smem.work_full[ring().index()]);
    mbarrier_wait(&smem.q_empty[q.index()], q.phase() ^ 1);  // previous Q released
    for (int w = 0; w < Config::kNumConsumers; ++w)          // the last tile may have fewer rows
      smem.q_descale[q.index()][w] =
          descales.q(work.q_head, min(work.row0 + 64 * w, shape.seqlen_q - 1));
    mbarrier_arrive_expect_tx(&smem.q_full[q.index()], Config::kBlockM * Config::kHeadDim);
    tma_load(smem.sQ[q.index()], mapQ, &smem.q_full[q.index()], {0, work.row0, 0, work.q_head});
    mbarrier_wait(&smem.prefetch, prefetch().phase());
    q.advance();
  }
  smem.work[q.count % kWorkRing] = WorkTile{};  // end of work
  mbarrier_arrive(&smem.work_full[ring().index()]);
  mbarrier_wait(&smem.q_empty[q.index()], q.phase() ^ 1);
  for (float& descale : smem.q_descale[q.index()]) descale = 0;
  mbarrier_arrive(&smem.q_full[q.index()]);  // no Q: wakes the consumers, which read the end mark
}

// K/V producer: another thread loads K_j and V_j into empty stages.
template <class Config>
__device__ __forceinline__ void produce_kv(SharedStorage<Config>& smem, const TensorMap& mapK,
                                           const TensorMap& mapV, const Descales& descales,
                                           const float4* gChunks) {
  constexpr int kBlockN = Config::kBlockN, kTileBytes = kBlockN * Config::kHeadDim;
  constexpr int kChunkBytes = sizeof(smem.sChunk[0]);
  PipelineState<Config::kStages> kv;
  for (PipelineState<2> ring;; ring.advance()) {
    mbarrier_wait(&smem.work_full[ring.index()], ring.phase());
    const WorkTile& work = smem.work[ring.count % kWorkRing];
    if (work.row0 < 0) break;
    for (int n_block = work.kv_range.end - 1; n_block >= work.kv_range.begin;
         --n_block, kv.advance()) {
      // kPrefetchBlocks before the end of the tile (the loop runs backwards), or at its start
      if (n_block == min(work.kv_range.begin + kPrefetchBlocks, work.kv_range.end) - 1)
        mbarrier_arrive(&smem.prefetch);
      const int stage = kv.index(), key0 = n_block * kBlockN;
      mbarrier_wait(&smem.k_empty[stage], kv.phase() ^ 1);  // passes at once the first time
      smem.k_descale[stage] = descales.k(work.kv_head, key0);
      mbarrier_arrive_expect_tx(&smem.k_full[stage], kTileBytes);
      tma_load(smem.sK[stage], mapK, &smem.k_full[stage], {0, key0, 0, work.kv_head});
      mbarrier_wait(&smem.v_empty[stage], kv.phase() ^ 1);
      const bool chunk_ends =
          n_block == work.kv_range.begin || n_block % Config::kChunkBlocks == 0;
      mbarrier_arrive_expect_tx(&smem.v_full[stage], kTileBytes + (chunk_ends ? kChunkBytes : 0));
      if (chunk_ends) {
        const int64_t chunk = int64_t{work.kv_head} * ceil_div(work.seqlen_k, kChunkKeys) +
                              n_block / Config::kChunkBlocks;
        bulk_load(smem.sChunk[PipelineState<Config::kChunkBuffers>{kv.count}.index()],
                  gChunks + chunk * (Config::kHeadDim / 2), kChunkBytes, &smem.v_full[stage]);
      }
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
                     const float4* __restrict__ gChunks,  // [B Hkv, chunks, d / 2]
                     float4* __restrict__ gSums,  // [blocks, d / 8 + 1, threads of consumers]
                     Element* __restrict__ gO,    // [B, Hq, seqlen_q, d]
                     float* __restrict__ gLse,    // [B, Hq, seqlen_q]
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
    if (threadIdx.x % kWarpgroup == 0) produce_q<Config>(smem, mapQ, shape, scheduler, descales);
    if (threadIdx.x % kWarpgroup == kWarp)
      produce_kv<Config>(smem, mapK, mapV, descales, gChunks);
    return;
  }
  setmaxnreg_inc<Config::kConsumerRegisters>();

  // q: pipeline state of the current Q tile; the others describe that tile.
  PipelineState<Config::kQStages> q{-1};
  int row0 = 0, last_key = 0;
  KvBlockRange kv_range{};
  float q_scale_log2 = 0, scale_log2 = 0;  // with Q's scale; with Q's and K's scales
  uint32_t q_rows[kHeadDim / 32][4];       // if Q is in registers
  const auto release_q = [&] {             // one arrival per warp
    if (thread_index() % kWarp == 0) mbarrier_arrive(&smem.q_empty[q.index()]);
  };
  const auto next_work_tile = [&] {
    q.advance();
    mbarrier_wait(&smem.q_full[q.index()], q.phase());
    const WorkTile& work = smem.work[q.count % kWorkRing];
    row0 = work.row0 + work.seqlen_k - work.seqlen_q;  // key on the diagonal of row work.row0
    last_key = work.seqlen_k - 1;
    kv_range = work.kv_range;  // never empty: a fully masked tile has one block, all of it masked
    q_scale_log2 = shape.softmax_scale * kLog2e * smem.q_descale[q.index()][warpgroup];
    const bool more = work.row0 >= 0;
    if constexpr (Config::kQInRegisters)
      if (more) load_q<Config>(q_rows, smem.sQ[q.index()]);
    __syncwarp();  // all lanes have read `work`, the scale and Q before lane 0 arrives
    if (Config::kQInRegisters) release_q();
    return more;
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
  float s[kBlockN / 8][4];
  uint32_t p[kBlockN / 32][4];
  float rescale[2];
  bool rescaled;
  // Softmax of one key block. `masked` is a type, so the unmasked body contains no mask code.
  const auto softmax = [&](int n_block, auto masked) {
    if constexpr (masked.value) apply_mask<Config>(s, shape, kv_range, n_block, row0, last_key);
    rescaled = online_softmax<Config>(s, row_max, row_sum, rescale, scale_log2);
  };
  //! [mmas]
  const auto issue_s = [&] {
    // this warpgroup's 64 rows of the first panel; issue_qk advances to the other panels
    issue_qk<Config>(s, q_rows, smem.sQ[q.index()] + warpgroup * 64 * kPanelBytes<kHeadDim>,
                     smem.sK[kv.index()]);
  };
  const auto issue_o = [&](KvState state) { issue_pv<Config>(o, p, smem.sV[state.index()]); };
  // Waits for P V of the previous block.
  const auto wait_o = [&] {
    wgmma_wait<0>(o);
    consumer_release(smem.v_empty, kv.previous());
  };
  const auto own_sums = [&] {  // this thread's workspace: O, l, max of previous chunks
    constexpr int kConsumers = Config::kThreads - kWarpgroup;
    return gSums + blockIdx.x * (kHeadDim / 8 + 1) * kConsumers + thread_index();
  };
  // Called when O holds all P V of a chunk: merges it with the previous chunks.
  const auto merge = [&](const WorkTile& work, int chunk, const float(&max)[2], float(&sum)[2]) {
    const bool first = chunk == (work.kv_range.end - 1) / kChunkBlocks;
    const PipelineState<Config::kChunkBuffers> last{kv.count - 2};  // the chunk's last block
    merge_partials<Config>(o, max, sum, own_sums(), smem.sChunk[last.index()] + quad_col() / 2,
                           first);
    fence_proxy_async();  // bulk_load overwrites what has been read; ordered by wait_k's __syncwarp
  };
  // Waits for K of this block and reads its scale.
  const auto wait_k = [&] {
    consumer_wait(smem.k_full, kv);
    scale_log2 = q_scale_log2 * smem.k_descale[kv.index()];
    __syncwarp();  // all lanes have read it before lane 0 releases K
  };
  // Issues (3) S of this key block, then (5) P V of the previous block; waits for S only.
  const auto mmas = [&](int n_block) {
    wait_k();
    issue_s();
    consumer_wait(smem.v_full, kv.previous());
    issue_o(kv.previous());
    wgmma_wait<1>(s);  // S complete, P V in flight
    consumer_release(smem.k_empty, kv);
    if (!Config::kQInRegisters && n_block == kv_range.begin) release_q();
  };
  const auto process_kv_block = [&](int n_block, auto masked) {
    mmas(n_block);
    softmax(n_block, masked);
    wait_o();
    round_p_e4m3<kBlockN>(p, s);
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
  if (!Config::kQInRegisters && kv_range.begin + 1 == kv_range.end) release_q();
  softmax(kv_range.end - 1, std::true_type{});
  round_p_e4m3<kBlockN>(p, s);
  kv.advance();
  bool more = true;
  int n_block = kv_range.end - 2;
  do {
    // In this chunk: diagonal, right window edge, sequence end; unmasked blocks; left window edge.
    const int begin = (n_block + 1) / kChunkBlocks * kChunkBlocks;
    for (; n_block >= max(kv_range.unmasked_end, begin); --n_block)
      process_kv_block(n_block, std::true_type{});
    for (; n_block >= max(kv_range.unmasked_begin, begin); --n_block)
      process_kv_block(n_block, std::false_type{});
    for (; n_block >= max(kv_range.begin, begin); --n_block)
      process_kv_block(n_block, std::true_type{});
    const WorkTile& last = smem.work[q.count % kWorkRing];
    float last_max[2] = {row_max[0], row_max[1]};
    float last_sum[2] = {row_sum[0], row_sum[1]};
    const bool tile_ends = n_block < kv_range.begin;
    if (tile_ends) {
      more = next_work_tile();
      n_block = kv_range.end - 1;
    }
    if (more) {  // this chunk's last P V overlaps with the next chunk's first S and softmax
      mmas(n_block);
#pragma unroll
      for (int r = 0; r < 2; ++r) row_max[r] = tile_ends ? kLowest : row_max[r], row_sum[r] = 0;
      softmax(n_block, std::true_type{});
      --n_block;
    } else {
      consumer_wait(smem.v_full, kv.previous());
      issue_o(kv.previous());
    }
    wait_o();
    round_p_e4m3<kBlockN>(p, s);
    kv.advance();
    merge(last, tile_ends ? last.kv_range.begin / kChunkBlocks : (n_block + 1) / kChunkBlocks + 1,
          last_max, last_sum);
    if (tile_ends) {
      // P's scale of 2^kPScale cancels in O / l. It is in l, too: it is taken from lse here.
#pragma unroll
      for (int r = 0; r < 2; ++r) last_max[r] -= kPScale;
      store_o<Element, kHeadDim>(gO, gLse, last, kHeadDim, o, last_max, last_sum);
    } else {
      store_partial<Config>(o, last_max, last_sum, own_sums());
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0;
  } while (more);
  //! [loops]
}

template <class Config>
Status launch_attention(const Arguments& args) {
  TileScheduler scheduler(args.problem, Config::kBlockM);
  if (args.report_tiling({Config::kBlockM, Config::kBlockN, scheduler.section}))
    return Status::success();
  const ForwardParams<Element> params(args);
  scheduler.counter = args.out<unsigned>("tile_counter");
  ByteTensorMaps maps;
  if (const Status made = maps.make(args, Config::kBlockM, Config::kBlockN); !made.ok())
    return made;
  const int num_sms = args.backend == Backend::gpu ? gpu_info().num_sms : kEmulatedSms;
  args.phase("attention");
  return launch_kernel(attention_kernel<Config>,
                       dim3(std::min<unsigned>(scheduler.count(), num_sms)), dim3(Config::kThreads),
                       sizeof(SharedStorage<Config>), args.stream, maps.q, maps.k, maps.v,
                       Descales(args), reinterpret_cast<const float4*>(args.out<float>("v_chunk")),
                       reinterpret_cast<float4*>(args.out<float>("sums")), params.o, params.lse,
                       shape_of(args.problem), scheduler);
}

template <class Config>
Status launch(const Arguments& args) {
  if (!args.on_tiling)
    if (const Status done =
            quantise_chunks<Config::kHeadDim>(args, quantise_turned<Config::kHeadDim>);
        !done.ok())
      return done;
  return launch_attention<Config>(args);
}

Status launch(const Arguments& args) {
  switch (args.problem.head_dim) {
    case 64: return launch<Config<64>>(args);
    case 128: return launch<Config<128>>(args);
    case 256: return launch<Config<256>>(args);
  }
  return Status::unsupported("only head dims 64, 128 and 256");
}

}  // namespace ATTN_BACKEND::f8_q_in_registers
