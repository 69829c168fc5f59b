#include "check/quantise.h"

namespace attn {

HostTensor column_means(const HostTensor& t, int64_t tile) {
  HostTensor means = t;
  const int64_t rows = t.spec.shape[2], d = t.spec.columns();
  for (int64_t first = 0; first < static_cast<int64_t>(t.data.size()); first += rows * d)
    for (int64_t row0 = 0; row0 < rows; row0 += tile) {
      const int64_t count = std::min(tile, rows - row0);
      const float* const x = t.data.data() + first + row0 * d;
      std::vector<double> sums(static_cast<std::size_t>(d));
      for (int64_t i = 0; i < count * d; ++i) sums[static_cast<std::size_t>(i % d)] += x[i];
      float* const mean = means.data.data() + first + row0 * d;
      for (int64_t i = 0; i < count * d; ++i)
        mean[i] = static_cast<float>(sums[static_cast<std::size_t>(i % d)] / double(count));
    }
  return means;
}

void add_elements(HostTensor& t, const HostTensor& x, float factor) {
  for (std::size_t i = 0; i < t.data.size(); ++i) t.data[i] += factor * x.data[i];
}

}  // namespace attn
