// v5_row_groups: larger tiles; pairs of warps that wait for nobody else.
//
// parent    v4_grid
// idea      traffic of O falls as tiles of keys grow, and the exchange as fewer warps share a row:
//           256 keys, 8 warps in 4 groups of 16 rows, 2 warps a row. Groups meet when K and V
//           change, and else never: each loads its own rows of Q and has a barrier of its own, so
//           that one group computes while another waits.
// expect    half the L2 bytes, a third of the exchange; stalls on barriers fall.
// supports  fp16, bf16; head dims 32, 64, 128; any lengths, masks, GQA, dropout
#include <algorithm>

#include "attn/kernel.h"
#include "attn/philox.h"
#include "emulator/warp_access.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "ptx/named_barrier.h"

namespace ATTN_BACKEND::v5_row_groups {
using namespace attn;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  // warps along the rows and along the keys of a tile
  static constexpr int kWarpsM = 4, kWarpsN = 2;
  static constexpr int kGroupThreads = 32 * kWarpsN;  // of 16 rows
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kBlockM = 16 * kWarpsM, kBlockN = 256;  // B_r, B_c
  static constexpr int kWarpKeys = kBlockN / kWarpsN;          // keys of a warp
  static constexpr int kSlice = kHeadDim / kWarpsN;            // columns of O that a warp adds up
  static_assert(kWarpKeys % 16 == 0 && kSlice % 8 == 0, "warps own whole MMAs");
};

// The swizzled offset of element (row, col) of a tile [rows, kHeadDim]: its 16-byte chunks are
// exchanged among themselves, so that those of 8 rows in one column lie in 8 groups of 4 banks.
//! [swizzle]
template <int kHeadDim>
__host__ __device__ constexpr int swizzled_offset(int row, int col) {
  constexpr int kChunks = kHeadDim / 8;  // 4, 8 or 16 a row
  const int phase = kChunks >= 8 ? row % 8 : row / 2 % 4;
  return row * kHeadDim + ((col / 8) ^ phase) * 8 + col % 8;
}
template <int kHeadDim>
constexpr bool free_of_conflicts() {
  for (int col = 0; col < kHeadDim; col += 16)
    if (ldmatrix_access(
            [=](int l) { return 2 * swizzled_offset<kHeadDim>(l % 16, col + l / 16 * 8); }, 4)
                .conflicts() > 0 ||
        ldmatrix_access(
            [=](int l) {
              return 2 * swizzled_offset<kHeadDim>(l / 16 * 8 + l % 8, col + l / 8 % 2 * 8);
            },
            4)
                .conflicts() > 0)
      return false;
  return true;
}
static_assert(free_of_conflicts<32>() && free_of_conflicts<64>() && free_of_conflicts<128>());
//! [swizzle]

//! [maxsum]
// The maximum of some numbers and the sum of exp(number - maximum).
struct MaxSum {
  float max = kNothing, sum = 0;
  // Stands for -inf where nothing was seen. It is finite, so that differences are numbers.
  static constexpr float kNothing = -3.4028234e38f;
};
//! [maxsum]

