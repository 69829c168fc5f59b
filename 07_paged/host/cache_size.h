// The size of a KV cache.
#pragma once

#include <string>
#include <vector>

namespace attn::paged {

// `07_paged --cache-size [--layers N] [--heads N] [--kv-heads N] [--head-dim N] [--latent N]
// [--tokens N] [--batch N]`: bytes of a KV cache with MHA, GQA, MQA and MLA, in 16, 8 and 4 bits.
// Scales and the unused rows of last pages are not counted. Throws InputError.
int cache_size_command(const std::vector<std::string>& arguments);

}  // namespace attn::paged
