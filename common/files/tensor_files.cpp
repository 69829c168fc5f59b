#include "files/tensor_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <set>
#include <span>

#include "attn/error.h"
#include "check/inputs.h"
#include "files/npy.h"

namespace attn {
namespace {

// Whether heads and tokens are swapped in a file of `--layout bnhd`.
bool swapped(const TensorSpec& spec, bool bnhd) {
  constexpr std::string_view kNames[] = {"q", "k", "v", "o", "do", "dq", "dk", "dv"};
  return bnhd && spec.rank == 4 && spec.contiguous() &&
         std::ranges::find(kNames, spec.name) != std::end(kNames);
}

// Drops dimensions that files do not have: lse [B, Hq, seqlen_q], packed tokens [tokens, heads, d],
// tables.
std::vector<int64_t> shape_in_file(const TensorSpec& spec, bool bnhd) {
  std::vector<int64_t> shape(std::end(spec.shape) - spec.rank, std::end(spec.shape));
  if (spec.name == "lse") shape.pop_back();
  if (swapped(spec, bnhd)) std::swap(shape[1], shape[2]);
  return shape;
}

// Swaps the middle dimensions: the rows of [outer, a, b, columns] as those of [outer, b, a,
// columns].
std::vector<float> with_sides_swapped(const std::vector<float>& x, int64_t outer, int64_t a,
                                      int64_t b, int64_t columns) {
  std::vector<float> out(x.size());
  for (int64_t n = 0; n < outer; ++n)
    for (int64_t i = 0; i < a; ++i)
      for (int64_t j = 0; j < b; ++j)
        std::copy_n(x.begin() + ((n * a + i) * b + j) * columns, columns,
                    out.begin() + ((n * b + j) * a + i) * columns);
  return out;
}

// The element type in a file. Rounded floating-point numbers are stored as float32. Types that
// NumPy lacks are stored as bytes, with a note next to the file.
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

HostTensor load(const std::filesystem::path& path, const TensorSpec& spec, bool bnhd = false) {
  const std::string_view type = type_in_file(spec.dtype);
  std::vector<std::string_view> accepted{type};
  if (is_index(spec.dtype)) accepted.push_back(type == "<i4" ? "<i8" : "<i4");  // either width
  if (type == "<f4") accepted = types_in_files(spec.dtype);
  const NpyBytes file = read_npy_bytes(path, accepted);
  std::vector<int64_t> shape = shape_in_file(spec, bnhd);
  if (spec.dtype == DType::int4) shape.back() = bytes_of(spec.dtype, shape.back());
  if (file.shape != shape)
    throw InputError(fmt::format("{}: has shape [{}], must be [{}]", path.string(),
                                 fmt::join(file.shape, ", "), fmt::join(shape, ", ")));
  TensorSpec stored = spec;
  stored.dtype = file.type == "<f4"   ? DType::fp32
                 : file.type == "<f2" ? DType::fp16
                 : file.type == "<i4" ? DType::int32
                 : file.type == "<i8" ? DType::int64
                                      : spec.dtype;
  HostTensor t = from_bytes(stored, file.bytes);
  t.spec.dtype = spec.dtype;
  if (swapped(spec, bnhd))
    t.data = with_sides_swapped(t.data, shape[0], shape[1], shape[2], shape[3]);
  if (spec.dtype == DType::int32)
    for (const int64_t n : t.numbers)
      if (n != static_cast<int32_t>(n))
        throw InputError(fmt::format("{}: {} is not an int32", path.string(), n));
  round_to(spec.dtype, t.data.data(), t.data.size());
  return t;
}

}  // namespace

std::vector<std::string_view> types_in_files(DType dtype) {
  if (dtype == DType::fp16 || dtype == DType::fp32) return {"<f4", "<f2"};  // exact in both
  return {"<f4"};
}

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

// Sets rows that belong to no sequence to NaN, whatever they were; all other values must be finite.
// `note`: context for the message. `overwritten`: rows that the operation writes before they are
// read.
void check_finite(const std::filesystem::path& path, const Problem& p, HostTensor& t,
                  std::vector<int64_t> overwritten, const std::string& note) {
  poison_unused(p, t);
  std::vector<int64_t> unused =
      t.spec.unused_rows(p.batch, t.spec.contiguous() ? t.spec.shape[1] : t.spec.shape[2]);
  unused.insert(unused.end(), overwritten.begin(), overwritten.end());
  std::ranges::sort(unused);
  // A score of -inf is a masked one; a sink of -inf means no sink.
  const bool scores = t.spec.name == "x" || t.spec.name == "sinks";
  for (std::size_t i = 0; i < t.data.size(); ++i) {
    const float x = t.data[i];
    if (std::isfinite(x) || (scores && x == -std::numeric_limits<float>::infinity())) continue;
    if (std::ranges::binary_search(unused, static_cast<int64_t>(i) / t.spec.columns())) continue;
    const auto row = static_cast<int64_t>(i) / t.spec.columns();
    int64_t in_file = row;  // the row's index in the file
    if (swapped(t.spec, p.files_bnhd)) {
      const int64_t heads = t.spec.shape[1], rows = t.spec.shape[2], head = row / rows % heads;
      in_file = (row / rows / heads * rows + row % rows) * heads + head;
    }
    throw InputError(
        fmt::format("{}: element {} is {} in {}; inputs must be finite{}", path.string(),
                    in_file * t.spec.columns() + static_cast<int64_t>(i) % t.spec.columns(), x,
                    name(t.spec.dtype), note));
  }
}

// A model's table of rotary angles covers its longest context, or the longest sequence where pages
// have more room. The file may lack rows that no token needs; these are computed.
HostTensor load_angles(const std::filesystem::path& path, const TensorSpec& spec,
                       const Problem& p) {
  TensorSpec in_file = spec;
  const std::vector<int64_t> shape = read_npy_shape(path, types_in_files(spec.dtype));
  const int64_t used = p.seqused_k.empty() ? p.seqlen_k : std::ranges::max(p.seqused_k);
  if (shape.size() == 2 && p.seqlen_q <= p.seqlen_k && shape[0] >= std::max(used, p.seqlen_q))
    in_file.shape[2] = shape[0];
  const HostTensor file = load(path, in_file);
  HostTensor t = draw_inputs(p, std::span(&spec, 1)).at(spec.name);
  std::copy_n(file.data.begin(), std::min(file.data.size(), t.data.size()), t.data.begin());
  return t;
}

// A file that would otherwise be ignored: the user expects it to be used.
void check_derived(const std::filesystem::path& path, const HostTensor& file,
                   const HostTensor& options) {
  if (file.data != options.data || file.numbers != options.numbers)
    throw InputError(fmt::format(
        "{}: differs from what the options say{}", path.string(),
        options.spec.name == "block_mask" ? ": --mask block:" + path.string() + " takes it" : ""));
}

}  // namespace

