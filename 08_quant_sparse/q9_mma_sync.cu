// q9_mma_sync: q3's scores with mma.sync, for GPUs without wgmma (sm_80 and later).
//
// parent    04_flash_v2/v11_wide_stores
// change    S = Q K^T is an int8 mma.sync. A row of d codes has the bytes of d / 2 bf16 numbers,
//           and ldmatrix moves bytes: tiles, swizzle and fragments of Q and K are those of half
//           the head dim. Smooth K, per-thread scales and the pass are q3's; a lane has the same
//           rows and keys of an accumulator. P V stays in bf16.
// why       SageAttention started on Ampere, where int8 mma.sync has twice the bf16 rate.
// expect    half of the MMAs of Q K^T; half of the bytes of Q and K in L2 and shared memory
// supports  --dtype int8, inputs in bf16; sm_80 and later; head dims 64, 128, 256; any lengths,
//           masks, GQA; softmax scales from 1e-10
// source    SageAttention (arXiv 2410.02367)
#include <algorithm>

#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "ptx/mma_s8.h"
#include "kernels/int8_fragments.h"
#include "kernels/mma_tiles.h"
#include "kernels/smooth.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::q9_mma_sync {
using namespace attn;
using namespace hopper;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kHeadDim == 256 ? 64 : 128, kBlockN = 64;  // B_r, B_c
  static constexpr int kNumWarps = 4, kThreads = 32 * kNumWarps, kBlocksPerSm = 2;
  static constexpr int kWarpRows = kBlockM / kNumWarps;
  static constexpr int kTiles = kWarpRows / 16;  // 16-row MMAs per warp
  // K-steps of 32 columns whose Q fragments stay in registers; at d=128 there are no registers
  // left.
  static constexpr int kQSteps = kHeadDim <= 64 ? kHeadDim / 32 : 0;
  // A row of codes in 16-bit columns, and its swizzled chunks.
  static constexpr int kCodes = kHeadDim / 2, kCodeSpan = kSpanOf<kCodes>;
  static constexpr int kRowBytes = 2 * kHeadDim;
  static constexpr int kSwizzleChunks = kSpanOf<kHeadDim>;  // the same for V and O
  static_assert(kBlockN % 16 == 0 && kHeadDim % 32 == 0, "warps own whole MMAs");
  static_assert(kScaleRows % kBlockM == 0 && kScaleRows % kBlockN == 0, "a tile has its scales");
};

constexpr float kRescaleThreshold = 8;  // log2 units: P <= 2^8

template <class Element, class Config>
struct SharedStorage {
  alignas(128) uint16_t sK[Config::kBlockN * Config::kCodes];  // [kBlockN, d], one byte each
  alignas(128) Element sV[Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sQ[Config::kBlockM * Config::kHeadDim];  // [kBlockM, d]; Q: one byte each
  Sequence sequence;  // kept here until the end of the loop, to save registers
  int row0;
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sequence, row0)
};

// Issues the copies of kRows rows of kHeadDim 16-bit columns, of which `rows` exist; the others are
// zero-filled.
//! [copy]
template <int kRows, int kHeadDim, class Config, class Element>
__device__ __forceinline__ void load_tile(Element* tile, const Element* g, int rows) {
  constexpr int kSwizzleChunks = kSpanOf<kHeadDim>, kCopyRows = Config::kThreads / kSwizzleChunks;
  const int tid = thread_index(), row = tid / kSwizzleChunks;
  g += row * kHeadDim + tid % kSwizzleChunks * 8;
  Element* const to = tile + swizzled_offset<kHeadDim>(row, tid % kSwizzleChunks * 8);
  const auto copy = [&](auto compares) {
#pragma unroll
    for (int r = 0; r < kRows; r += kCopyRows)
#pragma unroll
      for (int c = 0; c < kHeadDim; c += 8 * kSwizzleChunks) {
        const bool inside = !compares.value || row + r < rows;
        cp_async_16(to + r * kHeadDim + c, g + (inside ? r : -row) * kHeadDim + c, inside ? 16 : 0);
      }
  };
  rows >= kRows ? copy(std::false_type{}) : copy(std::true_type{});
}
//! [copy]

