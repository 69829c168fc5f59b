// v2_constant_tiles: 16-bit tiles of compile-time size, XOR-swizzled.
//
// parent    v1_scalar
// change    Tiles keep the type of the inputs. They are copied in 16-byte chunks to swizzled
//           offsets. Sizes are compile-time constants, 128 keys for every head dim. Four lanes
//           share a row in the softmax. The GEMMs still run in fp32, with two shared-memory reads
//           per multiply-add.
// why       Tensor cores need 16-bit operands and unrolled loops; this step prepares them.
// expect    Fewer visits, so fewer bytes of O: lts__t_bytes.sum falls.
//           sm__inst_executed_pipe_fma.sum hardly changes.
// supports  fp16, bf16; head dims 32, 64, 128; any lengths, masks, GQA, dropout
#include "attn/kernel.h"
#include "attn/philox.h"
#include "kernels/bank_conflicts.h"

namespace ATTN_BACKEND::v2_constant_tiles {
using namespace attn;
using namespace flash1;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kThreads = 128;
  static constexpr int kBlockM = 16, kBlockN = 128;  // B_r, B_c
};

// XOR swizzle: offset of element (row, col) of a tile [rows, kHeadDim]. The 16-byte chunks of a row
// are permuted so that the 8 rows that ldmatrix reads at once lie in disjoint banks. Rows of 4
// chunks (d = 32) share the 32 banks in pairs, so their permutation changes every second row.
//! [swizzle]
template <int kHeadDim>
__host__ __device__ constexpr int swizzled_offset(int row, int col) {
  constexpr int kChunks = kHeadDim / 8;  // 4, 8 or 16 per row
  const int phase = kChunks >= 8 ? row % 8 : row / 2 % 4;
  return row * kHeadDim + ((col / 8) ^ phase) * 8 + col % 8;
}
static_assert(free_of_conflicts(swizzled_offset<32>, 32) &&
                  free_of_conflicts(swizzled_offset<64>, 64) &&
                  free_of_conflicts(swizzled_offset<128>, 128),
              "ldmatrix reads without conflicts");
//! [swizzle]

//! [maxsum]
// Online softmax state of a set of scores: maximum m and sum l of exp(score - m).
struct SoftmaxState {
  float max = kNothing, sum = 0;
  // Finite initial row maximum: avoids (-inf) - (-inf) = NaN.
  static constexpr float kNothing = -3.4028234e38f;
};
//! [maxsum]

template <class Element, class Config>
struct SharedStorage {
  alignas(128) Element sK[Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sV[Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sQ[Config::kBlockM * Config::kHeadDim];  // [kBlockM, d]
  // S, then P. 8 floats of padding: four consecutive rows start in different banks.
  float sP[Config::kBlockM][Config::kBlockN + 8];      // [kBlockM, kBlockN]
  float sOld[Config::kBlockM], sNew[Config::kBlockM];  // factors of the old O and of P V
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sP, sOld, sNew)
};

// Copies rows [row0, row0 + kRows) of a [rows, d] matrix; rows past the end become 0.
template <int kRows, class Config, class Element>
__device__ void load_tile(Element* tile, const Element* g, int row0, int rows) {
  constexpr int kChunks = Config::kHeadDim / 8;  // of 16 bytes, per row
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kChunks; i += Config::kThreads) {
    const int r = i / kChunks, c = i % kChunks * 8;
    const bool inside = row0 + r < rows;
    *reinterpret_cast<uint4*>(tile + swizzled_offset<Config::kHeadDim>(r, c)) =
        inside ? *reinterpret_cast<const uint4*>(g + int64_t{row0 + r} * Config::kHeadDim + c)
               : make_uint4(0, 0, 0, 0);
  }
}

