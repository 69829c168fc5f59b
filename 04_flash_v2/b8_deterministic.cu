// b8_deterministic: split dQ accumulators, reduced in a fixed order.
//
// parent    b7_tuned
// change    Each block adds to an accumulator of its own, a slice of dQ: one of num_slices per
//           head. It processes every num_slices-th key tile, one after the other, so all additions
//           to an address come from one thread in program order. The postprocess kernel reduces the
//           slices in order. num_slices depends on the problem, not on the GPU.
// why       A floating-point sum depends on its order, and the parent's atomics have none.
// expect    Memory: 4 d bytes per query head, query and slice, zeroed and read once
//           (dram__bytes_write.sum of dot_kernel). Time: this traffic, and fewer blocks than key
//           tiles, so SMs idle at the end.
// supports  fp16, bf16; head dims 32, 64, 96, 128, 192, 256; any lengths, packed sequences, masks,
//           GQA, softcap, dropout
#include "attn/kernel.h"
#include "kernels/backward_tiles.h"
#include "ptx/cp_async.h"
#include "ptx/mma.h"
#include "ptx/named_barrier.h"
#include "ptx/reduce_add.h"

namespace ATTN_BACKEND::b8_deterministic {
using namespace backward_tiles;

//! [config]
struct Tuning {
  int stages = 2;   // of Q and dO; 2: one tile ahead
  int buffers = 2;  // of dS; 1 needs a second block barrier per tile
  int blocks_per_sm = 1;
  bool stagger = true;  // the warps that own P add to dQ one tile later, after dV
};
// From Tile, in kernels/backward_tiles.h: kRowSteps (MMA steps over the rows of a query tile),
// kQueryWarpsM (warps along the rows of dQ), kQueryRows and kQueryCols (a warp's part of dQ),
// kFragments (its float4 per thread), kRowBytes (of K), kSwizzleChunks (chunks per swizzle span).
template <int kHeadDim, int kBlockM, int kBlockN, int kWarpKeys_, Tuning kTuning = Tuning{}>
struct Tuned : Tile<kHeadDim, kBlockM, kBlockN, 2 * kBlockN / kWarpKeys_> {
  static constexpr int kWarpKeys = kWarpKeys_, kKeyTiles = kWarpKeys / 16;
  static constexpr int kNumPairs = kBlockN / kWarpKeys;  // pairs of warps that share their keys
  static constexpr int kStages = kTuning.stages, kBuffers = kTuning.buffers;
  static constexpr int kBlocksPerSm = kTuning.blocks_per_sm;
  static constexpr bool kStagger = kTuning.stagger;
  static_assert(kWarpKeys % 16 == 0, "warps own whole MMAs");
  static_assert(!kStagger || (kStages > 1 && kBuffers > 1), "dS of two tiles");
  // One named barrier per pair: a block has 16, and __syncthreads uses number 0.
  static_assert(kNumPairs <= 15, "one barrier per pair");
};
// clang-format off
//                              d   M    N   keys of a pair
template <int kHeadDim> struct Config;
template <> struct Config<32> : Tuned<32, 128, 128, 32> {};
template <> struct Config<64> : Tuned<64, 64, 64, 32, Tuning{.blocks_per_sm = 3}> {};
template <> struct Config<96> : Tuned<96, 64, 128, 32> {};
template <> struct Config<128> : Tuned<128, 64, 128, 32> {};
template <> struct Config<192> : Tuned<192, 64, 64, 16> {};
template <> struct Config<256> : Tuned<256, 64, 64, 16, Tuning{.buffers = 1, .stagger = false}> {};
// Tiles with softcap or dropout, which take extra registers.
template <int kHeadDim> struct WithFeatures : Config<kHeadDim> {};
template <> struct WithFeatures<32> : Tuned<32, 64, 128, 32> {};
template <> struct WithFeatures<64> : Tuned<64, 64, 128, 32> {};
template <> struct WithFeatures<128> : Tuned<128, 32, 128, 32> {};
// clang-format on
//! [config]

template <class Element, class Config>
struct SharedStorage {
  alignas(128) Element sK[Config::kBlockN * Config::kHeadDim];                    // [kBlockN, d]
  alignas(128) Element sV[Config::kBlockN * Config::kHeadDim];                    // [kBlockN, d]
  alignas(128) Element sQ[Config::kStages][Config::kBlockM * Config::kHeadDim];   // [kBlockM, d]
  alignas(128) Element sdO[Config::kStages][Config::kBlockM * Config::kHeadDim];  // [kBlockM, d]
  alignas(128) Element sdS[Config::kBuffers][Config::kBlockN * Config::kBlockM];  // dS^T
  // P^T per pair, in fragment order.
  alignas(128) uint4 sP[Config::kNumPairs][Config::kKeyTiles * Config::kRowSteps][32];
  alignas(16) float sRow[Config::kStages][2][Config::kBlockM];  // per row: lse / log(2), and D
  Sequence sequence;  // in shared memory to save registers
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sdO, sdS, sP, sRow, sequence)
};

