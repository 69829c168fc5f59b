/// \file
/// Tables in pages with values that need no GPU: the test that computes the values compares them
/// with the page, so that neither can change alone.
#pragma once

#include <cmath>
#include <fstream>
#include <regex>
#include <string>
#include <vector>

namespace attn::tests {

/// A number in a text and the unit of its last digit: {0.0129, 1e-4}, {3.5e-4, 1e-5}.
struct Printed {
  double value, unit;
};

inline std::vector<Printed> numbers_of(const std::string& text) {
  static const std::regex number(R"(-?[0-9]+(?:\.([0-9]+))?(?:e(-?[0-9]+))?)");
  std::vector<Printed> found;
  for (std::sregex_iterator at(text.begin(), text.end(), number), end; at != end; ++at) {
    const int exponent = (*at)[2].matched ? std::stoi((*at)[2]) : 0;
    found.push_back(
        {std::stod(at->str()), std::pow(10.0, exponent - static_cast<int>((*at)[1].length()))});
  }
  return found;
}

/// Whether a row of a Markdown table in `page`, a path from the root of the suite, begins with "| "
/// and `label` and contains the numbers of `cells`, such as "0.0091, 2.2e-4 | 0.0377, 9.3e-4", in
/// order. Each may differ by one unit of the page's last digit, since compilers may round 0.26249
/// and 0.26251 differently.
inline bool on_page(const std::string& page, const std::string& label, const std::string& cells) {
  const std::vector<Printed> wanted = numbers_of(cells);
  std::ifstream file(std::string(ATTN_SOURCE_DIR) + "/" + page);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("| " + label)) continue;
    const std::vector<Printed> row = numbers_of(line.substr(2 + label.size()));
    for (std::size_t first = 0; first + wanted.size() <= row.size(); ++first) {
      bool equal = true;
      for (std::size_t n = 0; n < wanted.size(); ++n)
        equal = equal && std::abs(wanted[n].value - row[first + n].value) <=
                             1.001 * row[first + n].unit;
      if (equal) return true;
    }
  }
  return false;
}

/// 2.2e-4, as in pages: the exponent without leading zeros.
inline std::string short_exponent(std::string number) {
  const auto e = number.find('e');
  if (e != number.npos && number[e + 2] == '0') number.erase(e + 2, 1);
  return number;
}

}  // namespace attn::tests
