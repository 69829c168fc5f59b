// GPU datasheets: the roofs of the roofline model where nothing was measured.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace attn {

/// A GPU's datasheet. Peaks are dense (no structured sparsity) and a multiply-add counts as 2
/// operations. 0: the vendor states no such figure, so there is no such roof.
struct GpuSpec {
  std::string_view name;  // value of --gpu, lower case: "h200"
  std::string_view full_name;  // "NVIDIA H200 SXM"
  int cc_major = 0;            // compute capability
  int cc_minor = 0;
  int num_sms = 0;
  double boost_clock_hz = 0;  // for the FP32 peak
  double tensor_clock_hz = 0;  // for the tensor peaks; lower on Hopper
  double hbm_bytes = 0;  // capacity of the device memory, HBM or GDDR
  double hbm_bytes_per_s = 0;     // its bandwidth
  double l2_bytes = 0;            // capacity of the L2 cache
  double fp32_flops = 0;  // operations per second, FP32 units
  double tensor_16bit_flops = 0;  // fp16 (and bf16, except on v100) with fp32 accumulation
  double tensor_fp8_flops = 0;    // fp8 with fp32 accumulation; 0: no fp8
  double tensor_int8_ops = 0;     // int8 with int32 accumulation; 0: not stated, or none
  double exp2_per_s = 0;  // 16 per clock and SM x boost clock
  int64_t shared_bytes_per_sm = 0;
  int64_t shared_bytes_per_block = 0;  // with the opt-in for more than 48 KiB
  std::string_view source;  // the documents the figures come from
};

/// All known GPUs, data centre parts first.
std::span<const GpuSpec> gpu_specs();

/// The GPU with that name, ignoring case, or nullptr.
const GpuSpec* find_gpu(std::string_view name);

/// "h200, h100, ...": the names that find_gpu accepts, for error messages.
std::string gpu_names();

}  // namespace attn
