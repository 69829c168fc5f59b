/// \file
/// One rank on a GPU: its streams, buffers and messages. Only gpus.cpp, which runs all of them,
/// includes it.
#pragma once

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "device/device.h"
#include "ranks/gpus.h"
#include "ranks/nccl.h"
#include "ranks/planted.h"
#include "ranks/release.h"

namespace attn::ranks {

using Clock = std::chrono::steady_clock;
constexpr double kStopSeconds = 10;     // after a failure, for kernels that wait for a peer
constexpr double kConnectSeconds = 60;  // NCCL finds the links between all GPUs

inline void cuda(cudaError_t error, const char* doing) {
  if (error != cudaSuccess)
    throw DeviceError(
        fmt::format("{}: {} ({})", doing, cudaGetErrorName(error), cudaGetErrorString(error)));
}

// One side of a copy, published to the other side: the n-th message from a rank to another.
struct Posted {
  void* data = nullptr;
  int64_t bytes = 0;
  cudaEvent_t ready = nullptr;  // what the receiver has queued before is complete
  cudaEvent_t sent = nullptr;
};

// Where the threads of the ranks meet.
struct Board {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::tuple<int, int, int>, Posted> posted;  // by sender, receiver, number
  std::optional<Status> failure;                       // the first
  void fail(const Status& status) {
    const std::lock_guard lock(mutex);
    if (!failure) failure = status;
    changed.notify_all();
  }
  bool failed() {
    const std::lock_guard lock(mutex);
    return failure.has_value();
  }
};

struct Exchange {
  std::string what;
  std::vector<Message> messages;
  std::vector<int> numbers;
  cudaEvent_t done = nullptr;
  // Of a traced round: its messages are under way; a launch waits for them.
  cudaEvent_t begun = nullptr, ended = nullptr, awaited = nullptr, resumed = nullptr;
};

// Thrown where another rank has failed: its error is reported.
struct Ended {};

class GpuRank final : public Rank {
 public:
  GpuRank(int index, const std::vector<int>& devices, Transport transport, Board& board,
          std::vector<std::unique_ptr<GpuRank>>& all, double seconds)
      : Rank(index, static_cast<int>(devices.size()),
             Device(Backend::gpu, devices[std::size_t(index)])),
        timeout_s(seconds),
        transport_(devices.size() == 1 ? Transport::copies : transport),
        board_(board),
        all_(all) {}

