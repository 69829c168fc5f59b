// Quantisation from bf16 to e4m3, before attention. A scale maps the absolute maximum of a tensor
// or tile to 448, the largest e4m3 number; its inverse, the descale, is stored with the codes.
//
//     q8  [B Hq, seqlen_q, d]    k8  [B Hkv, seqlen_k, d]    layout of the inputs
//     v8  [B Hkv, d, padded]     transposed, since wgmma takes 8-bit operands K-major only; keys
//                                of each 16 in the order of e4m3_column (ptx/wgmma_e4m3.h)
#pragma once

#include "attn/finite.h"
#include "attn/kernel.h"
#include "ptx/tma_bytes.h"
#include "ptx/wgmma_e4m3.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

constexpr float kLargestE4M3 = 448;
// Lower bounds of the absolute maximum from which a scale is computed. Scores are multiplied by the
// descales of Q and of K: a product of 0 would turn the -inf of a masked score into NaN. l is
// divided by the descale of V, at least 2^-88.8: below l = 2^37 the quotient is below 2^126.
constexpr float kSmallestMax = 1e-10f, kSmallestV = 0x1p-80f;
struct QuantisePass {
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
};
constexpr int kPartials = QuantisePass::kThreads;  // partial maxima per tensor
enum Tensor { kQ, kK, kV, kTensors };

// Row length of v8: keys rounded up to a multiple of 16 bytes.
inline __host__ __device__ int64_t padded_keys(int64_t keys) { return round_up(keys, 16); }

// Eight bf16 numbers, as floats.
struct Bf16x8 {
  float x[8];
};
__device__ __forceinline__ Bf16x8 load_bf16x8_as_given(const __nv_bfloat16* g) {
  const uint4 bits = *reinterpret_cast<const uint4*>(g);
  const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
  Bf16x8 e;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    e.x[2 * i] = __uint_as_float(pairs[i] << 16);
    e.x[2 * i + 1] = __uint_as_float(pairs[i] & 0xFFFF0000u);
  }
  return e;
}
// Infinities become NaN.
__device__ __forceinline__ Bf16x8 load_bf16x8(const __nv_bfloat16* g) {
  Bf16x8 e = load_bf16x8_as_given(g);
#pragma unroll
  for (float& x : e.x) x = finite_or_nan(x);
  return e;
}

__device__ __forceinline__ float largest_of(const Bf16x8& e, float so_far) {
#pragma unroll
  for (int i = 0; i < 8; ++i) so_far = fmaxf(so_far, fabsf(e.x[i]));
  return so_far;
}

// Block-wide maximum, returned to every thread.
__device__ __forceinline__ float block_max(float x, float (&sMax)[QuantisePass::kWarps]) {
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
  if (threadIdx.x % 32 == 0) sMax[threadIdx.x / 32] = x;
  __syncthreads();  // maxima of all warps are visible
  for (int w = 0; w < QuantisePass::kWarps; ++w) x = fmaxf(x, sMax[w]);
  __syncthreads();  // sMax is no longer read
  return x;
}

// Absolute maximum of each of kPartials parts of Q, of K and of V.
//! [absmax]
template <class Pass>
__global__ void __launch_bounds__(Pass::kThreads)
    absmax_kernel(const __nv_bfloat16* __restrict__ gQ, const __nv_bfloat16* __restrict__ gK,
                  const __nv_bfloat16* __restrict__ gV, int64_t eights_q, int64_t eights_k,
                  float* __restrict__ gPartial) {  // [3, kPartials]
  const int tensor = static_cast<int>(blockIdx.y);
  const __nv_bfloat16* const g = tensor == kQ ? gQ : tensor == kK ? gK : gV;
  const int64_t count = tensor == kQ ? eights_q : eights_k;
  const int64_t first = int64_t{blockIdx.x} * Pass::kThreads + threadIdx.x;
  float largest = 0;
#pragma unroll 4  // loads in flight
  for (int64_t i = first; i < count; i += kPartials * Pass::kThreads)
    largest = largest_of(load_bf16x8_as_given(g + 8 * i), largest);
  if (largest == INFINITY) {  // rare: a second pass that ignores infinities
    largest = 0;
    for (int64_t i = first; i < count; i += kPartials * Pass::kThreads)
      largest = largest_of(load_bf16x8(g + 8 * i), largest);
  }
  __shared__ float sMax[Pass::kWarps];
  largest = block_max(largest, sMax);
  if (threadIdx.x == 0) gPartial[tensor * kPartials + blockIdx.x] = largest;
}
//! [absmax]

