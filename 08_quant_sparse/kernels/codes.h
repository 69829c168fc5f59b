// Codes of a quantised cache: encoding, and conversion of four codes to fp16 operands, two per
// register, without a shuffle.
//
// A word is what ldmatrix gives a lane: four consecutive codes of a key; for V, where it transposes
// pairs, two of a key and two of the next one. K's are taken in storage order, (0 1) and (2 3): a
// sum over d may be in any order, if Q's columns have the same one. V's are taken crosswise, (0 2)
// and (1 3): two keys of one column, and of the next column.
#pragma once

#include "attn/kernel.h"
#include "ptx/mma.h"
#include "ptx/wgmma_s8.h"

namespace ATTN_BACKEND::flash_decoding {
using namespace attn;

// Selects bytes of `a` (0 to 3) and `b` (4 to 7) by the digits of `which`, the last digit for the
// lowest byte.
__device__ __forceinline__ uint32_t bytes_of_two(uint32_t a, uint32_t b, uint32_t which) {
#ifdef ATTN_EMULATED
  uint32_t all = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = which >> 4 * i & 7;
    all |= ((digit < 4 ? a >> 8 * digit : b >> 8 * (digit - 4)) & 0xFF) << 8 * i;
  }
  return all;
#else
  return __byte_perm(a, b, which);
#endif
}
// a - b on two packed fp16.
__device__ __forceinline__ uint32_t subtract_halves(uint32_t a, uint32_t b) {
#ifdef ATTN_EMULATED
  return pack2<__half>(unpack<__half>(a, 0) - unpack<__half>(b, 0),
                       unpack<__half>(a, 1) - unpack<__half>(b, 1));
#else
  uint32_t pair;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
#endif
}

// a b on two packed fp16.
__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
#ifdef ATTN_EMULATED
  return pack2<__half>(unpack<__half>(a, 0) * unpack<__half>(b, 0),
                       unpack<__half>(a, 1) * unpack<__half>(b, 1));
#else
  uint32_t pair;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
#endif
}

// The slot of Q's column `col` that matches the codes in storage order: of the four codes of a
// word, 0 1 are slots 2t 2t+1 of sixteen, and 2 3 are 2t+8 2t+9.
__device__ __forceinline__ int slot_of_four(int col) {
  return col / 16 * 16 + col % 16 / 4 * 2 + col % 2 + col % 4 / 2 * 8;
}

// int8, stored as its value plus 128. With 0x64 as its upper byte a code is the fp16 number 1024 +
// code: one byte permutation and one subtraction convert two codes.
//! [int8]
struct Int8Codes {
  static constexpr float kLargest = 127;
  __device__ static int slot(int col) { return slot_of_four(col); }
  __device__ static uint32_t encode(float a, float b, float c, float d) {
    return pack4_s8(a, b, c, d) ^ 0x80808080u;
  }
  __device__ static void in_storage_order(uint32_t word, uint32_t (&pairs)[2]) {
    pairs[0] = subtract_halves(bytes_of_two(word, kUpper, 0x4140), kBias);
    pairs[1] = subtract_halves(bytes_of_two(word, kUpper, 0x4342), kBias);
  }
  __device__ static void crosswise(uint32_t word, uint32_t (&pairs)[2]) {
    pairs[0] = subtract_halves(bytes_of_two(word, kUpper, 0x4240), kBias);
    pairs[1] = subtract_halves(bytes_of_two(word, kUpper, 0x4341), kBias);
  }
  static constexpr uint32_t kUpper = 0x64646464, kBias = 0x64806480;  // 1024, 1024 + 128
};
//! [int8]

