/// \file
/// The device pointers of a launch, typed and named once per family of steps. Shapes are those of
/// docs/notation.md.
#pragma once

#include "attn/step.h"

namespace attn {

/// Forward pass: Q, K, V to O and lse.
template <class Element>
struct ForwardParams {
  const Element *q, *k, *v;  ///< [B, H, N, d]; `v` is null for MLA, whose values are part of K
  Element* o;
  float* lse;  ///< [B, Hq, Nq], natural logarithm

  explicit ForwardParams(const Arguments& args)
      : q(args.in<Element>("q")),
        k(args.in<Element>("k")),
        v(args.in_or_null<Element>("v")),
        o(args.out<Element>("o")),
        lse(args.out<float>("lse")) {}
};

/// Backward pass: what the forward pass left (O and lse) and dO, to dQ, dK, dV.
template <class Element>
struct BackwardParams {
  const Element *q, *k, *v, *o, *dout;
  const float* lse;
  Element *dq, *dk, *dv;

  explicit BackwardParams(const Arguments& args)
      : q(args.in<Element>("q")),
        k(args.in<Element>("k")),
        v(args.in<Element>("v")),
        o(args.in<Element>("o")),
        dout(args.in<Element>("do")),
        lse(args.in<float>("lse")),
        dq(args.out<Element>("dq")),
        dk(args.out<Element>("dk")),
        dv(args.out<Element>("dv")) {}
};

/// Decoding: the forward pass over a cache of which `seqused_k` keys are used. The workspaces of
/// split-KV are null for a step that has none.
template <class Element>
struct DecodeParams : ForwardParams<Element> {
  const int* seqused_k;            ///< [B]
  float *o_partial, *lse_partial;  ///< one per split
  unsigned* arrived;               ///< arrival counters, 0 between launches

  explicit DecodeParams(const Arguments& args)
      : ForwardParams<Element>(args),
        seqused_k(args.in_or_null<int>("seqused_k")),
        o_partial(args.out_or_null<float>("o_partial")),
        lse_partial(args.out_or_null<float>("lse_partial")),
        arrived(args.out_or_null<unsigned>("arrived")) {}
};

/// Decoding or prefill over pages.
template <class Element>
struct PagedParams : DecodeParams<Element> {
  const int* page_table;  ///< [B, max_pages]

  explicit PagedParams(const Arguments& args)
      : DecodeParams<Element>(args), page_table(args.in<int>("page_table")) {}
};

}  // namespace attn
