// v17_prefix_tma: shared prefixes with TMA and wgmma.
//
// parent    v15_prefill_tma
// change    The kernel of v15 processes the prefix work tiles of v8's plan: rows of all members of
//           a group, a range of key blocks. A Q tile mixes sequences, so it takes one box per
//           member and 64 columns. The lanes of a warp look up members and issue the boxes; a
//           single thread would wait for one look-up after the other. A prefix ends at a page
//           boundary, so no box of V is partial. Partial O is stored in fp32; then v5 decodes the
//           suffixes, and the same merge follows.
// why       v8 reads a shared prefix once and is then limited by its MMAs, mma.sync.
// expect    the phase "prefix" reaches the rate of v15
// supports  fp16, bf16; head dims 64, 128, 256; 1 to 16 queries, any lengths, causal, windows (with
//           one on the left nothing is shared), GQA; page sizes that are multiples of 8; softmax
//           scales from 1e-37
#include <algorithm>

#include "device/device.h"
#include "attn/kernel.h"
#include "ptx/mbarrier.h"
#include "ptx/mma.h"
#include "ptx/named_barrier.h"
#include "ptx/setmaxnreg.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"
#include "kernels/boxes.h"
#include "kernels/hopper/fragments.h"
#include "kernels/hopper_tiles.h"
#include "kernels/work.h"
#include "kernels/prefix_boxes.h"
#include "kernels/prefix_merge.h"

ATTN_DECLARE_STEP(v5_balanced_plan);

namespace ATTN_BACKEND::v17_prefix_tma {
using namespace attn;
using namespace hopper;
using namespace splits;

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
  static_assert(kBlockN == tile_keys(kHeadDim), "boxes are of other tiles");
  static_assert(kBlockM == plans::wgmma_prefix_tiles(kHeadDim).rows, "the plan is of other tiles");
  static_assert(kBlockN / kAtomRows <= kWarp, "more boxes than lanes");
  static constexpr int kGroupBytes = 1024 * (kHeadDim / 64);  // 8 rows of K or V, all columns
  static_assert(kProducerRegisters + kNumConsumers * kConsumerRegisters <=
                    (kNumConsumers + 1) * (65536 / kThreads / 8 * 8),
                "more registers than a block of so many threads has");
};
template <int kHeadDim>
struct Config;
template <>
struct Config<64> : Tuned<64, Tuning{.num_consumers = 3, .block_n = 128}> {};
template <>
struct Config<128> : Tuned<128, Tuning{.block_n = 128}> {};
template <>
struct Config<256> : Tuned<256, Tuning{.block_n = 64, .q_stages = 1, .pingpong = false}> {};
//! [config]

