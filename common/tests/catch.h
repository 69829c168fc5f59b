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

namespace attn::tests {
/// How many cases could not run, so far.
inline int skipped_cases = 0;
inline void say_skipped(const char* why) {
  ++skipped_cases;
  std::printf("SKIPPED: %s\n", why);
}
}  // namespace attn::tests

/// Ends a case that cannot run here. ctest counts it as skipped, and the program says at its end
/// how many there were: Catch2 2.13 has no SKIP.
#define ATTN_SKIP(why)               \
  do {                               \
    attn::tests::say_skipped(why);   \
    return;                          \
  } while (false)
