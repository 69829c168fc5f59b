#include "report/encoding.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "attn/error.h"

namespace attn::report {
namespace {

constexpr const char* kMark = "\xef\xbb\xbf";  // U+FEFF in UTF-8

void append_utf8(std::string& out, uint32_t c) {
  const auto put = [&](uint32_t byte) { out += static_cast<char>(byte); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xc0 | c >> 6), put(0x80 | (c & 0x3f));
  } else if (c < 0x10000) {
    put(0xe0 | c >> 12), put(0x80 | (c >> 6 & 0x3f)), put(0x80 | (c & 0x3f));
  } else {
    put(0xf0 | c >> 18), put(0x80 | (c >> 12 & 0x3f)), put(0x80 | (c >> 6 & 0x3f));
    put(0x80 | (c & 0x3f));
  }
}

std::size_t line_at(const std::string& text, std::size_t at) {
  return 1 + static_cast<std::size_t>(
                 std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at), '\n'));
}

[[noreturn]] void fail(const std::string& file, std::size_t line, const char* what) {
  throw InputError(
      fmt::format("{}: line {}: {} (accepted: UTF-8 or UTF-16 text)", file, line, what));
}

std::string from_utf16(const std::string& bytes, bool little_endian, const std::string& file) {
  std::string out;
  const auto unit = [&](std::size_t at) -> uint32_t {
    const auto first = static_cast<unsigned char>(bytes[at]);
    const auto second = static_cast<unsigned char>(bytes[at + 1]);
    return little_endian ? first | second << 8 : first << 8 | second;
  };
  const std::size_t end = bytes.size() / 2 * 2;
  for (std::size_t at = 0; at < end; at += 2) {
    uint32_t c = unit(at);
    if (c >= 0xd800 && c < 0xe000) {  // a pair of surrogates
      const uint32_t low = c < 0xdc00 && at + 2 < end ? unit(at + 2) : 0;
      if (low < 0xdc00 || low >= 0xe000)
        fail(file, line_at(out, out.size()), "UTF-16 with half of a surrogate pair");
      c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
      at += 2;
    }
    append_utf8(out, c);
  }
  if (end != bytes.size())
    fail(file, line_at(out, out.size()), "UTF-16 that ends within a character");
  return out;
}

}  // namespace

std::string utf8_text(const std::string& bytes, const std::string& file) {
  std::string text;
  const auto pair = [&](int first, int second) {
    return bytes.size() >= 2 && static_cast<unsigned char>(bytes[0]) == first &&
           static_cast<unsigned char>(bytes[1]) == second;
  };
  if (pair(0xff, 0xfe) || (bytes.size() >= 2 && bytes[0] != 0 && bytes[1] == 0))
    text = from_utf16(bytes, true, file);
  else if (pair(0xfe, 0xff) || (bytes.size() >= 2 && bytes[0] == 0 && bytes[1] != 0))
    text = from_utf16(bytes, false, file);
  else
    text = bytes;
  // UTF-32, or UTF-16 appended to UTF-8.
  if (const auto zero = text.find('\0'); zero != text.npos)
    fail(file, line_at(text, zero), "a zero byte: the file mixes encodings, or is no text");
  for (std::size_t at = 0; (at = text.find(kMark, at)) != text.npos;)
    if (at == 0 || text[at - 1] == '\n' || text[at - 1] == '\r')
      text.erase(at, 3);
    else
      at += 3;
  return text;
}

}  // namespace attn::report
