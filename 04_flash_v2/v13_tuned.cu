// v13_tuned: tiles per head dim, from a sweep.
//
// parent    v12_features
// change    Tile sizes, warps, stages, fragments of Q in registers and blocks per SM come from a
//           sweep (host/sweep.cu) for each head dim. With two stages K and V are in flight a whole
//           KV block ahead, and one barrier per block is enough. Nothing else changes.
// why       One tile size does not suit all head dims.
// expect    gpu__time_duration.sum falls at d=32 and 64. New head dims: 96, 192, 256.
// supports  fp16, bf16; head dims 32, 64, 96, 128, 192, 256; any lengths, packed sequences, masks,
//           GQA, softcap, ALiBi, dropout
#include <algorithm>

#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "kernels/fragments.h"
#include "kernels/score_features.h"
#include "kernels/swizzle.h"
#include "kernels/tiles.h"
#include "kernels/v13_tiles.h"

namespace ATTN_BACKEND::v13_tuned {
using namespace attn;
using namespace flash2;

constexpr float kRescaleThreshold = 8;  // in log2 units: P is at most 2^8

template <class Element, class Config>
struct SharedStorage {
  alignas(128) Element sK[Config::kStages][Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sV[Config::kStages][Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sQ[Config::kBlockM * Config::kHeadDim];                   // [kBlockM, d]
  Sequence sequence;  // offsets and lengths (kernels/tiles.h); here, like row0, to save registers
  int row0;
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sequence, row0)
};

// Issues cp.async of kRows rows; rows from `rows` on become 0. `g`: this thread's first chunk, row
// tid / kSwizzleChunks and chunk tid % kSwizzleChunks; `step`: row stride.
//! [copy]
template <int kRows, class Config, class Element>
__device__ __forceinline__ void load_tile(Element* tile, const Element* g, int step, int rows) {
  constexpr int kSwizzleChunks = Config::kSwizzleChunks, kHeadDim = Config::kHeadDim;
  // thread_index() reads threadIdx.x again, so that no register holds it during the loop.
  const int tid = thread_index(), row = tid / kSwizzleChunks;
  Element* const to = tile + swizzled_offset<kHeadDim>(row, tid % kSwizzleChunks * 8);
  // `compares` is a compile-time flag: a whole tile is copied without comparisons.
  const auto copy = [&](auto compares) {
#pragma unroll
    for (int r = 0; r < kRows; r += Config::kCopyRows)
#pragma unroll
      for (int c = 0; c < kHeadDim; c += 8 * kSwizzleChunks) {
        const bool inside = !compares.value || row + r < rows;
        // outside: 0 bytes are read, from the valid address of row 0
        cp_async_16(to + r * kHeadDim + c, g + (inside ? r : -row) * step + c, inside ? 16 : 0);
      }
  };
  rows >= kRows ? copy(std::false_type{}) : copy(std::true_type{});
}
//! [copy]

// (3) S = Q K^T for the rows of this warp. Fragments are loaded one MMA ahead; the first kQSteps
// fragments of Q are in registers. Offsets are in bytes: q and k are where this lane's
// ldmatrix rows start in the first 16 columns; swizzle_advance moves them along the row.
//! [scores]
template <class Config>
__device__ __forceinline__ int q_offset() {
  const int tid = thread_index();
  return 2 * swizzled_offset<Config::kHeadDim>(tid / 32 * Config::kWarpRows + tid % 16,
                                               tid / 16 % 2 * 8);
}
template <class Config>
__device__ __forceinline__ void load_q_fragments(uint32_t (&a)[Config::kTiles][4], const char* sQ,
                                                 int q, int col) {
#pragma unroll
  for (int m = 0; m < Config::kTiles; ++m)
    ldmatrix_x4(a[m],
                sQ + swizzle_advance<Config::kSwizzleChunks>(q, col) + 16 * m * Config::kRowBytes);
}
template <class Element, class Config, int kCount>
__device__ __forceinline__ void gemm_qk(float (&s)[Config::kTiles][Config::kBlockN / 8][4],
                                        const uint32_t (&rQ)[kCount][Config::kTiles][4],
                                        const char* sQ, const char* sK) {
  constexpr int kKeySteps = Config::kBlockN / 16, kColSteps = Config::kHeadDim / 16;
  uint32_t a[2][Config::kTiles][4], b[2][4];
  const int tid = thread_index(), q = q_offset<Config>();
  const int k = 2 * swizzled_offset<Config::kHeadDim>(tid / 16 % 2 * 8 + tid % 8, tid / 8 % 2 * 8);
  const auto load_k = [&](int i) {
    const char* const rows = sK + i % kKeySteps * 16 * Config::kRowBytes;  // 16 keys
    ldmatrix_x4(b[i % 2], rows + swizzle_advance<Config::kSwizzleChunks>(k, i / kKeySteps * 16));
  };
  const auto load_q = [&](int step) {
    if (step >= Config::kQSteps && step < kColSteps)
      load_q_fragments<Config>(a[step % 2], sQ, q, 16 * step);
  };
  load_q(0);
  load_k(0);
#pragma unroll
  for (int step = 0; step < kColSteps; ++step) {
    load_q(step + 1);
    // % kCount only keeps the index valid where rQ is not used.
    const auto& rows = step < Config::kQSteps ? rQ[step % kCount] : a[step % 2];  // Q
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; n += 2) {
      const int i = step * kKeySteps + n / 2;
      if (i + 1 < kColSteps * kKeySteps) load_k(i + 1);
#pragma unroll
      for (int m = 0; m < Config::kTiles; ++m) {
        mma_m16n8k16<Element>(s[m][n], rows[m], {b[i % 2][0], b[i % 2][1]}, s[m][n]);
        mma_m16n8k16<Element>(s[m][n + 1], rows[m], {b[i % 2][2], b[i % 2][3]}, s[m][n + 1]);
      }
    }
  }
}
//! [scores]

// (4) Row maxima, reduced within a quad. O and l are relative to row_max, which may lag behind: it
// is raised, and both are rescaled, only if a row's maximum exceeds it by more than the threshold.
//! [rescale]
template <class Config, int kTiles>
__device__ __forceinline__ void update_max(float (&row_max)[kTiles][2], float (&row_sum)[kTiles][2],
                                           float (&o)[kTiles][Config::kHeadDim / 8][4],
                                           const float (&s)[kTiles][Config::kBlockN / 8][4],
                                           float softmax_scale_log2) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN;
  float max[kTiles][2];
  bool grown = false;
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[m][r] = fmaxf(s[m][0][2 * r], s[m][0][2 * r + 1]);
#pragma unroll
      for (int n = 1; n < kBlockN / 8; ++n)
        max[m][r] = fmaxf(max[m][r], fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
      max[m][r] = fmaxf(row_max[m][r], quad_max(max[m][r]) * softmax_scale_log2);
      grown = grown || max[m][r] > row_max[m][r] + kRescaleThreshold;
    }
  if (__any_sync(~0u, grown)) {  // uniform per warp; rare after the first KV blocks
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float rescale = exp2f(row_max[m][r] - max[m][r]);
        row_max[m][r] = max[m][r];
        row_sum[m][r] *= rescale;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n)
          o[m][n][2 * r] *= rescale, o[m][n][2 * r + 1] *= rescale;
      }
  }
}
//! [rescale]

