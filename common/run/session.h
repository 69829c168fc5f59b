/// \file
/// A problem on a device: inputs there, outputs and workspaces allocated, steps run one by one. The
/// chapter program, its benchmark and its tests all run steps through this.
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

/// Bytes that a step needs: inputs, outputs and its workspaces, guards included. Doubles, because
/// the sum of what a huge problem needs may not fit in 63 bits.
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

  /// Gives `step` its workspaces, poisoned, and what it plans; runs its `prepare`.
  Status prepare(const Step&);
  /// Gives the inputs other values of the same shapes, as when a launch that was captured once is
  /// replayed: nothing is prepared or planned anew.
  void replace(const HostTensors& inputs);
  /// Gives the prepared step, in the same place, the plan of other inputs: what a server does
  /// before it replays what it has captured. Its tensors must be as large as they were.
  void replan(const HostTensors& inputs);
  /// Works out the prepared step's plan once more: the seconds that took, or nothing where it has
  /// none.
  std::optional<double> time_plan() const;
  /// Captures the prepared step's launch as a CUDA graph: from here on, until another step is
  /// prepared, launch() replays it, and no host code of the step runs. The emulator has no graphs:
  /// there nothing changes.
  Status capture();
  /// Poisons outputs and workspaces (not what `prepare` saved), gives in-out tensors back their
  /// values, and launches the prepared step.
  Status launch();
  /// The same without waiting for the end: of two sessions whose launches were captured, each runs
  /// in a stream of its own.
  Status start();
  /// Leaves all workspaces as a launch that was aborted may leave them: poisoned, counters among
  /// them. The next prepare() has to make them good.
  void abandon();
  /// Launches the prepared step `count` times, each after `before(n)`, and compares the bits of
  /// every output of every launch with those of the first: "" or the first that differs. A launch
  /// that fails is said, too.
  std::string repeats_differ(int count, const std::function<void(int n)>& before = {});
  /// What the launch wrote, after waiting for it. Throws DeviceError.
  HostTensors outputs();
  /// Rows of an output, by their numbers in memory: [1, 1, count, columns]. For a tensor too large
  /// to bring back.
  HostTensor output_rows(const std::string& name, const std::vector<int64_t>& rows);
  /// What the launch left in a workspace of the prepared step, as whole numbers of 32 bits. Throws
  /// DeviceError, and std::invalid_argument where there is no such workspace.
  std::vector<int32_t> workspace(const std::string& name);
  /// A write outside a buffer, an input or a plan that changed, of an in-out tensor a row that may
  /// not; or nothing.
  std::optional<std::string> damage();
  /// A write outside a buffer, or nothing.
  std::optional<std::string> broken_guard();
  /// Poisons outputs, and workspaces but for what `prepare` saved.
  void poison();
  /// Times one launch (GPU only).
  Status time(GpuTimer&, Sample&);
  Status time_phases(GpuTimer&, Sample&);
  /// Launches between profiler marks, with nothing else on the device.
  Status profile();

 private:
  // A tensor that a launch is given, with its bytes as uploaded (a period of them), to see that
  // nobody wrote there.
  struct Given {
    DeviceBuffer buffer;
    std::vector<std::byte> bytes;
    int64_t row_bytes = 0;
    Layout layout = {};  // of what was given: a table that was loaded says where rows lie
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
