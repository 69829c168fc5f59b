// Each result is one line of JSON, written at once: a run that is cut off keeps what it has.
#include "host/measure.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "attn/error.h"
#include "check/operation.h"
#include "device/device.h"
#include "host/rank_model.h"
#include "host/rank_steps.h"
#include "ranks/gpus.h"
#include "ranks/sharded.h"
#include "run/options.h"

namespace attn::measure {
namespace {

using namespace ranks;
using nlohmann::json;

void print(const json& line) {
  fmt::print("{}\n", line.dump());
  std::fflush(stdout);
}

double median(std::vector<double> all, double quantile = 0.5) {
  std::ranges::sort(all);
  return all.empty() ? 0 : all[static_cast<std::size_t>(quantile * double(all.size() - 1))];
}
std::vector<double> slowest(const std::vector<RoundTime>& rounds) {
  std::vector<double> all;
  for (const RoundTime& r : rounds) all.push_back(r.slowest());
  return all;
}
double median_skew(const std::vector<RoundTime>& rounds) {
  std::vector<double> all;
  for (const RoundTime& r : rounds) all.push_back(r.skew());
  return median(all);
}

// Medians by rank, in us.
std::vector<double> by_rank(const std::vector<RoundTime>& rounds) {
  std::vector<double> medians;
  for (std::size_t r = 0; r < rounds.front().seconds.size(); ++r) {
    std::vector<double> all;
    for (const RoundTime& round : rounds) all.push_back(round.seconds[r]);
    medians.push_back(std::round(median(all) * 1e9) / 1e3);
  }
  return medians;
}
double median_overlap(const std::vector<RoundTime>& rounds) {
  std::vector<double> all;
  for (const RoundTime& r : rounds) all.push_back(r.overlap());
  return median(all);
}

// Options of the chapter's program, for GPUs.
Options parse(const char* command, const std::vector<std::string>& arguments) {
  std::vector<const char*> argv{chapter().name.c_str()};
  for (const std::string& a : arguments) argv.push_back(a.c_str());
  auto options = parse_options(chapter(), static_cast<int>(argv.size()), argv.data());
  if (!options) throw InputError(fmt::format("{}: takes the options of a problem", command));
  if (!options->problem.own.contains("devices"))
    throw InputError(fmt::format("{}: needs --devices 0,1,...", command));
  if (options->problem.own.contains("rank"))
    throw InputError(
        fmt::format("{}: releases all GPUs together, in one process: no --rank", command));
  if (!gpu_info().available)
    throw DeviceError(fmt::format("{}: no GPU ({})", command, gpu_info().error));
  return *options;
}

// The tensors of a problem on the first GPU. Inputs repeat a million normal numbers.
class Tensors {
 public:
  Tensors(const Problem& p, const Operation& op, Device device) : device_(device) {
    std::mt19937_64 random(p.seed);
    std::normal_distribution<float> normal;
    std::vector<float> numbers(1 << 20);
    for (float& x : numbers) x = normal(random);
    std::vector<std::byte> some(numbers.size() * static_cast<std::size_t>(size_of(p.dtype)));
    encode(p.dtype, numbers.data(), numbers.size(), some.data());
    for (const TensorSpec& spec : op.inputs(p)) {
      if (is_index(spec.dtype)) {
        HostTensor made = zeros(spec);
        spec.made(p, made);
        const std::vector<std::byte> bytes = to_bytes(made);
        add(spec.name, spec.bytes()).upload(bytes.data());
        continue;
      }
      DeviceBuffer& buffer = add(spec.name, spec.bytes());
      for (int64_t at = 0; at < spec.bytes(); at += static_cast<int64_t>(some.size()))
        buffer.upload(some.data(), at,
                      std::min(static_cast<int64_t>(some.size()), spec.bytes() - at));
    }
    for (const auto* specs : {&op.saved, &op.outputs})
      for (const TensorSpec& spec : (*specs)(p)) add(spec.name, spec.bytes()).poison();
  }
  DeviceBuffer& add(const std::string& name, int64_t bytes) {
    return buffers_.emplace_back(device_, name, bytes);
  }
  void bind(Arguments& args) const {
    for (const DeviceBuffer& b : buffers_) args.bind(b.name(), b.data());
  }
  // Rows of O, or of dQ, at its begin, middle and end.
  std::vector<float> sample(DType dtype) const {
    auto o = std::ranges::find(buffers_, "dq", &DeviceBuffer::name);
    if (o == buffers_.end()) o = std::ranges::find(buffers_, "o", &DeviceBuffer::name);
    const int64_t count = o->bytes() / size_of(dtype), some = std::min<int64_t>(count, 1 << 16);
    std::vector<float> all;
    for (const int64_t first : {int64_t{0}, (count - some) / 2 / 8 * 8, count - some}) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(some * size_of(dtype)));
      o->download(bytes.data(), first * size_of(dtype), some * size_of(dtype));
      std::vector<float> numbers(static_cast<std::size_t>(some));
      decode(dtype, bytes.data(), numbers.size(), numbers.data());
      all.insert(all.end(), numbers.begin(), numbers.end());
    }
    return all;
  }

