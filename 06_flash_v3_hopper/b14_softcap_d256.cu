// b14_softcap_d256: head dim 256 with softcap.
//
// parent    b16_issue_order
// change    With softcap the warpgroup of the scores passes P (1 - tanh^2) as well as P to the
//           warpgroup of their gradients.
// why       Gemma 2 has a softcap at this head dim. dS needs the derivative of the softcap, and the
//           tanh is in the other warpgroup.
// expect    gpu__time_duration.sum is nearly unchanged without softcap
// supports  fp16, bf16; head dim 256; any lengths, masks, GQA, softcap
// source    Dao-AILab/flash-attention, Flash_bwd_params: softcap
#include <algorithm>

#include "device/device.h"
#include "attn/kernel.h"
#include "kernels/backward_cluster.h"
#include "kernels/backward_features_d256.h"

namespace ATTN_BACKEND::b14_softcap_d256 {
using namespace attn;
using namespace hopper;

// The warpgroups of a block, and its named barriers. kProbabilities: P has been stored; kGradients:
// dS has been stored; kStored: the same, among the threads that store it.
enum Role { kScores = 0, kScoreGradients = 1, kProducer = 2 };
enum NamedBarrier { kProbabilities = 1, kGradients = 2, kStored = 3 };

//! [config]
struct Config {
  static constexpr int kHeadDim = 256, kBlockM = 64;
  static constexpr int kCluster = 2, kKeys = 64, kBlockN = 128;  // blocks; keys of one; of both
  static constexpr int kColumns = kHeadDim / 2;  // of dK and dV per warpgroup; of dQ per block
  static constexpr int kStages = 2;  // of Q; dO has one
  // Of dS. dO of visit i + 1 is released after dQ of visit i is complete, and that stage is loaded
  // again, for visit i + 2, when all warps of both blocks have released it. So dS of visit i + 2 is
  // computed when dS of visit i is no longer read.
  static constexpr int kDsBuffers = 2;
  static constexpr int kThreads = 3 * kWarpgroup, kConsumerThreads = 2 * kWarpgroup;
  static constexpr int kFragments = kBlockM * kHeadDim / 4 / kConsumerThreads;  // of a dQ tile
  static constexpr int kPanel = 64 * 64;                    // elements of 64 rows of 128 bytes
  static constexpr int kPanelBytes = kPanel * 2, kTileBytes = 4 * kPanelBytes;  // 64 x 256
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * 168, "of 65536 in all");
};
//! [config]
// Per thread. Scores: S^T, dP^T, or 64 x 64 of dQ; Gradient: dK or dV, [64, 128]; Fragments: P^T or
// dS^T, rounded.
using Scores = float[8][4];
using Gradient = float[Config::kColumns / 8][4];
using Fragments = uint32_t[4][4];

// Tiles are panels of 64 columns, [d / 64][64 rows, 64], with TMA's 128-byte swizzle.
template <class Element>
struct SharedStorage {
  static constexpr int kPanel = Config::kPanel;
  alignas(1024) Element sK[4 * kPanel];
  alignas(1024) Element sV[4 * kPanel];
  alignas(1024) Element sPeerK[2 * kPanel];  // the other block's keys, this block's columns of dQ
  alignas(1024) Element sQ[Config::kStages][4 * kPanel];
  alignas(1024) Element sdO[4 * kPanel];
  alignas(1024) Element sdS[Config::kDsBuffers][Config::kCluster * kPanel];  // a panel per block
  alignas(16) uint4 sExchange[4][kWarpgroup];  // P or dS: what a thread passes its counterpart
  // With softcap P (1 - tanh^2), passed as P: read before kGradients, written again after it.
  alignas(16) uint4 sCapped[4][kWarpgroup];
  uint4 sTaken[2];  // .x: index of the next key tile, as sent and as received; copied as 16 bytes
  unsigned index;  // of this key tile; guarded by v_full and v_empty
  alignas(128) float sLse[Config::kStages][Config::kBlockM];  // lse / log(2), per row
  alignas(128) float sD[Config::kBlockM];                     // rowsum(dO . O)
  // mbarriers: TMA bytes have landed. Q with lse, dO with D; ds_full: the peer's panel of dS.
  uint64_t k_full, v_full, q_full[Config::kStages], do_full, ds_full[Config::kDsBuffers];
  // mbarriers: all consumer warps of both blocks have released the tile
  uint64_t q_empty[Config::kStages], do_empty;
  uint64_t k_empty, v_empty;  // of this block alone
  uint64_t taken_full, taken_empty;  // sTaken
  ATTN_MEMBERS(SharedStorage, sK, sV, sPeerK, sQ, sdO, sdS, sExchange, sCapped, sTaken, index, sLse,
               sD, k_full, v_full, q_full, do_full, ds_full, q_empty, do_empty, k_empty, v_empty,
               taken_full, taken_empty)
};

