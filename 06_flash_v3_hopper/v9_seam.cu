// v9_seam: from one tile of queries to the next one without a stop.
//
// parent    v8_next_query
// idea      A tile of v8 begins with an S that nothing runs beside, and ends with a P V that no softmax runs beside.
//           Now the first S of the next tile runs beside the last P V of this one, as within a tile: the loop goes on.
//           Its Q is there already, where there are two places. The two tiles have maxima and sums of their own; O is
//           stored when the last P V is done, and is set to 0. In a loop like this the compiler needs help to see that
//           addresses of tiles are the same in all lanes: the number of the warpgroup comes from lane 0.
// expect    gpu__time_duration.sum: most at short lengths, as of v5; fewer instructions (sm__inst_executed.sum)
// supports  fp16, bf16; head dims 64, 128, 256; any lengths, masks, GQA
#include <algorithm>

#include "device/device.h"
#include "attn/kernel.h"
#include "ptx/mbarrier.h"
#include "ptx/mma.h"
#include "ptx/named_barrier.h"
#include "ptx/setmaxnreg.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"

namespace ATTN_BACKEND::v9_seam {
using namespace attn;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);  // warpgroups; the last one copies
  static constexpr int kStages = 2, kQueries = kHeadDim <= 128 ? 2 : 1;    // tiles in shared memory: K and V; Q
  static constexpr int kBlockM = 64 * kConsumers, kBlockN = kHeadDim == 256 ? 64 : 128;  // B_r, B_c
};

// Stands for -inf where nothing was seen. It is finite, so that differences are numbers.
constexpr float kNothing = -3.4028234e38f;

// The newest tiles of queries: up to five are in use, from the one that O is stored of to the one that is taken next.
constexpr int kRing = 8;

// Blocks of keys: some row of [row0, row0 + rows) sees something of [begin, end), and every row sees all of
// [plain_begin, plain_end).
//! [ranges]
struct BlockRanges {
  int begin, plain_begin, plain_end, end;
};
__device__ BlockRanges blocks_seen(const Shape& shape, int row0, int rows, int block_n) {
  const int last = min(row0 + rows, shape.seqlen_q) - 1, shift = shape.seqlen_k - shape.seqlen_q;
  const int begin = max(0, row0 + shift - shape.window_left);
  const int end = min(shape.seqlen_k, last + shift + shape.window_right + 1);
  if (end <= begin) return {0, 0, 0, 1};  // O = 0 and lse = -inf for all: one tile that is masked as a whole
  const int all_begin = max(0, last + shift - shape.window_left);  // what the last row sees first ...
  const int all_end = min(shape.seqlen_k, row0 + shift + shape.window_right + 1);  // ... and the first row last
  BlockRanges seen{begin / block_n, ceil_div(all_begin, block_n), all_end / block_n, ceil_div(end, block_n)};
  seen.plain_begin = min(seen.plain_begin, seen.end);
  seen.plain_end = max(seen.plain_begin, seen.plain_end);
  return seen;
}
//! [ranges]

// What a block works on: a tile of queries, and the blocks of keys that it sees.
struct Work {
  int bh, row0;  // its head, counted through the batch, and its first row; -1: there is no more
  BlockRanges seen;
};