 private:
  Device device_;
  std::vector<DeviceBuffer> buffers_;
};

double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    error += std::pow(double{a[i]} - b[i], 2), size += std::pow(double{b[i]}, 2);
  return std::sqrt(error / size);  // NaN if anything was not written
}

// The step that one GPU runs: of decoding the chapter's last without ranks, of a forward pass the
// ring with one rank, whose kernel is chapter 06's, of a backward pass chapter 06's b7.
struct OneGpu {
  std::string step;
  double seconds;
  std::vector<float> o;
};
OneGpu time_one(const Options& options, Device device, Tensors& tensors) {
  Problem p = options.problem;
  const bool decodes = options.operation == &decode(), backwards = options.operation == &backward();
  p.own["devices"] = {double(device.ordinal)};
  if (decodes) p.own.erase("devices");
  const std::string begin = decodes ? "v13_" : backwards ? "p5_" : "p2_";
  const Step& step = *std::ranges::find_if(
      chapter().steps, [&](const Step& s) { return s.name.starts_with(begin); });
  const std::string& name = step.name;
  Arguments args(p, device);
  tensors.bind(args);
  if (backwards)  // the forward pass
    if (const Status s = step.prepare.gpu(args); !s.ok()) throw DeviceError(s.message);
  if (!decodes && !backwards) {
    Measuring m{.most_rounds = options.repeat};
    measuring = &m;
    const Status status = step.launch.gpu(args);
    measuring = nullptr;
    if (!status.ok()) throw DeviceError(status.message);
    return {name, median(slowest(m.rounds[0])), tensors.sample(p.dtype)};
  }
  for (const Workspace& w : backwards ? workspaces_of_backward(p) : step.workspaces(p))
    args.bind(w.name, tensors.add(w.name, w.bytes).data());
  if (decodes)
    if (const Status s = step.prepare.gpu(args); !s.ok()) throw DeviceError(s.message);
  const LaunchFunction launch = backwards ? rank_steps::one_gpu_backward().gpu : step.launch.gpu;
  GpuTimer timer;
  std::vector<double> seconds;
  for (int n = -3; n < options.repeat; ++n) {
    Sample sample;
    if (const Status s = timer.time(args, launch, sample); !s.ok()) throw DeviceError(s.message);
    if (n >= 0) seconds.push_back(sample.seconds);
  }
  return {backwards ? "06_flash_v3_hopper/b7_dependent_launches" : name, median(seconds),
          tensors.sample(p.dtype)};
}

}  // namespace

