// s7_int8: predicted block lists on the INT8 / FP8 kernel.
//
// parent    q5_fewer_instructions
// change    s4's lists drive the kernel of q5; only the producer reads them. Blocks are chosen
//           from the original Q and K, so they are those of s4. Smooth K uses the mean of all
//           keys, visited or not: all scores of a row decrease by the same number, so the softmax
//           over a subset is unchanged. One loop tests per block whether it has a mask.
// why       Skipping blocks and cheaper blocks combine. Two loops, masked and unmasked, would need
//           more registers than there are.
// expect    time of phase "attention" shorter than s4's; the passes that quantise take as long as
//           before
// supports  --dtype e4m3, inputs in bf16; head dims 64, 128, 256; any lengths, causal and windows,
//           GQA; --scale at least 1e-10
#include <algorithm>

#include "device/device.h"
#include "attn/kernel.h"
#include "ptx/mbarrier.h"
#include "ptx/named_barrier.h"
#include "ptx/setmaxnreg.h"
#include "ptx/tma.h"
#include "ptx/wgmma_e4m3.h"
#include "ptx/wgmma_s8.h"
#include "kernels/choose_blocks.h"
#include "kernels/fp8_fragments.h"
#include "kernels/quantise_v.h"
#include "kernels/visits.h"

namespace ATTN_BACKEND::s7_int8 {
using namespace attn;
using namespace hopper;

using Element = __nv_bfloat16;    // type of the inputs and of O
using Descales = ThreadDescales;  // scales of a lane's part of a tile

constexpr float kPScale = 8;        // log2 units: P is scaled by 256
constexpr int kPrefetchBlocks = 4;  // the next tile is taken this many key blocks before the end
// Ring of query tiles. Up to five are in use: the one whose O is being stored, the current one, two
// whose Q is loaded or loading, and the one whose WorkTile is being written.
constexpr int kWorkRing = 8;

// Named barriers. 0 is used by __syncthreads; kPingPong + w lets warpgroup w issue its MMAs.
enum NamedBarrier { kBlock = 0, kPingPong = 1 };

//! [config]
template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kNumConsumers = 2;                            // consumer warpgroups
  static constexpr int kThreads = kWarpgroup * (kNumConsumers + 1);  // plus a producer
  static constexpr int kBlockM = 64 * kNumConsumers;                 // B_r
  static constexpr int kBlockN = kHeadDim == 256 ? 64 : 128;         // B_c
  static_assert(kBlockM == kScaleRows && kScaleRows % kBlockN == 0);
  static constexpr int kSliceColumns = kHeadDim == 256 ? 64 : kHeadDim;  // columns of P V per slice
  static constexpr int kSlices = kHeadDim / kSliceColumns;
  static constexpr int kStages = 2;               // buffers for K, and for V
  static constexpr int kQStages = 2;              // buffers for Q
  // block indices: softmax reads them after K's stage has been released, so there are twice as many
  // slots as stages
  static constexpr int kVisitRing = 2 * kStages;
  // Registers per thread: at launch 65536 / threads, rounded down to a multiple of 8 (168 for 384
  // threads). setmaxnreg moves these between warpgroups; asking for more than are free deadlocks.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(kProducerRegisters + kNumConsumers * kConsumerRegisters <=
                    (kNumConsumers + 1) * (65536 / kThreads / 8 * 8),
                "more registers than a block of so many threads has");
};
//! [config]

// Tiles of Q and K are panels of 128 one-byte columns, [d / 128][rows, 128], or of 64 at d=64, with
// a TMA swizzle of as many bytes; V^T is [d, keys].
template <class Config>
struct SharedStorage {
  alignas(1024) uint8_t sQ[Config::kQStages][Config::kBlockM * Config::kHeadDim];
  alignas(1024) uint8_t sK[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(1024) uint8_t sV[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(16) float q_descale[Config::kQStages][ThreadGroups::kQ];
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
             k + (panel * Config::kBlockN * 128 + inside), true);
  }
  wgmma_commit();
}
//! [issue_qk]

