#include "check/quantise.h"

namespace attn {

HostTensor column_means(const HostTensor& t, int64_t tile) {
  HostTensor means = t;
  const int64_t rows = t.spec.shape[2], d = t.spec.columns();
  parallel_for(static_cast<int64_t>(t.data.size()) / (rows * d), [&](int64_t head) {
    for (int64_t row0 = 0; row0 < rows; row0 += tile) {
      const int64_t count = std::min(tile, rows - row0), first = (head * rows + row0) * d;
      const float* const x = t.data.data() + first;
      std::vector<double> sums(static_cast<std::size_t>(d));
      for (int64_t i = 0; i < count * d; ++i) sums[static_cast<std::size_t>(i % d)] += x[i];
      float* const mean = means.data.data() + first;
      for (int64_t i = 0; i < count * d; ++i)
        mean[i] = static_cast<float>(sums[static_cast<std::size_t>(i % d)] / double(count));
    }
  });
  return means;
}

void add_elements(HostTensor& t, const HostTensor& x, float factor) {
  constexpr std::size_t kPart = 1 << 16;
  parallel_for(static_cast<int64_t>((t.data.size() + kPart - 1) / kPart), [&](int64_t part) {
    const std::size_t first = static_cast<std::size_t>(part) * kPart;
    for (std::size_t i = first; i < std::min(t.data.size(), first + kPart); ++i)
      t.data[i] += factor * x.data[i];
  });
}

}  // namespace attn