int ranks(const std::vector<std::string>& arguments) {
  const Options options = parse("--measure-ranks", arguments);
  const std::vector<int> devices = devices_of(options.problem);
  // One GPU is not as fast as the next: each of them computes the whole problem.
  std::vector<double> one_gpu_s;
  for (std::size_t n = devices.size(); n-- > 1;) {
    const Device other(Backend::gpu, devices[n]);
    const InUse in_use(other);
    Tensors tensors(options.problem, *options.operation, other);
    one_gpu_s.push_back(time_one(options, other, tensors).seconds);
  }
  const Device device(Backend::gpu, devices.front());
  const InUse in_use(device);
  Tensors tensors(options.problem, *options.operation, device);
  OneGpu one = time_one(options, device, tensors);
  one_gpu_s.push_back(one.seconds);
  one.seconds = std::accumulate(one_gpu_s.begin(), one_gpu_s.end(), 0.0) / double(devices.size());
  const auto [fastest, slowest_gpu] = std::ranges::minmax(one_gpu_s);
  int failures = 0;
  for (const Step& step : chapter().steps) {
    if (step.operation != options.operation || !takes(step, "devices")) continue;
    if (!options.steps.empty() && !std::ranges::count(options.steps, step.name)) continue;
    for (const char* transport : {"nccl", "copies"}) {
      Problem p = options.problem;
      const bool copies = transport[0] == 'c';
      if (p.own.contains("transport") && p.own.at("transport")[0] != double(copies)) continue;
      p.own["transport"] = {double(copies)};
      json line{{"measure", "ranks"},
                {"step", step.name},
                {"transport", transport},
                {"gpu", gpu_info().name},
                {"devices", devices},
                {"problem", p.text()},
                {"tokens_per_rank", double(p.seqlen_k) / double(devices.size())}};
      if (const auto reason = refusal(step, p)) {
        print((line["refused"] = *reason, line));
        continue;
      }
      Measuring m{.most_rounds = options.repeat};
      measuring = &m;
      Arguments args(p, device);
      tensors.bind(args);
      Status status;
      try {
        status = step.launch.gpu(args);
      } catch (const DeviceError& e) {
        status = Status::device_error(e.what());
      }
      measuring = nullptr;
      if (!status.ok()) {
        print((line["error"] = status.message, line));
        ++failures;
        continue;
      }
      const double whole = median(slowest(m.rounds[0])), launches = median(slowest(m.rounds[1]));
      const double transfers = median(slowest(m.rounds[2]));
      const auto us = [](double s) { return std::round(s * 1e9) / 1e3; };
      line.update(
          {{"one_gpu_step", one.step},
           {"one_gpu_us", us(one.seconds)},
           {"one_gpu_us_range", {us(fastest), us(slowest_gpu)}},
           {"us", us(whole)},
           {"us_quartiles",
            {us(median(slowest(m.rounds[0]), 0.25)), us(median(slowest(m.rounds[0]), 0.75))}},
           {"rounds", m.rounds[0].size()},
           {"skew_us", us(median_skew(m.rounds[0]))},
           {"us_by_rank", by_rank(m.rounds[0])},
           {"launches_us", us(launches)},
           {"launches_us_by_rank", by_rank(m.rounds[1])},
           {"transfers_us", us(transfers)},
           {"traced_us", us(median(slowest(m.rounds[3])))},
           {"overlap", median_overlap(m.rounds[3])},
           {"speedup", one.seconds / whole},
           {"efficiency", one.seconds / whole / double(devices.size())},
           {"bytes_per_rank", m.buffer_bytes},
           {"difference_from_one_gpu", difference(tensors.sample(p.dtype), one.o)}});
      if (const auto predicted =
              rank_model::predict(step.name, p, static_cast<int>(devices.size()),
                                  rank_model::with_memory_of(copies ? rank_model::nvlink_copies()
                                                                    : rank_model::nvlink_nccl(),
                                                             gpu_info().name)))
        line["predicted_us"] = us(predicted->seconds());
      print(line);
    }
  }
  return failures > 0 ? 4 : 0;
}

int links(const std::vector<std::string>& arguments) {
  const Options options = parse("--measure-links", arguments);
  const std::vector<int> devices = devices_of(options.problem);
  if (devices.size() < 2) throw InputError("--measure-links: needs two devices or more");
  int failures = 0;
  for (const auto& [transport, name] :
       {std::pair(Transport::nccl, "nccl"), {Transport::copies, "copies"}})
    for (int64_t bytes = 4096; bytes <= int64_t{1} << 28; bytes *= 4) {
      const Program ring{[=](Rank& rank) {
                           for (const char* buffer : {"from", "to"}) rank.allocate(buffer, bytes);
                         },
                         [=](Rank& rank) {
                           rank.wait(rank.exchange(
                               "ring", {send_to(rank.next(), rank.buffer("from"), bytes),
                                        receive_from(rank.previous(), rank.buffer("to"), bytes)}));
                         }};
      Measuring m{.most_rounds = options.repeat};
      measuring = &m;
      json line{{"measure", "link"},
                {"transport", name},
                {"gpu", gpu_info().name},
                {"devices", devices},
                {"bytes", bytes}};
      Status status;
      try {
        status = run_on_gpus(devices, transport, ring, [](Rank&) {}, 30, {});
      } catch (const DeviceError& e) {
        status = Status::device_error(e.what());
      }
      measuring = nullptr;
      if (!status.ok()) {
        print((line["error"] = status.message, line));
        ++failures;
        break;
      }
      const double seconds = median(slowest(m.rounds[0]));
      line.update({{"us", seconds * 1e6},
                   {"gb_per_s", double(bytes) / seconds * 1e-9},
                   {"skew_us", median_skew(m.rounds[0]) * 1e6}});
      print(line);
    }
  return failures > 0 ? 4 : 0;
}

}  // namespace attn::measure
