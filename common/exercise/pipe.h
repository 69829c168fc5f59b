/// \file
/// The protocol between the judge of an exercise and the process with the student's kernel, over
/// two pipes.
///
/// The judge sends a problem and its inputs. The answer is a message, which counts as a failure, or
/// as many numbers as the judge expects; any other output of the process is ignored. So the process
/// cannot gain anything except by returning the right numbers.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attn/step.h"
#include "attn/tensor.h"

namespace attn {

/// A request to the process.
struct Request {
  enum class What {
    launch,  ///< launch once; returns the outputs
    time,  ///< launch once, then timed (GPU); returns the outputs and the time
    profile,  ///< launch between profiler marks (GPU); returns nothing
    probe,  ///< run the exercise's probe; returns its numbers
  };
  What what = What::launch;
  std::string variant;  ///< version in the program
  Backend backend = Backend::emulated;
  uint64_t schedule = 0;  ///< seed of the emulator's schedule
  /// For a step with a workspace that one launch leaves to the next. A third launch finds a counter
  /// that the second no longer resets.
  int launches = 3;
  /// In the emulator: writes a page of the launch to this file. `title`: "ex01b (v5_async)".
  std::string timeline, title;
  bool quiet = false;  ///< hides the kernel's output from now on
  /// Its seed is set for dropout only: a kernel must not know how its inputs were drawn.
  Problem problem;
  std::vector<Workspace> workspaces;
  std::vector<TensorSpec> input_specs, output_specs;
  HostTensors inputs;

  /// Size of the answer in bytes; nothing if only the exercise knows it.
  std::optional<int64_t> expected() const;
};

/// The message of a program compiled for the emulator only.
inline constexpr const char* kNoGpuKernel = "this program has no kernel for a GPU";

struct Reply {
  std::string message;  ///< the error, in one line; then the rest is empty
  double seconds = 0;
  /// all outputs in device format, concatenated; float32 for a probe
  std::vector<std::byte> bytes;

  static Reply failure(std::string why);
  /// The outputs of `request`, which have as many bytes in total.
  HostTensors outputs(const Request& request) const;
  /// The numbers of a probe.
  std::vector<float> probed() const;
};

/// Called by the student's program. Returns nothing at the end of the file. Throws
/// std::runtime_error if the request is truncated.
std::optional<Request> read_request(int file);
void write_reply(int file, const Reply&);

/// The student's program, from the judge's side: started once, asked repeatedly, and killed at the
/// end together with all processes it has started.
class StudentProcess {
 public:
  /// Starts version `variant`; `seconds` limits the time of all answers together. Throws InputError
  /// if there is no such program.
  StudentProcess(const std::string& program, std::string variant, double seconds);
  ~StudentProcess();
  StudentProcess(const StudentProcess&) = delete;
  StudentProcess& operator=(const StudentProcess&) = delete;

  /// The answer, or a message: from the program, or that it ended or timed out. After a message it
  /// is not asked again.
  Reply ask(Request);
  /// Starts the program again if it has ended. Returns false if no time is left.
  bool restart();
  /// Limits the remaining time to `seconds`.
  void hurry(double seconds);

 private:
  void start();
  Reply gone(const std::string& why);
  bool send(const std::string& bytes);
  bool receive(void* to, std::size_t bytes);
  bool ready(int file, short events);

  std::string program_, variant_;
  double limit_;
  std::chrono::steady_clock::time_point end_;
  bool late_ = false;
  pid_t process_ = -1;
  int to_ = -1, from_ = -1;
};

}  // namespace attn
