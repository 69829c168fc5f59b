/// \file
/// Parses numbers and lists in option values. Throws InputError naming an invalid one.
#pragma once

#include <fmt/format.h>

#include <charconv>
#include <string>
#include <vector>

#include "attn/error.h"

namespace attn {

/// Parses a number from `lowest` to `highest`.
template <class T>
T parse_number(const std::string& option, const std::string& text, T lowest, T highest) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc::invalid_argument || stop != end)
    throw InputError(fmt::format("{} {}: not {}", option, text.empty() ? "''" : text,
                                 std::is_integral_v<T> ? "an integer" : "a number"));
  if (error == std::errc::result_out_of_range || !(value >= lowest && value <= highest))
    throw InputError(fmt::format("{} {}: must be from {} to {}", option, text, lowest, highest));
  return value;
}

/// Splits a list; an empty text has one empty part.
inline std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts{""};
  for (const char c : text) {
    if (c == separator)
      parts.emplace_back();
    else
      parts.back() += c;
  }
  return parts;
}

}  // namespace attn
