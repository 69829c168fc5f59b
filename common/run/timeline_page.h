/// \file
/// The page of `--timeline FILE.html`: what stands before and behind its data, which are the text
/// of `--timeline FILE.json`. CMake writes it from the folder timeline_page.
#pragma once

#include <string_view>

namespace attn {

extern const std::string_view kTimelinePageBegin, kTimelinePageEnd;

/// Whether `path` ends with .html: a page and no JSON.
inline bool is_timeline_page(std::string_view path) { return path.ends_with(".html"); }

}  // namespace attn
