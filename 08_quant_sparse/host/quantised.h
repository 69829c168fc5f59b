// The step tables of chapter 08: steps that quantise Q, K and V, and steps with a quantised cache.
#pragma once

#include <string>
#include <vector>

#include "attn/step.h"

namespace attn {

/// Rows per quantisation tile, as in quantise.h; keys per chunk, as in kernels/hopper/smooth_v.h.
constexpr int64_t kTileRows = 128, kChunkKeys = 4096;

/// Prefill: inputs quantised by the step (operation forward).
std::vector<Step> prefill_steps();

/// Such a step with INT8 Q K^T and FP8 P V, as `q4_fp8_pv`.
Step fp8_pv_step(std::string name, std::string idea, Launch launch);

/// The workspace of each running block for O and the max (q8: and l) between chunks: for a step
// with tiles of `rows` queries.
Workspace chunk_sums(const Problem&, int64_t rows);

/// The q, k, v that a step multiplies if it stores Q and K in int8 with one scale per 128 rows of
// a head.
HostTensors int8_blocks(const Problem&, const HostTensors& inputs);

/// The same with smooth K; and with per-thread scales.
HostTensors smoothed_blocks(const Problem&, const HostTensors& inputs);
HostTensors smoothed_threads(const Problem&, const HostTensors& inputs);
/// And with V in e4m3, one scale per channel of a head.
HostTensors fp8_pv(const Problem&, const HostTensors& inputs);
/// Or with smooth V, a mean and a scale per channel of a chunk of 4096 keys.
HostTensors fp8_chunks(const Problem&, const HostTensors& inputs);
/// Or with smooth V, a mean and a scale per channel of a head.
HostTensors fp8_heads(const Problem&, const HostTensors& inputs);

/// And with smooth Q per tile of 128 queries: q and k get 2 d columns, because the mean is
// multiplied by the unquantised keys.
HostTensors smoothed_q(const Problem&, const HostTensors& inputs);
/// The same with codes from -7 to 7. For comparison, what no step does: int4 without smoothing,
// and with smooth K alone, V not quantised.
HostTensors smoothed_q_int4(const Problem&, const HostTensors& inputs);
HostTensors int4_threads(const Problem&, const HostTensors& inputs);
HostTensors int4_smooth_k(const Problem&, const HostTensors& inputs);

/// Attention of a few queries to a long cache, quantised by the step (operation decode).
std::vector<Step> decode_steps();

/// The q, k, v of a step with an int8 or e4m3 cache (Problem::dtype), one scale per key and value.
HostTensors cache_of_8_bits(const Problem&, const HostTensors& inputs);
/// The same for int4, with a zero point.
HostTensors cache_of_4_bits(const Problem&, const HostTensors& inputs);
/// And with scales and zero points per channel of K, for groups of tokens, and the newest tokens
// in 16 bits (groups.h).
HostTensors cache_of_groups(const Problem&, const HostTensors& inputs);

/// Attention of one query to a few tokens of a cache (operation sparq).
Step sparq_step();
namespace sparq {
/// What d4_sparq reads for a K/V head of a sequence `p`: columns of K and tokens, both ascending,
// and per query head the tokens' estimated shares of the softmax.
struct Chosen {
  std::vector<int64_t> columns, keys;
  std::vector<double> alpha;
};
Chosen chosen_of(const Problem& p, const HostTensors& inputs, int64_t b, int64_t hkv);
}  // namespace sparq

}  // namespace attn
