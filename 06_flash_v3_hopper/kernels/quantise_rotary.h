// Rotary embedding of Q and K: by a pass of its own, which reads bf16 and writes bf16, and by the
// pass that quantises them, which has whole rows in registers anyway. Columns c and c + d/2 of a
// row are turned by the angle of its position: those of a lane's eights j and j + d/64 (RowLanes).
//
//     cos_sin              [positions, d]: d/2 cosines, d/2 sines (attn/rotary.h)
//     q_turned, k_turned   as Q and K lie, bf16: of the pass of its own
#pragma once

#include "kernels/quantise_tiles.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

struct RotaryAngles {
  const float* g;        // [positions, d]
  int first_q, first_k;  // the rows of query 0 and of key 0
  RotaryAngles(const Arguments& args) : g(args.in<float>("cos_sin")) {
    const auto more_keys = static_cast<int>(args.problem.seqlen_k - args.problem.seqlen_q);
    first_q = std::max(0, more_keys), first_k = std::max(0, -more_keys);
  }
};
// All heads have the same angles, so a block turns several of them by what it has loaded once.
struct RotaryPass : QuantisePass {
  static constexpr int kHeads = 4;
};

// (a, b) turned. The host does it in the same order, with the same fused multiply-adds (fp8.cpp).
//! [turn]
__device__ __forceinline__ void turn(float& a, float& b, float cosine, float sine) {
  const float x = a, y = b;
  a = fmaf(x, cosine, -(y * sine)), b = fmaf(y, cosine, x * sine);
}
//! [turn]

// A lane has eights of both halves of a row, and their angles in registers for several heads.
//! [apart]
template <class Pass, int kHeadDim>
__global__ void __launch_bounds__(Pass::kThreads)
    rotary_kernel(RowsOf q, RowsOf k, __nv_bfloat16* gQTurned, __nv_bfloat16* gKTurned,
                  RotaryAngles angles) {
  constexpr int kHalf = kHeadDim / 2, kLanes = kHalf / 8, kRowsAtOnce = Pass::kThreads / kLanes;
  const bool is_q = blockIdx.y == 0;
  const RowsOf t = is_q ? q : k;
  const int blocks = ceil_div(t.rows, kRowsAtOnce), block = static_cast<int>(blockIdx.x % blocks);
  const int64_t head0 = int64_t{blockIdx.x / blocks} * Pass::kHeads;
  const int row = block * kRowsAtOnce + static_cast<int>(threadIdx.x) / kLanes;
  const int column = static_cast<int>(threadIdx.x) % kLanes * 8;
  if (row >= t.rows) return;
  const float* const own =
      angles.g + int64_t{(is_q ? angles.first_q : angles.first_k) + row} * kHeadDim + column;
  float cosine[8], sine[8];
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    *reinterpret_cast<float4*>(cosine + i) = *reinterpret_cast<const float4*>(own + i);
    *reinterpret_cast<float4*>(sine + i) = *reinterpret_cast<const float4*>(own + kHalf + i);
  }
  const int64_t at = (head0 * t.rows + row) * kHeadDim + column, next = int64_t{t.rows} * kHeadDim;
  Eight x[Pass::kHeads][2];  // of the two halves
#pragma unroll
  for (int n = 0; n < Pass::kHeads; ++n)
    if (head0 + n < t.heads)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        x[n][half] = load_eight(t.g + at + n * next + half * kHalf);
#pragma unroll
  for (int n = 0; n < Pass::kHeads; ++n) {
    if (head0 + n >= t.heads) break;
#pragma unroll
    for (int i = 0; i < 8; ++i) turn(x[n][0].x[i], x[n][1].x[i], cosine[i], sine[i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float(&e)[8] = x[n][half].x;
      *reinterpret_cast<uint4*>((is_q ? gQTurned : gKTurned) + at + n * next + half * kHalf) =
          make_uint4(pack2<__nv_bfloat16>(e[0], e[1]), pack2<__nv_bfloat16>(e[2], e[3]),
                     pack2<__nv_bfloat16>(e[4], e[5]), pack2<__nv_bfloat16>(e[6], e[7]));
    }
  }
}
//! [apart]