// (5) P V of the columns of one slice: P from registers, V transposed, [d, k]. Issues only; does
// not wait.
//! [issue_pv]
template <class Config>
__device__ __forceinline__ void issue_pv(float (&pv)[Config::kSliceColumns / 8][4],
                                         const uint32_t (&p)[Config::kBlockN / 32][4],
                                         const uint8_t* sV, int slice) {
  constexpr int kKeys = kPanelKeys<Config::kBlockN>;
  const SmemDescriptor v = smem_descriptor_e4m3<kKeys>(sV + slice * Config::kSliceColumns * kKeys);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 32; ++i) {  // 32 keys are 32 bytes
    const int panel = i * 32 / kKeys, inside = i * 32 % kKeys;
    wgmma_e4m3(pv, p[i], v + (panel * Config::kHeadDim * kKeys + inside), i > 0);
  }
  wgmma_commit();
}
//! [issue_pv]

// (4) Online softmax in fp32, within the quad of lanes that share a row: biased S becomes P. O of
// the previous blocks must be multiplied by `rescale`.
//! [softmax]
template <class Config>
__device__ __forceinline__ void online_softmax(float (&s)[Config::kBlockN / 8][4],
                                               float (&row_max)[2], float (&row_sum)[2],
                                               float (&rescale)[2], float softmax_scale_log2) {
  // exact: the last two bits of the scale are 0; so is its sum with max, which is an integer
  const float bias = kScoreBias * softmax_scale_log2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int largest = __float_as_int(s[0][2 * r]);  // as an integer, too, -inf is below all scores
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; ++n)
      largest = max(largest, max(__float_as_int(s[n][2 * r]), __float_as_int(s[n][2 * r + 1])));
    const float max = fmaxf(
        row_max[r], ceilf(quad_max(fmaf(__int_as_float(largest), softmax_scale_log2, -bias))));
    rescale[r] = exp2f(row_max[r] - max);
    row_max[r] = max;
    row_sum[r] *= rescale[r];
  }
#pragma unroll
  for (int n = 0; n < Config::kBlockN / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[n][i] = exp2f(fmaf(s[n][i], softmax_scale_log2, kPScale - row_max[i / 2] - bias));
      row_sum[i / 2] += s[n][i];
    }
}
//! [softmax]