Inputs load_inputs(const std::string& folder, const Problem& p, const Operation& op) {
  HostTensors tensors;
  std::vector<std::string> read;
  std::string note;
  for (const TensorSpec& spec : op.store ? op.originals(p) : op.inputs(p)) {
    const std::filesystem::path path = file_of(folder, spec);
    const bool exists = std::filesystem::exists(path);
    if (spec.derived || (spec.made && !exists)) {
      tensors.merge(draw_inputs(p, std::span(&spec, 1)));
      if (exists) check_derived(path, load(path, spec), tensors.at(spec.name));
      if (spec.name == "seqused_k" && p.one_length())
        note = fmt::format("; no {}: all {} tokens of each sequence are in use",
                           path.filename().string(), p.seqlen_k);
      continue;
    }
    tensors.emplace(spec.name, spec.name == "cos_sin" ? load_angles(path, spec, p)
                                                      : load(path, spec, p.files_bnhd));
    read.push_back(spec.name);
  }
  try {
    if (op.place) op.place(p, tensors);
  } catch (const InputError& e) {
    throw InputError(e.what() + note);
  }
  for (const std::string& name : read) {
    const bool changes = op.changes && (name == "k" || name == "v");
    check_finite(file_of(folder, tensors.at(name).spec), p, tensors.at(name),
                 changes ? op.changes(p, tensors, name) : std::vector<int64_t>(), note);
  }
  if (!op.store) return {std::move(tensors), {}};
  return {op.store(p, tensors), std::move(tensors)};
}

std::vector<std::string> files_not_read(const std::string& folder, const Problem& p,
                                        const Operation& op) {
  std::set<std::filesystem::path> known;
  for (const TensorSpec& spec : op.inputs(p)) known.insert(file_of(folder, spec));
  if (op.store)
    for (const TensorSpec& spec : op.originals(p)) known.insert(file_of(folder, spec));
  std::vector<std::string> others;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().extension() == ".npy" && !known.contains(entry.path()))
      others.push_back(entry.path().filename().string());
  std::ranges::sort(others);
  return others;
}

void save_tensors(const std::filesystem::path& folder, const HostTensors& tensors, bool bnhd) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw InputError(fmt::format("--save {}: {}", folder.string(), error.message()));
  for (const auto& [name, t] : tensors) {
    const DType type = t.spec.dtype;
    std::vector<int64_t> shape = shape_in_file(t.spec, bnhd);
    if (type_in_file(type) == "<f4") {
      const bool swap = swapped(t.spec, bnhd);
      const std::vector<float> other =
          swap ? with_sides_swapped(t.data, shape[0], shape[2], shape[1], shape[3])
               : std::vector<float>();
      write_npy(file_of(folder, t.spec), shape, swap ? other.data() : t.data.data());
      continue;
    }
    if (type == DType::int4) shape.back() = bytes_of(type, shape.back());
    write_npy_bytes(file_of(folder, t.spec), shape, type_in_file(type), to_bytes(t).data());
    if (const std::string_view note = note_on(type); !note.empty())
      std::ofstream(folder / (name + ".npy.txt")) << name << ".npy: " << note << "\n";
  }
}

}  // namespace attn
