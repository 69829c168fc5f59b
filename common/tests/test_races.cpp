/// \file
/// Races: reported with both lines and the variable; correct synchronisation is not reported.
#include <cstring>
#include <regex>
#include <string>
#include <vector>

#include "attn/kernel.h"
#include "emulator/simt.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mbarrier.h"
#include "ptx/named_barrier.h"
#include "tests/catch.h"

namespace {

using namespace attn;

bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }
std::string place(int line) { return "tests/test_races.cpp:" + std::to_string(line); }

template <class... Parameters, class... Values>
std::string message(std::uint64_t seed, std::size_t shared, dim3 grid, dim3 block,
                    void (*kernel)(Parameters...), Values... values) {
  emulator::schedule_seed = seed;
  emulator::find_races = true;
  const Status status = launch_kernel(kernel, grid, block, shared, nullptr, values...);
  CHECK((status.ok() || status.code == Status::Code::kKernelError));
  CHECK_FALSE(has(status.message, "\n"));
  return status.message;
}

// A parsed message about a byte of shared memory: writer, reader, order.
struct Race {
  std::string element, why;
  struct Access {
    int thread = -1;
    std::string at, what;
  } written, read;
  bool found = false, written_first = false;
};
Race race(const std::string& line) {
  static const std::string access =
      R"((written|read) by (?:(\w+) of )?thread \((\d+),0,0\) at (\S+))";
  static const std::regex whole(
      R"(race: byte \d+ of shared memory of block \(0,0,0\) \((\S+)\) was )" + access +
      " and then " + access + " (.*)");
  std::smatch m;
  Race r;
  if (!std::regex_match(line, m, whole) || m[2] == m[6]) return r;
  r.found = true, r.element = m[1], r.why = m[10], r.written_first = m[2] == "written";
  const int w = r.written_first ? 2 : 6, other = 8 - w;
  r.written = {std::stoi(m[w + 2]), m[w + 3], m[w + 1]};
  r.read = {std::stoi(m[other + 2]), m[other + 3], m[other + 1]};
  return r;
}
std::string row(int i) { return "row[" + std::to_string(i) + "]"; }

struct Storage {
  float row[64];
  float partial[2][4];
  struct Pair {
    float key, value[3];
  } pairs[2];
  ATTN_MEMBERS(Storage, row, partial, pairs)
};

constexpr int kWrites = __LINE__ + 4, kReads = __LINE__ + 6, kWritesAgain = __LINE__ + 8;
template <bool kFirst, bool kSecond>
__global__ void sum(const float* in, float* out) {
  auto& smem = dynamic_shared<Storage>();
  smem.row[threadIdx.x] = in[threadIdx.x];
  if (kFirst) __syncthreads();
  const float other = smem.row[threadIdx.x ^ 32];
  if (kSecond) __syncthreads();
  smem.row[threadIdx.x] = other;
  out[threadIdx.x] = other;
}

// Reads an unwritten element of a member or of a variable.
constexpr int kUnwrittenLine = __LINE__ + 6;
__global__ void read_unwritten(bool member, float* out) {
  __shared__ float variable[8];
  auto& smem = dynamic_shared<Storage>();
  if (threadIdx.x < 7) variable[threadIdx.x] = smem.row[threadIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x == 3) out[0] = member ? smem.partial[1][2] : variable[7];
}

// Copies read by another thread (`other`) after a wait, a barrier, both or neither.
constexpr int kCopies = __LINE__ + 4, kReadsCopy = __LINE__ + 8;
__global__ void copy_and_read(bool wait, bool barrier, unsigned other, const float* in,
                              float* out) {
  auto& smem = dynamic_shared<Storage>();
  if (threadIdx.x < 16) cp_async_16(smem.row + 4 * threadIdx.x, in + 4 * threadIdx.x);
  cp_async_commit();
  if (wait) cp_async_wait<0>();
  if (barrier) __syncthreads();
  out[threadIdx.x] = threadIdx.x < 16 ? smem.row[4 * (threadIdx.x ^ other)] : 0;
}

// Two of four warps meet at a named barrier before all four read.
constexpr int kWritesOne = __LINE__ + 4, kReadsOther = __LINE__ + 6;
__global__ void too_few_meet(int warps, float* out) {
  auto& smem = dynamic_shared<Storage>();
  const int warp = static_cast<int>(threadIdx.x / 32);
  if (threadIdx.x % 32 == 0) smem.row[warp] = 1;
  if (warp < warps) named_barrier_sync(1, 32 * warps);
  out[threadIdx.x] = smem.row[warp ^ 1];
}