// (5) O += P V for the rows of this warp. `probabilities(step, a)` computes the A operand of 16
// keys, one step ahead, so that its exponentials overlap with the MMAs.
//! [output]
template <class Element, class Config, class Probabilities>
__device__ __forceinline__ void gemm_pv(float (&o)[Config::kTiles][Config::kHeadDim / 8][4],
                                        Probabilities probabilities, const char* sV) {
  constexpr int kKeySteps = Config::kBlockN / 16, kColSteps = Config::kHeadDim / 16;
  uint32_t a[2][Config::kTiles][4], b[2][4];
  const int tid = thread_index();
  const int v = 2 * swizzled_offset<Config::kHeadDim>(tid % 16, tid / 16 % 2 * 8);
  const auto load_v = [&](int i) {
    const char* const rows = sV + i / kColSteps * 16 * Config::kRowBytes;  // 16 keys
    ldmatrix_x4_trans(b[i % 2],
                      rows + swizzle_advance<Config::kSwizzleChunks>(v, i % kColSteps * 16));
  };
  load_v(0);
  probabilities(0, a[0]);
#pragma unroll
  for (int k = 0; k < kKeySteps; ++k) {
    if (k + 1 < kKeySteps) probabilities(k + 1, a[(k + 1) % 2]);
#pragma unroll
    for (int n = 0; n < Config::kHeadDim / 8; n += 2) {
      const int i = k * kColSteps + n / 2;
      if (i + 1 < kKeySteps * kColSteps) load_v(i + 1);
#pragma unroll
      for (int m = 0; m < Config::kTiles; ++m) {
        mma_m16n8k16<Element>(o[m][n], a[k % 2][m], {b[i % 2][0], b[i % 2][1]}, o[m][n]);
        mma_m16n8k16<Element>(o[m][n + 1], a[k % 2][m], {b[i % 2][2], b[i % 2][3]}, o[m][n + 1]);
      }
    }
  }
}
//! [output]

