/// \file
/// Host time of a call of libattention, next to the step's own launch function and to the encoding
/// of a tensor map, which is part of the launches of chapters 06 and 07.
///
///     bench_api --benchmark_format=json
///
/// The problems are so small that the GPU is never behind the host. `call_overhead.py` prints the
/// results as a table.
#include <benchmark/benchmark.h>

#if ATTN_HAVE_CUDA
#include <cuda.h>
#include <cuda_runtime_api.h>
#endif

#include <chrono>
#include <cstdio>
#include <memory>

#include "api/tests/gpu_calls.h"

using namespace attn;
using namespace attn::tests;

namespace {

constexpr int kCalls = 100;  // launched before the host waits for the GPU

// Times each call by itself: waiting for the GPU is not part of it.
template <class Call>
void time_calls(benchmark::State& state, Call call) {
  int launched = 0;
  for (auto _ : state) {
    if (launched++ % kCalls == 0) synchronize(Backend::gpu);
    const auto begin = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
    state.SetIterationTime(time.count());
  }
  synchronize(Backend::gpu);
}

void run_plan(benchmark::State& state, const std::string& name, api::Call call) {
  OnGpu g(name, call);
  const std::unique_ptr<attn_plan> plan = api::make_plan(call, &g.problem);
  const auto bytes = static_cast<std::size_t>(plan->workspace_bytes);
  Memory workspace(bytes, 0, Backend::gpu);
  const attn_tensors& t = g.tensors.tensors;
  if (attn_prepare(plan.get(), &t, workspace.data(), bytes, nullptr) != ATTN_OK)
    return state.SkipWithError(attn_last_error());
  time_calls(state, [&] {
    if (attn_run(plan.get(), &t, workspace.data(), bytes, nullptr) != ATTN_OK)
      throw std::runtime_error(attn_last_error());
  });
}

void launch(benchmark::State& state, const std::string& name, api::Call call) {
  OnGpu g(name, call);
  const std::unique_ptr<attn_plan> plan = api::make_plan(call, &g.problem);
  const auto bytes = static_cast<std::size_t>(plan->workspace_bytes);
  Memory workspace(bytes, 0, Backend::gpu);
  if (attn_prepare(plan.get(), &g.tensors.tensors, workspace.data(), bytes, nullptr) != ATTN_OK)
    return state.SkipWithError(attn_last_error());
  Arguments arguments(plan->problem, plan->device);
  for (auto& [of, memory] : g.tensors.memory) arguments.bind(of, memory.data());
  for (const auto& region : plan->regions)
    arguments.bind(region.name, workspace.data() + region.offset);
  const auto& function = step_named(name).step->launch.gpu;
  time_calls(state, [&] {
    if (const Status status = function(arguments); !status.ok())
      throw std::runtime_error(status.message);
  });
}

#if ATTN_HAVE_CUDA
// One call of the driver's encoder, as make_tensor_map of ptx/tma.h makes it for a tile of K.
void encode(benchmark::State& state) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                       cudaEnableDefault, &found) != cudaSuccess || !function)
    return state.SkipWithError("the driver has no cuTensorMapEncodeTiled");
  const auto call = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  const DeviceBuffer memory(Backend::gpu, "memory", 1 << 20);
  const cuuint64_t extents[] = {64, 160, 2, 1}, strides[] = {128, 20480, 40960};
  const cuuint32_t box[] = {64, 64, 1, 1}, steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  for (auto _ : state) {
    if (call(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, memory.data(), extents,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
      return state.SkipWithError("cuTensorMapEncodeTiled failed");
    benchmark::DoNotOptimize(map);
  }
}
#endif

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  if (!gpu_info().available) {
    std::puts("no GPU: nothing to time");
    return 77;
  }
  const auto add = [](const std::string& name, auto function) {
    return benchmark::RegisterBenchmark(name.c_str(), function)
        ->Iterations(1000)->Repetitions(20)->ReportAggregatesOnly()->Unit(benchmark::kMicrosecond);
  };
  const std::pair<std::string, api::Call> calls[] = {
      {"04_flash_v2/v13_tuned", api::Call::forward},
      {"04_flash_v2/b7_tuned", api::Call::backward},
      {"05_flash_decoding/v14_unified_max", api::Call::decode},
      {"06_flash_v3_hopper/v14_tuned", api::Call::forward},
      {"06_flash_v3_hopper/b7_dependent_launches", api::Call::backward},
      {"07_paged/v6_device_plan", api::Call::paged_decode}};
  for (const auto& [name, call] : calls) {
    if (!runs_here(*step_named(name).step)) continue;
    add("attn_run " + name, [=](benchmark::State& s) { run_plan(s, name, call); })->UseManualTime();
    add("launch " + name, [=](benchmark::State& s) { launch(s, name, call); })->UseManualTime();
  }
#if ATTN_HAVE_CUDA
  add("encode a tensor map", [](benchmark::State& s) { encode(s); });
#endif
  benchmark::RunSpecifiedBenchmarks();
}
