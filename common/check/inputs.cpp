#include "check/inputs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <optional>

#include "attn/parallel_for.h"
#include "check/field.h"

namespace attn {
namespace {

// A hash of (seed, stream, index): two rounds of the SplitMix64 finaliser.
uint64_t hash(uint64_t seed, uint64_t stream, uint64_t index) {
  const auto mix = [](uint64_t z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  };
  return mix(mix(mix(seed) ^ stream) ^ index);
}

double uniform(uint64_t bits) { return (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53; }

uint64_t stream_of(const std::string& name) {
  uint64_t s = 14695981039346656037ull;  // FNV-1a
  for (char c : name) s = (s ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return s;
}

// The needle of query i: the first or last visible key, or a tile boundary between them. `p` is the
// query's sequence, `head` its head, counted over all sequences.
int64_t needle_key(const Problem& p, int64_t head, int64_t i) {
  static constexpr int64_t kEdges[] = {15, 16, 31, 32, 63, 64, 127, 128};
  if (p.mask) {  // an end of one of the runs
    std::vector<int64_t> ends{};
    p.for_each_range(head % p.heads, i, [&](KeyRange run) {
      ends.insert(ends.end(), {run.begin, run.end - 1});
    });
    return ends.empty()
               ? 0
               : ends[hash(p.seed, 77, static_cast<uint64_t>(head * p.seqlen_q + i)) % ends.size()];
  }
  const KeyRange keys = p.visible(i);
  if (keys.size() == 0) return 0;
  // in a causal head, the last key is visible only to this query
  if (i == p.seqlen_q - 1) return keys.end - 1;
  const uint64_t r = hash(p.seed, 77, static_cast<uint64_t>(head * p.seqlen_q + i));
  const int64_t choice = static_cast<int64_t>(r % 12);
  if (choice == 0) return keys.begin;
  if (choice == 1) return keys.end - 1;
  if (choice == 2)
    return keys.begin + static_cast<int64_t>((r >> 8) % static_cast<uint64_t>(keys.size()));
  if (choice == 3) return std::max(keys.begin, keys.end - 2);
  // A multiple of 128 plus an edge, wrapped into the visible range.
  const int64_t edge = kEdges[choice - 4] + 128 * static_cast<int64_t>((r >> 8) % 64);
  return keys.begin <= edge && edge < keys.end ? edge : keys.begin + edge % keys.size();
}

}  // namespace

float normal(uint64_t seed, uint64_t stream, uint64_t index) {
  // Box-Muller; element 2n takes the cosine and 2n + 1 the sine of the same pair.
  const double u = uniform(hash(seed, stream, index / 2 * 2));
  const double v = uniform(hash(seed, stream, index / 2 * 2 + 1));
  const double angle = 2 * std::numbers::pi * v;
  const double radius = std::sqrt(-2 * std::log(u));
  return static_cast<float>(radius * (index % 2 == 0 ? std::cos(angle) : std::sin(angle)));
}

std::vector<int64_t> skewed_lengths(int64_t count, int64_t longest, uint64_t seed) {
  std::vector<int64_t> lengths(static_cast<std::size_t>(count));
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    const double share = std::exp2(-6 * uniform(hash(seed, 78, b)));
    lengths[b] = std::max<int64_t>(1, std::llround(share * static_cast<double>(longest)));
  }
  lengths[hash(seed, 79, 0) % lengths.size()] = longest;
  return lengths;
}

void poison_unused(const Problem& p, HostTensor& t) {
  if (is_index(t.spec.dtype)) return;
  const bool contiguous = t.spec.contiguous();
  const int64_t heads = contiguous ? t.spec.shape[1] : t.spec.shape[2], columns = t.spec.columns();
  const std::vector<int64_t> unused = t.spec.unused_rows(p.batch, heads);
  if (unused.empty()) return;
  // Index of the sequence whose last key precedes a row.
  std::vector<int64_t> owner(static_cast<std::size_t>(t.spec.rows()), -1);
  const int64_t unit = contiguous ? t.spec.shape[2] : t.spec.layout.page_size;  // unit of ownership
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t length = t.spec.rows_of(b);
      const int64_t room = contiguous ? unit : (length + unit - 1) / unit * unit;
      for (int64_t i = length; i < room; ++i)
        owner[static_cast<std::size_t>(t.spec.row(b, h, i))] = b;
    }
  for (const int64_t row : unused)
    std::fill_n(t.data.begin() + row * columns, columns,
                unused_nan(owner[static_cast<std::size_t>(row)]));
}

HostTensors draw_inputs(const Problem& p, std::span<const TensorSpec> specs) {
  HostTensors tensors;
  for (const TensorSpec& spec : specs) {
    HostTensor t = zeros(spec);
    if (spec.made) {
      spec.made(p, t);
      tensors.emplace(spec.name, std::move(t));
      continue;
    }
    const uint64_t stream = stream_of(spec.name);
    const int64_t columns = spec.columns();
    std::optional<FieldWaves> waves;
    if (has_field(p) && (spec.name == "q" || spec.name == "k" || spec.name == "v"))
      waves.emplace(p, spec);
    parallel_for(spec.rows(), [&](int64_t r) {
      float* row = t.data.data() + r * columns;
      const uint64_t first = static_cast<uint64_t>(r * columns);
      for (int64_t c = 0; c < columns; ++c) {
        const uint64_t index = first + static_cast<uint64_t>(c);
        row[c] = normal(p.seed, stream, index);
        if (p.inputs == InputKind::outlier && hash(p.seed, stream + 1, index) % 1000 == 0)
          row[c] += 10 * normal(p.seed, stream + 2, index);  // variance 100
      }
      if (waves) waves->set(r, row);
      if (p.inputs == InputKind::peaked && (spec.name == "q" || spec.name == "x")) {
        const double u = uniform(hash(p.seed, stream + 3, static_cast<uint64_t>(r)));
        const float factor = static_cast<float>(0.25 * std::pow(8000.0, u));
        for (int64_t c = 0; c < columns; ++c) row[c] *= factor;
      }
      if (spec.name == "x") {
        const int64_t i = r % p.seqlen_q;
        const KeyRange seen = p.visible(i);
        if (p.inputs == InputKind::needle) row[needle_key(p, r / p.seqlen_q, i)] = 16;
        for (int64_t c = 0; c < columns; ++c)
          if (c < seen.begin || c >= seen.end) row[c] = -std::numeric_limits<float>::infinity();
      }
    });
    round_to(spec.dtype, t.data.data(), t.data.size());
    poison_unused(p, t);
    tensors.emplace(spec.name, std::move(t));
  }
  if (p.inputs == InputKind::needle && tensors.contains("q") && tensors.contains("k")) {
    HostTensor& q = tensors.at("q");
    const HostTensor& k = tensors.at("k");
    parallel_for(p.batch * p.heads, [&](int64_t bh) {
      const int64_t b = bh / p.heads, h = bh % p.heads;
      const Problem sequence = p.sequence(b);
      if (sequence.seqlen_k == 0) return;  // no key to point at
      for (int64_t i = 0; i < sequence.seqlen_q; ++i) {
        const float* key = k.row(b, h / p.group(), needle_key(sequence, bh, i));
        double norm2 = 0;
        for (int64_t c = 0; c < p.head_dim; ++c) norm2 += double{key[c]} * key[c];
        // The needle's score is 16; the others have a spread of 16/|k|.
        const double factor = norm2 > 0 ? 16 / (norm2 * p.softmax_scale) : 0;
        float* row = const_cast<float*>(q.row(b, h, i));
        for (int64_t c = 0; c < p.head_dim; ++c)
          row[c] = round_to(q.spec.dtype, static_cast<float>(factor * key[c]));
      }
    });
  }
  return tensors;
}

}  // namespace attn
