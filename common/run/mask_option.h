/// \file
/// `--mask`: block masks, random or from a file, and column masks.
#pragma once

#include <memory>
#include <string>

#include "attn/mask.h"

namespace attn {

/// Parses `--mask TEXT` for a problem whose sizes are known:
///
///     random:DENSITY[,BLOCK_M,BLOCK_N]   each block open with that probability (0 to 1),
///                                        independently per head
///     block:FILE[,BLOCK_M,BLOCK_N]       block_mask [B or 1, Hq or 1, num_m_blocks, num_n_blocks],
///                                        int8, uint8 or bool: 0 closed, 1 open
///     flashmask:KIND                     column intervals: a kind of FlashMask's (arXiv
///                                        2410.01359, figure 1), drawn with --seed; causal kinds
///                                        also need --causal
///     flashmask:FOLDER                   user-defined column intervals: hidden_begin.npy and
///                                        hidden_end.npy [B or 1, Hq or 1, 1 or 2, seqlen_k],
///                                        int32 or int64; the key is masked for queries from begin
///                                        to end
///     sta:CANVAS,TILE,WINDOW[,WINDOW]    windows of tiles (attn/sliding_tiles.h), sides as
///                                        30x48x80; several windows are cycled over the heads;
///                                        keys after the canvas are text
///
/// `load`: the folder of --load, or "". Its hidden_begin.npy and hidden_end.npy replace the
/// intervals that a KIND would draw. Blocks have 128 queries and 128 keys by default. Throws
/// InputError.
std::shared_ptr<const KeyMask> read_mask(const std::string& text, const Problem&,
                                         const std::string& load = "");

}  // namespace attn