// Dynamic persistent, as in b4: sections of KV heads in turn, within a section longest tiles first.
// The unit is a cluster: its first block takes the next key tile, of 128 keys, from the counter.
struct KeyTileScheduler {
  unsigned num_n_blocks, num_kv_heads, section;
  unsigned* counter;
  KeyTileScheduler(const Problem& p, unsigned* tile_counter, const Machine& machine)
      : num_n_blocks(static_cast<unsigned>(ceil_div(p.seqlen_k, Config::kBlockN))),
        num_kv_heads(static_cast<unsigned>(p.batch * p.kv_heads)), counter(tile_counter) {
    const auto section_bytes = static_cast<int64_t>(machine.l2_bytes * 8 / 15);
    const int64_t heads = num_kv_heads, head_bytes = p.group() * p.seqlen_q * p.head_dim * 8;
    const int64_t sections = ceil_div(heads, std::max<int64_t>(1, section_bytes / head_bytes));
    section = static_cast<unsigned>(ceil_div(heads, sections));
  }
  __host__ __device__ unsigned count() const { return num_n_blocks * num_kv_heads; }
  __device__ unsigned first() const { return blockIdx.x / Config::kCluster; }
  __device__ unsigned next() const {
    return gridDim.x / Config::kCluster + atomicAdd(counter, 1u);
  }
  __device__ KeyTile at(unsigned index, const Shape& shape) const {
    const unsigned first_head = index / (section * num_n_blocks) * section;
    const unsigned heads = min(section, num_kv_heads - first_head);
    const unsigned in_section = index - first_head * num_n_blocks;
    return key_tile_of<Config>(shape, static_cast<int>(first_head + in_section % heads),
                               static_cast<int>(in_section / heads));
  }
};

// S^T = K Q^T, or dP^T = V dO^T: [64 keys, 64 rows], both K-major. Issues only; does not wait.
template <class Element>
__device__ __forceinline__ void issue_scores(Scores& s, const Element* sKeys,
                                             const Element* sRows) {
  const SmemDescriptor keys = smem_descriptor(sKeys), rows = smem_descriptor(sRows);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kHeadDim / 16; ++i) {
    const int at = i / 4 * Config::kPanelBytes + i % 4 * 32;
    wgmma<Element, false>(s, keys + at, rows + at, i > 0);
  }
  wgmma_commit();
}
// dV += P^T dO, or dK += dS^T Q, 128 columns from the panel `sRows` on: A from registers. Issues
// only.
template <class Element>
__device__ __forceinline__ void issue_gradient(Gradient& grad, const Fragments& a,
                                               const Element* sRows) {
  const SmemDescriptor rows = smem_descriptor(sRows, Config::kPanelBytes);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kBlockM / 16; ++i)  // 16 query rows are 16 rows of 128 bytes
    wgmma<Element, true>(grad, a[i], rows + 16 * 128 * i, true);
  wgmma_commit();
}
// 64 columns of dQ = dS K over the 64 keys of one block: a panel of dS, K-major, and of K,
// MN-major. Issues only.
template <class Element>
__device__ __forceinline__ void issue_dq(Scores& dq, const Element* sdS, const Element* sK,
                                         bool accumulate) {
  const SmemDescriptor ds = smem_descriptor(sdS), k = smem_descriptor(sK);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kKeys / 16; ++i)
    wgmma<Element, true>(dq, ds + 32 * i, k + 16 * 128 * i, accumulate || i > 0);
  wgmma_commit();
}

