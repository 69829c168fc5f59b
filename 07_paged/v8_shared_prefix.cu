// v8_shared_prefix: cascade; a shared prefix is read once for all sequences that share it.
//
// parent    v7_prefill
// change    The queries of all sequences that share a prefix are the rows of one problem, enough
//           for the tiles of prefill. The rest of each sequence is a batch that v5 decodes, with
//           page table and lengths that start after the prefix. A third kernel merges.
// why       Sequences that start with the same tokens share pages, but decoding reads them once per
//           sequence, for a few rows each time. Attention over a union of key sets is the merge of
//           attention over each set, so the prefix can be computed separately.
// expect    fewer bytes of K and V: a prefix is read once instead of once per sequence; its time is
//           now that of MMAs
// supports  fp16, bf16; head dims 64, 128, 256; 1 to 16 queries, any lengths and page sizes,
//           causal, windows (with one on the left nothing is shared), GQA; scales from 1e-37
// source    FlashInfer's cascade attention (arXiv 2501.01005)
#include <algorithm>

#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "kernels/work.h"
#include "kernels/prefill_tiles.h"

ATTN_DECLARE_STEP(v5_balanced_plan);

namespace ATTN_BACKEND::v8_shared_prefix {
using namespace attn;
using namespace paged;
using namespace plans;
using namespace splits;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = prefix_rows(kHeadDim), kBlockN = kPrefillKeys;  // B_r, B_c
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
  // Here, because they are needed rarely and would occupy registers: a sequence's row of the page
  // table, and the work tile.
  const int* pages;  // [max_pages]
  PrefixWork work;
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sSlots, pages, work)
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

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    attention_kernel(const Element* gQ,        // [B, Hq, seqlen_q, d]
                     const Element* gK,        // [num_pages, page_size, Hkv, d]
                     const Element* gV,        // [num_pages, page_size, Hkv, d]
                     const int* gTable,        // [B, max_pages]: page table
                     const PrefixWork* gWork,  // [blocks]: the work tile of each block
                     const int* gMembers,  // [B]: sequences, the members of each group contiguous
                     float* gOPartial,     // [partial results, d]
                     float* gLsePartial,   // [partial results], in log2 units
                     Shape shape, int page_size, int max_pages) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kTiles = Config::kTiles, kWarpRows = Config::kWarpRows;
  constexpr int kSwizzleChunks = Config::kSwizzleChunks;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const auto bytes = [](const auto& tile) { return reinterpret_cast<const char*>(&tile); };
  const PrefixWork work = gWork[blockIdx.x];
  if (work.begin == work.end) return;  // empty entry
  const int seqlen_k = work.keys;
  const KvBlockRange kv_range{work.begin, work.begin, seqlen_k / kBlockN, work.end};
  // This thread's first chunk of a row of Q, and of a token of the pool.
  //! [rows]
  const int chunk = threadIdx.x % kSwizzleChunks * 8;
  const int each = shape.heads / shape.kv_heads * shape.seqlen_q;  // rows per member
  const auto row_of_q = [&](int row) {
    const int b = gMembers[work.first_member + row / each];
    return gQ + ((int64_t{b} * shape.kv_heads + work.kv_head) * each + row % each) * kHeadDim +
           chunk;
  };
  //! [rows]
  const int kv = work.kv_head * kHeadDim + chunk;
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

  const int* const pages = gTable + int64_t{work.sequence} * max_pages;
  if (threadIdx.x == 0) smem.pages = pages, smem.work = work;
  // (1) Issue Q_i, which stays, and the first K_j. Here kv_range is never empty; the tests are
  // v7's.
  uint32_t rQ[std::max(1, Config::kQSteps)][kTiles][4];
  if (kv_range.begin < kv_range.end) {
    load_tile<kBlockM, Config>(smem.sQ, work.rows - work.row0, [&](int row) {
      return row_of_q(min(work.row0 + row, work.rows - 1));
    });
    if (Config::kQSteps > 0) cp_async_commit();
    store_slot(kv_range.begin, look_up(pages, kv_range.begin));
  }
  __syncthreads();  // smem.work and the first slots are visible
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

    // (3) S = Q K^T, -inf past the last key.
    float s[kTiles][kBlockN / 8][4] = {};
    gemm_qk<Element, Config>(s, rQ, bytes(smem.sQ), bytes(smem.sK));
    if constexpr (masked.value) apply_mask(s, shape, 0, seqlen_k - key0);

    // K_j+1 is in flight during softmax and P V.
    //! [pipeline_k]
    store_slot(n_block + 1, slot);  // replaces those of block j-1
    cp_async_wait<0>();
    __syncthreads();  // V_j and the slots are visible; all warps have read K_j
    if (more) load_kv(smem.sK, gK, n_block + 1);
    cp_async_commit();
    //! [pipeline_k]

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
    else  // end of the prefix
      process_kv_block(n_block, std::true_type{});
  //! [loops]

  // (7) O = O / l of these keys; (8) store partial O and lse for all rows of the tile.
  //! [finish]
  const int lane_id = thread_index() % 32, warp_rows = thread_index() / 32 * kWarpRows;
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(row_sum[m][r]), factor = 1 / sum;
      const int row = smem.work.row0 + warp_rows + 16 * m + 8 * r + lane_id / 4;
      if (row >= smem.work.rows) continue;
      const int64_t to = int64_t{smem.work.place} + row;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n)
        *reinterpret_cast<float2*>(gOPartial + to * kHeadDim + 8 * n + lane_id % 4 * 2) =
            make_float2(o[m][n][2 * r] * factor, o[m][n][2 * r + 1] * factor);
      if (lane_id % 4 == 0) gLsePartial[to] = row_max[m][r] + log2f(sum);
    }
  //! [finish]
}

