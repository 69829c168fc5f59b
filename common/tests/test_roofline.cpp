// Predictions from costs, the datasheet of a device, and statistics of timings.
#include "device/roofline.h"
#include "attn/step.h"

#include <string>

#include "run/results.h"
#include "tests/catch.h"

namespace {

using namespace attn;

Roofs roofs() {
  Roofs r;
  r.gpu = "by hand";
  r.hbm_copy = {1000, "measured"}, r.hbm_read = {2000, "measured"}, r.l2 = {5000, "measured"};
  r.fp32 = {100, "measured"}, r.tensor_fp16 = {800, "measured"}, r.tensor_bf16 = {400, "measured"};
  r.exp = {10, "measured"};
  return r;
}

// A phase by named members, since the order of Phase's members may change.
Phase phase(const std::string& name, double tensor, double fp32, double exp, double read,
            double write, double l2 = 0) {
  Phase p;
  p.name = name;
  p.tensor_flop = tensor, p.fp32_flop = fp32, p.exp = exp;
  p.hbm_read = read, p.hbm_write = write, p.l2_bytes = l2;
  return p;
}

TEST_CASE("a phase takes as long as the resource that binds", "[roofline]") {
  const auto of = [](const Phase& p, DType dtype = DType::fp16) {
    return predict({p}, roofs(), dtype);
  };
  const auto check = [](const Prediction& p, double seconds, const std::string& binding) {
    CHECK(p.seconds == Approx(seconds));
    CHECK(p.binding == binding);
    REQUIRE(p.phases.size() == 1);
    CHECK(p.phases[0].seconds == Approx(seconds));
    CHECK(p.phases[0].binding == binding);
  };
  check(of(phase("fp32", 0, 200, 1, 10, 10)), 2, "FP32");
  check(of(phase("tensor", 1600, 0, 0, 10, 10)), 2, "tensor");
  check(of(phase("tensor", 1600, 0, 0, 10, 10), DType::bf16), 4, "tensor");
  check(of(phase("exp", 80, 10, 30, 10, 10)), 3, "exp");
  check(of(phase("L2", 0, 0, 0, 10, 10, 20000)), 4, "L2");
  // Equal reads and writes at the copy rate, the rest at the read rate.
  check(of(phase("read", 0, 0, 0, 4000, 0)), 2, "HBM");
  check(of(phase("write", 0, 0, 0, 0, 4000)), 4, "HBM");
  check(of(phase("copy", 0, 0, 0, 1000, 1000)), 2, "HBM");
  check(of(phase("both", 0, 0, 0, 3000, 1000)), 2 + 1, "HBM");
  check(of(phase("both", 0, 0, 0, 1000, 3000)), 2 + 2, "HBM");
}

TEST_CASE("phases add up and the step is bound by where most time goes", "[roofline]") {
  const Cost cost = {phase("scores", 0, 300, 0, 0, 0), phase("softmax", 0, 0, 0, 2000, 2000),
                     phase("output", 0, 200, 0, 0, 0)};
  const Prediction p = predict(cost, roofs(), DType::fp32);
  CHECK(p.seconds == Approx(3 + 4 + 2));
  CHECK(p.binding == "FP32");  // 5 of 9 seconds, in two phases
  REQUIRE(p.phases.size() == 3);
  CHECK(p.phases[1].name == "softmax");
  CHECK(p.phases[1].binding == "HBM");
  CHECK(modelled_bytes(cost) == 4000);
  CHECK(modelled_bytes({}) == 0);
  CHECK(predict({}, roofs(), DType::fp32).seconds == 0);
}

TEST_CASE("an unknown roof never binds", "[roofline]") {
  Roofs r = roofs();
  r.l2 = {0, "not stated"};
  const Prediction p = predict({phase("x", 0, 100, 0, 0, 0, 1e30)}, r, DType::fp16);
  CHECK(p.seconds == Approx(1));
  CHECK(p.binding == "FP32");
}

TEST_CASE("the roofs of a datasheet are its figures", "[roofline]") {
  for (const GpuSpec& spec : gpu_specs()) {
    const Roofs r = datasheet_roofs(spec);
    INFO(spec.name);
    CHECK(r.gpu == spec.full_name);
    CHECK(r.hbm_copy.rate == spec.hbm_bytes_per_s);
    CHECK(r.hbm_read.rate == spec.hbm_bytes_per_s);
    CHECK(r.fp32.rate == spec.fp32_flops);
    CHECK(r.tensor(DType::fp16).rate == spec.tensor_16bit_flops);
    CHECK(r.exp.rate == spec.exp2_per_s);
    CHECK(r.l2.rate == 0);
    CHECK(r.fp32.source.find("datasheet") != std::string::npos);
  }
}

TEST_CASE("devices find their datasheet by the name that CUDA gives them", "[roofline]") {
  const auto spec = [](const char* device) {
    const GpuSpec* s = spec_of_device(device);
    return s == nullptr ? std::string("none") : std::string(s->name);
  };
  CHECK(spec("NVIDIA H200") == "h200");
  CHECK(spec("NVIDIA H100 80GB HBM3") == "h100");
  CHECK(spec("NVIDIA H100 PCIe") == "h100-pcie");
  CHECK(spec("NVIDIA A100-SXM4-80GB") == "a100");
  CHECK(spec("NVIDIA A100-SXM4-40GB") == "a100-40gb");
  CHECK(spec("A100-SXM4-40GB") == "a100-40gb");  // older drivers
  CHECK(spec("NVIDIA B200") == "b200");
  CHECK(spec("NVIDIA L40S") == "l40s");
  CHECK(spec("NVIDIA L4") == "l4");
  CHECK(spec("NVIDIA GeForce RTX 4090") == "rtx4090");
  CHECK(spec("NVIDIA GeForce RTX 3090") == "rtx3090");
  CHECK(spec("Tesla V100-SXM2-32GB") == "v100");
  CHECK(spec("Tesla V100-SXM2-16GB") == "v100");
  // Not in the table, although their names contain a name of the table: their figures differ.
  CHECK(spec("NVIDIA L40") == "none");
  CHECK(spec("NVIDIA GeForce RTX 3090 Ti") == "none");
  CHECK(spec("NVIDIA GeForce RTX 4090 D") == "none");
  CHECK(spec("NVIDIA GeForce RTX 4090 Laptop GPU") == "none");
  CHECK(spec("NVIDIA GH200 480GB") == "none");
  CHECK(spec("NVIDIA GB200") == "none");
  CHECK(spec("NVIDIA A100X") == "none");
  CHECK(spec("NVIDIA H100 NVL") == "none");
  CHECK(spec("NVIDIA H200 NVL") == "none");
  CHECK(spec("NVIDIA A100 80GB PCIe") == "none");
  CHECK(spec("NVIDIA A100-PCIE-40GB") == "none");
  CHECK(spec("Tesla V100-PCIE-16GB") == "none");
  CHECK(spec("NVIDIA H100 80GB HBM3 MIG 1g.10gb") == "none");
  CHECK(spec("Quadro X") == "none");
  CHECK(spec("NVIDIA GeForce RTX 4080") == "none");
  CHECK(spec("") == "none");
}

TEST_CASE("a GPU without a step's instructions is named", "[roofline]") {
  Step step;
  for (const int any : {70, 75, 80, 90, 120}) CHECK_FALSE(lacks(step, "GPU", any));
  step.needs = kAmpere;
  CHECK(lacks(step, "Tesla T4", 75) ==
        "Tesla T4 (sm_75) has no mma.sync for bf16: this step needs sm_80 or later");
  for (const int later : {80, 86, 89, 90, 100}) CHECK_FALSE(lacks(step, "GPU", later));
  step.needs = kHopper;
  CHECK_FALSE(lacks(step, "NVIDIA H200", 90));
  for (const int other : {75, 80, 89, 100, 120})  // later GPUs do not have sm_90a's instructions
    CHECK(lacks(step, "GPU", other) ==
          "GPU (sm_" + std::to_string(other) + ") has no wgmma: this step needs sm_90a");
  step.needs = kHopperTarget;
  CHECK_FALSE(lacks(step, "NVIDIA H200", 90));
  CHECK(lacks(step, "GPU", 80) ==
        "GPU (sm_80) runs no code for sm_90a, which this step is compiled for");
}

TEST_CASE("statistics are NumPy's median and quartiles", "[roofline]") {
  const auto check = [](std::vector<double> seconds, double q1, double median, double q3,
                        double fastest) {
    const TimeStatistics s = statistics(seconds);
    CHECK(s.q1 == Approx(q1));
    CHECK(s.median == Approx(median));
    CHECK(s.q3 == Approx(q3));
    CHECK(s.fastest == fastest);
    CHECK(s.count == static_cast<int>(seconds.size()));
  };
  check({3}, 3, 3, 3, 3);
  check({2, 1}, 1.25, 1.5, 1.75, 1);
  check({5, 1, 4, 2, 3}, 2, 3, 4, 1);
  check({10, 40, 20, 30}, 17.5, 25, 32.5, 10);  // np.percentile([10, 20, 30, 40], [25, 50, 75])
  check({1, 1, 1, 100}, 1, 1, 25.75, 1);
}

TEST_CASE("the share of the roof is predicted over measured time", "[roofline]") {
  StepResult r;
  CHECK_FALSE(r.share_of_roof());
  r.time = statistics({4, 4, 4});
  CHECK_FALSE(r.share_of_roof());  // nothing predicted
  r.prediction.seconds = 3;
  REQUIRE(r.share_of_roof());
  CHECK(*r.share_of_roof() == Approx(0.75));
}

}  // namespace
