#!/usr/bin/env python3
"""Times the attention of PyTorch and other libraries against the steps of a chapter, in one run.

    common/scripts/peers.py --program build/release/bin/01_naive --steps v12_cp_async,v13_cublas \\
        --batch 4 --heads 16 --head-dim 128 --seqlens 1024,2048,4096,8192 --backends math,flash \\
        --out results.json
    common/scripts/peers.py --program build/release/bin/02_online_softmax --operation softmax \\
        --problems problems.txt

A problem list has one problem per line, in the options of the chapter program:
"--batch 2 --seqlen 8192 --causal", "--rows 8 --cols 16777216 --dtype fp32". What a line leaves out
is as given on the command line, and "--steps" may stand there too. Text behind # is a comment.

Operations: forward, backward, softmax (against torch.softmax), and decode: one query against
a cache of --seqlen-k keys, by the program's forward operation if it has no decode. Backends:

    math           PyTorch, unfused                            forward, backward, decode
    flash          FlashAttention-2, in PyTorch                forward, backward, decode
    cudnn          cuDNN, called by PyTorch                    forward, backward, decode
    flex           FlexAttention of PyTorch, compiled          forward, backward
    fa3            FlashAttention-3, flash_attn_interface      forward, backward, decode
    flashinfer     FlashInfer's ragged prefill, flashinfer     forward (no paged decode here)
    sageattention  SageAttention in 8 bits, sageattention      forward
    CHAPTER:STEP   a step of another program next to --program, such as 01_naive:v13_cublas

The last three libraries are Python packages, whose versions the JSON records. A backend that cannot
be imported or lacks the operation ends the run with status 2. Compiling, planning and copying to a
library's layout are not timed. For decode, each library takes its turns twice: as a plain call, and
as the replay of a CUDA graph of that call ("flash graph").

Before it times anything, peers.py compares each backend's outputs with those of the first step, on
the inputs that the program saved (--save): the largest relative L2 difference of a row of O or of a
gradient. A difference larger than rounding explains (for SageAttention: quantisation) ends the run
with status 1. Both sides are then timed on these inputs.

For every problem, each backend and each step takes one turn per round (--rounds, at least 5), in an
order that is reversed every round. Before each turn the GPU rests for twice as long as the timed
calls of the previous turn took. The method is that of the chapter program (device.h, timing method
4): the L2 cache is overwritten, a kernel spins until the host has queued the call, and CUDA events
around the call take its time. The result is the median over all rounds with its quartiles. A ratio
is the peer's time over the step's time in one round: above 1 the step is faster. Prints a table and
writes everything as JSON. Needs PyTorch with CUDA: exits with 77 where there is none.
"""
import argparse
import importlib.metadata
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time

try:
    import numpy
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
except ImportError:
    print("peers.py: PyTorch or NumPy is not installed")
    sys.exit(77)

GRAPH = " graph"
# Datasheet roofs: peers.py does not use the roofs of these runs, so they need not be measured.
NO_ROOFS = ("--gpu", "h200")
TIMING_METHOD = 4  # as kTimingMethod in device.h
LEAST_ROUNDS = 5
CYCLES_A_SECOND = 2e9  # approximate clock of torch.cuda._sleep
# The largest relative L2 difference of a row of O between two correct kernels: twice the checker's
# bound for one kernel (reference.cpp). Gradients may differ by twice as much.
DIFFERENCES = {"bf16": 1.2e-2, "fp16": 2e-3, "fp32": 4e-5}
REFUSALS = (RuntimeError, ValueError, AssertionError)  # how libraries refuse a problem
MOST_BYTES = 8e9  # of inputs passed in files
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def masked(p):
    return p.causal and p.seqlen_q > 1  # one query attends to all keys