template <class Element, class Config>
struct SharedStorage {
  alignas(128) Element sK[Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sV[Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sQ[Config::kBlockM * Config::kHeadDim];  // [kBlockM, d]
  float sMax[Config::kWarpsN][Config::kBlockM];                 // of each warp's keys
  float sSum[Config::kWarpsN][Config::kBlockM];
  // Partial O, for the warp that adds up these columns, from each other one.
  float sO[Config::kWarpsM][Config::kWarpsN][Config::kWarpsN - 1][16][Config::kSlice + 8];
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sMax, sSum, sO)
};

// Issues the copies of rows [row0, row0 + kRows) of a [rows, d] matrix; what lies beyond its end
// becomes 0. `tid` is one of kThreads threads that share the work.
template <int kRows, int kThreads, class Config, class Element>
__device__ void load_tile(Element* tile, const Element* g, int row0, int rows, int tid) {
  constexpr int kChunks = Config::kHeadDim / 8;  // of 16 bytes, a row
#pragma unroll
  for (int i = tid; i < kRows * kChunks; i += kThreads) {
    const int r = i / kChunks, c = i % kChunks * 8;
    const bool inside = row0 + r < rows;
    cp_async_16(tile + swizzled_offset<Config::kHeadDim>(r, c),
                inside ? g + int64_t{row0 + r} * Config::kHeadDim + c : g, inside ? 16 : 0);
  }
}

// The blocks of keys that some query of rows [row0, row0 + rows) sees. Where there is none the
// first one is visited all the same, so that the rows get their O = 0 and lse = -inf.
struct BlockRange {
  int begin, end;
};
__device__ BlockRange blocks_seen(const Shape& shape, int row0, int rows, int block_n) {
  const int last = min(row0 + rows, shape.seqlen_q) - 1, shift = shape.seqlen_k - shape.seqlen_q;
  const int begin = max(0, row0 + shift - shape.window_left);
  const int end = min(shape.seqlen_k, last + shift + shape.window_right + 1);
  if (end <= begin) return {0, 1};
  return {begin / block_n, ceil_div(end, block_n)};
}

__device__ __forceinline__ float quad_max(float x) {  // over the 4 lanes that share a row
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// (3) S = Q K^T for 16 rows and the keys of this warp.
//! [scores]
template <class Config, class Element>
__device__ __forceinline__ void scores(float (&s)[Config::kWarpKeys / 8][4], const Element* sQ,
                                       const Element* sK) {
  const int lane_id = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < Config::kHeadDim; k += 16) {
    uint32_t a[4], b[4];
    ldmatrix_x4(a, sQ + swizzled_offset<Config::kHeadDim>(lane_id % 16, k + lane_id / 16 * 8));
#pragma unroll
    for (int n = 0; n < Config::kWarpKeys / 8; n += 2) {  // two MMAs of 8 keys at once
      ldmatrix_x4(b, sK + swizzled_offset<Config::kHeadDim>(8 * n + lane_id / 16 * 8 + lane_id % 8,
                                                            k + lane_id / 8 % 2 * 8));
      mma_m16n8k16<Element>(s[n], a, {b[0], b[1]}, s[n]);
      mma_m16n8k16<Element>(s[n + 1], a, {b[2], b[3]}, s[n + 1]);
    }
  }
}
//! [scores]

// (5) O = P V for 16 rows and the keys of this warp. Two neighbouring accumulators of the first
// MMA, rounded in pairs, are an operand of the second.
//! [output]
template <class Config, class Element>
__device__ __forceinline__ void output(float (&o)[Config::kHeadDim / 8][4],
                                       const uint32_t (&p)[Config::kWarpKeys / 8][2],
                                       const Element* sV) {
  const int lane_id = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < Config::kWarpKeys / 8; k += 2) {  // 16 keys
    const uint32_t a[4] = {p[k][0], p[k][1], p[k + 1][0], p[k + 1][1]};
#pragma unroll
    for (int n = 0; n < Config::kHeadDim / 8; n += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, sV + swizzled_offset<Config::kHeadDim>(8 * k + lane_id % 16,
                                                                  8 * n + lane_id / 16 * 8));
      mma_m16n8k16<Element>(o[n], a, {b[0], b[1]}, o[n]);
      mma_m16n8k16<Element>(o[n + 1], a, {b[2], b[3]}, o[n + 1]);
    }
  }
}
//! [output]

// Sets to 0 what dropout drops of row `row`, half `r` of the accumulators: 16 bytes of Philox for
// 64 keys.
template <class Config>
__device__ __forceinline__ void drop(float (&s)[Config::kWarpKeys / 8][4], int r, uint64_t seed,
                                     int64_t bh, int row, int key0, int dropped) {
#pragma unroll
  for (int first = 0; first < Config::kWarpKeys; first += 64) {
    const PhiloxBits bits = dropout_bits(seed, bh, row, (key0 + first) / 64, threadIdx.x % 4);
    // bytes of the keys before
    const int skipped = Config::kWarpKeys % 64 == 0 ? 0 : key0 % 64 / 4;
#pragma unroll
    for (int i = 0; i < 16 && first + i * 4 < Config::kWarpKeys; ++i)
      if (bits.byte(skipped + i) < static_cast<uint32_t>(dropped))
        s[first / 8 + i / 2][2 * r + i % 2] = 0;
  }
}

