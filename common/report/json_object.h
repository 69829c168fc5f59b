/// \file
/// Reads a JSON file value by value. For a missing value or one of the wrong type, the error is one
/// line with the file and the position in it.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attn/error.h"

namespace attn::report {

// A single line without terminal control characters.
inline std::string printable(std::string text) {
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  return text;
}

// An object in the file, and its path for messages: "steps[2].time".
class Object {
 public:
  Object(const nlohmann::json& value, std::string file, std::string where,
         std::string accepted = "what a chapter program writes with --json")
      : value_(value),
        file_(std::move(file)),
        where_(std::move(where)),
        accepted_(std::move(accepted)) {
    if (!value_.is_object()) fail(where_, "is not an object");
  }

  std::string text(const char* key) const {
    const nlohmann::json& v = at(key);
    if (!v.is_string()) fail(name(key), "is not text");
    return printable(v.get<std::string>());
  }
  std::string choice(const char* key, std::initializer_list<std::string_view> accepted) const {
    const std::string t = text(key);
    for (const std::string_view a : accepted)
      if (t == a) return t;
    fail(name(key), fmt::format("is '{}', must be one of {}", t, fmt::join(accepted, ", ")));
  }
  int64_t integer(const char* key, int64_t lowest) const {
    return integer(at(key), name(key), lowest);
  }
  uint64_t seed(const char* key) const {
    const nlohmann::json& v = at(key);
    if (!v.is_number_unsigned()) fail(name(key), "must be an integer from 0");
    return v.get<uint64_t>();
  }
  bool truth(const char* key) const {
    const nlohmann::json& v = at(key);
    if (!v.is_boolean()) fail(name(key), "is neither true nor false");
    return v.get<bool>();
  }
  double number(const char* key) const {
    const nlohmann::json& v = at(key);
    if (!v.is_number() || !std::isfinite(v.get<double>())) fail(name(key), "is not a number");
    return v.get<double>();
  }
  double positive(const char* key) const {
    const double x = number(key);
    if (!(x > 0)) fail(name(key), "must be above 0");
    return x;
  }
  /// Whether there is such a key, for keys that older files lack.
  bool contains(const char* key) const { return value_.contains(key); }
  bool has(const char* key) const { return !at(key).is_null(); }
  Object object(const char* key) const { return Object(at(key), file_, name(key), accepted_); }
  /// Nothing where the value is null.
  std::optional<double> maybe_number(const char* key) const {
    return has(key) ? std::optional(number(key)) : std::nullopt;
  }
  double at_least_zero(const char* key) const {
    const double x = number(key);
    if (x < 0) fail(name(key), "must not be below 0");
    return x;
  }
  std::vector<std::string> keys() const {
    std::vector<std::string> all;
    for (const auto& [key, inner] : value_.items()) all.push_back(key);
    return all;
  }
  /// The objects of a list.
  std::vector<Object> objects(const char* key) const {
    std::vector<Object> all;
    const nlohmann::json& list = array(key);
    for (std::size_t i = 0; i < list.size(); ++i)
      all.emplace_back(list[i], file_, fmt::format("{}[{}]", name(key), i), accepted_);
    return all;
  }
  /// The texts of a list.
  std::vector<std::string> texts(const char* key) const {
    std::vector<std::string> all;
    for (const nlohmann::json& v : array(key)) {
      if (!v.is_string()) fail(name(key), "is not a list of texts");
      all.push_back(printable(v.get<std::string>()));
    }
    return all;
  }
  const nlohmann::json& array(const char* key) const {
    const nlohmann::json& v = at(key);
    if (!v.is_array()) fail(name(key), "is not a list");
    return v;
  }
  int64_t integer(const nlohmann::json& v, const std::string& where, int64_t lowest) const {
    // The parser returns values above int64_t as unsigned; converting them would wrap.
    const bool fits = v.is_number_unsigned() ? v.get<uint64_t>() <= uint64_t{INT64_MAX}
                                             : v.is_number_integer();
    if (!fits || v.get<int64_t>() < lowest)
      fail(where, fmt::format("must be an integer from {}", lowest));
    return v.get<int64_t>();
  }
  std::string name(const char* key) const { return where_.empty() ? key : where_ + "." + key; }
  [[noreturn]] void fail(const std::string& where, std::string_view what) const {
    throw InputError(fmt::format("{}: {} {} (accepted: {})", file_,
                                 where.empty() ? "the file" : where, what, accepted_));
  }

 private:
  const nlohmann::json& at(const char* key) const {
    const auto found = value_.find(key);
    if (found == value_.end()) fail(name(key), "is missing");
    return *found;
  }

  const nlohmann::json& value_;
  std::string file_, where_, accepted_;
};

/// All bytes of a file. Throws InputError, also for a folder.
std::string read_bytes(const std::filesystem::path&);
/// Parses the JSON in `bytes`. Throws InputError with one line that begins with `file`.
nlohmann::json parse_json(const std::string& bytes, const std::string& file);

}  // namespace attn::report