// S^T becomes P^T = exp(scale S^T - lse). `sLse`: at this lane's first row.
__device__ __forceinline__ void probabilities(Scores& s, const float* sLse,
                                              float softmax_scale_log2) {
#pragma unroll
  for (int n = 0; n < Config::kBlockM / 8; ++n) {
    const float2 lse_log2 = *reinterpret_cast<const float2*>(sLse + 8 * n);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      s[n][i] = exp2f(fmaf(s[n][i], softmax_scale_log2, i % 2 == 0 ? -lse_log2.x : -lse_log2.y));
  }
}
// dP^T becomes dS^T = P^T (dP^T - D), with the rounded P, or with P (1 - tanh^2). `sD`: at this
// lane's first row.
template <class Element>
__device__ __forceinline__ void score_gradients(Scores& dp, const Fragments& p, const float* sD) {
#pragma unroll
  for (int n = 0; n < Config::kBlockM / 8; ++n) {
    const float2 d = *reinterpret_cast<const float2*>(sD + 8 * n);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      dp[n][i] = unpack<Element>(p[n / 2][n % 2 * 2 + i / 2], i % 2) *
                 (dp[n][i] - (i % 2 == 0 ? d.x : d.y));
  }
}
// Stores dS^T transposed, [64 rows, 64 keys], as in b1.
template <class Element>
__device__ __forceinline__ void store_ds(Element* sdS, const Fragments& ds) {
  const int lane_id = thread_index() % kWarp, warp_id = thread_index() / kWarp;
  const int row = lane_id / 16 * 8 + lane_id % 8, chunk = warp_id % 4 * 2 + lane_id / 8 % 2;
  Element* const to = sdS + row * 64 + (chunk ^ row % 8) * 8;
#pragma unroll
  for (int i = 0; i < Config::kBlockM / 16; ++i) stmatrix_x4_trans(to + 16 * 64 * i, ds[i]);
}

// One thread. Each block loads half of the columns of Q and dO, for both: its barrier counts the
// bytes of both halves. Corner of a box: column in the panel, row, panel, head.
//! [producer]
template <class Element>
__device__ __forceinline__ void produce(SharedStorage<Element>& smem, const TensorMap& mapQ,
                                        const TensorMap& mapdO, const TensorMap& mapK,
                                        const TensorMap& mapV, const TensorMap& mapRows,
                                        const Shape& shape, const KeyTileScheduler& scheduler,
                                        int rank, int num_m_blocks) {
  constexpr int kPanel = Config::kPanel, kRowsBytes = Config::kTileBytes + 4 * Config::kBlockM;
  PipelineState<Config::kStages> rows;
  PipelineState<1> gradients, kv;  // of dO; of key tiles, and of their indices
  unsigned index = scheduler.first();
  for (; index < scheduler.count(); kv.advance()) {
    const KeyTile work = scheduler.at(index, shape);
    const int key0 = work.key0 + rank * Config::kKeys, kv_head = work.kv_head;
    const int end = rows.count + count_visits(work);
    // Taken here, so that the wait for the previous tile hides the latency of the counter.
    const unsigned next = rank == 0 ? scheduler.next() : 0;
    mbarrier_wait(&smem.v_empty, kv.phase() ^ 1);  // under the last visit of the tile before
    smem.index = index;
    mbarrier_arrive_expect_tx(&smem.v_full, Config::kTileBytes);
    for (int half = 0; half < 2; ++half)
      tma_load(smem.sV + 2 * half * kPanel, mapV, &smem.v_full, {0, key0, 2 * half, kv_head});
    mbarrier_wait(&smem.k_empty, kv.phase() ^ 1);
    mbarrier_arrive_expect_tx(&smem.k_full, Config::kTileBytes + Config::kTileBytes / 2);
    for (int half = 0; half < 2; ++half)
      tma_load(smem.sK + 2 * half * kPanel, mapK, &smem.k_full, {0, key0, 2 * half, kv_head});
    tma_load(smem.sPeerK, mapK, &smem.k_full, {0, key0 ^ Config::kKeys, 2 * rank, kv_head});
    index = share_next(smem, next, rank, kv.phase());
#pragma unroll 1  // few registers
    for (Visit visit(work); rows.count < end;
         visit.advance(work), rows.advance(), gradients.advance()) {
      const int stage = rows.index(), head = visit.head;
      const int row0 = visit.m_block * Config::kBlockM, tile = head * num_m_blocks + visit.m_block;
      mbarrier_wait(&smem.q_empty[stage], rows.phase() ^ 1);
      mbarrier_arrive_expect_tx(&smem.q_full[stage], kRowsBytes);
      tma_load_multicast(smem.sQ[stage] + 2 * rank * kPanel, mapQ, &smem.q_full[stage],
                         {0, row0, 2 * rank, head}, 0b11);
      tma_load(smem.sLse[stage], mapRows, &smem.q_full[stage], {0, 0, tile});
      mbarrier_wait(&smem.do_empty, gradients.phase() ^ 1);
      mbarrier_arrive_expect_tx(&smem.do_full, kRowsBytes);
      tma_load_multicast(smem.sdO + 2 * rank * kPanel, mapdO, &smem.do_full,
                         {0, row0, 2 * rank, head}, 0b11);
      tma_load(smem.sD, mapRows, &smem.do_full, {0, 1, tile});
    }
  }
  mbarrier_wait(&smem.v_empty, kv.phase() ^ 1);
  smem.index = index;
  mbarrier_arrive(&smem.v_full);  // end of work
}
//! [producer]

