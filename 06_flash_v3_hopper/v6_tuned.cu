// v6_tuned: tiles for each head dim, and O rescaled seldom.
//
// parent    v5_persistent
// idea      Nothing new about attention. Tiles, warpgroups and stages for each head dim come from a sweep (sweep.cu).
//           So do the answers to two questions: do turns pay, and does it pay to rescale O only where a maximum has
//           grown by more than 2^8? Until then P is at most 256, and l and O agree. Beside that softcap, and packed
//           sequences of several lengths, which cost the plain kernel a few loads for each tile of queries.
// expect    larger tiles of keys: fewer maxima, barriers and rescales for each of them.
// supports  fp16, bf16; head dims 64, 128, 256; any lengths, packed sequences, masks, GQA, softcap
#include "attn/device.h"
#include "attn/kernel.h"
#include "ptx/mbarrier.h"
#include "ptx/mma.h"
#include "ptx/named_barrier.h"
#include "ptx/setmaxnreg.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"
#include "v6_tiles.h"

namespace ATTN_BACKEND::v6_tuned {

// Stands for -inf where nothing was seen. It is finite, so that differences are numbers.
constexpr float kNothing = -3.4028234e38f;

// Tiles are panels of 64 columns, [d / 64][rows, 64], with TMA's swizzle of 128 bytes.
template <class Element, class Config>
struct SharedStorage {
  alignas(1024) Element sQ[Config::kBlockM * Config::kHeadDim];
  alignas(1024) Element sK[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(1024) Element sV[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(1024) Element sO[Config::kOwnO ? Config::kBlockM * Config::kHeadDim : 8];
  uint64_t q_full, q_empty, k_full[Config::kStages], v_full[Config::kStages];  // mbarriers: the bytes are there
  uint64_t k_empty[Config::kStages], v_empty[Config::kStages];        // all consumers are done with them
};

// threadIdx.x, read anew each time: as one variable it, and all that follows from it, would keep registers in the loop.
__device__ __forceinline__ int thread_index() {
#ifdef ATTN_EMULATED
  return static_cast<int>(threadIdx.x);
#else
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
#endif
}

__device__ __forceinline__ float quad_max(float x) {  // over the 4 lanes that share a row
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// (3) S = Q K^T for the 64 rows of this warpgroup, both K-major. Starts it.
//! [scores]
template <class Config, class Element>
__device__ __forceinline__ void scores(float (&s)[Config::kBlockN / 8][4], const Element* sQ, const Element* sK) {
  const WgmmaOperand q = wgmma_operand(sQ), k = wgmma_operand(sK);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kHeadDim / 16; ++i) {  // 16 columns are 32 bytes, 64 columns a panel
    const int panel = i / 4, inside = i % 4 * 32;
    wgmma<Element, false>(s, q + (panel * Config::kBlockM * 128 + inside), k + (panel * Config::kBlockN * 128 + inside),
                          i > 0);
  }
  wgmma_commit();
}
//! [scores]

// (5) O += P V: P from registers, V as it lies in memory, [k, d]. Starts it.
//! [output]
template <class Config, class Element>
__device__ __forceinline__ void output(float (&o)[Config::kHeadDim / 8][4],
                                       const uint32_t (&p)[Config::kBlockN / 16][4], const Element* sV) {
  const WgmmaOperand v = wgmma_operand(sV, Config::kBlockN * 128);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 16; ++i)  // 16 keys are 16 rows of 128 bytes
    wgmma<Element, true>(o, p[i], v + 16 * 128 * i, true);
  wgmma_commit();
}
//! [output]

template <class Element, class Config, bool kSoftcap>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_kernel(const __grid_constant__ TensorMap mapQ,  // [B Hq, d / 64, seqlen_q, 64]
                     const __grid_constant__ TensorMap mapK,  // [B Hkv, d / 64, seqlen_k, 64]
                     const __grid_constant__ TensorMap mapV,  // as K
                     const __grid_constant__ TensorMap mapO,  // as Q
                     Element* gO,                             // [tokens, Hq, d]: packed; else mapO is used
                     float* gLse,                             // [B, Hq, seqlen_q] or [Hq, tokens]
                     const int* gCuQ,                         // [B + 1], or null: not packed
                     const int* gCuK,                         // [B + 1]
                     Shape shape, int num_m_blocks, int num_heads, int section) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kTileBytes = kBlockN * kHeadDim * 2, kStages = Config::kStages;
  auto& smem = dynamic_shared<SharedStorage<Element, Config>>();
  const int warpgroup = threadIdx.x / 128;
  // What scores are still multiplied by: log2(e) is in it.
  const float softmax_scale_log2 = kSoftcap ? 1.44269504f : shape.softmax_scale * 1.44269504f;

