// v11_mixed: prefill tiles and decode work tiles in one launch.
//
// parent    v7_prefill
// change    One list holds the query tiles of prefill and the work tiles of decoding sequences.
//           Resident blocks take entries from an atomic work queue, one counter per kind. The first
//           block on an SM prefers prefill, the second decoding, until that kind is used up. A
//           counter per SM tells a block which of the two it is (SM-aware CTA scheduling). If the
//           plan estimates a shorter time, all blocks prefer prefill.
// why       With chunked prefill, each batch contains both kinds. Prefill keeps the tensor cores
//           busy, decoding the memory; two launches in turn leave one of them idle. A static split
//           of the grid cannot mix the kinds on each SM, because the GPU chooses the SM of a block.
//           The plan fixes all partial results, so the output does not depend on which block takes
//           which entry.
// expect    gpu__time_duration.sum below the sum of both launches; dram throughput and tensor pipe
//           utilisation high at the same time. A decode work tile has 16 rows; in v7 a decoding
//           sequence takes a tile of up to 128
// supports  fp16, bf16; head dims 64, 128, 256; any lengths, ragged batches and page sizes, causal,
//           windows, GQA; scales from 1e-37; --serial, in two launches; --streams, in two streams
// source    Kamath et al., POD-Attention (arXiv 2410.18038)
#include <algorithm>
#include <tuple>

#include "attn/kernel.h"
#include "attn/two_streams.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "ptx/sm_id.h"
#include "kernels/decode_piece.h"
#include "kernels/work.h"
#include "kernels/prefill_tiles.h"

