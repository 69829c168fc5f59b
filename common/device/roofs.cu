// Measures the roofs of this GPU. Built by nvcc only.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "attn/blas.h"
#include "device/device.h"
#include "device/roofline.h"

namespace attn {
namespace {

constexpr int kThreads = 256;

// Every thread copies 16 bytes per access, with four loads in flight.
__global__ void copy_kernel(const uint4* from, uint4* to, int64_t count) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    const uint4 a = from[i], b = from[i + stride], c = from[i + 2 * stride],
                d = from[i + 3 * stride];
    to[i] = a, to[i + stride] = b, to[i + 2 * stride] = c, to[i + 3 * stride] = d;
  }
  for (; i < count; i += stride) to[i] = from[i];
}

// Reads `count` vectors `passes` times; storing the sum keeps the compiler from removing the loads.
__global__ void read_kernel(const uint4* from, int64_t count, int passes, unsigned* sink) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  unsigned sum = 0;
  for (int pass = 0; pass < passes; ++pass)
#pragma unroll 4
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += stride) {
      uint4 v;  // .cg: from L2, bypassing L1
      asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "l"(from + i));
      sum += v.x ^ v.y ^ v.z ^ v.w;
    }
  if (sum == 0x12345678u) *sink = sum;
}

// Eight independent chains per thread hide the latency of either unit.
constexpr int kChains = 8, kLinks = 2048;
__global__ void fma_kernel(float x, float* sink) {
  float c[kChains];
  for (int n = 0; n < kChains; ++n) c[n] = x + static_cast<float>(threadIdx.x + n);
  for (int i = 0; i < kLinks; ++i)
#pragma unroll
    for (int n = 0; n < kChains; ++n) c[n] = fmaf(c[n], x, c[n]);
  float sum = 0;
  for (int n = 0; n < kChains; ++n) sum += c[n];
  if (sum == 1.2345f) *sink = sum;
}
__global__ void exp_kernel(float x, float* sink) {
  float c[kChains];
  for (int n = 0; n < kChains; ++n) c[n] = x * static_cast<float>(threadIdx.x + n);
  for (int i = 0; i < kLinks; ++i)
#pragma unroll
    for (int n = 0; n < kChains; ++n) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(c[n]));
  float sum = 0;
  for (int n = 0; n < kChains; ++n) sum += c[n];
  if (sum == 1.2345f) *sink = sum;
}

// Sums of uniform numbers, approximately normal: zeros would run faster than real data.
__global__ void random_kernel(unsigned short* values, int64_t count, bool bf16) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  unsigned h = static_cast<unsigned>(i) * 2654435761u;
  float sum = -6;
  for (int n = 0; n < 12; ++n) {
    h = (h ^ (h >> 15)) * 2246822519u + 3266489917u;
    sum += static_cast<float>(h >> 8) * 0x1p-24f;
  }
  values[i] = bf16 ? static_cast<unsigned short>(__float_as_uint(sum) >> 16)
                   : __half_as_ushort(__float2half_rn(sum));
}

// Median seconds of `repeat` runs after two warm-up runs.
double median_seconds(int repeat, const std::function<void()>& run) {
  cudaEvent_t begin, end;
  if (cudaEventCreate(&begin) != cudaSuccess || cudaEventCreate(&end) != cudaSuccess)
    throw DeviceError("measuring roofs: no CUDA events");
  std::vector<float> times;
  for (int i = -2; i < repeat; ++i) {
    cudaEventRecord(begin);
    run();
    cudaEventRecord(end);
    cudaEventSynchronize(end);
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i >= 0) times.push_back(ms * 1e-3f);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    throw DeviceError(std::string("measuring roofs: ") + cudaGetErrorString(error));
  std::nth_element(times.begin(), times.begin() + repeat / 2, times.end());
  return times[static_cast<std::size_t>(repeat / 2)];
}

}  // namespace