class Backend:
    """A library's attention. forward(p, q, k, v) returns the call to time, without arguments."""

    package = None  # the module to import, if any
    operations = ("forward", "backward", "decode")
    nhd = False  # layout [B, N, H, D] instead of PyTorch's [B, H, N, D]
    bound = None  # of the difference; None: as DIFFERENCES

    def available(self):
        """Imports the package. None, or the reason in one line why that fails."""
        try:
            self.module = importlib.import_module(self.package) if self.package else None
        except ImportError as error:
            return f"the Python package {self.package} cannot be imported: {first_line(error)}"
        return None

    def version(self):
        names = importlib.metadata.packages_distributions().get(self.package)
        found = importlib.metadata.version(names[0]) if names else "unknown"
        return getattr(self.module, "__version__", found)

    def inputs(self, *tensors):
        """Tensors [B, H, N, D] in the library's layout."""
        return [x.transpose(1, 2).contiguous() if self.nhd else x for x in tensors]

    def outputs(self, p, result):
        """The tensors of a call's result in [B, H, N, D]: O, or dQ, dK and dV."""
        tensors = list(result) if isinstance(result, (tuple, list)) else [result]
        if p.operation != "backward":
            del tensors[1:]  # some libraries return the log-sum-exp as well
        if self.nhd:
            tensors = [x.reshape(p.batch, -1, *x.shape[-2:]).transpose(1, 2) for x in tensors]
        return tensors


class Sdpa(Backend):
    def __init__(self, choice):
        self.choice = choice

    def forward(self, p, q, k, v):
        def call():
            with sdpa_kernel(self.choice):
                return scaled_dot_product_attention(q, k, v, is_causal=masked(p),
                                                    enable_gqa=p.kv_heads != p.heads)
        return call


class Flex(Backend):
    package, operations = "torch.nn.attention.flex_attention", ("forward", "backward")

    def forward(self, p, q, k, v):
        # PyTorch compiles at most 8 shapes of a function: forget those of other problems.
        torch.compiler.reset()
        # The backward pass runs many times on one graph, so it must not reuse its buffers.
        importlib.import_module("torch._functorch.config").donated_buffer = False
        mask = self.module.create_block_mask(
            lambda b, h, row, col: row >= col, None, None, p.seqlen_q, p.seqlen_k, device="cuda"
        ) if masked(p) else None
        flex = torch.compile(self.module.flex_attention, dynamic=False, fullgraph=True)
        return lambda: flex(q, k, v, block_mask=mask, enable_gqa=p.kv_heads != p.heads)


class FlashAttention3(Backend):
    package, nhd = "flash_attn_interface", True

    def forward(self, p, q, k, v):
        if p.operation == "decode":  # flash_attn_func would not split the keys among CTAs
            return lambda: self.module.flash_attn_with_kvcache(q, k, v)
        return lambda: self.module.flash_attn_func(q, k, v, causal=p.causal)


class FlashInfer(Backend):
    package, operations, nhd = "flashinfer", ("forward",), True

    def forward(self, p, q, k, v):
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = self.module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        starts = [torch.arange(p.batch + 1, dtype=torch.int32, device="cuda") * n
                  for n in (p.seqlen_q, p.seqlen_k)]
        wrapper.plan(*starts, p.heads, p.kv_heads, p.head_dim, causal=p.causal, q_data_type=q.dtype)
        rows = [x.flatten(0, 1) for x in (q, k, v)]  # [B N, H, D]
        return lambda: wrapper.run(*rows)


class SageAttention(Backend):
    package, operations = "sageattention", ("forward",)
    bound = 6e-2  # INT8 Q K^T and, on Hopper, FP8 P V: quantisation error, not rounding to 16 bits

    def forward(self, p, q, k, v):
        return lambda: self.module.sageattn(q, k, v, tensor_layout="HND", is_causal=masked(p))


BACKENDS = {
    "math": Sdpa(SDPBackend.MATH), "flash": Sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": Sdpa(SDPBackend.CUDNN_ATTENTION), "flex": Flex(), "fa3": FlashAttention3(),
    "flashinfer": FlashInfer(), "sageattention": SageAttention(),
}


def quartiles(seconds):
    """Median and quartiles as the chapter program computes them (linear between neighbours)."""
    t = sorted(seconds)

    def at(share):
        x = share * (len(t) - 1)
        i = int(x)
        return t[i] + (x - i) * (t[min(i + 1, len(t) - 1)] - t[i])

    return {"median_s": at(0.5), "q1_s": at(0.25), "q3_s": at(0.75), "min_s": t[0], "count": len(t)}