namespace ATTN_BACKEND::v11_mixed {
using namespace attn;
using namespace paged;
using namespace plans;
using namespace splits;
using namespace decoding;

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
  int ticket;  // entry of gWork that the block has taken; at the same address in DecodeStorage
  alignas(128) Element sK[Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sV[Config::kBlockN * Config::kHeadDim];  // [kBlockN, d]
  alignas(128) Element sQ[Config::kBlockM * Config::kHeadDim];  // [kBlockM, d]
  int sSlots[2][Config::kBlockN];  // slots of the keys of this block and the next
  // Here, because they are needed rarely and would occupy registers: the sequence's row of the page
  // table, and what the epilogue needs.
  const int* pages;  // [max_pages]
  Sequence sequence;
  int row0;
  ATTN_MEMBERS(SharedStorage, ticket, sK, sV, sQ, sSlots, pages, sequence, row0)
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

// One query tile of one head. Called by all threads of a block. `smem` is free before the call, and
// after it once the caller has passed a barrier; smem.ticket may be overwritten at once.
template <class Element, class Config>
__device__ __forceinline__ void prefill_tile(SharedStorage<Element, Config>& smem,
                                             const MixedWork& work, const Element* gQ,
                                             const Element* gK, const Element* gV,
                                             const int* gTable, const int* gSeqused,
                                             const int* cu_seqlens_q, Element* gO, float* gLse,
                                             const Shape& shape, int q_stride, int page_size,
                                             int max_pages) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kTiles = Config::kTiles, kWarpRows = Config::kWarpRows;
  constexpr int kSwizzleChunks = Config::kSwizzleChunks;
  const auto bytes = [](const auto& tile) { return reinterpret_cast<const char*>(&tile); };
  const int b = work.sequence, hq = work.head, row0 = work.row0;
  const Sequence sequence = sequence_of(shape, cu_seqlens_q, gSeqused, b, hq);
  const int seqlen_k = sequence.seqlen_k, causal_offset = seqlen_k - sequence.seqlen_q;
  const KvBlockRange kv_range =
      kv_block_range(shape, sequence.seqlen_q, seqlen_k, row0, kBlockM, kBlockN);
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
  if (threadIdx.x == 0) smem.pages = pages, smem.sequence = sequence, smem.row0 = row0;
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
      if constexpr (masked.value) apply_mask(s, shape, row_minus_col, seqlen_k - key0);
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

  // (7) O = O / l, once. (8) Store lse, and O by way of this warp's rows of sQ.
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

// Atomic work queue in device memory. `taken`: entries taken, of prefill and of decode; `gone`:
// blocks that have exited; `on_sm`: blocks resident on each SM. All are 0 between launches: a block
// that exits decrements its SM's counter, and the last one resets `taken` and `gone`.
//! [tickets]
enum Kinds { kPrefill = 1, kDecode = 2, kBoth = 3 };
// Two launches have separate queues, since they may run concurrently: with a shared queue the last
// block of one would reset counters that the other still uses, and work would be done twice. They
// share no other written memory: partial O and its semaphores belong to decoding, rows of O to one
// sequence.
struct Tickets {
  unsigned taken[2], gone, on_sm[kCountedSms];
};
static_assert(2 * sizeof(Tickets) == kTickets * sizeof(unsigned), "of two launches");
// The SM of a block, and the kind of work that it takes first.
struct Preference {
  unsigned sm;
  int kind;  // 0: prefill, 1: decoding
};
//! [ex07f]
__device__ __forceinline__ Preference preference_of_block(Tickets* tickets, const int* gCounts) {
  const unsigned sm = sm_id() % kCountedSms;
  const unsigned before = flag_add(&tickets->on_sm[sm], 1);
  return {sm, gCounts[2] == 0 && before % 2 == 1};
}
// Index in gWork of the block's next entry: of its preferred kind until that is used up, then of
// the other. -1: none left. Called by one thread of a block.
__device__ __forceinline__ int take_ticket(Tickets* tickets, const int* gCounts, int kinds,
                                           Preference preference) {
  for (int n = 0; n < 2; ++n) {
    const int kind = preference.kind ^ n;
    if ((kinds & (kind == 0 ? kPrefill : kDecode)) == 0) continue;
    const int idx = static_cast<int>(flag_add(&tickets->taken[kind], 1));
    if (idx < gCounts[kind]) return kind == 0 ? idx : gCounts[0] + idx;
  }
  flag_add(&tickets->on_sm[preference.sm], ~0u);     // decrements
  if (flag_add(&tickets->gone, 1) == gridDim.x - 1)  // the last block to exit
    tickets->taken[0] = tickets->taken[1] = tickets->gone = 0;
  return -1;
}
//! [ex07f]
//! [tickets]

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    attention_kernel(const Element* gQ,        // [tokens, Hq, d], or [B, Hq, seqlen_q, d]
                     const Element* gK,        // [num_pages, page_size, Hkv, d]
                     const Element* gV,        // [num_pages, page_size, Hkv, d]
                     const int* gTable,        // [B, max_pages]: page table
                     const int* gSeqused,      // [B]: valid keys per sequence
                     const int* cu_seqlens_q,  // [B + 1]: first query of each sequence, or null
                     const MixedWork* gWork,   // [most]: prefill tiles, then decode work tiles
                     // [3]: prefill tiles, decode work tiles; 1 if all blocks prefer prefill
                     const int* gCounts,
                     Tickets* gTickets,     // the work queue
                     Element* gO,           // as gQ
                     float* gLse,           // [Hq, tokens], or [B, Hq, seqlen_q]
                     float* gOPartial,      // [parts, 16, d], of decode work tiles
                     float* gLsePartial,    // [parts, 16], in log2 units
                     unsigned* gSemaphore,  // [row blocks]: arrivals
                     Shape shape, int q_stride, int page_size, int max_pages, int kinds) {
  using Decode = DecodeConfig<Config::kHeadDim>;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  Preference preference{};
  if (threadIdx.x == 0) preference = preference_of_block(gTickets, gCounts);
  for (;;) {
    // An entry contains a barrier, so all threads have read the previous ticket.
    if (threadIdx.x == 0) smem.ticket = take_ticket(gTickets, gCounts, kinds, preference);
    __syncthreads();  // the ticket is visible; all threads have finished reading shared memory
    const int ticket = smem.ticket;
    if (ticket < 0) return;
    const MixedWork& work = gWork[ticket];
    if (ticket < gCounts[0])
      prefill_tile<Element, Config>(smem, work, gQ, gK, gV, gTable, gSeqused, cu_seqlens_q, gO,
                                    gLse, shape, q_stride, page_size, max_pages);
    else
      decode_piece<Element, Decode>(
          reinterpret_cast<DecodeStorage<Element, Decode>&>(smem), work,
          rows_of_group(shape, cu_seqlens_q, gSeqused, work.sequence, work.head, q_stride), shape,
          gTable + int64_t{work.sequence} * max_pages, page_size,
          {gQ, gK, gV, gO, gLse, gOPartial, gLsePartial, gSemaphore});
  }
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const PagedParams<Element> params(args);
  const Problem& p = args.problem;
  constexpr std::size_t kBytes =
      std::max(sizeof(SharedStorage<Element, Config>),
               sizeof(DecodeStorage<Element, DecodeConfig<Config::kHeadDim>>));
  const auto arguments_of = [&](Kinds kinds) {
    return std::tuple(
        params.q, params.k, params.v, params.page_table, params.seqused_k,
        args.in_or_null<int>("cu_seqlens_q"), args.in<MixedWork>("work"),
        args.in<int>("work_counts"), args.out<Tickets>("tickets") + (kinds == kDecode ? 1 : 0),
        params.o, params.lse, params.o_partial, params.lse_partial, params.arrived, shape_of(p),
        static_cast<int>(p.head_dim * (p.varlen() ? p.heads : 1)),
        static_cast<int>(page_size_of(p)), static_cast<int>(max_pages_of(p)), int{kinds});
  };
  const auto kernel = attention_kernel<Element, Config>;
  const auto grid = [&](int64_t blocks_per_sm) {
    return dim3(static_cast<unsigned>(blocks_per_sm * planned_blocks(p)));
  };
  const auto launch_of = [&](Kinds kinds) {
    const auto launch = [&](auto... arguments) {
      return launch_kernel(kernel, grid(Config::kBlocksPerSm), dim3(Config::kThreads), kBytes,
                           args.stream, arguments...);
    };
    return std::apply(launch, arguments_of(kinds));
  };
  const bool serial = p.own.contains("serial");
  args.phase(serial ? "prefill" : "attention");
  // Half of the resident blocks each: with all of them, the first launch would leave no room for
  // the second until it runs out of work. The GPU chooses their SMs.
  if (p.own.contains("streams"))
    return launch_in_two_streams(kernel, grid(Config::kBlocksPerSm / 2), dim3(Config::kThreads),
                                 kBytes, args.stream, arguments_of(kPrefill),
                                 arguments_of(kDecode));
  Status status = launch_of(serial ? kPrefill : kBoth);
  if (!serial || !status.ok()) return status;
  args.phase("decode");
  return launch_of(kDecode);
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

}  // namespace ATTN_BACKEND::v11_mixed
