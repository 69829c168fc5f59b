// v5_tensor_core: both GEMMs on tensor cores, by mma.sync and ldmatrix.
//
// parent    v4_split_keys
// change    One mma.m16n8k16 computes 16 x 8 scores over 16 elements of d. Its accumulators have
//           the layout that a lane's scores already have. Two neighbouring accumulators of S,
//           rounded and packed in pairs, are the A fragment of P V, so P stays in its lane.
// why       The tensor peak is 15 times the FP32 peak (H200 datasheet, for wgmma).
// expect    sm__ops_path_tensor_src_bf16_dst_fp32 rises from 0. Left for chapter 04: the traffic
//           of O, and the exchange between warps.
// supports  fp16, bf16; head dims 32, 64, 128; any lengths, masks, GQA, dropout
// source    PTX ISA, "Matrix fragments for mma.m16n8k16"
#include "attn/kernel.h"
#include "kernels/bank_conflicts.h"
#include "kernels/dropout.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::v5_tensor_core {
using namespace attn;
using namespace flash1;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  // warps along the queries and along the keys of a tile
  static constexpr int kWarpsM = 1, kWarpsN = kHeadDim == 32 ? 2 : 4;
  static constexpr int kTiles = 1, kGroupRows = 16 * kTiles;  // kTiles: 16-row MMA tiles per warp
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kBlockM = kGroupRows * kWarpsM, kBlockN = 128;  // B_r, B_c
  static constexpr int kWarpKeys = kBlockN / kWarpsN;                  // keys per warp
  static constexpr int kSlice = kHeadDim / kWarpsN;  // columns of O that a warp adds and stores
  static_assert(kWarpKeys % 16 == 0 && kSlice % 16 == 0, "warps own whole MMAs");
  static_assert((kWarpsN & (kWarpsN - 1)) == 0, "warp_n ^ w is another warp");
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
static_assert(free_of_conflicts(swizzled_offset<32>, 32) &&
                  free_of_conflicts(swizzled_offset<64>, 64) &&
                  free_of_conflicts(swizzled_offset<128>, 128),
              "ldmatrix reads without conflicts");
//! [swizzle]

//! [maxsum]
// Online softmax state of a set of scores: maximum m and sum l of exp(score - m).
struct SoftmaxState {
  float max = kNothing, sum = 0;
  // Finite initial row maximum: avoids (-inf) - (-inf) = NaN.
  static constexpr float kNothing = -3.4028234e38f;
};
//! [maxsum]

template <class Element, class Config>
struct SharedStorage {
  alignas(128) Element sK[Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sV[Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sQ[Config::kBlockM * Config::kHeadDim];  // [kBlockM, d]
  float sMax[Config::kWarpsN][Config::kBlockM];                 // row maximum over each warp's keys
  float sSum[Config::kWarpsN][Config::kBlockM];
  // Partial O: sO[group][owner][w - 1] is the slice that warp owner ^ w sends to warp owner.
  float sO[Config::kWarpsM][Config::kWarpsN][Config::kWarpsN - 1]
          [Config::kGroupRows * Config::kSlice];
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sMax, sSum, sO)
};

// Swizzled offset of elements (row, col) and (row, col + 1) of a slice of sO. The 4 lanes of a row
// store 32 contiguous bytes; from slices of 32 columns on, rows with equal col are spread over the
// banks.
template <class Config>
__device__ int exchange_offset(int row, int col) {
  return row * Config::kSlice + ((col / 8) ^ (row % (Config::kSlice / 8))) * 8 + col % 8;
}

// Copies rows [row0, row0 + kRows) of a [rows, d] matrix; rows past the end become 0.
template <int kRows, class Config, class Element>
__device__ void load_tile(Element* tile, const Element* g, int row0, int rows) {
  constexpr int kChunks = Config::kHeadDim / 8;  // of 16 bytes, per row
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kChunks; i += Config::kThreads) {
    const int r = i / kChunks, c = i % kChunks * 8;
    const bool inside = row0 + r < rows;
    *reinterpret_cast<uint4*>(tile + swizzled_offset<Config::kHeadDim>(r, c)) =
        inside ? *reinterpret_cast<const uint4*>(g + int64_t{row0 + r} * Config::kHeadDim + c)
               : make_uint4(0, 0, 0, 0);
  }
}

