// v6_p_16bit: P in 16 bits.
//
// parent    v5_register_tiles
// change    The softmax rounds P to the type of Q, K and V (fp16 or bf16). Rows of S and P are
//           padded with zeros to a multiple of 8 elements, so that each row starts on 16 bytes.
// why       The tensor cores of v8_mma need P in 16 bits. Probabilities lie between 0 and 1 and are
//           averaged over many keys, so O stays accurate. S stays in fp32: exp(S) amplifies a
//           rounding error of S.
// expect    HBM traffic of P halves: 2 N^2 bytes per head less in the softmax and in the output.
//           The products are not HBM-bound, so they gain nothing.
// supports  fp32 (P stays in fp32), fp16, bf16; any lengths, head dims, masks, GQA
#include "attn/kernel.h"
#include "emulator/warp_access.h"

namespace ATTN_BACKEND::v6_p_16bit {
using namespace attn;

struct Config {
  static constexpr int kBlockM = 64, kBlockN = 64, kBlockK = 32;  // tile: rows, columns, depth
  static constexpr int kPerThread = 4;  // 4 x 4 results per thread
  static constexpr int kThreadsX = kBlockN / kPerThread, kThreads = 256;
  static_assert(kBlockM / kPerThread * kThreadsX == kThreads, "one thread for each 4 x 4 results");
  static constexpr int kVector = 8;  // row stride of S and P: a multiple of this
  static constexpr std::size_t kMaxRowBytes = 224 * 1024;  // longest row kept in shared memory
};

// Tile rows along k (A, and B of the scores) are padded by one float, so that row r starts in bank
// r % 32 and the threads along x read a column without bank conflicts.
constexpr int kRowStride = Config::kBlockK + 1;
constexpr int tile_index(int row, int k) { return row * kRowStride + k; }
static_assert(shared_access([](int lane) { return 4 * tile_index(lane % Config::kThreadsX, 0); }, 4)
                      .conflicts() == 0,
              "the threads along x read one column of a tile");

struct SharedStorage {
  float sA[Config::kBlockM * kRowStride];  // [kBlockM, kBlockK]
  float sB[Config::kBlockN * kRowStride];  // [kBlockN, kBlockK] or [kBlockK, kBlockN]
  ATTN_MEMBERS(SharedStorage, sA, sB)
};

// Copies a kRows x kColumns tile to shared memory as floats. Elements outside the matrix become 0;
// `rows` and `columns` are the matrix's extents. Adjacent threads copy adjacent columns.
template <int kRows, int kColumns, class Index, class Element>
__device__ void load_tile(float* tile, Index index, const Element* matrix, int64_t stride, int row0,
                          int rows, int col0, int columns) {
  for (int i = threadIdx.x; i < kRows * kColumns; i += Config::kThreads) {
    const int r = i / kColumns, c = i % kColumns;
    const bool inside = row0 + r < rows && col0 + c < columns;
    tile[index(r, c)] = inside ? to_float(matrix[(row0 + r) * stride + col0 + c]) : 0;
  }
}

// C[rows, columns] = A[rows, depth] * op(B), one kBlockM x kBlockN tile of C per block. op(B) is
// the transpose of B[columns, depth] (scores), or B[depth, columns] itself (output). `columns_b`
// columns of op(B) exist, and `columns_c` of C are stored: rows of S are padded with zeros to a
// multiple of 8. `depth_a` is `depth_b` rounded up to 8: rows of A are zero-padded in memory.
//! [gemm]
template <bool kTransposeB, class Element, class C>
__device__ void gemm_tile(const Element* gA, int64_t stride_a, const Element* gB, int64_t stride_b,
                          C* gC, int64_t stride_c, int rows, int columns_b, int columns_c,
                          int depth_a, int depth_b) {
  SharedStorage& smem = dynamic_shared<SharedStorage>();
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kBlockK = Config::kBlockK;
  const int row0 = blockIdx.y * kBlockM, col0 = blockIdx.x * kBlockN;
  const int tx = threadIdx.x % Config::kThreadsX, ty = threadIdx.x / Config::kThreadsX;
  const auto padded = [](int r, int k) { return tile_index(r, k); };  // of rows along k
  const auto plain = [](int k, int c) { return k * kBlockN + c; };  // of rows of V

  float acc[Config::kPerThread][Config::kPerThread] = {};
  for (int k0 = 0; k0 < depth_a; k0 += kBlockK) {
    load_tile<kBlockM, kBlockK>(smem.sA, padded, gA, stride_a, row0, rows, k0, depth_a);
    if constexpr (kTransposeB)
      load_tile<kBlockN, kBlockK>(smem.sB, padded, gB, stride_b, col0, columns_b, k0, depth_b);
    else
      load_tile<kBlockK, kBlockN>(smem.sB, plain, gB, stride_b, k0, depth_b, col0, columns_b);
    __syncthreads();  // both tiles are complete
#pragma unroll
    for (int k = 0; k < kBlockK; ++k) {
      float a[Config::kPerThread], b[Config::kPerThread];
#pragma unroll
      for (int i = 0; i < Config::kPerThread; ++i) {
        a[i] = smem.sA[padded(ty * Config::kPerThread + i, k)];
        const int col = tx + i * Config::kThreadsX;
        b[i] = smem.sB[kTransposeB ? padded(col, k) : plain(k, col)];
      }
#pragma unroll
      for (int i = 0; i < Config::kPerThread; ++i)
#pragma unroll
        for (int j = 0; j < Config::kPerThread; ++j) acc[i][j] += a[i] * b[j];
    }
    __syncthreads();  // all reads are done: the next tiles may overwrite
  }
#pragma unroll
  for (int i = 0; i < Config::kPerThread; ++i)
#pragma unroll
    for (int j = 0; j < Config::kPerThread; ++j) {
      const int row = row0 + ty * Config::kPerThread + i, col = col0 + tx + j * Config::kThreadsX;
      if (row < rows && col < columns_c) gC[row * stride_c + col] = from_float<C>(acc[i][j]);
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
                                block, sizeof(SharedStorage), args.stream, params.q, params.k,
                                args.out<float>("S"), shape, row_stride);
  if (!status.ok()) return status;
  args.phase("softmax");
  status =
      launch_kernel(softmax_kernel<Element>, dim3(static_cast<unsigned>(shape.seqlen_q), 1, heads),
                    dim3(32), row_fits ? row_bytes : 0, args.stream, args.in<float>("S"),
                    args.out<Element>("P"), params.lse, shape, row_stride, row_fits);
  if (!status.ok()) return status;
  args.phase("output");
  return launch_kernel(output_kernel<Element>, dim3(blocks(shape.head_dim), rows, heads), block,
                       sizeof(SharedStorage), args.stream, args.in<Element>("P"), params.v,
                       params.o, shape, row_stride);
}

Status launch(const Arguments& args) {
  return dispatch_dtype(args.problem.dtype, [&]<class Element>() { return launch<Element>(args); });
}

}  // namespace ATTN_BACKEND::v6_p_16bit
