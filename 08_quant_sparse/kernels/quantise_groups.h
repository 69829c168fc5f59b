// Fills the cache of d9. Tokens up to coded_of(used) are 4-bit codes. K's channels have a scale and
// a zero point per group of 32 tokens; a value has its own, as in d3:
//
//     k4, v4 [B Hkv, room, d / 2]    groups [B Hkv, room / 32, group_bytes]
//     descale [B Hkv, room]: of a value, two bf16 numbers, the scale and the value of code 8
//
// The newest tokens are fp16, divided by the power of 2 of their largest element:
//
//     k_newest [B Hkv, 160, d]    v_newest [B Hkv, 80, d, 2]
//     newest_scale [B Hkv, 160, 2]: of a key in fp32, of a value as with codes
//
// The codes are stored under d1's names, k8 and v8. KIVI (arXiv 2402.02750), section 3. NaN or Inf
// in an encoded key makes the scores of its whole group NaN; elsewhere it affects its own token.
#pragma once

#include "kernels/groups.h"
#include "kernels/quantise_kv4.h"

namespace ATTN_BACKEND::flash_decoding {
using namespace attn;
using namespace groups;

template <int kThreads_>
struct GroupPass {
  static constexpr int kThreads = kThreads_;
  static constexpr float kMost = 0x1p100f;  // larger values count as infinite
};
// Position of a 16-bit column: eight adjacent ones are a lane's share of 32 columns of Q's
// fragments, pairs i and i + 4 as in Int4Codes::slot. Q's even pairs were multiplied by 16 times as
// much as its odd pairs, so a number that multiplies them is stored as 1/16.
__device__ __forceinline__ int place(int col) { return col / 8 * 8 + col % 4 * 2 + col % 8 / 4; }
__device__ __forceinline__ __half meets_q(float x, int col) {
  const float sixteenth = to_float(from_float<__half>(x * 0.0625f));
  return from_float<__half>(col % 2 == 0 ? sixteenth : 16 * sixteenth);
}
// The largest power of 2 not above x > 0, at most 2^126.
__device__ __forceinline__ float power_of_two(float x) {
  return __uint_as_float(min(__float_as_uint(x) & 0x7F800000u, 0x7E800000u));
}

struct GroupStorage {
  float sWidest[8], sFarthest[8];  // of each warp
  ATTN_MEMBERS(GroupStorage, sWidest, sFarthest)
};

// One block per group, one thread per channel. Scales are t S with S a power of 2 and t at most 1
// (and at least 2^-14); zero points, the values of code 0, are l Z with |l| below 2. t has three
// significant bits, as in e5m2, rounded up. With the eight of an element of Q they make fp16's
// eleven, so q t is exact. The factors multiply the sums.
//! [group]
template <class Pass>
__global__ void __launch_bounds__(Pass::kThreads)
    quantise_groups_kernel(const __nv_bfloat16* __restrict__ gK, const int* __restrict__ gSeqused,
                           int seqlen_k, int kv_heads, uint32_t* __restrict__ gK4,
                           uint8_t* __restrict__ gGroups) {
  constexpr int kHeadDim = Pass::kThreads, kWarps = kHeadDim / 32;
  auto& smem = dynamic_shared<GroupStorage>();
  const int num_groups = room_of(seqlen_k) / kGroup, col = threadIdx.x;
  const int64_t head = blockIdx.x / num_groups;
  const int key0 = blockIdx.x % num_groups * kGroup;
  if (key0 >= coded_of(gSeqused[head / kv_heads])) return;
  const int64_t group = blockIdx.x;
  float x[kGroup];
  float least = INFINITY, most = -INFINITY;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    x[i] = to_float(gK[(head * seqlen_k + key0 + i) * kHeadDim + col]);
    least = fminf(least, x[i]), most = fmaxf(most, x[i]);
    finite = finite && fabsf(x[i]) < Pass::kMost;
  }
  const float width = finite ? fmaxf((most - least) / Int4Codes::kLargest, kSmallestMax) : INFINITY;
  float widest = width, farthest = fmaxf(fabsf(least), kSmallestMax);
  for (int mask = 16; mask > 0; mask /= 2) {
    widest = fmaxf(widest, __shfl_xor_sync(~0u, widest, mask));
    farthest = fmaxf(farthest, __shfl_xor_sync(~0u, farthest, mask));
  }
  if (col % 32 == 0) smem.sWidest[col / 32] = widest, smem.sFarthest[col / 32] = farthest;
  __syncthreads();  // the values of all warps are stored
#pragma unroll
  for (int n = 0; n < kWarps; ++n) {
    widest = fmaxf(widest, smem.sWidest[n]);
    farthest = fmaxf(farthest, smem.sFarthest[n]);
  }
  const bool all_finite = widest < Pass::kMost;
  const float of_scales = 2 * power_of_two(widest), of_zeros = power_of_two(farthest);
  // Both are rounded before the codes are chosen, so the codes fit the stored values.
  const unsigned up = (__float_as_uint(width * (1 / of_scales)) + 0x1FFFFFu) & 0xFFE00000u;
  const __half scale = from_float<__half>(all_finite ? fmaxf(__uint_as_float(up), 0x1p-14f) : 0);
  const __half zero = meets_q(all_finite ? least * (1 / of_zeros) : 0, col);
  const float stored = to_float(zero) * (col % 2 == 0 ? 16 * of_zeros : of_zeros);
  const float inverse = all_finite ? 1 / (to_float(scale) * of_scales) : 0;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const float code = fminf(fmaxf(rintf((x[i] - stored) * inverse), 0), Int4Codes::kLargest);
    uint32_t word = all_finite ? static_cast<uint32_t>(code) << col % 8 * 4 : 0;
    for (int mask = 1; mask < 8; mask *= 2) word |= __shfl_xor_sync(~0u, word, mask);
    if (col % 8 == 0) gK4[((group * kGroup + i) * kHeadDim + col) / 8] = word;
  }
  uint8_t* const to = gGroups + group * group_bytes(kHeadDim);
  to[place(col)] = static_cast<uint8_t>(pack2<__half>(to_float(scale), 0) >> 8);
  reinterpret_cast<__half*>(to + kHeadDim)[place(col)] = zero;
  if (col < 4)
    reinterpret_cast<float*>(to + 3 * kHeadDim)[col] = !all_finite ? NAN
                                                       : col == 0  ? of_scales * 0x1p10f
                                                       : col == 1  ? of_zeros * 0x1p-10f
                                                                   : 0;
}
//! [group]

