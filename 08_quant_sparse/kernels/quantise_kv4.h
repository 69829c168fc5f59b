// Fills the cache of d3, bf16 to 4-bit codes, two per byte. The minimum of a key or a value becomes
// code 0, the maximum code 15.
//
//     k4, v4 [B Hkv, seqlen_k, d / 2]    descale [B Hkv, padded, 2]: of the key, of the value, each
//                                        two bf16 numbers, the scale and the value of code 8
//
// Both are stored under d1's names, k8 and v8. QServe (arXiv 2405.04532), section 5.1. NaN and Inf
// propagate as in quantise_kv.h.
#pragma once

#include "kernels/quantise_kv.h"

namespace ATTN_BACKEND::flash_decoding {
using namespace attn;

// A number is scale (code - 8) + middle.
struct Affine {
  float scale, middle;
};
__device__ __forceinline__ Affine affine_of(uint32_t pair) {
  return {unpack<__nv_bfloat16>(pair, 0), unpack<__nv_bfloat16>(pair, 1)};
}

// The scale and the middle (the value of code 8) of numbers from `least` to `most`, both rounded
// to bf16; the codes fit the stored values. If the numbers are closer than the smallest scale, the
// middle is that of their range: zeros then decode to exactly 0, and not to a rounding error of 8
// scales.
template <class Codes>
__device__ __forceinline__ Affine affine_for(float least, float most, float smallest_scale) {
  const auto rounded = [](float y) { return to_float(from_float<__nv_bfloat16>(y)); };
  const float width = (most - least) / Codes::kLargest;
  const float scale = rounded(fmaxf(width, smallest_scale));
  return {scale,
          rounded(width < smallest_scale ? 0.5f * (least + most) : least + Codes::kMiddle * scale)};
}

// A warp has some rows of K (blockIdx.y = 0) or V, eight columns per lane.
//! [quantise]
template <class Pass, class Codes, int kHeadDim>
__global__ void __launch_bounds__(Pass::kThreads)
    quantise4_kernel(const __nv_bfloat16* __restrict__ gK, const __nv_bfloat16* __restrict__ gV,
                     const int* __restrict__ gSeqused, int64_t rows, int seqlen_k, int kv_heads,
                     uint32_t* __restrict__ gK4, uint32_t* __restrict__ gV4,
                     uint32_t* __restrict__ gDescale) {
  constexpr int kLanes = kHeadDim / 8;
  const bool of_k = blockIdx.y == 0;
  const int64_t row = (int64_t{blockIdx.x} * Pass::kThreads + threadIdx.x) / kLanes;
  const int64_t head = row / seqlen_k, key = row % seqlen_k;
  const bool exists = row < rows && key < gSeqused[row < rows ? head / kv_heads : 0];
  const int64_t idx = row * kLanes + threadIdx.x % kLanes;  // of eight columns
  const uint4 bits = exists ? *reinterpret_cast<const uint4*>((of_k ? gK : gV) + 8 * idx)
                            : make_uint4(0, 0, 0, 0);
  const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
  float x[8];
  float least = INFINITY, most = -INFINITY;
  unsigned largest_bits = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = unpack<__nv_bfloat16>(pairs[i / 2], i % 2);
    least = fminf(least, x[i]), most = fmaxf(most, x[i]);
    largest_bits = max(largest_bits, __float_as_uint(x[i]) & 0x7FFFFFFFu);
  }
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
    least = fminf(least, __shfl_xor_sync(~0u, least, mask));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
    largest_bits = max(largest_bits, __shfl_xor_sync(~0u, largest_bits, mask));
  }
  if (!exists) return;
  const bool finite = largest_bits < 0x7F800000u && most - least < 3e38f;
  const auto [scale, middle] = affine_for<Codes>(least, most, of_k ? kSmallestMax : kSmallestV);
  const float inverse = 1 / scale;
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float code = rintf((x[i] - middle) * inverse) + Codes::kMiddle;
    word |= static_cast<uint32_t>(fminf(fmaxf(code, 0), Codes::kLargest)) << 4 * i;
  }
  (of_k ? gK4 : gV4)[idx] = finite ? word : 0;
  if (threadIdx.x % kLanes == 0)
    gDescale[2 * (head * padded_keys(seqlen_k) + key) + blockIdx.y] =
        finite ? pack2<__nv_bfloat16>(scale, middle) : 0x7FC07FC0u;  // NaN
}
//! [quantise]

template <class Codes>
Status quantise_cache4(const Arguments& args) {
  const DecodeParams<__nv_bfloat16> params(args);
  using Pass = QuantisePass;
  const Problem& p = args.problem;
  const int64_t rows = p.batch * p.kv_heads * p.seqlen_k;
  const auto launch = [&]<int kHeadDim>() {
    const int64_t blocks = ceil_div(rows * kHeadDim / 8, Pass::kThreads);
    return launch_kernel(
        quantise4_kernel<Pass, Codes, kHeadDim>, dim3(static_cast<unsigned>(blocks), 2),
        dim3(Pass::kThreads), 0, args.stream, params.k, params.v, params.seqused_k, rows,
        static_cast<int>(p.seqlen_k), static_cast<int>(p.kv_heads), args.out<uint32_t>("k8"),
        args.out<uint32_t>("v8"), args.out<uint32_t>("descale"));
  };
  const Status filled = p.head_dim == 64    ? launch.template operator()<64>()
                        : p.head_dim == 128 ? launch.template operator()<128>()
                                            : launch.template operator()<256>();
  if (!filled.ok()) return filled;
  return clear_counters(args);
}

}  // namespace ATTN_BACKEND::flash_decoding