// (4) -inf where masked. `row_minus_col`: diagonal of this lane's first row, relative to its first
// key; `keys`: number of keys from that key on.
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
// With features the other warp gets P times the derivative of softcap, with a minus sign where
// dropout drops P. `sLse` and `row` are at this lane's first row; `key`: this warp's first key.
//! [recompute]
template <class Element, class Config, bool kFeatures>
__device__ __forceinline__ void probabilities(
    uint32_t (&operand)[Config::kKeyTiles][Config::kRowSteps][4],
    const float (&s)[Config::kKeyTiles][Config::kBlockM / 8][4], const float* sLse, uint4* sP,
    const Shape& shape, uint64_t seed, int64_t bh, int row, int key) {
  const float softmax_scale_log2 = shape.softmax_scale * kLog2e;
#pragma unroll
  for (int k = 0; k < Config::kRowSteps; ++k) {
    uint32_t bytes[2][2][Config::kKeyTiles];  // [rows 0-7, 8-15][row, row + 1][16 keys each]
    const bool drops = kFeatures && shape.dropped > 0;
    if (drops)
#pragma unroll
      for (int n = 0; n < 2; ++n) draw(bytes[n], seed, bh, row + 16 * k + 8 * n, key);
#pragma unroll
    for (int m = 0; m < Config::kKeyTiles; ++m) {
      uint32_t(&p)[4] = operand[m][k], given[4];  // given: stored for the pair's other warp
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
            // the byte of key + 8 * (e % 2), in bits 0 to 7 or 16 to 23
            if (drops &&
                (bytes[e / 2][c][m] >> 16 * (e % 2) & 255) < static_cast<uint32_t>(shape.dropped))
              f[c].p = 0, f[c].ds = -f[c].ds;
          p[e] = pack2<Element>(f[0].p, f[1].p);
          given[e] = pack2<Element>(f[0].ds, f[1].ds);
        }
      }
      sP[(m * Config::kRowSteps + k) * 32] = uint4{given[0], given[1], given[2], given[3]};
    }
  }
}