// A thread has eight columns of a value, as in d3.
template <class Pass, class Codes, int kHeadDim>
__global__ void __launch_bounds__(Pass::kThreads)
    quantise_values_kernel(const __nv_bfloat16* __restrict__ gV, const int* __restrict__ gSeqused,
                           int64_t rows, int seqlen_k, int kv_heads, uint32_t* __restrict__ gV4,
                           uint32_t* __restrict__ gDescale) {
  constexpr int kLanes = kHeadDim / 8;
  const int64_t row = (int64_t{blockIdx.x} * Pass::kThreads + threadIdx.x) / kLanes;
  const int64_t head = row / seqlen_k, key = row % seqlen_k;
  const bool exists = row < rows && key < coded_of(gSeqused[row < rows ? head / kv_heads : 0]);
  const int lane = threadIdx.x % kLanes;  // eight columns
  const uint4 bits = exists ? *reinterpret_cast<const uint4*>(gV + 8 * (row * kLanes + lane))
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
  const auto [scale, middle] = affine_for<Codes>(least, most, kSmallestV);
  const float inverse = 1 / scale;
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float code = rintf((x[i] - middle) * inverse) + Codes::kMiddle;
    word |= static_cast<uint32_t>(fminf(fmaxf(code, 0), Codes::kLargest)) << 4 * i;
  }
  const int64_t to = head * room_of(seqlen_k) + key;
  gV4[to * kLanes + lane] = finite ? word : 0;
  if (lane == 0) gDescale[to] = finite ? pack2<__nv_bfloat16>(scale, middle) : 0x7FC07FC0u;  // NaN
}

