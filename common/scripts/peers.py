#!/usr/bin/env python3
"""Times PyTorch's backends beside the steps of a chapter, in one run.

    common/scripts/peers.py --program build/release/bin/01_naive --steps v4_tensor_core,v5_cublas \\
        --batch 4 --heads 16 --head-dim 128 --seqlens 1024,2048,4096,8192 --backends math,flash \\
        --out results.json
    common/scripts/peers.py --program build/release/bin/02_online_softmax --operation softmax \\
        --problems problems.txt

A problem list has a problem a line, in the words of the chapter program: "--batch 2 --seqlen 8192 --causal",
"--rows 8 --cols 16777216 --dtype fp32"; what a line leaves out is as given on the command line, and
"--steps" may stand there too. Text behind # is a comment.

Operations: forward, backward, decode (forward with one query, --seqlen-q 1) and softmax.
Backends: math, flash (FlashAttention-2), cudnn; torch.softmax for softmax. A step of another chapter is one too:
"01_naive:v5_cublas" runs that program beside --program.

For every problem the two sides take turns (--rounds): a GPU that gets warm slows both. The method is
that of the chapter program: CUDA events around one call, the L2 cache overwritten before it, random
normal data, the median over all rounds with its quartiles. A ratio is the peer's time over the step's: above
1 the step is faster. Its quartiles are those of the rounds, each with its own medians. Prints a table and
writes everything as JSON. Needs PyTorch with CUDA; exits with 77 where there is none, 2 for bad options.
"""
import argparse
import json
import os
import shlex
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
# Roofs from a datasheet: those of a run that nobody reads need not be measured.
NO_ROOFS = ("--gpu", "h200")
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
    """One backend on one problem."""

    def __init__(self, backend, p):
        dtype = DTYPES[p.dtype]
        self.backend, self.p = backend, p
        if p.operation == "softmax":
            self.x = torch.randn((p.rows, p.cols), device="cuda", dtype=dtype)
        else:
            grad = p.operation == "backward"
            shape = (p.batch, p.heads, p.seqlen_q, p.head_dim)
            kv_shape = (p.batch, p.kv_heads, p.seqlen_k, p.head_dim)
            self.q = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=grad)
            self.k, self.v = (
                torch.randn(kv_shape, device="cuda", dtype=dtype, requires_grad=grad) for _ in range(2)
            )
            self.d_o = torch.randn(shape, device="cuda", dtype=dtype)
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        self.scrub = torch.empty(2 * l2, dtype=torch.uint8, device="cuda")

    def forward(self):
        if self.p.operation == "softmax":
            return torch.softmax(self.x, dim=-1)
        with sdpa_kernel(BACKENDS[self.backend]):
            return scaled_dot_product_attention(
                self.q, self.k, self.v, is_causal=self.p.causal,
                enable_gqa=self.p.kv_heads != self.p.heads)

    def time(self, warmup, repeat):
        """Seconds of `repeat` calls."""
        times = []
        out = self.forward() if self.p.operation == "backward" else None
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


def program_options(p):
    """The problem in the words of the chapter program."""
    if p.operation == "softmax":
        words = ["--rows", p.rows, "--cols", p.cols]
    else:
        words = ["--batch", p.batch, "--heads", p.heads, "--kv-heads", p.kv_heads, "--head-dim",
                 p.head_dim, "--seqlen-q", p.seqlen_q, "--seqlen-k", p.seqlen_k]
        words += ["--causal"] if p.causal else []
    operation = "forward" if p.operation == "decode" else p.operation
    return [str(w) for w in ["--operation", operation, "--dtype", p.dtype, *words]]


def run_program(args, p, program, steps, options=(), accepted=(0,)):
    """One run of a chapter program; returns its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        return run_in(args, p, program, steps, folder, options, accepted)


def run_in(args, p, program, steps, folder, options, accepted):
    path = os.path.join(folder, "run.json")
    command = [program, *program_options(p), "--step", steps, "--time", "--warmup", str(args.warmup),
               "--repeat", str(args.repeat), "--check", args.check, "--json", path, "--require-gpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in accepted:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def time_of_other_chapter(args, p, name):
    """Median and quartiles of "chapter:step" stand for its launches."""
    chapter, step = name.split(":")
    # Exit status 3 or 4: it refuses the problem, or has not the memory. That is no mistake of the list.
    run = run_program(args, p, os.path.join(os.path.dirname(args.program), chapter), step, NO_ROOFS, (0, 3, 4))
    time = run["steps"][0]["time"]
    if time is None:
        raise RuntimeError(run["steps"][0]["reason"])
    return [time["q1_s"], time["median_s"], time["q3_s"]]


def problem_options():
    """What a line of a problem list may say."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--steps", "--step", default="all")
    parser.add_argument("--operation", choices=("forward", "backward", "decode", "softmax"), default="forward")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seqlen", type=int)
    parser.add_argument("--seqlen-q", type=int)
    parser.add_argument("--seqlen-k", type=int)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--cols", type=int, default=8192)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--causal", action="store_true")
    return parser