// A one-stage pipeline: thread 0 of warp 0 fills it, warp 1 reads it; `released` before it is
// refilled.
__global__ void fill_and_read(bool released, float* out) {
  struct Ring {
    float value;
    uint64_t full, empty;
    ATTN_MEMBERS(Ring, value, full, empty)
  };
  auto& smem = dynamic_shared<Ring>();
  if (threadIdx.x == 0) {
    mbarrier_init(&smem.full, 1);
    mbarrier_init(&smem.empty, 32);
    mbarrier_init_fence();
  }
  __syncthreads();
  for (int i = 0; i < 4; ++i) {
    if (threadIdx.x == 0) {
      if (released) mbarrier_wait(&smem.empty, i % 2 ^ 1);
      smem.value = static_cast<float>(i);
      mbarrier_arrive(&smem.full);
    }
    if (threadIdx.x >= 32) {
      mbarrier_wait(&smem.full, i % 2);
      out[threadIdx.x] = smem.value;
      mbarrier_arrive(&smem.empty);
    }
    if (!released) __syncwarp();
  }
}

// A lane passes a number to its neighbour; the shuffle in between is not a barrier.
__global__ void pass_lane(bool syncwarp, float* out) {
  auto& smem = dynamic_shared<Storage>();
  smem.row[threadIdx.x] = 1;
  if (syncwarp)
    __syncwarp();
  else
    __shfl_xor_sync(~0u, 1, 1);
  out[threadIdx.x] = smem.row[threadIdx.x ^ 1];
}

// Neighbours write two bytes of one word.
__global__ void write_halves(unsigned short* out) {
  auto* const halves = &dynamic_shared<unsigned short>();
  halves[threadIdx.x] = 1;
  out[threadIdx.x] = halves[threadIdx.x];
}

constexpr int kAddsPlainly = __LINE__ + 7;
__global__ void count_in_block(bool atomic, int* out) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  if (atomic)
    atomicAdd(&count, 1);
  else
    count += 1;
  __syncthreads();
  if (threadIdx.x == 0) *out = count;
}

// The two lines contain the two kinds of barrier access.
constexpr int kInits = __LINE__ + 3, kArrives = __LINE__ + 5;
__global__ void arrive_early(bool barrier) {
  __shared__ uint64_t all;
  if (threadIdx.x == 0) mbarrier_init(&all, 64);
  if (barrier) __syncthreads();
  mbarrier_arrive(&all);
}
__global__ void count_on_nothing(int* out) {
  __shared__ int count;
  atomicAdd(&count, 1);
  __syncthreads();
  if (threadIdx.x == 0) *out = count;
}
__global__ void meet_at(int id) { named_barrier_sync(id, 64); }
// Thread 0 stores, proceeds to another epoch, and adds; so does thread 32, with or without
// synchronisation.
__global__ void add_to_what_is_stored(bool all_meet) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  if (threadIdx.x < 32) __syncwarp();
  if (all_meet) __syncthreads();
  if (threadIdx.x % 32 == 0) atomicAdd(&count, 1);
}
// All threads read an element that thread 0 then writes: after a barrier of all, or only of its
// warp.
constexpr int kAllRead = __LINE__ + 5, kOneWrites = __LINE__ + 10;
__global__ void write_what_all_read(bool all_meet, float* out) {
  auto& smem = dynamic_shared<Storage>();
  if (threadIdx.x == 0) smem.row[0] = 1;
  __syncthreads();
  out[threadIdx.x] = smem.row[0];
  if (all_meet)
    __syncthreads();
  else
    __syncwarp();
  if (threadIdx.x == 0) smem.row[0] = 2;
}
__global__ void meet_in_two_places(float* out) {
  auto& smem = dynamic_shared<Storage>();
  smem.row[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (threadIdx.x % 4 == 0)
    __syncwarp();
  else
    __syncwarp();
  out[threadIdx.x] = smem.row[threadIdx.x ^ 1];
}
// test_blocks.cpp has a kernel of the same name.
__global__ void own_variable(void** at) {
  __shared__ int variable[24];
  variable[threadIdx.x] = 1;
  *at = variable;
}

}  // namespace

TEST_CASE("a barrier in shared memory is memory: who uses it has to know of its mbarrier_init",
          "[emulator][races]") {
  int races = 0;
  for (std::uint64_t seed = 1; seed <= 400; ++seed) {  // thread 0 is first in one of 64
    CHECK(message(seed, 0, dim3(1), dim3(64), arrive_early, true) == "");
    const std::string said = message(seed, 0, dim3(1), dim3(64), arrive_early, false);
    INFO(said);
    if (has(said, "on a barrier that no thread has initialised")) continue;
    ++races;
    CHECK(has(said, " of all of block (0,0,0) was written by mbarrier_init of thread (0,0,0) at " +
                        place(kInits)));
    CHECK(has(said, place(kArrives) + " with no barrier between"));
  }
  CHECK(races > 0);
}

