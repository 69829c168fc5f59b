// v6_queue: who is done takes the next tile of queries from a queue.
//
// parent    v5_persistent
// idea      v5 deals tiles out beforehand, as if those of a round took equally long. With a mask they do not, and an SM
//           with the shorter ones is idle at the end. Now a counter in device memory says which tile is next. The
//           thread that copies asks it when it has asked for the last K and V of a tile, and tells the consumers
//           through shared memory, as it tells them of Q.
// expect    with a mask: SMs that end together. Without one all tiles are alike, and little changes.
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

namespace ATTN_BACKEND::v6_queue {
using namespace attn;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);  // warpgroups; the last one copies
  static constexpr int kStages = 2;
  static constexpr bool kOwnO = kHeadDim <= 128;  // O has a place of its own; else it takes that of Q
  static constexpr int kBlockM = 64 * kConsumers, kBlockN = kHeadDim == 256 ? 64 : 128;  // B_r, B_c
};

// Stands for -inf where nothing was seen. It is finite, so that differences are numbers.
constexpr float kNothing = -3.4028234e38f;

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
  alignas(1024) Element sQ[Config::kBlockM * Config::kHeadDim];
  alignas(1024) Element sK[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(1024) Element sV[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(1024) Element sO[Config::kOwnO ? Config::kBlockM * Config::kHeadDim : 8];
  uint64_t q_full, q_empty, k_full[Config::kStages], v_full[Config::kStages];  // mbarriers: the bytes are there
  uint64_t k_empty[Config::kStages], v_empty[Config::kStages];        // all consumers are done with them
  Work work;  // what Q is of: q_full and q_empty are about it, too
  ATTN_MEMBERS(SharedStorage, sQ, sK, sV, sO, q_full, q_empty, k_full, v_full, k_empty,
               v_empty, work)
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
                     const __grid_constant__ TensorMap mapO,  // as Q
                     float* gLse,                             // [B, Hq, seqlen_q]
                     unsigned* gQueue,                        // 0, here and afterwards
                     Shape shape, int num_m_blocks, int num_heads, int section) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kTileBytes = kBlockN * kHeadDim * 2, kStages = Config::kStages;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int warpgroup = threadIdx.x / 128;
  const float softmax_scale_log2 = shape.softmax_scale * 1.44269504f;  // log2(e)

  if (threadIdx.x == 0) {
    mbarrier_init(&smem.q_full, 1), mbarrier_init(&smem.q_empty, 128 * Config::kConsumers);
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&smem.k_full[stage], 1), mbarrier_init(&smem.v_full[stage], 1);
      constexpr int kWarps = 4 * Config::kConsumers;  // one lane of each says that it is done
      mbarrier_init(&smem.k_empty[stage], kWarps), mbarrier_init(&smem.v_empty[stage], kWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();  // the barriers are there

  const Tiles tiles{num_m_blocks, num_heads, section};
  //! [producer]
  if (warpgroup == Config::kConsumers) {
    setmaxnreg_dec<40>();  // to find work takes more than 24; with 2 * 232 all of the 504 of a lane
    if (threadIdx.x % 128 != 0) return;
    int turn = 0;  // tiles of keys so far, of all tiles of queries
    unsigned index = blockIdx.x;
    for (int round = 0;; ++round, index = tiles.next(gQueue)) {
      const auto [bh, row0, seen] = tiles.at<kBlockM>(index, shape, kBlockN);
      // (1) load Q_i when the consumers are done with the one before, then K_j and V_j as stages become free
      mbarrier_wait(&smem.q_empty, round % 2 ^ 1);
      smem.work = {bh, row0, seen};
      if (row0 < 0) break;
      mbarrier_arrive_expect(&smem.q_full, kBlockM * kHeadDim * 2);
      tma_load(smem.sQ, mapQ, &smem.q_full, {0, row0, 0, bh});
      for (int n_block = seen.begin; n_block < seen.end; ++n_block, ++turn) {
        const int stage = turn % kStages, phase = turn / kStages % 2;
        const auto load = [&](Element* tile, const TensorMap& map, uint64_t* full, uint64_t* empty) {
          mbarrier_wait(empty, phase ^ 1);  // the first time it is
          mbarrier_arrive_expect(full, kTileBytes);
          tma_load(tile, map, full, {0, n_block * kBlockN, 0, bh / (shape.heads / shape.kv_heads)});
        };
        load(smem.sK[stage], mapK, &smem.k_full[stage], &smem.k_empty[stage]);
        load(smem.sV[stage], mapV, &smem.v_full[stage], &smem.v_empty[stage]);
      }
    }
    mbarrier_arrive(&smem.q_full);
    return;
  }
  setmaxnreg_inc<232>();
  //! [producer]

  const Element* const sQ = smem.sQ + warpgroup * 64 * 64;  // of every panel, here and below
  Element* const sO = (Config::kOwnO ? smem.sO : smem.sQ) + warpgroup * 64 * 64;
  //! [turns]
  // Barrier 1 + w opens when warpgroup w waits there and the one before has said that it is its turn.
  const auto wait_for_turn = [&] { named_barrier_sync(1 + warpgroup, 256); };
  const auto end_turn = [&] { named_barrier_arrive(1 + (warpgroup + 1) % Config::kConsumers, 256); };
  if (warpgroup == Config::kConsumers - 1) end_turn();  // the first one begins
  //! [turns]
  // This thread is done with Q, and with smem.work, which it has read itself. Where O takes the place of Q, O has been
  // read, too.
  const auto done_with_q = [&] { mbarrier_arrive(&smem.q_empty); };

  int turn = 0;  // the tile of keys that is worked on, counted from the block's first one
  for (int round = 0;; ++round) {
    mbarrier_wait(&smem.q_full, round % 2);
    const auto [bh, row0, seen] = smem.work;
    if (row0 < 0) break;
    // The first row of this lane in the tile, the second one is 8 below it; and the first of its columns of 8.
    const auto first_row = [] { return thread_index() / 32 * 16 + thread_index() % 32 / 4; };
    const auto quad_col = [] { return thread_index() % 4 * 2; };
    float o[kHeadDim / 8][4] = {};                             // not divided by l yet
    float row_max[2] = {kNothing, kNothing}, row_sum[2] = {};  // to base 2; of this lane's keys

    float s[kBlockN / 8][4];
    uint32_t p[kBlockN / 16][4];
    const auto wait_for = [&](uint64_t* full, int at) { mbarrier_wait(full + at % kStages, at / kStages % 2); };
    const auto release = [&](uint64_t* empty, int at) {  // this warp is done with it
      if (thread_index() % 32 == 0) mbarrier_arrive(empty + at % kStages);
    };

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
    // One block of keys and P V of the one before it.
    //! [products]
    const auto visit = [&](int n_block, auto masked) {
      wait_for(smem.k_full, turn);
      wait_for_turn();
      scores<Config>(s, sQ, smem.sK[turn % kStages]);
      wait_for(smem.v_full, turn - 1);
      output<Config>(o, p, smem.sV[(turn - 1) % kStages]);
      end_turn();  // the other's products queue behind these
      wgmma_wait<1>(s);  // S is there
      release(smem.k_empty, turn);
      if (Config::kOwnO && n_block + 1 == seen.end) done_with_q();
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
    //! [loops]
    // The first block has no P V before it; with or without a mask, it is compared.
    wait_for(smem.k_full, turn);
    wait_for_turn();
    scores<Config>(s, sQ, smem.sK[turn % kStages]);
    end_turn();
    wgmma_wait<0>(s);
    release(smem.k_empty, turn);
    if (Config::kOwnO && seen.begin + 1 == seen.end) done_with_q();
    softmax(seen.begin, std::true_type{});
    round_p();
    ++turn;
    int n_block = seen.begin + 1;
    for (; n_block < seen.plain_begin; ++n_block) visit(n_block, std::true_type{});  // left edge of the window
    for (; n_block < seen.plain_end; ++n_block) visit(n_block, std::false_type{});
    for (; n_block < seen.end; ++n_block) visit(n_block, std::true_type{});  // diagonal, right edge, last keys
    wait_for(smem.v_full, turn - 1);
    wait_for_turn();
    output<Config>(o, p, smem.sV[(turn - 1) % kStages]);
    end_turn();
    wgmma_wait<0>(o);
    release(smem.v_empty, turn - 1);
    //! [loops]

    // (7) O = O / l, once; (8) store O, through shared memory, and lse
    //! [finish]
    if (threadIdx.x % 128 == 0) tma_store_wait<0>();  // of the tile before
    named_barrier_sync(1 + Config::kConsumers + warpgroup, 128);  // its place is free; all are done with Q
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_sum[r] = quad_sum(row_sum[r]);
      const float factor = row_sum[r] > 0 ? __fdividef(1, row_sum[r]) : 0;  // a row that sees nothing: O = 0
      const int at = first_row() % 64 + 8 * r, row = row0 + first_row() + 8 * r;  // in the warpgroup, in the head
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n)  // pieces of 16 bytes, exchanged as TMA takes them
        *reinterpret_cast<uint32_t*>(sO + n / 8 * kBlockM * 64 + at * 64 + (n % 8 ^ at % 8) * 8 + quad_col()) =
            pack2<Element>(o[n][2 * r] * factor, o[n][2 * r + 1] * factor);
      if (quad_col() == 0 && row < shape.seqlen_q)
        gLse[int64_t{bh} * shape.seqlen_q + row] =
            row_sum[r] > 0 ? 0.693147181f * (row_max[r] + __log2f(row_sum[r])) : -INFINITY;
    }
    shared_write_fence();
    named_barrier_sync(1 + Config::kConsumers + warpgroup, 128);  // all rows are there
    if (threadIdx.x % 128 == 0) {
      for (int panel = 0; panel < kHeadDim / 64; ++panel)
        tma_store(mapO, sO + panel * kBlockM * 64, {0, row0 + 64 * warpgroup, panel, bh});
      tma_store_commit();
      if (!Config::kOwnO) tma_store_wait<0>();
    }
    if (!Config::kOwnO) done_with_q();
    //! [finish]
  }
  if (threadIdx.x % 128 == 0) tma_store_wait<0>();
}

