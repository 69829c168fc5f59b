// A one-warp kernel for mma_m16n8k32_s8 (ptx/mma_s8.h): operands loaded by ldmatrix, as in the
// steps, and by hand according to the layouts in the PTX ISA. The same for mma_m16n8k64_s4, whose
// rows are as many bytes.
#include "attn/kernel.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma_s4.h"
#include "ptx/mma_s8.h"
#include "tests/kernels.h"

namespace ATTN_BACKEND::tests {
using namespace attn;
using namespace attn::tests;

// D [16, 8] = A [16, 32] B^T [8, 32] + C [16, 8].
template <bool kLdmatrix, bool kFourBits>
__global__ void mma_s8_kernel(const uint8_t* gA, const uint8_t* gB, const int* gC, int* gD) {
  __shared__ __align__(16) uint8_t sA[16 * 48];  // rows of 32 codes and 16 bytes of padding
  __shared__ __align__(16) uint8_t sB[8 * 48];
  const int lane_id = static_cast<int>(threadIdx.x), g = lane_id / 4, t = lane_id % 4;
  for (int i = lane_id; i < 16 * 32; i += 32) sA[i / 32 * 48 + i % 32] = gA[i];
  for (int i = lane_id; i < 8 * 32; i += 32) sB[i / 32 * 48 + i % 32] = gB[i];
  __syncwarp();
  uint32_t a[4], b[2];
  if constexpr (kLdmatrix) {
    ldmatrix_x4(a, sA + lane_id % 16 * 48 + lane_id / 16 * 16);
    ldmatrix_x2(b, sB + lane_id % 8 * 48 + lane_id / 8 % 2 * 16);
  } else {
    const auto four = [](const uint8_t* codes) {
      return codes[0] | codes[1] << 8 | codes[2] << 16 | static_cast<uint32_t>(codes[3]) << 24;
    };
    for (int r = 0; r < 4; ++r) a[r] = four(gA + (g + r % 2 * 8) * 32 + 4 * t + r / 2 * 16);
    for (int r = 0; r < 2; ++r) b[r] = four(gB + g * 32 + 4 * t + r * 16);
  }
  int c[4], d[4];
  const int first = g * 8 + 2 * t;
  for (int i = 0; i < 4; ++i) c[i] = gC[first + i % 2 + i / 2 * 8 * 8];
  if constexpr (kFourBits)
    mma_m16n8k64_s4(d, a, b, c);
  else
    mma_m16n8k32_s8(d, a, b, c);
  for (int i = 0; i < 4; ++i) gD[first + i % 2 + i / 2 * 8 * 8] = d[i];
}

Status mma_s8_product(const KernelArguments& args) {
  const auto kernel = args.dtype == DType::int4 ? args.mode == kByHand ? mma_s8_kernel<false, true>
                                                                       : mma_s8_kernel<true, true>
                      : args.mode == kByHand ? mma_s8_kernel<false, false>
                                                : mma_s8_kernel<true, false>;
  return launch_kernel(kernel, dim3(1), dim3(32), 0, nullptr, static_cast<const uint8_t*>(args.a),
                       static_cast<const uint8_t*>(args.b), static_cast<const int*>(args.c),
                       static_cast<int*>(args.out));
}

}  // namespace ATTN_BACKEND::tests
