// b2_tensor_core: the five products of the backward pass on tensor cores.
//
// parent    b1_scalar
// idea      mma.sync for S, dP, dV, dK and dQ. dK and dV of a tile of keys are accumulators, in registers for as
//           long as queries pass by. P and dS go through shared memory once, because two of the products want them
//           transposed. Q and dO of the next rows are on their way meanwhile. D is computed once, by a kernel
//           of its own. dQ between visits lies in HBM as the accumulators lie in the threads.
// expect    tensor cores in place of FP32: a factor of 10 and more. ncu: sm__ops_path_tensor_*.sum
// supports  fp16, bf16; head dims 32, 64, 128; any lengths, masks, GQA, dropout
#include "attn/kernel.h"
#include "attn/philox.h"
#include "emulator/warp_access.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::b2_tensor_core {
using namespace attn;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_, kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kBlockM = kHeadDim == 128 ? 64 : 128, kBlockN = 128;  // B_r, B_c
  // Each product has its own share of warps: rows x columns of its result.
  static constexpr int kScoreRows = kBlockM / 2, kScoreKeys = kBlockN / 4;  // S, dP: 2 x 4 warps
  static constexpr int kGradKeys = kBlockN / 4, kGradCols = kHeadDim / 2;   // dV, dK: 4 x 2 warps
  static constexpr int kQueryWarpsN = kHeadDim == 32 ? 2 : 4;               // dQ: the others along the rows
  static constexpr int kQueryRows = kBlockM * kQueryWarpsN / kWarps, kQueryCols = kHeadDim / kQueryWarpsN;
  static_assert(kQueryRows % 16 == 0 && kQueryCols % 16 == 0 && kGradCols % 16 == 0, "warps own whole products");
};

// The swizzled offset of element (row, col) of a tile with rows of kWidth elements: its 16-byte chunks are exchanged
// among themselves, so that those of 8 rows in one column lie in 8 groups of 4 banks.
//! [swizzle]
template <int kWidth>
__host__ __device__ constexpr int swizzled_offset(int row, int col) {
  constexpr int kChunks = kWidth / 8;  // 4, 8 or 16 a row
  const int phase = kChunks >= 8 ? row % 8 : row / 2 % 4;
  return row * kWidth + ((col / 8) ^ phase) * 8 + col % 8;
}
template <int kWidth>
constexpr bool free_of_conflicts() {  // of the two ways in which product() reads
  for (int col = 0; col < kWidth; col += 16)
    if (ldmatrix_access([=](int l) { return 2 * swizzled_offset<kWidth>(l % 16, col + l / 16 * 8); }, 4).conflicts() > 0 ||
        ldmatrix_access([=](int l) { return 2 * swizzled_offset<kWidth>(l / 16 * 8 + l % 8, col + l / 8 % 2 * 8); }, 4)
                .conflicts() > 0)
      return false;
  return true;
}
static_assert(free_of_conflicts<32>() && free_of_conflicts<64>() && free_of_conflicts<128>());
//! [swizzle]

template <class Element, class Config>
struct SharedStorage {
  alignas(128) Element sK[Config::kBlockN * Config::kHeadDim];      // [kBlockN, d]
  alignas(128) Element sV[Config::kBlockN * Config::kHeadDim];      // [kBlockN, d]
  alignas(128) Element sQ[2][Config::kBlockM * Config::kHeadDim];   // [kBlockM, d], in turns
  alignas(128) Element sdO[2][Config::kBlockM * Config::kHeadDim];  // [kBlockM, d], in turns
  alignas(128) Element sP[Config::kBlockM * Config::kBlockN];       // [kBlockM, kBlockN]
  alignas(128) Element sdS[Config::kBlockM * Config::kBlockN];      // [kBlockM, kBlockN]
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sdO, sP, sdS)
};

