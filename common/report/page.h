/// \file
/// One HTML page about some runs, which a student hands in or an instructor reads. It needs nothing
/// but itself: no network, no scripts.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "report/profile.h"

namespace attn::report {

struct PageInput {
  std::vector<ResultFile> results;
  std::vector<Profile> profiles;   ///< bring counters to the comparisons
  std::optional<std::string> log;  ///< the work log in Markdown; else its questions are shown
  std::string name;                ///< whose page it is
};

/// The page with its checksum. Throws InputError where a profile is of no step of the results.
std::string page(const PageInput&);

struct Verification {
  bool intact = false;
  std::string said, found;  ///< SHA-256 in the page, and of the page
};
/// Whether a page is as page() wrote it. Throws InputError where it is no such page. Whoever
/// changes the page can compute the checksum as well: it finds accidents, not intent.
Verification verify_page(const std::string& bytes, const std::string& file);

}  // namespace attn::report
