#include "report/short_list.h"

#include <fmt/format.h>

#include <charconv>

namespace attn::report {

std::string short_list(const std::vector<std::string>& names) {
  if (names.size() == 1) return names[0];
  struct Range {
    char letter;
    int first, last;
  };
  std::vector<Range> ranges;
  for (const std::string& name : names) {
    int n = 0;
    const char* const end = name.data() + name.find('_');
    if (name.find('_') == name.npos || std::from_chars(name.data() + 1, end, n).ptr != end)
      return fmt::format("{}", fmt::join(names, ", "));
    const bool next = !ranges.empty() && ranges.back().letter == name[0];
    if (next && ranges.back().last + 1 == n)
      ranges.back().last = n;
    else if (next && ranges.back().last >= n)
      return fmt::format("{}", fmt::join(names, ", "));  // from two chapters
    else
      ranges.push_back({name[0], n, n});
  }
  std::string text;
  for (const Range& r : ranges) {
    if (!text.empty()) text += ", ";
    text += fmt::format("{}{}", r.letter, r.first);
    if (r.last > r.first)
      text += fmt::format("{} {}{}", r.last > r.first + 1 ? " to" : ",", r.letter, r.last);
  }
  return text;
}

}  // namespace attn::report
