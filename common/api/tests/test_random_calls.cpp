/// \file
/// Random calls on the emulator.
#include "api/tests/random_calls.h"

#ifndef ATTN_RANDOM_CALLS
#define ATTN_RANDOM_CALLS 400
#endif

TEST_CASE("random calls are right, or refused with one line", "[api]") {
  attn::tests::random_calls(ATTN_RANDOM_CALLS, attn::Backend::emulated);
}