template <class Element>
__device__ __forceinline__ void init_barriers(SharedStorage<Element>& smem) {
  constexpr int kWarps = Config::kCluster * Config::kConsumerThreads / kWarp;
  mbarrier_init(&smem.k_full, 1), mbarrier_init(&smem.k_empty, kWarps / 2);
  mbarrier_init(&smem.v_full, 1), mbarrier_init(&smem.v_empty, kWarps / 2);
  mbarrier_init(&smem.do_full, 1), mbarrier_init(&smem.do_empty, kWarps);
  mbarrier_init(&smem.taken_full, 1), mbarrier_init(&smem.taken_empty, 1);
  for (int i = 0; i < Config::kStages; ++i)
    mbarrier_init(&smem.q_full[i], 1), mbarrier_init(&smem.q_empty[i], kWarps),
        mbarrier_init(&smem.ds_full[i], 1);
  mbarrier_init_fence();
}

template <class Element, bool kSoftcap>
__global__ void __launch_bounds__(Config::kThreads, 1) attention_backward_kernel(
    const __grid_constant__ TensorMap mapQ,     // [B Hq, d / 64, seqlen_q, 64]
    const __grid_constant__ TensorMap mapdO,    // as Q
    const __grid_constant__ TensorMap mapK,     // [B Hkv, d / 64, seqlen_k, 64]
    const __grid_constant__ TensorMap mapV,     // as K
    const __grid_constant__ TensorMap mapRows,  // [tiles, 2, kBlockM floats]: lse, D
    Element* __restrict__ gdK,                  // [B, Hkv, seqlen_k, d]
    Element* __restrict__ gdV,                  // as dK
    float4* gAccum,                             // [tiles, blocks, kFragments / 2, threads]: dQ
    Shape shape, KeyTileScheduler scheduler, int num_m_blocks) {
  constexpr int kPanel = Config::kPanel, kBlockM = Config::kBlockM;
  auto& smem = dynamic_shared<SharedStorage<Element>>();
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const int rank = cluster_rank();
  if (threadIdx.x == 0) init_barriers(smem);
  cluster_sync();            // the barriers of both blocks are initialised
  wait_for_launch_before();  // lse, D, cleared accumulators of dot_kernel; visible to TMA, too
  launch_dependents();       // convert_kernel may start: it waits for the end of this kernel

  if (warpgroup == kProducer) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x % kWarpgroup == 0)
      produce<Element>(smem, mapQ, mapdO, mapK, mapV, mapRows, shape, scheduler, rank,
                       num_m_blocks);
    __syncwarp();
    cluster_sync();
    return;
  }
  setmaxnreg_inc<Config::kConsumerRegisters>();

  // Factor still to be applied to scores, including log2(e).
  const float softmax_scale_log2 = (kSoftcap ? shape.softcap : shape.softmax_scale) * kLog2e;
  const int columns = 2 * warpgroup * kPanel;  // this warpgroup's half of a tile: two panels
  Gradient dk = {}, dv = {};
  Fragments p, ds;
  int visit = 0;  // counts through all key tiles: its parities are those of the barriers
  PipelineState<1> kv;
  const auto release = [&](uint64_t* empty) {  // one arrival per warp, at both blocks
    __syncwarp();
    if (const int lane_id = thread_index() % kWarp; lane_id < Config::kCluster)
      mbarrier_release_cluster(cluster_address(empty, lane_id));
  };
  const auto release_keys = [&](uint64_t* empty) {  // at this block
    __syncwarp();
    if (thread_index() % kWarp == 0) mbarrier_arrive(empty);
  };
  // dQ over the keys of this block, then over those of the other, whose dS is copied here.
  const auto issue_dq_of = [&](Scores& dq, PipelineState<Config::kDsBuffers> here) {
    const Element* const sdS = smem.sdS[here.index()];
    issue_dq(dq, sdS + rank * kPanel, smem.sK + (2 * rank + warpgroup) * kPanel, false);
    mbarrier_wait(&smem.ds_full[here.index()], here.phase());
    issue_dq(dq, sdS + (1 - rank) * kPanel, smem.sPeerK + warpgroup * kPanel, true);
  };
  const auto add_dq = [&](const Scores& dq, const Visit& at) {
    float4* const accum = gAccum + ((int64_t{at.head} * num_m_blocks + at.m_block) * 2 + rank) *
                                       (8 * Config::kConsumerThreads);
#pragma unroll
    for (int f = 0; f < 8; ++f)
      reduce_add(accum + f * Config::kConsumerThreads + thread_index(),
                 make_float4(dq[f][0], dq[f][1], dq[f][2], dq[f][3]));
  };

  // One key tile of the warpgroup that has the scores.
  //! [scores]
  const auto process_scores = [&](const KeyTile& work) {
    Visit at(work), added(work);
    const int key0 = work.key0 + rank * Config::kKeys, end = visit + count_visits(work);
    // S^T becomes P^T, for dV in registers, and for the other warpgroup. The fence: lse before TMA
    // overwrites it.
    const auto softmax = [&](Scores& s, int stage) {
      if constexpr (kSoftcap) tanh_scores<Config>(s, shape.softmax_scale / shape.softcap);
      if (at.m_block < work.q_range.unmasked_begin || at.m_block >= work.q_range.unmasked_end)
        apply_mask<Config>(s, shape, at.m_block * kBlockM + shape.seqlen_k - shape.seqlen_q, key0);
      const float* const lse = smem.sLse[stage] + quad_col();
      if constexpr (kSoftcap) {
        Fragments capped;
        capped_probabilities<Element, Config>(s, capped, lse, softmax_scale_log2);
        store_fragments(smem.sCapped, capped);
      } else {
        probabilities(s, lse, softmax_scale_log2);
      }
      round_p<Element, kBlockM>(p, s);
      store_fragments(smem.sExchange, p);
      named_barrier_arrive(kProbabilities, Config::kConsumerThreads);
      fence_proxy_async();
    };
    // P of this visit is in registers. dQ of the visit before is computed here: by now dS of the
    // other block has usually arrived. S of the next visit is issued after dQ and dV: a wait for
    // its Q, whose stage was released at the end of the visit before, delays neither. Its
    // exponentials overlap with dK.
    const auto process_visit = [&](auto first, auto more) {
      const PipelineState<2> here{visit}, next{visit + 1};  // stage of Q, buffer of dS
      Scores s, dq;
      if constexpr (!first) issue_dq_of(dq, PipelineState<2>{visit - 1});
      mbarrier_wait(&smem.do_full, visit % 2);
      issue_gradient(dv, p, smem.sdO + columns);
      if constexpr (!first) wgmma_wait<1>(dq);
      wgmma_wait<0>(dv);
      release(&smem.do_empty);
      if constexpr (more) {
        mbarrier_wait(&smem.q_full[next.index()], next.phase());
        issue_scores(s, smem.sK, smem.sQ[next.index()]);
      }
      if constexpr (!first) {
        add_dq(dq, added);
        added.advance(work);
      }
      if (thread_index() == 0)
        mbarrier_arrive_expect_tx(&smem.ds_full[here.index()], Config::kPanelBytes);
      named_barrier_sync(kGradients, Config::kConsumerThreads);
      load_fragments(ds, smem.sExchange);
      issue_gradient(dk, ds, smem.sQ[here.index()] + columns);
      if constexpr (more) {
        at.advance(work);
        wgmma_wait<1>(s);
        softmax(s, next.index());
      }
      wgmma_wait<0>(dk);
      release(&smem.q_empty[here.index()]);
      ++visit;
    };
    release_keys(&smem.v_empty);  // this warpgroup reads only the index
    mbarrier_wait(&smem.k_full, kv.phase());
    const PipelineState<2> first{visit};
    Scores s;
    mbarrier_wait(&smem.q_full[first.index()], first.phase());
    issue_scores(s, smem.sK, smem.sQ[first.index()]);
    wgmma_wait<0>(s);
    softmax(s, first.index());
    if (visit + 1 < end) {
      process_visit(std::true_type{}, std::true_type{});
      while (visit + 1 < end) process_visit(std::false_type{}, std::true_type{});
      process_visit(std::false_type{}, std::false_type{});
    } else {
      process_visit(std::true_type{}, std::false_type{});
    }
    Scores dq;
    issue_dq_of(dq, PipelineState<2>{visit - 1});
    wgmma_wait<0>(dq);
    release_keys(&smem.k_empty);
    add_dq(dq, added);
  };
  //! [scores]
  // One key tile of the warpgroup that has their gradients. dP of a visit is in registers. dS goes
  // to the other warpgroup, and as rows of queries to both blocks. The additions to dQ overlap dP
  // of the next visit.
  //! [gradients]
  const auto process_gradients = [&](const KeyTile& work) {
    Visit at(work);
    const int end = visit + count_visits(work);
    Scores s;  // dP^T, then dS^T
    const auto process_visit = [&](auto more) {
      const PipelineState<2> here{visit};
      Scores dq;
      Element* const panel = smem.sdS[here.index()] + rank * kPanel;
      named_barrier_sync(kProbabilities, Config::kConsumerThreads);
      load_fragments(p, smem.sExchange);
      issue_gradient(dv, p, smem.sdO + columns);
      Fragments capped;
      if constexpr (kSoftcap) load_fragments(capped, smem.sCapped);
      score_gradients<Element>(s, kSoftcap ? capped : p, smem.sD + quad_col());
      round_p<Element, kBlockM>(ds, s);
      store_fragments(smem.sExchange, ds);
      store_ds(panel, ds);  // a free buffer: see kDsBuffers
      fence_proxy_async();  // dS before wgmma and the copy read it; D before TMA overwrites it
      named_barrier_arrive(kGradients, Config::kConsumerThreads);
      named_barrier_sync(kStored, kWarpgroup);
      if (thread_index() % kWarpgroup == 0)
        bulk_copy_to_cluster(panel, panel, Config::kPanelBytes, &smem.ds_full[here.index()],
                             1 - rank);
      wgmma_wait<0>(dv);
      release(&smem.do_empty);
      mbarrier_wait(&smem.q_full[here.index()], here.phase());
      issue_gradient(dk, ds, smem.sQ[here.index()] + columns);
      issue_dq_of(dq, here);
      wgmma_wait<1>(dk);
      release(&smem.q_empty[here.index()]);
      if constexpr (more) {
        mbarrier_wait(&smem.do_full, (visit + 1) % 2);
        issue_scores(s, smem.sV, smem.sdO);
      }
      wgmma_wait<more>(dq);
      if constexpr (!more) release_keys(&smem.k_empty);
      add_dq(dq, at);
      at.advance(work);
      if constexpr (more) wgmma_wait<0>(s);
      ++visit;
    };
    mbarrier_wait(&smem.do_full, visit % 2);
    issue_scores(s, smem.sV, smem.sdO);
    wgmma_wait<0>(s);
    mbarrier_wait(&smem.k_full, kv.phase());
    while (visit + 1 < end) process_visit(std::true_type{});
    release_keys(&smem.v_empty);  // dP of the last visit is complete
    process_visit(std::false_type{});
  };
  //! [gradients]

  const auto process_key_tiles = [&](auto process) {
    for (;; kv.advance()) {
      mbarrier_wait(&smem.v_full, kv.phase());
      const unsigned index = smem.index;
      if (index >= scheduler.count()) return;
      const KeyTile work = scheduler.at(index, shape);
      if (count_visits(work) > 0) {
        process(work);
      } else {
        mbarrier_wait(&smem.k_full, kv.phase());
        release_keys(&smem.v_empty), release_keys(&smem.k_empty);
      }
      // Store dK and dV: zeros if these keys are visible to no row.
      const int key = work.key0 + rank * Config::kKeys + first_row() % 64;
      const int keys = shape.seqlen_k - key;
      const int64_t first = (int64_t{work.kv_head} * shape.seqlen_k + key) * Config::kHeadDim +
                            warpgroup * Config::kColumns;
      store_gradient(gdK + first, Config::kHeadDim, keys, dk, shape.softmax_scale);
      store_gradient(gdV + first, Config::kHeadDim, keys, dv, 1);
#pragma unroll
      for (int n = 0; n < Config::kColumns / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) dk[n][i] = dv[n][i] = 0;
    }
  };
  warpgroup == kScores ? process_key_tiles(process_scores) : process_key_tiles(process_gradients);
  cluster_sync();  // the other block's arrivals and copies are complete
}

