// a1_append: new tokens go to their pages, keys turned on the way.
//
// idea      A projection leaves K and V of the new tokens one behind the other. Each goes to the
//           slot that the page table says. With a rotary embedding a key is turned by its position
//           first, columns c and c + d/2 by the angle of c: whoever reads it from the cache later
//           finds it done, and K is not read and written once more for it.
// expect    dram__throughput: a copy, at the rate of one
// supports  fp16, bf16; head dims 64, 128, 256; any page size, any number of new tokens
#include "attn/kernel.h"
#include "ptx/mma.h"
#include "splits.h"

namespace ATTN_BACKEND::a1_append {
using namespace attn;
using namespace splits;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_, kHalf = kHeadDim / 2;
  static constexpr int kThreads = 256;
  static constexpr int kLanes = kHalf / 8;  // of a row: each has 8 columns of both halves
};

// x of columns c to c + 7 and y of c + d/2 to c + d/2 + 7, turned.
//! [rotate]
template <class Element>
__device__ __forceinline__ void rotate(uint4& x, uint4& y, const float* cosine, const float* sine) {
  uint32_t(&low)[4] = reinterpret_cast<uint32_t(&)[4]>(x);
  uint32_t(&high)[4] = reinterpret_cast<uint32_t(&)[4]>(y);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float a[2], b[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float u = unpack<Element>(low[i], n), v = unpack<Element>(high[i], n);
      const float c = cosine[2 * i + n], s = sine[2 * i + n];
      a[n] = u * c - v * s;
      b[n] = v * c + u * s;
    }
    low[i] = pack2<Element>(a[0], a[1]), high[i] = pack2<Element>(b[0], b[1]);
  }
}
//! [rotate]

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads)
    append_kernel(const Element* gKNew,  // [B, seqlen_q, Hkv, d]
                  const Element* gVNew,  // [B, seqlen_q, Hkv, d]
                  const float* gCosSin,  // [seqlen_k, 2, d/2], or null
                  const int* gTable,     // [B, max_pages]: the pages of each sequence
                  const int* gSeqused,   // [B]: keys of each sequence, the new ones among them
                  Element* gK,           // [num_pages, page_size, Hkv, d]
                  Element* gV,           // [num_pages, page_size, Hkv, d]
                  Shape shape, unsigned rows, int page_size, int max_pages) {
  constexpr int kHeadDim = Config::kHeadDim, kHalf = Config::kHalf, kLanes = Config::kLanes;
  const unsigned at = blockIdx.x * Config::kThreads + threadIdx.x, row = at / kLanes;
  if (row >= rows) return;
  // (1) which token, which head. Divisions of 32 bits: those of 64 would take longer than the copy.
  const unsigned token = row / shape.kv_heads, head = row % shape.kv_heads;
  const unsigned b = token / shape.seqlen_q;
  const int position = gSeqused[b] - shape.seqlen_q + static_cast<int>(token % shape.seqlen_q);
  if (position < 0) return;  // the sequence has fewer tokens
  // (2) its slot
  const int slot =
      gTable[int64_t{b} * max_pages + position / page_size] * page_size + position % page_size;
  const int column = static_cast<int>(at % kLanes) * 8;
  const int64_t from = int64_t{row} * kHeadDim + column;
  const int64_t to = (int64_t{slot} * shape.kv_heads + head) * kHeadDim + column;
  // (3) copy
  uint4 k[2], v[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    k[n] = *reinterpret_cast<const uint4*>(gKNew + from + n * kHalf);
    v[n] = *reinterpret_cast<const uint4*>(gVNew + from + n * kHalf);
  }
  if (gCosSin != nullptr) {
    const float* const angle = gCosSin + int64_t{position} * kHeadDim + column;
    rotate<Element>(k[0], k[1], angle, angle + kHalf);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    *reinterpret_cast<uint4*>(gK + to + n * kHalf) = k[n];
    *reinterpret_cast<uint4*>(gV + to + n * kHalf) = v[n];
  }
}

template <class Element, class Config>
Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const int64_t rows = p.batch * p.seqlen_q * p.kv_heads;
  args.phase("append");
  return launch_kernel(
      append_kernel<Element, Config>,
      dim3(static_cast<unsigned>(ceil_div(rows * Config::kLanes, Config::kThreads))),
      dim3(Config::kThreads), 0, args.stream, args.in<Element>("k_new"), args.in<Element>("v_new"),
      args.in_or_null<float>("cos_sin"), args.in<int>("page_table"), args.in<int>("seqused_k"),
      args.out<Element>("k"), args.out<Element>("v"), shape_of(p), static_cast<unsigned>(rows),
      static_cast<int>(page_size_of(p)), static_cast<int>(max_pages_of(p)));
}

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    switch (args.problem.head_dim) {
      case 64: return launch<Element, Config<64>>(args);
      case 128: return launch<Element, Config<128>>(args);
      case 256: return launch<Element, Config<256>>(args);
    }
    return Status::unsupported("only head dims 64, 128 and 256");
  });
}

}  // namespace ATTN_BACKEND::a1_append