// The KV tiles that at least one query of rows [row0, row0 + rows) sees. If there is none, the
// first tile is visited, fully masked, so that O = 0 and lse = -inf are written.
struct KvBlockRange {
  int begin, end;
};
__device__ KvBlockRange kv_block_range(const Shape& shape, int row0, int rows, int block_n) {
  const int last = min(row0 + rows, shape.seqlen_q) - 1,
            causal_offset = shape.seqlen_k - shape.seqlen_q;
  const int begin = max(0, row0 + causal_offset - shape.window_left);
  const int end = min(shape.seqlen_k, last + causal_offset + shape.window_right + 1);
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

template <class Element, class Config, bool kDropout>
__global__ void __launch_bounds__(Config::kThreads)
    attention_kernel(const Element* gQ,     // [B, Hq, seqlen_q, d]
                     const Element* gK,     // [B, Hkv, seqlen_k, d]
                     const Element* gV,     // [B, Hkv, seqlen_k, d]
                     Element* gO,           // [B, Hq, seqlen_q, d]
                     float* gLse,           // [B, Hq, seqlen_q]
                     float* gAccum,         // [B, Hq, seqlen_q, d]: O between visits
                     SoftmaxState* gState,  // [B, Hq, seqlen_q]: m and l between visits
                     Shape shape, uint64_t seed) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int tid = threadIdx.x;
  const int64_t bh = blockIdx.x, bh_kv = bh / (shape.heads / shape.kv_heads);
  const int64_t q0 = bh * shape.seqlen_q;  // first row of this head
  const Element* q = gQ + q0 * kHeadDim;
  const Element* k = gK + bh_kv * shape.seqlen_k * kHeadDim;
  const Element* v = gV + bh_kv * shape.seqlen_k * kHeadDim;
  const int causal_offset = shape.seqlen_k - shape.seqlen_q;

  for (int n_block = 0; n_block * kBlockN < shape.seqlen_k; ++n_block) {
    // (1) Load K_j and V_j.
    const int key0 = n_block * kBlockN;
    __syncthreads();  // all warps have read the previous K and V
    load_tile<kBlockN, Config>(smem.sK, k, n_block * kBlockN, shape.seqlen_k);
    load_tile<kBlockN, Config>(smem.sV, v, n_block * kBlockN, shape.seqlen_k);
    for (int row0 = 0; row0 < shape.seqlen_q; row0 += kBlockM) {
      const KvBlockRange kv_range = kv_block_range(shape, row0, kBlockM, kBlockN);
      if (n_block < kv_range.begin || n_block >= kv_range.end) continue;
      const bool first = n_block == kv_range.begin, last = n_block + 1 == kv_range.end;

      // (2) Load Q_i. The previous Q was last read two barriers ago.
      load_tile<kBlockM, Config>(smem.sQ, q, row0, shape.seqlen_q);
      __syncthreads();  // Q, K and V are visible; all warps have read the previous tile's results

      // (3) S = scale Q K^T, -inf where masked.
      for (int i = tid; i < kBlockM * kBlockN; i += Config::kThreads) {
        const int row = i / kBlockN, key = i % kBlockN;
        const int diagonal = row0 + row + causal_offset;
        float score = 0;
        for (int x = 0; x < kHeadDim; ++x)
          score += to_float(smem.sQ[swizzled_offset<kHeadDim>(row, x)]) *
                   to_float(smem.sK[swizzled_offset<kHeadDim>(key, x)]);
        const bool visible = key0 + key >= diagonal - shape.window_left &&
                             key0 + key <= diagonal + shape.window_right &&
                             key0 + key < shape.seqlen_k;
        smem.sP[row][key] = visible ? score * shape.softmax_scale : -INFINITY;
      }
      __syncthreads();  // S is visible

      // (4) Online softmax, four lanes per row.
      const float inverse_kept = kDropout ? 1 / (1 - float(shape.dropped) / 256) : 1;
      if (tid < 4 * kBlockM) {
        const int row = tid / 4;
        float* const s = smem.sP[row];
        SoftmaxState old;
        // One lane of the quad loads the old state: quad_max passes its maximum on, and only this
        // lane uses its sum.
        if (!first && tid % 4 == 0 && row0 + row < shape.seqlen_q) old = gState[q0 + row0 + row];
        float max = old.max, sum = 0;
        for (int key = tid % 4; key < kBlockN; key += 4) max = fmaxf(max, s[key]);
        max = quad_max(max);
        for (int key = tid % 4; key < kBlockN; key += 4) {
          float& p = s[key];
          p = __expf(p - max);
          sum += p;
          if constexpr (kDropout)  // after the sum: a dropped key still counts in l
            if (!dropout_keeps(seed, bh, row0 + row, key0 + key, shape.dropped)) p = 0;
        }
        sum = quad_sum(sum);
        const float old_sum = old.sum * __expf(old.max - max);
        const SoftmaxState now{max, old_sum + sum};
        const float inverse_sum = now.sum != 0 ? 1 / now.sum : 0;
        if (tid % 4 == 0 && row0 + row < shape.seqlen_q) {
          smem.sOld[row] = old_sum * inverse_sum, smem.sNew[row] = inverse_kept * inverse_sum;
          gState[q0 + row0 + row] = now;
          if (last) gLse[q0 + row0 + row] = now.sum != 0 ? max + logf(now.sum) : -INFINITY;
        }
      }
      __syncthreads();  // P and the factors are visible

      // (5) O = P V, (7) merged with the old O and stored. (6), the exchange of partial O, comes
      // with v4_split_keys.
      for (int i = tid; i < kBlockM * kHeadDim; i += Config::kThreads) {
        const int row = i / kHeadDim, col = i % kHeadDim;
        if (row0 + row >= shape.seqlen_q) continue;
        const int64_t idx = (q0 + row0 + row) * kHeadDim + col;
        float o = 0;
        for (int key = 0; key < kBlockN; ++key)
          o += smem.sP[row][key] * to_float(smem.sV[swizzled_offset<kHeadDim>(key, col)]);
        o = (first ? 0 : gAccum[idx] * smem.sOld[row]) + o * smem.sNew[row];
        if (last)
          gO[idx] = from_float<Element>(o);
        else
          gAccum[idx] = o;
      }
    }
  }
}

template <class Element, class Config, bool kDropout>
Status launch(const Arguments& args) {
  const ForwardParams<Element> params(args);
  const Problem& p = args.problem;
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config, kDropout>,
                       dim3(static_cast<unsigned>(p.batch * p.heads)), dim3(Config::kThreads),
                       sizeof(SharedStorage<Element, Config>), args.stream, params.q, params.k,
                       params.v, params.o, params.lse, args.out<float>("accum"),
                       args.out<SoftmaxState>("state"), shape_of(p), p.seed);
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  return args.problem.dropout > 0 ? launch<Element, Config, true>(args)
                                  : launch<Element, Config, false>(args);
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    switch (args.problem.head_dim) {
      case 32: return launch<Element, Config<32>>(args);
      case 64: return launch<Element, Config<64>>(args);
      case 128: return launch<Element, Config<128>>(args);
    }
    return Status::unsupported("only head dims 32, 64 and 128");
  });
}

}  // namespace ATTN_BACKEND::v2_constant_tiles
