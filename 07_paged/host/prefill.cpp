// Prefill: ragged batches, chunks of prompts, token trees.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <random>

#include "attn/error.h"
#include "files/tensor_files.h"
#include "host/paged.h"
#include "kernels/splits.h"

namespace attn {
namespace {

using namespace splits;

// A ragged batch: cu_seqlens_q.npy gives the queries per sequence, seqused_k.npy the keys. The page
// table may have capacity for more.
void sizes_of_ragged_files(const std::string& folder, Problem& p) {
  const auto q = shape_of_file(folder, "q.npy", 3, "tokens, heads, head_dim");
  sizes_of_pages(folder, p);
  if (p.seqused_k.empty())
    throw InputError(folder + "/seqused_k.npy: missing: the keys of each sequence");
  const std::vector<int64_t> begins =
      load_lengths(std::filesystem::path(folder) / "cu_seqlens_q.npy", p.batch + 1);
  for (std::size_t b = 0; b + 1 < begins.size(); ++b)
    p.varlen_q.push_back(begins[b + 1] - begins[b]);
  if (begins.front() != 0 || begins.back() != q[0] || std::ranges::min(p.varlen_q) < 0)
    throw InputError(fmt::format("{}: cu_seqlens_q.npy must rise from 0 to {}, the tokens of q.npy",
                                 folder, q[0]));
  if (q[2] != p.head_dim)
    throw InputError(fmt::format("{}: q.npy [{}] and k_pages.npy must agree in head_dim ({})",
                                 folder, fmt::join(q, ", "), p.head_dim));
  p.own["max_pages"] = {static_cast<double>(max_pages_of(p))};
  p.varlen_k = std::move(p.seqused_k);
  p.seqused_k.clear();
  p.heads = q[1];
}

// ---- trees -------------------------------------------------------------------------------------

bool has_tree(const Problem& p) { return p.own.contains("tree"); }

// Tree mask: per query the bits of its ancestors and of itself; bit c is query c of its sequence.
// Random trees: a token's parent is one of the four tokens before it, or the last cached token.
void draw_trees(const Problem& p, HostTensor& t) {
  const auto words = static_cast<std::size_t>(tree_words(p));
  std::mt19937_64 random(p.seed);
  auto row = t.numbers.begin();
  for (int64_t b = 0; b < p.batch; ++b) {
    const auto first = row;
    for (int64_t i = 0; i < p.sequence(b).seqlen_q; ++i, row += static_cast<int64_t>(words)) {
      const int64_t up = 1 + static_cast<int64_t>(random() % 4);
      if (up <= i) std::copy_n(first + (i - up) * static_cast<int64_t>(words), words, row);
      int64_t& own = row[i / 32];
      own = static_cast<int32_t>(static_cast<uint32_t>(own) | 1u << i % 32);
    }
  }
}
TensorSpec tree_of(const Problem& p) {
  return {"tree_mask", {1, 1, p.tokens_q(), tree_words(p)}, DType::int32, {}, draw_trees, false, 2};
}

// Among the last seqlen_q keys, only a query's ancestors and itself are visible.
template <class Scalar>
void hide(const ScoreRow<Scalar>& row) {
  const Problem& p = row.problem;  // its sequence
  const HostTensor& tree = row.inputs.at("tree_mask");
  const auto cu_seqlens = row.inputs.find("cu_seqlens_q");
  const int64_t first =
      cu_seqlens == row.inputs.end()
          ? p.first_sequence * p.seqlen_q
          : cu_seqlens->second.numbers[static_cast<std::size_t>(p.first_sequence)];
  const int64_t* const bits = tree.numbers.data() + (first + row.i) * tree.spec.columns();
  for (std::size_t n = 0; n < row.scores.size(); ++n) {
    const int64_t c = row.first_key + static_cast<int64_t>(n) - (p.seqlen_k - p.seqlen_q);
    if (c >= 0 && (bits[c / 32] >> c % 32 & 1) == 0)
      row.scores[n] = -std::numeric_limits<Scalar>::infinity();
  }
}
}  // namespace

const Operation& paged_prefill() {
  static const Operation operation = [] {
    Operation op = paged_decode();
    op.name = "paged_prefill";
    op.few_queries = 0;
    op.useful_bytes = nullptr;  // rated by operations
    std::erase_if(op.own, [](const Feature& f) { return f.name == "sinks" || f.name == "rotary"; });
    op.sizes_of_files = sizes_of_ragged_files;
    op.own.push_back({.name = "tree",
                      .lacking = "tree mask",
                      .help =
                          "the queries of a sequence form a tree: each attends to the keys before, "
                          "to its ancestors and to itself",
                      .scores = hide<double>,
                      .scores_low = hide<float>});
    op.own.push_back({.name = "serial",
                      .lacking = "launch for each of the two",
                      .help = "prefill and decode tiles in two launches, one after the other"});
    op.own.push_back({.name = "streams",
                      .lacking = "second stream",
                      .help = "prefill and decode tiles in two launches, in two streams"});
    op.inputs = [](const Problem& p) {
      std::vector<TensorSpec> specs = paged_inputs(p);
      if (has_tree(p)) specs.push_back(tree_of(p));
      return specs;
    };
    op.reference = [own = op.own](const Problem& p, const HostTensors& in, Selection selection) {
      return attention_reference(p, in, selection, own);
    };
    return op;
  }();
  return operation;
}

}  // namespace attn