def load(folder, *names):
    """The first of these .npy files that exists, on the GPU, or None."""
    for name in names:
        path = os.path.join(folder, name + ".npy")
        if os.path.exists(path):
            return torch.from_numpy(numpy.load(path)).cuda()
    return None


def load_cache(folder, name):
    """K or V [B, Hkv, N, d], of a file of its own or from pages."""
    pages = load(folder, name + "_pages")
    if pages is None:
        return load(folder, name)
    rows = pages[load(folder, "page_table").long()]  # [B, max_pages, page_size, Hkv, d]
    return rows.flatten(1, 2).transpose(1, 2).contiguous()


def bytes_of_files(p):
    """What the program would write of a problem's inputs, in float32."""
    if p.operation == "softmax":
        return 4 * p.rows * p.cols
    return 4 * p.batch * p.head_dim * (2 * p.heads * p.seqlen_q + 2 * p.kv_heads * p.seqlen_k)


class Peer:
    """PyTorch's tensors of one problem: those in `folder`, which the program wrote, or random ones."""

    def __init__(self, p, folder=None):
        self.p = p

        def tensor(loaded, shape, grad=False):
            dtype = DTYPES[p.dtype]
            if loaded is None:
                return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=grad)
            return loaded.reshape(shape).to(dtype).requires_grad_(grad)

        def given(find, *names):
            return find(folder, *names) if folder else None

        if p.operation == "softmax":
            self.x = tensor(given(load, "x"), (p.rows, p.cols))
            return
        grad = p.operation == "backward"
        shape = (p.batch, p.heads, p.seqlen_q, p.head_dim)
        kv_shape = (p.batch, p.kv_heads, p.seqlen_k, p.head_dim)
        self.q = tensor(given(load, "q"), shape, grad)
        self.k, self.v = (tensor(given(load_cache, name), kv_shape, grad) for name in "kv")
        self.d_o = tensor(given(load, "do"), shape)

    def call(self, backend):
        """What is timed, as a function of nothing."""
        if self.p.operation == "softmax":
            return lambda: torch.softmax(self.x, dim=-1)

        if backend.endswith(GRAPH):
            return self.replay(self.call(backend.removesuffix(GRAPH)))

        library = BACKENDS[backend]
        q, k, v = library.inputs(self.q, self.k, self.v)
        forward = library.forward(self.p, q, k, v)
        if self.p.operation != "backward":
            return forward
        out, (d_o,) = forward(), library.inputs(self.d_o)
        out = out[0] if isinstance(out, tuple) else out
        return lambda: torch.autograd.grad(out, (q, k, v), d_o, retain_graph=True)

    @staticmethod
    def replay(call):
        """A CUDA graph of `call`, as a function of nothing: one launch, whatever the call needs the host for."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # the setup of a first call cannot be captured
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()

        def run():
            graph.replay()
            return out  # the graph writes to it, so it must live as long
        return run


def row_difference(a, b):
    """The largest relative L2 difference of a row of two lists of tensors; infinity where one list has
    a NaN, or another number of tensors."""
    if not b or len(a) != len(b):
        return math.inf
    worst = 0.0
    for x, y in zip(a, b):
        x, y = x.float().flatten(0, -2), y.float().reshape(x.shape).flatten(0, -2)
        # At least a tenth of the RMS norm of rows: rounding of a row near 0 is not relative to it.
        size = y.norm(dim=-1).clamp_min(y.norm() / y.shape[0] ** 0.5 / 10)
        of_rows = ((x - y).norm(dim=-1) / size).max().item()
        worst = max(worst, of_rows) if math.isfinite(of_rows) else math.inf
    return worst


def outputs_of(program, p, step, folder):
    """Lets the program save its inputs to `folder`; returns the step's outputs, or the reason why there
    are none."""
    run = subprocess.run([program, *program_options(p), "--step", step, "--check", "off",
                          "--save", folder, "--require-gpu", *NO_ROOFS],
                         capture_output=True, text=True, check=False)
    if run.returncode != 0:
        return (run.stderr or run.stdout).strip().splitlines()[-1]
    of_step = os.path.join(folder, step)
    names = ("dq", "dk", "dv") if p.operation == "backward" else ("o", "p", "y")
    return [x for name in names if (x := load(of_step, name)) is not None]


def compare(p, backends, call, ours, difference=row_difference):
    """The difference of each backend's outputs from `ours`; exits with 1 where one is too large."""
    found = {}
    for name in backends:
        if ":" in name or name.endswith(GRAPH):
            continue
        library = BACKENDS.get(name, Backend())  # "softmax" has no entry
        try:
            theirs = library.outputs(p, call(name)())
        except REFUSALS as error:
            print(f"  {name}: outputs were not compared: {first_line(error)}")
            continue
        found[name] = difference(theirs, ours)
        bound = library.bound or DIFFERENCES[p.dtype] * (2 if p.operation == "backward" else 1)
        if not found[name] <= bound:
            print(f"peers.py: {' '.join(program_options(p))}: {name} differs by {found[name]:.2e} "
                  f"in a row, at most {bound:.2e} is expected: nothing is timed")
            sys.exit(1)
    return found


