"""PyTorch operators with gradients: attention, decoding, paged decoding.

CUDA tensors run on the GPU in PyTorch's current stream, CPU tensors in the emulator. The operators
torch.ops.attn.* take pointers and strides of tensors, know the shapes of their results without
running (torch.compile), and never return an input. They need PyTorch 1.13; torch.compile needs 2.4.
`attention` uses them only where PyTorch traces: the dispatch of an operator takes as long as the
rest of a call.
"""
import functools
import warnings

import torch

from . import judge, library as lib, operations

_SIZES = ("float scale, float softcap, bool causal, int window_left, int window_right, str layout, "
          "str step")
_PACKED = ("Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, "
           "float dropout, int seed")
_library = torch.library.Library("attn", "DEF")
SHAPES = {}  # operator -> empty results for its arguments, as torch.compile needs them


def _register(schema, implementation, shapes):
    """Defines an operator; `shapes` returns empty results of the right sizes."""
    name = schema.partition("(")[0]
    _library.define(schema)
    for key in ("CPU", "CUDA"):
        _library.impl(name, implementation, key)
    if hasattr(torch.library, "register_fake"):
        torch.library.register_fake(f"attn::{name}", shapes, lib=_library)
    SHAPES[name] = shapes


def _window(left, right):
    return None if left == right == -1 else (left, right)


def _options(scale, softcap, causal, window_left, window_right, layout, step):
    return {"scale": scale or None, "softcap": softcap, "causal": causal,
            "window": _window(window_left, window_right), "layout": layout, "step": step or None}


def _lse_like(q, layout):
    if q.dim() == 3:
        return q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    b, h, n = q.shape[:3] if layout == "bhnd" else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty((b, h, n), dtype=torch.float32)


def _contiguous_like(x):
    return x.new_empty(x.shape)


def _without_gradients(function):
    """`function` without recording, for operators, whose inputs may require gradients. In an
    autograd.Function nothing is recorded: there it costs nothing."""
    @functools.wraps(function)
    def call(*arguments):
        if not torch.is_grad_enabled():
            return function(*arguments)
        with torch.no_grad():
            return function(*arguments)
    return call


@_without_gradients
def _forward(q, k, v, alibi, cu_q, cu_k, max_q, max_k, dropout, seed, scale, softcap, causal, left,
             right, layout, step):
    return operations.run_forward(
        "forward", None, q, k, v, causal, _window(left, right), scale or None, softcap, alibi,
        dropout, seed, cu_q, cu_k, max_q or None, max_k or None, layout, step or None, True, None,
        None)


def _forward_shapes(q, k, v, alibi, cu_q, cu_k, max_q, max_k, dropout, seed, *options):
    return _contiguous_like(q), _lse_like(q, options[5])


def _wants_determinism():
    """As PyTorch's own backward passes: with warn_only they only warn."""
    if not torch.are_deterministic_algorithms_enabled():
        return False
    if torch.is_deterministic_algorithms_warn_only_enabled():
        warnings.warn("attn: gradients may differ from run to run; with deterministic=True they do "
                      "not")
        return False
    return True


@_without_gradients
def _backward(q, k, v, o, lse, dout, alibi, cu_q, cu_k, max_q, max_k, dropout, seed, scale, softcap,
              causal, left, right, layout, step, deterministic=None):
    if deterministic is None:  # here, where nothing is traced
        deterministic = _wants_determinism()
    return operations.backward(q, k, v, o, lse, dout, alibi=alibi, cu_seqlens_q=cu_q,
                               cu_seqlens_k=cu_k, max_seqlen_q=max_q or None,
                               max_seqlen_k=max_k or None, dropout=dropout, seed=seed,
                               deterministic=deterministic,
                               **_options(scale, softcap, causal, left, right, layout, step))


def _backward_shapes(q, k, v, *_):
    return _contiguous_like(q), _contiguous_like(k), _contiguous_like(v)


@_without_gradients
def _quantised(q, k, v, dtype, scale, causal, window_left, window_right, layout, step):
    return operations.quantised_forward(q, k, v, dtype, scale=scale or None, causal=causal,
                                        window=(window_left, window_right), layout=layout,
                                        step=step or None, return_lse=True)


@_without_gradients
def _decode(q, k, v, lengths, alibi, *options):
    return operations.decode(q, k, v, lengths, alibi=alibi, return_lse=True, **_options(*options))


@_without_gradients
def _paged_decode(q, k_pages, v_pages, page_table, lengths, *options):
    return operations.paged_decode(q, k_pages, v_pages, page_table, lengths, return_lse=True,
                                   **_options(*options))


def _paged_decode_shapes(q, k_pages, v_pages, page_table, lengths, *options):
    o = q.new_empty((*q.shape[:-1], q.shape[-1] if v_pages is not None else 512))
    return o, _lse_like(q, options[5])


@_without_gradients
def _paged_append(k_new, v_new, k_pages, v_pages, page_table, lengths, step):
    operations.paged_append(k_new, v_new, k_pages, v_pages, page_table, lengths, step=step or None)


_register(f"forward(Tensor q, Tensor k, Tensor v, Tensor? alibi, {_PACKED}, {_SIZES}) -> "
          "(Tensor, Tensor)", _forward, _forward_shapes)
