/// \file
/// Counter-based random bits for dropout: a function of a seed and a position. So the backward pass
/// regenerates the bits of the forward pass, and no mask is stored. For kernels (both back ends)
/// and for the reference.
///
/// The generator is Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as
/// 1, 2, 3" (SC 2011), section 3.3.
#pragma once

#include <cstdint>

namespace attn {

/// 128 random bits.
struct PhiloxBits {
  uint32_t word[4];
  /// Byte `i`, 0 to 15.
  constexpr uint32_t byte(int i) const { return word[i / 4] >> (8 * (i % 4)) & 255; }
};

/// Ten rounds of Philox over a 128-bit counter with a 64-bit key.
constexpr PhiloxBits philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c0, p1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

/// One byte decides about probability (row, col) of head `bh`: it is dropped if the byte is below
/// `256 x dropout`. One Philox call gives 16 bytes: those of the columns that one lane owns of a
/// row in eight adjacent accumulators of mma.m16n8k16 (see ptx/mma.h). So no two lanes make the
/// same call:
///
///     col % 64     0  1 | 2  3 | 4  5 | 6  7 | 8  9 | 10 11 | ... | 62 63
///     quad         0      1      2      3      0      1             3       the call's counter
///     byte         0  1   0  1   0  1   0  1   2  3   2  3          14 15   of that call
constexpr int dropout_quad(int64_t col) { return static_cast<int>(col % 8 / 2); }
constexpr int dropout_byte(int64_t col) { return static_cast<int>(col % 64 / 8 * 2 + col % 2); }

/// The 16 bytes of row `row`, columns 64 * `group` to 64 * `group` + 63, quad `quad`.
constexpr PhiloxBits dropout_bits(uint64_t seed, int64_t bh, int row, int group, int quad) {
  return philox4x32(static_cast<uint32_t>(group * 4 + quad), static_cast<uint32_t>(row),
                    static_cast<uint32_t>(bh), static_cast<uint32_t>(bh >> 32), seed);
}

/// Whether probability (row, col) is kept. `dropped` is Shape::dropped. For code that does not use
/// the other 15 bytes.
constexpr bool dropout_keeps(uint64_t seed, int64_t bh, int row, int col, int dropped) {
  return dropout_bits(seed, bh, row, col / 64, dropout_quad(col)).byte(dropout_byte(col)) >=
         static_cast<uint32_t>(dropped);
}

}  // namespace attn
