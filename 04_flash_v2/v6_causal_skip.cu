// v6_causal_skip: blocks of keys are skipped, masked, or plain.
//
// parent    v5_exp2
// idea      For a tile of queries the blocks of keys form five ranges: unseen, cut by the left edge of the window,
//           seen whole, cut by the right edge, unseen. The unseen ones are not visited. The cut ones have a loop
//           whose body masks, the others one whose body has no mask at all: no comparison, no branch.
//           With a causal mask the last queries have the most keys: their blocks begin first, so that short ones
//           fill the gaps at the end.
// expect    Causal: nearly half the products (sm__ops_path_tensor_src_bf16_dst_fp32.sum); a window: as wide, as slow.
//           Without a mask: fewer instructions beside the products.
// supports  fp16, bf16; head dims 32, 64, 128; any lengths, masks, GQA, dropout; no negative scale
#include "attn/kernel.h"
#include "attn/philox.h"
#include "emulator/warp_access.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::v6_causal_skip {
using namespace attn;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kNumWarps = 8, kThreads = 32 * kNumWarps;
  static constexpr int kWarpRows = 16;  // of a warp, all of whose keys it sees to
  static constexpr int kBlockM = kWarpRows * kNumWarps, kBlockN = 64;  // B_r, B_c
  static_assert(kBlockN % 16 == 0 && kHeadDim % 16 == 0, "warps own whole products");
};

// The swizzled offset of element (row, col) of a tile [rows, kHeadDim]: its 16-byte chunks are exchanged among
// themselves, so that those of 8 rows in one column lie in 8 groups of 4 banks.
//! [swizzle]
template <int kHeadDim>
__host__ __device__ constexpr int swizzled_offset(int row, int col) {
  constexpr int kChunks = kHeadDim / 8;  // 4, 8 or 16 a row
  const int phase = kChunks >= 8 ? row % 8 : row / 2 % 4;
  return row * kHeadDim + ((col / 8) ^ phase) * 8 + col % 8;
}
//! [swizzle]

// The very addresses of the three ldmatrix below: Q and V, K.
//! [proof]
template <int kHeadDim>
constexpr bool free_of_conflicts() {
  for (int col = 0; col < kHeadDim; col += 16)
    if (ldmatrix_access([=](int l) { return 2 * swizzled_offset<kHeadDim>(l % 16, col + l / 16 * 8); }, 4).conflicts() > 0 ||
        ldmatrix_access([=](int l) { return 2 * swizzled_offset<kHeadDim>(l / 16 * 8 + l % 8, col + l / 8 % 2 * 8); }, 4)
                .conflicts() > 0)
      return false;
  return true;
}
static_assert(free_of_conflicts<32>() && free_of_conflicts<64>() && free_of_conflicts<128>());
//! [proof]

// Stands for -inf where nothing was seen. It is finite, so that differences are numbers.
constexpr float kNothing = -3.4028234e38f;

template <class Element, class Config>
struct SharedStorage {
  alignas(128) Element sK[Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sV[Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sQ[Config::kBlockM * Config::kHeadDim];  // [kBlockM, d]
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ)
};

// Starts to copy rows [row0, row0 + kRows) of a [rows, d] matrix; what lies beyond its end becomes 0.
template <int kRows, class Config, class Element>
__device__ void load_tile(Element* tile, const Element* g, int row0, int rows) {
  constexpr int kVectors = Config::kHeadDim / 8;  // of 16 bytes, a row
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kVectors; i += Config::kThreads) {
    const int r = i / kVectors, c = i % kVectors * 8;
    const bool inside = row0 + r < rows;
    cp_async_16(tile + swizzled_offset<Config::kHeadDim>(r, c),
                inside ? g + int64_t{row0 + r} * Config::kHeadDim + c : g, inside ? 16 : 0);
  }
}

// Blocks of keys: some row of [row0, row0 + rows) sees something of [begin, end), and every row sees all of
// [unmasked_begin, unmasked_end).
//! [ranges]
struct BlockRanges {
  int begin, unmasked_begin, unmasked_end, end;
};
__device__ BlockRanges blocks_seen(const Shape& shape, int row0, int rows, int block_n) {
  const int last = min(row0 + rows, shape.seqlen_q) - 1, shift = shape.seqlen_k - shape.seqlen_q;
  const int begin = max(0, row0 + shift - shape.window_left);
  const int end = min(shape.seqlen_k, last + shift + shape.window_right + 1);
  if (end <= begin) return {0, 0, 0, 0};  // O = 0 and lse = -inf for all
  const int all_begin = max(0, last + shift - shape.window_left);  // what the last row sees first ...
  const int all_end = min(shape.seqlen_k, row0 + shift + shape.window_right + 1);  // ... and the first row last
  BlockRanges seen{begin / block_n, ceil_div(all_begin, block_n), all_end / block_n, ceil_div(end, block_n)};
  seen.unmasked_begin = min(seen.unmasked_begin, seen.end);
  seen.unmasked_end = max(seen.unmasked_begin, seen.unmasked_end);
  return seen;
}
//! [ranges]

