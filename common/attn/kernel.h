/// \file
/// Base header of all step files: CUDA C++ if nvcc compiles it, the same names from the emulator if
/// the host compiler does (ATTN_EMULATED). A step is in `namespace ATTN_BACKEND::v1_global`, so
/// both versions fit into one program: gpu::v1_global and emulated::v1_global.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "attn/params.h"
#include "attn/step.h"

#ifdef ATTN_EMULATED
#include "emulator/cuda_names.h"
#define ATTN_BACKEND emulated
// Last parameter of instructions that the emulator may name in a message (a shuffle, ldmatrix,
// flag_store): the source line of the call.
#define ATTN_ONLY_CALLER attn::emulator::Place caller = {__builtin_FILE(), __builtin_LINE()}
#define ATTN_CALLER , ATTN_ONLY_CALLER
// Whether the compiler instruments memory accesses (emulator/accesses.cpp).
#ifdef __SANITIZE_THREAD__
#define ATTN_INSTRUMENTED true
#elif defined(__has_feature)
#define ATTN_INSTRUMENTED __has_feature(thread_sanitizer)
#else
#define ATTN_INSTRUMENTED false
#endif
#else
#ifndef ATTN_RECORD_TIMELINE
#define ATTN_ONLY_CALLER
#define ATTN_CALLER
#endif
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#ifdef ATTN_RECORD_TIMELINE
#define ATTN_BACKEND recorded
#else
#define ATTN_BACKEND gpu
#endif
#endif

// Stamps of wrappers (ptx/), for a timeline of a GPU: they exist in the recorded build of a step
// alone, and are no part of the key of a measurement. No semicolon follows.
#ifdef ATTN_RECORD_TIMELINE
#include "attn/record.h"
#else
#define ATTN_PASS_CALLER
#define ATTN_STAMP_BEGIN
#define ATTN_STAMP_END(kind, what)
#define ATTN_STAMP_PENDING(kind, line, pending)
#define ATTN_STAMP_COPY(barrier, shared)
#define ATTN_STAMP_FENCE
#define ATTN_STAMP_GROUP
#define ATTN_RECORD_BEGIN(storage, shared)
#endif

/// For a step that adds its own pass and launches its parent's attention kernel: declares the
/// parent's host function `attend`, which launches only that kernel. After the parent's name follow
/// the types of further parameters of `attend`.
///
///     ATTN_ATTENTION_OF(f4_block_scales);
///     ...
///     return f4_block_scales::attend(args);
///
/// The build, the diff tests and the keys of measurements find the parent's file by this macro.
#define ATTN_ATTENTION_OF(step, ...)                                      \
  namespace ATTN_BACKEND::step {                                          \
  attn::Status attend(const attn::Arguments& __VA_OPT__(, ) __VA_ARGS__); \
  }                                                                       \
  static_assert(true)

