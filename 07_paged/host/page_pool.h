// Pages, their reference counts, and sequences as lists of pages: the host's part of the cache. The
// pool of K and V is on the device.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

namespace attn::paged {

// An operation needs more pages than are free. State is unchanged.
struct OutOfPages : std::runtime_error {
  OutOfPages(int64_t wanted, int64_t free);
  int64_t wanted, free;
};

// Pages 0 to num_pages - 1 with reference counts; a page with count 0 is free. Free pages keep
// their contents until they are taken, and form a queue: first freed, first taken.
class PagePool {
 public:
  explicit PagePool(int num_pages);

  int take();              // takes a free page, with one owner. Throws OutOfPages
  void share(int page);    // increments the count of a page that has an owner
  void release(int page);  // decrements it
  bool revive(int page);   // takes this page, with its contents, if it is free; else returns false

  int owners(int page) const { return owners_.at(static_cast<std::size_t>(page)); }
  int free_pages() const { return free_; }
  int num_pages() const { return static_cast<int>(owners_.size()); }

 private:
  // Free pages in the order in which they are taken: a circular list with a sentinel.
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

// Tokens 0 to length - 1 lie in `pages`, page_size per page; the last page may be partly filled.
struct CachedSequence {
  std::vector<int> pages;
  int64_t length = 0;
};

// A page whose first tokens must be copied before the next ones are written.
struct PageCopy {
  int from, to, tokens;
  bool operator==(const PageCopy&) const = default;
};
// Slots of the new tokens: page * page_size + index in the page.
struct Appended {
  std::vector<int64_t> slots;
  std::optional<PageCopy> copy;
};

// Appends `count` tokens. Throws OutOfPages; then the sequence is unchanged.
Appended append(PagePool&, int page_size, CachedSequence&, int64_t count);
// A second sequence with the same tokens in the same pages.
CachedSequence fork(PagePool&, const CachedSequence&);
// Releases the pages, last page first: so the start of a sequence, which other requests are most
// likely to share, is overwritten last.
void drop(PagePool&, CachedSequence&);

}  // namespace attn::paged
