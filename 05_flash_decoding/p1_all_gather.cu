// p1_all_gather: each rank gathers all K and V, then computes its own queries.
//
// parent    06_flash_v3_hopper/v14_tuned
// change    The tokens of a sequence are sharded over ranks. A rank sends its K and V to all others
//           and launches one kernel: that of chapter 06 on packed shards. Its epilogue can merge O
//           and lse with fp32 accumulators, which the next steps need.
// why       Simplest form of context parallelism: 1 / ranks of the compute per rank. But each rank
//           needs the memory of all K and V, no transfer overlaps with computation, and under a
//           causal mask the last rank has most of the work.
// expect    time: transfer + compute of the last rank
// supports  fp16, bf16; head dims 64, 128, 256; any lengths, causal, windows, GQA
// source    "Context parallelism" of Megatron-LM and TransformerEngine (all_gather)
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
#include "kernels/shard_attention.h"

namespace ATTN_BACKEND::p1_all_gather {
using namespace attn;
using namespace hopper;
using namespace ranks;
using namespace attn::ranks;

constexpr float kRescaleThreshold = 8;  // log2 units: P <= 2^8
constexpr int kPrefetchBlocks = 4;  // the next tile is taken this many key blocks before the end
// Ring of query tiles. Up to five are in use: the one whose O is being stored, the current one, two
// whose Q is loaded or loading, and the one whose WorkTile is being written.
constexpr int kWorkRing = 8;

// Named barriers. 0 is used by __syncthreads; kPingPong + w lets warpgroup w issue its MMAs.
enum NamedBarrier { kBlock = 0, kPingPong = 1 };

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
template <int kHeadDim>
struct Config;
template <>
struct Config<64> : Tuned<64, Tuning{.num_consumers = 3, .block_n = 128}> {};
template <>
struct Config<128> : Tuned<128, Tuning{.block_n = 128}> {};
template <>
struct Config<256> : Tuned<256, Tuning{.block_n = 64, .q_stages = 1, .pingpong = false}> {};

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
  ATTN_MEMBERS(SharedStorage, sQ, sK, sV, q_full, k_full, v_full, q_empty, k_empty, v_empty,
               work_full, prefetch, work)
};

using TileScheduler = DynamicPersistent;

// (3) S = Q K^T for the 64 rows of this warpgroup, both K-major (the `false`). Issues only; does
// not wait. `q + n`: n bytes further. The first wgmma overwrites s, the others add to it.
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

// (5) O += P V: P from registers, V MN-major, [k, d]. Issues only; does not wait. The descriptor's
// second argument: bytes from panel to panel.
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

// (4) Online softmax in fp32, within the quad of lanes that share a row: S becomes P. Returns
// whether O must be multiplied by `rescale`: with lazy rescale, only if a maximum has grown by more
// than the threshold.
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

// Q producer: takes query tiles and (1) loads Q_i. It takes the next tile kPrefetchBlocks key
// blocks before the current one ends: in time to load Q; no earlier, because an idle SM may need
// the tile. Corner of a box: column in the panel, row, panel, head.
template <class Element, class Config>
__device__ __forceinline__ void produce_q(SharedStorage<Element, Config>& smem,
                                          const TensorMap& mapQ, const Shape& shape,
                                          const TileScheduler& scheduler) {
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

// K/V producer: another thread loads K_j and V_j into empty stages.
template <class Element, class Config>
__device__ __forceinline__ void produce_kv(SharedStorage<Element, Config>& smem,
                                           const TensorMap& mapK, const TensorMap& mapV) {
  constexpr int kBlockN = Config::kBlockN, kTileBytes = kBlockN * Config::kHeadDim * 2;
  PipelineState<Config::kStages> kv;
  for (PipelineState<2> ring;; ring.advance()) {
    mbarrier_wait(&smem.work_full[ring.index()], ring.phase());
    const WorkTile& work = smem.work[ring.count % kWorkRing];
    if (work.row0 < 0) break;
    for (int n_block = work.kv_range.begin; n_block < work.kv_range.end; ++n_block, kv.advance()) {
      if (n_block == max(work.kv_range.begin, work.kv_range.end - kPrefetchBlocks))
        mbarrier_arrive(&smem.prefetch);
      const auto load = [&](Element* tile, const TensorMap& map, uint64_t* full, uint64_t* empty) {
        mbarrier_wait(empty, kv.phase() ^ 1);  // passes at once the first time
        mbarrier_arrive_expect_tx(full, kTileBytes);
        tma_load(tile, map, full, {0, n_block * kBlockN, 0, work.kv_head});
      };
      const int stage = kv.index();
      load(smem.sK[stage], mapK, &smem.k_full[stage], &smem.k_empty[stage]);
      load(smem.sV[stage], mapV, &smem.v_full[stage], &smem.v_empty[stage]);
    }
  }
}

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
    attention_kernel(const __grid_constant__ TensorMap mapQ,  // [Hq, d / 64, rows, 64]
                     const __grid_constant__ TensorMap mapK,  // [Hkv, d / 64, keys, 64]
                     const __grid_constant__ TensorMap mapV,  // as K
                     Accumulators<Element> accumulators,      // of the rows of the block
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
    if (threadIdx.x % kWarpgroup == 0) produce_q<Element, Config>(smem, mapQ, shape, scheduler);
    if (threadIdx.x % kWarpgroup == kWarp) produce_kv<Element, Config>(smem, mapK, mapV);
    return;
  }
  setmaxnreg_inc<Config::kConsumerRegisters>();

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

  // q: pipeline state of the current Q tile; the others describe that tile.
  PipelineState<Config::kQStages> q{-1};
  int row0 = 0, last_key = 0;
  KvBlockRange kv_range{};
  const auto next_work_tile = [&] {
    q.advance();
    mbarrier_wait(&smem.q_full[q.index()], q.phase());
    const WorkTile& work = smem.work[q.count % kWorkRing];
    row0 = work.row0 + work.seqlen_k - work.seqlen_q;  // key on the diagonal of row work.row0
    last_key = work.seqlen_k - 1;
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
  // Softmax of one key block. `masked` is a type, so the unmasked body contains no mask code.
  const auto softmax = [&](int n_block, auto masked) {
    if constexpr (masked.value) apply_mask<Config>(s, shape, kv_range, n_block, row0, last_key);
    rescaled = online_softmax<Config>(s, row_max, row_sum, rescale, softmax_scale_log2);
  };
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
    // Left window edge; unmasked blocks; diagonal, right window edge, sequence end.
    for (; n_block < kv_range.unmasked_begin; ++n_block)
      process_kv_block(n_block, std::true_type{});
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
    accumulate_o<Element, kHeadDim>(accumulators, last, shape.heads, o, last_max, last_sum);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0;
  } while (more);
}

