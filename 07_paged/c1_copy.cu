// c1_copy: copies a list of pages in one launch.
//
// parent    none: an operation of its own
// change    One block per page and tensor; each thread has four 16-byte chunks in flight.
// why       Copy-on-write: before a sequence appends to a shared page, the page's tokens are copied
//           to a page of its own. Beam search forks many sequences at once, so copies come in
//           lists.
// expect    dram__throughput reaches the rate of a copy
// supports  fp16, bf16; head dims 64, 128, 256; any page size
#include "attn/kernel.h"
#include "kernels/splits.h"

namespace ATTN_BACKEND::c1_copy {
using namespace attn;
using namespace splits;

struct Config {
  static constexpr int kThreads = 256, kAtOnce = 4;  // chunks per thread
};

//! [copy]
template <class Element>
__global__ void __launch_bounds__(Config::kThreads)
    copy_kernel(const int* gCopies,          // [copies, 3]: from, to, tokens
                Element* gK,                 // [num_pages, page_size, Hkv, d]
                Element* gV,                 // [num_pages, page_size, Hkv, d]
                int page_size, int token) {  // token: elements per token
  const int* const copy = gCopies + 3 * int64_t{blockIdx.x};
  const int64_t page = int64_t{page_size} * token / 8;  // size of a page, in 16-byte chunks
  auto* const pool = reinterpret_cast<uint4*>(blockIdx.y == 0 ? gK : gV);
  const uint4* const from = pool + copy[0] * page;
  uint4* const to = pool + copy[1] * page;
  const int count = copy[2] * token / 8;
  // All loads of a round precede its stores. The compiler cannot reorder them itself, because it
  // does not know that the two pages differ.
  constexpr int kRound = Config::kAtOnce * Config::kThreads;
#pragma unroll 1
  for (int idx = static_cast<int>(threadIdx.x); idx < count; idx += kRound) {
    uint4 chunks[Config::kAtOnce];
#pragma unroll
    for (int n = 0; n < Config::kAtOnce; ++n)
      chunks[n] = from[min(idx + n * Config::kThreads, count - 1)];
#pragma unroll
    for (int n = 0; n < Config::kAtOnce; ++n)
      if (idx + n * Config::kThreads < count) to[idx + n * Config::kThreads] = chunks[n];
  }
}
//! [copy]

Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  return dispatch_16bit(p.dtype, [&]<class Element>() {
    args.phase("copy");
    return launch_kernel(
        copy_kernel<Element>, dim3(static_cast<unsigned>(p.batch), 2), dim3(Config::kThreads), 0,
        args.stream, args.in<int>("page_copies"), args.out<Element>("k"), args.out<Element>("v"),
        static_cast<int>(page_size_of(p)), static_cast<int>(p.kv_heads * p.head_dim));
  });
}

}  // namespace ATTN_BACKEND::c1_copy
