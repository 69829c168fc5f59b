/// \file
/// What each thread of a block knows of the others: vector clocks. An access is ordered before
/// another one if the thread of the second knows of the first, through barriers; else the two are a
/// race. Source: Flanagan and Freund, "FastTrack: Efficient and Precise Dynamic Race Detection"
/// (PLDI 2009), sections 2 and 3.
///
/// Whatever does things has a number: the threads of each resident block, and, as they come
/// up, the copies that one barrier counts, one thread's groups of cp.async, and so on. What is done
/// falls into epochs 1, 2, ... of whoever does it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace attn::emulator {

/// By number: the last epoch that is known. Shorter where nothing is known of the rest.
using Epochs = std::vector<std::uint32_t>;

/// What those know together who have arrived at a barrier.
struct Meeting {
  Epochs known;
  // What was joined last: all of a block mostly come knowing the same.
  std::shared_ptr<const Epochs> last;
};

/// What instructions of the async proxy access: shared memory or global memory. A fence may be for
/// one of them, or for both.
enum class Space : std::uint8_t { shared, global };

class Order {
 public:
  /// From here on threads are added for another launch, which may begin before the last one ends.
  void begin_launch() { launch_ = next_; }
  /// What is known when the last launch has ended: all that it has done, and what its threads know.
  /// Of launches before it they know if they have waited for them.
  std::shared_ptr<const Epochs> of_last_launch() const {
    Epochs known(next_, ~std::uint32_t{0});
    std::fill(known.begin(), known.begin() + static_cast<std::ptrdiff_t>(launch_), 0);
    for (std::size_t t = launch_; t < known_.size(); ++t)
      if (is_thread(t)) join(known, *known_[t]);
    return std::make_shared<const Epochs>(std::move(known));
  }
  /// Numbers for more of them.
  std::size_t add(std::size_t count = 1) { return std::exchange(next_, next_ + count); }
  /// Numbers for the threads of a block more: the first.
  std::size_t add_threads(std::size_t count) {
    const std::size_t first = add(count);
    own_.resize(next_, 1);
    first_.resize(next_, 1);
    known_.resize(next_, start());
    block_.resize(next_, 0);
    blocks_.push_back({first, count, {}});
    std::fill(block_.end() - static_cast<std::ptrdiff_t>(count), block_.end(),
              static_cast<std::uint32_t>(blocks_.size()));
    return first;
  }
  /// Which thread of its block it is.
  std::size_t index_in_block(std::size_t t) const { return t - blocks_[block_[t] - 1].first; }
  /// Whether both are threads of one warp.
  bool one_warp(std::size_t a, std::size_t b) const {
    if (!is_thread(a) || !is_thread(b) || block_[a] != block_[b]) return false;
    return index_in_block(a) / 32 == index_in_block(b) / 32;
  }
  bool is_thread(std::size_t who) const { return who < block_.size() && block_[who] != 0; }
  /// The epoch of what thread t does now.
  std::uint32_t now(std::size_t t) const { return own_[t]; }
  /// From here on thread t is another one, that knows nothing, not even of its predecessor.
  /// Whoever learns of its epochs is taken to know of its predecessor's, too.
  void start_again(std::size_t t) {
    first_[t] = ++own_[t];
    known_[t] = start();
  }
  const std::shared_ptr<const Epochs>& known(std::size_t t) const { return known_[t]; }
  bool knows(std::size_t t, std::size_t who, std::uint32_t epoch) const {
    if (who == t && epoch >= first_[t]) return true;
    const Epochs& e = *known_[t];
    return who < e.size() && e[who] >= epoch;
  }
  /// Thread t learns that `who` is done with `epoch`.
  void learn(std::size_t t, std::size_t who, std::uint32_t epoch) {
    if (knows(t, who, epoch)) return;
    Learnt& last = learnt_[(who * 31 + t / 32) % learnt_.size()];
    if (last.before != known_[t] || last.who != who || last.epoch != epoch) {
      Epochs more = *known_[t];
      set(more, who, epoch);
      last = {known_[t], std::make_shared<const Epochs>(std::move(more)), who, epoch};
    }
    known_[t] = last.after;
  }
  /// Thread t arrives: what it has done, and what it knows, is known there; what it does from here
  /// on is not.
  void give(std::size_t t, Meeting& m) {
    if (m.last != known_[t]) join(m.known, *known_[t]);
    m.last = known_[t];
    set(m.known, t, own_[t]++);
  }
  /// Thread t goes on, knowing what is known there.
  void take(std::size_t t, const std::shared_ptr<const Epochs>& known) {
    if (known == known_[t]) return;
    Joined& last = joined_[t / 32 % joined_.size()];
    if (last.before != known_[t] || last.more != known) {
      last = {known_[t], known, known};
      if (!covers(*known, *known_[t])) {
        Epochs both = *known_[t];
        join(both, *known);
        last.after = std::make_shared<const Epochs>(std::move(both));
      }
    }
    known_[t] = last.after;
  }
  /// `fence.proxy.async` of thread t: what it knows of the threads, and has done, is known of their
  /// proxies as well. PTX ISA, "Causality order": a proxy fence anywhere on the path from one
  /// access to the other puts them in order, by whichever thread.
  void fence_proxy(std::size_t t, Space space) {
    Epochs more = *known_[t];
    const std::uint32_t of_itself = t < more.size() ? more[t] : 0;
    set(more, t, own_[t]);
    for (Threads& block : blocks_) {
      const auto known = [&](std::size_t i) { return i < more.size() ? more[i] : 0; };
      const auto any = [&] {
        for (std::size_t i = block.first; i < block.first + block.count; ++i)
          if (known(i) != 0) return true;
        return false;
      };
      if (!any()) continue;
      std::size_t& proxies = block.proxies[static_cast<std::size_t>(space)];
      if (proxies == 0) proxies = add(block.count);
      for (std::size_t i = 0; i < block.count; ++i)
        if (const std::uint32_t epoch = known(block.first + i); epoch > known(proxies + i))
          set(more, proxies + i, epoch);
    }
    more[t] = of_itself;
    known_[t] = std::make_shared<const Epochs>(std::move(more));
    ++own_[t];
  }
  /// Whether thread t knows of a proxy fence after epoch `epoch` of thread `who`.
  bool knows_fenced(std::size_t t, std::size_t who, std::uint32_t epoch, Space space) const {
    const Threads& block = blocks_[block_[who] - 1];
    const std::size_t proxies = block.proxies[static_cast<std::size_t>(space)];
    return proxies != 0 && knows(t, proxies + (who - block.first), epoch);
  }