// (3) S = Q K^T for the rows of this warp. Fragments are loaded one MMA ahead; those of Q for the
// first kQSteps times 32 columns are in registers. Offsets, in bytes, are those of this lane's
// chunk in the first 32 columns, i.e. 16 columns of 16 bits.
//! [scores]
template <class Config>
__device__ __forceinline__ int q_offset() {
  const int tid = thread_index();
  return 2 * swizzled_offset<Config::kCodes>(tid / 32 * Config::kWarpRows + tid % 16,
                                             tid / 16 % 2 * 8);
}
template <class Config>
__device__ __forceinline__ void load_q_fragments(uint32_t (&a)[Config::kTiles][4], const char* sQ,
                                                 int q, int col) {
#pragma unroll
  for (int m = 0; m < Config::kTiles; ++m)
    ldmatrix_x4(a[m], sQ + swizzle_advance<Config::kCodeSpan>(q, col) + 16 * m * Config::kHeadDim);
}
template <class Element, class Config, int kCount>
__device__ __forceinline__ void gemm_qk(int (&s)[Config::kTiles][Config::kBlockN / 8][4],
                                       const uint32_t (&rQ)[kCount][Config::kTiles][4],
                                       const char* sQ, const char* sK) {
  constexpr int kKeySteps = Config::kBlockN / 16, kColSteps = Config::kHeadDim / 32;
  uint32_t a[2][Config::kTiles][4], b[2][4];
  const int tid = thread_index(), q = q_offset<Config>();
  const int k = 2 * swizzled_offset<Config::kCodes>(tid / 16 % 2 * 8 + tid % 8, tid / 8 % 2 * 8);
  const auto load_k = [&](int i) {
    const char* const rows = sK + i % kKeySteps * 16 * Config::kHeadDim;
    ldmatrix_x4(b[i % 2], rows + swizzle_advance<Config::kCodeSpan>(k, i / kKeySteps * 16));
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
    const auto& rows = step < Config::kQSteps ? rQ[step % kCount] : a[step % 2];
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; n += 2) {
      const int i = step * kKeySteps + n / 2;
      if (i + 1 < kColSteps * kKeySteps) load_k(i + 1);
#pragma unroll
      for (int m = 0; m < Config::kTiles; ++m) {
        mma_m16n8k32_s8(s[m][n], rows[m], {b[i % 2][0], b[i % 2][1]}, s[m][n]);
        mma_m16n8k32_s8(s[m][n + 1], rows[m], {b[i % 2][2], b[i % 2][3]}, s[m][n + 1]);
      }
    }
  }
}
//! [scores]

