// v16_mla_seesaw: latent attention with softmax overlapped with MMAs (FlashMLA's seesaw schedule).
//
// parent    two: the tiles of v13_mla_wgmma, the copies of v15_prefill_tma
// change    The left warpgroup computes S, softmax and P of the even tiles, the right one of the
//           odd tiles. Each still owns half of O's columns, so each P is multiplied twice: by its
//           own warpgroup from registers, by the other one from shared memory. Both share one
//           running max, which is passed along with P. A third warpgroup issues TMA loads, one box
//           per page as in v15_prefill_tma. A tile has two halves, the columns that each warpgroup
//           multiplies as V; each warpgroup releases its half. Q of the next work tile is loaded
//           while O of this one is stored. A sequence of many parts is reduced by a second launch.
// why       While one warpgroup computes a softmax, the tensor cores execute MMAs of the other. One
//           block takes 2 us for each part of 64 rows that it reduces; a single sequence has 64.
// expect    128 heads: 250 us for 128 sequences of 4096 keys on an H200. Softmax is hidden; loads
//           are not fully, because a tile of 72 KB waits for another one to be released.
//           16 heads: the bandwidth of HBM, as before. One sequence of 8192 keys: 17 us with 16
//           heads, 23 us with 128
// supports  fp16, bf16; head dim 576 (512 of V), one K/V head; 1 to 16 queries, any lengths,
//           causal; page sizes that are multiples of 8; scales from 1e-37
// source    FlashMLA, seesaw schedule
#include <climits>

#include "attn/kernel.h"
#include "ptx/global_flag.h"
#include "ptx/grid_dependency.h"
#include "ptx/launch.h"
#include "ptx/mbarrier.h"
#include "ptx/mma.h"
#include "ptx/named_barrier.h"
#include "ptx/setmaxnreg.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"
#include "kernels/hopper/fragments.h"
#include "kernels/latent_pieces.h"
#include "kernels/work.h"
#include "kernels/splits.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::v16_mla_seesaw {
using namespace attn;
using namespace paged;
using namespace plans;
using namespace splits;
using namespace latent;
using hopper::kWarp, hopper::kWarpgroup, hopper::with_stride_byte_offset, hopper::PipelineState;

//! [config]
// Consumer warpgroups. The columns of O that each owns are those of one half of a KV tile.
enum Side { kLeft = 0, kRight = 1 };
// Named barriers. 0 is used by __syncthreads. kPReady + side: P of this side is in shared memory.
// kSideDone + side: its warps have finished reading the P of the other side. kBoth: both sides.
constexpr int kPReady = 1, kSideDone = 3, kBoth = 5;

struct Config {
  static constexpr int kHeadDim = kLatentDim, kRows = kWgmmaRows;
  static constexpr int kOutDim = kLatentValues;        // the first columns of K are V
  static constexpr int kBlockN = 64, kTile = kBlockN;  // keys per tile
  static constexpr int kConsumers = 2 * kWarpgroup, kThreads = kConsumers + kWarpgroup;
  static constexpr int kNumWarps = kConsumers / kWarp;  // consumer warps
  static constexpr int kColumns = kOutDim / 2;          // columns of O per warpgroup
  // Panels of 64 columns per half: the left one has V's first four; the right one V's last four and
  // the RoPE part, which is not part of V. And the first panel of a half.
  __host__ __device__ static constexpr int panels(int half) { return half == kLeft ? 4 : 5; }
  __host__ __device__ static constexpr int begin(int half) { return half * kBlockN * 4 * 64; }
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(kTile == tile_keys(kHeadDim), "plans count other tiles");
};
//! [config]

constexpr float kRescaleThreshold = 8;  // log2 units: P <= 2^8

