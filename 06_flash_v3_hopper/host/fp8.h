// The FP8 steps' part of chapter 06's table: see FP8.md.
#pragma once

#include <vector>

#include "attn/step.h"

namespace attn {

std::vector<Step> fp8_steps();

/// The q, k, v that a step multiplies which stores each tensor in e4m3 with one scale.
HostTensors in_tensor_scales(const Problem&, const HostTensors& inputs);
/// The same of a step with a scale for each tile of 128 rows; and of one that rotates Q and K
/// before.
HostTensors in_tile_scales(const Problem&, const HostTensors& inputs);
HostTensors rotated_in_tile_scales(const Problem&, const HostTensors& inputs);
/// As the last one, but V with a mean and a scale for each channel of 4096 keys.
HostTensors rotated_in_chunks(const Problem&, const HostTensors& inputs);
/// The same after a rotary embedding, if there is one: rounded to bf16 first, or not.
HostTensors turned_apart(const Problem&, const HostTensors& inputs);
HostTensors turned_in_registers(const Problem&, const HostTensors& inputs);

}  // namespace attn
