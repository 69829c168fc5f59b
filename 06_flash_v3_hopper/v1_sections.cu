// v1_sections: chapter 04's loop with a tile scheduler, head sections and a register epilogue.
//
// parent    04_flash_v2/v4_unmasked_blocks
// change    Still mma.sync, ldmatrix and cp.async. A TileScheduler yields tiles, a WorkTile
//           describes one, as in all later steps. Heads come in sections whose K and V fit in L2,
//           tiles have 128 keys (64 at d=256), and O is stored from registers in whole sectors.
// why       The baseline that later steps compare Hopper's instructions with.
// expect    dram__bytes_read.sum falls where K and V of all heads do not fit in L2. The MMAs stay
//           the same.
// supports  fp16, bf16; head dims 64, 128, 256; any lengths, masks, GQA
#include "attn/kernel.h"
#include "emulator/warp_access.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "kernels/hopper/fragments.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::v1_sections {
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
  static constexpr int kTiles = 1;                            // 16-row MMAs per warp
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

// (3) S = Q K^T for the rows of this warp.
//! [scores]
template <class Config, class Element>
__device__ __forceinline__ void gemm_qk(float (&s)[Config::kTiles][Config::kBlockN / 8][4],
                                        const Element* sQ, const Element* sK) {
  const int lane_id = thread_index() % 32, row = thread_index() / 32 * 16;
#pragma unroll
  for (int k = 0; k < Config::kHeadDim; k += 16) {
    uint32_t a[Config::kTiles][4], b[4];
#pragma unroll
    for (int m = 0; m < Config::kTiles; ++m)
      ldmatrix_x4(a[m], sQ + swizzled_offset<Config::kHeadDim>(row + 16 * m + lane_id % 16,
                                                               k + lane_id / 16 * 8));
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; n += 2) {  // two MMAs of 8 keys
      ldmatrix_x4(b, sK + swizzled_offset<Config::kHeadDim>(8 * n + lane_id / 16 * 8 + lane_id % 8,
                                                            k + lane_id / 8 % 2 * 8));
#pragma unroll
      for (int m = 0; m < Config::kTiles; ++m) {
        mma_m16n8k16<Element>(s[m][n], a[m], {b[0], b[1]}, s[m][n]);
        mma_m16n8k16<Element>(s[m][n + 1], a[m], {b[2], b[3]}, s[m][n + 1]);
      }
    }
  }
}
//! [scores]