// Q and P: panels of 64 columns, [columns / 64][rows, 64]. A half of a KV tile: atoms of 8 rows and
// 64 columns, as its boxes deliver them, [rows / 8][panels][8, 64].
template <class Element, class Config>
struct SharedStorage {
  alignas(1024) Element sK[2][Config::kBlockN * Config::kHeadDim];  // one even and one odd tile
  alignas(1024) Element sQ[Config::kRows * Config::kHeadDim];
  alignas(1024) Element sP[Config::kRows * Config::kBlockN];  // P of both sides, in turn
  float sMax[2][Config::kRows];  // of each side's last tile, in log2 units
  float sSum[2][Config::kRows];  // row sums of each side's keys, at the end
  // mbarriers: bytes have landed; the buffer is released. For K [tile][half]: a half is released by
  // the side that multiplies it as V, the last one to read it.
  uint64_t q_full, q_empty, k_full[2][2], k_empty[2][2];
  bool last;  // this block arrived last and reduces the parts of the row block
  ATTN_MEMBERS(SharedStorage, sK, sQ, sP, sMax, sSum, q_full, q_empty, k_full, k_empty, last)
};
// Swizzled offset of element (row, col) in a panel of 64 rows.
__device__ __forceinline__ int swizzled_offset(int row, int col) {
  return row * 64 + ((col / 8) ^ row) % 8 * 8 + col % 8;
}

// (3) S = Q K^T. Issues only; does not wait.
//! [issue_s]
template <int kHalf, class Element, class Config>
__device__ __forceinline__ void issue_s(float (&s)[Config::kBlockN / 8][4], const Element* sQ,
                                        const Element* sK) {
  constexpr int kPanels = Config::panels(kHalf);
  const SmemDescriptor q = smem_descriptor(sQ + kHalf * Config::panels(kLeft) * 64 * Config::kRows);
  const SmemDescriptor k =
      with_stride_byte_offset(smem_descriptor(sK + Config::begin(kHalf)), kPanels * 1024);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kPanels * 4; ++i) {  // 16 of a panel's 64 columns, 32 bytes
    const int panel = i / 4, inside = i % 4 * 32;
    wgmma<Element, false>(s, q + (panel * Config::kRows * 128 + inside),
                          k + (panel * 1024 + inside), kHalf > 0 || i > 0);
  }
}
//! [issue_s]

// (5) O += P V for the columns of a side. `p_of(n)`: P of 16 keys, its own from registers, the
// other side's from shared memory. Issues only; does not wait.
//! [issue_o]
template <Side kSide, class Element, class Config, class POf>
__device__ __forceinline__ void issue_o(float (&o)[Config::kColumns / 8][4], const Element* sK,
                                        POf p_of) {
  constexpr int kGroup = Config::panels(kSide) * 1024;  // stride between groups of 8 keys, in bytes
  const SmemDescriptor v =
      with_stride_byte_offset(smem_descriptor(sK + Config::begin(kSide), 1024), kGroup);
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < Config::kBlockN / 16; ++n)
    wgmma<Element, true>(o, p_of(n), v + 2 * kGroup * n, true);
  wgmma_commit();
}
//! [issue_o]

