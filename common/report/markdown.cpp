#include "report/markdown.h"

#include <fmt/format.h>
#include <md4c-html.h>

#include <algorithm>

#include "report/markup.h"

namespace attn::report {
namespace {

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != text.npos; at += to.size())
    text.replace(at, from.size(), to);
}

}  // namespace

std::string markdown(std::string_view from, int level) {
  std::string html, text = well_formed(from);
  const auto append = [](const MD_CHAR* more, MD_SIZE size, void* to) {
    static_cast<std::string*>(to)->append(more, size);
  };
  replace_all(text, "\xef\xbf\xbd\n", "\n");  // CR LF line ends
  const unsigned flags = MD_DIALECT_GITHUB | MD_FLAG_NOHTML;
  if (md_html(text.data(), static_cast<MD_SIZE>(text.size()), append, &html, flags, 0) != 0)
    return escaped(text);
  // The text contains no tags any more, so these come from md4c.
  for (int n = 6; n >= 1; --n)
    for (const char* end : {"", "/"}) {
      const auto tag = [&](int of) { return fmt::format("<{}h{}>", end, of); };
      replace_all(html, tag(n), tag(std::min(6, n + level - 1)));
    }
  return html;
}

}  // namespace attn::report
