/// \file
/// A problem on a device: inputs there, outputs and workspaces allocated, steps run one by one. The
/// chapter program, its benchmark and its tests all run steps through this.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attn/device.h"
#include "attn/operation.h"
#include "attn/step.h"

namespace attn {

/// Bytes that a step needs: inputs, outputs and its workspaces, guards included. Doubles, because the
/// sum of what a huge problem needs may not fit in 63 bits.
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
  Session(const Problem&, const Operation&, Backend, const HostTensors& inputs);

  /// Gives `step` its workspaces, poisoned, and runs its `prepare`.
  Status prepare(const Step&);
  /// Poisons outputs and workspaces (not what `prepare` saved) and launches the prepared step.
  Status launch();
  /// What the launch wrote, after waiting for it. Throws DeviceError.
  HostTensors outputs();
  /// Rows of an output, by their numbers in memory: [1, 1, count, columns]. For a tensor too large to bring back.
  HostTensor output_rows(const std::string& name, const std::vector<int64_t>& rows);
  /// A write outside a buffer, an input that changed, or nothing.
  std::optional<std::string> damage();
  /// A write outside a buffer, or nothing.
  std::optional<std::string> broken_guard();
  /// Poisons outputs, and workspaces but for what `prepare` saved.
  void poison();
  /// Times one launch (GPU only).
  Status time(GpuTimer&, Sample&);
  /// Launches between profiler marks, with nothing else on the device.
  Status profile();

 private:
  Problem problem_;
  const Operation& operation_;
  Backend backend_;
  Arguments arguments_;
  std::vector<DeviceBuffer> inputs_, saved_, outputs_, workspaces_;
  std::vector<bool> workspace_saved_;
  std::vector<std::vector<std::byte>> input_bytes_;  // as uploaded, a period of it, to see that nobody wrote there
  const Step* step_ = nullptr;
};

}  // namespace attn
