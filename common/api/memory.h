/// \file
/// Device memory of a caller: copies from the host, and strided copies, in a stream.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attn/step.h"

namespace attn::api {

/// The GPU that the calling thread uses, or -1.
int current_gpu();

/// Copies host bytes to device memory. `from` may change after the call.
Status upload(Device, void* to, const void* from, std::size_t bytes, Stream);

/// Memory of a back end, aligned to 256 bytes.
Status allocate(Backend, std::size_t bytes, void** memory);
void release(Backend, void* memory);
/// A mark behind what a stream has now; `done` frees it once that is done.
Status record(Stream, void** mark);
bool done(void* mark);
/// Orders what `stream` gets later after what `other` has now.
Status stream_wait(Stream stream, Stream other);

/// Elements [batch][heads][rows][columns] and their strides, in units of `unit` bytes (2 or 4).
struct Strided {
  int64_t batch, heads, rows, columns;
  int64_t from_batch, from_head, from_row;
  int64_t to_batch, to_head, to_row;
};
Status copy_strided(Device, void* to, const void* from, const Strided&, int unit, Stream);

}  // namespace attn::api
