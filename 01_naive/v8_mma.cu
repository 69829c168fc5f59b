// v8_mma: mma.sync for both products, fragments by 32-bit loads.
//
// parent    v7_vector_loads
// change    mma.sync.m16n8k16 multiplies a 16 x 16 tile of A by a 16 x 8 tile of B. The 32 lanes
//           hold the tiles in registers, as fragments: one register holds two elements adjacent
//           along k. A warp owns 16 x 32 results: 4 MMAs that share one fragment of A.
// why       On FP32 units a multiply-add takes half a shared load, which limits the products. With
//           MMAs it takes a sixth (V) to a tenth (K) of that, and tensor cores multiply faster.
// expect    sm__ops_path_tensor_src_bf16_dst_fp32.sum (operations of the tensor cores) > 0. Shared
//           loads remain: 4 per fragment of A, 2 per fragment of K. Pairs along k lie in different
//           rows of V, so one register of V takes two 16-bit loads.
// supports  fp16, bf16; head dims that are a multiple of 8 (16-byte rows); any lengths, masks, GQA
#include "attn/kernel.h"
#include "emulator/warp_access.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::v8_mma {
using namespace attn;

struct Config {
  static constexpr int kBlockM = 64, kBlockN = 64, kBlockK = 64;  // tile: rows, columns, depth
  static constexpr int kWarpsM = 4, kWarpsN = 2, kThreads = 32 * kWarpsM * kWarpsN;
  // 16 x 32 results per warp
  static constexpr int kWarpM = kBlockM / kWarpsM, kWarpN = kBlockN / kWarpsN;
  static constexpr int kVector = 8;  // elements per 16 bytes
  static constexpr std::size_t kMaxRowBytes = 224 * 1024;  // longest row kept in shared memory
};

// Tile rows are padded by 16 bytes (4 banks), so the 8 rows of a fragment start in 8 different
// groups of 4 banks: no bank conflicts.
constexpr int padded(int columns) { return columns + Config::kVector; }
static_assert(
    shared_access([](int l) { return 2 * (l / 4 * padded(64) + l % 4 * 2); }, 4).conflicts() == 0,
    "the lanes of a warp load one register of a fragment");

template <class Element>
struct SharedStorage {
  alignas(16) Element sA[Config::kBlockM * padded(Config::kBlockK)];
  alignas(16) Element sB[Config::kBlockN * padded(Config::kBlockK)];  // or [kBlockK, kBlockN]
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

// Packs two elements into one fragment register: adjacent in memory, or `stride` apart.
template <class Element>
__device__ __forceinline__ uint32_t load2(const Element* from) {
  return *reinterpret_cast<const uint32_t*>(from);
}
template <class Element>
__device__ __forceinline__ uint32_t load2(const Element* from, int stride) {
  const auto* bits = reinterpret_cast<const uint16_t*>(from);
  return bits[0] | uint32_t{bits[stride]} << 16;
}

// Stores two adjacent results.
__device__ __forceinline__ void store2(float* to, float low, float high) {
  *reinterpret_cast<float2*>(to) = make_float2(low, high);
}
template <class Element>
__device__ __forceinline__ void store2(Element* to, float low, float high) {
  *reinterpret_cast<uint32_t*>(to) = pack2<Element>(low, high);
}

// C[rows, columns] = A[rows, depth] * op(B), one kBlockM x kBlockN tile of C per block.
// Scores: op(B) = K^T has seqlen_k columns (`columns_b`); S is stored with `columns_c` columns.
// Output: op(B) = V has seqlen_k rows (`depth_b`); P has `depth_a` columns.
// Both are seqlen_k rounded up to 8, and the padding of S and P is 0.
//! [gemm]
template <bool kTransposeB, class Element, class C>
__device__ void gemm_tile(const Element* gA, int64_t stride_a, const Element* gB, int64_t stride_b,
                          C* gC, int64_t stride_c, int rows, int columns_b, int columns_c,
                          int depth_a, int depth_b) {
  auto& smem = dynamic_shared<SharedStorage<Element>>();
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kBlockK = Config::kBlockK;
  const int row0 = blockIdx.y * kBlockM, col0 = blockIdx.x * kBlockN;
  constexpr int kTilesN = Config::kWarpN / 8;  // n8 tiles per warp: 4
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const int g = lane_id / 4, t = lane_id % 4;  // lane = 4 g + t, see ptx/mma.h
  const int warp_row = warp_id / Config::kWarpsN * Config::kWarpM;
  const int warp_col = warp_id % Config::kWarpsN * Config::kWarpN;

  float acc[kTilesN][4] = {};
  for (int k0 = 0; k0 < depth_a; k0 += kBlockK) {
    load_tile<kBlockM, kBlockK>(smem.sA, gA, stride_a, row0, rows, k0, depth_a);
    if constexpr (kTransposeB)
      load_tile<kBlockN, kBlockK>(smem.sB, gB, stride_b, col0, columns_b, k0, depth_b);
    else
      load_tile<kBlockK, kBlockN>(smem.sB, gB, stride_b, k0, depth_b, col0, columns_b);
    __syncthreads();  // both tiles are complete
#pragma unroll
    for (int k = 0; k < kBlockK; k += 16) {
      uint32_t a[4], b[kTilesN][2];  // A: rows g, g + 8; k + 2t, k + 2t + 8
      const Element* from = smem.sA + (warp_row + g) * padded(kBlockK) + k + 2 * t;
      a[0] = load2(from), a[1] = load2(from + 8 * padded(kBlockK));
      a[2] = load2(from + 8), a[3] = load2(from + 8 * padded(kBlockK) + 8);
#pragma unroll
      for (int j = 0; j < kTilesN; ++j)  // B: column g; k + 2t, k + 2t + 8
        if constexpr (kTransposeB) {  // tile rows are columns of op(B)
          from = smem.sB + (warp_col + 8 * j + g) * padded(kBlockK) + k + 2 * t;
          b[j][0] = load2(from), b[j][1] = load2(from + 8);
        } else {  // tile rows are rows of op(B)
          from = smem.sB + (k + 2 * t) * padded(kBlockN) + warp_col + 8 * j + g;
          b[j][0] = load2(from, padded(kBlockN));
          b[j][1] = load2(from + 8 * padded(kBlockN), padded(kBlockN));
        }
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) mma_m16n8k16<Element>(acc[j], a, b[j], acc[j]);
    }
    __syncthreads();  // all reads are done: the next tiles may overwrite
  }
#pragma unroll
  for (int j = 0; j < kTilesN; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // d[0], d[1]: row g; d[2], d[3]: row g + 8
      const int row = row0 + warp_row + 8 * half + g, col = col0 + warp_col + 8 * j + 2 * t;
      if (row < rows && col < columns_c)
        store2(gC + row * stride_c + col, acc[j][2 * half], acc[j][2 * half + 1]);
    }
}
//! [gemm]

