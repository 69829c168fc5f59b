#include "report/fences.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <vector>

#include "attn/error.h"

namespace attn::report {
namespace {

namespace fs = std::filesystem;
using Lines = std::vector<std::string>;

// The lines of a region, and their numbers in the file. Other markers are left out, and so are
// marks of timelines (attn/span.h).
struct Region {
  Lines lines;
  std::vector<int> numbers;
};

Region read_region(const fs::path& file, const std::string& name, const std::string& where) {
  std::ifstream in(file);
  if (!in) throw InputError(fmt::format("{}: {}: no such file", where, file.string()));
  const std::string marker = fmt::format("//! [{}]", name);
  Region region;
  int number = 0, markers = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    const auto text = line.find_first_not_of(' ');
    const bool is_mark = text != line.npos && line.compare(text, 9, "ATTN_SPAN") == 0;
    const bool is_marker = text != line.npos && line.compare(text, 4, "//! ") == 0;
    if (is_marker && line.substr(text) == marker) ++markers;
    if (markers == 1 && !is_marker && !is_mark)
      region.lines.push_back(line), region.numbers.push_back(number);
  }
  if (markers != 2)
    throw InputError(
        fmt::format("{}: {} has no two lines {}", where, file.string(), marker));
  if (region.lines.empty())
    throw InputError(fmt::format("{}: {}: [{}] is empty", where, file.string(), name));
  return region;
}

// Removes the common indentation of a block of lines. #pragma lines at column 0 do not count.
void outdent(Lines& lines) {
  std::size_t indent = std::string::npos;
  for (const std::string& line : lines)
    if (const auto first = line.find_first_not_of(' '); first != line.npos && line[first] != '#')
      indent = std::min(indent, first);
  if (indent == std::string::npos) return;
  for (std::string& line : lines)
    line.erase(0, std::min(indent, std::min(line.find_first_not_of(' '), line.size())));
}

std::string link(const std::string& file, int first, int last) {
  return fmt::format("[{0}, lines {1} to {2}]({0}#L{1}-L{2})", file, first, last);
}

std::string code_fence(const Lines& words, const fs::path& folder, const std::string& where) {
  if (words.size() != 3 && words.size() != 4)
    throw InputError(where + ": must be code: FILE REGION, or code: FILE REGION FIRST-LAST");
  Region region = read_region(folder / words[1], words[2], where);
  std::size_t first = 1, last = region.lines.size();
  if (words.size() == 4) {
    char dash = 0;
    std::istringstream range(words[3]);
    if (!(range >> first >> dash >> last) || dash != '-' || first < 1 || first > last ||
        last > region.lines.size())
      throw InputError(fmt::format("{}: lines {}: must be FIRST-LAST of 1 to {}", where, words[3],
                                   region.lines.size()));
  }
  if (last - first >= kMaxFenceLines)
    throw InputError(fmt::format("{}: {} lines, at most {}: name some, as 1-{}", where,
                                 last - first + 1, kMaxFenceLines, kMaxFenceLines));
  Lines lines(region.lines.begin() + static_cast<std::ptrdiff_t>(first - 1),
              region.lines.begin() + static_cast<std::ptrdiff_t>(last));
  outdent(lines);
  return fmt::format("{}\n```cpp\n{}\n```\n",
                     link(words[1], region.numbers[first - 1], region.numbers[last - 1]),
                     fmt::join(lines, "\n"));
}

// The longest common subsequence of two regions gives the unchanged lines.
Lines difference(const Lines& a, const Lines& b) {
  std::vector<std::vector<std::size_t>> common(a.size() + 1,
                                               std::vector<std::size_t>(b.size() + 1, 0));
  for (std::size_t i = a.size(); i-- > 0;)
    for (std::size_t j = b.size(); j-- > 0;)
      common[i][j] = a[i] == b[j] ? common[i + 1][j + 1] + 1
                                  : std::max(common[i + 1][j], common[i][j + 1]);
  Lines lines;
  std::size_t i = 0, j = 0;
  while (i < a.size() || j < b.size()) {
    if (i < a.size() && j < b.size() && a[i] == b[j]) {
      lines.push_back("  " + a[i]), ++i, ++j;
    } else if (i < a.size() && (j == b.size() || common[i + 1][j] >= common[i][j + 1])) {
      lines.push_back("- " + a[i++]);
    } else {
      lines.push_back("+ " + b[j++]);
    }
  }
  return lines;
}

std::string diff_fence(const Lines& words, const fs::path& folder, const std::string& where) {
  if (words.size() != 4) throw InputError(where + ": must be diff: FILE FILE REGION");
  const Region a = read_region(folder / words[1], words[3], where);
  const Region b = read_region(folder / words[2], words[3], where);
  const Lines lines = difference(a.lines, b.lines);
  if (lines.size() > kMaxDiffLines)
    throw InputError(
        fmt::format("{}: {} lines, at most {}", where, lines.size(), kMaxDiffLines));
  return fmt::format("{} to {}\n```diff\n{}\n```\n",
                     link(words[1], a.numbers.front(), a.numbers.back()),
                     link(words[2], b.numbers.front(), b.numbers.back()), fmt::join(lines, "\n"));
}

}  // namespace

std::string fill_fences(const std::string& page, const fs::path& path) {
  static const std::string kClose = " -->", kEnd = "<!-- end code -->";
  std::string out;
  std::size_t at = 0;
  while (true) {
    const std::size_t begin =
        std::min(page.find("\n<!-- code: ", at), page.find("\n<!-- diff: ", at));
    if (begin == page.npos) break;
    const std::size_t close = page.find(kClose, begin), end = page.find(kEnd, begin);
    if (close == page.npos || end == page.npos || end < close)
      throw InputError(fmt::format("{}: a code marker without its {}", path.string(), kEnd));
    const std::string marker = page.substr(begin + 6, close - begin - 6);  // "code: FILE REGION"
    std::istringstream text(marker);
    Lines words;
    for (std::string word; text >> word;) words.push_back(word);
    const std::string where = fmt::format("{}: {}", path.string(), marker);
    out += page.substr(at, close + kClose.size() - at) + "\n";
    out += words[0] == "diff:" ? diff_fence(words, path.parent_path(), where)
                               : code_fence(words, path.parent_path(), where);
    at = end;
  }
  return out + page.substr(at);
}

}  // namespace attn::report
