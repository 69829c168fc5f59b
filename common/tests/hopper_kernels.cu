// A kernel that uses Hopper's functions of common/ptx: a producer warp copies, a warpgroup
// multiplies, with two pipeline stages. The result is compared with that of the test; each
// synchronisation can be left out.
#include "attn/kernel.h"
#include "ptx/mbarrier.h"
#include "ptx/mma.h"
#include "ptx/named_barrier.h"
#include "ptx/setmaxnreg.h"
#include "ptx/stmatrix.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"
#include "tests/kernels.h"

namespace ATTN_BACKEND::tests {
using namespace attn;
using namespace attn::tests;

template <int kN>
struct Product {
  static constexpr int kPanels = ceil_div(kN, 64);  // 64 columns each
  template <class Element>
  struct Storage {
    alignas(1024) Element sA[2][64 * 64];
    alignas(1024) Element sB[2][kPanels * 64 * 64];  // [kN, 64] or panels [64, 64]
    alignas(1024) Element sD[kPanels * 64 * 64];
    uint64_t full[2], empty[2];
  };
};

// D [64, kN] = A [64, 64 tiles] B [64 tiles, kN]; mapB is of B^T, K-major, or of B.
template <class Element, int kN, bool kRegisters, bool kTransposedB>
__global__ void __launch_bounds__(384, 1)
    product_kernel(const __grid_constant__ TensorMap mapA, const __grid_constant__ TensorMap mapB,
                   const __grid_constant__ TensorMap mapD, int tiles,
                   [[maybe_unused]] int planted) {
#ifdef ATTN_EMULATED
  const int fault = planted;
#else
  constexpr int fault = kNoFault;
#endif
  constexpr int kPanels = Product<kN>::kPanels;
  auto& smem = dynamic_shared<typename Product<kN>::template Storage<Element>>();
  if (threadIdx.x == 0) {
    for (int s = 0; s < 2; ++s) mbarrier_init(&smem.full[s], 1), mbarrier_init(&smem.empty[s], 128);
    if (fault != kNoInitFence) mbarrier_init_fence();
  }
  __syncthreads();

  // the producer; the third warpgroup only releases registers
  if (threadIdx.x >= 128) {
    setmaxnreg_dec<24>();
    if (threadIdx.x != 128) return;
    constexpr int kBytes = 64 * 64 * 2 + (kTransposedB ? kPanels * 64 * 64 * 2 : kN * 64 * 2);
    for (int t = 0; t < tiles; ++t) {
      const int s = t % 2;
      if (fault != kNoWaitForReader) mbarrier_wait(&smem.empty[s], t / 2 % 2 ^ 1);
      mbarrier_arrive_expect_tx(&smem.full[s], fault == kTooFewBytes ? kBytes - 16 : kBytes);
      tma_load(smem.sA[s], mapA, &smem.full[s], {0, 0, t});
      if constexpr (kTransposedB)
        for (int p = 0; p < kPanels; ++p)
          tma_load(smem.sB[s] + p * 64 * 64, mapB, &smem.full[s], {64 * p, 64 * t, 0});
      else
        tma_load(smem.sB[s], mapB, &smem.full[s], {0, 0, t});
    }
    return;
  }

  setmaxnreg_inc<240>();
  const int lane_id = threadIdx.x % 32, row0 = static_cast<int>(threadIdx.x) / 32 * 16;
  float d[kN / 8][4];
  for (int t = 0; t < tiles; ++t) {
    const int s = t % 2;
    if (fault != kNoWaitForCopy) mbarrier_wait(&smem.full[s], (t / 2 % 2) ^ (fault == kWrongPhase));
    uint32_t a[4][4];
    if constexpr (kRegisters)
      for (int k = 0; k < 4; ++k) {  // 16-byte chunk p of row r is at p ^ (r % 8)
        const int row = row0 + lane_id % 16, piece = 2 * k + lane_id / 16;
        ldmatrix_x4(a[k], smem.sA[s] + row * 64 + (piece ^ row % 8) * 8);
      }
    if (fault != kNoRegisterFence) wgmma_fence();
    const SmemDescriptor operand_a = smem_descriptor(smem.sA[s]);
    const SmemDescriptor operand_b = smem_descriptor(smem.sB[s], 64 * 64 * 2);
    for (int k = 0; k < 4; ++k) {  // a k step of 16 advances 32 bytes, or 16 rows of 128
      const SmemDescriptor b = operand_b + (kTransposedB ? 2048 * k : 32 * k);
      if constexpr (kRegisters)
        wgmma<Element, kTransposedB>(d, a[k], b, t + k > 0);
      else
        wgmma<Element, kTransposedB>(d, operand_a + 32 * k, b, t + k > 0);
    }
    wgmma_commit();
    if (fault == kReleasedTooEarly) mbarrier_arrive(&smem.empty[s]);
    if (fault == kRegistersTooEarly) a[0][0] = a[1][1] = 0;  // the MMA may not have read them yet
    wgmma_wait<0>(d);
    if (kRegisters) fence_proxy_async();  // TMA writes over what ldmatrix has read
    if (fault != kReleasedTooEarly) mbarrier_arrive(&smem.empty[s]);
  }

  for (int n = 0; n < kN / 8; ++n)
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + lane_id / 4 + 8 * half;
      Element* const to =
          smem.sD + n / 8 * 64 * 64 + row * 64 + (n % 8 ^ row % 8) * 8 + lane_id % 4 * 2;
      *reinterpret_cast<uint32_t*>(to) = pack2<Element>(d[n][2 * half], d[n][2 * half + 1]);
    }
  if (fault != kNoSharedFence) fence_proxy_async();
  if (fault != kNoBarrierBeforeStore) named_barrier_sync(1, 128);  // all warps have written
  if (threadIdx.x == 0) {
    for (int p = 0; p < kPanels; ++p) tma_store(mapD, smem.sD + p * 64 * 64, {64 * p, 0, 0});
    tma_store_commit();
    if (fault != kNoWaitForStore) tma_store_wait<0>();
  }
}

