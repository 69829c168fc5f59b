// v1_global: three naive kernels, one thread per element.
//
// parent    none: the first step of the suite
// change    S = Q K^T, P = softmax(scale S), O = P V: one kernel each. S and P are full matrices in
//           HBM.
// why       This is the formula, and the baseline of all later steps.
// expect    Correct and slow. Adjacent threads work on adjacent *rows*, so the 32 addresses of a
//           warp's load fall into 32 different sectors: 32 sectors per request in the softmax, 16.5
//           on average in the products, whose other operand is one address for the warp. ncu:
//           l1tex__t_sectors_pipe_lsu_mem_global_op_ld / l1tex__t_requests_...
// supports  fp32, fp16, bf16 (arithmetic in fp32); any lengths, head dims, masks, GQA
// source    Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.1
#include "attn/kernel.h"
#include "emulator/warp_access.h"

namespace ATTN_BACKEND::v1_global {
using namespace attn;

struct Config {
  // threadIdx.x runs along the rows of the result, threadIdx.y along its columns.
  static constexpr int kThreadsX = 32, kThreadsY = 8;
  static_assert(kThreadsX == 32, "a warp is one line of threads along x");
};

// Model of a warp's access, for the check only: byte offset in fp32, one row per lane.
constexpr int64_t row_of_lane(int lane, int64_t row_stride) { return lane * row_stride * 4; }
static_assert(sectors([](int lane) { return row_of_lane(lane, 128); }, 4) == 32,
              "32 lanes in 32 rows: every load moves 32 sectors and uses 4 bytes of each");

// (1) scores: S = Q K^T.
//! [scores]
template <class Element>
__global__ void scores_kernel(const Element* gQ,  // [B, Hq, seqlen_q, d]
                              const Element* gK,  // [B, Hkv, seqlen_k, d]
                              float* gS,          // [B, Hq, seqlen_q, seqlen_k]
                              Shape shape) {
  const int row = blockIdx.x * Config::kThreadsX + threadIdx.x;
  const int col = blockIdx.y * Config::kThreadsY + threadIdx.y;
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

// (2) P = softmax(scale * S) over the visible keys, one thread per row.
//! [softmax]
__global__ void softmax_kernel(const float* gS,  // [B, Hq, seqlen_q, seqlen_k]
                               float* gP,        // [B, Hq, seqlen_q, seqlen_k]
                               float* gLse,      // [B, Hq, seqlen_q]
                               Shape shape) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  const int64_t bh = blockIdx.z;
  if (row >= shape.seqlen_q) return;
  const float* s = gS + (bh * shape.seqlen_q + row) * shape.seqlen_k;  // [seqlen_k]
  float* p = gP + (bh * shape.seqlen_q + row) * shape.seqlen_k;        // [seqlen_k]

  //! [ex01a]
  // Visible keys: [begin, end). Bottom-right alignment: the last query's diagonal is the last key.
  const int diagonal = row + shape.seqlen_k - shape.seqlen_q;
  const int begin = max(0, diagonal - shape.window_left);
  const int end = min(shape.seqlen_k, diagonal + shape.window_right + 1);

  float row_max = -INFINITY;
  for (int j = begin; j < end; ++j) row_max = fmaxf(row_max, s[j] * shape.softmax_scale);
  float row_sum = 0;
  for (int j = begin; j < end; ++j) row_sum += __expf(s[j] * shape.softmax_scale - row_max);
  // Fully masked row: P = 0, O = 0, lse = -inf.
  const float inverse_sum = row_sum != 0 ? 1 / row_sum : 0;
  for (int j = 0; j < shape.seqlen_k; ++j) {
    const bool visible = begin <= j && j < end;
    p[j] = visible ? __expf(s[j] * shape.softmax_scale - row_max) * inverse_sum : 0;
  }
  gLse[bh * shape.seqlen_q + row] = row_sum != 0 ? row_max + logf(row_sum) : -INFINITY;
  //! [ex01a]
}
//! [softmax]

// (3) output: O = P V.
//! [output]
template <class Element>
__global__ void output_kernel(const float* gP,    // [B, Hq, seqlen_q, seqlen_k]
                              const Element* gV,  // [B, Hkv, seqlen_k, d]
                              Element* gO,        // [B, Hq, seqlen_q, d]
                              Shape shape) {
  const int row = blockIdx.x * Config::kThreadsX + threadIdx.x;
  const int col = blockIdx.y * Config::kThreadsY + threadIdx.y;
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
  const auto rows = static_cast<unsigned>(ceil_div(shape.seqlen_q, Config::kThreadsX));
  const dim3 block(Config::kThreadsX, Config::kThreadsY);
  const auto blocks = [](int n) { return static_cast<unsigned>(ceil_div(n, Config::kThreadsY)); };

  args.phase("scores");
  Status status =
      launch_kernel(scores_kernel<Element>, dim3(rows, blocks(shape.seqlen_k), heads), block, 0,
                    args.stream, params.q, params.k, args.out<float>("S"), shape);
  if (!status.ok()) return status;
  args.phase("softmax");
  status = launch_kernel(softmax_kernel, dim3(rows, 1, heads), dim3(Config::kThreadsX), 0,
                         args.stream, args.in<float>("S"), args.out<float>("P"), params.lse, shape);
  if (!status.ok()) return status;
  args.phase("output");
  return launch_kernel(output_kernel<Element>, dim3(rows, blocks(shape.head_dim), heads), block, 0,
                       args.stream, args.in<float>("P"), params.v, params.o, shape);
}

Status launch(const Arguments& args) {
  return dispatch_dtype(args.problem.dtype, [&]<class Element>() { return launch<Element>(args); });
}

}  // namespace ATTN_BACKEND::v1_global
