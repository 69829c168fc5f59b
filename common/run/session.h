/// \file
/// A problem on a device: uploads the inputs, allocates outputs and workspaces, and runs steps one
/// by one. The chapter program, its benchmark and its tests run steps through this class.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attn/step.h"
#include "check/operation.h"
#include "device/captured_launch.h"
#include "device/device.h"

namespace attn {

/// Bytes that a step needs: inputs, outputs and workspaces, guard bands included. Doubles, because
/// the total for a huge problem may not fit in 63 bits.
struct MemoryNeed {
  double tensors = 0, workspaces = 0;
  std::string workspace_text;  ///< "S 2.00 GiB + P 1.00 GiB"
  double total() const { return tensors + workspaces; }
};
MemoryNeed memory_need(const Problem&, const Operation&, const Step&);

/// "2.00 GiB"
std::string bytes_text(double bytes);

class Session {
 public:
  /// Uploads the inputs. Throws DeviceError.
  Session(const Problem&, const Operation&, Device, const HostTensors& inputs);

  /// Allocates and poisons the workspaces of `step`, computes its plan, and runs its `prepare`.
  Status prepare(const Step&);
  /// Replaces the values of the inputs, with the same shapes, as when a captured launch is
  /// replayed. Nothing is prepared or planned again.
  void replace(const HostTensors& inputs);
  /// Overwrites the plan of the prepared step with the plan for other inputs, as a server does
  /// before it replays a captured graph. The plan's tensors must keep their sizes.
  void replan(const HostTensors& inputs);
  /// Computes the prepared step's plan again and returns the seconds it took; nothing for a step
  /// without a plan.
  std::optional<double> time_plan() const;
  /// Captures the prepared step's launch as a CUDA graph. Until another step is prepared, launch()
  /// replays the graph and runs no host code of the step. The emulator has no graphs, so there this
  /// does nothing.
  Status capture();
  /// Poisons outputs and workspaces (except what `prepare` saved), resets in-out tensors, and
  /// launches the prepared step.
  Status launch();
  /// The same without waiting for completion: two sessions with captured launches run concurrently,
  /// each in its own stream.
  Status start();
  /// Leaves all workspaces, counters included, poisoned, as an aborted launch may leave them. The
  /// next prepare() must restore them.
  void abandon();
  /// Launches the prepared step `count` times, each after `before(n)`, and compares the outputs
  /// named in `names` (none named: all) of every launch bitwise with the first launch. Returns "",
  /// or the first difference or failed launch.
  std::string repeats_differ(int count, const std::function<void(int n)>& before = {},
                             const std::vector<std::string>& names = {});
  /// Waits for the launch and returns its outputs. Throws DeviceError.
  HostTensors outputs();
  /// Rows of an output by their indices in memory: [1, 1, count, columns]. For tensors too large to
  /// download.
  HostTensor output_rows(const std::string& name, const std::vector<int64_t>& rows);
  /// The contents of a workspace of the prepared step after the launch, as 32-bit integers. Throws
  /// DeviceError, and std::invalid_argument if there is no such workspace.
  std::vector<int32_t> workspace(const std::string& name);
  /// A write outside a buffer, a changed input or plan, or a change in a read-only row of an in-out
  /// tensor; or nothing.
  std::optional<std::string> damage();
  /// A write outside a buffer, or nothing.
  std::optional<std::string> broken_guard();
  /// Poisons outputs, and workspaces except what `prepare` saved.
  void poison();
  /// Times one launch (GPU only).
  Status time(GpuTimer&, Sample&);
  Status time_phases(GpuTimer&, Sample&);
  /// Launches between profiler marks, with nothing else on the device.
  Status profile();

 private:
  // An input of a launch, with its bytes as uploaded (one period of them), to detect writes to it.
  struct Given {
    DeviceBuffer buffer;
    std::vector<std::byte> bytes;
    int64_t row_bytes = 0;
    Layout layout = {};  // as given: a loaded table defines where rows lie
    bool in_out = false;
    std::vector<int64_t> may_change = {};  // rows of an in-out tensor
  };
  Status call(const Launch&) const;
  void give(std::vector<Given>&, const TensorSpec&, const HostTensor&);
  void restore(Given&);
  std::optional<std::string> change_of(const Given&) const;
  DeviceBuffer& output(const std::string& name);

  Problem problem_;
  const Operation& operation_;
  Device device_;
  HostTensors planning_inputs_;
  Arguments arguments_;
  std::vector<Given> inputs_, plan_;
  std::vector<DeviceBuffer> saved_, outputs_, workspaces_;
  std::vector<bool> workspace_saved_;
  const Step* step_ = nullptr;
  std::unique_ptr<CapturedLaunch> captured_;
};

}  // namespace attn
