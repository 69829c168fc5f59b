// v4_unmasked_blocks: separate loop bodies for masked and unmasked KV blocks.
//
// parent    v3_prefetch
// change    A causal mask cuts the last KV blocks of a query tile, a sliding window the first ones
//           too. Four numbers bound the ranges. The loop body is compiled twice: for masked blocks,
//           and for unmasked ones, which compare no index. In a masked block a warp skips
//           the MMAs if all its rows are masked.
// why       The parent compares indices in every block, also where no key is masked.
// expect    sm__inst_executed.sum falls; with a causal mask so do the MMAs
//           (sm__ops_path_tensor_src_bf16_dst_fp32.sum).
// supports  fp16, bf16; head dims 32, 64, 128; any lengths, masks, GQA; softmax_scale >= 1e-37
#include "attn/kernel.h"
#include "emulator/warp_access.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "kernels/fragments.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::v4_unmasked_blocks {
using namespace attn;
using namespace flash2;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = 128, kBlockN = 64;  // B_r, B_c
  static constexpr int kNumWarps = 8, kThreads = 32 * kNumWarps, kBlocksPerSm = 1;
  static constexpr int kWarpRows = kBlockM / kNumWarps;
  static constexpr int kTiles = kWarpRows / 16;  // 16-row MMA tiles per warp
  static_assert(kBlockN % 16 == 0 && kHeadDim % 16 == 0, "warps own whole MMAs");
};

// XOR swizzle: offset of element (row, col) of a tile [rows, kHeadDim]. The 16-byte chunks of a row
// are permuted so that the 8 rows that ldmatrix reads at once lie in disjoint banks. Rows of 4
// chunks (d = 32) share the 32 banks in pairs, so their permutation changes every second row.
//! [swizzle]
template <int kHeadDim>
__host__ __device__ constexpr int swizzled_offset(int row, int col) {
  constexpr int kChunks = kHeadDim / 8;  // 4, 8 or 16 per row
  const int phase = kChunks >= 8 ? row % 8 : row / 2 % 4;
  return row * kHeadDim + ((col / 8) ^ phase) * 8 + col % 8;
}
template <int kHeadDim>
constexpr bool free_of_conflicts() {
  for (int col = 0; col < kHeadDim; col += 16)
    if (ldmatrix_access(  // Q and V
            [=](int l) { return 2 * swizzled_offset<kHeadDim>(l % 16, col + l / 16 * 8); }, 4)
                .conflicts() > 0 ||
        ldmatrix_access(  // K
            [=](int l) {
              return 2 * swizzled_offset<kHeadDim>(l / 16 * 8 + l % 8, col + l / 8 % 2 * 8);
            },
            4)
                .conflicts() > 0)
      return false;
  return true;
}
static_assert(free_of_conflicts<32>() && free_of_conflicts<64>() && free_of_conflicts<128>());
//! [swizzle]

template <class Element, class Config>
struct SharedStorage {
  alignas(128) Element sK[Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sV[Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sQ[Config::kBlockM * Config::kHeadDim];  // [kBlockM, d]
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ)
};

// Issues cp.async of rows [row0, row0 + kRows) of a [rows, d] matrix; rows past the end become 0.
// `tid` is one of the kThreads threads that share the work.
template <int kRows, int kThreads, class Config, class Element>
__device__ void load_tile(Element* tile, const Element* g, int row0, int rows, int tid) {
  constexpr int kChunks = Config::kHeadDim / 8;  // of 16 bytes, per row
#pragma unroll
  for (int i = tid; i < kRows * kChunks; i += kThreads) {
    const int r = i / kChunks, c = i % kChunks * 8;
    const bool inside = row0 + r < rows;
    cp_async_16(tile + swizzled_offset<Config::kHeadDim>(r, c),
                inside ? g + int64_t{row0 + r} * Config::kHeadDim + c : g, inside ? 16 : 0);
  }
}

// (3) S = Q K^T for the rows of this warp.
//! [scores]
template <class Config, class Element>
__device__ __forceinline__ void gemm_qk(float (&s)[Config::kTiles][Config::kBlockN / 8][4],
                                        const Element* sQ, const Element* sK) {
  const int lane_id = threadIdx.x % 32, row = threadIdx.x / 32 * Config::kWarpRows;
#pragma unroll
  for (int k = 0; k < Config::kHeadDim; k += 16) {
    uint32_t a[Config::kTiles][4], b[4];
#pragma unroll
    for (int m = 0; m < Config::kTiles; ++m)
      ldmatrix_x4(a[m], sQ + swizzled_offset<Config::kHeadDim>(row + 16 * m + lane_id % 16,
                                                               k + lane_id / 16 * 8));
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; n += 2) {  // two MMAs of 8 keys per ldmatrix
      ldmatrix_x4(b, sK + swizzled_offset<Config::kHeadDim>(8 * n + lane_id / 16 * 8 + lane_id % 8,
                                                            k + lane_id / 8 % 2 * 8));
#pragma unroll
      for (int m = 0; m < Config::kTiles; ++m) {
        mma_m16n8k16<Element>(s[m][n], a[m], {b[0], b[1]}, s[m][n]);
        mma_m16n8k16<Element>(s[m][n + 1], a[m], {b[2], b[3]}, s[m][n + 1]);
      }
    }
  }
}
//! [scores]