// e4m3: sign, four exponent bits, three fraction bits. Shifted into fp16's fields a code is 2^-8 of
// its value, because fp16's exponent bias is larger by 8.
//! [fp8]
struct Fp8Codes {
  static constexpr float kLargest = 448;
  __device__ static int slot(int col) { return slot_of_four(col); }
  __device__ static uint32_t encode(float a, float b, float c, float d) {
#if !defined(ATTN_EMULATED) && __CUDA_ARCH__ >= 890
    return pack4_e4m3(a, b, c, d);
#else
    return code_of(a) | code_of(b) << 8 | code_of(c) << 16 | code_of(d) << 24;
#endif
  }
  // Round to nearest even, saturating at 448; NaN is 0x7F.
  __device__ static uint32_t code_of(float x) {
    const uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80;
    const uint32_t size = min(bits & 0x7FFFFFFFu, 0x43E00000u);  // 448
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return sign | 0x7F;
    if (size < 0x3C800000u)  // below 2^-6: subnormal, multiples of 2^-9
      return sign | static_cast<uint32_t>(rintf(__uint_as_float(size) * 512));
    // Adds half of the last kept bit, minus one if that bit is even; the exponent bias is lower by
    // 120.
    return sign | (((size + 0x7FFFFu + (size >> 20 & 1)) >> 20) - (120 << 3));
  }
  // The lower two codes of a word, and the upper two.
  __device__ static void convert(uint32_t word, uint32_t (&pairs)[2]) {
#if !defined(ATTN_EMULATED) && __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(pairs[0]), "=r"(pairs[1])
        : "r"(word));
#else
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Codes as the upper bytes of halves; then all bits but the sign move down by one.
      const uint32_t upper = bytes_of_two(word, 0, i == 0 ? 0x1404 : 0x3424);
      const uint32_t halves = (upper & 0x80008000u) | (upper & 0x7F007F00u) >> 1;
      pairs[i] = multiply_halves(halves, 0x5C005C00u);  // 2^8
    }
#endif
  }
  __device__ static void in_storage_order(uint32_t word, uint32_t (&pairs)[2]) {
    convert(word, pairs);
  }
  __device__ static void crosswise(uint32_t word, uint32_t (&pairs)[2]) {
    convert(bytes_of_two(word, 0, 0x3120), pairs);
  }
};
//! [fp8]

// a b + c on two packed fp16.
__device__ __forceinline__ uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
#ifdef ATTN_EMULATED
  return pack2<__half>(fmaf(unpack<__half>(a, 0), unpack<__half>(b, 0), unpack<__half>(c, 0)),
                       fmaf(unpack<__half>(a, 1), unpack<__half>(b, 1), unpack<__half>(c, 1)));
#else
  uint32_t pair;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
#endif
}

// 4-bit codes, 0 to 15, eight per word; their operands are 8 less. In each half of a word, nibble i
// becomes the fp16 number 1024 + code or, four bits higher, 1024 + 16 code. One shift, four AND-OR,
// two subtractions and two fused multiply-adds convert eight codes.
//! [int4]
struct Int4Codes {
  static constexpr float kLargest = 15, kMiddle = 8;
  // The slot of a column of Q. Lane t of a quad has columns 8t to 8t + 7 of 32 of each key: one
  // word. Pair i of it is nibbles i and i + 4, columns 8t + i and 8t + i + 4. The MMA takes pairs 0
  // and 1 as columns 2t 2t+1 and 2t+8 2t+9 of sixteen; the next MMA takes pairs 2 and 3 as those of
  // the next sixteen.
  __device__ static int slot(int col) {
    return col / 32 * 32 + col % 4 / 2 * 16 + col % 32 / 8 * 2 + col % 2 * 8 + col % 8 / 4;
  }
  __device__ static void pairs_of(uint32_t word, uint32_t (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t nibbles = word >> i / 2 * 8 & (i % 2 == 0 ? 0x000F000Fu : 0x00F000F0u);
      pairs[i] = i % 2 == 0 ? subtract_halves(nibbles | k1024, 0x64086408u)      // 1024 + 8
                            : fma_halves(nibbles | k1024, 0x2C002C00u, 0xD480D480u);  // / 16 - 72
    }
  }
  static constexpr uint32_t k1024 = 0x64006400;
};
//! [int4]

}  // namespace ATTN_BACKEND::flash_decoding
