#include "emulator/memory.h"

#include <algorithm>
#include <utility>

namespace attn::emulator {
namespace {

// In ascending order of their addresses. Where two overlap, either may be found: a race between
// two threads is missed if each has found another one.
std::vector<GlobalBuffer*>& buffers() {
  static thread_local std::vector<GlobalBuffer*> all;
  return all;
}

// What the last look-ups have found: a loop comes by the same two buffers again, and by the same
// memory that is no buffer's, such as a kernel's arguments.
struct Found {
  GlobalBuffer *buffer = nullptr, *earlier = nullptr;  // the last two
  const std::byte *first = nullptr, *end = nullptr;  // no buffer here, nor a guard of one
};
thread_local constinit Found found;

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

GlobalBuffer::GlobalBuffer(std::string name, const void* data, std::size_t bytes, std::size_t guard)
    : name_(std::move(name)),
      data_(static_cast<const std::byte*>(data)),
      bytes_(bytes),
      guard_(guard) {
  byte_name_ = [this](std::size_t byte) { return "byte " + std::to_string(byte) + " of " + name_; };
  auto& all = buffers();
  all.insert(std::ranges::upper_bound(all, data_, {}, &GlobalBuffer::data_), this);
  found = {};
}
GlobalBuffer::~GlobalBuffer() {
  std::erase(buffers(), this);
  found = {};
}

GlobalBuffer* GlobalBuffer::find(const void* at) {
  const auto* const byte = static_cast<const std::byte*>(at);
  const auto holds = [byte](const GlobalBuffer* b) {
    return static_cast<std::size_t>(byte - b->data_) < b->bytes_;
  };
  if (found.buffer && holds(found.buffer)) return found.buffer;
  if (found.earlier && holds(found.earlier)) {
    std::swap(found.buffer, found.earlier);
    return found.buffer;
  }
  if (byte >= found.first && byte < found.end) return nullptr;
  auto& all = buffers();
  const auto next = std::ranges::upper_bound(all, byte, {}, &GlobalBuffer::data_);
  const GlobalBuffer* const before = next == all.begin() ? nullptr : next[-1];
  if (before && holds(before)) {
    found.earlier = std::exchange(found.buffer, next[-1]);
    return found.buffer;
  }
  // From the end of the buffer before it to the beginning of the next one.
  const std::byte* const first = before ? before->data_ + before->bytes_ + before->guard_ : nullptr;
  const std::byte* const end =
      next == all.end() ? byte + 1 : (*next)->data_ - (*next)->guard_;
  if (byte >= first && byte < end) found.first = first, found.end = end;
  return nullptr;
}
bool GlobalBuffer::known_to_be_none(const void* at) {
  const auto* const byte = static_cast<const std::byte*>(at);
  return byte >= found.first && byte < found.end;
}
GlobalBuffer* GlobalBuffer::nearest(const void* at) {
  const auto distance = [at](const GlobalBuffer* b) {
    const auto* const byte = static_cast<const std::byte*>(at);
    return byte < b->data_ ? b->data_ - byte : byte - (b->data_ + b->bytes_);
  };
  const auto& all = buffers();
  const auto least = std::min_element(all.begin(), all.end(), [&](const auto* a, const auto* b) {
    return distance(a) < distance(b);
  });
  return least == all.end() ? nullptr : *least;
}
std::string GlobalBuffer::place_of(const void* at) const {
  const auto* const byte = static_cast<const std::byte*>(at);
  if (byte < data_) return std::to_string(data_ - byte) + " bytes before " + name_;
  return std::to_string(byte - data_ - static_cast<std::ptrdiff_t>(bytes_)) +
         " bytes past the end of " + name_ + " (" + std::to_string(bytes_) + " bytes)";
}
bool GlobalBuffer::guards(const void* at) const {
  const auto* const byte = static_cast<const std::byte*>(at);
  return byte >= data_ - guard_ && byte < data_ + bytes_ + guard_;
}
void GlobalBuffer::forget_accesses() {
  for (GlobalBuffer* b : buffers()) b->shadow_.clear();
}
std::size_t GlobalBuffer::offset(const void* at) const {
  return static_cast<std::size_t>(static_cast<const std::byte*>(at) - data_);
}

}  // namespace attn::emulator
