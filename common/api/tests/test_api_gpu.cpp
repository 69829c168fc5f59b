/// \file
/// libattention on a GPU: every step, captured graphs, streams of several threads; and the host
/// time of a call next to that of the step's own launch.
#include "api/tests/calls.h"

#if ATTN_HAVE_CUDA
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

using namespace attn;
using namespace attn::tests;

namespace {

const api::NamedStep& step_named(const std::string& name) {
  for (const api::NamedStep& named : api::all_steps())
    if (named.name == name) return named;
  throw std::invalid_argument(name);
}
bool runs_here(const Step& step) {
  const GpuInfo& gpu = gpu_info();
  return step.launch.gpu && !lacks(step, gpu.name, 10 * gpu.cc_major + gpu.cc_minor);
}

class OwnStream {
 public:
  OwnStream() { REQUIRE(cudaStreamCreate(&stream_) == cudaSuccess); }
  ~OwnStream() { (void)cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  cudaStream_t get() const { return stream_; }
  void wait() const { REQUIRE(cudaStreamSynchronize(stream_) == cudaSuccess); }

 private:
  cudaStream_t stream_ = nullptr;
};

// A problem of a step on the GPU, with its tensors and an expected output.
struct OnGpu {
  Problem p;
  attn_problem problem;
  CallTensors tensors;
  std::vector<std::byte> o;
  OnGpu(const std::string& name, api::Call call) : p(*problem_for(*step_named(name).step)) {
    const Operation& op = *step_named(name).step->operation;
    problem = abi_problem(p, op);
    problem.backend = ATTN_GPU;
    problem.step = step_named(name).name.c_str();
    tensors = tensors_of(op, p, draw(op, p).tensors, {}, Backend::gpu);
    REQUIRE(run(call, problem, tensors.tensors) == "");
    synchronize(Backend::gpu);
    o = tensors.bytes("o");
  }
};

// Microseconds of the host for one call, the median of many.
template <class Body>
double host_time(Body body) {
  std::vector<double> times;
  for (int n = 0; n < 300; ++n) {
    const auto begin = std::chrono::steady_clock::now();
    body();
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
    if (n >= 100) times.push_back(time.count());
    if (n % 50 == 0) synchronize(Backend::gpu);
  }
  std::ranges::nth_element(times, times.begin() + 100);
  return times[100];
}

}  // namespace

TEST_CASE("on a GPU every step through the ABI has the bits of its session", "[gpu]") {
  int compared = 0;
  for (const api::NamedStep& named : api::all_steps()) {
    const auto call = call_of(*named.step);
    const auto p = call ? problem_for(*named.step) : std::nullopt;
    if (!p || !runs_here(*named.step)) continue;
    compare_with_session(named, *call, *p, Backend::gpu);
    ++compared;
  }
  CHECK(compared > 50);  // most steps run on any GPU since sm_80
}

TEST_CASE("a captured run is replayed after the lengths have changed in place", "[gpu]") {
  OnGpu g("07_paged/v6_device_plan", api::Call::paged_decode);
  g.problem.lengths_k = nullptr;
  attention::Plan plan(attn_paged_decode_plan, g.problem);
  Memory workspace(plan.workspace_bytes(), 0, Backend::gpu);
  const OwnStream stream;
  plan.prepare(g.tensors.tensors, workspace.data(), stream.get());
  plan.run(g.tensors.tensors, workspace.data(), stream.get());  // loads the kernels
  stream.wait();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  REQUIRE(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  plan.run(g.tensors.tensors, workspace.data(), stream.get());
  REQUIRE(cudaStreamEndCapture(stream.get(), &graph) == cudaSuccess);
  REQUIRE(cudaGraphInstantiate(&replay, graph, 0) == cudaSuccess);
  for (const std::vector<int32_t>& lengths : {std::vector<int32_t>{160, 37}, {12, 30}, {90, 1}}) {
    std::vector<std::byte> bytes(lengths.size() * 4);
    std::memcpy(bytes.data(), lengths.data(), bytes.size());
    g.tensors.memory.at("seqused_k").write(bytes);
    REQUIRE(run(api::Call::paged_decode, g.problem, g.tensors.tensors) == "");
    synchronize(Backend::gpu);
    const std::vector<std::byte> o = g.tensors.bytes("o");
    g.tensors.memory.at("o").write(std::vector<std::byte>(o.size(), std::byte{0xFF}));
    REQUIRE(cudaGraphLaunch(replay, stream.get()) == cudaSuccess);
    stream.wait();
    CHECK(same(g.tensors.bytes("o"), o));
  }
  (void)cudaGraphExecDestroy(replay);
  (void)cudaGraphDestroy(graph);
}

TEST_CASE("one plan runs in streams of several threads", "[gpu]") {
  OnGpu g("04_flash_v2/v13_tuned", api::Call::forward);
  attention::Plan plan(attn_forward_plan, g.problem);
  std::atomic<int> right = 0;
  std::vector<std::thread> threads;
  for (int n = 0; n < 4; ++n)
    threads.emplace_back([&] {
      cudaStream_t stream = nullptr;
      if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return;
      Memory workspace(plan.workspace_bytes(), 0, Backend::gpu), o(g.o.size(), 0, Backend::gpu),
          lse(g.tensors.bytes("lse").size(), 0, Backend::gpu);
      attn_tensors t = g.tensors.tensors;
      t.o.data = o.data(), t.lse = reinterpret_cast<float*>(lse.data());
      plan.prepare(t, workspace.data(), stream);
      for (int launch = 0; launch < 20; ++launch) plan.run(t, workspace.data(), stream);
      right += cudaStreamSynchronize(stream) == cudaSuccess && same(o.read(), g.o);
      (void)cudaStreamDestroy(stream);
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(right == 4);
}

TEST_CASE("host time of a call next to the step's own launch", "[gpu]") {
  fmt::print("{:<32} {:>10} {:>10}  us of the host\n", "step", "attn_run", "launch");
  for (const auto& [name, call] : {std::pair("04_flash_v2/v13_tuned", api::Call::forward),
                                   {"06_flash_v3_hopper/v14_tuned", api::Call::forward},
                                   {"05_flash_decoding/v14_unified_max", api::Call::decode},
                                   {"07_paged/v14_cross_work_tile", api::Call::paged_decode}}) {
    const api::NamedStep& named = step_named(name);
    if (!runs_here(*named.step)) continue;
    OnGpu g(name, call);
    const std::unique_ptr<attn_plan> plan = api::make_plan(call, &g.problem);
    const auto bytes = static_cast<std::size_t>(plan->workspace_bytes);
    Memory workspace(bytes, 0, Backend::gpu);
    const attn_tensors& t = g.tensors.tensors;
    REQUIRE(attn_prepare(plan.get(), &t, workspace.data(), bytes, nullptr) == ATTN_OK);
    const double by_api = host_time([&] {
      if (attn_run(plan.get(), &t, workspace.data(), bytes, nullptr) != ATTN_OK)
        throw std::runtime_error(attn_last_error());
    });
    Arguments arguments(plan->problem, plan->device);
    for (auto& [of, memory] : g.tensors.memory) arguments.bind(of, memory.data());
    for (const auto& region : plan->regions)
      arguments.bind(region.name, workspace.data() + region.offset);
    const double direct = host_time([&] {
      if (const Status status = named.step->launch.gpu(arguments); !status.ok())
        throw std::runtime_error(status.message);
    });
    fmt::print("{:<32} {:>10.2f} {:>10.2f}\n", name, by_api, direct);
    CHECK(by_api < direct + 2);
  }
}
#endif
