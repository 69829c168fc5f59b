// Radix tree of cached prefixes, as in SGLang's RadixAttention.
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

// A node holds a run of tokens, in whole pages; its children differ in their first page. The tree
// owns a reference to its pages, in addition to the sequences that use them. Sequences of different
// namespaces (`space`: a LoRA adapter, a customer) share nothing.
class RadixTree {
 public:
  struct Node;
  struct Match {
    std::vector<int> pages;
    Node* node;  // node at the end of the match
  };

  RadixTree(PagePool& pool, int page_size);
  ~RadixTree();  // releases all pages
  RadixTree(const RadixTree&) = delete;
  RadixTree& operator=(const RadixTree&) = delete;

  // Longest cached prefix of `tokens`, in whole pages. A caller that uses its pages shares them and
  // locks the node.
  Match match(const std::string& space, std::span<const Token> tokens);
  // Inserts `tokens`, stored in `pages`; a partly filled page is left out. Tokens that are already
  // cached keep their pages; returns the number of those pages.
  int insert(const std::string& space, std::span<const Token> tokens, std::span<const int> pages);
  // A locked node and its ancestors are not evicted.
  void lock(Node*);
  void unlock(Node*);
  // Releases pages until `count` more are free or no unlocked leaf is left, from the end of the
  // least recently used leaf. Returns how many became free.
  int evict(int count);

  int pages() const { return pages_; }
  int nodes() const;  // without roots
  // Throws std::logic_error if the tree is inconsistent.
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
  std::set<Node*, Older> leaves_;  // unlocked, least recently used first
  int64_t now_ = 0, numbers_ = 0;
  int pages_ = 0;
};

}  // namespace attn::paged