TEST_CASE("an atomic reads what is there: what nobody has written is named", "[emulator][races]") {
  int out = 0;
  const std::string said = message(1, 0, dim3(1), dim3(64), count_on_nothing, &out);
  INFO(said);
  CHECK(has(said, "byte 0 of count of block (0,0,0) was changed by atomicAdd of thread ("));
  CHECK(has(said, ", where no thread had written"));
}

TEST_CASE("named barrier 0 is __syncthreads's", "[emulator][races]") {
  CHECK(message(1, 0, dim3(1), dim3(64), meet_at, 1) == "");
  CHECK(has(message(1, 0, dim3(1), dim3(64), meet_at, 0),
            "with barrier 0, which is __syncthreads's: 1 to 15 are free"));
}

TEST_CASE("a race names what lies there, both threads and both lines", "[emulator][races]") {
  std::vector<float> in(64, 1.0f), out(64);
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const auto run = [&](auto kernel) {
      return message(seed, sizeof(Storage), dim3(1), dim3(64), kernel, in.data(), out.data());
    };
    CHECK(run(sum<true, true>) == "");
    const std::string first = run(sum<false, true>), second = run(sum<true, false>);
    INFO(first << "\n" << second);
    for (const bool again : {false, true}) {
      const Race r = race(again ? second : first);
      CHECK(r.found);
      CHECK(r.element == row(r.written.thread));
      CHECK(r.read.thread == (r.written.thread ^ 32));
      CHECK(r.written.at == place(again ? kWritesAgain : kWrites));
      CHECK(r.read.at == place(kReads));
      CHECK(r.why == "with no barrier between");
    }
  }
}

TEST_CASE("what nobody has written is named", "[emulator][races]") {
  float out = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const std::string member =
        message(seed, sizeof(Storage), dim3(1), dim3(32), read_unwritten, true, &out);
    const std::string variable =
        message(seed, sizeof(Storage), dim3(1), dim3(32), read_unwritten, false, &out);
    CHECK(member ==
          "byte 280 of shared memory of block (0,0,0) (partial[1][2]) was read by thread (3,0,0) "
          "at " +
              place(kUnwrittenLine) + ", where no thread had written");
    CHECK(has(variable, "byte 28 of variable of block (0,0,0) was read by thread (3,0,0) at "));
  }
}

TEST_CASE("what nobody has written is named where blocks are watched together, too",
          "[emulator][races]") {
  float out = 0;
  emulator::find_global_races = true;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    CHECK(message(seed, sizeof(Storage), dim3(1), dim3(32), read_unwritten, true, &out) ==
          "byte 280 of shared memory of block (0,0,0) (partial[1][2]) was read by thread (3,0,0) "
          "of block (0,0,0) at " +
              place(kUnwrittenLine) + ", where no thread had written");
    const std::string variable =
        message(seed, sizeof(Storage), dim3(3), dim3(32), read_unwritten, false, &out);
    CHECK(has(variable, "byte 28 of variable of block ("));
  }
  emulator::find_global_races = false;
}

TEST_CASE("a copy is there for its thread after a wait, for others after a barrier besides",
          "[emulator][races]") {
  alignas(16) float in[64] = {}, out[32];
  for (std::uint64_t seed = 1; seed <= 20; ++seed)
    for (const bool early : {false, true}) {
      emulator::early_copies = early;
      const auto run = [&](bool wait, bool barrier, unsigned other) {
        return message(seed, sizeof(Storage), dim3(1), dim3(32), copy_and_read, wait, barrier,
                       other, in, out);
      };
      CHECK(run(true, true, 1) == "");
      CHECK(run(true, false, 0) == "");
      const std::string no_barrier = run(true, false, 1), no_wait = run(false, true, 1);
      INFO(no_barrier << "\n" << no_wait);
      for (const std::string& said : {no_barrier, no_wait}) {
        const Race r = race(said);
        CHECK(r.found);
        CHECK(r.element == row(4 * r.written.thread));
        CHECK(r.read.thread == (r.written.thread ^ 1));
        CHECK(r.written.what == "cp_async_16");
        CHECK(r.written.at == place(kCopies));
        CHECK(r.read.at == place(kReadsCopy));
      }
      CHECK(race(no_wait).written_first);
      CHECK(race(no_wait).why == "before a wait for it");
      CHECK((race(no_barrier).why == "with no barrier between" ||
             race(no_barrier).why == "before a wait for it"));
      emulator::early_copies = false;
    }
}