template <class Element, class Config, class Layout, bool kFeatures>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    attention_kernel(const Element* gQ,     // [B, Hq, seqlen_q, d], or packed: see Packed
                     const Element* gK,     // [B, Hkv, seqlen_k, d]
                     const Element* gV,     // [B, Hkv, seqlen_k, d]
                     Element* gO,           // [B, Hq, seqlen_q, d]
                     float* gLse,           // [B, Hq, seqlen_q]
                     const float* gSlopes,  // [Hq]: ALiBi slopes, or null
                     Shape shape, Layout layout, uint64_t seed, int num_m_blocks, int num_heads,
                     int section) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kTiles = Config::kTiles, kWarpRows = Config::kWarpRows;
  constexpr int kSwizzleChunks = Config::kSwizzleChunks, kStages = Config::kStages;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const auto bytes = [](const auto& tile) { return reinterpret_cast<const char*>(&tile); };
  // Sections of heads. Within one, longest query tiles first (LPT order), across its heads.
  //! [order]
  const int first_head = blockIdx.x / (section * num_m_blocks) * section;
  const int heads = min(section, num_heads - first_head);
  const int in_section = blockIdx.x - first_head * num_m_blocks;
  const int row0 = (num_m_blocks - 1 - in_section / heads) * kBlockM;
  const int bh = first_head + in_section % heads;
  //! [order]
  const Sequence sequence = sequence_of(shape, layout, bh, kHeadDim);
  if (row0 >= sequence.seqlen_q) return;  // the batch has longer sequences
  const int seqlen_k = sequence.seqlen_k, causal_offset = seqlen_k - sequence.seqlen_q;
  const KvBlockRange kv_range =
      kv_block_range(shape, sequence.seqlen_q, seqlen_k, row0, kBlockM, kBlockN);
  // This thread's first chunk in each tile that it copies.
  const int copy_row = threadIdx.x / kSwizzleChunks, chunk = threadIdx.x % kSwizzleChunks * 8;
  const Element* const q = gQ + sequence.q + int64_t{row0 + copy_row} * layout.q_stride + chunk;
  const int64_t kv = sequence.kv + copy_row * layout.kv_stride + chunk;
  const auto load_kv = [&](auto& tiles, const Element* g, int n_block) {
    load_tile<kBlockN, Config>(tiles[n_block % kStages],
                               g + kv + int64_t{n_block * kBlockN} * layout.kv_stride,
                               layout.kv_stride, seqlen_k - n_block * kBlockN);
  };
  // the factor that is still to be applied to scores
  const float softmax_scale_log2 = kFeatures ? 1 : shape.softmax_scale * kLog2e;
  const float slope_log2 = kFeatures && gSlopes != nullptr ? gSlopes[bh % shape.heads] * kLog2e : 0;

  if (threadIdx.x == 0) smem.sequence = sequence, smem.row0 = row0;
  // (1) Issue the copies of Q_i, which stays in shared memory, and of the first K_j (with two
  // stages also V_j).
  uint32_t rQ[std::max(1, Config::kQSteps)][kTiles][4];
  if (kv_range.begin < kv_range.end) {
    load_tile<kBlockM, Config>(smem.sQ, q, layout.q_stride, sequence.seqlen_q - row0);
    if (Config::kQSteps > 0) cp_async_commit();
    load_kv(smem.sK, gK, kv_range.begin);
    if (kStages == 2) load_kv(smem.sV, gV, kv_range.begin);
    cp_async_commit();
  }
  if (Config::kQSteps > 0) cp_async_wait<1>();
  __syncthreads();  // smem.sequence is visible, and Q for rQ
  if (kv_range.begin < kv_range.end) {
#pragma unroll
    for (int step = 0; step < Config::kQSteps; ++step)
      load_q_fragments<Config>(rQ[step], bytes(smem.sQ), q_offset<Config>(), 16 * step);
  }
  float o[kTiles][kHeadDim / 8][4] = {};  // unnormalised
  // row_max in log2 units; row_sum of this lane's keys
  float row_max[kTiles][2], row_sum[kTiles][2] = {};
  for (int m = 0; m < kTiles; ++m) row_max[m][0] = row_max[m][1] = kLowest;

  // One KV block. `masked` is a compile-time flag: the unmasked body compares no index.
  const auto process_kv_block = [&](int n_block, auto masked) {
    const int key0 = n_block * kBlockN, stage = n_block % kStages;
    // A warp skips a masked block in which all its rows are masked.
    const int warp_row0 = smem.row0 + thread_index() / 32 * kWarpRows;
    const bool idle =
        masked.value && (key0 > warp_row0 + kWarpRows - 1 + causal_offset + shape.window_right ||
                         key0 + kBlockN <= warp_row0 + causal_offset - shape.window_left);
    // (2) One stage: V_j is in flight during Q K^T. Two stages: K_j+1 and V_j+1 are in flight
    // during the whole block. In this loop at most one cp.async group is in flight, so every wait
    // is for all groups.
    cp_async_wait<0>();
    __syncthreads();  // K_j (and V_j) are visible; all warps have read V_j-1 (and K_j-1)
    if (kStages == 1) {
      load_kv(smem.sV, gV, n_block);
    } else if (n_block + 1 < kv_range.end) {
      load_kv(smem.sK, gK, n_block + 1);
      load_kv(smem.sV, gV, n_block + 1);
    }
    cp_async_commit();

    // (3) S = Q K^T, -inf where masked.
    float s[kTiles][kBlockN / 8][4] = {};
    if (!idle) {
      gemm_qk<Element, Config>(s, rQ, bytes(smem.sQ), bytes(smem.sK[stage]));
      const int lane_id = thread_index() % 32;
      const int row_minus_col = warp_row0 + lane_id / 4 + causal_offset - key0 - lane_id % 4 * 2;
      if constexpr (kFeatures) apply_softcap_and_alibi(s, shape, slope_log2, row_minus_col);
      if constexpr (masked.value) apply_mask(s, shape, row_minus_col, seqlen_k - key0);
    }

    if (kStages == 1) {  // K_j+1 is in flight during softmax and P V
      cp_async_wait<0>();
      __syncthreads();  // V_j is visible; all warps have read K_j
      if (n_block + 1 < kv_range.end) load_kv(smem.sK, gK, n_block + 1);
      cp_async_commit();
    }
    if (idle) return;

    // (4) Online softmax.
    //! [softmax]
    update_max<Config>(row_max, row_sum, o, s, softmax_scale_log2);
    const auto exponentials = [&](int m, int step) {
#pragma unroll
      for (int n = 2 * step; n < 2 * step + 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[m][n][i] = exp2f(fmaf(s[m][n][i], softmax_scale_log2, -row_max[m][i / 2]));
          row_sum[m][i / 2] += s[m][n][i];
        }
    };
    if constexpr (kFeatures) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int step = 0; step < kBlockN / 16; ++step) exponentials(m, step);
        // after the sum: a dropped key still counts in l
        for (int r = 0; r < 2 && shape.dropped > 0; ++r)
          apply_dropout(s[m], r, seed, bh, warp_row0 + 16 * m + 8 * r + thread_index() % 32 / 4,
                        key0, shape.dropped);
      }
    }
    // Two neighbouring accumulators of S, rounded and packed in pairs, are one A fragment of P V.
    const auto probabilities = [&](int step, uint32_t(&a)[kTiles][4]) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        if constexpr (!kFeatures) exponentials(m, step);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&p)[4] = s[m][2 * step + i / 2];
          a[m][i] = pack2<Element>(p[2 * (i % 2)], p[2 * (i % 2) + 1]);
        }
      }
    };
    //! [softmax]

    // (5) O += P V
    gemm_pv<Element, Config>(o, probabilities, bytes(smem.sV[stage]));
  };
  //! [loops]
  for (int n_block = kv_range.begin; n_block < kv_range.end; ++n_block)
    if (n_block >= kv_range.unmasked_begin && n_block < kv_range.unmasked_end)
      process_kv_block(n_block, std::false_type{});
    else  // left edge of the window; diagonal, right edge, end of the keys
      process_kv_block(n_block, std::true_type{});
  //! [loops]

  // (7) O = O / l, once; (8) store O through this warp's rows of sQ, and lse.
  //! [finish]
  const int tid = thread_index(), lane_id = tid % 32, warp_rows = tid / 32 * kWarpRows;
  char* const sO = reinterpret_cast<char*>(smem.sQ + warp_rows * kHeadDim);  // [kWarpRows, d]
  const Sequence seq = smem.sequence;
  const int first_row = smem.row0 + warp_rows, rows = seq.seqlen_q - first_row;  // of this warp
  const float inverse_kept = kFeatures ? 1 / (1 - float(shape.dropped) / 256) : 1;
  const int o_lane = 2 * swizzled_offset<kHeadDim>(lane_id / 4, lane_id % 4 * 2);
  __syncwarp();  // all lanes have read Q
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(row_sum[m][r]);
      const float factor = sum != 0 ? inverse_kept / sum : 0;  // fully masked row: O = 0
      char* const to = sO + (16 * m + 8 * r) * Config::kRowBytes;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n)
        *reinterpret_cast<uint32_t*>(to + swizzle_advance<kSwizzleChunks>(o_lane, 8 * n)) =
            pack2<Element>(o[m][n][2 * r] * factor, o[m][n][2 * r + 1] * factor);
      const int row = 16 * m + 8 * r + lane_id / 4;
      if (lane_id % 4 == 0 && row < rows)
        gLse[seq.lse + first_row + row] = sum != 0 ? kLn2 * row_max[m][r] + logf(sum) : -INFINITY;
    }
  __syncwarp();  // all rows of the warp are visible
