// A new operation: inputs, option, reference and a step in one file. The chapter program supports
// it.
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "check/operation.h"
#include "check/reference_rows.h"
#include "run/runner.h"
#include "tests/catch.h"

#define ATTN_EMULATED
#include "attn/kernel.h"

namespace {
using namespace attn;
bool weights_forgotten = false;  // a planted fault

// m = sum_j w_j |x_j|^power / columns, one thread per row of x.
__global__ void row_mean(const float* x, const float* w, float* m, int rows, int columns,
                         float power) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= rows) return;
  float sum = 0;
  for (int j = 0; j < columns; ++j)
    sum += (weights_forgotten ? 1 : w[j]) * std::pow(std::abs(x[row * columns + j]), power);
  m[row] = sum / static_cast<float>(columns);
}
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const auto rows = static_cast<unsigned>(p.batch * p.heads * p.seqlen_q);
  return launch_kernel(row_mean, dim3((rows + 31) / 32), dim3(32), 0, args.stream,
                       args.in<float>("x"), args.in<float>("weights"), args.out<float>("m"), rows,
                       p.seqlen_k, p.own.at("power")[0]);
}
std::vector<TensorSpec> inputs(const Problem& p) {
  return {{"x", {p.batch, p.heads, p.seqlen_q, p.seqlen_k}, DType::fp32},
          {"weights", {1, 1, 1, p.seqlen_k}, DType::fp32}};
}
std::vector<TensorSpec> output(const Problem& p) {
  return {{"m", {p.batch, p.heads, p.seqlen_q, 1}, DType::fp32}};
}
std::vector<Expected> reference(const Problem& p, const HostTensors& in, Selection selection) {
  const std::vector<detail::HeadRows> pieces = detail::select_rows(p, selection);
  Expected e = expected_rows(output(p)[0], detail::first_rows(pieces).back(), 1e-5, true);
  std::size_t at = 0;
  for (const auto& [b, h, rows] : pieces)
    for (const int64_t i : rows) {
      Eigen::VectorXd terms(p.seqlen_k);
      for (int64_t j = 0; j < p.seqlen_k; ++j)
        terms[j] = in.at("weights").row(0, 0, 0)[j] *
                   std::pow(std::abs(in.at("x").row(b, h, i)[j]), p.own.at("power")[0]) /
                   double(p.seqlen_k);
      const Eigen::Matrix<double, 1, 1> mean{terms.sum()};
      detail::store(e, at++, {b, h, i}, mean, mean.cast<float>(), terms.cwiseAbs2(), 0);
    }
  return {e};
}
const Operation operation{.name = "row_mean",
                          .inputs = inputs,
                          .saved = [](auto&) { return std::vector<TensorSpec>(); },
                          .outputs = output,
                          .flop = [](auto&) { return 0.0; },
                          .reference = reference,
                          .matrix = true,
                          .own = {{.name = "power",
                                   .lacking = "power",
                                   .help = "of the mean (2)",
                                   .kind = Feature::Kind::number,
                                   .least = 1,
                                   .most = 9,
                                   .otherwise = 2,
                                   .everywhere = true}}};
const Chapter test_chapter{"09_row_mean",
                           "the test's",
                           {{.name = "v1_thread",
                             .operation = &operation,
                             .idea = "a row a thread",
                             .support = "fp32",
                             .refuses = [](auto&) { return std::nullopt; },
                             .workspaces = [](auto&) { return std::vector<Workspace>(); },
                             .cost = [](auto&) { return Cost{{.name = "mean", .hbm_read = 1}}; },
                             .launch = {nullptr, launch}}}};
}  // namespace

TEST_CASE("an operation of a chapter's own goes through the whole program", "[operation]") {
  const auto run = [](std::vector<const char*> options) {
    options.insert(options.begin(),
                   {"09_row_mean", "--device", "emulated", "--json", "row_mean.json"});
    return run_chapter(test_chapter, static_cast<int>(options.size()), options.data());
  };
  CHECK(run({"--rows", "77", "--cols", "203", "--power", "3"}) == 0);
  const nlohmann::json j = nlohmann::json::parse(std::ifstream("row_mean.json"));
  CHECK(
      (j["problem"]["own"]["power"][0] == 3 && j["steps"][0]["verdicts"][0]["rows_checked"] == 77));
  CHECK(run({"--rows", "5", "--power", "0"}) == 2);  // out of range
  CHECK(run({"--rows", "5", "--softcap", "9"}) == 2);  // a feature of attention
  CHECK(run({"--operation", "softmax"}) == 2);  // from another chapter
  weights_forgotten = true;
  CHECK(run({"--rows", "77", "--cols", "203"}) == 1);
}