// The KV tiles that at least one query of rows [row0, row0 + rows) sees. If there is none, the
// first tile is visited, fully masked, so that O = 0 and lse = -inf are written.
struct KvBlockRange {
  int begin, end;
};
__device__ KvBlockRange kv_block_range(const Shape& shape, int row0, int rows, int block_n) {
  const int last = min(row0 + rows, shape.seqlen_q) - 1,
            causal_offset = shape.seqlen_k - shape.seqlen_q;
  const int begin = max(0, row0 + causal_offset - shape.window_left);
  const int end = min(shape.seqlen_k, last + causal_offset + shape.window_right + 1);
  if (end <= begin) return {0, 1};
  return {begin / block_n, ceil_div(end, block_n)};
}

__device__ __forceinline__ float quad_max(float x) {  // over the 4 lanes that share a row
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// (3) S = Q K^T for the rows and the keys of this warp.
// Addresses of ldmatrix: lanes 0-15 give the 16 rows of Q at the left 8 columns, lanes 16-31 at the
// right 8. For K, lanes 0-7 give keys 0-7 at the left 8 columns, lanes 8-15 the same keys at the
// right 8, and lanes 16-31 do so for keys 8-15: two B operands.
//! [scores]
template <class Config, class Element>
__device__ __forceinline__ void gemm_qk(float (&s)[Config::kTiles][Config::kWarpKeys / 8][4],
                                        const Element* sQ, const Element* sK) {
  const int lane_id = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < Config::kHeadDim; k += 16) {
    uint32_t a[Config::kTiles][4], b[4];
#pragma unroll
    for (int m = 0; m < Config::kTiles; ++m)
      ldmatrix_x4(a[m], sQ + swizzled_offset<Config::kHeadDim>(16 * m + lane_id % 16,
                                                               k + lane_id / 16 * 8));
#pragma unroll
    for (int n = 0; n < Config::kWarpKeys / 8; n += 2) {  // two MMAs of 8 keys per ldmatrix
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

// (5) Partial O = P V over the keys of this warp, kSlice columns from `col0` on.
// Two neighbouring accumulators of S, rounded and packed in pairs, are one A fragment. B needs
// neighbours along the keys, and V is stored [key, d]: ldmatrix transposes. Lanes 0-15 give 16 keys
// at the left 8 columns, lanes 16-31 at the right 8: two B operands.
//! [output]
template <class Config, class Element>
__device__ __forceinline__ void gemm_pv(
    float (&o)[Config::kTiles][Config::kSlice / 8][4],
    const uint32_t (&p)[Config::kTiles][Config::kWarpKeys / 8][2], const Element* sV, int col0) {
  const int lane_id = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < Config::kWarpKeys / 8; k += 2) {  // 16 keys per MMA
#pragma unroll
    for (int n = 0; n < Config::kSlice / 8; n += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, sV + swizzled_offset<Config::kHeadDim>(8 * k + lane_id % 16,
                                                                  col0 + 8 * n + lane_id / 16 * 8));
#pragma unroll
      for (int m = 0; m < Config::kTiles; ++m) {
        const uint32_t a[4] = {p[m][k][0], p[m][k][1], p[m][k + 1][0], p[m][k + 1][1]};
        mma_m16n8k16<Element>(o[m][n], a, {b[0], b[1]}, o[m][n]);
        mma_m16n8k16<Element>(o[m][n + 1], a, {b[2], b[3]}, o[m][n + 1]);
      }
    }
  }
}
//! [output]

template <class Element, class Config, bool kDropout>
__global__ void __launch_bounds__(Config::kThreads)
    attention_kernel(const Element* gQ,     // [B, Hq, seqlen_q, d]
                     const Element* gK,     // [B, Hkv, seqlen_k, d]
                     const Element* gV,     // [B, Hkv, seqlen_k, d]
                     Element* gO,           // [B, Hq, seqlen_q, d]
                     float* gLse,           // [B, Hq, seqlen_q]
                     float* gAccum,         // [B, Hq, seqlen_q, d]: O between visits
                     SoftmaxState* gState,  // [B, Hq, seqlen_q]: m and l between visits
                     Shape shape, uint64_t seed) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kWarpsN = Config::kWarpsN, kWarpKeys = Config::kWarpKeys, kSlice = Config::kSlice;
  constexpr int kTiles = Config::kTiles, kGroupRows = Config::kGroupRows;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int lane_id = threadIdx.x % 32, warp_m = threadIdx.x / 32 / kWarpsN,
            warp_n = threadIdx.x / 32 % kWarpsN;
  const int quad_row = lane_id / 4, quad_col = 2 * (lane_id % 4);  // position in an accumulator
  const int64_t bh = blockIdx.x, bh_kv = bh / (shape.heads / shape.kv_heads);
  const int64_t q0 = bh * shape.seqlen_q;  // first row of this head
  const Element* q = gQ + q0 * kHeadDim;
  const Element* k = gK + bh_kv * shape.seqlen_k * kHeadDim;
  const Element* v = gV + bh_kv * shape.seqlen_k * kHeadDim;
  const int causal_offset = shape.seqlen_k - shape.seqlen_q;
  const int group_row = kGroupRows * warp_m;                // first row of this warp's group
  Element* const group_q = smem.sQ + group_row * kHeadDim;  // [kGroupRows, d]
  // Row r (0 or 1) of this lane in accumulator tile m.
  const auto local_row = [&](int m, int r) { return group_row + 16 * m + 8 * r + quad_row; };

  for (int n_block = 0; n_block * kBlockN < shape.seqlen_k; ++n_block) {
    // (1) Load K_j and V_j.
    __syncthreads();  // all warps have read the previous K and V
    load_tile<kBlockN, Config>(smem.sK, k, n_block * kBlockN, shape.seqlen_k);
    load_tile<kBlockN, Config>(smem.sV, v, n_block * kBlockN, shape.seqlen_k);
    for (int row0 = 0; row0 < shape.seqlen_q; row0 += kBlockM) {
      const KvBlockRange kv_range = kv_block_range(shape, row0, kBlockM, kBlockN);
      if (n_block < kv_range.begin || n_block >= kv_range.end) continue;
      const bool first = n_block == kv_range.begin, last = n_block + 1 == kv_range.end;

      // (2) Load Q_i. The previous Q was last read two barriers ago.
      load_tile<kBlockM, Config>(smem.sQ, q, row0, shape.seqlen_q);
      __syncthreads();  // Q, K and V are visible; all warps have read the previous tile's results

      const int group_row0 = row0 + group_row;
      const auto row = [&](int m, int r) { return row0 + local_row(m, r); };

      // (3) S = scale Q K^T, -inf where masked.
      const int key0 = n_block * kBlockN + warp_n * kWarpKeys;
      // rightmost key visible to the first row under a causal mask
      const int diagonal = group_row0 + causal_offset;
      // Fully masked: the keys start after the last row's range or end before the first row's.
      const bool none = key0 >= min(shape.seqlen_k, diagonal + kGroupRows + shape.window_right) ||
                        key0 + kWarpKeys <= diagonal - shape.window_left;
      float s[kTiles][kWarpKeys / 8][4] = {};
      if (!none) gemm_qk<Config>(s, group_q, smem.sK + warp_n * kWarpKeys * kHeadDim);
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int n = 0; n < kWarpKeys / 8; ++n)
          for (int i = 0; i < 4; ++i) s[m][n][i] *= shape.softmax_scale;
      // Mask only tiles that a mask boundary crosses: keys not visible to every row.
      if (key0 < diagonal + kGroupRows - 1 - shape.window_left ||
          key0 + kWarpKeys > min(shape.seqlen_k, diagonal + shape.window_right + 1)) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
          for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int key = key0 + 8 * n + quad_col + i % 2,
                        row_diagonal = row(m, i / 2) + causal_offset;
              if (key < row_diagonal - shape.window_left ||
                  key > row_diagonal + shape.window_right || key >= shape.seqlen_k)
                s[m][n][i] = -INFINITY;
            }
      }

      // (4) Online softmax: row maximum of this warp's keys, then of all warps and the old state.
      //! [softmax]
      float row_max[kTiles][2];
      SoftmaxState old[kTiles][2];
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          // Assigned here, because nvcc 13.0 applies the default initialisers only to old[0].
          old[m][r] = {};
          float& max = row_max[m][r] = SoftmaxState::kNothing;
