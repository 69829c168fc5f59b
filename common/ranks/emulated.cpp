#include "ranks/emulated.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "device/device.h"
#include "ranks/planted.h"

namespace attn::ranks {
namespace {

// A message of a rank. `number`: the n-th from its sender to its receiver.
struct Posted {
  Message message;
  int number = 0;
  bool lost = false, late = false, stale = false, done = false;
};
struct Exchange {
  std::string what;
  bool grouped = true;
  std::vector<Posted> messages;
  bool posted = false;
  bool done() const {
    for (const Posted& m : messages)
      if (!m.done) return false;
    return true;
  }
};
struct Work {
  enum Kind { kCompute, kTogether, kPost, kWait } kind;
  std::function<Status(Stream)> launch;
  Ticket ticket = 0;
};

class EmulatedRanks;

class EmulatedRank final : public Rank {
 public:
  EmulatedRank(int index, int world, EmulatedRanks& all)
      : Rank(index, world, Backend::emulated), all_(all) {}

  void* allocate(const std::string& name, int64_t bytes, bool zero) override {
    const std::string named = fmt::format("{} of rank {}", name, index());
    DeviceBuffer& made =
        buffers_.try_emplace(name, Device(Backend::emulated), named, bytes).first->second;
    made.poison(zero ? 0 : ~0u);
    return made.data();
  }
  void* buffer(const std::string& name) const override { return buffers_.at(name).data(); }
  Rank& peer(int index) const override;

  void compute(const std::string&, std::function<Status(Stream)> launch) override {
    work.push_back({Work::kCompute, std::move(launch)});
  }
  void compute_with_peers(const std::string&, std::function<Status(Stream)> launch) override {
    work.push_back({Work::kTogether, std::move(launch)});
  }
  void all_reduce(const std::string&, float* data, int64_t count, Reduction reduction) override {
    reductions.push_back({data, count, reduction});
    compute_with_peers("", [this, n = reductions.size() - 1](Stream) { return reduce(n); });
  }
  Ticket exchange(const std::string& what, const std::vector<Message>& messages,
                  bool grouped) override;
  void wait(Ticket ticket) override { work.push_back({Work::kWait, {}, ticket}); }

  // A write of this rank outside one of its buffers, or nothing.
  std::optional<std::string> broken_guard() const {
    for (const auto& [name, buffer] : buffers_)
      if (auto broken = buffer.broken_guard()) return broken;
    return std::nullopt;
  }

  std::vector<Work> work;
  std::vector<Exchange> exchanges;
  struct Reduced {
    float* data;
    int64_t count;
    Reduction reduction;
  };
  std::vector<Reduced> reductions;
  std::size_t at = 0;  // the work that is next

 private:
  Status reduce(std::size_t n) const;

  EmulatedRanks& all_;
  std::map<std::string, DeviceBuffer> buffers_;
};

class EmulatedRanks {
 public:
  EmulatedRanks(int world, double timeout_s) : timeout_s_(timeout_s) {
    for (int r = 0; r < world; ++r)
      ranks.push_back(std::make_unique<EmulatedRank>(r, world, *this));
  }

  // Ranks take turns: each runs until it waits for a message that is not there.
  Status run() {
    for (;;) {
      bool progress = false, all_done = true;
      for (const auto& rank : ranks) {
        for (; rank->at < rank->work.size(); ++rank->at, progress = true) {
          bool blocked = false;
          if (Status s = do_next(*rank, blocked); !s.ok()) return s;
          if (blocked) break;
        }
        all_done = all_done && rank->at == rank->work.size();
      }
      if (all_done) return Status::success();
      if (!progress) return timed_out();
    }
  }

  std::vector<std::unique_ptr<EmulatedRank>> ranks;
  int sent = 0;                                   // messages of all ranks
  std::map<std::pair<int, int>, int> numbers[2];  // by (sender, receiver): messages so far

