#include "attn/blas.h"

#include <fmt/format.h>

#include <Eigen/Core>
#include <algorithm>
#include <climits>

#if ATTN_HAVE_CUBLAS
#include <cublas_v2.h>
#endif

namespace attn {
namespace {

using MatrixF = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// One matrix of a batch as float, `rows` x `columns` in storage order.
MatrixF load(const void* base, DType type, int64_t offset, int64_t rows, int64_t columns,
             int64_t ld) {
  MatrixF m(rows, columns);
  const auto* bytes = static_cast<const std::byte*>(base) + offset * size_of(type);
  for (int64_t r = 0; r < rows; ++r)
    decode(type, bytes + r * ld * size_of(type), static_cast<std::size_t>(columns),
           m.row(r).data());
  return m;
}

Status emulated_gemm(const Gemm& g) {
  for (int64_t i = 0; i < g.batch; ++i) {
    MatrixF a = g.a_transposed ? load(g.a, g.a_type, i * g.stride_a, g.k, g.m, g.lda)
                               : load(g.a, g.a_type, i * g.stride_a, g.m, g.k, g.lda);
    MatrixF b = g.b_transposed ? load(g.b, g.b_type, i * g.stride_b, g.n, g.k, g.ldb)
                               : load(g.b, g.b_type, i * g.stride_b, g.k, g.n, g.ldb);
    if (g.a_transposed) a = a.transpose().eval();
    if (g.b_transposed) b = b.transpose().eval();
    const MatrixF c = a * b;
    auto* bytes = static_cast<std::byte*>(g.c) + i * g.stride_c * size_of(g.c_type);
    for (int64_t r = 0; r < g.m; ++r)
      encode(g.c_type, c.row(r).data(), static_cast<std::size_t>(g.n),
             bytes + r * g.ldc * size_of(g.c_type));
  }
  return Status::success();
}

#if ATTN_HAVE_CUBLAS
cudaDataType_t cuda_type(DType t) {
  return t == DType::fp32 ? CUDA_R_32F : t == DType::fp16 ? CUDA_R_16F : CUDA_R_16BF;
}

// One handle per thread: creating it takes longer than most launches.
cublasHandle_t handle() {
  struct Owner {
    cublasHandle_t handle = nullptr;
    Owner() {
      if (cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS) handle = nullptr;
    }
    ~Owner() {
      if (handle) (void)cublasDestroy(handle);
    }
  };
  static thread_local Owner owner;
  return owner.handle;
}

Status cublas_gemm(Stream stream, const Gemm& g) {
  const int64_t largest = std::max({g.batch, g.m, g.n, g.k, g.lda, g.ldb, g.ldc});
  if (largest > INT_MAX)
    return Status::unsupported(fmt::format("cuBLAS takes dimensions below 2^31, got {}", largest));
  if (handle() == nullptr) return Status::device_error("cublasCreate failed");
  cublasStatus_t status = cublasSetStream(handle(), static_cast<cudaStream_t>(stream));
  // cuBLAS is column-major. A row-major C [m, n] is a column-major C^T [n, m] = op(B)^T op(A)^T. So
  // the operands are swapped and "transposed" keeps its meaning.
  const float alpha = 1, beta = 0;
  const auto i = [](int64_t x) { return static_cast<int>(x); };
  if (status == CUBLAS_STATUS_SUCCESS)
    status = cublasGemmStridedBatchedEx(handle(), g.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                                        g.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, i(g.n), i(g.m),
                                        i(g.k), &alpha, g.b, cuda_type(g.b_type), i(g.ldb),
                                        g.stride_b, g.a, cuda_type(g.a_type), i(g.lda), g.stride_a,
                                        &beta, g.c, cuda_type(g.c_type), i(g.ldc), g.stride_c,
                                        i(g.batch), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  if (status != CUBLAS_STATUS_SUCCESS)
    return Status::device_error(std::string("cublasGemmStridedBatchedEx: ") +
                                cublasGetStatusString(status));
  return Status::success();
}
#endif

}  // namespace

bool have_cublas() { return ATTN_HAVE_CUBLAS; }

Status gemm_strided_batched(Backend backend, [[maybe_unused]] Stream stream, const Gemm& g) {
  if (backend == Backend::emulated) return emulated_gemm(g);
#if ATTN_HAVE_CUBLAS
  return cublas_gemm(stream, g);
#else
  return Status::unsupported("this build has no cuBLAS");
#endif
}

}  // namespace attn
