/// \file
/// Random calls of the C functions, half of them with one thing wrong: each is right or refused
/// with one line, and a refused call writes nothing. Every buffer is an allocation of its own, of
/// exactly its size, so that AddressSanitizer finds what reads or writes past its end; on a GPU a
/// guard band on each side shows what was written past it.
///
/// The environment variable ATTN_RANDOM_CALLS is the number of calls, ATTN_RANDOM_SEED the seed.
#pragma once

#include <fmt/format.h>
#include <stdlib.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>

#include "api/tests/calls.h"
#include "tests/catch.h"

namespace attn::tests {

/// A buffer of exactly its size. On a GPU `host` is a copy.
class Exact {
 public:
  Exact(std::size_t bytes, Backend backend) : bytes_(bytes) {
    REQUIRE(posix_memalign(&host_, 256, std::max<std::size_t>(bytes, 1)) == 0);
    std::memset(host_, 0xFF, bytes);
    if (backend == Backend::gpu) gpu_.emplace(backend, "a buffer", static_cast<int64_t>(bytes));
  }
  ~Exact() { free(host_); }
  Exact(const Exact&) = delete;
  void* host() { return host_; }
  void* data() { return gpu_ ? gpu_->data() : host_; }
  std::size_t bytes() const { return bytes_; }
  /// Before the call: its contents to the GPU.
  void begin_call() {
    before_.assign(begin(), begin() + bytes_);
    if (gpu_) gpu_->upload(host_);
  }
  /// After the call: its contents from the GPU. "" or what was written past an end.
  std::string end_call() {
    if (!gpu_) return "";
    gpu_->download(host_);
    return gpu_->broken_guard().value_or("");
  }
  bool untouched() const { return std::equal(before_.begin(), before_.end(), begin()); }

 private:
  const unsigned char* begin() const { return static_cast<const unsigned char*>(host_); }
  std::size_t bytes_;
  void* host_ = nullptr;
  std::optional<DeviceBuffer> gpu_;
  std::vector<unsigned char> before_;
};

class RandomCall {
 public:
  RandomCall(uint64_t seed, Backend backend) : random_(seed), backend_(backend) {}

  // Draws, calls, and judges: "" or the fault. `launched` says whether the call was right.
  std::string run(bool& launched) {
    draw();
    const bool broken = chance(0.5);
    const char* const what = broken ? damage() : "nothing";
    for (const auto& buffer : buffers_) buffer->begin_call();
    const attn_status status = call(broken);
    const std::string line = status == ATTN_OK ? "" : attn_last_error();
    const std::string text = fmt::format("{} {}, wrong: {}: status {}, {}", name_, describe(), what,
                                         static_cast<int>(status), line);
    launched = status == ATTN_OK;
    if (backend_ == Backend::gpu) {
      try {
        synchronize(backend_);
      } catch (const DeviceError& e) {
        return e.what() + (": " + text);
      }
    }
    for (const auto& buffer : buffers_)
      if (const std::string past = buffer->end_call(); !past.empty()) return past + ": " + text;
    if (broken && status == ATTN_OK) return "was not refused: " + text;
    if (status == ATTN_OK) {
      for (const Exact* out : outputs_)
        if (!finite(*out) || out->untouched()) return "has NaN or was not written: " + text;
      if (lse_ && has_nan(*lse_)) return "has NaN in lse, or did not write it: " + text;
      return "";
    }
    if (status >= ATTN_KERNEL_ERROR) return "failed: " + text;
    if (line.empty() || line.find('\n') != line.npos) return "is not one line: " + text;
    for (const Exact* out : outputs_)
      if (!out->untouched()) return "wrote something: " + text;
    if (lse_ && !lse_->untouched()) return "wrote lse: " + text;
    return "";
  }

 private:
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  int64_t from(int64_t first, int64_t last) { return first + below(last - first + 1); }
  bool chance(double p) { return std::uniform_real_distribution<>()(random_) < p; }

