// v16_mla_seesaw: latent attention whose softmax runs under products.
//
// parent    v13_mla_wgmma
// idea      FlashMLA's seesaw. Each warpgroup has S, softmax and P of every second tile: the left
//           one of the even tiles, the right one of the odd tiles. O stays cut by columns, so each
//           P has two products: its own warpgroup multiplies it from registers, the other one from
//           shared memory. While one computes a softmax, the tensor cores have products of the
//           other. The maximum is one for both, and goes to and fro with P.
//           A third warpgroup copies by TMA, with boxes of a page as in v15_prefill_tma. A tile is
//           two halves, the columns that a warpgroup multiplies as V: it is also the one to
//           release them. Q of the next piece comes while O of this one is stored.
// expect    the tensor pipe is busy but for what neither softmax nor a copy hides; with few rows
//           the bandwidth of HBM, as before
// supports  fp16, bf16; head dim 576 (512 of V), one K/V head; 1 to 16 queries, any lengths,
//           causal; page sizes that are multiples of 8; scales from 1e-37
#include "attn/kernel.h"
#include "ptx/global_flag.h"
#include "ptx/mbarrier.h"
#include "ptx/mma.h"
#include "ptx/named_barrier.h"
#include "ptx/setmaxnreg.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"
#include "boxes.h"
#include "hopper_fragments.h"
#include "plan.h"
#include "splits.h"
#include "tiles.h"

namespace ATTN_BACKEND::v16_mla_seesaw {
using namespace attn;
using namespace paged;
using namespace plans;
using namespace splits;
using hopper::kWarp, hopper::kWarpgroup, hopper::groups_apart, hopper::PipelineState;

//! [config]
// The warpgroups that compute; their columns of O, and the half of a tile of keys that these are.
enum Side { kLeft = 0, kRight = 1 };
// Named barriers. 0 is that of __syncthreads. kPReady + side: its P is in shared memory;
// kSideDone + side: its warps are done with the P of the other; kBoth: the warps of both are here.
enum NamedBarrier { kBlock = 0, kPReady = 1, kSideDone = 3, kBoth = 5 };

struct Config {
  static constexpr int kHeadDim = kLatentDim, kRows = kWgmmaRows;
  static constexpr int kOutDim = kLatentValues;            // the first columns of K are V
  static constexpr int kBlockN = 64, kTile = kBlockN;      // keys of a tile
  static constexpr int kConsumers = 2 * hopper::kWarpgroup, kThreads = 3 * hopper::kWarpgroup;
  static constexpr int kNumWarps = kConsumers / hopper::kWarp;
  static constexpr int kColumns = kOutDim / 2;             // of O, a warpgroup
  // Panels of 64 columns of a half of a tile: four are V's left columns; four its right ones, and one
  // lies behind V. Where the half begins.
  __host__ __device__ static constexpr int panels(int half) { return half == kLeft ? 4 : 5; }
  __host__ __device__ static constexpr int begin(int half) { return half * kBlockN * 4 * 64; }
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(kTile == tile_keys(kHeadDim), "plans count other tiles");
};
//! [config]

constexpr float kRescaleThreshold = 8;  // to base 2: P is at most 2^8

// Q and P are panels of 64 columns, [columns / 64][rows, 64]. A half of a tile of keys is atoms of
// 8 rows and 64 columns as its boxes bring them, [rows / 8][panels][8, 64].
template <class Element, class Config>
struct SharedStorage {
  alignas(1024) Element sK[2][Config::kBlockN * Config::kHeadDim];  // an even tile, an odd one
  alignas(1024) Element sQ[Config::kRows * Config::kHeadDim];
  alignas(1024) Element sP[Config::kRows * Config::kBlockN];  // of both sides, in turn
  float sMax[2][Config::kRows];                               // to base 2: after a tile of a side
  float sSum[2][Config::kRows];
  // mbarriers: the bytes of a half are there; the side that has it is done with it
  uint64_t q_full, q_empty, k_full[2][2], k_empty[2][2];
  bool last;  // whether this block merges
  ATTN_MEMBERS(SharedStorage, sK, sQ, sP, sMax, sSum, q_full, q_empty, k_full, k_empty, last)
};
// The swizzled offset of element (row, col) of a panel of 64 rows.
__device__ __forceinline__ int swizzled_offset(int row, int col) {
  return row * 64 + ((col / 8) ^ row) % 8 * 8 + col % 8;
}

// The place of a key in the pool, counted in tokens: fewer than 2^31.
struct Pages {
  const int* gTable;  // [B, max_pages]: the pages of each sequence
  int max_pages, page_size, box_rows;
};
__device__ __forceinline__ int slot_of(const Pages& pages, int sequence, int key, int end) {
  if (key >= end) return hopper::kNowhere;  // the table is not read there
  const int page = pages.gTable[int64_t{sequence} * pages.max_pages + key / pages.page_size];
  return page * pages.page_size + key % pages.page_size;
}

// (3) S = Q K^T. Issues it, and does not wait.
//! [issue_s]
template <int kHalf, class Element, class Config>
__device__ __forceinline__ void issue_s(float (&s)[Config::kBlockN / 8][4], const Element* sQ,
                                        const Element* sK) {
  constexpr int kPanels = Config::panels(kHalf);
  const WgmmaOperand q = wgmma_operand(sQ + kHalf * Config::panels(kLeft) * 64 * Config::kRows);
  const WgmmaOperand k = groups_apart(wgmma_operand(sK + Config::begin(kHalf)), kPanels * 1024);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kPanels * 4; ++i) {  // 16 columns are 32 bytes, 64 columns a panel
    const int panel = i / 4, inside = i % 4 * 32;
    wgmma<Element, false>(s, q + (panel * Config::kRows * 128 + inside),
                          k + (panel * 1024 + inside), kHalf > 0 || i > 0);
  }
}
//! [issue_s]

