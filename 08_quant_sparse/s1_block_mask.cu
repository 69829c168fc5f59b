// s1_block_mask: fully masked blocks are skipped, by lists that the host makes.
//
// parent    06_flash_v3_hopper/v14_tuned
// change    The host makes a list of the visible key blocks of each query tile (Step::plan). Only
//           the producer reads it: consumers process a gapless stream of tiles, as for a shorter
//           sequence. Blocks visible to every row come first; those cut by a causal mask, a window
//           or the end come last, so both loops stay as they were. Each head may have a mask of
//           its own.
// why       Computing masked blocks makes the time independent of the density. With lists, neither
//           loop has a test per block.
// expect    time over density: a line through launch, with the slope of the dense kernel
// supports  fp16, bf16; head dims 64, 128, 256; any lengths, block masks combined with others, GQA
// source    FlashInfer (arXiv 2501.01005): block-sparse lists
#include <algorithm>

#include "device/device.h"
#include "attn/kernel.h"
#include "ptx/mbarrier.h"
#include "ptx/mma.h"
#include "ptx/named_barrier.h"
#include "ptx/setmaxnreg.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"
#include "kernels/hopper/fragments.h"
#include "kernels/sparse_maps.h"
#include "kernels/visits.h"

namespace ATTN_BACKEND::s1_block_mask {
using namespace attn;
using namespace hopper;

constexpr float kRescaleThreshold = 8;  // log2 units: P <= 2^8
constexpr int kPrefetchBlocks = 4;  // the next tile is taken this many key blocks before the end
// Ring of query tiles. Up to five are in use: the one whose O is being stored, the current one, two
// whose Q is loaded or loading, and the one whose WorkTile is being written.
constexpr int kWorkRing = 8;

// Named barriers. 0 is used by __syncthreads; kPingPong + w lets warpgroup w issue its MMAs.
enum NamedBarrier { kBlock = 0, kPingPong = 1 };

//! [config]
struct Tuning {
  int num_consumers = 2;  // consumer warpgroups, plus a producer
  int block_n;            // B_c
  int stages = 2;         // buffers for K, and for V
  int q_stages = 2;       // buffers for Q
  bool pingpong = true;
  bool lazy_rescale = true;
};
template <int kHeadDim_, Tuning kTuning>
struct Tuned {
  static constexpr int kHeadDim = kHeadDim_, kNumConsumers = kTuning.num_consumers;
  static constexpr int kThreads = kWarpgroup * (kNumConsumers + 1);
  static constexpr int kBlockM = 64 * kNumConsumers, kBlockN = kTuning.block_n;  // B_r, B_c
  static constexpr int kStages = kTuning.stages, kQStages = kTuning.q_stages;
  static constexpr bool kUsesPingPong = kTuning.pingpong, kLazyRescale = kTuning.lazy_rescale;
  // Registers per thread: at launch 65536 / threads, rounded down to a multiple of 8 (168 for 384
  // threads, 128 for 512). setmaxnreg moves these between warpgroups; asking for more than are free
  // deadlocks.
  static constexpr int kProducerRegisters = kNumConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kNumConsumers == 3 ? 160 : 232;
  static_assert(kProducerRegisters + kNumConsumers * kConsumerRegisters <=
                    (kNumConsumers + 1) * (65536 / kThreads / 8 * 8),
                "more registers than a block of so many threads has");
};
// Tile sizes; mask blocks must be multiples of them (sparse.h).
template <int kHeadDim>
struct Config;
template <>
struct Config<64>
    : Tuned<64, Tuning{.block_n = 128, .stages = 3, .pingpong = false, .lazy_rescale = false}> {};
template <>
struct Config<128> : Tuned<128, Tuning{.block_n = 128}> {};
template <>
struct Config<256> : Tuned<256, Tuning{.block_n = 64, .q_stages = 1, .pingpong = false}> {};
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
  // mbarriers. work_full: a WorkTile is written. prefetch: take the next tile. Two work_full
  // suffice: the Q producer waits for prefetch, so it is at most one tile ahead of K and V.
  uint64_t work_full[2], prefetch;
  WorkTile work[kWorkRing];
  int n_block[Config::kStages];  // of K and V, per stage
  ATTN_MEMBERS(SharedStorage, sQ, sK, sV, q_full, k_full, v_full, q_empty, k_empty, v_empty,
               work_full, prefetch, work, n_block)
};