// Starts to copy rows [row0, row0 + kRows) of a [rows, d] matrix; what lies beyond its end becomes 0.
template <int kRows, class Config, class Element>
__device__ void load_tile(Element* tile, const Element* g, int row0, int rows) {
  constexpr int kVectors = Config::kHeadDim / 8;  // of 16 bytes, a row
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kVectors; i += Config::kThreads) {
    const int r = i / kVectors, c = i % kVectors * 8;
    const bool inside = row0 + r < rows;
    cp_async_16(tile + swizzled_offset<Config::kHeadDim>(r, c),
                inside ? g + int64_t{row0 + r} * Config::kHeadDim + c : g, inside ? 16 : 0);
  }
}

// The blocks of keys that some query of rows [row0, row0 + rows) sees. Where there is none the first one is
// visited all the same, so that the rows get their dQ = 0.
struct BlockRange {
  int begin, end;
};
__device__ BlockRange blocks_seen(const Shape& shape, int row0, int rows, int block_n) {
  const int last = min(row0 + rows, shape.seqlen_q) - 1, shift = shape.seqlen_k - shape.seqlen_q;
  const int begin = max(0, row0 + shift - shape.window_left);
  const int end = min(shape.seqlen_k, last + shift + shape.window_right + 1);
  if (end <= begin) return {0, 1};
  return {begin / block_n, ceil_div(end, block_n)};
}

// C += A B for one warp: rows from `row0`, columns from `col0` on. A is [rows, kK] in shared memory, or its
// transpose [kK, rows]; B is [kK, columns], or its transpose. Widths are those of the rows as they are stored.
//! [product]
template <int kK, bool kTransposedA, bool kTransposedB, int kWidthA, int kWidthB, int kTilesM, int kTilesN,
          class Element>
__device__ __forceinline__ void product(float (&c)[kTilesM][kTilesN][4], const Element* sA, int row0,
                                        const Element* sB, int col0) {
  const int lane_id = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kK; k += 16) {
    uint32_t a[kTilesM][4], b[4];
#pragma unroll
    for (int m = 0; m < kTilesM; ++m)
      if constexpr (kTransposedA)
        ldmatrix_x4_trans(a[m], sA + swizzled_offset<kWidthA>(k + lane_id / 16 * 8 + lane_id % 8,
                                                    row0 + 16 * m + lane_id / 8 % 2 * 8));
      else
        ldmatrix_x4(a[m], sA + swizzled_offset<kWidthA>(row0 + 16 * m + lane_id % 16, k + lane_id / 16 * 8));
#pragma unroll
    for (int n = 0; n < kTilesN; n += 2) {
      if constexpr (kTransposedB)
        ldmatrix_x4(b, sB + swizzled_offset<kWidthB>(col0 + 8 * n + lane_id / 16 * 8 + lane_id % 8, k + lane_id / 8 % 2 * 8));
      else
        ldmatrix_x4_trans(b, sB + swizzled_offset<kWidthB>(k + lane_id % 16, col0 + 8 * n + lane_id / 16 * 8));
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        mma_m16n8k16<Element>(c[m][n], a[m], {b[0], b[1]}, c[m][n]);
        mma_m16n8k16<Element>(c[m][n + 1], a[m], {b[2], b[3]}, c[m][n + 1]);
      }
    }
  }
}
//! [product]

