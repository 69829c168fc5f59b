/// \file
/// Tensors as .npy files, one per tensor, for `--load` and `--save`: floating-point numbers as
/// float32, indices and lengths as integers, 8-bit and 4-bit types as stored.
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

/// Reads FOLDER/NAME.npy for each input of an operation, or for the originals of its inputs,
/// rounded to its type. Derived inputs without a file are computed. Throws InputError if a file is
/// missing, has another shape or is not finite.
Inputs load_inputs(const std::string& folder, const Problem&, const Operation&);

/// The .npy files of the folder for which the operation has no tensor, sorted: for example the file
/// of the sinks if --sinks is missing. The user may expect them to be used.
std::vector<std::string> files_not_read(const std::string& folder, const Problem&,
                                        const Operation&);

/// `count` integers, one per sequence; with `most`, each from 0 to `most`.
std::vector<int64_t> load_lengths(const std::filesystem::path&, int64_t count,
                                  std::optional<int64_t> most = {});

/// The element types that a file may have for a tensor of type `dtype`: float32, and also float16
/// for fp16 and fp32.
std::vector<std::string_view> types_in_files(DType);

/// Writes FOLDER/NAME.npy for each tensor, and creates the folder. `bnhd`: see Problem::files_bnhd.
/// Throws InputError.
void save_tensors(const std::filesystem::path& folder, const HostTensors&, bool bnhd = false);

}  // namespace attn
