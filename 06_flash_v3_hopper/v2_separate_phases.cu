// v2_separate_phases: S, softmax and P V are separate phases of a whole tile.
//
// parent    v1_sections
// change    The loop is cut where a tile-wide MMA will be issued and awaited: S of all keys of a
//           block, its softmax, P rounded as a whole, then P V. K and V have separate waits, each
//           right before the tile is read.
// why       In v1 a warp's exponentials alternate with its MMAs, 16 keys at a time, and a warp
//           skips fully masked blocks. wgmma multiplies a whole tile for four warps and allows
//           neither.
// expect    gpu__time_duration.sum rises a little. A warp no longer interleaves its exponentials
//           with its MMAs, so the two overlap only if two warps are in different phases. P takes
//           registers of its own.
// supports  fp16, bf16; head dims 64, 128, 256; any lengths, masks, GQA
#include "attn/kernel.h"
#include "emulator/warp_access.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "kernels/hopper/fragments.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::v2_separate_phases {
using namespace attn;
using namespace hopper;

//! [config]
template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kNumConsumers = 2;  // warpgroups; from v5 on a producer joins them
  static constexpr int kThreads = kWarpgroup * kNumConsumers;
  static constexpr int kBlockM = 64 * kNumConsumers;          // B_r
  static constexpr int kBlockN = kHeadDim == 256 ? 64 : 128;  // B_c
  static constexpr int kStages = 1;                           // buffers for K, and for V
  static constexpr int kQStages = 1;                          // buffers for Q
  static_assert(kBlockN % 16 == 0 && kHeadDim % 16 == 0, "warps own whole MMAs");
};
//! [config]

// XOR swizzle: offset of element (row, col) of a tile [rows, kHeadDim]. The 16-byte chunks of a row
// are permuted so that the 8 rows of an ldmatrix phase hit disjoint banks.
//! [swizzle]
template <int kHeadDim>
__host__ __device__ constexpr int swizzled_offset(int row, int col) {
  return row * kHeadDim + ((col / 8) ^ row % 8) * 8 + col % 8;
}
template <int kHeadDim>
constexpr bool free_of_conflicts() {
  for (int col = 0; col < kHeadDim; col += 16)
    if (ldmatrix_access(
            [=](int l) { return 2 * swizzled_offset<kHeadDim>(l % 16, col + l / 16 * 8); }, 4)
                .conflicts() > 0 ||
        ldmatrix_access(
            [=](int l) {
              return 2 * swizzled_offset<kHeadDim>(l / 16 * 8 + l % 8, col + l / 8 % 2 * 8);
            },
            4)
                .conflicts() > 0)
      return false;
  return true;
}
static_assert(free_of_conflicts<64>() && free_of_conflicts<128>() && free_of_conflicts<256>());
//! [swizzle]

// Alignment and numbers of stages are those that wgmma and TMA will need.
template <class Element, class Config>
struct SharedStorage {
  alignas(1024) Element sQ[Config::kQStages][Config::kBlockM * Config::kHeadDim];
  alignas(1024) Element sK[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(1024) Element sV[Config::kStages][Config::kBlockN * Config::kHeadDim];
  ATTN_MEMBERS(SharedStorage, sQ, sK, sV)
};

// One query tile per block.
//! [tiles]
struct SingleTile : TileOrder {
  using TileOrder::TileOrder;
  __device__ unsigned first() const { return blockIdx.x; }
  __device__ unsigned next(unsigned) const { return count(); }
};
using TileScheduler = SingleTile;
//! [tiles]

// Issues the copies of kRows rows of a [heads, rows, d] tensor; rows past the end become zeros.
template <int kRows, class Config, class Element>
__device__ void load_tile(Element* tile, const Element* g, int head, int row0, int rows) {
#pragma unroll
  for (int i = 8 * thread_index(); i < kRows * Config::kHeadDim; i += 8 * Config::kThreads) {
    const int r = i / Config::kHeadDim, c = i % Config::kHeadDim, row = min(row0 + r, rows - 1);
    cp_async_16(tile + swizzled_offset<Config::kHeadDim>(r, c),
                g + (int64_t{head} * rows + row) * Config::kHeadDim + c, row0 + r < rows ? 16 : 0);
  }
}

// (3) S = Q K^T for the rows of this warp. Named as in v3, where it only issues; here S is complete
// when it returns.
//! [issue_qk]
template <class Config, class Element>
__device__ __forceinline__ void issue_qk(float (&s)[Config::kBlockN / 8][4], const Element* sQ,
                                         const Element* sK) {
  const int lane_id = thread_index() % 32;
  float zero[4] = {};
#pragma unroll
  for (int k = 0; k < Config::kHeadDim; k += 16) {
    uint32_t a[4], b[4];
    ldmatrix_x4(a, sQ + swizzled_offset<Config::kHeadDim>(lane_id % 16, k + lane_id / 16 * 8));
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; n += 2) {  // two MMAs of 8 keys
      ldmatrix_x4(b, sK + swizzled_offset<Config::kHeadDim>(8 * n + lane_id / 16 * 8 + lane_id % 8,
                                                            k + lane_id / 8 % 2 * 8));
      mma_m16n8k16<Element>(s[n], a, {b[0], b[1]}, k > 0 ? s[n] : zero);
      mma_m16n8k16<Element>(s[n + 1], a, {b[2], b[3]}, k > 0 ? s[n + 1] : zero);
    }
  }
}
//! [issue_qk]