// (1) D = rowsum(dO . O), eight numbers a lane.
//! [dot]
template <class Element, int kHeadDim>
__global__ void dot_kernel(const Element* gO,   // [rows, d]
                           const Element* gdO,  // [rows, d]
                           float* gD,           // [rows]
                           int64_t rows) {
  constexpr int kLanes = kHeadDim / 8;  // of a row
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, row = thread / kLanes;
  float sum = 0;
  if (row < rows) {
    const uint4 o = reinterpret_cast<const uint4*>(gO)[thread], d_o = reinterpret_cast<const uint4*>(gdO)[thread];
    const uint32_t a[4] = {o.x, o.y, o.z, o.w}, b[4] = {d_o.x, d_o.y, d_o.z, d_o.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += unpack<Element>(a[i / 2], i % 2) * unpack<Element>(b[i / 2], i % 2);
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (row < rows && thread % kLanes == 0) gD[row] = sum;
}
//! [dot]

template <class Element, class Config, bool kDropout>
__global__ void __launch_bounds__(Config::kThreads)
    attention_backward_kernel(const Element* gQ,   // [B, Hq, seqlen_q, d]
                              const Element* gK,   // [B, Hkv, seqlen_k, d]
                              const Element* gV,   // [B, Hkv, seqlen_k, d]
                              const Element* gdO,  // [B, Hq, seqlen_q, d]
                              const float* gLse,   // [B, Hq, seqlen_q]
                              const float* gD,     // [B, Hq, seqlen_q]
                              Element* gdQ,        // [B, Hq, seqlen_q, d]
                              Element* gdK,        // [B, Hkv, seqlen_k, d]
                              Element* gdV,        // [B, Hkv, seqlen_k, d]
                              float4* gAccum,      // [B, Hq, num_m_blocks, fragments, threads]: dQ between visits
                              Shape shape, uint64_t seed) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int quad_row = lane_id / 4, quad_col = 2 * (lane_id % 4);  // place in an accumulator
  // This warp's parts of the products.
  const int score_row = warp_id / 4 * Config::kScoreRows, score_key = warp_id % 4 * Config::kScoreKeys;
  const int grad_key = warp_id / 2 * Config::kGradKeys, grad_col = warp_id % 2 * Config::kGradCols;
  const int query_row = warp_id / Config::kQueryWarpsN * Config::kQueryRows;
  const int query_col = warp_id % Config::kQueryWarpsN * Config::kQueryCols;
  const int64_t bh_kv = blockIdx.x, k0 = bh_kv * shape.seqlen_k;
  const int group = shape.heads / shape.kv_heads, shift = shape.seqlen_k - shape.seqlen_q;
  const int num_m_blocks = ceil_div(shape.seqlen_q, kBlockM);
  const float softmax_scale_log2 = shape.softmax_scale * 1.44269504f;  // log2(e)
  const float inverse_kept = kDropout ? 1 / (1 - float(shape.dropped) / 256) : 1;

  for (int n_block = 0; n_block * kBlockN < shape.seqlen_k; ++n_block) {
    const int key0 = n_block * kBlockN;
    // The visits: of each head that shares these keys, the blocks of rows that see one of them.
    const auto next_visit = [&](int visit) {
      for (; visit < group * num_m_blocks; ++visit) {
        const BlockRange seen = blocks_seen(shape, visit % num_m_blocks * kBlockM, kBlockM, kBlockN);
        if (seen.begin <= n_block && n_block < seen.end) break;
      }
      return visit;
    };
    const auto load_rows = [&](int visit, int stage) {
      const int64_t q0 = (bh_kv * group + visit / num_m_blocks) * shape.seqlen_q;
      const int row0 = visit % num_m_blocks * kBlockM;
      load_tile<kBlockM, Config>(smem.sQ[stage], gQ + q0 * kHeadDim, row0, shape.seqlen_q);
      load_tile<kBlockM, Config>(smem.sdO[stage], gdO + q0 * kHeadDim, row0, shape.seqlen_q);
    };

    // (2) load K_j, V_j and the first rows
    int visit = next_visit(0), stage = 0;
    __syncthreads();  // all are done with the tiles before
    load_tile<kBlockN, Config>(smem.sK, gK + k0 * kHeadDim, key0, shape.seqlen_k);
    load_tile<kBlockN, Config>(smem.sV, gV + k0 * kHeadDim, key0, shape.seqlen_k);
    if (visit < group * num_m_blocks) load_rows(visit, stage);
    cp_async_commit();
    float dk[Config::kGradKeys / 16][Config::kGradCols / 8][4] = {};
    float dv[Config::kGradKeys / 16][Config::kGradCols / 8][4] = {};

    for (int following; visit < group * num_m_blocks; visit = following, stage ^= 1) {
      const int m_block = visit % num_m_blocks, row0 = m_block * kBlockM;
      const int64_t bh = bh_kv * group + visit / num_m_blocks, q0 = bh * shape.seqlen_q;
      const BlockRange seen = blocks_seen(shape, row0, kBlockM, kBlockN);
      const bool first = n_block == seen.begin, last = n_block + 1 == seen.end;
      constexpr int kTiles = Config::kScoreRows / 16;
      float lse_log2[kTiles][2], row_dot[kTiles][2];
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = row0 + score_row + 16 * m + 8 * r + quad_row;
          const float lse = row < shape.seqlen_q ? gLse[q0 + row] : -INFINITY;
          lse_log2[m][r] = lse == -INFINITY ? INFINITY : lse * 1.44269504f;  // P = 0 where nothing is seen
          row_dot[m][r] = row < shape.seqlen_q ? gD[q0 + row] : 0;
        }
      cp_async_wait<0>();
      __syncthreads();  // the rows are there; all are done with P, dS and the other stage
      following = next_visit(visit + 1);
      if (following < group * num_m_blocks) load_rows(following, stage ^ 1);
      cp_async_commit();

      // (3) S = Q K^T, dP = dO V^T
      float s[kTiles][Config::kScoreKeys / 8][4] = {}, dp[kTiles][Config::kScoreKeys / 8][4] = {};
      product<kHeadDim, false, true, kHeadDim, kHeadDim>(s, smem.sQ[stage], score_row, smem.sK, score_key);
      product<kHeadDim, false, true, kHeadDim, kHeadDim>(dp, smem.sdO[stage], score_row, smem.sV, score_key);

      // (4) P = exp(scale S - lse), dS = P (dP - D)
      //! [recompute]
      const int diagonal = row0 + score_row + shift;  // the last key that a causal mask leaves to the first row
      if (key0 + score_key < diagonal + Config::kScoreRows - 1 - shape.window_left ||
          key0 + score_key + Config::kScoreKeys > min(shape.seqlen_k, diagonal + shape.window_right + 1)) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
          for (int n = 0; n < Config::kScoreKeys / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int key = key0 + score_key + 8 * n + quad_col + i % 2;
              const int own = diagonal + 16 * m + 8 * (i / 2) + quad_row;
              if (key < own - shape.window_left || key > own + shape.window_right || key >= shape.seqlen_k)
                s[m][n][i] = -INFINITY;
            }
      }
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = score_row + 16 * m + 8 * r + quad_row;
          // Dropout: the bytes of the forward pass again; those of the keys before this warp's are skipped.
          PhiloxBits bits{};
          if constexpr (kDropout)
            bits = dropout_bits(seed, bh, row0 + row, (key0 + score_key) / 64, lane_id % 4);
#pragma unroll
          for (int n = 0; n < Config::kScoreKeys / 8; ++n) {
            float p[2], ds[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const int i = 2 * r + c;
              p[c] = exp2f(fmaf(s[m][n][i], softmax_scale_log2, -lse_log2[m][r]));
              float z = inverse_kept;
              if constexpr (kDropout)
                if (bits.byte(score_key % 64 / 4 + 2 * n + c) < static_cast<uint32_t>(shape.dropped)) z = 0;
              ds[c] = p[c] * (dp[m][n][i] * z - row_dot[m][r]);
              if (z == 0) p[c] = 0;  // the factor comes at the end: a P of 1 is rounded to 1
            }
            const int at = swizzled_offset<kBlockN>(row, score_key + 8 * n + quad_col);
            *reinterpret_cast<uint32_t*>(smem.sP + at) = pack2<Element>(p[0], p[1]);
            *reinterpret_cast<uint32_t*>(smem.sdS + at) = pack2<Element>(ds[0], ds[1]);
          }
        }
      //! [recompute]
      __syncthreads();  // P and dS are there, of all warps

      // (5) dV += P^T dO, dK += dS^T Q
      product<kBlockM, true, false, kBlockN, kHeadDim>(dv, smem.sP, grad_key, smem.sdO[stage], grad_col);
      product<kBlockM, true, false, kBlockN, kHeadDim>(dk, smem.sdS, grad_key, smem.sQ[stage], grad_col);

      // (6) dQ += dS K: nobody but this thread reads or writes these places, at any visit
      //! [dq]
      constexpr int kFragments = Config::kQueryRows / 16 * (Config::kQueryCols / 8);
      float4* const accum = gAccum + (bh * num_m_blocks + m_block) * kFragments * Config::kThreads + threadIdx.x;
      float dq[Config::kQueryRows / 16][Config::kQueryCols / 8][4] = {};
      if (!first)
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          const float4 before = accum[f * Config::kThreads];
          float(&to)[4] = dq[f / (Config::kQueryCols / 8)][f % (Config::kQueryCols / 8)];
          to[0] = before.x, to[1] = before.y, to[2] = before.z, to[3] = before.w;
        }
      product<kBlockN, false, false, kBlockN, kHeadDim>(dq, smem.sdS, query_row, smem.sK, query_col);
