"""The operations of libattention as functions on arrays.

Shapes: q and o [B, Hq, Nq, d], k and v [B, Hkv, Nk, d], lse [B, Hq, Nq] in float32, the natural
logarithm; with layout="bnhd" the second and third dimension of q, k, v and o change places. Types:
float16, float32, bf16 (attn.bf16, ml_dtypes, torch.bfloat16). `step` names a step, as
"04_flash_v2/v13_tuned"; without it the first one that takes the problem is used (attn.which).
Errors are one line: attn.InvalidValue, attn.Unsupported, attn.DeviceError, attn.KernelError.
"""
import numpy as np

from .calls import Call, Repeated, masks
from .library import DTYPES, InvalidValue, number, whole
from . import arrays


def _attention(call, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    """Views of q, k, v and the sizes of the problem."""
    packed = cu_seqlens_q is not None
    if packed != (cu_seqlens_k is not None):
        raise InvalidValue("cu_seqlens_q, cu_seqlens_k: both must be given, or none")
    qv, kv, vv = (call.heads_view(name, x, packed) for name, x in zip("qkv", (q, k, v)))
    batch, heads, rows, d = call.sizes(qv, packed)
    kv_batch, kv_heads, keys, kd = call.sizes(kv, packed)
    if vv.shape != kv.shape:
        raise InvalidValue(f"v: {list(vv.shape)}: must have the shape of k, {list(kv.shape)}")
    if kd != d or kv_batch != batch:
        raise InvalidValue(f"k: {list(kv.shape)}: must have the batch and head dim of q, "
                           f"{list(qv.shape)}")
    call.fields.update(heads=heads, kv_heads=kv_heads, head_dim=d)
    if not packed:
        call.fields.update(batch=batch, seqlen_q=rows, seqlen_k=keys)
        return qv, kv, vv
    call.fields.update(packed=1, total_q=rows, total_k=keys)
    _begins(call, "q", cu_seqlens_q, rows, max_seqlen_q)
    _begins(call, "k", cu_seqlens_k, keys, max_seqlen_k)
    return qv, kv, vv


def _begins(call, side, cu_seqlens, total, longest):
    """Where packed sequences begin; checked, and known to the plan, where they are on the CPU."""
    name = f"cu_seqlens_{side}"
    given = call.fields.get("batch")
    found = call.array(name, cu_seqlens, "int32", given and (given + 1,))
    batch = call.fields["batch"] = found.shape[0] - 1
    if found.device == "cpu":
        begins = arrays.to_numpy(found.owner).astype("int64")
        lengths = begins[1:] - begins[:-1]
        if begins[0] != 0 or begins[-1] != total or (lengths < 0).any() or batch == 0:
            raise InvalidValue(f"{name}: must ascend from 0 to the {total} tokens")
        call.host_list(f"lengths_{side}", lengths)
        longest = lengths.max()
    elif longest is None:
        raise InvalidValue(f"max_seqlen_{side}: must be given, since {name} is on a GPU")
    call.fields[f"seqlen_{side}"] = max(1, whole(f"max_seqlen_{side}", longest, 0))


def _slopes(call, alibi):
    if alibi is not None:
        call.fields["alibi"] = 1
        call.array("alibi", alibi, "fp32", (call.fields["heads"],))


def _sparse_mask(call, block_mask, block_size, hidden, sliding_tiles):
    """A mask of blocks, of column intervals, or of sliding tile windows; on the host."""
    given = sum(x is not None for x in (block_mask, hidden, sliding_tiles))
    if given == 0:
        return
    if given > 1:
        raise InvalidValue("block_mask, hidden, sliding_tiles: at most one of them may be given")
    if call.fields.get("packed"):
        raise InvalidValue("block_mask, hidden, sliding_tiles: not with packed sequences")
    if sliding_tiles is not None:
        try:
            canvas, tile, windows = sliding_tiles
        except (TypeError, ValueError):
            raise InvalidValue("sliding_tiles: must be (canvas, tile, windows)") from None
        for name, x in (("canvas", canvas), ("tile", tile)):
            if not isinstance(x, (tuple, list)) or len(x) != 3:
                raise InvalidValue(f"{name}: {x!r}: must be (time, height, width)")
            call.fields[name] = tuple(whole(name, side) for side in x)
        call.fields["mask_heads"] = call.host_windows("tile_windows", windows)
        return
    batch, heads, rows, keys = (call.fields[name] for name in ("batch", "heads", "seqlen_q",
                                                               "seqlen_k"))
    if hidden is not None:
        try:
            begin, end = hidden
        except (TypeError, ValueError):
            raise InvalidValue("hidden: must be a pair (begin, end)") from None
        arrays_of = {"hidden_begin": begin, "hidden_end": end}
        last, kind = ((1, 2), (keys,)), "int32"
    else:
        try:
            m, n = block_size
        except (TypeError, ValueError):
            raise InvalidValue("block_size: must be a pair (m, n)") from None
        m, n = whole("block_size", m, 1), whole("block_size", n, 1)
        call.fields.update(block_m=m, block_n=n)
        arrays_of, kind = {"block_mask": block_mask}, "uint8"
        last = ((-(-rows // m),), (-(-keys // n),))
    choices = ((1, batch), (1, heads), *last)
    for name, x in arrays_of.items():
        shape = call.host_mask(name, x, kind, choices)
        choices = tuple((extent,) for extent in shape)  # begin and end have one shape
    call.fields.update(mask_batch=shape[0], mask_heads=shape[1])
    if hidden is not None:
        call.fields["mask_intervals"] = shape[2]


def _lse_shape(call, rows):
    heads = call.fields["heads"]
    return (heads, rows) if call.fields.get("packed") else (call.fields["batch"], heads, rows)


def _dropout(call, dropout, seed):
    call.fields.update(dropout=number("dropout", dropout),
                       seed=whole("seed", seed, 0, 2 ** 64 - 1))


def run_forward(operation, dtype, q, k, v, causal, window, scale, softcap, alibi, dropout, seed,
                cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, layout, step, return_lse,
                out, stream, block_mask=None, block_size=None, hidden=None, sliding_tiles=None):
    """forward and quantised_forward, without their keywords, which take time."""
    key = None
    plain = (alibi is cu_seqlens_q is cu_seqlens_k is out is stream is block_mask is hidden is
             sliding_tiles is None and not dropout)
    if plain:
        key, again = Repeated.find((q, k, v), operation, dtype, causal, window, scale, softcap,
                                   layout, step)
        if again:
            found = again.run((q, k, v), return_lse)
            return found if return_lse else found[0]
    call = Call(operation, layout, step, stream)
    qv, kv, vv = _attention(call, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    masks(call, causal, window, scale, softcap)
    _slopes(call, alibi)
    _dropout(call, dropout, seed)
    _sparse_mask(call, block_mask, block_size, hidden, sliding_tiles)
    accepted = ("bf16", "fp16", "fp32") if dtype is None else ("bf16",)
    element = call.element_type(qv, kv, vv, accepted=accepted)
    call.fields["dtype"] = DTYPES[dtype or element]
    packed = cu_seqlens_q is not None
    o = call.output("o", qv, qv.shape, element, out, packed)
    lse = call.output("lse", qv, _lse_shape(call, call.sizes(qv, packed)[2]), "fp32")
    plan = call.run(qv)
    if key:
        Repeated(call, plan, qv, (("q", q), ("k", k), ("v", v)),
                 (("o", o), ("lse", lse))).keep(key)
    return (o, lse) if return_lse else o


def forward(q, k, v, *, causal=False, window=None, scale=None, softcap=0.0, alibi=None,
            dropout=0.0, seed=0, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
            max_seqlen_k=None, block_mask=None, block_size=(128, 128), hidden=None,
            sliding_tiles=None, layout="bhnd", step=None, return_lse=False, out=None, stream=None):
    """Attention: softmax(scale q k^T + masks) v. Returns o, or (o, lse).

    `causal`: key j is visible to query i if j <= i + Nk - Nq. `window`: (left, right) visible keys
    on each side of the diagonal, -1 for no limit. `scale`: default 1/sqrt(d). `alibi`: a slope per
    query head, float32 [Hq]; slope |i + Nk - Nq - j| is subtracted from the score of (i, j).
    `dropout`: the fraction of probabilities that become 0, rounded to 1/256; `seed` determines
    which (Philox), the same in backward. With cu_seqlens_q and cu_seqlens_k, int32 [B + 1],
    sequences are packed: q [tokens, Hq, d], k and v [tokens, Hkv, d], lse [Hq, tokens]; on a GPU
    max_seqlen_q and max_seqlen_k are needed, since lengths are not copied to the host. Fully masked
    rows: o = 0, lse = -inf. `stream`: default PyTorch's current stream, else the default stream.

    Sparse masks are arrays on the host; the kernel skips blocks without a visible key. B or Hq may
    be 1: one mask for all. `block_mask` [B, Hq, ceil(Nq / m), ceil(Nk / n)]: 1 where a block of
    `block_size` = (m, n) queries and keys is visible. `hidden` = (begin, end), int32
    [B, Hq, 1 or 2, Nk] each: queries begin to end - 1 do not attend to a key (FlashMask).
    `sliding_tiles` = (canvas, tile, windows) in tokens (time, height, width), windows [3] or
    [Hq, 3]: the canvas is stored tile by tile, text follows it (Sliding Tile Attention). Blocks
    and tiles must have multiples of 128 tokens.
    """
    return run_forward("forward", None, q, k, v, causal, window, scale, softcap, alibi, dropout,
                       seed, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, layout, step,
                       return_lse, out, stream, block_mask, block_size, hidden, sliding_tiles)


def quantised_forward(q, k, v, dtype, *, causal=False, window=None, scale=None, layout="bhnd",
                      step=None, return_lse=False, out=None, stream=None):
    """Attention of bf16 tensors, quantised to `dtype`: "int8" or "e4m3".

    Q and K in int4, V in e4m3: dtype="e4m3", step="08_quant_sparse/q7_int4_qk".
    """
    if dtype not in ("int8", "e4m3"):
        raise InvalidValue(f"dtype {dtype}: must be int8 or e4m3")
    return run_forward("quantised_forward", dtype, q, k, v, causal, window, scale, 0, None, 0, 0,
                       None, None, None, None, layout, step, return_lse, out, stream)


def backward(q, k, v, o, lse, dout, *, causal=False, window=None, scale=None, softcap=0.0,
             alibi=None, dropout=0.0, seed=0, cu_seqlens_q=None, cu_seqlens_k=None,
             max_seqlen_q=None, max_seqlen_k=None, layout="bhnd", step=None, deterministic=False,
             stream=None):
    """Gradients (dq, dk, dv), of the shapes of q, k and v, from a forward pass's o and lse and from
    dout, which has the shape of q.

    `deterministic`: only by steps whose gradients are bitwise equal from run to run.
    """
    key = None
    plain = alibi is cu_seqlens_q is cu_seqlens_k is stream is None and not dropout
    if plain:
        key, again = Repeated.find((q, k, v, o, lse, dout), "backward", causal, window, scale,
                                   softcap, layout, step, deterministic)
        if again:
            return again.run((q, k, v, o, lse, dout))
    call = Call("backward", layout, step, stream)
    call.fields["deterministic"] = int(bool(deterministic))
    qv, kv, vv = _attention(call, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    masks(call, causal, window, scale, softcap)
    _slopes(call, alibi)
    _dropout(call, dropout, seed)
    packed = cu_seqlens_q is not None
    like_q = [call.heads_view(name, x, packed) for name, x in (("o", o), ("dout", dout))]
    for found in like_q:
        if found.shape != qv.shape:
            raise InvalidValue(f"{found.name}: {list(found.shape)}: must have the shape of q, "
                               f"{list(qv.shape)}")
    element = call.element_type(qv, kv, vv, *like_q)
    call.fields["dtype"] = DTYPES[element]
    call.array("lse", lse, "fp32", _lse_shape(call, call.sizes(qv, packed)[2]))
    gradients = tuple(call.output(name, qv, of.shape, element, packed=packed)
                      for name, of in (("dq", qv), ("dk", kv), ("dv", vv)))
    plan = call.run(qv)
    if key:
        Repeated(call, plan, qv,
                 tuple(zip(("q", "k", "v", "o", "lse", "dout"), (q, k, v, o, lse, dout))),
                 tuple(zip(("dq", "dk", "dv"), gradients))).keep(key)
    return gradients


def _on_gpu(lengths):
    """Whether no plan depends on their values, so that a call of the same sizes can be repeated."""
    return arrays.is_torch(lengths) and lengths.is_cuda


def _lengths(call, lengths, host_lengths):
    """Valid keys of each sequence: on the device, and on the host where they are known."""
    batch = call.fields["batch"]
    found = call.array("seqused_k", lengths, "int32", (batch,), title="lengths")
    known = None
    if host_lengths is not None:
        known = arrays.integers(host_lengths)
        if known is None or known.shape != (batch,):
            raise InvalidValue(f"host_lengths: must be [{batch}] integers")
    if found.device == "cpu":
        read = arrays.to_numpy(found.owner).astype("int64")
        if known is not None and (known != read).any():
            raise InvalidValue("host_lengths: differ from lengths")
        known = read
    if known is not None:
        call.host_list("lengths_k", known)
    return known


def decode(q, k, v, lengths, *, causal=False, window=None, scale=None, softcap=0.0, alibi=None,
           dtype=None, host_lengths=None, layout="bhnd", step=None, return_lse=False, stream=None):
    """Attention of a few queries per sequence to a KV cache: o, or (o, lse).

    k and v [B, Hkv, Nk, d] have room for Nk keys, of which `lengths`, int32 [B], are valid.
    `dtype`: "int8", "int4" or "e4m3" for a step that quantises a cache of bf16. Steps that schedule
    on the host need `host_lengths` if `lengths` is on a GPU.
    """
    key, inputs = None, (q, k, v, lengths)
    if alibi is host_lengths is stream is None and _on_gpu(lengths):
        key, again = Repeated.find(inputs, "decode", causal, window, scale, softcap, dtype, layout,
                                   step)
        if again:
            found = again.run(inputs, return_lse)
            return found if return_lse else found[0]
    call = Call("decode", layout, step, stream)
    qv, kv, vv = _attention(call, q, k, v, None, None, None, None)
    masks(call, causal, window, scale, softcap)
    _slopes(call, alibi)
    if dtype not in (None, "int8", "int4", "e4m3"):
        raise InvalidValue(f"dtype {dtype}: must be int8, int4 or e4m3, or be left out")
    accepted = ("bf16", "fp16", "fp32") if dtype is None else ("bf16",)
    element = call.element_type(qv, kv, vv, accepted=accepted)
    call.fields["dtype"] = DTYPES[dtype or element]
    _lengths(call, lengths, host_lengths)
    o = call.output("o", qv, qv.shape, element)
    lse = call.output("lse", qv, _lse_shape(call, call.sizes(qv)[2]), "fp32")
    plan = call.run(qv)
    if key:
        Repeated(call, plan, qv, tuple(zip(("q", "k", "v", "seqused_k"), inputs)),
                 (("o", o), ("lse", lse))).keep(key)
    return (o, lse) if return_lse else o


def _pools(call, k_pages, v_pages, page_table, written=False):
    dims = ("pages", "page_size", "Hkv", "d")
    kv = call.view("k_pages", k_pages, dims, written)
    call.set_tensor("k", kv, pool=True)
    if v_pages is not None:
        vv = call.view("v_pages", v_pages, dims, written)
        if vv.shape != kv.shape or vv.dtype != kv.dtype:
            raise InvalidValue(f"v_pages: {vv.dtype} {list(vv.shape)}: must be as k_pages, "
                               f"{kv.dtype} {list(kv.shape)}")
        call.set_tensor("v", vv, pool=True)
    table = call.view("page_table", page_table, ("B", "pages"))
    call.array("page_table", page_table, "int32", table.shape)
    call.fields.update(num_pages=kv.shape[0], page_size=kv.shape[1], kv_heads=kv.shape[2],
                       head_dim=kv.shape[3], max_pages=table.shape[1], batch=table.shape[0])
    return kv


def _check_table(call, page_table, known):
    """Pages that the lengths use must be in the pool; other entries are not read."""
    table = arrays.to_numpy(page_table)
    size, pages = call.fields["page_size"], call.fields["num_pages"]
    for b, length in enumerate(known):
        used = table[b, :-(-length // size)]
        if used.size and (used.min() < 0 or used.max() >= pages):
            raise InvalidValue(f"page_table: indices from {used.min()} to {used.max()} in row {b}: "
                               f"must be from 0 to {pages - 1}")


def _paged(operation, q, k_pages, v_pages, page_table, lengths, causal, window, scale, softcap,
           sinks, host_lengths, cu_seqlens_q, max_seqlen_q, layout, step, return_lse, stream):
    names = ("q", "k", "page_table", "seqused_k", "v")
    key, inputs = None, (q, k_pages, page_table, lengths)
    if v_pages is not None:
        inputs = (*inputs, v_pages)
    if sinks is host_lengths is cu_seqlens_q is stream is None and _on_gpu(lengths):
        key, again = Repeated.find(inputs, operation, causal, window, scale, softcap, layout, step)
        if again:
            found = again.run(inputs, return_lse)
            return found if return_lse else found[0]
    call = Call(operation, layout, step, stream)
    kv = _pools(call, k_pages, v_pages, page_table)
    is_latent = operation == "paged_decode" and kv.shape[2:] == (1, 576)
    if is_latent != (v_pages is None):
        raise InvalidValue(f"v_pages: must {'be None' if is_latent else 'be given'} for k_pages "
                           f"{list(kv.shape)}: latent attention (Hkv = 1, d = 576) reads V from K")
    packed = cu_seqlens_q is not None
    qv = call.heads_view("q", q, packed)
    batch, heads, rows, d = call.sizes(qv, packed)
    if d != kv.shape[3] or (not packed and batch != call.fields["batch"]):
        raise InvalidValue(f"q: {list(qv.shape)}: must have the head dim of k_pages, "
                           f"{list(kv.shape)}, and the batch of page_table")
    call.fields.update(heads=heads, seqlen_q=rows)
    masks(call, causal, window, scale, softcap)
    if sinks is not None:
        call.fields["sinks"] = 1
        call.array("sinks", sinks, "fp32", (heads,))
    call.fields["dtype"] = DTYPES[call.element_type(qv, kv)]
    if packed:
        call.fields.update(packed=1, total_q=rows)
        _begins(call, "q", cu_seqlens_q, rows, max_seqlen_q)
    known = _lengths(call, lengths, host_lengths)
    if kv.device == "cpu":
        _check_table(call, page_table, known)
        call.lists["host_page_table"] = np.ascontiguousarray(arrays.to_numpy(page_table), np.int32)
    latent = v_pages is None
    shape = (*qv.shape[:-1], 512) if latent else qv.shape
    o = call.output("o", qv, shape, qv.dtype, packed=packed)
    lse = call.output("lse", qv, _lse_shape(call, rows), "fp32")
    plan = call.run(qv)
    if key:
        Repeated(call, plan, qv, tuple(zip(names, inputs)), (("o", o), ("lse", lse))).keep(key)
    return (o, lse) if return_lse else o


def paged_decode(q, k_pages, v_pages, page_table, lengths, *, causal=False, window=None, scale=None,
                 softcap=0.0, sinks=None, host_lengths=None, layout="bhnd", step=None,
                 return_lse=False, stream=None):
    """Decoding over a paged KV cache: o, or (o, lse).

    k_pages, v_pages [num_pages, page_size, Hkv, d]; page_table int32 [B, pages per sequence];
    lengths int32 [B]. With v_pages=None, Hkv = 1 and d = 576 it is latent attention (MLA): V is the
    first 512 columns of K, and o has 512 columns. `sinks`, float32 [Hq]: exp(sink) is added to the
    denominator of softmax, and so to lse.
    """
    return _paged("paged_decode", q, k_pages, v_pages, page_table, lengths, causal, window, scale,
                  softcap, sinks, host_lengths, None, None, layout, step, return_lse, stream)


def paged_prefill(q, k_pages, v_pages, page_table, lengths, *, cu_seqlens_q=None, max_seqlen_q=None,
                  causal=True, window=None, scale=None, softcap=0.0, host_lengths=None,
                  layout="bhnd", step=None, return_lse=False, stream=None):
    """The last queries of each sequence, whose keys are in the pages already: o, or (o, lse)."""
    return _paged("paged_prefill", q, k_pages, v_pages, page_table, lengths, causal, window, scale,
                  softcap, None, host_lengths, cu_seqlens_q, max_seqlen_q, layout, step, return_lse,
                  stream)


def paged_append(k_new, v_new, k_pages, v_pages, page_table, lengths, *, host_lengths=None,
                 step=None, stream=None):
    """Stores new tokens in the pages, in place.

    k_new, v_new [B, n, Hkv, d] become the last n of the `lengths` tokens of each sequence.
    """
    call = Call("paged_append", "bnhd", step, stream)
    kv = _pools(call, k_pages, v_pages, page_table, written=True)
    dims = ("B", "n", "Hkv", "d")
    new = [call.view(name, x, dims) for name, x in (("k_new", k_new), ("v_new", v_new))]
    batch, count = new[0].shape[:2]
    for found in new:
        if found.shape != (call.fields["batch"], count, *kv.shape[2:]):
            raise InvalidValue(f"{found.name}: {list(found.shape)}: must be "
                               f"{[call.fields['batch'], count, *kv.shape[2:]]}")
        b, n, h, d = found.shape
        if found.strides[3] != 1 and d > 1 or b > 1 and found.strides[0] != n * found.strides[1]:
            raise InvalidValue(f"{found.name}: strides {list(found.strides)}: tokens must be "
                               "evenly spaced; make it contiguous")
        steps = [b * n * h * d, found.strides[2], found.strides[1]]
        if steps[1:] != [d, h * d] or found.pointer % 16:
            call.fields["copy_strided"] = 1
        t = getattr(call.tensors, found.name)
        t.data, t.stride_batch, t.stride_head, t.stride_row = (found.pointer, *steps)
    call.fields.update(heads=kv.shape[2], seqlen_q=count)
    call.fields["dtype"] = DTYPES[call.element_type(kv, *new)]
    known = _lengths(call, lengths, host_lengths)
    if known is not None and (known < count).any():
        raise InvalidValue(f"lengths: {known.min()}: must count the {count} new tokens")
    if kv.device == "cpu":
        _check_table(call, page_table, known)
    call.run(kv)
