// b2_tuned: the warps share out P and dS; P stays in registers.
//
// parent    b1_kv_parallel
// idea      The scores are computed transposed, S^T = K Q^T, so that P^T and dS^T, rounded, are operands of dV = P^T dO
//           and dK = dS^T Q where they stand. Half of the warps own P and dV, the other half dS and dK, of the same
//           keys: a pair meets once a tile, at a barrier of its own, when P changes hands. The block shares dS alone,
//           for dQ. Two stages of it, and of Q and dO, need one barrier of the block a tile instead of two.
//           Those who own dS add to dQ at once, the others a tile later, after dV: so the exponentials of one half run
//           beside products of the other. Blocks of a head begin at different rows: fewer additions to the same dQ.
//           What a warp does with a tile is in backward_products.h; here is who does it, and when.
// expect    Traffic of shared memory (l1tex__data_pipe_lsu_wavefronts_mem_shared.sum) falls by a fifth, stalls at
//           barriers (smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio) by half.
// supports  fp16, bf16; head dims 32, 64, 96, 128, 192, 256; any lengths, packed sequences, masks, GQA, softcap,
//           dropout
#include "attn/kernel.h"
#include "backward_parts.h"
#include "backward_products.h"
#include "backward_tiles.h"
#include "ptx/named_barrier.h"
#include "ptx/reduce_add.h"

namespace ATTN_BACKEND::b2_tuned {
using namespace backward_tiles;

template <class Element, class Config>
struct SharedStorage {
  alignas(128) Element sK[Config::kBlockN * Config::kHeadDim];                    // [kBlockN, d]
  alignas(128) Element sV[Config::kBlockN * Config::kHeadDim];                    // [kBlockN, d]
  alignas(128) Element sQ[Config::kStages][Config::kBlockM * Config::kHeadDim];   // [kBlockM, d]
  alignas(128) Element sdO[Config::kStages][Config::kBlockM * Config::kHeadDim];  // [kBlockM, d]
  alignas(128) Element sdS[Config::kBuffers][Config::kBlockN * Config::kBlockM];  // dS^T: [kBlockN, kBlockM]
  alignas(128) uint4 sP[Config::kPairs][Config::kKeyTiles * Config::kRowSteps][32];  // operands, as lanes hold them
  alignas(16) float sRow[Config::kStages][2][Config::kBlockM];  // of a row: lse / log(2), and D
  Sequence sequence;  // here, where it costs no registers
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sdO, sdS, sP, sRow, sequence)
};

