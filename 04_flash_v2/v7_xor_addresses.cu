// v7_xor_addresses: each shared-memory address is a base offset XOR a constant.
//
// parent    v6_register_double_buffer
// change    A lane computes one base offset for each of Q, K and V. Along a row the offset changes
//           by XOR with a constant, 16 rows down by adding one. A thread copies one column of
//           chunks, and bounds-checks rows only in a partial tile.
// why       The parent computes the full swizzled address of every fragment.
// expect    sm__inst_executed.sum: integer instructions between the MMAs
// supports  fp16, bf16; head dims 32, 64, 128; any lengths, masks, GQA; softmax_scale >= 1e-37
#include "attn/kernel.h"
#include "emulator/warp_access.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "kernels/fragments.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::v7_xor_addresses {
using namespace attn;
using namespace flash2;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = 128, kBlockN = 64;  // B_r, B_c
  static constexpr int kNumWarps = 4, kThreads = 32 * kNumWarps, kBlocksPerSm = 2;
  static constexpr int kWarpRows = kBlockM / kNumWarps;
  static constexpr int kTiles = kWarpRows / 16;  // 16-row MMA tiles per warp
  static constexpr int kRowBytes = 2 * kHeadDim;
  static constexpr int kSwizzleChunks =
      kHeadDim % 64 == 0 ? 8 : 4;  // 16-byte chunks that the swizzle permutes
  static constexpr int kCopyRows = kThreads / kSwizzleChunks;  // rows that the block copies at once
  static_assert(kBlockN % 16 == 0 && kHeadDim % 16 == 0, "warps own whole MMAs");
};

// Byte offset `cols` columns further along the row: XOR within a span of kSwizzleChunks chunks,
// addition from span to span. Example, row 5 at d=128: chunk 0 is at 5 * 256 + (0 ^ 5) * 16 = 1360,
// chunk 6 at 5 * 256 + (6 ^ 5) * 16 = 1328 = 1360 ^ 6 * 16. Valid because the XOR changes bits that
// are 0 at a row's start, for an `offset` in chunk 0, and in chunk 1 if `cols` is a multiple of 16.
template <int kSwizzleChunks>
__host__ __device__ constexpr int swizzle_advance(int offset, int cols) {
  return (offset ^ (2 * (cols % (8 * kSwizzleChunks)))) +
         cols / (8 * kSwizzleChunks) * (16 * kSwizzleChunks);
}

// XOR swizzle: offset of element (row, col) of a tile [rows, kHeadDim]. The 16-byte chunks of a row
// are permuted so that the 8 rows that ldmatrix reads at once lie in disjoint banks. Rows of 4
// chunks (d = 32) share the 32 banks in pairs, so their permutation changes every second row.
//! [swizzle]
//! [ex04b]
template <int kHeadDim>
__host__ __device__ constexpr int swizzled_offset(int row, int col) {
  constexpr int kChunks = kHeadDim / 8;  // 4, 8 or 16 per row
  const int phase = kChunks >= 8 ? row % 8 : row / 2 % 4;
  return row * kHeadDim + ((col / 8) ^ phase) * 8 + col % 8;
}
template <int kHeadDim>
constexpr bool free_of_conflicts() {
  for (int col = 0; col < kHeadDim; col += 16)
    if (ldmatrix_access(  // Q and V
            [=](int l) { return 2 * swizzled_offset<kHeadDim>(l % 16, col + l / 16 * 8); }, 4)
                .conflicts() > 0 ||
        ldmatrix_access(  // K
            [=](int l) {
              return 2 * swizzled_offset<kHeadDim>(l / 16 * 8 + l % 8, col + l / 8 % 2 * 8);
            },
            4)
                .conflicts() > 0)
      return false;
  for (int col = 0; col < kHeadDim; col += 16)
    for (int l = 0; l < 32; ++l)  // swizzle_advance gives the same addresses
      if (const int idx = 2 * swizzled_offset<kHeadDim>(l % 16, l / 16 * 8);
          swizzle_advance<Config<kHeadDim>::kSwizzleChunks>(idx, col) !=
          2 * swizzled_offset<kHeadDim>(l % 16, col + l / 16 * 8))
        return false;
  return true;
}
static_assert(free_of_conflicts<32>() && free_of_conflicts<64>() && free_of_conflicts<128>());
//! [ex04b]
//! [swizzle]

template <class Element, class Config>
struct SharedStorage {
  alignas(128) Element sK[Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sV[Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sQ[Config::kBlockM * Config::kHeadDim];  // [kBlockM, d]
  Sequence sequence;  // offsets and lengths (kernels/tiles.h); here, like row0, to save registers
  int row0;
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sequence, row0)
};

// Issues cp.async of kRows rows; rows from `rows` on become 0. `g`: this thread's first chunk, row
// tid / kSwizzleChunks and chunk tid % kSwizzleChunks.
//! [copy]
template <int kRows, class Config, class Element>
__device__ __forceinline__ void load_tile(Element* tile, const Element* g, int rows) {
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
        cp_async_16(to + r * kHeadDim + c, g + (inside ? r : -row) * kHeadDim + c, inside ? 16 : 0);
      }
  };
  rows >= kRows ? copy(std::false_type{}) : copy(std::true_type{});
}
//! [copy]

