/// \file
/// What each thread of a block knows of the others: vector clocks. An access is ordered before
/// another one if the thread of the second knows of the first, through barriers; else the two are a
/// race. Source: Flanagan and Freund, "FastTrack: Efficient and Precise Dynamic Race Detection"
/// (PLDI 2009), sections 2 and 3.
///
/// Everybody who does things has a number: threads from 0 on; then, as they come up, the copies
/// that one barrier counts, one thread's groups of cp.async, and so on. What is done falls into
/// epochs 1, 2, ... of whoever does it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace attn::emulator {

/// Of everybody by number: the last epoch that is known. Shorter where nothing is known of the
/// rest.
using Epochs = std::vector<std::uint32_t>;

/// What those know together who have arrived at a barrier.
struct Meeting {
  Epochs known;
  // What was joined last: all of a block mostly come knowing the same.
  std::shared_ptr<const Epochs> last;
};

class Order {
 public:
  explicit Order(std::size_t threads)
      : threads_(threads),
        next_(threads),
        own_(threads, 1),
        first_(threads, 1),
        known_(threads, start()) {}

  /// A number for somebody more.
  std::size_t add(std::size_t count = 1) { return std::exchange(next_, next_ + count); }
  /// The epoch of what thread t does now.
  std::uint32_t now(std::size_t t) const { return own_[t]; }
  /// From here on thread t is another one, that knows nothing, not even of its predecessor.
  /// Whoever learns of its epochs is taken to know of its predecessor's, too.
  void start_again(std::size_t t) {
    first_[t] = ++own_[t];
    known_[t] = start();
  }
  bool knows(std::size_t t, std::size_t who, std::uint32_t epoch) const {
    if (who == t && epoch >= first_[t]) return true;
    const Epochs& e = *known_[t];
    return who < e.size() && e[who] >= epoch;
  }
  /// Thread t learns that `who` is done with `epoch`.
  void learn(std::size_t t, std::size_t who, std::uint32_t epoch) {
    if (knows(t, who, epoch)) return;
    Epochs more = *known_[t];
    set(more, who, epoch);
    known_[t] = std::make_shared<const Epochs>(std::move(more));
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
    if (covers(*known, *known_[t])) {
      known_[t] = known;
    } else {
      Epochs both = *known_[t];
      join(both, *known);
      known_[t] = std::make_shared<const Epochs>(std::move(both));
    }
  }
  /// All that thread t knows of the threads, and has done, is known of numbers `first` and on
  /// instead as well.
  void repeat(std::size_t t, std::size_t first) {
    Epochs more = *known_[t];
    for (std::size_t i = 0; i < threads_; ++i) {
      const std::uint32_t epoch = i == t ? own_[t] : i < known_[t]->size() ? (*known_[t])[i] : 0;
      set(more, first + i, std::max(epoch, first + i < more.size() ? more[first + i] : 0));
    }
    known_[t] = std::make_shared<const Epochs>(std::move(more));
    ++own_[t];
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

  std::size_t threads_, next_;
  Epochs own_;    // the epoch of what each thread does now
  Epochs first_;  // the first that is not a predecessor's
  // Of each thread, but for its own; often one for all.
  std::vector<std::shared_ptr<const Epochs>> known_;
};

}  // namespace attn::emulator
