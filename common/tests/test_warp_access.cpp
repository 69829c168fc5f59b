// The rules for coalescing and bank conflicts, on patterns with known cost.
// common/scripts/check_warp_access.sh compares them with a GPU.
#include "emulator/warp_access.h"

#include <algorithm>
#include <array>
#include <set>
#include <string>

#include "emulator/shared_trace.h"
#include "tests/catch.h"
#include "tests/warp_access_patterns.h"

namespace {

using namespace attn;
using namespace attn::tests;

// Layouts can be checked at compile time.
constexpr int64_t unit(int lane) { return 4 * lane; }
static_assert(sectors(unit, 4) == 4);
static_assert(shared_access(unit, 4).conflicts() == 0);
static_assert(shared_access([](int l) { return int64_t{128} * l; }, 4).wavefronts == 32);
static_assert(ldmatrix_access([](int l) { return int64_t{144} * l; }, 4).conflicts() == 0);
static_assert(ldmatrix_access([](int l) { return int64_t{128} * l; }, 4).conflicts() == 28);

TEST_CASE("the patterns of the GPU probe cost what they do by hand", "[warp_access]") {
  std::set<std::string> names;
  for_each_pattern([&](auto pattern, const char* name, int cost) {
    INFO(name);
    CHECK(predicted<decltype(pattern)>() == cost);
    CHECK(names.insert(name).second);
  });
}

// What a page of --timeline shows of an access.
TEST_CASE("the lanes of each wavefront", "[warp_access]") {
  const auto rows_of = [](auto address, int bytes) {
    std::array<int64_t, 32> at{};
    for (int lane = 0; lane < 32; ++lane) at[static_cast<std::size_t>(lane)] = address(lane);
    return emulator::bank_rows(at, bytes);
  };
  const auto check = [&](auto address, int bytes) {
    const SharedAccess all = shared_access(address, bytes);
    const emulator::BankRows banks = rows_of(address, bytes);
    CHECK(banks.wavefronts == all.wavefronts);
    CHECK(banks.rows.size() == static_cast<std::size_t>(all.wavefronts));
    CHECK(std::ranges::count(banks.extra, true) == all.conflicts());
    std::set<int> lanes;
    for (const std::vector<int>& row : banks.rows) lanes.insert(row.begin(), row.end());
    int taking_part = 0;
    for (int lane = 0; lane < 32; ++lane) taking_part += address(lane) >= 0;
    CHECK(lanes.size() == static_cast<std::size_t>(taking_part));
  };
  for (const int bytes : {4, 8, 16})
    for (const int64_t stride : {0, 1, 2, 3, 8, 9, 16, 32, 33}) {
      INFO(bytes << " bytes, stride " << stride);
      check([=](int lane) { return bytes * stride * lane; }, bytes);
      check([=](int lane) { return bytes * (lane * 7 % 32) * stride; }, bytes);
      check([=](int lane) { return lane % 3 == 0 ? -1 : bytes * stride * lane; }, bytes);
    }
  // Lanes of one word share a wavefront; 2-byte accesses are to words.
  CHECK(rows_of([](int lane) { return int64_t{2} * lane; }, 2).rows.size() == 1);
  CHECK(rows_of([](int lane) { return int64_t{64} * lane; }, 2).rows.size() == 16);
  const auto column = rows_of([](int lane) { return int64_t{128} * lane; }, 4);
  CHECK(column.rows[5] == std::vector{5});
  CHECK(!column.extra[0]);
  CHECK(column.extra[5]);
}

TEST_CASE("sectors of global memory", "[warp_access]") {
  const auto strided = [](int64_t stride, int64_t offset) {
    return [=](int lane) { return offset + lane * stride; };
  };
  // Unit stride: 32 lanes x 4, 8, 16 bytes in sectors of 32.
  CHECK(sectors(strided(4, 0), 4) == 4);
  CHECK(sectors(strided(8, 0), 8) == 8);
  CHECK(sectors(strided(16, 0), 16) == 16);
  CHECK(sectors(strided(2, 0), 2) == 2);
  // Not aligned to a sector: one more.
  CHECK(sectors(strided(4, 4), 4) == 5);
  CHECK(sectors(strided(4, 28), 4) == 5);
  CHECK(sectors(strided(4, 32), 4) == 4);
  CHECK(sectors(strided(16, 16), 16) == 17);
  CHECK(sectors(strided(4, (int64_t{1} << 40) + 4), 4) == 5);  // far beyond 32 bits
  // Every n-th float: n times as many until each lane has its own sector.
  for (int n = 1; n <= 64; ++n) {
    INFO("stride " << n);
    CHECK(sectors(strided(4 * n, 0), 4) == (n < 8 ? (31 * 4 * n) / 32 + 1 : 32));
  }
  // The same sector, in any order of lanes.
  CHECK(sectors([](int) { return int64_t{40}; }, 4) == 1);
  CHECK(sectors([](int lane) { return int64_t{4} * (31 - lane); }, 4) == 4);
  CHECK(sectors([](int lane) { return int64_t{4} * (lane * 5 % 32); }, 4) == 4);
  // An access across a sector boundary touches both sectors.
  CHECK(sectors([](int lane) { return lane == 0 ? int64_t{24} : int64_t{-1}; }, 16) == 2);
  CHECK(sectors(strided(64, 24), 16) == 64);
  // Inactive lanes.
  CHECK(sectors([](int) { return int64_t{-1}; }, 4) == 0);
  CHECK(sectors([](int lane) { return lane < 8 ? int64_t{4} * lane : int64_t{-1}; }, 4) == 1);
  CHECK(sectors([](int lane) { return lane % 2 == 0 ? int64_t{4} * lane : int64_t{-1}; }, 4) == 4);
}

TEST_CASE("wavefronts of 4-byte accesses to shared memory", "[warp_access]") {
  const auto wavefronts = [](auto address) { return shared_access(address, 4).wavefronts; };
  // Every n-th float: gcd(n, 32) lanes share a bank.
  for (int n = 1; n <= 64; ++n) {
    int common = 1;
    while (n % (2 * common) == 0 && common < 32) common *= 2;
    INFO("stride " << n);
    const SharedAccess access = shared_access([=](int lane) { return int64_t{4} * n * lane; }, 4);
    CHECK(access.wavefronts == common);
    CHECK(access.ideal == 1);
    CHECK(access.conflicts() == common - 1);
  }
  CHECK(wavefronts([](int) { return int64_t{0}; }) == 1);  // one word for all lanes
  CHECK(wavefronts([](int lane) { return int64_t{4} * (lane / 2); }) == 1);
  CHECK(wavefronts([](int lane) { return int64_t{128} * (lane / 8); }) == 4);  // 4 words per bank
  CHECK(wavefronts([](int lane) { return int64_t{4} * (lane ^ 21); }) == 1);
  CHECK(wavefronts([](int) { return int64_t{-1}; }) == 0);
  CHECK(wavefronts([](int lane) { return lane < 3 ? int64_t{128} * lane : int64_t{-1}; }) == 3);
  CHECK(shared_access([](int) { return int64_t{-1}; }, 4).ideal == 0);
  // The column of a 32 x 32 tile with XOR swizzle instead of padding.
  CHECK(wavefronts([](int row) { return int64_t{4} * (32 * row + (5 ^ row)); }) == 1);
}

TEST_CASE("wavefronts of 8- and 16-byte accesses to shared memory", "[warp_access]") {
  const auto access = [](int64_t stride, int bytes) {
    return shared_access([=](int lane) { return stride * lane; }, bytes);
  };
  CHECK(access(8, 8).wavefronts == 2);  // per half warp
  CHECK(access(8, 8).ideal == 2);
  CHECK(access(16, 8).wavefronts == 4);
  CHECK(access(128, 8).wavefronts == 32);
  CHECK(access(136, 8).wavefronts == 2);  // rows of 32 floats and 2 of padding
  CHECK(access(16, 16).wavefronts == 4);  // per quarter warp
  CHECK(access(16, 16).ideal == 4);
  CHECK(access(32, 16).wavefronts == 8);
  CHECK(access(128, 16).wavefronts == 32);
  CHECK(access(128, 16).conflicts() == 28);
  CHECK(access(144, 16).conflicts() == 0);  // rows of 128 bytes and 16 of padding
  CHECK(access(272, 16).conflicts() == 0);
  CHECK(access(256, 16).conflicts() == 28);
  CHECK(access(160, 16).conflicts() == 4);  // rows 0 and 4 of 8 conflict
  const auto eight_lanes = [](int lane) { return lane < 8 ? int64_t{16} * lane : int64_t{-1}; };
  CHECK(shared_access(eight_lanes, 16).wavefronts == 1);
  CHECK(shared_access(eight_lanes, 16).ideal == 1);
}

TEST_CASE("wavefronts of ldmatrix", "[warp_access]") {
  const auto padded = [](int stride) { return [=](int lane) { return int64_t{stride} * lane; }; };
  const auto swizzled = [](int lane) { return int64_t{128} * lane + 16 * (3 ^ (lane % 8)); };
  for (const int matrices : {1, 2, 4}) {
    INFO(matrices << " matrices");
    CHECK(ldmatrix_access(padded(16), matrices).wavefronts == matrices);
    CHECK(ldmatrix_access(padded(128), matrices).wavefronts == 8 * matrices);
    CHECK(ldmatrix_access(padded(144), matrices).wavefronts == matrices);
    CHECK(ldmatrix_access(swizzled, matrices).wavefronts == matrices);
    CHECK(ldmatrix_access(swizzled, matrices).ideal == matrices);
  }
}

}  // namespace
