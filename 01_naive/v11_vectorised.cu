// v11_vectorised: 16-byte accesses to S, P and O.
//
// parent    v10_ldmatrix
// change    The softmax processes four keys per lane: float4 loads of S, 8-byte stores of P. The
//           products stage their results in shared memory, from fragment order to rows, and store
//           16 bytes per lane.
// why       Fragments stored directly write only 32 bytes (O: 16) of each of 8 rows per request.
// expect    Store sectors per request of the products rise from 8 to 16. The softmax is HBM-bound;
//           it becomes faster because fewer requests keep more bytes in flight.
// supports  fp16, bf16; head dims that are a multiple of 8 (16-byte rows); any lengths, masks, GQA
#include "attn/kernel.h"
#include "emulator/warp_access.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::v11_vectorised {
using namespace attn;

struct Config {
  static constexpr int kBlockM = 128, kBlockK = 64;  // kBlockN is 64 or 128
  static constexpr int kWarpsM = 4, kWarpsN = 2, kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kWarpM = kBlockM / kWarpsM;  // 32 rows per warp: two m16 tiles
  static constexpr int kVector = 8;  // elements per 16 bytes
  static constexpr std::size_t kMaxRowBytes = 224 * 1024;  // longest row kept in shared memory
};

// Tile rows are padded by 16 bytes, so the 8 rows of an ldmatrix phase start in 8 different groups
// of 4 banks: no bank conflicts.
constexpr int padded(int columns) { return columns + Config::kVector; }
constexpr int64_t row_of_matrix(int lane, int stride) { return 2 * (lane % 16) * stride; }
static_assert(
    ldmatrix_access([](int l) { return row_of_matrix(l, padded(64)); }, 4).conflicts() == 0 &&
        ldmatrix_access([](int l) { return row_of_matrix(l, padded(128)); }, 4).conflicts() == 0,
    "ldmatrix reads a tile without bank conflicts");

template <class Element, int kBlockN>
struct SharedStorage {
  static constexpr int kSmallerB = Config::kBlockK * padded(kBlockN);   // [kBlockK, kBlockN]
  static constexpr int kLargerB = kBlockN * padded(Config::kBlockK);    // [kBlockN, kBlockK]
  alignas(16) Element sA[Config::kBlockM * padded(Config::kBlockK)];    // 18432 bytes
  alignas(16) Element sB[kSmallerB > kLargerB ? kSmallerB : kLargerB];  // 18432 for kBlockN = 128
  ATTN_MEMBERS(SharedStorage, sA, sB)
};

// Copies a kRows x kColumns tile to shared memory in 16-byte vectors. Elements outside the matrix
// become 0; `rows` and `columns` are the matrix's extents, `columns` a multiple of 8.
template <int kRows, int kColumns, class Element>
__device__ void load_tile(Element* tile, const Element* matrix, int64_t stride, int row0, int rows,
                          int col0, int columns) {
  constexpr int kVectors = kColumns / Config::kVector;  // 16-byte vectors per tile row
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kVectors; i += Config::kThreads) {
    const int r = i / kVectors, c = i % kVectors * Config::kVector;
    const bool inside = row0 + r < rows && col0 + c < columns;
    *reinterpret_cast<uint4*>(tile + r * padded(kColumns) + c) =
        inside ? *reinterpret_cast<const uint4*>(matrix + (row0 + r) * stride + col0 + c)
               : make_uint4(0, 0, 0, 0);
  }
}

// Stores two adjacent results.
__device__ __forceinline__ void store2(float* to, float low, float high) {
  *reinterpret_cast<float2*>(to) = make_float2(low, high);
}
template <class Element>
__device__ __forceinline__ void store2(Element* to, float low, float high) {
  *reinterpret_cast<uint32_t*>(to) = pack2<Element>(low, high);
}

// Stores four adjacent probabilities.
template <class Element>
__device__ __forceinline__ void store4(Element* to, float a, float b, float c, float d) {
  if constexpr (sizeof(Element) == 4)
    *reinterpret_cast<float4*>(to) = make_float4(a, b, c, d);
  else
    *reinterpret_cast<uint2*>(to) = make_uint2(pack2<Element>(a, b), pack2<Element>(c, d));
}

