// v7_tuned: tiles for each head dim, and fewer instructions beside the products.
//
// parent    v6_causal_skip
// idea      Nothing new about attention. Tiles and warps for each head dim come from a sweep (sweep.cu). With 32 rows a
//           warp each fragment of K and V feeds two products. Addresses are one offset a lane and constants: a swizzle
//           is an XOR, so a step along a row is one too. Tiles that are not cut are copied without comparing. O is
//           rescaled only where a maximum has grown by more than 2^8: until then P is at most 256, and l and O agree.
//           O leaves through shared memory, 16 bytes a lane. Heads run in sections whose K and V stay in L2.
// expect    sm__inst_executed.sum falls by a third; the tensor pipe is busy for more of the time
//           (sm__ops_path_tensor_src_bf16_dst_fp32.sum over gpu__time_duration.sum).
// supports  fp16, bf16; head dims 32, 64, 96, 128, 192, 256; any lengths, packed sequences, masks, GQA, softcap,
//           ALiBi, dropout
#include "attn/kernel.h"
#include "attn/philox.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "v7_tiles.h"

namespace ATTN_BACKEND::v7_tuned {

// Stands for -inf where nothing was seen. It is finite, so that differences are numbers.
constexpr float kNothing = -3.4028234e38f;
constexpr float kLog2E = 1.44269504f;

template <class Element, class Config>
struct SharedStorage {
  alignas(128) Element sK[Config::kStages][Config::kBlockN * Config::kHeadDim];  // [kBlockN, d] each
  alignas(128) Element sV[Config::kStages][Config::kBlockN * Config::kHeadDim];  // [kBlockN, d] each
  alignas(128) Element sQ[Config::kBlockM * Config::kHeadDim];                   // [kBlockM, d]
  Sequence sequence;  // needed at the end alone: until then no register is free to keep it, or row0
  int row0;
  ATTN_MEMBERS(SharedStorage, sK, sV, sQ, sequence, row0)
};

// threadIdx.x, read anew each time: as one variable it, and all that follows from it, would keep registers in the loop.
__device__ __forceinline__ int thread_index() {
#ifdef ATTN_EMULATED
  return threadIdx.x;
#else
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
#endif
}

// Starts to copy kRows rows, of which `rows` exist; the others become 0. `g` is this thread's first chunk of them, of
// row tid / kSpan and chunk tid % kSpan; `step`: elements from a row to the next.
//! [copy]
template <int kRows, class Config, class Element>
__device__ __forceinline__ void load_tile(Element* tile, const Element* g, int step, int rows) {
  constexpr int kSpan = Config::kSpan, kCopyRows = Config::kCopyRows, kHeadDim = Config::kHeadDim;
  const int tid = thread_index(), row = tid / kSpan;
  Element* const to = tile + swizzled_offset<kHeadDim>(row, tid % kSpan * 8);
  const auto copy = [&](auto cut) {
#pragma unroll
    for (int r = 0; r < kRows; r += kCopyRows)
#pragma unroll
      for (int c = 0; c < kHeadDim; c += 8 * kSpan) {
        const bool inside = !cut.value || row + r < rows;
        cp_async_16(to + r * kHeadDim + c, g + (inside ? r : -row) * step + c, inside ? 16 : 0);
      }
  };
  rows >= kRows ? copy(std::false_type{}) : copy(std::true_type{});
}
//! [copy]

__device__ __forceinline__ float quad_max(float x) {  // over the 4 lanes that share a row
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// (3) S = Q K^T for the rows of this warp. Fragments are loaded one product ahead. Offsets are those, in bytes, of this
// lane's chunk in the first 16 columns.
//! [scores]
template <class Config>
__device__ __forceinline__ int q_offset() {
  const int tid = thread_index();
  return 2 * swizzled_offset<Config::kHeadDim>(tid / 32 * Config::kWarpRows + tid % 16, tid / 16 % 2 * 8);
}
template <class Config>
__device__ __forceinline__ void load_q(uint32_t (&a)[Config::kTiles][4], const char* sQ, int q, int col) {
#pragma unroll
  for (int m = 0; m < Config::kTiles; ++m)
    ldmatrix_x4(a[m], sQ + along_row<Config::kSpan>(q, col) + 16 * m * Config::kRowBytes);
}
template <class Element, class Config, int kCount>
__device__ __forceinline__ void scores(float (&s)[Config::kTiles][Config::kBlockN / 8][4],
                                       const uint32_t (&kept)[kCount][Config::kTiles][4], const char* sQ,
                                       const char* sK) {
  constexpr int kPairs = Config::kBlockN / 16, kSteps = Config::kHeadDim / 16;  // two products of 8 keys at once
  uint32_t a[2][Config::kTiles][4], b[2][4];
  const int tid = thread_index(), q = q_offset<Config>();
  const int k = 2 * swizzled_offset<Config::kHeadDim>(tid / 16 % 2 * 8 + tid % 8, tid / 8 % 2 * 8);
  const auto load_k = [&](int i) {
    ldmatrix_x4(b[i % 2], sK + along_row<Config::kSpan>(k, i / kPairs * 16) + i % kPairs * 16 * Config::kRowBytes);
  };
  const auto load_next_q = [&](int step) {
    if (step >= Config::kKept && step < kSteps) load_q<Config>(a[step % 2], sQ, q, 16 * step);
  };
  load_next_q(0);
  load_k(0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    load_next_q(step + 1);
    const auto& rows = step < Config::kKept ? kept[step % kCount] : a[step % 2];
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; n += 2) {
      const int i = step * kPairs + n / 2;
      if (i + 1 < kSteps * kPairs) load_k(i + 1);
#pragma unroll
      for (int m = 0; m < Config::kTiles; ++m) {
        mma_m16n8k16<Element>(s[m][n], rows[m], {b[i % 2][0], b[i % 2][1]}, s[m][n]);
        mma_m16n8k16<Element>(s[m][n + 1], rows[m], {b[i % 2][2], b[i % 2][3]}, s[m][n + 1]);
      }
    }
  }
}
//! [scores]

// (5) O += P V for the rows of this warp. `probabilities(pair, a)` makes the operand of 16 keys: one step ahead, so
// that its exponentials run beside the products.
//! [output]
template <class Element, class Config, class Probabilities>
__device__ __forceinline__ void output(float (&o)[Config::kTiles][Config::kHeadDim / 8][4], Probabilities probabilities,
                                       const char* sV) {
  constexpr int kPairs = Config::kHeadDim / 16, kSteps = Config::kBlockN / 16 * kPairs;
  uint32_t a[2][Config::kTiles][4], b[2][4];
  const int tid = thread_index(), v = 2 * swizzled_offset<Config::kHeadDim>(tid % 16, tid / 16 % 2 * 8);
  const auto load_v = [&](int i) {
    const char* const row = sV + i / kPairs * 16 * Config::kRowBytes;
    ldmatrix_x4_trans(b[i % 2], row + along_row<Config::kSpan>(v, i % kPairs * 16));
  };
  load_v(0);
  probabilities(0, a[0]);
#pragma unroll
  for (int k = 0; k < Config::kBlockN / 16; ++k) {
    if (k + 1 < Config::kBlockN / 16) probabilities(k + 1, a[(k + 1) % 2]);
#pragma unroll
    for (int n = 0; n < Config::kHeadDim / 8; n += 2) {
      const int i = k * kPairs + n / 2;
      if (i + 1 < kSteps) load_v(i + 1);
#pragma unroll
      for (int m = 0; m < Config::kTiles; ++m) {
        mma_m16n8k16<Element>(o[m][n], a[k % 2][m], {b[i % 2][0], b[i % 2][1]}, o[m][n]);
        mma_m16n8k16<Element>(o[m][n + 1], a[k % 2][m], {b[i % 2][2], b[i % 2][3]}, o[m][n + 1]);
      }
    }
  }
}
//! [output]

// Softcap and ALiBi; scores become those of base 2, with nothing left to multiply. `own`: position of this lane's first
// row from its first key.
//! [features]
template <class Config>
__device__ __forceinline__ void cap_and_bias(float (&s)[Config::kTiles][Config::kBlockN / 8][4], const Shape& shape,
                                             float slope_log2, int own) {
  const auto each = [&](auto change) {
#pragma unroll
    for (int m = 0; m < Config::kTiles; ++m)
#pragma unroll
      for (int n = 0; n < Config::kBlockN / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][n][i] = change(s[m][n][i], 16 * m + 8 * (i / 2) - 8 * n - i % 2);
  };
  if (shape.softcap > 0) {
    const float cap = shape.softcap * kLog2E, in = shape.softmax_scale / shape.softcap;
    each([&](float x, int) {  // tanh y = 1 - 2 / (e^2y + 1), a difference of like numbers where y is small
      const float y = x * in, y2 = y * y;
      const float series = y * fmaf(y2, fmaf(y2, fmaf(y2, -17.0f / 315, 2.0f / 15), -1.0f / 3), 1);
      return cap * (fabsf(y) < 0.25f ? series : fmaf(-2, __fdividef(1, exp2f(2 * kLog2E * y) + 1), 1));
    });
  } else {
    each([&](float x, int) { return x * (shape.softmax_scale * kLog2E); });
  }
  if (slope_log2 > 0) {
    const float distance = static_cast<float>(own);
    each([&](float x, int further) { return fmaf(-slope_log2, fabsf(distance + static_cast<float>(further)), x); });
  }
}
//! [features]

// Sets to 0 what dropout drops of row `row`, half `r` of the accumulators: 16 bytes of Philox for 64 keys.
template <class Config>
__device__ __forceinline__ void drop(float (&s)[Config::kBlockN / 8][4], int r, uint64_t seed, int64_t bh, int row,
                                     int key0, int dropped) {
#pragma unroll
  for (int first = 0; first < Config::kBlockN; first += 64) {
    const PhiloxBits bits = dropout_bits(seed, bh, row, (key0 + first) / 64, threadIdx.x % 4);
    const int skipped = Config::kBlockN % 64 == 0 ? 0 : key0 % 64 / 4;  // bytes of the keys before
#pragma unroll
    for (int i = 0; i < 16 && first + i * 4 < Config::kBlockN; ++i)
      if (bits.byte(skipped + i) < static_cast<uint32_t>(dropped)) s[first / 8 + i / 2][2 * r + i % 2] = 0;
  }
}

template <class Element, class Config, bool kFeatures>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    attention_kernel(const Element* gQ,     // [B, Hq, seqlen_q, d], or packed: see Packing
                     const Element* gK,     // [B, Hkv, seqlen_k, d]
                     const Element* gV,     // [B, Hkv, seqlen_k, d]
                     Element* gO,           // [B, Hq, seqlen_q, d]
                     float* gLse,           // [B, Hq, seqlen_q]
                     const float* gSlopes,  // [Hq]: of ALiBi; null: none
                     Shape shape, Packing packing, uint64_t seed, int num_m_blocks, int num_heads, int section) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kTiles = Config::kTiles, kWarpRows = Config::kWarpRows;
  constexpr int kSpan = Config::kSpan, kStages = Config::kStages;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  // Heads come in sections. In one, the tiles of queries with the most keys begin first, those of all its heads.
  const int first_head = blockIdx.x / (section * num_m_blocks) * section;
  const int heads = min(section, num_heads - first_head), turn = blockIdx.x - first_head * num_m_blocks;
  const int bh = first_head + turn % heads, row0 = (num_m_blocks - 1 - turn / heads) * kBlockM;
  const Sequence sequence = sequence_of(shape, packing, bh, kHeadDim);
  if (row0 >= sequence.seqlen_q) return;  // of a batch with longer sequences
  const int seqlen_k = sequence.seqlen_k, shift = seqlen_k - sequence.seqlen_q;
  const BlockRanges seen = blocks_seen(shape, sequence.seqlen_q, seqlen_k, row0, kBlockM, kBlockN);
  // This thread's first chunk of every tile that it copies.
  const int copy_row = threadIdx.x / kSpan, chunk = threadIdx.x % kSpan * 8;
  const Element* const q = gQ + sequence.q + int64_t{row0 + copy_row} * packing.q_step + chunk;
  const int64_t kv = sequence.kv + copy_row * packing.kv_step + chunk;
  const auto bytes = [](const auto& tile) { return reinterpret_cast<const char*>(&tile); };
  const auto load_k_or_v = [&](auto& tiles, const Element* g, int n_block) {
    load_tile<kBlockN, Config>(tiles[n_block % kStages], g + kv + int64_t{n_block * kBlockN} * packing.kv_step,
                               packing.kv_step, seqlen_k - n_block * kBlockN);
  };
  const float scale_log2 = kFeatures ? 1 : shape.softmax_scale * kLog2E;  // c: what scores are still multiplied by
  const float slope_log2 = kFeatures && gSlopes != nullptr ? gSlopes[bh % shape.heads] * kLog2E : 0;

