/// \file
/// What the judge of an exercise and the process with the student's kernel say to each other, over
/// two pipes.
///
/// The judge sends a problem and its inputs. What comes back is a message, which counts as a
/// failure, or numbers, as many as the judge expects; whatever else the process writes is read by
/// nobody. So nothing that it can do is worth more than the right numbers.
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

/// What the process is asked to do.
struct Request {
  enum class What {
    launch,   ///< launch once: the outputs
    time,     ///< launch once, then again by the clock (GPU): the outputs, and how long it took
    profile,  ///< launch between profiler marks (GPU): nothing
    probe,    ///< run the exercise's probe: its numbers
  };
  What what = What::launch;
  std::string variant;  ///< which version, of those in the program
  Backend backend = Backend::emulated;
  uint64_t schedule = 0;  ///< seed of the emulator's schedule
  bool early_copies = false;
  int launches = 2;    ///< of a step with a workspace that one launch leaves for the next
  bool quiet = false;  ///< what the kernel prints is not shown, from now on
  Problem problem;  ///< its seed only where dropout needs it: the inputs are all that a kernel
                    ///< should know
  std::vector<Workspace> workspaces;
  std::vector<TensorSpec> input_specs, output_specs;
  HostTensors inputs;

  /// How many bytes the answer has; nothing where only the exercise knows.
  std::optional<int64_t> expected() const;
};

/// What a program says that was compiled for the emulator alone.
inline constexpr const char* kNoGpuKernel = "this program has no kernel for a GPU";

struct Reply {
  std::string message;  ///< what went wrong, in one line; then the rest is empty
  double seconds = 0;
  /// all outputs as a device holds them, one behind the other; float32 of a probe
  std::vector<std::byte> bytes;

  static Reply failure(std::string why);
  /// The outputs of `request`, which have as many bytes together.
  HostTensors outputs(const Request& request) const;
  /// What a probe found.
  std::vector<float> probed() const;
};

/// The side of the student's program. Nothing at the end of the file. Throws std::runtime_error
/// where the request is cut off.
std::optional<Request> read_request(int file);
void write_reply(int file, const Reply&);

/// The student's program as the judge sees it: started at once, asked again and again, killed at
/// the end with all that it has started.
class StudentProcess {
 public:
  /// Of version `variant`; `seconds` is how long it may take for all answers together. Throws
  /// InputError where there is no such program.
  StudentProcess(const std::string& program, std::string variant, double seconds);
  ~StudentProcess();
  StudentProcess(const StudentProcess&) = delete;
  StudentProcess& operator=(const StudentProcess&) = delete;

  /// The answer, or a message: of the program, or that it ended or took too long. After that it is
  /// not asked again.
  Reply ask(Request);
  /// Starts it again if it has ended. False where there is no time left.
  bool restart();
  /// From now on it has at most that many seconds.
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