// The angles of a tile's rows. Rows are 16 bytes further apart than they are long, so that the
// eight lanes of two rows that read 16 bytes each at once find them in all 32 banks.
//! [angles]
template <int kHeadDim>
struct RotaryStorage {
  static constexpr int kStride = kHeadDim + 4;
  alignas(16) float sAngles[kScaleRows * kStride];
  ColumnSigns<kHeadDim> signs;
  TileMaxima<kHeadDim> sMax;
  ATTN_MEMBERS(RotaryStorage, sAngles, signs, sMax)
};
// The signs of Hadamard's rotation are flipped before a pair is turned, in bf16. (s a, r b) is
// turned to s and r times what (a, b) is if its sine is multiplied by s r, which is done here, once
// for several heads.
template <int kHeadDim>
__device__ __forceinline__ void load_angles(RotaryStorage<kHeadDim>& smem, const float* g,
                                            int rows) {
  constexpr int kHalf = kHeadDim / 2, kFours = kHeadDim / 4;  // of a row
  const int column = static_cast<int>(threadIdx.x) % kFours * 4;
  float sign[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    sign[i] = column < kHalf ? 1 : random_sign(column + i) * random_sign(column - kHalf + i);
#pragma unroll 8  // so many loads in flight
  for (int row = static_cast<int>(threadIdx.x) / kFours; row < kScaleRows;
       row += RowLanes<kHeadDim>::kThreads / kFours) {
    float4 x{};
    if (row < rows) x = *reinterpret_cast<const float4*>(g + int64_t{row} * kHeadDim + column);
    x.x *= sign[0], x.y *= sign[1], x.z *= sign[2], x.w *= sign[3];
    *reinterpret_cast<float4*>(smem.sAngles + row * smem.kStride + column) = x;
  }
}
//! [angles]

// H x of a row that was turned: of floats, which are no longer numbers in bf16 that an MMA takes
// (quantise_tiles.h). All rounds are additions; columns 8 and 16 apart are in two lanes.
template <int kCount>
__device__ __forceinline__ void hadamard(float (&x)[kCount], int lane) {
#pragma unroll
  for (int apart = 1; apart < 8; apart *= 2) add_and_subtract(x, apart);
#pragma unroll
  for (int apart = 1; apart < 4; apart *= 2) {
    const float sign = (lane & apart) == 0 ? 1.0f : -1.0f;  // one has the sum, one the difference
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = fmaf(sign, x[i], __shfl_xor_sync(~0u, x[i], apart));
  }
#pragma unroll
  for (int apart = 8; apart < kCount; apart *= 2) add_and_subtract(x, apart);
}

// Quantises Q and K, turned on the way: a block has a tile of rows, of several heads.
//! [fused]
template <class Pass, int kHeadDim>
__global__ void __launch_bounds__(RowLanes<kHeadDim>::kThreads, RowLanes<kHeadDim>::kBlocks)
    quantise_turned_kernel(RowsOf q, RowsOf k, RotaryAngles angles) {
  auto& smem = dynamic_shared<RotaryStorage<kHeadDim>>();
  constexpr int kPairs = RowLanes<kHeadDim>::kEights / 2;  // of a lane's eights
  const bool is_q = blockIdx.y == 0;
  const RowsOf t = is_q ? q : k;
  const int tile = static_cast<int>(blockIdx.x % t.tiles);
  const int head0 = static_cast<int>(blockIdx.x / t.tiles) * Pass::kHeads;
  const int heads = min(static_cast<int>(t.heads), head0 + Pass::kHeads);
  if (head0 >= heads) return;  // the whole block
  const int row0 = tile * kScaleRows, lane = threadIdx.x % RowLanes<kHeadDim>::kLanes;
  TileOfRows next = t.tile(head0 * t.tiles + tile);
  TileBits<kHeadDim> bits;
  bits.load(t.g, next);
  smem.signs.find();
  load_angles(smem, angles.g + int64_t{(is_q ? angles.first_q : angles.first_k) + row0} * kHeadDim,
              t.rows - row0);
  __syncthreads();  // the angles are there
  const auto turn_row = [&](float(&x)[16 * kPairs], int row) {
#pragma unroll
    for (int i = 0; i < 8 * kPairs; i += 4) {
      const float* const own = smem.sAngles + row * smem.kStride + 8 * lane + i / 8 * 32 + i % 8;
      const float4 cosine = *reinterpret_cast<const float4*>(own);
      const float4 sine = *reinterpret_cast<const float4*>(own + kHeadDim / 2);
      turn(x[i], x[i + 8 * kPairs], cosine.x, sine.x);
      turn(x[i + 1], x[i + 1 + 8 * kPairs], cosine.y, sine.y);
      turn(x[i + 2], x[i + 2 + 8 * kPairs], cosine.z, sine.z);
      turn(x[i + 3], x[i + 3 + 8 * kPairs], cosine.w, sine.w);
    }
  };
#pragma unroll 1
  for (int head = head0; head < heads; ++head) {
    const TileOfRows own = next;
    TileNumbers<kHeadDim, 4> numbers;
    unpack(bits, &smem.signs, numbers);
    if (head + 1 < heads) {
      next.row0 += t.rows, next.index += t.tiles;
      bits.load(t.g, next);
    }
#pragma unroll
    for (int n = 0; n < numbers.kRows; ++n) {
      turn_row(numbers.x[n], numbers.row(n));
      hadamard(numbers.x[n], lane);
#pragma unroll
      for (float& number : numbers.x[n]) number = finite_or_nan(number);  // sums may overflow
    }
    quantise_tile(t.g8, t.gDescale, own, numbers, smem.sMax[head % 2], kHadamardNorm<kHeadDim>);
  }
}
//! [fused]

// Q and K turned and quantised: by one pass, or by two.
//! [launch_rotary]
template <class Pass, int kHeadDim, bool kFused>
Status quantise_turned(const Arguments& args) {
  using Storage = RotaryStorage<kHeadDim>;
  const RowsOf q = rows_of(args, "q", "q"), k = rows_of(args, "k", "k");
  const auto blocks = [](int64_t of_q, int64_t of_k) {
    return dim3(static_cast<unsigned>(std::max(of_q, of_k)), 2);
  };
  const int64_t groups_q = ceil_div(q.heads, int64_t{Pass::kHeads});
  const int64_t groups_k = ceil_div(k.heads, int64_t{Pass::kHeads});
  if constexpr (kFused) {
    args.phase("quantise");
    return launch_kernel(
        quantise_turned_kernel<Pass, kHeadDim>, blocks(groups_q * q.tiles, groups_k * k.tiles),
        dim3(RowLanes<kHeadDim>::kThreads), sizeof(Storage), args.stream, q, k, RotaryAngles(args));
  } else {
    constexpr int kRowsAtOnce = Pass::kThreads / (kHeadDim / 16);
    args.phase("rotary");
    const Status turned = launch_kernel(
        rotary_kernel<Pass, kHeadDim>,
        blocks(groups_q * ceil_div(q.rows, kRowsAtOnce), groups_k * ceil_div(k.rows, kRowsAtOnce)),
        dim3(Pass::kThreads), 0, args.stream, q, k, args.out<__nv_bfloat16>("q_turned"),
        args.out<__nv_bfloat16>("k_turned"), RotaryAngles(args));
    return turned.ok() ? quantise_q_and_k<Pass, true, kHeadDim>(args, "_turned") : turned;
  }
}
//! [launch_rotary]

}  // namespace ATTN_BACKEND::hopper
