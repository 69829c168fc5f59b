/// \file
/// The device: a GPU through the CUDA runtime, or host memory for the emulator.
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

/// Out of memory, or an error from the CUDA runtime: programs exit with status 4.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The GPU of this machine.
struct GpuInfo {
  bool available = false;
  int ordinal = 0, count = 0;  ///< index of this GPU, number of GPUs
  std::string name;   ///< "NVIDIA H200"
  std::string error;  ///< why there is no GPU: the CUDA error's name, or "built without CUDA"
  int cc_major = 0, cc_minor = 0, num_sms = 0;
  int64_t l2_bytes = 0;
  int driver_version = 0, runtime_version = 0;
};
/// About the selected GPU. Asks the CUDA runtime once per GPU; any error means "no GPU".
const GpuInfo& gpu_info();

/// SMs and L2 of the selected GPU; without one those of an H200. Launches fit their work to them.
Machine this_machine();

/// Selects a GPU for this thread until it goes out of scope. Does nothing for the emulator and for
/// a Device without an index. Throws DeviceError if there is no such GPU.
class InUse {
 public:
  explicit InUse(Device);
  ~InUse();
  InUse(const InUse&) = delete;

 private:
  int before_ = Device::kInUse;
};

/// "NVIDIA H200 (sm_90)" or "emulated (no GPU: cudaErrorNoDevice)"; with several GPUs also the
/// index.
std::string device_text(Device);

/// Bytes that an allocation could get now.
int64_t free_bytes(Device);

/// A device allocation with a guard band on both sides. Poison is all bits 1, a NaN in fp32, fp16
/// and bf16, so that reads of unwritten memory show up in the result; outputs get unwritten_bits()
/// (tensor.h). Throws DeviceError.
class DeviceBuffer {
 public:
  DeviceBuffer(Device device, std::string name, int64_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&&) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&&) = delete;

  void* data() const;
  int64_t bytes() const { return bytes_; }
  const std::string& name() const { return name_; }
  /// Fills the buffer with a repeated 4-byte `pattern`.
  void poison(std::uint32_t pattern = 0xFFFFFFFF);
  void upload(const void* from) { upload(from, 0, bytes_); }
  /// Copies `bytes` bytes from the host, to byte `first` of the buffer.
  void upload(const void* from, int64_t first, int64_t bytes);
  void download(void* to) const { download(to, 0, bytes_); }
  /// Copies `bytes` bytes to the host, from byte `first` of the buffer.
  void download(void* to, int64_t first, int64_t bytes) const;
  /// Copies the contents of another buffer of the same device and size.
  void copy_from(const DeviceBuffer&);
  /// Whether all bytes equal those of another such buffer. On a GPU the comparison runs there.
  bool same_as(const DeviceBuffer&) const;
  /// Describes the first overwritten byte of a guard band, or returns nothing.
  std::optional<std::string> broken_guard() const;

  /// The allocated size of a buffer of `bytes`.
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

/// Whether the bytes behind two device pointers are equal (GPU only).
bool same_bytes_on_gpu(const void* a, const void* b, int64_t bytes);

/// Waits for the device. Throws DeviceError with the CUDA error of any earlier launch.
void synchronize(Device);

/// Begins or ends the range that a profiler records (cudaProfilerStart, cudaProfilerStop).
void profiler_range(Device, bool begin);

/// Seconds of one launch. For a launch with one phase, `phases` holds that phase; for several
/// phases only GpuTimer::time_phases fills it.
struct Sample {
  double seconds = 0;
  bool launch_hidden = true;  ///< the GPU was still spinning when the host had queued everything
  std::vector<std::pair<std::string, double>> phases = {};
};

/// Queues a kernel that spins for `seconds` (GPU only).
Status spin(Stream, double seconds);

/// The version of the timing method, recorded with results and peers. Figures of different versions
/// are not compared. 1: the launch was part of the time. 2: it is hidden. 3: the first phase begins
/// with the launch, not with an event of its own, which took 1.3 us on an H200. 4: no event between
/// two phases of a launch, which took 0.9 to 1.6 us; phases are timed in separate launches.
inline constexpr int kTimingMethod = 4;

/// Times launches with CUDA events. Before each launch the L2 cache is overwritten (2 x its size),
/// so that no step profits from data of the previous one. Then the GPU spins for a millisecond, so
/// that everything is queued when the clock starts and host launch time is not measured.
class GpuTimer {
 public:
  GpuTimer();
  ~GpuTimer();
  GpuTimer(const GpuTimer&) = delete;
  /// Flushes L2, spins, launches and waits; repeats with a longer spin, up to 64 ms, if the host
  /// was too slow. Two events: one before the launch, one after it.
  Status time(Arguments& arguments, LaunchFunction launch, Sample& sample);
  /// The same with an event between successive phases (Arguments::phase()). These events are part
  /// of the time of the phases, so the sum of the phases is longer than the time that time()
  /// measures.
  Status time_phases(Arguments& arguments, LaunchFunction launch, Sample& sample);

 private:
  struct Impl;
  Status measure(Arguments&, LaunchFunction, Sample&, bool between_phases);
  std::unique_ptr<Impl> impl_;
};

}  // namespace attn