  if (threadIdx.x == 0) smem.sequence = sequence, smem.row0 = row0;
  // (1) load Q_i, which stays, and the first K_j (of two stages: and V_j)
  uint32_t kept[std::max(1, Config::kKept)][kTiles][4];  // fragments of Q
  if (seen.begin < seen.end) {
    load_tile<kBlockM, Config>(smem.sQ, q, packing.q_step, sequence.seqlen_q - row0);
    if (Config::kKept > 0) cp_async_commit();
    load_k_or_v(smem.sK, gK, seen.begin);
    if (kStages == 2) load_k_or_v(smem.sV, gV, seen.begin);
    cp_async_commit();
  }
  if (Config::kKept > 0) cp_async_wait<1>();
  __syncthreads();  // smem.sequence is there, and for kept fragments all threads' Q
  if (seen.begin < seen.end) {
#pragma unroll
    for (int step = 0; step < Config::kKept; ++step)
      load_q<Config>(kept[step], bytes(smem.sQ), q_offset<Config>(), 16 * step);
  }
  float o[kTiles][kHeadDim / 8][4] = {};              // not divided by l yet
  float row_max[kTiles][2], row_sum[kTiles][2] = {};  // times c: to base 2; of this lane's keys
  for (int m = 0; m < kTiles; ++m) row_max[m][0] = row_max[m][1] = kNothing;