  Exact& make(std::size_t bytes) {
    return *buffers_.emplace_back(std::make_unique<Exact>(bytes, backend_));
  }
  /// [batch][heads][rows][head_dim], or packed: [rows][heads][head_dim].
  struct Shape {
    int64_t batch, heads, rows;
    bool packed = false;
    bool pool = false;  ///< pages, which have no strides
  };
  // Contiguous, or with strides where they are copied: heads and rows exchanged, and, if there may
  // be `gaps`, 8 elements between rows. The last row ends with the buffer.
  attn_tensor strided(const Shape& s, bool gaps, int64_t& elements) {
    elements = s.batch * s.heads * s.rows * p_.head_dim;
    if (!p_.copy_strided || s.pool || chance(0.3)) return {};
    const int64_t last = p_.head_dim + (gaps ? 8 * below(2) : 0), all = s.heads * s.rows * last;
    const bool by_row = s.packed || chance(0.5);
    elements = s.batch * all - (last - p_.head_dim);
    return {nullptr, all, by_row ? last : s.rows * last, by_row ? s.heads * last : last};
  }
  attn_tensor input(const Shape& shape) {
    const bool wide = p_.dtype == ATTN_FP32;
    int64_t elements = 0;
    attn_tensor tensor = strided(shape, true, elements);
    Exact& buffer = make(static_cast<std::size_t>(elements) * (wide ? 4 : 2));
    std::normal_distribution<float> normal;
    for (int64_t n = 0; n < elements; ++n) {
      const float x = normal(random_);
      if (wide)
        static_cast<float*>(buffer.host())[n] = x;
      else
        encode(p_.dtype == ATTN_FP16 ? DType::fp16 : DType::bf16, &x, 1,
               static_cast<char*>(buffer.host()) + 2 * n);
    }
    tensor.data = buffer.data();
    return tensor;
  }
  attn_tensor output(const Shape& shape) {
    int64_t elements = 0;
    attn_tensor tensor = strided(shape, false, elements);
    Exact& buffer = make(static_cast<std::size_t>(elements) * (p_.dtype == ATTN_FP32 ? 4 : 2));
    outputs_.push_back(&buffer);
    tensor.data = buffer.data();
    return tensor;
  }
  const int32_t* integers(const std::vector<int64_t>& values) {
    Exact& buffer = make(values.size() * 4);
    for (std::size_t n = 0; n < values.size(); ++n)
      static_cast<int32_t*>(buffer.host())[n] = static_cast<int32_t>(values[n]);
    return static_cast<const int32_t*>(buffer.data());
  }
  bool finite(const Exact& out) const {
    const std::size_t size = p_.dtype == ATTN_FP32 ? 4 : 2, count = out.bytes() / size;
    std::vector<float> values(count);
    decode(p_.dtype == ATTN_FP32   ? DType::fp32
           : p_.dtype == ATTN_FP16 ? DType::fp16
                                   : DType::bf16,
           const_cast<Exact&>(out).host(), count, values.data());
    return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
  }

  static bool has_nan(const Exact& lse) {  // -inf is the lse of a fully masked row
    std::vector<float> values(lse.bytes() / sizeof(float));
    std::memcpy(values.data(), const_cast<Exact&>(lse).host(), lse.bytes());
    return std::any_of(values.begin(), values.end(), [](float x) { return std::isnan(x); });
  }