// C[rows, columns] = A[rows, depth] * op(B), one kBlockM x kBlockN tile of C per block.
// Scores: op(B) = K^T has seqlen_k columns (`columns_b`); S is stored with `columns_c` columns.
// Output: op(B) = V has seqlen_k rows (`depth_b`); P has `depth_a` columns.
// Both are seqlen_k rounded up to 8, and the padding of S and P is 0.
//! [gemm]
template <bool kTransposeB, int kBlockN, class Element, class C>
__device__ void gemm_tile(const Element* gA, int64_t stride_a, const Element* gB, int64_t stride_b,
                          C* gC, int64_t stride_c, int rows, int columns_b, int columns_c,
                          int depth_a, int depth_b) {
  auto& smem = dynamic_shared<SharedStorage<Element, kBlockN>>();
  constexpr int kBlockM = Config::kBlockM, kBlockK = Config::kBlockK;
  constexpr int kWarpN = kBlockN / Config::kWarpsN;
  constexpr int kTilesM = Config::kWarpM / 16, kTilesN = kWarpN / 8;  // m16n8 tiles per warp
  const int row0 = blockIdx.y * kBlockM, col0 = blockIdx.x * kBlockN;
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const int warp_row = warp_id / Config::kWarpsN * Config::kWarpM;
  const int warp_col = warp_id % Config::kWarpsN * kWarpN;

  float acc[kTilesM][kTilesN][4] = {};
  for (int k0 = 0; k0 < depth_a; k0 += kBlockK) {
    load_tile<kBlockM, kBlockK>(smem.sA, gA, stride_a, row0, rows, k0, depth_a);
    if constexpr (kTransposeB)
      load_tile<kBlockN, kBlockK>(smem.sB, gB, stride_b, col0, columns_b, k0, depth_b);
    else
      load_tile<kBlockK, kBlockN>(smem.sB, gB, stride_b, k0, depth_b, col0, columns_b);
    __syncthreads();  // both tiles are complete
#pragma unroll
    for (int k = 0; k < kBlockK; k += 16) {
      uint32_t a[kTilesM][4], b[kTilesN][2];
#pragma unroll
      for (int i = 0; i < kTilesM;
           ++i)  // lanes 0-15 address rows at k, lanes 16-31 at k + 8
        ldmatrix_x4(a[i], smem.sA + (warp_row + 16 * i + lane_id % 16) * padded(kBlockK) + k +
                              lane_id / 16 * 8);
#pragma unroll
      for (int j = 0; j < kTilesN; j += 2) {  // one ldmatrix_x4 loads B of two MMAs
        uint32_t pair[4];
        if constexpr (kTransposeB)  // tile rows are columns of op(B): 2 x 8 columns, k and k + 8
          ldmatrix_x4(
              pair, smem.sB +
                        (warp_col + 8 * j + lane_id / 16 * 8 + lane_id % 8) * padded(kBlockK) + k +
                        lane_id / 8 % 2 * 8);
        else  // tile rows are rows of op(B): k and k + 8, 2 x 8 columns, transposed
          ldmatrix_x4_trans(pair, smem.sB + (k + lane_id % 16) * padded(kBlockN) + warp_col +
                                      8 * j + lane_id / 16 * 8);
        b[j][0] = pair[0], b[j][1] = pair[1], b[j + 1][0] = pair[2], b[j + 1][1] = pair[3];
      }
#pragma unroll
      for (int i = 0; i < kTilesM; ++i)
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) mma_m16n8k16<Element>(acc[i][j], a[i], b[j], acc[i][j]);
    }
    __syncthreads();  // all reads are done: the next tiles may overwrite
  }
  // Stage the results in shared memory, 16 rows per warp at a time, so that stores are full lines.
  constexpr int kVectorC = 16 / sizeof(C), kStrideC = kWarpN + kVectorC,
                kVectorsC = kWarpN / kVectorC;
  static_assert(8 * 16 * kStrideC * sizeof(C) <= sizeof(smem), "the results fit");
  C* sC = reinterpret_cast<C*>(&smem) + warp_id * 16 * kStrideC;  // [16, kWarpN], padded rows
#pragma unroll
  for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {  // d[0], d[1]: row g; d[2], d[3]: row g + 8
      C* to = sC + lane_id / 4 * kStrideC + 8 * j + lane_id % 4 * 2;
      store2(to, acc[i][j][0], acc[i][j][1]);
      store2(to + 8 * kStrideC, acc[i][j][2], acc[i][j][3]);
    }
    __syncwarp();  // the 16 rows are complete
