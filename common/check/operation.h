/// \file
/// Operations: the function that steps compute, independent of their implementation.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "attn/feature.h"
#include "attn/step.h"
#include "attn/tensor.h"
#include "check/reference.h"

namespace attn {

/// The inputs and outputs of an operation, the count of its work, and its reference. A chapter
/// declares its own operations; those that several chapters share are below.
struct Operation {
  std::string name;
  std::function<std::vector<TensorSpec>(const Problem&)> inputs;  ///< drawn, made or loaded
  std::function<std::vector<TensorSpec>(const Problem&)> saved;  ///< written by Step::prepare
  /// Checked. An output with the name of an input is in-out: the launch receives its value and may
  /// change it.
  std::function<std::vector<TensorSpec>(const Problem&)> outputs;
  /// Useful operations by convention: 4 d B Hq per visible pair forward, 2.5 times as many
  /// backward. 0 for operations whose rate is given in bytes per second.
  std::function<double(const Problem&)> flop;
  std::function<std::vector<Expected>(const Problem&, const HostTensors&, Selection)> reference;
  int64_t few_queries = 0;  ///< default of --seqlen-q; 0: the general default
  bool matrix = false;  ///< on rows of scores (Problem::matrix)
  std::vector<Feature> own = {};  ///< features, with their options, that only this operation has
  /// The rows of an in-out tensor that may change, as ascending row indices in memory.
  std::function<std::vector<int64_t>(const Problem&, const HostTensors&, const std::string& tensor)>
      changes = {};
  /// The useful bytes, for operations whose rate is given in them and compared with the read roof.
  /// Null: no such rate.
  std::function<double(const Problem&)> useful_bytes = {};
  /// Sets the input tables (page tables) that follow from the layouts of other inputs.
  std::function<void(const Problem&, HostTensors& inputs)> place = {};
  /// Sets the sizes of a problem from the files of --load. Null: they are the shapes of q, k, v.
  std::function<void(const std::string& folder, Problem&)> sizes_of_files = {};
  /// Derives fields from the operation's own options, before Problem::finish. Null: nothing to
  /// derive. `given`: the options on the command line.
  std::function<void(Problem&, const std::set<std::string>& given)> complete = {};
  /// Its steps multiply in 16 bits, whatever type keys and values are stored in. This selects the
  /// roof of the MMAs.
  bool products_of_16_bits = false;
  /// A line about a problem's inputs, printed before steps are checked. Null: no line.
  std::function<std::string(const Problem&, const HostTensors& inputs)> note = {};

  // For inputs that are stored in another form than q, k, v: quantised by a rule of their own.
  /// The tensors that are drawn or loaded instead of the inputs; `store` converts them to inputs.
  std::function<std::vector<TensorSpec>(const Problem&)> originals = {};
  std::function<HostTensors(const Problem&, const HostTensors& originals)> store = {};
  /// The exact q, k, v that stored inputs represent; the reference is computed from them. The
  /// distance of the outputs from those of the originals is reported separately.
  std::function<HostTensors(const Problem&, const HostTensors& stored)> logical = {};

  /// Bytes that no implementation can avoid: every input read once and every output written once;
  /// or the useful bytes.
  double compulsory_bytes(const Problem&) const;
};

/// The outputs of a problem without queries or without keys (Problem::empty): O and gradients are
/// 0; lse is -inf or, where a head has a sink, the sink. In-out tensors keep their values.
HostTensors outputs_without_keys(const Problem&, const Operation&, const HostTensors& inputs);

/// The type that determines the MMA roof of a problem.
DType type_of_products(const Operation&, const Problem&);

/// Attention forward: o and lse from q, k, v.
const Operation& forward();
/// Attention backward: dq, dk, dv from q, k, v, do, and the o and lse of a forward pass.
const Operation& backward();

/// Attention of a few queries per sequence to a KV cache with room for seqlen_k keys, of which
/// seqused_k [B] are in use.
const Operation& decode();
/// The tensor specs of attention: q, k, v, and those that only some problems have (alibi,
/// cu_seqlens_q ...).
std::vector<TensorSpec> attention_inputs(const Problem&);
/// The input `seqused_k`, int32 [B].
TensorSpec seqused_of(const Problem&);

/// The inputs of a problem, and the originals where the operation stores them in another form.
struct Inputs {
  HostTensors tensors, originals;
};
Inputs draw(const Operation&, const Problem&);

/// The expected rows of a step. If the step stores its inputs in fewer bits (Step::logical), they
/// are computed from the stored values.
std::vector<Expected> expected_of(const Step&, const Problem&, const HostTensors& inputs,
                                  Selection);

/// The type of `--dtype` to which a step quantises its inputs, as named by its features; else bf16.
DType quantises_to(const Step&);

/// The operations of a chapter's steps, each once, in order.
std::vector<const Operation*> operations_of(const Chapter&);
/// Looks up an operation by name; nullptr if there is none.
const Operation* find_operation(const Chapter&, std::string_view name);

}  // namespace attn