// Q producer: takes query tiles and (1) loads Q_i. It takes the next tile kPrefetchBlocks key
// blocks before the current one ends: in time to load Q; no earlier, because an idle SM may need
// the tile. Corner of a box: column in the panel, row, panel, head.
//! [producer]
template <class Config>
__device__ __forceinline__ void produce_q(SharedStorage<Config>& smem, const TensorMap& mapQ,
                                          const Shape& shape, const TileScheduler& scheduler,
                                          const Descales& descales, const BlockLists& lists) {
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
#pragma unroll 2  // more at once would exceed the producer's registers
    for (int i = 0; i < ThreadGroups::kQ; i += 4)
      *reinterpret_cast<float4*>(&smem.q_descale[q.index()][i]) =
          *reinterpret_cast<const float4*>(descales.q(work.q_head, work.row0) + i);
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
__device__ __forceinline__ void produce_kv(SharedStorage<Config>& smem,
                                           const TensorMap& mapK, const TensorMap& mapV,
                                           const Descales& descales, const BlockLists& lists) {
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
      *reinterpret_cast<float4*>(&smem.k_descale[stage][0]) =
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
                     const float* gLseShift,    // [B, Hq, seqlen_q]
                     const float* gVDescale,    // [B Hkv, d]
                     Element* __restrict__ gO,  // [B, Hq, seqlen_q, d]
                     float* __restrict__ gLse,  // [B, Hq, seqlen_q]
                     BlockLists lists, Shape shape, TileScheduler scheduler) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN;
  auto& smem = dynamic_shared<SharedStorage<Config>>();
  // Broadcast from lane 0, so that the compiler knows it is warp-uniform. Then tile addresses stay
  // in uniform registers, which wgmma requires.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) init_barriers(smem);
  __syncthreads();  // barriers are initialised

  if (warpgroup == Config::kNumConsumers) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x % kWarpgroup == 0)
      produce_q<Config>(smem, mapQ, shape, scheduler, descales, lists);
    if (threadIdx.x % kWarpgroup == kWarp) produce_kv<Config>(smem, mapK, mapV, descales, lists);
    return;
  }
  setmaxnreg_inc<Config::kConsumerRegisters>();

  //! [pingpong]
  // A warpgroup issues its MMAs after the previous warpgroup has issued its own. A named barrier
  // completes when one warpgroup waits and the other has passed on: 2 x 128 arrivals.
  const auto pingpong_wait = [&] { named_barrier_sync(kPingPong + warpgroup, 2 * kWarpgroup); };
  const auto pingpong_pass_on = [&] {
    named_barrier_arrive(kPingPong + (warpgroup + 1) % Config::kNumConsumers, 2 * kWarpgroup);
  };
  if (warpgroup == Config::kNumConsumers - 1) pingpong_pass_on();  // warpgroup 0 goes first
  //! [pingpong]

  // q: pipeline state of the current Q tile; the others describe that tile.
  PipelineState<Config::kQStages> q{-1};
  int left = 0;  // key blocks still to visit
  float scale_log2 = 0;  // with the scales of Q and of the block's keys
  const auto next_work_tile = [&] {
    q.advance();
    mbarrier_wait(&smem.q_full[q.index()], q.phase());
    const WorkTile& work = smem.work[q.count % kWorkRing];
    left = max(1, work.visits.count());
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

  float o[kHeadDim / 8][4] = {};           // unnormalised
  float pv[Config::kSliceColumns / 8][4];  // P V of the current tile, to be added to O
  // max in log2 units; sum over this lane's keys
  float row_max[2] = {kLowest, kLowest}, row_sum[2] = {};
  float s[kBlockN / 8][4];
  // S as int32, in the registers of s: a second array makes ptxas spill (q5 at d=128: 1252 bytes).
  auto& s_acc = reinterpret_cast<int (&)[kBlockN / 8][4]>(s);
  uint32_t p[kBlockN / 32][4];
  // rescale: factor of O when the P V in flight is added; next_rescale: when the next one is. While
  // O is 0 any factor will do.
  float rescale[2] = {}, next_rescale[2];
  // S of a key block becomes P, masked if necessary.
  const auto softmax = [&] {
    as_floats(s, s_acc);
    // Reread: variables would occupy registers in the loop.
    const WorkTile& work = smem.work[q.count % kWorkRing];
    apply_mask<Config>(s, shape, work.kv_range, smem.n_block[kv.count % Config::kVisitRing],
                       work.row0 + work.seqlen_k - work.seqlen_q, work.last_key);
    online_softmax<Config>(s, row_max, row_sum, next_rescale, scale_log2);
  };
  //! [mmas]
  const auto issue_s = [&] {
    issue_qk<Config>(s_acc, smem.sQ[q.index()] + warpgroup * 64 * kPanelBytes<kHeadDim>,
                     smem.sK[kv.index()]);
  };
  const auto issue_o = [&](KvState state, int slice = 0) {
    issue_pv<Config>(pv, p, smem.sV[state.index()], slice);
  };
  // Waits for P V of the previous block and adds it to O, which the same FFMAs rescale.
  const auto await_o = [&] {
#pragma unroll
    for (int slice = 0; slice < Config::kSlices; ++slice) {
      if (slice > 0) issue_o(kv.previous(), slice);
      wgmma_wait<0>(pv);
      add_slice(o, rescale, pv, slice);
    }
    consumer_release(smem.v_empty, kv.previous());
  };
  // Waits for K of this block and reads its scale and that of Q (kept, it would occupy a register),
  // before this warp releases K. Initialises the accumulators while it is another warpgroup's turn.
  const auto wait_k = [&] {
    init_accumulators(s);
    consumer_wait(smem.k_full, kv);
    const float of_q = smem.q_descale[q.index()][ThreadGroups::of_q(first_row())];
    scale_log2 = without_last_bits(shape.softmax_scale * kLog2e * of_q *
                                   smem.k_descale[kv.index()][ThreadGroups::of_k(quad_col())]);
  };
  // Issues (3) S of this key block, then (5) P V of the previous block; waits for S only.
  const auto mmas = [&] {
    wait_k();
    pingpong_wait();
    issue_s();
    consumer_wait(smem.v_full, kv.previous());
    issue_o(kv.previous());
    pingpong_pass_on();
    wgmma_wait<1>(s_acc);  // S complete, P V in flight
    consumer_release(smem.k_empty, kv);
    if (--left == 0) release_q();
  };
  const auto process_kv_block = [&] {
    mmas();
    softmax();
    await_o();
    round_p_e4m3<kBlockN>(p, s);
    rescale[0] = next_rescale[0], rescale[1] = next_rescale[1];
    kv.advance();
  };
  //! [mmas]

  //! [loops]
  if (!next_work_tile()) return;
  // The very first S has no P V to overlap with.
  wait_k();
  pingpong_wait();
  issue_s();
  pingpong_pass_on();
  wgmma_wait<0>(s_acc);
  consumer_release(smem.k_empty, kv);
  if (--left == 0) release_q();
  softmax();
  round_p_e4m3<kBlockN>(p, s);
  kv.advance();
  bool more = true;
  do {
    while (left > 0) process_kv_block();
    // P's scale of 2^kPScale cancels in O / l. It is in l, too: it is taken from lse here.
    const float last_max[2] = {row_max[0] - kPScale, row_max[1] - kPScale};
    float last_sum[2] = {row_sum[0], row_sum[1]};
    // Applied now, so that these factors and those of the next tile are not live together.
    rescale_rows<kHeadDim>(o, rescale);
    rescale[0] = rescale[1] = 1;
    more = next_work_tile();
    if (more) {  // this tile's last P V overlaps with the next tile's first S and softmax
      mmas();
#pragma unroll
      for (int r = 0; r < 2; ++r) row_max[r] = kLowest, row_sum[r] = 0;
      softmax();
    } else {
      consumer_wait(smem.v_full, kv.previous());
      pingpong_wait();
      issue_o(kv.previous());
      pingpong_pass_on();
    }
    await_o();
    round_p_e4m3<kBlockN>(p, s);
    kv.advance();
    const WorkTile& last = smem.work[(q.count - 1) % kWorkRing];  // next_work_tile() has advanced
    store_o<Element, kHeadDim>(gO, gLse, last, kHeadDim, o, last_max, last_sum, gLseShift,
                               gVDescale + last.kv_head * kHeadDim);
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
  Fp8TensorMaps maps;
  if (const Status made = maps.make(args, Config::kBlockM, Config::kBlockN); !made.ok())
    return made;
  BlockLists lists{};
  Arguments pooling = args;  // its k_mean are block means, not the mean that is subtracted
  pooling.bind("k_mean", args.out<float>("k_means"));
  if (const Status chosen = choose_visits<Element, Config>(pooling, rule_of(args.problem), lists);
      !chosen.ok())
    return chosen;
  const int num_sms = args.backend == Backend::gpu ? gpu_info().num_sms : kEmulatedSms;
  args.phase("attention");
  return launch_kernel(attention_kernel<Config>,
                       dim3(std::min<unsigned>(scheduler.count(), num_sms)), dim3(Config::kThreads),
                       sizeof(SharedStorage<Config>), args.stream, maps.q, maps.k, maps.v,
                       Descales(args), args.out<float>("lse_shift"), args.out<float>("v_descale"),
                       params.o, params.lse, lists, shape_of(args.problem), scheduler);
}

template <class Config>
Status launch(const Arguments& args) {
  if (!args.on_tiling)
    if (const Status done = quantise_all<Config::kHeadDim, ThreadGroups>(args); !done.ok())
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

}  // namespace ATTN_BACKEND::s7_int8