// The newest tokens, one per warp, 16 per block; missing ones are 0. A word of V has two
// neighbouring tokens: the layout of the operands.
//! [newest]
template <class Pass, int kHeadDim>
__global__ void __launch_bounds__(Pass::kThreads)
    keep_newest_kernel(const __nv_bfloat16* __restrict__ gK, const __nv_bfloat16* __restrict__ gV,
                       const int* __restrict__ gSeqused, int seqlen_k, int kv_heads,
                       __half* __restrict__ gKNewest, __half* __restrict__ gVNewest,
                       uint2* __restrict__ gNewestScale) {
  constexpr int kBlocks = kNewestRoom / 16, kOwn = kHeadDim / 32;
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const int64_t head = blockIdx.x / kBlocks;
  const int nth = blockIdx.x % kBlocks * 16 + warp_id;  // of the newest ones
  const int used = gSeqused[head / kv_heads], key = coded_of(used) + nth;
  const bool exists = key < used;
  float x[2][kOwn] = {}, scale[2], inverse[2];
#pragma unroll
  for (int of = 0; of < 2; ++of) {
    unsigned largest_bits = 0;
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      if (exists)
        x[of][n] =
            to_float((of == 0 ? gK : gV)[(head * seqlen_k + key) * kHeadDim + 32 * n + lane_id]);
      largest_bits = max(largest_bits, __float_as_uint(x[of][n]) & 0x7FFFFFFFu);
    }
    for (int mask = 16; mask > 0; mask /= 2)
      largest_bits = max(largest_bits, __shfl_xor_sync(~0u, largest_bits, mask));
    const bool finite = largest_bits < 0x7F800000u;
    scale[of] = power_of_two(
        fmaxf(__uint_as_float(finite ? largest_bits : 0), of == 0 ? kSmallestMax : kSmallestV));
    inverse[of] = 1 / scale[of];
    if (!finite) scale[of] = NAN;
#pragma unroll
    for (int n = 0; n < kOwn; ++n) x[of][n] = finite ? x[of][n] * inverse[of] : 0;
  }
  const int64_t row = head * kNewestRoom + nth;
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    const int col = 32 * n + lane_id;
    gKNewest[row * kHeadDim + place(col)] = meets_q(x[0][n], col);
    gVNewest[(row / 2 * kHeadDim + col) * 2 + row % 2] = from_float<__half>(x[1][n]);
  }
  if (lane_id == 0)
    gNewestScale[row] =
        make_uint2(__float_as_uint(scale[0] * 0x1p-10f), pack2<__nv_bfloat16>(scale[1], 0));
}
//! [newest]

template <class Codes, int kHeadDim>
Status fill_groups(const Arguments& args) {
  const DecodeParams<__nv_bfloat16> params(args);
  const Problem& p = args.problem;
  const int64_t heads = p.batch * p.kv_heads, rows = heads * p.seqlen_k;
  const int seqlen_k = static_cast<int>(p.seqlen_k), kv_heads = static_cast<int>(p.kv_heads);
  const auto grid = [](int64_t blocks) { return dim3(static_cast<unsigned>(blocks)); };
  using Groups = GroupPass<kHeadDim>;
  if (const Status status = launch_kernel(
          quantise_groups_kernel<Groups>, grid(heads * room_of(seqlen_k) / kGroup),
          dim3(Groups::kThreads), sizeof(GroupStorage), args.stream, params.k, params.seqused_k,
          seqlen_k, kv_heads, args.out<uint32_t>("k8"), args.out<uint8_t>("groups"));
      !status.ok())
    return status;
  using Values = QuantisePass;
  if (const Status status = launch_kernel(quantise_values_kernel<Values, Codes, kHeadDim>,
                                          grid(ceil_div(rows * kHeadDim / 8, Values::kThreads)),
                                          dim3(Values::kThreads), 0, args.stream, params.v,
                                          params.seqused_k, rows, seqlen_k, kv_heads,
                                          args.out<uint32_t>("v8"), args.out<uint32_t>("descale"));
      !status.ok())
    return status;
  using Newest = GroupPass<512>;
  return launch_kernel(keep_newest_kernel<Newest, kHeadDim>, grid(heads * kNewestRoom / 16),
                       dim3(Newest::kThreads), 0, args.stream, params.k, params.v, params.seqused_k,
                       seqlen_k, kv_heads, args.out<__half>("k_newest"),
                       args.out<__half>("v_newest"), args.out<uint2>("newest_scale"));
}
template <class Codes>
Status fill_groups(const Arguments& args) {
  switch (args.problem.head_dim) {
    case 64: return fill_groups<Codes, 64>(args);
    case 128: return fill_groups<Codes, 128>(args);
    case 256: return fill_groups<Codes, 256>(args);
  }
  return Status::unsupported("only head dims 64, 128 and 256");
}

}  // namespace ATTN_BACKEND::flash_decoding
