// v9_tree_mask: tree attention; a bitmask of seqlen_q x seqlen_q.
//
// parent    v7_prefill
// change    The mask covers only the last seqlen_q keys: one row of 32-bit words per query. For
//           each of its rows a lane extracts the 64 bits of a key block. Blocks before the tree
//           need no mask.
// why       In speculative decoding a draft proposes a tree of continuations, and one pass of the
//           model verifies all of them. A token attends to the cache and to its ancestors, not to
//           its siblings.
// expect    the time of v7 with as many queries; the one or two blocks of the tree cost more
// supports  fp16, bf16; head dims 64, 128, 256; any lengths, ragged batches and page sizes, trees,
//           causal, windows, GQA; scales from 1e-37
// source    Miao et al., SpecInfer (arXiv 2305.09781); Cai et al., Medusa (arXiv 2401.10774)
#include <algorithm>

#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "kernels/prefill_tiles.h"

namespace ATTN_BACKEND::v9_tree_mask {
using namespace attn;
using namespace paged;
using namespace splits;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = prefill_rows(kHeadDim), kBlockN = kPrefillKeys;  // B_r, B_c
  static constexpr int kNumWarps = kPrefillWarps, kThreads = 32 * kNumWarps, kBlocksPerSm = 2;
  static constexpr int kWarpRows = kBlockM / kNumWarps;
  static constexpr int kTiles = kWarpRows / 16;  // 16-row MMAs per warp
  // 16-column fragments of Q that stay in registers. At d=128 none fit next to O of 32 rows per
  // warp; at d=256 a tile has half as many rows.
  static constexpr int kQSteps = kHeadDim == 64 ? 4 : kHeadDim == 256 ? 8 : 0;
  static constexpr int kRowBytes = 2 * kHeadDim;
  // 16-byte chunks that the swizzle permutes: 8, as all head dims of this chapter are multiples of
  // 64 (chapter 04 has others)
  static constexpr int kSwizzleChunks = kHeadDim % 64 == 0 ? 8 : 4;
  static constexpr int kCopyRows = kThreads / kSwizzleChunks;  // rows that the block copies at once
  static_assert(kBlockN % 16 == 0 && kHeadDim % 16 == 0, "warps own whole MMAs");
};

