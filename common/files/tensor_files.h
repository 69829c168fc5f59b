/// \file
/// Tensors as .npy files, one each, `--load` and `--save`: numbers in float32, indices and lengths
/// as whole numbers, what is stored in 8 or 4 bits as it is stored.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attn/problem.h"
#include "attn/tensor.h"
#include "check/operation.h"

namespace attn {

/// Reads FOLDER/NAME.npy for each input of an operation, or for what it makes these of, rounded to
/// its type; what is not drawn is made, where there is no file. Throws InputError where a file is
/// missing, has another shape or is not finite.
Inputs load_inputs(const std::string& folder, const Problem&, const Operation&);

/// The .npy files of the folder that the operation has no tensor for, sorted: without --sinks that
/// of the sinks, say. The user may mean them.
std::vector<std::string> files_not_read(const std::string& folder, const Problem&,
                                        const Operation&);

/// `count` whole numbers, one a sequence; with `most` each is from 0 to that.
std::vector<int64_t> load_lengths(const std::filesystem::path&, int64_t count,
                                  std::optional<int64_t> most = {});

/// The element types that a file may have of a tensor that a kernel takes in `dtype`: float32, and
/// float16 for fp16 and fp32.
std::vector<std::string_view> types_in_files(DType);

/// Writes FOLDER/NAME.npy for each tensor; makes the folder. `bnhd`: see Problem::files_bnhd.
/// Throws InputError.
void save_tensors(const std::filesystem::path& folder, const HostTensors&, bool bnhd = false);

}  // namespace attn
