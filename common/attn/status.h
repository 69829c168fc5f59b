/// \file
/// Status of a launch.
#pragma once

#include <string>
#include <utility>

namespace attn {

/// The outcome of a launch, or of a query such as "does this step support this problem?".
struct Status {
  enum class Code {
    kOk,
    kUnsupported,  ///< the step refuses the problem; message: its reason
    kKernelError,  ///< the emulator found an error of the kernel
    kDeviceError,  ///< the CUDA runtime or cuBLAS reported a failure
  };
  Code code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }
  static Status success() { return {}; }
  static Status unsupported(std::string why) { return {Code::kUnsupported, std::move(why)}; }
  static Status kernel_error(std::string what) { return {Code::kKernelError, std::move(what)}; }
  static Status device_error(std::string what) { return {Code::kDeviceError, std::move(what)}; }
};

}  // namespace attn
