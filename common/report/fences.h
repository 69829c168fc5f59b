/// \file
/// Code in Markdown pages, copied from the sources between two markers, as tables are filled:
///
///     <!-- code: v9_dynamic_scheduler.cu softmax -->
///     <!-- code: v9_dynamic_scheduler.cu softmax 4-15 -->      these lines of the region
///     <!-- diff: v7_overlap.cu v8_persistent.cu tiles -->      the region of both, line by line
///     ...
///     <!-- end code -->
///
/// A region is enclosed by two lines `//! [softmax]`. Paths are relative to the page. A link to the
/// file and its lines is inserted above the fence.
#pragma once

#include <filesystem>
#include <string>

namespace attn::report {

inline constexpr int kMaxFenceLines = 15, kMaxDiffLines = 24;

/// `page` with every fence filled from the files next to `path`. Throws InputError, with one line
/// that names the page and the marker, for a missing file or region, a range outside of it, more
/// than kMaxFenceLines lines of code or kMaxDiffLines of a diff, or a marker without its end.
std::string fill_fences(const std::string& page, const std::filesystem::path& path);

}  // namespace attn::report
