/// \file
/// Batched matrix products by a library: cuBLAS on the GPU, Eigen in the emulator. The baseline for
/// hand-written GEMMs, and the measured tensor roof.
#pragma once

#include <cstdint>

#include "attn/step.h"

namespace attn {

/// C = alpha * op(A) * op(B) for each of `batch` matrices, all row-major: op(A) `[m, k]`, op(B)
/// `[k, n]`, C `[m, n]`. `a_transposed`: A is stored `[k, m]`; likewise B `[n, k]`. Leading
/// dimensions and strides count elements. Accumulation is in fp32.
struct Gemm {
  int64_t batch, m, n, k;
  const void* a;
  DType a_type;
  bool a_transposed;
  int64_t lda, stride_a;
  const void* b;
  DType b_type;
  bool b_transposed;
  int64_t ldb, stride_b;
  void* c;
  DType c_type;
  int64_t ldc, stride_c;
};

/// Whether this build has cuBLAS.
bool have_cublas();

/// Runs the product. Unsupported: a dimension beyond cuBLAS's 32-bit interface, or a build without
/// cuBLAS.
[[nodiscard]] Status gemm_strided_batched(Backend, Stream, const Gemm&);

}  // namespace attn
