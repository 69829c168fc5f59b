// A kernel around wgmma_e4m3: one warpgroup, operands written to shared memory by its threads.
#include "attn/kernel.h"
#include "ptx/tma.h"
#include "ptx/wgmma_e4m3.h"
#include "tests/kernels.h"

namespace ATTN_BACKEND::tests {
using namespace attn;
using namespace attn::tests;

template <int kRowBytes>
struct E4M3Storage {
  alignas(1024) uint8_t sA[64 * kRowBytes];
  alignas(1024) uint8_t sB[64 * kRowBytes];
};

// D [64, 64] = A B with A [64, 32 groups] and B^T [64, 32 groups], in k steps of 32.
template <int kRowBytes, bool kRegisters>
__global__ void __launch_bounds__(128, 1)
    e4m3_kernel(const uint8_t* gA, const uint8_t* gB, float* gD, int groups) {
  auto& smem = dynamic_shared<E4M3Storage<kRowBytes>>();
  constexpr int kChunks = kRowBytes / 16, kSteps = kRowBytes / 32;
  const int lane_id = threadIdx.x % 32, row0 = static_cast<int>(threadIdx.x) / 32 * 16;
  float d[8][4];
  for (int step = 0; step < groups; ++step) {
    if (step % kSteps == 0) {  // the next panel; data past the end is not multiplied
      for (int i = threadIdx.x; i < 64 * kChunks; i += 128) {
        const int row = i / kChunks, chunk = i % kChunks;
        const int place = kRowBytes == 128 ? chunk ^ row % 8 : chunk ^ row / 2 % 4;
        const int from = row * groups * 32 + step * 32 + chunk * 16;
        const bool there = step * 32 + chunk * 16 < groups * 32;
        const uint4 none = make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4*>(smem.sA + row * kRowBytes + place * 16) =
            there ? *reinterpret_cast<const uint4*>(gA + from) : none;
        *reinterpret_cast<uint4*>(smem.sB + row * kRowBytes + place * 16) =
            there ? *reinterpret_cast<const uint4*>(gB + from) : none;
      }
      fence_proxy_async();
      __syncthreads();
    }
    uint32_t a[4];
    for (int i = 0; i < 4; ++i) {
      const int row = row0 + lane_id / 4 + i % 2 * 8;
      a[i] = *reinterpret_cast<const uint32_t*>(gA + row * groups * 32 + step * 32 + i / 2 * 16 +
                                                lane_id % 4 * 4);
    }
    const int inside = step % kSteps * 32;
    const SmemDescriptor left = smem_descriptor_e4m3<kRowBytes>(smem.sA) + inside;
    const SmemDescriptor right = smem_descriptor_e4m3<kRowBytes>(smem.sB) + inside;
    wgmma_fence();
    if constexpr (kRegisters)
      wgmma_e4m3(d, a, right, step > 0);
    else
      wgmma_e4m3(d, left, right, step > 0);
    wgmma_commit();
    wgmma_wait<0>(d);
    __syncthreads();  // all warps have read the panel
  }
  for (int n = 0; n < 8; ++n)
    for (int i = 0; i < 4; ++i)
      gD[(row0 + lane_id / 4 + i / 2 * 8) * 64 + 8 * n + lane_id % 4 * 2 + i % 2] = d[n][i];
}

Status e4m3_product(const KernelArguments& args) {
  const auto launch = [&]<int kRowBytes, bool kRegisters>() {
    return launch_kernel(e4m3_kernel<kRowBytes, kRegisters>, dim3(1), dim3(128),
                         sizeof(E4M3Storage<kRowBytes>), nullptr,
                         static_cast<const uint8_t*>(args.a), static_cast<const uint8_t*>(args.b),
                         static_cast<float*>(args.out), args.mode / 4);
  };
  switch (args.mode % 4) {
    case 0: return launch.template operator()<64, false>();
    case 1: return launch.template operator()<64, true>();
    case 2: return launch.template operator()<128, false>();
    default: return launch.template operator()<128, true>();
  }
}

}  // namespace ATTN_BACKEND::tests