// Producer warp: (1) loads Q_i, (2) K_j. Each lane issues one box of a tile: the rows of one page,
// at least 8, so a tile has at most 8 boxes. It looks up its page one tile ahead. Rows of Q past
// the sequence's last belong to the next sequence; their results are not stored.
//! [producer]
template <class Element, class Config>
__device__ __forceinline__ void produce(SharedStorage<Element, Config>& smem,
                                        const Pieces<Config>& pieces, const Maps& maps,
                                        const Pages& pages) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int boxes = Config::kBlockN / pages.box_rows, own_row = lane * pages.box_rows;
  PipelineState<1> q, k[2];
  for (int idx = pieces.begin(); idx < pieces.end(); ++idx, q.advance()) {
    const PlannedTile piece = pieces.at(idx);
    const int sequence = piece.work.row_block;
    if (lane == 0) {
      mbarrier_wait(&smem.q_empty, q.phase() ^ 1);  // passes at once the first time
      mbarrier_arrive_expect_tx(&smem.q_full, Config::kRows * Config::kHeadDim * 2);
      tma_load(smem.sQ, maps.q, &smem.q_full, {0, static_cast<int>(piece.rows.first), 0});
    }
    int ahead = slot_of(pages, sequence, piece.begin + own_row, piece.end);
    for (int key0 = piece.begin, stage = 0; key0 < piece.end; key0 += Config::kBlockN, stage ^= 1) {
      const int rows = piece.end - key0, slot = ahead;  // valid keys
      ahead = slot_of(pages, sequence, key0 + Config::kBlockN + own_row, piece.end);
      // 0 times NaN is NaN, so rows of V past the end must be 0: the box that contains the end is
      // loaded row by row.
      const bool is_cut = lane < boxes && own_row < rows && rows < own_row + pages.box_rows;
      const unsigned cut = __ballot_sync(~0u, is_cut);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        constexpr int kGroup = 8 * 64;  // elements per atom
        const int panels = Config::panels(half), panel0 = half * Config::panels(kLeft);
        Element* const tile = smem.sK[stage] + Config::begin(half);
        uint64_t* const full = &smem.k_full[stage][half];
        mbarrier_wait(&smem.k_empty[stage][half], k[stage].phase() ^ 1);
        if (lane == 0) mbarrier_arrive_expect_tx(full, Config::kBlockN * panels * 128);
        __syncwarp();  // expect all bytes before any box is issued
        if (lane < boxes && !is_cut)
          tma_load(tile + own_row / 8 * panels * kGroup, maps.half[half], full,
                   {0, 0, panel0, slot / 8});
        if (cut == 0) continue;
        const int holder = __ffs(static_cast<int>(cut)) - 1;
        const int row0 = __shfl_sync(~0u, own_row, holder), slot0 = __shfl_sync(~0u, slot, holder);
        for (int i = lane; i < pages.box_rows; i += kWarp) {
          const int row = row0 + i, from = row < rows ? slot0 + i : hopper::kNowhere;
          for (int panel = 0; panel < panels; ++panel)
            tma_load(tile + (row / 8 * panels + panel) * kGroup + row % 8 * 64, maps.row, full,
                     {0, from, panel0 + panel});
        }
      }
      k[stage].advance();
    }
  }
}
//! [producer]

template <class Element, class Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Element, Config>& smem) {
  mbarrier_init(&smem.q_full, 1);
  mbarrier_init(&smem.q_empty, Config::kNumWarps);  // one arrival per warp
  for (int stage = 0; stage < 2; ++stage)
    for (int half = 0; half < 2; ++half) {
      mbarrier_init(&smem.k_full[stage][half], 1);
      mbarrier_init(&smem.k_empty[stage][half], Config::kNumWarps / 2);
    }
  mbarrier_init_fence();
}