#pragma unroll
  for (int i = 0; i < kWarpRows; i += 32 / kSwizzleChunks) {
    const int r = i + lane_id / kSwizzleChunks;
    if (r >= rows) break;
#pragma unroll
    for (int c = lane_id % kSwizzleChunks * 8; c < kHeadDim; c += 8 * kSwizzleChunks)
      *reinterpret_cast<uint4*>(gO + seq.q + int64_t{first_row + r} * layout.q_stride + c) =
          *reinterpret_cast<const uint4*>(sO + 2 * swizzled_offset<kHeadDim>(r, c));
  }
  //! [finish]
}

template <class Element, class Config, class Layout, bool kFeatures>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const int64_t num_m_blocks = ceil_div(p.seqlen_q, Config::kBlockM), num_heads = p.heads * p.batch;
  const int64_t section = heads_of_section(p);
  // A dry run: the cost model only asks for the tiles.
  if (args.report_tiling(
          {Config::kBlockM, Config::kBlockN, section, Config::kBlocksPerSm, Config::kWarpRows}))
    return Status::success();
  const ForwardParams<Element> params(args);
  args.phase("attention");
  return launch_kernel(
      attention_kernel<Element, Config, Layout, kFeatures>,
      dim3(static_cast<unsigned>(num_m_blocks * num_heads)), dim3(Config::kThreads),
      sizeof(SharedStorage<Element, Config>), args.stream, params.q, params.k, params.v, params.o,
      params.lse, args.in_or_null<float>("alibi"), shape_of(p), Layout(args), p.seed,
      static_cast<int>(num_m_blocks), static_cast<int>(num_heads), static_cast<int>(section));
}

#ifndef ATTN_SWEEP  // host/sweep.cu instantiates its own tiles
template <class Element, int kHeadDim>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  // A negative scale would turn the maximum into a minimum. One that underflows to 0 in fp32, or a
  // denormal one that is flushed to 0, times -inf would be NaN.
  if (p.dropout > 0 || p.softcap > 0 || p.alibi || p.softmax_scale < 1e-37)
    return launch<Element, WithFeatures<kHeadDim>, Packed, true>(args);
  if (p.varlen()) return launch<Element, Config<kHeadDim>, Packed, false>(args);
  return launch<Element, Config<kHeadDim>, Contiguous<kHeadDim>, false>(args);
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
    return Status::unsupported("only head dims 32, 64, 96, 128, 192 and 256");
  });
}
#endif

}  // namespace ATTN_BACKEND::v13_tuned
