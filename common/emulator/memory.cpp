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

GlobalBuffer::GlobalBuffer(std::string name, const void* data, std::size_t bytes, std::size_t guard)
    : name_(std::move(name)),
      data_(static_cast<const std::byte*>(data)),
      bytes_(bytes),
      guard_(guard) {
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
GlobalBuffer* GlobalBuffer::nearest(const void* at) {
  const auto distance = [at](const GlobalBuffer* b) {
    const auto* const byte = static_cast<const std::byte*>(at);
    return byte < b->data_ ? b->data_ - byte : byte - (b->data_ + b->bytes_);
  };
  const auto& all = buffers();
  const auto found = std::min_element(all.begin(), all.end(), [&](const auto* a, const auto* b) {
    return distance(a) < distance(b);
  });
  return found == all.end() ? nullptr : *found;
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
