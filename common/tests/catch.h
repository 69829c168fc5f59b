// Catch2 2.13 and 3.x have different headers. Tests include this file and use the common subset:
// TEST_CASE, SECTION, CHECK, REQUIRE, CHECK_THROWS_AS, GENERATE, INFO, Approx, ContainsSubstring.
#pragma once

#include <cstdio>
#include <string>

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;  // 2.13 declares it in the global namespace
using Catch::Matchers::ContainsSubstring;
#elif __has_include(<catch2/catch.hpp>)
#include <catch2/catch.hpp>
inline auto ContainsSubstring(const std::string& text) { return Catch::Matchers::Contains(text); }
#else
#error "Catch2 is not installed: see the dependencies in README.md"
#endif

namespace attn::tests {

/// Number of cases, or parts of cases, skipped so far.
inline int skipped_cases = 0;
/// Reports that a case, or a part of one, is not run, and why. ctest counts such a case as skipped
/// (AttnChapter.cmake), and the program prints their number at its end. A WARN would let the case
/// pass, and Catch2 2.13 has no SKIP.
inline void skipped(const std::string& why) {
  ++skipped_cases;
  std::printf("SKIPPED: %s\n", why.c_str());
  std::fflush(stdout);
}

}  // namespace attn::tests

/// Ends a case that cannot run on this machine.
#define ATTN_SKIP(why)         \
  do {                         \
    attn::tests::skipped(why); \
    return;                    \
  } while (false)
