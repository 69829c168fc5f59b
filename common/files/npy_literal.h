/// \file
/// The Python literal in the header of a .npy file: strings, booleans, integers, tuples and lists.
#pragma once

#include <cctype>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace attn::npy {

inline constexpr int kMaxNesting = 32;  // of lists and tuples; bounds the recursion

// Text from a file or a path for use in a message: printable characters only, so that the message
// stays on one line.
inline std::string printable(std::string_view text, std::size_t max_length) {
  std::string result;
  for (const char c : text.substr(0, max_length)) {
    const bool control = static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
    result += control ? '?' : c;
  }
  if (text.size() > max_length) result += "...";
  return result;
}

inline std::string in_quotes(std::string_view text) {
  std::string result = "'";
  for (const char c : printable(text, 40)) {
    // Bytes above ASCII may be part of a multi-byte character, which a terminal cannot show.
    result += static_cast<unsigned char>(c) >= 0x80 ? '?' : c;
  }
  return result + "'";
}

struct Value {
  enum class Kind { kString, kBool, kNone, kInteger, kTuple, kList };
  Kind kind = Kind::kNone;
  std::string text;          // kString
  bool truth = false;        // kBool
  int64_t number = 0;        // kInteger
  std::vector<Value> items;  // kTuple, kList
};

class ParseError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A recursive-descent parser for the subset of Python literals that describes a dtype and a shape.
// Throws ParseError at the first byte that does not match.
class HeaderParser {
 public:
  explicit HeaderParser(std::string_view text) : text_(text) {}

  // The whole header: one dict with string keys, followed by white space only.
  std::vector<std::pair<std::string, Value>> parse_dict() {
    std::vector<std::pair<std::string, Value>> dict;
    expect('{');
    while (!accept('}')) {
      if (!dict.empty()) {
        expect(',');
        if (accept('}')) break;
      }
      Value key = parse_value(0);
      if (key.kind != Value::Kind::kString) throw error("a key that is not a string");
      expect(':');
      dict.emplace_back(std::move(key.text), parse_value(0));
    }
    skip_space();
    if (position_ != text_.size()) throw error("text after the dict");
    return dict;
  }

 private:
  ParseError error(std::string_view what) const {
    return ParseError(std::string(what) + " at byte " + std::to_string(position_));
  }

  void skip_space() {
    while (position_ < text_.size() && std::string_view(" \t\r\n").find(text_[position_]) !=
                                           std::string_view::npos) {
      ++position_;
    }
  }

  bool accept(char c) {
    skip_space();
    if (position_ >= text_.size() || text_[position_] != c) return false;
    ++position_;
    return true;
  }

  void expect(char c) {
    if (!accept(c)) throw error(std::string("no '") + c + "'");
  }

  Value parse_value(int depth) {
    if (depth > kMaxNesting) throw error("too many brackets");
    skip_space();
    if (position_ >= text_.size()) throw error("an early end");
    const char c = text_[position_];
    if (c == '\'' || c == '"') return parse_string();
    if (c == '(') return parse_sequence('(', ')', depth);
    if (c == '[') return parse_sequence('[', ']', depth);
    if (c == '-' || c == '+' || is_digit(c)) return parse_integer();
    return parse_word();
  }

  Value parse_string() {
    const char quote = text_[position_++];
    Value value;
    value.kind = Value::Kind::kString;
    while (position_ < text_.size() && text_[position_] != quote) {
      // Escapes are kept as they are: no key or type has one, so they only need to be skipped.
      if (text_[position_] == '\\' && position_ + 1 < text_.size()) {
        value.text += text_[position_++];
      }
      value.text += text_[position_++];
    }
    if (position_ >= text_.size()) throw error("a string without an end");
    ++position_;
    return value;
  }

  // "(2, 3)", "(5,)", "()", "[('x', '<f4')]". "(5)" is a number in parentheses, as in Python.
  Value parse_sequence(char open, char close, int depth) {
    expect(open);
    Value value;
    value.kind = open == '(' ? Value::Kind::kTuple : Value::Kind::kList;
    bool comma = false;
    while (!accept(close)) {
      if (!value.items.empty()) {
        expect(',');
        comma = true;
        if (accept(close)) break;
      }
      value.items.push_back(parse_value(depth + 1));
    }
    if (open == '(' && value.items.size() == 1 && !comma) {
      Value inner = std::move(value.items.front());  // the move must end before `value` does
      return inner;
    }
    return value;
  }

  Value parse_integer() {
    const bool negative = text_[position_] == '-';
    if (!is_digit(text_[position_])) ++position_;
    if (position_ >= text_.size() || !is_digit(text_[position_])) throw error("no number");
    Value value;
    value.kind = Value::Kind::kInteger;
    constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
    for (; position_ < text_.size() && is_digit(text_[position_]); ++position_) {
      const int64_t digit = text_[position_] - '0';
      if (value.number > (kMax - digit) / 10) throw error("a number of more than 63 bits");
      value.number = value.number * 10 + digit;
    }
    if (negative) value.number = -value.number;
    // Python 2 wrote long integers as 3L.
    if (position_ < text_.size() && text_[position_] == 'L') ++position_;
    return value;
  }

  Value parse_word() {
    const std::size_t begin = position_;
    while (position_ < text_.size() &&
           std::isalpha(static_cast<unsigned char>(text_[position_])) != 0) {
      ++position_;
    }
    const std::string_view word = text_.substr(begin, position_ - begin);
    // u'...' is a Python 2 string, r'...' a raw string: without escapes both equal '...'.
    const bool prefix = word == "u" || word == "U" || word == "r" || word == "R";
    if (prefix && position_ < text_.size() && (text_[position_] == '\'' || text_[position_] == '"'))
      return parse_string();
    Value value;
    if (word == "True" || word == "False") {
      value.kind = Value::Kind::kBool;
      value.truth = word == "True";
    } else if (word != "None") {
      position_ = begin;
      throw error("no Python literal");
    }
    return value;
  }

  static bool is_digit(char c) { return c >= '0' && c <= '9'; }

  std::string_view text_;
  std::size_t position_ = 0;
};

}  // namespace attn::npy