 private:
  Status do_next(EmulatedRank& rank, bool& blocked) {
    Work& work = rank.work[rank.at];
    switch (work.kind) {
      case Work::kCompute: return work.launch(nullptr);
      case Work::kTogether:  // when all ranks have come to it
        for (const auto& other : ranks)
          blocked = blocked || other->at == other->work.size() ||
                    other->work[other->at].kind != Work::kTogether;
        return blocked ? Status::success() : together(rank);
      case Work::kPost:
        rank.exchanges[static_cast<std::size_t>(work.ticket)].posted = true;
        return planted.early ? deliver(rank.index(), work.ticket) : Status::success();
      case Work::kWait: {
        const Exchange& exchange = rank.exchanges[static_cast<std::size_t>(work.ticket)];
        if (Status s = deliver(rank.index(), work.ticket); !s.ok()) return s;
        blocked = !exchange.done();
        return Status::success();
      }
    }
    return Status::success();
  }

  // The launch of rank 0 is that of all ranks. The caller counts this rank's work, and this
  // function that of the others.
  Status together(const EmulatedRank& rank) {
    const EmulatedRank& first = *ranks.front();
    const std::function<Status(Stream)>& launch = first.work[first.at].launch;
    for (const auto& other : ranks)
      if (other.get() != &rank) ++other->at;
    return launch(nullptr);
  }

  // The message at which a transfer may go on: in an ungrouped exchange only the first unfinished.
  Posted* match(int from, int to, int number, bool sends) {
    EmulatedRank& rank = *ranks[static_cast<std::size_t>(sends ? from : to)];
    for (Exchange& exchange : rank.exchanges) {
      if (!exchange.posted) return nullptr;  // exchanges of a rank follow one another
      for (Posted& m : exchange.messages) {
        if (!m.done && m.message.sends == sends && m.number == number && !m.lost &&
            m.message.peer == (sends ? to : from))
          return &m;
        if (!m.done && !exchange.grouped) return nullptr;
      }
      if (!exchange.done()) return nullptr;
    }
    return nullptr;
  }

  // The posted exchange of a rank that has a message with `peer`, or -1.
  Ticket ticket_of(int index, int peer, int number, bool sends) const {
    const EmulatedRank& rank = *ranks[static_cast<std::size_t>(index)];
    for (std::size_t t = 0; t < rank.exchanges.size() && rank.exchanges[t].posted; ++t)
      for (const Posted& m : rank.exchanges[t].messages)
        if (m.message.sends == sends && m.message.peer == peer && m.number == number)
          return static_cast<Ticket>(t);
    return -1;
  }

  // Copies the messages of this exchange that both sides have come to, and of those before it.
  // What the peers must finish first is finished, too.
  Status deliver(int index, Ticket last, int depth = 0) {
    EmulatedRank& rank = *ranks[static_cast<std::size_t>(index)];
    for (Ticket t = 0; t <= last; ++t) {
      Exchange& exchange = rank.exchanges[static_cast<std::size_t>(t)];
      if (!exchange.posted) return Status::success();
      for (Posted& mine : exchange.messages) {
        if (mine.done) continue;
        const bool sends = mine.message.sends;
        const int peer = mine.message.peer;
        const int from = sends ? index : peer, to = sends ? peer : index;
        Posted* const theirs = mine.lost ? nullptr : match(from, to, mine.number, !sends);
        // The exchanges of the peer follow one another: those before the match come first.
        if (theirs == nullptr && depth < 2 * static_cast<int>(ranks.size()))
          if (const Ticket there = ticket_of(peer, index, mine.number, !sends); there > 0)
            if (Status s = deliver(peer, there - 1, depth + 1); !s.ok()) return s;
        Posted* const found = mine.lost ? nullptr : match(from, to, mine.number, !sends);
        if (found != nullptr) {
          if (found->message.bytes != mine.message.bytes)
            return Status::device_error(fmt::format("rank {} {} rank {} {} bytes, which {} {}: {}",
                                                    index, sends ? "sends" : "expects of", peer,
                                                    mine.message.bytes, sends ? "expects" : "sends",
                                                    found->message.bytes, exchange.what));
          const auto bytes = static_cast<std::size_t>(mine.message.bytes);
          void* const target = sends ? found->message.data : mine.message.data;
          const auto* const source =
              static_cast<const std::byte*>(sends ? mine.message.data : found->message.data);
          const Posted& its = sends ? mine : *found;
          std::vector<std::byte>& earlier = last_[{from, to}];
          std::vector<std::byte> now(source, source + bytes);
          if (its.stale && earlier.size() == bytes) now = earlier;
          if (!its.late) std::memcpy(target, now.data(), bytes);
          if (planted.stale) earlier = std::move(now);
          mine.done = found->done = true;
        } else if (!exchange.grouped) {
          break;
        }
      }
      if (!exchange.done()) return Status::success();
    }
    return Status::success();
  }