template <class Element, class Config, bool kFeatures>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    attention_backward_kernel(const Element* gQ,   // [B, Hq, seqlen_q, d], or packed: see Packing
                              const Element* gK,   // [B, Hkv, seqlen_k, d]
                              const Element* gV,   // [B, Hkv, seqlen_k, d]
                              const Element* gdO,  // [B, Hq, seqlen_q, d]
                              const float* gRows,  // [tiles, 2, kBlockM]: lse / log(2), D
                              Element* gdK,        // [B, Hkv, seqlen_k, d]
                              Element* gdV,        // [B, Hkv, seqlen_k, d]
                              float4* gAccum,      // [tiles, fragments, threads]: dQ
                              Shape shape, Packing packing, uint64_t seed, int num_kv_heads, int section) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kKeyTiles = Config::kKeyTiles, kSpan = Config::kSpan;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int quad_row = lane_id / 4, quad_col = 2 * (lane_id % 4);  // place in an accumulator
  // A pair of warps has the same keys. The first of them owns P and dV, the second dS and dK.
  const int pair = warp_id % Config::kPairs, warp_key = pair * Config::kWarpKeys;
  const bool owns_p = warp_id < Config::kPairs;
  // Heads come in sections. In one, the keys that a causal mask leaves the most rows begin first, those of all heads.
  const int first_head = blockIdx.x / (section * packing.num_n_blocks) * section;
  const int heads = min(section, num_kv_heads - first_head), turn = blockIdx.x - first_head * packing.num_n_blocks;
  const int key0 = turn / heads * kBlockN, group = shape.heads / shape.kv_heads;
  const int64_t first_bh = int64_t{first_head + turn % heads} * group;
  Sequence sequence = sequence_of(shape, packing, first_bh, kHeadDim, kBlockM);
  const int seqlen_q = sequence.seqlen_q, seqlen_k = sequence.seqlen_k;
  if (key0 >= seqlen_k) return;  // of a batch with longer sequences

  // The visits: of each head that shares these keys, the blocks of rows that see one of them. Blocks of the same head
  // begin at different rows, so that they seldom add to the same rows of dQ at once.
  const BlockRanges seen = blocks_that_see(shape, seqlen_q, seqlen_k, key0, kBlockN, kBlockM);
  const int blocks = seen.end - seen.begin, visits = group * blocks;
  const int first_block = seen.begin + (Config::kRotate && blocks > 0 ? turn / heads * 4 % blocks : 0);
  struct Visit {
    int head, m_block;  // of the group
  };
  const auto advance = [&](Visit& visit) {
    if (++visit.m_block == seen.end) visit.m_block = seen.begin;
    if (visit.m_block == first_block) ++visit.head;
  };
  const int64_t head_step = packing.cu_seqlens_q == nullptr ? int64_t{seqlen_q} * kHeadDim : kHeadDim;
  const auto tile_of = [&](const Visit& visit) { return visit.head * packing.num_tiles + visit.m_block; };
  const int copy_row = threadIdx.x / kSpan, chunk = threadIdx.x % kSpan * 8;  // this thread's first of every tile
  const auto load_rows = [&](const Visit& visit, int stage) {
    const int row0 = visit.m_block * kBlockM;
    const int64_t first =
        sequence.q + visit.head * head_step + int64_t{row0 + copy_row} * packing.q_step + chunk;
    load_tile<kBlockM, Config>(smem.sQ[stage], gQ + first, packing.q_step, seqlen_q - row0);
    load_tile<kBlockM, Config>(smem.sdO[stage], gdO + first, packing.q_step, seqlen_q - row0);
    const float* const numbers = gRows + (sequence.tile + tile_of(visit)) * (2 * kBlockM);
    if (threadIdx.x < kBlockM / 2) cp_async_16(&smem.sRow[stage][0][0] + 4 * threadIdx.x, numbers + 4 * threadIdx.x);
  };

  // (2) load K_j, V_j and the first rows
  Visit visit{0, first_block}, next = visit;
  const int64_t first = sequence.kv + int64_t{key0 + copy_row} * packing.kv_step + chunk;
  load_tile<kBlockN, Config>(smem.sK, gK + first, packing.kv_step, seqlen_k - key0);
  load_tile<kBlockN, Config>(smem.sV, gV + first, packing.kv_step, seqlen_k - key0);
  for (int stage = 0; stage < Config::kStages; ++stage) {
    if (stage < visits) load_rows(next, stage), advance(next);
    cp_async_commit();
  }
  float grad[kKeyTiles][kHeadDim / 8][4] = {};  // dV or dK
  // This lane's chunks: of a row and of a column of operands, and of dS^T.
  const int by_rows = 2 * swizzled_offset<kHeadDim>(lane_id % 16, lane_id / 16 * 8);
  const int by_cols = 2 * swizzled_offset<kHeadDim>(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2 * 8);
  const int ds_load = 2 * swizzled_offset<kBlockM>(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2 * 8);
  const int ds_store = 2 * (warp_key * kBlockM + swizzled_offset<kBlockM>(quad_row, quad_col));
  uint4* const sP = &smem.sP[pair][0][lane_id];
  const int query_row = warp_id % Config::kQueryWarpsM * Config::kQueryRows;
  const int query_col = warp_id / Config::kQueryWarpsM * Config::kQueryCols;
  const char* const sKeys = reinterpret_cast<const char*>(owns_p ? smem.sK : smem.sV) + warp_key * Config::kRowBytes;
  // (6) dQ += dS K
  const auto add_dq = [&](int tile, int buffer) {
    float dq[Config::kQueryRows / 16][Config::kQueryCols / 8][4] = {};
    query_gradient<Element, Config>(dq, reinterpret_cast<const char*>(smem.sdS[buffer]), ds_load, query_row,
                                    reinterpret_cast<const char*>(smem.sK), by_rows, query_col);
    float4* const accum = gAccum + (sequence.tile + tile) * (kBlockM * kHeadDim / 4) + threadIdx.x;
#pragma unroll
    for (int f = 0; f < Config::kFragments; ++f) {
      const auto& x = dq[f / (Config::kQueryCols / 8)][f % (Config::kQueryCols / 8)];
      reduce_add(accum + f * Config::kThreads, make_float4(x[0], x[1], x[2], x[3]));
    }
  };
  const bool late = Config::kStagger && owns_p;
  int tile_before = 0;
  if (threadIdx.x == 0) smem.sequence = sequence;
  cp_async_wait<Config::kStages - 1>();
  __syncthreads();  // K, V and the first rows are there

  for (int i = 0; i < visits; ++i, advance(visit)) {
    const int stage = i % Config::kStages;
    const char* const sQ = reinterpret_cast<const char*>(smem.sQ[stage]);
    const char* const sdO = reinterpret_cast<const char*>(smem.sdO[stage]);
    char* const sdS = reinterpret_cast<char*>(smem.sdS[i % Config::kBuffers]);
    // (3) S^T = K Q^T or dP^T = V dO^T
    float s[kKeyTiles][kBlockM / 8][4] = {};
    scores<Element, Config>(s, sKeys, by_rows, owns_p ? sQ : sdO, by_cols);

    // (4) P = exp(scale S - lse), dS = P (dP - D), as operands
    uint32_t operand[kKeyTiles][Config::kRowSteps][4];
    const float* const numbers = smem.sRow[stage][owns_p ? 0 : 1] + quad_col;
    if (owns_p) {
      const int row = visit.m_block * kBlockM + quad_col, key = key0 + warp_key;  // of this lane, of this warp
      if (visit.m_block < seen.unmasked_begin || visit.m_block >= seen.unmasked_end)
        hide<Config>(s, shape, row + seqlen_k - seqlen_q - key - quad_row, seqlen_k - key - quad_row);
      probabilities<Element, Config, kFeatures>(operand, s, numbers, sP, shape, seed, first_bh + visit.head, row, key);
      named_barrier_sync(1 + pair, 64);  // the other warp may take P
    } else {
      named_barrier_sync(1 + pair, 64);  // P is there
      score_gradients<Element, Config, kFeatures>(operand, s, numbers, sP, sdS, ds_store,
                                                  1 / (1 - float(shape.dropped) / 256));
    }

    // (5) dV += P^T dO or dK += dS^T Q
    gradient<Element, Config>(grad, operand, owns_p ? sdO : sQ, by_rows);
    if (late && i > 0) add_dq(tile_before, (i - 1) % Config::kBuffers);  // beside dK of the others
    if constexpr (Config::kStages > 1) cp_async_wait<Config::kStages - 2>();
    __syncthreads();  // dS and the next rows are there; all are done with these rows, and with dQ of the tile before
    if (i + Config::kStages < visits) {
      Visit coming = visit;
      sequence = smem.sequence;
      for (int ahead = 0; ahead < Config::kStages; ++ahead) advance(coming);
      load_rows(coming, stage);
    }
    cp_async_commit();

    if (!late) add_dq(tile_of(visit), i % Config::kBuffers);
    tile_before = tile_of(visit);
    if constexpr (Config::kStages == 1 || Config::kBuffers == 1) {
      cp_async_wait<Config::kStages - 1>();
      __syncthreads();  // all are done with dS; with one stage: the next rows are there
    }
  }

  if (late && visits > 0) add_dq(tile_before, (visits - 1) % Config::kBuffers);

  // (7) store dK_j, dV_j through the rows of K or V that were this warp's
  cp_async_wait<0>();
  __syncthreads();  // all are done with K
  char* const sGrad = const_cast<char*>(sKeys);
  const float inverse_kept = kFeatures ? 1 / (1 - float(shape.dropped) / 256) : 1;
  const float factor = owns_p ? inverse_kept : shape.softmax_scale;
