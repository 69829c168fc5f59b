// Codes as operands as they lie.
//
// A half whose exponent's bits are 0 is a denormal number: 2^-24 times what its lower ten bits say.
// Tensor cores multiply such numbers like all others, exactly. So four bits under a mask, or a
// byte, are an operand: 2^-24 code or, where bits lie four places higher, 2^-20 code.
#pragma once

#include "kernels/cache_tiles.h"
#include "kernels/codes.h"

namespace ATTN_BACKEND::flash_decoding {
using namespace attn;

// For K a shift and four maskings make eight operands of a word. Of V 8 is subtracted: O adds up as
// many numbers as there are keys, and 8 times l, taken off at the end, would take the last bits of
// O along.
//! [denormals]
//! [ex08d]
// Q's columns make up for K's powers of 2, but for 2^-10, those of a chunk of eight alike: 2^14 and
// 2^10.
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
  static constexpr float kUnit = 0x1p-24f;  // what a code is multiplied by, in pairs 0 and 2
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

// Q is below 2 (load_q): times 2^14 it is still a number of fp16, and Q times code is 2^-10 of what
// it should be. Each warp does that to the rows it loaded.
//! [meet]
template <class Config, class Codes>
__device__ __forceinline__ void scale_for_denormals(__half* sQ) {
  __syncwarp();  // all of a row is there
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