template <class Element, class Config, bool kDropout>
__global__ void __launch_bounds__(Config::kThreads)
    attention_kernel(const Element* gQ,  // [B, Hq, seqlen_q, d]
                     const Element* gK,  // [B, Hkv, seqlen_k, d]
                     const Element* gV,  // [B, Hkv, seqlen_k, d]
                     Element* gO,        // [B, Hq, seqlen_q, d]
                     float* gLse,        // [B, Hq, seqlen_q]
                     float* gAccum,      // [B, Hq, seqlen_q, d]: O between visits
                     MaxSum* gState,     // [B, Hq, seqlen_q]: m and l between visits
                     Shape shape, uint64_t seed, int rows_a_block) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kWarpsN = Config::kWarpsN, kWarpKeys = Config::kWarpKeys, kSlice = Config::kSlice;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int lane_id = threadIdx.x % 32, warp_m = threadIdx.x / 32 / kWarpsN,
            warp_n = threadIdx.x / 32 % kWarpsN;
  const int quad_row = lane_id / 4, quad_col = 2 * (lane_id % 4);  // place in an accumulator
  const int64_t bh = blockIdx.x, bh_kv = bh / (shape.heads / shape.kv_heads);
  const int64_t q0 = bh * shape.seqlen_q;  // first row of this head
  const Element* q = gQ + q0 * kHeadDim;
  const Element* k = gK + bh_kv * shape.seqlen_k * kHeadDim;
  const Element* v = gV + bh_kv * shape.seqlen_k * kHeadDim;
  const int shift = shape.seqlen_k - shape.seqlen_q;
  //! [groups]
  // The group: kWarpsN warps that share 16 rows of a tile.
  constexpr int kThreads = Config::kThreads, kGroupThreads = Config::kGroupThreads;
  const int group_tid = threadIdx.x % kGroupThreads, group_row = 16 * warp_m;
  Element* const group_q = smem.sQ + group_row * kHeadDim;  // [16, d]
  const auto group_sync = [&] { named_barrier_sync(1 + warp_m, kGroupThreads); };
  //! [groups]

  // This block's rows. With a causal mask the last ones have the most keys: they begin first.
  const int first_row = (gridDim.y - 1 - blockIdx.y) * rows_a_block;
  const int end_row = min(first_row + rows_a_block, shape.seqlen_q);
  // The first of them from `row0` on that see something of a block of keys.
  const auto next_rows = [&](int row0, int n_block) {
    for (; row0 < end_row; row0 += kBlockM) {
      const BlockRange seen = blocks_seen(shape, row0, kBlockM, kBlockN);
      if (seen.begin <= n_block && n_block < seen.end) break;
    }
    return row0;
  };

  for (int n_block = 0; n_block * kBlockN < shape.seqlen_k; ++n_block) {
    // (1) load K_j with the first Q_i, then V_j
    int row0 = next_rows(first_row, n_block);
    if (row0 >= end_row) continue;
    __syncthreads();  // all are done with the tiles before
    load_tile<kBlockN, kThreads, Config>(smem.sK, k, n_block * kBlockN, shape.seqlen_k,
                                         threadIdx.x);
    load_tile<16, kGroupThreads, Config>(group_q, q, row0 + group_row, shape.seqlen_q, group_tid);
    cp_async_commit();
    load_tile<kBlockN, kThreads, Config>(smem.sV, v, n_block * kBlockN, shape.seqlen_k,
                                         threadIdx.x);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // K and V are there: until they change, groups need not meet again
    for (int following; row0 < end_row; row0 = following) {
      const BlockRange seen = blocks_seen(shape, row0, kBlockM, kBlockN);
      const bool first = n_block == seen.begin, last = n_block + 1 == seen.end;
      group_sync();  // Q is there; the group is done with the sums of the rows before

      // (2) ask for what the last visit left of O, l and m
      const int row[2] = {row0 + warp_m * 16 + quad_row, row0 + warp_m * 16 + quad_row + 8};
      MaxSum old[2];
      float2 old_o[2][kSlice / 8] = {};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (first || row[r] >= shape.seqlen_q) continue;
        old[r] = gState[q0 + row[r]];
#pragma unroll
        for (int n = 0; n < kSlice / 8; ++n)
          old_o[r][n] = *reinterpret_cast<const float2*>(gAccum + (q0 + row[r]) * kHeadDim +
                                                         warp_n * kSlice + quad_col + 8 * n);
      }

      // (3) S = scale Q K^T, -inf where a query does not see a key.
      float s[kWarpKeys / 8][4] = {};
      scores<Config>(s, group_q, smem.sK + warp_n * kWarpKeys * kHeadDim);
      const int key0 = n_block * kBlockN + warp_n * kWarpKeys;
#pragma unroll
      for (int n = 0; n < kWarpKeys / 8; ++n)
        for (int i = 0; i < 4; ++i) s[n][i] *= shape.softmax_scale;
      // Most tiles are seen whole: what the last of the 16 rows sees begins, and what the first
      // sees ends, outside.
      // the last key that a causal mask leaves to the first row
      const int diagonal = row0 + warp_m * 16 + shift;
      if (key0 < diagonal + 15 - shape.window_left ||
          key0 + kWarpKeys > min(shape.seqlen_k, diagonal + shape.window_right + 1)) {
#pragma unroll
        for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int key = key0 + 8 * n + quad_col + i % 2,
                      last_key = row[i / 2] + shift + shape.window_right;
            if (key < row[i / 2] + shift - shape.window_left || key > last_key ||
                key >= shape.seqlen_k)
              s[n][i] = -INFINITY;
          }
      }

      // (4) softmax: the maximum over this warp's keys, then over all warps and what was seen
      // before.
      //! [softmax]
      float row_max[2] = {MaxSum::kNothing, MaxSum::kNothing}, row_sum[2] = {};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int n = 0; n < kWarpKeys / 8; ++n)
          row_max[r] = fmaxf(row_max[r], fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        row_max[r] = quad_max(row_max[r]);
        if (quad_col == 0) smem.sMax[warp_n][warp_m * 16 + quad_row + 8 * r] = row_max[r];
      }
      group_sync();  // the maxima of both warps are there; both are done with Q
      following = next_rows(row0 + kBlockM, n_block);
      if (following < end_row)
        load_tile<16, kGroupThreads, Config>(group_q, q, following + group_row, shape.seqlen_q,
                                             group_tid);
      cp_async_commit();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row_max[r] = old[r].max;