Roofs measure_roofs() {
  const GpuInfo& gpu = gpu_info();
  const std::string source = "measured";
  Roofs roofs;
  roofs.gpu = gpu.name;
  roofs.machine = {gpu.num_sms, static_cast<double>(gpu.l2_bytes)};
  const int waves = gpu.num_sms * (2048 / kThreads);
  // 2 GiB each way unless the GPU is nearly full: a short copy ends before it reaches full speed.
  int64_t bytes = int64_t{1} << 31;
  while (bytes > (int64_t{1} << 24) && 3 * bytes > free_bytes(Backend::gpu)) bytes /= 2;
  {
    DeviceBuffer from(Backend::gpu, "roof: source", bytes), to(Backend::gpu, "roof: copy", bytes);
    from.poison();
    const auto* a = static_cast<const uint4*>(from.data());
    auto* b = static_cast<uint4*>(to.data());
    auto* sink = static_cast<unsigned*>(to.data());
    const int64_t count = bytes / 16;
    const double ours =
        median_seconds(10, [&] { copy_kernel<<<waves, kThreads>>>(a, b, count); });
    const double library = median_seconds(10, [&] {
      cudaMemcpyAsync(b, a, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice);
    });
    roofs.hbm_copy = {2 * static_cast<double>(bytes) / std::min(ours, library), source};
    const double read =
        median_seconds(10, [&] { read_kernel<<<waves, kThreads>>>(a, count, 1, sink); });
    roofs.hbm_read = {static_cast<double>(bytes) / read, source};
    // A third of L2 stays resident from pass to pass.
    const int64_t resident = gpu.l2_bytes / 3 / 16;
    constexpr int kPasses = 40;
    const double l2 = median_seconds(
        10, [&] { read_kernel<<<waves, kThreads>>>(a, std::min(resident, count), kPasses, sink); });
    roofs.l2 = {static_cast<double>(std::min(resident, count)) * 16 * kPasses / l2, source};
    auto* out = static_cast<float*>(to.data());
    const double chains = static_cast<double>(waves) * kThreads * kChains * kLinks;
    roofs.fp32 = {
        2 * chains / median_seconds(10, [&] { fma_kernel<<<waves, kThreads>>>(0.5f, out); }),
        source};
    roofs.exp = {chains / median_seconds(10, [&] { exp_kernel<<<waves, kThreads>>>(0.5f, out); }),
                 source};
  }
  // 8-bit roofs are not measured: the GEMM library used here has no such types.
  if (const GpuSpec* const spec = spec_of_device(gpu.name)) {
    roofs.tensor_e4m3 = {spec->tensor_fp8_flops, "datasheet"};
    roofs.tensor_int8 = {spec->tensor_int8_ops, "datasheet"};
  }
  if (have_cublas()) {
    int64_t n = 8192;
    while (n > 1024 && 4 * 2 * n * n > free_bytes(Backend::gpu)) n /= 2;
    DeviceBuffer a(Backend::gpu, "roof: A", 2 * n * n), b(Backend::gpu, "roof: B", 2 * n * n),
        c(Backend::gpu, "roof: C", 2 * n * n);
    for (const DType t : {DType::fp16, DType::bf16}) {
      for (DeviceBuffer* m : {&a, &b})
        random_kernel<<<static_cast<unsigned>(n * n / kThreads), kThreads>>>(
            static_cast<unsigned short*>(m->data()), n * n, t == DType::bf16);
      const Gemm gemm{1,  n, n, n, a.data(), t, false, n, 0, b.data(), t,
                      true, n, 0, c.data(), t, n, 0};
      const double seconds = median_seconds(10, [&] {
        const Status status = gemm_strided_batched(Backend::gpu, nullptr, gemm);
        if (!status.ok()) throw DeviceError("measuring roofs: " + status.message);
      });
      const Roof roof{2.0 * static_cast<double>(n) * static_cast<double>(n) *
                          static_cast<double>(n) / seconds,
                      source};
      (t == DType::fp16 ? roofs.tensor_fp16 : roofs.tensor_bf16) = roof;
    }
  }
  return roofs;
}

}  // namespace attn
