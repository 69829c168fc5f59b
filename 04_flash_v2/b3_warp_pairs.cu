// b3_warp_pairs: two warps share 32 keys; one computes P and dV, the other dS and dK.
//
// parent    b2_transposed
// change    For the same 32 keys, the first warp of a pair computes S^T, P^T and dV, the second
//           dP^T, dS^T and dK. Since dS^T needs P^T, the first warp passes it on once per query
//           tile, through shared memory in fragment order; the second waits at a named barrier of
//           64 threads.
// why       A warp that computes both S^T and dP^T has registers for 16 keys only. With 32 keys
//           each fragment of Q or dO that it loads feeds four MMAs instead of two.
// expect    fewer shared-memory loads: l1tex__data_pipe_lsu_wavefronts_mem_shared.sum falls
// supports  fp16, bf16; head dims 32, 64, 128; any lengths, packed sequences, masks, GQA
#include "attn/kernel.h"
#include "kernels/backward_tiles.h"
#include "ptx/cp_async.h"
#include "ptx/mma.h"
#include "ptx/named_barrier.h"
#include "ptx/reduce_add.h"

namespace ATTN_BACKEND::b3_warp_pairs {
using namespace backward_tiles;

//! [config]
// From Tile, in kernels/backward_tiles.h: kRowSteps (MMA steps over the rows of a query tile),
// kQueryWarpsM (warps along the rows of dQ), kQueryRows and kQueryCols (a warp's part of dQ),
// kFragments (its float4 per thread), kRowBytes (of K), kSwizzleChunks (chunks per swizzle span).
template <int kHeadDim>
struct Config : Tile<kHeadDim, kHeadDim == 128 ? 64 : 128, 128, 8> {
  static constexpr int kWarpKeys = 32, kKeyTiles = kWarpKeys / 16;
  // pairs of warps that share their keys
  static constexpr int kNumPairs = Config::kBlockN / kWarpKeys;
  static constexpr int kStages = 2;  // stages of Q and dO: one tile ahead
  // One named barrier per pair: a block has 16, and __syncthreads uses number 0.
  static_assert(2 * kNumPairs == Config::kNumWarps && kNumPairs <= 15, "one barrier per pair");
};
//! [config]

template <class Element, class Config>
struct SharedStorage {
  alignas(128) Element sK[Config::kBlockN * Config::kHeadDim];                    // [kBlockN, d]
  alignas(128) Element sV[Config::kBlockN * Config::kHeadDim];                    // [kBlockN, d]
  alignas(128) Element sQ[Config::kStages][Config::kBlockM * Config::kHeadDim];   // [kBlockM, d]
  alignas(128) Element sdO[Config::kStages][Config::kBlockM * Config::kHeadDim];  // [kBlockM, d]
  alignas(128) Element sdS[Config::kBlockN * Config::kBlockM];                    // dS^T
  // P^T per pair, in fragment order.
  alignas(128) uint4 sP[Config::kNumPairs][Config::kKeyTiles * Config::kRowSteps][32];
  alignas(16) float sRow[Config::kStages][2][Config::kBlockM];  // per row: lse / log(2), and D
  Sequence sequence;  // in shared memory to save registers
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sdO, sdS, sP, sRow, sequence)
};

// (4) -inf where masked. `row_minus_col`: the key on the diagonal of this lane's first row, minus
// this lane's first key. `keys`: number of keys of the sequence from that key on.
//! [mask]
template <class Config>
__device__ __forceinline__ void apply_mask(float (&s)[Config::kKeyTiles][Config::kBlockM / 8][4],
                                           const Shape& shape, int row_minus_col, int keys) {
#pragma unroll
  for (int m = 0; m < Config::kKeyTiles; ++m)
#pragma unroll
    for (int n = 0; n < Config::kBlockM / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = 16 * m + 8 * (e / 2), row = 8 * n + e % 2;  // relative to this lane's first
        if (key - row < row_minus_col - shape.window_left ||
            key - row > row_minus_col + shape.window_right || key >= keys)
          s[m][n][e] = -INFINITY;
      }
}
//! [mask]

