// One-warp kernels for the functions of common/ptx. Their results are compared, element by element,
// with what the test computes from the layouts in the PTX ISA.
#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "ptx/reduce_add.h"
#include "tests/kernels.h"

namespace ATTN_BACKEND::tests {
using namespace attn;
using namespace attn::tests;

constexpr int kStride = 24;  // of a row in shared memory: 16 elements and 16 bytes of padding

__device__ uint32_t pair_of(const uint16_t* low, const uint16_t* high) {
  return *low | static_cast<uint32_t>(*high) << 16;
}

// D [16, 16] = A [16, 16] * B [16, 16] + C [16, 16], all row-major: two MMAs of 8 columns each.
template <class Element, bool kLdmatrixA, int kLoadB>
__global__ void mma_kernel(const uint16_t* gA, const uint16_t* gB, const float* gC, float* gD) {
  __shared__ __align__(16) uint16_t sA[16 * kStride];          // [m, k]
  __shared__ __align__(16) uint16_t sB[16 * kStride];          // [k, n]
  __shared__ __align__(16) uint16_t sB_columns[16 * kStride];  // [n, k]
  __shared__ __align__(16) uint16_t sUnused[8];  // for lanes whose address is ignored
  const int lane_id = static_cast<int>(threadIdx.x), g = lane_id / 4, t = lane_id % 4;
  for (int i = lane_id; i < 256; i += 32) {
    sA[i / 16 * kStride + i % 16] = gA[i];
    sB[i / 16 * kStride + i % 16] = gB[i];
    sB_columns[i % 16 * kStride + i / 16] = gB[i];
  }
  if (lane_id < 8) sUnused[lane_id] = 0xFFFF;  // NaN
  __syncwarp();

  uint32_t a[4], b[2][2];
  if constexpr (kLdmatrixA) {
    ldmatrix_x4(a, sA + lane_id % 16 * kStride + lane_id / 16 * 8);
  } else {
    for (int r = 0; r < 4; ++r) {  // a[0]: row g, k 2t; a[1]: row g + 8; a[2], a[3]: k 2t + 8
      const uint16_t* from = gA + (g + r % 2 * 8) * 16 + 2 * t + r / 2 * 8;
      a[r] = pair_of(from, from + 1);
    }
  }
  if constexpr (kLoadB == kByHand) {
    for (int j = 0; j < 2; ++j)
      for (int r = 0; r < 2; ++r) {  // b[0]: k 2t, 2t + 1 of column g; b[1]: k 2t + 8, 2t + 9
        const uint16_t* from = gB + (2 * t + 8 * r) * 16 + 8 * j + g;
        b[j][r] = pair_of(from, from + 16);
      }
  } else if constexpr (kLoadB == kLdmatrix || kLoadB == kLdmatrixTrans) {
    for (int j = 0; j < 2; ++j) {  // only the addresses of lanes 0..15 are used
      const uint16_t* row = kLoadB == kLdmatrix
                                ? sB_columns + (8 * j + lane_id % 8) * kStride + lane_id / 8 * 8
                                : sB + lane_id % 16 * kStride + 8 * j;
      if (lane_id >= 16) row = sUnused;
      if constexpr (kLoadB == kLdmatrix)
        ldmatrix_x2(b[j], row);
      else
        ldmatrix_x2_trans(b[j], row);
    }
  } else {
    uint32_t both[4];
    if constexpr (kLoadB == kLdmatrixPair)
      ldmatrix_x4(both, sB_columns + (lane_id / 16 * 8 + lane_id % 8) * kStride +
                            lane_id / 8 % 2 * 8);
    else
      ldmatrix_x4_trans(both, sB + lane_id % 16 * kStride + lane_id / 16 * 8);
    for (int r = 0; r < 4; ++r) b[r / 2][r % 2] = both[r];
  }
  for (int j = 0; j < 2; ++j) {
    float c[4], d[4];
    const int first = g * 16 + 8 * j + 2 * t;  // c[0], c[1] in row g; c[2], c[3] in row g + 8
    for (int i = 0; i < 4; ++i) c[i] = gC[first + i % 2 + i / 2 * 8 * 16];
    mma_m16n8k16<Element>(d, a, b[j], c);
    for (int i = 0; i < 4; ++i) gD[first + i % 2 + i / 2 * 8 * 16] = d[i];
  }
}

template <class Element>
Status mma_of(const KernelArguments& args) {
  void (*const kernels[])(const uint16_t*, const uint16_t*, const float*, float*) = {
      mma_kernel<Element, false, 0>, mma_kernel<Element, false, 1>, mma_kernel<Element, false, 2>,
      mma_kernel<Element, false, 3>, mma_kernel<Element, false, 4>, mma_kernel<Element, true, 0>,
      mma_kernel<Element, true, 1>,  mma_kernel<Element, true, 2>,  mma_kernel<Element, true, 3>,
      mma_kernel<Element, true, 4>};
  return launch_kernel(kernels[args.mode], dim3(1), dim3(32), 0, nullptr,
                       static_cast<const uint16_t*>(args.a), static_cast<const uint16_t*>(args.b),
                       static_cast<const float*>(args.c), static_cast<float*>(args.out));
}
Status mma_product(const KernelArguments& args) {
  return dispatch_16bit(args.dtype, [&]<class Element>() { return mma_of<Element>(args); });
}

// The registers of x4, x2, x4_trans, x2_trans for 32 rows of 8 elements: out [4][32 lanes][4].
__global__ void dump_kernel(const uint16_t* rows, uint32_t* out) {
  __shared__ __align__(16) uint16_t tile[32 * 8];
  const int lane_id = static_cast<int>(threadIdx.x);
  for (int i = lane_id; i < 256; i += 32) tile[i] = rows[i];
  __syncwarp();
  uint32_t four[4], two[2];
  ldmatrix_x4(four, tile + 8 * lane_id);
  for (int r = 0; r < 4; ++r) out[(0 * 32 + lane_id) * 4 + r] = four[r];
  ldmatrix_x2(two, tile + 8 * lane_id);
  for (int r = 0; r < 2; ++r) out[(1 * 32 + lane_id) * 4 + r] = two[r];
  ldmatrix_x4_trans(four, tile + 8 * lane_id);
  for (int r = 0; r < 4; ++r) out[(2 * 32 + lane_id) * 4 + r] = four[r];
  ldmatrix_x2_trans(two, tile + 8 * lane_id);
  for (int r = 0; r < 2; ++r) out[(3 * 32 + lane_id) * 4 + r] = two[r];
}
Status ldmatrix_dump(const KernelArguments& args) {
  return launch_kernel(dump_kernel, dim3(1), dim3(32), 0, nullptr,
                       static_cast<const uint16_t*>(args.a), static_cast<uint32_t*>(args.out));
}

// out[i] = {in[2 i], in[2 i + 1]}; `mode` pairs.
template <class Element>
__global__ void pack_kernel(const float* in, uint32_t* out, int pairs) {
  for (int i = static_cast<int>(threadIdx.x); i < pairs; i += 32)
    out[i] = pack2<Element>(in[2 * i], in[2 * i + 1]);
}
Status pack_pairs(const KernelArguments& args) {
  return dispatch_16bit(args.dtype, [&]<class Element>() {
    return launch_kernel(pack_kernel<Element>, dim3(1), dim3(32), 0, nullptr,
                         static_cast<const float*>(args.a), static_cast<uint32_t*>(args.out),
                         args.mode);
  });
}

// Each lane copies 16 bytes over bytes 0xEE; only valid[lane] of them are read, the rest is zero.
__global__ void copy_partial_kernel(const unsigned char* in, const int* valid, unsigned char* out) {
  __shared__ __align__(16) unsigned char tile[32 * 16];
  unsigned char* mine = tile + 16 * threadIdx.x;
  for (int i = 0; i < 16; ++i) mine[i] = 0xEE;
  __syncwarp();
  cp_async_16(mine, in + 16 * threadIdx.x, valid[threadIdx.x]);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  // Reads another lane's bytes, to test that the copy is visible to other lanes.
  const unsigned other = threadIdx.x ^ 1;
  for (unsigned i = 0; i < 16; ++i) out[16 * other + i] = tile[16 * other + i];
}
Status copy_partial(const KernelArguments& args) {
  return launch_kernel(copy_partial_kernel, dim3(1), dim3(32), 0, nullptr,
                       static_cast<const unsigned char*>(args.a), static_cast<const int*>(args.b),
                       static_cast<unsigned char*>(args.out));
}

// Copies `tiles` tiles of 32 x 16 bytes with two buffers: one is read while the next is in flight.
__global__ void copy_groups_kernel(const uint4* in, uint4* out, int tiles) {
  __shared__ __align__(16) uint4 buffers[2][32];
  const unsigned lane_id = threadIdx.x;
  cp_async_16(&buffers[0][lane_id], in + lane_id);
  cp_async_commit();
  for (int t = 0; t < tiles; ++t) {
    if (t + 1 < tiles) cp_async_16(&buffers[(t + 1) % 2][lane_id], in + (t + 1) * 32 + lane_id);
    cp_async_commit();  // empty for the last tile, so that the count of groups stays the same
    if (t + 1 < tiles)
      cp_async_wait<1>();
    else
      cp_async_wait<0>();
    __syncthreads();  // tile t of every lane has landed
    out[t * 32 + 31 - lane_id] = buffers[t % 2][31 - lane_id];
    __syncthreads();  // tile t is read before the copy after next overwrites it
  }
}
Status copy_two_groups(const KernelArguments& args) {
  return launch_kernel(copy_groups_kernel, dim3(1), dim3(32), 0, nullptr,
                       static_cast<const uint4*>(args.a), static_cast<uint4*>(args.out), args.mode);
}

// Every thread of the grid adds (1, 2, 4, 8) times its lane to the same four quads, in rotated
// order.
__global__ void add_quads_kernel(float4* out) {
  const float x = static_cast<float>(threadIdx.x % 32);
  for (int i = 0; i < 4; ++i)
    reduce_add(out + (threadIdx.x + i) % 4, make_float4(x, 2 * x, 4 * x, 8 * x));
}
Status add_quads(const KernelArguments& args) {
  return launch_kernel(add_quads_kernel, dim3(args.grid[0]), dim3(args.block[0]), 0, nullptr,
                       static_cast<float4*>(args.out));
}

}  // namespace ATTN_BACKEND::tests