#pragma unroll
    for (int v = lane_id; v < 16 * kVectorsC; v += 32) {
      const int r = v / kVectorsC, c = v % kVectorsC * kVectorC;
      const int row = row0 + warp_row + 16 * i + r, col = col0 + warp_col + c;
      if (row < rows && col < columns_c)
        *reinterpret_cast<uint4*>(gC + row * stride_c + col) =
            *reinterpret_cast<const uint4*>(sC + r * kStrideC + c);
    }
    __syncwarp();  // all reads are done: the next 16 rows may overwrite
  }
}
//! [gemm]

// (1) scores: S = Q K^T.
//! [scores]
template <class Element>
__global__ void __launch_bounds__(Config::kThreads, 2)  // 2 blocks per SM: 128 registers
    scores_kernel(const Element* gQ,  // [B, Hq, seqlen_q, d]
                  const Element* gK,  // [B, Hkv, seqlen_k, d]
                  float* gS,          // [B, Hq, seqlen_q, row_stride]
                  Shape shape, int row_stride) {
  const int64_t bh = blockIdx.z;                              // b * Hq + h
  const int64_t bh_kv = bh / (shape.heads / shape.kv_heads);  // b * Hkv + h / (Hq / Hkv)
  gemm_tile<true, 128>(gQ + bh * shape.seqlen_q * shape.head_dim, shape.head_dim,
                       gK + bh_kv * shape.seqlen_k * shape.head_dim, shape.head_dim,
                       gS + bh * shape.seqlen_q * row_stride, row_stride, shape.seqlen_q,
                       shape.seqlen_k, row_stride, shape.head_dim, shape.head_dim);
}
//! [scores]

// (2) P = softmax(scale * S) over the visible keys, one warp per row. A block is a single warp, so
// as many rows are resident on an SM as fit in its shared memory (an H200: at most 32 blocks).
//! [softmax]
template <class Element>
__global__ void __launch_bounds__(32)
    softmax_kernel(const float* __restrict__ gS,  // [B, Hq, seqlen_q, row_stride]
                   Element* __restrict__ gP,      // [B, Hq, seqlen_q, row_stride]
                   float* gLse,                   // [B, Hq, seqlen_q]
                   Shape shape, int row_stride, bool row_fits) {
  const int lane_id = threadIdx.x;
  const int row = blockIdx.x;
  const int64_t bh = blockIdx.z;
  const float* s = gS + (bh * shape.seqlen_q + row) * row_stride;  // [row_stride]
  Element* p = gP + (bh * shape.seqlen_q + row) * row_stride;      // [row_stride]
  float* sRow = &dynamic_shared<float>();                          // [row_stride] if it fits

  // Visible keys: [begin, end). Bottom-right alignment: the last query's diagonal is the last key.
  const int diagonal = row + shape.seqlen_k - shape.seqlen_q;
  const int begin = max(0, diagonal - shape.window_left);
  const int end = min(shape.seqlen_k, diagonal + shape.window_right + 1);

  // Four scaled scores; masked ones are -inf.
  const auto scores_at = [&](const float* from, int j) {
    const float4 x = *reinterpret_cast<const float4*>(from + j);
    const auto masked = [&](float score, int key) {
      return begin <= key && key < end ? score * shape.softmax_scale : -INFINITY;
    };
    return make_float4(masked(x.x, j), masked(x.y, j + 1), masked(x.z, j + 2), masked(x.w, j + 3));
  };
  const auto in_row = [&](int j) -> float4& { return *reinterpret_cast<float4*>(sRow + j); };
  const int first = begin / 4 * 4 + 4 * lane_id;  // this lane's quads: first, first + 128, ...

  float row_max = -INFINITY;
#pragma unroll 4
  for (int j = first; j < end; j += 128) {
    const float4 x = scores_at(s, j);
    row_max = fmaxf(row_max, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
    if (row_fits) in_row(j) = x;  // read by this lane only: no barrier
  }
  for (int offset = 16; offset > 0; offset /= 2)
    row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, offset));
  if (row_max == -INFINITY) row_max = 0;  // fully masked row: exp(-inf - 0) = 0, not NaN

  const auto exp_of = [&](float4 x) {
    return make_float4(__expf(x.x - row_max), __expf(x.y - row_max), __expf(x.z - row_max),
                       __expf(x.w - row_max));
  };
  float row_sum = 0;
