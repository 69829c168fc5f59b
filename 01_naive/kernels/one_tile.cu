// One warp multiplies one tile: D [16, 8] = A [16, 16] * B [16, 8], with one mma.m16n8k16. MMA.md
// of this chapter explains the two kernels, and tests/test_one_tile.cpp runs them.
#include "attn/kernel.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::one_tile {
using namespace attn;

constexpr int kM = 16, kN = 8, kK = 16;  // rows of D, columns of D, dot-product length

// Fragments by hand: each lane loads its own elements of A and B, two per register.
//! [by_hand]
__global__ void by_hand_kernel(const __half* gA,  // [kM, kK]
                               const __half* gB,  // [kK, kN]
                               float* gD) {       // [kM, kN]
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;  // lane = 4 g + t

  uint32_t a[4];  // A: rows g and g + 8; a register holds two adjacent k
  for (int r = 0; r < 4; ++r) {
    const int m = g + 8 * (r % 2), k = 2 * t + 8 * (r / 2);
    a[r] = pack2<__half>(to_float(gA[m * kK + k]), to_float(gA[m * kK + k + 1]));
  }
  uint32_t b[2];  // B: column g; a register holds two adjacent k
  for (int r = 0; r < 2; ++r) {
    const int k = 2 * t + 8 * r, n = g;
    b[r] = pack2<__half>(to_float(gB[k * kN + n]), to_float(gB[(k + 1) * kN + n]));
  }

  float d[4] = {};  // D: rows g and g + 8, columns 2t and 2t + 1
  mma_m16n8k16<__half>(d, a, b, d);  // d = A B + d, warp-wide

  for (int i = 0; i < 4; ++i) {
    const int m = g + 8 * (i / 2), n = 2 * t + i % 2;
    gD[m * kN + n] = d[i];
  }
}
//! [by_hand]

// Fragments by ldmatrix: one plain ldmatrix for A, one transposed ldmatrix for B.
//! [by_ldmatrix]
__global__ void by_ldmatrix_kernel(const __half* gA, const __half* gB, float* gD) {
  __shared__ __align__(16) __half sA[kM * kK];  // [kM, kK]
  __shared__ __align__(16) __half sB[kK * kN];  // [kK, kN]
  const int lane_id = threadIdx.x, g = lane_id / 4, t = lane_id % 4;
  for (int i = lane_id; i < kM * kK; i += 32) sA[i] = gA[i];
  for (int i = lane_id; i < kK * kN; i += 32) sB[i] = gB[i];
  __syncwarp();

  uint32_t a[4], b[2];
  // Four 8 x 8 matrices: lanes 0-15 address the rows at k = 0, lanes 16-31 the same rows at k = 8.
  ldmatrix_x4(a, sA + lane_id % 16 * kK + lane_id / 16 * 8);
  // Two 8 x 8 matrices: lanes 0-15 address rows of B, which run along n. The B fragment needs pairs
  // along k, so ldmatrix transposes each matrix.
  ldmatrix_x2_trans(b, sB + lane_id % 16 * kN);

  float d[4] = {};
  mma_m16n8k16<__half>(d, a, b, d);
  for (int i = 0; i < 4; ++i) gD[(g + 8 * (i / 2)) * kN + 2 * t + i % 2] = d[i];
}
//! [by_ldmatrix]

Status multiply(const void* a, const void* b, void* d, bool ldmatrix) {
  return launch_kernel(ldmatrix ? by_ldmatrix_kernel : by_hand_kernel, dim3(1), dim3(32), 0,
                       nullptr, static_cast<const __half*>(a), static_cast<const __half*>(b),
                       static_cast<float*>(d));
}

}  // namespace ATTN_BACKEND::one_tile
