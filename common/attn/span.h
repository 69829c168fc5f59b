/// \file
/// Marks of timelines: names for the phases of a kernel (docs/timelines.md).
#pragma once

#include <cstddef>

#include "attn/kernel.h"

/// ATTN_SPAN("softmax") marks the rest of its scope, or the code up to ATTN_SPAN_END("softmax") in
/// it. No semicolon follows. `--timeline` draws the mark on the track of the warp. In the ordinary
/// build for a GPU both expand to nothing: marks change neither machine code nor the key of a
/// measurement. At most 12 names per step. In the recorded build (attn/record.h) they are stamps.
#ifdef ATTN_EMULATED
namespace attn::emulator {
// The number of marks that the running thread has open; opens one, closes those above a number, or
// the last one of a name and those in it.
std::size_t open_marks();
void begin_mark(const char* name);
void end_marks(std::size_t open);
void end_mark(const char* name);

struct Span {
  explicit Span(const char* name) : open(open_marks()) { begin_mark(name); }
  ~Span() noexcept(false) { end_marks(open); }  // the thread may have to stop there
  Span(const Span&) = delete;
  std::size_t open;
};
}  // namespace attn::emulator
#define ATTN_SPAN_NAME(line) attn_span_##line
#define ATTN_SPAN_AT(name, line) const attn::emulator::Span ATTN_SPAN_NAME(line)(name);
#define ATTN_SPAN(name) ATTN_SPAN_AT(name, __LINE__)
#define ATTN_SPAN_END(name) attn::emulator::end_mark(name);
#else
#ifdef ATTN_RECORD_TIMELINE
#define ATTN_SPAN_NAME(line) attn_span_##line
#define ATTN_SPAN_AT(name, line) \
  const attn::RecordedSpan<attn::record_hash(name), attn::record_ended(line)> ATTN_SPAN_NAME(line);
#define ATTN_SPAN(name) ATTN_SPAN_AT(name, __LINE__)
#define ATTN_SPAN_END(name) \
  attn::record_mark(attn::RecordKind::mark_end, \
                    std::integral_constant<std::uint32_t, attn::record_hash(name)>::value);
#else
#define ATTN_SPAN(name)
#define ATTN_SPAN_END(name)
#endif
#endif