#pragma unroll
        for (int w = 0; w < kWarpsN; ++w)
          row_max[r] = fmaxf(row_max[r], smem.sMax[w][warp_m * 16 + quad_row + 8 * r]);
#pragma unroll
        for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& p = s[n][2 * r + c];
            p = __expf(p - row_max[r]);
            row_sum[r] += p;
          }
        row_sum[r] = quad_sum(row_sum[r]);
        if (quad_col == 0) smem.sSum[warp_n][warp_m * 16 + quad_row + 8 * r] = row_sum[r];
      }
      //! [softmax]
      if constexpr (kDropout)  // the sum keeps what O loses
        for (int r = 0; r < 2; ++r) drop<Config>(s, r, seed, bh, row[r], key0, shape.dropped);
      uint32_t p[kWarpKeys / 8][2];
#pragma unroll
      for (int n = 0; n < kWarpKeys / 8; ++n)
        p[n][0] = pack2<Element>(s[n][0], s[n][1]), p[n][1] = pack2<Element>(s[n][2], s[n][3]);

      // (5) O = P V over this warp's keys; (6) the warps' parts added up, each warp some columns.
      float o[kHeadDim / 8][4] = {}, sum[kSlice / 8][4];
      output<Config, Element>(o, p, smem.sV + warp_n * kWarpKeys * kHeadDim);
      //! [exchange]
#pragma unroll
      for (int owner = 0; owner < kWarpsN; ++owner)
