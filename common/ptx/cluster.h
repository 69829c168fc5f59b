/// \file
/// Thread block clusters: blocks that run at the same time on neighbouring multiprocessors and
/// access each other's shared memory (distributed shared memory). PTX ISA, "barrier.cluster",
/// "mapa", "ld.shared::cluster"; CUDA C++ Programming Guide, "Thread Block Clusters" (sm_90).
///
/// A block must not end while others may access its shared memory, nor access theirs before they
/// run: kernels synchronise before the first such access and after the last.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attn/kernel.h"
#include "ptx/ldmatrix.h"  // shared_address
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace attn {
inline namespace ATTN_BACKEND {

/// An address in the dynamic shared memory of any block of the cluster.
struct ClusterAddress {
#ifdef ATTN_EMULATED
  void* at;
#else
  uint32_t at;
#endif
};

/// Rank of this block in its cluster.
__device__ __forceinline__ int cluster_rank() {
#ifdef ATTN_EMULATED
  return static_cast<int>(emulator::Block::current().cluster_rank());
#else
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#endif
}

/// Where block `rank` has what this block has at `shared`.
__device__ __forceinline__ ClusterAddress cluster_address(const void* shared,
                                                          int rank ATTN_CALLER) {
#ifdef ATTN_EMULATED
  return {emulator::Block::current().map_shared("cluster_address", caller, shared,
                                                static_cast<unsigned>(rank))};
#else
  ClusterAddress mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(mapped.at)
               : "r"(shared_address(shared)), "r"(rank));
  return mapped;
#endif
}

/// Loads a 4- or 16-byte value.
template <class T>
__device__ __forceinline__ T cluster_load(ClusterAddress from ATTN_CALLER) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 16);
  T value;
#ifdef ATTN_EMULATED
  emulator::Block::current().require_aligned("cluster_load", caller, "an address", from.at,
                                             sizeof(T));
  emulator::Block::current().access_cluster(emulator::Kind::read, "cluster_load", caller, from.at,
                                            sizeof(T));
  std::memcpy(&value, from.at, sizeof(T));
#else
  if constexpr (sizeof(T) == 4) {
    uint32_t bits;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(bits) : "r"(from.at) : "memory");
    memcpy(&value, &bits, 4);
  } else {
    uint4 bits;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "r"(from.at)
                 : "memory");
    memcpy(&value, &bits, 16);
  }
#endif
  return value;
}

/// Arrives at the cluster's barrier: what this thread has done is visible to those who wait. All
/// threads of the cluster that have not ended call it, then cluster_wait().
__device__ __forceinline__ void cluster_arrive(ATTN_ONLY_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().cluster_arrive("cluster_arrive", caller);
#else
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait(ATTN_ONLY_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().cluster_wait("cluster_wait", caller);
#else
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_sync(ATTN_ONLY_CALLER) {
#ifdef ATTN_EMULATED
  cluster_arrive(caller), cluster_wait(caller);
#else
  cluster_arrive(), cluster_wait();
#endif
}

/// Arrives at an mbarrier of any block of the cluster; what this thread has done before is visible
/// to those of that block who wait there with mbarrier_wait_cluster.
__device__ __forceinline__ void mbarrier_arrive_cluster(ClusterAddress barrier ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().mbarrier_arrive_cluster("mbarrier_arrive_cluster", caller, barrier.at);
#else
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier.at)
               : "memory");
#endif
}

/// The same after reads alone: others may overwrite what this thread has read, by wgmma or into
/// registers. What it has written need not be visible to them. mbarrier_arrive_cluster waits for
/// all earlier writes and atomics of the thread, to global memory too (MEMBAR.ALL.GPU in SASS);
/// this does not. They wait with mbarrier_wait. The emulator treats both calls alike, so it does
/// not report this one where mbarrier_arrive_cluster is needed.
__device__ __forceinline__ void mbarrier_release_cluster(ClusterAddress barrier ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().mbarrier_arrive_cluster("mbarrier_release_cluster", caller,
                                                     barrier.at);
#else
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier.at) : "memory");
#endif
}

