/// \file
/// libattention on a GPU: every step, captured graphs, streams of several threads.
#include "api/tests/gpu_calls.h"
#include "api/tests/random_calls.h"

#if ATTN_HAVE_CUDA
#include <cuda_runtime_api.h>

#include <atomic>
#include <thread>

using namespace attn;
using namespace attn::tests;

namespace {

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

TEST_CASE("random calls on a GPU are right, or refused with one line", "[gpu]") {
  random_calls(2000, Backend::gpu);
}
#endif
