// b2_cublas: backward pass, cuBLAS for the four GEMMs.
//
// parent    v13_cublas (reads the P of its forward pass; same cuBLAS calls; phases of b1_global)
// change    cuBLAS computes dV, dP, dQ and dK; one kernel computes dS, one warp per row.
// why       The sum over the query heads of a group (GQA) becomes part of the GEMM: the heads are
//           adjacent in memory, so P^T dO runs over group * seqlen_q rows.
// expect    The traffic of P, dP and dS limits the time: P and dS in the input type, dP in fp32.
// supports  fp32, fp16, bf16; any lengths, head dims, masks, GQA; dimensions below 2^31
#include "attn/blas.h"
#include "attn/kernel.h"

namespace ATTN_BACKEND::b2_cublas {
using namespace attn;

struct Config {
  static constexpr int kVector = 8;  // row stride of P, dP and dS: a multiple of this, for cuBLAS
  static constexpr int kWarps = 4;  // rows per block of the dS kernel
};

// (3) dS = scale * P (dP - D), where D = rowsum(P dP); one warp per row. P is 0 at masked keys, so
// dS is 0 there, too.
//! [ds]
template <class Element>
__global__ void __launch_bounds__(32 * Config::kWarps)
    ds_kernel(const Element* gP,  // [B, Hq, seqlen_q, row_stride]
              const float* gdP,   // [B, Hq, seqlen_q, row_stride]
              Element* gdS,       // [B, Hq, seqlen_q, row_stride]
              Shape shape, int row_stride) {
  const int lane_id = threadIdx.x;
  const int row = blockIdx.x * Config::kWarps + threadIdx.y;
  const int64_t bh = blockIdx.z;
  if (row >= shape.seqlen_q) return;
  const int64_t first = (bh * shape.seqlen_q + row) * row_stride;
  float row_d = 0;
#pragma unroll 8
  for (int j = lane_id; j < shape.seqlen_k; j += 32)
    row_d += to_float(gP[first + j]) * gdP[first + j];
  for (int offset = 16; offset > 0; offset /= 2) row_d += __shfl_xor_sync(~0u, row_d, offset);
#pragma unroll 8
  for (int j = lane_id; j < row_stride; j += 32) {
    const bool inside = j < shape.seqlen_k;  // row padding: 0
    gdS[first + j] = from_float<Element>(
        inside ? shape.softmax_scale * to_float(gP[first + j]) * (gdP[first + j] - row_d) : 0.f);
  }
}
//! [ds]

template <class Element>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const Shape shape = shape_of(p);
  const int64_t n_k = p.seqlen_k, d = p.head_dim;
  const int64_t row_stride = round_up(n_k, Config::kVector);
  const int64_t rows = p.group() * p.seqlen_q;  // of all query heads in a group
  struct Matrix {  // [rows, columns] per K/V head, row-major with stride ld
    const void* data;
    DType type;
    int64_t ld, stride;
  };
  const auto matrix = [&](const char* name, DType type, int64_t ld, int64_t matrix_rows) {
    return Matrix{args.in<void>(name), type, ld, matrix_rows * ld};
  };
  // C [m, n] = op(A) [m, k] * op(B) [k, n]
  const auto product = [&](const char* phase, int64_t m, int64_t n, int64_t k, Matrix a, bool a_t,
                           Matrix b, bool b_t, Matrix c) {
    args.phase(phase);
    return gemm_strided_batched(
        args.backend, args.stream,
        {.batch = p.batch * p.kv_heads, .m = m, .n = n, .k = k,
         .a = a.data, .a_type = a.type, .a_transposed = a_t, .lda = a.ld, .stride_a = a.stride,
         .b = b.data, .b_type = b.type, .b_transposed = b_t, .ldb = b.ld, .stride_b = b.stride,
         .c = const_cast<void*>(c.data), .c_type = c.type, .ldc = c.ld, .stride_c = c.stride});
  };
  const Matrix q = matrix("q", p.dtype, d, rows), k = matrix("k", p.dtype, d, n_k);
  const Matrix v = matrix("v", p.dtype, d, n_k), d_o = matrix("do", p.dtype, d, rows);
  const Matrix probabilities = matrix("P", p.dtype, row_stride, rows);
  const Matrix dp = matrix("S", DType::fp32, row_stride, rows);  // dP reuses the memory of S
  const Matrix ds = matrix("dS", p.dtype, row_stride, rows);

  // (1) dV [seqlen_k, d] = P^T [seqlen_k, rows] * dO [rows, d]
  Status status = product("dv", n_k, d, rows, probabilities, true, d_o, false,
                          matrix("dv", p.dtype, d, n_k));
  // (2) dP [rows, seqlen_k] = dO [rows, d] * V^T [d, seqlen_k]
  if (status.ok()) status = product("dp", rows, n_k, d, d_o, false, v, true, dp);
  if (status.ok()) {
    args.phase("ds");
    const auto blocks = static_cast<unsigned>(ceil_div(shape.seqlen_q, Config::kWarps));
    status = launch_kernel(ds_kernel<Element>,
                           dim3(blocks, 1, static_cast<unsigned>(p.batch * p.heads)),
                           dim3(32, Config::kWarps), 0, args.stream, args.in<Element>("P"),
                           args.in<float>("S"), args.out<Element>("dS"), shape,
                           static_cast<int>(row_stride));
  }
  // (4) dQ [rows, d] = dS [rows, seqlen_k] * K [seqlen_k, d]
  if (status.ok())
    status = product("dq", rows, d, n_k, ds, false, k, false, matrix("dq", p.dtype, d, rows));
  // (5) dK [seqlen_k, d] = dS^T [seqlen_k, rows] * Q [rows, d]
  if (status.ok())
    status = product("dk", n_k, d, rows, ds, true, q, false, matrix("dk", p.dtype, d, n_k));
  return status;
}

Status launch(const Arguments& args) {
  return dispatch_dtype(args.problem.dtype,
                        [&]<class Element>() { return launch<Element>(args); });
}

}  // namespace ATTN_BACKEND::b2_cublas
