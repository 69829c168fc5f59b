#!/usr/bin/env python3
"""peers.py with FP8, pages, and FlashAttention-3 as a CUDA graph.

    common/scripts/peers_formats.py --program build/release/bin/06_flash_v3_hopper --dtype e4m3 \\
        --steps f1_fp8 --backends fa3_e4m3,fa3_e4m3_casts,cudnn --seqlens 2048,16384
    common/scripts/peers_formats.py --program build/release/bin/07_paged --operation decode \\
        --steps v5_balanced_plan --backends fa3_pages --problems problems.txt

Options, output and method are those of peers.py (--help there), except that

- --dtype may be e4m3: the step and the libraries get the same bf16 tensors, and the step's
  quantisation is in its time,
- a CUDA graph keeps the copies of the inputs that it reads, and its outputs are compared as well.
  peers.py frees these copies before the replay: decode with fa3 and with fa3_pages in this script,
- with e4m3 the outputs may differ by 0.12 over all rows, and by 0.4 in the worst row.

Further backends:

    fa3_e4m3        FlashAttention-3 in e4m3; Q, K and V are cast before the timing      forward
    fa3_e4m3_casts  the same, and PyTorch's three casts are timed; no scale is computed  forward
    sage_per_warp   SageAttention2 with one scale per warp, quantisation included        forward
    fa3_pages       FlashAttention-3 on pages of 16 tokens in random order, its schedule
                    made before                                                          decode
"""
import math
import sys

import peers
from peers import torch

PAGE = 16  # tokens, the default of 07_paged
# Bounds of the relative L2 difference: over all rows, and of a row. The worst of half a million
# rows differed by 0.28.
MOST_OF_ALL = 0.12
peers.DIFFERENCES["e4m3"] = 0.4
peers.DTYPES["e4m3"] = torch.bfloat16


def replay(call, of_peers=peers.Peer.replay):
    """A CUDA graph of `call` that keeps what the call reads: a library's copies of the inputs."""
    run = of_peers(call)
    return lambda: (run(), call)[0]


peers.Peer.replay = staticmethod(replay)


def e4m3_difference(theirs, ours):
    """The difference of the worst row; infinity where all rows together differ by too much."""
    squares = sum(((x.float() - y.float()) ** 2).sum().item() for x, y in zip(theirs, ours))
    of_all = math.sqrt(squares / sum((y.float() ** 2).sum().item() for y in ours))
    return peers.row_difference(theirs, ours) if of_all <= MOST_OF_ALL else math.inf


def compare(p, backends, call, ours, difference=None, of_peers=peers.compare):
    """As in peers.py, also of the graphs' outputs."""
    difference = difference or (e4m3_difference if p.dtype == "e4m3" else peers.row_difference)
    found = of_peers(p, backends, call, ours, difference)
    graphs = [name.removesuffix(peers.GRAPH) for name in backends if name.endswith(peers.GRAPH)]
    replays = of_peers(p, graphs, lambda name: call(name + peers.GRAPH), ours, difference)
    return found | {name + peers.GRAPH: replays[name] for name in replays}


peers.compare = compare


class Fp8FlashAttention3(peers.FlashAttention3):
    operations = ("forward",)

    def __init__(self, casts):
        self.casts = casts  # whether they are timed

    def forward(self, p, q, k, v):
        def cast():
            return [x.to(torch.float8_e4m3fn) for x in (q, k, v)]

        attention = self.module.flash_attn_func
        if self.casts:
            return lambda: attention(*cast(), causal=p.causal)
        tensors = cast()
        return lambda: attention(*tensors, causal=p.causal)


class SagePerWarp(peers.SageAttention):
    bound = None  # as DIFFERENCES: the step has a quantisation error, too

    def forward(self, p, q, k, v):
        attention = self.module.sageattn_qk_int8_pv_fp8_cuda_sm90
        return lambda: attention(q, k, v, tensor_layout="HND", is_causal=peers.masked(p),
                                 qk_quant_gran="per_warp", pv_accum_dtype="fp32+fp32")


class PagedFlashAttention3(peers.FlashAttention3):
    operations = ("decode",)

    def forward(self, p, q, k, v):
        if p.seqlen_k % PAGE:
            raise ValueError(f"--seqlen-k {p.seqlen_k}: must be a multiple of {PAGE} here")
        order = torch.randperm(p.batch * p.seqlen_k // PAGE, device="cuda")
        # Page i of the pool holds page order[i] of the batch.
        pools = [x.reshape(-1, PAGE, *x.shape[2:])[order] for x in (k, v)]
        table = order.argsort().reshape(p.batch, -1).int()
        lengths = torch.full((p.batch,), p.seqlen_k, device="cuda", dtype=torch.int32)
        schedule = self.module.get_scheduler_metadata(
            p.batch, 1, p.seqlen_k, p.heads, p.kv_heads, p.head_dim, lengths, page_size=PAGE)
        return lambda: self.module.flash_attn_with_kvcache(
            q, *pools, cache_seqlens=lengths, page_table=table, scheduler_metadata=schedule)


peers.BACKENDS |= {
    "fa3_e4m3": Fp8FlashAttention3(casts=False), "fa3_e4m3_casts": Fp8FlashAttention3(casts=True),
    "sage_per_warp": SagePerWarp(), "fa3_pages": PagedFlashAttention3(),
}

if __name__ == "__main__":
    peers.__doc__ = __doc__  # what --help prints
    sys.exit(peers.main())
