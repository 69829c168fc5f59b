// The main() of every test program. Cases tagged [gpu] need a GPU: if only they are selected and
// there is none, the program exits with 77 ("skipped"), or with 1 if ATTN_REQUIRE_GPU=1. It also
// exits with 77 if everything that ran passed but something was skipped (catch.h).
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define CATCH_CONFIG_RUNNER
#include "device/device.h"
#include "tests/catch.h"

int main(int argc, char** argv) {
  const bool gpu_cases = argc == 2 && std::strcmp(argv[1], "[gpu]") == 0;
  if (gpu_cases && !attn::gpu_info().available) {
    const char* required = std::getenv("ATTN_REQUIRE_GPU");
    std::printf("no GPU: %s\n", attn::gpu_info().error.c_str());
    return required && std::strcmp(required, "1") == 0 ? 1 : 77;
  }
  const int status = Catch::Session().run(argc, argv);
  if (attn::tests::skipped_cases > 0)
    std::printf("%d test cases were skipped\n", attn::tests::skipped_cases);
  return status == 0 && attn::tests::skipped_cases > 0 ? 77 : status;
}
