// The step table of chapter 08: INT8 and FP8 prefill, quantised KV caches, block-sparse attention.
#include <algorithm>
#include <iterator>

#include "host/head_windows.h"
#include "host/predict.h"
#include "host/quantised.h"
#include "host/sparse_steps.h"

namespace attn {

const Chapter& chapter() {
  static const Chapter c = [] {
    Chapter all{"08_quant_sparse", "quantised and block-sparse attention, quantised KV caches", {}};
    std::ranges::move(prefill_steps(), std::back_inserter(all.steps));
    std::ranges::move(sparse_steps(), std::back_inserter(all.steps));
    std::ranges::move(predict_steps(), std::back_inserter(all.steps));
    std::ranges::move(decode_steps(), std::back_inserter(all.steps));
    all.commands.push_back({"--windows",
                            "[--canvas TxHxW ...]: for each head of a field, the smallest sliding "
                            "tile window within an error bound, for --mask sta:",
                            windows_command});
    all.steps.push_back(sparq_step());
    return all;
  }();
  return c;
}

}  // namespace attn
