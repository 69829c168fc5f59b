/// \file
/// Recorded build of a step for a GPU (ATTN_RECORD_TIMELINE): what the wrappers of asynchronous
/// instructions, __syncthreads and marks write into the rings of device/recording.h. Steps are
/// compiled again for it, in the namespace `recorded`; in all other builds nothing here exists.
///
/// The first lane of a warp writes a record per event, without a branch. Its place in the ring is
/// kept in registers that one asm statement declares for the whole kernel (record_begin) and others
/// name: a variable would have to be passed through every function. So every kernel that uses a
/// wrapper must call dynamic_shared() first, and ptxas refuses one that does not.
#pragma once

#include <type_traits>

#include "device/recording.h"

#ifndef ATTN_RECORD_MARKS  // {"softmax", ...} and , 263 ...: recorded.awk defines them
#define ATTN_RECORD_MARKS {}
#define ATTN_RECORD_ENDED
#endif

namespace attn {
inline namespace ATTN_BACKEND {

static __constant__ RecordTarget record_targets[kRecordTargets];

__device__ __forceinline__ uint32_t record_clock() {
  uint32_t clock;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
  return clock;
}

// A ring is aligned to its size, a power of two: the high half of the address is constant, and the
// low bits of the next record are 0 where there is no room for it. `mask`: an operand.
#define ATTN_RECORD_STORE(record, mask)                \
  "{\n"                                                \
  ".reg .pred room;\n"                                 \
  ".reg .b32 low, inside;\n"                           \
  ".reg .b64 next;\n"                                  \
  "mov.b64 next, {attn_next, attn_high};\n"            \
  "@attn_first st.global.v4.b32 [next], " record ";\n" \
  "add.u32 low, attn_next, 16;\n"                      \
  "and.b32 inside, low, " mask ";\n"                   \
  "setp.ne.u32 room, inside, 0;\n"                     \
  "@room mov.b32 attn_next, low;\n"                    \
  "}"
__device__ __forceinline__ void record(uint32_t tag, uint32_t what, uint32_t begin, uint32_t end) {
  asm volatile(ATTN_RECORD_STORE("{%0, %1, %2, %3}", "%4")::"r"(tag), "r"(what), "r"(begin),
               "r"(end), "r"(record_targets[0].mask));
}
// The record of a group of wgmma: from the fence, which keeps its clock, to the commit. Nothing is
// stored between them.
__device__ __forceinline__ void record_fence() {
  asm volatile("mov.b32 attn_issued, %0;" ::"r"(record_clock()));
}
__device__ __forceinline__ void record_group(uint32_t tag) {
  asm volatile(ATTN_RECORD_STORE("{%0, 0, attn_issued, %1}", "%2")::"r"(tag), "r"(record_clock()),
               "r"(record_targets[0].mask));
}
#undef ATTN_RECORD_STORE

// What a wrapper names: a barrier by its address or number.
__device__ __forceinline__ uint32_t recorded_as(int number) {
  return static_cast<uint32_t>(number);
}
__device__ __forceinline__ uint32_t recorded_as(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// The first two records of a warp: its clocks, its SM, and where its shared memory lies.
template <class Storage>
__device__ __forceinline__ void record_begin(const void* shared) {
  uint32_t bytes, sm;
  uint64_t clock, ns;
  asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  RecordTarget target = record_targets[0];
#pragma unroll
  for (std::size_t n = 1; n < kRecordTargets; ++n)
    if (record_targets[n].shared_bytes == bytes) target = record_targets[n];
  const uint64_t block = blockIdx.x + gridDim.x * (blockIdx.y + uint64_t{gridDim.y} * blockIdx.z);
  const uint64_t ring =
      target.rings + (block * target.warps + threadIdx.x / 32) * (target.mask + uint64_t{1});
  asm volatile(
      ".reg .pred attn_first;\n"
      ".reg .b32 attn_next, attn_high, attn_issued;\n"
      "setp.eq.u32 attn_first, %0, 0;\n"
      "mov.b32 attn_next, %1;\n"
      "mov.b32 attn_high, %2;" ::"r"(threadIdx.x % 32),
      "r"(static_cast<uint32_t>(ring + 2 * sizeof(Record))),
      "r"(static_cast<uint32_t>(ring >> 32)));
  if (threadIdx.x % 32 != 0) return;
  if constexpr (requires { Storage::attn_record_members(nullptr); })
    if (block == 0 && threadIdx.x == 0 && target.members)
      Storage::attn_record_members(reinterpret_cast<RecordedMember*>(target.members));
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(clock));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  Record* const records = reinterpret_cast<Record*>(ring);
  records[0] = {record_tag(RecordKind::begin), recorded_as(shared), static_cast<uint32_t>(clock),
                static_cast<uint32_t>(clock >> 32)};
  records[1] = {record_tag(RecordKind::timer), sm, static_cast<uint32_t>(ns),
                static_cast<uint32_t>(ns >> 32)};
}

template <class T>
__device__ __forceinline__ void record_member(RecordedMember*& to, const char* name,
                                              std::size_t offset) {
  *to++ = {reinterpret_cast<uint64_t>(name),
           static_cast<uint32_t>(offset),
           static_cast<uint32_t>(sizeof(T)),
           static_cast<uint32_t>(sizeof(std::remove_all_extents_t<T>)),
           {static_cast<uint32_t>(std::extent_v<T, 0>),
            static_cast<uint32_t>(std::extent_v<T, 1>)}};
}

// By the hash of its name, an immediate: an address would occupy two registers in the loop.
__device__ __forceinline__ void record_mark(RecordKind kind, std::uint32_t name) {
  record(record_tag(kind), name, 0, record_clock());
}
// Lines of the step at which a mark begins that an ATTN_SPAN_END ends.
constexpr int kRecordEnded[] = {0 ATTN_RECORD_ENDED};
constexpr bool record_ended(int line) {
  for (const int ended : kRecordEnded)
    if (ended == line) return true;
  return false;
}
/// ATTN_SPAN: the mark ends at the end of the scope, unless ATTN_SPAN_END ends it.
template <uint32_t kName, bool kEnded>
struct RecordedSpan {
  __device__ __forceinline__ RecordedSpan() { record_mark(RecordKind::mark, kName); }
  __device__ __forceinline__ ~RecordedSpan() {
    if constexpr (!kEnded) record_mark(RecordKind::mark_end, kName);
  }
  RecordedSpan(const RecordedSpan&) = delete;
};

__device__ __forceinline__ void recorded_syncthreads(int line = __builtin_LINE()) {
  const uint32_t begin = record_clock();
  __syncthreads();
  record(record_tag(RecordKind::block_wait, line), 0, begin, record_clock());
}

/// Before the launch of a recorded kernel: its target, in constant memory of this file.
template <class Kernel>
[[nodiscard]] Status record_launch(Kernel* kernel, dim3 grid, dim3 block,
                                   std::size_t& shared_bytes, Stream stream) {
  Recording* const recording = Recording::current();
  if (!recording) return Status::device_error("a recorded kernel without a recording");
  if (block.y != 1 || block.z != 1)
    return Status::unsupported("only blocks of one dimension can be recorded");
  RecordTarget target;
  std::size_t index = 0;
  bool fresh = false;
  const Status added =
      recording->add(reinterpret_cast<const void*>(kernel), {grid.x, grid.y, grid.z}, block.x,
                     ATTN_RECORD_MARKS, shared_bytes, index, target, fresh);
  if (!added.ok() || !fresh) return added;
  const cudaError_t error =
      cudaMemcpyToSymbolAsync(record_targets, &target, sizeof target, index * sizeof target,
                              cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? Status::success()
                              : Status::device_error(cudaGetErrorString(error));
}

}  // namespace ATTN_BACKEND
}  // namespace attn

#define ATTN_ONLY_CALLER int caller = __builtin_LINE()
#define ATTN_CALLER , ATTN_ONLY_CALLER
#define ATTN_PASS_CALLER , caller

// In wrappers. ATTN_STAMP_BEGIN before an instruction, ATTN_STAMP_WAIT(kind, what) after it.
#define ATTN_STAMP_BEGIN const uint32_t attn_begin = record_clock();
#define ATTN_STAMP_END(kind, what) \
  record(record_tag(RecordKind::kind, caller), recorded_as(what), attn_begin, record_clock());
#define ATTN_STAMP_PENDING(kind, line, pending) \
  record(record_tag(RecordKind::kind, line, pending), 0, attn_begin, record_clock());
#define ATTN_STAMP_COPY(barrier, shared)                                                 \
  record(record_tag(RecordKind::tma, caller), recorded_as(barrier), recorded_as(shared), \
         record_clock());
#define ATTN_STAMP_FENCE record_fence();
#define ATTN_STAMP_GROUP record_group(record_tag(RecordKind::wgmma_group));

#define ATTN_RECORD_BEGIN(storage, shared) record_begin<storage>(shared);

#define ATTN_MEMBER(storage, member) \
  attn::record_member<decltype(storage::member)>(to, #member, offsetof(storage, member));
#define ATTN_EACH_MEMBER(s, m, ...) \
  ATTN_MEMBER(s, m) __VA_OPT__(ATTN_AGAIN ATTN_PARENS(s, __VA_ARGS__))
#define ATTN_AGAIN() ATTN_EACH_MEMBER
#define ATTN_PARENS ()
#define ATTN_EXPAND(...) ATTN_EXPAND_4(ATTN_EXPAND_4(ATTN_EXPAND_4(ATTN_EXPAND_4(__VA_ARGS__))))
#define ATTN_EXPAND_4(...) ATTN_EXPAND_1(ATTN_EXPAND_1(ATTN_EXPAND_1(ATTN_EXPAND_1(__VA_ARGS__))))
#define ATTN_EXPAND_1(...) __VA_ARGS__
#define ATTN_MEMBERS(storage, ...)                                             \
  static __device__ void attn_record_members(attn::RecordedMember* to) {       \
    ATTN_EXPAND(ATTN_EACH_MEMBER(storage, __VA_ARGS__))                        \
  }

#define __syncthreads() attn::recorded_syncthreads()
