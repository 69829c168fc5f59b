// Datasheet figures. How to read the vendor's documents:
//
// - Datasheets since 2020 print tensor peaks "with sparsity", twice the dense rate. They are halved
//   here.
// - GeForce tensor cores accumulate in fp32 at half of their fp16 rate, so the whitepaper's rows
//   "with FP32 Accumulate" apply.
// - The GB of a memory size is 2^30 bytes, as the driver reports it (an H200 of "141 GB" has
//   150.1e9 bytes left for programs); the GB/s of a bandwidth is 10^9 bytes.
// - A figure that the datasheet leaves out but the driver reports for every such GPU (the number of
//   SMs, the maximum clock, the size of the L2) is taken from the CUDA device attributes, and
//   `source` says so.
#include "device/gpus.h"

#include <algorithm>
#include <array>

namespace attn {
namespace {

constexpr double kKiB = 1024.0;
constexpr double kMiB = 1024.0 * kKiB;
constexpr double kGiB = 1024.0 * kMiB;
constexpr double kMHz = 1e6;
constexpr double kGBps = 1e9;  // bytes per second
constexpr double kTera = 1e12;

// CUDA C++ Programming Guide, sections "Compute Capability 7.x" to "10.x": every SM has 16 special
// function units, which compute exp2. Its table "Throughput of Native Arithmetic Instructions" has
// the same 16 results per clock and SM.
constexpr double kExp2PerClockPerSm = 16.0;

struct SharedMemory {
  int64_t bytes_per_sm;
  int64_t bytes_per_block;
};

// CUDA Programming Guide, table "Memory Information per Compute Capability", where a KB is 1024
// bytes; 7.0 by its section "Compute Capability 7.x". From 8.0 on, each block has 1 KiB reserved.
constexpr SharedMemory shared_memory(int cc_major, int cc_minor) {
  if (cc_major == 7 && cc_minor == 0) return {96 * 1024, 96 * 1024};
  if (cc_major == 8 && cc_minor == 0) return {164 * 1024, 163 * 1024};
  if (cc_major == 8) return {100 * 1024, 99 * 1024};  // 8.6 and 8.9
  return {228 * 1024, 227 * 1024};                    // 9.0 and 10.0
}

// Computes the fields that follow from other figures.
constexpr GpuSpec derived(GpuSpec spec) {
  spec.exp2_per_s = kExp2PerClockPerSm * spec.num_sms * spec.boost_clock_hz;
  const SharedMemory shared = shared_memory(spec.cc_major, spec.cc_minor);
  spec.shared_bytes_per_sm = shared.bytes_per_sm;
  spec.shared_bytes_per_block = shared.bytes_per_block;
  return spec;
}

constexpr std::array kGpus = {
    // The datasheet prints the H100 SXM's peaks and no clock; 1980 MHz is what the driver reports,
    // 1830 MHz the tensor clock at which those peaks hold. Its L2 is larger than the H100's 50 MB.
    derived({
        .name = "h200",
        .full_name = "NVIDIA H200 SXM",
        .cc_major = 9,
        .cc_minor = 0,
        .num_sms = 132,
        .boost_clock_hz = 1980 * kMHz,
        .tensor_clock_hz = 1830 * kMHz,
        .hbm_bytes = 141 * kGiB,
        .hbm_bytes_per_s = 4800 * kGBps,
        .l2_bytes = 60 * kMiB,
        .fp32_flops = 67 * kTera,
        .tensor_16bit_flops = 1979 * kTera / 2,
        .tensor_fp8_flops = 3958 * kTera / 2,
        .tensor_int8_ops = 3958 * kTera / 2,
        .source = "NVIDIA H200 Tensor Core GPU datasheet, table of specifications (column SXM); "
                  "CUDA device attributes for SMs, clock and L2; NVIDIA H100 Tensor Core GPU "
                  "Architecture whitepaper for the tensor clock",
    }),
    derived({
        .name = "h100",
        .full_name = "NVIDIA H100 SXM",
        .cc_major = 9,
        .cc_minor = 0,
        .num_sms = 132,
        .boost_clock_hz = 1980 * kMHz,
        .tensor_clock_hz = 1830 * kMHz,
        .hbm_bytes = 80 * kGiB,
        .hbm_bytes_per_s = 3350 * kGBps,
        .l2_bytes = 50 * kMiB,
        .fp32_flops = 66.9 * kTera,
        .tensor_16bit_flops = 989.4 * kTera,
        .tensor_fp8_flops = 1978.9 * kTera,
        .tensor_int8_ops = 1978.9 * kTera,
        .source = "NVIDIA H100 Tensor Core GPU Architecture whitepaper, table of GPU features "
                  "(column H100 SXM5); NVIDIA H100 datasheet for the memory bandwidth",
    }),
    derived({
        .name = "h100-pcie",
        .full_name = "NVIDIA H100 PCIe",
        .cc_major = 9,
        .cc_minor = 0,
        .num_sms = 114,
        .boost_clock_hz = 1755 * kMHz,
        .tensor_clock_hz = 1620 * kMHz,
        .hbm_bytes = 80 * kGiB,
        .hbm_bytes_per_s = 2000 * kGBps,
        .l2_bytes = 50 * kMiB,
        .fp32_flops = 51.2 * kTera,
        .tensor_16bit_flops = 1513 * kTera / 2,
        .tensor_fp8_flops = 3026 * kTera / 2,
        .tensor_int8_ops = 3026 * kTera / 2,
        .source = "NVIDIA H100 datasheet, table of specifications (column H100 PCIe); NVIDIA "
                  "H100 Tensor Core GPU Architecture whitepaper, table of GPU features, for SMs, "
                  "clocks, L2 and FP32",
    }),
    derived({
        .name = "a100",
        .full_name = "NVIDIA A100 SXM 80 GB",
        .cc_major = 8,
        .cc_minor = 0,
        .num_sms = 108,
        .boost_clock_hz = 1410 * kMHz,
        .tensor_clock_hz = 1410 * kMHz,
        .hbm_bytes = 80 * kGiB,
        .hbm_bytes_per_s = 2039 * kGBps,
        .l2_bytes = 40 * kMiB,
        .fp32_flops = 19.5 * kTera,
        .tensor_16bit_flops = 312 * kTera,
        .tensor_int8_ops = 624 * kTera,
        .source = "NVIDIA A100 Tensor Core GPU datasheet, table of specifications (column A100 "
                  "80GB SXM); NVIDIA A100 Tensor Core GPU Architecture whitepaper, comparison of "
                  "data center GPUs, for SMs, clock and L2",
    }),
    derived({
        .name = "a100-40gb",
        .full_name = "NVIDIA A100 SXM 40 GB",
        .cc_major = 8,
        .cc_minor = 0,
        .num_sms = 108,
        .boost_clock_hz = 1410 * kMHz,
        .tensor_clock_hz = 1410 * kMHz,
        .hbm_bytes = 40 * kGiB,
        .hbm_bytes_per_s = 1555 * kGBps,
        .l2_bytes = 40 * kMiB,
        .fp32_flops = 19.5 * kTera,
        .tensor_16bit_flops = 312 * kTera,
        .tensor_int8_ops = 624 * kTera,
        .source = "NVIDIA A100 Tensor Core GPU Architecture whitepaper, comparison of data "
                  "center GPUs (column NVIDIA A100)",
    }),
    // The brief prints "up to 192 GB" and neither SMs, clock nor L2. Without a clock there is no
    // roof for exp2.
    derived({
        .name = "b200",
        .full_name = "NVIDIA B200 SXM",
        .cc_major = 10,
        .cc_minor = 0,
        .num_sms = 148,
        .hbm_bytes = 192 * kGiB,
        .hbm_bytes_per_s = 8000 * kGBps,
        .l2_bytes = 126 * kMiB,
        .fp32_flops = 80 * kTera,
        .tensor_16bit_flops = 4500 * kTera / 2,
        .tensor_fp8_flops = 9000 * kTera / 2,
        .source = "NVIDIA Blackwell Architecture Technical Brief, table of system specifications "
                  "(HGX B200, per GPU); CUDA Blackwell Tuning Guide, section Increased L2 "
                  "Capacity; CUDA device attributes for SMs",
    }),
    // The datasheet's dense 362.05 TFLOPS is 1 % below its sparse 733 / 2.
    derived({
        .name = "l40s",
        .full_name = "NVIDIA L40S",
        .cc_major = 8,
        .cc_minor = 9,
        .num_sms = 142,
        .boost_clock_hz = 2520 * kMHz,
        .tensor_clock_hz = 2520 * kMHz,
        .hbm_bytes = 48 * kGiB,
        .hbm_bytes_per_s = 864 * kGBps,
        .l2_bytes = 96 * kMiB,
        .fp32_flops = 91.6 * kTera,
        .tensor_16bit_flops = 362.05 * kTera,
        .tensor_fp8_flops = 733 * kTera,
        .tensor_int8_ops = 733 * kTera,
        .source = "NVIDIA L40S datasheet, table of specifications; CUDA device attributes for "
                  "clock and L2",
    }),
    derived({
        .name = "l4",
        .full_name = "NVIDIA L4",
        .cc_major = 8,
        .cc_minor = 9,
        .num_sms = 58,
        .boost_clock_hz = 2040 * kMHz,
        .tensor_clock_hz = 2040 * kMHz,
        .hbm_bytes = 24 * kGiB,
        .hbm_bytes_per_s = 300 * kGBps,
        .l2_bytes = 48 * kMiB,
        .fp32_flops = 30.3 * kTera,
        .tensor_16bit_flops = 242 * kTera / 2,
        .tensor_fp8_flops = 485 * kTera / 2,
        .tensor_int8_ops = 485 * kTera / 2,
        .source = "NVIDIA L4 Tensor Core GPU datasheet, table of specifications; CUDA device "
                  "attributes for SMs, clock and L2",
    }),
    derived({
        .name = "rtx4090",
        .full_name = "NVIDIA GeForce RTX 4090",
        .cc_major = 8,
        .cc_minor = 9,
        .num_sms = 128,
        .boost_clock_hz = 2520 * kMHz,
        .tensor_clock_hz = 2520 * kMHz,
        .hbm_bytes = 24 * kGiB,
        .hbm_bytes_per_s = 1008 * kGBps,
        .l2_bytes = 73728 * kKiB,
        .fp32_flops = 82.6 * kTera,
        .tensor_16bit_flops = 165.2 * kTera,
        .tensor_fp8_flops = 330.3 * kTera,
        .tensor_int8_ops = 660.6 * kTera,
        .source = "NVIDIA Ada GPU Architecture whitepaper V2.02 or later (earlier ones print "
                  "another fp8 peak), appendix A, table of GeForce RTX 4090 specifications",
    }),
    derived({
        .name = "rtx3090",
        .full_name = "NVIDIA GeForce RTX 3090",
        .cc_major = 8,
        .cc_minor = 6,
        .num_sms = 82,
        .boost_clock_hz = 1695 * kMHz,
        .tensor_clock_hz = 1695 * kMHz,
        .hbm_bytes = 24 * kGiB,
        .hbm_bytes_per_s = 936 * kGBps,
        .l2_bytes = 6144 * kKiB,
        .fp32_flops = 35.6 * kTera,
        .tensor_16bit_flops = 71 * kTera,
        .tensor_int8_ops = 284 * kTera,
        .source = "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A, table of GeForce "
                  "RTX 3090 specifications",
    }),
    // Its tensor cores support fp16 only, not bf16.
    derived({
        .name = "v100",
        .full_name = "NVIDIA V100 SXM2 32 GB",
        .cc_major = 7,
        .cc_minor = 0,
        .num_sms = 80,
        .boost_clock_hz = 1530 * kMHz,
        .tensor_clock_hz = 1530 * kMHz,
        .hbm_bytes = 32 * kGiB,
        .hbm_bytes_per_s = 900 * kGBps,
        .l2_bytes = 6144 * kKiB,
        .fp32_flops = 15.7 * kTera,
        .tensor_16bit_flops = 125 * kTera,
        .source = "NVIDIA A100 Tensor Core GPU Architecture whitepaper, comparison of data "
                  "center GPUs (column NVIDIA Tesla V100)",
    }),
};

constexpr char to_lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

}  // namespace

std::span<const GpuSpec> gpu_specs() { return kGpus; }

const GpuSpec* find_gpu(std::string_view name) {
  for (const GpuSpec& gpu : kGpus) {
    if (std::ranges::equal(gpu.name, name, {}, {}, to_lower)) return &gpu;
  }
  return nullptr;
}

std::string gpu_names() {
  std::string names;
  for (const GpuSpec& gpu : kGpus) {
    if (!names.empty()) names += ", ";
    names += gpu.name;
  }
  return names;
}

}  // namespace attn
