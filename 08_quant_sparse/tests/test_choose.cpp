// The selection kernels: their sums are bitwise the host's, and their search finds what its sort
// finds, for scores of all kinds and for more than fit in shared memory.
#include <algorithm>
#include <cmath>
#include <limits>

#include "08_quant_sparse/host/predict.h"
#include "08_quant_sparse/kernels/sparse.h"
#include "attn/error.h"
#include "check/field.h"
#include "run/runner.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

const Step& s4_predict() {
  for (const Step& step : chapter().steps)
    if (step.name == "s4_predict") return step;
  throw InputError("no s4_predict");
}

int kept_blocks(const BlockMask& mask, int64_t m) {
  int kept = 0;
  for (int64_t n = 0; n < mask.shape()[3]; ++n) kept += mask.open(0, 0, m, n);
  return kept;
}

// A query tile whose self-similarity equals the limit predicts; with a limit one bit higher it does
// not. A different summation order or rounding of the inverse would change that bit.
int similarities_at_the_limit(Backend backend) {
  int n = 0;
  for (const int64_t d : {64, 128, 256})
    for (const int64_t queries : {128, 100, 37}) {
      Problem p = one_head(problem(queries, 6 * 128, d, ++n % 2 ? DType::bf16 : DType::fp16));
      p.own["keep"] = {0};
      p.seed = static_cast<uint64_t>(n);
      p.finish();
      // A direction common to all queries, so that the kept blocks matter; blocks of K are
      // self-similar.
      HostTensors in = draw_inputs(p, predict().inputs(p));
      for (std::size_t i = 3; i < in.at("q").data.size(); i += static_cast<std::size_t>(d)) {
        float& x = in.at("q").data[i];
        x = round_to(p.dtype, x + 2);
      }
      for (std::size_t i = 0; i < in.at("k").data.size(); ++i) {
        const auto column = i % static_cast<std::size_t>(d), row = i / static_cast<std::size_t>(d);
        in.at("k").data[i] = column == 3 ? float(row / 64 % 5) : float(column % 2);
      }
      const auto similarity = static_cast<float>(mean_similarity(p, in).q);
      INFO(p.text() << ", similarity " << similarity);
      for (const float asked : {similarity, std::nextafter(similarity, 2.0f)}) {
        p.own["similarity"] = {double{asked}};
        Case c(p, predict());
        c.inputs = in;
        c.expected = predict().reference(p, in, {});
        const int64_t blocks = chosen_blocks(p, in)->shape()[3];
        CHECK((kept_blocks(*chosen_blocks(p, in), 0) == blocks) == (asked > similarity));
        CHECK(run_step(s4_predict(), c, backend) == "");
      }
    }
  return n;
}

// Scores of blocks, given by each block's level: of one sign, of both, ties, and more than 64 of
// them, the number in shared memory at a time.
int levels(Backend backend) {
  using Level = float (*)(int n);
  constexpr Level kLevels[] = {
      [](int) { return 1.0f; }, [](int n) { return 1 + float(n % 7) / 8; },  // one sign, with ties
      [](int n) { return float(n * 37 % 64) / 16 - 2; },  // both signs, and 0
      [](int n) { return n % 3 == 0 ? 3.0f : float(-n); }};  // few large ones
  int n = 0;
  for (const Level level : kLevels)
    for (const int blocks : {1, 33, 70})
      for (const char* rule : {"keep", "keep_mass"}) {
        Problem p = one_head(problem(256, 128 * blocks, 64, DType::bf16));
        // A scale at which some weights are 0.
        constexpr double kAmounts[] = {0.3, 0.05, 1, 0.9, 0.6};
        p.own[rule] = {kAmounts[n % 5]};
        p.own["similarity"] = {0};
        p.softmax_scale = ++n % 4 < 3 ? 8 : 0.05;
        p.causal = n % 7 == 0;
        p.finish();
        Case c(p, predict());
        // Channel 0 has the level. Channel 2 has mean 0 and large values where the level is low, so
        // that O depends on each kept block.
        const auto fill = [](HostTensor& t, auto level_of, auto swing_of) {
          for (std::size_t row = 0; row < t.data.size() / 64; ++row) {
            float* const x = &t.data[64 * row];
            std::fill(x, x + 64, 0.0f);
            x[0] = level_of(static_cast<int>(row / 128));
            x[2] = swing_of(x[0], row % 2 == 0 ? 1 : -1);
          }
        };
        fill(
            c.inputs.at("q"), [](int block) { return block == 0 ? 2.0f : -1.0f; },
            [](float, int) { return 2.0f; });
        fill(c.inputs.at("k"), level, [](float x, int sign) { return float(sign) * (8 - 2 * x); });
        c.expected = predict().reference(p, c.inputs, {});
        INFO(p.text());
        CHECK(run_step(s4_predict(), c, backend) == "");
      }
  return n;
}

// More key blocks than have their scores in shared memory.
void long_sequences(Backend backend) {
  for (const char* rule : {"keep", "keep_mass"}) {
    Problem p = problem(140, 128 * (kScoresInShared + 6) - 5, 64, DType::bf16);
    p.heads = backend == Backend::gpu ? 2 : 1, p.kv_heads = 1;
    p.own["similarity"] = {0};
    p.own[rule] = {0.004};
    p.finish();
    INFO(p.text());
    CHECK(run_step(s4_predict(), p, backend) == "");
  }
}

}  // namespace

TEST_CASE("similarities at the limit are bitwise those of the host", "[emulated]") {
  CHECK(similarities_at_the_limit(Backend::emulated) == 9);
}
TEST_CASE("the threshold search agrees with a sort", "[emulated]") {
  CHECK(levels(Backend::emulated) == 24);
}
TEST_CASE("scores of long sequences lie in global memory", "[emulated]") {
  long_sequences(Backend::emulated);
}
TEST_CASE("choices at the limit and of long sequences on the GPU", "[gpu]") {
  similarities_at_the_limit(Backend::gpu);
  levels(Backend::gpu);
  long_sequences(Backend::gpu);
}
