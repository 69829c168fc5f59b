// Codes used directly as fp16 subnormals.
//
// An fp16 word with exponent bits 0 is a subnormal: 2^-24 times its lower ten bits. Tensor cores
// multiply subnormals exactly. So four masked bits, or a byte, are an operand: 2^-24 code or, four
// bits higher, 2^-20 code.
#pragma once

#include "kernels/cache_tiles.h"
#include "kernels/codes.h"

namespace ATTN_BACKEND::flash_decoding {
using namespace attn;

// K: one shift and four ANDs make eight operands of a word. V: 8 is subtracted from each, because
// subtracting it at the end would make O the small difference of two large sums.
//! [denormals]
//! [ex08d]
// Factors in Q's columns compensate for K's powers of 2, up to 2^-10: 2^14 and 2^10, the same for a
// chunk of eight columns.
__device__ __forceinline__ uint32_t factor_of_q(int chunk) {
  return chunk % 2 == 0 ? 0x74007400 : 0x64006400;
}
__device__ __forceinline__ void operands_of_k(uint32_t word, uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    pairs[i] = word >> i / 2 * 8 & (i % 2 == 0 ? 0x000F000Fu : 0x00F000F0u);
}
__device__ __forceinline__ void operands_of_v(uint32_t word, uint32_t (&pairs)[4]) {
  operands_of_k(word, pairs);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    pairs[i] = subtract_halves(pairs[i], i % 2 == 0 ? 0x00080008u : 0x00800080u);
}
//! [ex08d]
struct Int4Denormals : Int4Codes {
  static constexpr float kUnit = 0x1p-24f;  // factor of a code, in pairs 0 and 2
  __device__ static uint32_t q_factor(int chunk) { return factor_of_q(chunk); }
  __device__ static void of_k(uint32_t word, uint32_t (&pairs)[4]) { operands_of_k(word, pairs); }
  __device__ static void of_v(uint32_t word, uint32_t (&pairs)[4]) { operands_of_v(word, pairs); }
};
//! [denormals]
struct Int8Denormals : Int8Codes {
  static constexpr float kMiddle = 128, kUnit = 0x1p-24f;
  __device__ static uint32_t q_factor(int) { return 0x74007400; }
  __device__ static void of_k(uint32_t word, uint32_t (&pairs)[2]) {
    pairs[0] = bytes_of_two(word, 0, 0x4140);
    pairs[1] = bytes_of_two(word, 0, 0x4342);
  }
  __device__ static void of_v(uint32_t word, uint32_t (&pairs)[2]) {
    pairs[0] = subtract_halves(bytes_of_two(word, 0, 0x4240), 0x00800080);
    pairs[1] = subtract_halves(bytes_of_two(word, 0, 0x4341), 0x00800080);
  }
};

// Q is below 2 (load_q), so times 2^14 it is still in fp16's range, and Q times code is 2^-10 of
// its value. Each warp scales the rows that it loaded.
//! [meet]
template <class Config, class Codes>
__device__ __forceinline__ void scale_for_denormals(__half* sQ) {
  __syncwarp();  // the whole row is stored
  for (int row = threadIdx.x / 32; row < Config::kRows; row += Config::kNumWarps)
    for (int chunk = threadIdx.x % 32; chunk < Config::kHeadDim / 8; chunk += 32) {
      uint4& q = *reinterpret_cast<uint4*>(
          sQ + swizzled_offset<Config::kHeadDim>(row, 8 * chunk));
      const uint32_t factor = Codes::q_factor(chunk);
      q = make_uint4(multiply_halves(q.x, factor), multiply_halves(q.y, factor),
                     multiply_halves(q.z, factor), multiply_halves(q.w, factor));
    }
}
//! [meet]

}  // namespace ATTN_BACKEND::flash_decoding
