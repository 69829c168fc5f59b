// Memory of recordings on a GPU, and the clocks of its SMs. Built by nvcc only.
#include "device/recording.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>

#include "device/device.h"

namespace attn {
namespace {

// All rings together, and the records of one ring.
constexpr std::uint64_t kMostBytes = std::uint64_t{512} << 20;
constexpr std::uint64_t kMostRecords = 16384, kLeastRecords = 64;
constexpr std::size_t kMostText = 64;  // bytes of a name
// Points of an SM's clock per call of sample_clocks, and the time between two.
constexpr int kSamples = 8;
constexpr std::uint64_t kSampleNs = 2000;
constexpr int kBlocksOfSamples = 2;  // per SM: the second finds an SM that the first has missed

__device__ std::uint64_t global_timer() {
  std::uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// Waits for changes of %globaltimer: the clock is read where its value is exact.
__global__ void sample_kernel(SmSample* samples) {
  std::uint32_t sm, least = ~0u;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  const std::uint64_t begin = global_timer();
  for (int n = 0; n < kSamples; ++n) {
    std::uint64_t last = global_timer(), now = last;
    while (last < begin + n * kSampleNs) last = global_timer();
    while ((now = global_timer()) == last) {
    }
    std::uint64_t clock;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(clock));
    least = min(least, static_cast<std::uint32_t>(now - last));
    samples[blockIdx.x * kSamples + n] = {sm, 0, clock, now};
  }
  for (int n = 0; n < kSamples; ++n) samples[blockIdx.x * kSamples + n].resolution_ns = least;
}

__global__ void text_kernel(const std::uint64_t* addresses, char* texts) {
  const char* from = reinterpret_cast<const char*>(addresses[blockIdx.x]);
  char* to = texts + blockIdx.x * kMostText;
  for (std::size_t n = 0; n + 1 < kMostText && from[n]; ++n) to[n] = from[n];
}

Status status_of(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return Status::success();
  return Status::device_error(std::string("--timeline: ") + doing + ": " +
                              cudaGetErrorString(error));
}

}  // namespace

struct Recording::Impl {
  struct Kernel {
    const void* function;
    RecordedKernel shape;
    std::size_t index;
    RecordTarget target;
    std::unique_ptr<DeviceBuffer> rings, members;
  };
  Device device;
  int sms = 0;
  std::vector<Kernel> kernels;
  std::vector<std::string> marks;
  std::vector<std::unique_ptr<DeviceBuffer>> samples;
  Recording* before = nullptr;
};

namespace {
thread_local Recording* current_recording = nullptr;
}

Recording* Recording::current() { return current_recording; }

Recording::Recording(Device device) : impl_(new Impl{device}) {
  impl_->sms = gpu_info().num_sms;
  impl_->before = std::exchange(current_recording, this);
}
Recording::~Recording() {
  current_recording = impl_->before;
  delete impl_;
}

Status Recording::add(const void* kernel, const unsigned (&grid)[3], unsigned threads,
                      const std::vector<const char*>& marks, std::size_t& shared_bytes,
                      std::size_t& index, RecordTarget& target, bool& fresh) {
  for (const Impl::Kernel& k : impl_->kernels)
    if (k.function == kernel && std::equal(grid, grid + 3, k.shape.blocks) &&
        k.shape.warps == (threads + 31) / 32) {
      shared_bytes = k.target.shared_bytes, index = k.index, target = k.target, fresh = false;
      return Status::success();
    }
  fresh = true;
  index = impl_->kernels.size();
  if (index == kRecordTargets)
    return Status::device_error("--timeline: at most " + std::to_string(kRecordTargets) +
                               " kernels of a step can be recorded");
  // The size tells kernels of a file apart: no two have the same.
  const auto taken = [&] {
    return std::ranges::any_of(impl_->kernels, [&](const Impl::Kernel& k) {
      return k.target.shared_bytes == shared_bytes;
    });
  };
  while (taken()) shared_bytes += 16;
  RecordedKernel shape;
  std::copy_n(grid, 3, shape.blocks);
  shape.warps = (threads + 31) / 32;
  const std::uint64_t rings = shape.count() * shape.warps;
  // All rings of a recording have the size of the first kernel's.
  const std::uint64_t most = impl_->kernels.empty() ? kMostBytes / sizeof(Record) / rings
                                                    : impl_->kernels[0].shape.capacity;
  if (most < kLeastRecords)
    return Status::device_error(
        "--timeline: " + std::to_string(shape.count()) + " blocks of " +
        std::to_string(shape.warps) + " warps: at most " +
        std::to_string(kMostBytes / sizeof(Record) / kLeastRecords / shape.warps) +
        " such blocks can be recorded on a GPU: choose a smaller problem");
  shape.capacity = std::bit_floor(std::min(most, kMostRecords));
  const std::uint64_t ring_bytes = shape.capacity * sizeof(Record);
  Impl::Kernel k{kernel, shape, index, {}, nullptr, nullptr};
  // One more ring: the first one is aligned to its size.
  k.rings = std::make_unique<DeviceBuffer>(impl_->device, "records",
                                           static_cast<std::int64_t>((rings + 1) * ring_bytes));
  k.members = std::make_unique<DeviceBuffer>(
      impl_->device, "members", static_cast<std::int64_t>(kMostMembers * sizeof(RecordedMember)));
  const auto base = reinterpret_cast<std::uint64_t>(k.rings->data());
  k.target = {static_cast<std::uint32_t>(shared_bytes),
              static_cast<std::uint32_t>(ring_bytes - 1),
              static_cast<std::uint32_t>(shape.warps),
              0,
              (base + ring_bytes - 1) / ring_bytes * ring_bytes,
              reinterpret_cast<std::uint64_t>(k.members->data())};
  target = k.target;
  impl_->kernels.push_back(std::move(k));
  impl_->marks.assign(marks.begin(), marks.end());
  return clear();
}

Status Recording::clear() {
  for (const Impl::Kernel& k : impl_->kernels)
    for (const DeviceBuffer* b : {k.rings.get(), k.members.get()})
      if (const Status s = status_of(
              cudaMemset(b->data(), 0, static_cast<std::size_t>(b->bytes())), "clearing records");
          !s.ok())
        return s;
  return Status::success();
}

Status Recording::sample_clocks() {
  const int blocks = kBlocksOfSamples * impl_->sms;
  impl_->samples.push_back(std::make_unique<DeviceBuffer>(
      impl_->device, "clocks", static_cast<std::int64_t>(blocks * kSamples * sizeof(SmSample))));
  sample_kernel<<<static_cast<unsigned>(blocks), 1>>>(
      static_cast<SmSample*>(impl_->samples.back()->data()));
  return status_of(cudaGetLastError(), "sampling clocks");
}

Status Recording::read(RecordedLaunch& launch) {
  synchronize(impl_->device);
  std::vector<std::uint64_t> addresses;
  for (Impl::Kernel& k : impl_->kernels) {
    RecordedKernel& to = launch.kernels.emplace_back(k.shape);
    to.records.resize(to.count() * to.warps * to.capacity);
    k.rings->download(to.records.data(),
                      static_cast<std::int64_t>(
                          k.target.rings - reinterpret_cast<std::uint64_t>(k.rings->data())),
                      static_cast<std::int64_t>(to.records.size() * sizeof(Record)));
    to.members.resize(kMostMembers);
    k.members->download(to.members.data());
    std::erase_if(to.members, [](const RecordedMember& m) { return m.name == 0; });
    for (const RecordedMember& m : to.members) addresses.push_back(m.name);
  }
  for (const std::string& name : impl_->marks) launch.marks[record_hash(name.c_str())] = name;
  for (const auto& samples : impl_->samples) {
    const std::size_t old = launch.samples.size();
    launch.samples.resize(old + static_cast<std::size_t>(samples->bytes()) / sizeof(SmSample));
    samples->download(launch.samples.data() + old);
  }
  if (addresses.empty()) return Status::success();
  DeviceBuffer from(impl_->device, "addresses",
                    static_cast<std::int64_t>(addresses.size() * sizeof(std::uint64_t)));
  DeviceBuffer to(impl_->device, "names",
                  static_cast<std::int64_t>(addresses.size() * kMostText));
  from.upload(addresses.data());
  to.poison(0);
  text_kernel<<<static_cast<unsigned>(addresses.size()), 1>>>(
      static_cast<const std::uint64_t*>(from.data()), static_cast<char*>(to.data()));
  if (const Status s = status_of(cudaGetLastError(), "reading names"); !s.ok()) return s;
  synchronize(impl_->device);
  std::vector<char> texts(addresses.size() * kMostText);
  to.download(texts.data());
  for (std::size_t n = 0; n < addresses.size(); ++n)
    launch.texts[addresses[n]] = texts.data() + n * kMostText;
  return Status::success();
}

}  // namespace attn