// (5) O += P V: a side's columns of V, and P from registers or, that of the other side, from shared
// memory. Issues it, and does not wait.
//! [issue_o]
template <Side kSide, class Config, class Element>
__device__ __forceinline__ WgmmaOperand values_of(const Element* sK) {
  return groups_apart(wgmma_operand(sK + Config::begin(kSide), 1024),
                      Config::panels(kSide) * 1024);
}
template <Side kSide, class Element, class Config>
__device__ __forceinline__ void issue_own(float (&o)[Config::kColumns / 8][4],
                                          const uint32_t (&p)[Config::kBlockN / 16][4],
                                          const Element* sK) {
  const WgmmaOperand v = values_of<kSide, Config>(sK);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 16; ++i)  // 16 keys are two groups of 8 rows
    wgmma<Element, true>(o, p[i], v + 2 * Config::panels(kSide) * 1024 * i, true);
  wgmma_commit();
}
template <Side kSide, class Element, class Config>
__device__ __forceinline__ void issue_other(float (&o)[Config::kColumns / 8][4], const Element* sP,
                                            const Element* sK) {
  const WgmmaOperand p = wgmma_operand(sP), v = values_of<kSide, Config>(sK);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 16; ++i)
    wgmma<Element, true>(o, p + 32 * i, v + 2 * Config::panels(kSide) * 1024 * i, true);
  wgmma_commit();
}
//! [issue_o]

// The merge of the parts of a row by a warp: a lane has four columns of each 128 and the weight of
// every 32nd part. `place_of(n)`: where part n lies.
//! [merge_row]
template <class Element, class Config, class PlaceOf>
__device__ __forceinline__ void merge_row(const float* gOPartial, const float* gLsePartial,
                                          Element* gO, float* gLse, int64_t row, int num_parts,
                                          PlaceOf place_of) {
  constexpr int kHeadDim = Config::kOutDim, kAtOnce = 4;  // parts in flight
  constexpr int kOwn = ceil_div(kHeadDim, 128);
  const int lane_id = threadIdx.x % 32;
  float4 parts[kAtOnce][kOwn] = {};
  const auto load = [&](int n0) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int c = 0; c < kOwn; ++c)
        if (n0 + i < num_parts)
          parts[i][c] = *reinterpret_cast<const float4*>(gOPartial + place_of(n0 + i) * kHeadDim +
                                                         128 * c + 4 * lane_id);
  };
  load(0);
  float max = kLowest, sum = 0, weight = 0, out[kOwn][4] = {};
  for (int n = lane_id; n < num_parts; n += 32) max = fmaxf(max, gLsePartial[place_of(n)]);
  for (int distance = 16; distance > 0; distance /= 2)
    max = fmaxf(max, __shfl_xor_sync(~0u, max, distance));
  for (int n0 = 0; n0 < num_parts; n0 += kAtOnce) {
    if (n0 > 0) load(n0);
    if (n0 % 32 == 0) {
      const int n = n0 + lane_id;
      weight = n < num_parts ? exp2f(gLsePartial[place_of(n)] - max) : 0;
      sum += weight;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float of_part = __shfl_sync(~0u, weight, n0 % 32 + i);
      if (n0 + i >= num_parts) continue;
#pragma unroll
      for (int c = 0; c < kOwn; ++c) add_scaled(out[c], of_part, parts[i][c]);
    }
  }
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
#pragma unroll
  for (int c = 0; c < kOwn; ++c)
    store_row_part(gO + row * kHeadDim + 128 * c + 4 * lane_id, out[c], sum > 0 ? 1 / sum : 0);
  if (lane_id == 0) gLse[row] = sum > 0 ? kLn2 * (max + log2f(sum)) : -INFINITY;
}
//! [merge_row]

