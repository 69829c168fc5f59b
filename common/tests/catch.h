// Catch2 2.13 and 3.x put their headers in different places. Tests include this file and use what
// both have: TEST_CASE, SECTION, CHECK, REQUIRE, CHECK_THROWS_AS, GENERATE, INFO and Approx.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;  // 2.13 has it in the global namespace already
#elif __has_include(<catch2/catch.hpp>)
#include <catch2/catch.hpp>
#else
#error "Catch2 is not installed: see the dependencies in README.md"
#endif

#include <cstdio>
#include <string>

namespace attn::tests {

/// How often a case, or a part of one, was not run, so far.
inline int skipped_cases = 0;
/// Says that a case, or a part of one, is not run, and why. ctest counts such a case as skipped
/// (AttnChapter.cmake), and the program says at its end how many there were: a WARN would let it
/// pass, and Catch2 2.13 has no SKIP.
inline void skipped(const std::string& why) {
  ++skipped_cases;
  std::printf("SKIPPED: %s\n", why.c_str());
  std::fflush(stdout);
}

}  // namespace attn::tests

/// Ends a case that cannot run here.
#define ATTN_SKIP(why)         \
  do {                         \
    attn::tests::skipped(why); \
    return;                    \
  } while (false)
