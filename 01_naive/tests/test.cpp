// Every step of chapter 01 is correct on every shape it accepts, on both back ends.
#include "01_naive/host/algorithm.h"
#include "device/roofline.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

// some are not multiples of 8
const std::vector<int64_t> kHeadDims{8, 64, 40, 128, 72, 1, 33, 192};
const std::vector<DType> kDTypes{DType::bf16, DType::fp16, DType::fp32};

Eigen::MatrixXd head(const HostTensor& t, int64_t b, int64_t h) {
  using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  return Eigen::Map<const RowMajor>(t.row(b, h, 0), t.spec.shape[2], t.spec.shape[3])
      .cast<double>();
}

}  // namespace

// Every step accepts every head dim, dtype, mask and length of these tests, except the steps with
// 16-bit tiles, which need fp16 or bf16 and head dims that are a multiple of 8.
bool attn::tests::promised(const Step& step, const Problem& p) {
  return plain(p) && (!one_of_steps(step, {"v7_vector_loads", "v8_mma", "v9_warp_tiles",
                                           "v10_ldmatrix", "v11_vectorised", "v12_cp_async"}) ||
                      (p.dtype != DType::fp32 && p.head_dim % 8 == 0));
}

TEST_CASE("forward steps match the reference on short problems", "[emulated]") {
  Counts ran;
  int n = 0;
  covering_problems(kShortLengths, kHeadDims, kDTypes, [&](Problem p) {
    ran += check_steps("forward", p, Backend::emulated, in_turn, turn(n));
    ++n;
  });
  CHECK(ran.least('v') >= 13);
}

// v4_tiled does not run on long rows: its blocks have 1024 threads, and the emulator switches
// fibers at each barrier. It would take as long as all other steps together.
bool on_long_rows(const Step& step, int number) {
  return step.name != "v4_tiled" && in_turn(step, number);
}

TEST_CASE("forward steps match the reference on long problems", "[emulated]") {
  check_steps("forward", one_head(problem(239, 239, 64, DType::bf16, InputKind::needle)),
              Backend::emulated);
  int number = 0;
  for (const int n : {511, 512, 799})
    check_steps("forward", one_head(problem(n, n, 64, DType::bf16, InputKind::needle)),
                Backend::emulated, on_long_rows, number++);
  Problem wide = problem(5, 3000, 256, DType::fp16, InputKind::peaked);
  check_steps("forward", wide, Backend::emulated,
              [](const Step& step, int) { return step.name != "v4_tiled"; });
}

TEST_CASE("softmax rows longer than shared memory match the reference", "[emulated]") {
  check_steps("forward", one_head(problem(2, 60001, 8, DType::bf16, InputKind::needle)),
              Backend::emulated);
}

TEST_CASE("backward steps match the reference on short problems", "[emulated]") {
  Counts ran;
  covering_problems(kShortLengths, kHeadDims, kDTypes,
                    [&](Problem p) { ran += check_steps("backward", p, Backend::emulated); });
  CHECK(ran.text() == "b1_global 80, b2_cublas 80");
}

TEST_CASE("the textbook algorithm matches the reference", "[emulated]") {
  Problem p = problem(37, 53, 24, DType::fp32);
  p.causal = true;
  p.finish();
  const HostTensors in = draw_inputs(p, backward().inputs(p));
  const auto q = head(in.at("q"), 0, 1), k = head(in.at("k"), 0, 1), v = head(in.at("v"), 0, 1);
  const naive::Forward forward = naive::forward(q, k, v, p.softmax_scale, true);
  const naive::Gradients gradients =
      naive::backward(q, k, v, forward.p, head(in.at("do"), 0, 1), p.softmax_scale);
  const auto distance = [](const Expected& e, const Eigen::MatrixXd& m) {
    double largest = 0;
    for (std::size_t r = 0; r < e.rows.size(); ++r)
      for (int64_t c = 0; e.rows[r].h == 1 && c < e.spec.columns(); ++c)
        largest =
            std::max(largest, std::abs(e.reference[r * static_cast<std::size_t>(e.spec.columns()) +
                                                   static_cast<std::size_t>(c)] -
                                       m(e.rows[r].i, c)));
    return largest;
  };
  const auto o = forward_reference(p, in, {});
  CHECK(distance(o[0], forward.o) < 1e-12);
  CHECK(distance(o[1], forward.lse) < 1e-12);
  const auto g = backward_reference(p, in, {});
  CHECK(distance(g[0], gradients.dq) < 1e-12);
  CHECK(distance(g[1], gradients.dk) < 1e-12);
  CHECK(distance(g[2], gradients.dv) < 1e-12);
}

TEST_CASE("every schedule gives the same bits", "[emulated]") {
  for (const Step& step : chapter().steps) {
    Problem p = problem(70, 70, 40, DType::bf16);
    p.finish();
    check_schedules(step, p);
  }
}

