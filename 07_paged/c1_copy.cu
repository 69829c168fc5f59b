// c1_copy: pages copied to others, all of a batch in one launch.
//
// idea      Before a sequence writes to a page that others have, it needs its tokens in a page of
//           its own (copy on write). Beams go on in two ways by the dozen, so that copies come in
//           lists: a block a page and tensor, four chunks of 16 bytes in flight a thread.
// expect    dram__throughput: a copy, at the rate of one
// supports  fp16, bf16; head dims 64, 128, 256; any page size
#include "attn/kernel.h"
#include "splits.h"

namespace ATTN_BACKEND::c1_copy {
using namespace attn;
using namespace splits;

struct Config {
  static constexpr int kThreads = 256;
};

//! [copy]
template <class Element>
__global__ void __launch_bounds__(Config::kThreads)
    copy_kernel(const int* gCopies,  // [copies, 3]: from, to, tokens
                Element* gK,         // [num_pages, page_size, Hkv, d]
                Element* gV,         // [num_pages, page_size, Hkv, d]
                int page_size, int token) {
  const int* const copy = gCopies + 3 * int64_t{blockIdx.x};
  const int64_t page = int64_t{page_size} * token;
  Element* const pool = blockIdx.y == 0 ? gK : gV;
  // Two pages, so that later loads need not wait for earlier stores: four are in flight.
  const Element* __restrict__ const from = pool + copy[0] * page;
  Element* __restrict__ const to = pool + copy[1] * page;
  const int count = copy[2] * token;
#pragma unroll 4
  for (int at = 8 * static_cast<int>(threadIdx.x); at < count; at += 8 * Config::kThreads)
    *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(from + at);
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
