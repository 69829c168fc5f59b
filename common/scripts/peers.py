#!/usr/bin/env python3
"""Times PyTorch's attention backends beside the steps of a chapter, in one run.

    common/scripts/peers.py --program build/release/bin/01_naive --steps v4_tensor_core,v5_cublas \\
        --batch 4 --heads 16 --head-dim 128 --seqlens 1024,2048,4096,8192 --backends math,flash \\
        --out results.json

For every problem the two sides take turns (--rounds): a GPU that gets warm slows both. The method is
that of the chapter program: CUDA events around one call, the L2 cache overwritten before it, random
normal data, the median over all rounds with its quartiles. Prints a table and writes everything as JSON.
Needs PyTorch with CUDA; exits with 77 where there is none.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
except ImportError:
    print("peers.py: PyTorch is not installed")
    sys.exit(77)

BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,  # FlashAttention-2
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def quartiles(seconds):
    """Median and quartiles as the chapter program computes them (linear between neighbours)."""
    t = sorted(seconds)

    def at(share):
        x = share * (len(t) - 1)
        i = int(x)
        return t[i] + (x - i) * (t[min(i + 1, len(t) - 1)] - t[i])

    return {"median_s": at(0.5), "q1_s": at(0.25), "q3_s": at(0.75), "min_s": t[0], "count": len(t)}


class Peer:
    """One backend on one problem, forward or backward."""

    def __init__(self, backend, args, seqlen):
        shape = (args.batch, args.heads, seqlen, args.head_dim)
        kv_shape = (args.batch, args.kv_heads, seqlen, args.head_dim)
        dtype = DTYPES[args.dtype]
        grad = args.operation == "backward"
        self.q = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=grad)
        self.k, self.v = (
            torch.randn(kv_shape, device="cuda", dtype=dtype, requires_grad=grad) for _ in range(2)
        )
        self.d_o = torch.randn(shape, device="cuda", dtype=dtype)
        self.backend, self.args = BACKENDS[backend], args
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        self.scrub = torch.empty(2 * l2, dtype=torch.uint8, device="cuda")

    def forward(self):
        with sdpa_kernel(self.backend):
            return scaled_dot_product_attention(
                self.q, self.k, self.v, is_causal=self.args.causal,
                enable_gqa=self.args.kv_heads != self.args.heads)

    def time(self, warmup, repeat):
        """Seconds of `repeat` calls."""
        times = []
        out = self.forward() if self.args.operation == "backward" else None
        for i in range(-warmup, repeat):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.scrub.zero_()
            begin.record()
            if out is None:
                self.forward()
            else:
                torch.autograd.grad(out, (self.q, self.k, self.v), self.d_o, retain_graph=True)
            end.record()
            end.synchronize()
            if i >= 0:
                times.append(begin.elapsed_time(end) * 1e-3)
        return times


def run_program(args, seqlen, folder):
    """One run of the chapter program; returns its JSON."""
    path = os.path.join(folder, "run.json")
    command = [args.program, "--batch", args.batch, "--heads", args.heads, "--kv-heads",
               args.kv_heads, "--head-dim", args.head_dim, "--seqlen", seqlen, "--dtype", args.dtype,
               "--operation", args.operation, "--step", args.steps, "--time", "--warmup", args.warmup,
               "--repeat", args.repeat, "--check", args.check, "--json", path, "--require-gpu"]
    if args.causal:
        command.append("--causal")
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(str(c) for c in command)}\n{done.stdout}{done.stderr}")
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--steps", default="all")
    parser.add_argument("--operation", choices=("forward", "backward"), default="forward")
    parser.add_argument("--backends", default="math,flash,cudnn")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seqlens", default="1024,2048,4096,8192")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=10, help="timed calls a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--check", default="off", help="off: the steps were checked elsewhere")
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    args.kv_heads = args.kv_heads or args.heads
    if not torch.cuda.is_available():
        print("peers.py: PyTorch sees no GPU")
        sys.exit(77)

    report = {"schema": "attn-peers-1", "gpu": torch.cuda.get_device_name(),
              "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "problems": []}
    for seqlen in (int(n) for n in args.seqlens.split(",")):
        times, runs = {}, []
        for _ in range(args.rounds):
            for backend in args.backends.split(","):
                try:
                    peer = Peer(backend, args, seqlen)
                    times.setdefault(backend, []).extend(peer.time(args.warmup, args.repeat))
                except RuntimeError as error:  # not supported, or out of memory
                    times[backend] = str(error).splitlines()[0]
                peer = None
                torch.cuda.empty_cache()
            with tempfile.TemporaryDirectory() as folder:
                runs.append(run_program(args, seqlen, folder))
        peers = [{"name": name, "time": quartiles(t)} if isinstance(t, list) else
                 {"name": name, "reason": t} for name, t in times.items()]
        report["problems"].append({"problem": runs[-1]["problem"], "operation": args.operation,
                                   "runs": runs, "peers": peers})
        print(f"{args.operation} {args.dtype} B={args.batch} Hq={args.heads} Hkv={args.kv_heads} "
              f"N={seqlen} d={args.head_dim}{' causal' if args.causal else ''}")
        for step in runs[-1]["steps"]:
            if not step.get("time"):
                continue
            median = sorted(s["time"]["median_s"] for r in runs for s in r["steps"]
                            if s["name"] == step["name"])[(len(runs) - 1) // 2]
            ratios = "  ".join(f"{p['time']['median_s'] / median:6.2f} x {p['name']}"
                               for p in peers if "time" in p)
            print(f"  {step['name']:<16} {median * 1e3:10.3f} ms  {step['flop'] / median * 1e-12:7.1f} "
                  f"TFLOP/s  {ratios}")
        for p in peers:
            text = f"{p['time']['median_s'] * 1e3:10.3f} ms" if "time" in p else p["reason"]
            print(f"  torch {p['name']:<10} {text}")
        sys.stdout.flush()
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
