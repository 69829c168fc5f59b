#include "ranks/nccl.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "device/device.h"

#if __has_include(<nccl.h>)
#include <nccl.h>
#else
// As in nccl.h of 2.19. NCCL accepts the shorter configurations of older headers.
extern "C" {
typedef struct ncclComm* ncclComm_t;
typedef struct {
  char internal[128];
} ncclUniqueId;
typedef enum { ncclSuccess = 0, ncclInProgress = 7 } ncclResult_t;
typedef enum { ncclInt8 = 0, ncclFloat32 = 7 } ncclDataType_t;
typedef enum { ncclSum = 0, ncclMax = 2 } ncclRedOp_t;
typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cgaClusterSize, minCTAs, maxCTAs;
  const char* netName;
  int splitShare;
} ncclConfig_t;
}
#define NCCL_CONFIG_INITIALIZER \
  { sizeof(ncclConfig_t), 0xcafebeef, 21900, INT_MIN, INT_MIN, INT_MIN, INT_MIN, nullptr, INT_MIN }
#endif

namespace attn::ranks {
namespace {

constexpr int kOldest = 21803;  // version 2.18.3: the first whose point-to-point calls do not block
struct Library {
  ncclResult_t (*GetVersion)(int*);
  ncclResult_t (*GetUniqueId)(ncclUniqueId*);
  ncclResult_t (*CommInitRankConfig)(ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*);
  ncclResult_t (*CommGetAsyncError)(ncclComm_t, ncclResult_t*);
  ncclResult_t (*CommAbort)(ncclComm_t);
  ncclResult_t (*GroupStart)();
  ncclResult_t (*GroupEnd)();
  ncclResult_t (*Send)(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
  ncclResult_t (*Recv)(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
  ncclResult_t (*AllReduce)(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                            cudaStream_t);
  const char* (*GetErrorString)(ncclResult_t);
};

Library load() {
  const char* const given = std::getenv("ATTN_NCCL");
  void* handle = nullptr;
  for (const char* name : {given ? given : "libnccl.so.2", "/usr/local/cuda/lib64/libnccl.so.2",
                           "/usr/local/cuda/lib/libnccl.so.2"})
    if (handle == nullptr) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr)
    throw DeviceError(
        "NCCL: no libnccl.so.2 (ATTN_NCCL=FILE names it; --transport copies needs none)");
  Library library{};
  const auto find = [&](auto& function, const char* name) {
    void* const symbol = dlsym(handle, name);
    if (symbol == nullptr) throw DeviceError(fmt::format("NCCL: the library has no {}", name));
    std::memcpy(&function, &symbol, sizeof symbol);
  };
  find(library.GetVersion, "ncclGetVersion");
  int version = 0;
  if (library.GetVersion(&version) != ncclSuccess || version < kOldest)
    throw DeviceError(fmt::format("NCCL: version {} is older than {}", version, kOldest));
  find(library.GetUniqueId, "ncclGetUniqueId");
  find(library.CommInitRankConfig, "ncclCommInitRankConfig");
  find(library.CommGetAsyncError, "ncclCommGetAsyncError");
  find(library.CommAbort, "ncclCommAbort");
  find(library.GroupStart, "ncclGroupStart");
  find(library.GroupEnd, "ncclGroupEnd");
  find(library.Send, "ncclSend");
  find(library.Recv, "ncclRecv");
  find(library.AllReduce, "ncclAllReduce");
  find(library.GetErrorString, "ncclGetErrorString");
  return library;
}
const Library& nccl() {
  static const Library library = load();
  return library;
}

}  // namespace

// Few of 132 SMs, since attention runs at the same time.
int nccl_ctas() {
  const char* const text = std::getenv("ATTN_NCCL_CTAS");
  return text == nullptr ? 8 : std::max(1, std::atoi(text));
}

struct NcclComm::Impl {
  ncclComm_t comm = nullptr;
  double timeout_s = 0;
  std::function<bool()> ended = [] { return false; };

