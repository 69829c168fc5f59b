/// \file
/// Tables of pages that no GPU is needed for: the test that makes the numbers looks them up in the
/// page, so that neither changes alone.
#pragma once

#include <fstream>
#include <string>

namespace attn::tests {

/// Whether a row of a Markdown table in `page`, a path from the root of the suite, begins with
/// "| " and `label` and holds `cells`, as "0.0091, 2.2e-4 | 0.0377, 9.3e-4".
inline bool on_page(const std::string& page, const std::string& label, const std::string& cells) {
  std::ifstream file(std::string(ATTN_SOURCE_DIR) + "/" + page);
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("| " + label) && line.find("| " + cells + " |") != line.npos) return true;
  return false;
}

/// 2.2e-4, as pages have it: the exponent without leading zeros.
inline std::string short_exponent(std::string number) {
  const auto e = number.find('e');
  if (e != number.npos && number[e + 2] == '0') number.erase(e + 2, 1);
  return number;
}

}  // namespace attn::tests
