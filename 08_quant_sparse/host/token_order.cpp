#include "host/token_order.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <random>

#include "check/field.h"

namespace attn {

// Skilling's AxestoTranspose: undoes the rotation of each cube, from the largest to the smallest,
// then applies a Gray code. The interleaved bits of the three coordinates are the position.
uint64_t hilbert_place(std::array<uint32_t, 3> x, int bits) {
  for (uint32_t q = uint32_t{1} << (bits - 1); q > 1; q >>= 1)
    for (std::size_t i = 0; i < 3; ++i) {
      if (x[i] & q) {
        x[0] ^= q - 1;  // invert
      } else {
        const uint32_t t = (x[0] ^ x[i]) & (q - 1);  // exchange
        x[0] ^= t, x[i] ^= t;
      }
    }
  x[1] ^= x[0], x[2] ^= x[1];
  uint32_t t = 0;
  for (uint32_t q = uint32_t{1} << (bits - 1); q > 1; q >>= 1)
    if (x[2] & q) t ^= q - 1;
  uint64_t place = 0;
  for (int bit = bits - 1; bit >= 0; --bit)
    for (std::size_t i = 0; i < 3; ++i) place = place << 1 | ((x[i] ^ t) >> bit & 1);
  return place;
}

std::vector<int64_t> token_order(const Problem& p, TokenOrder order) {
  std::vector<int64_t> tokens(static_cast<std::size_t>(p.seqlen_k));
  std::iota(tokens.begin(), tokens.end(), 0);
  const Field field = field_of(p);
  const auto end = tokens.begin() + field.tokens();
  if (order == TokenOrder::random) {
    std::mt19937_64 random(p.seed);
    for (auto n = field.tokens() - 1; n > 0; --n)  // std::shuffle differs between libraries
      std::swap(tokens[static_cast<std::size_t>(n)],
                tokens[random() % static_cast<uint64_t>(n + 1)]);
  }
  if (order == TokenOrder::hilbert) {
    const int64_t longest = *std::ranges::max_element(field.sides);
    const int bits =
        std::max(1, static_cast<int>(std::bit_width(static_cast<uint64_t>(longest - 1))));
    std::vector<uint64_t> place;
    for (int64_t n = 0; n < field.tokens(); ++n) {
      const auto at = field.place(n);
      place.push_back(hilbert_place({static_cast<uint32_t>(at[0]), static_cast<uint32_t>(at[1]),
                                     static_cast<uint32_t>(at[2])},
                                    bits));
    }
    std::sort(tokens.begin(), end, [&](int64_t a, int64_t b) {
      return place[static_cast<std::size_t>(a)] < place[static_cast<std::size_t>(b)];
    });
  }
  return tokens;
}

HostTensors in_order(const Problem& p, const HostTensors& inputs, TokenOrder order) {
  const std::vector<int64_t> tokens = token_order(p, order);
  HostTensors ordered = inputs;
  for (auto& [name, t] : ordered) {
    const int64_t columns = t.spec.columns(), rows = p.seqlen_k;
    for (int64_t n = 0; n < t.spec.rows(); ++n) {
      const int64_t from = n / rows * rows + tokens[static_cast<std::size_t>(n % rows)];
      std::copy_n(inputs.at(name).data.begin() + from * columns, columns,
                  t.data.begin() + n * columns);
    }
  }
  return ordered;
}

}  // namespace attn