  void draw() {
    call_ = static_cast<api::Call>(below(7));
    const bool paged = call_ == api::Call::paged_decode || call_ == api::Call::paged_prefill ||
                       call_ == api::Call::paged_append;
    const bool few = call_ == api::Call::decode || call_ == api::Call::paged_decode ||
                     call_ == api::Call::paged_append;
    attn_problem_defaults(&p_);
    p_.backend = backend_ == Backend::gpu ? ATTN_GPU : ATTN_EMULATED;
    p_.copy_strided = chance(0.3);
    p_.dtype = call_ == api::Call::quantised_forward ? static_cast<int32_t>(from(3, 5))
               : paged || few                        ? static_cast<int32_t>(from(0, 1))
                                                     : static_cast<int32_t>(from(0, 2));
    p_.batch = from(1, 2), p_.kv_heads = from(1, 2), p_.heads = p_.kv_heads * from(1, 2);
    p_.seqlen_q = few ? from(1, 4) : from(1, 64), p_.seqlen_k = from(few ? 4 : 1, 64);
    p_.head_dim = chance(0.8) ? 64 : 128;
    p_.causal = chance(0.5);
    if (chance(0.2)) p_.window_left = from(0, 40);
    if (chance(0.1)) p_.softcap = 30;
    if (paged) {
      static constexpr int64_t kSizes[] = {1, 3, 8, 16};
      p_.page_size = kSizes[below(4)];
      p_.max_pages = from((4 + p_.page_size - 1) / p_.page_size, 64 / p_.page_size);
      p_.num_pages = p_.batch * p_.max_pages + below(3);
      p_.seqlen_k = p_.page_size * p_.max_pages;
    }
    // Packed sequences, or lengths of a cache.
    p_.packed = (call_ == api::Call::forward || call_ == api::Call::backward ||
                 call_ == api::Call::paged_prefill) &&
                chance(0.3);
    for (int64_t b = 0; b < p_.batch; ++b) {
      lengths_q_.push_back(b == 0 ? p_.seqlen_q : from(1, p_.seqlen_q));
      lengths_k_.push_back(b == 0 ? p_.seqlen_k : from(few ? 4 : 1, p_.seqlen_k));
    }
    const auto sum = [](const std::vector<int64_t>& v) {
      return std::accumulate(v.begin(), v.end(), int64_t{0});
    };
    p_.total_q = sum(lengths_q_), p_.total_k = sum(lengths_k_);
    const bool host = chance(0.7);
    if (host && p_.packed) p_.lengths_q = lengths_q_.data();
    if (host && (p_.packed || few || paged)) p_.lengths_k = lengths_k_.data();

    const int64_t rows_q = p_.packed ? p_.total_q : p_.batch * p_.seqlen_q;
    const Shape q =
        p_.packed ? Shape{1, p_.heads, p_.total_q, true} : Shape{p_.batch, p_.heads, p_.seqlen_q};
    const Shape k = paged       ? Shape{p_.num_pages, p_.kv_heads, p_.page_size, false, true}
                    : p_.packed ? Shape{1, p_.kv_heads, p_.total_k, true}
                                : Shape{p_.batch, p_.kv_heads, p_.seqlen_k};
    t_.size = sizeof t_;
    if (call_ == api::Call::paged_append) {
      const Shape tokens{1, p_.kv_heads, p_.batch * p_.seqlen_q, true};
      t_.k_new = input(tokens), t_.v_new = input(tokens);
      t_.k = input(k), outputs_.push_back(buffers_.back().get());  // pages: read and written
      t_.v = input(k), outputs_.push_back(buffers_.back().get());
    } else {
      t_.q = input(q), t_.k = input(k), t_.v = input(k);
      Exact& lse = make(static_cast<std::size_t>(rows_q * p_.heads) * 4);
      if (call_ == api::Call::backward)
        for (int64_t n = 0; n < rows_q * p_.heads; ++n) static_cast<float*>(lse.host())[n] = 2;
      else
        lse_ = &lse;
      t_.lse = static_cast<float*>(lse.data());
    }
    if (call_ == api::Call::backward) {
      t_.o = input(q), t_.dout = input(q);
      t_.dq = output(q), t_.dk = output(k), t_.dv = output(k);
    } else if (call_ != api::Call::paged_append) {
      t_.o = output(q);
    }
    const auto begins = [](const std::vector<int64_t>& lengths) { return cumulative(lengths); };
    if (p_.packed) t_.cu_seqlens_q = integers(begins(lengths_q_));
    if (p_.packed) t_.cu_seqlens_k = integers(begins(lengths_k_));
    if (few || paged) t_.seqused_k = integers(lengths_k_);
    if (paged) {
      std::vector<int64_t> table(static_cast<std::size_t>(p_.batch * p_.max_pages));
      std::iota(table.begin(), table.end(), 0);
      std::shuffle(table.begin(), table.end(), random_);
      t_.page_table = integers(table);
    }
    if (chance(0.4)) {  // a step of this operation, or the best one
      const auto& all = api::all_steps();
      for (int n = 0; n < 50 && !p_.step; ++n) {
        const api::NamedStep& named =
            all[static_cast<std::size_t>(below(static_cast<int64_t>(all.size())))];
        if (call_of(*named.step) == call_) p_.step = named.name.c_str();
      }
    }
    name_ = p_.step ? p_.step : "best";
  }

