// Timing on several GPUs: commands of the chapter's program.
#pragma once

#include <string>
#include <vector>

namespace attn::measure {

// --measure-ranks OPTIONS: times the steps on several ranks, next to one GPU.
int ranks(const std::vector<std::string>& arguments);
// --measure-links --devices N,N,...: bandwidth of a ring of messages, by size.
int links(const std::vector<std::string>& arguments);

}  // namespace attn::measure