// (5) O += P V for the rows of this warp, complete when it returns.
//! [issue_pv]
template <class Config, class Element>
__device__ __forceinline__ void issue_pv(float (&o)[Config::kHeadDim / 8][4],
                                         const uint32_t (&p)[Config::kBlockN / 16][4],
                                         const Element* sV) {
  const int lane_id = thread_index() % 32;
#pragma unroll
  for (int k = 0; k < Config::kBlockN; k += 16) {
    uint32_t b[4];
#pragma unroll
    for (int n = 0; n < Config::kHeadDim / 8; n += 2) {
      ldmatrix_x4_trans(
          b, sV + swizzled_offset<Config::kHeadDim>(k + lane_id % 16, 8 * n + lane_id / 16 * 8));
      mma_m16n8k16<Element>(o[n], p[k / 16], {b[0], b[1]}, o[n]);
      mma_m16n8k16<Element>(o[n + 1], p[k / 16], {b[2], b[3]}, o[n + 1]);
    }
  }
}
//! [issue_pv]

// (4) Online softmax in fp32, within the quad of lanes that share a row: S becomes P. The caller
// multiplies O by `rescale`.
//! [softmax]
template <class Config>
__device__ __forceinline__ void online_softmax(float (&s)[Config::kBlockN / 8][4],
                                               float (&row_max)[2], float (&row_sum)[2],
                                               float (&rescale)[2], float softmax_scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float max = s[0][2 * r];
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; ++n)
      max = fmaxf(max, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    max = fmaxf(row_max[r], quad_max(max) * softmax_scale_log2);
    rescale[r] = exp2f(row_max[r] - max);
    row_max[r] = max;
    row_sum[r] *= rescale[r];
  }