namespace attn {
inline namespace ATTN_BACKEND {

constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;  // log2(e), ln(2)

template <class T>
__host__ __device__ constexpr T ceil_div(T a, std::type_identity_t<T> b) {
  return (a + b - 1) / b;
}
template <class T>
__host__ __device__ constexpr T round_up(T a, std::type_identity_t<T> multiple) {
  return ceil_div(a, multiple) * multiple;
}

/// Conversions from float to an element type, to nearest even, and back.
template <class Element>
__device__ __forceinline__ Element from_float(float x) {
  if constexpr (std::is_same_v<Element, float>) {
    return x;
  } else if constexpr (std::is_same_v<Element, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

/// ATTN_MEMBERS(Storage, sQ, sK, ...), last in the struct, tells the emulator the members of
/// `Storage`, so its messages can say "sK[1][17][40]". On the GPU it expands to nothing.
#ifdef ATTN_EMULATED
#define ATTN_MEMBER(storage, member) \
  ::attn::emulator::member_of<decltype(storage::member)>(#member, offsetof(storage, member)),
#define ATTN_EACH_MEMBER(s, m, ...) ATTN_MEMBER(s, m) __VA_OPT__(ATTN_AGAIN ATTN_PARENS(s, __VA_ARGS__))
#define ATTN_AGAIN() ATTN_EACH_MEMBER
#define ATTN_PARENS ()
#define ATTN_EXPAND(...) ATTN_EXPAND_16(ATTN_EXPAND_16(ATTN_EXPAND_16(ATTN_EXPAND_16(__VA_ARGS__))))
#define ATTN_EXPAND_16(...) ATTN_EXPAND_4(ATTN_EXPAND_4(ATTN_EXPAND_4(ATTN_EXPAND_4(__VA_ARGS__))))
#define ATTN_EXPAND_4(...) ATTN_EXPAND_1(ATTN_EXPAND_1(ATTN_EXPAND_1(ATTN_EXPAND_1(__VA_ARGS__))))
#define ATTN_EXPAND_1(...) __VA_ARGS__
#define ATTN_MEMBERS(storage, ...)                                       \
  static const ::attn::emulator::Members& attn_members() {               \
    static const ::attn::emulator::Members all{ATTN_EXPAND(ATTN_EACH_MEMBER(storage, __VA_ARGS__))}; \
    return all;                                                          \
  }
#else
#ifndef ATTN_RECORD_TIMELINE
#define ATTN_MEMBERS(storage, ...)
#endif
#endif

/// The block's dynamic shared memory as one `Storage`. The emulator fills it with NaN.
template <class Storage>
__device__ __forceinline__ Storage& dynamic_shared() {
#ifdef ATTN_EMULATED
  if constexpr (requires { Storage::attn_members(); })
    attn::emulator::Block::current().name_shared(&Storage::attn_members());
  return *static_cast<Storage*>(attn::emulator::Block::current().shared());
#else
  extern __shared__ __align__(1024) unsigned char attn_dynamic_shared[];
  ATTN_RECORD_BEGIN(Storage, attn_dynamic_shared)
  return *reinterpret_cast<Storage*>(attn_dynamic_shared);
#endif
}

/// Calls `body.operator()<Element>()` with the element type of a problem.
template <class Body>
Status dispatch_dtype(DType dtype, Body body) {
  switch (dtype) {
    case DType::fp32: return body.template operator()<float>();
    case DType::fp16: return body.template operator()<__half>();
    case DType::bf16: return body.template operator()<__nv_bfloat16>();
    case DType::int32:
    case DType::int64:
    case DType::int8:
    case DType::e4m3:
    case DType::e5m2:
    case DType::int4: break;
  }
  return Status::unsupported("the elements must be fp32, fp16 or bf16");
}
/// The same for steps that support only 16-bit types.
template <class Body>
Status dispatch_16bit(DType dtype, Body body) {
  switch (dtype) {
    case DType::fp32: return Status::unsupported("tensor cores take fp16 or bf16");
    case DType::fp16: return body.template operator()<__half>();
    case DType::bf16: return body.template operator()<__nv_bfloat16>();
    case DType::int32:
    case DType::int64:
    case DType::int8:
    case DType::e4m3:
    case DType::e5m2:
    case DType::int4: break;
  }
  return Status::unsupported("the elements must be fp16 or bf16");
}

/// Launches `kernel<<<grid, block, shared_bytes, stream>>>(arguments...)`, or runs it in the
/// emulator. Reports errors: a grid that is too large, too much shared memory, a failed launch.
template <class... Parameters, class... Values>
[[nodiscard]] Status launch_kernel(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                                   std::size_t shared_bytes, [[maybe_unused]] Stream stream,
                                   Values... arguments) {
  constexpr unsigned kMaxGridYZ = 65535;  // CUDA C++ Programming Guide, compute capabilities
  constexpr unsigned kMaxThreads = 1024, kMaxThreadsZ = 64;
  constexpr std::size_t kMaxShared = 227 * 1024;
  for (const unsigned n : {grid.x, grid.y, grid.z, block.x, block.y, block.z})
    if (n == 0) return Status::unsupported("an empty grid or block");
  if (grid.y > kMaxGridYZ || grid.z > kMaxGridYZ)
    return Status::unsupported("a grid of " + std::to_string(grid.x) + " x " +
                               std::to_string(grid.y) + " x " + std::to_string(grid.z) +
                               " blocks: y and z end at 65535");
  if (block.x > kMaxThreads || block.y > kMaxThreads || block.z > kMaxThreadsZ ||
      block.x * block.y * block.z > kMaxThreads)
    return Status::unsupported("a block of " + std::to_string(block.x) + " x " +
                               std::to_string(block.y) + " x " + std::to_string(block.z) +
                               " threads: it ends at 1024, and z ends at 64");
  if (shared_bytes > kMaxShared)
    return Status::unsupported(std::to_string(shared_bytes) +
                               " bytes of shared memory a block: the limit is 232448");
#ifdef ATTN_EMULATED
  try {
    attn::emulator::run_grid(grid, block, shared_bytes,
                             {[&] { kernel(Parameters(arguments)...); },
                              reinterpret_cast<const void*>(kernel), ATTN_INSTRUMENTED});
  } catch (const attn::emulator::KernelError& e) {
    return Status::kernel_error(e.what());
  }
#else
#ifdef ATTN_RECORD_TIMELINE
  if (const Status added = record_launch(kernel, grid, block, shared_bytes, stream); !added.ok())
    return added;
#endif
  if (shared_bytes > 48 * 1024) {  // more than 48 KiB must be requested
    const cudaError_t error = cudaFuncSetAttribute(
        reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
        static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return Status::device_error(cudaGetErrorString(error));
  }
  kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(
      Parameters(arguments)...);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    return Status::device_error(std::string(cudaGetErrorName(error)) + ": " +
                                cudaGetErrorString(error));
#endif
  return Status::success();
}

}  // namespace ATTN_BACKEND
}  // namespace attn
