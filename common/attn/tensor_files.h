/// \file
/// Tensors as .npy files, one each, in float32: `--load` and `--save`.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "attn/problem.h"
#include "attn/tensor.h"

namespace attn {

/// Reads FOLDER/NAME.npy for each of `specs`, rounded to its type; what follows from the options is made. Throws
/// InputError where a file is missing, has another shape or is not finite.
HostTensors load_inputs(const std::string& folder, const Problem&, const std::vector<TensorSpec>& specs);

/// Writes FOLDER/NAME.npy for each tensor; makes the folder. Throws InputError.
void save_tensors(const std::filesystem::path& folder, const HostTensors&);

}  // namespace attn
