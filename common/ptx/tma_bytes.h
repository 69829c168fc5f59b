/// \file
/// Tensor maps of 1-byte elements; those of 16-bit elements are in tma.h.
#pragma once

#include "ptx/tma.h"

namespace attn {
inline namespace ATTN_BACKEND {

/// Encodes a tensor of bytes at `base`, a multiple of 16. `strides`, multiples of 16, from the
/// second dimension on; `box` up to 256 per dimension, with rows as long as the swizzle. Returns an
/// error for what the hardware does not support.
template <std::size_t kRank>
[[nodiscard]] Status make_byte_tensor_map(TensorMap& map, const uint8_t* base,
                                          std::array<int64_t, kRank> extents,
                                          std::array<int64_t, kRank - 1> strides,
                                          std::array<int, kRank> box) {
  bool fits = reinterpret_cast<std::uintptr_t>(base) % 16 == 0 && (box[0] == 64 || box[0] == 128);
  for (const int64_t s : strides) fits = fits && s % 16 == 0 && s < int64_t{1} << 40;
  for (const int n : box) fits = fits && n >= 1 && n <= 256;
  for (const int64_t n : extents) fits = fits && n >= 1 && n < int64_t{1} << 32;
  if (!fits)
    return Status::unsupported(
        "TMA needs addresses and strides of whole 16 bytes, boxes of 1 to 256 a dimension");
#ifdef ATTN_EMULATED
  map = {reinterpret_cast<const std::byte*>(base), static_cast<int>(kRank), {}, {1}, {}, 1, box[0]};
  for (std::size_t i = 0; i < kRank; ++i) map.extents[i] = extents[i], map.box[i] = box[i];
  for (std::size_t i = 1; i < kRank; ++i) map.strides[i] = strides[i - 1];
#else
  if (const GpuInfo& gpu = gpu_info(); gpu.available && gpu.cc_major * 10 + gpu.cc_minor != 90)
    return Status::unsupported("TMA and wgmma of Hopper, sm_90a; this GPU is sm_" +
                               std::to_string(gpu.cc_major) + std::to_string(gpu.cc_minor) +
                               ": chapters 01 to 05 run on it");
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
      function = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (!encode)
    return Status::device_error(
        "the driver has no cuTensorMapEncodeTiled: it is older than CUDA 12");
  cuuint64_t extent[kRank], stride[kRank - 1];
  cuuint32_t box_extent[kRank], step[kRank];
  for (std::size_t i = 0; i < kRank; ++i)
    extent[i] = static_cast<cuuint64_t>(extents[i]),
    box_extent[i] = static_cast<cuuint32_t>(box[i]), step[i] = 1;
  for (std::size_t i = 0; i + 1 < kRank; ++i) stride[i] = static_cast<cuuint64_t>(strides[i]);
  const CUresult result =
      encode(&map.map, CU_TENSOR_MAP_DATA_TYPE_UINT8, kRank, const_cast<uint8_t*>(base), extent,
             stride, box_extent, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             box[0] == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    return Status::device_error("cuTensorMapEncodeTiled: error " +
                                std::to_string(static_cast<int>(result)));
#endif
  return Status::success();
}

}  // namespace ATTN_BACKEND
}  // namespace attn
