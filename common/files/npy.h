// Reads and writes NumPy's .npy files, the format of tensors on disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "attn/error.h"

namespace attn {

/// The contents of a .npy file.
struct NpyArray {
  std::vector<int64_t> shape;  // at most 8 dimensions; empty for a single number
  std::vector<float> data;     // product(shape) values in C order: the last dimension is contiguous
};

/// Reads a .npy file: format version 1.0, 2.0 or 3.0, little-endian float32, C order, rank 0 to 8,
/// any dimension may be 0. Throws InputError with one line for everything else, including a file
/// that is too short or too long for its shape. Every size in the file is checked against the
/// file's size before it is used.
NpyArray read_npy(const std::filesystem::path& path);

/// Writes the product(shape) values at `data`, in C order, as .npy format version 1.0, replacing
/// the file at `path`. `data` may be null if the product is 0. Throws InputError if read_npy would
/// not accept the shape, or if the file cannot be written completely (missing folder, full disk); a
/// partly written file is removed.
void write_npy(const std::filesystem::path& path, const std::vector<int64_t>& shape,
               const float* data);

/// An array of any NumPy number type, as the bytes of the file.
struct NpyBytes {
  std::vector<int64_t> shape;
  std::string type;  // "<i4", "|u1" ...
  std::vector<std::byte> bytes;
};

/// The same for the element types `accepted`, little-endian; the message "convert with
/// .astype(np.NAME)" names the first.
NpyBytes read_npy_bytes(const std::filesystem::path& path,
                        const std::vector<std::string_view>& accepted);
/// Reads only the shape from a file's header, and checks it against the file's size.
std::vector<int64_t> read_npy_shape(const std::filesystem::path& path,
                                    const std::vector<std::string_view>& accepted);
void write_npy_bytes(const std::filesystem::path& path, const std::vector<int64_t>& shape,
                     std::string_view type, const void* bytes);

}  // namespace attn
