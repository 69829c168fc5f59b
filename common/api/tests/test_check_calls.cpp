// The reference, checker and cost model of attention_check.h.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "api/attention_check.h"
#include "api/tests/calls.h"
#include "check/inputs.h"
#include "tests/catch.h"

namespace attn::tests {
namespace {

attn_problem small(int64_t rows, int64_t keys) {
  attn_problem p;
  attn_problem_defaults(&p);
  p.backend = ATTN_EMULATED, p.dtype = ATTN_BF16;
  p.heads = 2, p.kv_heads = 1, p.seqlen_q = rows, p.seqlen_k = keys, p.head_dim = 64;
  return p;
}

std::vector<double> drawn(int64_t count, uint64_t stream) {
  std::vector<double> x(static_cast<std::size_t>(count));
  for (std::size_t n = 0; n < x.size(); ++n) x[n] = normal(1, stream, n);
  return x;
}

}  // namespace

TEST_CASE("attn_reference is the textbook formula in double", "[api]") {
  const attn_problem p = small(3, 5);
  const std::vector<double> q = drawn(2 * 3 * 64, 1), k = drawn(5 * 64, 2), v = drawn(5 * 64, 3);
  std::vector<double> o(q.size()), lse(6);
  attn_doubles t{};
  t.size = sizeof t, t.q = q.data(), t.k = k.data(), t.v = v.data(), t.o = o.data();
  t.lse = lse.data();
  REQUIRE(attn_reference(&p, &t) == ATTN_OK);
  for (std::size_t row = 0; row < 6; ++row) {
    double weights[5], sum = 0, expected = 0;
    for (std::size_t j = 0; j < 5; ++j) {
      double score = 0;
      for (std::size_t c = 0; c < 64; ++c) score += q[row * 64 + c] * k[j * 64 + c];
      sum += weights[j] = std::exp(score / 8);
    }
    for (std::size_t j = 0; j < 5; ++j) expected += weights[j] / sum * v[j * 64 + 7];
    CHECK(std::abs(o[row * 64 + 7] - expected) < 1e-14);
    CHECK(std::abs(lse[row] - std::log(sum)) < 1e-14);
  }
  t.q = nullptr;
  CHECK(attn_reference(&p, &t) == ATTN_INVALID_VALUE);
  CHECK(std::string(attn_last_error()) == "q: is null");
  t.size = 1;
  CHECK(attn_reference(&p, &t) == ATTN_INVALID_VALUE);
  CHECK(attn_reference(nullptr, &t) == ATTN_INVALID_VALUE);
}

TEST_CASE("attn_check draws inputs and judges outputs", "[api]") {
  const attn_problem p = small(40, 70);
  attn_check* check = nullptr;
  REQUIRE(attn_check_begin("forward", &p, "random", 3, &check) == ATTN_OK);
  const std::string tensors = attn_check_tensors(check);
  CHECK(tensors == "in k bf16 1 1 70 64\nin q bf16 1 2 40 64\nin v bf16 1 1 70 64\n"
                   "out o bf16 1 2 40 64\nout lse fp32 1 2 40\n");
  CallTensors call{Backend::emulated, {}, {}};
  for (const auto& [name, elements] :
       {std::pair{"q", 2 * 40 * 64}, std::pair{"k", 70 * 64}, std::pair{"v", 70 * 64}}) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(elements) * 2);
    REQUIRE(attn_check_input(check, name, bytes.data(), bytes.size()) == ATTN_OK);
    call.give(name, bytes);
  }
  call.make("o", 2 * 40 * 64 * 2);
  call.make("lse", 2 * 40 * 4);
  REQUIRE(run(api::Call::forward, p, call.tensors) == "");
  std::vector<std::byte> o = call.bytes("o");
  int pass = 0;
  char text[4096];
  const auto judged = [&] {
    return attn_check_output(check, "o", o.data(), o.size(), &pass, text, sizeof text, nullptr);
  };
  REQUIRE(judged() == ATTN_OK);
  CHECK(pass == 1);
  std::memset(o.data() + 39 * 128, 0, 128);  // the last row of head 0
  REQUIRE(judged() == ATTN_OK);
  CHECK(pass == 0);
  CHECK(std::string(text).find("o (b 0, h 0, row 39") == 0);
  CHECK(attn_check_output(check, "o", o.data(), 7, &pass, text, sizeof text, nullptr) ==
        ATTN_INVALID_VALUE);
  CHECK(std::string(attn_last_error()) == "o: 7 bytes, must be 10240");
  CHECK(attn_check_input(check, "x", o.data(), 2) == ATTN_INVALID_VALUE);
  attn_check_end(check);
  attn_check_end(nullptr);
  CHECK(attn_check_begin("forward", &p, "far", 3, &check) == ATTN_INVALID_VALUE);
  CHECK(std::string(attn_last_error()) ==
        "inputs far: must be random, needle, peaked or outlier");
}

TEST_CASE("attn_cost and attn_describe say what a step costs and takes", "[api]") {
  attn_problem p = small(1024, 1024);
  char text[4096];
  REQUIRE(attn_cost("forward", &p, "h200", text, sizeof text, nullptr) == ATTN_OK);
  CHECK(std::string(text).find("\"useful_flop\":536870912.0") != std::string::npos);
  CHECK(attn_cost("forward", &p, "abacus", text, sizeof text, nullptr) == ATTN_INVALID_VALUE);
  p.step = "06_flash_v3_hopper/v14_tuned", p.head_dim = 96;
  CHECK(attn_cost("forward", &p, nullptr, text, sizeof text, nullptr) == ATTN_UNSUPPORTED);
  REQUIRE(attn_describe("04_flash_v2/b8_deterministic", text, sizeof text, nullptr) == ATTN_OK);
  CHECK(std::string(text).find("\"deterministic\":true") != std::string::npos);
  CHECK(attn_describe("none", text, sizeof text, nullptr) == ATTN_INVALID_VALUE);
}

TEST_CASE("memory for language bindings", "[api]") {
  void* memory = nullptr;
  REQUIRE(attn_allocate(ATTN_EMULATED, 5, &memory) == ATTN_OK);
  CHECK(reinterpret_cast<std::uintptr_t>(memory) % 256 == 0);
  attn_free(ATTN_EMULATED, memory);
  CHECK(attn_allocate(7, 5, &memory) == ATTN_INVALID_VALUE);
  CHECK(attn_allocate(ATTN_EMULATED, SIZE_MAX, &memory) == ATTN_DEVICE_ERROR);
  CHECK(attn_allocate(ATTN_EMULATED, 5, nullptr) == ATTN_INVALID_VALUE);
}

}  // namespace attn::tests
