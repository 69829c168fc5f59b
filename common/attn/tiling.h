/// \file
/// A step's tiles of S, and the HBM traffic that their order causes: which K and V blocks a tile
/// reads, and which of these reads miss L2.
///
/// A launch reports its tiles itself (Arguments::report_tiling), so the model and the launch cannot
/// disagree.
#pragma once

#include <optional>

#include "attn/problem.h"
#include "attn/step.h"

namespace attn {

/// What `launch` would run for `p`, which it says itself; nothing where it refuses `p`. Of tiled
/// steps only.
std::optional<Tiling> tiling_of(const Launch& launch, const Problem& p);

/// Those of a step, of a varlen batch as of its longest lengths; nothing if it is not tiled.
std::optional<Tiling> tiling_of(const Step& step, const Problem& p);

/// Tiles of S of one head with at least one visible score; all tiles if not `skips`.
double visits(const Problem&, const Tiling&, bool skips = true);

/// Bytes of K and V that come from HBM, at least all of them once.
///
/// Blocks take tiles of queries in order, `blocks_per_sm` on each SM, and go through their keys at
/// one pace. L2 is modelled as a list of the K/V blocks, Q and O tiles that were used last (least
/// recently used goes first). Its size is kL2Share of the nominal one: an SM reads through its own
/// half of L2, so that what both halves use is there twice. The share is fitted to counters of an
/// H200; test_model compares all steps with theirs.
double kv_bytes_from_hbm(const Problem&, const Tiling&, const Machine&);
inline constexpr double kL2Share = 0.55;

}  // namespace attn
