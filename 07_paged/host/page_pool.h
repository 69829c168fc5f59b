// The pages of a cache, who has them, and the sequences that are made of them. On the host: what a
// server keeps beside the pool of K and V on the device.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

namespace attn::paged {

// Fewer pages are free than an operation needs. Nothing has changed.
struct OutOfPages : std::runtime_error {
  OutOfPages(int64_t wanted, int64_t free);
  int64_t wanted, free;
};

// Pages 0 to num_pages - 1. Several may own a page, which is free when nobody does. What a free
// page holds stays in it until it is taken, so the one that was freed first is taken first.
class PagePool {
 public:
  explicit PagePool(int num_pages);

  int take();              // a free page, for one owner. Throws OutOfPages
  void share(int page);    // one owner more, of a page that has one
  void release(int page);  // one owner less
  bool revive(int page);   // a free page for one owner, as it is; false if somebody has it

  int owners(int page) const { return owners_.at(static_cast<std::size_t>(page)); }
  int free_pages() const { return free_; }
  int num_pages() const { return static_cast<int>(owners_.size()); }

 private:
  // The free pages in the order in which they are taken: a ring of links through a page that is
  // none.
  struct Links {
    int before, after;
  };
  Links& links(int page) { return links_[static_cast<std::size_t>(page)]; }
  void link(int page);
  void unlink(int page);

  std::vector<int> owners_;
  std::vector<Links> links_;
  int free_ = 0;
};

// Tokens 0 to length - 1 lie in `pages`, page_size in each, the last page filled in part.
struct Sequence {
  std::vector<int> pages;
  int64_t length = 0;
};

// A page whose first tokens must be copied before the next ones are written.
struct PageCopy {
  int from, to, tokens;
  bool operator==(const PageCopy&) const = default;
};
// Where new tokens go: their slots, page * page_size + place in the page.
struct Appended {
  std::vector<int64_t> slots;
  std::optional<PageCopy> copy;
};

// `count` tokens more. Throws OutOfPages; then the sequence is what it was.
Appended append(PagePool&, int page_size, Sequence&, int64_t count);
// The same tokens once more, in the same pages.
Sequence fork(PagePool&, const Sequence&);
// Gives its pages back, the last one first: the beginning of a sequence, which others are likelier
// to have, is overwritten last.
void drop(PagePool&, Sequence&);

}  // namespace attn::paged