  if (threadIdx.x == 0) {
    mbarrier_init(&smem.q_full, 1), mbarrier_init(&smem.q_empty, 4 * Config::kConsumers);
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&smem.k_full[stage], 1), mbarrier_init(&smem.v_full[stage], 1);
      constexpr int kWarps = 4 * Config::kConsumers;  // one lane of each says that it is done
      mbarrier_init(&smem.k_empty[stage], kWarps), mbarrier_init(&smem.v_empty[stage], kWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();  // the barriers are there

  const Tiles tiles{num_m_blocks, num_heads, section};
  //! [producer]
  if (warpgroup == Config::kConsumers) {
    registers_give<Config::kProducerRegisters>();
    if (threadIdx.x % 128 != 0) return;
    int turn = 0, taken = 0;  // tiles of keys so far, of all tiles of queries; those
    for (int round = 0; tiles.exists(round); ++round) {
      const auto [bh, row0] = tiles.at<kBlockM>(round);
      const Sequence sequence = sequence_of(shape, gCuQ, gCuK, bh);
      if (row0 >= sequence.seqlen_q) continue;  // of a batch with longer sequences
      const BlockRanges seen = blocks_seen(shape, sequence.seqlen_q, sequence.seqlen_k, row0, kBlockM, kBlockN);
      // (1) load Q_i when the consumers are done with the one before, then K_j and V_j as stages become free
      mbarrier_wait(&smem.q_empty, taken++ % 2 ^ 1);
      if (seen.begin == seen.end) continue;
      mbarrier_arrive_expect(&smem.q_full, kBlockM * kHeadDim * 2);
      tma_load(smem.sQ, mapQ, &smem.q_full, {0, sequence.q_token + row0, 0, sequence.q_head});
      for (int n_block = seen.begin; n_block < seen.end; ++n_block, ++turn) {
        const int stage = turn % kStages, phase = turn / kStages % 2;
        const auto load = [&](Element* tile, const TensorMap& map, uint64_t* full, uint64_t* empty) {
          mbarrier_wait(empty, phase ^ 1);  // the first time it is
          mbarrier_arrive_expect(full, kTileBytes);
          tma_load(tile, map, full, {0, sequence.kv_token + n_block * kBlockN, 0, sequence.kv_head});
        };
        load(smem.sK[stage], mapK, &smem.k_full[stage], &smem.k_empty[stage]);
        load(smem.sV[stage], mapV, &smem.v_full[stage], &smem.v_empty[stage]);
      }
    }
    return;
  }
  registers_take<Config::kConsumerRegisters>();
  //! [producer]

  const Element* const sQ = smem.sQ + warpgroup * 64 * 64;  // of every panel, here and below
  Element* const sO = (Config::kOwnO ? smem.sO : smem.sQ) + warpgroup * 64 * 64;
  //! [turns]
  // Barrier 1 + w opens when warpgroup w waits there and the one before has said that it is its turn.
  const auto wait_for_turn = [&] {
    if (Config::kTurns) named_barrier_sync(1 + warpgroup, 256);
  };
  const auto end_turn = [&] {
    if (Config::kTurns) named_barrier_arrive(1 + (warpgroup + 1) % Config::kConsumers, 256);
  };
  if (warpgroup == Config::kConsumers - 1) end_turn();  // the first one begins
  //! [turns]
  const auto done_with_q = [&] {  // this warp is; where O takes its place, when that has been read too
    if (thread_index() % 32 == 0) mbarrier_arrive(&smem.q_empty);
  };

  int first_turn = 0, visited = 0;  // tiles of keys before this tile of queries; tiles of queries that saw any
  for (int round = 0; tiles.exists(round); ++round) {
    const auto [bh, row0] = tiles.at<kBlockM>(round);
    const Sequence sequence = sequence_of(shape, gCuQ, gCuK, bh);
    if (row0 >= sequence.seqlen_q) continue;
    const BlockRanges seen = blocks_seen(shape, sequence.seqlen_q, sequence.seqlen_k, row0, kBlockM, kBlockN);
    // The first row of this lane in the tile, the second one is 8 below it; and the first of its columns of 8.
    const auto first_row = [] { return thread_index() / 32 * 16 + thread_index() % 32 / 4; };
    const auto quad_col = [] { return thread_index() % 4 * 2; };
    float o[kHeadDim / 8][4] = {};                             // not divided by l yet
    float row_max[2] = {kNothing, kNothing}, row_sum[2] = {};  // to base 2; of this lane's keys

    float s[kBlockN / 8][4];
    uint32_t p[kBlockN / 16][4];
    const auto turn_of = [&](int n_block) { return first_turn + n_block - seen.begin; };
    const auto stage_of = [&](int n_block) { return turn_of(n_block) % kStages; };
    const auto wait_for = [&](uint64_t* full, int n_block) {
      mbarrier_wait(full + stage_of(n_block), turn_of(n_block) / kStages % 2);
    };
    const auto release = [&](uint64_t* empty, int n_block) {  // this warp is done with it
      if (thread_index() % 32 == 0) mbarrier_arrive(empty + stage_of(n_block));
    };

    float rescale[2];
    bool rescaled;
    // S of one block of keys becomes P, in float32. `masked` is a type, so that the plain body has no trace of a mask.
    const auto softmax = [&](int n_block, auto masked) {
      if constexpr (kSoftcap) {  // tanh y = 1 - 2 / (e^2y + 1), a difference of like numbers where y is small
        const float in = shape.softmax_scale / shape.softcap;
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float y = s[n][i] * in, y2 = y * y;
            const float series = y * fmaf(y2, fmaf(y2, fmaf(y2, -17.0f / 315, 2.0f / 15), -1.0f / 3), 1);
            const float whole = fmaf(-2, __fdividef(1, exp2f(2 * 1.44269504f * y) + 1), 1);
            s[n][i] = shape.softcap * (fabsf(y) < 0.25f ? series : whole);
          }
      }
      if constexpr (masked.value) {
        // Position of this lane's first row from its first key, and how many keys there are from there on.
        const int key0 = n_block * kBlockN + quad_col(), keys = sequence.seqlen_k - key0;
        const int own = row0 + first_row() + sequence.seqlen_k - sequence.seqlen_q - key0;
        const int first = own - shape.window_left, last = own + shape.window_right;
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int key = 8 * n + i % 2, below = 8 * (i / 2);
            if (key - below < first || key - below > last || key >= keys) s[n][i] = -INFINITY;
          }
      }

      // (4) softmax, all of it in the quad of lanes that share a row.
      //! [softmax]
      float max[2];
      bool grown = !Config::kSeldom;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        max[r] = s[0][2 * r];
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n) max[r] = fmaxf(max[r], fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        max[r] = fmaxf(row_max[r], quad_max(max[r]) * softmax_scale_log2);
        grown = grown || max[r] > row_max[r] + 8;
      }
      rescaled = Config::kSeldom ? __any_sync(~0u, grown) : true;  // a question to the warp, as branches are its own
      if (rescaled) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          rescale[r] = exp2f(row_max[r] - max[r]);
          row_max[r] = max[r];
          row_sum[r] *= rescale[r];
        }
      }
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[n][i] = exp2f(fmaf(s[n][i], softmax_scale_log2, -row_max[i / 2]));
          row_sum[i / 2] += s[n][i];
        }
      //! [softmax]
    };
    // Two neighbouring accumulators, rounded in pairs, are the left operand of 16 keys.
    const auto round_p = [&] {
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n) {
        p[n / 2][n % 2 * 2] = pack2<Element>(s[n][0], s[n][1]);
        p[n / 2][n % 2 * 2 + 1] = pack2<Element>(s[n][2], s[n][3]);
      }
    };
    // One block of keys and P V of the one before it.
    //! [products]
    const auto visit = [&](int n_block, auto masked) {
      wait_for(smem.k_full, n_block);
      wait_for_turn();
      scores<Config>(s, sQ, smem.sK[stage_of(n_block)]);
      wait_for(smem.v_full, n_block - 1);
      output<Config>(o, p, smem.sV[stage_of(n_block - 1)]);
      end_turn();  // the other's products queue behind these
      wgmma_wait<1>();  // S is there
      release(smem.k_empty, n_block);
      if (Config::kOwnO && n_block + 1 == seen.end) done_with_q();
      softmax(n_block, masked);
      wgmma_wait<0>();  // and O of the block before
      release(smem.v_empty, n_block - 1);
      round_p();
      if (rescaled) {
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) o[n][i] *= rescale[i / 2];
      }
    };
    //! [products]
    //! [loops]
    if (seen.begin < seen.end) {  // the first block has no P V before it; with or without a mask, it is compared
      mbarrier_wait(&smem.q_full, visited++ % 2);
      wait_for(smem.k_full, seen.begin);
      wait_for_turn();
      scores<Config>(s, sQ, smem.sK[stage_of(seen.begin)]);
      end_turn();
      wgmma_wait<0>();
      release(smem.k_empty, seen.begin);
      if (Config::kOwnO && seen.begin + 1 == seen.end) done_with_q();
      softmax(seen.begin, std::true_type{});
      round_p();
      int n_block = seen.begin + 1;
      for (; n_block < seen.plain_begin; ++n_block) visit(n_block, std::true_type{});  // left edge of the window
      for (; n_block < seen.plain_end; ++n_block) visit(n_block, std::false_type{});
      for (; n_block < seen.end; ++n_block) visit(n_block, std::true_type{});  // diagonal, right edge, last keys
      wait_for(smem.v_full, seen.end - 1);
      wait_for_turn();
      output<Config>(o, p, smem.sV[stage_of(seen.end - 1)]);
      end_turn();
      wgmma_wait<0>();
      release(smem.v_empty, seen.end - 1);
    }
    //! [loops]

    // (7) O = O / l, once; (8) store O, through shared memory, and lse
    //! [finish]
    if (threadIdx.x % 128 == 0) tma_store_wait<0>();  // of the tile before
    named_barrier_sync(1 + Config::kConsumers + warpgroup, 128);  // its place is free; all are done with Q
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_sum[r] = quad_sum(row_sum[r]);
      const float factor = row_sum[r] > 0 ? 1 / row_sum[r] : 0;  // a row that sees nothing: O = 0
      const int at = first_row() % 64 + 8 * r, row = row0 + first_row() + 8 * r;  // in the warpgroup, in the head
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n)  // pieces of 16 bytes, exchanged as TMA takes them
        *reinterpret_cast<uint32_t*>(sO + n / 8 * kBlockM * 64 + at * 64 + (n % 8 ^ at % 8) * 8 + quad_col()) =
            pack2<Element>(o[n][2 * r] * factor, o[n][2 * r + 1] * factor);
      if (quad_col() == 0 && row < sequence.seqlen_q)
        gLse[sequence.lse + row] =
            row_sum[r] > 0 ? 0.693147181f * row_max[r] + logf(row_sum[r]) : -INFINITY;
    }
    shared_write_fence();
    named_barrier_sync(1 + Config::kConsumers + warpgroup, 128);  // all rows are there
    if (gCuQ != nullptr) {  // TMA would write over the next sequence: 16 bytes a thread, of rows that exist
      for (int i = thread_index() % 128; i < 64 * kHeadDim / 8; i += 128) {
        const int at = i / (kHeadDim / 8), piece = i % (kHeadDim / 8), row = row0 + 64 * warpgroup + at;
        if (row < sequence.seqlen_q)
          *reinterpret_cast<uint4*>(gO + (int64_t{sequence.q_token + row} * shape.heads + sequence.q_head) * kHeadDim +
                                    piece * 8) =
              *reinterpret_cast<const uint4*>(sO + piece / 8 * kBlockM * 64 + at * 64 + (piece % 8 ^ at % 8) * 8);
      }
      __syncwarp();  // all lanes have read: one of them says that Q's place is free
    } else if (threadIdx.x % 128 == 0) {
      for (int panel = 0; panel < kHeadDim / 64; ++panel) {
        shared_write_fence();
        tma_store(mapO, sO + panel * kBlockM * 64, {0, row0 + 64 * warpgroup, panel, bh});
      }
      tma_store_commit();
      if (!Config::kOwnO) tma_store_wait<0>();
    }
    if (!Config::kOwnO || seen.begin == seen.end) done_with_q();
    first_turn += seen.end - seen.begin;
    //! [finish]
  }
  if (threadIdx.x % 128 == 0) tma_store_wait<0>();
}

