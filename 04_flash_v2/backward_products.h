// The five products of b2 and b3, and P and dS between them: what a warp does with a tile once it is there. Operands
// that warps share lie in shared memory; `operand`, P or dS of this warp's keys, never does.
#pragma once

#include "backward_parts.h"
#include "backward_tiles.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::backward_tiles {

// (3) C = A B^T for the keys of this warp and all rows of the tile: K Q^T or V dO^T. `a`, `b`: this lane's chunk in the
// first 16 columns. Fragments are loaded one product ahead.
//! [scores]
template <class Element, class Config>
__device__ __forceinline__ void scores(float (&c)[Config::kKeyTiles][Config::kBlockM / 8][4], const char* sA, int a,
                                       const char* sB, int b) {
  constexpr int kHeadDim = Config::kHeadDim, kPairs = Config::kBlockM / 16, kSteps = kHeadDim / 16 * kPairs;
  constexpr int kAhead = Config::kBlocksPerSm > 2 ? 0 : 1;  // of A: where registers are few, other warps fill the gap
  uint32_t ra[1 + kAhead][Config::kKeyTiles][4], rb[2][4];
  const auto load_a = [&](int step) {
#pragma unroll
    for (int m = 0; m < Config::kKeyTiles; ++m)
      ldmatrix_x4(ra[step % (1 + kAhead)][m], sA + along_row<kHeadDim>(a, 16 * step) + 16 * m * Config::kRowBytes);
  };
  const auto load_b = [&](int i) {
    ldmatrix_x4(rb[i % 2], sB + along_row<kHeadDim>(b, i / kPairs * 16) + i % kPairs * 16 * Config::kRowBytes);
  };
  load_a(0);
  load_b(0);
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    if (kAhead == 0 && step > 0) load_a(step);
    if (kAhead > 0 && 16 * step + 16 < kHeadDim) load_a(step + 1);
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const int i = step * kPairs + n;
      if (i + 1 < kSteps) load_b(i + 1);
#pragma unroll
      for (int m = 0; m < Config::kKeyTiles; ++m) {
        mma_m16n8k16<Element>(c[m][2 * n], ra[step % (1 + kAhead)][m], {rb[i % 2][0], rb[i % 2][1]}, c[m][2 * n]);
        mma_m16n8k16<Element>(c[m][2 * n + 1], ra[step % (1 + kAhead)][m], {rb[i % 2][2], rb[i % 2][3]}, c[m][2 * n + 1]);
      }
    }
  }
}
//! [scores]

// (5) C += A B with A in registers: P^T dO or dS^T Q.
//! [gradient]
template <class Element, class Config>
__device__ __forceinline__ void gradient(float (&c)[Config::kKeyTiles][Config::kHeadDim / 8][4],
                                         const uint32_t (&a)[Config::kKeyTiles][Config::kRowSteps][4], const char* sB,
                                         int b) {
  constexpr int kHeadDim = Config::kHeadDim, kPairs = kHeadDim / 16, kSteps = Config::kRowSteps * kPairs;
  uint32_t rb[2][4];
  const auto load_b = [&](int i) {
    ldmatrix_x4_trans(rb[i % 2], sB + along_row<kHeadDim>(b, i % kPairs * 16) + i / kPairs * 16 * Config::kRowBytes);
  };
  load_b(0);
#pragma unroll
  for (int k = 0; k < Config::kRowSteps; ++k)
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const int i = k * kPairs + n;
      if (i + 1 < kSteps) load_b(i + 1);
#pragma unroll
      for (int m = 0; m < Config::kKeyTiles; ++m) {
        mma_m16n8k16<Element>(c[m][2 * n], a[m][k], {rb[i % 2][0], rb[i % 2][1]}, c[m][2 * n]);
        mma_m16n8k16<Element>(c[m][2 * n + 1], a[m][k], {rb[i % 2][2], rb[i % 2][3]}, c[m][2 * n + 1]);
      }
    }
}
//! [gradient]

// (6) dQ = dS K for the rows from `row0` and the columns from `col0` on, from dS^T. `a`, `b`: this lane's chunk in the
// first 16 rows or columns of the first 16 keys.
//! [dq]
template <class Element, class Config>
__device__ __forceinline__ void query_gradient(float (&c)[Config::kQueryRows / 16][Config::kQueryCols / 8][4],
                                               const char* sdS, int a, int row0, const char* sK, int b,
                                               int col0) {
  constexpr int kTiles = Config::kQueryRows / 16, kPairs = Config::kQueryCols / 16;
  constexpr int kSteps = Config::kBlockN / 16;
  uint32_t ra[2][kTiles][4], rb[2][kPairs][4];
  const auto load = [&](int step) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
      ldmatrix_x4_trans(ra[step % 2][m],
                        sdS + along_row<Config::kBlockM>(a, row0 + 16 * m) + step * 32 * Config::kBlockM);
#pragma unroll
    for (int n = 0; n < kPairs; ++n)
      ldmatrix_x4_trans(rb[step % 2][n],
                        sK + along_row<Config::kHeadDim>(b, col0 + 16 * n) + step * 16 * Config::kRowBytes);
  };
  load(0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) load(step + 1);
