// A kernel for wgmma_s8: one warpgroup, operands written to shared memory by its threads; and a
// kernel that rounds to int8.
#include "attn/kernel.h"
#include "ptx/tma.h"
#include "ptx/wgmma_s8.h"
#include "tests/kernels.h"

namespace ATTN_BACKEND::tests {
using namespace attn;
using namespace attn::tests;

template <int kColumns>
struct S8Storage {
  alignas(1024) uint8_t sA[64 * 128];
  alignas(1024) uint8_t sB[kColumns * 128];
};

// D [64, columns] = A B with A [64, 128] and B^T [columns, 128].
template <int kColumns>
__global__ void __launch_bounds__(128, 1)
    s8_kernel(const uint8_t* gA, const uint8_t* gB, int* gD) {
  auto& smem = dynamic_shared<S8Storage<kColumns>>();
  const auto store = [&](uint8_t* tile, const uint8_t* g, int rows) {
    for (int i = threadIdx.x; i < rows * 8; i += 128) {
      const int row = i / 8, chunk = i % 8;
      *reinterpret_cast<uint4*>(tile + row * 128 + (chunk ^ row % 8) * 16) =
          *reinterpret_cast<const uint4*>(g + row * 128 + chunk * 16);
    }
  };
  store(smem.sA, gA, 64);
  store(smem.sB, gB, kColumns);
  fence_proxy_async();
  __syncthreads();
  int d[kColumns / 8][4];
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step)
    wgmma_s8(d, smem_descriptor_e4m3<128>(smem.sA) + 32 * step,
             smem_descriptor_e4m3<128>(smem.sB) + 32 * step, step > 0);
  wgmma_commit();
  wgmma_wait<0>(d);
  const int lane_id = threadIdx.x % 32, row0 = static_cast<int>(threadIdx.x) / 32 * 16;
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      gD[(row0 + lane_id / 4 + i / 2 * 8) * kColumns + 8 * n + lane_id % 4 * 2 + i % 2] = d[n][i];
}

// Packs four numbers of each thread into four codes.
__global__ void pack_kernel(const float* gX, uint32_t* gCodes) {
  const float* const x = gX + 4 * threadIdx.x;
  gCodes[threadIdx.x] = pack4_s8(x[0], x[1], x[2], x[3]);
}

Status s8_product(const KernelArguments& args) {
  const auto launch = [&]<int kColumns>() {
    return launch_kernel(s8_kernel<kColumns>, dim3(1), dim3(128), sizeof(S8Storage<kColumns>),
                         nullptr, static_cast<const uint8_t*>(args.a),
                         static_cast<const uint8_t*>(args.b), static_cast<int*>(args.out));
  };
  switch (args.mode) {
    case 64: return launch.template operator()<64>();
    case 128: return launch.template operator()<128>();
    case 160: return launch.template operator()<160>();
    default: return launch.template operator()<192>();
  }
}
Status s8_pack(const KernelArguments& args) {
  return launch_kernel(pack_kernel, dim3(1), dim3(32), 0, nullptr,
                       static_cast<const float*>(args.a), static_cast<uint32_t*>(args.out));
}

}  // namespace ATTN_BACKEND::tests
