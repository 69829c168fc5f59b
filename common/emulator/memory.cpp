#include "emulator/memory.h"

#include <algorithm>
#include <mutex>

namespace attn::emulator {
namespace {

std::vector<GlobalBuffer*>& buffers() {
  static thread_local std::vector<GlobalBuffer*> all;
  return all;
}

}  // namespace

std::string Member::element(std::size_t byte) const {
  std::string text = name;
  std::size_t inside = bytes;
  for (std::size_t d = 0; d < extents.size() && extents[d] != 0; ++d) {
    inside /= extents[d];
    text.append("[").append(std::to_string(byte / inside)).append("]");
    byte %= inside;
  }
  if (element_bytes <= 8) return text;  // else a struct: how far into it
  return text + " + " + std::to_string(byte);
}

GlobalBuffer::GlobalBuffer(std::string name, const void* data, std::size_t bytes)
    : name_(std::move(name)), data_(static_cast<const std::byte*>(data)), bytes_(bytes) {
  byte_name_ = [this](std::size_t byte) { return "byte " + std::to_string(byte) + " of " + name_; };
  buffers().push_back(this);
}
GlobalBuffer::~GlobalBuffer() { std::erase(buffers(), this); }

GlobalBuffer* GlobalBuffer::find(const void* at) {
  static thread_local GlobalBuffer* last = nullptr;  // a loop comes by the same buffer again
  const auto holds = [at](const GlobalBuffer* b) {
    return static_cast<std::size_t>(static_cast<const std::byte*>(at) - b->data_) < b->bytes_;
  };
  const auto& all = buffers();
  if (last && std::find(all.begin(), all.end(), last) != all.end() && holds(last)) return last;
  const auto found = std::find_if(all.begin(), all.end(), holds);
  return found == all.end() ? nullptr : last = *found;
}
void GlobalBuffer::forget_accesses() {
  for (GlobalBuffer* b : buffers()) b->shadow_.clear();
}
std::size_t GlobalBuffer::offset(const void* at) const {
  return static_cast<std::size_t>(static_cast<const std::byte*>(at) - data_);
}

void GridRaces::start_block(std::size_t first, std::size_t count, std::uint32_t block) {
  races.start_block(first, count, block);
  for (std::size_t t = first; t < first + count; ++t) fenced[t] = nullptr, seen[t] = {};
}

void GridRaces::fence(std::size_t t) {
  Order& order = races.order();
  order.take(t, std::make_shared<const Epochs>(seen[t].known));
  Meeting all;
  order.give(t, all);
  fenced[t] = std::make_shared<const Epochs>(std::move(all.known));
}

void GridRaces::atomic(std::size_t t, const void* at, bool releases, bool acquires) {
  Order& order = races.order();
  Meeting& place = places[at];
  Order::join(seen[t].known, place.known);
  if (acquires) order.take(t, std::make_shared<const Epochs>(place.known));
  if (acquires && !releases) return;               // a load tells nobody anything
  if (releases && !acquires) place.known.clear();  // a store: what was released before is gone
  if (fenced[t]) Order::join(place.known, *fenced[t]);
  if (releases) order.give(t, place);
  place.last = nullptr;
}

}  // namespace attn::emulator
