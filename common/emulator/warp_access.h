/// \file
/// What one memory instruction of a warp costs, computed at compile time from its 32 addresses.
///
/// Give these functions the very index function that a kernel uses, and put the answer in a
/// static_assert: a layout that comes to conflict no longer compiles. common/tests/warp_access.cu
/// checks the rules against the counters of a GPU.
///
///     global memory          32-byte sectors; a line of 128 bytes has 4
///     address  0 .. 31   32 .. 63   64 .. 95   96 .. 127
///             [sector 0][sector 1 ][sector 2 ][sector 3 ]
///
///     shared memory          32 banks of 4 bytes; word w lies in bank w % 32
///     one wavefront serves one word of each bank; a word that several lanes want counts once.
///     8-byte accesses are served a half warp at a time, 16-byte ones a quarter warp.
#pragma once

#include <cstdint>

namespace attn {

inline constexpr int kLanes = 32;

/// The number of 32-byte sectors that a warp's access of `bytes` a lane touches.
/// `address(lane)` is a byte address; a negative one means that the lane does not take part.
template <class AddressOfLane>
constexpr int sectors(AddressOfLane address, int bytes) {
  int64_t seen[kLanes * 2] = {};
  int count = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int64_t first = address(lane);
    if (first < 0) continue;
    for (int64_t sector = first / 32; sector <= (first + bytes - 1) / 32; ++sector) {
      bool known = false;
      for (int i = 0; i < count; ++i) known = known || seen[i] == sector;
      if (!known) seen[count++] = sector;
    }
  }
  return count;
}

/// Shared-memory cost of one instruction of a warp.
struct SharedAccess {
  int wavefronts;  ///< passes through the 32 banks
  int ideal;       ///< passes that the amount of data needs at least
  constexpr int conflicts() const { return wavefronts - ideal; }
};

/// Wavefronts of a warp's access of 4, 8 or 16 bytes a lane. `address(lane)` is a byte offset in
/// shared memory, aligned to `bytes`; a negative one means that the lane does not take part.
template <class AddressOfLane>
constexpr SharedAccess shared_access(AddressOfLane address, int bytes) {
  const int lanes_at_once = kLanes * 4 / bytes;  // so that 128 bytes are served at once
  SharedAccess access{0, 0};
  for (int group = 0; group < kLanes; group += lanes_at_once) {
    int64_t words[kLanes] = {};  // the distinct words that this group wants
    int count = 0;
    for (int lane = group; lane < group + lanes_at_once; ++lane) {
      const int64_t first = address(lane);
      if (first < 0) continue;
      for (int64_t word = first / 4; word < (first + bytes) / 4; ++word) {
        bool known = false;
        for (int i = 0; i < count; ++i) known = known || words[i] == word;
        if (!known) words[count++] = word;
      }
    }
    int most = 0;  // words of the busiest bank
    for (int bank = 0; bank < 32; ++bank) {
      int here = 0;
      for (int i = 0; i < count; ++i) here += words[i] % 32 == bank;
      most = here > most ? here : most;
    }
    access.wavefronts += most;
    access.ideal += count > 0;
  }
  return access;
}

/// The same for `ldmatrix`: lane l gives the address of one row of 16 bytes, row l % 8 of matrix
/// l / 8. Each 8 x 8 matrix is one pass of 8 rows.
template <class AddressOfLane>
constexpr SharedAccess ldmatrix_access(AddressOfLane address, int matrices) {
  return shared_access([=](int lane) { return lane < 8 * matrices ? address(lane) : int64_t{-1}; },
                       16);
}

}  // namespace attn
