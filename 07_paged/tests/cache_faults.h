// Copies of the cache, each with one fault planted by faults.cmake.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct CacheFault {
  const char* what;
  std::string (*disagreement)(uint64_t seed, int num_pages, int page_size, int operations);
};
extern const std::vector<CacheFault> kCacheFaults;
