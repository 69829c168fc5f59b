// Where the compiler reports what a kernel does to memory. Emulated kernels are compiled with
// `-fsanitize=thread,alignment` and linked to these functions in place of the sanitizers'
// libraries: the instrumentation is theirs, the rules are a GPU's. Names and meaning: LLVM's
// compiler-rt, tsan_interface.h and ubsan_handlers.h (the interface alone).
//
// The compiler believes that they do not throw. What is wrong ends the kernel at its next barrier.
//
// Two other ways to see accesses were weighed. *Page protection* needs nothing of the compiler:
// shared memory is not accessible, each access faults, is noted, and one instruction runs with the
// page open: two signals and two system calls, in place of a call from compiled code, for every
// element that a kernel touches in shared memory. *References that record* (a `Shared<float>` in
// place of `float`) need no more than a call, either, but kernels would have to be written in them:
// they do not convert to the `const Element*` that helpers and instructions take. So the compiler
// does it, and a kernel stays what a GPU's reader expects.
#include <algorithm>
#include <cstring>
#include <string>

#include "emulator/simt.h"

#ifdef ATTN_SHADOW  // of test_api_asan: AddressSanitizer's library, but no instrumentation by it
#include <sanitizer/asan_interface.h>
extern "C" void __asan_get_shadow_mapping(std::size_t* scale, std::size_t* offset);
extern "C" void __asan_report_load_n(void*, std::size_t);
extern "C" void __asan_report_store_n(void*, std::size_t);
#endif

#ifndef ATTN_ASAN  // AddressSanitizer and this instrumentation exclude one another

using attn::emulator::Kind;

namespace {

// Without optimisation the linker may keep the kernels' copy of an inline function that the
// emulator calls, and that copy comes by here again.
#ifdef __OPTIMIZE__
struct Unwatched {};
#else
struct Unwatched {
  attn::emulator::Block* running = attn::emulator::running_block;
  attn::emulator::Block* reading = attn::emulator::reading_block;
  Unwatched() { attn::emulator::running_block = attn::emulator::reading_block = nullptr; }
  ~Unwatched() { attn::emulator::running_block = running, attn::emulator::reading_block = reading; }
};
#endif

// When the running thread has used up its time slice, its next reads are looked at: a loop that
// waits for a word reads no more than a few, again and again.
constexpr int kLookedAt = 24, kFew = 4;
thread_local constinit int looked_at = 0, distinct = 0;
thread_local constinit const void* places[kFew] = {};

void count_slice(attn::emulator::Block& block, const void* at, const void* caller) {
  const void* const* const end = places + std::min(distinct, kFew);
  const bool known = std::any_of(static_cast<const void* const*>(places), end,
                                 [&](const void* p) { return p == at; });
  if (!known && distinct < kFew) places[distinct] = at;
  distinct += !known;
  attn::emulator::reads_left = 1;
  if (++looked_at < kLookedAt) return;
  const bool waits = distinct <= kFew;
  attn::emulator::reads_left = attn::emulator::kSlice, looked_at = distinct = 0;
  block.end_slice(caller, waits);
}

#ifdef ATTN_SHADOW
// Reports an access to memory that AddressSanitizer has poisoned: past the end of an allocation, or
// freed.
inline void check_shadow(Kind kind, const void* at, std::size_t bytes) {
  static const std::size_t offset = [] {
    std::size_t scale = 0, from = 0;
    __asan_get_shadow_mapping(&scale, &from);
    return from;
  }();
  // One byte of the shadow for 8 of memory; 0: all 8 may be accessed. No gap has less than 16.
  const auto first = reinterpret_cast<std::uintptr_t>(at);
  const auto clean = [](std::uintptr_t byte) {
    return *reinterpret_cast<const char*>((byte >> 3) + offset) == 0;  // NOLINT: an address
  };
  if (bytes <= 16 && clean(first) && clean(first + bytes - 1)) return;
  if (void* const bad = __asan_region_is_poisoned(const_cast<void*>(at), bytes))
    kind == Kind::read ? __asan_report_load_n(bad, bytes) : __asan_report_store_n(bad, bytes);
}
#endif

inline void note(Kind kind, const void* at, std::size_t bytes, const void* caller) {
  using namespace attn::emulator;
#ifdef ATTN_SHADOW
  check_shadow(kind, at, bytes);
#endif
  if (kind == Kind::read && --reads_left == 0 && running_block) {
    Block& running = *running_block;
    [[maybe_unused]] const Unwatched unwatched;
    count_slice(running, at, caller);
  }
  Block* const block = kind == Kind::read ? reading_block : running_block;
  if (!block) return;
  [[maybe_unused]] const Unwatched unwatched;
  block->access(kind, nullptr, Where(caller), at, bytes);
}

}  // namespace

