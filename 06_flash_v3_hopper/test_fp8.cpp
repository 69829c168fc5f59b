// What FP8.md promises: its steps right on every shape that they accept, and how far they are from
// attention to what was given.
#include <algorithm>
#include <cmath>
#include <vector>

#include "fp8.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

const std::vector<int64_t> kShort{1, 17, 64, 65, 113, 127, 129, 203};
const std::vector<int64_t> kHeadDims{64, 128, 64, 256};

bool quantises(const Step& step, int) { return takes(step, "e4m3"); }

}  // namespace

TEST_CASE("FP8 steps are right on short problems", "[emulated]") {
  Counts ran;
  int n = 0;
  covering_problems(kShort, kHeadDims, {DType::e4m3}, [&](Problem p) {
    if (n++ % 3 != 0 && p.head_dim == 256) return;  // slow
    ran += check_steps("forward", p, Backend::emulated, quantises);
  });
  CHECK(ran.text() ==
        "f1_fp8 34, f2_p_scale 34, f3_two_level 34, f4_block_scales 34, f5_incoherent 34");
}

TEST_CASE("FP8 steps are right on several blocks of queries and of keys", "[emulated]") {
  Problem p = problem(150, 395, 64, DType::e4m3, InputKind::needle);
  p.heads = 2, p.kv_heads = 1, p.causal = true;
  check_steps("forward", p, Backend::emulated);
  p = problem(300, 290, 128, DType::e4m3, InputKind::peaked);
  p.heads = p.kv_heads = 1, p.window_left = 130, p.window_right = 40;
  check_steps("forward", p, Backend::emulated);
}

TEST_CASE("FP8 steps on the GPU", "[gpu]") {
  Counts ran;
  covering_problems(kLengths, kHeadDims, {DType::e4m3},
                    [&](const Problem& p) { ran += check_steps("forward", p, Backend::gpu); });
  CHECK(ran.text() ==
        "f1_fp8 110, f2_p_scale 110, f3_two_level 110, f4_block_scales 110, f5_incoherent 110");
  for (const int64_t d : {64, 128, 256}) {
    Problem p = problem(2100, 4000, d, DType::e4m3, InputKind::needle);
    p.causal = true;
    check_steps("forward", p, Backend::gpu);
  }
}

// What is checked against must not be what the kernel does: a scale of the largest number, and codes to nearest even.
TEST_CASE("what an FP8 step multiplies, by hand", "[fp8]") {
  Problem p = problem(2, 3, 64, DType::e4m3);
  p.batch = p.heads = p.kv_heads = 1;
  p.finish();
  HostTensors in;
  for (const TensorSpec& spec : forward().inputs(p)) {
    CHECK(spec.dtype == DType::bf16);
    in.emplace(spec.name, zeros(spec));
  }
  std::vector<float>& q = in.at("q").data;
  q[0] = -896, q[1] = 3.125f, q[2] = 3.25f, q[3] = 1;  // a scale of 2: 1.5625 lies between 1.5 and 1.625
  const HostTensors stored = in_tensor_scales(p, in);
  CHECK(stored.at("q").data[0] == -896);
  CHECK(stored.at("q").data[1] == 3);  // to even
  CHECK(stored.at("q").data[2] == 3.25f);
  CHECK(stored.at("q").data[3] == 1);
  CHECK(stored.at("k").data[0] == 0);
}