// What a block works on, piece by piece: a part of a sequence's keys, and a tile of its rows.
struct Piece {
  Work work;
  int row_block, used;
  Rows rows;
  int begin, end;  // keys
};
template <class Config>
struct Pieces {
  const Work* gWork;      // [pieces]: what each team works on, one by one
  const int* gWorkBegin;  // [teams + 1]: the first piece of each team
  const int* gSeqused;    // [B]: keys of each sequence
  Shape shape;
  int row_tiles;
  // The blocks of a team have one row tile each, of one sequence after the other.
  __device__ int team() const { return static_cast<int>(blockIdx.x) / row_tiles; }
  __device__ int row_tile() const { return static_cast<int>(blockIdx.x) % row_tiles; }
  __device__ int begin() const { return gWorkBegin[team()]; }
  __device__ int end() const { return gWorkBegin[team() + 1]; }
  __device__ Piece at(int piece) const {
    const Work w = gWork[piece];
    const int used = gSeqused[w.row_block], block = w.row_block * row_tiles + row_tile();
    const int first = w.tile * Config::kTile, keys = keys_of_sequence(shape, used).end;
    return {w, block, used, rows_of(shape, block, Config::kRows), first,
            min(keys, first + w.count * Config::kTile)};
  }
};

// (1) load Q_i, (2) K_j, by one warp. A lane has one box of a tile, whole rows of a page.
//! [producer]
template <class Element, class Config>
__device__ __forceinline__ void produce(SharedStorage<Element, Config>& smem,
                                        const Pieces<Config>& pieces, const TensorMap& mapQ,
                                        const TensorMap& mapLeft, const TensorMap& mapRight,
                                        const TensorMap& mapRow,
                                        const Pages& pages) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int boxes = Config::kBlockN / pages.box_rows, own_row = lane * pages.box_rows;
  PipelineState<1> q, k[2];
  for (int at = pieces.begin(); at < pieces.end(); ++at, q.advance()) {
    const Piece piece = pieces.at(at);
    const int sequence = piece.work.row_block;
    if (lane == 0) {
      mbarrier_wait(&smem.q_empty, q.phase() ^ 1);  // the first time it is
      mbarrier_arrive_expect(&smem.q_full, Config::kRows * Config::kHeadDim * 2);
      tma_load(smem.sQ, mapQ, &smem.q_full, {0, static_cast<int>(piece.rows.first), 0});
    }
    int ahead = slot_of(pages, sequence, piece.begin + own_row, piece.end);
    for (int key0 = piece.begin, stage = 0; key0 < piece.end; key0 += Config::kBlockN, stage ^= 1) {
      const int rows = piece.end - key0, slot = ahead;  // keys that there are
      ahead = slot_of(pages, sequence, key0 + Config::kBlockN + own_row, piece.end);
      // 0 times V must be 0: behind the end rows are zeros, and the box that holds the end comes
      // row by row.
      const bool is_cut = lane < boxes && own_row < rows && rows < own_row + pages.box_rows;
      const unsigned cut = __ballot_sync(~0u, is_cut);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        constexpr int kGroup = 8 * 64;  // elements of an atom
        const int panels = Config::panels(half), panel0 = half * Config::panels(kLeft);
        Element* const tile = smem.sK[stage] + Config::begin(half);
        uint64_t* const full = &smem.k_full[stage][half];
        mbarrier_wait(&smem.k_empty[stage][half], k[stage].phase() ^ 1);
        if (lane == 0) mbarrier_arrive_expect(full, Config::kBlockN * panels * 128);
        __syncwarp();  // all bytes are announced before any of them arrives
        if (lane < boxes && !is_cut)
          tma_load(tile + own_row / 8 * panels * kGroup, half == kLeft ? mapLeft : mapRight, full, {0, 0, panel0, slot / 8});
        if (cut == 0) continue;
        const int holder = __ffs(static_cast<int>(cut)) - 1;
        const int row0 = __shfl_sync(~0u, own_row, holder), slot0 = __shfl_sync(~0u, slot, holder);
        for (int i = lane; i < pages.box_rows; i += kWarp) {
          const int row = row0 + i, from = row < rows ? slot0 + i : hopper::kNowhere;
          for (int panel = 0; panel < panels; ++panel)
            tma_load(tile + (row / 8 * panels + panel) * kGroup + row % 8 * 64, mapRow, full,
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
  mbarrier_init(&smem.q_empty, Config::kNumWarps);  // one lane of a warp says that it is done
  for (int stage = 0; stage < 2; ++stage)
    for (int half = 0; half < 2; ++half) {
      mbarrier_init(&smem.k_full[stage][half], 1);
      mbarrier_init(&smem.k_empty[stage][half], Config::kNumWarps / 2);
    }
  mbarrier_init_fence();
}

// What a side does, in one piece after the other.
template <Side kSide, class Element, class Config>
__device__ __forceinline__ void consume(SharedStorage<Element, Config>& smem,
                                        const Pieces<Config>& pieces, Element* gO, float* gLse,
                                        float* gOPartial, float* gLsePartial, unsigned* gArrived) {
  constexpr int kBlockN = Config::kBlockN, kOutDim = Config::kOutDim;
  constexpr Side kOther = kSide == kLeft ? kRight : kLeft;
  const Shape& shape = pieces.shape;
  const int warp_id = static_cast<int>(threadIdx.x) / kWarp;
  const int lane_id = static_cast<int>(threadIdx.x) % kWarp;
  const int quad_row = 16 * (warp_id % 4) + lane_id / 4, quad_col = lane_id % 4 * 2;
  const float softmax_scale_log2 = shape.softmax_scale * kLog2e;
  PipelineState<1> q, k[2];
  const auto release = [&](int stage) {  // this warp is done with its half
    if (lane_id == 0) mbarrier_arrive(&smem.k_empty[stage][kSide]);
    k[stage].advance();
  };
  const auto release_q = [&] {
    if (lane_id == 0) mbarrier_arrive(&smem.q_empty);
  };

  for (int at = pieces.begin(); at < pieces.end(); ++at, q.advance()) {
    float o[Config::kColumns / 8][4] = {};                   // not divided by l yet
    float row_max[2] = {kLowest, kLowest}, row_sum[2] = {};  // to base 2; of this side's keys
    float s[kBlockN / 8][4];
    uint32_t p[kBlockN / 16][4];
    // Keys of this piece, and those of them that this lane's rows see.
    int tiles, last_seen[2];
    {
      const Piece piece = pieces.at(at);
      tiles = ceil_div(max(0, piece.end - piece.begin), kBlockN);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int query = (piece.rows.row0 + quad_row + 8 * r) % shape.seqlen_q;
        last_seen[r] = min(piece.end, keys_of_query(shape, piece.used, query).end) - piece.begin;
      }
    }
    const auto scores = [&](int stage) {
      mbarrier_wait(&smem.k_full[stage][kLeft], k[stage].phase());
      issue_s<kLeft, Element, Config>(s, smem.sQ, smem.sK[stage]);
      mbarrier_wait(&smem.k_full[stage][kRight], k[stage].phase());
      issue_s<kRight, Element, Config>(s, smem.sQ, smem.sK[stage]);
      wgmma_commit();
    };
    const auto own_product = [&](int stage) {
      issue_own<kSide, Element, Config>(o, p, smem.sK[stage]);
    };
    const auto other_product = [&](int stage) {
      issue_other<kSide, Element, Config>(o, smem.sP, smem.sK[stage]);
    };

    // The maximum is `max` from here on. Both sides come to it after each tile, one with its own,
    // the other with what it is told; O is idle.
    //! [follow]
    const auto follow = [&](const float (&max)[2], auto await) {
      if (!__any_sync(~0u, max[0] > row_max[0] || max[1] > row_max[1])) return;
      await();
      const float rescale[2] = {exp2f(row_max[0] - max[0]), exp2f(row_max[1] - max[1])};
#pragma unroll
      for (int r = 0; r < 2; ++r) row_max[r] = max[r], row_sum[r] *= rescale[r];
      hopper::rescale_rows<Config::kColumns>(o, rescale);
    };
    //! [follow]
    // (4) softmax: S of a tile becomes P; -inf where a query does not see a key.
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
      float max[2] = {s[0][0], s[0][2]}, sum[2] = {};  // not scaled yet
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
    // P, and the maximum with it, go to the other side; and come from there.
    //! [seesaw]
    const auto send_p = [&] {
      named_barrier_sync(kSideDone + kSide, kWarpgroup);  // all of it has multiplied the other's P
#pragma unroll
      for (int c = 0; c < kBlockN / 8; ++c)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          *reinterpret_cast<uint32_t*>(
              smem.sP + swizzled_offset(quad_row + 8 * r, 8 * c + quad_col)) = p[c / 2][c % 2 * 2 + r];
      shared_write_fence();  // P is for wgmma
      named_barrier_arrive(kPReady + kSide, Config::kConsumers);
    };
    const auto receive_p = [&](auto await) {
      named_barrier_sync(kPReady + kOther, Config::kConsumers);
      const float max[2] = {smem.sMax[kOther][quad_row], smem.sMax[kOther][quad_row + 8]};
      follow(max, await);
    };
    //! [seesaw]

    mbarrier_wait(&smem.q_full, q.phase());
    if (tiles <= kSide) release_q();  // it has no S
    //! [loop]
    if constexpr (kSide == kLeft) {
      const auto even_tile = [&](int n) {
        scores(0);
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
        release(0);
        receive_p([] {});
        other_product(1);
        wgmma_wait<0>(o);
        release(1);
      }
      if (n < tiles) even_tile(n);
    } else {
      int n = 0;
      for (; n + 1 < tiles; n += 2) {
        scores(1);
        receive_p([&] { wgmma_wait<0>(s, o); });
        other_product(0);
        wgmma_wait<1>(s);  // S is there, O in flight
        if (n + 3 >= tiles) release_q();
        softmax(n + 1, [&] {
          wgmma_wait<0>(o);
          release(0);
        });
        send_p();
        own_product(1);
        wgmma_wait<0>(o);
        release(1);
      }
      if (n < tiles) {
        receive_p([] {});
        other_product(0);
      }
    }
    wgmma_wait<0>(o);
    if (tiles % 2 == 1) release(0);
    //! [loop]

    // (6) both sides get the sums
    const Piece piece = pieces.at(at);
    const Rows& rows = piece.rows;
    const auto [sequence, tile, count, split, num_splits, first_part] = piece.work;
    const auto place_of = [&](int part, int row) {
      return (int64_t{first_part + part} * pieces.row_tiles + pieces.row_tile()) * Config::kRows +
             row;
    };
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(row_sum[r]);
      if (quad_col == 0) smem.sSum[kSide][quad_row + 8 * r] = sum;
    }
    named_barrier_sync(kBoth, Config::kConsumers);  // the sums are there
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = quad_row + 8 * r, col = kSide * Config::kColumns + quad_col;
      if (row >= rows.count) continue;
      const float sum = smem.sSum[kLeft][row] + smem.sSum[kRight][row];
      // (7) O = O / l of these keys; (8) store it and its lse, -inf where there are none
      const float factor = sum > 0 ? 1 / sum : 0;
      const float lse = sum > 0 ? row_max[r] + log2f(sum) : -INFINITY;
      const int64_t to = num_splits == 1 ? rows.first + row : place_of(split, row);
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

    // (9) the last one merges
    //! [arrive]
    named_barrier_sync(kBoth, Config::kConsumers);  // this part is stored, the sums have been read
    if (num_splits == 1) continue;
    if (threadIdx.x == 0)
      smem.last = flag_add(&gArrived[piece.row_block], 1) == num_splits - 1u;
    // All see `last` and, through thread 0, the parts of the other blocks.
    named_barrier_sync(kBoth, Config::kConsumers);
    if (!smem.last) continue;
    for (int r = warp_id; r < rows.count; r += Config::kNumWarps)
      merge_row<Element, Config>(gOPartial, gLsePartial, gO, gLse, rows.first + r, num_splits,
                                 [&](int part) { return place_of(part, r); });
    if (threadIdx.x == 0) gArrived[piece.row_block] = 0;  // for the next launch
    //! [arrive]
  }
}

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_kernel(const __grid_constant__ TensorMap mapQ,      // [9, B Hq seqlen_q, 64]
                     const __grid_constant__ TensorMap mapLeft,   // pool, [tokens / 8, 9, 8, 64]
                     const __grid_constant__ TensorMap mapRight,  // the same, in other boxes
                     const __grid_constant__ TensorMap mapRow,    // and in boxes of a row
                     Pages pages, Pieces<Config> pieces,
                     Element* gO,        // [B, Hq, seqlen_q, 512]
                     float* gLse,        // [B, Hq, seqlen_q]
                     float* gOPartial,   // [parts, row_tiles, kRows, 512]
                     float* gLsePartial, // [parts, row_tiles, kRows], to base 2
                     unsigned* gArrived) {  // [row blocks]: parts that are stored; 0 between launches
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  // Of lane 0, so that the compiler knows that it is the same in all lanes.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) init_barriers(smem);
  __syncthreads();  // the barriers are there
  if (warpgroup == 2) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x / kWarp == Config::kNumWarps)
      produce<Element, Config>(smem, pieces, mapQ, mapLeft, mapRight, mapRow, pages);
    return;
  }
  setmaxnreg_inc<Config::kConsumerRegisters>();
  if (warpgroup == kLeft)
    consume<kLeft, Element, Config>(smem, pieces, gO, gLse, gOPartial, gLsePartial, gArrived);
  else
    consume<kRight, Element, Config>(smem, pieces, gO, gLse, gOPartial, gLsePartial, gArrived);
}

