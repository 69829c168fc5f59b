// Orders of the tokens of a canvas. Blocks of 128 tokens are self-similar if their tokens are
// neighbours in all three dimensions.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "attn/problem.h"
#include "attn/tensor.h"

namespace attn {

/// `rows` as given, along a Hilbert curve, or random.
enum class TokenOrder { rows, hilbert, random };

/// The token order of a step that reorders: `--order`, or a Hilbert curve.
TokenOrder order_of(const Problem&);

/// Position on a Hilbert curve of 2^bits points per side (Skilling, *Programming the Hilbert
// curve*, AIP Conference Proceedings 707, 2004). Consecutive points are neighbours.
uint64_t hilbert_place(std::array<uint32_t, 3> point, int bits);

/// The n-th token, for each n: the canvas of a problem's inputs (check/field.h) in that order,
// then text. If the canvas is not a cube of a power of two, points outside it are left out, so the
// curve jumps now and then.
std::vector<int64_t> token_order(const Problem&, TokenOrder);

/// Rows of all tensors in that order.
HostTensors in_order(const Problem&, const HostTensors& inputs, TokenOrder);

}  // namespace attn
