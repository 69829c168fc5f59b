"""peers.py and peers_formats.py with a stand-in for PyTorch. Arguments: peers.py, empty folder."""
import argparse
import importlib.util
import io
import itertools
import os
import subprocess
import sys
import types
import weakref
from contextlib import redirect_stderr, redirect_stdout

script, folder = sys.argv[1:3]


def module(name, **contents):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(contents)


module("numpy")
module("torch", bfloat16="bf16", float16="fp16", float32="fp32", cuda=types.SimpleNamespace(is_available=lambda: False))
module("torch.nn")
module("torch.nn.attention", sdpa_kernel=None,
       SDPBackend=types.SimpleNamespace(MATH=1, FLASH_ATTENTION=2, CUDNN_ATTENTION=3))
module("torch.nn.functional", scaled_dot_product_attention=None)
spec = importlib.util.spec_from_file_location("peers", script)
peers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(peers)

list_file = os.path.join(folder, "problems.txt")


def exit_of(*words):
    """Exit status of main() and what it said."""
    said, sys.argv = io.StringIO(), ["peers.py", "--program", os.path.join(folder, "x"), *words]
    try:
        with redirect_stdout(said), redirect_stderr(said):
            peers.main()
    except SystemExit as e:
        return e.code, said.getvalue()
    return 0, said.getvalue()


def problems(text, *words):
    with open(list_file, "w", encoding="utf-8") as file:
        file.write(text)
    given = vars(peers.problem_options().parse_args(words))
    return peers.problems_of(argparse.Namespace(problems=list_file, seqlens="", **given))


p = problems("--batch 2 --seqlen 8192 --causal  # long\n\n# nothing\n--operation softmax --rows 8 --cols 77 --step v4\n"
             "--operation decode --seqlen-k 4096\n", "--heads", "8", "--dtype", "fp16")
assert len(p) == 3
listed = {"v1": "forward", "v2": "decode", "v4": "softmax"}
assert [peers.steps_of(listed, one) for one in p] == [["v1"], ["v4"], ["v2"]]
assert p[2].program_operation == "decode"
assert peers.program_options(p[2])[:2] == ["--operation", "decode"]
assert peers.steps_of({"v1": "forward"}, p[2]) == ["v1"] and p[2].program_operation == "forward"  # an older program
assert peers.sides_of(p[2], ["flash", "cudnn", "04_x:v7"]) == ["flash", "flash graph", "cudnn", "cudnn graph", "04_x:v7"]
assert peers.sides_of(p[0], ["flash"]) == ["flash"] and peers.sides_of(p[1], ["flash"]) == ["softmax"]
assert peers.program_options(p[0]) == ("--operation forward --dtype fp16 --batch 2 --heads 8 --kv-heads 8 --head-dim 128 "
                                       "--seqlen-q 8192 --seqlen-k 8192 --causal").split()
assert peers.program_options(p[1]) == "--operation softmax --dtype fp16 --rows 8 --cols 77".split()
assert p[1].steps == "v4" and p[0].steps == "all"
assert "--seqlen-q 1 --seqlen-k 4096" in " ".join(peers.program_options(p[2]))

# The ratio of each round by itself: a GPU that got slower for both sides changes nothing.
r = peers.ratios_of({"v1": [[2.0], [4.0], [6.0]], "v2": "refused", "math": [[1, 3, 9], [6, 6], [12, 12]],
                     "flash": "not supported"}, ["v1", "v2"], ["math", "flash"])
assert r == [{"step": "v1", "peer": "math", "median": 1.5, "q1": 1.5, "q3": 1.75}], r

# Turns go there and back, everybody rests twice as long as the turn before took, and who cannot is asked once.
order, rests = [], []


def turn(side):
    order.append(side)
    if side == "math":
        raise RuntimeError("out of memory\nmore")
    return [{"flash": 0.01, "v1": 0.02}[side]] * 3, side != "flash"