def problems_of(args):
    """The problems of the list, or those of --seqlens."""
    if args.problems is None:
        lines = [f"--seqlen {n}" for n in args.seqlens.split(",")] if args.operation != "softmax" else [""]
    else:
        with open(args.problems, encoding="utf-8") as file:
            lines = [text for line in file if (text := line.partition("#")[0].strip())]
    parser, problems = problem_options(), []
    parser.set_defaults(**{key: getattr(args, key) for key in vars(parser.parse_args([]))})
    for line in lines:
        p = parser.parse_args(shlex.split(line))
        p.kv_heads = p.kv_heads or p.heads
        p.seqlen_k = p.seqlen_k or p.seqlen or 1024
        p.seqlen_q = p.seqlen_q or (1 if p.operation == "decode" else p.seqlen or 1024)
        if p.causal and p.seqlen_q != p.seqlen_k:
            # PyTorch's diagonal begins in the first corner, ours ends in the last.
            parser.error(f"'{line}': --causal needs equal lengths here")
        problems.append(p)
    return problems


def ratios_of(runs, peer_rounds):
    """Peer's time over step's time, for every pair: the median and quartiles of the rounds."""
    ratios = []
    for step in (s["name"] for s in runs[0]["steps"] if s.get("time")):
        mine = [next(s for s in run["steps"] if s["name"] == step)["time"]["median_s"] for run in runs]
        for peer, rounds in peer_rounds.items():
            if not isinstance(rounds, str):
                r = quartiles([quartiles(theirs)["median_s"] / m for theirs, m in zip(rounds, mine)])
                ratios.append({"step": step, "peer": peer, "median": r["median_s"], "q1": r["q1_s"],
                               "q3": r["q3_s"]})
    return ratios


def main():
    parser = argparse.ArgumentParser(description=__doc__, parents=[problem_options()],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--problems", help="file with a problem a line")
    parser.add_argument("--seqlens", default="1024,2048,4096,8192", help="where there is no list")
    parser.add_argument("--backends", default="math,flash,cudnn")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=7, help="timed calls a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", default="off", help="off: the steps were checked elsewhere")
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    for name in args.backends.split(","):
        if name not in BACKENDS and not os.access(
                os.path.join(os.path.dirname(args.program), name.partition(":")[0]), os.X_OK):
            parser.error(f"--backends {name}: must be some of {', '.join(BACKENDS)} or CHAPTER:STEP")
    problems = problems_of(args)
    if not torch.cuda.is_available():
        print("peers.py: PyTorch sees no GPU")
        sys.exit(77)

    report = {"schema": "attn-peers-1", "gpu": torch.cuda.get_device_name(),
              "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "problems": []}
    for p in problems:
        rounds, runs = {}, []
        for _ in range(args.rounds):
            for backend in ["softmax"] if p.operation == "softmax" else args.backends.split(","):
                if isinstance(rounds.get(backend), str):
                    continue
                try:
                    if ":" in backend:
                        rounds.setdefault(backend, []).append(time_of_other_chapter(args, p, backend))
                        continue
                    peer = Peer(backend, p)
                    rounds.setdefault(backend, []).append(peer.time(args.warmup, args.repeat))
                except RuntimeError as error:  # not supported, or out of memory
                    rounds[backend] = str(error).splitlines()[0]
                peer = None
                torch.cuda.empty_cache()
            # The first run says the roofs.
            runs.append(run_program(args, p, args.program, p.steps, NO_ROOFS if runs else ()))
        peers = [{"name": name, "reason": t} if isinstance(t, str) else
                 {"name": name, "time": quartiles([x for one in t for x in one])}
                 for name, t in rounds.items()]
        ratios = ratios_of(runs, rounds)
        report["problems"].append({"problem": runs[-1]["problem"], "operation": p.operation,
                                   "runs": runs, "peers": peers, "ratios": ratios})
        print(" ".join(program_options(p)))
        for step in runs[-1]["steps"]:
            if not step.get("time"):
                continue
            median = quartiles([s["time"]["median_s"] for r in runs for s in r["steps"]
                                if s["name"] == step["name"]])["median_s"]
            rate = (f"{step['flop'] / median * 1e-12:7.1f} TFLOP/s" if step["flop"] else
                    f"{step['modelled_bytes'] / median * 1e-9:7.0f} GB/s")
            text = "  ".join(f"{r['median']:6.3f} ({r['q1']:.3f} .. {r['q3']:.3f}) x {r['peer']}"
                             for r in ratios if r["step"] == step["name"])
            print(f"  {step['name']:<16} {median * 1e3:10.3f} ms  {rate}  {text}")
        for peer in peers:
            text = f"{peer['time']['median_s'] * 1e3:10.3f} ms" if "time" in peer else peer["reason"]
            print(f"  torch {peer['name']:<10} {text}")
        sys.stdout.flush()
        if args.out:  # after every problem: a long run that is cut off leaves what it has
            with open(args.out, "w", encoding="utf-8") as file:
                json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
