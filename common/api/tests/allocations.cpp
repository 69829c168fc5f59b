// Counts the allocations of a thread, for tests.
#include <cstdint>
#include <cstdlib>
#include <new>

#include "api/tests/calls.h"

static thread_local int64_t count = 0;
int64_t attn::tests::allocations() { return count; }

void* operator new(std::size_t bytes) {
  ++count;
  if (void* const memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
