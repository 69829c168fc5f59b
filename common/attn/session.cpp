#include "attn/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
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
  for (const auto* specs : {&op.inputs, &op.saved, &op.outputs})
    for (const TensorSpec& t : (*specs)(p)) need.tensors += static_cast<double>(DeviceBuffer::footprint(t.bytes()));
  for (const Workspace& w : step.workspaces(p)) {
    need.workspaces += static_cast<double>(DeviceBuffer::footprint(w.bytes));
    if (!need.workspace_text.empty()) need.workspace_text += " + ";
    need.workspace_text += w.name + " " + bytes_text(static_cast<double>(w.bytes));
  }
  return need;
}

Session::Session(const Problem& problem, const Operation& operation, Backend backend,
                 const HostTensors& inputs)
    : problem_(problem), operation_(operation), backend_(backend), arguments_(problem_, backend) {
  for (const TensorSpec& spec : operation.inputs(problem)) {
    const HostTensor& tensor = inputs.at(spec.name);
    std::vector<std::byte> bytes(tensor.data.size() * static_cast<std::size_t>(size_of(spec.dtype)));
    encode(spec.dtype, tensor.data.data(), tensor.data.size(), bytes.data());
    DeviceBuffer& buffer = inputs_.emplace_back(backend, spec.name, spec.bytes());
    const auto period = static_cast<int64_t>(bytes.size());
    for (int64_t first = 0; first < spec.bytes(); first += period)
      buffer.upload(bytes.data(), first, std::min(period, spec.bytes() - first));
    input_bytes_.push_back(std::move(bytes));
  }
  for (const TensorSpec& spec : operation.saved(problem))
    saved_.emplace_back(backend, spec.name, spec.bytes()).poison();
  for (const TensorSpec& spec : operation.outputs(problem))
    outputs_.emplace_back(backend, spec.name, spec.bytes());
  for (const auto* buffers : {&inputs_, &saved_, &outputs_})
    for (const DeviceBuffer& b : *buffers) arguments_.bind(b.name(), b.data());
}

Status Session::prepare(const Step& step) {
  step_ = &step;
  workspaces_.clear();
  workspace_saved_.clear();
  for (const Workspace& w : step.workspaces(problem_)) {
    workspaces_.emplace_back(backend_, w.name, w.bytes).poison();
    workspace_saved_.push_back(w.saved);
    arguments_.bind(w.name, workspaces_.back().data());
  }
  if (!step.prepare) return Status::success();
  const Status status = step.prepare.on(backend_)(arguments_);
  if (status.ok()) synchronize(backend_);
  return status;
}

void Session::poison() {
  for (DeviceBuffer& b : outputs_) b.poison();
  for (std::size_t i = 0; i < workspaces_.size(); ++i)
    if (!workspace_saved_[i]) workspaces_[i].poison();
}

Status Session::launch() {
  poison();
  const Status status = step_->launch.on(backend_)(arguments_);
  if (status.ok()) synchronize(backend_);
  return status;
}

HostTensors Session::outputs() {
  HostTensors result;
  const std::vector<TensorSpec> specs = operation_.outputs(problem_);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(specs[i].bytes()));
    outputs_[i].download(bytes.data());
    HostTensor t{specs[i], std::vector<float>(static_cast<std::size_t>(specs[i].elements()))};
    decode(specs[i].dtype, bytes.data(), t.data.size(), t.data.data());
    result.emplace(specs[i].name, std::move(t));
  }
  return result;
}

HostTensor Session::output_rows(const std::string& name, const std::vector<int64_t>& rows) {
  const std::vector<TensorSpec> specs = operation_.outputs(problem_);
  const auto spec = std::ranges::find(specs, name, &TensorSpec::name);
  if (spec == specs.end()) throw std::invalid_argument(name + ": no output of " + operation_.name);
  const int64_t columns = spec->columns(), bytes = columns * size_of(spec->dtype);
  HostTensor t{{name, {1, 1, static_cast<int64_t>(rows.size()), columns}, spec->dtype}, {}};
  t.data.resize(static_cast<std::size_t>(t.spec.elements()));
  std::vector<std::byte> row(static_cast<std::size_t>(bytes));
  for (std::size_t r = 0; r < rows.size(); ++r) {
    outputs_[static_cast<std::size_t>(spec - specs.begin())].download(row.data(), rows[r] * bytes, bytes);
    decode(spec->dtype, row.data(), static_cast<std::size_t>(columns),
           t.data.data() + r * static_cast<std::size_t>(columns));
  }
  return t;
}

std::optional<std::string> Session::broken_guard() {
  for (const auto* buffers : {&inputs_, &saved_, &outputs_, &workspaces_})
    for (const DeviceBuffer& b : *buffers)
      if (auto broken = b.broken_guard()) return broken;
  return std::nullopt;
}

std::optional<std::string> Session::damage() {
  if (auto broken = broken_guard()) return broken;
  constexpr int64_t kAtOnce = 64 << 20;
  std::vector<std::byte> now;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    const auto period = static_cast<int64_t>(input_bytes_[i].size());
    int64_t bytes = 0;
    for (int64_t first = 0; first < inputs_[i].bytes(); first += bytes) {
      const int64_t at = first % period;
      bytes = std::min({kAtOnce, inputs_[i].bytes() - first, period - at});
      now.resize(static_cast<std::size_t>(bytes));
      inputs_[i].download(now.data(), first, bytes);
      if (std::memcmp(now.data(), input_bytes_[i].data() + at, now.size()) != 0)
        return fmt::format("wrote to its input {}", inputs_[i].name());
    }
  }
  return std::nullopt;
}

Status Session::time(GpuTimer& timer, Sample& sample) {
  return timer.time(arguments_, step_->launch.on(backend_), sample);
}

Status Session::profile() {
  profiler_range(backend_, true);
  const Status status = step_->launch.on(backend_)(arguments_);
  if (status.ok()) synchronize(backend_);
  profiler_range(backend_, false);
  return status;
}

}  // namespace attn
