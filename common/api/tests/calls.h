/// \file
/// Calls of libattention for a problem of the chapters, with memory of their own. For tests.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/make_plan.h"
#include "attn/mask.h"
#include "attn/sliding_tiles.h"
#include "attn/tensor.h"
#include "device/device.h"
#include "run/schedule.h"
#include "run/session.h"
#include "tests/catch.h"

namespace attn::tests {

/// Allocations of the calling thread so far (allocations.cpp).
int64_t allocations();

/// Memory at an address that 256 divides, after `offset` bytes; filled with 0xFF.
class Memory {
 public:
  explicit Memory(std::size_t bytes = 0, std::size_t offset = 0,
                  Backend backend = Backend::emulated)
      : bytes_(bytes), offset_(offset) {
    if (backend == Backend::gpu) {
      gpu_ =
          std::make_unique<DeviceBuffer>(backend, "memory", static_cast<int64_t>(bytes + offset));
      gpu_->poison();
    } else {
      store_.assign(bytes + offset + 256, std::byte{0xFF});
    }
  }
  std::byte* data() {
    if (gpu_) return static_cast<std::byte*>(gpu_->data()) + offset_;
    const auto at = reinterpret_cast<std::uintptr_t>(store_.data());
    return store_.data() + (256 - at % 256) % 256 + offset_;
  }
  std::size_t bytes() const { return bytes_; }
  void write(const std::vector<std::byte>& from) {
    if (gpu_)
      gpu_->upload(from.data(), static_cast<int64_t>(offset_), static_cast<int64_t>(from.size()));
    else
      std::memcpy(data(), from.data(), from.size());
  }
  std::vector<std::byte> read() {
    std::vector<std::byte> to(bytes_);
    if (gpu_)
      gpu_->download(to.data(), static_cast<int64_t>(offset_), static_cast<int64_t>(bytes_));
    else
      std::memcpy(to.data(), data(), bytes_);
    return to;
  }