  // Breaks one thing, and names it.
  const char* damage() {
    attn_tensor& some = call_ == api::Call::paged_append ? t_.k_new : t_.q;
    switch (below(16)) {
      case 0: return some.data = nullptr, "a null tensor";
      case 1:
        p_.copy_strided = 0;
        some.data = static_cast<char*>(some.data) + (p_.dtype == ATTN_FP32 ? 4 : 2);
        return "an offset";
      case 2: some.data = static_cast<char*>(some.data) + 1; return "an odd address";
      case 3:
        if (p_.seqlen_q == 1) return some.data = nullptr, "a null tensor";
        some.stride_row = p_.head_dim - 1, some.stride_head = some.stride_batch = 1 << 20;
        return "rows that overlap";
      case 4: return p_.batch = -from(0, 5), "batch";
      case 5: return p_.kv_heads = 2, p_.heads = 3, "heads";
      case 6: return p_.head_dim = from(200000, 300000), "head_dim";
      case 7: return p_.seqlen_q = int64_t{1} << from(30, 60), "seqlen_q";
      case 8: return p_.dtype = static_cast<int32_t>(from(6, 1000)), "dtype";
      case 9: return p_.step = "06_flash_v3_hopper/none", "step";
      case 10: return p_.size = 0, "the size of the problem";
      case 11: return t_.size = 0, "the size of the tensors";
      case 12: return p_.softmax_scale = std::nan(""), "softmax_scale";
      case 13: return p_.window_left = -from(2, 9), "window_left";
      case 14: return p_.backend = static_cast<int32_t>(from(2, 9)), "backend";
      default: return short_workspace_ = true, "a short workspace, or no plan";
    }
  }

  attn_status call(bool broken) {
    attn_plan* made = nullptr;
    attn_status status = plan_function(call_)(&p_, &made);
    if (status != ATTN_OK) return status;
    const std::unique_ptr<attn_plan, void (*)(attn_plan*)> plan(made, attn_plan_destroy);
    name_ = attn_plan_step(made);
    const std::size_t bytes = attn_plan_workspace_bytes(made);
    Exact& workspace = make(bytes);
    workspace.begin_call();
    if (short_workspace_ && bytes == 0) return attn_run(nullptr, &t_, nullptr, 0, nullptr);
    const std::size_t given = short_workspace_ && broken ? bytes - 1 : bytes;
    status = attn_prepare(made, &t_, workspace.data(), given, nullptr);
    if (status != ATTN_OK) return status;
    return attn_run(made, &t_, workspace.data(), given, nullptr);
  }

  std::string describe() const {
    return fmt::format("{} B={} H={},{} N={},{} d={} dtype={} packed={} pages={}x{}",
                       api::text_of(call_), p_.batch, p_.heads, p_.kv_heads, p_.seqlen_q,
                       p_.seqlen_k, p_.head_dim, p_.dtype, p_.packed, p_.max_pages, p_.page_size);
  }

  std::mt19937_64 random_;
  Backend backend_;
  api::Call call_{};
  attn_problem p_{};
  attn_tensors t_{};
  std::vector<int64_t> lengths_q_, lengths_k_;
  std::vector<std::unique_ptr<Exact>> buffers_;
  std::vector<Exact*> outputs_;
  Exact* lse_ = nullptr;  // as an output
  bool short_workspace_ = false;
  std::string name_;
};

/// Draws so many calls, if the environment does not say how many, and judges them.
inline void random_calls(int64_t count, Backend backend) {
  const auto setting = [](const char* name, int64_t otherwise) {
    const char* const text = std::getenv(name);
    return text ? std::atoll(text) : otherwise;
  };
  const int64_t calls = setting("ATTN_RANDOM_CALLS", count);
  const auto seed = static_cast<uint64_t>(setting("ATTN_RANDOM_SEED", 1));
  int64_t right = 0;
  for (int64_t n = 0; n < calls; ++n) {
    bool launched = false;
    RandomCall call(seed * 1000003 + static_cast<uint64_t>(n), backend);
    const std::string fault = call.run(launched);
    INFO("call " << n);
    REQUIRE(fault == "");
    right += launched;
  }
  fmt::print("{} calls, {} launched\n", calls, right);
  CHECK(right * (backend == Backend::gpu ? 8 : 4) > calls);  // a GPU does not run every step
}

}  // namespace attn::tests