#define ATTN_ACCESS(name, kind, bytes) \
  void name(void* at) { note(kind, at, bytes, __builtin_return_address(0)); }
#define ATTN_ACCESSES(bytes)                                   \
  ATTN_ACCESS(__tsan_read##bytes, Kind::read, bytes)           \
  ATTN_ACCESS(__tsan_write##bytes, Kind::write, bytes)         \
  ATTN_ACCESS(__tsan_unaligned_read##bytes, Kind::read, bytes) \
  ATTN_ACCESS(__tsan_unaligned_write##bytes, Kind::write, bytes)

// Counters of shared pointers and the like, in what a kernel includes of the host's: plain atomics.
#define ATTN_ATOMICS(bits, T)                                                                  \
  T __tsan_atomic##bits##_load(const volatile T* at, int) {                                    \
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                              \
  }                                                                                            \
  void __tsan_atomic##bits##_store(volatile T* at, T x, int) {                                 \
    __atomic_store_n(at, x, __ATOMIC_SEQ_CST);                                                 \
  }                                                                                            \
  T __tsan_atomic##bits##_exchange(volatile T* at, T x, int) {                                 \
    return __atomic_exchange_n(at, x, __ATOMIC_SEQ_CST);                                       \
  }                                                                                            \
  T __tsan_atomic##bits##_fetch_add(volatile T* at, T x, int) {                                \
    return __atomic_fetch_add(at, x, __ATOMIC_SEQ_CST);                                        \
  }                                                                                            \
  T __tsan_atomic##bits##_fetch_sub(volatile T* at, T x, int) {                                \
    return __atomic_fetch_sub(at, x, __ATOMIC_SEQ_CST);                                        \
  }                                                                                            \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* at, T* old, T x, int, int) {   \
    return __atomic_compare_exchange_n(at, old, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }

extern "C" {

ATTN_ACCESSES(1)
ATTN_ACCESSES(2)
ATTN_ACCESSES(4)
ATTN_ACCESSES(8)
ATTN_ACCESSES(16)
void __tsan_read_range(void* at, std::size_t bytes) {
  note(Kind::read, at, bytes, __builtin_return_address(0));
}
void __tsan_write_range(void* at, std::size_t bytes) {
  note(Kind::write, at, bytes, __builtin_return_address(0));
}
void* __tsan_memcpy(void* to, const void* from, std::size_t bytes) {
  note(Kind::read, from, bytes, __builtin_return_address(0));
  note(Kind::write, to, bytes, __builtin_return_address(0));
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, std::size_t bytes) {
  note(Kind::read, from, bytes, __builtin_return_address(0));
  note(Kind::write, to, bytes, __builtin_return_address(0));
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, std::size_t bytes) {
  note(Kind::write, to, bytes, __builtin_return_address(0));
  return std::memset(to, value, bytes);
}
ATTN_ATOMICS(8, char)
ATTN_ATOMICS(32, int)
ATTN_ATOMICS(64, long)
void __tsan_init() {}
void __tsan_func_entry(void*) {
  using namespace attn::emulator;
  if (entering_block) entering_block->entered(__builtin_return_address(0));
}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

/// What the compiler says of a pointer that is not aligned as its type.
struct MisalignedData {
  const char* file;
  std::uint32_t line, column;
  const void* type;
  // Kind 0: a load, 1: a store; the rest form addresses, and load nothing.
  unsigned char log_alignment, kind;
};
void __ubsan_handle_type_mismatch_v1(const MisalignedData* data, std::uintptr_t pointer) {
  attn::emulator::Block* const block = attn::emulator::running_block;
  const auto* at = reinterpret_cast<const void*>(pointer);  // NOLINT: an address
  if (!block || data->kind > 1 || !block->is_kernels(at)) return;
  const std::uintptr_t bytes = std::uintptr_t{1} << data->log_alignment;
  const attn::emulator::Place place{data->file, static_cast<int>(data->line)};
  block->fail_later(block->running_name() + (data->kind == 0 ? " loads" : " stores") + " at " +
                    place.text() + (data->kind == 0 ? " from" : " to") + " an address " +
                    std::to_string(pointer % bytes) + " bytes past a multiple of " +
                    std::to_string(bytes) + ": a misaligned access");
}
}  // extern "C"

#endif