using TileScheduler = DynamicPersistent;

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
  for (int i = 0; i < Config::kBlockN / 16; ++i)  // 16 keys: 16 rows of 128 bytes
    wgmma<Element, true>(o, p[i], v + 16 * 128 * i, true);
  wgmma_commit();
}
//! [issue_pv]

// (4) Online softmax in fp32, within the quad of lanes that share a row: S becomes P. Returns
// whether O must be multiplied by `rescale`: with lazy rescale, only if a maximum has grown by more
// than the threshold.
//! [softmax]
template <class Config>
__device__ __forceinline__ bool online_softmax(float (&s)[Config::kBlockN / 8][4],
                                               float (&row_max)[2], float (&row_sum)[2],
                                               float (&rescale)[2], float softmax_scale_log2) {
  float max[2];
  bool grown = !Config::kLazyRescale;
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
  const bool rescaled = Config::kLazyRescale ? __any_sync(~0u, grown) : true;
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
      s[n][i] = exp2f(fmaf(s[n][i], softmax_scale_log2, -row_max[i / 2]));
      row_sum[i / 2] += s[n][i];
    }
  return rescaled;
}
//! [softmax]

// Q producer: takes query tiles and (1) loads Q_i. It takes the next tile kPrefetchBlocks key
// blocks before the current one ends: in time to load Q; no earlier, because an idle SM may need
// the tile. Corner of a box: column in the panel, row, panel, head.
//! [producer]
template <class Element, class Config>
__device__ __forceinline__ void produce_q(SharedStorage<Element, Config>& smem,
                                          const TensorMap& mapQ, const BlockLists& lists,
                                          const Shape& shape, const TileScheduler& scheduler) {
  PipelineState<Config::kQStages> q;
  // q.count also indexes work_full (2 slots), prefetch (1) and the ring of WorkTiles
  const auto ring = [&] { return PipelineState<2>{q.count}; };
  const auto prefetch = [&] { return PipelineState<1>{q.count}; };
  for (unsigned index = scheduler.first(); index < scheduler.count();
       index = scheduler.next(index)) {
    const WorkTile work =
        listed_work_of<Config>(shape, scheduler.at<Config::kBlockM>(index), lists);
    smem.work[q.count % kWorkRing] = work;
    mbarrier_arrive(&smem.work_full[ring().index()]);
    mbarrier_wait(&smem.q_empty[q.index()], q.phase() ^ 1);  // previous Q released
    mbarrier_arrive_expect_tx(&smem.q_full[q.index()], Config::kBlockM * Config::kHeadDim * 2);
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
template <class Element, class Config>
__device__ __forceinline__ void produce_kv(SharedStorage<Element, Config>& smem,
                                           const TensorMap& mapK, const TensorMap& mapV,
                                           const BlockLists& lists) {
  constexpr int kBlockN = Config::kBlockN, kTileBytes = kBlockN * Config::kHeadDim * 2;
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
      const int n_block = ahead, stage = kv.index();
      ahead = block(i + 1);
      if (i == max(0, count - kPrefetchBlocks)) mbarrier_arrive(&smem.prefetch);
      const auto load = [&](Element* tile, const TensorMap& map, uint64_t* full) {
        mbarrier_arrive_expect_tx(full, kTileBytes);
        tma_load(tile, map, full, {0, n_block * kBlockN, 0, work.kv_head});
      };
      mbarrier_wait(&smem.k_empty[stage], kv.phase() ^ 1);  // passes at once the first time
      smem.n_block[stage] = n_block;
      load(smem.sK[stage], mapK, &smem.k_full[stage]);
      mbarrier_wait(&smem.v_empty[stage], kv.phase() ^ 1);
      load(smem.sV[stage], mapV, &smem.v_full[stage]);
    }
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
  mbarrier_init(&smem.work_full[0], 1), mbarrier_init(&smem.work_full[1], 1);
  mbarrier_init(&smem.prefetch, 1);
  mbarrier_init_fence();
}

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_kernel(const __grid_constant__ TensorMap mapQ,  // [B Hq, d / 64, seqlen_q, 64]
                     const __grid_constant__ TensorMap mapK,  // [B Hkv, d / 64, seqlen_k, 64]
                     const __grid_constant__ TensorMap mapV,  // as K
                     Element* __restrict__ gO,                // [B, Hq, seqlen_q, d]
                     float* __restrict__ gLse,                // [B, Hq, seqlen_q]
                     BlockLists lists, Shape shape, TileScheduler scheduler) {
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
      produce_q<Element, Config>(smem, mapQ, lists, shape, scheduler);
    if (threadIdx.x % kWarpgroup == kWarp) produce_kv<Element, Config>(smem, mapK, mapV, lists);
    return;
  }
  setmaxnreg_inc<Config::kConsumerRegisters>();

  //! [pingpong]
  // A warpgroup issues its MMAs after the previous warpgroup has issued its own. A named barrier
  // completes when one warpgroup waits and the other has passed on: 2 x 128 arrivals.
  const auto pingpong_wait = [&] {
    if (Config::kUsesPingPong) named_barrier_sync(kPingPong + warpgroup, 2 * kWarpgroup);
  };
  const auto pingpong_pass_on = [&] {
    if (Config::kUsesPingPong)
      named_barrier_arrive(kPingPong + (warpgroup + 1) % Config::kNumConsumers, 2 * kWarpgroup);
  };
  if (warpgroup == Config::kNumConsumers - 1) pingpong_pass_on();  // warpgroup 0 goes first
  //! [pingpong]

  // q: pipeline state of the current Q tile; the others describe that tile.
  PipelineState<Config::kQStages> q{-1};
  int row0 = 0, last_key = 0;
  int unmasked = 0, count = 0;  // key blocks that the tile visits: without a mask, in all
  KvBlockRange kv_range{};
  const auto next_work_tile = [&] {
    q.advance();
    mbarrier_wait(&smem.q_full[q.index()], q.phase());
    const WorkTile& work = smem.work[q.count % kWorkRing];
    row0 = work.row0 + work.seqlen_k - work.seqlen_q;  // key on the diagonal of row work.row0
    last_key = work.last_key;
    unmasked = work.visits.masked - work.visits.first, count = max(1, work.visits.count());
    kv_range = work.kv_range;  // never empty: a fully masked tile has one block, all of it masked
    const bool more = work.row0 >= 0;
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

  float o[kHeadDim / 8][4] = {};  // unnormalised
  // row_max: the reference, which may lag the row max (log2 units); row_sum: of this lane's keys
  float row_max[2] = {kLowest, kLowest}, row_sum[2] = {};
  float s[kBlockN / 8][4];
  uint32_t p[kBlockN / 16][4];
  float rescale[2];
  bool rescaled;
  int n_block = 0;  // of S
  // Softmax of one key block. `masked` is a type, so the unmasked body contains no mask code.
  const auto softmax = [&](auto masked) {
    if constexpr (masked.value) apply_mask<Config>(s, shape, kv_range, n_block, row0, last_key);
    rescaled = online_softmax<Config>(s, row_max, row_sum, rescale, softmax_scale_log2);
  };
  // This warp has read the block index, and has finished reading K.
  const auto release_k = [&] {
    n_block = smem.n_block[kv.index()];
    __syncwarp();  // all lanes have read the index before lane 0 arrives
    consumer_release(smem.k_empty, kv);
  };
  //! [mmas]
  const auto issue_s = [&] {
    // this warpgroup's 64 rows of the first panel; issue_qk advances to the other panels
    issue_qk<Config>(s, smem.sQ[q.index()] + warpgroup * 64 * 64, smem.sK[kv.index()]);
  };
  const auto issue_o = [&](KvState state) { issue_pv<Config>(o, p, smem.sV[state.index()]); };
  // Issues (3) S of this key block, then (5) P V of the previous block; waits for S only.
  const auto mmas = [&](bool is_last) {
    consumer_wait(smem.k_full, kv);
    pingpong_wait();
    issue_s();
    consumer_wait(smem.v_full, kv.previous());
    issue_o(kv.previous());
    pingpong_pass_on();
    wgmma_wait<1>(s);  // S complete, P V in flight
    release_k();
    if (is_last) release_q();
  };
  const auto process_kv_block = [&](int nth, auto masked) {
    mmas(nth + 1 == count);
    softmax(masked);
    wgmma_wait<0>(o);  // P V of the previous block complete
    consumer_release(smem.v_empty, kv.previous());
    round_p<Element, kBlockN>(p, s);
    if (rescaled) rescale_rows<kHeadDim>(o, rescale);
    kv.advance();
  };
  //! [mmas]

  //! [loops]
  if (!next_work_tile()) return;
  // The very first S has no P V to overlap with.
  consumer_wait(smem.k_full, kv);
  pingpong_wait();
  issue_s();
  pingpong_pass_on();
  wgmma_wait<0>(s);
  release_k();
  if (count == 1) release_q();
  softmax(std::true_type{});
  round_p<Element, kBlockN>(p, s);
  kv.advance();
  bool more = true;
  int nth = 1;  // of the tile's listed blocks
  do {
    // blocks that need no mask, then those that do
    for (; nth < unmasked; ++nth) process_kv_block(nth, std::false_type{});
    for (; nth < count; ++nth) process_kv_block(nth, std::true_type{});
    const WorkTile& last = smem.work[q.count % kWorkRing];
    const float last_max[2] = {row_max[0], row_max[1]};
    float last_sum[2] = {row_sum[0], row_sum[1]};
    more = next_work_tile();
    if (more) {  // this tile's last P V overlaps with the next tile's first S and softmax
      mmas(count == 1);
#pragma unroll
      for (int r = 0; r < 2; ++r) row_max[r] = kLowest, row_sum[r] = 0;
      softmax(std::true_type{});
      nth = 1;
    } else {
      consumer_wait(smem.v_full, kv.previous());
      pingpong_wait();
      issue_o(kv.previous());
      pingpong_pass_on();
    }
    wgmma_wait<0>(o);
    consumer_release(smem.v_empty, kv.previous());
    round_p<Element, kBlockN>(p, s);
    kv.advance();
    store_o<Element, kHeadDim>(gO, gLse, last, kHeadDim, o, last_max, last_sum);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0;
  } while (more);
  //! [loops]
}

template <class Element, class Config>
Status attend(const Arguments& args, ListStrides strides) {
  static_assert(Config::kBlockM == kSparseBlockM &&
                    Config::kBlockN == sparse_block_n(Config::kHeadDim),
                "lists are made for other tiles");
  TileScheduler scheduler(args.problem, Config::kBlockM);
  if (args.report_tiling({Config::kBlockM, Config::kBlockN, scheduler.section}))
    return Status::success();
  const ForwardParams<Element> params(args);
  scheduler.counter = args.out<unsigned>("tile_counter");
  TensorMaps maps;
  if (const Status made = maps.make<Element>(args, Config::kBlockM, Config::kBlockN); !made.ok())
    return made;
  const BlockLists lists{args.in<BlockList>("visits"), args.in<int>("visited"), strides.batch,
                         strides.head};
  const int num_sms = args.backend == Backend::gpu ? gpu_info().num_sms : kEmulatedSms;
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config>,
                       dim3(std::min<unsigned>(scheduler.count(), num_sms)), dim3(Config::kThreads),
                       sizeof(SharedStorage<Element, Config>), args.stream, maps.q, maps.k, maps.v,
                       params.o, params.lse, lists, shape_of(args.problem), scheduler);
}

// The attention kernel on any lists: s4_predict launches it on lists that the device makes.
Status attend(const Arguments& args, ListStrides strides) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    switch (args.problem.head_dim) {
      case 64: return attend<Element, Config<64>>(args, strides);
      case 128: return attend<Element, Config<128>>(args, strides);
      case 256: return attend<Element, Config<256>>(args, strides);
    }
    return Status::unsupported("only head dims 64, 128 and 256");
  });
}

Status launch(const Arguments& args) { return attend(args, list_strides(args.problem)); }

}  // namespace ATTN_BACKEND::s1_block_mask