#pragma unroll
        for (int n = 0; n < kSlice / 8; ++n) {
          const float(&part)[4] = o[owner * (kSlice / 8) + n];
          if (owner == warp_n) {
            for (int i = 0; i < 4; ++i) sum[n][i] = part[i];
          } else {
            auto& to = smem.sO[warp_m][owner][warp_n - (warp_n > owner)];
            *reinterpret_cast<float2*>(&to[quad_row][8 * n + quad_col]) =
                make_float2(part[0], part[1]);
            *reinterpret_cast<float2*>(&to[quad_row + 8][8 * n + quad_col]) =
                make_float2(part[2], part[3]);
          }
        }
      group_sync();  // parts and sums of both warps are there
#pragma unroll
      for (int w = 0; w < kWarpsN - 1; ++w)
#pragma unroll
        for (int n = 0; n < kSlice / 8; ++n)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float2 part = *reinterpret_cast<const float2*>(
                &smem.sO[warp_m][warp_n][w][quad_row + 8 * r][8 * n + quad_col]);
            sum[n][2 * r] += part.x, sum[n][2 * r + 1] += part.y;
          }
      //! [exchange]

      // (7) O_i, l_i, m_i: merged with what was there, and stored.
      const float kept = kDropout ? 1 - float(shape.dropped) / 256 : 1;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (row[r] >= shape.seqlen_q) continue;
        MaxSum now{row_max[r], old[r].sum * __expf(old[r].max - row_max[r])};
        const float old_sum = now.sum;
#pragma unroll
        for (int w = 0; w < kWarpsN; ++w) now.sum += smem.sSum[w][warp_m * 16 + quad_row + 8 * r];
        const float inverse_sum = now.sum > 0 ? 1 / now.sum : 0;
        const int64_t at = (q0 + row[r]) * kHeadDim + warp_n * kSlice + quad_col;
#pragma unroll
        for (int n = 0; n < kSlice / 8; ++n) {
          const float2 x =
              make_float2((old_o[r][n].x * old_sum + sum[n][2 * r] / kept) * inverse_sum,
                          (old_o[r][n].y * old_sum + sum[n][2 * r + 1] / kept) * inverse_sum);
          if (last)
            *reinterpret_cast<uint32_t*>(gO + at + 8 * n) = pack2<Element>(x.x, x.y);
          else
            *reinterpret_cast<float2*>(gAccum + at + 8 * n) = x;
        }
        if (warp_n == 0 && quad_col == 0) {
          gState[q0 + row[r]] = now;
          if (last) gLse[q0 + row[r]] = now.sum > 0 ? now.max + logf(now.sum) : -INFINITY;
        }
      }
      cp_async_wait<0>();  // the next Q
    }
  }
}

// Rows of a block: so many that their O between visits stays in L2 (256 KiB), or fewer until there
// are two blocks an SM of an H200 (132).
//! [rows]
int64_t rows_a_block(const Problem& p, int64_t block_m) {
  int64_t rows = 64 * 1024 / p.head_dim;
  while (rows > block_m && p.batch * p.heads * ceil_div(p.seqlen_q, rows) < 264) rows /= 2;
  // grid.y ends there
  return std::max(rows, ceil_div(ceil_div(p.seqlen_q, int64_t{65535}), block_m) * block_m);
}
//! [rows]

template <class Element, class Config, bool kDropout>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const int64_t rows = rows_a_block(p, Config::kBlockM);
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config, kDropout>,
                       dim3(static_cast<unsigned>(p.batch * p.heads),
                            static_cast<unsigned>(ceil_div(p.seqlen_q, rows))),
                       dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), args.stream,
                       args.in<Element>("q"), args.in<Element>("k"), args.in<Element>("v"),
                       args.out<Element>("o"), args.out<float>("lse"), args.out<float>("accum"),
                       args.out<MaxSum>("state"), shape_of(p), p.seed, static_cast<int>(rows));
}

template <class Element, int kHeadDim>
Status launch(const Arguments& args) {
  return args.problem.dropout > 0 ? launch<Element, Config<kHeadDim>, true>(args)
                                  : launch<Element, Config<kHeadDim>, false>(args);
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    switch (args.problem.head_dim) {
      case 32: return launch<Element, 32>(args);
      case 64: return launch<Element, 64>(args);
      case 128: return launch<Element, 128>(args);
    }
    return Status::unsupported("only head dims 32, 64 and 128");
  });
}

}  // namespace ATTN_BACKEND::v5_row_groups
