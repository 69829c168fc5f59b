// v4_tiled: shared-memory tiles, one result per thread.
//
// parent    v3_warp_softmax
// change    A block computes a 32 x 32 tile of results. It copies a 32 x 32 tile of each operand to
//           shared memory, and each of its 1024 threads accumulates one result from there.
// why       The block fetches each value from L2 once and uses it 32 times.
// expect    Load requests of the products fall 32-fold. Shared memory becomes the limit: two shared
//           loads per multiply-add.
// supports  fp32, fp16, bf16; any lengths, head dims, masks, GQA
#include "attn/kernel.h"
#include "emulator/warp_access.h"

namespace ATTN_BACKEND::v4_tiled {
using namespace attn;

struct Config {
  // threadIdx.x runs along the columns of the result, threadIdx.y along its rows.
  static constexpr int kBlockM = 32, kBlockN = 32, kBlockK = 32;  // tile: rows, columns, depth
  static constexpr int kThreadsX = kBlockN, kThreadsY = kBlockM;  // one thread per result
  static constexpr std::size_t kMaxRowBytes = 224 * 1024;  // longest row kept in shared memory
};

// Tile rows are padded by one float, so that row r starts in bank r % 32. The B tile of the scores
// needs it: its threads along x read a column, without bank conflicts.
constexpr int kRowStride = Config::kBlockK + 1;
constexpr int tile_index(int row, int k) { return row * kRowStride + k; }
// shared_access(byte offset of each lane, bytes per lane)
static_assert(shared_access([](int lane) { return 4 * tile_index(lane % Config::kThreadsX, 0); }, 4)
                      .conflicts() == 0,
              "the threads along x read one column of a tile");

struct SharedStorage {
  float sA[Config::kBlockM * kRowStride];  // [kBlockM, kBlockK]
  float sB[Config::kBlockN * kRowStride];  // [kBlockN, kBlockK] or [kBlockK, kBlockN]
  ATTN_MEMBERS(SharedStorage, sA, sB)  // names for the emulator's messages
};

// Loads an element as float; elements outside the matrix are 0. `rows`, `columns`: its extents.
template <class Element>
__device__ float element(const Element* matrix, int64_t stride, int row, int rows, int column,
                         int columns) {
  return row < rows && column < columns ? to_float(matrix[row * stride + column]) : 0;
}

// C[rows, columns] = A[rows, depth] * op(B), one kBlockM x kBlockN tile of C per block. op(B) is
// the transpose of B[columns, depth] (scores), or B[depth, columns] itself (output).
//! [gemm]
template <bool kTransposeB, class A, class B, class C>
__device__ void gemm_tile(const A* gA, int64_t stride_a, const B* gB, int64_t stride_b, C* gC,
                          int64_t stride_c, int rows, int columns, int depth) {
  SharedStorage& smem = dynamic_shared<SharedStorage>();
  const int row0 = blockIdx.y * Config::kBlockM, col0 = blockIdx.x * Config::kBlockN;
  const int tx = threadIdx.x, ty = threadIdx.y;

  float acc = 0;
  for (int k0 = 0; k0 < depth; k0 += Config::kBlockK) {
    smem.sA[tile_index(ty, tx)] = element(gA, stride_a, row0 + ty, rows, k0 + tx, depth);
    smem.sB[tile_index(ty, tx)] =
        kTransposeB ? element(gB, stride_b, col0 + ty, columns, k0 + tx, depth)
                    : element(gB, stride_b, k0 + ty, depth, col0 + tx, columns);
    __syncthreads();  // both tiles are complete
    for (int k = 0; k < Config::kBlockK; ++k)
      acc += smem.sA[tile_index(ty, k)] *
             smem.sB[kTransposeB ? tile_index(tx, k) : tile_index(k, tx)];
    __syncthreads();  // all reads are done: the next tiles may overwrite
  }
  const int row = row0 + ty, col = col0 + tx;
  if (row < rows && col < columns) gC[row * stride_c + col] = from_float<C>(acc);
}
//! [gemm]

// (1) scores: S = Q K^T.
//! [scores]
template <class Element>
__global__ void scores_kernel(const Element* gQ,  // [B, Hq, seqlen_q, d]
                              const Element* gK,  // [B, Hkv, seqlen_k, d]
                              float* gS,          // [B, Hq, seqlen_q, seqlen_k]
                              Shape shape) {
  const int64_t bh = blockIdx.z;                              // b * Hq + h
  const int64_t bh_kv = bh / (shape.heads / shape.kv_heads);  // b * Hkv + h / (Hq / Hkv)
  gemm_tile<true>(gQ + bh * shape.seqlen_q * shape.head_dim, shape.head_dim,
                  gK + bh_kv * shape.seqlen_k * shape.head_dim, shape.head_dim,
                  gS + bh * shape.seqlen_q * shape.seqlen_k, shape.seqlen_k, shape.seqlen_q,
                  shape.seqlen_k, shape.head_dim);
}
//! [scores]

// (2) P = softmax(scale * S) over the visible keys, one warp per row. A block is a single warp, so
// as many rows are resident on an SM as fit in its shared memory (an H200: at most 32 blocks).
//! [softmax]
__global__ void __launch_bounds__(32)
    softmax_kernel(const float* gS,  // [B, Hq, seqlen_q, seqlen_k]
                   float* gP,        // [B, Hq, seqlen_q, seqlen_k]
                   float* gLse,      // [B, Hq, seqlen_q]
                   Shape shape, bool row_fits) {
  const int lane_id = threadIdx.x;
  const int row = blockIdx.x;
  const int64_t bh = blockIdx.z;
  const float* s = gS + (bh * shape.seqlen_q + row) * shape.seqlen_k;  // [seqlen_k]
  float* p = gP + (bh * shape.seqlen_q + row) * shape.seqlen_k;        // [seqlen_k]
  float* sRow = &dynamic_shared<float>();                              // [seqlen_k] if it fits

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
  for (int j = (begin + lane_id) % 32; j < shape.seqlen_k; j += 32) {
    const bool visible = begin <= j && j < end;
    p[j] = visible ? __expf(s_again[j] * shape.softmax_scale - row_max) * inverse_sum : 0;
  }
  if (lane_id == 0)
    gLse[bh * shape.seqlen_q + row] = row_sum != 0 ? row_max + logf(row_sum) : -INFINITY;
}
//! [softmax]

// (3) output: O = P V.
//! [output]
template <class Element>
__global__ void output_kernel(const float* gP,    // [B, Hq, seqlen_q, seqlen_k]
                              const Element* gV,  // [B, Hkv, seqlen_k, d]
                              Element* gO,        // [B, Hq, seqlen_q, d]
                              Shape shape) {
  const int64_t bh = blockIdx.z;
  const int64_t bh_kv = bh / (shape.heads / shape.kv_heads);
  gemm_tile<false>(gP + bh * shape.seqlen_q * shape.seqlen_k, shape.seqlen_k,
                   gV + bh_kv * shape.seqlen_k * shape.head_dim, shape.head_dim,
                   gO + bh * shape.seqlen_q * shape.head_dim, shape.head_dim, shape.seqlen_q,
                   shape.head_dim, shape.seqlen_k);
}
//! [output]

template <class Element>
Status launch(const Arguments& args) {
  const ForwardParams<Element> params(args);
  const Shape shape = shape_of(args.problem);
  const auto heads = static_cast<unsigned>(args.problem.batch * args.problem.heads);
  const auto rows = static_cast<unsigned>(ceil_div(shape.seqlen_q, Config::kThreadsY));
  const dim3 block(Config::kThreadsX, Config::kThreadsY);
  const auto blocks = [](int n) { return static_cast<unsigned>(ceil_div(n, Config::kThreadsX)); };
  const std::size_t row_bytes = sizeof(float) * static_cast<std::size_t>(shape.seqlen_k);
  const bool row_fits = row_bytes <= Config::kMaxRowBytes;

  args.phase("scores");
  Status status = launch_kernel(scores_kernel<Element>, dim3(blocks(shape.seqlen_k), rows, heads),
                                block, sizeof(SharedStorage), args.stream, params.q, params.k,
                                args.out<float>("S"), shape);
  if (!status.ok()) return status;
  args.phase("softmax");
  status = launch_kernel(softmax_kernel, dim3(static_cast<unsigned>(shape.seqlen_q), 1, heads),
                         dim3(32), row_fits ? row_bytes : 0, args.stream, args.in<float>("S"),
                         args.out<float>("P"), params.lse, shape, row_fits);
  if (!status.ok()) return status;
  args.phase("output");
  return launch_kernel(output_kernel<Element>, dim3(blocks(shape.head_dim), rows, heads), block,
                       sizeof(SharedStorage), args.stream, args.in<float>("P"), params.v, params.o,
                       shape);
}

Status launch(const Arguments& args) {
  return dispatch_dtype(args.problem.dtype, [&]<class Element>() { return launch<Element>(args); });
}

}  // namespace ATTN_BACKEND::v4_tiled
