#include "files/tensor_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <span>

#include "attn/error.h"
#include "check/inputs.h"
#include "files/npy.h"

namespace attn {
namespace {

// Without the sides that a tensor has for form: lse [B, Hq, seqlen_q], packed tokens [tokens,
// heads, d], tables.
std::vector<int64_t> shape_in_file(const TensorSpec& spec) {
  std::vector<int64_t> shape(std::end(spec.shape) - spec.rank, std::end(spec.shape));
  if (spec.name == "lse") shape.pop_back();
  return shape;
}

// How the elements of a type lie in a file. Rounded floating-point numbers as float32; what NumPy
// has no type for as bytes, with a note beside the file.
std::string_view type_in_file(DType t) {
  switch (t) {
    case DType::fp32:
    case DType::fp16:
    case DType::bf16:
      return "<f4";
    case DType::int32:
      return "<i4";
    case DType::int64:
      return "<i8";
    case DType::int8:
      return "|i1";
    case DType::e4m3:
    case DType::e5m2:
    case DType::int4:
      return "|u1";
  }
  return "";
}
std::string_view note_on(DType t) {
  switch (t) {
    case DType::e4m3:
      return "each byte is an e4m3: sign, 4 bits of exponent, 3 of mantissa; NaN is 7F and FF";
    case DType::e5m2:
      return "each byte is an e5m2: the upper byte of a float16";
    case DType::int4:
      return "each byte is two int4, -8 to 7: the first in the low half, the second in the high "
             "half";
    default:
      return "";  // NumPy has the type
  }
}

std::filesystem::path file_of(const std::filesystem::path& folder, const TensorSpec& spec) {
  return folder / ((spec.file.empty() ? spec.name : spec.file) + ".npy");
}

HostTensor load(const std::filesystem::path& path, const TensorSpec& spec) {
  const std::string_view type = type_in_file(spec.dtype);
  // Whole numbers may be written in either width.
  const std::vector<std::string_view> accepted =
      is_index(spec.dtype) ? std::vector<std::string_view>{type, type == "<i4" ? "<i8" : "<i4"}
                           : std::vector{type};
  const NpyBytes file = read_npy_bytes(path, accepted);
  std::vector<int64_t> shape = shape_in_file(spec);
  if (spec.dtype == DType::int4) shape.back() = bytes_of(spec.dtype, shape.back());
  if (file.shape != shape)
    throw InputError(fmt::format("{}: has shape [{}], must be [{}]", path.string(),
                                 fmt::join(file.shape, ", "), fmt::join(shape, ", ")));
  TensorSpec stored = spec;
  stored.dtype = file.type == "<f4"   ? DType::fp32
                 : file.type == "<i4" ? DType::int32
                 : file.type == "<i8" ? DType::int64
                                      : spec.dtype;
  HostTensor t = from_bytes(stored, file.bytes);
  t.spec.dtype = spec.dtype;
  if (spec.dtype == DType::int32)
    for (const int64_t n : t.numbers)
      if (n != static_cast<int32_t>(n))
        throw InputError(fmt::format("{}: {} is no int32", path.string(), n));
  round_to(spec.dtype, t.data.data(), t.data.size());
  return t;
}

}  // namespace

std::vector<int64_t> load_lengths(const std::filesystem::path& path, int64_t count,
                                  std::optional<int64_t> most) {
  const HostTensor t = load(path, TensorSpec{.name = path.stem().string(),
                                             .shape = {1, 1, 1, count},
                                             .dtype = DType::int32,
                                             .rank = 1});
  for (std::size_t b = 0; most && b < t.numbers.size(); ++b)
    if (t.numbers[b] < 0 || t.numbers[b] > *most)
      throw InputError(fmt::format("{}: entry {} is {}, must be from 0 to {}", path.string(), b,
                                   t.numbers[b], *most));
  return t.numbers;
}

namespace {

// Rows that belong to no sequence become NaN, whatever they were; nothing else may be infinite.
// `note`: what a reader of the message should know.
void check_finite(const std::filesystem::path& path, const Problem& p, HostTensor& t,
                  const std::string& note) {
  poison_unused(p, t);
  const std::vector<int64_t> unused =
      t.spec.unused_rows(p.batch, t.spec.contiguous() ? t.spec.shape[1] : t.spec.shape[2]);
  const bool scores = t.spec.name == "x";  // of which -inf is a masked one
  for (std::size_t i = 0; i < t.data.size(); ++i) {
    const float x = t.data[i];
    if (std::isfinite(x) || (scores && x == -std::numeric_limits<float>::infinity())) continue;
    if (std::ranges::binary_search(unused, static_cast<int64_t>(i) / t.spec.columns())) continue;
    throw InputError(fmt::format("{}: element {} is {} in {}; inputs must be finite{}",
                                 path.string(), i, x, name(t.spec.dtype), note));
  }
}

}  // namespace

Inputs load_inputs(const std::string& folder, const Problem& p, const Operation& op) {
  HostTensors tensors;
  std::vector<std::string> read;
  std::string note;
  for (const TensorSpec& spec : op.store ? op.originals(p) : op.inputs(p)) {
    const std::filesystem::path path = file_of(folder, spec);
    if (spec.derived || (spec.made && !std::filesystem::exists(path))) {
      tensors.merge(draw_inputs(p, std::span(&spec, 1)));
      if (spec.name == "seqused_k" && p.one_length())
        note = fmt::format("; no {}: all {} tokens of each sequence are in use",
                           path.filename().string(), p.seqlen_k);
      continue;
    }
    tensors.emplace(spec.name, load(path, spec));
    read.push_back(spec.name);
  }
  try {
    if (op.place) op.place(p, tensors);
  } catch (const InputError& e) {
    throw InputError(e.what() + note);
  }
  for (const std::string& name : read)
    check_finite(file_of(folder, tensors.at(name).spec), p, tensors.at(name), note);
  if (!op.store) return {std::move(tensors), {}};
  return {op.store(p, tensors), std::move(tensors)};
}

void save_tensors(const std::filesystem::path& folder, const HostTensors& tensors) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw InputError(fmt::format("--save {}: {}", folder.string(), error.message()));
  for (const auto& [name, t] : tensors) {
    const DType type = t.spec.dtype;
    std::vector<int64_t> shape = shape_in_file(t.spec);
    if (type_in_file(type) == "<f4") {
      write_npy(file_of(folder, t.spec), shape, t.data.data());
      continue;
    }
    if (type == DType::int4) shape.back() = bytes_of(type, shape.back());
    write_npy_bytes(file_of(folder, t.spec), shape, type_in_file(type), to_bytes(t).data());
    if (const std::string_view note = note_on(type); !note.empty())
      std::ofstream(folder / (name + ".npy.txt")) << name << ".npy: " << note << "\n";
  }
}

}  // namespace attn
