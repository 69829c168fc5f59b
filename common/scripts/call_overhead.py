#!/usr/bin/env python3
"""Host time of a call of libattention on a GPU: from C++ (bench_api), from PyTorch next to SDPA,
and the losses of a small model that is trained with both. verify_on_gpu.sh runs it as the part
"calls".

    PYTHONPATH=common/python common/scripts/call_overhead.py --bench build/release/bin/bench_api
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

for folder in ("python", "python/tests"):
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / folder))
import attn.torch
from attn.flash_attn import flash_attn_func
from small_model import losses_of

CALLS, TURNS = 10_000, 20
TOGETHER = 50  # calls after which the host waits for the GPU


def medians_us(calls):
    """Median host time of each, taken in turns: a busy host slows all of them alike."""
    times = [[] for _ in calls]
    for turn in range(TURNS + 2):
        for call, taken in zip(calls, times):
            for n in range(CALLS // TURNS):
                if n % TOGETHER == 0:
                    torch.cuda.synchronize()
                begin = time.perf_counter_ns()
                call()
                if turn >= 2:  # the others warm up
                    taken.append((time.perf_counter_ns() - begin) / 1000)
    torch.cuda.synchronize()
    return [statistics.median(taken) for taken in times]


def from_cpp(bench):
    """Median host time per call, in us, of each benchmark."""
    # In random order, so that a busy host slows attn_run and the step's launch alike.
    text = subprocess.run([bench, "--benchmark_format=json",
                           "--benchmark_enable_random_interleaving=true"], check=True,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    return {run["run_name"].partition("/iterations")[0]: run["real_time"]
            for run in json.loads(text)["benchmarks"] if run.get("aggregate_name") == "median"}


def print_cpp(found):
    print("C++: host time of a call, us\n")
    print(f"{'step':<40} {'attn_run':>9} {'launch of the step':>19} {'difference':>11}")
    for name, us in found.items():
        if name.startswith("attn_run "):
            step = name.removeprefix("attn_run ")
            launch = found["launch " + step]
            print(f"{step:<40} {us:>9.2f} {launch:>19.2f} {us - launch:>11.2f}")
    print(f"{'encoding one tensor map':<40} {found['encode a tensor map']:>29.2f}")


def print_torch():
    shape = (1, 2, 64, 64)
    plain = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    grad = [x.clone().requires_grad_() for x in plain]
    pages = torch.zeros(4, 64, 2, 64, dtype=torch.bfloat16, device="cuda")
    table = torch.arange(1, dtype=torch.int32, device="cuda").view(1, 1)
    lengths = torch.full((1,), 64, dtype=torch.int32, device="cuda")
    query = plain[0][:, :, :1].contiguous()
    differentiable = {
        "attn.torch.attention": lambda *x: attn.torch.attention(*x, causal=True),
        "attn.flash_attn.flash_attn_func": lambda *x: flash_attn_func(*x, causal=True),
        "scaled_dot_product_attention": lambda *x: F.scaled_dot_product_attention(
            *x, is_causal=True)}
    others = {
        "attn.forward": lambda: attn.forward(*plain, causal=True),
        "attn.decode": lambda: attn.decode(query, *plain[1:], lengths),
        "attn.paged_decode": lambda: attn.paged_decode(query, pages, pages, table, lengths)}
    douts = [torch.ones_like(f(*grad)) for f in differentiable.values()]
    columns = [
        medians_us([*(lambda f=f: f(*plain) for f in differentiable.values()), *others.values()]),
        medians_us([lambda f=f: f(*grad) for f in differentiable.values()]),
        medians_us([lambda f=f, dout=dout: torch.autograd.grad(f(*grad), grad, dout)
                    for f, dout in zip(differentiable.values(), douts)])]
    print(f"\nPyTorch {torch.__version__}: host time of a call, us, bf16 {list(shape)}, causal, "
          f"median of {CALLS}\n")
    print(f"{'function':<40} {'no gradients':>13} {'with gradients':>15} {'and backward':>13}")
    for row, name in enumerate([*differentiable, *others]):
        print(f"{name:<40}" + "".join(f" {column[row]:>{width}.2f}" for column, width in
                                      zip(columns, (13, 15, 13)) if row < len(column)))


def print_training():
    ours = losses_of(lambda *x: attn.torch.attention(*x, causal=True), "cuda", 100, 256)
    theirs, again = (losses_of(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True),
                               "cuda", 100, 256) for _ in range(2))
    print("\nTraining: two layers, 2 heads of 64, 2 x 256 tokens, bf16 attention, Adam; loss\n")
    print(f"{'step':<40}" + "".join(f" {n:>7}" for n in (1, 25, 50, 75, 100)))
    for name, losses in (("attn.torch.attention", ours),
                         ("scaled_dot_product_attention", theirs)):
        print(f"{name:<40}" + "".join(f" {losses[n - 1]:>7.4f}" for n in (1, 25, 50, 75, 100)))
    most = (ours - theirs).abs().max().item()
    noise = (again - theirs).abs().max().item()
    print(f"largest difference in a step: {most:.4f}; of SDPA from itself, run again: {noise:.4f}")
    return most < 0.05


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--bench", help="the program bench_api; without it no times from C++")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("call_overhead.py: no GPU", file=sys.stderr)
        return 77
    print(f"{torch.cuda.get_device_name()}\n")
    if given.bench:
        print_cpp(from_cpp(given.bench))
    print_torch()
    return 0 if print_training() else 1


sys.exit(main())
