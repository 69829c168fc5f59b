// Reads and writes NumPy's .npy files: how tensors enter and leave the programs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "attn/error.h"

namespace attn {

/// An array as it lies in a .npy file.
struct NpyArray {
  std::vector<int64_t> shape;  // at most 8 dimensions; empty for a single number
  std::vector<float> data;     // product(shape) values in C order: the last dimension is contiguous
};

/// Reads a .npy file: format version 1.0, 2.0 or 3.0, little-endian float32, C order, rank 0 to 8,
/// any dimension may be 0.
/// Throws InputError with one line for everything else, among it a file that is too short or too
/// long for its shape. No size found in the file is believed before it is compared with the file's.
NpyArray read_npy(const std::filesystem::path& path);

/// Writes the product(shape) values at `data`, in C order, as .npy format version 1.0, in place of
/// what `path` held. `data` may be null where the product is 0.
/// Throws InputError where the shape is not one that read_npy accepts, or where the file cannot be
/// written whole (missing folder, full disk); a half-written file is removed.
void write_npy(const std::filesystem::path& path, const std::vector<int64_t>& shape,
               const float* data);

/// An array of any of NumPy's numbers, as its bytes lie in the file.
struct NpyBytes {
  std::vector<int64_t> shape;
  std::string type;  // "<i4", "|u1" ...
  std::vector<std::byte> bytes;
};

/// The same for the element types `accepted`, little-endian; "convert with .astype(np.NAME)" names
/// the first.
NpyBytes read_npy_bytes(const std::filesystem::path& path,
                        const std::vector<std::string_view>& accepted);
/// The shape in a file's header, which is held to the file's size: the data is not read.
std::vector<int64_t> read_npy_shape(const std::filesystem::path& path,
                                    const std::vector<std::string_view>& accepted);
void write_npy_bytes(const std::filesystem::path& path, const std::vector<int64_t>& shape,
                     std::string_view type, const void* bytes);

}  // namespace attn