/// As mbarrier_wait, for what threads of other blocks have done before they arrived: mbarrier_wait
/// acquires at the scope of its own block.
__device__ __forceinline__ void mbarrier_wait_cluster(uint64_t* barrier, int parity ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().mbarrier_wait("mbarrier_wait_cluster", caller, barrier,
                                           static_cast<unsigned>(parity));
#else
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 ended, [%0], %1;\n"
      "@ended bra done;\n"
      "bra again;\n"
      "done:\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}

/// Copies `bytes` bytes, a multiple of 16, of this block's shared memory to block `rank`, to where
/// this block has `to`. That block's barrier at the place of `barrier` counts them; it must expect
/// them. The async proxy reads the source: fence_proxy_async() after ordinary stores.
__device__ __forceinline__ void bulk_copy_to_cluster(void* to, const void* from, int bytes,
                                                     uint64_t* barrier, int rank ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block& block = emulator::Block::current();
  const auto peer = static_cast<unsigned>(rank);
  const auto size = static_cast<std::size_t>(bytes);
  void* const there = block.map_shared("bulk_copy_to_cluster", caller, to, peer);
  block.require_aligned("bulk_copy_to_cluster", caller, "a destination", to, 16);
  block.require_aligned("bulk_copy_to_cluster", caller, "a source", from, 16);
  // The source is in dynamic shared memory, too.
  block.map_shared("bulk_copy_to_cluster", caller, from, block.cluster_rank());
  if (bytes <= 0 || bytes % 16 != 0)
    block.fail("bulk_copy_to_cluster", caller,
               "with " + std::to_string(bytes) + " bytes, not a multiple of 16");
  block.require_shared("bulk_copy_to_cluster", caller, "a source", from, size);
  block.mbarrier_copy_to(
      peer, "bulk_copy_to_cluster", caller,
      block.map_shared("bulk_copy_to_cluster", caller, barrier, peer), there, size,
      [=] { std::memcpy(there, from, size); },
      [=](const emulator::Block::Visit& reads) { reads(from, size); });
#else
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(cluster_address(to, rank).at),
      "r"(shared_address(from)), "r"(bytes), "r"(cluster_address(barrier, rank).at)
      : "memory");
#endif
}

/// As tma_load, to every block of the cluster whose bit is set in `ranks`: to the same place in its
/// shared memory, counted by its own barrier at the place of `barrier`, each of which must expect
/// the bytes.
template <std::size_t kRank>
__device__ __forceinline__ void tma_load_multicast(void* shared, const TensorMap& map,
                                                   uint64_t* barrier, const int (&first)[kRank],
                                                   uint16_t ranks ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block& block = emulator::Block::current();
  std::size_t bytes = static_cast<std::size_t>(map.element_bytes);
  for (std::size_t i = 0; i < kRank; ++i) bytes *= static_cast<std::size_t>(map.box[i]);
  std::array<int, kRank> at;
  std::copy_n(first, kRank, at.begin());
  block.require_aligned("tma_load_multicast", caller, "a destination", shared, 128);
  if (ranks == 0 || ranks >> block.cluster_size() != 0)
    block.fail("tma_load_multicast", caller, "to blocks that the cluster does not have");
  for (unsigned rank = 0; rank < block.cluster_size(); ++rank) {
    if (!(ranks >> rank & 1)) continue;
    auto* const to =
        static_cast<std::byte*>(block.map_shared("tma_load_multicast", caller, shared, rank));
    auto* const own = static_cast<std::byte*>(shared);
    block.mbarrier_copy_to(
        rank, "tma_load_multicast", caller,
        block.map_shared("tma_load_multicast", caller, barrier, rank), to, bytes,
        [=] {
          each_piece(map, own, at, [=](std::byte* s, const std::byte* g) {
            g ? std::memcpy(to + (s - own), g, 16) : std::memset(to + (s - own), 0, 16);
          });
        },
        [&](const emulator::Block::Visit& reads) {
          each_piece(map, own, at, [&](std::byte*, const std::byte* g) {
            if (g) reads(g, 16);
          });
        });
  }
#else
  static_assert(kRank == 3 || kRank == 4, "ranks in use");
  if constexpr (kRank == 3)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
        "cluster "
        "[%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(shared_address(shared)),
        "l"(&map), "r"(shared_address(barrier)), "h"(ranks), "r"(first[0]), "r"(first[1]),
        "r"(first[2])
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
        "cluster "
        "[%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(shared_address(shared)),
        "l"(&map), "r"(shared_address(barrier)), "h"(ranks), "r"(first[0]), "r"(first[1]),
        "r"(first[2]), "r"(first[3])
        : "memory");
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
