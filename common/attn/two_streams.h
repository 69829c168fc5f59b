/// \file
/// Two launches of a kernel in two streams, so that both may run concurrently.
#pragma once

#include <cstddef>
#include <string>
#include <tuple>

#include "attn/kernel.h"

#ifndef ATTN_EMULATED
#include <map>
#endif

namespace attn {
inline namespace ATTN_BACKEND {

#ifndef ATTN_EMULATED
/// A side stream for a second launch, and the events of a fork and a join. Stream capture accepts
/// the same pattern: the fork takes the side stream into the graph, and the join brings it back,
/// without which the capture cannot end.
class SideStream {
 public:
  /// The side stream of this GPU and host thread. It is per thread, because another thread would
  /// record its own work between an event and the wait for it. The first fork creates it, which
  /// must happen before a capture; it is kept until the thread ends.
  static SideStream& of_gpu(int ordinal) {
    static thread_local std::map<int, SideStream> all;
    return all[ordinal];
  }
  SideStream() = default;
  SideStream(const SideStream&) = delete;
  ~SideStream() {  // none of these calls waits for queued work or cancels it
    for (const cudaEvent_t event : {fork_, join_})
      if (event) (void)cudaEventDestroy(event);
    if (stream_) (void)cudaStreamDestroy(stream_);
  }

  Stream stream() const { return stream_; }
  /// Later work in the side stream waits for all work queued in `stream`.
  Status fork(Stream stream) {
    // The default stream synchronises with all blocking streams, so this one is non-blocking.
    Status s;
    if (!stream_)
      s = status_of(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
    for (cudaEvent_t* const event : {&fork_, &join_})
      if (s.ok() && !*event)
        s = status_of(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "making an event");
    return s.ok() ? wait(static_cast<cudaStream_t>(stream), fork_, stream_) : s;
  }
  /// Later work in `stream` waits for all work queued in the side stream.
  Status join(Stream stream) const {
    return wait(stream_, join_, static_cast<cudaStream_t>(stream));
  }

 private:
  static Status status_of(cudaError_t error, const char* doing) {
    if (error == cudaSuccess) return Status::success();
    (void)cudaGetLastError();  // clears the error: the next launch must not report it again
    return Status::device_error(std::string(doing) + ": " + cudaGetErrorName(error));
  }
  static Status wait(cudaStream_t first, cudaEvent_t event, cudaStream_t then) {
    const Status s = status_of(cudaEventRecord(event, first), "recording an event");
    return s.ok() ? status_of(cudaStreamWaitEvent(then, event, 0), "waiting for an event") : s;
  }

  cudaStream_t stream_ = nullptr;
  cudaEvent_t fork_ = nullptr, join_ = nullptr;
};
#endif

/// Launches `kernel` with the arguments `first` in `stream` and the others in a side stream. Both
/// wait for earlier work in `stream`, and later work waits for both. The GPU decides whether they
/// run concurrently, and neither may wait for the other. Their grids are equal and one-dimensional.
///
/// The emulator has no streams: both launches are one grid, and blockIdx.y selects the launch. So
/// blocks of both are resident together, and races between them are found.
template <class... Parameters, class Arguments>
[[nodiscard]] Status launch_in_two_streams(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                                           std::size_t shared_bytes, Stream stream,
                                           const Arguments& first, const Arguments& second) {
  if (grid.y != 1 || grid.z != 1)
    return Status::unsupported("two streams: only grids of one dimension");
#ifdef ATTN_EMULATED
  (void)stream;
  try {
    attn::emulator::run_grid({grid.x, 2}, block, shared_bytes,
                             {[&] { std::apply(kernel, blockIdx.y == 0 ? first : second); },
                              reinterpret_cast<const void*>(kernel), ATTN_INSTRUMENTED});
  } catch (const attn::emulator::KernelError& e) {
    return Status::kernel_error(e.what());
  }
  return Status::success();
#else
  int gpu = 0;
  if (const cudaError_t error = cudaGetDevice(&gpu); error != cudaSuccess)
    return Status::device_error(cudaGetErrorString(error));
  SideStream& side = SideStream::of_gpu(gpu);
  if (Status forked = side.fork(stream); !forked.ok()) return forked;
  const auto launch = [&](Stream in, const Arguments& arguments) {
    return std::apply(
        [&](auto... values) {
          return launch_kernel(kernel, grid, block, shared_bytes, in, values...);
        },
        arguments);
  };
  Status status = launch(side.stream(), second);
  if (status.ok()) status = launch(stream, first);
  // Also after a failure: work in the side stream must complete before later work starts.
  const Status joined = side.join(stream);
  return status.ok() ? joined : status;
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
