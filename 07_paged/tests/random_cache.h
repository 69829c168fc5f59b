// Random operations on a cache and on a plain model of it: maps of vectors, without shared pages
// and without a tree.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/page_pool.h"
#include "host/radix_tree.h"

namespace attn::paged {

class RandomCache {
 public:
  RandomCache(uint64_t seed, int num_pages, int page_size)
      : random_(seed),
        page_size_(page_size),
        pool_(num_pages),
        tree_(pool_, page_size),
        memory_(static_cast<std::size_t>(num_pages * page_size), -1) {}

  // Throws std::logic_error, or what the cache throws, if the two disagree.
  void run(int operations) {
    for (int n = 0; n < operations; ++n) {
      operation();
      compare();
    }
  }
  // Releases everything: then all pages are free.
  void end() {
    for (auto& [number, one] : sequences_) drop_one(one);
    sequences_.clear();
    const int all = pool_.num_pages();
    tree_.evict(all);
    must(pool_.free_pages() == all, "a page leaks");
    must(tree_.nodes() == 0, "a node without pages is left");
  }
  int operations_without_room() const { return without_room_; }
  int copies() const { return copies_; }
  int evictions() const { return evictions_; }

 private:
  using Tokens = std::vector<Token>;
  struct One {
    std::string space;
    CachedSequence sequence;
    Tokens tokens;                    // expected contents
    RadixTree::Node* node = nullptr;  // locked
    Tokens locked = {};               // the prefix that is locked
  };
  struct Prefix {
    int page;  // in its last page
    int64_t used;
  };

  static void must(bool holds, const std::string& what) {
    if (!holds) throw std::logic_error(what);
  }
  int below(int n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }
  One& any() {
    return std::next(sequences_.begin(), below(static_cast<int>(sequences_.size())))->second;
  }

  void operation() {
    const int what = below(100);
    if (sequences_.empty() || (what < 12 && sequences_.size() < 12)) return begin();
    if (what < 60) return write(any(), 1 + below(what < 20 ? 3 * page_size_ : 2));
    if (what < 72 && sequences_.size() < 12) return fork_one(any());
    if (what < 84) return finish();
    if (what < 92) return insert(any());
    return evict(1 + below(4));
  }

  // A new sequence uses the cached prefix of its prompt.
  void begin() {
    One one{below(4) == 0 ? "other" : "", {}, {}};
    Tokens prompt(static_cast<std::size_t>(below(5 * page_size_ + 1)));
    for (Token& t : prompt) t = below(2);
    const RadixTree::Match m = tree_.match(one.space, prompt);
    ++now_;
    std::map<Tokens, Prefix>& prefixes = model_[one.space];
    for (const Tokens& p : whole_prefixes(prompt)) {
      const auto there = prefixes.find(p);
      if (there == prefixes.end()) break;
      there->second.used = now_;
      one.locked = p;
      one.sequence.pages.push_back(there->second.page);
    }
    must(m.pages == one.sequence.pages, "match: another prefix than the longest");
    for (const int page : m.pages) pool_.share(page);
    tree_.lock(one.node = m.node);
    one.sequence.length = static_cast<int64_t>(one.locked.size());
    one.tokens = one.locked;
    const int number = numbers_++;
    One& added = sequences_.emplace(number, std::move(one)).first->second;
    write(added, prompt.size() - added.tokens.size(), &prompt);
  }

  void write(One& one, std::size_t count, const Tokens* what = nullptr) {
    const CachedSequence before = one.sequence;
    Appended to;
    try {
      to = append(pool_, page_size_, one.sequence, static_cast<int64_t>(count));
    } catch (const OutOfPages& e) {
      must(one.sequence.pages == before.pages && one.sequence.length == before.length,
           "append: the sequence has changed, and there was no room");
      must(e.free == pool_.free_pages() && e.wanted > e.free, "append: there was room");
      ++without_room_;
      return;
    }
    must(to.slots.size() == count, "append: as many slots as tokens");
    if (to.copy) {
      ++copies_;
      for (int i = 0; i < to.copy->tokens; ++i) at(to.copy->to, i) = at(to.copy->from, i);
    }
    for (const int64_t slot : to.slots) {
      const Token t = what ? (*what)[one.tokens.size()] : below(2);
      memory_.at(static_cast<std::size_t>(slot)) = t;
      one.tokens.push_back(t);
    }
  }

  void fork_one(const One& from) {
    One one = from;
    one.sequence = fork(pool_, from.sequence);
    tree_.lock(one.node);
    sequences_.emplace(numbers_++, std::move(one));
  }
  void drop_one(One& one) {
    drop(pool_, one.sequence);
    tree_.unlock(one.node);
  }
  void finish() {
    const auto it = std::next(sequences_.begin(), below(static_cast<int>(sequences_.size())));
    if (below(2) == 0) insert(it->second);
    drop_one(it->second);
    sequences_.erase(it);
  }

  void insert(One& one) {
    const int there = tree_.insert(one.space, one.tokens, one.sequence.pages);
    ++now_;
    int known = 0;
    std::size_t n = 0;
    for (const Tokens& p : whole_prefixes(one.tokens)) {
      const auto [at, added] = model_[one.space].try_emplace(p, Prefix{one.sequence.pages[n++], 0});
      at->second.used = now_;
      known += !added;
    }
    must(there == known, "insert: another number of pages that were there");
  }

