// What the passes of the FP8 steps store of Q and K, number for number. Attention alone would not
// see a rotation by another orthogonal matrix, as long as it is one for both.
#include <algorithm>
#include <cmath>
#include <vector>

#include "attn/small_types.h"
#include "fp8.h"
#include "run/runner.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

// Codes times their scales, of q or of k.
std::vector<float> meant(const DeviceBuffer& codes, const DeviceBuffer& descale, int64_t rows,
                         int64_t d) {
  std::vector<uint8_t> code(static_cast<std::size_t>(codes.bytes()));
  std::vector<float> scale(static_cast<std::size_t>(descale.bytes()) / sizeof(float)),
      x(code.size());
  codes.download(code.data()), descale.download(scale.data());
  const int64_t tiles = (rows + 127) / 128;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / d;
    const int64_t tile = row / rows * tiles + row % rows / 128;
    x[i] = E4M3::decode(code[i]) * scale[static_cast<std::size_t>(tile)];
  }
  return x;
}

// Runs the step and returns the share of numbers of Q and K that are not those of `Step::logical`.
// A sum in another order may be rounded to the neighbouring code.
double share_of_others(const Step& step, const Problem& p, Backend backend) {
  const HostTensors in = draw_inputs(p, forward().inputs(p));
  Arguments arguments(p, backend);
  std::map<std::string, DeviceBuffer> buffers;
  const auto bind = [&](const std::string& name, int64_t bytes) -> DeviceBuffer& {
    DeviceBuffer& b = buffers.try_emplace(name, backend, name, bytes).first->second;
    b.poison();
    arguments.bind(name, b.data());
    return b;
  };
  for (const auto& [name, tensor] : in)
    bind(name, tensor.spec.bytes()).upload(to_bytes(tensor).data());
  for (const TensorSpec& spec : forward().outputs(p)) bind(spec.name, spec.bytes());
  for (const Workspace& w : step.workspaces(p)) bind(w.name, w.bytes);
  REQUIRE(step.prepare.on(backend)(arguments).ok());
  REQUIRE(step.launch.on(backend)(arguments).message == "");
  synchronize(backend);
  const HostTensors expected = step.logical(p, in);
  double others = 0, all = 0;
  for (const std::string name : {"q", "k"}) {
    const std::vector<float> x = meant(buffers.at(name + "8"), buffers.at(name + "_descale"),
                                       name == "q" ? p.seqlen_q : p.seqlen_k, p.head_dim);
    const std::vector<float>& y = expected.at(name).data;
    REQUIRE(x.size() == y.size());
    for (std::size_t i = 0; i < x.size(); ++i)
      others += std::abs(x[i] - y[i]) > 1e-5f * std::abs(y[i]);
    all += static_cast<double>(x.size());
  }
  return others / all;
}

void check_codes(Backend backend) {
  for (const Step& step : fp8_steps())
    for (const int64_t d : {64, 128, 256}) {
      if (step.name < "f4") continue;                 // with one scale for a tensor
      Problem p = problem(131, 263, d, DType::e4m3);  // two tiles of queries, three of keys
      p.batch = 1, p.heads = 2, p.kv_heads = 1;
      if (step.name == "f7_rotary") p.own["rotary"] = {1};
      p.finish();
      INFO(step.name << " " << p.text());
      CHECK(share_of_others(step, p, backend) < 1e-3);
    }
}

}  // namespace

TEST_CASE("codes of Q and K are those of the host", "[emulated][fp8][rotary]") {
  check_codes(Backend::emulated);
}
TEST_CASE("codes of Q and K are those of the host, on the GPU", "[gpu][fp8][rotary]") {
  check_codes(Backend::gpu);
}