class Timer:
    """Times calls as GpuTimer does (device.cpp): nobody's launch is in the time."""

    LONGEST_SPIN = 64e-3

    def __init__(self):
        self.scrub = torch.empty(2 * torch.cuda.get_device_properties("cuda").L2_cache_size, dtype=torch.uint8, device="cuda")
        self.spin = 1e-3

    def once(self, call):
        """Seconds of one call, and whether everything was queued when it began.

        What a first call sets up may wait for the GPU: it is tried once more as it is, then with a longer spin.
        """
        spin, attempt = self.spin, 0
        while True:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.scrub.zero_()
            torch.cuda._sleep(int(spin * CYCLES_A_SECOND))
            begin.record()
            call()
            end.record()
            hidden = not begin.query()
            end.synchronize()
            if hidden or (attempt % 2 == 1 and spin >= self.LONGEST_SPIN):
                self.spin = spin if hidden else self.spin
                return begin.elapsed_time(end) * 1e-3, hidden
            attempt += 1
            spin *= 4 if attempt % 2 == 0 else 1

    def turn(self, call, warmup, repeat):
        """Seconds of `repeat` calls, and whether every launch was hidden."""
        samples = [self.once(call) for _ in range(warmup + repeat)][warmup:]
        return [s for s, _ in samples], all(hidden for _, hidden in samples)


def program_options(p):
    """The problem in the words of the chapter program."""
    if p.operation == "softmax":
        words = ["--rows", p.rows, "--cols", p.cols]
    else:
        words = ["--batch", p.batch, "--heads", p.heads, "--kv-heads", p.kv_heads, "--head-dim",
                 p.head_dim, "--seqlen-q", p.seqlen_q, "--seqlen-k", p.seqlen_k]
        words += ["--causal"] if p.causal else []
    return [str(w) for w in ["--operation", p.program_operation, "--dtype", p.dtype, *words]]


class Program:
    """A chapter program that times its steps when it is told to (--turns)."""

    def __init__(self, args, p, program, steps, options=()):
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "run.json")
        self.command = [program, *program_options(p), "--step", steps, "--time", "--turns",
                        "--warmup", str(args.warmup), "--repeat", str(args.repeat), "--json", self.path,
                        "--require-gpu", *options]
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True)
        self.said = ""
        self.answer()  # when its inputs are on the GPU

    def answer(self):
        """The next line of JSON, or nothing when it has ended."""
        for line in self.process.stdout:
            self.said += line
            if line.startswith("{"):
                return json.loads(line)
        return None

    def turn(self, step):
        """Seconds of a step's launches, and whether every one was hidden. RuntimeError: why there are none."""
        try:
            self.process.stdin.write(step + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        if answer := self.answer():
            if "reason" in answer:
                raise RuntimeError(answer["reason"])
            return answer["seconds"], answer["launch_hidden"]
        # The program ended. 3 and 4: it refuses the problem, or lacks memory; the list may contain such.
        if self.process.wait() in (3, 4):
            raise RuntimeError(self.reason(step))
        sys.exit(f"{' '.join(self.command)}\n{self.said}")

    def reason(self, step):
        with open(self.path, encoding="utf-8") as file:
            return next(s["reason"] for s in json.load(file)["steps"] if s["name"] == step)

    def end(self):
        """Its JSON."""
        self.said += self.process.communicate()[0]
        if self.process.returncode not in (0, 3, 4):
            sys.exit(f"{' '.join(self.command)}\n{self.said}")
        with open(self.path, encoding="utf-8") as file:
            return json.load(file)


def listed_steps(program):
    """The steps of a program, each with its operation."""
    listed = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines() if line.startswith("  ") and line[2] != " "]
    return {row[0]: row[1] for row in rows}