taken, late = peers.take_turns(["math", "flash", "v1"], 5, turn, rests.append)
assert order == ["math", "flash", "v1"] + ["v1", "flash"] + ["flash", "v1"] + ["v1", "flash"] + ["flash", "v1"], order
assert [round(x, 6) for x in rests] == [0, 0, 0.06, 0.12, 0.12, 0.06, 0.06, 0.12, 0.12, 0.06, 0.06], rests
assert taken["math"] == "out of memory" and len(taken["v1"]) == 5 and late == {"flash"}


# A GPU and a host with separate clocks: host launch time is not part of any measured time.
class Gpu:
    def __init__(self):
        self.host = self.free = 0.0

    def queue(self, seconds):
        self.host += 5e-6
        self.free = max(self.free, self.host) + seconds


gpu = Gpu()


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = max(gpu.free, gpu.host)

    def query(self):
        return self.at <= gpu.host

    def synchronize(self):
        gpu.host = max(gpu.host, self.at)

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


sys.modules["torch"].uint8 = 0
sys.modules["torch"].empty = lambda *_, **__: types.SimpleNamespace(zero_=lambda: gpu.queue(40e-6))
sys.modules["torch"].cuda = types.SimpleNamespace(
    is_available=lambda: False, Event=Event, _sleep=lambda cycles: gpu.queue(cycles / 2e9),
    get_device_properties=lambda _: types.SimpleNamespace(L2_cache_size=1))


def timed(host_s):
    def call():
        gpu.host += host_s
        gpu.queue(300e-6)
    return peers.Timer().turn(call, 1, 3)


# A captured call runs without the host: what it needs that for is in no replay.
class Graph:
    def replay(self):
        gpu.queue(self.seconds)


class capture:
    def __init__(self, graph):
        self.graph = graph

    def __enter__(self):
        self.begin = gpu.free = max(gpu.free, gpu.host)

    def __exit__(self, *_):
        self.graph.seconds, gpu.free = gpu.free - self.begin, self.begin


class Nothing:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


stream = types.SimpleNamespace(wait_stream=lambda other: None)
vars(sys.modules["torch"].cuda).update(Stream=lambda: stream, current_stream=lambda: stream, stream=lambda s: Nothing(),
                                       CUDAGraph=Graph, graph=capture)
heads = []


def attention(q, k, v, is_causal, enable_gqa):
    heads.append((is_causal, enable_gqa))
    gpu.host += 0.1  # longer than any spin
    gpu.free = max(gpu.free, gpu.host - 0.1) + 20e-6


peers.sdpa_kernel, peers.scaled_dot_product_attention = lambda backend: Nothing(), attention
sys.modules["torch"].randn = lambda *_, **__: None
p[2].kv_heads, p[2].causal = 2, True
peer = peers.Peer(p[2])
seconds, hidden = peers.Timer().turn(peer.call("flash graph"), 1, 3)
assert hidden and all(abs(x - 20e-6) < 1e-9 for x in seconds), seconds
assert heads == [(False, True)] * 4, heads  # three to set up, one captured; one query attends to all keys; groups
assert not peers.Timer().turn(peer.call("flash"), 0, 1)[1]

for host_s in (0, 200e-6, 3e-3):
    seconds, hidden = timed(host_s)
    assert hidden and all(abs(x - 300e-6) < 1e-9 for x in seconds), (host_s, seconds)
assert not timed(0.1)[1]


# The other end of --turns: a chapter program that answers, refuses, or has not the memory.
def program(body, step="v5"):
    path = os.path.join(folder, "01_other")
    with open(path, "w", encoding="utf-8") as file:
        file.write("#!/bin/sh\nall=$@\nwhile [ $1 != --json ]; do shift; done\njson=$2\n"
                   f"echo options: $all >{folder}/options\n{body}")
    os.chmod(path, 0o755)
    try:
        running = peers.Program(argparse.Namespace(warmup=1, repeat=2), p[0], path, step, peers.NO_ROOFS)
        return [running.turn(step), running.turn(step), running.end()]
    except RuntimeError as error:
        return str(error)
    except SystemExit:
        return "exit"