//! [attend]
// Launches one block: queries of this rank, keys of any. `args.problem` is of the block.
template <class Element, class Config>
Status attend_in(const Arguments& args, const Accumulation& rows, int transfer_sms) {
  const Problem& p = args.problem;
  TileScheduler scheduler(p, Config::kBlockM);
  scheduler.counter = args.out<unsigned>("tile_counter");
  TensorMap q, k, v;
  for (const Status& made :
       {map_of(q, args.in<Element>("q"), p, p.heads, p.seqlen_q, Config::kBlockM),
        map_of(k, args.in<Element>("k"), p, p.kv_heads, p.seqlen_k, Config::kBlockN),
        map_of(v, args.in<Element>("v"), p, p.kv_heads, p.seqlen_k, Config::kBlockN)})
    if (!made.ok()) return made;
  const int num_sms =
      args.backend == Backend::gpu ? gpu_info().num_sms - transfer_sms : kEmulatedSms;
  const Accumulators<Element> accumulators{args.out<Element>("o"), args.out<float>("o_acc"),
                                           args.out<float>("lse"), rows};
  return launch_kernel(attention_kernel<Element, Config>,
                       dim3(std::min<unsigned>(scheduler.count(), num_sms)), dim3(Config::kThreads),
                       sizeof(SharedStorage<Element, Config>), args.stream, q, k, v, accumulators,
                       shape_of(p), scheduler);
}
Status attend(const Arguments& args, const Accumulation& rows, int transfer_sms) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    switch (args.problem.head_dim) {
      case 64: return attend_in<Element, Config<64>>(args, rows, transfer_sms);
      case 128: return attend_in<Element, Config<128>>(args, rows, transfer_sms);
      case 256: return attend_in<Element, Config<256>>(args, rows, transfer_sms);
    }
    return Status::unsupported("only head dims 64, 128 and 256");
  });
}
//! [attend]

// All keys, in the order of the sequence: K and V of every rank are received where they belong.
//! [gather]
Sharding gathered(const Sharding& sharding) {
  Sharding all = sharding;
  all.k.assign(all.k.size(), {Part{0, sharding.whole.seqlen_k}});
  return all;
}
void prepare(const ForwardShard& s) {
  s.rank.allocate("all_kv", gathered(s.sharding).kv_bytes(0));
  allocate_accumulators(s);
}
void run(const ForwardShard& s) {
  const Sharding all = gathered(s.sharding);
  const int64_t row = all.k_row_bytes(), own_rows = s.sharding.rows_k(s.rank.index());
  std::byte* const own = bytes_at(s.rank, "kv");
  std::byte* const whole = bytes_at(s.rank, "all_kv");
  std::vector<Message> messages;
  for (int peer = 0; peer < s.rank.world(); ++peer) {
    const Part theirs = s.sharding.k[static_cast<std::size_t>(peer)].front();
    for (int64_t b = 0; b < 2 * all.whole.batch; ++b) {  // sequences of K, then of V
      messages.push_back(send_to(peer, own + b * own_rows * row, own_rows * row));
      messages.push_back(receive_from(peer, whole + (b * all.whole.seqlen_k + theirs.first) * row,
                                      theirs.count * row));
    }
  }
  s.rank.wait(s.rank.exchange("all-gather", messages));
  ShardAttention attention({all, s.rank}, {s.rank.index()}, attend);
  attention.begin();
  attention.multiply(0, whole);
  attention.end();
}
//! [gather]

Status launch(const Arguments& args) {
  return run_forward(args, TokenOrder::contiguous, {prepare, run});
}

}  // namespace ATTN_BACKEND::p1_all_gather