template <class Element, class Config>
struct SharedStorage {
  alignas(128) Element sK[Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sV[Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sQ[Config::kBlockM * Config::kHeadDim];  // [kBlockM, d]
  int sSlots[2][Config::kBlockN];  // slots of the keys of this block and the next
  // Here, because they are needed rarely and would occupy registers: the sequence's row of the page
  // table, its tree, and what the epilogue needs.
  const int* pages;  // [max_pages]
  const int* tree;   // [seqlen_q, words]
  Sequence sequence;
  int row0;
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sSlots, pages, tree, sequence, row0)
};

// Issues cp.async of kRows rows; rows from `rows` on become 0. `row_of(row)`: this thread's first
// chunk of a row in memory; any valid chunk for rows past the end.
//! [copy]
template <int kRows, class Config, class Element, class RowOf>
__device__ __forceinline__ void load_tile(Element* tile, int rows, RowOf row_of) {
  constexpr int kSwizzleChunks = Config::kSwizzleChunks, kHeadDim = Config::kHeadDim;
  const int tid = thread_index(), row = tid / kSwizzleChunks;
  Element* const to = tile + swizzled_offset<kHeadDim>(row, tid % kSwizzleChunks * 8);
  const auto copy = [&](auto compares) {
#pragma unroll
    for (int r = 0; r < kRows; r += Config::kCopyRows) {
      const bool inside = !compares.value || row + r < rows;
      const Element* const from = row_of(row + r);
#pragma unroll
      for (int c = 0; c < kHeadDim; c += 8 * kSwizzleChunks)
        cp_async_16(to + r * kHeadDim + c, from + c, inside ? 16 : 0);
    }
  };
  rows >= kRows ? copy(std::false_type{}) : copy(std::true_type{});
}
//! [copy]

// (3) S = Q K^T for the rows of this warp. Fragments are loaded one MMA ahead; the first kQSteps
// fragments of Q are in registers. Offsets: in bytes, this lane's in the first 16 columns.
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
    const char* const rows = sK + i % kKeySteps * 16 * Config::kRowBytes;
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
    const auto& rows = step < Config::kQSteps ? rQ[step % kCount] : a[step % 2];
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

//! [tree]
//! [ex07d]
// 64 bits of a query's row of the mask, from bit `first` on. Keys before the tree count as 1, keys
// after it as 0.
__device__ __forceinline__ uint64_t tree_bits(const int* row, int words, int first) {
  const auto word = [&](int n) -> uint64_t {
    return n < 0 ? ~0u : n < words ? static_cast<unsigned>(row[n]) : 0u;
  };
  if (first <= -64) return ~uint64_t{0};
  // word and bit of `first`, which may be negative: 64 is added so that / and % round down
  const int n = (first + 64) / 32 - 2, shift = (first + 64) % 32;
  const uint64_t low = word(n) | word(n + 1) << 32;
  return shift == 0 ? low : low >> shift | word(n + 2) << (64 - shift);
}
// Sets keys of the block that are not ancestors of this lane's rows to -inf. `row`: the lane's
// first row; `first`: the first key of the block, relative to the first key of the tree.
template <int kTiles, int kColumns>
__device__ __forceinline__ void apply_tree(float (&s)[kTiles][kColumns][4], const int* tree,
                                           int words, int row, int rows, int first) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // rows past the last have its bits; they are not stored
      const int query = min(row + 16 * m + 8 * r, rows - 1);
      const uint64_t bits =
          tree_bits(tree + int64_t{query} * words, words, first) >> (thread_index() % 4 * 2);
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if ((bits >> (8 * n + i) & 1) == 0) s[m][n][2 * r + i] = -INFINITY;
    }
}
//! [ex07d]
//! [tree]

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    attention_kernel(const Element* gQ,        // [tokens, Hq, d], or [B, Hq, seqlen_q, d]
                     const Element* gK,        // [num_pages, page_size, Hkv, d]
                     const Element* gV,        // [num_pages, page_size, Hkv, d]
                     const int* gTable,        // [B, max_pages]: page table
                     const int* gSeqused,      // [B]: valid keys per sequence
                     const int* cu_seqlens_q,  // [B + 1]: first query of each sequence, or null
                     // [tokens, words]: per query, its visible tree tokens; or null
                     const int* gTree,
                     Element* gO,  // as gQ
                     float* gLse,  // [Hq, tokens], or [B, Hq, seqlen_q]
                     Shape shape, int q_stride, int page_size, int max_pages, int words,
                     int num_m_blocks, int num_heads, int section) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kTiles = Config::kTiles, kWarpRows = Config::kWarpRows;
  constexpr int kSwizzleChunks = Config::kSwizzleChunks;
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
  const int b = bh / shape.heads, hq = bh % shape.heads;
  const Sequence sequence = sequence_of(shape, cu_seqlens_q, gSeqused, b, hq);
  if (row0 >= sequence.seqlen_q) return;  // past the end of this sequence
  const int seqlen_k = sequence.seqlen_k, causal_offset = seqlen_k - sequence.seqlen_q;
  KvBlockRange kv_range =
      kv_block_range(shape, sequence.seqlen_q, seqlen_k, row0, kBlockM, kBlockN);
  if (gTree != nullptr)  // blocks of the tree are masked
    kv_range.unmasked_end =
        max(kv_range.unmasked_begin, min(kv_range.unmasked_end, max(0, causal_offset) / kBlockN));
  // This thread's first chunk of a row of Q, and of a token of the pool.
  const int chunk = threadIdx.x % kSwizzleChunks * 8;
  const Element* const q = gQ + sequence.q + int64_t{row0} * q_stride + chunk;
  const int kv = hq / (shape.heads / shape.kv_heads) * kHeadDim + chunk;
  //! [slots]
  // Each thread looks up one key of a block; past the end, the last key.
  const auto look_up = [&](const int* pages, int n_block) {
    const int key = min(n_block * kBlockN + thread_index() % kBlockN, seqlen_k - 1);
    return pages[key / page_size] * page_size + key % page_size;
  };
  const auto store_slot = [&](int n_block, int slot) {
    if (thread_index() < kBlockN) smem.sSlots[n_block % 2][thread_index()] = slot;
  };
  const auto load_kv = [&](Element* to, const Element* g, int n_block) {
    load_tile<kBlockN, Config>(to, seqlen_k - n_block * kBlockN, [&](int row) {
      return g + kv + int64_t{smem.sSlots[n_block % 2][row]} * (shape.kv_heads * kHeadDim);
    });
  };
  //! [slots]
  const float softmax_scale_log2 = shape.softmax_scale * kLog2e;

  const int* const pages = gTable + int64_t{b} * max_pages;
  const int first_query = cu_seqlens_q != nullptr ? cu_seqlens_q[b] : b * shape.seqlen_q;
  if (threadIdx.x == 0) {
    smem.pages = pages, smem.sequence = sequence, smem.row0 = row0;
    smem.tree = gTree == nullptr ? nullptr : gTree + int64_t{first_query} * words;
  }
  // (1) Issue Q_i, which stays, and the first K_j.
  uint32_t rQ[std::max(1, Config::kQSteps)][kTiles][4];
  if (kv_range.begin < kv_range.end) {
    const int rows = sequence.seqlen_q - row0;
    load_tile<kBlockM, Config>(smem.sQ, rows,
                               [&](int row) { return q + int64_t{min(row, rows - 1)} * q_stride; });
    if (Config::kQSteps > 0) cp_async_commit();
    store_slot(kv_range.begin, look_up(pages, kv_range.begin));
  }
  __syncthreads();  // smem.sequence and the first slots are visible
  if (kv_range.begin < kv_range.end) {
    load_kv(smem.sK, gK, kv_range.begin);
    cp_async_commit();
  }
  if (Config::kQSteps > 0) {
    cp_async_wait<1>();
    __syncthreads();  // Q is visible
  }
  if (kv_range.begin < kv_range.end) {
#pragma unroll
    for (int step = 0; step < Config::kQSteps; ++step)
      load_q_fragments<Config>(rQ[step], bytes(smem.sQ), q_offset<Config>(), 16 * step);
  }
  float o[kTiles][kHeadDim / 8][4] = {};  // unnormalised
  // row_max: the reference, which may lag the row max (log2 units); row_sum: of this lane's keys
  float row_max[kTiles][2], row_sum[kTiles][2] = {};
  for (int m = 0; m < kTiles; ++m) row_max[m][0] = row_max[m][1] = kLowest;

  // One key block. `masked` is a type, so the unmasked body contains no mask code.
  const auto process_kv_block = [&](int n_block, auto masked) {
    const int key0 = n_block * kBlockN;
    // A warp skips a masked block in which all its rows are masked.
    const int warp_row0 = smem.row0 + thread_index() / 32 * kWarpRows;
    const bool idle =
        masked.value && (key0 > warp_row0 + kWarpRows - 1 + causal_offset + shape.window_right ||
                         key0 + kBlockN <= warp_row0 + causal_offset - shape.window_left);
    // (2) V_j is in flight during Q K^T. At most one cp.async group is in flight, so both waits
    // wait for all groups.
    //! [pipeline]
    cp_async_wait<0>();
    __syncthreads();  // K_j is visible; all warps have read V_j-1
    load_kv(smem.sV, gV, n_block);
    cp_async_commit();
    const bool more = n_block + 1 < kv_range.end;
    // the look-up's latency overlaps with Q K^T
    const int slot = more ? look_up(smem.pages, n_block + 1) : 0;
    //! [pipeline]

    // (3) S = Q K^T, -inf where masked.
    float s[kTiles][kBlockN / 8][4] = {};
    if (!idle) {
      gemm_qk<Element, Config>(s, rQ, bytes(smem.sQ), bytes(smem.sK));
      const int lane_id = thread_index() % 32;
      const int row_minus_col = warp_row0 + lane_id / 4 + causal_offset - key0 - lane_id % 4 * 2;
      if constexpr (masked.value) {
        apply_mask(s, shape, row_minus_col, seqlen_k - key0);
        if (gTree != nullptr && key0 + kBlockN > causal_offset)
          apply_tree(s, smem.tree, words, warp_row0 + lane_id / 4, smem.sequence.seqlen_q,
                     key0 - causal_offset);
      }
    }

    // K_j+1 is in flight during softmax and P V.
    //! [pipeline_k]
    store_slot(n_block + 1, slot);  // replaces those of block j-1
    cp_async_wait<0>();
    __syncthreads();  // V_j and the slots are visible; all warps have read K_j
    if (more) load_kv(smem.sK, gK, n_block + 1);
    cp_async_commit();
    //! [pipeline_k]
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

  // (7) O = O / l, once; (8) store O through this warp's rows of sQ, and lse.
  //! [finish]
  const int tid = thread_index(), lane_id = tid % 32, warp_rows = tid / 32 * kWarpRows;
  char* const sO = reinterpret_cast<char*>(smem.sQ + warp_rows * kHeadDim);  // [kWarpRows, d]
  const Sequence seq = smem.sequence;
  const int first_row = smem.row0 + warp_rows, rows = seq.seqlen_q - first_row;  // of this warp
  const int o_lane = 2 * swizzled_offset<kHeadDim>(lane_id / 4, lane_id % 4 * 2);
  __syncwarp();  // all lanes have read Q
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(row_sum[m][r]);
      const float factor = sum != 0 ? 1 / sum : 0;  // fully masked row: O = 0
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
      *reinterpret_cast<uint4*>(gO + seq.q + int64_t{first_row + r} * q_stride + c) =
          *reinterpret_cast<const uint4*>(sO + 2 * swizzled_offset<kHeadDim>(r, c));
  }
  //! [finish]
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const PagedParams<Element> params(args);
  const Problem& p = args.problem;
  const int64_t num_m_blocks = ceil_div(p.seqlen_q, Config::kBlockM), num_heads = p.heads * p.batch;
  args.phase("attention");
  return launch_kernel(
      attention_kernel<Element, Config>, dim3(static_cast<unsigned>(num_m_blocks * num_heads)),
      dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), args.stream, params.q,
      params.k, params.v, params.page_table, params.seqused_k, args.in_or_null<int>("cu_seqlens_q"),
      args.in_or_null<int>("tree_mask"), params.o, params.lse, shape_of(p),
      static_cast<int>(p.head_dim * (p.varlen() ? p.heads : 1)), static_cast<int>(page_size_of(p)),
      static_cast<int>(max_pages_of(p)), static_cast<int>(tree_words(p)),
      static_cast<int>(num_m_blocks), static_cast<int>(num_heads),
      static_cast<int>(heads_of_section(p)));
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    switch (args.problem.head_dim) {
      case 64: return launch<Element, Config<64>>(args);
      case 128: return launch<Element, Config<128>>(args);
      case 256: return launch<Element, Config<256>>(args);
    }
    return Status::unsupported("only head dims 64, 128 and 256");
  });
}

}  // namespace ATTN_BACKEND::v9_tree_mask
