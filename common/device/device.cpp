#include "device/device.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>
#include <new>

#include "emulator/fiber.h"  // ATTN_ASAN
#include "emulator/memory.h"

#ifdef ATTN_ASAN
#include <sanitizer/asan_interface.h>
#endif
#if ATTN_HAVE_CUDA
#include <cuda_profiler_api.h>
#include <cuda_runtime_api.h>
#endif

namespace attn {
namespace {

constexpr std::size_t kAlignment = 4096;  // of the data, on both back ends
constexpr unsigned char kGuardByte = 0xA5;

#if ATTN_HAVE_CUDA
void cuda(cudaError_t error, const char* doing) {
  if (error != cudaSuccess)
    throw DeviceError(
        fmt::format("{}: {} ({})", doing, cudaGetErrorName(error), cudaGetErrorString(error)));
}
cudaStream_t as_cuda(Stream s) { return static_cast<cudaStream_t>(s); }
#endif

GpuInfo query([[maybe_unused]] int ordinal) {
  GpuInfo info;
#if ATTN_HAVE_CUDA
  info.ordinal = ordinal;
  cudaError_t error = cudaGetDeviceCount(&info.count);
  if (error == cudaSuccess && info.count == 0) error = cudaErrorNoDevice;
  cudaDeviceProp properties{};
  if (error == cudaSuccess) error = cudaGetDeviceProperties(&properties, ordinal);
  if (error != cudaSuccess) {
    info.error = cudaGetErrorName(error);
    (void)cudaGetLastError();
    return info;
  }
  info.available = true;
  info.name = properties.name;
  info.cc_major = properties.major;
  info.cc_minor = properties.minor;
  info.num_sms = properties.multiProcessorCount;
  info.l2_bytes = properties.l2CacheSize;
  (void)cudaDriverGetVersion(&info.driver_version);
  (void)cudaRuntimeGetVersion(&info.runtime_version);
#else
  info.error = "built without CUDA";
#endif
  return info;
}

// Memory that the host can still allocate, page cache included. A container may have a lower limit
// than its machine.
int64_t available_to_machine() {
  std::ifstream info("/proc/meminfo");
  for (std::string key, unit; info >> key;) {
    int64_t kib = 0;
    info >> kib;
    std::getline(info, unit);
    if (key == "MemAvailable:") return kib * 1024;
  }
  return int64_t{sysconf(_SC_AVPHYS_PAGES)} * sysconf(_SC_PAGESIZE);
}
int64_t available_to_cgroup() {
  int64_t limit = 0, used = 0;
  const bool limited = std::ifstream("/sys/fs/cgroup/memory.max") >> limit &&  // "max": no limit
                       std::ifstream("/sys/fs/cgroup/memory.current") >> used;
  return limited ? std::max<int64_t>(0, limit - used) : std::numeric_limits<int64_t>::max();
}

}  // namespace

Machine this_machine() {
  const GpuInfo& gpu = gpu_info();
  return gpu.available ? Machine{gpu.num_sms, double(gpu.l2_bytes)} : Machine{};
}

const GpuInfo& gpu_info() {
  int ordinal = 0;
#if ATTN_HAVE_CUDA
  if (cudaGetDevice(&ordinal) != cudaSuccess) (void)cudaGetLastError();
#endif
  static std::mutex mutex;
  static std::map<int, GpuInfo> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(ordinal);
  return found != known.end() ? found->second
                              : known.emplace(ordinal, query(ordinal)).first->second;
}

InUse::InUse(Device device) {
  if (device.backend != Backend::gpu || device.ordinal == Device::kInUse) return;
  const GpuInfo& gpu = gpu_info();
  if (device.ordinal >= gpu.count)
    throw DeviceError(fmt::format("GPU {}: there {} {}", device.ordinal,
                                  gpu.count == 1 ? "is" : "are", gpu.count));
#if ATTN_HAVE_CUDA
  before_ = gpu.ordinal;
  cuda(cudaSetDevice(device.ordinal), "choosing a GPU");
#endif
}

InUse::~InUse() {
#if ATTN_HAVE_CUDA
  if (before_ != Device::kInUse) (void)cudaSetDevice(before_);
#endif
}

std::string device_text(Device device) {
  const InUse in_use(device);
  const GpuInfo& gpu = gpu_info();
  if (device.backend == Backend::gpu)
    return fmt::format("{} (sm_{}{}){}", gpu.name, gpu.cc_major, gpu.cc_minor,
                       gpu.count > 1 ? fmt::format(", GPU {} of {}", gpu.ordinal, gpu.count) : "");
  return gpu.available ? "emulated" : fmt::format("emulated (no GPU: {})", gpu.error);
}

int64_t free_bytes(Device device) {
#if ATTN_HAVE_CUDA
  if (device.backend == Backend::gpu) {
    const InUse in_use(device);
    std::size_t free = 0, total = 0;
    cuda(cudaMemGetInfo(&free, &total), "asking for free memory");
    return static_cast<int64_t>(free);
  }
#endif
  (void)device;
  return std::min(available_to_machine(), available_to_cgroup());
}

DeviceBuffer::DeviceBuffer(Device device, std::string name, int64_t bytes)
    : device_(device), name_(std::move(name)), bytes_(bytes) {
  const auto total = static_cast<std::size_t>(footprint(bytes));
#if ATTN_HAVE_CUDA
  if (device.backend == Backend::gpu) {
    const InUse in_use(device);
    void* p = nullptr;
    if (cudaMalloc(&p, total) != cudaSuccess) {
      (void)cudaGetLastError();
      throw DeviceError(fmt::format("{}: the GPU gave no {} bytes; {} are free", name_, total,
                                    free_bytes(device)));
    }
    base_ = static_cast<std::byte*>(p);
    cuda(cudaMemset(base_, kGuardByte, kGuardBytes), "guarding a buffer");
    cuda(cudaMemset(base_ + kGuardBytes + bytes, kGuardByte, kGuardBytes), "guarding a buffer");
    return;
  }
#endif
  base_ = static_cast<std::byte*>(
      ::operator new(total, std::align_val_t{kAlignment}, std::nothrow));
  if (base_ == nullptr)
    throw DeviceError(fmt::format("{}: the host gave no {} bytes; {} are free", name_, total,
                                  free_bytes(device)));
  emulated_ = std::make_unique<emulator::GlobalBuffer>(
      name_, data(), static_cast<std::size_t>(bytes), static_cast<std::size_t>(kGuardBytes));
  std::memset(base_, kGuardByte, kGuardBytes);
  std::memset(base_ + kGuardBytes + bytes, kGuardByte, kGuardBytes);
  unpoison_guards(false);
}

DeviceBuffer::~DeviceBuffer() {
  if (base_ == nullptr) return;
#if ATTN_HAVE_CUDA
  if (device_.backend == Backend::gpu) {
    (void)cudaFree(base_);
    return;
  }
#endif
  unpoison_guards(true);
  ::operator delete(base_, std::align_val_t{kAlignment});
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : device_(other.device_), name_(std::move(other.name_)), bytes_(other.bytes_),
      base_(std::exchange(other.base_, nullptr)), emulated_(std::move(other.emulated_)) {}

void* DeviceBuffer::data() const { return base_ + kGuardBytes; }

// AddressSanitizer reports a kernel's access to a guard band at the exact source line.
void DeviceBuffer::unpoison_guards([[maybe_unused]] bool readable) const {
#ifdef ATTN_ASAN
  if (device_.backend != Backend::emulated) return;
  for (std::byte* guard : {base_, base_ + kGuardBytes + bytes_}) {
    if (readable)
      ASAN_UNPOISON_MEMORY_REGION(guard, kGuardBytes);
    else
      ASAN_POISON_MEMORY_REGION(guard, kGuardBytes);
  }
#endif
}

void DeviceBuffer::poison(std::uint32_t pattern) {
#if ATTN_HAVE_CUDA
  if (const std::uint32_t byte = pattern & 0xFF;
      device_.backend == Backend::gpu && pattern == byte * 0x01010101u)
    return cuda(cudaMemset(data(), static_cast<int>(byte), static_cast<std::size_t>(bytes_)),
                "poisoning a buffer");
#endif
  const std::vector<std::uint32_t> some(
      static_cast<std::size_t>(std::min<int64_t>(bytes_ / 4 + 1, 1 << 16)), pattern);
  int64_t done = std::min(bytes_, static_cast<int64_t>(some.size()) * 4);
  upload(some.data(), 0, done);
  // Doubles the filled range in each pass by copying it behind itself.
  for (std::byte* const to = base_ + kGuardBytes; done < bytes_;) {
    const int64_t more = std::min(done, bytes_ - done);
#if ATTN_HAVE_CUDA
    if (device_.backend == Backend::gpu)
      cuda(cudaMemcpy(to + done, to, static_cast<std::size_t>(more), cudaMemcpyDeviceToDevice),
           "poisoning a buffer");
    else
#endif
      std::memcpy(to + done, to, static_cast<std::size_t>(more));
    done += more;
  }
}

void DeviceBuffer::upload(const void* from, int64_t first, int64_t bytes) {
  std::byte* const to = base_ + kGuardBytes + first;
  const auto n = static_cast<std::size_t>(bytes);
#if ATTN_HAVE_CUDA
  if (device_.backend == Backend::gpu)
    return cuda(cudaMemcpy(to, from, n, cudaMemcpyHostToDevice), "copying to the GPU");
#endif
  std::memcpy(to, from, n);
}

void DeviceBuffer::download(void* to, int64_t first, int64_t bytes) const {
  const std::byte* from = base_ + kGuardBytes + first;
  const auto n = static_cast<std::size_t>(bytes);
#if ATTN_HAVE_CUDA
  if (device_.backend == Backend::gpu)
    return cuda(cudaMemcpy(to, from, n, cudaMemcpyDeviceToHost), "copying from the GPU");
#endif
  std::memcpy(to, from, n);
}

void DeviceBuffer::copy_from(const DeviceBuffer& other) {
  const auto n = static_cast<std::size_t>(bytes_);
#if ATTN_HAVE_CUDA
  if (device_.backend == Backend::gpu)
    return cuda(cudaMemcpy(data(), other.data(), n, cudaMemcpyDeviceToDevice), "copying");
#endif
  std::memcpy(data(), other.data(), n);
}

bool DeviceBuffer::same_as(const DeviceBuffer& other) const {
#if ATTN_HAVE_CUDA
  if (device_.backend == Backend::gpu) return same_bytes_on_gpu(data(), other.data(), bytes_);
#endif
  return std::memcmp(data(), other.data(), static_cast<std::size_t>(bytes_)) == 0;
}

std::optional<std::string> DeviceBuffer::broken_guard() const {
  std::vector<unsigned char> guard(kGuardBytes);
  unpoison_guards(true);
  std::optional<std::string> broken;
  for (const bool after : {false, true}) {
    const std::byte* from = after ? base_ + kGuardBytes + bytes_ : base_;
#if ATTN_HAVE_CUDA
    if (device_.backend == Backend::gpu)
      cuda(cudaMemcpy(guard.data(), from, kGuardBytes, cudaMemcpyDeviceToHost), "reading a guard");
    else
#endif
      std::memcpy(guard.data(), from, kGuardBytes);
    for (int64_t i = 0; i < kGuardBytes && !broken; ++i)
      if (guard[static_cast<std::size_t>(i)] != kGuardByte)
        broken = fmt::format("wrote outside {}: at byte {} of {}", name_,
                             after ? bytes_ + i : i - kGuardBytes, bytes_);
  }
  unpoison_guards(false);
  return broken;
}

void synchronize(Device device) {
#if ATTN_HAVE_CUDA
  const InUse in_use(device);
  if (device.backend == Backend::gpu) cuda(cudaDeviceSynchronize(), "running the kernel");
#endif
  (void)device;
}

void profiler_range(Device device, bool begin) {
#if ATTN_HAVE_CUDA
  if (device.backend == Backend::gpu)
    cuda(begin ? cudaProfilerStart() : cudaProfilerStop(), "marking the profiled range");
#endif
  (void)device, (void)begin;
}

#if ATTN_HAVE_CUDA
struct GpuTimer::Impl {
  DeviceBuffer scrub{Backend::gpu, "L2 flush", 2 * gpu_info().l2_bytes};
  double spin_s = 1e-3;  // increased if the host takes longer to queue a launch
  std::vector<cudaEvent_t> events;
  cudaEvent_t event(std::size_t i) {
    while (events.size() <= i) cuda(cudaEventCreate(&events.emplace_back()), "creating an event");
    return events[i];
  }
  ~Impl() {
    for (cudaEvent_t e : events) (void)cudaEventDestroy(e);
  }
};
GpuTimer::GpuTimer() : impl_(std::make_unique<Impl>()) {}
Status GpuTimer::measure(Arguments& arguments, LaunchFunction launch, Sample& sample,
                         bool between_phases) {
  constexpr double kLongestSpin = 64e-3;
  const InUse in_use(arguments.device);
  const cudaStream_t stream = as_cuda(arguments.stream);
  const auto scrub_bytes = static_cast<std::size_t>(impl_->scrub.bytes());
  // The first launch of a kernel loads its code, which waits for the GPU. So the launch is timed
  // again, first with the same spin, then with a longer one.
  double spin_s = impl_->spin_s;
  for (int attempt = 0;; spin_s *= ++attempt % 2 == 0 ? 4 : 1) {
    cuda(cudaMemsetAsync(impl_->scrub.data(), 0, scrub_bytes, stream), "flushing L2");
    if (const Status status = spin(arguments.stream, spin_s); !status.ok()) return status;
    std::vector<std::string> names;
    arguments.on_phase = [&](std::string_view phase) {
      if (between_phases && !names.empty())  // the first phase begins with the launch
        cuda(cudaEventRecord(impl_->event(names.size()), stream), "recording an event");
      names.emplace_back(phase);
    };
    cuda(cudaEventRecord(impl_->event(0), stream), "recording an event");
    const Status status = launch(arguments);
    arguments.on_phase = nullptr;
    const std::size_t last = between_phases ? std::max<std::size_t>(1, names.size()) : 1;
    cuda(cudaEventRecord(impl_->event(last), stream), "recording an event");
    if (!status.ok()) return status;
    const bool hidden = cudaEventQuery(impl_->event(0)) == cudaErrorNotReady;
    cuda(cudaEventSynchronize(impl_->event(last)), "running the kernel");
    if (!hidden && (attempt % 2 == 0 || spin_s < kLongestSpin)) continue;
    if (hidden) impl_->spin_s = spin_s;
    const auto seconds = [&](std::size_t from, std::size_t to) {
      float ms = 0;
      cuda(cudaEventElapsedTime(&ms, impl_->event(from), impl_->event(to)), "reading a timer");
      return double{ms} * 1e-3;
    };
    sample = {seconds(0, last), hidden, {}};
    if (names.size() == last)
      for (std::size_t n = 0; n < last; ++n)
        sample.phases.emplace_back(names[n], seconds(n, n + 1));
    return status;
  }
}
#else
struct GpuTimer::Impl {};
GpuTimer::GpuTimer() {}
Status GpuTimer::measure(Arguments&, LaunchFunction, Sample&, bool) {
  return Status::device_error("built without CUDA");
}
Status spin(Stream, double) { return Status::device_error("built without CUDA"); }
#endif
GpuTimer::~GpuTimer() = default;
Status GpuTimer::time(Arguments& arguments, LaunchFunction launch, Sample& sample) {
  return measure(arguments, launch, sample, /*between_phases=*/false);
}
Status GpuTimer::time_phases(Arguments& arguments, LaunchFunction launch, Sample& sample) {
  return measure(arguments, launch, sample, /*between_phases=*/true);
}

}  // namespace attn