// (4) Row max, within the quad of lanes that share a row. O and l are rescaled only if a max has
// grown by more than the threshold. Each lane has its own scales, so a max is scaled before the
// shuffles.
//! [rescale]
template <class Config, int kTiles>
__device__ __forceinline__ void update_max(float (&row_max)[kTiles][2], float (&row_sum)[kTiles][2],
                                           float (&o)[kTiles][Config::kHeadDim / 8][4],
                                           const float (&s)[kTiles][Config::kBlockN / 8][4],
                                           const float (&scale_log2)[kTiles]) {
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
      max[m][r] = fmaxf(row_max[m][r], quad_max(max[m][r] * scale_log2[m]));
      grown = grown || max[m][r] > row_max[m][r] + kRescaleThreshold;
    }
  if (__any_sync(~0u, grown)) {  // of the warp: rare after the first blocks
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
    const char* const rows = sV + i / kColSteps * 16 * Config::kRowBytes;
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

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    attention_kernel(const uint16_t* gQ,  // [B, Hq, seqlen_q, d], one byte each
                     const uint16_t* gK,  // [B, Hkv, seqlen_k, d], one byte each
                     const Element* gV,  // [B, Hkv, seqlen_k, d]
                     Element* gO,        // [B, Hq, seqlen_q, d]
                     float* gLse,        // [B, Hq, seqlen_q]
                     ThreadDescales descales, const float* gLseShift,  // [B, Hq, seqlen_q]
                     Shape shape, int num_m_blocks, int num_heads, int section) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kTiles = Config::kTiles, kWarpRows = Config::kWarpRows;
  constexpr int kSwizzleChunks = Config::kSwizzleChunks;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const auto bytes = [](const auto& tile) { return reinterpret_cast<const char*>(&tile); };
  // Heads are grouped in sections. Within a section, the longest tiles come first (LPT order),
  // across all its heads.
  //! [order]
  const int first_head = blockIdx.x / (section * num_m_blocks) * section;
  const int heads = min(section, num_heads - first_head);
  const int in_section = blockIdx.x - first_head * num_m_blocks;
  const int row0 = (num_m_blocks - 1 - in_section / heads) * kBlockM;
  const int bh = first_head + in_section % heads;
  //! [order]
  const Sequence sequence = sequence_of(shape, bh, kHeadDim);
  const int seqlen_k = sequence.seqlen_k, causal_offset = seqlen_k - sequence.seqlen_q;
  const KvBlockRange kv_range =
      kv_block_range(shape, sequence.seqlen_q, seqlen_k, row0, kBlockM, kBlockN);
  const uint16_t* const q = gQ + (sequence.q + int64_t{row0} * kHeadDim) / 2;
  const auto load_kv = [&]<int kColumns>(auto& to, const auto* g, int n_block) {
    const int64_t first = (smem.sequence.kv / kHeadDim + n_block * kBlockN) * kColumns;
    load_tile<kBlockN, kColumns, Config>(to, g + first, seqlen_k - n_block * kBlockN);
  };
  const auto load_k = [&](int n) { load_kv.template operator()<Config::kCodes>(smem.sK, gK, n); };
  const auto load_v = [&](int n) { load_kv.template operator()<kHeadDim>(smem.sV, gV, n); };

  if (threadIdx.x == 0) smem.sequence = sequence, smem.row0 = row0;
  __syncthreads();  // both are stored
  // (1) Load Q_i, which stays, and the first K_j.
  uint32_t rQ[std::max(1, Config::kQSteps)][kTiles][4];
  if (kv_range.begin < kv_range.end) {
    load_tile<kBlockM, Config::kCodes, Config>(reinterpret_cast<uint16_t*>(smem.sQ), q,
                                               sequence.seqlen_q - row0);
    if (Config::kQSteps > 0) cp_async_commit();
    load_k(kv_range.begin);
    cp_async_commit();
  }
  if (Config::kQSteps > 0) cp_async_wait<1>();
  __syncthreads();  // for rQ: Q of all threads is loaded
  if (kv_range.begin < kv_range.end) {
#pragma unroll
    for (int step = 0; step < Config::kQSteps; ++step)
      load_q_fragments<Config>(rQ[step], bytes(smem.sQ), q_offset<Config>(), 16 * step);
  }
  float o[kTiles][kHeadDim / 8][4] = {};  // unnormalised
  // row_max: the reference, which may lag the row max (log2 units); row_sum: of this lane's keys
  float row_max[kTiles][2], row_sum[kTiles][2] = {};
  for (int m = 0; m < kTiles; ++m) row_max[m][0] = row_max[m][1] = kLowest;
  const int kv_head = bh / (shape.heads / shape.kv_heads);
  float q_scale_log2[kTiles];  // of this lane's rows, and of softmax
  const int first = thread_index() / 32 * kWarpRows + thread_index() % 32 / 4;
  for (int m = 0; m < kTiles; ++m)
    q_scale_log2[m] = shape.softmax_scale * kLog2e *
                      descales.q(bh, row0)[ThreadGroups::of_q(row0 % kScaleRows + first + 16 * m)];

  // One key block. `masked` is a type, so the unmasked body contains no mask code.
  const auto process_kv_block = [&](int n_block, auto masked) {
    const int key0 = n_block * kBlockN;
    // A warp skips a block that is fully masked for its rows.
    const int warp_row0 = smem.row0 + thread_index() / 32 * kWarpRows;
    const bool idle =
        masked.value && (key0 > warp_row0 + kWarpRows - 1 + causal_offset + shape.window_right ||
                         key0 + kBlockN <= warp_row0 + causal_offset - shape.window_left);
    // (2) V_j is in flight during Q K^T. At most one cp.async group is in flight, so both waits
    // wait for all groups.
    //! [pipeline]
    cp_async_wait<0>();
    __syncthreads();  // K_j is visible; V_j-1 is no longer read
    load_v(n_block);
    cp_async_commit();
    //! [pipeline]

    // (3) S = Q K^T, -inf where masked.
    float s[kTiles][kBlockN / 8][4];
    if (!idle) {
      int s_acc[kTiles][kBlockN / 8][4] = {};  // before their conversion to float
      gemm_qk<Element, Config>(s_acc, rQ, bytes(smem.sQ), bytes(smem.sK));
#pragma unroll
      for (int m = 0; m < kTiles; ++m) to_floats(s[m], s_acc[m]);
      const int lane_id = thread_index() % 32;
      const int row_minus_col = warp_row0 + lane_id / 4 + causal_offset - key0 - lane_id % 4 * 2;
      if constexpr (masked.value) apply_mask(s, shape, row_minus_col, seqlen_k - key0);
    }

    // K_j+1 is in flight during softmax and P V.
    //! [pipeline_k]
    cp_async_wait<0>();
    __syncthreads();  // V_j is visible; K_j is no longer read
    if (n_block + 1 < kv_range.end) load_k(n_block + 1);
    cp_async_commit();
    //! [pipeline_k]
    if (idle) return;

    // (4) Online softmax.
    //! [softmax]
    const float k_scale = descales.k(kv_head, key0)[ThreadGroups::of_k(thread_index() % 4 * 2)];
    float scale_log2[kTiles];
    for (int m = 0; m < kTiles; ++m) scale_log2[m] = q_scale_log2[m] * k_scale;
    update_max<Config>(row_max, row_sum, o, s, scale_log2);
    const auto exponentials = [&](int m, int step) {
#pragma unroll
      for (int n = 2 * step; n < 2 * step + 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[m][n][i] = exp2f(fmaf(s[m][n][i], scale_log2[m], -row_max[m][i / 2]));
          row_sum[m][i / 2] += s[m][n][i];
        }
    };
    // Two neighbouring accumulators of the first MMA, rounded in pairs, are an A operand of the
    // second.
    const auto probabilities = [&](int step, uint32_t(&a)[kTiles][4]) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        exponentials(m, step);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&p)[4] = s[m][2 * step + i / 2];
          a[m][i] = pack2<Element>(p[2 * (i % 2)], p[2 * (i % 2) + 1]);
        }
      }
    };
    //! [softmax]

    // (5) O += P V
    gemm_pv<Element, Config>(o, probabilities, bytes(smem.sV));
  };
  //! [loops]
  for (int n_block = kv_range.begin; n_block < kv_range.end; ++n_block)
    if (n_block >= kv_range.unmasked_begin && n_block < kv_range.unmasked_end)
      process_kv_block(n_block, std::false_type{});
    else  // left edge of the window; diagonal, right edge, end of the keys
      process_kv_block(n_block, std::true_type{});
  //! [loops]

  // (7) O = O / l, once; (8) store O, staged in the space of Q, and lse. A row of O is as long as
  // two rows of codes, so a warp overwrites Q of others. No warp still reads Q: a __syncthreads has
  // followed the last Q K^T.
  //! [finish]
  const int tid = thread_index(), lane_id = tid % 32, warp_rows = tid / 32 * kWarpRows;
  char* const sO = reinterpret_cast<char*>(smem.sQ + warp_rows * kHeadDim);  // [kWarpRows, d]
  const Sequence seq = smem.sequence;
  const int first_row = smem.row0 + warp_rows, rows = seq.seqlen_q - first_row;  // of this warp
  const int o_lane = 2 * swizzled_offset<kHeadDim>(lane_id / 4, lane_id % 4 * 2);
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(row_sum[m][r]);
      const float factor = sum == 0 ? 0 : 1 / sum;  // fully masked row: O = 0
      char* const to = sO + (16 * m + 8 * r) * Config::kRowBytes;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n)
        *reinterpret_cast<uint32_t*>(to + swizzle_advance<kSwizzleChunks>(o_lane, 8 * n)) =
            pack2<Element>(o[m][n][2 * r] * factor, o[m][n][2 * r + 1] * factor);
      const int row = 16 * m + 8 * r + lane_id / 4;
      if (lane_id % 4 == 0 && row < rows)
        gLse[seq.lse + first_row + row] =
            sum == 0 ? -INFINITY
                     : gLseShift[seq.lse + first_row + row] + kLn2 * row_max[m][r] + logf(sum);
    }
  __syncwarp();  // all rows of the warp are visible
