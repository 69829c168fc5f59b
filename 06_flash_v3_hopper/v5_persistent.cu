// v5_persistent: as many blocks as SMs, and what surrounds a tile of queries beside another one's work.
//
// parent    v4_overlap
// idea      A block of v4 begins with empty stages and ends with stores that nobody computes beside. Now a block takes
//           one tile of queries after the other: the producer is at the next one when the consumers finish this. O
//           leaves through shared memory, by TMA. Tiles are dealt out, longest first, to and fro, so that blocks get
//           nearly as much.
// expect    most at short lengths, where a tile is little work: N = 512 has four blocks of keys for one tile.
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

namespace ATTN_BACKEND::v5_persistent {
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

// Tiles are panels of 64 columns, [d / 64][rows, 64], with TMA's swizzle of 128 bytes.
template <class Element, class Config>
struct SharedStorage {
  alignas(1024) Element sQ[Config::kBlockM * Config::kHeadDim];
  alignas(1024) Element sK[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(1024) Element sV[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(1024) Element sO[Config::kOwnO ? Config::kBlockM * Config::kHeadDim : 8];
  uint64_t q_full, q_empty, k_full[Config::kStages], v_full[Config::kStages];  // mbarriers: the bytes are there
  uint64_t k_empty[Config::kStages], v_empty[Config::kStages];        // all consumers are done with them
  ATTN_MEMBERS(SharedStorage, sQ, sK, sV, sO, q_full, q_empty, k_full, v_full, k_empty, v_empty)
};

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
  if (end <= begin) return {0, 0, 0, 0};  // O = 0 and lse = -inf for all
  const int all_begin = max(0, last + shift - shape.window_left);  // what the last row sees first ...
  const int all_end = min(shape.seqlen_k, row0 + shift + shape.window_right + 1);  // ... and the first row last
  BlockRanges seen{begin / block_n, ceil_div(all_begin, block_n), all_end / block_n, ceil_div(end, block_n)};
  seen.plain_begin = min(seen.plain_begin, seen.end);
  seen.plain_end = max(seen.plain_begin, seen.plain_end);
  return seen;
}
//! [ranges]

// Which tiles of queries a block works on. Heads come in sections; in one, tiles with the most keys first, those of all
// its heads. In round r the blocks take the next gridDim.x of them, by turns from the first block on and from the last,
// so that who got the longest one gets the shortest one then.
//! [tiles]
struct Tiles {
  int num_m_blocks, num_heads, section;
  __device__ int index(int round) const {
    const int block = blockIdx.x, blocks = gridDim.x;
    return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
  }
  __device__ bool exists(int round) const { return index(round) < num_m_blocks * num_heads; }
  struct Tile {
    int bh, row0;
  };
  template <int kBlockM>
  __device__ Tile at(int round) const {
    const int first_head = index(round) / (section * num_m_blocks) * section;
    const int heads = min(section, num_heads - first_head), turn = index(round) - first_head * num_m_blocks;
    return {first_head + turn % heads, (num_m_blocks - 1 - turn / heads) * kBlockM};
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
                     Shape shape, int num_m_blocks, int num_heads, int section) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kTileBytes = kBlockN * kHeadDim * 2, kStages = Config::kStages;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int warpgroup = threadIdx.x / 128;
  const float softmax_scale_log2 = shape.softmax_scale * 1.44269504f;  // log2(e)

