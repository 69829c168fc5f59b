/// \file
/// Operations: what the steps of a chapter compute, independent of how.
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

/// What an operation takes and gives, how its work is counted, and what is right. A chapter
/// declares those that it alone has; those of several chapters are below.
struct Operation {
  std::string name;
  std::function<std::vector<TensorSpec>(const Problem&)> inputs;  ///< drawn, made or loaded
  std::function<std::vector<TensorSpec>(const Problem&)> saved;   ///< left by Step::prepare
  /// Checked. One that has the name of an input is in-out: the launch gets it as given and may
  /// change it.
  std::function<std::vector<TensorSpec>(const Problem&)> outputs;
  /// Useful operations by the field's convention: 4 d B Hq a visible pair forward, 2.5 x backward.
  /// 0 for operations whose rate is said in bytes a second.
  std::function<double(const Problem&)> flop;
  std::function<std::vector<Expected>(const Problem&, const HostTensors&, Selection)> reference;
  int64_t few_queries = 0;        ///< how many without --seqlen-q; 0: as many as any operation has
  bool matrix = false;            ///< of rows of scores alone (Problem::matrix)
  std::vector<Feature> own = {};  ///< features of this operation alone, with their options
  /// Of an in-out tensor the rows that may change, by their numbers in memory, rising.
  std::function<std::vector<int64_t>(const Problem&, const HostTensors&, const std::string& tensor)>
      changes = {};
  /// The bytes that are of use, for operations whose rate is said in them, against the roof of
  /// reading. Null: no such rate.
  std::function<double(const Problem&)> useful_bytes = {};
  /// Of tables among the inputs (page tables) follow layouts of others: sets them.
  std::function<void(const Problem&, HostTensors& inputs)> place = {};
  /// The sizes that the files of --load give, into a problem. Null: their shapes are those of q,
  /// k, v.
  std::function<void(const std::string& folder, Problem&)> sizes_of_files = {};
  /// What follows from its own options, before Problem::finish. Null: nothing. `given`: the options
  /// of the command line.
  std::function<void(Problem&, const std::set<std::string>& given)> complete = {};
  /// Its steps multiply in 16 bits, whatever keys and values are stored in: the roof of its
  /// products.
  bool products_of_16_bits = false;
  /// What inputs make of a problem, in a line that is printed before steps are checked. Null:
  /// nothing.
  std::function<std::string(const Problem&, const HostTensors& inputs)> note = {};

  // Inputs that are stored in another form than q, k, v: in fewer bits, by a rule of their own.
  /// What is drawn, or loaded, in place of the inputs; `store` makes these of it.
  std::function<std::vector<TensorSpec>(const Problem&)> originals = {};
  std::function<HostTensors(const Problem&, const HostTensors& originals)> store = {};
  /// The q, k, v that inputs mean, exact: the reference is that of these. How far outputs are from
  /// those of the originals is said beside it.
  std::function<HostTensors(const Problem&, const HostTensors& stored)> logical = {};

  /// Bytes that no implementation can avoid: every input read once, every output written once; or
  /// the useful ones.
  double compulsory_bytes(const Problem&) const;
};

/// The outputs of a problem without queries or without keys (Problem::empty): O and gradients 0,
/// lse -inf or, where a head has a sink, the sink; an in-out tensor is left as given.
HostTensors outputs_without_keys(const Problem&, const Operation&, const HostTensors& inputs);

/// The type whose rate is the roof of a problem's products.
DType type_of_products(const Operation&, const Problem&);

/// Attention: o and lse of q, k, v.
const Operation& forward();
/// Its gradients: dq, dk, dv of q, k, v, do, with the o and lse of a forward pass.
const Operation& backward();

/// Attention of a few queries of each sequence to a cache with room for seqlen_k keys, of which
/// seqused_k [B] are in use.
const Operation& decode();
/// The tensor specs of attention: q, k, v, and those that only some problems have (alibi,
/// cu_seqlens_q ...).
std::vector<TensorSpec> attention_inputs(const Problem&);
/// The input `seqused_k`, int32 [B].
TensorSpec seqused_of(const Problem&);

/// The inputs of a problem, and what they were made of where the operation stores them.
struct Inputs {
  HostTensors tensors, originals;
};
Inputs draw(const Operation&, const Problem&);

/// The rows that are expected of a step: of what it stores, if it stores its inputs in fewer bits
/// (Step::logical).
std::vector<Expected> expected_of(const Step&, const Problem&, const HostTensors& inputs,
                                  Selection);

/// The type of `--dtype` that a step quantises its inputs to, which it names among its features;
/// bf16 if it does not.
DType quantises_to(const Step&);

/// The operations of a chapter's steps, each once, in their order.
std::vector<const Operation*> operations_of(const Chapter&);
/// One of them by name; nullptr if there is none.
const Operation* find_operation(const Chapter&, std::string_view name);

}  // namespace attn
