/// \file
/// Calls of libattention for a problem of the chapters, with memory of their own. For tests.
#pragma once

#include <cstddef>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "api/make_plan.h"
#include "attn/tensor.h"

namespace attn::tests {

/// Host memory at an address that 256 divides, after `offset` bytes.
class Memory {
 public:
  explicit Memory(std::size_t bytes = 0, std::size_t offset = 0)
      : bytes_(bytes), offset_(offset), store_(bytes + offset + 256, std::byte{0xFF}) {}
  std::byte* data() {
    const auto at = reinterpret_cast<std::uintptr_t>(store_.data());
    return store_.data() + (256 - at % 256) % 256 + offset_;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_, offset_;
  std::vector<std::byte> store_;
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

/// The tensors of an operation as the ABI takes them, by the chapters' names.
struct CallTensors {
  std::map<std::string, Memory> memory;
  attn_tensors tensors{};

  void give(const std::string& name, const std::vector<std::byte>& bytes) {
    Memory& m = memory[name] = Memory(bytes.size());
    std::memcpy(m.data(), bytes.data(), bytes.size());
    point(name);
  }
  void make(const std::string& name, std::size_t bytes) {
    memory[name] = Memory(bytes);
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
  std::vector<std::byte> bytes(const std::string& name) {
    Memory& m = memory.at(name);
    return {m.data(), m.data() + m.bytes()};
  }
};

}  // namespace attn::tests