// (3) S = Q K^T for the rows of this warp. Fragments are loaded one MMA ahead.
// `q`, `k`: byte offsets of this lane in the first 16 columns.
//! [scores]
template <class Element, class Config>
__device__ __forceinline__ void gemm_qk(float (&s)[Config::kTiles][Config::kBlockN / 8][4],
                                        const char* sQ, const char* sK) {
  constexpr int kKeySteps = Config::kBlockN / 16, kColSteps = Config::kHeadDim / 16;
  uint32_t a[2][Config::kTiles][4], b[2][4];
  // thread_index() reads threadIdx.x again, so that no register holds it during the loop.
  const int tid = thread_index(), row = tid / 32 * Config::kWarpRows + tid % 16;
  const int q = 2 * swizzled_offset<Config::kHeadDim>(row, tid / 16 % 2 * 8);
  const int k = 2 * swizzled_offset<Config::kHeadDim>(tid / 16 % 2 * 8 + tid % 8, tid / 8 % 2 * 8);
  const auto load_k = [&](int i) {
    const char* const rows = sK + i % kKeySteps * 16 * Config::kRowBytes;  // 16 keys
    ldmatrix_x4(b[i % 2], rows + swizzle_advance<Config::kSwizzleChunks>(k, i / kKeySteps * 16));
  };
  const auto load_q = [&](int step) {
    if (step == kColSteps) return;
#pragma unroll
    for (int m = 0; m < Config::kTiles; ++m)
      ldmatrix_x4(a[step % 2][m], sQ + swizzle_advance<Config::kSwizzleChunks>(q, 16 * step) +
                                      16 * m * Config::kRowBytes);
  };
  load_q(0);
  load_k(0);
#pragma unroll
  for (int step = 0; step < kColSteps; ++step) {
    load_q(step + 1);
    const auto& rows = a[step % 2];  // fragments of Q
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

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    attention_kernel(const Element* gQ,  // [B, Hq, seqlen_q, d]
                     const Element* gK,  // [B, Hkv, seqlen_k, d]
                     const Element* gV,  // [B, Hkv, seqlen_k, d]
                     Element* gO,        // [B, Hq, seqlen_q, d]
                     float* gLse,        // [B, Hq, seqlen_q]
                     Shape shape, int num_m_blocks, int num_heads) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kTiles = Config::kTiles, kWarpRows = Config::kWarpRows;
  constexpr int kSwizzleChunks = Config::kSwizzleChunks;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const auto bytes = [](const auto& tile) { return reinterpret_cast<const char*>(&tile); };
  // Longest query tiles first (LPT order: longest processing time first), across all heads.
  const int row0 = (num_m_blocks - 1 - blockIdx.x / num_heads) * kBlockM;
  const int bh = blockIdx.x % num_heads;
  const Sequence sequence = sequence_of(shape, bh, kHeadDim);
  const int seqlen_k = sequence.seqlen_k, causal_offset = seqlen_k - sequence.seqlen_q;
  const KvBlockRange kv_range =
      kv_block_range(shape, sequence.seqlen_q, seqlen_k, row0, kBlockM, kBlockN);
  // This thread's first chunk in each tile that it copies.
  const int copy_row = threadIdx.x / kSwizzleChunks, chunk = threadIdx.x % kSwizzleChunks * 8;
  const Element* const q = gQ + sequence.q + int64_t{row0 + copy_row} * kHeadDim + chunk;
  const int64_t kv = sequence.kv + copy_row * kHeadDim + chunk;
  const auto load_kv = [&](Element* to, const Element* g, int n_block) {
    load_tile<kBlockN, Config>(to, g + kv + int64_t{n_block * kBlockN} * kHeadDim,
                               seqlen_k - n_block * kBlockN);
  };
  const float softmax_scale_log2 = shape.softmax_scale * kLog2e;

  if (threadIdx.x == 0) smem.sequence = sequence, smem.row0 = row0;
  // (1) Issue the copies of Q_i, which stays in shared memory, and of the first K_j.
  if (kv_range.begin < kv_range.end) {
    load_tile<kBlockM, Config>(smem.sQ, q, sequence.seqlen_q - row0);
    load_kv(smem.sK, gK, kv_range.begin);
    cp_async_commit();
  }
  __syncthreads();                        // smem.sequence is visible
  float o[kTiles][kHeadDim / 8][4] = {};  // unnormalised
  // row_max in log2 units; row_sum of this lane's keys
  float row_max[kTiles][2], row_sum[kTiles][2] = {};
  for (int m = 0; m < kTiles; ++m) row_max[m][0] = row_max[m][1] = kLowest;

  // One KV block. `masked` is a compile-time flag: the unmasked body compares no index.
  const auto process_kv_block = [&](int n_block, auto masked) {
    const int key0 = n_block * kBlockN;
    // A warp skips a masked block in which all its rows are masked.
    const int warp_row0 = smem.row0 + thread_index() / 32 * kWarpRows;
    const bool idle =
        masked.value && (key0 > warp_row0 + kWarpRows - 1 + causal_offset + shape.window_right ||
                         key0 + kBlockN <= warp_row0 + causal_offset - shape.window_left);
    // (2) Issue V_j: in flight during Q K^T. At each of the two waits at most one cp.async group is
    // in flight, so cp_async_wait<0> waits for that group only.
    //! [pipeline]
    cp_async_wait<0>();
    __syncthreads();  // K_j is visible; all warps have read V_j-1
    load_kv(smem.sV, gV, n_block);
    cp_async_commit();
    //! [pipeline]

    // (3) S = Q K^T, -inf where masked.
    float s[kTiles][kBlockN / 8][4] = {};
    if (!idle) {
      gemm_qk<Element, Config>(s, bytes(smem.sQ), bytes(smem.sK));
      const int lane_id = thread_index() % 32;
      const int row_minus_col = warp_row0 + lane_id / 4 + causal_offset - key0 - lane_id % 4 * 2;
      if constexpr (masked.value) apply_mask(s, shape, row_minus_col, seqlen_k - key0);
    }

    // K_j+1 is in flight during softmax and P V.
    //! [pipeline_k]
    cp_async_wait<0>();
    __syncthreads();  // V_j is visible; all warps have read K_j
    if (n_block + 1 < kv_range.end) load_kv(smem.sK, gK, n_block + 1);
    cp_async_commit();
    //! [pipeline_k]
    if (idle) return;

      // (4) Online softmax, within the quad of lanes that share a row.
      //! [softmax]
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float max = -INFINITY;
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n)
          max = fmaxf(max, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
        max = fmaxf(row_max[m][r], quad_max(max) * softmax_scale_log2);
        const float rescale = exp2f(row_max[m][r] - max);
        row_max[m][r] = max;
        row_sum[m][r] *= rescale;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n)
          o[m][n][2 * r] *= rescale, o[m][n][2 * r + 1] *= rescale;
      }
    const auto exponentials = [&](int m, int step) {
#pragma unroll
      for (int n = 2 * step; n < 2 * step + 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[m][n][i] = exp2f(fmaf(s[m][n][i], softmax_scale_log2, -row_max[m][i / 2]));
          row_sum[m][i / 2] += s[m][n][i];
        }
    };
    // Two neighbouring accumulators of S, rounded and packed in pairs, are one A fragment of P V.
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

  // (7) O = O / l, once; (8) store O and lse.
  //! [finish]
  const int tid = thread_index(), lane_id = tid % 32, warp_rows = tid / 32 * kWarpRows;
  const Sequence seq = smem.sequence;
  const int first_row = smem.row0 + warp_rows, rows = seq.seqlen_q - first_row;  // of this warp
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(row_sum[m][r]);
      const float factor = sum != 0 ? 1 / sum : 0;  // fully masked row: O = 0
      const int row = 16 * m + 8 * r + lane_id / 4;
      if (row >= rows) continue;
      Element* const to = gO + seq.q + int64_t{first_row + row} * kHeadDim + lane_id % 4 * 2;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n)
        *reinterpret_cast<uint32_t*>(to + 8 * n) =
            pack2<Element>(o[m][n][2 * r] * factor, o[m][n][2 * r + 1] * factor);
      if (lane_id % 4 == 0)
        gLse[seq.lse + first_row + row] = sum != 0 ? kLn2 * row_max[m][r] + logf(sum) : -INFINITY;
    }
  //! [finish]
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const int64_t num_m_blocks = ceil_div(p.seqlen_q, Config::kBlockM), num_heads = p.heads * p.batch;
  // A dry run: the cost model only asks for the tiles.
  if (args.report_tiling(
          {Config::kBlockM, Config::kBlockN, num_heads, Config::kBlocksPerSm, Config::kWarpRows}))
    return Status::success();
  const ForwardParams<Element> params(args);
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config>,
                       dim3(static_cast<unsigned>(num_m_blocks * num_heads)),
                       dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), args.stream,
                       params.q, params.k, params.v, params.o, params.lse, shape_of(p),
                       static_cast<int>(num_m_blocks), static_cast<int>(num_heads));
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

}  // namespace ATTN_BACKEND::v7_xor_addresses