#pragma unroll 4
  for (int j = first; j < end; j += 128) {
    const float4 e = exp_of(row_fits ? in_row(j) : scores_at(s, j));
    row_sum += (e.x + e.y) + (e.z + e.w);
    if (row_fits) in_row(j) = e;
  }
  for (int offset = 16; offset > 0; offset /= 2) row_sum += __shfl_xor_sync(~0u, row_sum, offset);
  // Fully masked row: P = 0, O = 0, lse = -inf.
  const float inverse_sum = row_sum != 0 ? 1 / row_sum : 0;
#pragma unroll 4
  for (int j = first % 128; j < row_stride; j += 128) {
    float4 e = make_float4(0, 0, 0, 0);
    if (first <= j && j < end) e = row_fits ? in_row(j) : exp_of(scores_at(s, j));
    store4(p + j, e.x * inverse_sum, e.y * inverse_sum, e.z * inverse_sum, e.w * inverse_sum);
  }
  if (lane_id == 0)
    gLse[bh * shape.seqlen_q + row] = row_sum != 0 ? row_max + logf(row_sum) : -INFINITY;
}
//! [softmax]

// (3) output: O = P V.
//! [output]
template <int kBlockN, class Element>
__global__ void __launch_bounds__(Config::kThreads, 2)  // 2 blocks per SM: 128 registers
    output_kernel(const Element* gP,  // [B, Hq, seqlen_q, row_stride]
                  const Element* gV,  // [B, Hkv, seqlen_k, d]
                  Element* gO,        // [B, Hq, seqlen_q, d]
                  Shape shape, int row_stride) {
  const int64_t bh = blockIdx.z;
  const int64_t bh_kv = bh / (shape.heads / shape.kv_heads);
  gemm_tile<false, kBlockN>(gP + bh * shape.seqlen_q * row_stride, row_stride,
                            gV + bh_kv * shape.seqlen_k * shape.head_dim, shape.head_dim,
                            gO + bh * shape.seqlen_q * shape.head_dim, shape.head_dim,
                            shape.seqlen_q, shape.head_dim, shape.head_dim, row_stride,
                            shape.seqlen_k);
}
//! [output]

template <class Element>
Status launch(const Arguments& args) {
  const ForwardParams<Element> params(args);
  const Shape shape = shape_of(args.problem);
  const int row_stride = round_up(shape.seqlen_k, Config::kVector);
  const auto heads = static_cast<unsigned>(args.problem.batch * args.problem.heads);
  const auto rows = static_cast<unsigned>(ceil_div(shape.seqlen_q, Config::kBlockM));
  const dim3 block(Config::kThreads);
  const auto blocks = [](int n, int tile) { return static_cast<unsigned>(ceil_div(n, tile)); };
  const std::size_t row_bytes = sizeof(float) * static_cast<std::size_t>(row_stride);
  const bool row_fits = row_bytes <= Config::kMaxRowBytes;

  args.phase("scores");
  Status status = launch_kernel(scores_kernel<Element>, dim3(blocks(row_stride, 128), rows, heads),
                                block, sizeof(SharedStorage<Element, 128>), args.stream, params.q,
                                params.k, args.out<float>("S"), shape, row_stride);
  if (!status.ok()) return status;
  args.phase("softmax");
  status =
      launch_kernel(softmax_kernel<Element>, dim3(static_cast<unsigned>(shape.seqlen_q), 1, heads),
                    dim3(32), row_fits ? row_bytes : 0, args.stream, args.in<float>("S"),
                    args.out<Element>("P"), params.lse, shape, row_stride, row_fits);
  if (!status.ok()) return status;
  args.phase("output");
  const auto gemm_pv = [&]<int kBlockN>() {
    return launch_kernel(output_kernel<kBlockN, Element>,
                         dim3(blocks(shape.head_dim, kBlockN), rows, heads), block,
                         sizeof(SharedStorage<Element, kBlockN>), args.stream,
                         args.in<Element>("P"), params.v, params.o, shape, row_stride);
  };
  return shape.head_dim <= 64 ? gemm_pv.template operator()<64>()
                              : gemm_pv.template operator()<128>();
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() { return launch<Element>(args); });
}

}  // namespace ATTN_BACKEND::v11_vectorised
