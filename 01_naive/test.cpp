#include "tests/catch.h"
TEST_CASE("placeholder") { CHECK(true); }