// Absolute maximum of a tensor, computed by a whole block.
__device__ __forceinline__ float tensor_max(const float* gPartial, int tensor,
                                            float (&sMax)[QuantisePass::kWarps]) {
  return fmaxf(block_max(gPartial[tensor * kPartials + threadIdx.x], sMax),
               tensor == kV ? kSmallestV : kSmallestMax);
}

// Q and K: 16 elements per thread; blockIdx.y selects the tensor.
//! [rows]
template <class Pass>
__global__ void __launch_bounds__(Pass::kThreads)
    quantise_rows_kernel(const __nv_bfloat16* __restrict__ gQ, const __nv_bfloat16* __restrict__ gK,
                         int64_t count_q, int64_t count_k, const float* __restrict__ gPartial,
                         uint8_t* __restrict__ gQ8, uint8_t* __restrict__ gK8,
                         float* __restrict__ gDescale) {  // [3]
  __shared__ float sMax[Pass::kWarps];
  const int tensor = static_cast<int>(blockIdx.y);
  const int64_t first = (int64_t{blockIdx.x} * Pass::kThreads + threadIdx.x) * 16;
  const float largest = tensor_max(gPartial, tensor, sMax), scale = kLargestE4M3 / largest;
  if (first == 0) gDescale[tensor] = largest / kLargestE4M3;
  if (first >= (tensor == kQ ? count_q : count_k)) return;
  uint32_t codes[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Bf16x8 e = load_bf16x8((tensor == kQ ? gQ : gK) + first + 8 * half);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      codes[2 * half + i] = pack4_e4m3(e.x[4 * i] * scale, e.x[4 * i + 1] * scale,
                                       e.x[4 * i + 2] * scale, e.x[4 * i + 3] * scale);
  }
  *reinterpret_cast<uint4*>((tensor == kQ ? gQ8 : gK8) + first) =
      make_uint4(codes[0], codes[1], codes[2], codes[3]);
}
//! [rows]

// V: a block transposes 128 keys of 64 columns. A thread takes 8 columns of the four keys in
// neighbouring slots, which form one word per column in shared memory.
//! [transpose]
constexpr int kTransposedKeys = 128, kTransposedColumns = 64;
struct TransposeStorage {
  uint32_t sWords[kTransposedColumns][kTransposedKeys / 4 + 1];  // padding: fewer bank conflicts
};
// Loads a thread's four keys in the order of their slots; zeros past the last key. No conversion
// here: a conversion between two loads makes the second wait for the first, which cost f1 and f6 3
// % of their time on an H200.
__device__ __forceinline__ void load_keys(const __nv_bfloat16* gV, int64_t row_stride, int key0,
                                          int keys, int group, Bf16x8 (&four)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = key0 + group / 4 * 16 + e4m3_column(group % 4 * 4 + i);
    if (key < keys)
      four[i] = load_bf16x8_as_given(gV + key * row_stride);
    else
      four[i] = Bf16x8{};
  }
}
// Multiplies the keys by `scale` and stores the codes, transposed, in shared memory. Infinities
// become NaN here, after all loads have been issued.
__device__ __forceinline__ void store_transposed(TransposeStorage& smem, const Bf16x8 (&four)[4],
                                                 float scale, int group, int column) {
#pragma unroll
  for (int c = 0; c < 8; ++c)
    smem.sWords[column + c][group] =
        pack4_e4m3(finite_or_nan(four[0].x[c] * scale), finite_or_nan(four[1].x[c] * scale),
                   finite_or_nan(four[2].x[c] * scale), finite_or_nan(four[3].x[c] * scale));
}
__device__ __forceinline__ void write_transposed(const TransposeStorage& smem, uint8_t* gV8,
                                                 int64_t padded, int key0) {
  const int word = static_cast<int>(threadIdx.x) % 32, first = static_cast<int>(threadIdx.x) / 32;
  if (key0 + 4 * word >= padded) return;
  for (int column = first; column < kTransposedColumns; column += QuantisePass::kWarps)
    *reinterpret_cast<uint32_t*>(gV8 + column * padded + key0 + 4 * word) =
        smem.sWords[column][word];
}