// A map of [heads, rows, d] whose boxes are tiles of `tile_rows` rows, of all panels of 64 columns or of one.
//! [map]
template <class Element>
Status map_of(TensorMap& map, const Element* g, int64_t heads, int64_t rows, int64_t head_dim, int tile_rows,
              bool all_panels) {
  return make_tensor_map<4>(map, g, {64, rows, head_dim / 64, heads}, {2 * head_dim, 128, 2 * rows * head_dim},
                            {64, tile_rows, all_panels ? static_cast<int>(head_dim / 64) : 1, 1}, Swizzle::k128);
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
  TensorMap q, k, v, o;
  for (const Status& status :
       {map_of(q, args.in<Element>("q"), p.batch * p.heads, p.seqlen_q, p.head_dim, Config::kBlockM, true),
        map_of(k, args.in<Element>("k"), p.batch * p.kv_heads, p.seqlen_k, p.head_dim, Config::kBlockN, true),
        map_of(v, args.in<Element>("v"), p.batch * p.kv_heads, p.seqlen_k, p.head_dim, Config::kBlockN, true),
        map_of(o, args.out<Element>("o"), p.batch * p.heads, p.seqlen_q, p.head_dim, 64, false)})
    if (!status.ok()) return status;
  const int64_t num_m_blocks = ceil_div(p.seqlen_q, Config::kBlockM);
  const int64_t num_tiles = num_m_blocks * p.heads * p.batch;
  const int num_sms = args.backend == Backend::gpu ? gpu_info().num_sms : 3;  // emulated: so few that each has several
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config>,
                       dim3(static_cast<unsigned>(std::min<int64_t>(num_tiles, num_sms))),
                       dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), args.stream, q, k, v, o,
                       args.out<float>("lse"), args.out<unsigned>("queue"), shape_of(p), static_cast<int>(num_m_blocks),
                       static_cast<int>(p.heads * p.batch), static_cast<int>(heads_of_section(p)));
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

}  // namespace ATTN_BACKEND::v6_queue

// Once, before the first launch of a step that has a queue.
namespace ATTN_BACKEND::v6_queue_clear {
using namespace attn;
__global__ void clear_kernel(unsigned* gQueue) { *gQueue = 0; }
Status launch(const Arguments& args) {
  return launch_kernel(clear_kernel, dim3(1), dim3(1), 0, args.stream, args.out<unsigned>("queue"));
}
}  // namespace ATTN_BACKEND::v6_queue_clear
