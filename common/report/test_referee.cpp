// The counter check: honest launches, and launches that skipped work.
#include <string>
#include <vector>

#include "report/referee.h"
#include "report/test_files.h"
#include "tests/catch.h"

namespace {

using namespace attn::report;
using namespace attn::report::test;

// The required work of v1_global at B=4 H=16 N=2048 d=128 in bf16.
const Required kNeeded{4. * 128 * 2048 * 2048 * 64, 3. * 64 * 2048 * 128 * 2, 2e-4};

KernelCounters kernel(double tensor_ops, double ffma, double read, double seconds) {
  KernelCounters k;
  k.name = "scores_kernel";
  k.signature = "_ZN3gpu17v1_global_student13scores_kernelI13__nv_bfloat16EEvPKT_";
  k.values = {{"tensor_bf16_ops", tensor_ops}, {"ffma", ffma}, {"fadd", 0}, {"fmul", 0},
              {"hbm_read_bytes", read}, {"time_s", seconds}};
  return k;
}
const KernelCounters kHonest =
    kernel(kNeeded.flop / 2, kNeeded.flop / 4, kNeeded.input_bytes, 1e-2);

std::vector<std::string> judge(const std::vector<KernelCounters>& kernels) {
  return objections(kernels, kNeeded, "_student");
}
bool only(const std::vector<std::string>& found, const std::string& what) {
  return found.size() == 1 && found[0].find(what) != std::string::npos;
}

}  // namespace

TEST_CASE("the referee lets honest launches pass") {
  CHECK(judge({kHonest}).empty());
  // Half the work in each of two kernels.
  const KernelCounters half =
      kernel(kNeeded.flop / 4, kNeeded.flop / 8, kNeeded.input_bytes / 2, 5e-3);
  CHECK(judge({half, half}).empty());
  // A committed export of the shipped step: its counters suffice, but its name differs.
  const CounterFile v1 = read_counter_file(recorded("01_naive.v4_tensor_core.ncu.csv"));
  CHECK(objections(v1.kernels, {kNeeded.flop, kNeeded.input_bytes, 1e-4}, "_kernel").empty());
}

TEST_CASE("the referee objects to work that was not done") {
  KernelCounters k = kHonest;
  k.values["tensor_bf16_ops"] = 0;
  CHECK(only(judge({k}), "too few operations"));
  k = kHonest;
  k.values["hbm_read_bytes"] = kNeeded.input_bytes / 2;
  CHECK(only(judge({k}), "did not read its inputs"));
  k = kHonest;
  k.values["time_s"] = 1e-4;
  CHECK(only(judge({k}), "faster than the GPU can be"));
  k = kHonest;
  k.signature = "sm90_xmma_gemm_bf16bf16";
  CHECK(only(judge({k}), "is not a kernel of the exercise"));
}

TEST_CASE("a counter that is not there judges nothing") {
  KernelCounters k = kHonest;
  k.values = {{"hbm_read_bytes", kNeeded.input_bytes}};
  CHECK(judge({k}).empty());
}

TEST_CASE("what the referee cannot read is one line") {
  TemporaryFile file;
  CHECK(refusal_of([&] {
          return read_required(file.write(R"({"passed": true})"));
        }).find("speed is missing") != std::string::npos);
  CHECK(refusal_of([&] {
          return read_required(file.write(R"({"speed": {"required_flop": -1, "input_bytes": 3}})"));
        }).find("must not be below 0") != std::string::npos);
  const Required r =
      read_required(file.write(R"({"speed": {"required_flop": 7, "input_bytes": 3}})"));
  CHECK(r.flop == 7);
  CHECK(r.roof_s == 0);
}
