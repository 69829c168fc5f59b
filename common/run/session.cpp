#include "run/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <set>
#include <stdexcept>

namespace attn {

std::string bytes_text(double bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  int unit = 0;
  for (; bytes >= 1024 && unit < 6; ++unit) bytes /= 1024;
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.2f} {}", bytes, kUnits[unit]);
}

MemoryNeed memory_need(const Problem& p, const Operation& op, const Step& step) {
  MemoryNeed need;
  std::set<std::string> counted;  // counts an in-out tensor once
  for (const auto* specs : {&op.inputs, &op.saved, &op.outputs})
    for (const TensorSpec& t : (*specs)(p))
      if (counted.insert(t.name).second)
        need.tensors += static_cast<double>(DeviceBuffer::footprint(t.bytes()));
  for (const Workspace& w : step.workspaces(p)) {
    need.workspaces += static_cast<double>(DeviceBuffer::footprint(w.bytes));
    if (!need.workspace_text.empty()) need.workspace_text += " + ";
    need.workspace_text += w.name + " " + bytes_text(static_cast<double>(w.bytes));
  }
  return need;
}

void Session::restore(Given& g) {
  const auto period = static_cast<int64_t>(g.bytes.size());
  for (int64_t first = 0; first < g.buffer.bytes(); first += period)
    g.buffer.upload(g.bytes.data(), first, std::min(period, g.buffer.bytes() - first));
}

void Session::give(std::vector<Given>& all, const TensorSpec& spec, const HostTensor& tensor) {
  Given& g = all.emplace_back(DeviceBuffer(device_, spec.name, spec.bytes()),
                              to_bytes({spec, tensor.data, tensor.numbers}),
                              bytes_of(spec.dtype, spec.columns()), tensor.spec.layout);
  restore(g);
  arguments_.bind(spec.name, g.buffer.data());
}

Session::Session(const Problem& problem, const Operation& operation, Device device,
                 const HostTensors& inputs)
    : problem_(problem), operation_(operation), device_(device), arguments_(problem_, device) {
  for (const TensorSpec& spec : operation.inputs(problem)) {
    const HostTensor& tensor = inputs.at(spec.name);
    give(inputs_, spec, tensor);
    if (is_index(spec.dtype) || spec.made) planning_inputs_.emplace(spec.name, tensor);
  }
  for (const TensorSpec& spec : operation.saved(problem))
    saved_.emplace_back(device, spec.name, spec.bytes()).poison();
  for (const TensorSpec& spec : operation.outputs(problem)) {
    const auto given =
        std::ranges::find(inputs_, spec.name, [](const Given& g) { return g.buffer.name(); });
    if (given == inputs_.end()) {
      outputs_.emplace_back(device, spec.name, spec.bytes());
    } else {
      given->in_out = true;
      given->may_change = operation.changes(problem, inputs, spec.name);
    }
  }
  for (const auto* buffers : {&saved_, &outputs_})
    for (const DeviceBuffer& b : *buffers) arguments_.bind(b.name(), b.data());
}

void Session::replace(const HostTensors& inputs) {
  const std::vector<TensorSpec> specs = operation_.inputs(problem_);
  for (std::size_t n = 0; n < inputs_.size(); ++n) {
    const HostTensor& tensor = inputs.at(specs[n].name);
    inputs_[n].bytes = to_bytes({specs[n], tensor.data, tensor.numbers});
    inputs_[n].layout = tensor.spec.layout;
    if (inputs_[n].in_out)
      inputs_[n].may_change = operation_.changes(problem_, inputs, specs[n].name);
    restore(inputs_[n]);
  }
}

Status Session::prepare(const Step& step) {
  step_ = &step;
  captured_.reset();
  workspaces_.clear();
  workspace_saved_.clear();
  plan_.clear();
  for (const Workspace& w : step.workspaces(problem_)) {
    workspaces_.emplace_back(device_, w.name, w.bytes).poison();
    workspace_saved_.push_back(w.saved);
    arguments_.bind(w.name, workspaces_.back().data());
  }
  if (step.plan)
    for (const auto& [name, tensor] : step.plan(problem_, planning_inputs_))
      give(plan_, tensor.spec, tensor);
  if (!step.prepare) return Status::success();
  const InUse in_use(device_);
  const Status status = call(step.prepare);
  if (status.ok()) synchronize(device_);
  return status;
}