#pragma unroll
  for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        *reinterpret_cast<uint32_t*>(sGrad + along_row<kHeadDim>(2 * swizzled_offset<kHeadDim>(quad_row, quad_col), 8 * n) +
                                     (16 * m + 8 * r) * Config::kRowBytes) =
            pack2<Element>(grad[m][n][2 * r] * factor, grad[m][n][2 * r + 1] * factor);
  __syncwarp();  // all of the warp's rows are there
  Element* const g = owns_p ? gdV : gdK;
  const Sequence own = sequence_of(shape, packing, first_bh, kHeadDim, kBlockM);  // again: no register kept it
#pragma unroll
  for (int r = lane_id / kSpan; r < Config::kWarpKeys; r += 32 / kSpan)
#pragma unroll
    for (int c = lane_id % kSpan * 8; c < kHeadDim; c += 8 * kSpan)
      if (key0 + warp_key + r < own.seqlen_k)
        *reinterpret_cast<uint4*>(g + own.kv + int64_t{key0 + warp_key + r} * packing.kv_step + c) =
            *reinterpret_cast<const uint4*>(sGrad + 2 * swizzled_offset<kHeadDim>(r, c));
}

#ifndef ATTN_SWEEP  // sweep_backward.cu tries others
constexpr int64_t kSectionBytes = 24 << 20;  // of the 60 MB of an H200's L2
#endif