__device__ __forceinline__ float quad_max(float x) {  // over the 4 lanes that share a row
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// (3) S = Q K^T for the 16 rows of this warp.
//! [scores]
template <class Config, class Element>
__device__ __forceinline__ void scores(float (&s)[Config::kBlockN / 8][4], const Element* sQ, const Element* sK) {
  const int lane_id = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < Config::kHeadDim; k += 16) {
    uint32_t a[4], b[4];
    ldmatrix_x4(a, sQ + swizzled_offset<Config::kHeadDim>(lane_id % 16, k + lane_id / 16 * 8));
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; n += 2) {  // two products of 8 keys at once
      ldmatrix_x4(b, sK + swizzled_offset<Config::kHeadDim>(8 * n + lane_id / 16 * 8 + lane_id % 8, k + lane_id / 8 % 2 * 8));
      mma_m16n8k16<Element>(s[n], a, {b[0], b[1]}, s[n]);
      mma_m16n8k16<Element>(s[n + 1], a, {b[2], b[3]}, s[n + 1]);
    }
  }
}
//! [scores]

// (5) O += P V for the 16 rows of this warp. Two neighbouring accumulators of the first product, rounded in pairs,
// are an operand of the second.
//! [output]
template <class Config, class Element>
__device__ __forceinline__ void output(float (&o)[Config::kHeadDim / 8][4],
                                       const float (&s)[Config::kBlockN / 8][4], const Element* sV) {
  const int lane_id = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < Config::kBlockN / 8; k += 2) {  // 16 keys
    const uint32_t a[4] = {pack2<Element>(s[k][0], s[k][1]), pack2<Element>(s[k][2], s[k][3]),
                           pack2<Element>(s[k + 1][0], s[k + 1][1]), pack2<Element>(s[k + 1][2], s[k + 1][3])};
#pragma unroll
    for (int n = 0; n < Config::kHeadDim / 8; n += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, sV + swizzled_offset<Config::kHeadDim>(8 * k + lane_id % 16, 8 * n + lane_id / 16 * 8));
      mma_m16n8k16<Element>(o[n], a, {b[0], b[1]}, o[n]);
      mma_m16n8k16<Element>(o[n + 1], a, {b[2], b[3]}, o[n + 1]);
    }
  }
}
//! [output]

// Sets to 0 what dropout drops of row `row`, half `r` of the accumulators: 16 bytes of Philox for 64 keys.
template <class Config>
__device__ __forceinline__ void drop(float (&s)[Config::kBlockN / 8][4], int r, uint64_t seed, int64_t bh, int row,
                                     int key0, int dropped) {
#pragma unroll
  for (int first = 0; first < Config::kBlockN; first += 64) {
    const PhiloxBits bits = dropout_bits(seed, bh, row, (key0 + first) / 64, threadIdx.x % 4);
    const int skipped = Config::kBlockN % 64 == 0 ? 0 : key0 % 64 / 4;  // bytes of the keys before
#pragma unroll
    for (int i = 0; i < 16 && first + i * 4 < Config::kBlockN; ++i)
      if (bits.byte(skipped + i) < static_cast<uint32_t>(dropped)) s[first / 8 + i / 2][2 * r + i % 2] = 0;
  }
}