// Consumer: the loop of one side over its work tiles.
template <Side kSide, class Element, class Config>
__device__ __forceinline__ void consume(SharedStorage<Element, Config>& smem,
                                        const Pieces<Config>& pieces, Element* gO, float* gLse,
                                        float* gOPartial, float* gLsePartial,
                                        unsigned* gSemaphore) {
  constexpr int kBlockN = Config::kBlockN, kOutDim = Config::kOutDim;
  constexpr Side kOther = kSide == kLeft ? kRight : kLeft;
  const Shape& shape = pieces.shape;
  const int warp_id = static_cast<int>(threadIdx.x) / kWarp;
  const int lane_id = static_cast<int>(threadIdx.x) % kWarp;
  const int quad_row = 16 * (warp_id % 4) + lane_id / 4, quad_col = lane_id % 4 * 2;
  const float softmax_scale_log2 = shape.softmax_scale * kLog2e;
  PipelineState<1> q, k[2];
  const auto consumer_release = [&](int stage) {  // one arrival per warp, for its side's half
    if (lane_id == 0) mbarrier_arrive(&smem.k_empty[stage][kSide]);
    k[stage].advance();
  };
  const auto release_q = [&] {
    if (lane_id == 0) mbarrier_arrive(&smem.q_empty);
  };

  for (int idx = pieces.begin(); idx < pieces.end(); ++idx, q.advance()) {
    float o[Config::kColumns / 8][4] = {};  // unnormalised
    // subtracted instead of the row max, which it may lag (log2 units), common to both sides; sum
    // over this side's tiles
    float row_max[2] = {kLowest, kLowest}, row_sum[2] = {};
    float s[kBlockN / 8][4];
    uint32_t p[kBlockN / 16][4];
    // Keys of this work tile, and the range visible to this lane's rows.
    int tiles, last_seen[2];
    {
      const PlannedTile piece = pieces.at(idx);
      tiles = ceil_div(max(0, piece.end - piece.begin), kBlockN);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int query = (piece.rows.row0 + quad_row + 8 * r) % shape.seqlen_q;
        last_seen[r] =
            min(piece.end, keys_of_query(shape, piece.seqlen_k, query).end) - piece.begin;
      }
    }
    // S starts with the left half of a tile, while the right half is in flight.
    const auto gemm_qk = [&](int stage) {
      mbarrier_wait(&smem.k_full[stage][kLeft], k[stage].phase());
      issue_s<kLeft, Element, Config>(s, smem.sQ, smem.sK[stage]);
      mbarrier_wait(&smem.k_full[stage][kRight], k[stage].phase());
      issue_s<kRight, Element, Config>(s, smem.sQ, smem.sK[stage]);
      wgmma_commit();
    };
    const auto own_product = [&](int stage) {
      issue_o<kSide, Element, Config>(
          o, smem.sK[stage], [&](int n) -> auto& { return p[n]; });
    };
    const auto other_product = [&](int stage) {
      const SmemDescriptor other = smem_descriptor(smem.sP);
      issue_o<kSide, Element, Config>(o, smem.sK[stage], [&](int n) { return other + 32 * n; });
    };

    // Makes `max` the running max: that of the tile whose P both sides multiply next. No P V is in
    // flight, but the right side may have S in flight. While a wgmma is in flight, ptxas lets no
    // other instruction write accumulators and would insert a wait before the branch (C7517). So
    // the right side waits for S, and only inside the branch: after the first tiles a maximum
    // rarely grows by 8.
    //! [follow]
    const auto follow = [&](const float(&max)[2], auto await) {
      if (!__any_sync(~0u, max[0] > row_max[0] || max[1] > row_max[1])) return;
      await();
      const float rescale[2] = {exp2f(row_max[0] - max[0]), exp2f(row_max[1] - max[1])};
#pragma unroll
      for (int r = 0; r < 2; ++r) row_max[r] = max[r], row_sum[r] *= rescale[r];
      hopper::rescale_rows<Config::kColumns>(o, rescale);
    };
    //! [follow]
    // (4) Online softmax: S of a tile becomes P; -inf where masked. `await_o`: waits for O, which
    // is still in flight.
    //! [softmax]
    const auto softmax = [&](int n, auto await_o) {
      const int key0 = n * kBlockN;
      if (key0 + kBlockN > min(last_seen[0], last_seen[1])) {
#pragma unroll
        for (int c = 0; c < kBlockN / 8; ++c)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (key0 + 8 * c + quad_col + i % 2 >= last_seen[i / 2]) s[c][i] = -INFINITY;
      }
      float max[2] = {s[0][0], s[0][2]}, sum[2] = {};  // unscaled
#pragma unroll
      for (int c = 0; c < kBlockN / 8; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) max[i / 2] = fmaxf(max[i / 2], s[c][i]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        max[r] = hopper::quad_max(max[r]) * softmax_scale_log2;
        if (max[r] <= row_max[r] + kRescaleThreshold) max[r] = row_max[r];
        if (quad_col == 0) smem.sMax[kSide][quad_row + 8 * r] = max[r];
      }
#pragma unroll
      for (int c = 0; c < kBlockN / 8; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[c][i] = exp2f(fmaf(s[c][i], softmax_scale_log2, -max[i / 2]));
          sum[i / 2] += s[c][i];
        }
      hopper::round_p<Element, kBlockN>(p, s);
      await_o();
      follow(max, [] {});
      row_sum[0] += sum[0], row_sum[1] += sum[1];
    };
    //! [softmax]
    // Sends P, and the running max with it, to the other side. One buffer for P suffices: before a
    // side stores its P it has multiplied the P of the other, which was stored after the other had
    // multiplied this side's previous P.
    //! [seesaw]
    const auto send_p = [&] {
      named_barrier_sync(kSideDone + kSide, kWarpgroup);  // this side has multiplied the other's P
#pragma unroll
      for (int c = 0; c < kBlockN / 8; ++c)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          *reinterpret_cast<uint32_t*>(smem.sP +
                                       swizzled_offset(quad_row + 8 * r, 8 * c + quad_col)) =
              p[c / 2][c % 2 * 2 + r];
      fence_proxy_async();  // make P visible to the async proxy
      named_barrier_arrive(kPReady + kSide, Config::kConsumers);
    };
    const auto receive_p = [&](auto await) {
      named_barrier_sync(kPReady + kOther, Config::kConsumers);
      const float max[2] = {smem.sMax[kOther][quad_row], smem.sMax[kOther][quad_row + 8]};
      follow(max, await);
    };
    //! [seesaw]

    mbarrier_wait(&smem.q_full, q.phase());
    if (tiles <= kSide) release_q();  // this side has no S in flight
    //! [loop]
    if constexpr (kSide == kLeft) {
      const auto even_tile = [&](int n) {
        gemm_qk(0);
        wgmma_wait<0>(s);
        if (n + 2 >= tiles) release_q();
        softmax(n, [] {});
        send_p();
        own_product(0);
      };
      int n = 0;
      for (; n + 1 < tiles; n += 2) {
        even_tile(n);
        wgmma_wait<0>(o);
        consumer_release(0);
        receive_p([] {});  // no MMA to await before O is rescaled
        other_product(1);
        wgmma_wait<0>(o);  // before the next S: issuing that first was slower
        consumer_release(1);
      }
      if (n < tiles) even_tile(n);
    } else {
      int n = 0;
      for (; n + 1 < tiles; n += 2) {
        gemm_qk(1);
        receive_p([&] { wgmma_wait<0>(s, o); });
        other_product(0);
        wgmma_wait<1>(s);  // S complete, P V in flight
        if (n + 3 >= tiles) release_q();
        softmax(n + 1, [&] {
          wgmma_wait<0>(o);
          consumer_release(0);
        });
        send_p();
        own_product(1);
        // Both halves must be released before the next tile is loaded into this stage. If this side
        // released its half only after the next S, it would wait for that tile forever.
        wgmma_wait<0>(o);
        consumer_release(1);
      }
      if (n < tiles) {
        receive_p([] {});
        other_product(0);
      }
    }
    wgmma_wait<0>(o);
    if (tiles % 2 == 1) consumer_release(0);
    //! [loop]

    // (6) Both sides read the row sums.
    const PlannedTile piece = pieces.at(idx);
    const Rows& rows = piece.rows;
    const auto [sequence, tile, count, split, num_splits, first_part] = piece.work;
    const auto partial_index = [&](int part, int row) {
      return (int64_t{first_part + part} * pieces.row_tiles + pieces.row_tile()) * Config::kRows +
             row;
    };
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(row_sum[r]);
      if (quad_col == 0) smem.sSum[kSide][quad_row + 8 * r] = sum;
    }
    named_barrier_sync(kBoth, Config::kConsumers);  // the sums are visible
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = quad_row + 8 * r, col = kSide * Config::kColumns + quad_col;
      if (row >= rows.count) continue;
      const float sum = smem.sSum[kLeft][row] + smem.sSum[kRight][row];
      // (7) O = O / l of this work tile; (8) store O and lse, -inf if no key is visible.
      const float factor = sum != 0 ? 1 / sum : 0;
      const float lse = sum != 0 ? row_max[r] + log2f(sum) : -INFINITY;
      const int64_t to = num_splits == 1 ? rows.first + row : partial_index(split, row);
