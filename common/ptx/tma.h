/// \file
/// Tensor memory accelerator (TMA): one thread issues the copy of a box of a tensor. PTX ISA,
/// "cp.async.bulk.tensor" (sm_90). The host describes the tensor in a TensorMap, which a kernel
/// takes as `const __grid_constant__ TensorMap`.
///
/// The rows of a box are stored one after the other. With 128-byte swizzle the 16-byte chunks of
/// each row of 128 bytes are permuted: chunk p of row r is stored at p ^ (r % 8), where wgmma reads
/// it without bank conflicts. In terms of addresses, bits 4 to 6 are XORed with bits 7 to 9, so a
/// box must start at a multiple of 1024 bytes. The rows of a larger tile may also be loaded by
/// separate boxes, at any multiple of 128 bytes: their chunks are stored as in one box (observed on
/// a GPU for boxes of one row, in v15 of chapter 07).
///
///     row 0   0 1 2 3 4 5 6 7      each number: a chunk of 8 elements of 16 bits
///     row 1   1 0 3 2 5 4 7 6
///     row 2   2 3 0 1 6 7 4 5      out-of-range elements are loaded as 0 and not stored
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "device/device.h"
#include "attn/kernel.h"
#include "ptx/mbarrier.h"

#ifndef ATTN_EMULATED
#include <cuda.h>
#endif