 private:
  std::size_t bytes_, offset_;
  std::vector<std::byte> store_;
  std::unique_ptr<DeviceBuffer> gpu_;
};

inline std::optional<api::Call> call_of(const Step& step) {
  using api::Call;
  static const std::map<std::string, Call> calls{
      {"forward", Call::forward},
      {"backward", Call::backward},
      {"decode", Call::decode},
      {"paged_decode", Call::paged_decode},
      {"paged_mla", Call::paged_decode},
      {"paged_prefill", Call::paged_prefill},
      {"paged_append", Call::paged_append},
  };
  const auto found = calls.find(step.operation->name);
  if (found == calls.end()) return std::nullopt;
  if (found->second == Call::forward && quantises_to(step) != DType::bf16)
    return Call::quantised_forward;
  return found->second;
}

using MakePlan = attn_status (*)(const attn_problem*, attn_plan**);
inline MakePlan plan_function(api::Call call) {
  static constexpr MakePlan kAll[] = {attn_forward_plan,          attn_backward_plan,
                                      attn_decode_plan,           attn_paged_decode_plan,
                                      attn_paged_prefill_plan,    attn_paged_append_plan,
                                      attn_quantised_forward_plan};
  return kAll[static_cast<int>(call)];
}

/// The problem of the ABI for one of the chapters, on the emulator.
inline attn_problem abi_problem(const Problem& p, const Operation& op) {
  attn_problem a;
  attn_problem_defaults(&a);
  a.backend = ATTN_EMULATED;
  a.dtype = p.dtype == DType::bf16   ? ATTN_BF16
            : p.dtype == DType::fp16 ? ATTN_FP16
            : p.dtype == DType::fp32 ? ATTN_FP32
            : p.dtype == DType::int8 ? ATTN_INT8
            : p.dtype == DType::e4m3 ? ATTN_E4M3
                                     : ATTN_INT4;
  a.batch = p.batch, a.heads = p.heads, a.kv_heads = p.kv_heads;
  a.seqlen_q = p.seqlen_q, a.seqlen_k = p.seqlen_k, a.head_dim = p.head_dim;
  a.causal = p.causal, a.window_left = p.window_left, a.window_right = p.window_right;
  a.softmax_scale = p.softmax_scale, a.softcap = p.softcap, a.alibi = p.alibi;
  a.dropout = p.dropout, a.seed = p.seed, a.sinks = p.own.contains("sinks");
  a.packed = p.varlen();
  if (p.varlen()) a.lengths_q = p.varlen_q.data(), a.lengths_k = p.varlen_k.data();
  if (p.varlen()) a.total_q = p.tokens_q(), a.total_k = p.tokens_k();
  if (!p.seqused_k.empty()) a.lengths_k = p.seqused_k.data();
  for (const TensorSpec& spec : op.inputs(p)) {
    if (spec.name == "page_table") a.max_pages = spec.columns();
    if (spec.name == "k" && op.name.starts_with("paged"))
      a.num_pages = spec.shape[0], a.page_size = spec.shape[1];
  }
  return a;
}

/// The tile of some_tiles().
inline constexpr Sides kTile{2, 8, 8};

/// A problem's mask as the ABI takes it.
class HostMask {
 public:
  explicit HostMask(const Problem& p) {
    if (!p.mask) return;
    const std::vector<HostTensor> all = p.mask->tensors();
    if (const auto* tiles = dynamic_cast<const SlidingTiles*>(p.mask.get())) {
      canvas_ = tiles->canvas_tiles();
      for (std::size_t i = 0; i < 3; ++i) canvas_[i] *= kTile[i];
      for (std::size_t i = 0; i < all[0].numbers.size(); ++i)
        windows_.push_back(all[0].numbers[i] * kTile[i % 3]);
      return;
    }
    std::copy_n(all[0].spec.shape, 4, shape_);
    first_.assign(all[0].numbers.begin(), all[0].numbers.end());
    if (all.size() == 2) second_.assign(all[1].numbers.begin(), all[1].numbers.end());
    for (const float open : all[0].data) blocks_.push_back(open != 0);
    if (const auto* blocks = dynamic_cast<const BlockMask*>(p.mask.get()))
      block_m_ = blocks->block_m(), block_n_ = blocks->block_n();
  }
  void give(attn_problem& a) const {
    if (!windows_.empty()) {
      a.mask_heads = a.heads, a.tile_windows = windows_.data();
      std::ranges::copy(canvas_, a.canvas), std::ranges::copy(kTile, a.tile);
    }
    if (first_.empty() && blocks_.empty()) return;
    a.mask_batch = shape_[0], a.mask_heads = shape_[1];
    if (!blocks_.empty()) {
      a.block_mask = blocks_.data(), a.block_m = block_m_, a.block_n = block_n_;
      return;
    }
    a.mask_intervals = shape_[2];
    a.hidden_begin = first_.data(), a.hidden_end = second_.data();
  }

 private:
  int64_t shape_[4] = {}, block_m_ = 0, block_n_ = 0;
  std::vector<uint8_t> blocks_;
  std::vector<int32_t> first_, second_;
  Sides canvas_ = {};
  std::vector<int64_t> windows_;
};

/// The tensors of an operation as the ABI takes them, by the chapters' names.
struct CallTensors {
  Backend backend = Backend::emulated;
  std::map<std::string, Memory> memory = {};
  attn_tensors tensors = {};

