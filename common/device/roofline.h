/// \file
/// Roofs and predictions. A resource with a rate needs work / rate seconds for its share of a
/// phase; the phase takes at least the longest of these times. docs/roofline.md explains the method
/// with an example.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "attn/cost.h"
#include "device/gpus.h"
#include "attn/problem.h"

namespace attn {

/// The rate of a resource per second. 0: unknown, and then it never binds.
struct Roof {
  double rate = 0;
  std::string source;  ///< "measured", or the datasheet's name
};

/// The roofs of one GPU.
struct Roofs {
  std::string gpu;
  Roof hbm_copy;  ///< bytes read + bytes written by a copy
  Roof hbm_read;  ///< bytes read by a sum
  Roof l2;
  Roof fp32;
  Roof tensor_fp16, tensor_bf16, tensor_e4m3;
  Roof tensor_int8;  ///< from a datasheet; 0: that of e4m3
  Roof exp;
  Machine machine;
  /// For int8: Q K^T in int8, P V in bf16.
  Roof tensor(DType t) const {
    const double whole = tensor_int8.rate > 0 ? tensor_int8.rate : tensor_e4m3.rate;
    if (t == DType::int8 && whole > 0 && tensor_bf16.rate > 0)
      return {2 / (1 / whole + 1 / tensor_bf16.rate), tensor_bf16.source};
    return t == DType::fp16 ? tensor_fp16 : t == DType::e4m3 ? tensor_e4m3 : tensor_bf16;
  }
};

/// Roofs from the datasheet.
Roofs datasheet_roofs(const GpuSpec&);
/// The table entry of the GPU that the CUDA runtime names `device_name`; nullptr if there is none.
const GpuSpec* spec_of_device(const std::string& device_name);
/// Measures the roofs of this GPU with our own kernels and cuBLAS, in about a second: copy and read
/// of 1 GiB, repeated reads of a third of L2, chains of FMA and of exp2, an 8192-cubed GEMM on
/// random data. Medians. Throws DeviceError.
Roofs measure_roofs();

/// Lower bound of the time of a phase or of a step.
struct Prediction {
  double seconds = 0;
  /// "HBM", "L2", "FP32", "tensor", "exp"; for a step, the roof with the largest share of its time.
  std::string binding;
  struct OfPhase {
    std::string name;
    double seconds;
    std::string binding;
  };
  std::vector<OfPhase> phases;
};
Prediction predict(const Cost&, const Roofs&, DType);

/// Time to read `bytes` from HBM at the read roof; 0 if there is none.
double read_seconds(double bytes, const Roofs&);

/// Why a time can be shorter than a roof allows; explains a share above 100 %.
std::string_view above_roof(std::string_view binding);

/// HBM traffic of a step by its own model, in bytes.
double modelled_bytes(const Cost&);

/// "12.34 us": a time with a fitting unit.
std::string time_text(double seconds);

}  // namespace attn