  // One block of keys. `masked` is a type, so that the plain body has no trace of a mask.
  const auto visit = [&](int n_block, auto masked) {
    const int key0 = n_block * kBlockN, stage = n_block % kStages;
    // Of a block with a mask a warp may see nothing.
    const int warp_row0 = smem.row0 + thread_index() / 32 * kWarpRows;
    const bool idle = masked.value && (key0 > warp_row0 + kWarpRows - 1 + shift + shape.window_right ||
                                       key0 + kBlockN <= warp_row0 + shift - shape.window_left);
    // (2) V_j is on its way during Q K^T, or K_j+1 and V_j+1 all the time. Of the groups of copies only the newest one
    // is ever under way, so that every wait is for all of them.
    cp_async_wait<0>();
    __syncthreads();  // K_j (and V_j) of all threads is there; all are done with V_j-1 (and K_j-1)
    if (kStages == 1) {
      load_k_or_v(smem.sV, gV, n_block);
    } else if (n_block + 1 < seen.end) {
      load_k_or_v(smem.sK, gK, n_block + 1);
      load_k_or_v(smem.sV, gV, n_block + 1);
    }
    cp_async_commit();

    // (3) S = Q K^T, -inf where a query does not see a key.
    float s[kTiles][kBlockN / 8][4] = {};
    if (!idle) {
      scores<Element, Config>(s, kept, bytes(smem.sQ), bytes(smem.sK[stage]));
      // Position of this lane's first row from its first key.
      const int lane_id = thread_index() % 32, quad_col = lane_id % 4 * 2;
      const int own = warp_row0 + lane_id / 4 + shift - key0 - quad_col;
      if constexpr (kFeatures) cap_and_bias<Config>(s, shape, slope_log2, own);
      if constexpr (masked.value) {
        const auto hide = [&](auto hidden) {
#pragma unroll
          for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
              for (int i = 0; i < 4; ++i)
                if (hidden(8 * n + i % 2, 16 * m + 8 * (i / 2))) s[m][n][i] = -INFINITY;
        };
        // What a row sees shifts with it. One loop for each edge: both in one take registers that are not there.
        const int last = own + shape.window_right, first = own - shape.window_left;
        if (shape.window_right < Shape::kNoWindow) hide([&](int key, int below) { return key - below > last; });
        if (shape.window_left < Shape::kNoWindow) hide([&](int key, int below) { return key - below < first; });
        if (const int keys = seqlen_k - key0 - quad_col; key0 + kBlockN > seqlen_k)
          hide([&](int key, int) { return key >= keys; });
      }
    }

    if (kStages == 1) {  // K_j+1 is on its way during softmax and P V
      cp_async_wait<0>();
      __syncthreads();  // V_j of all threads is there; all are done with K_j
      if (n_block + 1 < seen.end) load_k_or_v(smem.sK, gK, n_block + 1);
      cp_async_commit();
    }
    if (idle) return;

    // (4) softmax, all of it in the quad of lanes that share a row.
    //! [softmax]
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
        max[m][r] = fmaxf(row_max[m][r], quad_max(max[m][r]) * scale_log2);
        grown = grown || max[m][r] > row_max[m][r] + Config::kSlack;
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
          for (int n = 0; n < kHeadDim / 8; ++n) o[m][n][2 * r] *= rescale, o[m][n][2 * r + 1] *= rescale;
        }
    }
    // Two neighbouring accumulators of the first product, rounded in pairs, are an operand of the second.
    const auto exponentials = [&](int m, int pair) {
#pragma unroll
      for (int n = 2 * pair; n < 2 * pair + 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[m][n][i] = exp2f(fmaf(s[m][n][i], scale_log2, -row_max[m][i / 2]));
          row_sum[m][i / 2] += s[m][n][i];
        }
    };
    if constexpr (kFeatures) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int pair = 0; pair < kBlockN / 16; ++pair) exponentials(m, pair);
        for (int r = 0; r < 2 && shape.dropped > 0; ++r)  // the sum keeps what O loses
          drop<Config>(s[m], r, seed, bh, warp_row0 + 16 * m + 8 * r + thread_index() % 32 / 4, key0, shape.dropped);
      }
    }
    const auto probabilities = [&](int pair, uint32_t (&a)[kTiles][4]) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        if constexpr (!kFeatures) exponentials(m, pair);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[m][i] = pack2<Element>(s[m][2 * pair + i / 2][2 * (i % 2)], s[m][2 * pair + i / 2][2 * (i % 2) + 1]);
      }
    };
    //! [softmax]

    // (5) O += P V
    output<Element, Config>(o, probabilities, bytes(smem.sV[stage]));
  };
  for (int n_block = seen.begin; n_block < seen.end; ++n_block)
    if (n_block >= seen.unmasked_begin && n_block < seen.unmasked_end)
      visit(n_block, std::false_type{});
    else  // left edge of the window; diagonal, right edge, last keys
      visit(n_block, std::true_type{});

  // (7) O = O / l, once; (8) store O, through the rows of sQ that this warp alone reads, and lse
  //! [finish]
  const int tid = thread_index(), lane_id = tid % 32, warp_rows = tid / 32 * kWarpRows;
  char* const sO = reinterpret_cast<char*>(smem.sQ + warp_rows * kHeadDim);  // [kWarpRows, d]
  const Sequence own = smem.sequence;
  const int first_row = smem.row0 + warp_rows;  // of this warp
  const float inverse_kept = kFeatures ? 1 / (1 - float(shape.dropped) / 256) : 1;
  const int o_lane = 2 * swizzled_offset<kHeadDim>(lane_id / 4, lane_id % 4 * 2);
  __syncwarp();  // all lanes are done with Q
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(row_sum[m][r]);
      const float factor = sum > 0 ? inverse_kept / sum : 0;  // a row that sees nothing: O = 0
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n)
        *reinterpret_cast<uint32_t*>(sO + along_row<kSpan>(o_lane, 8 * n) + (16 * m + 8 * r) * Config::kRowBytes) =
            pack2<Element>(o[m][n][2 * r] * factor, o[m][n][2 * r + 1] * factor);
      if (const int row = first_row + 16 * m + 8 * r + lane_id / 4; lane_id % 4 == 0 && row < own.seqlen_q)
        gLse[own.lse + row] = sum > 0 ? 0.693147181f * row_max[m][r] + logf(sum) : -INFINITY;
    }
  __syncwarp();  // all of the warp's rows are there
