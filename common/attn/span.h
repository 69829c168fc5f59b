/// \file
/// Marks of timelines: names for the phases of a kernel (docs/timelines.md).
#pragma once

#include "attn/kernel.h"

/// ATTN_SPAN("softmax") marks the rest of its scope; no semicolon follows. `--timeline` draws the
/// mark on the track of the warp. On a GPU it expands to nothing, so that marks change neither
/// machine code nor the key of a measurement. At most 12 names per step.
#ifdef ATTN_EMULATED
namespace attn::emulator {
void begin_mark(const char* name);
void end_mark();
struct Span {
  explicit Span(const char* name) { begin_mark(name); }
  ~Span() noexcept(false) { end_mark(); }  // the thread may have to stop
  Span(const Span&) = delete;
};
}  // namespace attn::emulator
#define ATTN_SPAN_NAME(line) attn_span_##line
#define ATTN_SPAN_AT(name, line) const attn::emulator::Span ATTN_SPAN_NAME(line)(name);
#define ATTN_SPAN(name) ATTN_SPAN_AT(name, __LINE__)
#else
#define ATTN_SPAN(name)
#endif