// A map of [heads, rows, d], or of packed [rows, heads, d], whose boxes are tiles of `tile_rows` rows, of all panels of
// 64 columns or of one.
//! [map]
template <class Element>
Status map_of(TensorMap& map, const Element* g, const Problem& p, int64_t heads, int64_t rows, int tile_rows,
              bool all_panels) {
  const int64_t d = p.head_dim, row_bytes = 2 * d * (p.varlen() ? heads : 1);
  const int64_t head_bytes = 2 * d * (p.varlen() ? 1 : rows);
  return make_tensor_map<4>(map, g, {64, rows, d / 64, heads * (p.varlen() ? 1 : p.batch)},
                            {row_bytes, 128, head_bytes}, {64, tile_rows, all_panels ? static_cast<int>(d / 64) : 1, 1},
                            Swizzle::k128);
}
//! [map]

template <class Element, class Config, bool kSoftcap>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const int64_t rows_q = p.varlen() ? p.tokens_q() : p.seqlen_q, rows_k = p.varlen() ? p.tokens_k() : p.seqlen_k;
  TensorMap q, k, v, o;
  for (const Status& status :
       {map_of(q, args.in<Element>("q"), p, p.heads, rows_q, Config::kBlockM, true),
        map_of(k, args.in<Element>("k"), p, p.kv_heads, rows_k, Config::kBlockN, true),
        map_of(v, args.in<Element>("v"), p, p.kv_heads, rows_k, Config::kBlockN, true),
        map_of(o, args.out<Element>("o"), p, p.heads, rows_q, 64, false)})
    if (!status.ok()) return status;
  const int64_t num_m_blocks = ceil_div(p.seqlen_q, Config::kBlockM);
  const int64_t num_tiles = num_m_blocks * p.heads * p.batch;
  const int num_sms = args.backend == Backend::gpu ? gpu_info().num_sms : 3;  // emulated: so few that each has several
  args.phase("attention");
  return launch_kernel(attention_kernel<Element, Config, kSoftcap>,
                       dim3(static_cast<unsigned>(std::min<int64_t>(num_tiles, num_sms))), dim3(Config::kThreads),
                       sizeof(SharedStorage<Element, Config>), args.stream, q, k, v, o, args.out<Element>("o"),
                       args.out<float>("lse"), args.in_or_null<int>("cu_seqlens_q"),
                       args.in_or_null<int>("cu_seqlens_k"), shape_of(p), static_cast<int>(num_m_blocks),
                       static_cast<int>(p.heads * p.batch), static_cast<int>(heads_of_section(p)));
}

#ifndef ATTN_SWEEP  // sweep.cu has its own tiles
template <class Element, int kHeadDim>
Status launch(const Arguments& args) {
  if (args.problem.softcap > 0) return launch<Element, WithSoftcap<kHeadDim>, true>(args);
  return args.problem.masked() ? launch<Element, Config<kHeadDim, true>, false>(args)
                               : launch<Element, Config<kHeadDim, false>, false>(args);
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    switch (args.problem.head_dim) {
      case 64: return launch<Element, 64>(args);
      case 128: return launch<Element, 128>(args);
      case 256: return launch<Element, 256>(args);
    }
    return Status::unsupported("head dims 64, 128 and 256 alone");
  });
}
#endif

}  // namespace ATTN_BACKEND::v6_tuned
