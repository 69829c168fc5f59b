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

CALLS, TOGETHER = 10_000, 50  # calls in all; after so many the host waits for the GPU


def median_us(call):
    times = []
    for n in range(CALLS + 1000):
        if n % TOGETHER == 0:
            torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        call()
        if n >= 1000:  # the others warm up
            times.append((time.perf_counter_ns() - begin) / 1000)
    torch.cuda.synchronize()
    return statistics.median(times)


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
    rows = [("attn.torch.attention", lambda *x: attn.torch.attention(*x, causal=True)),
            ("attn.forward", lambda *x: attn.forward(*x, causal=True)),
            ("attn.flash_attn.flash_attn_func", lambda *x: flash_attn_func(*x, causal=True)),
            ("scaled_dot_product_attention", lambda *x: F.scaled_dot_product_attention(
                *x, is_causal=True))]
    print(f"\nPyTorch {torch.__version__}: host time of a call, us, bf16 {list(shape)}, causal, "
          f"median of {CALLS}\n")
    print(f"{'function':<40} {'no gradients':>13} {'with gradients':>15} {'and backward':>13}")
    for name, function in rows:
        us = [median_us(lambda: function(*plain))]
        if name != "attn.forward":
            us.append(median_us(lambda: function(*grad)))
            dout = torch.ones_like(function(*grad))
            us.append(median_us(lambda: torch.autograd.grad(function(*grad), grad, dout)))
        print(f"{name:<40} {us[0]:>13.2f}" + "".join(f" {x:>{w}.2f}" for x, w in
                                                     zip(us[1:], (15, 13))))
    pages = torch.zeros(4, 64, 2, 64, dtype=torch.bfloat16, device="cuda")
    table = torch.arange(1, dtype=torch.int32, device="cuda").view(1, 1)
    lengths = torch.full((1,), 64, dtype=torch.int32, device="cuda")
    query = plain[0][:, :, :1].contiguous()
    cached = median_us(lambda: attn.decode(query, *plain[1:], lengths))
    paged = median_us(lambda: attn.paged_decode(query, pages, pages, table, lengths))
    print(f"{'attn.decode':<40} {cached:>13.2f}\n{'attn.paged_decode':<40} {paged:>13.2f}")


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