template <class Element, class Config, bool kDropout>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_kernel(const Element* gQ,  // [B, Hq, seqlen_q, d]
                     const Element* gK,  // [B, Hkv, seqlen_k, d]
                     const Element* gV,  // [B, Hkv, seqlen_k, d]
                     Element* gO,        // [B, Hq, seqlen_q, d]
                     float* gLse,        // [B, Hq, seqlen_q]
                     Shape shape, uint64_t seed, int num_m_blocks, int num_heads) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kWarpRows = Config::kWarpRows;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int quad_row = lane_id / 4, quad_col = 2 * (lane_id % 4);  // place in an accumulator
  const int m_block = num_m_blocks - 1 - blockIdx.x / num_heads;  // those with the most keys first
  const int64_t bh = blockIdx.x % num_heads, bh_kv = bh / (shape.heads / shape.kv_heads);
  const int64_t q0 = bh * shape.seqlen_q;  // first row of this head
  const Element* q = gQ + q0 * kHeadDim;
  const Element* k = gK + bh_kv * shape.seqlen_k * kHeadDim;
  const Element* v = gV + bh_kv * shape.seqlen_k * kHeadDim;
  const int shift = shape.seqlen_k - shape.seqlen_q;
  const float softmax_scale_log2 = shape.softmax_scale * 1.44269504f;  // log2(e)
  const int row0 = m_block * kBlockM, warp_row0 = row0 + kWarpRows * warp_id;
  // Row of this thread: its half r of the accumulators.
  const auto row = [&](int r) { return warp_row0 + 8 * r + quad_row; };

  const BlockRanges seen = blocks_seen(shape, row0, kBlockM, kBlockN);

  // (1) load Q_i, which stays, and the first K_j
  load_tile<kBlockM, Config>(smem.sQ, q, row0, shape.seqlen_q);
  if (seen.begin < seen.end) load_tile<kBlockN, Config>(smem.sK, k, seen.begin * kBlockN, shape.seqlen_k);
  cp_async_commit();
  float o[kHeadDim / 8][4] = {};  // not divided by l yet
  float row_max[2] = {kNothing, kNothing};  // times c: to base 2
  float row_sum[2] = {0, 0};                // of this lane's keys

  // One block of keys. `masked` is a type, so that the plain body has no trace of a mask.
  const auto visit = [&](int n_block, auto masked) {
    // (2) V_j is on its way during Q K^T. Of the groups of copies only the newest one is ever under way, so that
    // both waits are for all of them.
    //! [pipeline]
    cp_async_wait<0>();
    __syncthreads();  // K_j of all threads is there; all are done with V_j-1
    load_tile<kBlockN, Config>(smem.sV, v, n_block * kBlockN, shape.seqlen_k);
    cp_async_commit();
    //! [pipeline]

    // (3) S = Q K^T, -inf where a query does not see a key.
    const int key0 = n_block * kBlockN;
    float s[kBlockN / 8][4] = {};
    scores<Config>(s, smem.sQ + kWarpRows * warp_id * kHeadDim, smem.sK);
    if constexpr (masked.value) {
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = key0 + 8 * n + quad_col + i % 2, own = row(i / 2) + shift;
          if (key < own - shape.window_left || key > own + shape.window_right || key >= shape.seqlen_k)
            s[n][i] = -INFINITY;
        }
    }

    // K_j+1 is on its way during softmax and P V.
    //! [pipeline_k]
    cp_async_wait<0>();
    __syncthreads();  // V_j of all threads is there; all are done with K_j
    if (n_block + 1 < seen.end)
      load_tile<kBlockN, Config>(smem.sK, k, (n_block + 1) * kBlockN, shape.seqlen_k);
    cp_async_commit();
    //! [pipeline_k]

    // (4) softmax, all of it in the quad of lanes that share a row.
    //! [softmax]
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float max = -INFINITY, sum = 0;
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n) max = fmaxf(max, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
      max = fmaxf(row_max[r], quad_max(max) * softmax_scale_log2);
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& p = s[n][2 * r + c];
          p = exp2f(fmaf(p, softmax_scale_log2, -max));
          sum += p;
        }
      const float rescale = exp2f(row_max[r] - max);
      row_max[r] = max;
      row_sum[r] = row_sum[r] * rescale + sum;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) o[n][2 * r] *= rescale, o[n][2 * r + 1] *= rescale;
      if constexpr (kDropout)  // the sum keeps what O loses
        drop<Config>(s, r, seed, bh, row(r), key0, shape.dropped);
    }
    //! [softmax]

    // (5) O += P V
    output<Config>(o, s, smem.sV);
  };
  //! [loops]
  int n_block = seen.begin;
  for (; n_block < seen.unmasked_begin; ++n_block) visit(n_block, std::true_type{});   // left edge of the window
  for (; n_block < seen.unmasked_end; ++n_block) visit(n_block, std::false_type{});
  for (; n_block < seen.end; ++n_block) visit(n_block, std::true_type{});  // diagonal, right edge, last keys
  //! [loops]

  // (7) O = O / l, once; (8) store O and lse
  //! [finish]
  const float inverse_kept = kDropout ? 1 / (1 - float(shape.dropped) / 256) : 1;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_sum[r] = quad_sum(row_sum[r]);
    if (row(r) >= shape.seqlen_q) continue;
    const float factor = row_sum[r] > 0 ? inverse_kept / row_sum[r] : 0;  // a row that sees nothing: O = 0
    Element* const to = gO + (q0 + row(r)) * kHeadDim + quad_col;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
      *reinterpret_cast<uint32_t*>(to + 8 * n) = pack2<Element>(o[n][2 * r] * factor, o[n][2 * r + 1] * factor);
    if (quad_col == 0) gLse[q0 + row(r)] = row_sum[r] > 0 ? 0.693147181f * row_max[r] + logf(row_sum[r]) : -INFINITY;
  }
  //! [finish]
}

template <class Element, class Config, bool kDropout>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  if (args.plans({Config::kBlockM, Config::kBlockN, p.heads * p.batch})) return Status::success();
  const int64_t num_m_blocks = ceil_div(p.seqlen_q, Config::kBlockM);
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config, kDropout>,
                       dim3(static_cast<unsigned>(num_m_blocks * p.heads * p.batch)), dim3(Config::kThreads),
                       sizeof(SharedStorage<Element, Config>), args.stream, args.in<Element>("q"),
                       args.in<Element>("k"), args.in<Element>("v"), args.out<Element>("o"),
                       args.out<float>("lse"), shape_of(p), p.seed, static_cast<int>(num_m_blocks),
                        static_cast<int>(p.heads * p.batch));
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
    return Status::unsupported("head dims 32, 64 and 128 alone");
  });
}

}  // namespace ATTN_BACKEND::v6_causal_skip
