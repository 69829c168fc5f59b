// s4_predict: a tile of queries chooses its blocks of keys by their means.
//
// parent    s1_block_mask
// idea      Most masks are not known before the launch. SpargeAttn (arXiv 2502.18137) predicts
//           them: if the rows of a block are similar, their mean represents them, and scores of
//           means tell where a tile of queries looks. Two kernels make the lists of s1 on the
//           device: pool_kernel reads Q and K and finds the means, choose_kernel reads the means.
//           Both are in choose_blocks.h, because later steps use them too. The choice in short,
//           for a tile of queries and each block of keys n:
//
//               score = q_mean . k_mean[n];  // kAlways if one of the two blocks is dissimilar
//               least = least_kept(scores);  // the threshold that --keep or --keep-mass asks for
//               if (score >= least) gVisited[at++] = n;
//
//           A causal mask hides single scores in the visited blocks, as in s1. The attention kernel
//           is the parent's, compiled once for both steps.
// expect    time: the kept share of the dense one, and phases "pool" and "choose", a few percent of
//           it
// supports  fp16, bf16; head dims 64, 128, 256; any lengths, causal and windows, GQA
#include <algorithm>

#include "device/device.h"
#include "attn/kernel.h"
#include "kernels/choose_blocks.h"
#include "kernels/visits.h"

ATTN_ATTENTION_OF(s1_block_mask, attn::ListStrides);

namespace ATTN_BACKEND::s4_predict {
using namespace attn;
using namespace hopper;

//! [launch]
// The tiles of s1.
template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kSparseBlockM, kBlockN = sparse_block_n(kHeadDim);  // B_r, B_c
};

template <class Element, class Config>
Status launch(const Arguments& args) {
  BlockLists lists{};
  if (!args.on_tiling)
    if (const Status done = choose_visits<Element, Config>(args, rule_of(args.problem), lists);
        !done.ok())
      return done;
  return s1_block_mask::attend(args, {lists.batch_stride, lists.head_stride});
}
//! [launch]

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

}  // namespace ATTN_BACKEND::s4_predict
