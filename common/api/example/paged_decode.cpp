// Decoding over a paged KV cache with libattention, in the emulator: host pointers instead of
// device pointers, and no stream. On a GPU the problem says ATTN_GPU, and memory comes from
// cudaMalloc.
#include <attention_kernels/attention.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

namespace {

std::uint16_t to_bf16(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<std::uint16_t>((bits + 0x8000) >> 16);
}
float to_float(std::uint16_t x) {
  const std::uint32_t bits = std::uint32_t{x} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Memory aligned as cudaMalloc aligns it.
template <class T>
struct Array {
  explicit Array(std::size_t count)
      : data(static_cast<T*>(std::aligned_alloc(256, (count * sizeof(T) + 511) / 256 * 256))),
        size(count) {}
  ~Array() { std::free(data); }
  Array(const Array&) = delete;
  T* data;
  std::size_t size;
};

constexpr int kBatch = 3, kHeads = 8, kKvHeads = 2, kDim = 128, kPageSize = 16, kMaxPages = 8,
              kNumPages = kBatch * kMaxPages;
constexpr int kLengths[kBatch] = {100, 37, 1};

}  // namespace

int main() try {
  Array<std::uint16_t> q(kBatch * kHeads * kDim), o(kBatch * kHeads * kDim),
      k(kNumPages * kPageSize * kKvHeads * kDim), v(kNumPages * kPageSize * kKvHeads * kDim);
  Array<float> lse(kBatch * kHeads);
  Array<std::int32_t> page_table(kBatch * kMaxPages), seqused_k(kBatch);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (Array<std::uint16_t>* array : {&q, &k, &v})
    for (std::size_t n = 0; n < array->size; ++n) array->data[n] = to_bf16(normal(random));
  for (int n = 0; n < kBatch * kMaxPages; ++n) page_table.data[n] = n * 7 % kNumPages;
  std::int64_t lengths[kBatch];
  for (int b = 0; b < kBatch; ++b) lengths[b] = seqused_k.data[b] = kLengths[b];

  //! [problem]
  attn_problem problem = attention::problem();
  problem.backend = ATTN_EMULATED;
  problem.batch = kBatch, problem.heads = kHeads, problem.kv_heads = kKvHeads;
  problem.head_dim = kDim;
  problem.page_size = kPageSize, problem.num_pages = kNumPages, problem.max_pages = kMaxPages;
  problem.lengths_k = lengths;  // without them a step is chosen that schedules on the device
  //! [problem]

  //! [run]
  attn_tensors tensors = attention::tensors();
  tensors.q.data = q.data, tensors.k.data = k.data, tensors.v.data = v.data;
  tensors.o.data = o.data, tensors.lse = lse.data;
  tensors.page_table = page_table.data, tensors.seqused_k = seqused_k.data;

  attention::Plan plan(attn_paged_decode_plan, problem);
  Array<unsigned char> workspace(plan.workspace_bytes());
  plan.prepare(tensors, workspace.data);
  plan.run(tensors, workspace.data);
  //! [run]

  double worst = 0;
  for (int b = 0; b < kBatch; ++b)
    for (int h = 0; h < kHeads; ++h) {
      const auto row = [&](int key) {
        const int page = page_table.data[b * kMaxPages + key / kPageSize];
        return ((page * kPageSize + key % kPageSize) * kKvHeads + h / (kHeads / kKvHeads)) * kDim;
      };
      double sum = 0;
      std::vector<double> out(kDim);
      for (int key = 0; key < kLengths[b]; ++key) {
        double score = 0;
        for (int c = 0; c < kDim; ++c)
          score += to_float(q.data[(b * kHeads + h) * kDim + c]) * to_float(k.data[row(key) + c]);
        const double weight = std::exp(score / std::sqrt(double(kDim)));
        sum += weight;
        for (int c = 0; c < kDim; ++c) out[c] += weight * to_float(v.data[row(key) + c]);
      }
      for (int c = 0; c < kDim; ++c)
        worst = std::fmax(worst,
                          std::fabs(out[c] / sum - to_float(o.data[(b * kHeads + h) * kDim + c])));
    }
  std::printf("%s: worst error %.4f\n", plan.step(), worst);
  return worst < 0.02 ? 0 : 1;
} catch (const attention::Error& e) {
  std::printf("%s\n", e.what());
  return 1;
}