// dS^T = P^T (dP^T - D), rounded: A operand of dK, and stored for dQ. `sDot`: D, at this lane's
// first row; `lane_offset`: byte offset of this lane's first element of dS^T.
template <class Element, class Config, bool kFeatures>
__device__ __forceinline__ void score_gradients(
    uint32_t (&operand)[Config::kKeyTiles][Config::kRowSteps][4],
    const float (&dp)[Config::kKeyTiles][Config::kBlockM / 8][4], const float* sDot,
    const uint4* sP, char* sdS, int lane_offset, float inverse_keep) {
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
          ds[c] = !kFeatures ? factor * (x - d)
                             : fabsf(factor) * ((factor < 0 ? 0 : x * inverse_keep) - d);
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
template <class Element, class Config, bool kFeatures>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    attention_backward_kernel(const Element* gQ,   // [B, Hq, seqlen_q, d], or packed: see Packing
                              const Element* gK,   // [B, Hkv, seqlen_k, d]
                              const Element* gV,   // [B, Hkv, seqlen_k, d]
                              const Element* gdO,  // [B, Hq, seqlen_q, d]
                              const float* gRows,  // [tiles, 2, kBlockM]: lse / log(2), D
                              Element* gdK,        // [B, Hkv, seqlen_k, d]
                              Element* gdV,        // [B, Hkv, seqlen_k, d]
                              float4* gAccum,      // [slices, tiles, fragments, threads]: dQ
                              Shape shape, Packing packing, uint64_t seed, int num_kv_heads) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kKeyTiles = Config::kKeyTiles, kSwizzleChunks = Config::kSwizzleChunks,
                kStages = Config::kStages;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int quad_row = lane_id / 4, quad_col = 2 * (lane_id % 4);  // position in an accumulator
  // Two warps share their keys. The first owns P and dV, the second dS and dK.
  const int pair = warp_id % Config::kNumPairs, warp_key = pair * Config::kWarpKeys;
  const bool owns_p = warp_id < Config::kNumPairs;
  const int group = shape.heads / shape.kv_heads, slice = blockIdx.x / num_kv_heads;
  const int64_t first_bh = int64_t{blockIdx.x % num_kv_heads} * group;
  Sequence sequence = sequence_of(shape, packing, first_bh, kHeadDim, kBlockM);
  const int seqlen_q = sequence.seqlen_q, seqlen_k = sequence.seqlen_k;
  if (threadIdx.x == 0) smem.sequence = sequence;

  // The key tiles of this slice, one per pass (`part`). Every second pass reverses the order of the
  // slices, so that with a causal mask no slice always has the longest tile.
  for (int part = 0; part * packing.num_slices * kBlockN < seqlen_k; ++part) {
    const int index = part % 2 == 0 ? slice : packing.num_slices - 1 - slice;
    const int key0 = (part * packing.num_slices + index) * kBlockN;
    if (key0 >= seqlen_k) continue;
    // Visits: all query tiles that see a key of this tile, of all query heads that share it.
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
      const int64_t first = sequence.q + visit.head * head_stride +
                            int64_t{row0 + copy_row} * packing.q_stride + chunk;
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
    // This lane's byte offsets for ldmatrix.x4. by_rows: 16 rows, their left and right 8 columns
    // (A, and B that is transposed). by_cols: left, right of 8 rows, then of 8 more (two B). And
    // of dS^T.
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
    const auto add_dq = [&](int tile, int buffer) {
      float dq[Config::kQueryRows / 16][Config::kQueryCols / 8][4] = {};
      multiply_ab<Element, kBlockN, true, kBlockM, kHeadDim>(
          dq, reinterpret_cast<const char*>(smem.sdS[buffer]), ds_load, query_row,
          reinterpret_cast<const char*>(smem.sK), by_rows, query_col);
      const int64_t in_slice = slice * packing.slice_tiles + sequence.tile + tile;
      float4* const accum = gAccum + in_slice * (kBlockM * kHeadDim / 4) + threadIdx.x;
#pragma unroll
      for (int f = 0; f < Config::kFragments; ++f) {
        const auto& x = dq[f / (Config::kQueryCols / 8)][f % (Config::kQueryCols / 8)];
        reduce_add(accum + f * Config::kThreads, make_float4(x[0], x[1], x[2], x[3]));
      }
    };
    //! [dq]
    const bool late = Config::kStagger && owns_p;
    int tile_before = 0;
    const float inverse_keep = kFeatures ? 1 / (1 - float(shape.dropped) / 256) : 1;
    cp_async_wait<kStages - 1>();
    __syncthreads();  // K, V and the first rows are visible

    for (int i = 0; i < visits; ++i, advance(visit)) {
      const int stage = i % kStages;
      const char* const sQ = reinterpret_cast<const char*>(smem.sQ[stage]);
      const char* const sdO = reinterpret_cast<const char*>(smem.sdO[stage]);
      char* const sdS = reinterpret_cast<char*>(smem.sdS[i % Config::kBuffers]);
      // (3) S^T = K Q^T or dP^T = V dO^T
      float s[kKeyTiles][kBlockM / 8][4] = {};
      // Third argument, kAhead: A is loaded ahead where at most two blocks share an SM; three leave
      // no registers.
      multiply_abt<Element, kHeadDim, Config::kBlocksPerSm <= 2>(s, sKeys, by_rows,
                                                                 owns_p ? sQ : sdO, by_cols);

      // (4) P^T = exp(scale S^T - lse), dS^T = P^T (dP^T - D), as A operands
      uint32_t operand[kKeyTiles][Config::kRowSteps][4];
      const float* const rows = smem.sRow[stage][owns_p ? 0 : 1] + quad_col;
      if (owns_p) {
        const int row = visit.m_block * kBlockM + quad_col, key = key0 + warp_key + quad_row;
        if (visit.m_block < q_range.unmasked_begin || visit.m_block >= q_range.unmasked_end)
          apply_mask<Config>(s, shape, row + seqlen_k - seqlen_q - key, seqlen_k - key);
        probabilities<Element, Config, kFeatures>(operand, s, rows, sP, shape, seed,
                                                  first_bh + visit.head, row, key - quad_row);
        named_barrier_sync(1 + pair, 64);  // releases P to the other warp
      } else {
        named_barrier_sync(1 + pair, 64);  // P has arrived
        score_gradients<Element, Config, kFeatures>(operand, s, rows, sP, sdS, ds_store,
                                                    inverse_keep);
      }

      // (5) dV += P^T dO or dK += dS^T Q
      multiply_ab<Element>(grad, operand, owns_p ? sdO : sQ, by_rows);
      if (late && i > 0)  // overlaps with dK of the other warps
        add_dq(tile_before, (i - 1) % Config::kBuffers);
      if constexpr (kStages > 1) cp_async_wait<kStages - 2>();  // the next rows: issued a visit ago
      // dS and the next rows are visible; all warps have read these rows and the previous dS
      __syncthreads();
      if (i + kStages < visits) {
        Visit coming = visit;
        sequence = smem.sequence;
        for (int ahead = 0; ahead < kStages; ++ahead) advance(coming);
        load_rows(coming, stage);
      }
      cp_async_commit();

      if (!late) add_dq(tile_of(visit), i % Config::kBuffers);
      tile_before = tile_of(visit);
      if constexpr (kStages == 1 || Config::kBuffers == 1) {
        cp_async_wait<kStages - 1>();
        __syncthreads();  // all warps have read dS; with one stage: the next rows are visible
      }
    }
    if (late && visits > 0) add_dq(tile_before, (visits - 1) % Config::kBuffers);

    // (7) Store dK_j or dV_j through this warp's rows of K or V.
    cp_async_wait<0>();
    __syncthreads();  // all warps have read K
    const Sequence seq = sequence_of(shape, packing, first_bh, kHeadDim, kBlockM);
    store_gradient<Element, Config>(
        (owns_p ? gdV : gdK) + seq.kv + int64_t{key0 + warp_key} * packing.kv_stride,
        packing.kv_stride, seq.seqlen_k - key0 - warp_key, grad,
        owns_p ? inverse_keep : shape.softmax_scale, sKeys);
    __syncthreads();  // all warps have read K and V
  }
}

