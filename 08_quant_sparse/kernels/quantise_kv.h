// Fills the cache of the 8-bit decode steps, bf16 to 8-bit codes. Each key and each value of a head
// has its own scale, so that a token can be appended without changing others.
//
//     k8, v8 [B Hkv, seqlen_k, d]    descale [B Hkv, padded, 2]: of the key, of the value
//
// NaN and Inf propagate: the descale of their token is NaN, and so is O of each query that attends
// to the token. Keys past the used length are neither read nor written.
#pragma once

#include "attn/kernel.h"
#include "kernels/codes.h"
#include "kernels/decode/splits.h"

namespace ATTN_BACKEND::flash_decoding {
using namespace attn;

// Smallest maxima for which a scale is chosen, so that tokens of zeros have one: of K, of V.
constexpr float kSmallestMax = 1e-10f, kSmallestV = 0x1p-80f;
struct QuantisePass {
  static constexpr int kThreads = 256;
};
// Descales are copied 16 bytes at a time, two tokens: their rows are aligned to that.
inline __host__ __device__ int64_t padded_keys(int64_t keys) { return round_up(keys, 2); }

// A warp has some rows of K (blockIdx.y = 0) or V, eight columns per lane.
//! [quantise]
template <class Pass, class Codes, int kHeadDim>
__global__ void __launch_bounds__(Pass::kThreads)
    quantise_kernel(const __nv_bfloat16* __restrict__ gK, const __nv_bfloat16* __restrict__ gV,
                    const int* __restrict__ gSeqused, int64_t rows, int seqlen_k, int kv_heads,
                    uint8_t* __restrict__ gK8, uint8_t* __restrict__ gV8,
                    float* __restrict__ gDescale) {
  constexpr int kLanes = kHeadDim / 8;
  const bool of_k = blockIdx.y == 0;
  const int64_t row =
      (int64_t{blockIdx.x} * Pass::kThreads + threadIdx.x) / kLanes;
  const int64_t head = row / seqlen_k, key = row % seqlen_k;
  const bool exists = row < rows && key < gSeqused[row < rows ? head / kv_heads : 0];
  const int64_t idx = row * kHeadDim + threadIdx.x % kLanes * 8;
  const uint4 bits = exists ? *reinterpret_cast<const uint4*>((of_k ? gK : gV) + idx)
                            : make_uint4(0, 0, 0, 0);
  const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
  float x[8];
  // Magnitudes as integers compare like the floats, with Inf and then NaN at the end.
  unsigned largest_bits = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = unpack<__nv_bfloat16>(pairs[i / 2], i % 2);
    largest_bits = max(largest_bits, __float_as_uint(x[i]) & 0x7FFFFFFFu);
  }
  for (int mask = kLanes / 2; mask > 0; mask /= 2)
    largest_bits = max(largest_bits, __shfl_xor_sync(~0u, largest_bits, mask));
  if (!exists) return;
  const bool finite = largest_bits < 0x7F800000u;
  const float largest = fmaxf(__uint_as_float(largest_bits), of_k ? kSmallestMax : kSmallestV);
  const float scale = finite ? Codes::kLargest / largest : 0;
  *reinterpret_cast<uint2*>((of_k ? gK8 : gV8) + idx) =
      make_uint2(Codes::encode(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale),
                 Codes::encode(x[4] * scale, x[5] * scale, x[6] * scale, x[7] * scale));
  if (threadIdx.x % kLanes == 0)
    gDescale[2 * (head * padded_keys(seqlen_k) + key) + blockIdx.y] =
        finite ? largest / Codes::kLargest : NAN;
}
//! [quantise]

template <class Pass>
__global__ void __launch_bounds__(Pass::kThreads) clear_kernel(unsigned* gSemaphore, int count) {
  const int idx = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (idx < count) gSemaphore[idx] = 0;
}

// The counters that blocks reset to 0: cleared once, before all launches.
inline Status clear_counters(const Arguments& args) {
  using Pass = QuantisePass;
  const int64_t count = splits::row_blocks(args.problem, splits::kMmaRows);
  return launch_kernel(clear_kernel<Pass>,
                       dim3(static_cast<unsigned>(ceil_div(count, Pass::kThreads))),
                       dim3(Pass::kThreads), 0, args.stream, args.out<unsigned>("arrived"),
                       static_cast<int>(count));
}
// Fills the cache, and clears the counters.
template <class Codes, int kHeadDim>
Status quantise_cache(const Arguments& args) {
  const DecodeParams<__nv_bfloat16> params(args);
  using Pass = QuantisePass;
  const Problem& p = args.problem;
  const int64_t rows = p.batch * p.kv_heads * p.seqlen_k;
  const int64_t blocks = ceil_div(rows * kHeadDim / 8, Pass::kThreads);
  if (const Status status = launch_kernel(
          quantise_kernel<Pass, Codes, kHeadDim>, dim3(static_cast<unsigned>(blocks), 2),
          dim3(Pass::kThreads), 0, args.stream, params.k, params.v, params.seqused_k, rows,
          static_cast<int>(p.seqlen_k), static_cast<int>(p.kv_heads), args.out<uint8_t>("k8"),
          args.out<uint8_t>("v8"), args.out<float>("descale"));
      !status.ok())
    return status;
  return clear_counters(args);
}
template <class Codes>
Status quantise_cache(const Arguments& args) {
  switch (args.problem.head_dim) {
    case 64: return quantise_cache<Codes, 64>(args);
    case 128: return quantise_cache<Codes, 128>(args);
    case 256: return quantise_cache<Codes, 256>(args);
  }
  return Status::unsupported("only head dims 64, 128 and 256");
}

}  // namespace ATTN_BACKEND::flash_decoding
