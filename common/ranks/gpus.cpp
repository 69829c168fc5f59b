#include "ranks/gpus.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <thread>
#include <utility>

#include "ranks/gpu_rank.h"
#include "ranks/meeting.h"

namespace attn::ranks {

struct GpuRanks::Impl {
  std::vector<int> devices;
  Board board;
  std::vector<std::unique_ptr<GpuRank>> ranks;
  Program program;
  unsigned* flag = nullptr;  // host memory, mapped by all GPUs: [0] releases, [1] is of hold()
  unsigned round = 0;
  std::vector<std::unique_ptr<DeviceBuffer>> scrub;  // for flushing L2
  std::string meeting;                               // the file, until all ranks are connected

  // The file of rank 0 is for this run: no later one may find it.
  void end_meeting() {
    std::error_code error;
    if (!meeting.empty()) std::filesystem::remove(std::exchange(meeting, ""), error);
  }

  ~Impl() {
    end_meeting();
    ranks.clear();
    scrub.clear();
    if (flag != nullptr) (void)cudaFreeHost(flag);
  }

  // Calls a function on a thread per rank, and waits for all of them.
  Status on_threads(const std::function<void(GpuRank&)>& body) {
    std::vector<std::thread> threads;
    for (const auto& rank : ranks)
      threads.emplace_back([&] {
        try {
          cuda(cudaSetDevice(rank->device().ordinal), "choosing a GPU");
          body(*rank);
        } catch (const Ended&) {
        } catch (const Status& status) {
          board.fail(status);
        } catch (const std::exception& e) {
          board.fail(Status::device_error(e.what()));
        }
      });
    for (std::thread& t : threads) t.join();
    if (!board.failure) return Status::success();
    *static_cast<volatile unsigned*>(flag) = ++round;  // releases kernels that are held back
    stop_all();
    return *board.failure;
  }

  // Ends NCCL's kernels that wait for a peer: of all ranks at once, since each may wait for the
  // others. While a kernel spins, nothing that the process does later ends, not even freeing
  // memory: so the process then reports the failure and ends here.
  void stop_all() {
    end_meeting();
    const auto deadline = Clock::now() + std::chrono::duration<double>(kStopSeconds);
    const auto left = std::make_shared<std::atomic<std::size_t>>(ranks.size());
    for (const auto& rank : ranks)
      std::thread([left, of = rank.get()] {
        (void)cudaSetDevice(of->device().ordinal);
        of->abort();
        --*left;
      }).detach();
    const auto stopped = [&] {
      return *left == 0 && std::ranges::all_of(ranks, [](const auto& r) { return r->idle(); });
    };
    while (!stopped()) {
      if (Clock::now() > deadline) {
        fmt::print(stderr, "{}: {}; a kernel goes on for {:g} s: the process ends\n",
                   program_invocation_short_name, board.failure->message, kStopSeconds);
        std::fflush(nullptr);
        std::_Exit(4);  // as of any device error
      }
      std::this_thread::yield();
    }
  }

  Status play(RoundTime* times, Variant variant) {
    if (board.failure) return *board.failure;
    board.posted.clear();
    ++round;
    std::atomic<int> queued{0};
    const Status status = on_threads([&](GpuRank& rank) {
      rank.begin_round();
      rank.variant = variant;
      if (times != nullptr) {
        DeviceBuffer& l2 = *scrub[scrub.size() == 1 ? 0 : static_cast<std::size_t>(rank.index())];
        cuda(cudaMemsetAsync(l2.data(), 0, static_cast<std::size_t>(l2.bytes()), rank.stream),
             "flushing L2");
        if (Status s = hold(rank.stream, flag, round); !s.ok()) throw s;
      }
      cuda(cudaEventRecord(rank.begin, rank.stream), "recording an event");
      program.run(rank);
      cuda(cudaEventRecord(rank.end, rank.stream), "recording an event");
      // The last thread that has queued its work releases all GPUs.
      if (++queued == static_cast<int>(ranks.size()))
        *static_cast<volatile unsigned*>(flag) = round;
      if (const std::string missing = rank.wait_for_end(); !missing.empty())
        throw Status::device_error(missing);
    });
    if (!status.ok() || times == nullptr) return status;
    if (static_cast<volatile unsigned*>(flag)[1] == round)
      return Status::device_error("the work of all ranks takes longer to queue than a GPU waits");
    times->seconds.clear();
    for (const auto& rank : ranks) {
      const InUse in_use(rank->device());
      float ms = 0;
      cuda(cudaEventElapsedTime(&ms, rank->begin, rank->end), "reading a timer");
      times->seconds.push_back(double{ms} * 1e-3);
      if (variant != Variant::traced) continue;
      times->under_way.push_back(rank->seconds_under_way());
      times->waited.push_back(rank->seconds_waited());
    }
    return status;
  }
};

GpuRanks::GpuRanks(const std::vector<int>& devices, Transport transport, double timeout_s,
                   const Process& process)
    : impl_(std::make_unique<Impl>()) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  for (const int device : devices)
    if (device >= count)
      throw DeviceError(fmt::format("--devices: GPU {}: this machine has {}", device, count));
  impl_->devices = devices;
  void* flag = nullptr;
  cuda(cudaHostAlloc(&flag, 2 * sizeof(unsigned), cudaHostAllocPortable | cudaHostAllocMapped),
       "allocating the release flag");
  impl_->flag = static_cast<unsigned*>(flag);
  impl_->flag[0] = impl_->flag[1] = 0;
  const int world = static_cast<int>(devices.size());
  for (int r = 0; r < world; ++r) {
    if (process.rank >= 0 && process.rank != r) continue;
    impl_->ranks.push_back(
        std::make_unique<GpuRank>(r, devices, transport, impl_->board, impl_->ranks, timeout_s));
    const Device device(Backend::gpu, devices[static_cast<std::size_t>(r)]);
    const InUse in_use(device);
    impl_->scrub.push_back(
        std::make_unique<DeviceBuffer>(device, "L2 flush", 2 * gpu_info().l2_bytes));
  }
  const bool by_nccl = transport == Transport::nccl && devices.size() > 1;
  std::string id;
  if (by_nccl && process.rank > 0)
    id = accept(process.id_file, process.rank, {"", world, NcclComm::version(), process.run},
                kConnectSeconds)
             .id;
  else if (by_nccl)
    id = NcclComm::unique_id();
  if (by_nccl && process.rank == 0) {
    impl_->meeting = process.id_file;
    invite(process.id_file, {id, world, NcclComm::version(), process.run});
  }
  const Status status =
      impl_->on_threads([&](GpuRank& rank) { rank.connect(id, devices, impl_->flag); });
  impl_->end_meeting();
  if (!status.ok()) throw DeviceError(status.message);
}
GpuRanks::~GpuRanks() = default;