template <class Pass>
__global__ void __launch_bounds__(Pass::kThreads)
    quantise_transposed_kernel(const __nv_bfloat16* __restrict__ gV, int seqlen_k, int head_dim,
                               const float* __restrict__ gPartial, uint8_t* __restrict__ gV8,
                               float* __restrict__ gDescale) {
  __shared__ TransposeStorage smem;
  __shared__ float sMax[Pass::kWarps];
  const int panels = head_dim / kTransposedColumns;
  const int64_t head = blockIdx.x / panels;
  const int column0 = static_cast<int>(blockIdx.x) % panels * kTransposedColumns;
  const int key0 = static_cast<int>(blockIdx.y) * kTransposedKeys;
  const int64_t padded = padded_keys(seqlen_k);
  const float largest = tensor_max(gPartial, kV, sMax), scale = kLargestE4M3 / largest;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) gDescale[kV] = largest / kLargestE4M3;
  // 8 threads per row of 64 columns; 32 groups of four keys.
  const int column = static_cast<int>(threadIdx.x) % 8 * 8;
  const int group = static_cast<int>(threadIdx.x) / 8;
  Bf16x8 four[4];
  load_keys(gV + head * seqlen_k * head_dim + column0 + column, head_dim, key0, seqlen_k, group,
            four);
  store_transposed(smem, four, scale, group, column);
  __syncthreads();  // all codes are visible
  write_transposed(smem, gV8 + (head * head_dim + column0) * padded, padded, key0);
}
//! [transpose]

// Descale of the tile that begins at a given row of a head.
struct TensorDescales {
  const float* g;  // [3]
  TensorDescales(const Arguments& args) : g(args.out<float>("descale")) {}
  __device__ float q(int, int) const { return g[kQ]; }
  __device__ float k(int, int) const { return g[kK]; }
  __device__ float v(int, int) const { return g[kV]; }
};

// One scale per tensor: two passes, because the maximum must be known before rounding.
//! [launch]
inline Status quantise_tensors(const Arguments& args) {
  const ForwardParams<__nv_bfloat16> params(args);
  using Pass = QuantisePass;
  const Problem& p = args.problem;
  const auto *q = params.q, *k = params.k, *v = params.v;
  float *const partial = args.out<float>("partial"), *const descale = args.out<float>("descale");
  const int64_t heads_k = p.batch * p.kv_heads;
  const int64_t count_q = p.batch * p.heads * p.seqlen_q * p.head_dim;
  const int64_t count_k = heads_k * p.seqlen_k * p.head_dim;
  args.phase("scales");
  if (const Status status =
          launch_kernel(absmax_kernel<Pass>, dim3(kPartials, kTensors), dim3(Pass::kThreads), 0,
                        args.stream, q, k, v, count_q / 8, count_k / 8, partial);
      !status.ok())
    return status;
  args.phase("quantise");
  const int64_t blocks = ceil_div(std::max(count_q, count_k), 16 * Pass::kThreads);
  if (const Status status =
          launch_kernel(quantise_rows_kernel<Pass>, dim3(static_cast<unsigned>(blocks), 2),
                        dim3(Pass::kThreads), 0, args.stream, q, k, count_q, count_k, partial,
                        args.out<uint8_t>("q8"), args.out<uint8_t>("k8"), descale);
      !status.ok())
    return status;
  return launch_kernel(
      quantise_transposed_kernel<Pass>,
      dim3(static_cast<unsigned>(heads_k * p.head_dim / kTransposedColumns),
           static_cast<unsigned>(ceil_div(padded_keys(p.seqlen_k), kTransposedKeys))),
      dim3(Pass::kThreads), 0, args.stream, v, static_cast<int>(p.seqlen_k),
      static_cast<int>(p.head_dim), partial, args.out<uint8_t>("v8"), descale);
}
//! [launch]

}  // namespace ATTN_BACKEND::hopper