template <class Element, class Config, bool kFeatures>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const Packing packing = packing_of<Config>(args);
  const dim3 all_rows(static_cast<unsigned>(packing.num_m_blocks * p.batch * p.heads));
  args.phase("dot");
  Status status = launch_kernel(dot_kernel<Element, Config>, all_rows, dim3(256), 0, args.stream,
                                args.in<Element>("o"), args.in<Element>("do"), args.in<float>("lse"),
                                args.out<float>("rows"), args.out<float4>("accum"), shape_of(p), packing);
  if (!status.ok()) return status;
  args.phase("attention_backward");
  status = launch_kernel(attention_backward_kernel<Element, Config, kFeatures>,
                         dim3(static_cast<unsigned>(packing.num_n_blocks * p.batch * p.kv_heads)),
                         dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), args.stream,
                         args.in<Element>("q"), args.in<Element>("k"), args.in<Element>("v"), args.in<Element>("do"),
                         args.in<float>("rows"), args.out<Element>("dk"), args.out<Element>("dv"),
                         args.out<float4>("accum"), shape_of(p), packing, p.seed,
                         static_cast<int>(p.batch * p.kv_heads), static_cast<int>(heads_of_section(p, kSectionBytes)));
  if (!status.ok()) return status;
  args.phase("convert");
  return launch_kernel(convert_kernel<Element, Config>, all_rows, dim3(Config::kThreads), 0, args.stream,
                       args.in<float4>("accum"), args.out<Element>("dq"), shape_of(p), packing);
}

#ifndef ATTN_SWEEP  // sweep_backward.cu has its own tiles
template <class Element, int kHeadDim>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  // A scale that is 0 as a float, or denormal and taken for 0, would make its product with -inf no number.
  if (p.dropout > 0 || p.softcap > 0 || p.softmax_scale < 1e-37)
    return launch<Element, WithFeatures<kHeadDim>, true>(args);
  return launch<Element, Config<kHeadDim>, false>(args);
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    switch (args.problem.head_dim) {
      case 32: return launch<Element, 32>(args);
      case 64: return launch<Element, 64>(args);
      case 96: return launch<Element, 96>(args);
      case 128: return launch<Element, 128>(args);
      case 192: return launch<Element, 192>(args);
      case 256: return launch<Element, 256>(args);
    }
    return Status::unsupported("head dims 32, 64, 96, 128, 192 and 256 alone");
  });
}
#endif

}  // namespace ATTN_BACKEND::b2_tuned
