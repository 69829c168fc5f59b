"""The functions of flash_attn_interface (FlashAttention-3) by their names, order and defaults.

Tensors are PyTorch's, [B, N, H, d], or packed [tokens, H, d]. What libattention does not do is
refused in one line: qv, descales, attention_chunk, num_splits, sm_margin, seqused_q and seqused_k
in packed batches, rotary embedding, scheduler metadata, and in the KV cache cache_batch_idx,
cache_leftpad, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, rotary_seqlens. pack_gqa is a hint and
is ignored. flash_attn_combine is missing. Signatures: the main branch of August 2026.
"""
from typing import Optional, Union

import torch

from . import flash_attn
from .flash_attn import cached, refuse


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None,
                    k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
                    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
                    return_attn_probs=False):
    """q [B, Nq, Hq, d], k and v [B, Nk, Hkv, d] -> out, or (out, softmax_lse)."""
    refuse(qv=(qv, None), q_descale=(q_descale, None), k_descale=(k_descale, None),
           v_descale=(v_descale, None), attention_chunk=(attention_chunk, 0),
           num_splits=(num_splits, 1), sm_margin=(sm_margin, 0))
    found = flash_attn.attention(q, k, v, 0.0, softmax_scale, causal, window_size, softcap, None,
                                 deterministic, True)
    return found[:2] if return_attn_probs else found[0]


def flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None,
                              v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
                              deterministic=False, num_heads_q=None, sm_margin=0,
                              return_attn_probs=False):
    """qkv [B, N, 3, H, d], or with num_heads_q [B, N, Hq + 2 Hkv, d]."""
    if num_heads_q is None:
        q, k, v = qkv.unbind(2)
    else:
        kv_heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, kv_heads, kv_heads], dim=2)
    return flash_attn_func(q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale,
                           window_size, attention_chunk, softcap, deterministic=deterministic,
                           sm_margin=sm_margin, return_attn_probs=return_attn_probs)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                           seqused_q=None, seqused_k=None, softmax_scale=None, causal=False,
                           qv=None, q_descale=None, k_descale=None, v_descale=None,
                           window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                           pack_gqa=None, deterministic=False, sm_margin=0,
                           return_attn_probs=False):
    """q [total_q, Hq, d], k and v [total_k, Hkv, d]; softmax_lse [Hq, total_q]."""
    refuse(seqused_q=(seqused_q, None), seqused_k=(seqused_k, None), qv=(qv, None),
           q_descale=(q_descale, None), k_descale=(k_descale, None), v_descale=(v_descale, None),
           attention_chunk=(attention_chunk, 0), num_splits=(num_splits, 1),
           sm_margin=(sm_margin, 0))
    found = flash_attn.attention(q, k, v, 0.0, softmax_scale, causal, window_size, softcap, None,
                                 deterministic, True, cu_seqlens_q=cu_seqlens_q,
                                 cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
                                 max_seqlen_k=max_seqlen_k)
    return found[:2] if return_attn_probs else found[0]


def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens: Optional[Union[int, torch.Tensor]] = None,
        cache_batch_idx: Optional[torch.Tensor] = None,
        cache_leftpad: Optional[torch.Tensor] = None, page_table: Optional[torch.Tensor] = None,
        cu_seqlens_q: Optional[torch.Tensor] = None,
        cu_seqlens_k_new: Optional[torch.Tensor] = None, max_seqlen_q: Optional[int] = None,
        rotary_seqlens: Optional[torch.Tensor] = None, q_descale: Optional[torch.Tensor] = None,
        k_descale: Optional[torch.Tensor] = None, v_descale: Optional[torch.Tensor] = None,
        softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
        rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
        return_softmax_lse=False):
    """As in FlashAttention-2, with pages by `page_table`."""
    refuse(qv=(qv, None), rotary_cos=(rotary_cos, None), rotary_sin=(rotary_sin, None),
           cache_batch_idx=(cache_batch_idx, None), cache_leftpad=(cache_leftpad, None),
           cu_seqlens_q=(cu_seqlens_q, None), cu_seqlens_k_new=(cu_seqlens_k_new, None),
           max_seqlen_q=(max_seqlen_q, None), rotary_seqlens=(rotary_seqlens, None),
           q_descale=(q_descale, None), k_descale=(k_descale, None), v_descale=(v_descale, None),
           attention_chunk=(attention_chunk, 0), scheduler_metadata=(scheduler_metadata, None),
           sm_margin=(sm_margin, 0))
    return cached(q, k_cache, v_cache, k, v, cache_seqlens, page_table, softmax_scale, causal,
                  window_size, softcap, None, num_splits, return_softmax_lse)