  static void set(Epochs& e, std::size_t who, std::uint32_t epoch) {
    if (e.size() <= who) e.resize(who + 1, 0);
    e[who] = epoch;
  }
  static void join(Epochs& e, const Epochs& more) {
    if (e.size() < more.size()) e.resize(more.size(), 0);
    for (std::size_t i = 0; i < more.size(); ++i) e[i] = std::max(e[i], more[i]);
  }

 private:
  static std::shared_ptr<const Epochs> start() {
    static const std::shared_ptr<const Epochs> nothing = std::make_shared<const Epochs>();
    return nothing;
  }
  static bool covers(const Epochs& e, const Epochs& less) {
    if (e.size() < less.size()) return false;
    for (std::size_t i = 0; i < less.size(); ++i)
      if (e[i] < less[i]) return false;
    return true;
  }

  struct Threads {  // of one resident block after the other
    std::size_t first, count;
    std::array<std::size_t, 2> proxies;  // by Space: the number of the first one's, once it has one
  };
  // The last results: the lanes of a warp mostly know, and learn, the same.
  struct Joined {
    std::shared_ptr<const Epochs> before, more, after;
  };
  struct Learnt {
    std::shared_ptr<const Epochs> before, after;
    std::size_t who = 0;
    std::uint32_t epoch = 0;
  };
  std::array<Joined, 64> joined_;
  std::array<Learnt, 64> learnt_;
  // The vectors below are by number, those of threads alone mean something.
  std::size_t next_ = 0, launch_ = 0;
  Epochs own_;    // the epoch of what each thread does now
  Epochs first_;  // the first that is not a predecessor's
  // Of each thread, but for its own; often one for all.
  std::vector<std::shared_ptr<const Epochs>> known_;
  std::vector<std::uint32_t> block_;  // 1 + the index in blocks_; 0: not a thread
  std::vector<Threads> blocks_;
};

}  // namespace attn::emulator
