/// \file
/// Converts untrusted Markdown to HTML: the work log of a page.
#pragma once

#include <string>
#include <string_view>

namespace attn::report {

/// GitHub's Markdown (tables, strikethrough, task lists) as HTML. HTML in the text is escaped;
/// headings begin at `level`.
std::string markdown(std::string_view text, int level);

}  // namespace attn::report