// With TMA's 128-byte swizzle. Q: panels of 64 columns, [d / 64][rows, 64]. K and V: atoms of 8
// rows and 64 columns, as their boxes deliver them, [rows / 8][d / 64][8, 64].
template <class Element, class Config>
struct SharedStorage {
  alignas(1024) Element sQ[Config::kQStages][Config::kBlockM * Config::kHeadDim];
  alignas(1024) Element sK[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(1024) Element sV[Config::kStages][Config::kBlockN * Config::kHeadDim];
  // mbarriers: TMA bytes have landed
  uint64_t q_full[Config::kQStages], k_full[Config::kStages], v_full[Config::kStages];
  // mbarriers: all consumer warps have released the tile
  uint64_t q_empty[Config::kQStages], k_empty[Config::kStages], v_empty[Config::kStages];
  // mbarriers: a WorkTile is written; take the next tile. Four of the former: K's warp signals
  // prefetch, so the Q producer may be up to three tiles ahead of V's warp.
  uint64_t work_full[4], prefetch;
  WorkTile work[kWorkRing];
  ATTN_MEMBERS(SharedStorage, sQ, sK, sV, q_full, k_full, v_full, q_empty, k_empty, v_empty,
               work_full, prefetch, work)
};

using TileScheduler = PrefixList;

// (3) S = Q K^T for the 64 rows of this warpgroup, both K-major (the `false`). Issues only; does
// not wait. `q + n`: n bytes further. The first wgmma overwrites s, the others add to it.
//! [issue_qk]
template <class Config, class Element>
__device__ __forceinline__ void issue_qk(float (&s)[Config::kBlockN / 8][4], const Element* sQ,
                                         const Element* sK) {
  const SmemDescriptor q = smem_descriptor(sQ);
  const SmemDescriptor k = with_stride_byte_offset(smem_descriptor(sK), Config::kGroupBytes);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kHeadDim / 16; ++i) {  // 16 of a panel's 64 columns, 32 bytes
    const int panel = i / 4, inside = i % 4 * 32;
    wgmma<Element, false>(s, q + (panel * Config::kBlockM * 128 + inside),
                          k + (panel * 1024 + inside), i > 0);
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
  const SmemDescriptor v = with_stride_byte_offset(smem_descriptor(sV, 1024), Config::kGroupBytes);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 16; ++i)  // 16 keys are two groups of 8 rows
    wgmma<Element, true>(o, p[i], v + 2 * Config::kGroupBytes * i, true);
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

// Q producer: a warp takes work tiles and (1) loads Q_i; each lane issues some of its boxes. It
// takes the next work tile when kPrefetchBlocks key blocks of this one are left to load.
//! [producer]
template <class Element, class Config>
__device__ __forceinline__ void produce_q(SharedStorage<Element, Config>& smem,
                                          const TensorMap& mapQ, const int* gMembers,
                                          int q_box_rows, const Shape& shape,
                                          const TileScheduler& scheduler) {
  constexpr int kBlockM = Config::kBlockM, kPanels = Config::kHeadDim / 64;
  const int lane = thread_index() % kWarp;
  const int each = shape.heads / shape.kv_heads * shape.seqlen_q;  // rows per member
  PipelineState<Config::kQStages> q;
  // q.count also indexes work_full (4 slots), prefetch (1) and the ring of WorkTiles
  const auto ring = [&] { return PipelineState<4>{q.count}; };
  const auto prefetch = [&] { return PipelineState<1>{q.count}; };
  for (unsigned index = scheduler.first(); index < scheduler.count();
       index = scheduler.next(index)) {
    const plans::PrefixWork& piece = scheduler.gWork[index];
    if (piece.begin == piece.end) continue;  // empty entry
    const WorkTile work = work_of<Config>(piece);
    if (lane == 0) {
      smem.work[q.count % kWorkRing] = work;
      mbarrier_arrive(&smem.work_full[ring().index()]);
    }
    mbarrier_wait(&smem.q_empty[q.index()], q.phase() ^ 1);  // previous Q released
    if (lane == 0)
      mbarrier_arrive_expect_tx(&smem.q_full[q.index()], kBlockM * Config::kHeadDim * 2);
    __syncwarp();  // expect all bytes of the tile before any box is issued
    //! [rows]
    for (int r = lane * q_box_rows; r < kBlockM; r += kWarp * q_box_rows) {
      const int row = work.row0 + r;  // among the rows of all members
      int from = kNowhere;
      if (row < work.seqlen_q)
        from = (gMembers[piece.first_member + row / each] * shape.kv_heads + work.kv_head) * each +
               row % each;
      for (int panel = 0; panel < kPanels; ++panel)
        tma_load(smem.sQ[q.index()] + (panel * kBlockM + r) * 64, mapQ, &smem.q_full[q.index()],
                 {0, from, panel});
    }
    //! [rows]
    mbarrier_wait(&smem.prefetch, prefetch().phase());
    __syncwarp();  // all lanes have passed this phase before the next work tile advances it
    q.advance();
  }
  if (lane == 0) {
    smem.work[q.count % kWorkRing] = WorkTile{};  // end of work
    mbarrier_arrive(&smem.work_full[ring().index()]);
    mbarrier_wait(&smem.q_empty[q.index()], q.phase() ^ 1);
    // no Q: wakes the consumers, which read the end mark
    mbarrier_arrive(&smem.q_full[q.index()]);
  }
}

// K/V producers: one warp loads K_j, another V_j, into empty stages. Each lane issues one box of
// whole rows.
template <bool kOfV, class Element, class Config>
__device__ __forceinline__ void produce_kv(SharedStorage<Element, Config>& smem,
                                           const TensorMap& mapK, const TensorMap& mapV,
                                           const Pages& pages) {
  constexpr int kBlockN = Config::kBlockN, kTileBytes = kBlockN * Config::kHeadDim * 2;
  constexpr int kPanels = Config::kHeadDim / 64;
  // a variable would take one of 32 registers
  const auto lane = [] { return thread_index() % kWarp; };
  const int box_rows = pages.box_rows, boxes = kBlockN / box_rows;
  const int own_row = lane() * box_rows;
  PipelineState<Config::kStages> kv;
  for (PipelineState<4> ring;; ring.advance()) {
    mbarrier_wait(&smem.work_full[ring.index()], ring.phase());
    const WorkTile& work = smem.work[ring.count % kWorkRing];
    if (work.row0 < 0) break;
    int ahead = page_of(pages, work, work.kv_range.begin * kBlockN + own_row);
    for (int n_block = work.kv_range.begin; n_block < work.kv_range.end; ++n_block, kv.advance()) {
      const int key = n_block * kBlockN + own_row, slot = slot_of(pages, work, key, ahead);
      ahead = page_of(pages, work, key + kBlockN);  // its latency overlaps with this tile's copies
      if (!kOfV && lane() == 0 &&
          n_block == max(work.kv_range.begin, work.kv_range.end - kPrefetchBlocks))
        mbarrier_arrive(&smem.prefetch);
      const auto arm = [&](uint64_t* full, uint64_t* empty) {
        mbarrier_wait(empty, kv.phase() ^ 1);  // passes at once the first time
        if (lane() == 0) mbarrier_arrive_expect_tx(full, kTileBytes);
        __syncwarp();  // expect all bytes of the tile before any box is issued
      };
      const auto load = [&](Element* tile, const TensorMap& map, uint64_t* full) {
        tma_load(tile + own_row * Config::kHeadDim, map, full,
                 {0, 0, work.kv_head * kPanels, slot / 8});
      };
      const int stage = kv.index();
      // Past the prefix TMA fills boxes with zeros: scores there are masked, and V must be 0.
      if constexpr (kOfV) {
        arm(&smem.v_full[stage], &smem.v_empty[stage]);
        if (lane() < boxes) load(smem.sV[stage], mapV, &smem.v_full[stage]);
      } else {
        arm(&smem.k_full[stage], &smem.k_empty[stage]);
        if (lane() < boxes) load(smem.sK[stage], mapK, &smem.k_full[stage]);
      }
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
  for (uint64_t& full : smem.work_full) mbarrier_init(&full, 1);
  mbarrier_init(&smem.prefetch, 1);
  mbarrier_init_fence();
}

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_kernel(const __grid_constant__ TensorMap mapQ,  // [d / 64, B Hq seqlen_q, 64]
                     // pool, [tokens / 8, Hkv d / 64, 8, 64]
                     const __grid_constant__ TensorMap mapK,
                     const __grid_constant__ TensorMap mapV,  // as K
                     float* __restrict__ gOPartial,           // [partial results, d]
                     float* __restrict__ gLsePartial,         // [partial results], in log2 units
                     // [B]: sequences, the members of each group contiguous
                     const int* __restrict__ gMembers, int q_box_rows, Pages pages, Shape shape,
                     TileScheduler scheduler) {
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
    if (threadIdx.x % kWarpgroup / kWarp == 0)
      produce_q<Element, Config>(smem, mapQ, gMembers, q_box_rows, shape, scheduler);
    if (threadIdx.x % kWarpgroup / kWarp == 1)
      produce_kv<false, Element, Config>(smem, mapK, mapV, pages);
    if (threadIdx.x % kWarpgroup / kWarp == 2)
      produce_kv<true, Element, Config>(smem, mapK, mapV, pages);
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
  int last_key = 0;
  KvBlockRange kv_range{};
  const auto next_work_tile = [&] {
    q.advance();
    mbarrier_wait(&smem.q_full[q.index()], q.phase());
    const WorkTile& work = smem.work[q.count % kWorkRing];
    last_key = work.seqlen_k - 1;
    kv_range = work.kv_range;  // never empty: the producer of Q skips empty tiles
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
  // Softmax of one key block. `masked` is a type, so the unmasked body contains no mask code.
  const auto softmax = [&](int n_block, auto masked) {
    if constexpr (masked.value) apply_mask<Config>(s, shape, kv_range, n_block, 0, last_key);
    rescaled = online_softmax<Config>(s, row_max, row_sum, rescale, softmax_scale_log2);
  };
  //! [mmas]
  const auto issue_s = [&] {
    // this warpgroup's 64 rows of the first panel; issue_qk advances to the other panels
    issue_qk<Config>(s, smem.sQ[q.index()] + warpgroup * 64 * 64, smem.sK[kv.index()]);
  };
  const auto issue_o = [&](KvState state) { issue_pv<Config>(o, p, smem.sV[state.index()]); };
  // Issues (3) S of this key block, then (5) P V of the previous block; waits for S only.
  const auto mmas = [&](int n_block) {
    consumer_wait(smem.k_full, kv);
    pingpong_wait();
    issue_s();
    consumer_wait(smem.v_full, kv.previous());
    issue_o(kv.previous());
    pingpong_pass_on();
    wgmma_wait<1>(s);  // S complete, P V in flight
    consumer_release(smem.k_empty, kv);
    if (n_block + 1 == kv_range.end) release_q();
  };
  const auto process_kv_block = [&](int n_block, auto masked) {
    mmas(n_block);
    softmax(n_block, masked);
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
  consumer_release(smem.k_empty, kv);
  if (kv_range.begin + 1 == kv_range.end) release_q();
  softmax(kv_range.begin, std::true_type{});
  round_p<Element, kBlockN>(p, s);
  kv.advance();
  bool more = true;
  int n_block = kv_range.begin + 1;
  do {
    // Unmasked blocks; then the end of the prefix.
    for (; n_block < kv_range.unmasked_end; ++n_block) process_kv_block(n_block, std::false_type{});
    for (; n_block < kv_range.end; ++n_block) process_kv_block(n_block, std::true_type{});
    const WorkTile& last = smem.work[q.count % kWorkRing];
    const float last_max[2] = {row_max[0], row_max[1]};
    float last_sum[2] = {row_sum[0], row_sum[1]};
    more = next_work_tile();
    if (more) {  // this tile's last P V overlaps with the next tile's first S and softmax
      mmas(kv_range.begin);
#pragma unroll
      for (int r = 0; r < 2; ++r) row_max[r] = kLowest, row_sum[r] = 0;
      softmax(kv_range.begin, std::true_type{});
      n_block = kv_range.begin + 1;
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
    store_part<kHeadDim>(gOPartial, gLsePartial, last, o, last_max, last_sum);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0;
  } while (more);
  //! [loops]
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const PagedParams<Element> params(args);
  constexpr int kHeadDim = Config::kHeadDim;
  const Problem& p = args.problem;
  const TileScheduler scheduler{args.in<plans::PrefixWork>("prefix_work"),
                                static_cast<unsigned>(plans::most_prefix_work(p))};
  const int rows_of_q = static_cast<int>(q_box_rows(p, Config::kBlockM));
  const Pages pages{params.page_table, static_cast<int>(max_pages_of(p)),
                    static_cast<int>(page_size_of(p)), static_cast<int>(box_rows(p))};
  TensorMap q, k, v;
  for (const Status& made :
       {map_of_q_rows(q, params.q, p, rows_of_q), map_of_pool(k, params.k, p, pages.box_rows),
        map_of_pool(v, params.v, p, pages.box_rows)})
    if (!made.ok()) return made;
  Shape shape = shape_of(p);
  shape.window_right = Shape::kNoWindow;  // every query attends to the whole prefix
  const int num_sms = args.backend == Backend::gpu ? gpu_info().num_sms : kEmulatedSms;
  args.phase("prefix");
  Status status = launch_kernel(
      attention_kernel<Element, Config>, dim3(std::min<unsigned>(scheduler.size, num_sms)),
      dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), args.stream, q, k, v,
      args.out<float>("prefix_o"), args.out<float>("prefix_lse"), args.in<int>("members"),
      rows_of_q, pages, shape, scheduler);
  if (!status.ok()) return status;
  Arguments suffix = args;
  suffix.bind("page_table", args.out<int>("suffix_table"));
  suffix.bind("seqused_k", args.out<int>("suffix_used"));
  status = v5_balanced_plan::launch(suffix);
  if (!status.ok()) return status;
  return paged::merge_prefix<Element, kHeadDim>(args);
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

}  // namespace ATTN_BACKEND::v17_prefix_tma
