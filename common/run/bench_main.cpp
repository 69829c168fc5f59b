// The Google Benchmark program of a chapter, bench_<chapter>: runs the chapter's steps on the GPU
// and times them with CUDA events, as the chapter program does (L2 is flushed before each launch).
//
//     bench_01_naive --batch 4 --heads 16 --head-dim 128 --benchmark_filter=v4
//         --benchmark_out=b.json
//
// It accepts the problem options of the chapter program; without --seqlen it runs 1024 .. 8192.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "attn/error.h"
#include "check/inputs.h"
#include "run/options.h"
#include "device/roofline.h"
#include "run/session.h"

namespace attn {
namespace {

// Shared by the benchmarks of one process. The session of the last problem is kept, so that inputs
// are drawn and uploaded once for all steps.
struct Shared {
  Roofs roofs = measure_roofs();
  GpuTimer timer;
  std::string key;
  std::unique_ptr<Session> session;

  Session& session_for(const Problem& p, const Operation& op) {
    if (std::string wanted = op.name + " " + p.text(); wanted != key) {
      session.reset();  // frees its memory first
      session = std::make_unique<Session>(p, op, Backend::gpu, draw(op, p).tensors);
      key = std::move(wanted);
    }
    return *session;
  }
};

void run(benchmark::State& state, Shared& shared, const Step& step, const Problem& p) {
  const Operation& op = *step.operation;
  double seconds = 0;
  try {
    const double needed = memory_need(p, op, step).total();
    const auto free = static_cast<double>(free_bytes(Backend::gpu));
    if (shared.key != op.name + " " + p.text() && needed > free)
      return state.SkipWithError(
          fmt::format("{} needed, {} free", bytes_text(needed), bytes_text(free)).c_str());
    Session& session = shared.session_for(p, op);
    if (Status s = session.prepare(step); !s.ok()) return state.SkipWithError(s.message.c_str());
    Sample sample;
    if (Status s = session.time(shared.timer, sample); !s.ok())  // warm-up
      return state.SkipWithError(s.message.c_str());
    for (auto _ : state) {
      if (Status s = session.time(shared.timer, sample); !s.ok())
        return state.SkipWithError(s.message.c_str());
      state.SetIterationTime(sample.seconds);
      seconds += sample.seconds;
    }
  } catch (const DeviceError& e) {
    return state.SkipWithError(e.what());
  }
  const Cost cost = cost_of(step, p, shared.roofs.machine);
  const Prediction prediction = predict(cost, shared.roofs, type_of_products(op, p));
  const double mean = seconds / static_cast<double>(state.iterations());
  state.counters["TFLOP/s"] = op.flop(p) / mean * 1e-12;
  if (op.useful_bytes) {
    state.counters["useful GB/s"] = op.useful_bytes(p) / mean * 1e-9;
    state.counters["%read"] = 100 * read_seconds(op.useful_bytes(p), shared.roofs) / mean;
  }
  state.counters["GB/s"] = modelled_bytes(cost) / mean * 1e-9;
  state.counters["%roof"] = 100 * prediction.seconds / mean;
  state.SetLabel(prediction.binding);
}

int bench(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);  // removes its own options from argv
  bool lengths_given = false;
  for (int i = 1; i < argc; ++i) lengths_given |= std::strncmp(argv[i], "--seqlen", 8) == 0;
  const std::optional<Options> options = parse_options(chapter(), argc, argv);
  if (!options) return 0;
  if (!gpu_info().available) {
    fmt::print("no GPU ({}): benchmarks need one\n", gpu_info().error);
    return 77;
  }
  Shared shared;
  std::vector<int64_t> lengths{1024, 2048, 4096, 8192};
  if (lengths_given || options->problem.varlen()) lengths = {0};
  for (const int64_t n : lengths)
    for (const Step& step : chapter().steps) {
      Problem p = options->problem;
      if (n > 0) p.seqlen_k = n;
      if (n > 0 && options->operation->few_queries == 0) p.seqlen_q = n;
      if (step.operation != options->operation || refusal(step, p) || !step.launch.gpu) continue;
      const GpuInfo& gpu = gpu_info();
      if (const auto reason = lacks(step, gpu.name, 10 * gpu.cc_major + gpu.cc_minor)) {
        fmt::print("{}: {}\n", step.name, *reason);
        continue;
      }
      const std::string name =
          fmt::format("{}/B{}/Hq{}/Hkv{}/Nq{}/Nk{}/d{}/{}{}{}", step.name, p.batch, p.heads,
                      p.kv_heads, p.seqlen_q, p.seqlen_k, p.head_dim, attn::name(p.dtype),
                      p.causal ? "/causal" : "", p.varlen() ? "/varlen" : "");
      benchmark::RegisterBenchmark(
          name.c_str(), [&shared, &step, p](benchmark::State& s) { run(s, shared, step, p); })
          ->UseManualTime()
          ->Unit(benchmark::kMillisecond);
    }
  benchmark::AddCustomContext("gpu", gpu_info().name);
  benchmark::AddCustomContext("hbm_copy_bytes_per_s",
                              fmt::format("{:.4g}", shared.roofs.hbm_copy.rate));
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace
}  // namespace attn

int main(int argc, char** argv) {
  try {
    return attn::bench(argc, argv);
  } catch (const attn::InputError& e) {
    fmt::print(stderr, "bench_{}: {}\n", attn::chapter().name, e.what());
    return 2;
  } catch (const attn::DeviceError& e) {
    fmt::print(stderr, "bench_{}: {}\n", attn::chapter().name, e.what());
    return 4;
  }
}