  void give(const std::string& name, const std::vector<std::byte>& bytes) {
    make(name, bytes.size());
    memory.at(name).write(bytes);
  }
  void make(const std::string& name, std::size_t bytes) {
    memory.insert_or_assign(name, Memory(bytes, 0, backend));
    point(name);
  }
  void point(const std::string& name) {
    tensors.size = sizeof tensors;
    void* const at = memory.at(name).data();
    const std::map<std::string, attn_tensor attn_tensors::*> some{
        {"q", &attn_tensors::q},         {"k", &attn_tensors::k},
        {"v", &attn_tensors::v},         {"o", &attn_tensors::o},
        {"do", &attn_tensors::dout},     {"dq", &attn_tensors::dq},
        {"dk", &attn_tensors::dk},       {"dv", &attn_tensors::dv},
        {"k_new", &attn_tensors::k_new}, {"v_new", &attn_tensors::v_new}};
    if (const auto found = some.find(name); found != some.end()) {
      (tensors.*found->second).data = at;
    } else if (name == "lse") {
      tensors.lse = reinterpret_cast<float*>(at);
    } else if (name == "sinks") {
      tensors.sinks = reinterpret_cast<const float*>(at);
    } else if (name == "alibi") {
      tensors.alibi = reinterpret_cast<const float*>(at);
    } else {
      const auto* const numbers = reinterpret_cast<const int32_t*>(at);
      if (name == "cu_seqlens_q") tensors.cu_seqlens_q = numbers;
      if (name == "cu_seqlens_k") tensors.cu_seqlens_k = numbers;
      if (name == "seqused_k") tensors.seqused_k = numbers;
      if (name == "page_table") tensors.page_table = numbers;
    }
  }
  /// The bytes of a tensor.
  std::vector<std::byte> bytes(const std::string& name) { return memory.at(name).read(); }
};

/// Masks of a problem, of a third of the blocks and of two intervals per column.
inline std::shared_ptr<const KeyMask> some_blocks(const Problem& p) {
  const std::vector<int64_t> shape{1, p.heads, (p.seqlen_q + 127) / 128, (p.seqlen_k + 127) / 128};
  std::vector<bool> open(static_cast<std::size_t>(shape[1] * shape[2] * shape[3]));
  for (std::size_t n = 0; n < open.size(); ++n) open[n] = n % 3 != 1;
  return std::make_shared<BlockMask>(128, 128, shape, std::move(open));
}
inline std::shared_ptr<const KeyMask> some_columns(const Problem& p) {
  std::vector<int64_t> begin, end;
  for (int64_t j = 0; j < p.batch * 2 * p.seqlen_k; ++j) {
    begin.push_back(7 * j % p.seqlen_q);
    end.push_back(begin.back() + j % (p.seqlen_q / 2));
  }
  return std::make_shared<ColumnIntervals>(std::vector<int64_t>{p.batch, 1, 2, p.seqlen_k},
                                           std::move(begin), std::move(end));
}

/// A canvas of four tiles, and 48 tokens of text.
inline std::shared_ptr<const KeyMask> some_tiles() {
  return std::make_shared<SlidingTiles>(Sides{2, 16, 16}, kTile,
                                        std::vector<Sides>{{2, 8, 16}, {2, 8, 8}}, 48);
}

/// A problem with several tiles and sequences that a step takes, or nothing.
inline std::optional<Problem> problem_for(const Step& step) {
  const Operation& op = *step.operation;
  const bool decodes = op.few_queries > 0;
  for (int n = 0; n < 24; ++n) {
    Problem p;
    p.batch = decodes ? 2 : 1, p.heads = 2, p.kv_heads = 1;
    p.seqlen_q = decodes ? 3 : 70, p.seqlen_k = 160, p.head_dim = 64;
    p.dtype = quantises_to(step);
    p.causal = n % 2 == 0;
    if (n / 2 % 2 == 1) p.dtype = DType::fp32;
    if (op.name == "paged_mla") p.head_dim = 576;
    if (decodes) p.seqused_k = {160, 37};
    if (op.name == "paged_prefill") {
      p.seqused_k.clear();
      p.varlen_q = {33, 5}, p.varlen_k = {160, 37};
    }
    if (n % 8 >= 4) p.head_dim = 128, p.kv_heads = 2;
    if (n >= 8 && op.name == "forward") p.mask = some_columns(p);
    if (n >= 16 && op.name == "forward") {
      p.seqlen_q = p.seqlen_k = 560, p.causal = false;
      p.mask = some_tiles();
    }
    if (op.complete) op.complete(p, {"--head-dim", "--kv-heads", "--heads"});
    p.finish();
    if (!refusal(step, p)) return p;
  }
  return std::nullopt;
}

/// Without printing all bytes where they differ.
inline bool same(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  return a == b;
}

/// The largest difference of two tensors, relative to the largest element; NaN counts as one.
inline double distance(const TensorSpec& spec, const std::vector<std::byte>& a,
                       const std::vector<std::byte>& b) {
  const auto values = [&](const std::vector<std::byte>& bytes) {
    std::vector<float> x(bytes.size() * 8 / static_cast<std::size_t>(bits_of(spec.dtype)));
    decode(spec.dtype, bytes.data(), x.size(), x.data());
    return x;
  };
  const std::vector<float> x = values(a), y = values(b);
  double most = 0, size = 0;
  for (std::size_t n = 0; n < x.size(); ++n) {
    if (std::isinf(y[n]) && x[n] == y[n]) continue;  // lse of a fully masked row
    const double apart = std::abs(double{x[n]} - double{y[n]});
    most = std::max(most, std::isfinite(apart) ? apart : HUGE_VAL);
    size = std::max(size, std::abs(double{y[n]}));
  }
  return size > 0 ? most / size : most;
}

struct Result {
  std::string fault;
  std::map<std::string, std::vector<std::byte>> outputs;
};

inline Result by_session(const Step& step, const Problem& p, const HostTensors& inputs,
                         std::map<std::string, std::vector<std::byte>>* saved, Backend backend) {
  Result result;
  choose_schedule(1);
  Session session(p, *step.operation, backend, inputs);
  Status status = session.prepare(step);
  if (status.ok()) status = session.launch();
  if (!status.ok()) return {status.message, {}};
  for (const auto& [name, tensor] : session.outputs()) result.outputs[name] = to_bytes(tensor);
  // O and lse of a forward pass, for the backward one.
  if (!step.operation->saved(p).empty()) {
    Session forwards(p, forward(), backend, inputs);
    for (const auto& named : api::all_steps())
      if (named.step->prepare.emulated == nullptr && named.step->operation == &forward() &&
          named.step->launch.emulated == step.prepare.emulated)
        if (forwards.prepare(*named.step).ok() && forwards.launch().ok())
          for (const auto& [name, tensor] : forwards.outputs()) (*saved)[name] = to_bytes(tensor);
  }
  return result;
}

/// Plans, prepares and runs: "" or the line of the call that failed.
inline std::string run(api::Call call, const attn_problem& problem, const attn_tensors& tensors) {
  attn_plan* plan = nullptr;
  if (plan_function(call)(&problem, &plan) != ATTN_OK) return attn_last_error();
  const std::unique_ptr<attn_plan, void (*)(attn_plan*)> owner(plan, attn_plan_destroy);
  const std::size_t bytes = attn_plan_workspace_bytes(plan);
  Memory workspace(bytes, 0, problem.backend == ATTN_GPU ? Backend::gpu : Backend::emulated);
  if (attn_prepare(plan, &tensors, workspace.data(), bytes, nullptr) != ATTN_OK)
    return attn_last_error();
  return attn_run(plan, &tensors, workspace.data(), bytes, nullptr) == ATTN_OK ? ""
                                                                               : attn_last_error();
}

inline CallTensors tensors_of(const Operation& op, const Problem& p, const HostTensors& inputs,
                              const std::map<std::string, std::vector<std::byte>>& saved = {},
                              Backend backend = Backend::emulated) {
  CallTensors tensors{backend, {}, {}};
  for (const auto& [name, tensor] : inputs) tensors.give(name, to_bytes(tensor));
  for (const auto& [name, bytes] : saved) tensors.give(name, bytes);
  for (const TensorSpec& spec : op.outputs(p))
    if (!inputs.contains(spec.name))
      tensors.make(spec.name, static_cast<std::size_t>(spec.bytes()));
  return tensors;
}

inline void compare_with_session(const api::NamedStep& named, api::Call call, const Problem& p,
                                 Backend backend) {
  INFO(named.name);
  const Step& step = *named.step;
  const HostTensors inputs = draw(*step.operation, p).tensors;
  std::map<std::string, std::vector<std::byte>> saved;
  const Result right = by_session(step, p, inputs, &saved, backend);
  REQUIRE(right.fault == "");
  attn_problem problem = abi_problem(p, *step.operation);
  problem.backend = backend == Backend::gpu ? ATTN_GPU : ATTN_EMULATED;
  problem.step = named.name.c_str();
  const HostMask mask(p);
  mask.give(problem);
  std::vector<int32_t> table;
  if (inputs.contains("page_table")) {
    const auto& numbers = inputs.at("page_table").numbers;
    table.assign(numbers.begin(), numbers.end());
    problem.host_page_table = table.data();
  }
  CallTensors tensors = tensors_of(*step.operation, p, inputs, saved, backend);
  choose_schedule(1);
  REQUIRE(run(call, problem, tensors.tensors) == "");
  if (backend == Backend::gpu) synchronize(backend);
  for (const TensorSpec& spec : step.operation->outputs(p)) {
    INFO(spec.name);
    const std::vector<std::byte> by_call = tensors.bytes(spec.name);
    // On a GPU the order of atomic additions changes the last bits of some steps.
    if (backend == Backend::gpu && !step.deterministic)
      CHECK(distance(spec, by_call, right.outputs.at(spec.name)) < 0x1p-6);
    else
      CHECK(same(by_call, right.outputs.at(spec.name)));
  }
}

}  // namespace attn::tests