  // Waits until a call has done its part on the host.
  Status settle(ncclResult_t result, const std::string& what) const {
    using Clock = std::chrono::steady_clock;
    const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
    while (result == ncclInProgress) {
      if (Clock::now() > deadline || ended())
        return Status::device_error(fmt::format("time-out of {:g} s: NCCL in {}", timeout_s, what));
      if (nccl().CommGetAsyncError(comm, &result) != ncclSuccess) break;
      if (result == ncclInProgress) std::this_thread::yield();
    }
    if (result == ncclSuccess) return Status::success();
    return Status::device_error(fmt::format("NCCL: {}: {}", what, nccl().GetErrorString(result)));
  }
};

std::string NcclComm::unique_id() {
  ncclUniqueId id;
  if (const ncclResult_t result = nccl().GetUniqueId(&id); result != ncclSuccess)
    throw DeviceError(fmt::format("NCCL: making an id: {}", nccl().GetErrorString(result)));
  return {id.internal, sizeof id.internal};
}

int NcclComm::version() {
  int version = 0;
  (void)nccl().GetVersion(&version);
  return version;
}

NcclComm::NcclComm(const std::string& id, int rank, int world, double timeout_s,
                   std::function<bool()> ended)
    : impl_(std::make_unique<Impl>()) {
  ncclUniqueId same;
  if (id.size() != sizeof same.internal)
    throw DeviceError(fmt::format("NCCL: an id of {} bytes, not {}", id.size(), sizeof same));
  std::memcpy(same.internal, id.data(), id.size());
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.minCTAs = config.maxCTAs = nccl_ctas();
  // The SMs that attention leaves free are not of one GPC: no cluster of blocks would fit.
  config.cgaClusterSize = 0;
  impl_->timeout_s = timeout_s, impl_->ended = std::move(ended);
  const ncclResult_t result = nccl().CommInitRankConfig(&impl_->comm, world, same, rank, &config);
  const Status status = impl_->settle(result, fmt::format("connecting rank {} of {}", rank, world));
  if (!status.ok()) {
    abort();
    throw DeviceError(status.message);
  }
}
// Aborts: all that was queued has been waited for, or has failed.
NcclComm::~NcclComm() { abort(); }

void NcclComm::limit(double timeout_s, std::function<bool()> ended) {
  impl_->timeout_s = timeout_s, impl_->ended = std::move(ended);
}

void NcclComm::abort() {
  if (impl_->comm != nullptr) (void)nccl().CommAbort(impl_->comm);
  impl_->comm = nullptr;
}

Status NcclComm::group(const std::string& what, const Message* messages, std::size_t count,
                       Stream stream) {
  if (impl_->comm == nullptr) return Status::device_error("NCCL: aborted before " + what);
  const auto in = static_cast<cudaStream_t>(stream);
  ncclResult_t result = nccl().GroupStart();
  for (const Message* m = messages; m != messages + count; ++m) {
    if (result != ncclSuccess && result != ncclInProgress) break;
    const auto bytes = static_cast<std::size_t>(m->bytes);
    result = m->sends ? nccl().Send(m->data, bytes, ncclInt8, m->peer, impl_->comm, in)
                      : nccl().Recv(m->data, bytes, ncclInt8, m->peer, impl_->comm, in);
  }
  const ncclResult_t ended = nccl().GroupEnd();
  if (result != ncclSuccess && result != ncclInProgress) return impl_->settle(result, what);
  return impl_->settle(ended, what);
}

Status NcclComm::all_reduce(const std::string& what, float* data, int64_t count,
                            Reduction reduction, Stream stream) {
  if (impl_->comm == nullptr) return Status::device_error("NCCL: aborted before " + what);
  const auto op = reduction == Reduction::max ? ncclMax : ncclSum;
  return impl_->settle(nccl().AllReduce(data, data, static_cast<std::size_t>(count), ncclFloat32,
                                        op, impl_->comm, static_cast<cudaStream_t>(stream)),
                       what);
}

Status NcclComm::sum_bytes(const std::string& what, void* data, int64_t bytes, Stream stream) {
  if (impl_->comm == nullptr) return Status::device_error("NCCL: aborted before " + what);
  return impl_->settle(nccl().AllReduce(data, data, static_cast<std::size_t>(bytes), ncclInt8,
                                        ncclSum, impl_->comm, static_cast<cudaStream_t>(stream)),
                       what);
}

}  // namespace attn::ranks
