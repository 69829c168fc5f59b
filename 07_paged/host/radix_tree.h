// Which prefixes of token sequences lie in the cache: a radix tree, as SGLang's RadixAttention has.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "host/page_pool.h"

namespace attn::paged {

using Token = int32_t;

// A node has a run of tokens, in whole pages, and its children begin with different pages. The tree
// is an owner of its pages, beside the sequences that use them. Sequences of different namespaces
// (`space`: a LoRA adapter, a customer) share nothing.
class RadixTree {
 public:
  struct Node;
  struct Match {
    std::vector<int> pages;
    Node* node;  // where the match ends
  };

  RadixTree(PagePool& pool, int page_size);
  ~RadixTree();  // the pages are the pool's again
  RadixTree(const RadixTree&) = delete;
  RadixTree& operator=(const RadixTree&) = delete;

  // The longest prefix of `tokens` that is there, in whole pages. Whoever uses its pages shares
  // them, and locks the node.
  Match match(const std::string& space, std::span<const Token> tokens);
  // `tokens` lie in `pages`; a page that is not full is left out. What is there already keeps the
  // pages that it has: how many that are is returned.
  int insert(const std::string& space, std::span<const Token> tokens, std::span<const int> pages);
  // What lies between the root and a node is not evicted while it is locked.
  void lock(Node*);
  void unlock(Node*);
  // Gives up pages until `count` more are free, or no leaf is left that is not locked: the end of
  // the leaf that was not used for the longest time. Returns how many became free.
  int evict(int count);

  int pages() const { return pages_; }
  int nodes() const;  // without roots
  // Throws std::logic_error where something in the tree contradicts itself.
  void check() const;

 private:
  Node* root(const std::string& space);
  Node* walk(Node*, std::span<const Token>, std::vector<int>* pages);
  void split(Node*, std::size_t pages);
  void touch(Node*);
  void list(Node*);  // among the leaves that may be evicted, if it is one
  void unlist(Node*);
  void remove(Node*);

  PagePool& pool_;
  const std::size_t page_size_;
  std::map<std::string, std::unique_ptr<Node>> roots_;
  struct Older {
    bool operator()(const Node*, const Node*) const;
  };
  std::set<Node*, Older> leaves_;  // not locked, least recently used first
  int64_t now_ = 0, numbers_ = 0;
  int pages_ = 0;
};

}  // namespace attn::paged
