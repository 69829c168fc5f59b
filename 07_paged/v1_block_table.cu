// v1_block_table: one block per query head, keys found through a page table.
//
// parent    05_flash_decoding/v1_one_block
// change    Key `key` lies in page `key / page_size` of the sequence's row of the page table, at
//           token `key % page_size` of that page. As in vLLM's first kernel, one block of 128
//           threads per query head and sequence runs on CUDA cores.
// why       A contiguous cache reserves the longest possible length for each sequence. With pages a
//           sequence only occupies what it uses.
// expect    lts__t_bytes.sum grows with the group: K and V are read once per query head
// supports  fp16, bf16; head dims 64, 128, 256; 1 to 16 queries, any lengths and page sizes,
//           causal, windows, GQA
// source    Kwon et al., PagedAttention (arXiv 2309.06180)
#include "attn/kernel.h"
#include "kernels/splits.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::v1_block_table {
using namespace attn;
using namespace paged;
using namespace splits;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_, kRows = 1;
  static constexpr int kBlockN = 16;  // keys per tile of a warp
  static constexpr int kNumWarps = 4, kThreads = 32 * kNumWarps;
  static constexpr int kLanes = kHeadDim / 8;           // lanes per key, 16 bytes each
  static constexpr int kRowsPerLoad = 32 / kLanes;      // keys (rows of K) per load of a warp
  static constexpr int kKeys = kBlockN / kRowsPerLoad;  // keys per lane and tile
  // groups of lanes with their own (m, l) state
  static constexpr int kParts = kNumWarps * kRowsPerLoad;
  static_assert(kHeadDim % 64 == 0 && kLanes <= 32, "a warp reads whole rows");
};

template <class Config>
struct SharedStorage {
  float sO[Config::kParts][Config::kRows][Config::kHeadDim];
  float sMax[Config::kParts][Config::kRows];  // in log2 units
  float sSum[Config::kParts][Config::kRows];
  ATTN_MEMBERS(SharedStorage, sO, sMax, sSum)
};

// Slot of a key: its index in the pool, counted in tokens, below 2^31. slot * elements per token
// can exceed 2^31, so offsets are 64-bit.
//! [slot]
struct Pages {
  const int* gTable;  // [max_pages]: the sequence's row of the page table
  int page_size;
};
//! [ex07a]
__device__ __forceinline__ int slot_of(const Pages& pages, int key) {
  return pages.gTable[key / pages.page_size] * pages.page_size + key % pages.page_size;
}
//! [slot]

// Loads this lane's chunks of a tile; rows from `count` on become 0. `g`: the lane's chunk of the
// pool's first token.
//! [load]
template <class Config, class Element>
__device__ __forceinline__ void load_tile(uint4 (&tile)[Config::kKeys], const Element* g, int token,
                                          const Pages& pages, int key0, int count) {
  const int key = threadIdx.x % 32 / Config::kLanes;
#pragma unroll
  for (int n = 0; n < Config::kKeys; ++n) {
    const int row = n * Config::kRowsPerLoad + key;
    tile[n] = uint4{};
    if (row < count)
      tile[n] = *reinterpret_cast<const uint4*>(g + int64_t{slot_of(pages, key0 + row)} * token);
  }
}
//! [load]
//! [ex07a]

