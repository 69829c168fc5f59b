// Orders of the tokens of a canvas: blocks of 128 tokens are alike if what lies in them is near
// each other in all three dimensions.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "attn/problem.h"
#include "attn/tensor.h"

namespace attn {

/// `rows` as they are given, along a Hilbert curve, or at random.
enum class TokenOrder { rows, hilbert, random };

/// The order into which a step puts the tokens of a problem, if it does: `--order`, or a curve.
TokenOrder order_of(const Problem&);

/// Place on a Hilbert curve of 2^bits points on each side (Skilling, *Programming the Hilbert
/// curve*, AIP Conference Proceedings 707, 2004): points that follow each other are neighbours.
uint64_t hilbert_place(std::array<uint32_t, 3> point, int bits);

/// Which token comes n-th, for each n: those of the canvas of a problem's inputs (check/field.h),
/// in that order, then text. Of a canvas that is no cube of a power of two the curve's places are
/// taken in their order, so that it jumps now and then.
std::vector<int64_t> token_order(const Problem&, TokenOrder);

/// Rows of all tensors in that order.
HostTensors in_order(const Problem&, const HostTensors& inputs, TokenOrder);

}  // namespace attn