TEST_CASE("barriers of some threads put in order what those threads do", "[emulator][races]") {
  float out[128];
  int races = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    CHECK(message(seed, sizeof(Storage), dim3(1), dim3(128), too_few_meet, 4, out) == "");
    const std::string few =
        message(seed, sizeof(Storage), dim3(1), dim3(128), too_few_meet, 2, out);
    INFO(few);
    const Race r = race(few);
    CHECK(r.found);
    CHECK((r.written.thread == 64 || r.written.thread == 96));
    CHECK(r.element == row(r.written.thread / 32));
    CHECK(r.read.thread / 32 == (r.written.thread / 32 ^ 1));
    CHECK(r.written.at == place(kWritesOne));
    CHECK(r.read.at == place(kReadsOther));
    CHECK(r.why == "with no barrier between");
    CHECK(message(seed, 64, dim3(1), dim3(64), fill_and_read, true, out) == "");
    const std::string twice = message(seed, 64, dim3(1), dim3(64), fill_and_read, false, out);
    races += has(twice, "(value) was ");
    // Or a phase that no thread has observed.
    if (!has(twice, "(value) was ")) CHECK(has(twice, "waits in mbarrier_wait"));
    CHECK(message(seed, sizeof(Storage), dim3(1), dim3(32), pass_lane, true, out) == "");
    CHECK(has(message(seed, sizeof(Storage), dim3(1), dim3(32), pass_lane, false, out),
              "with no barrier between"));
  }
  CHECK(races > 5);
}

TEST_CASE("a byte of a member is named by its indices, in a struct by its offset",
          "[emulator][races]") {
  const emulator::Members& members = Storage::attn_members();
  REQUIRE(members.size() == 3);
  CHECK(members[0].element(4 * 5 + 2) == "row[5]");
  CHECK(members[1].element(4 * 6) == "partial[1][2]");
  CHECK(members[2].element(16 + 8) == "pairs[1] + 8");
}

TEST_CASE("parts of one word are no race", "[emulator][races]") {
  unsigned short out[64];
  for (std::uint64_t seed = 1; seed <= 20; ++seed)
    CHECK(message(seed, 128, dim3(1), dim3(64), write_halves, out) == "");
}

TEST_CASE("atomic additions in shared memory are no race, plain ones are", "[emulator][races]") {
  int out = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    CHECK(message(seed, 0, dim3(1), dim3(64), count_in_block, true, &out) == "");
    CHECK(out == 64);
    const std::string plain = message(seed, 0, dim3(1), dim3(64), count_in_block, false, &out);
    CHECK(has(plain, "race: byte 0 of count of block (0,0,0) was "));
    CHECK(has(plain, place(kAddsPlainly + 1)));
  }
}

TEST_CASE("an atomic does not hide the plain store before it", "[emulator][races]") {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    CHECK(message(seed, 0, dim3(1), dim3(64), add_to_what_is_stored, true) == "");
    CHECK(has(message(seed, 0, dim3(1), dim3(64), add_to_what_is_stored, false),
              "race: byte 0 of count of block (0,0,0) was "));
  }
}

TEST_CASE("all readers are remembered, however many", "[emulator][races]") {
  float out[256];
  for (std::uint64_t seed = 1; seed <= 40; ++seed)
    for (const unsigned threads : {64, 256}) {
      CHECK(message(seed, sizeof(Storage), dim3(1), dim3(threads), write_what_all_read, true,
                    out) == "");
      const std::string said =
          message(seed, sizeof(Storage), dim3(1), dim3(threads), write_what_all_read, false, out);
      INFO(said);
      const Race r = race(said);
      CHECK(r.found);
      CHECK(r.element == "row[0]");
      CHECK((r.written.thread == 0 && r.read.thread >= 32));
      CHECK(r.written.at == place(kOneWrites));
      CHECK(r.read.at == place(kAllRead));
    }
}

TEST_CASE("lanes of a warp meet in __syncwarp wherever it stands", "[emulator][races]") {
  float out[32];
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    CHECK(message(seed, sizeof(Storage), dim3(1), dim3(32), meet_in_two_places, out) == "");
    for (int i = 0; i < 32; ++i) CHECK(out[i] == static_cast<float>(i ^ 1));
  }
}

TEST_CASE("kernels of one name in two files have their own __shared__ variables",
          "[emulator][races]") {
  void* at = nullptr;
  CHECK(message(1, 0, dim3(1), dim3(24), own_variable, &at) == "");
  const auto found = emulator::static_shared(reinterpret_cast<const void*>(own_variable));
  REQUIRE(found.size() == 1);
  CHECK((found[0].data == at && found[0].bytes == 24 * sizeof(int)));
}
