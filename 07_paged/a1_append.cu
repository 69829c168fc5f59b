// a1_append: stores K and V of new tokens to their pages, with RoPE on K.
//
// parent    none: an operation of its own
// change    A projection writes K and V of the new tokens contiguously. This kernel copies each
//           token to its slot, which the page table gives. With a rotary embedding it first rotates
//           K by the token's position: columns c and c + d/2 by the angle of c.
// why       Keys are rotated once, when they are stored. Decoding reads rotated keys, and no
//           separate pass reads and writes K again.
// expect    dram__throughput reaches the rate of a copy
// supports  fp16, bf16; head dims 64, 128, 256; any page size, any number of new tokens (if a
//           sequence is shorter than that, the first ones are padding)
// source    Su et al., RoFormer (arXiv 2104.09864)
#include "attn/kernel.h"
#include "kernels/rotate.h"
#include "kernels/splits.h"

namespace ATTN_BACKEND::a1_append {
using namespace attn;
using namespace paged;
using namespace splits;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_, kHalf = kHeadDim / 2;
  static constexpr int kThreads = 256;
  static constexpr int kLanes = kHalf / 8;  // lanes per row: each owns 8 columns of both halves
};

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads)
    append_kernel(const Element* gKNew,  // [B, seqlen_q, Hkv, d]
                  const Element* gVNew,  // [B, seqlen_q, Hkv, d]
                  const float* gCosSin,  // [seqlen_k, 2, d/2], or null
                  const int* gTable,     // [B, max_pages]: page table
                  const int* gSeqused,   // [B]: valid keys per sequence, new ones included
                  Element* gK,           // [num_pages, page_size, Hkv, d]
                  Element* gV,           // [num_pages, page_size, Hkv, d]
                  Shape shape, unsigned rows, int page_size, int max_pages) {
  constexpr int kHeadDim = Config::kHeadDim, kHalf = Config::kHalf, kLanes = Config::kLanes;
  const unsigned idx = blockIdx.x * Config::kThreads + threadIdx.x, row = idx / kLanes;
  if (row >= rows) return;
  const int column = static_cast<int>(idx % kLanes) * 8;
  // (1) Load before the slot is known: the look-ups below overlap with these loads. The pointers
  // are to 16-byte chunks; with offsets in Elements the compiler split half of the stores into four
  // of 4 bytes.
  const int64_t from = (int64_t{row} * kHeadDim + column) / 8;
  const auto* const fromK = reinterpret_cast<const uint4*>(gKNew) + from;
  const auto* const fromV = reinterpret_cast<const uint4*>(gVNew) + from;
  uint4 k[2] = {fromK[0], fromK[kHalf / 8]}, v[2] = {fromV[0], fromV[kHalf / 8]};
  // (2) Token and head. 32-bit divisions: 64-bit ones would take longer than the copy.
  const unsigned token = row / shape.kv_heads, head = row % shape.kv_heads;
  const unsigned b = token / shape.seqlen_q;
  const int position = gSeqused[b] - shape.seqlen_q + static_cast<int>(token % shape.seqlen_q);
  if (position < 0) return;  // padding: the sequence has fewer tokens
  // (3) slot
  const int slot =
      gTable[int64_t{b} * max_pages + position / page_size] * page_size + position % page_size;
  const int64_t to = ((int64_t{slot} * shape.kv_heads + head) * kHeadDim + column) / 8;
  if (gCosSin != nullptr) {
    const auto* const angles =
        reinterpret_cast<const float4*>(gCosSin + int64_t{position} * kHeadDim + column);
    rotate<Element>(k[0], k[1], angles, angles + kHalf / 4);
  }
  auto* const toK = reinterpret_cast<uint4*>(gK) + to;
  auto* const toV = reinterpret_cast<uint4*>(gV) + to;
  toK[0] = k[0], toK[kHalf / 8] = k[1];
  toV[0] = v[0], toV[kHalf / 8] = v[1];
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
