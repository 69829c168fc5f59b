/// \file
/// A chapter for tests of the memory panel of a page of `--timeline`: tiles with known writers,
/// bank conflicts and copies in flight, and a race. The tests find lines by the names behind "at:".
#include "attn/kernel.h"
#include "check/operation.h"
#include "ptx/cp_async.h"
#include "tests/small_step.h"

namespace {
using namespace attn;
using attn::tests::small_step;

enum class Tile { unpadded, padded, swizzled };

template <Tile kTile>
struct SharedStorage {
  static constexpr int kStride = kTile == Tile::padded ? 33 : 32;
  float tile[32][kStride];
  alignas(16) float copied[32][4];
  float unused[32];
  ATTN_MEMBERS(SharedStorage, tile, copied, unused)
};

// Two warps write the rows of a tile in turn, then each reads a column. Warp 1 copies 16 bytes per
// lane. The rest is one thread per row, dot products as in the formula.
template <Tile kTile, bool kBarrier>
__global__ void attention(const float* gQ, const float* gK, const float* gV, float* gO, float* gLse,
                          Shape shape) {
  auto& smem = dynamic_shared<SharedStorage<kTile>>();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const auto column = [](int row, int col) { return kTile == Tile::swizzled ? col ^ row : col; };
  if (warp == 1) cp_async_16(smem.copied[lane], gQ + lane * 4, 16);  // at: copy
  cp_async_commit();
  for (int row = warp; row < 32; row += 2)
    smem.tile[row][column(row, lane)] = 1;  // at: write
  kBarrier ? __syncthreads() : __syncwarp();
  float sum = smem.tile[lane][column(lane, warp)];  // at: read
  cp_async_wait<0>();
  __syncthreads();
  sum += smem.copied[lane][0];
  const int i = static_cast<int>(blockIdx.x * 64 + threadIdx.x);
  if (i >= shape.seqlen_q) return;
  const int64_t row = int64_t{blockIdx.y} * shape.seqlen_q + i,
                first = int64_t{blockIdx.y} * shape.seqlen_k;
  const auto score = [&](int j) {
    float dot = 0;
    for (int c = 0; c < shape.head_dim; ++c)
      dot += gQ[row * shape.head_dim + c] * gK[(first + j) * shape.head_dim + c];
    return dot * shape.softmax_scale;
  };
  float row_max = -INFINITY, row_sum = 0;
  for (int j = 0; j < shape.seqlen_k; ++j) row_max = fmaxf(row_max, score(j));
  for (int j = 0; j < shape.seqlen_k; ++j) row_sum += __expf(score(j) - row_max);
  for (int c = 0; c < shape.head_dim; ++c) {
    float o = 0;
    for (int j = 0; j < shape.seqlen_k; ++j)
      o += __expf(score(j) - row_max) * gV[(first + j) * shape.head_dim + c];
    gO[row * shape.head_dim + c] = o / row_sum;
  }
  gLse[row] = row_max + logf(row_sum) + (sum == 1e30f ? 1.0f : 0.0f);
}

template <Tile kTile, bool kBarrier>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.seqlen_q, int64_t{64})),
                  static_cast<unsigned>(p.batch * p.heads));
  return launch_kernel(attention<kTile, kBarrier>, grid, dim3(64), sizeof(SharedStorage<kTile>),
                       args.stream, args.in<float>("q"), args.in<float>("k"), args.in<float>("v"),
                       args.out<float>("o"), args.out<float>("lse"), shape_of(p));
}

}  // namespace

const attn::Chapter& attn::chapter() {
  static const Chapter c{"memory",
                         "tiles in shared memory",
                         {small_step("v1_unpadded", launch<Tile::unpadded, true>),
                          small_step("v2_padded", launch<Tile::padded, true>),
                          small_step("v3_swizzled", launch<Tile::swizzled, true>),
                          small_step("v4_race", launch<Tile::padded, false>)}};
  return c;
}