Status GpuRanks::prepare(const Program& program) {
  impl_->program = program;
  // Buffers are freed when no rank uses them: ranks may write into those of their peers.
  if (Status s = impl_->on_threads([](GpuRank& rank) { rank.forget_buffers(); }); !s.ok()) return s;
  return impl_->on_threads([&](GpuRank& rank) {
    program.prepare(rank);
    synchronize(rank.device());
  });
}
Status GpuRanks::load() { return impl_->play(nullptr, Variant::launches_only); }
Status GpuRanks::run() { return impl_->play(nullptr, Variant::whole); }
Status GpuRanks::time(RoundTime& times, Variant variant) { return impl_->play(&times, variant); }
std::vector<int64_t> GpuRanks::buffer_bytes() const {
  std::vector<int64_t> all;
  for (const auto& rank : impl_->ranks) all.push_back(rank->buffer_bytes());
  return all;
}
Status GpuRanks::finish(const std::function<void(Rank&)>& finish,
                        const std::vector<Output>& shared) {
  for (const auto& rank : impl_->ranks) {
    const InUse in_use(rank->device());
    if (const auto broken = rank->broken_guard()) return Status::kernel_error(*broken);
    for (const Output& o : shared)
      cuda(cudaMemset(o.data, 0, static_cast<std::size_t>(o.bytes)), "clearing a result");
    finish(*rank);
    synchronize(rank->device());
  }
  if (shared.empty() || impl_->ranks.front()->world() == 1) return Status::success();
  return impl_->on_threads([&](GpuRank& rank) {
    for (const Output& o : shared) rank.share(o);
  });
}
bool GpuRanks::usable() const { return !impl_->board.failure; }
void GpuRanks::set_timeout(double seconds) {
  for (const auto& rank : impl_->ranks) rank->timeout_s = seconds;
}

namespace {
Status measure(GpuRanks& ranks, Measuring& wanted) {
  wanted.buffer_bytes = ranks.buffer_bytes();
  for (const Variant v :
       {Variant::whole, Variant::launches_only, Variant::transfers_only, Variant::traced}) {
    auto& rounds = wanted.rounds[static_cast<int>(v)];
    rounds.clear();
    if (v != Variant::whole && wanted.buffer_bytes.size() == 1) continue;  // one rank: no messages
    double spent = 0;
    for (int n = -wanted.warmup; n < wanted.most_rounds; ++n) {
      RoundTime time;
      if (Status s = ranks.time(time, v); !s.ok()) return s;
      if (n < 0) continue;
      rounds.push_back(time);
      spent += time.slowest();
      if (rounds.size() >= 5 && spent > wanted.most_s) break;
    }
  }
  return Status::success();
}
}  // namespace

Status run_on_gpus(const std::vector<int>& devices, Transport transport, const Program& program,
                   const std::function<void(Rank&)>& finish, double timeout_s,
                   const Process& process) {
  // Never destroyed: at the end of the process CUDA may be gone before.
  using Kept = std::map<std::pair<std::vector<int>, Transport>, std::unique_ptr<GpuRanks>>;
  static Kept& kept = *new Kept;
  std::unique_ptr<GpuRanks>& ranks = kept[{devices, transport}];
  // Of several processes one may have failed alone: connected again, it would meet the others at
  // another step.
  if (ranks && !ranks->usable() && process.rank >= 0)
    return Status::device_error(
        "--rank: an earlier step has failed, and the ranks are not in step");
  if (!ranks || !ranks->usable())
    ranks = std::make_unique<GpuRanks>(devices, transport, timeout_s, process);
  ranks->set_timeout(timeout_s);
  Status status = ranks->prepare(program);
  // Loads all kernels. While a kernel of NCCL waits for a lost message, loading would block the
  // host, and no time-out would be noticed.
  if (status.ok()) status = ranks->load();
  // The second run finds flags and buffers as the first one has left them.
  for (int n = 0; n < 2 && status.ok(); ++n) status = ranks->run();
  if (status.ok()) status = ranks->finish(finish, process.outputs);
  if (status.ok() && measuring != nullptr) status = measure(*ranks, *measuring);
  return status.ok() ? ranks->prepare({[](Rank&) {}, {}}) : status;  // frees the buffers
}

void copy_rows_on_gpus(void* to, int64_t to_pitch, const void* from, int64_t from_pitch,
                       int64_t width, int64_t rows) {
  cuda(cudaMemcpy2D(to, static_cast<std::size_t>(to_pitch), from,
                    static_cast<std::size_t>(from_pitch), static_cast<std::size_t>(width),
                    static_cast<std::size_t>(rows), cudaMemcpyDefault),
       "copying rows between GPUs");
}

}  // namespace attn::ranks