TEST_CASE("steps refuse unsupported problems and say why", "[emulated]") {
  Problem p = problem(8, 8, 7, DType::bf16);
  p.finish();
  CHECK(step_named("v10_ldmatrix").refuses(p).value().find("multiple of 8") != std::string::npos);
  CHECK_FALSE(step_named("v1_global").refuses(p));
  p = problem(8, 8, 64, DType::fp32);
  p.finish();
  CHECK(refusal(step_named("v10_ldmatrix"), p).value().find("fp16 and bf16") != std::string::npos);
  p = problem(8, 8, 64, DType::bf16);
  p.batch = 70000;
  p.finish();
  for (const Step& s : chapter().steps) {
    INFO(s.name);
    CHECK(s.refuses(p).has_value());  // batch * heads exceeds gridDim.z
  }
  p = problem(1, 600000, 8, DType::bf16);
  p.finish();
  CHECK(step_named("v1_global").refuses(p).value().find("--seqlen-k") != std::string::npos);
  CHECK_FALSE(step_named("v2_coalesced").refuses(p));
}

TEST_CASE("cost models match the README", "[emulated]") {
  Problem p = problem(4096, 4096, 128, DType::bf16);
  p.batch = 4, p.heads = 16, p.kv_heads = 16;
  p.finish();
  const double scores = 64.0 * 4096 * 4096;
  const Cost v10 = step_named("v10_ldmatrix").cost(p);
  REQUIRE(v10.size() == 3);
  CHECK(v10[0].hbm_write == 4 * scores);  // S: fp32
  CHECK(v10[1].hbm_read == 4 * scores);
  CHECK(v10[1].hbm_write == 2 * scores);  // P: 16 bits
  CHECK(v10[0].tensor_flop + v10[2].tensor_flop == forward().flop(p));
  // From v3 on S is read once; from v6 on P has 2 bytes per element.
  CHECK(step_named("v3_warp_softmax").cost(p)[1].hbm_read == 4 * scores);
  CHECK(step_named("v5_register_tiles").cost(p)[1].hbm_write == 4 * scores);
  CHECK(step_named("v6_p_16bit").cost(p)[1].hbm_write == 2 * scores);
  CHECK(step_named("v7_vector_loads").cost(p)[0].fp32_flop == forward().flop(p) / 2);
  CHECK(step_named("v1_global").cost(p)[1].hbm_read == 3 * 4 * scores);
  // With tensor cores, the traffic of S and P is the limit.
  CHECK(predict(v10, datasheet_roofs(*find_gpu("h200")), p.dtype).binding == "HBM");
}

TEST_CASE("all steps match the reference on the GPU", "[gpu]") {
  Counts ran;
  covering_problems(kLengths, kHeadDims, kDTypes, [&](Problem p) {
    ran += check_steps("forward", p, Backend::gpu);
    ran += check_steps("backward", p, Backend::gpu);
  });
  CHECK(ran.least('v') >= 56);
  CHECK(ran.least('b') >= 110);
  check_steps("forward", problem(2, 60001, 8, DType::bf16, InputKind::needle), Backend::gpu);
}

TEST_CASE("the two back ends agree", "[gpu]") {
  Problem p = problem(203, 239, 64, DType::bf16, InputKind::needle);
  p.causal = true;
  p.finish();
  for (const Step& step : chapter().steps) check_back_ends_agree(step, p);
}

TEST_CASE("1000 repeats give the same bits", "[gpu]") {
  Problem p = problem(203, 203, 64, DType::bf16);
  p.finish();
  for (const Step& step : chapter().steps) check_gpu_repeats(step, p);
}

TEST_CASE("tensors with more than 2^31 elements match the reference", "[gpu][large]") {
  // S and P have more than 2^31 elements. The last rows of the last head are among those compared.
  Problem p = problem(8192, 8192, 64, DType::bf16);
  p.batch = 3, p.heads = 11, p.kv_heads = 11;
  p.finish();
  const Operation& op = forward();
  const HostTensors inputs = draw_inputs(p, op.inputs(p));
  Session session(p, op, Backend::gpu, inputs);
  const auto expected = op.reference(p, inputs, {.full = false, .budget = 1e7});
  for (const char* name :
       {"v5_register_tiles", "v9_warp_tiles", "v10_ldmatrix", "v12_cp_async", "v13_cublas"}) {
    INFO(name);
    const Step& step = step_named(name);
    if (memory_need(p, op, step).total() > static_cast<double>(free_bytes(Backend::gpu))) {
      skipped(step.name + " needs more memory than there is: " + p.text());
      continue;
    }
    REQUIRE(session.prepare(step).ok());
    REQUIRE(session.launch().ok());
    CHECK_FALSE(session.damage());
    const HostTensors out = session.outputs();
    for (const Expected& e : expected) CHECK(check(out.at(e.spec.name), e).failure == "");
  }
}
