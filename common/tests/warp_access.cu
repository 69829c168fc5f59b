// warp_access_probe: one small kernel per pattern, with one warp and kLoads loads, for ncu to
// count. Prints a line per kernel in launch order: number, metric, predicted count, name. The
// counts of the first kernel, which loads nothing, are the baseline. See
// common/scripts/check_warp_access.sh.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "tests/warp_access_patterns.h"

namespace {

using namespace attn::tests;

constexpr int kLoads = 8;
constexpr int kSharedBytes = 16 * 1024, kGlobalStep = 16 * 1024;  // beyond any pattern's extent

// Loads through inline PTX: the compiler neither widens nor removes them. Nothing writes to shared
// memory, because stores would be counted with the loads of ldmatrix.
__device__ uint32_t load_shared(uint32_t from, int bytes) {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (bytes == 4)
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(a) : "r"(from));
  else if (bytes == 8)
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(from));
  else
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(from));
  return a ^ b ^ c ^ d;
}
__device__ uint32_t load_matrices(uint32_t from) {
  uint32_t a, b, c, d;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(from));
  return a ^ b ^ c ^ d;
}
__device__ uint32_t load_global(const char* from, int bytes) {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (bytes == 4)
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(a) : "l"(from));
  else if (bytes == 8)
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "l"(from));
  else
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "l"(from));
  return a ^ b ^ c ^ d;
}

// Load n is offset by n rows of banks (or n times kGlobalStep), so that all addresses differ and
// each load costs as much as the first. The sum is stored, so that no load is removed.
template <class Pattern, int kCount>
__global__ void probe(const char* global, uint32_t* out) {
  __shared__ __align__(1024) char shared[kSharedBytes];
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int64_t at = Pattern::address(static_cast<int>(threadIdx.x));
  uint32_t sum = 0;
  if (at >= 0) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const uint32_t from = base + static_cast<uint32_t>(at) + 128 * n;
      if constexpr (Pattern::kInstruction == Instruction::kShared)
        sum += load_shared(from, Pattern::kBytes);
      else if constexpr (Pattern::kInstruction == Instruction::kLdmatrix)
        sum += load_matrices(from);
      else
        sum += load_global(global + at + n * kGlobalStep, Pattern::kBytes);
    }
  }
  out[threadIdx.x] = sum;
}

void check(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s (%s)\n", doing, cudaGetErrorName(error), cudaGetErrorString(error));
  std::exit(4);
}

}  // namespace

int main() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    std::fprintf(stderr, "no GPU: %s\n", cudaGetErrorName(error));
    return 77;
  }
  char* global = nullptr;
  uint32_t* out = nullptr;
  check(cudaMalloc(&global, kLoads * kGlobalStep), "allocating");
  check(cudaMalloc(&out, 32 * sizeof(uint32_t)), "allocating");
  check(cudaMemset(global, 0, kLoads * kGlobalStep), "clearing");

  int number = 0;
  const auto run = [&](auto kernel, const char* metric, int predicted, const char* name) {
    kernel<<<1, 32>>>(global, out);
    check(cudaGetLastError(), name);
    std::printf("%d\t%s\t%d\t%s\n", number++, metric, predicted, name);
  };
  run(probe<Strided<Instruction::kShared, 4, 4>, 0>, "baseline", 0, "no loads");
  for_each_pattern([&](auto pattern, const char* name, int) {
    using Pattern = decltype(pattern);
    static_assert(Pattern::address(31) + 16 + 128 * kLoads <= kSharedBytes);
    const char* metric = Pattern::kInstruction == Instruction::kShared     ? "shared"
                         : Pattern::kInstruction == Instruction::kLdmatrix ? "ldmatrix"
                                                                           : "global";
    run(probe<Pattern, kLoads>, metric, kLoads * predicted<Pattern>(), name);
  });
  check(cudaDeviceSynchronize(), "running the kernels");
  check(cudaFree(global), "freeing");
  check(cudaFree(out), "freeing");
  return 0;
}
