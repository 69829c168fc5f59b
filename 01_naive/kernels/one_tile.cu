// One warp, one tile: D [16, 8] = A [16, 16] * B [16, 8] by one mma.m16n8k16. The README of this
// chapter explains it before the first step on tensor cores, and tests/test_one_tile.cpp runs it.
#include "attn/kernel.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::one_tile {
using namespace attn;

constexpr int kM = 16, kN = 8, kK = 16;  // rows of D, columns of D, length of a dot product

// Each lane loads the elements of A and B that it must hold, two per register.
//! [by_hand]
__global__ void by_hand_kernel(const __half* gA,  // [kM, kK]
                               const __half* gB,  // [kK, kN]
                               float* gD) {       // [kM, kN]
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;  // lane = 4 g + t

  uint32_t a[4];  // 8 elements of A: rows g and g + 8, two neighbours along k per register
  for (int r = 0; r < 4; ++r) {
    const int m = g + 8 * (r % 2), k = 2 * t + 8 * (r / 2);
    a[r] = pack2<__half>(to_float(gA[m * kK + k]), to_float(gA[m * kK + k + 1]));
  }
  uint32_t b[2];  // 4 elements of B: column g, two neighbours along k per register
  for (int r = 0; r < 2; ++r) {
    const int k = 2 * t + 8 * r, n = g;
    b[r] = pack2<__half>(to_float(gB[k * kN + n]), to_float(gB[(k + 1) * kN + n]));
  }

  float d[4] = {};                   // 4 elements of D: rows g and g + 8, columns 2 t and 2 t + 1
  mma_m16n8k16<__half>(d, a, b, d);  // d = A B + d, by all 32 lanes together

  for (int i = 0; i < 4; ++i) {
    const int m = g + 8 * (i / 2), n = 2 * t + i % 2;
    gD[m * kN + n] = d[i];
  }
}
//! [by_hand]

// The same fragments from shared memory: one ldmatrix for A, one transposed ldmatrix for B.
//! [by_ldmatrix]
__global__ void by_ldmatrix_kernel(const __half* gA, const __half* gB, float* gD) {
  __shared__ __align__(16) __half sA[kM * kK];  // [kM, kK]
  __shared__ __align__(16) __half sB[kK * kN];  // [kK, kN]
  const int lane_id = threadIdx.x, g = lane_id / 4, t = lane_id % 4;
  for (int i = lane_id; i < kM * kK; i += 32) sA[i] = gA[i];
  for (int i = lane_id; i < kK * kN; i += 32) sB[i] = gB[i];
  __syncwarp();

  uint32_t a[4], b[2];
  // Four matrices of 8 x 8: lanes 0-15 give the rows at k 0, lanes 16-31 the same rows at k 8.
  ldmatrix_x4(a, sA + lane_id % 16 * kK + lane_id / 16 * 8);
  // Two matrices: lanes 0-15 give rows of B, which run along n. A fragment of B needs neighbours
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