// Tiles are panels of 64 columns, [d / 64][rows, 64], with TMA's swizzle of 128 bytes.
template <class Element, class Config>
struct SharedStorage {
  alignas(1024) Element sQ[Config::kQueries][Config::kBlockM * Config::kHeadDim];
  alignas(1024) Element sK[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(1024) Element sV[Config::kStages][Config::kBlockN * Config::kHeadDim];
  // mbarriers: the bytes are there, and all consumers are done with them.
  uint64_t q_full[Config::kQueries], k_full[Config::kStages], v_full[Config::kStages];
  uint64_t q_empty[Config::kQueries], k_empty[Config::kStages], v_empty[Config::kStages];
  uint64_t work_full[2], ask;  // mbarriers too: there is work; soon there will be none
  Work work[kRing];
  ATTN_MEMBERS(SharedStorage, sQ, sK, sV, q_full, k_full, v_full, q_empty, k_empty, v_empty,
               work_full, ask, work)
};

// Tiles of queries in the order in which blocks take them: heads come in sections; in one, tiles with the most keys
// first, those of all its heads. A block begins with the one of its own number. The next ones come from a queue, so
// that a block with short tiles gets more of them.
//! [tiles]
struct Tiles {
  int num_m_blocks, num_heads, section;
  template <int kBlockM>
  __device__ Work at(unsigned index, const Shape& shape, int block_n) const {
    if (index >= unsigned(num_m_blocks * num_heads)) return {0, -1, {}};
    const int first_head = int(index) / (section * num_m_blocks) * section;
    const int heads = min(section, num_heads - first_head), turn = int(index) - first_head * num_m_blocks;
    const int row0 = (num_m_blocks - 1 - turn / heads) * kBlockM;
    return {first_head + turn % heads, row0, blocks_seen(shape, row0, kBlockM, block_n)};
  }
  // Who has taken a tile asks for the next one, once. The queue is asked as often as there are tiles, and is 0 again.
  __device__ unsigned next(unsigned* queue) const {
    return gridDim.x + atomicInc(queue, num_m_blocks * num_heads - 1);
  }
};
//! [tiles]

// threadIdx.x, read anew each time: as one variable it, and all that follows from it, would keep registers in the loop.
__device__ __forceinline__ int thread_index() {
#ifdef ATTN_EMULATED
  return static_cast<int>(threadIdx.x);
#else
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
#endif
}

__device__ __forceinline__ float quad_max(float x) {  // over the 4 lanes that share a row
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// (3) S = Q K^T for the 64 rows of this warpgroup, both K-major. Starts it.
//! [scores]
template <class Config, class Element>
__device__ __forceinline__ void scores(float (&s)[Config::kBlockN / 8][4], const Element* sQ, const Element* sK) {
  const WgmmaOperand q = wgmma_operand(sQ), k = wgmma_operand(sK);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kHeadDim / 16; ++i) {  // 16 columns are 32 bytes, 64 columns a panel
    const int panel = i / 4, inside = i % 4 * 32;
    wgmma<Element, false>(s, q + (panel * Config::kBlockM * 128 + inside), k + (panel * Config::kBlockN * 128 + inside),
                          i > 0);
  }
  wgmma_commit();
}
//! [scores]

// (5) O += P V: P from registers, V as it lies in memory, [k, d]. Starts it.
//! [output]
template <class Config, class Element>
__device__ __forceinline__ void output(float (&o)[Config::kHeadDim / 8][4],
                                       const uint32_t (&p)[Config::kBlockN / 16][4], const Element* sV) {
  const WgmmaOperand v = wgmma_operand(sV, Config::kBlockN * 128);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 16; ++i)  // 16 keys are 16 rows of 128 bytes
    wgmma<Element, true>(o, p[i], v + 16 * 128 * i, true);
  wgmma_commit();
}
//! [output]

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_kernel(const __grid_constant__ TensorMap mapQ,  // [B Hq, d / 64, seqlen_q, 64]
                     const __grid_constant__ TensorMap mapK,  // [B Hkv, d / 64, seqlen_k, 64]
                     const __grid_constant__ TensorMap mapV,  // as K
                     Element* __restrict__ gO,                // [B, Hq, seqlen_q, d]
                     float* __restrict__ gLse,                // [B, Hq, seqlen_q]
                     unsigned* gQueue,                        // 0, here and afterwards
                     Shape shape, int num_m_blocks, int num_heads, int section) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kTileBytes = kBlockN * kHeadDim * 2, kStages = Config::kStages, kQueries = Config::kQueries;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  // Of lane 0, so that the compiler knows that it is the same in all lanes: then it keeps addresses of tiles in uniform
  // registers, as wgmma takes them.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const float softmax_scale_log2 = shape.softmax_scale * 1.44269504f;  // log2(e)

  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * Config::kConsumers;  // one lane of each says that it is done
    for (int i = 0; i < kQueries; ++i) mbarrier_init(&smem.q_full[i], 1), mbarrier_init(&smem.q_empty[i], kWarps);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&smem.k_full[i], 1), mbarrier_init(&smem.v_full[i], 1);
      mbarrier_init(&smem.k_empty[i], kWarps), mbarrier_init(&smem.v_empty[i], kWarps);
    }
    mbarrier_init(&smem.work_full[0], 1), mbarrier_init(&smem.work_full[1], 1), mbarrier_init(&smem.ask, 1);
    mbarrier_init_fence();
  }
  __syncthreads();  // the barriers are there

  const Tiles tiles{num_m_blocks, num_heads, section};
  //! [producer]
  if (warpgroup == Config::kConsumers) {
    setmaxnreg_dec<40>();  // and 2 * 232: 504 a lane, as 384 threads are launched with
    // One thread finds work and (1) loads Q_i. It asks for a tile of queries when it must, not earlier: a block with
    // long ones would keep it from others that are idle already.
    if (threadIdx.x % 128 == 0) {
      int taken = 0;
      for (unsigned index = blockIdx.x;; index = tiles.next(gQueue)) {
        const Work work = tiles.at<kBlockM>(index, shape, kBlockN);
        const int q = taken % kQueries;
        smem.work[taken % kRing] = work;
        mbarrier_arrive(&smem.work_full[taken % 2]);
        mbarrier_wait(&smem.q_empty[q], taken / kQueries % 2 ^ 1);  // the consumers are done with the one before
        if (work.row0 < 0) return mbarrier_arrive(&smem.q_full[q]);
        mbarrier_arrive_expect(&smem.q_full[q], kBlockM * kHeadDim * 2);
        tma_load(smem.sQ[q], mapQ, &smem.q_full[q], {0, work.row0, 0, work.bh});
        mbarrier_wait(&smem.ask, taken++ % 2);
      }
    }
    // Another one loads K_j and V_j as stages become free.
    if (threadIdx.x % 128 == 32) {
      for (int taken = 0, turn = 0;; ++taken) {
        mbarrier_wait(&smem.work_full[taken % 2], taken / 2 % 2);
        const Work& work = smem.work[taken % kRing];
        if (work.row0 < 0) break;
        for (int n_block = work.seen.begin; n_block < work.seen.end; ++n_block, ++turn) {
          if (n_block == max(work.seen.begin, work.seen.end - 4)) mbarrier_arrive(&smem.ask);
          const int stage = turn % kStages, phase = turn / kStages % 2;
          const auto load = [&](Element* tile, const TensorMap& map, uint64_t* full, uint64_t* empty) {
            mbarrier_wait(empty, phase ^ 1);  // the first time it is
            mbarrier_arrive_expect(full, kTileBytes);
            tma_load(tile, map, full, {0, n_block * kBlockN, 0, work.bh / (shape.heads / shape.kv_heads)});
          };
          load(smem.sK[stage], mapK, &smem.k_full[stage], &smem.k_empty[stage]);
          load(smem.sV[stage], mapV, &smem.v_full[stage], &smem.v_empty[stage]);
        }
      }
    }
    return;
  }
  setmaxnreg_inc<232>();
  //! [producer]

  //! [turns]
  // Barrier 1 + w opens when warpgroup w waits there and the one before has said that it is its turn.
  const auto wait_for_turn = [&] { named_barrier_sync(1 + warpgroup, 256); };
  const auto end_turn = [&] { named_barrier_arrive(1 + (warpgroup + 1) % Config::kConsumers, 256); };
  if (warpgroup == Config::kConsumers - 1) end_turn();  // the first one begins
  //! [turns]

  // The tile of queries that is worked on, and which of this block's it is.
  int taken = -1, row0 = 0;
  BlockRanges seen{};
  const auto take_tile = [&] {
    ++taken;
    mbarrier_wait(&smem.q_full[taken % kQueries], taken / kQueries % 2);
    const Work& work = smem.work[taken % kRing];
    row0 = work.row0;
    seen = work.seen;
    const bool more = work.row0 >= 0;
    __syncwarp();  // all lanes have read it, before one says so
    return more;
  };
  const auto done_with_q = [&] {  // this warp is
    if (thread_index() % 32 == 0) mbarrier_arrive(&smem.q_empty[taken % kQueries]);
  };
  // The tile of keys that is worked on, counted from the block's first one. The compiler sees that it is the same in
  // all lanes as long as no `if` changes it and no consumer returns from the loop. If not, every operand of wgmma is
  // moved to uniform registers first.
  int turn = 0;
  const auto wait_for = [&](uint64_t* full, int at) { mbarrier_wait(full + at % kStages, at / kStages % 2); };
  const auto release = [&](uint64_t* empty, int at) {  // this warp is done with it
    if (thread_index() % 32 == 0) mbarrier_arrive(empty + at % kStages);
  };
  // The first row of this lane in the tile, the second one is 8 below it; and the first of its columns of 8.
  const auto first_row = [] { return thread_index() / 32 * 16 + thread_index() % 32 / 4; };
  const auto quad_col = [] { return thread_index() % 4 * 2; };

  float o[kHeadDim / 8][4] = {};                             // not divided by l yet
  float row_max[2] = {kNothing, kNothing}, row_sum[2] = {};  // to base 2; of this lane's keys
  float s[kBlockN / 8][4];
  uint32_t p[kBlockN / 16][4];
  float rescale[2];
  // S of one block of keys becomes P, in float32. `masked` is a type, so that the plain body has no trace of a mask.
  const auto softmax = [&](int n_block, auto masked) {
    if constexpr (masked.value) {
      // Position of this lane's first row from its first key, and how many keys there are from there on.
      const int key0 = n_block * kBlockN + quad_col(), keys = shape.seqlen_k - key0;
      const int own = row0 + first_row() + shape.seqlen_k - shape.seqlen_q - key0;
      const int first = own - shape.window_left, last = own + shape.window_right;
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = 8 * n + i % 2, below = 8 * (i / 2);
          if (key - below < first || key - below > last || key >= keys) s[n][i] = -INFINITY;
        }
    }

    // (4) softmax, all of it in the quad of lanes that share a row.
    //! [softmax]
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float max = s[0][2 * r];
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n) max = fmaxf(max, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
      max = fmaxf(row_max[r], quad_max(max) * softmax_scale_log2);
      rescale[r] = exp2f(row_max[r] - max);
      row_max[r] = max;
      row_sum[r] *= rescale[r];
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          s[n][i] = exp2f(fmaf(s[n][i], softmax_scale_log2, -max));
          row_sum[r] += s[n][i];
        }
    }
    //! [softmax]
  };
  // Two neighbouring accumulators, rounded in pairs, are the left operand of 16 keys.
  const auto round_p = [&] {
#pragma unroll
    for (int n = 0; n < kBlockN / 8; ++n) {
      p[n / 2][n % 2 * 2] = pack2<Element>(s[n][0], s[n][1]);
      p[n / 2][n % 2 * 2 + 1] = pack2<Element>(s[n][2], s[n][3]);
    }
  };
  // (3) S of this tile of keys, beside (5) P V of the one before it.
  //! [products]
  const auto start_scores = [&] {
    scores<Config>(s, smem.sQ[taken % kQueries] + warpgroup * 64 * 64, smem.sK[turn % kStages]);
  };
  const auto start_output = [&](int at) { output<Config>(o, p, smem.sV[at % kStages]); };
  const auto products = [&](int n_block) {
    wait_for(smem.k_full, turn);
    wait_for_turn();
    start_scores();
    wait_for(smem.v_full, turn - 1);
    start_output(turn - 1);
    end_turn();  // the other's products queue behind these
    wgmma_wait<1>(s);  // S is there
    release(smem.k_empty, turn);
    if (n_block + 1 == seen.end) done_with_q();
  };
  const auto visit = [&](int n_block, auto masked) {
    products(n_block);
    softmax(n_block, masked);
    wgmma_wait<0>(o);  // and O of the block before
    release(smem.v_empty, turn - 1);
    round_p();
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] *= rescale[i / 2];
    ++turn;
  };
  //! [products]

  // (7) O = O / l, once; (8) store O and lse
  //! [finish]
  const auto finish = [&](const Work& work, const float (&max)[2], float (&sum)[2]) {
    const bool upper = thread_index() % 2 != 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = quad_sum(sum[r]);
      const float factor = sum[r] > 0 ? __fdividef(1, sum[r]) : 0;  // a row that sees nothing: O = 0
      const int row = first_row() + 8 * r;
      const bool exists = work.row0 + row < shape.seqlen_q;
      const int64_t at = int64_t{work.bh} * shape.seqlen_q + work.row0 + row;  // of all rows
      // Lanes 0 and 1 of a quad exchange halves, and 2 and 3: then each has 4 columns side by side.
      Element* const gRow = gO + at * kHeadDim + (upper ? 8 : 0) + thread_index() / 2 % 2 * 4;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; n += 2) {
        const uint32_t even = pack2<Element>(o[n][2 * r] * factor, o[n][2 * r + 1] * factor);
        const uint32_t odd = pack2<Element>(o[n + 1][2 * r] * factor, o[n + 1][2 * r + 1] * factor);
        const uint32_t got = __shfl_xor_sync(~0u, upper ? even : odd, 1);
        if (exists) *reinterpret_cast<uint2*>(gRow + 8 * n) = upper ? make_uint2(got, odd) : make_uint2(even, got);
      }
      if (quad_col() == 0 && exists)
        gLse[at] = sum[r] > 0 ? 0.693147181f * (max[r] + __log2f(sum[r])) : -INFINITY;
    }
  };
  //! [finish]
  //! [loops]
  if (!take_tile()) return;
  // The first S of all has no P V before it.
  wait_for(smem.k_full, turn);
  wait_for_turn();
  start_scores();
  end_turn();
  wgmma_wait<0>(s);
  release(smem.k_empty, turn);
  if (seen.begin + 1 == seen.end) done_with_q();
  softmax(seen.begin, std::true_type{});
  round_p();
  ++turn;
  bool more = true;
  int n_block = seen.begin + 1;
  do {
    for (; n_block < seen.plain_begin; ++n_block) visit(n_block, std::true_type{});  // left edge of the window
    for (; n_block < seen.plain_end; ++n_block) visit(n_block, std::false_type{});
    for (; n_block < seen.end; ++n_block) visit(n_block, std::true_type{});  // diagonal, right edge, last keys
    const Work& last = smem.work[taken % kRing];
    const float last_max[2] = {row_max[0], row_max[1]};
    float last_sum[2] = {row_sum[0], row_sum[1]};
    more = take_tile();
    if (more) {  // the last P V of this tile of queries, beside the first S of the next one
      products(seen.begin);
#pragma unroll
      for (int r = 0; r < 2; ++r) row_max[r] = kNothing, row_sum[r] = 0;
      softmax(seen.begin, std::true_type{});
      n_block = seen.begin + 1;
    } else {
      wait_for(smem.v_full, turn - 1);
      wait_for_turn();
      start_output(turn - 1);
      end_turn();
    }
    wgmma_wait<0>(o);
    release(smem.v_empty, turn - 1);
    round_p();
    ++turn;
    finish(last, last_max, last_sum);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0;
  } while (more);
  //! [loops]
}

