// What the quantising steps store, decoded, up to the neighbouring code of a few numbers
// (check/quantise.h). The reference computes exact attention over these values.
#include "check/quantise.h"
#include "host/quantised.h"

namespace attn {
namespace {

int64_t tile_of(int64_t head, int64_t row, int64_t rows) {
  return head * ((rows + kTileRows - 1) / kTileRows) + row / kTileRows;
}

// Rounds Q or K to int8 with one scale per tile of 128 rows of a head.
void round_tiles(HostTensor& t) {
  round_to_codes(t, int8_codes(t), [rows = t.spec.shape[2]](int64_t head, int64_t row, int64_t) {
    return tile_of(head, row, rows);
  });
}

// The same with the scales of q3: 64 groups of rows per tile of Q, four per tile of K.
void round_threads(HostTensor& t, float largest) {
  const bool of_q = t.spec.name == "q";
  round_to_codes(t, int8_codes(t, largest),
                 [of_q, rows = t.spec.shape[2]](int64_t head, int64_t row, int64_t) {
                   const int64_t tile = tile_of(head, row, rows), r = row % kTileRows;
                   return of_q ? tile * 64 + r / 16 * 8 + r % 8 : tile * 4 + r % 8 / 2;
                 });
}

// Rounds V to e4m3, with one scale per channel of `chunk` keys of a head.
void round_channels(HostTensor& v, int64_t chunk) {
  const int64_t d = v.spec.columns(), chunks = (v.spec.shape[2] + chunk - 1) / chunk;
  round_to_codes(v, e4m3_codes(v), [=](int64_t head, int64_t row, int64_t c) {
    return (head * chunks + row / chunk) * d + c;
  });
}

// Rounds what is left after subtracting the mean of each column over tiles of `tile` rows. S, lse
// and O include the means.
template <class Round>
void smooth(HostTensor& t, int64_t tile, Round round) {
  const HostTensor means = column_means(t, tile);
  add_elements(t, means, -1);
  round(t);
  add_elements(t, means);
}
void smooth_channels(HostTensor& v, int64_t chunk) {
  smooth(v, chunk, [=](HostTensor& t) { round_channels(t, chunk); });
}

// Q and K per thread, with smooth K.
HostTensors smoothed(const Problem& p, const HostTensors& inputs, float largest) {
  HostTensors stored = inputs;
  smooth(stored.at("k"), p.seqlen_k, [=](HostTensor& t) { round_threads(t, largest); });
  round_threads(stored.at("q"), largest);
  return stored;
}

// The columns of `a`, then those of `b`: a product with another such matrix is the sum of two
// products.
HostTensor concatenate_columns(const HostTensor& a, const HostTensor& b) {
  HostTensor both{a.spec, {}};
  const auto d = static_cast<std::size_t>(a.spec.columns());
  both.spec.shape[3] *= 2;
  for (std::size_t at = 0; at < a.data.size(); at += d)
    for (const HostTensor* t : {&a, &b})
      both.data.insert(both.data.end(), t->data.begin() + static_cast<std::ptrdiff_t>(at),
                       t->data.begin() + static_cast<std::ptrdiff_t>(at + d));
  return both;
}

// S = codes . codes + mean . (k - mean of K), and the rest of q . k goes into lse. So a query is
// its codes followed by its tile's mean; a key is its codes plus their mean, followed by the
// original key.
HostTensors with_smooth_q(const Problem& p, const HostTensors& inputs, float largest) {
  HostTensors less = inputs;
  const HostTensor means = column_means(less.at("q"), kTileRows);
  add_elements(less.at("q"), means, -1);
  HostTensors stored = smoothed(p, less, largest);
  round_channels(stored.at("v"), p.seqlen_k);
  stored.at("q") = concatenate_columns(stored.at("q"), means);
  stored.at("k") = concatenate_columns(stored.at("k"), inputs.at("k"));
  return stored;
}

}  // namespace

HostTensors int8_blocks(const Problem&, const HostTensors& inputs) {
  HostTensors stored = inputs;
  for (const char* name : {"q", "k"}) round_tiles(stored.at(name));
  return stored;
}
HostTensors smoothed_blocks(const Problem& p, const HostTensors& inputs) {
  HostTensors stored = inputs;
  smooth(stored.at("k"), p.seqlen_k, round_tiles);
  round_tiles(stored.at("q"));
  return stored;
}
HostTensors smoothed_threads(const Problem& p, const HostTensors& inputs) {
  return smoothed(p, inputs, 127);
}

HostTensors fp8_pv(const Problem& p, const HostTensors& inputs) {
  HostTensors stored = smoothed_threads(p, inputs);
  round_channels(stored.at("v"), p.seqlen_k);
  return stored;
}
HostTensors fp8_chunks(const Problem& p, const HostTensors& inputs) {
  HostTensors stored = smoothed_threads(p, inputs);
  smooth_channels(stored.at("v"), kChunkKeys);
  return stored;
}
HostTensors fp8_heads(const Problem& p, const HostTensors& inputs) {
  HostTensors stored = smoothed_threads(p, inputs);
  smooth_channels(stored.at("v"), p.seqlen_k);
  return stored;
}

HostTensors smoothed_q(const Problem& p, const HostTensors& inputs) {
  return with_smooth_q(p, inputs, 127);
}
HostTensors smoothed_q_int4(const Problem& p, const HostTensors& inputs) {
  return with_smooth_q(p, inputs, 7);
}

HostTensors int4_threads(const Problem&, const HostTensors& inputs) {
  HostTensors stored = inputs;
  for (const char* name : {"q", "k"}) round_threads(stored.at(name), 7);
  return stored;
}
HostTensors int4_smooth_k(const Problem& p, const HostTensors& inputs) {
  return smoothed(p, inputs, 7);
}

}  // namespace attn
