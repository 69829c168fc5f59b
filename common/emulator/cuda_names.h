/// \file
/// The names of CUDA C++ for the host compiler: what a step file uses besides C++ itself.
///
/// Included by attn/kernel.h when a step is compiled for the emulator; the same names come from the
/// CUDA headers when nvcc compiles it. A missing name is a compile error here, never a wrong
/// result: add it with the meaning that the CUDA C++ Programming Guide gives it.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emulator/float16.h"
#include "emulator/simt.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
// The emulator reads them back from what this puts before the kernel's code (program.h): as many
// instructions that do nothing. Clang does not take a number there that depends on a template's
// parameter.
#if defined(__GNUC__) && !defined(__clang__)
#define __launch_bounds__(threads, ...) __attribute__((patchable_function_entry(threads, threads)))
#else
#define __launch_bounds__(...)
#endif
#define __align__(n) __attribute__((aligned(n)))  // may stand after __shared__, unlike alignas
// One block runs at a time on a thread of the host, so its shared variables are that thread's,
// until another block goes on.
#define __shared__ static thread_local

namespace attn::emulator {

using dim3 = Index3;

// ---- vector types ---------------------------------------------------------------------------
template <class T, std::size_t Align>
struct alignas(Align) Vector2 {
  T x, y;
};
template <class T, std::size_t Align>
struct alignas(Align) Vector4 {
  T x, y, z, w;
};
using float2 = Vector2<float, 8>;
using float4 = Vector4<float, 16>;
using int2 = Vector2<int, 8>;
using int4 = Vector4<int, 16>;
using uint2 = Vector2<unsigned, 8>;
using uint4 = Vector4<unsigned, 16>;
constexpr float2 make_float2(float x, float y) { return {x, y}; }
constexpr float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
constexpr int2 make_int2(int x, int y) { return {x, y}; }
constexpr int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
constexpr uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
constexpr uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- 16-bit floating point --------------------------------------------------------------------
using __half = Float16;
using __nv_bfloat16 = BFloat16;
inline float __half2float(__half x) { return static_cast<float>(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return static_cast<float>(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }

// ---- barriers -------------------------------------------------------------------------------
inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  Block::current().wait_block("__syncthreads", {file, line});
}
inline void __syncwarp(unsigned mask = ~0u, const char* file = __builtin_FILE(),
                       int line = __builtin_LINE()) {
  Block::current().wait_syncwarp({file, line}, mask);
}
[[noreturn]] inline void __trap(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  Block::current().fail("__trap", {file, line}, "which ends the kernel");
}
inline void __threadfence() { Block::current().fence(Races::Scope::gpu); }
inline void __threadfence_block() { Block::current().fence(Races::Scope::block); }

// ---- shuffles and votes ---------------------------------------------------------------------
template <class T>
struct ShuffleOperands {
  T value;
  int source;  // lane to read from
  T result;
  bool from_none = false;  // that lane has brought nothing
};
/// The one shuffle below the four of CUDA: lane l gets the value of lane `source`.
template <class T>
T shuffle(const char* what, Place place, unsigned mask, T value, int source) {
  ShuffleOperands<T> mine{value, source, value};
  Block::current().wait_warp(
      what, place, mask, mine,
      [](auto& lanes) {
        for (auto* lane : lanes)
          if (lane) {
            auto* const from = lanes[static_cast<std::size_t>(lane->source)];
            lane->from_none = !from;
            if (from) lane->result = from->value;
          }
      },
      Block::Exited::do_not_count);
  if (mine.from_none)
    Block::current().fail(what, place,
                          (mask >> source & 1)
                              ? "and reads the value of lane " + std::to_string(source) +
                                    ", which has exited or does not exist"
                              : "with a mask that does not name lane " + std::to_string(source) +
                                    ", whose value it reads");
  return mine.result;
}
inline int lane_id() { return static_cast<int>(Block::current().lane()); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  const int lane = lane_id();
  return shuffle("__shfl_sync", {file, line}, mask, value,
                 (lane & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  const int lane = lane_id(), source = lane ^ lane_mask;
  // A lane of a later sub-warp is out of reach; one of an earlier sub-warp is not.
  const bool reachable = (source & ~(width - 1)) <= (lane & ~(width - 1));
  return shuffle("__shfl_xor_sync", {file, line}, mask, value, reachable ? source : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  const int lane = lane_id(), source = lane - static_cast<int>(delta);
  return shuffle("__shfl_up_sync", {file, line}, mask, value,
                 source < (lane & ~(width - 1)) ? lane : source);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  const int lane = lane_id(), source = lane + static_cast<int>(delta);
  return shuffle("__shfl_down_sync", {file, line}, mask, value,
                 source > (lane | (width - 1)) ? lane : source);
}
struct VoteOperands {
  bool predicate;
  unsigned ballot;
};
inline unsigned vote(const char* what, Place place, unsigned mask, bool predicate) {
  VoteOperands mine{predicate, 0};
  Block::current().wait_warp(
      what, place, mask, mine,
      [](auto& lanes) {
        unsigned ballot = 0;
        for (std::size_t l = 0; l < kWarpSize; ++l)
          if (lanes[l] && lanes[l]->predicate) ballot |= 1u << l;
        for (auto* lane : lanes)
          if (lane) lane->ballot = ballot;
      },
      Block::Exited::do_not_count);
  return mine.ballot;
}
inline unsigned __ballot_sync(unsigned mask, int predicate, const char* file = __builtin_FILE(),
                              int line = __builtin_LINE()) {
  return vote("__ballot_sync", {file, line}, mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate, const char* file = __builtin_FILE(),
                      int line = __builtin_LINE()) {
  return vote("__any_sync", {file, line}, mask, predicate != 0) != 0;
}
inline int __all_sync(unsigned mask, int predicate, const char* file = __builtin_FILE(),
                      int line = __builtin_LINE()) {
  return vote("__all_sync", {file, line}, mask, predicate == 0) == 0;
}

// ---- atomics: no other thread runs in the middle of one
// -------------------------------------------- The compiler is not to report what they do to
// memory: they say it.
#define ATTN_UNRECORDED __attribute__((no_sanitize("thread")))
template <class T>
ATTN_UNRECORDED T atomicAdd(T* address, std::type_identity_t<T> value,
                            const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  Block::current().atomic("atomicAdd", {file, line}, address, sizeof(T));
  const auto old = *address;
  *address = old + value;
  return old;
}
ATTN_UNRECORDED inline unsigned atomicInc(unsigned* address, unsigned last,
                                          const char* file = __builtin_FILE(),
                                          int line = __builtin_LINE()) {
  Block::current().atomic("atomicInc", {file, line}, address, sizeof(unsigned));
  const auto old = *address;
  *address = old >= last ? 0 : old + 1;
  return old;
}
template <class T>
ATTN_UNRECORDED T atomicMax(T* address, std::type_identity_t<T> value,
                            const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  Block::current().atomic("atomicMax", {file, line}, address, sizeof(T));
  const auto old = *address;
  *address = old < value ? value : old;
  return old;
}
template <class T>
ATTN_UNRECORDED T atomicMin(T* address, std::type_identity_t<T> value,
                            const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  Block::current().atomic("atomicMin", {file, line}, address, sizeof(T));
  const auto old = *address;
  *address = value < old ? value : old;
  return old;
}
template <class T>
ATTN_UNRECORDED T atomicExch(T* address, std::type_identity_t<T> value,
                             const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  Block::current().atomic("atomicExch", {file, line}, address, sizeof(T));
  const auto old = *address;
  *address = value;
  return old;
}
template <class T>
ATTN_UNRECORDED T atomicCAS(T* address, std::type_identity_t<T> compare,
                            std::type_identity_t<T> value, const char* file = __builtin_FILE(),
                            int line = __builtin_LINE()) {
  Block::current().atomic("atomicCAS", {file, line}, address, sizeof(T));
  const auto old = *address;
  *address = old == compare ? value : old;
  return old;
}

// ---- arithmetic -----------------------------------------------------------------------------
template <class T>
constexpr T min(T a, std::type_identity_t<T> b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, std::type_identity_t<T> b) {
  return a < b ? b : a;
}
// The GPU's fast versions are approximations to about 2 units in the last place.
// (The host's own library has names like __expf too, so these two have to be macros.)
inline float fast_exp(float x) { return std::exp(x); }
inline float fast_log(float x) { return std::log(x); }
#define __expf(x) attn::emulator::fast_exp(x)
#define __logf(x) attn::emulator::fast_log(x)
#define __log2f(x) (attn::emulator::fast_log(x) * 1.44269504f)
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(unsigned x) { return x == 0 ? 0 : std::countr_zero(x) + 1; }
template <class T>
T __ldg(const T* address) {
  return *address;
}

}  // namespace attn::emulator

using namespace attn::emulator;  // a kernel writes threadIdx, not attn::emulator::threadIdx
