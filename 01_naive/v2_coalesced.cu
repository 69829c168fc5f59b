// v2_coalesced: adjacent threads access adjacent addresses.
//
// parent    v1_global
// change    threadIdx.x runs along the *columns* of the result, threadIdx.y along its rows: the
//           lanes of a warp write 32 adjacent columns and read 32 adjacent elements of V's rows.
// why       Coalesced accesses to fp32 need 4 sectors per request instead of 32, and use all bytes.
// expect    Stores of S: 32 to 4 sectors per request. Loads of V and stores of O: 4, or 2 in 16
//           bits. Loads of Q and P are one address per warp. Two strided patterns remain: the
//           softmax (v3_warp_softmax), and the loads of K, where the 32 lanes read 32 different
//           rows (v4_tiled).
// supports  fp32, fp16, bf16; any lengths, head dims, masks, GQA
#include "attn/kernel.h"
#include "emulator/warp_access.h"

namespace ATTN_BACKEND::v2_coalesced {
using namespace attn;

struct Config {
  // threadIdx.x runs along the columns of the result, threadIdx.y along its rows.
  static constexpr int kThreadsX = 32, kThreadsY = 8;
  static_assert(kThreadsX == 32, "a warp is one line of threads along x");
};

// Model of a warp's store to a row of S, for the check only: byte offset of a lane's column.
constexpr int64_t column_of_lane(int lane) { return lane * 4; }
static_assert(sectors([](int lane) { return column_of_lane(lane); }, 4) == 4,
              "32 lanes in 32 columns: every store moves 4 sectors and uses all of them");

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

  args.phase("scores");
  Status status =
      launch_kernel(scores_kernel<Element>, dim3(blocks(shape.seqlen_k), rows, heads), block, 0,
                    args.stream, params.q, params.k, args.out<float>("S"), shape);
  if (!status.ok()) return status;
  args.phase("softmax");
  status =
      launch_kernel(softmax_kernel, dim3(blocks(shape.seqlen_q), 1, heads), dim3(Config::kThreadsX),
                    0, args.stream, args.in<float>("S"), args.out<float>("P"), params.lse, shape);
  if (!status.ok()) return status;
  args.phase("output");
  return launch_kernel(output_kernel<Element>, dim3(blocks(shape.head_dim), rows, heads), block, 0,
                       args.stream, args.in<float>("P"), params.v, params.o, shape);
}

Status launch(const Arguments& args) {
  return dispatch_dtype(args.problem.dtype, [&]<class Element>() { return launch<Element>(args); });
}

}  // namespace ATTN_BACKEND::v2_coalesced