// Merges O and lse of a suffix with the partial results of its prefix: one warp per row; a lane
// owns four of each 128 columns.
//! [merge]
template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads)
    merge_kernel(const int* gPrefixOf,      // [B, 4]: parts, first partial result, first row, rows
                 const float* gOPartial,    // [partial results, d]
                 const float* gLsePartial,  // [partial results], in log2 units
                 Element* gO,               // [B, Hq, seqlen_q, d]
                 float* gLse,               // [B, Hq, seqlen_q]
                 Shape shape, int rows) {
  constexpr int kHeadDim = Config::kHeadDim;
  const int lane_id = threadIdx.x % 32, idx = blockIdx.x * Config::kNumWarps + threadIdx.x / 32;
  if (idx >= rows) return;
  const int each = shape.heads / shape.kv_heads * shape.seqlen_q;
  const int head = idx / each % shape.kv_heads, b = idx / (each * shape.kv_heads);
  // of[1]: first partial result; of[2], of[3]: the sequence's first row and all rows of the group
  const int *const of = gPrefixOf + 4 * b, parts = of[0];
  if (parts == 0) return;  // no shared prefix
  const auto partial_index = [&](int n) {
    return int64_t{of[1]} + (head * parts + n) * of[3] + of[2] + idx % each;
  };
  const float lse_suffix = gLse[idx] * kLog2e;
  float max = lse_suffix, sum = 0;
  for (int n = 0; n < parts; ++n) max = fmaxf(max, gLsePartial[partial_index(n)]);
#pragma unroll
  for (int c = 4 * lane_id; c < kHeadDim; c += 128) {
    uint2& out = *reinterpret_cast<uint2*>(gO + int64_t{idx} * kHeadDim + c);
    const float weight = exp2f(lse_suffix - max);
    float x[4] = {weight * unpack<Element>(out.x, 0), weight * unpack<Element>(out.x, 1),
                  weight * unpack<Element>(out.y, 0), weight * unpack<Element>(out.y, 1)};
    sum = weight;
    for (int n = 0; n < parts; ++n) {
      const float of_part = exp2f(gLsePartial[partial_index(n)] - max);
      add_scaled(x, of_part,
                 *reinterpret_cast<const float4*>(gOPartial + partial_index(n) * kHeadDim + c));
      sum += of_part;
    }
    store_row_part(gO + int64_t{idx} * kHeadDim + c, x, 1 / sum);
  }
  __syncwarp();  // all lanes have read the lse that is overwritten
  if (lane_id == 0) gLse[idx] = kLn2 * (max + log2f(sum));
}
//! [merge]

template <class Element, class Config>
Status launch(const Arguments& args) {
  const PagedParams<Element> params(args);
  const Problem& p = args.problem;
  const int64_t rows = p.batch * p.heads * p.seqlen_q;
  args.phase("prefix");
  Shape shape = shape_of(p);
  shape.window_right = Shape::kNoWindow;  // every query attends to the whole prefix
  Status status = launch_kernel(
      attention_kernel<Element, Config>, dim3(static_cast<unsigned>(most_prefix_work(p))),
      dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), args.stream, params.q,
      params.k, params.v, params.page_table, args.in<PrefixWork>("prefix_work"),
      args.in<int>("members"), args.out<float>("prefix_o"), args.out<float>("prefix_lse"), shape,
      static_cast<int>(page_size_of(p)), static_cast<int>(max_pages_of(p)));
  if (!status.ok()) return status;
  Arguments suffix = args;
  suffix.bind("page_table", args.out<int>("suffix_table"));
  suffix.bind("seqused_k", args.out<int>("suffix_used"));
  status = v5_balanced_plan::launch(suffix);
  if (!status.ok()) return status;
  args.phase("merge");
  return launch_kernel(
      merge_kernel<Element, Config>, dim3(static_cast<unsigned>(ceil_div(rows, Config::kNumWarps))),
      dim3(Config::kThreads), 0, args.stream, args.in<int>("prefix_of"), args.in<float>("prefix_o"),
      args.in<float>("prefix_lse"), params.o, params.lse, shape_of(p), static_cast<int>(rows));
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

}  // namespace ATTN_BACKEND::v8_shared_prefix
