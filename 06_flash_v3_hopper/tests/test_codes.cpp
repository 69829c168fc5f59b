// The codes that the FP8 passes store for Q, K and V, number by number. Attention alone would not
// reveal another orthogonal matrix, as long as Q and K share it, nor codes of V that are a little
// too small.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "attn/small_types.h"
#include "host/fp8.h"
#include "run/runner.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

constexpr double kMaxOthers = 1e-4;  // of all codes

// Codes of q, k or v in the layout of the inputs, their factors, and the offset added afterwards.
struct Stored {
  std::vector<uint8_t> codes;
  std::vector<float> descales, means;
  float meaning(std::size_t i) const { return means[i] + E4M3::decode(codes[i]) * descales[i]; }
};

template <class T>
std::vector<T> downloaded(const DeviceBuffer& buffer) {
  std::vector<T> all(static_cast<std::size_t>(buffer.bytes()) / sizeof(T));
  buffer.download(all.data());
  return all;
}

// Slot of a key (of 16) in v8: the order of PTX's accumulators, as in FP8.md.
constexpr int kSlots[] = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};

Stored stored(const std::map<std::string, DeviceBuffer>& buffers, const std::string& name,
              int64_t heads, int64_t rows, int64_t d) {
  const std::vector<uint8_t> codes = downloaded<uint8_t>(buffers.at(name + "8"));
  const bool chunks = name == "v" && buffers.contains("v_chunk");
  const bool tensors = buffers.contains("descale");  // one scale per tensor
  const std::string of_scales = chunks ? "v_chunk" : tensors ? "descale" : name + "_descale";
  const std::vector<float> scales = downloaded<float>(buffers.at(of_scales));
  const std::size_t tensor = name == "q" ? 0 : name == "k" ? 1 : 2;
  const int64_t padded = (rows + 15) / 16 * 16, part = chunks ? 4096 : 128;
  const int64_t parts = (rows + part - 1) / part;  // per head
  Stored s;
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t c = 0; c < d; ++c) {
        const int64_t at = name == "v" ? (head * d + c) * padded + row / 16 * 16 + kSlots[row % 16]
                                       : (head * rows + row) * d + c;
        s.codes.push_back(codes.at(static_cast<std::size_t>(at)));
        const auto own = static_cast<std::size_t>(head * parts + row / part);
        const auto channel = own * static_cast<std::size_t>(d) + static_cast<std::size_t>(c);
        s.means.push_back(chunks ? scales.at(2 * channel) : 0);
        s.descales.push_back(scales.at(chunks ? 2 * channel + 1 : tensors ? tensor : own));
      }
  // Padding past the last key is multiplied by 0, so it must be finite.
  if (name == "v") CHECK(std::ranges::count(codes, E4M3::kNaN) == 0);
  if (name == "v") CHECK(std::ranges::count(codes, E4M3::kNaN | 0x80) == 0);
  return s;
}

// Rank of a code in ascending order.
int rank_of(uint8_t code) { return (code & 0x80) != 0 ? -(code & 0x7F) : code; }

// Runs the step and compares its codes with `Step::logical`. A sum in another order may round to
// the neighbouring code; that is allowed for few codes.
void check_stored(const Step& step, const Problem& p, Backend backend) {
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
  std::size_t others = 0, far = 0, all = 0;
  for (const std::string name : {"q", "k", "v"}) {
    const bool of_q = name == "q";
    const Stored s = stored(buffers, name, p.batch * (of_q ? p.heads : p.kv_heads),
                            of_q ? p.seqlen_q : p.seqlen_k, p.head_dim);
    const std::vector<float>& y = expected.at(name).data;
    REQUIRE(s.codes.size() == y.size());
    for (std::size_t i = 0; i < y.size(); ++i) {
      // A mean plus a code of opposite sign cancels; both errors remain.
      const float error = 1e-5f * (std::abs(y[i]) + s.descales[i]);
      if (std::abs(s.meaning(i) - y[i]) <= error) continue;
      ++others;
      const uint8_t code = E4M3::encode((y[i] - s.means[i]) / s.descales[i]);
      far += std::abs(rank_of(code) - rank_of(s.codes[i])) > 1;
    }
    all += y.size();
  }
  INFO(others << " others of " << all);
  CHECK(static_cast<double>(others) < kMaxOthers * static_cast<double>(all));
  CHECK(far == 0);
}

void check_codes(Backend backend) {
  for (const Step& step : fp8_steps())
    for (const int64_t d : {64, 128, 256}) {
      if (one_of_steps(step, {"f2_p_scale", "f3_two_level"}) && d > 64) continue;  // as f1
      Problem p = problem(131, 263, d, DType::e4m3);  // two query tiles, three key tiles
      p.window_left = 10, p.window_right = 0;         // attention itself is not checked here
      if (one_of_steps(step, {"f7_rotary", "f8_q_in_registers"})) p.own["rotary"] = {1};
      p.finish();
      INFO(step.name << " " << p.text());
      check_stored(step, p, backend);
    }
}
// Clusters of two, four and eight blocks of 512 keys, with blocks that are whole, partly filled and
// empty; a second chunk; two heads. All steps with smooth V have the kernel of f6.
void check_codes_of_chunks(Backend backend) {
  constexpr int64_t kKeysAndDims[][2] = {{512, 64},  {700, 64},   {1100, 128},
                                         {2000, 64}, {4200, 256}, {4796, 128}};
  for (const auto& [keys, d] : kKeysAndDims) {
    Problem p = problem(3, keys, d, DType::e4m3);
    p.window_left = 10, p.window_right = 0;
    p.finish();
    INFO(p.text());
    check_stored(step_named("f6_smooth_v_chunks"), p, backend);
  }
}

}  // namespace

TEST_CASE("codes of Q K and V match the host's", "[emulated][fp8][rotary]") {
  check_codes(Backend::emulated);
}
TEST_CASE("codes of V match the host's for any number of blocks and chunks", "[emulated][fp8]") {
  check_codes_of_chunks(Backend::emulated);
}
TEST_CASE("codes of Q K and V match the host's on the GPU", "[gpu][fp8][rotary]") {
  check_codes(Backend::gpu);
  check_codes_of_chunks(Backend::gpu);
}
