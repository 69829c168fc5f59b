// v4_overlap: a warpgroup's softmax beside its own product.
//
// parent    v3_pingpong
// idea      The next scores do not depend on this block's P V. So Q K^T of block j is asked for before P V of block
//           j - 1; as soon as the scores are there their softmax begins, while P V is still under way. O is rescaled
//           when that is done too. Two blocks are then in the registers: scores of one, P of the other.
// expect    what is left of the softmax outside of products goes under them; most where a turn is short.
// supports  fp16, bf16; head dims 64, 128, 256; any lengths, masks, GQA
#include <algorithm>

#include "attn/kernel.h"
#include "ptx/mbarrier.h"
#include "ptx/mma.h"
#include "ptx/named_barrier.h"
#include "ptx/setmaxnreg.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"

namespace ATTN_BACKEND::v4_overlap {
using namespace attn;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);  // warpgroups; the last one copies
  static constexpr int kStages = 2;
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
  uint64_t q_full, k_full[Config::kStages], v_full[Config::kStages];  // mbarriers: the bytes are there
  uint64_t k_empty[Config::kStages], v_empty[Config::kStages];        // all consumers are done with them
  ATTN_MEMBERS(SharedStorage, sQ, sK, sV, q_full, k_full, v_full, k_empty, v_empty)
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
                     Element* gO,                             // [B, Hq, seqlen_q, d]
                     float* gLse,                             // [B, Hq, seqlen_q]
                     Shape shape, int num_m_blocks, int num_heads, int section) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kTileBytes = kBlockN * kHeadDim * 2, kStages = Config::kStages;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  // Heads come in sections. In one, the tiles of queries with the most keys begin first, those of all its heads.
  const int first_head = blockIdx.x / (section * num_m_blocks) * section;
  const int heads = min(section, num_heads - first_head), index = blockIdx.x - first_head * num_m_blocks;
  const int bh = first_head + index % heads, row0 = (num_m_blocks - 1 - index / heads) * kBlockM;
  const int bh_kv = bh / (shape.heads / shape.kv_heads);
  const int warpgroup = threadIdx.x / 128, lane_id = threadIdx.x % 32;
  const int shift = shape.seqlen_k - shape.seqlen_q;
  const BlockRanges seen = blocks_seen(shape, row0, kBlockM, kBlockN);
  const float softmax_scale_log2 = shape.softmax_scale * 1.44269504f;  // log2(e)

  if (threadIdx.x == 0) {
    mbarrier_init(&smem.q_full, 1);
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&smem.k_full[stage], 1), mbarrier_init(&smem.v_full[stage], 1);
      constexpr int kWarps = 4 * Config::kConsumers;  // one lane of each says that it is done
      mbarrier_init(&smem.k_empty[stage], kWarps), mbarrier_init(&smem.v_empty[stage], kWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();  // the barriers are there

  //! [producer]
  if (warpgroup == Config::kConsumers) {
    setmaxnreg_dec<24>();
    if (threadIdx.x % 128 != 0 || seen.begin == seen.end) return;
    // (1) load Q_i, which stays, then K_j and V_j as stages become free
    mbarrier_arrive_expect(&smem.q_full, kBlockM * kHeadDim * 2);
    tma_load(smem.sQ, mapQ, &smem.q_full, {0, row0, 0, bh});
    for (int n_block = seen.begin; n_block < seen.end; ++n_block) {
      const int turn = n_block - seen.begin, stage = turn % kStages, phase = turn / kStages % 2;
      const auto load = [&](Element* tile, const TensorMap& map, uint64_t* full, uint64_t* empty) {
        mbarrier_wait(empty, phase ^ 1);  // the first time it is
        mbarrier_arrive_expect(full, kTileBytes);
        tma_load(tile, map, full, {0, n_block * kBlockN, 0, bh_kv});
      };
      load(smem.sK[stage], mapK, &smem.k_full[stage], &smem.k_empty[stage]);
      load(smem.sV[stage], mapV, &smem.v_full[stage], &smem.v_empty[stage]);
    }
    return;
  }
  setmaxnreg_inc<240>();
  //! [producer]

  // Rows of this lane, r = 0 or 1, and the first of its columns of 8.
  const auto row = [&](int r) { return row0 + static_cast<int>(threadIdx.x) / 32 * 16 + lane_id / 4 + 8 * r; };
  const int quad_col = lane_id % 4 * 2;
  const Element* const sQ = smem.sQ + warpgroup * 64 * 64;  // of every panel
  float o[kHeadDim / 8][4] = {};                            // not divided by l yet
  float row_max[2] = {kNothing, kNothing}, row_sum[2] = {};  // to base 2; of this lane's keys

  float s[kBlockN / 8][4];
  uint32_t p[kBlockN / 16][4];
  const auto stage_of = [&](int n_block) { return (n_block - seen.begin) % kStages; };
  const auto wait_for = [&](uint64_t* full, int n_block) {
    mbarrier_wait(full + stage_of(n_block), (n_block - seen.begin) / kStages % 2);
  };
  const auto release = [&](uint64_t* empty, int n_block) {  // this warp is done with it
    if (lane_id == 0) mbarrier_arrive(empty + stage_of(n_block));
  };
  //! [turns]
  // Barrier 1 + w opens when warpgroup w waits there and the other one has said that it is its turn.
  const auto wait_for_turn = [&] { named_barrier_sync(1 + warpgroup, 128 * Config::kConsumers); };
  const auto end_turn = [&] { named_barrier_arrive(1 + (warpgroup ^ 1), 128 * Config::kConsumers); };
  if (warpgroup == 1) end_turn();  // the first one begins
  //! [turns]

  float rescale[2];
  // S of one block of keys becomes P, in float32. `masked` is a type, so that the plain body has no trace of a mask.
  const auto softmax = [&](int n_block, auto masked) {
    if constexpr (masked.value) {
      const int key0 = n_block * kBlockN + quad_col;
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = key0 + 8 * n + i % 2, own = row(i / 2) + shift;
          if (key < own - shape.window_left || key > own + shape.window_right || key >= shape.seqlen_k)
            s[n][i] = -INFINITY;
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
    //! [ex06c]
    wait_for(smem.k_full, n_block);
    wait_for_turn();
    scores<Config>(s, sQ, smem.sK[stage_of(n_block)]);
    wait_for(smem.v_full, n_block - 1);
    output<Config>(o, p, smem.sV[stage_of(n_block - 1)]);
    end_turn();  // the other's products queue behind these
    wgmma_wait<1>(s);  // S is there
    release(smem.k_empty, n_block);
    softmax(n_block, masked);
    wgmma_wait<0>(o);  // and O of the block before
    release(smem.v_empty, n_block - 1);
    round_p();
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] *= rescale[i / 2];
    //! [ex06c]
  };
  //! [products]
  //! [loops]
  if (seen.begin < seen.end) {  // the first block has no P V before it; with or without a mask, it is compared
    mbarrier_wait(&smem.q_full, 0);
    wait_for(smem.k_full, seen.begin);
    wait_for_turn();
    scores<Config>(s, sQ, smem.sK[0]);
    end_turn();
    wgmma_wait<0>(s);
    release(smem.k_empty, seen.begin);
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

  // (7) O = O / l, once; (8) store O and lse
  //! [finish]
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_sum[r] = quad_sum(row_sum[r]);
    if (row(r) >= shape.seqlen_q) continue;
    const float factor = row_sum[r] > 0 ? __fdividef(1, row_sum[r]) : 0;  // a row that sees nothing: O = 0
    const int64_t at = int64_t{bh} * shape.seqlen_q + row(r);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
      *reinterpret_cast<uint32_t*>(gO + at * kHeadDim + quad_col + 8 * n) =
          pack2<Element>(o[n][2 * r] * factor, o[n][2 * r + 1] * factor);
    if (quad_col == 0) gLse[at] = row_sum[r] > 0 ? 0.693147181f * (row_max[r] + __log2f(row_sum[r])) : -INFINITY;
  }
  //! [finish]
}

// A map of [heads, rows, d] whose boxes are tiles of `tile_rows` rows and all panels of 64 columns.
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
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config>,
                       dim3(static_cast<unsigned>(num_m_blocks * p.heads * p.batch)), dim3(Config::kThreads),
                       sizeof(SharedStorage<Element, Config>), args.stream, q, k, v, args.out<Element>("o"),
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

}  // namespace ATTN_BACKEND::v4_overlap