template <class Element, int kN, bool kRegisters, bool kTransposedB>
Status launch_product(const KernelArguments& args, int tiles, int fault) {
  const auto* a = static_cast<const Element*>(args.a);
  const auto* b = static_cast<const Element*>(args.b);
  const int64_t k = 64 * tiles;
  TensorMap map_a, map_b, map_d;
  Status status =
      make_tensor_map<3>(map_a, a, {64, 64, tiles}, {2 * k, 128}, {64, 64, 1}, Swizzle::k128);
  if (!status.ok()) return status;
  status = kTransposedB ? make_tensor_map<3>(map_b, b, {kN, k, 1}, {2 * kN, 2 * kN * k},
                                             {64, 64, 1}, Swizzle::k128)
                        : make_tensor_map<3>(map_b, b, {64, kN, tiles}, {2 * k, 128}, {64, kN, 1},
                                             Swizzle::k128);
  if (!status.ok()) return status;
  status = make_tensor_map<3>(map_d, static_cast<const Element*>(args.out), {kN, kHopperRows, 1},
                              {2 * kN, 2 * kN * kHopperRows}, {64, 64, 1}, Swizzle::k128);
  if (!status.ok()) return status;
  return launch_kernel(product_kernel<Element, kN, kRegisters, kTransposedB>, dim3(1), dim3(384),
                       sizeof(typename Product<kN>::template Storage<Element>), nullptr, map_a,
                       map_b, map_d, tiles, fault);
}

Status hopper_product(const KernelArguments& args) {
  const int tiles = args.mode % 16, fault = args.mode / 16 % 16, way = args.mode / 256 % 4;
  return dispatch_16bit(args.dtype, [&]<class Element>() {
    const auto launch = [&]<int kN>() {
      switch (way) {
        case 0: return launch_product<Element, kN, false, false>(args, tiles, fault);
        case 1: return launch_product<Element, kN, false, true>(args, tiles, fault);
        case 2: return launch_product<Element, kN, true, false>(args, tiles, fault);
        default: return launch_product<Element, kN, true, true>(args, tiles, fault);
      }
    };
    switch (args.mode / 1024 * 8) {
      case 64: return launch.template operator()<64>();
      case 80: return launch.template operator()<80>();
      case 96: return launch.template operator()<96>();
      case 112: return launch.template operator()<112>();
      case 128: return launch.template operator()<128>();
      case 144: return launch.template operator()<144>();
      case 160: return launch.template operator()<160>();
      case 176: return launch.template operator()<176>();
      case 192: return launch.template operator()<192>();
      case 256: return launch.template operator()<256>();
      default: return Status::unsupported("no such shape");
    }
  });
}

// Stores registers given by the host, out[version][row of 8 elements]: stmatrix_x4 and its
// transposing version.
__global__ void stmatrix_kernel(const uint32_t* in, uint16_t* out) {
  __shared__ __align__(16) uint16_t tile[2][32 * 8];
  uint32_t r[4];
  for (int m = 0; m < 4; ++m) r[m] = in[4 * threadIdx.x + m];
  stmatrix_x4(tile[0] + 8 * threadIdx.x, r);
  stmatrix_x4_trans(tile[1] + 8 * threadIdx.x, r);
  __syncwarp();
  for (int version = 0; version < 2; ++version)
    for (int i = 0; i < 8; ++i)
      out[(version * 32 + threadIdx.x) * 8 + i] = tile[version][8 * threadIdx.x + i];
}
Status stmatrix_dump(const KernelArguments& args) {
  return launch_kernel(stmatrix_kernel, dim3(1), dim3(32), 0, nullptr,
                       static_cast<const uint32_t*>(args.a), static_cast<uint16_t*>(args.out));
}

}  // namespace ATTN_BACKEND::tests
