// v2_tensor_core: both MMAs by mma.sync; the warps split the keys.
//
// parent    v1_scalar
// idea      a warp owns a part of the keys of the tile, for all its rows. Scores and probabilities
//           stay in registers: the accumulator of the first MMA is the operand of the second.
//           But every warp ends with a partial O of its own keys, and these are added up through
//           shared memory.
// expect    the MMAs leave the FP32 units. What is left: traffic of O, and the exchange between
//           warps (two barriers a visit), which chapter 04 removes. ncu:
//           sm__ops_path_tensor_src_bf16_dst_fp32
// supports  fp16, bf16; head dims 32, 64, 128; any lengths, masks, GQA, dropout
#include "attn/kernel.h"
#include "attn/philox.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::v2_tensor_core {
using namespace attn;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  // warps along the rows and along the keys of a tile
  static constexpr int kWarpsM = 1, kWarpsN = 4;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kBlockM = 16 * kWarpsM, kBlockN = 128;  // B_r, B_c
  static constexpr int kWarpKeys = kBlockN / kWarpsN;          // keys of a warp
  static constexpr int kSlice = kHeadDim / kWarpsN;            // columns of O that a warp adds up
  // elements: 8 rows of ldmatrix begin in 8 groups of banks
  static constexpr int kStride = kHeadDim + 8;
  static_assert(kWarpKeys % 16 == 0 && kSlice % 8 == 0, "warps own whole MMAs");
};

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
  alignas(16) Element sK[Config::kBlockN * Config::kStride];  // [kBlockN, d]
  alignas(16) Element sV[Config::kBlockN * Config::kStride];  // [kBlockN, d]
  alignas(16) Element sQ[Config::kBlockM * Config::kStride];  // [kBlockM, d]
  float sMax[Config::kWarpsN][Config::kBlockM];               // of each warp's keys
  float sSum[Config::kWarpsN][Config::kBlockM];
  // Partial O, for the warp that adds up these columns, from each other one.
  float sO[Config::kWarpsM][Config::kWarpsN][Config::kWarpsN - 1][16][Config::kSlice + 8];
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sMax, sSum, sO)
};

// Copies rows [row0, row0 + kRows) of a [rows, d] matrix; what lies beyond its end becomes 0.
template <int kRows, class Config, class Element>
__device__ void load_tile(Element* tile, const Element* g, int row0, int rows) {
  constexpr int kChunks = Config::kHeadDim / 8;  // of 16 bytes, a row
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kChunks; i += Config::kThreads) {
    const int r = i / kChunks, c = i % kChunks * 8;
    const bool inside = row0 + r < rows;
    *reinterpret_cast<uint4*>(tile + r * Config::kStride + c) =
        inside ? *reinterpret_cast<const uint4*>(g + int64_t{row0 + r} * Config::kHeadDim + c)
               : make_uint4(0, 0, 0, 0);
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
    ldmatrix_x4(a, sQ + lane_id % 16 * Config::kStride + k + lane_id / 16 * 8);
#pragma unroll
    for (int n = 0; n < Config::kWarpKeys / 8; n += 2) {  // two MMAs of 8 keys at once
      ldmatrix_x4(b, sK + (8 * n + lane_id / 16 * 8 + lane_id % 8) * Config::kStride + k +
                         lane_id / 8 % 2 * 8);
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
      ldmatrix_x4_trans(b,
                        sV + (8 * k + lane_id % 16) * Config::kStride + 8 * n + lane_id / 16 * 8);
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
                     Shape shape, uint64_t seed) {
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

  for (int n_block = 0; n_block * kBlockN < shape.seqlen_k; ++n_block) {
    // (1) load K_j and V_j
    __syncthreads();  // all are done with the tile before
    load_tile<kBlockN, Config>(smem.sK, k, n_block * kBlockN, shape.seqlen_k);
    load_tile<kBlockN, Config>(smem.sV, v, n_block * kBlockN, shape.seqlen_k);
    for (int row0 = 0; row0 < shape.seqlen_q; row0 += kBlockM) {
      const BlockRange seen = blocks_seen(shape, row0, kBlockM, kBlockN);
      if (n_block < seen.begin || n_block >= seen.end) continue;
      const bool first = n_block == seen.begin, last = n_block + 1 == seen.end;

      // (2) load Q_i. The rows before were read from sQ two barriers ago.
      load_tile<kBlockM, Config>(smem.sQ, q, row0, shape.seqlen_q);
      __syncthreads();  // Q, K and V are there; all are done with the sums of the rows before

      // (3) S = scale Q K^T, -inf where a query does not see a key.
      float s[kWarpKeys / 8][4] = {};
      scores<Config>(s, smem.sQ + warp_m * 16 * Config::kStride,
                     smem.sK + warp_n * kWarpKeys * Config::kStride);
      const int key0 = n_block * kBlockN + warp_n * kWarpKeys;
      const int row[2] = {row0 + warp_m * 16 + quad_row, row0 + warp_m * 16 + quad_row + 8};
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
      MaxSum old[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int n = 0; n < kWarpKeys / 8; ++n)
          row_max[r] = fmaxf(row_max[r], fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        row_max[r] = quad_max(row_max[r]);
        if (quad_col == 0) smem.sMax[warp_n][warp_m * 16 + quad_row + 8 * r] = row_max[r];
        if (!first && row[r] < shape.seqlen_q) old[r] = gState[q0 + row[r]];
      }
      __syncthreads();  // the maxima of all warps are there
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
      output<Config, Element>(o, p, smem.sV + warp_n * kWarpKeys * Config::kStride);
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
      __syncthreads();  // parts and sums of all warps are there
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
          float2 x =
              first ? make_float2(0, 0) : *reinterpret_cast<const float2*>(gAccum + at + 8 * n);
          x.x = (x.x * old_sum + sum[n][2 * r] / kept) * inverse_sum;
          x.y = (x.y * old_sum + sum[n][2 * r + 1] / kept) * inverse_sum;
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
    }
  }
}

template <class Element, class Config, bool kDropout>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config, kDropout>,
                       dim3(static_cast<unsigned>(p.batch * p.heads)), dim3(Config::kThreads),
                       sizeof(SharedStorage<Element, Config>), args.stream, args.in<Element>("q"),
                       args.in<Element>("k"), args.in<Element>("v"), args.out<Element>("o"),
                       args.out<float>("lse"), args.out<float>("accum"), args.out<MaxSum>("state"),
                       shape_of(p), p.seed);
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

}  // namespace ATTN_BACKEND::v2_tensor_core
