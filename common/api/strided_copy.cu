// Copies rows with strides to rows with other strides: tensors of a caller that are not contiguous.
#include "api/memory.h"
#include "attn/kernel.h"

namespace ATTN_BACKEND::api {
using namespace attn;

constexpr int kThreads = 128;

template <class Unit>
__global__ void copy_kernel(Unit* __restrict__ to, const Unit* __restrict__ from,
                            const attn::api::Strided s) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= s.batch * s.heads * s.rows * s.columns) return;
  const int64_t column = n % s.columns, row = n / s.columns % s.rows,
                head = n / s.columns / s.rows % s.heads, b = n / s.columns / s.rows / s.heads;
  to[b * s.to_batch + head * s.to_head + row * s.to_row + column] =
      from[b * s.from_batch + head * s.from_head + row * s.from_row + column];
}

template <class Unit>
Status launch_copy(void* to, const void* from, const attn::api::Strided& s, Stream stream) {
  const int64_t blocks = ceil_div(s.batch * s.heads * s.rows * s.columns, int64_t{kThreads});
  if (blocks >= int64_t{1} << 31)
    return Status::unsupported("strides: at most 2^38 elements can be copied");
  return launch_kernel(copy_kernel<Unit>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0,
                       stream, static_cast<Unit*>(to), static_cast<const Unit*>(from), s);
}

Status copy(void* to, const void* from, const attn::api::Strided& s, int unit, Stream stream) {
  return unit == 2 ? launch_copy<uint16_t>(to, from, s, stream)
                   : launch_copy<uint32_t>(to, from, s, stream);
}

}  // namespace ATTN_BACKEND::api