#pragma unroll
      for (int m = 0; m < Config::kQueryRows / 16; ++m)
#pragma unroll
        for (int n = 0; n < Config::kQueryCols / 8; ++n) {
          const float(&from)[4] = dq[m][n];
          if (!last) {
            accum[(m * (Config::kQueryCols / 8) + n) * Config::kThreads] =
                make_float4(from[0], from[1], from[2], from[3]);
            continue;
          }
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int row = row0 + query_row + 16 * m + 8 * r + quad_row;
            if (row < shape.seqlen_q)
              *reinterpret_cast<uint32_t*>(gdQ + (q0 + row) * kHeadDim + query_col + 8 * n + quad_col) =
                  pack2<Element>(from[2 * r] * shape.softmax_scale, from[2 * r + 1] * shape.softmax_scale);
          }
        }
      //! [dq]
    }

    // (7) store dK_j, dV_j
#pragma unroll
    for (int m = 0; m < Config::kGradKeys / 16; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = key0 + grad_key + 16 * m + 8 * r + quad_row;
        if (key >= shape.seqlen_k) continue;
#pragma unroll
        for (int n = 0; n < Config::kGradCols / 8; ++n) {
          const int64_t at = (k0 + key) * kHeadDim + grad_col + 8 * n + quad_col;
          *reinterpret_cast<uint32_t*>(gdV + at) =
              pack2<Element>(dv[m][n][2 * r] * inverse_kept, dv[m][n][2 * r + 1] * inverse_kept);
          *reinterpret_cast<uint32_t*>(gdK + at) =
              pack2<Element>(dk[m][n][2 * r] * shape.softmax_scale, dk[m][n][2 * r + 1] * shape.softmax_scale);
        }
      }
  }
}