answers = """echo 'device: x'; echo '{"ready": true}'
while read step; do echo '{"step": "'$step'", "seconds": [1, 2], "launch_hidden": true}'; done
echo '{"steps": []}' >$json"""
assert program(answers) == [([1, 2], True), ([1, 2], True), {"steps": []}]
with open(os.path.join(folder, "options"), encoding="utf-8") as file:
    said = file.read()
    assert "--gpu h200" in said and "--step v5 --time --turns --warmup 1 --repeat 2" in said, said
ends = """echo '{"steps": [{"name": "v5", "reason": "out of memory: 2 TiB"}]}' >$json; exit """
assert program(ends + "4") == "out of memory: 2 TiB"
assert program(ends + "3") == "out of memory: 2 TiB"
assert program(ends + "1") == "exit"

assert exit_of()[0] == 77
code, said = exit_of("--backends", "math,triton")
assert code == 2 and "--backends triton: must be some of math, flash, cudnn, flex" in said, said
code, said = exit_of("--rounds", "4")
assert code == 2 and "--rounds 4: must be from 5" in said, said
with open(list_file, "w", encoding="utf-8") as file:
    file.write("--seqlen-q 3 --seqlen-k 7 --causal\n")
code, said = exit_of("--problems", list_file)
assert code == 2 and "--causal needs equal lengths" in said, said
# Without PyTorch: 77, and the reason.
alone = subprocess.run([sys.executable, "-I", "-S", script, "--program", "x"], capture_output=True, text=True, check=False)
assert alone.returncode == 77 and "not installed" in alone.stdout, alone

# Outputs that differ end the run before anything is timed.
one = problems("--seqlen 64")[0]
one.program_operation = "forward"


def compared(differences, **more):
    """Exit status and text of compare() for backends whose outputs are so far off."""
    said = io.StringIO()
    vars(one).update(more)

    def call(name):
        def run():
            if differences[name] is None:
                raise RuntimeError("not supported")
            return differences[name]
        return run
    try:
        with redirect_stdout(said):
            return 0, peers.compare(one, list(differences), call, 0.0,
                                    lambda theirs, ours: abs(theirs[0] - ours))
    except SystemExit as e:
        return e.code, said.getvalue()


assert compared({"flash": 0.01, "cudnn": None}) == (0, {"flash": 0.01})
status, text = compared({"flash": 0.001, "cudnn": 0.02})
assert status == 1 and "cudnn differs by 2.00e-02" in text and "nothing is timed" in text, text
assert compared({"flash": float("nan")})[0] == 1
assert compared({"flash": 0.02}, operation="backward")[0] == 0
assert compared({"flash": 0.01}, operation="forward", dtype="fp16")[0] == 1
assert compared({"flash": 0.9, "flash graph": 0.9, "04_x:v7": 0.9}, dtype="bf16")[0] == 1
assert compared({"flash graph": 0.9, "04_x:v7": 0.9})[0] == 0  # the same kernels; another program


class Rows:
    """A stand-in for a tensor of rows: what row_difference() asks of one."""

    def __init__(self, rows):
        self.rows, self.shape = rows, (len(rows), len(rows[0]))

    def float(self):
        return self

    def flatten(self, *_):
        return self

    def reshape(self, _):
        return self

    def __sub__(self, other):
        return Rows([[a - b for a, b in zip(x, y)] for x, y in zip(self.rows, other.rows)])

    def norm(self, dim=None):
        norms = [sum(x * x for x in row) ** 0.5 for row in self.rows]
        return Numbers(norms) if dim == -1 else sum(x * x for x in norms) ** 0.5


class Numbers:
    """And for one of numbers."""

    def __init__(self, numbers):
        self.numbers = numbers

    def clamp_min(self, least):
        return Numbers([max(x, least) for x in self.numbers])

    def __truediv__(self, other):
        return Numbers([a / b for a, b in zip(self.numbers, other.numbers)])

    def max(self):
        return Numbers([float("nan") if any(x != x for x in self.numbers) else max(self.numbers)])

    def item(self):
        return self.numbers[0]


