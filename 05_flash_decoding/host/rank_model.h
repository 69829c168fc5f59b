// The time of a step on several ranks, predicted from compute, bytes over the links, and latency.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "attn/problem.h"

namespace attn::rank_model {

// What a prediction assumes of a machine. The rates of the kernels are those of one H200 in this
// suite's tables, the links' as measured on 8 x H200 of one host (NCCL 2.28, no multicast).
struct Machine {
  std::string name = "NVLink, copy engine";
  double forward_flops = 650e12;   // chapter 06's forward pass, bf16, d=128, long sequences
  double backward_flops = 550e12;  // its backward pass
  double read_bytes_per_s = 4.1e12;
  double link_bytes_per_s = 358e9;  // per direction and rank
  double message_s = 12e-6;         // from the start of a message to its first byte
  double launch_s = 5e-6;           // first and last tiles of a launch, idle SMs
};
const Machine& nvlink_copies();
const Machine& nvlink_nccl();
const Machine& infiniband();

struct Prediction {
  double compute_s = 0;   // of the rank with the most work
  double transfer_s = 0;  // of one rank, sends and receives at the same time
  double total_s = 0;     // with the overlap that the step has
  double bytes = 0;       // that a rank sends
  double seconds() const { return total_s; }
};
// Nothing for a step without a model.
std::optional<Prediction> predict(const std::string& step, const Problem&, int world,
                                  const Machine& = nvlink_copies());

// --predict-ranks OPTIONS: a table for 2 to 512 ranks.
int table(const std::vector<std::string>& arguments);

}  // namespace attn::rank_model
