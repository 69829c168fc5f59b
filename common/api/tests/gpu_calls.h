/// \file
/// Problems of steps on the GPU, for the tests and the benchmark of libattention.
#pragma once

#include <stdexcept>

#include "api/tests/calls.h"

namespace attn::tests {

inline const api::NamedStep& step_named(const std::string& name) {
  for (const api::NamedStep& named : api::all_steps())
    if (named.name == name) return named;
  throw std::invalid_argument(name);
}
inline bool runs_here(const Step& step) {
  const GpuInfo& gpu = gpu_info();
  return step.launch.gpu && !lacks(step, gpu.name, 10 * gpu.cc_major + gpu.cc_minor);
}

/// A problem of a step on the GPU, with its tensors and the O of one run. O and lse of the forward
/// pass, which a backward step reads, have no useful values.
struct OnGpu {
  Problem p;
  attn_problem problem;
  CallTensors tensors;
  std::vector<std::byte> o;
  OnGpu(const std::string& name, api::Call call) : p(*problem_for(*step_named(name).step)) {
    const Operation& op = *step_named(name).step->operation;
    problem = abi_problem(p, op);
    problem.backend = ATTN_GPU;
    problem.step = step_named(name).name.c_str();
    tensors = tensors_of(op, p, draw(op, p).tensors, {}, Backend::gpu);
    for (const TensorSpec& spec : op.saved(p))
      tensors.make(spec.name, static_cast<std::size_t>(spec.bytes()));
    if (const std::string fault = run(call, problem, tensors.tensors); !fault.empty())
      throw std::runtime_error(name + ": " + fault);
    synchronize(Backend::gpu);
    o = tensors.bytes("o");
  }
};

}  // namespace attn::tests
