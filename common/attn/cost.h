/// \file
/// Cost model of a step: its operations and bytes, stated before they are measured.
#pragma once

#include <string>
#include <vector>

namespace attn {

/// Work of one phase of a step (usually one kernel). The roofline time of a phase is the maximum of
/// work / rate over all resources; that of a step is the sum over its phases.
struct Phase {
  std::string name;
  double tensor_flop = 0;  ///< on tensor cores, in the element type of the problem
  double fp32_flop = 0;    ///< on the FP32 units; a fused multiply-add counts 2
  double exp = 0;          ///< exponentials, on the special-function units
  double hbm_read = 0;     ///< bytes moved by the step's access pattern
  double hbm_write = 0;
  double l2_bytes = 0;  ///< bytes between L1 and L2; 0: not modelled

  /// Adds the work of the same phase for another part of a problem.
  Phase& operator+=(const Phase& other) {
    name = other.name;
    tensor_flop += other.tensor_flop;
    fp32_flop += other.fp32_flop;
    exp += other.exp;
    hbm_read += other.hbm_read;
    hbm_write += other.hbm_write;
    l2_bytes += other.l2_bytes;
    return *this;
  }
};

/// Properties of a GPU, besides its roofs, that a cost model needs. Defaults: H200.
struct Machine {
  int num_sms = 132;
  double l2_bytes = 60 << 20;
};

/// Phases of a step in launch order, with the names given to Arguments::phase().
using Cost = std::vector<Phase>;

}  // namespace attn