  Status timed_out() const {
    for (const auto& rank : ranks) {
      if (rank->at >= rank->work.size() || rank->work[rank->at].kind != Work::kWait) continue;
      for (Ticket t = 0; t <= rank->work[rank->at].ticket; ++t) {
        const Exchange& exchange = rank->exchanges[static_cast<std::size_t>(t)];
        for (const Posted& m : exchange.messages)
          if (!m.done)
            return Status::device_error(fmt::format(
                "time-out of {:g} s (emulated: no rank can go on): rank {} {} {} bytes {} rank {} "
                "in {}",
                timeout_s_, rank->index(), m.message.sends ? "sends" : "waits for", m.message.bytes,
                m.message.sends ? "to" : "of", m.message.peer, exchange.what));
      }
    }
    return Status::device_error("time-out (emulated): no rank can go on");
  }

  double timeout_s_;
  std::map<std::pair<int, int>, std::vector<std::byte>> last_;  // messages, for a planted fault
};

Rank& EmulatedRank::peer(int index) const { return *all_.ranks[static_cast<std::size_t>(index)]; }

// The n-th reduction of all ranks, in their order.
Status EmulatedRank::reduce(std::size_t n) const {
  const Reduced& first = all_.ranks.front()->reductions[n];
  for (const auto& rank : all_.ranks)
    if (rank->reductions.size() <= n || rank->reductions[n].count != first.count ||
        rank->reductions[n].reduction != first.reduction)
      return Status::device_error(
          fmt::format("ranks 0 and {} reduce different things", rank->index()));
  for (int64_t i = 0; i < first.count; ++i) {
    float result = first.data[i];
    for (std::size_t r = 1; r < all_.ranks.size(); ++r) {
      const float x = all_.ranks[r]->reductions[n].data[i];
      result = first.reduction == Reduction::max ? std::max(result, x) : result + x;
    }
    for (const auto& rank : all_.ranks) rank->reductions[n].data[i] = result;
  }
  return Status::success();
}

Ticket EmulatedRank::exchange(const std::string& what, const std::vector<Message>& messages,
                              bool grouped) {
  const auto ticket = static_cast<Ticket>(exchanges.size());
  Exchange& made = exchanges.emplace_back(Exchange{what, grouped && !planted.ungrouped, {}});
  for (const Message& m : messages) {
    if (m.bytes == 0) continue;
    const auto pair = m.sends ? std::pair(index(), m.peer) : std::pair(m.peer, index());
    Posted posted{m, all_.numbers[m.sends][pair]++};
    if (m.sends) {
      const int n = all_.sent++;
      posted.lost = planted.lost == n || lose_message();
      posted.late = planted.late == n, posted.stale = planted.stale == n;
    }
    made.messages.push_back(posted);
  }
  work.push_back({Work::kPost, {}, ticket});
  return ticket;
}

}  // namespace

Status run_emulated(int world, const Program& program, const std::function<void(Rank&)>& finish,
                    double timeout_s) {
  EmulatedRanks all(world, timeout_s);
  for (const auto& rank : all.ranks) program.prepare(*rank);
  for (int run = 0; run < planted.runs; ++run) {
    for (const auto& rank : all.ranks) {
      program.run(*rank);
      // at the end a rank waits for all that it has sent
      if (!rank->exchanges.empty()) rank->wait(static_cast<Ticket>(rank->exchanges.size()) - 1);
    }
    if (Status status = all.run(); !status.ok()) return status;
  }
  for (const auto& rank : all.ranks) {
    if (const auto broken = rank->broken_guard()) return Status::kernel_error(*broken);
    finish(*rank);
  }
  return Status::success();
}

}  // namespace attn::ranks
