#include "host/radix_tree.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <tuple>

namespace attn::paged {

struct RadixTree::Node {
  Node* parent = nullptr;
  std::vector<Token> tokens;  // [pages, page_size]
  std::vector<int> pages;
  std::map<std::vector<Token>, std::unique_ptr<Node>> children;  // keyed by their first page
  int locks = 0;
  int64_t used = 0, number = 0;  // time of last use; id of the node
};

namespace {
std::vector<Token> first_page(std::span<const Token> tokens, std::size_t page_size) {
  return {tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(page_size)};
}
}  // namespace

bool RadixTree::Older::operator()(const Node* a, const Node* b) const {
  return std::tie(a->used, a->number) < std::tie(b->used, b->number);
}

RadixTree::RadixTree(PagePool& pool, int page_size)
    : pool_(pool), page_size_(static_cast<std::size_t>(page_size)) {}

RadixTree::~RadixTree() {
  const std::function<void(Node&)> give_back = [&](Node& node) {
    for (auto& [page, child] : node.children) give_back(*child);
    for (auto page = node.pages.rbegin(); page != node.pages.rend(); ++page) pool_.release(*page);
  };
  for (auto& [space, node] : roots_) give_back(*node);
}

RadixTree::Node* RadixTree::root(const std::string& space) {
  std::unique_ptr<Node>& root = roots_[space];
  if (!root) root = std::make_unique<Node>();
  return root.get();
}

void RadixTree::unlist(Node* node) { leaves_.erase(node); }
void RadixTree::list(Node* node) {
  if (node->parent && node->children.empty() && node->locks == 0) leaves_.insert(node);
}
// Leaves are ordered by the time of their last use: a leaf is removed while that changes.
void RadixTree::touch(Node* node) {
  unlist(node);
  node->used = now_;
  list(node);
}

// Splits a node after some pages. The lower part remains the node that others point to, so that
// their locks still hold; the upper part gets the same lock count.
//! [split]
void RadixTree::split(Node* node, std::size_t pages) {
  const auto tokens = static_cast<std::ptrdiff_t>(pages * page_size_);
  Node* const parent = node->parent;
  const std::vector<Token> key = first_page(node->tokens, page_size_);
  auto upper = std::make_unique<Node>();
  upper->parent = parent, upper->locks = node->locks, upper->used = node->used;
  upper->number = ++numbers_;
  upper->tokens.assign(node->tokens.begin(), node->tokens.begin() + tokens);
  upper->pages.assign(node->pages.begin(),
                      node->pages.begin() + static_cast<std::ptrdiff_t>(pages));
  node->tokens.erase(node->tokens.begin(), node->tokens.begin() + tokens);
  node->pages.erase(node->pages.begin(), node->pages.begin() + static_cast<std::ptrdiff_t>(pages));
  std::unique_ptr<Node> lower = std::move(parent->children.at(key));
  lower->parent = upper.get();
  upper->children.emplace(first_page(node->tokens, page_size_), std::move(lower));
  parent->children.at(key) = std::move(upper);
}
//! [split]

// Descends from `node` along `tokens`, as far as whole pages match; a node that matches in part is
// split.
//! [walk]
RadixTree::Node* RadixTree::walk(Node* node, std::span<const Token> tokens,
                                 std::vector<int>* pages) {
  while (tokens.size() >= page_size_) {
    const auto found = node->children.find(first_page(tokens, page_size_));
    if (found == node->children.end()) break;
    Node* child = found->second.get();
    std::size_t same = 1;  // pages
    while (same < child->pages.size() && (same + 1) * page_size_ <= tokens.size() &&
           std::equal(tokens.begin() + static_cast<std::ptrdiff_t>(same * page_size_),
                      tokens.begin() + static_cast<std::ptrdiff_t>((same + 1) * page_size_),
                      child->tokens.begin() + static_cast<std::ptrdiff_t>(same * page_size_)))
      ++same;
    if (same < child->pages.size()) {
      split(child, same);
      child = child->parent;
    }
    touch(child);
    if (pages) pages->insert(pages->end(), child->pages.begin(), child->pages.end());
    tokens = tokens.subspan(same * page_size_);
    node = child;
  }
  return node;
}
//! [walk]

RadixTree::Match RadixTree::match(const std::string& space, std::span<const Token> tokens) {
  ++now_;
  Match m;
  m.node = walk(root(space), tokens, &m.pages);
  return m;
}

int RadixTree::insert(const std::string& space, std::span<const Token> tokens,
                      std::span<const int> pages) {
  ++now_;
  const std::size_t whole = tokens.size() / page_size_;
  std::vector<int> there;
  Node* const node = walk(root(space), tokens, &there);
  if (there.size() < whole) {
    auto leaf = std::make_unique<Node>();
    leaf->parent = node, leaf->used = now_, leaf->number = ++numbers_;
    const auto rest =
        tokens.subspan(there.size() * page_size_, (whole - there.size()) * page_size_);
    leaf->tokens.assign(rest.begin(), rest.end());
    for (std::size_t n = there.size(); n < whole; ++n) {
      pool_.share(pages[n]);
      leaf->pages.push_back(pages[n]);
    }
    pages_ += static_cast<int>(leaf->pages.size());
    unlist(node);  // no longer a leaf
    Node* const added = leaf.get();
    node->children.emplace(first_page(rest, page_size_), std::move(leaf));
    list(added);
  }
  return static_cast<int>(there.size());
}

//! [lock]
void RadixTree::lock(Node* node) {
  for (; node; node = node->parent) {
    unlist(node);
    ++node->locks;
  }
}
void RadixTree::unlock(Node* node) {
  for (; node; node = node->parent) {
    if (node->locks == 0) throw std::logic_error("unlock: the node is not locked");
    --node->locks;
    list(node);
  }
}
//! [lock]

void RadixTree::remove(Node* node) {
  Node* const parent = node->parent;
  unlist(node);
  const auto self =
      std::ranges::find_if(parent->children, [&](const auto& c) { return c.second.get() == node; });
  parent->children.erase(self);
  list(parent);
}

//! [evict]
int RadixTree::evict(int count) {
  int freed = 0;
  while (freed < count && !leaves_.empty()) {
    Node* const leaf = *leaves_.begin();
    while (freed < count && !leaf->pages.empty()) {
      const int before = pool_.free_pages();
      pool_.release(leaf->pages.back());
      freed += pool_.free_pages() - before;
      leaf->pages.pop_back();
      leaf->tokens.resize(leaf->pages.size() * page_size_);
      --pages_;
    }
    if (leaf->pages.empty()) remove(leaf);
  }
  return freed;
}
//! [evict]

int RadixTree::nodes() const {
  int count = 0;
  const std::function<void(const Node&)> visit = [&](const Node& node) {
    count += node.parent != nullptr;
    for (const auto& [key, child] : node.children) visit(*child);
  };
  for (const auto& [space, node] : roots_) visit(*node);
  return count;
}

void RadixTree::check() const {
  const auto must = [](bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("radix tree: ") + what);
  };
  int pages = 0;
  std::size_t leaves = 0;
  std::set<int> owned;
  const std::function<void(const Node&)> visit = [&](const Node& node) {
    if (node.parent) {
      must(!node.pages.empty(), "a node without pages");
      must(node.locks <= node.parent->locks, "a node is locked, and not what lies above it");
      must(node.used <= node.parent->used || !node.parent->parent,
           "a node was used after its parent");
      const bool leaf = node.children.empty() && node.locks == 0;
      must(leaf == leaves_.contains(const_cast<Node*>(&node)), "the list of leaves");
      leaves += leaf;
    }
    must(node.tokens.size() == node.pages.size() * page_size_, "tokens and pages");
    for (const int page : node.pages) {
      must(owned.insert(page).second, "a page in two nodes");
      must(pool_.owners(page) > 0, "a page without an owner");
    }
    pages += static_cast<int>(node.pages.size());
    for (const auto& [key, child] : node.children) {
      must(child->parent == &node, "a child of another");
      must(key == first_page(child->tokens, page_size_), "a child under another page");
      visit(*child);
    }
  };
  for (const auto& [space, node] : roots_) visit(*node);
  must(pages == pages_, "the number of pages");
  must(leaves == leaves_.size(), "a leaf that is not there");
}

}  // namespace attn::paged