// (1) scores: S = Q K^T.
//! [scores]
template <class Element>
__global__ void __launch_bounds__(Config::kThreads, 3)  // 3 blocks per SM: 80 registers
    scores_kernel(const Element* gQ,  // [B, Hq, seqlen_q, d]
                  const Element* gK,  // [B, Hkv, seqlen_k, d]
                  float* gS,          // [B, Hq, seqlen_q, row_stride]
                  Shape shape, int row_stride) {
  const int64_t bh = blockIdx.z;                              // b * Hq + h
  const int64_t bh_kv = bh / (shape.heads / shape.kv_heads);  // b * Hkv + h / (Hq / Hkv)
  gemm_tile<true>(gQ + bh * shape.seqlen_q * shape.head_dim, shape.head_dim,
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

  float row_max = -INFINITY;
  for (int j = begin + lane_id; j < end; j += 32) {
    row_max = fmaxf(row_max, s[j] * shape.softmax_scale);
    if (row_fits) sRow[j] = s[j];  // read by this lane only: no barrier
  }
  for (int offset = 16; offset > 0; offset /= 2)
    row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, offset));
  const float* s_again = row_fits ? sRow : s;
  float row_sum = 0;
  for (int j = begin + lane_id; j < end; j += 32)
    row_sum += __expf(s_again[j] * shape.softmax_scale - row_max);
  for (int offset = 16; offset > 0; offset /= 2) row_sum += __shfl_xor_sync(~0u, row_sum, offset);
  // Fully masked row: P = 0, O = 0, lse = -inf.
  const float inverse_sum = row_sum != 0 ? 1 / row_sum : 0;
  // Each lane visits the keys that it stored in sRow: no barrier.
  for (int j = (begin + lane_id) % 32; j < row_stride; j += 32) {
    const bool visible = begin <= j && j < end;
    const float e = visible ? __expf(s_again[j] * shape.softmax_scale - row_max) : 0;
    p[j] = from_float<Element>(e * inverse_sum);
  }
  if (lane_id == 0)
    gLse[bh * shape.seqlen_q + row] = row_sum != 0 ? row_max + logf(row_sum) : -INFINITY;
}
//! [softmax]

// (3) output: O = P V.
//! [output]
template <class Element>
__global__ void __launch_bounds__(Config::kThreads, 3)  // 3 blocks per SM: 80 registers
    output_kernel(const Element* gP,  // [B, Hq, seqlen_q, row_stride]
                  const Element* gV,  // [B, Hkv, seqlen_k, d]
                  Element* gO,        // [B, Hq, seqlen_q, d]
                  Shape shape, int row_stride) {
  const int64_t bh = blockIdx.z;
  const int64_t bh_kv = bh / (shape.heads / shape.kv_heads);
  gemm_tile<false>(gP + bh * shape.seqlen_q * row_stride, row_stride,
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
  const auto blocks = [](int n) { return static_cast<unsigned>(ceil_div(n, Config::kBlockN)); };
  const std::size_t row_bytes = sizeof(float) * static_cast<std::size_t>(row_stride);
  const bool row_fits = row_bytes <= Config::kMaxRowBytes;

  args.phase("scores");
  Status status = launch_kernel(scores_kernel<Element>, dim3(blocks(row_stride), rows, heads),
                                block, sizeof(SharedStorage<Element>), args.stream, params.q,
                                params.k, args.out<float>("S"), shape, row_stride);
  if (!status.ok()) return status;
  args.phase("softmax");
  status =
      launch_kernel(softmax_kernel<Element>, dim3(static_cast<unsigned>(shape.seqlen_q), 1, heads),
                    dim3(32), row_fits ? row_bytes : 0, args.stream, args.in<float>("S"),
                    args.out<Element>("P"), params.lse, shape, row_stride, row_fits);
  if (!status.ok()) return status;
  args.phase("output");
  return launch_kernel(output_kernel<Element>, dim3(blocks(shape.head_dim), rows, heads), block,
                       sizeof(SharedStorage<Element>), args.stream, args.in<Element>("P"), params.v,
                       params.o, shape, row_stride);
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() { return launch<Element>(args); });
}

}  // namespace ATTN_BACKEND::v8_mma