void Session::replan(const HostTensors& inputs) {
  if (!step_->plan) return;
  const HostTensors plan = step_->plan(problem_, inputs);
  for (Given& g : plan_) {
    std::vector<std::byte> bytes = to_bytes(plan.at(g.buffer.name()));
    if (bytes.size() != g.bytes.size())
      throw std::invalid_argument(g.buffer.name() + ": the plan has another size");
    g.bytes = std::move(bytes);
    restore(g);
  }
}

std::optional<double> Session::time_plan() const {
  if (!step_->plan) return std::nullopt;
  const auto begin = std::chrono::steady_clock::now();
  const HostTensors plan = step_->plan(problem_, planning_inputs_);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  return plan.empty() ? std::nullopt : std::optional(seconds.count());
}

void Session::poison() {
  for (const TensorSpec& spec : operation_.outputs(problem_)) {
    const auto buffer = std::ranges::find(outputs_, spec.name, &DeviceBuffer::name);
    if (buffer != outputs_.end()) buffer->poison(unwritten_bits(spec.dtype));
  }
  for (Given& g : inputs_)
    if (g.in_out) restore(g);
  for (std::size_t i = 0; i < workspaces_.size(); ++i)
    if (!workspace_saved_[i]) workspaces_[i].poison();
}

Status Session::capture() {
  if (device_.backend != Backend::gpu) return Status::success();
  const InUse in_use(device_);
  const LaunchFunction function = step_->launch.on(device_.backend);
  if (!function) return Status::device_error("not built for this device");
  // The first launch loads the kernels, which is not possible during stream capture.
  if (Status status = launch(); !status.ok()) return status;
  captured_ = std::make_unique<CapturedLaunch>();
  return captured_->capture(arguments_, function);
}

Status Session::start() {
  poison();
  const InUse in_use(device_);
  return captured_ ? captured_->replay() : call(step_->launch);
}
Status Session::launch() {
  const Status status = start();
  const InUse in_use(device_);
  if (status.ok()) synchronize(device_);
  return status;
}

void Session::abandon() {
  for (DeviceBuffer& workspace : workspaces_) workspace.poison();
}

std::string Session::repeats_differ(int count, const std::function<void(int)>& before,
                                    const std::vector<std::string>& names) {
  std::vector<TensorSpec> specs = operation_.outputs(problem_);
  std::erase_if(specs, [&](const TensorSpec& spec) {
    return !names.empty() && std::ranges::find(names, spec.name) == names.end();
  });
  std::vector<DeviceBuffer> first;
  for (int n = 0; n < count; ++n) {
    if (before) before(n);
    if (const Status status = launch(); !status.ok())
      return fmt::format("launch {}: {}", n, status.message);
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const DeviceBuffer& now = output(specs[i].name);
      if (n == 0)
        first.emplace_back(device_, specs[i].name, now.bytes()).copy_from(now);
      else if (!now.same_as(first[i]))
        return fmt::format("{} of launch {} has other bits than that of launch 0", now.name(), n);
    }
  }
  return "";
}

// A program built without CUDA has no GPU kernels.
Status Session::call(const Launch& launch) const {
  const LaunchFunction function = launch.on(device_.backend);
  return function ? function(arguments_) : Status::device_error("not built for this device");
}

DeviceBuffer& Session::output(const std::string& name) {
  const auto buffer = std::ranges::find(outputs_, name, &DeviceBuffer::name);
  if (buffer != outputs_.end()) return *buffer;
  for (Given& g : inputs_)
    if (g.in_out && g.buffer.name() == name) return g.buffer;
  throw std::invalid_argument(name + ": no output of " + operation_.name);
}

