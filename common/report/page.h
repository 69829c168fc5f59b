/// \file
/// An HTML page about some runs, which a student hands in or an instructor reads. It is
/// self-contained: no network, no scripts.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "report/profile.h"

namespace attn::report {

struct PageInput {
  std::vector<ResultFile> results;
  std::vector<Profile> profiles;  ///< their counters appear in comparisons
  std::optional<std::string> log;  ///< the work log in Markdown; empty: its questions are shown
  std::string name;  ///< the author
};

/// The page with its checksum. Throws InputError if a profile belongs to no step of the results.
std::string page(const PageInput&);

struct Verification {
  bool intact = false;
  std::string said, found;  ///< SHA-256 in the page, and of the page
};
/// Whether a page is unchanged since page() wrote it. Throws InputError for other files. Anyone who
/// changes the page can also compute its checksum: this detects accidents, not intent.
Verification verify_page(const std::string& bytes, const std::string& file);

}  // namespace attn::report