template <class Element, bool kSoftcap>
Status launch(const Arguments& args) {
  const BackwardParams<Element> params(args);
  const Problem& p = args.problem;
  const Shape shape = shape_of(p);
  const int num_m_blocks = static_cast<int>(ceil_div(p.seqlen_q, Config::kBlockM));
  const int64_t tiles = num_m_blocks * p.batch * p.heads;
  const Machine machine = args.backend == Backend::gpu ? this_machine() : Machine{2 * kEmulatedSms};
  const KeyTileScheduler scheduler(p, args.out<unsigned>("tile_counter"), machine);
  const unsigned units = std::min<unsigned>(scheduler.count(), machine.num_sms / Config::kCluster);
  float4* const accum = args.out<float4>("accum");
  TensorMap q, dout, k, v, rows;
  for (const Status& made :
       {map_of_half(q, params.q, p, p.heads, p.seqlen_q),
        map_of_half(dout, params.dout, p, p.heads, p.seqlen_q),
        map_of_half(k, params.k, p, p.kv_heads, p.seqlen_k),
        map_of_half(v, params.v, p, p.kv_heads, p.seqlen_k),
        make_tensor_map<3>(rows, args.in<__half>("rows"), {2 * Config::kBlockM, 2, tiles},
                           {4 * Config::kBlockM, 8 * Config::kBlockM}, {2 * Config::kBlockM, 1, 1},
                           Swizzle::kNone)})
    if (!made.ok()) return made;
  args.phase("dot");
  Status status =
      launch_kernel(dot_kernel<Element, Config, true>, dim3(static_cast<unsigned>(tiles)),
                    dim3(256), 0, args.stream, params.o, params.dout, params.lse,
                    args.out<float>("rows"), accum, scheduler.counter, shape, num_m_blocks);
  if (!status.ok()) return status;
  args.phase("attention_backward");
  status = launch_kernel({.cluster = Config::kCluster, .dependent = true},
                         attention_backward_kernel<Element, kSoftcap>,
                         dim3(Config::kCluster * units), dim3(Config::kThreads),
                         sizeof(SharedStorage<Element>), args.stream, q, dout, k, v, rows,
                         params.dk, params.dv, accum, shape, scheduler, num_m_blocks);
  if (!status.ok()) return status;
  args.phase("convert");
  return launch_kernel({.dependent = true}, convert_halves_kernel<Element, Config>,
                       dim3(static_cast<unsigned>(2 * tiles)), dim3(Config::kConsumerThreads), 0,
                       args.stream, args.in<float4>("accum"), params.dq, shape, num_m_blocks);
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    return args.problem.softcap > 0 ? launch<Element, true>(args) : launch<Element, false>(args);
  });
}

}  // namespace ATTN_BACKEND::b14_softcap_d256
