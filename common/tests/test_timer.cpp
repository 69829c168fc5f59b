/// \file
/// The extent of a measured time. GPU only: a timing test that compares two medians, which would
/// differ by the host's 200 microseconds.
#include <algorithm>
#include <cmath>
#include <chrono>
#include <thread>
#include <vector>

#include "device/device.h"
#include "tests/catch.h"

namespace {

using namespace attn;

DeviceBuffer* buffer = nullptr;
Status fill(const Arguments&) {
  buffer->poison();
  return Status::success();
}
Status fill_by_a_slow_host(const Arguments& arguments) {
  std::this_thread::sleep_for(std::chrono::microseconds(200));
  return fill(arguments);
}
Status fill_by_a_very_slow_host(const Arguments& arguments) {
  std::this_thread::sleep_for(std::chrono::milliseconds(3));
  return fill(arguments);
}

Status fill_in_three_phases(const Arguments& arguments) {
  for (const char* phase : {"first", "second", "third"}) {
    arguments.phase(phase);
    buffer->poison();
  }
  return Status::success();
}
Status fill_in_one_phase(const Arguments& arguments) {
  arguments.phase("all");
  return fill(arguments);
}

double median_seconds(GpuTimer& timer, LaunchFunction launch) {
  Problem problem;
  Arguments arguments(problem, Backend::gpu);
  std::vector<double> seconds;
  for (int i = 0; i < 21; ++i) {
    Sample sample;
    REQUIRE(timer.time(arguments, launch, sample).ok());
    CHECK(sample.launch_hidden);
    seconds.push_back(sample.seconds);
  }
  std::nth_element(seconds.begin(), seconds.begin() + 10, seconds.end());
  return seconds[10];
}

}  // namespace

TEST_CASE("what the host needs to launch is in nobody's time", "[gpu]") {
  if (!gpu_info().available) return;
  DeviceBuffer memory(Backend::gpu, "memory", 256 << 20);
  buffer = &memory;
  GpuTimer timer;
  const double plain = median_seconds(timer, fill);
  INFO("plain " << plain << " s");
  CHECK(std::abs(median_seconds(timer, fill_by_a_slow_host) - plain) < 30e-6);
  CHECK(std::abs(median_seconds(timer, fill_by_a_very_slow_host) - plain) < 30e-6);
  buffer = nullptr;
}

TEST_CASE("phases are timed in launches of their own", "[gpu]") {
  if (!gpu_info().available) return;
  DeviceBuffer memory(Backend::gpu, "memory", 1 << 20);
  buffer = &memory;
  GpuTimer timer;
  Problem problem;
  Arguments arguments(problem, Backend::gpu);
  Sample sample;
  // The whole launch: no events between phases, so no phase times.
  REQUIRE(timer.time(arguments, fill_in_three_phases, sample).ok());
  CHECK(sample.phases.empty());
  REQUIRE(timer.time_phases(arguments, fill_in_three_phases, sample).ok());
  REQUIRE(sample.phases.size() == 3);
  CHECK(sample.phases[1].first == "second");
  double sum = 0;
  for (const auto& [name, seconds] : sample.phases) {
    CHECK(seconds > 0);
    sum += seconds;
  }
  CHECK(std::abs(sum - sample.seconds) < 1e-6);
  // For a launch with one phase both are equal.
  REQUIRE(timer.time(arguments, fill_in_one_phase, sample).ok());
  REQUIRE(sample.phases.size() == 1);
  CHECK(sample.phases[0].second == sample.seconds);
  buffer = nullptr;
}
