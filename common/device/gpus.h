// What the vendor says each GPU can do: the roofs of the roofline where nothing was measured.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace attn {

/// A GPU's datasheet. Peaks are dense (no structured sparsity) and multiply-adds count as 2
/// operations. 0 means that the vendor states no such figure: there is no roof to draw.
struct GpuSpec {
  std::string_view name;       // what --gpu takes, lower case: "h200"
  std::string_view full_name;  // "NVIDIA H200 SXM"
  int cc_major = 0;            // compute capability
  int cc_minor = 0;
  int num_sms = 0;
  double boost_clock_hz = 0;      // of the FP32 peak
  double tensor_clock_hz = 0;     // of the tensor peaks; lower on Hopper
  double hbm_bytes = 0;           // capacity of the device memory, be it HBM or GDDR
  double hbm_bytes_per_s = 0;     // its bandwidth
  double l2_bytes = 0;            // capacity of the L2 cache
  double fp32_flops = 0;          // operations a second, FP32 units
  double tensor_16bit_flops = 0;  // fp16 (and, but on v100, bf16) with fp32 accumulation
  double tensor_fp8_flops = 0;    // fp8 with fp32 accumulation; 0: no fp8
  double tensor_int8_ops = 0;     // int8 with int32 accumulation; 0: not stated, or none
  double exp2_per_s = 0;          // 16 a clock and SM x boost clock
  int64_t shared_bytes_per_sm = 0;
  int64_t shared_bytes_per_block = 0;  // with the opt-in for more than 48 KiB
  std::string_view source;             // the documents that the figures are from
};

/// All GPUs known, data centre parts first.
std::span<const GpuSpec> gpu_specs();

/// The GPU of that name, whatever its case, or nullptr.
const GpuSpec* find_gpu(std::string_view name);

/// "h200, h100, ...": the names that find_gpu knows, for error messages.
std::string gpu_names();

}  // namespace attn
