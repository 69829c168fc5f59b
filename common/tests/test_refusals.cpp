/// \file
/// What a GPU breaks on, and the emulator therefore refuses with one line: what, where, why.
#define ATTN_EMULATED
#include <string>

#include "attn/kernel.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/tma.h"
#include "ptx/wgmma.h"
#include "tests/catch.h"

namespace {

using namespace attn;

struct alignas(1024) Storage {
  unsigned char bytes[16384];
  uint64_t barrier;
};

__global__ void copy_to(int to, int from, const unsigned char* global) {
  cp_async_16(dynamic_shared<Storage>().bytes + to, global + from);
  cp_async_commit();
  cp_async_wait<0>();
}
__global__ void load_matrix(int offset, int lane, uint32_t* out) {
  uint32_t r[4];
  const int own = static_cast<int>(threadIdx.x);
  ldmatrix_x4(r, dynamic_shared<Storage>().bytes + 16 * own + (own == lane ? offset : 0));
  out[0] = r[0];
}
__global__ void load_two(int lane, uint32_t* out) {
  uint32_t r[2];
  const int own = static_cast<int>(threadIdx.x);
  ldmatrix_x2(r, dynamic_shared<Storage>().bytes + 16 * own + (own == lane ? 2 : 0));
  out[0] = r[0];
}
__global__ void bring_box(int offset, const TensorMap map) {
  auto& smem = dynamic_shared<Storage>();
  mbarrier_init(&smem.barrier, 1);
  mbarrier_init_fence();
  mbarrier_arrive_expect(&smem.barrier, 64 * 64 * 2);
  tma_load(smem.bytes + offset, map, &smem.barrier, {0, 0});
  mbarrier_wait(&smem.barrier, 0);
}
__global__ void multiply(unsigned warps, float* out) {
  float d[8][4] = {};
  const WgmmaOperand tile = wgmma_operand(reinterpret_cast<const __half*>(dynamic_shared<Storage>().bytes));
  if (threadIdx.x / 32 < warps) {
    wgmma_fence();
    wgmma<__half, false>(d, tile, tile, false);
    wgmma_commit();
    wgmma_wait<0>();
  }
  out[0] = d[0][0];
}

template <class... Parameters, class... Values>
std::string message(void (*kernel)(Parameters...), unsigned threads, Values... values) {
  const Status status = launch_kernel(kernel, dim3(1), dim3(threads), sizeof(Storage), nullptr, values...);
  CHECK((status.ok() || status.code == Status::Code::kKernelError));
  CHECK(status.message.find('\n') == std::string::npos);
  return status.message;
}
bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

}  // namespace

TEST_CASE("cp.async of addresses that are no whole 16 bytes is refused", "[emulator][refusals]") {
  alignas(16) static const unsigned char global[64] = {};
  CHECK(message(copy_to, 1, 32, 16, global) == "");
  const std::string to = message(copy_to, 1, 34, 0, global), from = message(copy_to, 1, 0, 8, global);
  CHECK(has(to, "cp_async_16"));
  CHECK(has(to, "test_refusals.cpp:"));
  CHECK(has(to, "a destination 2 bytes past a multiple of 16"));
  CHECK(has(from, "a source 8 bytes past a multiple of 16"));
}

TEST_CASE("ldmatrix of a row that is not aligned is refused, of a lane that does not count it is not", "[emulator][refusals]") {
  uint32_t out = 0;
  CHECK(message(load_matrix, 32, 0, 5, &out) == "");
  CHECK(has(message(load_matrix, 32, 2, 5, &out), "a row 2 bytes past a multiple of 16"));
  CHECK(has(message(load_matrix, 32, 2, 5, &out), "thread (5,0,0)"));
  CHECK(has(message(load_two, 32, 15, &out), "a row 2 bytes past a multiple of 16"));
  CHECK(message(load_two, 32, 16, &out) == "");
}

TEST_CASE("TMA to an address that is no whole 128 bytes is refused", "[emulator][refusals]") {
  alignas(16) static const __half tensor[64 * 64] = {};
  TensorMap map;
  REQUIRE(make_tensor_map<2>(map, tensor, {64, 64}, {128}, {64, 64}, Swizzle::kNone).ok());
  CHECK(message(bring_box, 1, 128, map) == "");
  CHECK(has(message(bring_box, 1, 16, map), "tma_load"));
  CHECK(has(message(bring_box, 1, 16, map), "a destination 16 bytes past a multiple of 128"));
}

TEST_CASE("wgmma by part of a warpgroup is refused", "[emulator][refusals]") {
  float out = 0;
  CHECK(message(multiply, 128, 4u, &out) == "");
  for (const unsigned warps : {1u, 2u, 3u})
    CHECK(has(message(multiply, 128, warps, &out), "all four warps of a warpgroup multiply together"));
  CHECK(has(message(multiply, 32, 4u, &out), "all four warps"));  // a block that has one warp
}