#pragma unroll
          for (int n = 0; n < kWarpKeys / 8; ++n)
            max = fmaxf(max, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
          max = quad_max(max);
          if (quad_col == 0) smem.sMax[warp_n][local_row(m, r)] = max;
          if (!first && row(m, r) < shape.seqlen_q) old[m][r] = gState[q0 + row(m, r)];
        }
      __syncthreads();  // the maxima of all warps are visible
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& max = row_max[m][r];
#pragma unroll
          for (int w = 1; w < kWarpsN; ++w)
            max = fmaxf(max, smem.sMax[warp_n ^ w][local_row(m, r)]);
          max = fmaxf(old[m][r].max, max);
          float sum = 0;
#pragma unroll
          for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              float& p = s[m][n][2 * r + c];
              p = __expf(p - max);
              sum += p;
            }
          sum = quad_sum(sum);
          if (quad_col == 0) smem.sSum[warp_n][local_row(m, r)] = sum;
          if constexpr (kDropout)  // after the sum: a dropped key still counts in l
            drop<kWarpKeys>(s[m], r, seed, bh, row(m, r), key0, shape.dropped);
        }
      //! [softmax]
      uint32_t p[kTiles][kWarpKeys / 8][2];
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int n = 0; n < kWarpKeys / 8; ++n)
          p[m][n][0] = pack2<Element>(s[m][n][0], s[m][n][1]),
          p[m][n][1] = pack2<Element>(s[m][n][2], s[m][n][3]);

      // (5) P V over this warp's keys. (6) The slices that other warps own come first, through sO.
      //! [exchange]
      const Element* const v_tile = smem.sV + warp_n * kWarpKeys * kHeadDim;
