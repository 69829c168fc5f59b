#include "run/file_shapes.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <vector>

#include "attn/error.h"
#include "check/operation.h"
#include "files/npy.h"
#include "files/tensor_files.h"

namespace attn {
namespace {

using Sizes = std::vector<int64_t>;

std::string text(const Sizes& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }
std::string in(const std::string& folder, const std::string& name) {
  return (std::filesystem::path(folder) / (name + ".npy")).string();
}

// The shape of folder/name.npy, which must have as many dimensions as `sides` has names.
Sizes shape_of(const std::string& folder, const std::string& name, const Problem& p,
               std::size_t rank, const char* sides) {
  const Sizes shape = read_npy_shape(in(folder, name), types_in_files(p.dtype));
  if (shape.size() != rank)
    throw InputError(
        fmt::format("{}: has shape {}, must be [{}]", in(folder, name), text(shape), sides));
  return shape;
}

// Sets `field` to the file's value. A different value on the command line is an error.
void take(int64_t& field, int64_t value, const std::string& file,
          const std::set<std::string>& given, std::initializer_list<const char*> options) {
  for (const char* option : options)
    if (given.contains(option) && field != value)
      throw InputError(fmt::format("{} {}: {} says {}", option, field, file, value));
  field = value;
}

void agree(const std::string& folder, const char* a, const Sizes& of_a, const char* b,
           const Sizes& of_b, std::initializer_list<std::pair<std::size_t, const char*>> sides) {
  for (const auto& [side, name] : sides)
    if (of_a[side] != of_b[side])
      throw InputError(fmt::format("{}: has shape {} and {} has {}: they must agree in {}",
                                   in(folder, b), text(of_b), in(folder, a), text(of_a), name));
}
void same(const std::string& folder, const char* a, const Sizes& of_a, const char* b,
          const Sizes& of_b) {
  if (of_a != of_b)
    throw InputError(fmt::format("{}: has shape {} and {} has {}: they must have the same shape",
                                 in(folder, b), text(of_b), in(folder, a), text(of_a)));
}

void take_rows(const std::string& folder, const std::string& name,
               const std::set<std::string>& given, Problem& p) {
  const Sizes x = shape_of(folder, name, p, 4, "batch, heads, rows, columns");
  const std::string file = in(folder, name);
  take(p.batch, x[0], file, given, {"--batch"});
  take(p.heads, x[1], file, given, {"--heads"});
  take(p.kv_heads, x[1], file, given, {"--kv-heads"});
  take(p.seqlen_q, x[2], file, given, {"--seqlen-q", "--seqlen", "--rows"});
  take(p.seqlen_k, x[3], file, given, {"--seqlen-k", "--seqlen", "--cols"});
}

// The list gives the number of tokens; the reader of the files compares it with them.
void take_packed(const std::string& folder, const Sizes& q, const Sizes& k,
                 const std::set<std::string>& given, Problem& p) {
  agree(folder, "q", q, "k", k, {{2, "head_dim"}});
  take(p.heads, q[1], in(folder, "q"), given, {"--heads"});
  take(p.kv_heads, k[1], in(folder, "k"), given, {"--kv-heads"});
  take(p.head_dim, q[2], in(folder, "q"), given, {"--head-dim"});
}

// Detects shapes where heads and tokens can be confused. A reading is valid if the number of query
// heads is a multiple of the number of key/value heads.
std::string other_reading(const std::string& folder, const Sizes& q, const Sizes& k,
                          const std::set<std::string>& given) {
  const auto valid = [](int64_t heads, int64_t kv_heads) {
    return kv_heads > 0 && heads > 0 && heads % kv_heads == 0;
  };
  if (given.contains("--layout") || q[1] == q[2] || !valid(q[2], k[2])) return "";
  const std::string layouts = fmt::format(
      "{}: {} is read as [batch, heads, seqlen, head_dim], {} heads and {} queries; if it is "
      "FlashAttention's [batch, seqlen, heads, head_dim], say --layout bnhd",
      in(folder, "q"), text(q), q[1], q[2]);
  if (!valid(q[1], k[1]))
    throw InputError(
        fmt::format("{} ({} heads are no multiple of the {} of k.npy)", layouts, q[1], k[1]));
  if (q[2] <= 1 || q[1] <= q[2]) return "";
  return "warning: " + layouts + " (--layout bhnd is silent)";
}

std::string take_attention(const std::string& folder, const Operation& operation,
                           const std::set<std::string>& given, Problem& p) {
  const bool packed = p.varlen();
  const char* const sides = packed         ? "tokens, heads, head_dim"
                            : p.files_bnhd ? "batch, seqlen, heads, head_dim"
                                           : "batch, heads, seqlen, head_dim";
  const auto shape = [&](const char* name) {
    return shape_of(folder, name, p, packed ? 3 : 4, sides);
  };
  Sizes q = shape("q"), k = shape("k");
  same(folder, "k", k, "v", shape("v"));
  const std::vector<TensorSpec> inputs = operation.inputs(p.at_least_one());
  const auto has = [&](const char* name) {
    return std::ranges::find(inputs, name, &TensorSpec::name) != inputs.end();
  };
  if (has("do")) same(folder, "q", q, "do", shape("do"));
  if (packed) return take_packed(folder, q, k, given, p), "";
  const std::string warning = other_reading(folder, q, k, given);
  if (p.files_bnhd) std::swap(q[1], q[2]), std::swap(k[1], k[2]);
  agree(folder, "q", q, "k", k, {{0, "batch"}, {3, "head_dim"}});
  if (k[1] < 1 || q[1] < 1 || q[1] % k[1] != 0)
    throw InputError(
        fmt::format("{}: {} heads and {}: {}: the query heads must be a multiple of "
                    "the key/value heads",
                    in(folder, "q"), q[1], in(folder, "k"), k[1]));
  take(p.batch, q[0], in(folder, "q"), given, {"--batch"});
  take(p.heads, q[1], in(folder, "q"), given, {"--heads"});
  take(p.kv_heads, k[1], in(folder, "k"), given, {"--kv-heads"});
  take(p.seqlen_q, q[2], in(folder, "q"), given, {"--seqlen-q", "--seqlen"});
  take(p.seqlen_k, k[2], in(folder, "k"), given, {"--seqlen-k", "--seqlen"});
  take(p.head_dim, q[3], in(folder, "q"), given, {"--head-dim"});
  const std::filesystem::path used = in(folder, "seqused_k");
  if (!has("seqused_k") || !std::filesystem::exists(used)) return warning;
  if (!p.seqused_k.empty())
    throw InputError(fmt::format("--seqused: not together with {}", used.string()));
  p.seqused_k = load_lengths(used, p.batch, p.seqlen_k);
  return warning;
}

// For operations with input shapes of their own.
void take_own(const std::string& folder, const Operation& operation,
              const std::set<std::string>& given, Problem& p) {
  Problem found = p;
  operation.sizes_of_files(folder, found);
  const auto same_as = [&](const std::string& option, const auto& said, const auto& there) {
    if (given.contains(option) && said != there)
      throw InputError(fmt::format("{} {}: the files in {} say {}", option, said, folder, there));
  };
  same_as("--batch", p.batch, found.batch);
  same_as("--heads", p.heads, found.heads);
  same_as("--kv-heads", p.kv_heads, found.kv_heads);
  same_as("--seqlen-q", p.seqlen_q, found.seqlen_q);
  same_as("--seqlen-k", p.seqlen_k, found.seqlen_k);
  same_as("--head-dim", p.head_dim, found.head_dim);
  for (const Feature& f : operation.own)
    if (f.values(p).size() == 1 && f.values(found).size() == 1)
      same_as(f.option(), f.values(p).front(), f.values(found).front());
  p = std::move(found);
}

}  // namespace

std::string take_shapes_of_files(const std::string& folder, const Operation& operation,
                                 const std::set<std::string>& given, Problem& p) {
  if (!std::filesystem::is_directory(folder))
    throw InputError(
        fmt::format("--load {}: {}", folder,
                    std::filesystem::exists(folder) ? "not a folder" : "no such folder"));
  if (operation.sizes_of_files) return take_own(folder, operation, given, p), "";
  if (operation.matrix)
    return take_rows(folder, operation.inputs(p.at_least_one()).front().name, given, p), "";
  return take_attention(folder, operation, given, p);
}

}  // namespace attn