// A map of [heads, rows, d] whose boxes are tiles of `tile_rows` rows, all panels of 64 columns.
//! [map]
template <class Element>
Status map_of(TensorMap& map, const Element* g, int64_t heads, int64_t rows, int64_t head_dim, int tile_rows) {
  return make_tensor_map<4>(map, g, {64, rows, head_dim / 64, heads}, {2 * head_dim, 128, 2 * rows * head_dim},
                            {64, tile_rows, static_cast<int>(head_dim / 64), 1}, Swizzle::k128);
}
//! [map]

// Heads of a section: so many that their K and V take 24 MB of an H200's L2 (60 MB), or one group that shares them.
//! [section]
int64_t heads_of_section(const Problem& p) {
  const int64_t kv_bytes = 2 * p.seqlen_k * p.head_dim * 2;
  return std::min(p.heads * p.batch, std::max<int64_t>(1, (24 << 20) / kv_bytes) * p.group());
}
//! [section]

template <class Element, class Config>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  if (args.plans({Config::kBlockM, Config::kBlockN, heads_of_section(p)})) return Status::success();
  TensorMap q, k, v;
  for (const Status& status :
       {map_of(q, args.in<Element>("q"), p.batch * p.heads, p.seqlen_q, p.head_dim, Config::kBlockM),
        map_of(k, args.in<Element>("k"), p.batch * p.kv_heads, p.seqlen_k, p.head_dim, Config::kBlockN),
        map_of(v, args.in<Element>("v"), p.batch * p.kv_heads, p.seqlen_k, p.head_dim, Config::kBlockN)})
    if (!status.ok()) return status;
  const int64_t num_m_blocks = ceil_div(p.seqlen_q, Config::kBlockM);
  const int64_t num_tiles = num_m_blocks * p.heads * p.batch;
  const int num_sms = args.backend == Backend::gpu ? gpu_info().num_sms : 3;  // emulated: so few that each has several
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config>,
                       dim3(static_cast<unsigned>(std::min<int64_t>(num_tiles, num_sms))),
                       dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), args.stream, q, k, v,
                       args.out<Element>("o"), args.out<float>("lse"), args.out<unsigned>("queue"), shape_of(p),
                       static_cast<int>(num_m_blocks), static_cast<int>(p.heads * p.batch),
                       static_cast<int>(heads_of_section(p)));
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    switch (args.problem.head_dim) {
      case 64: return launch<Element, Config<64>>(args);
      case 128: return launch<Element, Config<128>>(args);
      case 256: return launch<Element, Config<256>>(args);
    }
    return Status::unsupported("head dims 64, 128 and 256 alone");
  });
}

}  // namespace ATTN_BACKEND::v9_seam