right, off = Rows([[3.0, 4.0], [0.0, 5.0]]), Rows([[3.0, 4.0], [0.0, 5.5]])
bad = Rows([[3.0, 4.0], [float("nan"), 5.0]])
assert peers.row_difference([right], [right]) == 0
assert abs(peers.row_difference([off], [right]) - 0.1) < 1e-12
assert peers.row_difference([bad], [right]) == float("inf")
assert peers.row_difference([right], [bad]) == float("inf")
assert peers.row_difference([right, bad], [right, right]) == float("inf")
assert peers.row_difference([right, right], [right]) == float("inf")
assert peers.row_difference([], []) == float("inf")


# Further libraries, with stand-ins. Each element of a tensor is a number that names it.
class Tensor:
    dtype, requires_grad = "bf16", False

    def __init__(self, shape, numbers=None):
        self.shape = tuple(shape)
        indices = itertools.product(*map(range, self.shape))
        self.numbers = list(range(len(list(indices)))) if numbers is None else numbers

    def items(self):
        return dict(zip(itertools.product(*map(range, self.shape)), self.numbers))

    def transpose(self, a, b):
        def swap(x):
            x = list(x)
            x[a], x[b] = x[b], x[a]
            return tuple(x)
        moved = {swap(index): number for index, number in self.items().items()}
        return Tensor(swap(self.shape), [moved[index] for index in sorted(moved)])

    def contiguous(self):
        return self

    def reshape(self, *shape):
        size = 1
        for n in shape:
            size *= n if n > 0 else 1
        return Tensor([n if n > 0 else len(self.numbers) // size for n in shape], self.numbers)

    def flatten(self, first, last):
        assert (first, last) == (0, 1)
        return self.reshape(-1, *self.shape[2:])

    def __eq__(self, other):
        return (self.shape, self.numbers) == (other.shape, other.numbers)


B, H, G, N, K, D = 2, 4, 2, 3, 5, 2  # batch, query heads, K/V heads, queries, keys, head dim
taken, plans = [], []


def attention_of(**words):
    """A library's function that gives Q back as O, and notes what it was given."""
    def function(*tensors, **options):
        taken.append((*tensors, options))
        return words.get("result", lambda q: q)(tensors[0])
    return function


class Range:
    def __init__(self, n):
        self.n = n

    def __mul__(self, factor):
        return [x * factor for x in range(self.n)]


class Wrapper:
    def __init__(self, workspace, layout):
        assert layout == "NHD"

    def plan(self, *words, **options):
        plans.append((*words, options))

    run = staticmethod(attention_of())


def with_lse(q):
    return q, "log-sum-exp"


module("flash_attn_interface", flash_attn_func=attention_of(result=with_lse), __version__="3.0",
       flash_attn_with_kvcache=attention_of())
module("flashinfer", BatchPrefillWithRaggedKVCacheWrapper=Wrapper, __version__="0.7")
module("sageattention", sageattn=attention_of(), __version__="2.2")
sys.modules["torch"].int32 = 0
sys.modules["torch"].arange = lambda n, **_: Range(n)
made = itertools.count()


def randn(shape, **_):
    """A tensor that differs from all others."""
    new, first = Tensor(shape), 10000 * next(made)
    return Tensor(shape, [first + number for number in new.numbers])


sys.modules["torch"].randn = randn


def peer_of(name, *words):
    """A backend's peer and call on a small problem."""
    shape = f" --batch {B} --heads {H} --kv-heads {G} --head-dim {D} --dtype bf16\n"
    p = problems(" ".join(words) + shape)[0]
    assert peers.packages_of([name], [p]) is not None
    taken.clear()
    return peers.Peer(p), p


def result_of(name, *words):
    peer, p = peer_of(name, *words)
    call = peer.call(name)
    assert not taken or p.operation == "backward"
    return peer, peers.BACKENDS[name].outputs(p, call())


for words in (["--seqlen 3 --causal"], ["--seqlen-q 3 --seqlen-k 5"]):
    causal = "--causal" in words[0]
    peer, out = result_of("fa3", *words)
    q, k, v, options = taken[0]
    assert q == peer.q.transpose(1, 2) and q.shape == (B, N, H, D) and options == {"causal": causal}
    assert k == peer.k.transpose(1, 2) and k.shape == (B, peer.p.seqlen_k, G, D)
    assert v == peer.v.transpose(1, 2)
    assert out == [peer.q], out  # without the log-sum-exp
    peer, out = result_of("flashinfer", *words)
    q, k, v, options = taken[0]
    assert out == [peer.q] and q.shape == (B * N, H, D)
    for given, own in ((q, peer.q), (k, peer.k), (v, peer.v)):
        assert given == own.transpose(1, 2).flatten(0, 1)
    n = peer.p.seqlen_k
    assert plans.pop() == ([0, N, 2 * N], [0, n, 2 * n], H, G, D,
                           {"causal": causal, "q_data_type": "bf16"})
    peer, out = result_of("sageattention", *words)
    assert taken == [(peer.q, peer.k, peer.v, {"tensor_layout": "HND", "is_causal": causal})]
    assert out == [peer.q]
assert not plans
library = sys.modules["flash_attn_interface"]
prefill, library.flash_attn_func = library.flash_attn_func, None  # would not split the keys
peer, out = result_of("fa3", "--operation decode --seqlen-k 5")
library.flash_attn_func = prefill
assert taken[0][0].shape == (B, 1, H, D) and out == [peer.q] and not taken[0][3]
assert peers.sides_of(peer.p, ["fa3"]) == ["fa3", "fa3 graph"]


# Gradients: with respect to tensors in the library's layout; brought back for the comparison only.
def grad(out, inputs, d_o, retain_graph):
    assert retain_graph and out == inputs[0] and d_o.shape == (B, N, H, D)
    return inputs


sys.modules["torch"].autograd = types.SimpleNamespace(grad=grad)
Tensor.to = Tensor.requires_grad_ = lambda self, *_: self
peer, out = result_of("fa3", "--operation backward --seqlen 3")
assert out == [peer.q, peer.k, peer.v]

# FlexAttention: compiled again for each problem; the mask leaves every row its keys.
resets, masks = [], []
sys.modules["torch"].compiler = types.SimpleNamespace(reset=lambda: resets.append(1))
sys.modules["torch"].compile = lambda function, dynamic, fullgraph: function
module("torch._functorch")
module("torch._functorch.config", donated_buffer=True)


def block_mask(mask, batch, heads, rows, cols, device):
    masks.append([[mask(0, 0, row, col) for col in range(cols)] for row in range(rows)])
    return "mask"


module("torch.nn.attention.flex_attention", create_block_mask=block_mask,
       flex_attention=attention_of())
peer, out = result_of("flex", "--seqlen 3 --causal")
assert taken == [(peer.q, peer.k, peer.v, {"block_mask": "mask", "enable_gqa": True})]
assert masks == [[[True, False, False], [True, True, False], [True, True, True]]]
assert out == [peer.q] and len(resets) == 1
peer, out = result_of("flex", "--seqlen-q 1 --seqlen-k 5 --causal")
assert taken[0][3]["block_mask"] is None  # one query attends to all keys
assert not sys.modules["torch._functorch.config"].donated_buffer


# A wrong output of a library ends the run; the bound of SageAttention is its own.
def status_of(name, off, *words, dtype="bf16"):
    peer, p = peer_of(name, *words)
    p.program_operation, p.dtype = p.operation, dtype
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            peers.compare(p, [name], peer.call, [peer.q],
                          lambda theirs, ours: off if theirs == ours else 1.0)
    except SystemExit as e:
        return e.code, said.getvalue()
    return 0, said.getvalue()


for name in ("fa3", "flashinfer", "sageattention", "flex"):
    assert status_of(name, 0.01, "--seqlen 3")[0] == 0
    assert (status_of(name, 0.05, "--seqlen 3")[0] == 0) == (name == "sageattention"), name
assert status_of("sageattention", 0.07, "--seqlen 3")[0] == 1
sys.modules["flash_attn_interface"].flash_attn_func = attention_of(result=lambda q: Tensor(q.shape))
status, text = status_of("fa3", 0.0, "--seqlen 3")
assert status == 1 and "fa3 differs by 1.00e+00" in text and "nothing is timed" in text, text


# A refusal of a problem is no wrong output, even without a word.
def refuse(q):
    raise AssertionError


sys.modules["sageattention"].sageattn = attention_of(result=refuse)
assert status_of("sageattention", 0.0, "--seqlen 3") == (
    0, "  sageattention: outputs were not compared: AssertionError\n")

# peers_formats.py: the step gets bf16 tensors and quantises them; casts are timed or not.
sys.modules["peers"] = peers
sys.modules["torch"].float8_e4m3fn = "e4m3"
spec = importlib.util.spec_from_file_location(
    "peers_formats", os.path.join(os.path.dirname(script), "peers_formats.py"))
formats = importlib.util.module_from_spec(spec)
spec.loader.exec_module(formats)
casts = []
Tensor.to = lambda self, dtype: casts.append(dtype) or self
sys.modules["flash_attn_interface"].flash_attn_func = attention_of(result=with_lse)
sys.modules["sageattention"].sageattn_qk_int8_pv_fp8_cuda_sm90 = attention_of()
for name, before, inside, causal in (
        ("fa3_e4m3", 3, 0, True), ("fa3_e4m3_casts", 0, 3, True), ("fa3_e4m3_casts", 0, 3, False),
        ("sage_per_warp", 0, 0, True), ("sage_per_warp", 0, 0, False)):
    assert peers.BACKENDS[name].operations == ("forward",)
    peer, p = peer_of(name, "--seqlen 3", "--causal" if causal else "")
    p.dtype = "e4m3"
    casts.clear()
    call = peer.call(name)
    assert casts == ["e4m3"] * before, (name, casts)
    out = peers.BACKENDS[name].outputs(p, call())
    assert casts == ["e4m3"] * (before + inside) and out == [peer.q], (name, casts)
    if name == "sage_per_warp":
        assert taken[0][:3] == (peer.q, peer.k, peer.v)
        assert taken[0][3] == {"tensor_layout": "HND", "is_causal": causal,
                               "qk_quant_gran": "per_warp", "pv_accum_dtype": "fp32+fp32"}
    else:
        assert taken[0][:3] == tuple(x.transpose(1, 2) for x in (peer.q, peer.k, peer.v))
        assert taken[0][3] == {"causal": causal}
p.program_operation = "forward"
assert "--dtype e4m3" in " ".join(peers.program_options(p))
assert peers.DTYPES["e4m3"] == "bf16"
for name in ("fa3_e4m3", "sage_per_warp"):
    assert status_of(name, 0.35, "--seqlen 3", dtype="e4m3")[0] == 0
    assert status_of(name, 0.45, "--seqlen 3", dtype="e4m3")[0] == 1


# Pages in another order: the table leads back to each page.
class Numbered(list):
    def argsort(self):
        return Numbered(sorted(range(len(self)), key=self.__getitem__))

    def reshape(self, batch, _):
        n = len(self) // batch
        return Numbered(self[i * n:(i + 1) * n] for i in range(batch))

    def int(self):
        self.is_int = True
        return self


Tensor.__getitem__ = lambda self, order: [self.items_of(i) for i in order]
Tensor.items_of = lambda self, i: self.numbers[i * (n := len(self.numbers) // self.shape[0]):][:n]
sys.modules["flash_attn_interface"].get_scheduler_metadata = (
    lambda *words, page_size: (*words, page_size))
sys.modules["torch"].randperm = lambda n, device: Numbered([3, 0, 1, 2])
sys.modules["torch"].full = lambda shape, value, **_: [value] * shape[0]
peer, out = result_of("fa3_pages", "--operation decode --seqlen-k 32")
q, k, v, options = taken[0]
assert options["page_table"].is_int and peers.BACKENDS["fa3_pages"].operations == ("decode",)
assert options == {"cache_seqlens": [32, 32], "page_table": [[1, 2], [3, 0]],
                   "scheduler_metadata": (B, 1, 32, H, G, D, [32, 32], 16)} and out == [peer.q]
for pool, own in ((k, peer.k), (v, peer.v)):
    gathered = [pool[page] for pages in options["page_table"] for page in pages]
    assert sum(gathered, []) == own.transpose(1, 2).numbers
# The schedule is made before the call.
schedules = []
sys.modules["flash_attn_interface"].get_scheduler_metadata = (
    lambda *words, page_size: schedules.append(words))
call = peer_of("fa3_pages", "--operation decode --seqlen-k 32")[0].call("fa3_pages")
assert len(schedules) == 1 and call() and len(schedules) == 1
# A graph keeps what it reads: here a copy of Q, to which only the call refers.
sys.modules["flash_attn_interface"].flash_attn_with_kvcache = attention_of(
    result=lambda q: Tensor(q.shape, q.numbers))
peer, p = peer_of("fa3_pages", "--operation decode --seqlen-k 32")
replay = peer.call("fa3_pages graph")
assert taken[0][0] is not peer.q and replay() == taken[0][0]
copy = weakref.ref(taken[0][0])
taken.clear()
assert copy() is not None


# The outputs of a graph are compared, too; those of e4m3 by all rows together as well.
def graph_status(off):
    calls = {"fa3": 0.0, "fa3 graph": off}
    try:
        return 0, peers.compare(p, list(calls), lambda name: lambda: Tensor((1,), [calls[name]]), 0.0,
                                lambda theirs, ours: theirs[0].numbers[0])
    except SystemExit as e:
        return e.code, None


library_outputs, peers.BACKENDS["fa3"].outputs = peers.BACKENDS["fa3"].outputs, lambda p, x: [x]
p.program_operation = "decode"
with redirect_stdout(io.StringIO()):
    assert graph_status(0.01) == (0, {"fa3": 0.0, "fa3 graph": 0.01})
    assert graph_status(0.02)[0] == 1
peers.BACKENDS["fa3"].outputs = library_outputs


class Column(Rows):
    """Rows of one number each, with the sums that a root mean square asks for."""

    def __pow__(self, n):
        return Column([[x ** n for x in row] for row in self.rows])

    def __sub__(self, other):
        return Column(super().__sub__(other).rows)

    def sum(self):
        return Numbers([sum(map(sum, self.rows))])


ones = Column([[1.0]] * 100)
assert abs(formats.e4m3_difference([Column([[1.1]] * 100)], [ones]) - 0.1) < 1e-9
assert formats.e4m3_difference([Column([[1.13]] * 100)], [ones]) == float("inf")
assert abs(formats.e4m3_difference([Column([[1.0]] * 99 + [[1.3]])], [ones]) - 0.3) < 1e-9
p.dtype, peers.BACKENDS["fa3"].outputs = "e4m3", lambda p, x: [x]
with redirect_stdout(io.StringIO()):
    for off, status in ((0.1, 0), (0.13, 1)):  # below and above the bound of all rows
        try:
            peers.compare(p, ["fa3"], lambda name: lambda: Column([[1 + off]] * 100), [ones])
            assert status == 0
        except SystemExit as e:
            assert e.code == status
peers.BACKENDS["fa3"].outputs = library_outputs
try:
    result_of("fa3_pages", "--operation decode --seqlen-k 33")
    raise SystemExit("a partial page was accepted")
except ValueError as error:
    assert str(error) == "--seqlen-k 33: must be a multiple of 16 here"

# Versions, and backends that cannot do what is asked.
both = problems("--seqlen 3\n--operation softmax\n")
assert peers.packages_of(["math", "flex", "04_x:v7"], both) == {}
assert peers.packages_of(["fa3", "flashinfer", "sageattention"], both) == {
    "flash_attn_interface": "3.0", "flashinfer": "0.7", "sageattention": "2.2"}
for name, operation in (("flashinfer", "decode"), ("sageattention", "backward"),
                        ("flex", "decode")):
    code, said = exit_of("--operation", operation, "--backends", f"math,{name}")
    assert (code, said) == (2, f"peers.py: --backends {name}: has no operation {operation}\n"), said
for name, package in (("fa3", "flash_attn_interface"), ("flashinfer", "flashinfer"),
                      ("sageattention", "sageattention")):
    sys.modules[package] = None  # not installed
    code, said = exit_of("--backends", f"math,{name}")
    assert code == 2 and said.count("\n") == 1, said
    reason = f"the Python package {package} cannot be imported: "
    assert said.startswith(f"peers.py: --backends {name}: {reason}"), said
print("everything as expected")