#pragma unroll
  for (int i = 0; i < kWarpRows; i += 32 / kSpan) {
    const int r = i + lane_id / kSpan;
    if (first_row + r >= own.seqlen_q) break;
#pragma unroll
    for (int c = lane_id % kSpan * 8; c < kHeadDim; c += 8 * kSpan)
      *reinterpret_cast<uint4*>(gO + own.q + int64_t{first_row + r} * packing.q_step + c) =
          *reinterpret_cast<const uint4*>(sO + 2 * swizzled_offset<kHeadDim>(r, c));
  }
  //! [finish]
}

template <class Element, class Config, bool kFeatures>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const Tiling tiling{Config::kBlockM, Config::kBlockN, heads_of_section(p), Config::kBlocksPerSm, Config::kWarpRows};
  if (args.plans(tiling)) return Status::success();
  const int64_t num_m_blocks = ceil_div(p.seqlen_q, Config::kBlockM);
  const Packing packing{args.in_or_null<int>("cu_seqlens_q"), args.in_or_null<int>("cu_seqlens_k"),
                        static_cast<int>(p.head_dim * (p.varlen() ? p.heads : 1)),
                        static_cast<int>(p.head_dim * (p.varlen() ? p.kv_heads : 1))};
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config, kFeatures>,
                       dim3(static_cast<unsigned>(num_m_blocks * p.heads * p.batch)), dim3(Config::kThreads),
                       sizeof(SharedStorage<Element, Config>), args.stream, args.in<Element>("q"),
                       args.in<Element>("k"), args.in<Element>("v"), args.out<Element>("o"), args.out<float>("lse"),
                       args.in_or_null<float>("alibi"), shape_of(p), packing, p.seed, static_cast<int>(num_m_blocks),
                       static_cast<int>(p.heads * p.batch), static_cast<int>(tiling.section));
}

#ifndef ATTN_SWEEP  // sweep.cu has its own tiles
template <class Element, int kHeadDim>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  // A scale that is 0 as a float, or denormal and taken for 0, would make c times -inf no number.
  if (p.dropout > 0 || p.softcap > 0 || p.alibi || p.softmax_scale < 1e-37)
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

}  // namespace ATTN_BACKEND::v7_tuned
