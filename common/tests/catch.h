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

/// Says that a test, or a part of one, was not run, and why. ctest counts such a test as skipped
/// (SKIP_REGULAR_EXPRESSION in AttnChapter.cmake): a WARN would let it pass.
inline void skipped(const std::string& why) {
  std::printf("skipped: %s\n", why.c_str());
  std::fflush(stdout);
}

}  // namespace attn::tests
