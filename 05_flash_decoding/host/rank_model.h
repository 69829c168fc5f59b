// The time of a step on several ranks, predicted from compute, bytes over the links, and latency.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "attn/problem.h"

namespace attn::rank_model {

// What a prediction assumes of a machine. Rates of kernels and of the copy engine were measured on
// H200s; latencies and NCCL's rates were fitted to the times of two and of four, next_message_s to
// those of four H100s. launch_s, and what concerns InfiniBand, is assumed.
struct Machine {
  std::string name = "NVLink, copy engine";
  double forward_flops = 650e12;   // chapter 06's forward pass, bf16, d=128, long sequences
  double backward_flops = 550e12;  // its backward pass
  double launch_s = 5e-6;          // first and last tiles of a launch, idle SMs
  // v13_even_splits: the time of a cache is decode_s, up to ramp_s for its first 128 MiB, and its
  // bytes over read_bytes_per_s.
  double read_bytes_per_s = 4.59e12;
  double decode_s = 12e-6, ramp_s = 8.5e-6;
  // Per direction and rank, of messages below 96 MiB and of larger ones.
  double small_bytes_per_s = 351e9, link_bytes_per_s = 381e9;
  double message_s = 16e-6;      // from the start of a message to its first byte
  double next_message_s = 9e-6;  // decoding, to another rank: the copy engine sends in turn
  double reduce_hop_s = 2e-6;    // an all-reduce, for another rank
  double peer_s = 4.2e-6;        // p7: partial results to peers, flags, the merge
  double read_s(double bytes) const {
    constexpr double kRampBytes = 128 << 20;
    return decode_s + ramp_s * std::min(bytes / kRampBytes, 1.0) + bytes / read_bytes_per_s;
  }
  double transfer_s(double bytes) const {
    return bytes / (bytes < 96 << 20 ? small_bytes_per_s : link_bytes_per_s);
  }
};
const Machine& nvlink_copies();
const Machine& nvlink_nccl();
const Machine& infiniband();
// The same with the memory of another GPU, as the driver names it ("NVIDIA H100 80GB HBM3"): reads
// as an H200, 96 % of the datasheet's bandwidth.
Machine with_memory_of(Machine, const std::string& gpu);

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

// Decoding: the fewest keys from which on two ranks are faster than one GPU, or 0.
int64_t pays_from(const std::string& step, Problem, const Machine& = nvlink_copies());

// --predict-ranks OPTIONS: a table for 2 to 512 ranks.
int table(const std::vector<std::string>& arguments);

// A time that several_gpus.sh has measured, and its prediction.
struct Measured {
  std::string step, transport;
  Problem problem;
  std::vector<double> devices;
  double seconds, one_gpu_s, overlap;
  double predicted_s;
  // Within 15 %, or 5 us below 100 us.
  bool is_predicted() const;
};
// The lines of a file of several_gpus.sh.
std::vector<Measured> read_measured(const std::string& file);
// --compare-ranks FILE: the same as a table.
int compare(const std::vector<std::string>& arguments);

}  // namespace attn::rank_model
