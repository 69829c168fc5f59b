// The parts of chapter 08's table: the steps that quantise Q, K and V, and those that have a
// quantised cache.
#pragma once

#include <string>
#include <vector>

#include "attn/step.h"

namespace attn {

/// Rows with scales of their own, as in quantise.h; keys of a chunk, as in quantise_chunks.h.
constexpr int64_t kTileRows = 128, kChunkKeys = 4096;

/// Attention to many queries, inputs quantised by the step (operation forward).
std::vector<Step> prefill_steps();

/// Such a step with Q and K in int8 and P and V in e4m3, as `q4_fp8_pv` is.
Step fp8_pv_step(std::string name, std::string idea, Launch launch);

/// What each block that runs leaves of O and the maximum (q8: and l) for its next chunk of keys:
/// for a step with tiles of `rows` queries.
Workspace chunk_sums(const Problem&, int64_t rows);

/// The q, k, v that a step multiplies which stores Q and K in int8, a scale for each tile of 128
/// rows of a head.
HostTensors int8_blocks(const Problem&, const HostTensors& inputs);

/// The same with the mean of K taken off while it is rounded; and with scales of the rows of Q and
/// of the keys whose scores a lane has.
HostTensors smoothed_blocks(const Problem&, const HostTensors& inputs);
HostTensors smoothed_threads(const Problem&, const HostTensors& inputs);
/// And with V in e4m3, a scale for each column of a head.
HostTensors fp8_pv(const Problem&, const HostTensors& inputs);
/// Or with V less its mean, a mean and a scale for each column of a chunk of 4096 keys.
HostTensors fp8_chunks(const Problem&, const HostTensors& inputs);
/// Or a mean and a scale for each column of a head; and the mean of K formed of those of blocks.
HostTensors fp8_heads(const Problem&, const HostTensors& inputs);

/// And with the mean of each tile of 128 queries taken off: q and k of 2 d columns, as the mean
/// meets keys that are not rounded.
HostTensors smoothed_q(const Problem&, const HostTensors& inputs);
/// The same of codes from -7 to 7; and of what no step does, for comparison: without smoothing, and
/// with the mean of K alone taken off, V as it was.
HostTensors smoothed_q_int4(const Problem&, const HostTensors& inputs);
HostTensors int4_threads(const Problem&, const HostTensors& inputs);
HostTensors int4_smooth_k(const Problem&, const HostTensors& inputs);

/// Attention of a few queries to a long cache, quantised by the step (operation decode).
std::vector<Step> decode_steps();

/// The q, k, v of a step whose cache has int8 or e4m3 (Problem::dtype), a scale for each key and
/// value.
HostTensors cache_of_8_bits(const Problem&, const HostTensors& inputs);
/// The same of int4, with a zero point.
HostTensors cache_of_4_bits(const Problem&, const HostTensors& inputs);
/// And with scales and zero points of K's channels, for groups of tokens, and the newest tokens in
/// 16 bits (groups.h).
HostTensors cache_of_groups(const Problem&, const HostTensors& inputs);

/// Attention of one query to a few tokens of a cache (operation sparq).
Step sparq_step();
namespace sparq {
/// What d4_sparq reads for a K/V head of a sequence `p`: columns of K, tokens, both rising, and of
/// each of its query heads the tokens' part of softmax as the columns guess it.
struct Chosen {
  std::vector<int64_t> columns, keys;
  std::vector<double> alpha;
};
Chosen chosen_of(const Problem& p, const HostTensors& inputs, int64_t b, int64_t hkv);
}  // namespace sparq

}  // namespace attn
