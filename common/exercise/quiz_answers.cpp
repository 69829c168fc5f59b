#include "exercise/quiz_answers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string_view>

#include "attn/error.h"

namespace attn {
namespace {

std::string trimmed(const std::string& s) {
  const auto first = s.find_first_not_of(" \t\r"), last = s.find_last_not_of(" \t\r");
  return first == s.npos ? "" : s.substr(first, last - first + 1);
}

std::string lower(std::string s) {
  std::ranges::transform(s, s.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return s;
}

// sum = product {+- product}; product = power {*/ power}; power = - power | atom [^ power];
// atom = number | ( sum )
class Arithmetic {
 public:
  explicit Arithmetic(const std::string& text) : rest_(text) {}
  std::optional<double> whole_text() {
    const double value = sum();
    skip_spaces();
    return good_ && rest_.empty() && std::isfinite(value) ? std::optional(value) : std::nullopt;
  }

 private:
  double sum() {
    double value = product();
    for (;;)
      if (take('+'))
        value += product();
      else if (take('-'))
        value -= product();
      else
        return value;
  }
  double product() {
    double value = power();
    for (;;)
      if (take('*'))
        value *= power();
      else if (take('/'))
        value /= power();
      else
        return value;
  }
  double power() {
    if (++depth_ > 100) good_ = false;
    double value = 0;
    if (good_ && take('-')) {
      value = -power();
    } else if (good_) {
      value = atom();
      if (take('^')) value = std::pow(value, power());
    }
    --depth_;
    return value;
  }
  double atom() {
    double value = 0;
    if (take('(')) {
      value = sum();
      good_ = good_ && take(')');
    } else {
      skip_spaces();
      const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
      good_ = error == std::errc() && !rest_.empty() &&
              (std::isdigit(static_cast<unsigned char>(rest_[0])) || rest_[0] == '.');
      if (good_) rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
    }
    return value;
  }
  void skip_spaces() {
    while (!rest_.empty() && (rest_[0] == ' ' || rest_[0] == '\t')) rest_.remove_prefix(1);
  }
  bool take(char c) {
    skip_spaces();
    if (rest_.empty() || rest_[0] != c) return false;
    rest_.remove_prefix(1);
    return true;
  }

  std::string_view rest_;
  int depth_ = 0;
  bool good_ = true;
};

bool is_letters_of(const std::string& value, const std::string& all) {
  std::size_t next = 0;
  for (const char c : value) {
    next = all.find(c, next);
    if (next++ == all.npos) return false;
  }
  return !value.empty();
}

}  // namespace

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw InputError(path + ": cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

Answers read_answers(const std::string& path) {
  Answers answers;
  std::istringstream lines(read_text(path));
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    line = trimmed(line.substr(0, line.find('#')));
    if (line.empty()) continue;
    const auto equals = line.find('=');
    if (equals == line.npos)
      throw InputError(fmt::format("{}:{}: must be \"name = value\"", path, number));
    const std::string name = trimmed(line.substr(0, equals));
    if (std::ranges::find(answers, name, &Answers::value_type::first) != answers.end())
      throw InputError(fmt::format("{}:{}: {} is given twice", path, number, name));
    answers.emplace_back(name, trimmed(line.substr(equals + 1)));
  }
  return answers;
}

std::string answer_to(const Answers& answers, const std::string& name) {
  const auto found = std::ranges::find(answers, name, &Answers::value_type::first);
  return found == answers.end() ? "" : found->second;
}

std::optional<double> arithmetic(const std::string& text) { return Arithmetic(text).whole_text(); }

Question Question::from_text(const std::string& name, const std::string& text) {
  std::istringstream words(text);
  Question q{name, Kind::choice, {std::istream_iterator<std::string>(words), {}}};
  if (q.choices == std::vector<std::string>{"whole"}) return {name, Kind::whole, {}};
  if (q.choices.size() == 2 && q.choices[0] == "letters")
    return {name, Kind::letters, {q.choices[1]}};
  if (q.choices.size() < 2)
    throw std::invalid_argument(name + ": needs \"whole\", \"letters abc\" or its choices");
  return q;
}

std::string Question::accepted() const {
  switch (kind) {
    case Kind::number:
      return "must be one number, or arithmetic as in 4 * 4096^2 * 128";
    case Kind::whole: return "must be one integer, or arithmetic that gives one";
    case Kind::choice:
      return fmt::format("must be one of {}", fmt::join(choices, ", "));
    case Kind::letters:
      return fmt::format("must be some of the letters {}, in alphabetical order", choices[0]);
  }
  return "";
}

std::string Question::understood(const std::string& value, const std::string& path) const {
  const auto refuse = [&] {
    return InputError(fmt::format("{}: {} = {}: {}", path, name, value, accepted()));
  };
  const std::string small = lower(value);
  if (kind == Kind::choice) {
    for (const std::string& c : choices)
      if (lower(c) == small) return c;
    throw refuse();
  }
  if (kind == Kind::letters) {
    if (!is_letters_of(small, choices[0])) throw refuse();
    return small;
  }
  const auto number = arithmetic(value);
  constexpr double kExact = 9007199254740992;  // every integer up to 2^53 is exact
  const bool is_whole = number && *number == std::round(*number) && std::abs(*number) <= kExact;
  if (!number || (kind == Kind::whole && !is_whole)) throw refuse();
  return is_whole ? fmt::format("{}", static_cast<int64_t>(*number))
                  : fmt::format("{:.12g}", *number);
}

Answers understood(const Answers& written, const std::vector<Question>& questions,
                   const std::string& path) {
  std::vector<std::string> names;
  for (const Question& q : questions) names.push_back(q.name);
  for (const auto& [name, value] : written)
    if (std::ranges::find(names, name) == names.end())
      throw InputError(fmt::format("{}: {}: not a name in this exercise; the names are {}", path,
                                   name, fmt::join(names, ", ")));
  Answers result;
  for (const Question& q : questions) {
    const std::string value = answer_to(written, q.name);
    result.emplace_back(q.name, value.empty() || value == "?" ? "" : q.understood(value, path));
  }
  return result;
}

bool all_answered(const Answers& understood) {
  bool all = true;
  for (const auto& [name, value] : understood) {
    if (value.empty()) fmt::print("{}: not answered\n", name);
    all = all && !value.empty();
  }
  return all;
}

bool confirmed(const Answers& understood, const Answers& written) {
  fmt::print("understood:\n");
  for (const auto& [name, value] : understood) {
    const std::string original = answer_to(written, name);
    fmt::print("  {} = {}{}\n", name, value,
               original == value ? "" : fmt::format("    ({})", original));
  }
  if (!isatty(STDIN_FILENO) || !isatty(STDOUT_FILENO)) return true;
  fmt::print("Is that your prediction? It is sealed, and then the truth is shown. [y/N] ");
  std::fflush(stdout);
  std::string answer;
  std::getline(std::cin, answer);
  return lower(trimmed(answer)) == "y" || lower(trimmed(answer)) == "yes";
}

}  // namespace attn