#pragma unroll
    for (int n = 0; n < kPairs; ++n)
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        const auto& pair = rb[step % 2][n];
        mma_m16n8k16<Element>(c[m][2 * n], ra[step % 2][m], {pair[0], pair[1]}, c[m][2 * n]);
        mma_m16n8k16<Element>(c[m][2 * n + 1], ra[step % 2][m], {pair[2], pair[3]}, c[m][2 * n + 1]);
      }
  }
}
//! [dq]

// (4) P = exp(scale S - lse), rounded: the operand of dV, and for the other warp of the pair. With features that gets
// its own factor, negative where dropout drops P. `row`, `key`: the first of this lane, of this warp.
//! [recompute]
template <class Element, class Config, bool kFeatures>
__device__ __forceinline__ void probabilities(uint32_t (&operand)[Config::kKeyTiles][Config::kRowSteps][4],
                                              const float (&s)[Config::kKeyTiles][Config::kBlockM / 8][4],
                                              const float* sLse, uint4* sP, const Shape& shape, uint64_t seed,
                                              int64_t bh, int row, int key) {
  const float softmax_scale_log2 = shape.softmax_scale * kLog2E;
#pragma unroll
  for (int k = 0; k < Config::kRowSteps; ++k) {
    uint32_t bytes[2][2][Config::kKeyTiles];  // 8 rows on; the next row; 16 keys on
    const bool drops = kFeatures && shape.dropped > 0;
    if (drops)
#pragma unroll
      for (int n = 0; n < 2; ++n) draw(bytes[n], seed, bh, row + 16 * k + 8 * n, key);
#pragma unroll
    for (int m = 0; m < Config::kKeyTiles; ++m) {
      uint32_t(&p)[4] = operand[m][k], given[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 lse_log2 = *reinterpret_cast<const float2*>(sLse + 16 * k + 8 * (e / 2));
        const float* const x = s[m][2 * k + e / 2] + 2 * (e % 2);
        if constexpr (!kFeatures) {
          p[e] = given[e] = pack2<Element>(exp2f(fmaf(x[0], softmax_scale_log2, -lse_log2.x)),
                                           exp2f(fmaf(x[1], softmax_scale_log2, -lse_log2.y)));
        } else {
          Factors f[2] = {capped(x[0], lse_log2.x, shape), capped(x[1], lse_log2.y, shape)};
#pragma unroll
          for (int c = 0; c < 2; ++c)
            if (drops && (bytes[e / 2][c][m] >> 16 * (e % 2) & 255) < static_cast<uint32_t>(shape.dropped))
              f[c].p = 0, f[c].ds = -f[c].ds;
          p[e] = pack2<Element>(f[0].p, f[1].p);
          given[e] = pack2<Element>(f[0].ds, f[1].ds);
        }
      }
      sP[(m * Config::kRowSteps + k) * 32] = uint4{given[0], given[1], given[2], given[3]};
    }
  }
}

// The other warp: dS = P (dP - D), rounded: the operand of dK, and for dQ. `own`: byte offset of this lane's first one
// in dS^T.
template <class Element, class Config, bool kFeatures>
__device__ __forceinline__ void score_gradients(uint32_t (&operand)[Config::kKeyTiles][Config::kRowSteps][4],
                                                const float (&dp)[Config::kKeyTiles][Config::kBlockM / 8][4],
                                                const float* sDot, const uint4* sP, char* sdS, int own,
                                                float inverse_kept) {
#pragma unroll
  for (int k = 0; k < Config::kRowSteps; ++k)
#pragma unroll
    for (int m = 0; m < Config::kKeyTiles; ++m) {
      const uint4 four = sP[(m * Config::kRowSteps + k) * 32];
      const uint32_t p[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 dot = *reinterpret_cast<const float2*>(sDot + 16 * k + 8 * (e / 2));
        float ds[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float x = dp[m][2 * k + e / 2][2 * (e % 2) + c], d = c == 0 ? dot.x : dot.y;
          const float factor = unpack<Element>(p[e], c);
          ds[c] = !kFeatures ? factor * (x - d) : fabsf(factor) * ((factor < 0 ? 0 : x * inverse_kept) - d);
        }
        operand[m][k][e] = pack2<Element>(ds[0], ds[1]);
        *reinterpret_cast<uint32_t*>(sdS + along_row<Config::kBlockM>(own, 16 * k + 8 * (e / 2)) +
                                     (16 * m + 8 * (e % 2)) * 2 * Config::kBlockM) = operand[m][k][e];
      }
    }
}
//! [recompute]

}  // namespace ATTN_BACKEND::backward_tiles
