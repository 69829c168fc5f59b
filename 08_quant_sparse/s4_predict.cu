// s4_predict: a query tile chooses its key blocks by block means.
//
// parent    s1_block_mask
// change    Two kernels make the lists of s1 on the device: pool_kernel reads Q and K and computes
//           the block means, choose_kernel reads the means. Both are in choose_blocks.h, because
//           later steps use them too. The choice in short, for a query tile and each key block n:
//
//               score = q_mean . k_mean[n];  // kAlways if one of the two blocks is dissimilar
//               least = least_kept(scores);  // the threshold that --keep or --keep-mass asks for
//               if (score >= least) gVisited[at++] = n;
//
//           A causal mask is still applied per element in the visited blocks. The attention kernel
//           is the parent's, compiled once for both steps.
// why       Most masks are not known before the launch. If the rows of a block are similar, their
//           mean represents them, and scores of means predict where a query tile attends.
// expect    time: the kept share of the dense time, plus phases "pool" and "choose", a few percent
// supports  fp16, bf16; head dims 64, 128, 256; any lengths, causal and windows, GQA
// source    SpargeAttn (arXiv 2502.18137), section 3.3
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