#pragma unroll
      for (int n = 0; n < Config::kColumns / 8; ++n) {
        const float o0 = o[n][2 * r] * factor, o1 = o[n][2 * r + 1] * factor;
        const int64_t element = to * kOutDim + col + 8 * n;
        if (num_splits == 1)
          *reinterpret_cast<uint32_t*>(gO + element) = pack2<Element>(o0, o1);
        else
          *reinterpret_cast<float2*>(gOPartial + element) = make_float2(o0, o1);
      }
      if (col > 0) continue;
      (num_splits == 1 ? gLse : gLsePartial)[to] = num_splits == 1 ? kLn2 * lse : lse;
    }

    // (9) The last block to arrive reduces.
    //! [arrive]
    // the partial result is stored; all threads have read the sums
    named_barrier_sync(kBoth, Config::kConsumers);
    if (num_splits == 1 || num_splits > pieces.most_own_parts) continue;
    if (threadIdx.x == 0) smem.last = flag_add(&gSemaphore[piece.row_block], 1) == num_splits - 1u;
    // `last` is visible and, through thread 0, the other blocks' results.
    named_barrier_sync(kBoth, Config::kConsumers);
    if (!smem.last) continue;
    for (int r = warp_id; r < rows.count; r += Config::kNumWarps)
      merge_row<Element, Config>(gOPartial, gLsePartial, gO, gLse, rows.first + r, num_splits,
                                 [&](int part) { return partial_index(part, r); });
    if (threadIdx.x == 0) gSemaphore[piece.row_block] = 0;  // reset for the next launch
    //! [arrive]
  }
}

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_kernel(const __grid_constant__ Maps maps, Pages pages, Pieces<Config> pieces,
                     Element* gO,             // [B, Hq, seqlen_q, 512]
                     float* gLse,             // [B, Hq, seqlen_q]
                     float* gOPartial,        // [parts, row_tiles, kRows, 512]
                     float* gLsePartial,      // [parts, row_tiles, kRows], in log2 units
                     unsigned* gSemaphore) {  // [row blocks]: arrivals; 0 between launches
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  // Broadcast from lane 0, so that the compiler knows it is warp-uniform.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) init_barriers(smem);
  launch_dependents();  // combine_kernel may start: it waits for the end of this kernel
  __syncthreads();      // barriers are initialised
  if (warpgroup == 2) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x / kWarp == Config::kNumWarps)
      produce<Element, Config>(smem, pieces, maps, pages);
    return;
  }
  setmaxnreg_inc<Config::kConsumerRegisters>();
  if (warpgroup == kLeft)
    consume<kLeft, Element, Config>(smem, pieces, gO, gLse, gOPartial, gLsePartial, gSemaphore);
  else
    consume<kRight, Element, Config>(smem, pieces, gO, gLse, gOPartial, gLsePartial, gSemaphore);
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const PagedParams<Element> params(args);
  const Problem& p = args.problem;
  const int64_t row_tiles = ceil_div(p.heads * p.seqlen_q, Config::kRows);
  const Pages pages{params.page_table, static_cast<int>(max_pages_of(p)),
                    static_cast<int>(page_size_of(p)), static_cast<int>(box_rows(p))};
  Maps maps;
  if (const Status made = maps.make<Element, Config>(args, pages.box_rows); !made.ok()) return made;
  const bool combine = combines(p, Config::kRows);
  const Pieces<Config> pieces{args.in<WorkTile>("work"),
                              args.in<int>("work_begin"),
                              params.seqused_k,
                              shape_of(p),
                              static_cast<int>(row_tiles),
                              combine ? few_parts(p, Config::kRows) : INT_MAX};
  args.phase("attention");
  const Status done = launch_kernel(
      attention_kernel<Element, Config>,
      dim3(static_cast<unsigned>(row_tiles * teams(p, Config::kRows))), dim3(Config::kThreads),
      sizeof(SharedStorage<Element, Config>), args.stream, maps, pages, pieces, params.o,
      params.lse, params.o_partial, params.lse_partial, params.arrived);
  if (!done.ok() || !combine) return done;
  args.phase("combine");
  return launch_kernel(LaunchAttributes{.dependent = true}, combine_kernel<Element, Config>,
                       dim3(static_cast<unsigned>(4 * planned_blocks(p))), dim3(32 * kCombineWarps),
                       0, args.stream, args.in<SplitSequence>("splits"), params.o_partial,
                       params.lse_partial, params.o, params.lse, pieces.shape, pieces.row_tiles,
                       static_cast<int>(most_split_sequences(p, Config::kRows)));
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype,
                        [&]<class Element>() { return launch<Element, Config>(args); });
}

}  // namespace ATTN_BACKEND::v16_mla_seesaw