// Of the pool [num_pages, page_size, 576], taken as [tokens / 8, 9, 8, 64]: a box is `rows` tokens
// and `panels` times 64 columns.
//! [map]
template <class Element>
Status map_of_half(TensorMap& map, const Element* g, const Problem& p, int rows, int panels) {
  const int64_t tokens = num_pages_of(p) * page_size_of(p);
  return make_tensor_map<4>(map, g, {64, 8, kLatentDim / 64, tokens / 8},
                            {2 * kLatentDim, 128, 16 * kLatentDim}, {64, 8, panels, rows / 8},
                            Swizzle::k128);
}
//! [map]

template <class Element, class Config>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const int64_t rows = p.heads * p.seqlen_q, row_tiles = ceil_div(rows, Config::kRows);
  const auto* const gK = args.in<Element>("k");
  const Pages pages{args.in<int>("page_table"), static_cast<int>(max_pages_of(p)),
                    static_cast<int>(page_size_of(p)), static_cast<int>(box_rows(p))};
  TensorMap q, left, right, row;
  for (const Status& status :
       {make_tensor_map<3>(q, args.in<Element>("q"), {64, p.batch * rows, kLatentDim / 64},
                           {2 * kLatentDim, 128}, {64, Config::kRows, kLatentDim / 64},
                           Swizzle::k128),
        map_of_half(left, gK, p, pages.box_rows, Config::panels(kLeft)),
        map_of_half(right, gK, p, pages.box_rows, Config::panels(kRight)),
        hopper::map_of_rows(row, gK, p)})
    if (!status.ok()) return status;
  const Pieces<Config> pieces{args.in<Work>("work"), args.in<int>("work_begin"),
                              args.in<int>("seqused_k"), shape_of(p), static_cast<int>(row_tiles)};
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config>,
                       dim3(static_cast<unsigned>(row_tiles * teams(p, Config::kRows))),
                       dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), args.stream,
                       q, left, right, row, pages, pieces, args.out<Element>("o"),
                       args.out<float>("lse"), args.out<float>("o_partial"),
                       args.out<float>("lse_partial"), args.out<unsigned>("arrived"));
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype,
                        [&]<class Element>() { return launch<Element, Config>(args); });
}

}  // namespace ATTN_BACKEND::v16_mla_seesaw