#pragma unroll
  for (int n = 0; n < Config::kBlockN / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[n][i] = exp2f(fmaf(s[n][i], softmax_scale_log2, -row_max[i / 2]));
      row_sum[i / 2] += s[n][i];
    }
}
//! [softmax]

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_kernel(const Element* gQ,         // [B, Hq, seqlen_q, d]
                     const Element* gK,         // [B, Hkv, seqlen_k, d]
                     const Element* gV,         // [B, Hkv, seqlen_k, d]
                     Element* __restrict__ gO,  // [B, Hq, seqlen_q, d]
                     float* __restrict__ gLse,  // [B, Hq, seqlen_q]
                     Shape shape, TileScheduler scheduler) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const float softmax_scale_log2 = shape.softmax_scale * kLog2e;

  // q: pipeline state of the current Q tile; index: the next tile; the others describe the current
  // tile.
  PipelineState<Config::kQStages> q{-1};
  unsigned index = scheduler.first();
  WorkTile work{};
  int row0 = 0, last_key = 0;
  KvBlockRange kv_range{};
  const auto next_work_tile = [&] {
    if (index >= scheduler.count()) return false;
    q.advance();
    work = work_of<Config>(shape, scheduler.at<Config::kBlockM>(index));
    index = scheduler.next(index);
    row0 = work.row0 + work.seqlen_k - work.seqlen_q;  // key on the diagonal of row work.row0
    last_key = work.seqlen_k - 1;
    kv_range = work.kv_range;  // never empty: a fully masked tile has one block, all of it masked
    return true;
  };
  // Pipeline state of the current K/V tile, counted through all tiles of this block.
  using KvState = PipelineState<Config::kStages>;
  KvState kv;
  //! [wait]
  const auto consumer_wait = [] {
    cp_async_wait<1>();  // the newest copy group, one tile, may be in flight
    __syncthreads();     // the copies of all threads are visible
  };
  //! [wait]
  const auto load = [&](Element* tile, const Element* g, int n_block) {
    if (n_block < kv_range.end)
      load_tile<kBlockN, Config>(tile, g, work.kv_head, n_block * kBlockN, work.seqlen_k);
    cp_async_commit();
  };

  float o[kHeadDim / 8][4] = {};  // unnormalised
  // max in log2 units; sum over this lane's keys
  float row_max[2] = {kLowest, kLowest}, row_sum[2] = {};
  float s[kBlockN / 8][4];
  uint32_t p[kBlockN / 16][4];
  float rescale[2];
  // Softmax of one key block. `masked` is a type, so the unmasked body contains no mask code.
  const auto softmax = [&](int n_block, auto masked) {
    if constexpr (masked.value) apply_mask<Config>(s, shape, kv_range, n_block, row0, last_key);
    online_softmax<Config>(s, row_max, row_sum, rescale, softmax_scale_log2);
  };
  //! [mmas]
  const auto issue_s = [&] {
    issue_qk<Config>(s, smem.sQ[q.index()] + thread_index() / 32 * 16 * kHeadDim,
                     smem.sK[kv.index()]);
  };
  const auto issue_o = [&](KvState state) { issue_pv<Config>(o, p, smem.sV[state.index()]); };
  const auto process_kv_block = [&](int n_block, auto masked) {
    consumer_wait();
    issue_s();
    __syncthreads();  // K_j is no longer read
    load(smem.sK[0], gK, n_block + 1);
    softmax(n_block, masked);
    rescale_rows<kHeadDim>(o, rescale);
    round_p<Element, kBlockN>(p, s);
    consumer_wait();
    issue_o(kv);
    __syncthreads();  // V_j is no longer read
    load(smem.sV[0], gV, n_block + 1);
    kv.advance();
  };
  //! [mmas]

  //! [loops]
  if (!next_work_tile()) return;
  do {
    // (1) Load Q_i, which stays, and the first K_j and V_j. Q is in K's copy group.
    load_tile<Config::kBlockM, Config>(smem.sQ[0], gQ, work.q_head, work.row0, work.seqlen_q);
    load(smem.sK[0], gK, kv_range.begin);
    load(smem.sV[0], gV, kv_range.begin);
    int n_block = kv_range.begin;
    // Left window edge; unmasked blocks; diagonal, right window edge, sequence end.
    for (; n_block < kv_range.unmasked_begin; ++n_block)
      process_kv_block(n_block, std::true_type{});
    for (; n_block < kv_range.unmasked_end; ++n_block) process_kv_block(n_block, std::false_type{});
    for (; n_block < kv_range.end; ++n_block) process_kv_block(n_block, std::true_type{});
    store_o<Element, kHeadDim>(gO, gLse, work, kHeadDim, o, row_max, row_sum);
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max[r] = kLowest, row_sum[r] = 0;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0;
  } while (next_work_tile());
  //! [loops]
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const TileScheduler scheduler(args.problem, Config::kBlockM);
  if (args.report_tiling({Config::kBlockM, Config::kBlockN, scheduler.section}))
    return Status::success();
  const ForwardParams<Element> params(args);
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config>, dim3(scheduler.count()),
                       dim3(Config::kThreads), sizeof(SharedStorage<Element, Config>), args.stream,
                       params.q, params.k, params.v, params.o, params.lse, shape_of(args.problem),
                       scheduler);
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

}  // namespace ATTN_BACKEND::v2_separate_phases