def steps_of(listed, p):
    """The steps of a problem, by name: all of its operation, or those asked for. Says how the program calls that."""
    p.program_operation = p.operation
    if p.operation == "decode" and "decode" not in listed.values():
        p.program_operation = "paged_decode" if "paged_decode" in listed.values() else "forward"
    if p.steps != "all":
        return p.steps.split(",")
    return [step for step, operation in listed.items() if operation == p.program_operation]


def sides_of(p, backends):
    """The backends that take turns."""
    if p.operation == "softmax":
        return ["softmax"]
    if p.operation != "decode":
        return backends
    return [side for name in backends for side in ([name, name + GRAPH] if name in BACKENDS else [name])]


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
        if p.causal and p.seqlen_q != p.seqlen_k and p.seqlen_q > 1:
            # PyTorch's causal mask is top-left aligned, ours is bottom-right aligned.
            parser.error(f"'{line}': --causal needs equal lengths here")
        problems.append(p)
    return problems


def ratios_of(rounds, steps, peers):
    """Peer's time over step's time, for every pair: the median and quartiles of the rounds, each with its medians."""
    ratios = []
    for step in steps:
        for peer in peers:
            if isinstance(rounds[step], str) or isinstance(rounds[peer], str):
                continue
            r = quartiles([quartiles(theirs)["median_s"] / quartiles(mine)["median_s"]
                           for theirs, mine in zip(rounds[peer], rounds[step])])
            ratios.append({"step": step, "peer": peer, "median": r["median_s"], "q1": r["q1_s"], "q3": r["q3_s"]})
    return ratios


def take_turns(sides, rounds, turn, rest=time.sleep):
    """`rounds` turns of every side, there and back; a list of seconds a turn, or the reason why there is none.

    turn(side) gives (seconds, hidden) or raises RuntimeError. The GPU rests before each turn for twice as long as the
    timed calls of the one before took, whoever that was.
    """
    taken, late, busy = {side: [] for side in sides}, set(), 0
    for n in range(rounds):
        for side in sides if n % 2 == 0 else reversed(sides):
            if isinstance(taken[side], str):
                continue
            rest(min(1.0, 2 * busy))
            try:
                seconds, hidden = turn(side)
            except REFUSALS as error:  # not supported, or out of memory
                taken[side], busy = first_line(error), 0
                continue
            busy = sum(seconds)
            taken[side].append(seconds)
            if not hidden:
                late.add(side)
    return taken, late


def packages_of(backends, problems):
    """Versions of these backends' packages. Exits with 2 if a backend cannot do its part."""
    versions = {}
    for name in backends:
        library = BACKENDS.get(name, Backend())
        lacks = {p.operation for p in problems} - {"softmax", *library.operations}
        if reason := f"has no operation {min(lacks)}" if lacks else library.available():
            print(f"peers.py: --backends {name}: {reason}", file=sys.stderr)
            sys.exit(2)
        if library.package and not library.package.startswith("torch."):
            versions[library.package] = library.version()
    return versions


