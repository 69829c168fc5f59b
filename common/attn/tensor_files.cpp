#include "attn/tensor_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "attn/error.h"
#include "attn/inputs.h"
#include "attn/npy.h"

namespace attn {
namespace {

// Without the sides that a tensor has for form: lse [B, Hq, seqlen_q], packed tokens [tokens, heads, d].
std::vector<int64_t> shape_in_file(const TensorSpec& spec) {
  if (follows_from_options(spec.name)) return {spec.columns()};
  std::vector<int64_t> shape(std::begin(spec.shape), std::end(spec.shape));
  if (spec.name == "lse") shape.pop_back();
  if (!spec.cu_seqlens.empty()) shape.erase(shape.begin());
  return shape;
}

}  // namespace

HostTensors load_inputs(const std::string& folder, const Problem& p, const std::vector<TensorSpec>& specs) {
  HostTensors tensors;
  for (const TensorSpec& spec : specs) {
    if (follows_from_options(spec.name)) {
      tensors.merge(draw_inputs(p, std::span(&spec, 1)));
      continue;
    }
    const auto path = std::filesystem::path(folder) / (spec.name + ".npy");
    NpyArray array = read_npy(path);
    if (const std::vector<int64_t> shape = shape_in_file(spec); array.shape != shape)
      throw InputError(fmt::format("{}: has shape [{}], must be [{}]", path.string(),
                                   fmt::join(array.shape, ", "), fmt::join(shape, ", ")));
    HostTensor t{spec, std::move(array.data)};
    round_to(spec.dtype, t.data.data(), t.data.size());
    // A score of -inf is a masked one; nothing else may be infinite.
    const bool scores = spec.name == "x";
    const auto bad = std::find_if_not(t.data.begin(), t.data.end(), [=](float x) {
      return std::isfinite(x) || (scores && x == -std::numeric_limits<float>::infinity());
    });
    if (bad != t.data.end())
      throw InputError(fmt::format("{}: element {} is {} in {}; inputs must be finite", path.string(),
                                   bad - t.data.begin(), *bad, name(spec.dtype)));
    tensors.emplace(spec.name, std::move(t));
  }
  return tensors;
}

void save_tensors(const std::filesystem::path& folder, const HostTensors& tensors) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error)
    throw InputError(fmt::format("--save {}: {}", folder.string(), error.message()));
  for (const auto& [name, t] : tensors) {
    write_npy(folder / (name + ".npy"), shape_in_file(t.spec), t.data.data());
  }
}

}  // namespace attn
