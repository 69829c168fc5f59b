/// \file
/// `stmatrix`: stores 8 x 8 matrices of 16-bit elements from `mma` fragments to shared memory, the
/// inverse of `ldmatrix`. Source: PTX ISA, "stmatrix" (sm_90 and later).
#pragma once

#include <cstdint>

#include "attn/kernel.h"
#include "ptx/ldmatrix.h"  // shared_address

namespace attn {
inline namespace ATTN_BACKEND {

#ifdef ATTN_EMULATED
// Emulation of both variants: lane 8 m + i holds the address of row i of matrix m.
template <bool kTranspose>
void emulate_stmatrix(void* row, const uint32_t (&r)[4], const char* what, emulator::Place caller) {
  struct Lane {
    void* row;
    uint32_t r[4];
  } mine{row, {r[0], r[1], r[2], r[3]}};
  emulator::Block::current().require_aligned(what, caller, "a row", row, 16);
  emulator::Block::current().require_shared(what, caller, "a row", row, 16);
  emulator::Block::current().access(emulator::Kind::write, what, caller, row, 16);
  emulator::Block::current().wait_warp(what, caller, ~0u, mine, [](auto& lanes) {
    for (int m = 0; m < 4; ++m) {
      uint16_t matrix[8][8];
      for (int lane = 0; lane < 32; ++lane)
        for (int c = 0; c < 2; ++c) {
          const int i = lane / 4, j = lane % 4 * 2 + c;
          matrix[kTranspose ? j : i][kTranspose ? i : j] =
              static_cast<uint16_t>(lanes[lane]->r[m] >> 16 * c);
        }
      for (int i = 0; i < 8; ++i) std::memcpy(lanes[8 * m + i]->row, matrix[i], 16);
    }
  });
}
#endif

/// Stores four 8 x 8 matrices. Lane l gives the address of row l % 8 of matrix l / 8 (16 bytes,
/// 16-byte aligned). Register m of lane l holds elements 2t and 2t + 1 of row g of matrix m, with
/// g = l / 4 and t = l % 4, as in ldmatrix_x4.
__device__ __forceinline__ void stmatrix_x4(void* row, const uint32_t (&r)[4] ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulate_stmatrix<false>(row, r, "stmatrix_x4", caller);
#else
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
#endif
}

/// Transposes four matrices and stores them: register m of lane l holds elements 2t and 2t + 1 of
/// *column* g of the stored matrix m. A fragment of dS^T [keys, queries] becomes rows of
/// dS [queries, keys].
__device__ __forceinline__ void stmatrix_x4_trans(void* row, const uint32_t (&r)[4] ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulate_stmatrix<true>(row, r, "stmatrix_x4_trans", caller);
#else
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