_register("backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor dout, Tensor? "
          f"alibi, {_PACKED}, {_SIZES}, bool? deterministic=None) -> (Tensor, Tensor, Tensor)",
          _backward, _backward_shapes)
_register("quantised_forward(Tensor q, Tensor k, Tensor v, str dtype, float scale, bool causal, "
          "int window_left, int window_right, str layout, str step) -> (Tensor, Tensor)",
          _quantised,
          lambda q, k, v, dtype, scale, causal, left, right, layout, step:
          (_contiguous_like(q), _lse_like(q, layout)))
_register(f"decode(Tensor q, Tensor k, Tensor v, Tensor lengths, Tensor? alibi, {_SIZES}) -> "
          "(Tensor, Tensor)", _decode,
          lambda q, k, v, lengths, alibi, *options: (_contiguous_like(q), _lse_like(q, options[5])))
_register("paged_decode(Tensor q, Tensor k_pages, Tensor? v_pages, Tensor page_table, Tensor "
          f"lengths, {_SIZES}) -> (Tensor, Tensor)", _paged_decode, _paged_decode_shapes)
_register("paged_append(Tensor k_new, Tensor v_new, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor "
          "page_table, Tensor lengths, str step) -> ()", _paged_append, lambda *_: None)


_is_compiling = torch.compiler.is_compiling if hasattr(torch, "compiler") else lambda: False
_has_transforms = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_eager(q, k, v):
    """Whether nothing but the result of this call is asked for: no compiler, trace, mode, vmap."""
    return (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN and
            not (_is_compiling() or torch._C._get_tracing_state() or _has_transforms() or
                 torch._C._len_torch_dispatch_stack()))


def _refuse_second_derivatives():
    """Where a gradient is itself to be differentiated, it would silently be a constant."""
    if torch.is_grad_enabled() and not (_is_compiling() or _has_transforms()):
        raise lib.Unsupported("create_graph: there are no second derivatives")


class _Attention(torch.autograd.Function):
    """An operator of its own would cost a call more; the gradient is found here instead."""

    @staticmethod
    def forward(ctx, q, k, v, alibi, cu_q, cu_k, options, backward_step, deterministic):
        run = _forward if _is_eager(q, k, v) else torch.ops.attn.forward
        o, lse = run(q, k, v, alibi, cu_q, cu_k, *options)
        ctx.save_for_backward(q, k, v, o, lse, alibi, cu_q, cu_k)
        ctx.options = *options[:-1], backward_step, deterministic
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # lse's would be zeros, a launch
        return o, lse

    @staticmethod
    def backward(ctx, dout, _):
        _refuse_second_derivatives()
        if dout is None:
            return (None,) * 9
        q, k, v, o, lse, alibi, cu_q, cu_k = ctx.saved_tensors
        run = _backward if _is_eager(q, o, dout) else torch.ops.attn.backward
        gradients = run(q, k, v, o, lse, dout.contiguous(), alibi, cu_q, cu_k, *ctx.options)
        return (*gradients, *(None,) * 6)


def attention(q, k, v, *, causal=False, window=None, scale=None, softcap=0.0, alibi=None,
              dropout=0.0, seed=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
              max_seqlen_k=None, layout="bhnd", step=None, backward_step=None, deterministic=None,
              return_lse=False):
    """attn.forward with gradients of q, k and v; `backward_step` names the backward pass's step.

    `deterministic`: True: only steps whose gradients are bitwise equal from run to run, or
    attn.Unsupported. False: any step. None: True after torch.use_deterministic_algorithms(True),
    unless with warn_only.
    lse has no gradient. With alibi there are none at all, and no second derivatives. Without
    `seed`, dropout draws one from PyTorch's CPU generator (torch.manual_seed).
    """
    differentiated = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad)
    if differentiated and alibi is not None:
        raise lib.Unsupported("alibi: no step has gradients with it")
    if seed is None:
        seed = int(torch.randint(2 ** 62, ())) if dropout else 0
    if not differentiated and _is_eager(q, k, v):
        return operations.run_forward(
            "forward", None, q, k, v, causal, window, scale, softcap, alibi, dropout, seed,
            cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, layout, step, return_lse, None,
            None)
    options = (max_seqlen_q or 0, max_seqlen_k or 0, float(dropout), seed, lib.scale_of(scale),
               float(softcap or 0), bool(causal), *lib.window_of(window), layout, step or "")
    o, lse = _Attention.apply(q, k, v, alibi, cu_seqlens_q, cu_seqlens_k, options,
                              backward_step or "",
                              None if deterministic is None else bool(deterministic))
    return (o, lse) if return_lse else o


class _Reference(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, masks):
        ctx.save_for_backward(q, k, v)
        ctx.masks = masks
        return torch.from_numpy(judge.reference(q, k, v, **masks)).to(q)

    @staticmethod
    def backward(ctx, dout):
        _refuse_second_derivatives()
        q, k, v = ctx.saved_tensors
        found = judge.reference(q, k, v, dout, **ctx.masks)
        return (*(torch.from_numpy(x).to(q) for x in found), None)


def reference(q, k, v, *, causal=False, window=None, scale=None, softcap=0.0, dropout=0.0,
              seed=0):
    """attn.reference with gradients, as a tensor of q's type and device; it runs on the host."""
    return _Reference.apply(q, k, v, {"causal": causal, "window": window, "scale": scale,
                                      "softcap": softcap, "dropout": dropout, "seed": seed})
