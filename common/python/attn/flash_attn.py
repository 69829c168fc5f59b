"""The functions of the package flash_attn (FlashAttention-2) by their names, order and defaults.

`from attn.flash_attn import flash_attn_func`. Tensors are PyTorch's, [B, N, H, d], or packed
[tokens, H, d]. What libattention does not do is refused in one line: slopes per sequence or with a
block_table, block_table in varlen, num_splits, rotary embedding, cache_batch_idx, cache_leftpad.
deterministic=False, the default, leaves it to torch.use_deterministic_algorithms.
Dropout is reproducible by torch.manual_seed; its mask is not that of FlashAttention. With
return_attn_probs the third result, the matrix of probabilities, is None. Signatures: flash_attn
2.8.
"""
from typing import Optional, Union

import torch

from . import library as lib, operations, torch as attn_torch


def refuse(**given):
    """Refuses arguments that differ from the only accepted value: name=(value, accepted)."""
    for name, (value, accepted) in given.items():
        if isinstance(value, torch.Tensor) or value != accepted:
            raise lib.Unsupported(f"{name}: must be {accepted}: libattention has nothing else")


def _slopes(alibi_slopes):
    if alibi_slopes is not None and alibi_slopes.dim() != 1:
        raise lib.Unsupported(f"alibi_slopes: {list(alibi_slopes.shape)}: must be [nheads]; slopes "
                              "per sequence are not supported")
    return alibi_slopes


def attention(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
              deterministic, return_attn_probs, **packed):
    """What all functions below call: (out, softmax_lse, None) with return_attn_probs, else out."""
    found = attn_torch.attention(
        q, k, v, causal=causal, window=window_size, scale=softmax_scale, softcap=softcap,
        alibi=_slopes(alibi_slopes), dropout=dropout_p, layout="bnhd", return_lse=return_attn_probs,
        deterministic=deterministic or None, **packed)
    return (*found, None) if return_attn_probs else found


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False,
                    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                    return_attn_probs=False):
    """q [B, Nq, Hq, d], k and v [B, Nk, Hkv, d] -> out [B, Nq, Hq, d]."""
    return attention(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                     deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False,
                              window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                              deterministic=False, return_attn_probs=False):
    """qkv [B, N, 3, H, d]."""
    return attention(*qkv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap,
                     alibi_slopes, deterministic, return_attn_probs)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False,
                             window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                             deterministic=False, return_attn_probs=False):
    """kv [B, Nk, 2, Hkv, d]."""
    return attention(q, *kv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap,
                     alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                           dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                           softcap=0.0, alibi_slopes=None, deterministic=False,
                           return_attn_probs=False, block_table=None):
    """q [total_q, Hq, d], k and v [total_k, Hkv, d]; softmax_lse [Hq, total_q]."""
    refuse(block_table=(block_table, None))
    return attention(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                     deterministic, return_attn_probs, cu_seqlens_q=cu_seqlens_q,
                     cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
                     max_seqlen_k=max_seqlen_k)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0,
                                     softmax_scale=None, causal=False, window_size=(-1, -1),
                                     softcap=0.0, alibi_slopes=None, deterministic=False,
                                     return_attn_probs=False):
    """qkv [total, 3, H, d]."""
    return flash_attn_varlen_func(
        *(x.contiguous() for x in qkv.unbind(1)), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs)


def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                    dropout_p=0.0, softmax_scale=None, causal=False,
                                    window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                                    deterministic=False, return_attn_probs=False):
    """kv [total_k, 2, Hkv, d]."""
    return flash_attn_varlen_func(
        q, *(x.contiguous() for x in kv.unbind(1)), cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs)


def cached(q, k_cache, v_cache, k, v, cache_seqlens, table, softmax_scale, causal, window_size,
           softcap, alibi_slopes, num_splits, return_softmax_lse):
    """Decoding over a cache, contiguous or in pages, after new keys were stored in it."""
    if num_splits != 0:
        raise lib.Unsupported("num_splits: must be 0: steps choose their splits")
    if (k is None) != (v is None):
        raise lib.InvalidValue("k, v: both must be given, or none")
    # Everything is checked before new keys are stored.
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        if x is not None and (x.dtype != q.dtype or x.device != q.device):
            raise lib.InvalidValue(f"{name}: {x.dtype} on {x.device}: must be that of q, {q.dtype} "
                                   f"on {q.device}")
        if x is not None and x.shape[2:] != k_cache.shape[2:]:
            raise lib.InvalidValue(f"{name}: {list(x.shape)}: must have the heads and head dim of "
                                   f"k_cache, {list(k_cache.shape)}")
    batch, new = q.shape[0], 0 if k is None else k.shape[1]
    if not isinstance(cache_seqlens, torch.Tensor):
        filled = k_cache.shape[1] if cache_seqlens is None and table is None else cache_seqlens
        if filled is None:
            raise lib.InvalidValue("cache_seqlens: must be given with a block table")
        cache_seqlens = torch.full((batch,), filled, dtype=torch.int32, device=q.device)
    room = k_cache.shape[1] * (1 if table is None else table.shape[1])
    if not cache_seqlens.is_cuda and ((cache_seqlens < 0) | (cache_seqlens + new > room)).any():
        raise lib.InvalidValue(f"cache_seqlens: must be from 0 to {room - new}, the room of a "
                               f"sequence without the {new} new tokens")
    lengths = cache_seqlens + new if new else cache_seqlens
    options = {"causal": causal, "window": window_size, "scale": softmax_scale, "softcap": softcap,
               "layout": "bnhd", "return_lse": True}
    if table is not None:
        refuse(alibi_slopes=(alibi_slopes, None))
        if new:
            operations.paged_append(k, v, k_cache, v_cache, table, lengths)
        out, lse = operations.paged_decode(q, k_cache, v_cache, table, lengths, **options)
    else:
        if new:  # as a scatter: positions stay on the device
            rows = cache_seqlens.long()[:, None] + torch.arange(new, device=q.device)
            sequences = torch.arange(batch, device=q.device)[:, None]
            k_cache[sequences, rows], v_cache[sequences, rows] = k, v
        out, lse = operations.decode(q, k_cache, v_cache, lengths, alibi=_slopes(alibi_slopes),
                                     **options)
    return (out, lse) if return_softmax_lse else out


def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens: Optional[Union[int, torch.Tensor]] = None,
        cache_batch_idx: Optional[torch.Tensor] = None,
        cache_leftpad: Optional[torch.Tensor] = None, block_table: Optional[torch.Tensor] = None,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False):
    """q [B, Nq, Hq, d]; k_cache [B, Nk, Hkv, d], or with block_table [pages, page_size, Hkv, d].

    New k and v [B, n, Hkv, d] are stored at cache_seqlens first, in place.
    """
    refuse(rotary_cos=(rotary_cos, None), rotary_sin=(rotary_sin, None),
           cache_batch_idx=(cache_batch_idx, None), cache_leftpad=(cache_leftpad, None))
    return cached(q, k_cache, v_cache, k, v, cache_seqlens, block_table, softmax_scale, causal,
                  window_size, softcap, alibi_slopes, num_splits, return_softmax_lse)