  if (threadIdx.x == 0) {
    mbarrier_init(&smem.q_full, 1), mbarrier_init(&smem.q_empty, 4 * Config::kConsumers);
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
    setmaxnreg_dec<24>();
    if (threadIdx.x % 128 != 0) return;
    int turn = 0;  // tiles of keys so far, of all tiles of queries
    for (int round = 0; tiles.exists(round); ++round) {
      const auto [bh, row0] = tiles.at<kBlockM>(round);
      const BlockRanges seen = blocks_seen(shape, row0, kBlockM, kBlockN);
      // (1) load Q_i when the consumers are done with the one before, then K_j and V_j as stages become free
      mbarrier_wait(&smem.q_empty, round % 2 ^ 1);
      if (seen.begin == seen.end) continue;
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
    return;
  }
  setmaxnreg_inc<240>();
  //! [producer]

  const Element* const sQ = smem.sQ + warpgroup * 64 * 64;  // of every panel, here and below
  Element* const sO = (Config::kOwnO ? smem.sO : smem.sQ) + warpgroup * 64 * 64;
  //! [turns]
  // Barrier 1 + w opens when warpgroup w waits there and the one before has said that it is its turn.
  const auto wait_for_turn = [&] { named_barrier_sync(1 + warpgroup, 256); };
  const auto end_turn = [&] { named_barrier_arrive(1 + (warpgroup + 1) % Config::kConsumers, 256); };
  if (warpgroup == Config::kConsumers - 1) end_turn();  // the first one begins
  //! [turns]
  const auto done_with_q = [&] {  // this warp is; where O takes its place, when that has been read too
    if (thread_index() % 32 == 0) mbarrier_arrive(&smem.q_empty);
  };

  int first_turn = 0, visited = 0;  // tiles of keys before this tile of queries; tiles of queries that saw any
  for (int round = 0; tiles.exists(round); ++round) {
    const auto [bh, row0] = tiles.at<kBlockM>(round);
    const BlockRanges seen = blocks_seen(shape, row0, kBlockM, kBlockN);
    // The first row of this lane in the tile, the second one is 8 below it; and the first of its columns of 8.
    const auto first_row = [] { return thread_index() / 32 * 16 + thread_index() % 32 / 4; };
    const auto quad_col = [] { return thread_index() % 4 * 2; };
    float o[kHeadDim / 8][4] = {};                             // not divided by l yet
    float row_max[2] = {kNothing, kNothing}, row_sum[2] = {};  // to base 2; of this lane's keys

    float s[kBlockN / 8][4];
    uint32_t p[kBlockN / 16][4];
    const auto turn_of = [&](int n_block) { return first_turn + n_block - seen.begin; };
    const auto stage_of = [&](int n_block) { return turn_of(n_block) % kStages; };
    const auto wait_for = [&](uint64_t* full, int n_block) {
      mbarrier_wait(full + stage_of(n_block), turn_of(n_block) / kStages % 2);
    };
    const auto release = [&](uint64_t* empty, int n_block) {  // this warp is done with it
      if (thread_index() % 32 == 0) mbarrier_arrive(empty + stage_of(n_block));
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
      wait_for(smem.k_full, n_block);
      wait_for_turn();
      scores<Config>(s, sQ, smem.sK[stage_of(n_block)]);
      wait_for(smem.v_full, n_block - 1);
      output<Config>(o, p, smem.sV[stage_of(n_block - 1)]);
      end_turn();  // the other's products queue behind these
      wgmma_wait<1>(s);  // S is there
      release(smem.k_empty, n_block);
      if (Config::kOwnO && n_block + 1 == seen.end) done_with_q();
      softmax(n_block, masked);
      wgmma_wait<0>(o);  // and O of the block before
      release(smem.v_empty, n_block - 1);
      round_p();
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[n][i] *= rescale[i / 2];
    };
    //! [products]
    //! [loops]
    if (seen.begin < seen.end) {  // the first block has no P V before it; with or without a mask, it is compared
      mbarrier_wait(&smem.q_full, visited++ % 2);
      wait_for(smem.k_full, seen.begin);
      wait_for_turn();
      scores<Config>(s, sQ, smem.sK[stage_of(seen.begin)]);
      end_turn();
      wgmma_wait<0>(s);
      release(smem.k_empty, seen.begin);
      if (Config::kOwnO && seen.begin + 1 == seen.end) done_with_q();
      softmax(seen.begin, std::true_type{});
      round_p();
      int n_block = seen.begin + 1;
      for (; n_block < seen.plain_begin; ++n_block) visit(n_block, std::true_type{});  // left edge of the window
      for (; n_block < seen.plain_end; ++n_block) visit(n_block, std::false_type{});
      for (; n_block < seen.end; ++n_block) visit(n_block, std::true_type{});  // diagonal, right edge, last keys
      wait_for(smem.v_full, seen.end - 1);
      wait_for_turn();
      output<Config>(o, p, smem.sV[stage_of(seen.end - 1)]);
      end_turn();
      wgmma_wait<0>(o);
      release(smem.v_empty, seen.end - 1);
    }
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
    if (!Config::kOwnO || seen.begin == seen.end) done_with_q();
    first_turn += seen.end - seen.begin;
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
                       args.out<float>("lse"), shape_of(p), static_cast<int>(num_m_blocks),
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

}  // namespace ATTN_BACKEND::v5_persistent
