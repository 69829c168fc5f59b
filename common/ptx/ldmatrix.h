/// \file
/// `ldmatrix`: loads 8 x 8 matrices of 16-bit elements from shared memory into `mma` fragments.
/// Source: PTX ISA, "ldmatrix" (sm_75 and later).
#pragma once

#include <cstdint>

#include "attn/kernel.h"

namespace attn {
inline namespace ATTN_BACKEND {

#ifdef ATTN_EMULATED
// Emulation of all variants: lane 8 m + i holds the address of row i of matrix m.
template <int kMatrices, bool kTranspose>
void emulate_ldmatrix(uint32_t (&r)[kMatrices], const void* row, const char* what,
                      emulator::Place caller) {
  struct Lane {
    const void* row;
    uint32_t r[kMatrices];
  } mine{row, {}};
  // x2 ignores the addresses of the other lanes
  const bool counts = emulator::Block::current().lane() < 8 * kMatrices;
  if (counts) {
    emulator::Block::current().require_aligned(what, caller, "a row", row, 16);
    emulator::Block::current().access(emulator::Kind::read, what, caller, row, 16);
  }
  emulator::Block::current().wait_warp(what, caller, ~0u, mine, [](auto& lanes) {
    for (int m = 0; m < kMatrices; ++m) {
      uint16_t matrix[8][8];
      for (int i = 0; i < 8; ++i) std::memcpy(matrix[i], lanes[8 * m + i]->row, 16);
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        const uint16_t low = kTranspose ? matrix[2 * t][g] : matrix[g][2 * t];
        const uint16_t high = kTranspose ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1];
        lanes[lane]->r[m] = low | uint32_t{high} << 16;
      }
    }
  });
  for (int m = 0; m < kMatrices; ++m) r[m] = mine.r[m];
}
#else
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
#endif

/// Loads four 8 x 8 matrices. Lane l gives the address of row l % 8 of matrix l / 8 (16 bytes,
/// 16-byte aligned). Register m of lane l receives elements 2t and 2t + 1 of row g of matrix m,
/// with g = l / 4 and t = l % 4:
///
///     lanes 0..7 -> rows of matrix 0        lane:  0 0  1 1  2 2  3 3     <- row 0 of each matrix
///     lanes 8..15 -> rows of matrix 1              4 4  5 5  6 6  7 7     <- row 1
///     ...                                          ...
///
/// The four registers are an A fragment of mma_m16n8k16 if the matrices are, in this order: rows
/// 0-7 of k 0-7, rows 8-15 of k 0-7, rows 0-7 of k 8-15, rows 8-15 of k 8-15.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulate_ldmatrix<4, false>(r, row, "ldmatrix_x4", caller);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
#endif
}

/// Loads two matrices; lanes 0..15 give the row addresses.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void* row ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulate_ldmatrix<2, false>(r, row, "ldmatrix_x2", caller);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
#endif
}

/// Loads four matrices and transposes each: register m of lane l receives elements 2t and 2t + 1 of
/// *column* g. A row-major [k, n] tile in shared memory becomes the column-major B fragment of mma.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulate_ldmatrix<4, true>(r, row, "ldmatrix_x4_trans", caller);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
#endif
}

/// Loads and transposes two matrices; lanes 0..15 give the row addresses.
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulate_ldmatrix<2, true>(r, row, "ldmatrix_x2_trans", caller);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
