// Latent attention: one K/V head whose values are part of its keys.
#include <fmt/format.h>

#include "attn/error.h"
#include "host/paged.h"
#include "kernels/splits.h"

namespace attn {
namespace {

using namespace splits;

TensorSpec output_of(const Problem& p) {
  TensorSpec o = like_q(p, "o");
  o.shape[3] = kLatentValues;
  return o;
}

std::vector<TensorSpec> inputs(const Problem& p) {
  const HostTensor table = drawn_table(p);
  TensorSpec kv = in_pages(p, "k", table);
  kv.file = "kv_pages";
  return {like_q(p, "q"), kv, table.spec, seqused_of(p)};
}

// Reference attention; the first elements of each key are its value.
std::vector<Expected> reference(const Problem& p, const HostTensors& in, Selection selection) {
  const HostTensor& k = in.at("k");
  HostTensor v{in_pages(p, "v", in.at("page_table")), {}, {}};
  v.spec.shape[3] = kLatentValues;
  const auto all = static_cast<std::size_t>(k.spec.columns());
  v.data.reserve(k.data.size() / all * kLatentValues);
  for (auto row = k.data.begin(); row != k.data.end(); row += static_cast<std::ptrdiff_t>(all))
    v.data.insert(v.data.end(), row, row + kLatentValues);
  HostTensors tensors = in;
  tensors.emplace("v", std::move(v));
  return attention_reference(p, tensors, selection, {});
}

void sizes_of_files(const std::string& folder, Problem& p) {
  auto q = shape_of_file(
      folder, "q.npy", 4,
      p.files_bnhd ? "batch, seqlen_q, heads, head_dim" : "batch, heads, seqlen_q, head_dim");
  if (p.files_bnhd) std::swap(q[1], q[2]);
  sizes_of_pages(folder, p, "kv_pages.npy");
  if (q[0] != p.batch || q[3] != p.head_dim)
    throw InputError(fmt::format(
        "{}: q.npy [{}], kv_pages.npy and page_table.npy must agree in batch ({}) and head_dim "
        "({})",
        folder, fmt::join(q, ", "), p.batch, p.head_dim));
  p.heads = q[1], p.seqlen_q = q[2];
}

// Default: DeepSeek-V2-Lite, 16 heads.
void complete(Problem& p, const std::set<std::string>& given) {
  complete_lengths(p, given);
  if (p.inputs == InputKind::files) return;
  if (!given.contains("--head-dim")) p.head_dim = kLatentDim;
  if (!given.contains("--kv-heads")) p.kv_heads = 1;
  if (!given.contains("--heads")) p.heads = 16;
}

}  // namespace

const Operation& paged_mla() {
  static const Operation operation = [] {
    Operation op = paged_decode();
    op.name = "paged_mla";
    op.inputs = inputs;
    op.outputs = [](const Problem& p) { return std::vector{output_of(p), lse_of(p)}; };
    op.flop = [](const Problem& p) {
      return 2 * static_cast<double>(kLatentDim + kLatentValues) * p.total_pairs();
    };
    op.reference = reference;
    op.sizes_of_files = sizes_of_files;
    op.complete = complete;
    op.own = page_options();
    op.useful_bytes = [](const Problem& p) {
      double tokens = 0;
      for (int64_t b = 0; b < p.batch; ++b) tokens += static_cast<double>(p.sequence(b).seqlen_k);
      return tokens * static_cast<double>(bytes_of(p.dtype, p.head_dim)) +
             static_cast<double>(like_q(p, "q").bytes() + output_of(p).bytes() + lse_of(p).bytes());
    };
    return op;
  }();
  return operation;
}

}  // namespace attn