// (4) P^T = exp(scale S^T - lse), rounded: A operand of dV, and stored for the pair's other warp.
// `sLse` is at this lane's first row.
//! [recompute]
template <class Element, class Config>
__device__ __forceinline__ void probabilities(
    uint32_t (&operand)[Config::kKeyTiles][Config::kRowSteps][4],
    const float (&s)[Config::kKeyTiles][Config::kBlockM / 8][4], const float* sLse, uint4* sP,
    const Shape& shape) {
  const float softmax_scale_log2 = shape.softmax_scale * kLog2e;
#pragma unroll
  for (int k = 0; k < Config::kRowSteps; ++k)
#pragma unroll
    for (int m = 0; m < Config::kKeyTiles; ++m) {
      uint32_t(&p)[4] = operand[m][k];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 lse_log2 = *reinterpret_cast<const float2*>(sLse + 16 * k + 8 * (e / 2));
        const float* const x = s[m][2 * k + e / 2] + 2 * (e % 2);
        p[e] = pack2<Element>(exp2f(fmaf(x[0], softmax_scale_log2, -lse_log2.x)),
                              exp2f(fmaf(x[1], softmax_scale_log2, -lse_log2.y)));
      }
      sP[(m * Config::kRowSteps + k) * 32] = uint4{p[0], p[1], p[2], p[3]};
    }
}

// dS^T = P^T (dP^T - D), rounded: A operand of dK, and stored for dQ. `sDot`: D, at this lane's
// first row; `lane_offset`: byte offset of this lane's first element of dS^T.
template <class Element, class Config>
__device__ __forceinline__ void score_gradients(
    uint32_t (&operand)[Config::kKeyTiles][Config::kRowSteps][4],
    const float (&dp)[Config::kKeyTiles][Config::kBlockM / 8][4], const float* sDot,
    const uint4* sP, char* sdS, int lane_offset) {
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
          ds[c] = unpack<Element>(p[e], c) * (x - d);
        }
        operand[m][k][e] = pack2<Element>(ds[0], ds[1]);
        *reinterpret_cast<uint32_t*>(
            sdS + swizzle_advance<Config::kBlockM>(lane_offset, 16 * k + 8 * (e / 2)) +
            (16 * m + 8 * (e % 2)) * 2 * Config::kBlockM) = operand[m][k][e];
      }
    }
}
//! [recompute]