#pragma unroll
  for (int i = 0; i < kWarpRows; i += 32 / kSwizzleChunks) {
    const int r = i + lane_id / kSwizzleChunks;
    if (r >= rows) break;
#pragma unroll
    for (int c = lane_id % kSwizzleChunks * 8; c < kHeadDim; c += 8 * kSwizzleChunks)
      *reinterpret_cast<uint4*>(gO + seq.q + int64_t{first_row + r} * kHeadDim + c) =
          *reinterpret_cast<const uint4*>(sO + 2 * swizzled_offset<kHeadDim>(r, c));
  }
  //! [finish]
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const int64_t num_m_blocks = ceil_div(p.seqlen_q, Config::kBlockM), num_heads = p.heads * p.batch;
  const int64_t section = heads_of_section(p, num_m_blocks);
  if (args.report_tiling(
          {Config::kBlockM, Config::kBlockN, section, Config::kBlocksPerSm, Config::kWarpRows}))
    return Status::success();
  const ForwardParams<Element> params(args);
  if (const Status done = quantise_smoothed<Config::kHeadDim, ThreadGroups>(args); !done.ok())
    return done;
  args.phase("attention");
  return launch_kernel(
      attention_kernel<Element, Config>, dim3(static_cast<unsigned>(num_m_blocks * num_heads)),
      dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), args.stream,
      args.out<uint16_t>("q8"), args.out<uint16_t>("k8"), params.v, params.o, params.lse,
      ThreadDescales(args), args.out<float>("lse_shift"), shape_of(p),
      static_cast<int>(num_m_blocks), static_cast<int>(num_heads), static_cast<int>(section));
}

Status launch(const Arguments& args) {
  switch (args.problem.head_dim) {
    case 64: return launch<__nv_bfloat16, Config<64>>(args);
    case 128: return launch<__nv_bfloat16, Config<128>>(args);
    case 256: return launch<__nv_bfloat16, Config<256>>(args);
  }
  return Status::unsupported("only head dims 64, 128 and 256");
}

}  // namespace ATTN_BACKEND::q9_mma_sync