// Scores of one row with this lane's keys, in log2 units, reduced over the lanes of a key.
template <class Element, class Config>
__device__ __forceinline__ void gemm_qk(float (&s)[Config::kKeys], const float (&q)[8],
                                        const uint4 (&k)[Config::kKeys]) {
#pragma unroll
  for (int n = 0; n < Config::kKeys; ++n) {
    s[n] = dot<Element>(q, k[n]);
#pragma unroll
    for (int distance = 1; distance < Config::kLanes; distance *= 2)
      s[n] += __shfl_xor_sync(~0u, s[n], distance);
  }
}

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads)
    attention_kernel(const Element* gQ,    // [B, Hq, seqlen_q, d]
                     const Element* gK,    // [num_pages, page_size, Hkv, d]
                     const Element* gV,    // [num_pages, page_size, Hkv, d]
                     const int* gTable,    // [B, max_pages]: page table
                     const int* gSeqused,  // [B]: valid keys per sequence
                     Element* gO,          // [B, Hq, seqlen_q, d]
                     float* gLse,          // [B, Hq, seqlen_q]
                     Shape shape, int page_size, int max_pages) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN, kRows = Config::kRows;
  auto& smem = dynamic_shared<SharedStorage<Config>>();
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const int key = lane_id / Config::kLanes, chunk = lane_id % Config::kLanes * 8;
  const int part = warp_id * Config::kRowsPerLoad + key;
  const Rows rows = rows_of(shape, blockIdx.x, kRows);
  const int b = rows.bh_kv / shape.kv_heads, seqlen_k = gSeqused[b];
  const KvRange keys = visible_keys(shape, seqlen_k, rows);
  const Pages pages{gTable + int64_t{b} * max_pages, page_size};
  const int token = shape.kv_heads * kHeadDim;  // elements per token
  const int kv = rows.bh_kv % shape.kv_heads * kHeadDim + chunk;

  // (1) Load Q, which stays in registers.
  float q[kRows][8], o[kRows][8] = {};        // O is unnormalised
  float row_max[kRows], row_sum[kRows] = {};  // max in log2 units; sum over this lane's keys
  KvRange kv_range[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = min(r, rows.count - 1);  // rows past the last repeat it, and are not stored
    const uint4 chunk_of_q =
        *reinterpret_cast<const uint4*>(gQ + (rows.first + row) * kHeadDim + chunk);
    const uint32_t pairs[4] = {chunk_of_q.x, chunk_of_q.y, chunk_of_q.z, chunk_of_q.w};
    for (int i = 0; i < 8; ++i)
      q[r][i] = unpack<Element>(pairs[i / 2], i % 2) * (shape.softmax_scale * kLog2e);
    kv_range[r] = keys_of_query(shape, seqlen_k, (rows.row0 + row) % shape.seqlen_q);
    row_max[r] = kLowest;
  }

  for (int key0 = keys.begin + warp_id * kBlockN; key0 < keys.end;
       key0 += Config::kNumWarps * kBlockN) {
    // (2) Load K_j and V_j.
    uint4 k[Config::kKeys], v[Config::kKeys];
    load_tile<Config>(k, gK + kv, token, pages, key0, keys.end - key0);
    load_tile<Config>(v, gV + kv, token, pages, key0, keys.end - key0);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // (3) S = q K^T.
      float s[Config::kKeys];
      gemm_qk<Element, Config>(s, q[r], k);
      // (4) Mask and online softmax.
      //! [softmax]
      float max = row_max[r];
#pragma unroll
      for (int n = 0; n < Config::kKeys; ++n) {
        const int j = key0 + n * Config::kRowsPerLoad + key;
        if (j < kv_range[r].begin || j >= kv_range[r].end) s[n] = -INFINITY;
        max = fmaxf(max, s[n]);
      }
      const float rescale = exp2f(row_max[r] - max);
      row_max[r] = max;
      row_sum[r] *= rescale;
#pragma unroll
      for (int i = 0; i < 8; ++i) o[r][i] *= rescale;
        //! [softmax]
        // (5) O += P V
#pragma unroll
      for (int n = 0; n < Config::kKeys; ++n) {
        const float p = exp2f(s[n] - max);
        row_sum[r] += p;
        add<Element>(o[r], p, v[n]);
      }
    }
  }

  // (6) Reduce across the groups of lanes of all warps.
  //! [merge]
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < 8; ++i) smem.sO[part][r][chunk + i] = o[r][i];
    if (chunk == 0) smem.sMax[part][r] = row_max[r], smem.sSum[part][r] = row_sum[r];
  }
  __syncthreads();  // m, l and O of all warps are visible
  for (int idx = threadIdx.x; idx < rows.count * kHeadDim; idx += Config::kThreads) {
    const int r = idx / kHeadDim, col = idx % kHeadDim;
    float max = kLowest, sum = 0, out = 0;
    for (int n = 0; n < Config::kParts; ++n) max = fmaxf(max, smem.sMax[n][r]);
    for (int n = 0; n < Config::kParts; ++n) {
      const float weight = exp2f(smem.sMax[n][r] - max);
      sum += weight * smem.sSum[n][r];
      out += weight * smem.sO[n][r][col];
    }
    //! [merge]
    // (7) O = O / l, once; (8) store O and lse. Fully masked row: O = 0, lse = -inf.
    gO[(rows.first + r) * kHeadDim + col] = from_float<Element>(sum != 0 ? out / sum : 0);
    if (col == 0) gLse[rows.first + r] = sum != 0 ? kLn2 * max + logf(sum) : -INFINITY;
  }
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const PagedParams<Element> params(args);
  const Problem& p = args.problem;
  args.phase("attention");
  return launch_kernel(
      attention_kernel<Element, Config>, dim3(static_cast<unsigned>(row_blocks(p, Config::kRows))),
      dim3(Config::kThreads), sizeof(SharedStorage<Config>), args.stream, params.q, params.k,
      params.v, params.page_table, params.seqused_k, params.o, params.lse, shape_of(p),
      static_cast<int>(page_size_of(p)), static_cast<int>(max_pages_of(p)));
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

}  // namespace ATTN_BACKEND::v1_block_table
