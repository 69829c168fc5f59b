// v13_cublas: cuBLAS for both products.
//
// parent    v12_cp_async (its softmax is unchanged)
// change    cuBLAS computes S and O with Hopper's wgmma, without fusion. The query heads of a group
//           are adjacent in memory, so they form one matrix of group * seqlen_q rows.
// why       It shows what remains when the products are as fast as a library makes them.
// expect    The traffic of S and P remains: each is written once and read once.
// supports  fp32, fp16, bf16; any lengths, head dims, masks, GQA; dimensions below 2^31. In the
//           emulator Eigen computes the products.
#include "attn/blas.h"
#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::v13_cublas {
using namespace attn;

struct Config {
  static constexpr int kVector = 8;  // row stride of S and P: a multiple of this
  static constexpr std::size_t kMaxRowBytes = 224 * 1024;  // longest row kept in shared memory
};

// Stores four adjacent probabilities.
template <class Element>
__device__ __forceinline__ void store4(Element* to, float a, float b, float c, float d) {
  if constexpr (sizeof(Element) == 4)
    *reinterpret_cast<float4*>(to) = make_float4(a, b, c, d);
  else
    *reinterpret_cast<uint2*>(to) = make_uint2(pack2<Element>(a, b), pack2<Element>(c, d));
}

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

  if (row_fits) {  // the whole row in flight; each lane reads only its own part
    for (int j = first; j < end; j += 128) cp_async_16(sRow + j, s + j);
    cp_async_commit();
    cp_async_wait<0>();
  }
  float row_max = -INFINITY;
#pragma unroll 4
  for (int j = first; j < end; j += 128) {
    const float4 x = scores_at(row_fits ? sRow : s, j);
    row_max = fmaxf(row_max, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
    if (row_fits) in_row(j) = x;
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

template <class Element>
Status launch(const Arguments& args) {
  const ForwardParams<Element> params(args);
  const Problem& p = args.problem;
  const Shape shape = shape_of(p);
  const int row_stride = round_up(shape.seqlen_k, Config::kVector);
  const auto heads = static_cast<unsigned>(p.batch * p.heads);
  const std::size_t row_bytes = sizeof(float) * static_cast<std::size_t>(row_stride);
  const bool row_fits = row_bytes <= Config::kMaxRowBytes;
  const int64_t rows = p.group() * p.seqlen_q;  // of all query heads in a group

  args.phase("scores");  // (1) S [rows, seqlen_k] = Q [rows, d] * K [seqlen_k, d]^T
  // clang-format off
  Status status = gemm_strided_batched(
      args.backend, args.stream,
      {.batch = p.batch * p.kv_heads, .m = rows, .n = p.seqlen_k, .k = p.head_dim,
       .a = params.q, .a_type = p.dtype, .a_transposed = false, .lda = p.head_dim,
       .stride_a = rows * p.head_dim,
       .b = params.k, .b_type = p.dtype, .b_transposed = true, .ldb = p.head_dim,
       .stride_b = p.seqlen_k * p.head_dim,
       .c = args.out<float>("S"), .c_type = DType::fp32, .ldc = row_stride,
       .stride_c = rows * row_stride});
  // clang-format on
  if (!status.ok()) return status;
  args.phase("softmax");
  status =
      launch_kernel(softmax_kernel<Element>, dim3(static_cast<unsigned>(shape.seqlen_q), 1, heads),
                    dim3(32), row_fits ? row_bytes : 0, args.stream, args.in<float>("S"),
                    args.out<Element>("P"), params.lse, shape, row_stride, row_fits);
  if (!status.ok()) return status;
  args.phase("output");  // (3) O [rows, d] = P [rows, seqlen_k] * V [seqlen_k, d]
  // clang-format off
  return gemm_strided_batched(
      args.backend, args.stream,
      {.batch = p.batch * p.kv_heads, .m = rows, .n = p.head_dim, .k = p.seqlen_k,
       .a = args.in<Element>("P"), .a_type = p.dtype, .a_transposed = false, .lda = row_stride,
       .stride_a = rows * row_stride,
       .b = params.v, .b_type = p.dtype, .b_transposed = false, .ldb = p.head_dim,
       .stride_b = p.seqlen_k * p.head_dim,
       .c = params.o, .c_type = p.dtype, .ldc = p.head_dim,
       .stride_c = rows * p.head_dim});
  // clang-format on
}

Status launch(const Arguments& args) {
  return dispatch_dtype(args.problem.dtype, [&]<class Element>() { return launch<Element>(args); });
}

}  // namespace ATTN_BACKEND::v13_cublas