  // On the rank's thread.
  void connect(const std::string& id, const std::vector<int>& devices, unsigned* flag) {
    cuda(cudaSetDevice(device().ordinal), "choosing a GPU");
    int least = 0, greatest = 0;
    cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for priorities");
    cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, least), "making a stream");
    cuda(cudaStreamCreateWithPriority(&transfers_, cudaStreamNonBlocking, greatest),
         "making a stream");
    cuda(cudaEventCreate(&begin), "making an event");
    cuda(cudaEventCreate(&end), "making an event");
    for (const int peer : devices) {
      int can = 0;
      if (peer == device().ordinal) continue;
      cuda(cudaDeviceCanAccessPeer(&can, device().ordinal, peer), "asking for peer access");
      if (!can) {
        out_of_reach_.push_back(peer);
        continue;
      }
      const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
      if (error == cudaErrorPeerAccessAlreadyEnabled)
        (void)cudaGetLastError();
      else
        cuda(error, "enabling peer access");
    }
    // Loads the kernel: while one is held back, loading would wait for it.
    if (Status s = hold(stream, flag, 0); !s.ok()) throw s;
    if (transport_ != Transport::nccl) return;
    comm_.emplace(id, index(), world(), kConnectSeconds, [this] { return board_.failed(); });
    connect_pairs();
  }
  ~GpuRank() override {
    (void)cudaSetDevice(device().ordinal);
    comm_.reset();
    buffers_.clear();
    for (const auto* events : {&events_, &timed_events_})
      for (cudaEvent_t e : *events) (void)cudaEventDestroy(e);
    for (cudaEvent_t e : {begin, end})
      if (e != nullptr) (void)cudaEventDestroy(e);
    for (cudaStream_t s : {stream, transfers_})
      if (s != nullptr) (void)cudaStreamDestroy(s);
  }

  void* allocate(const std::string& name, int64_t bytes, bool zero) override {
    DeviceBuffer& made = buffers_.try_emplace(name, device(), name, bytes).first->second;
    made.poison(zero ? 0 : ~0u);
    return made.data();
  }
  void* buffer(const std::string& name) const override { return buffers_.at(name).data(); }
  Rank& peer(int index) const override {
    if (all_.size() != static_cast<std::size_t>(world()))
      throw DeviceError("--rank: this step writes to peers of its own process");
    GpuRank& rank = *all_[static_cast<std::size_t>(index)];
    if (std::ranges::count(out_of_reach_, rank.device().ordinal) > 0)
      throw DeviceError(fmt::format("GPU {} cannot write to the memory of GPU {}", device().ordinal,
                                    rank.device().ordinal));
    return rank;
  }
  int transfer_sms() const override { return comm_ ? nccl_ctas() : 0; }
  void forget_buffers() { buffers_.clear(); }

  void compute(const std::string&, std::function<Status(Stream)> launch) override {
    if (variant == Variant::transfers_only) return;
    if (const Status status = launch(stream); !status.ok()) throw status;
  }
  void compute_with_peers(const std::string& what, std::function<Status(Stream)> launch) override {
    peers_in_ = what;
    compute(what, std::move(launch));
  }
  void all_reduce(const std::string& what, float* data, int64_t count,
                  Reduction reduction) override {
    if (variant == Variant::launches_only || world() == 1) return;
    if (!comm_) throw Status::unsupported("--transport copies: has no all-reduce");
    peers_in_ = what;
    const Status status = comm_->all_reduce(what, data, count, reduction, stream);
    if (!status.ok()) throw status;
  }
  Ticket exchange(const std::string& what, const std::vector<Message>& messages,
                  bool grouped) override {
    if (variant == Variant::launches_only) return 0;
    const auto ticket = static_cast<Ticket>(exchanges_.size());
    Exchange& made = exchanges_.emplace_back(Exchange{what, {}, {}});
    for (const Message& m : messages) {
      if (m.bytes == 0) continue;
      const auto pair = m.sends ? std::pair(index(), m.peer) : std::pair(m.peer, index());
      made.numbers.push_back(numbers_[pair][m.sends]++);
      made.messages.push_back(m);
    }
    const cudaEvent_t ready = event();
    cuda(cudaEventRecord(ready, stream), "recording an event");
    cuda(cudaStreamWaitEvent(transfers_, ready, 0), "waiting for an event");
    if (transport_ == Transport::nccl) made.begun = traced(transfers_);
    const std::size_t at_once = grouped ? made.messages.size() : 1;
    for (std::size_t n = 0; n < made.messages.size(); n += at_once)
      if (transport_ == Transport::nccl)
        send_by_nccl(made, n, at_once);
      else
        copy(made, n, at_once, ready);
    made.ended = traced(transfers_);
    made.done = event();
    cuda(cudaEventRecord(made.done, transfers_), "recording an event");
    return ticket;
  }
  void wait(Ticket ticket) override {
    if (variant == Variant::launches_only) return;
    Exchange& exchange = exchanges_[static_cast<std::size_t>(ticket)];
    exchange.awaited = traced(stream);
    cuda(cudaStreamWaitEvent(stream, exchange.done, 0), "waiting for an exchange");
    if (transport_ == Transport::copies)
      for (std::size_t n = 0; n < exchange.messages.size(); ++n)
        if (!exchange.messages[n].sends) wait_for_copy(exchange, n, stream);
    exchange.resumed = traced(stream);
  }
  // Of a traced round that has ended.
  double seconds_under_way() const {
    return sum_of([](const Exchange& e) { return std::pair(e.begun, e.ended); });
  }
  double seconds_waited() const {
    return sum_of([](const Exchange& e) { return std::pair(e.awaited, e.resumed); });
  }

  // A round begins: events of the last one are used again.
  void begin_round() {
    exchanges_.clear(), used_events_ = used_timed_ = 0, numbers_.clear(), peers_in_.clear();
    if (comm_) comm_->limit(timeout_s, [this] { return board_.failed(); });
  }
  // Waits for all that was queued, at most so long. Returns "" or what is missing.
  std::string wait_for_end() {
    const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
    for (;;) {
      const cudaError_t state = cudaEventQuery(end);
      if (state == cudaSuccess) return waited_too_long();
      if (state != cudaErrorNotReady) cuda(state, "running the kernels of a rank");
      if (Clock::now() > deadline || board_.failed()) break;
      std::this_thread::yield();
    }
    if (board_.failed()) throw Ended{};
    for (const Exchange& exchange : exchanges_)
      if (cudaEventQuery(exchange.done) == cudaErrorNotReady)
        for (const bool sends : {false, true})
          for (const Message& m : exchange.messages)
            if (m.sends == sends) return text_of(exchange.what, m);
    return peers_in_.empty() ? fmt::format("time-out of {:g} s: rank {}: its kernels do not end",
                                           timeout_s, index())
                             : waits_in_launch();
  }
  // A write outside one of its buffers, or nothing.
  std::optional<std::string> broken_guard() const {
    for (const auto& [name, buffer] : buffers_)
      if (auto broken = buffer.broken_guard()) return broken;
    return std::nullopt;
  }
  void abort() {
    if (comm_) comm_->abort();
  }
  // Rows of which each process has those of its rank, and 0 elsewhere, become whole.
  void share(const Output& output) {
    comm_->limit(timeout_s, [this] { return board_.failed(); });
    peers_in_ = "the exchange of results";
    if (Status s = comm_->sum_bytes(peers_in_, output.data, output.bytes, stream); !s.ok()) throw s;
    cuda(cudaEventRecord(end, stream), "recording an event");
    if (const std::string missing = wait_for_end(); !missing.empty())
      throw Status::device_error(missing);
  }
  bool idle() const {
    const InUse in_use(device());
    for (cudaStream_t s : {stream, transfers_})
      if (s != nullptr && cudaStreamQuery(s) == cudaErrorNotReady) return false;
    return true;
  }

  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  double timeout_s;
  Variant variant = Variant::whole;
  int64_t buffer_bytes() const {
    int64_t all = 0;
    for (const auto& [name, buffer] : buffers_) all += buffer.bytes();
    return all;
  }

 private:
  // NCCL connects two ranks at their first message, which blocks the host if one of them never
  // sends it: so all pairs exchange a byte first.
  void connect_pairs() {
    // Freed after the communicator: freeing waits for a kernel of NCCL that waits for a peer.
    auto* const at = static_cast<std::byte*>(allocate("connections", 2 * world(), true));
    std::vector<Message> messages;
    for (int peer = 0; peer < world(); ++peer) {
      if (peer == index()) continue;
      messages.push_back(send_to(peer, at + peer, 1));
      messages.push_back(receive_from(peer, at + world() + peer, 1));
    }
    const Status status =
        comm_->group("connecting all pairs", messages.data(), messages.size(), transfers_);
    if (!status.ok()) throw status;
    const auto deadline = Clock::now() + std::chrono::duration<double>(kConnectSeconds);
    cudaError_t state = cudaStreamQuery(transfers_);
    for (; state == cudaErrorNotReady; state = cudaStreamQuery(transfers_))
      if (Clock::now() > deadline || board_.failed())
        throw Status::device_error(fmt::format("time-out of {:g} s: rank {} connects to the others",
                                               kConnectSeconds, index()));
    cuda(state, "connecting all pairs");
  }
  std::string waits_in_launch() const {
    return fmt::format("time-out of {:g} s: rank {} waits for a peer in {}", timeout_s, index(),
                       peers_in_);
  }
  // Kernels that wait for a peer end by themselves, and say so.
  std::string waited_too_long() const {
    const auto late = buffers_.find("late");
    unsigned said = 0;
    if (late == buffers_.end()) return "";
    cuda(cudaMemcpy(&said, late->second.data(), sizeof said, cudaMemcpyDeviceToHost),
         "reading a flag");
    return said == 0 ? "" : waits_in_launch();
  }
  std::string text_of(const std::string& what, const Message& m) const {
    return fmt::format("time-out of {:g} s: rank {} {} {} bytes {} rank {} in {}", timeout_s,
                       index(), m.sends ? "sends" : "waits for", m.bytes, m.sends ? "to" : "of",
                       m.peer, what);
  }
  // An event that is recorded in a traced round, and null in others.
  cudaEvent_t traced(cudaStream_t in) {
    if (variant != Variant::traced) return nullptr;
    if (used_timed_ == timed_events_.size())
      cuda(cudaEventCreate(&timed_events_.emplace_back()), "making an event");
    const cudaEvent_t made = timed_events_[used_timed_++];
    cuda(cudaEventRecord(made, in), "recording an event");
    return made;
  }
  template <class Interval>
  double sum_of(Interval interval) const {
    double seconds = 0;
    for (const Exchange& exchange : exchanges_) {
      const auto [from, to] = interval(exchange);
      float ms = 0;
      if (from == nullptr || to == nullptr) continue;
      cuda(cudaEventElapsedTime(&ms, from, to), "reading a timer");
      seconds += double{ms} * 1e-3;
    }
    return seconds;
  }
  cudaEvent_t event() {
    if (used_events_ == events_.size())
      cuda(cudaEventCreateWithFlags(&events_.emplace_back(), cudaEventDisableTiming),
           "making an event");
    return events_[used_events_++];
  }

  void send_by_nccl(const Exchange& exchange, std::size_t first, std::size_t count) {
    std::vector<Message> kept;
    for (std::size_t n = first; n < first + count; ++n)
      if (!exchange.messages[n].sends || !lose_message()) kept.push_back(exchange.messages[n]);
    if (kept.empty()) return;
    const Status status = comm_->group(exchange.what, kept.data(), kept.size(), transfers_);
    if (!status.ok()) throw status;
  }

  // The sender copies when the receiver has published its buffer. Receivers publish before they
  // wait for anything, so grouped messages cannot deadlock.
  void copy(Exchange& exchange, std::size_t first, std::size_t count, cudaEvent_t ready) {
    for (std::size_t n = first; n < first + count; ++n)
      if (const Message& m = exchange.messages[n]; !m.sends) {
        const std::lock_guard lock(board_.mutex);
        board_.posted[{m.peer, index(), exchange.numbers[n]}] = {m.data, m.bytes, ready, nullptr};
        board_.changed.notify_all();
      }
    for (std::size_t n = first; n < first + count; ++n) {
      const Message& m = exchange.messages[n];
      if (!m.sends || lose_message()) continue;
      const std::tuple key{index(), m.peer, exchange.numbers[n]};
      Posted& to = found(key, exchange.what, m, [](const Posted&) { return true; });
      if (to.bytes != m.bytes)
        throw Status::device_error(
            fmt::format("rank {} sends {} bytes to rank {}, which expects "
                        "{}: {}",
                        index(), m.bytes, m.peer, to.bytes, exchange.what));
      cuda(cudaStreamWaitEvent(transfers_, to.ready, 0), "waiting for a receiver");
      if (exchange.begun == nullptr) exchange.begun = traced(transfers_);
      cuda(cudaMemcpyAsync(to.data, m.data, static_cast<std::size_t>(m.bytes), cudaMemcpyDefault,
                           transfers_),
           "copying to a peer");
      const cudaEvent_t sent = event();
      cuda(cudaEventRecord(sent, transfers_), "recording an event");
      const std::lock_guard lock(board_.mutex);
      to.sent = sent;
      board_.changed.notify_all();
    }
    if (count == 1 && !exchange.messages[first].sends) wait_for_copy(exchange, first, transfers_);
  }
  void wait_for_copy(const Exchange& exchange, std::size_t n, cudaStream_t waits) {
    const Message& m = exchange.messages[n];
    const Posted& from = found({m.peer, index(), exchange.numbers[n]}, exchange.what, m,
                               [](const Posted& p) { return p.sent != nullptr; });
    cuda(cudaStreamWaitEvent(waits, from.sent, 0), "waiting for a copy");
  }
  // Waits on the host until a peer's thread has come so far.
  template <class Condition>
  Posted& found(const std::tuple<int, int, int>& key, const std::string& what, const Message& m,
                Condition condition) {
    std::unique_lock lock(board_.mutex);
    std::map<std::tuple<int, int, int>, Posted>::iterator at;
    const bool there = board_.changed.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] {
      at = board_.posted.find(key);
      return board_.failure || (at != board_.posted.end() && condition(at->second));
    });
    if (board_.failure) throw Ended{};
    if (!there) throw Status::device_error(text_of(what, m));
    return at->second;
  }

  Transport transport_;
  std::string peers_in_;  // the launch in which kernels wait for each other
  Board& board_;
  std::vector<std::unique_ptr<GpuRank>>& all_;
  std::vector<int> out_of_reach_;  // GPUs whose memory this one cannot access
  cudaStream_t transfers_ = nullptr;
  std::optional<NcclComm> comm_;
  std::map<std::string, DeviceBuffer> buffers_;
  std::vector<Exchange> exchanges_;
  std::vector<cudaEvent_t> events_, timed_events_;
  std::size_t used_events_ = 0, used_timed_ = 0;
  std::map<std::pair<int, int>, int[2]> numbers_;
};

}  // namespace attn::ranks