  // The model has one prefix per page of the tree. A page may be evicted if no longer prefix exists
  // and no locked prefix begins with it.
  void evict(int count) {
    const int freed = tree_.evict(count);
    ++evictions_;
    int expected = 0;
    while (expected < count) {
      std::map<Tokens, Prefix>* of = nullptr;
      const Tokens* oldest = nullptr;
      int64_t used = 0;
      for (auto& [space, prefixes] : model_)
        for (auto it = prefixes.begin(); it != prefixes.end(); ++it) {
          const auto next = std::next(it);  // in map order, the next longer prefix
          if (next != prefixes.end() && begins_with(next->first, it->first)) continue;
          const bool locked = std::ranges::any_of(sequences_, [&](const auto& s) {
            return s.second.space == space && begins_with(s.second.locked, it->first);
          });
          if (!locked && (!oldest || it->second.used < used))
            of = &prefixes, oldest = &it->first, used = it->second.used;
        }
      if (!oldest) break;
      expected += owners_in_model(of->at(*oldest).page) == 1;
      of->erase(*oldest);
    }
    must(freed == expected,
         "evict: " + std::to_string(freed) + " pages became free, not " + std::to_string(expected));
  }

  void compare() {
    tree_.check();
    int in_use = 0, in_tree = 0;
    for (const auto& [space, prefixes] : model_) in_tree += static_cast<int>(prefixes.size());
    must(tree_.pages() == in_tree, "the tree has other pages");
    for (const auto& [space, prefixes] : model_)
      for (const auto& [tokens, last] : prefixes)
        for (int i = 0; i < page_size_; ++i)
          must(at(last.page, i) == tokens[tokens.size() - static_cast<std::size_t>(page_size_ - i)],
               "a page of the tree holds other tokens");
    std::vector<int> owned(static_cast<std::size_t>(pool_.num_pages()));
    for (const auto& [number, one] : sequences_)
      for (const int page : one.sequence.pages) ++owned.at(static_cast<std::size_t>(page));
    for (const auto& [space, prefixes] : model_)
      for (const auto& [tokens, last] : prefixes) ++owned[static_cast<std::size_t>(last.page)];
    for (int page = 0; page < pool_.num_pages(); ++page) {
      const int owners = owned[static_cast<std::size_t>(page)];
      must(pool_.owners(page) == owners, "page " + std::to_string(page) + " has " +
                                             std::to_string(pool_.owners(page)) + " owners, not " +
                                             std::to_string(owners));
      in_use += owners > 0;
    }
    must(pool_.free_pages() == pool_.num_pages() - in_use, "a page is free and in use, or neither");
    for (const auto& [number, one] : sequences_) {
      must(one.sequence.length == static_cast<int64_t>(one.tokens.size()),
           "the length of a sequence");
      const std::size_t pages = (one.tokens.size() + static_cast<std::size_t>(page_size_) - 1) /
                                static_cast<std::size_t>(page_size_);
      must(one.sequence.pages.size() == pages, "the pages of a sequence");
      for (std::size_t i = 0; i < one.tokens.size(); ++i)
        must(at(one.sequence.pages[i / static_cast<std::size_t>(page_size_)],
                static_cast<int>(i % static_cast<std::size_t>(page_size_))) == one.tokens[i],
             "a sequence holds other tokens");
    }
  }

  Token& at(int page, int i) { return memory_.at(static_cast<std::size_t>(page * page_size_ + i)); }
  int owners_in_model(int page) const {
    std::ptrdiff_t owners = 0;
    for (const auto& [number, one] : sequences_)
      owners += std::ranges::count(one.sequence.pages, page);
    for (const auto& [space, prefixes] : model_)
      owners +=
          std::ranges::count_if(prefixes, [&](const auto& p) { return p.second.page == page; });
    return static_cast<int>(owners);
  }
  std::vector<Tokens> whole_prefixes(const Tokens& tokens) const {
    std::vector<Tokens> all;
    for (auto end = page_size_; end <= static_cast<int>(tokens.size()); end += page_size_)
      all.emplace_back(tokens.begin(), tokens.begin() + end);
    return all;
  }
  static bool begins_with(const Tokens& tokens, const Tokens& prefix) {
    return tokens.size() >= prefix.size() &&
           std::equal(prefix.begin(), prefix.end(), tokens.begin());
  }

  std::mt19937_64 random_;
  const int page_size_;
  PagePool pool_;
  RadixTree tree_;
  Tokens memory_;  // contents of the device pool
  std::map<int, One> sequences_;
  std::map<std::string, std::map<Tokens, Prefix>> model_;
  int numbers_ = 0, without_room_ = 0, copies_ = 0, evictions_ = 0;
  int64_t now_ = 0;
};

// "" if `operations` random operations, and the final release, agree with the model; otherwise the
// difference. A cache that disagrees is not destroyed, because its destructor could fail.
inline std::string disagreement(uint64_t seed, int num_pages, int page_size, int operations) {
  static auto& left = *new std::vector<std::unique_ptr<RandomCache>>;
  left.push_back(std::make_unique<RandomCache>(seed, num_pages, page_size));
  try {
    left.back()->run(operations);
    left.back()->end();
  } catch (const std::exception& e) {
    return e.what();
  }
  left.pop_back();
  return "";
}

}  // namespace attn::paged