// (5) O += P V for the rows of this warp. `probabilities(step, a)` makes the A operand of 16 keys.
//! [output]
template <class Config, class Element, class Probabilities>
__device__ __forceinline__ void gemm_pv(float (&o)[Config::kTiles][Config::kHeadDim / 8][4],
                                        Probabilities probabilities, const Element* sV) {
  const int lane_id = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < Config::kBlockN; k += 16) {
    uint32_t a[Config::kTiles][4], b[4];
    probabilities(k / 16, a);
#pragma unroll
    for (int n = 0; n < Config::kHeadDim / 8; n += 2) {
      ldmatrix_x4_trans(
          b, sV + swizzled_offset<Config::kHeadDim>(k + lane_id % 16, 8 * n + lane_id / 16 * 8));
#pragma unroll
      for (int m = 0; m < Config::kTiles; ++m) {
        mma_m16n8k16<Element>(o[m][n], a[m], {b[0], b[1]}, o[m][n]);
        mma_m16n8k16<Element>(o[m][n + 1], a[m], {b[2], b[3]}, o[m][n + 1]);
      }
    }
  }
}
//! [output]

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_kernel(const Element* gQ,         // [B, Hq, seqlen_q, d]
                     const Element* gK,         // [B, Hkv, seqlen_k, d]
                     const Element* gV,         // [B, Hkv, seqlen_k, d]
                     Element* __restrict__ gO,  // [B, Hq, seqlen_q, d]
                     float* __restrict__ gLse,  // [B, Hq, seqlen_q]
                     Shape shape, TileScheduler scheduler) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN;
  constexpr int kTiles = Config::kTiles;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const float softmax_scale_log2 = shape.softmax_scale * kLog2e;

  // The current query tile, and the index of the next one.
  unsigned index = scheduler.first();
  WorkTile work{};
  int row0 = 0, last_key = 0;
  KvBlockRange kv_range{};
  const auto next_work_tile = [&] {
    if (index >= scheduler.count()) return false;
    work = work_of<Config>(shape, scheduler.at<Config::kBlockM>(index));
    index = scheduler.next(index);
    row0 = work.row0 + work.seqlen_k - work.seqlen_q;  // key on the diagonal of row work.row0
    last_key = work.seqlen_k - 1;
    kv_range = work.kv_range;  // never empty: a fully masked tile has one block, all of it masked
    return true;
  };
  const auto load = [&](Element* tile, const Element* g, int n_block) {
    if (n_block < kv_range.end)
      load_tile<kBlockN, Config>(tile, g, work.kv_head, n_block * kBlockN, work.seqlen_k);
    cp_async_commit();
  };

  float o[kTiles][kHeadDim / 8][4] = {};  // unnormalised
  // max in log2 units; sum over this lane's keys
  float row_max[kTiles][2], row_sum[kTiles][2] = {};
  for (int m = 0; m < kTiles; ++m) row_max[m][0] = row_max[m][1] = kLowest;

  // One key block. `masked` is a type, so the unmasked body contains no mask code.
  const auto process_kv_block = [&](int n_block, auto masked) {
    const int key0 = n_block * kBlockN, warp_row0 = row0 + threadIdx.x / 32 * 16;
    // A warp skips a block that is fully masked for its rows.
    const bool idle = masked.value && (key0 > warp_row0 + 15 + shape.window_right ||
                                       key0 + kBlockN <= warp_row0 - shape.window_left);
    // (2) V_j is in flight during Q K^T. At most one cp.async group is in flight, so both waits
    // wait for all groups.
    //! [pipeline]
    cp_async_wait<0>();
    __syncthreads();  // K_j is visible; V_j-1 is no longer read
    load(smem.sV[0], gV, n_block);
    //! [pipeline]

    // (3) S = Q K^T, -inf where masked.
    float s[kTiles][kBlockN / 8][4] = {};
    if (!idle) {
      gemm_qk<Config>(s, smem.sQ[0], smem.sK[0]);
      if constexpr (masked.value)
        apply_mask<Config>(s[0], shape, kv_range, n_block, row0, last_key);
    }

    // K_j+1 is in flight during softmax and P V.
    //! [pipeline_k]
    cp_async_wait<0>();
    __syncthreads();  // V_j is visible; K_j is no longer read
    load(smem.sK[0], gK, n_block + 1);
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
    gemm_pv<Config>(o, probabilities, smem.sV[0]);
  };

  //! [loops]
  if (!next_work_tile()) return;
  do {
    // (1) Load Q_i, which stays, and the first K_j, in one copy group.
    load_tile<Config::kBlockM, Config>(smem.sQ[0], gQ, work.q_head, work.row0, work.seqlen_q);
    load(smem.sK[0], gK, kv_range.begin);
    int n_block = kv_range.begin;
    // Left window edge; unmasked blocks; diagonal, right window edge, sequence end.
    for (; n_block < kv_range.unmasked_begin; ++n_block)
      process_kv_block(n_block, std::true_type{});
    for (; n_block < kv_range.unmasked_end; ++n_block) process_kv_block(n_block, std::false_type{});
    for (; n_block < kv_range.end; ++n_block) process_kv_block(n_block, std::true_type{});
    store_o<Element, kHeadDim>(gO, gLse, work, kHeadDim, o[0], row_max[0], row_sum[0]);
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max[0][r] = kLowest, row_sum[0][r] = 0;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[0][n][i] = 0;
  } while (next_work_tile());
  //! [loops]
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const TileScheduler scheduler(args.problem, Config::kBlockM);
  if (args.report_tiling(
          {Config::kBlockM, Config::kBlockN, scheduler.section, 1, 16}))  // rows per warp
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

}  // namespace ATTN_BACKEND::v1_sections