def main():
    parser = argparse.ArgumentParser(description=__doc__, parents=[problem_options()],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--problems", help="file with a problem a line")
    parser.add_argument("--seqlens", default="1024,2048,4096,8192", help="where there is no list")
    parser.add_argument("--backends", default="math,flash,cudnn")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=7, help="timed calls a round")
    parser.add_argument("--rounds", type=int, default=LEAST_ROUNDS, help=f"at least {LEAST_ROUNDS}")
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    for name in args.backends.split(","):
        if name not in BACKENDS and not os.access(
                os.path.join(os.path.dirname(args.program), name.partition(":")[0]), os.X_OK):
            parser.error(f"--backends {name}: must be some of {', '.join(BACKENDS)} or CHAPTER:STEP")
    if args.rounds < LEAST_ROUNDS:
        parser.error(f"--rounds {args.rounds}: must be from {LEAST_ROUNDS}, for the quartiles")
    problems = problems_of(args)
    packages = packages_of(args.backends.split(","), problems)
    if not torch.cuda.is_available():
        print("peers.py: PyTorch sees no GPU")
        sys.exit(77)

    report = {"schema": "attn-peers-1", "timing_method": TIMING_METHOD, "gpu": torch.cuda.get_device_name(),
              "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "problems": [],
              **({"packages": packages} if packages else {})}
    timer, listed = Timer(), listed_steps(args.program)
    for p in problems:
        steps = steps_of(listed, p)
        backends = sides_of(p, args.backends.split(","))
        # Roofs are compared with rates in GB/s only, and measured once.
        with_roofs = p.operation in ("softmax", "decode") and not report["problems"]
        programs = {step: None for step in steps}
        own = Program(args, p, args.program, ",".join(steps), () if with_roofs else NO_ROOFS)
        for step in steps:
            programs[step] = own
        for name in backends:
            if ":" in name:
                chapter, step = name.split(":")
                programs[name] = Program(args, p, os.path.join(os.path.dirname(args.program), chapter), step, NO_ROOFS)
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # files of some GB, read once
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            if bytes_of_files(p) > MOST_BYTES:
                ours = f"{bytes_of_files(p):.1e} bytes of inputs"
            else:
                ours = outputs_of(args.program, p, steps[0], folder)
            files = not isinstance(ours, str)
            peer, calls = Peer(p, folder if files else None), {}
        differences = compare(p, backends, peer.call, ours) if files else {}
        if not files:
            print(f"  outputs were not compared: {ours}")
        ours = None

        def turn(side):
            if side in programs:
                return programs[side].turn(side.rpartition(":")[2])
            if side not in calls:  # a graph is captured once
                calls[side] = peer.call(side)
            return timer.turn(calls[side], args.warmup, args.repeat)

        rounds, late = take_turns([*backends, *steps], args.rounds, turn)
        run = own.end()
        for program in set(programs.values()) - {own}:
            program.end()
        peer, calls = None, {}
        torch.cuda.empty_cache()
        for side in late:
            print(f"  {side}: the host was slower than the longest spin: its launches are in its times")
        peers = [{"name": name, "reason": rounds[name]} if isinstance(rounds[name], str) else
                 {"name": name, "time": quartiles([x for one in rounds[name] for x in one]),
                  "launch_hidden": name not in late} for name in backends]
        ratios = ratios_of(rounds, steps, backends)
        report["problems"].append({"problem": run["problem"], "operation": p.operation, "rounds": args.rounds,
                                   "runs": [run], "peers": peers, "ratios": ratios,
                                   "output_differences": differences})
        print(" ".join(program_options(p)))
        for step in run["steps"]:
            if not step.get("time"):
                continue
            median = step["time"]["median_s"]
            rate = (f"{step['compulsory_bytes'] / median * 1e-9:7.0f} GB/s of use" if "useful_read_s" in step else
                    f"{step['flop'] / median * 1e-12:7.1f} TFLOP/s" if step["flop"] else
                    f"{step['modelled_bytes'] / median * 1e-9:7.0f} GB/s")
            text = "  ".join(f"{r['median']:6.3f} ({r['q1']:.3f} .. {r['q3']:.3f}) x {r['peer']}"
                             for r in ratios if r["step"] == step["name"])
            print(f"  {step['name']:<16} {median * 1e3:10.3f} ms  {rate}  {text}")
        for peer in peers:
            text = f"{peer['time']['median_s'] * 1e3:10.3f} ms" if "time" in peer else peer["reason"]
            print(f"  {peer['name']:<16} {text}")
        sys.stdout.flush()
        if args.out:  # after every problem, so that an interrupted run keeps its results
            with open(args.out, "w", encoding="utf-8") as file:
                json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