template <class Element, class Config, bool kDropout>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const int64_t rows = p.batch * p.heads * p.seqlen_q;
  args.phase("dot");
  const Status status =
      launch_kernel(dot_kernel<Element, Config::kHeadDim>,
                    dim3(static_cast<unsigned>(ceil_div(rows * Config::kHeadDim, int64_t{8 * 256}))), dim3(256), 0,
                    args.stream, args.in<Element>("o"), args.in<Element>("do"), args.out<float>("dot"), rows);
  if (!status.ok()) return status;
  args.phase("attention_backward");
  return launch_kernel(attention_backward_kernel<Element, Config, kDropout>,
                       dim3(static_cast<unsigned>(p.batch * p.kv_heads)), dim3(Config::kThreads),
                       sizeof(SharedStorage<Element, Config>), args.stream, args.in<Element>("q"),
                       args.in<Element>("k"), args.in<Element>("v"), args.in<Element>("do"),
                       args.in<float>("lse"), args.in<float>("dot"), args.out<Element>("dq"),
                       args.out<Element>("dk"), args.out<Element>("dv"), args.out<float4>("accum"),
                       shape_of(p), p.seed);
}

template <class Element, int kHeadDim>
Status launch(const Arguments& args) {
  return args.problem.dropout > 0 ? launch<Element, Config<kHeadDim>, true>(args)
                                  : launch<Element, Config<kHeadDim>, false>(args);
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    switch (args.problem.head_dim) {
      case 32: return launch<Element, 32>(args);
      case 64: return launch<Element, 64>(args);
      case 128: return launch<Element, 128>(args);
    }
    return Status::unsupported("head dims 32, 64 and 128 alone");
  });
}

}  // namespace ATTN_BACKEND::b2_tensor_core