// Slices per head: the number that minimises waves of blocks times tiles per block on 132 SMs (an
// H200). At most one per key tile, and at most max(8, at_once / heads).
//! [slices]
int slices_of(const Problem& p, int num_n_blocks, int blocks_per_sm) {
  constexpr int64_t kMost = 8;  // beyond one full wave: 16 times the bytes of dQ
  const int64_t at_once = 132 * blocks_per_sm;  // concurrent blocks
  const int64_t heads = p.batch * p.kv_heads;
  const int64_t most = std::min<int64_t>(num_n_blocks, std::max(kMost, at_once / heads));
  int64_t best = 1;
  for (int64_t n = 2; n <= most; ++n)  // waves of blocks times work per block
    if (ceil_div(n * heads, at_once) * best < ceil_div(best * heads, at_once) * n) best = n;
  return static_cast<int>(best);
}
//! [slices]

template <class Element, class Config, bool kFeatures>
Status launch(const Arguments& args) {
  const BackwardParams<Element> params(args);
  const Problem& p = args.problem;
  const int num_n_blocks = static_cast<int>(ceil_div(p.seqlen_k, Config::kBlockN));
  const int num_slices = slices_of(p, num_n_blocks, Config::kBlocksPerSm);
  const Packing packing = packing_of<Config>(args, num_slices);
  // Grid of dot_kernel and convert_kernel: a block per query tile.
  const dim3 all_rows(static_cast<unsigned>(packing.num_m_blocks * p.batch * p.heads));
  const dim3 grid(static_cast<unsigned>(packing.num_slices * p.batch * p.kv_heads));
  args.phase("dot");
  Status status = launch_kernel(dot_kernel<Element, Config>, all_rows, dim3(256), 0, args.stream,
                                params.o, params.dout, params.lse, args.out<float>("rows"),
                                args.out<float4>("accum"), shape_of(p), packing);
  if (!status.ok()) return status;
  args.phase("attention_backward");
  status = launch_kernel(attention_backward_kernel<Element, Config, kFeatures>, grid,
                         dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>),
                         args.stream, params.q, params.k, params.v, params.dout,
                         args.in<float>("rows"), params.dk, params.dv, args.out<float4>("accum"),
                         shape_of(p), packing, p.seed, static_cast<int>(p.batch * p.kv_heads));
  if (!status.ok()) return status;
  args.phase("convert");
  return launch_kernel(convert_kernel<Element, Config>, all_rows, dim3(Config::kThreads), 0,
                       args.stream, args.in<float4>("accum"), params.dq, shape_of(p), packing);
}

template <class Element, int kHeadDim>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  // A negative scale times -inf, a masked score, would be +inf. One that underflows to 0 in fp32,
  // or a denormal one that is flushed to 0, times -inf would be NaN.
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
    return Status::unsupported("head dims 32, 64, 96, 128, 192 and 256 only");
  });
}

}  // namespace ATTN_BACKEND::b8_deterministic
