// v3_warp_softmax: one warp per softmax row; the row is read from HBM once.
//
// parent    v2_coalesced
// change    The 32 lanes of a warp read 32 adjacent scores of one row. Each lane reduces its own
//           keys; five shuffles combine the lanes. The first pass copies the row to shared memory,
//           and the second and third pass read it there.
// why       With one thread per row, each lane reads a different row: 32 sectors per request, and
//           sectors are evicted before their other 28 bytes are used.
// expect    softmax_kernel: 32 to 4 sectors per request; HBM reads of S fall from three passes,
//           measured as almost four times its size, to one. The two products do not change.
// supports  fp32, fp16, bf16; any lengths, head dims, masks, GQA
#include "attn/kernel.h"

namespace ATTN_BACKEND::v3_warp_softmax {
using namespace attn;

struct Config {
  // threadIdx.x runs along the columns of the result, threadIdx.y along its rows.
  static constexpr int kThreadsX = 32, kThreadsY = 8;
  static_assert(kThreadsX == 32, "a warp is one line of threads along x");
  static constexpr std::size_t kMaxRowBytes = 224 * 1024;  // longest row kept in shared memory
};

// (1) scores: S = Q K^T.
//! [scores]
template <class Element>
__global__ void scores_kernel(const Element* gQ,  // [B, Hq, seqlen_q, d]
                              const Element* gK,  // [B, Hkv, seqlen_k, d]
                              float* gS,          // [B, Hq, seqlen_q, seqlen_k]
                              Shape shape) {
  const int col = blockIdx.x * Config::kThreadsX + threadIdx.x;
  const int row = blockIdx.y * Config::kThreadsY + threadIdx.y;
  const int64_t bh = blockIdx.z;                              // b * Hq + h
  const int64_t bh_kv = bh / (shape.heads / shape.kv_heads);  // b * Hkv + h / (Hq / Hkv)
  if (row >= shape.seqlen_q || col >= shape.seqlen_k) return;
  const Element* q = gQ + (bh * shape.seqlen_q + row) * shape.head_dim;     // [d]
  const Element* k = gK + (bh_kv * shape.seqlen_k + col) * shape.head_dim;  // [d]
  float dot = 0;
  for (int c = 0; c < shape.head_dim; ++c) dot += to_float(q[c]) * to_float(k[c]);
  gS[(bh * shape.seqlen_q + row) * shape.seqlen_k + col] = dot;
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
  const int col = blockIdx.x * Config::kThreadsX + threadIdx.x;
  const int row = blockIdx.y * Config::kThreadsY + threadIdx.y;
  const int64_t bh = blockIdx.z;
  const int64_t bh_kv = bh / (shape.heads / shape.kv_heads);
  if (row >= shape.seqlen_q || col >= shape.head_dim) return;
  const float* p = gP + (bh * shape.seqlen_q + row) * shape.seqlen_k;        // [seqlen_k]
  // a column of [seqlen_k, d]
  const Element* v = gV + bh_kv * shape.seqlen_k * shape.head_dim + col;
  float sum = 0;
  for (int j = 0; j < shape.seqlen_k; ++j)
    sum += p[j] * to_float(v[int64_t{j} * shape.head_dim]);
  gO[(bh * shape.seqlen_q + row) * shape.head_dim + col] = from_float<Element>(sum);
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
  Status status =
      launch_kernel(scores_kernel<Element>, dim3(blocks(shape.seqlen_k), rows, heads), block, 0,
                    args.stream, params.q, params.k, args.out<float>("S"), shape);
  if (!status.ok()) return status;
  args.phase("softmax");
  status = launch_kernel(softmax_kernel, dim3(static_cast<unsigned>(shape.seqlen_q), 1, heads),
                         dim3(32), row_fits ? row_bytes : 0, args.stream, args.in<float>("S"),
                         args.out<float>("P"), params.lse, shape, row_fits);
  if (!status.ok()) return status;
  args.phase("output");
  return launch_kernel(output_kernel<Element>, dim3(blocks(shape.head_dim), rows, heads), block, 0,
                       args.stream, args.in<float>("P"), params.v, params.o, shape);
}

Status launch(const Arguments& args) {
  return dispatch_dtype(args.problem.dtype, [&]<class Element>() { return launch<Element>(args); });
}

}  // namespace ATTN_BACKEND::v3_warp_softmax
