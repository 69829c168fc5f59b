// Keys visible to a query or sequence and their number of tiles, for kernels and schedulers. Of
// chapter 05_flash_decoding.
#pragma once

#include "attn/kernel.h"

namespace ATTN_BACKEND::flash_decoding {
using namespace attn;

// Keys [begin, end). The causal diagonal ends at the last query and the last valid key.
//! [keys]
struct KvRange {
  int begin, end;
};
__device__ __forceinline__ KvRange keys_of_query(const Shape& shape, int seqlen_k, int i) {
  const int diagonal = i + seqlen_k - shape.seqlen_q;
  return {max(0, diagonal - shape.window_left), min(seqlen_k, diagonal + shape.window_right + 1)};
}
// The keys visible to any query of a sequence, and their number of tiles: at least one, because
// some block must store O = 0.
__device__ __forceinline__ KvRange keys_of_sequence(const Shape& shape, int seqlen_k) {
  return {keys_of_query(shape, seqlen_k, 0).begin,
          keys_of_query(shape, seqlen_k, shape.seqlen_q - 1).end};
}
__device__ __forceinline__ int tiles_of(const Shape& shape, int seqlen_k, int tile_keys) {
  const KvRange keys = keys_of_sequence(shape, seqlen_k);
  return max(1, ceil_div(max(0, keys.end - keys.begin), tile_keys));
}
//! [keys]

}  // namespace ATTN_BACKEND::flash_decoding