// (5) O += P V for the rows of this warp. `probabilities(step, a)` computes the A operand of 16
// keys.
//! [output]
template <class Config, class Element, class Probabilities>
__device__ __forceinline__ void gemm_pv(float (&o)[Config::kTiles][Config::kHeadDim / 8][4],
                                        Probabilities probabilities, const Element* sV) {
  const int lane_id = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < Config::kBlockN; k += 16) {
    uint32_t a[Config::kTiles][4], b[4];
    probabilities(k / 16, a);
#pragma unroll
    for (int n = 0; n < Config::kHeadDim / 8; n += 2) {
      ldmatrix_x4_trans(
          b, sV + swizzled_offset<Config::kHeadDim>(k + lane_id % 16, 8 * n + lane_id / 16 * 8));
#pragma unroll
      for (int m = 0; m < Config::kTiles; ++m) {
        mma_m16n8k16<Element>(o[m][n], a[m], {b[0], b[1]}, o[m][n]);
        mma_m16n8k16<Element>(o[m][n + 1], a[m], {b[2], b[3]}, o[m][n + 1]);
      }
    }
  }
}
//! [output]

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    attention_kernel(const Element* gQ,  // [B, Hq, seqlen_q, d]
                     const Element* gK,  // [B, Hkv, seqlen_k, d]
                     const Element* gV,  // [B, Hkv, seqlen_k, d]
                     Element* gO,        // [B, Hq, seqlen_q, d]
                     float* gLse,        // [B, Hq, seqlen_q]
                     Shape shape, int num_m_blocks, int num_heads) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kTiles = Config::kTiles, kWarpRows = Config::kWarpRows;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int lane_id = threadIdx.x % 32, warp_rows = threadIdx.x / 32 * kWarpRows;
  const int quad_row = lane_id / 4, quad_col = 2 * (lane_id % 4);  // position in an accumulator
  // Longest query tiles first (LPT order: longest processing time first), across all heads.
  const int row0 = (num_m_blocks - 1 - blockIdx.x / num_heads) * kBlockM;
  const int64_t bh = blockIdx.x % num_heads, bh_kv = bh / (shape.heads / shape.kv_heads);
  const int64_t q0 = bh * shape.seqlen_q;  // first row of this head
  const Element* q = gQ + q0 * kHeadDim;
  const Element* k = gK + bh_kv * shape.seqlen_k * kHeadDim;
  const Element* v = gV + bh_kv * shape.seqlen_k * kHeadDim;
  const int causal_offset = shape.seqlen_k - shape.seqlen_q;
  const float softmax_scale_log2 = shape.softmax_scale * kLog2e;
  constexpr int kThreads = Config::kThreads;
  // Row r (0 or 1) of this lane in accumulator tile m.
  const int warp_row0 = row0 + warp_rows;
  const auto row = [&](int m, int r) { return warp_row0 + 16 * m + 8 * r + quad_row; };
  const KvBlockRange kv_range =
      kv_block_range(shape, shape.seqlen_q, shape.seqlen_k, row0, kBlockM, kBlockN);

  // (1) Issue the copies of Q_i, which stays in shared memory, and of the first K_j.
  if (kv_range.begin < kv_range.end) {
    load_tile<kBlockM, kThreads, Config>(smem.sQ, q, row0, shape.seqlen_q, threadIdx.x);
    load_tile<kBlockN, kThreads, Config>(smem.sK, k, kv_range.begin * kBlockN, shape.seqlen_k,
                                         threadIdx.x);
    cp_async_commit();
  }
  float o[kTiles][kHeadDim / 8][4] = {};  // unnormalised
  // row_max in log2 units; row_sum of this lane's keys
  float row_max[kTiles][2], row_sum[kTiles][2] = {};
  for (int m = 0; m < kTiles; ++m) row_max[m][0] = row_max[m][1] = kLowest;

  // One KV block. `masked` is a compile-time flag: the unmasked body compares no index.
  const auto process_kv_block = [&](int n_block, auto masked) {
    const int key0 = n_block * kBlockN;
    // A warp skips a masked block in which all its rows are masked.
    const bool idle =
        masked.value && (key0 > warp_row0 + kWarpRows - 1 + causal_offset + shape.window_right ||
                         key0 + kBlockN <= warp_row0 + causal_offset - shape.window_left);
    // (2) Issue V_j: in flight during Q K^T. At each of the two waits at most one cp.async group is
    // in flight, so cp_async_wait<0> waits for that group only.
    //! [pipeline]
    cp_async_wait<0>();
    __syncthreads();  // K_j is visible; all warps have read V_j-1
    load_tile<kBlockN, kThreads, Config>(smem.sV, v, n_block * kBlockN, shape.seqlen_k,
                                         threadIdx.x);
    cp_async_commit();
    //! [pipeline]

    // (3) S = Q K^T, -inf where masked.
    float s[kTiles][kBlockN / 8][4] = {};
    if (!idle) {
      gemm_qk<Config>(s, smem.sQ, smem.sK);
      const int row_minus_col = row(0, 0) + causal_offset - key0 - quad_col;
      if constexpr (masked.value) apply_mask(s, shape, row_minus_col, shape.seqlen_k - key0);
    }

    // K_j+1 is in flight during softmax and P V.
    //! [pipeline_k]
    cp_async_wait<0>();
    __syncthreads();  // V_j is visible; all warps have read K_j
    if (n_block + 1 < kv_range.end)
      load_tile<kBlockN, kThreads, Config>(smem.sK, k, (n_block + 1) * kBlockN, shape.seqlen_k,
                                           threadIdx.x);
    cp_async_commit();
    //! [pipeline_k]
    if (idle) return;

      // (4) Online softmax, within the quad of lanes that share a row.
      //! [softmax]
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float max = -INFINITY;
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n)
          max = fmaxf(max, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
        max = fmaxf(row_max[m][r], quad_max(max) * softmax_scale_log2);
        const float rescale = exp2f(row_max[m][r] - max);
        row_max[m][r] = max;
        row_sum[m][r] *= rescale;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n)
          o[m][n][2 * r] *= rescale, o[m][n][2 * r + 1] *= rescale;
      }
    const auto exponentials = [&](int m, int step) {
#pragma unroll
      for (int n = 2 * step; n < 2 * step + 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[m][n][i] = exp2f(fmaf(s[m][n][i], softmax_scale_log2, -row_max[m][i / 2]));
          row_sum[m][i / 2] += s[m][n][i];
        }
    };
    // Two neighbouring accumulators of S, rounded and packed in pairs, are one A fragment of P V.
    const auto probabilities = [&](int step, uint32_t(&a)[kTiles][4]) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        exponentials(m, step);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&p)[4] = s[m][2 * step + i / 2];
          a[m][i] = pack2<Element>(p[2 * (i % 2)], p[2 * (i % 2) + 1]);
        }
      }
    };
    //! [softmax]

    // (5) O += P V
    gemm_pv<Config>(o, probabilities, smem.sV);
  };
  //! [loops]
  for (int n_block = kv_range.begin; n_block < kv_range.end; ++n_block)
    if (n_block >= kv_range.unmasked_begin && n_block < kv_range.unmasked_end)
      process_kv_block(n_block, std::false_type{});
    else  // left edge of the window; diagonal, right edge, end of the keys
      process_kv_block(n_block, std::true_type{});
      //! [loops]

      // (7) O = O / l, once; (8) store O and lse.
      //! [finish]
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(row_sum[m][r]);
      const float factor = sum != 0 ? 1 / sum : 0;  // fully masked row: O = 0
      if (row(m, r) >= shape.seqlen_q) continue;
      const int64_t idx = (q0 + row(m, r)) * kHeadDim + quad_col;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n)
        *reinterpret_cast<uint32_t*>(gO + idx + 8 * n) =
            pack2<Element>(o[m][n][2 * r] * factor, o[m][n][2 * r + 1] * factor);
      if (quad_col == 0)
        gLse[q0 + row(m, r)] = sum != 0 ? kLn2 * row_max[m][r] + logf(sum) : -INFINITY;
    }
  //! [finish]
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const int64_t num_m_blocks = ceil_div(p.seqlen_q, Config::kBlockM), num_heads = p.heads * p.batch;
  // A dry run: the cost model only asks for the tiles.
  if (args.report_tiling(
          {Config::kBlockM, Config::kBlockN, num_heads, Config::kBlocksPerSm, Config::kWarpRows}))
    return Status::success();
  const ForwardParams<Element> params(args);
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config>,
                       dim3(static_cast<unsigned>(num_m_blocks * num_heads)),
                       dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), args.stream,
                       params.q, params.k, params.v, params.o, params.lse, shape_of(p),
                       static_cast<int>(num_m_blocks), static_cast<int>(num_heads));
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    switch (args.problem.head_dim) {
      case 32: return launch<Element, Config<32>>(args);
      case 64: return launch<Element, Config<64>>(args);
      case 128: return launch<Element, Config<128>>(args);
    }
    return Status::unsupported("only head dims 32, 64 and 128");
  });
}

}  // namespace ATTN_BACKEND::v4_unmasked_blocks