// Phases: (1) is dot_kernel, (2) to (7) are here, with (6) as a lambda, (8) is convert_kernel.
// (1) and (8): kernels/backward_tiles.h.
template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads)
    attention_backward_kernel(const Element* gQ,   // [B, Hq, seqlen_q, d], or packed: see Packing
                              const Element* gK,   // [B, Hkv, seqlen_k, d]
                              const Element* gV,   // [B, Hkv, seqlen_k, d]
                              const Element* gdO,  // [B, Hq, seqlen_q, d]
                              const float* gRows,  // [tiles, 2, kBlockM]: lse / log(2), D
                              Element* gdK,        // [B, Hkv, seqlen_k, d]
                              Element* gdV,        // [B, Hkv, seqlen_k, d]
                              float4* gAccum,      // [tiles, fragments, threads]: dQ
                              Shape shape, Packing packing, int num_kv_heads) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kKeyTiles = Config::kKeyTiles, kSwizzleChunks = Config::kSwizzleChunks,
                kStages = Config::kStages;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int quad_row = lane_id / 4, quad_col = 2 * (lane_id % 4);  // position in an accumulator
  // Two warps share their keys. The first owns P and dV, the second dS and dK.
  const int pair = warp_id % Config::kNumPairs, warp_key = pair * Config::kWarpKeys;
  const bool owns_p = warp_id < Config::kNumPairs;
  const int key0 = blockIdx.x / num_kv_heads * kBlockN, group = shape.heads / shape.kv_heads;
  const int64_t first_bh = int64_t{blockIdx.x % num_kv_heads} * group;
  Sequence sequence = sequence_of(shape, packing, first_bh, kHeadDim, kBlockM);
  const int seqlen_q = sequence.seqlen_q, seqlen_k = sequence.seqlen_k;
  if (key0 >= seqlen_k) return;  // the batch has longer sequences

  // Visits: for each query head that shares this key tile, the query tiles to which one of its keys
  // is visible.
  const KvBlockRange q_range = q_block_range(shape, seqlen_q, seqlen_k, key0, kBlockN, kBlockM);
  const int blocks = q_range.end - q_range.begin, visits = group * blocks;
  struct Visit {
    int head, m_block;  // head: within the group
  };
  const auto advance = [&](Visit& visit) {
    if (++visit.m_block == q_range.end) visit.m_block = q_range.begin, ++visit.head;
  };
  const int64_t head_stride =
      packing.cu_seqlens_q == nullptr ? int64_t{seqlen_q} * kHeadDim : kHeadDim;
  const auto tile_of = [&](const Visit& visit) {
    return visit.head * packing.num_tiles + visit.m_block;
  };
  // This thread's first chunk in each tile that it copies.
  const int copy_row = threadIdx.x / kSwizzleChunks, chunk = threadIdx.x % kSwizzleChunks * 8;
  const auto load_rows = [&](const Visit& visit, int stage) {
    const int row0 = visit.m_block * kBlockM;
    const int64_t first =
        sequence.q + visit.head * head_stride + int64_t{row0 + copy_row} * packing.q_stride + chunk;
    load_tile<kBlockM, Config>(smem.sQ[stage], gQ + first, packing.q_stride, seqlen_q - row0);
    load_tile<kBlockM, Config>(smem.sdO[stage], gdO + first, packing.q_stride, seqlen_q - row0);
    const float* const rows = gRows + (sequence.tile + tile_of(visit)) * (2 * kBlockM);
    if (threadIdx.x < kBlockM / 2)
      cp_async_16(&smem.sRow[stage][0][0] + 4 * threadIdx.x, rows + 4 * threadIdx.x);
  };

  // (2) Issue K_j, V_j and the first rows.
  Visit visit{0, q_range.begin}, next = visit;
  const int64_t first = sequence.kv + int64_t{key0 + copy_row} * packing.kv_stride + chunk;
  load_tile<kBlockN, Config>(smem.sK, gK + first, packing.kv_stride, seqlen_k - key0);
  load_tile<kBlockN, Config>(smem.sV, gV + first, packing.kv_stride, seqlen_k - key0);
  for (int stage = 0; stage < kStages; ++stage) {
    if (stage < visits) load_rows(next, stage), advance(next);
    cp_async_commit();
  }
  float grad[kKeyTiles][kHeadDim / 8][4] = {};  // dV or dK
  // This lane's byte offset of a row for ldmatrix.x4, in a block of 16 rows by 16 columns, four
  // 8 x 8 matrices. by_rows: the two left ones first (A operand; B by .trans). by_cols: the two
  // upper ones first (B of two MMAs). ds_load: as by_cols, for dS^T with rows of kBlockM (A by
  // .trans). ds_store: this lane's first accumulator element in dS^T.
  const int by_rows = 2 * swizzled_offset<kHeadDim>(lane_id % 16, lane_id / 16 * 8);
  const int by_cols =
      2 * swizzled_offset<kHeadDim>(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2 * 8);
  const int ds_load =
      2 * swizzled_offset<kBlockM>(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2 * 8);
  const int ds_store = 2 * (warp_key * kBlockM + swizzled_offset<kBlockM>(quad_row, quad_col));
  uint4* const sP = &smem.sP[pair][0][lane_id];
  // First row and column of this warp's part of dQ.
  const int query_row = warp_id % Config::kQueryWarpsM * Config::kQueryRows;
  const int query_col = warp_id / Config::kQueryWarpsM * Config::kQueryCols;
  char* const sKeys =
      reinterpret_cast<char*>(owns_p ? smem.sK : smem.sV) + warp_key * Config::kRowBytes;
  // (6) dQ += dS K
  //! [dq]
  const auto add_dq = [&](int tile) {
    float dq[Config::kQueryRows / 16][Config::kQueryCols / 8][4] = {};
    multiply_ab<Element, kBlockN, true, kBlockM, kHeadDim>(
        dq, reinterpret_cast<const char*>(smem.sdS), ds_load, query_row,
        reinterpret_cast<const char*>(smem.sK), by_rows, query_col);
    float4* const accum = gAccum + (sequence.tile + tile) * (kBlockM * kHeadDim / 4) + threadIdx.x;
#pragma unroll
    for (int f = 0; f < Config::kFragments; ++f) {
      const auto& x = dq[f / (Config::kQueryCols / 8)][f % (Config::kQueryCols / 8)];
      reduce_add(accum + f * Config::kThreads, make_float4(x[0], x[1], x[2], x[3]));
    }
  };
  //! [dq]
  if (threadIdx.x == 0) smem.sequence = sequence;
  cp_async_wait<kStages - 1>();
  __syncthreads();  // K, V and the first rows are visible

  for (int i = 0; i < visits; ++i, advance(visit)) {
    const int stage = i % kStages;
    const char* const sQ = reinterpret_cast<const char*>(smem.sQ[stage]);
    const char* const sdO = reinterpret_cast<const char*>(smem.sdO[stage]);
    char* const sdS = reinterpret_cast<char*>(smem.sdS);
    // (3) S^T = K Q^T or dP^T = V dO^T
    float s[kKeyTiles][kBlockM / 8][4] = {};
    multiply_abt<Element, kHeadDim>(s, sKeys, by_rows, owns_p ? sQ : sdO, by_cols);

    // (4) P^T = exp(scale S^T - lse), dS^T = P^T (dP^T - D), as A operands
    uint32_t operand[kKeyTiles][Config::kRowSteps][4];
    const float* const rows = smem.sRow[stage][owns_p ? 0 : 1] + quad_col;
    if (owns_p) {
      const int row = visit.m_block * kBlockM + quad_col, key = key0 + warp_key + quad_row;
      if (visit.m_block < q_range.unmasked_begin || visit.m_block >= q_range.unmasked_end)
        apply_mask<Config>(s, shape, row + seqlen_k - seqlen_q - key, seqlen_k - key);
      probabilities<Element, Config>(operand, s, rows, sP, shape);
      named_barrier_sync(1 + pair, 64);  // releases P to the other warp
    } else {
      named_barrier_sync(1 + pair, 64);  // P has arrived
      score_gradients<Element, Config>(operand, s, rows, sP, sdS, ds_store);
    }

    // (5) dV += P^T dO or dK += dS^T Q
    multiply_ab<Element>(grad, operand, owns_p ? sdO : sQ, by_rows);
    cp_async_wait<kStages - 2>();  // the next rows, issued one visit ago
    __syncthreads();  // dS and the next rows are visible; all warps have read these rows
    if (i + kStages < visits) {
      Visit coming = visit;
      sequence = smem.sequence;
      for (int ahead = 0; ahead < kStages; ++ahead) advance(coming);
      load_rows(coming, stage);
    }
    cp_async_commit();

    add_dq(tile_of(visit));
    __syncthreads();  // all warps have read dS
  }

  // (7) Store dK_j or dV_j through this warp's rows of K or V.
  cp_async_wait<0>();
  __syncthreads();  // all warps have read K
  const Sequence seq = sequence_of(shape, packing, first_bh, kHeadDim, kBlockM);
  store_gradient<Element, Config>(
      (owns_p ? gdV : gdK) + seq.kv + int64_t{key0 + warp_key} * packing.kv_stride,
      packing.kv_stride, seq.seqlen_k - key0 - warp_key, grad, owns_p ? 1 : shape.softmax_scale,
      sKeys);
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const BackwardParams<Element> params(args);
  const Problem& p = args.problem;
  const Packing packing = packing_of<Config>(args);
  // Grid of dot_kernel and convert_kernel: a block per query tile.
  const dim3 all_rows(static_cast<unsigned>(packing.num_m_blocks * p.batch * p.heads));
  const dim3 grid(static_cast<unsigned>(packing.num_n_blocks * p.batch * p.kv_heads));
  args.phase("dot");
  Status status = launch_kernel(dot_kernel<Element, Config>, all_rows, dim3(256), 0, args.stream,
                                params.o, params.dout, params.lse, args.out<float>("rows"),
                                args.out<float4>("accum"), shape_of(p), packing);
  if (!status.ok()) return status;
  args.phase("attention_backward");
  status = launch_kernel(attention_backward_kernel<Element, Config>, grid, dim3(Config::kThreads),
                         sizeof(SharedStorage<Element, Config>), args.stream, params.q, params.k,
                         params.v, params.dout, args.in<float>("rows"), params.dk, params.dv,
                         args.out<float4>("accum"), shape_of(p), packing,
                         static_cast<int>(p.batch * p.kv_heads));
  if (!status.ok()) return status;
  args.phase("convert");
  return launch_kernel(convert_kernel<Element, Config>, all_rows, dim3(Config::kThreads), 0,
                       args.stream, args.in<float4>("accum"), params.dq, shape_of(p), packing);
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    switch (args.problem.head_dim) {
      case 32: return launch<Element, Config<32>>(args);
      case 64: return launch<Element, Config<64>>(args);
      case 128: return launch<Element, Config<128>>(args);
    }
    return Status::unsupported("head dims 32, 64 and 128 only");
  });
}

}  // namespace ATTN_BACKEND::b3_warp_pairs
