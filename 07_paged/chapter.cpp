// Table of the chapter's steps. Costs and refusals per kind of step are in host/steps.cpp.
#include "host/paged.h"
#include "host/plan.h"
#include "host/prefix_plan.h"
#include "host/steps.h"
#include "host/cache_size.h"
#include "host/trace.h"
#include "kernels/splits.h"

ATTN_DECLARE_STEP(v1_block_table);
ATTN_DECLARE_STEP(v2_page_table);
ATTN_DECLARE_STEP(v3_prefetched_pages);
ATTN_DECLARE_STEP(v4_ragged_plan);
ATTN_DECLARE_STEP(v5_balanced_plan);
ATTN_DECLARE_STEP(v6_device_plan);
ATTN_DECLARE_STEP(v7_prefill);
ATTN_DECLARE_STEP(v8_shared_prefix);
ATTN_DECLARE_STEP(v9_tree_mask);
ATTN_DECLARE_STEP(v10_variants);
ATTN_DECLARE_STEP(v11_mixed);
ATTN_DECLARE_STEP(v12_mla);
ATTN_DECLARE_STEP(v13_mla_wgmma);
ATTN_DECLARE_STEP(v14_cross_work_tile);
ATTN_DECLARE_STEP(v15_prefill_tma);
ATTN_DECLARE_STEP(v16_mla_seesaw);
ATTN_DECLARE_STEP(v17_prefix_tma);
ATTN_DECLARE_STEP(a1_append);
ATTN_DECLARE_STEP(c1_copy);

namespace attn {
namespace {

using namespace builders;
using namespace splits;

Chapter make_chapter() {
  Chapter c{"07_paged", "a paged KV cache: ragged batches, shared prefixes", {}};
  c.commands.push_back(
      {"--trace",
       "[FILE] [--svg FILE] [--save FILE]: replays requests on a paged and a contiguous cache",
       paged::trace_command});
  c.commands.push_back({"--cache-size",
                        "[--layers N] [--kv-heads N] [--head-dim N] [--tokens N] ...: bytes of a "
                        "KV cache with MHA, GQA, MQA, MLA, in 16, 8 and 4 bits",
                        paged::cache_size_command});
  c.commands.push_back(
      {"--plans", "[--svg FILE]: modelled SM utilisation of plans", plans::plans_command});
  c.steps.push_back(one_block("v1_block_table",
                              "one block per query head, keys found through a page table",
                              ATTN_LAUNCH(v1_block_table)));
  c.steps.push_back(runs("v2_page_table",
                         "chapter 05's stream-K kernel with a page look-up per key",
                         ATTN_LAUNCH(v2_page_table)));
  c.steps.push_back(runs("v3_prefetched_pages", "one look-up per key, one tile ahead",
                         ATTN_LAUNCH(v3_prefetched_pages)));
  c.steps.push_back(
      planned("v4_ragged_plan", "FlashInfer's plan/run: the host assigns KV chunks to blocks",
              ATTN_LAUNCH(v4_ragged_plan), plans::uniform_plan, plans::uniform_tensors));
  c.steps.push_back(planned("v5_balanced_plan", "a plan that balances the cost of all blocks",
                            ATTN_LAUNCH(v5_balanced_plan), plans::balanced_plan,
                            plans::balanced_tensors));
  c.steps.push_back(device_planned("v6_device_plan", "a kernel makes the plan, in closed form",
                                   ATTN_LAUNCH(v6_device_plan)));
  c.steps.push_back(prefill("v7_prefill", "prefill on pages: many queries per sequence, ragged",
                            {"seqused", "varlen"}, ATTN_LAUNCH(v7_prefill)));
  c.steps.push_back(shared("v8_shared_prefix",
                           "cascade: a shared prefix is read once for all sequences",
                           ATTN_LAUNCH(v8_shared_prefix), plans::mma_prefix_tiles));
  c.steps.push_back(with_trees("v9_tree_mask", "tree attention: a bitmask of seqlen_q x seqlen_q",
                               ATTN_LAUNCH(v9_tree_mask)));
  c.steps.push_back(with_variants("v10_variants",
                                  "softcap and ALiBi as a functor; attention sinks; RoPE on Q",
                                  ATTN_LAUNCH(v10_variants)));
  c.steps.push_back(mixed("v11_mixed", "prefill tiles and decode work tiles in one launch",
                          ATTN_LAUNCH(v11_mixed)));
  c.steps.push_back(latent("v12_mla", "latent attention: one K/V head, V is a part of K",
                           ATTN_LAUNCH(v12_mla), kMmaRows));
  c.steps.push_back(latent_wgmma("v13_mla_wgmma", "latent attention with wgmma, 64 rows per block",
                                 ATTN_LAUNCH(v13_mla_wgmma)));
  c.steps.push_back(
      planned("v14_cross_work_tile", "loads of the next work tile overlap with the end of this one",
              ATTN_LAUNCH(v14_cross_work_tile), plans::balanced_plan, plans::balanced_tensors));
  c.steps.push_back(hopper_prefill("v15_prefill_tma",
                                   "chapter 06's kernel on pages: one TMA box per page",
                                   ATTN_LAUNCH(v15_prefill_tma)));
  c.steps.push_back(latent_boxes("v16_mla_seesaw",
                                 "latent attention, softmax overlapped with MMAs (seesaw)",
                                 ATTN_LAUNCH(v16_mla_seesaw)));
  c.steps.push_back(hopper_shared("v17_prefix_tma", "shared prefixes with TMA and wgmma",
                                  ATTN_LAUNCH(v17_prefix_tma)));
  c.steps.push_back(copies("a1_append", "stores new tokens to their pages, with RoPE on K",
                           paged_append(), "append", ATTN_LAUNCH(a1_append), refuse_append));
  c.steps.push_back(copies("c1_copy", "copies a list of pages in one launch", page_copy(), "copy",
                           ATTN_LAUNCH(c1_copy), refuse_all));
  return c;
}

}  // namespace

const Chapter& chapter() {
  static const Chapter c = make_chapter();
  return c;
}

}  // namespace attn
