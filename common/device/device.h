/// \file
/// The device: a GPU through the CUDA runtime, or the host's memory for the emulator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "attn/step.h"

namespace attn::emulator {
class GlobalBuffer;
}

namespace attn {

/// Out of memory, or a failure that the CUDA runtime reported: programs exit with status 4.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// What the machine has.
struct GpuInfo {
  bool available = false;
  int ordinal = 0, count = 0;  ///< this GPU's number, and how many there are
  std::string name;   ///< "NVIDIA H200"
  std::string error;  ///< why there is none: the CUDA error's name, or "built without CUDA"
  int cc_major = 0, cc_minor = 0, num_sms = 0;
  int64_t l2_bytes = 0;
  int driver_version = 0, runtime_version = 0;
};
/// Of the GPU in use. Asks the CUDA runtime once for each; any error means "no GPU".
const GpuInfo& gpu_info();

/// Makes a GPU the one in use for this thread, until it goes out of scope. Does nothing for the
/// emulator, and for a Device that says no number. Throws DeviceError where there is no such GPU.
class InUse {
 public:
  explicit InUse(Device);
  ~InUse();
  InUse(const InUse&) = delete;

 private:
  int before_ = Device::kInUse;
};

/// "NVIDIA H200 (sm_90)" or "emulated (no GPU: cudaErrorNoDevice)"; of several GPUs the number,
/// too.
std::string device_text(Device);

/// Bytes that an allocation could get now.
int64_t free_bytes(Device);

/// A device allocation with a guard band on both sides. Poison is all bits 1, a NaN in fp32, fp16
/// and bf16, so that who reads what nobody wrote is found; outputs get unwritten_bits() (tensor.h).
/// Throws DeviceError.
class DeviceBuffer {
 public:
  DeviceBuffer(Device device, std::string name, int64_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&&) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&&) = delete;

  void* data() const;
  int64_t bytes() const { return bytes_; }
  const std::string& name() const { return name_; }
  /// Fills it with `pattern`, four bytes again and again.
  void poison(std::uint32_t pattern = 0xFFFFFFFF);
  void upload(const void* from) { upload(from, 0, bytes_); }
  /// `bytes` bytes, to byte `first` and on.
  void upload(const void* from, int64_t first, int64_t bytes);
  void download(void* to) const { download(to, 0, bytes_); }
  /// `bytes` from byte `first` on.
  void download(void* to, int64_t first, int64_t bytes) const;
  /// Takes the bytes of another buffer of the same device and size.
  void copy_from(const DeviceBuffer&);
  /// Whether all bytes are those of another such buffer. On a GPU they are compared there.
  bool same_as(const DeviceBuffer&) const;
  /// The first byte of a guard band that was overwritten: a line that says where, or nothing.
  std::optional<std::string> broken_guard() const;

  /// What an allocation of `bytes` really takes.
  static int64_t footprint(int64_t bytes) { return bytes + 2 * kGuardBytes; }
  static constexpr int64_t kGuardBytes = 4096;

 private:
  void unpoison_guards(bool readable) const;
  Device device_;
  std::string name_;
  int64_t bytes_;
  std::byte* base_ = nullptr;  // guard | data | guard
  std::unique_ptr<emulator::GlobalBuffer> emulated_;  // the emulator's view of data
};

/// Whether two device pointers have the same bytes (GPU only).
bool same_bytes_on_gpu(const void* a, const void* b, int64_t bytes);

/// Waits for the device. Throws DeviceError with the CUDA error of whatever ran before.
void synchronize(Device);

/// Marks the begin and the end of what a profiler should see (cudaProfilerStart, cudaProfilerStop).
void profiler_range(Device, bool begin);

/// Seconds of one launch. Of a launch of one phase `phases` has that one, too; of several phases
/// only GpuTimer::time_phases fills it.
struct Sample {
  double seconds = 0;
  bool launch_hidden = true;  ///< the GPU was still busy when the host had queued everything
  std::vector<std::pair<std::string, double>> phases = {};
};

/// Queues a kernel that does nothing for so long (GPU only).
Status spin(Stream, double seconds);

/// The number of the method by which times are measured; results and peers say it. It grows when
/// the method changes: figures of different methods are not compared. 1: the launch was part of the
/// time. 2: it is hidden. 3: the first phase begins with the launch, not with an event of its own,
/// which took 1.3 us on an H200. 4: no event between two phases of a launch, which took 0.9 to
/// 1.6 us; phases are timed in launches of their own.
inline constexpr int kTimingMethod = 4;

/// Times launches with CUDA events. Before each, the L2 cache is overwritten (2 x its size), so
/// that no step profits from what the one before left there; then the GPU is kept busy for a
/// millisecond, so that everything is queued when the clock starts and the host's time to launch is
/// nobody's.
class GpuTimer {
 public:
  GpuTimer();
  ~GpuTimer();
  GpuTimer(const GpuTimer&) = delete;
  /// Flushes L2, spins, launches, waits; again with a longer spin, up to 64 ms, where the host was
  /// not done in time. Two events: one before the launch, one behind it.
  Status time(Arguments& arguments, LaunchFunction launch, Sample& sample);
  /// The same with an event between every two phases (Arguments::phase()). These events are part of
  /// the time of the phases, so the sum of the phases is longer than what time() measures.
  Status time_phases(Arguments& arguments, LaunchFunction launch, Sample& sample);

 private:
  struct Impl;
  Status measure(Arguments&, LaunchFunction, Sample&, bool between_phases);
  std::unique_ptr<Impl> impl_;
};

}  // namespace attn