namespace attn {
inline namespace ATTN_BACKEND {

/// Tensor map: a tensor of up to 5 dimensions, innermost first, and the box of one copy.
struct alignas(128) TensorMap {
#ifdef ATTN_EMULATED
  const std::byte* base;
  int rank;
  std::array<int64_t, 5> extents, strides;  // extents in elements, strides in bytes
  std::array<int, 5> box;
  int element_bytes, swizzle_bytes;
#else
  CUtensorMap map;
#endif
};

/// Swizzle of a box in shared memory: none, or of chunks in rows of 64 or 128 bytes.
enum class Swizzle { kNone = 0, k64 = 64, k128 = 128 };

/// Encodes a tensor of 2-byte elements at `base`, a multiple of 16 bytes. `strides` in bytes,
/// multiples of 16, from the second dimension on; `box` in elements, up to 256 per dimension.
/// Returns an error for what the hardware does not support.
template <std::size_t kRank, class Element>
[[nodiscard]] Status make_tensor_map(TensorMap& map, const Element* base, std::array<int64_t, kRank> extents,
                                     std::array<int64_t, kRank - 1> strides, std::array<int, kRank> box,
                                     Swizzle swizzle) {
  static_assert(kRank >= 2 && kRank <= 5 && sizeof(Element) == 2);
  bool fits = reinterpret_cast<std::uintptr_t>(base) % 16 == 0;
  for (const int64_t s : strides) fits = fits && s % 16 == 0 && s < int64_t{1} << 40;
  for (const int n : box) fits = fits && n >= 1 && n <= 256;
  for (const int64_t n : extents) fits = fits && n >= 1 && n < int64_t{1} << 32;
  fits = fits && (swizzle == Swizzle::kNone || box[0] * 2 == static_cast<int>(swizzle));
  if (!fits)
    return Status::unsupported("TMA needs addresses and strides of whole 16 bytes, boxes of 1 to 256 a dimension");
#ifdef ATTN_EMULATED
  map = {reinterpret_cast<const std::byte*>(base), static_cast<int>(kRank), {}, {2}, {}, 2, static_cast<int>(swizzle)};
  for (std::size_t i = 0; i < kRank; ++i) map.extents[i] = extents[i], map.box[i] = box[i];
  for (std::size_t i = 1; i < kRank; ++i) map.strides[i] = strides[i - 1];
#else
  // Every kernel that takes a map is compiled for sm_90a only.
  if (const GpuInfo& gpu = gpu_info(); gpu.available && gpu.cc_major * 10 + gpu.cc_minor != 90)
    return Status::unsupported("TMA and wgmma of Hopper, sm_90a; this GPU is sm_" + std::to_string(gpu.cc_major) +
                               std::to_string(gpu.cc_minor) + ": chapters 01 to 05 run on it");
  // The driver's function is looked up at run time: libcuda need not exist on the build machine.
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) !=
            cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
      function = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (!encode) return Status::device_error("the driver has no cuTensorMapEncodeTiled: it is older than CUDA 12");
  cuuint64_t extent[kRank], stride[kRank - 1];
  cuuint32_t box_extent[kRank], step[kRank];
  for (std::size_t i = 0; i < kRank; ++i)
    extent[i] = static_cast<cuuint64_t>(extents[i]), box_extent[i] = static_cast<cuuint32_t>(box[i]), step[i] = 1;
  for (std::size_t i = 0; i + 1 < kRank; ++i) stride[i] = static_cast<cuuint64_t>(strides[i]);
  const CUresult result = encode(
      &map.map,
      std::is_same_v<Element, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      kRank, const_cast<Element*>(base), extent, stride, box_extent, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle == Swizzle::k128  ? CU_TENSOR_MAP_SWIZZLE_128B
      : swizzle == Swizzle::k64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    return Status::device_error("cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(result)));
#endif
  return Status::success();
}

#ifdef ATTN_EMULATED
// Calls `each(shared, global)` for each 16-byte chunk of a box; global is null if out of range.
template <std::size_t kRank, class Each>
void each_piece(const TensorMap& map, std::byte* shared, const std::array<int, kRank>& first, Each each) {
  const auto base = reinterpret_cast<std::uintptr_t>(emulator::Block::current().shared());
  const int piece = 16 / map.element_bytes;
  std::array<int, kRank> at{};
  for (std::size_t offset = 0;; offset += 16) {
    bool inside = true;
    const std::byte* global = map.base;
    for (std::size_t i = 0; i < kRank; ++i) {
      const int64_t index = first[i] + at[i];
      inside = inside && index >= 0 && index < map.extents[i];
      global += index * map.strides[i];
    }
    std::uintptr_t address = reinterpret_cast<std::uintptr_t>(shared) - base + offset;
    if (map.swizzle_bytes) address ^= (address >> 7 & static_cast<unsigned>(map.swizzle_bytes / 16 - 1)) << 4;
    each(reinterpret_cast<std::byte*>(base + address), inside ? global : nullptr);
    std::size_t i = 0;
    for (at[0] += piece; at[i] >= map.box[i]; ++at[i]) {
      at[i] = 0;
      if (++i == kRank) return;
    }
  }
}
#endif

/// Issues the load of the box that starts at `first` (elements, innermost dimension first) to
/// `shared`. One thread calls it. `barrier` must expect the bytes of the box in the current phase,
/// before or after this call.
template <std::size_t kRank>
__device__ __forceinline__ void tma_load(void* shared, const TensorMap& map, uint64_t* barrier,
                                         const int (&first)[kRank] ATTN_CALLER) {
#ifdef ATTN_EMULATED
  std::size_t bytes = static_cast<std::size_t>(map.element_bytes);
  for (std::size_t i = 0; i < kRank; ++i) bytes *= static_cast<std::size_t>(map.box[i]);
  std::array<int, kRank> at;
  std::copy_n(first, kRank, at.begin());
  std::byte* const to = static_cast<std::byte*>(shared);
  emulator::Block::current().require_aligned("tma_load", caller, "a destination", shared, 128);
  emulator::Block::current().mbarrier_copy(
      "tma_load", caller, barrier, to, bytes,
      [=] {
        each_piece(map, to, at, [](std::byte* s, const std::byte* g) {
          g ? std::memcpy(s, g, 16) : std::memset(s, 0, 16);
        });
      },
      [&](const emulator::Block::Visit& reads) {
        each_piece(map, to, at, [&](std::byte*, const std::byte* g) {
          if (g) reads(g, 16);
        });
      });
#else
  static_assert(kRank == 3 || kRank == 4, "ranks in use");
  ATTN_STAMP_COPY(barrier, shared)
  if constexpr (kRank == 3)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
        ::"r"(shared_address(shared)),
        "l"(&map), "r"(shared_address(barrier)), "r"(first[0]), "r"(first[1]), "r"(first[2])
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(shared_address(shared)),
        "l"(&map), "r"(shared_address(barrier)), "r"(first[0]), "r"(first[1]), "r"(first[2]), "r"(first[3])
        : "memory");
#endif
}

/// Proxy fence of shared memory: orders accesses of ordinary code (and cp.async) with those of the
/// async proxy (TMA, wgmma) to the same bytes. It has to stand on the path from one to the other:
/// each writer calls it before the barrier, or the thread that issues the TMA instruction calls it
/// after the barrier. wgmma has many issuers, so there the writers call it. Also before a TMA load
/// over bytes that ordinary code has read. PTX ISA, "Causality order", "Async proxy".
__device__ __forceinline__ void fence_proxy_async() {
#ifdef ATTN_EMULATED
  emulator::Block::current().fence_proxy(emulator::Space::shared);
#else
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// The same of global memory: between stores of ordinary code and a TMA load of them in one launch.
__device__ __forceinline__ void fence_proxy_async_global() {
#ifdef ATTN_EMULATED
  emulator::Block::current().fence_proxy(emulator::Space::global);
#else
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

/// Issues the store of a box from shared to global memory. The same thread calls it,
/// tma_store_commit() and tma_store_wait().
template <std::size_t kRank>
__device__ __forceinline__ void tma_store(const TensorMap& map, const void* shared,
                                          const int (&first)[kRank] ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block& block = emulator::Block::current();
  std::size_t bytes = static_cast<std::size_t>(map.element_bytes);
  for (std::size_t i = 0; i < kRank; ++i) bytes *= static_cast<std::size_t>(map.box[i]);
  block.require_aligned("tma_store", caller, "a source", shared, 128);
  block.require_shared("tma_store", caller, "a source", shared, bytes);
  std::array<int, kRank> at;
  std::copy_n(first, kRank, at.begin());
  const auto from = static_cast<std::byte*>(const_cast<void*>(shared));
  block.store_async(
      "tma_store", caller,
      [=] {
        std::vector<std::pair<std::byte*, std::array<std::byte, 16>>> pieces;
        each_piece(map, from, at, [&](std::byte* s, const std::byte* g) {
          if (!g) return;
          pieces.push_back({const_cast<std::byte*>(g), {}});
          std::memcpy(pieces.back().second.data(), s, 16);
        });
        return [pieces = std::move(pieces)] {
          for (const auto& [to, piece] : pieces) std::memcpy(to, piece.data(), 16);
        };
      },
      emulator::Kind::write,
      [&](const emulator::Block::Visit& reads) {
        each_piece(map, from, at, [&](std::byte* s, const std::byte* g) {
          if (g) reads(s, 16);
        });
      },
      [&](const emulator::Block::Visit& writes) {
        each_piece(map, from, at, [&](std::byte*, const std::byte* g) {
          if (g) writes(g, 16);
        });
      });
#else
  static_assert(kRank == 3 || kRank == 4, "ranks in use");
  if constexpr (kRank == 3)
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
                 "r"(shared_address(shared)), "r"(first[0]), "r"(first[1]), "r"(first[2])
                 : "memory");
  else
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(shared_address(shared)), "r"(first[0]), "r"(first[1]), "r"(first[2]), "r"(first[3])
                 : "memory");
#endif
}

__device__ __forceinline__ void tma_store_commit() {
#ifdef ATTN_EMULATED
  emulator::Block::current().store_commit();
#else
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

/// Waits until all but the newest kPending groups of this thread's stores have read shared memory,
/// which may then be overwritten. A block must wait for all of them before it exits.
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
#ifdef ATTN_EMULATED
  emulator::Block::current().store_wait(kPending, false);
#else
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
#endif
}

/// Waits until all but the newest kPending groups are complete: global memory has been written,
/// too. What follows may tell another block, by a release, that it is there.
template <int kPending>
__device__ __forceinline__ void bulk_wait_group() {
#ifdef ATTN_EMULATED
  emulator::Block::current().store_wait(kPending, true);
#else
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
