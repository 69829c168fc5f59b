// The FP8 part of chapter 06's table: see FP8.md.
#pragma once

#include <vector>

#include "attn/step.h"

namespace attn {

std::vector<Step> fp8_steps();

/// The q, k, v that a step with one e4m3 scale per tensor multiplies.
HostTensors in_tensor_scales(const Problem&, const HostTensors& inputs);
/// The same with one scale per tile of 128 rows, and with Q and K rotated first.
HostTensors in_tile_scales(const Problem&, const HostTensors& inputs);
HostTensors rotated_in_tile_scales(const Problem&, const HostTensors& inputs);
/// As the last one, but V has a mean and a scale per channel of a 4096-key chunk.
HostTensors rotated_in_chunks(const Problem&, const HostTensors& inputs);
/// The same after a rotary embedding, if there is one: rounded to bf16 first, or not.
HostTensors turned_apart(const Problem&, const HostTensors& inputs);
HostTensors turned_in_registers(const Problem&, const HostTensors& inputs);

}  // namespace attn