#pragma unroll
      for (int w = 1; w < kWarpsN; ++w) {
        const int owner = warp_n ^ w;
        float theirs[kTiles][kSlice / 8][4] = {};
        if (!none) gemm_pv<Config>(theirs, p, v_tile, owner * kSlice);
        float* const to = smem.sO[warp_m][owner][w - 1];
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
          for (int n = 0; n < kSlice / 8; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r)
              *reinterpret_cast<float2*>(
                  to + exchange_offset<Config>(16 * m + 8 * r + quad_row, 8 * n + quad_col)) =
                  make_float2(theirs[m][n][2 * r], theirs[m][n][2 * r + 1]);
      }
      float o[kTiles][kSlice / 8][4] = {};
      if (!none) gemm_pv<Config>(o, p, v_tile, warp_n * kSlice);
      __syncthreads();  // partial O and sums of all warps are visible
      //! [exchange]

      // (7) Merge with the old O_i, l_i, m_i and store.
      const float inverse_kept = kDropout ? 1 / (1 - float(shape.dropped) / 256) : 1;
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (row(m, r) >= shape.seqlen_q) continue;
          const float max = row_max[m][r], old_sum = old[m][r].sum * __expf(old[m][r].max - max);
          SoftmaxState now{max, old_sum};
#pragma unroll
          for (int w = 0; w < kWarpsN; ++w) now.sum += smem.sSum[w][local_row(m, r)];
          const float inverse_sum = now.sum != 0 ? 1 / now.sum : 0;
          const float old_factor = old_sum * inverse_sum, factor = inverse_kept * inverse_sum;
          const int64_t idx = (q0 + row(m, r)) * kHeadDim + warp_n * kSlice + quad_col;
#pragma unroll
          for (int n = 0; n < kSlice / 8; ++n) {
            float2 sum = make_float2(o[m][n][2 * r], o[m][n][2 * r + 1]);
#pragma unroll
            for (int w = 0; w < kWarpsN - 1; ++w) {
              const float2 part = *reinterpret_cast<const float2*>(
                  smem.sO[warp_m][warp_n][w] +
                  exchange_offset<Config>(16 * m + 8 * r + quad_row, 8 * n + quad_col));
              sum.x += part.x, sum.y += part.y;
            }
            const float2 old_o =
                first ? float2{} : *reinterpret_cast<const float2*>(gAccum + idx + 8 * n);
            const float2 x = make_float2(old_o.x * old_factor + sum.x * factor,
                                         old_o.y * old_factor + sum.y * factor);
            if (last)
              *reinterpret_cast<uint32_t*>(gO + idx + 8 * n) = pack2<Element>(x.x, x.y);
            else
              *reinterpret_cast<float2*>(gAccum + idx + 8 * n) = x;
          }
          if (warp_n == 0 && quad_col == 0) {
            gState[q0 + row(m, r)] = now;
            if (last) gLse[q0 + row(m, r)] = now.sum != 0 ? max + logf(now.sum) : -INFINITY;
          }
        }
    }
  }
}

template <class Element, class Config, bool kDropout>
Status launch(const Arguments& args) {
  const ForwardParams<Element> params(args);
  const Problem& p = args.problem;
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config, kDropout>,
                       dim3(static_cast<unsigned>(p.batch * p.heads)), dim3(Config::kThreads),
                       sizeof(SharedStorage<Element, Config>), args.stream, params.q, params.k,
                       params.v, params.o, params.lse, args.out<float>("accum"),
                       args.out<SoftmaxState>("state"), shape_of(p), p.seed);
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  return args.problem.dropout > 0 ? launch<Element, Config, true>(args)
                                  : launch<Element, Config, false>(args);
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

}  // namespace ATTN_BACKEND::v5_tensor_core
