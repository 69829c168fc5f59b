#include "host/page_pool.h"

#include <string>

namespace attn::paged {

OutOfPages::OutOfPages(int64_t wanted_pages, int64_t free_pages)
    : std::runtime_error("out of pages: " + std::to_string(wanted_pages) + " wanted, " +
                         std::to_string(free_pages) + " free"),
      wanted(wanted_pages),
      free(free_pages) {}

PagePool::PagePool(int num_pages)
    : owners_(static_cast<std::size_t>(num_pages)),
      links_(static_cast<std::size_t>(num_pages) + 1, {num_pages, num_pages}) {
  for (int page = 0; page < num_pages; ++page) link(page);
}

// Appends a page to the free queue; removes one from it.
void PagePool::link(int page) {
  const int ring = num_pages(), last = links(ring).before;
  links(page) = {last, ring};
  links(last).after = links(ring).before = page;
  ++free_;
}
void PagePool::unlink(int page) {
  const auto [before, after] = links(page);
  links(before).after = after;
  links(after).before = before;
  --free_;
}

//! [owners]
int PagePool::take() {
  if (free_ == 0) throw OutOfPages(1, 0);
  const int page = links(num_pages()).after;
  unlink(page);
  owners_[static_cast<std::size_t>(page)] = 1;
  return page;
}
void PagePool::share(int page) {
  if (owners(page) == 0) throw std::logic_error("share: no owner of page " + std::to_string(page));
  ++owners_[static_cast<std::size_t>(page)];
}
void PagePool::release(int page) {
  if (owners(page) == 0)
    throw std::logic_error("release: no owner of page " + std::to_string(page));
  if (--owners_[static_cast<std::size_t>(page)] == 0) link(page);
}
bool PagePool::revive(int page) {
  if (owners(page) > 0) return false;
  unlink(page);
  owners_[static_cast<std::size_t>(page)] = 1;
  return true;
}
//! [owners]

//! [append]
Appended append(PagePool& pool, int page_size, CachedSequence& s, int64_t count) {
  Appended result;
  if (count == 0) return result;
  // tokens in the last page; 0: it is full
  const auto fill = static_cast<int>(s.length % page_size);
  const bool copied = fill > 0 && pool.owners(s.pages.back()) > 1;
  const int64_t pages = (s.length + count + page_size - 1) / page_size;
  const int64_t wanted = pages - static_cast<int64_t>(s.pages.size()) + copied;
  if (wanted > pool.free_pages()) throw OutOfPages(wanted, pool.free_pages());
  if (copied) {  // copy-on-write: the other owners keep the page
    const int own = pool.take();
    result.copy = PageCopy{s.pages.back(), own, fill};
    pool.release(s.pages.back());
    s.pages.back() = own;
  }
  while (static_cast<int64_t>(s.pages.size()) < pages) s.pages.push_back(pool.take());
  for (const int64_t end = s.length + count; s.length < end; ++s.length)
    result.slots.push_back(int64_t{s.pages[static_cast<std::size_t>(s.length / page_size)]} *
                               page_size +
                           s.length % page_size);
  return result;
}
//! [append]

//! [fork]
CachedSequence fork(PagePool& pool, const CachedSequence& s) {
  for (const int page : s.pages) pool.share(page);
  return s;
}
void drop(PagePool& pool, CachedSequence& s) {
  for (; !s.pages.empty(); s.pages.pop_back()) pool.release(s.pages.back());
  s.length = 0;
}
//! [fork]

}  // namespace attn::paged