HostTensors Session::outputs() {
  HostTensors result;
  for (TensorSpec spec : operation_.outputs(problem_)) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(spec.bytes()));
    output(spec.name).download(bytes.data());
    for (const Given& g : inputs_)
      if (g.in_out && g.buffer.name() == spec.name) spec.layout = g.layout;
    result.emplace(spec.name, from_bytes(spec, bytes));
  }
  return result;
}

std::vector<int32_t> Session::workspace(const std::string& name) {
  const auto buffer = std::ranges::find(workspaces_, name, &DeviceBuffer::name);
  if (buffer == workspaces_.end()) throw std::invalid_argument(name + ": no workspace");
  std::vector<int32_t> words(static_cast<std::size_t>(buffer->bytes()) / sizeof(int32_t));
  buffer->download(reinterpret_cast<std::byte*>(words.data()));
  return words;
}

HostTensor Session::output_rows(const std::string& name, const std::vector<int64_t>& rows) {
  const DeviceBuffer& buffer = output(name);
  const std::vector<TensorSpec> specs = operation_.outputs(problem_);
  const TensorSpec& spec = *std::ranges::find(specs, name, &TensorSpec::name);
  const int64_t row_bytes = bytes_of(spec.dtype, spec.columns());
  std::vector<std::byte> bytes(rows.size() * static_cast<std::size_t>(row_bytes));
  for (std::size_t r = 0; r < rows.size(); ++r)
    buffer.download(bytes.data() + static_cast<int64_t>(r) * row_bytes, rows[r] * row_bytes,
                    row_bytes);
  return from_bytes({name, {1, 1, static_cast<int64_t>(rows.size()), spec.columns()}, spec.dtype},
                    bytes);
}

std::optional<std::string> Session::broken_guard() {
  for (const auto* buffers : {&saved_, &outputs_, &workspaces_})
    for (const DeviceBuffer& b : *buffers)
      if (auto broken = b.broken_guard()) return broken;
  for (const auto* given : {&inputs_, &plan_})
    for (const Given& g : *given)
      if (auto broken = g.buffer.broken_guard()) return broken;
  return std::nullopt;
}

std::optional<std::string> Session::change_of(const Given& g) const {
  constexpr int64_t kAtOnce = 64 << 20;
  const auto period = static_cast<int64_t>(g.bytes.size());
  std::vector<std::byte> now;
  int64_t bytes = 0;
  for (int64_t first = 0; first < g.buffer.bytes(); first += bytes) {
    const int64_t at = first % period;
    bytes = std::min({kAtOnce, g.buffer.bytes() - first, period - at});
    now.resize(static_cast<std::size_t>(bytes));
    g.buffer.download(now.data(), first, bytes);
    if (std::memcmp(now.data(), g.bytes.data() + at, now.size()) == 0) continue;
    if (!g.in_out) return fmt::format("wrote to its input {}", g.buffer.name());
    for (int64_t i = 0; i < bytes; ++i) {
      const int64_t row = (first + i) / g.row_bytes;
      if (now[static_cast<std::size_t>(i)] != g.bytes[static_cast<std::size_t>(at + i)] &&
          !std::ranges::binary_search(g.may_change, row))
        return fmt::format("wrote to row {} of {}, which must stay as it is", row, g.buffer.name());
    }
  }
  return std::nullopt;
}

std::optional<std::string> Session::damage() {
  if (auto broken = broken_guard()) return broken;
  for (const auto* given : {&inputs_, &plan_})
    for (const Given& g : *given)
      if (auto change = change_of(g)) return change;
  return std::nullopt;
}

Status Session::time(GpuTimer& timer, Sample& sample) {
  return timer.time(arguments_, step_->launch.on(device_.backend), sample);
}
Status Session::time_phases(GpuTimer& timer, Sample& sample) {
  return timer.time_phases(arguments_, step_->launch.on(device_.backend), sample);
}

Status Session::profile() {
  const InUse in_use(device_);
  profiler_range(device_, true);
  const Status status = call(step_->launch);
  if (status.ok()) synchronize(device_);
  profiler_range(device_, false);
  return status;
}

}  // namespace attn
