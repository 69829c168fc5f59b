"""The suite's reference, checker, cost model and timer."""
import ctypes as c
import inspect
import json
import statistics

import numpy as np

from . import arrays, library as lib


def steps(operation=None):
    """Names of all steps, or of those of one operation ("forward", "decode", "paged_mla", ...).
    Those of quantised_forward are under "forward"."""
    pairs = [line.split() for line in lib.library().attn_steps().decode().splitlines()]
    operations = sorted({of for _, of in pairs})
    if operation is not None and operation not in operations:
        raise lib.InvalidValue(f"operation {operation}: must be one of {', '.join(operations)}")
    return [name for name, of in pairs if operation in (None, of)]


def describe(step):
    """A step as a dict: operation, idea, dtypes, head_dims, deterministic, features, ..."""
    return json.loads(lib.text_of("attn_describe", lib.step_of(step)))


def _problem(operation, dtype, batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, causal,
             window, scale, softcap, step, lengths_k, page_size, num_pages, max_pages, device,
             deterministic):
    if dtype not in lib.DTYPES:
        raise lib.InvalidValue(f"dtype {dtype}: must be one of {', '.join(lib.DTYPES)}")
    if device not in ("gpu", "emulated"):
        raise lib.InvalidValue(f"device {device}: must be gpu or emulated")
    left, right = lib.window_of(window)
    sizes = {"batch": batch, "heads": heads, "kv_heads": heads if kv_heads is None else kv_heads,
             "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim,
             "page_size": page_size, "max_pages": max_pages}
    sizes = {name: lib.whole(name, size) for name, size in sizes.items()}
    pages = sizes["batch"] * sizes["max_pages"] if num_pages is None else num_pages
    p = lib.problem(
        backend=lib.GPU if device == "gpu" else lib.EMULATED, dtype=lib.DTYPES[dtype], **sizes,
        num_pages=lib.whole("num_pages", pages), causal=int(bool(causal)), window_left=left,
        window_right=right, softmax_scale=lib.scale_of(scale),
        softcap=lib.number("softcap", softcap), step=lib.step_of(step),
        deterministic=int(bool(deterministic)))
    if operation == "decode" or operation.startswith("paged"):
        room = page_size * max_pages if operation.startswith("paged") else p.seqlen_k
        p.lengths = (np.full(max(0, batch), room) if lengths_k is None
                     else arrays.integers(lengths_k))  # the problem keeps it alive
        if p.lengths is None or p.lengths.shape != (max(0, batch),):
            raise lib.InvalidValue(f"lengths_k: must be [{batch}] integers")
        p.lengths_k = p.lengths.ctypes.data
    return p


_FEW_QUERIES = ("decode", "paged_decode", "paged_append")


def _with_defaults(function):
    """Sizes and masks of a problem as keywords, with their defaults, for `function(p, ...)`."""
    def of(operation="forward", *arguments, dtype=None, batch=1, heads=2, kv_heads=None,
           seqlen_q=None, seqlen_k=None, head_dim=64, causal=False, window=None, scale=None,
           softcap=0.0, step=None, lengths_k=None, page_size=16, num_pages=None, max_pages=8,
           device="emulated", deterministic=False, **others):
        if unknown := sorted(set(others) - set(inspect.signature(function).parameters)):
            raise lib.InvalidValue(f"{unknown[0]}: no keyword of a problem")
        dtype = dtype or ("e4m3" if operation == "quantised_forward" else "bf16")
        if seqlen_q is None:
            seqlen_q = 1 if operation in _FEW_QUERIES else 128
        if seqlen_k is None:
            seqlen_k = 128 if operation in _FEW_QUERIES else seqlen_q
        p = _problem(operation, dtype, batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, causal,
                     window, scale, softcap, step, lengths_k, page_size, num_pages, max_pages,
                     device, deterministic)
        return function(operation, p, *arguments, **others)
    of.__doc__ = function.__doc__
    of.__name__ = function.__name__
    return of


@_with_defaults
def which(operation, p):
    """For each step of an operation, or for the one named `step`: "best", "yes", or the reason why
    it refuses the problem.

    which("forward", heads=8, kv_heads=1, head_dim=96, dtype="bf16", causal=True, device="gpu").
    Keywords: dtype, batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, causal, window, scale,
    softcap, lengths_k, page_size, num_pages, max_pages, step, device ("emulated" or "gpu"),
    deterministic.
    """
    text = lib.text_of("attn_which", operation.encode(), c.byref(p))
    verdicts = dict(line.split(None, 1) for line in text.splitlines())
    if p.step is None:
        return verdicts
    step = p.step.decode()
    if step not in verdicts:
        raise lib.InvalidValue(f"step {step}: no step of {operation}")
    return {step: verdicts[step]}


@_with_defaults
def cost(operation, p, gpu=None):
    """The cost model of a step (default: the best one) as a dict; keywords as for which().

    Operations and bytes per phase, the roofline time in seconds on `gpu` ("h200", "a100", ...), and
    the resource that bounds it. Rates are those of datasheets.
    """
    name = gpu.encode() if gpu else None
    return json.loads(lib.text_of("attn_cost", operation.encode(), c.byref(p), name))


def reference(q, k, v, dout=None, *, causal=False, window=None, scale=None, softcap=0.0, alibi=None,
              dropout=0.0, seed=0, lengths=None, return_lse=False):
    """Attention by the textbook formula in float64, on the host: o, or (o, lse).

    With `dout`: the gradients (dq, dk, dv). q [B, Hq, Nq, d], k and v [B, Hkv, Nk, d]; `lengths`
    [B]: valid keys of each sequence. Any type and library of arrays; NumPy arrays are returned.
    """
    q, k, v = (np.ascontiguousarray(arrays.to_numpy(x), np.float64) for x in (q, k, v))
    for name, x in zip("qkv", (q, k, v)):
        if x.ndim != 4:
            raise lib.InvalidValue(f"{name}: {x.ndim} dimensions: must be [B, H, N, d]")
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise lib.InvalidValue(f"k {list(k.shape)}, v {list(v.shape)}: must have equal shapes, and "
                               f"the batch and head dim of q {list(q.shape)}")
    left, right = lib.window_of(window)
    p = lib.problem(dtype=lib.DTYPES["fp32"], batch=q.shape[0], heads=q.shape[1],
                    kv_heads=k.shape[1], seqlen_q=q.shape[2], seqlen_k=k.shape[2],
                    head_dim=q.shape[3], causal=int(causal), window_left=left, window_right=right,
                    softmax_scale=lib.scale_of(scale), softcap=softcap,
                    alibi=int(alibi is not None), dropout=dropout,
                    seed=lib.whole("seed", seed, 0, 2 ** 64 - 1))
    t = lib.Doubles(size=c.sizeof(lib.Doubles))
    given = {"q": q, "k": k, "v": v}
    if lengths is not None:
        given["lengths"] = arrays.integers(lengths)
        if given["lengths"] is None or given["lengths"].shape != (q.shape[0],):
            raise lib.InvalidValue(f"lengths: must be [{q.shape[0]}] integers")
        p.lengths_k = given["lengths"].ctypes.data
    if alibi is not None:
        given["alibi"] = np.ascontiguousarray(arrays.to_numpy(alibi), np.float32)
        if given["alibi"].shape != (q.shape[1],):
            raise lib.InvalidValue(f"alibi: {list(given['alibi'].shape)}: must be [{q.shape[1]}]")
    if dout is not None:
        given["dout"] = np.ascontiguousarray(arrays.to_numpy(dout), np.float64)
        if given["dout"].shape != q.shape:
            raise lib.InvalidValue(f"dout: {list(given['dout'].shape)}: must be {list(q.shape)}")
        results = {"dq": np.zeros_like(q), "dk": np.zeros_like(k), "dv": np.zeros_like(v)}
    else:
        results = {"o": np.zeros_like(q), "lse": np.full(q.shape[:3], -np.inf)}
    for name, x in {**given, **results}.items():
        if name != "lengths":
            setattr(t, name, x.ctypes.data)
    lib.call("attn_reference", c.byref(p), c.byref(t))
    if dout is not None:
        return tuple(results.values())
    return (results["o"], results["lse"]) if return_lse else results["o"]


class Report:
    """What attn.check found: true if everything passed; str() tells the first failures.

    `lines`: what was found for each problem and output, passed or not; `failures`: the failures.
    """
    _SHOWN = 4

    def __init__(self):
        self.count, self.failures, self.lines = 0, [], []

    def add(self, passed, line):
        self.count += 1
        self.lines.append(line)
        if not passed:
            self.failures.append(line)

    def __bool__(self):
        return self.count > 0 and not self.failures

    def __str__(self):
        more = len(self.failures) - self._SHOWN
        return "\n".join([*self.failures[:self._SHOWN],
                          *([f"... and {more} more failures (.failures)"] if more > 0 else []),
                          f"{self.count - len(self.failures)} of {self.count} outputs are correct"])

    __repr__ = __str__


_KINDS = ("random", "needle", "peaked", "outlier")
# The last key tile is partial for tiles of 16 to 128; causal with more queries than keys has rows
# without any key. Batch, grouped heads and another head dim find wrong strides, a wrong K/V head
# and a scale that is not 1/sqrt(d).
_ATTENTION = ({"seqlen_q": 128, "seqlen_k": 128},
              {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen_q": 70, "seqlen_k": 150},
              {"seqlen_q": 1, "seqlen_k": 97},
              {"head_dim": 128, "seqlen_q": 65, "seqlen_k": 65},
              {"seqlen_q": 128, "seqlen_k": 128, "causal": True},
              {"seqlen_q": 100, "seqlen_k": 60, "causal": True})
_PROBLEMS = {
    "forward": _ATTENTION, "backward": _ATTENTION,
    "decode": ({"seqlen_k": 200}, {"batch": 3, "heads": 4, "kv_heads": 2, "seqlen_k": 150,
                                   "lengths_k": [150, 1, 77]},
               {"head_dim": 128, "seqlen_q": 2, "seqlen_k": 97, "causal": True}),
    "paged_decode": ({}, {"batch": 3, "heads": 4, "kv_heads": 2, "lengths_k": [128, 1, 77]},
                     {"head_dim": 128, "page_size": 32, "max_pages": 4})}


def check(f, operation="forward", problems=None, *, inputs=_KINDS, seed=1, to=None,
          **keywords):
    """Checks a function of one's own with the suite's inputs, reference and bounds: a Report.

    f(q, k, v) returns o or (o, lse), shaped as q and [B, Hq, Nq]; it gets causal=True if the
    problem is causal, and window, softcap, scale likewise. For "backward" f(q, k, v, o, lse, dout)
    returns (dq, dk, dv); for "decode" f(q, k, v, seqused_k). Arrays are NumPy's, float32 unless
    dtype is "fp16" or "bf16"; `to` converts each, as `to=lambda x: torch.tensor(np.asarray(x))`. A
    problem is a dict of the keywords of attn.which(). A failure is told in words: the first wrong
    element, and the pattern of all: a tile, a head, a range of keys, a factor.
    """
    if operation not in _ARGUMENTS:
        raise lib.InvalidValue(f"operation {operation}: must be {', '.join(_ARGUMENTS)}")
    if isinstance(inputs, str):
        raise lib.InvalidValue(f"inputs {inputs}: must be a list of kinds, as [\"random\"]")
    report = Report()
    for given in _PROBLEMS[operation] if problems is None else problems:
        options = {"dtype": "fp32", **keywords, **given}
        for kind in inputs:
            _check_one(report, f, operation, options, kind, seed, to)
    return report


_ARGUMENTS = {"forward": "q k v", "backward": "q k v o lse do", "decode": "q k v seqused_k",
              "paged_decode": "q k v page_table seqused_k"}


def _must_take(f, tensors, options, title):
    """Says so if f cannot be called with the options of a problem."""
    try:
        signature = inspect.signature(f)
    except ValueError:  # a built-in function
        return
    try:
        signature.bind(*tensors, **options)
    except TypeError as error:
        given = ", ".join(f"{name}={value}" for name, value in options.items()) or "tensors"
        raise lib.InvalidValue(f"f: cannot be called for {title}: {error}; it must take {given}, "
                               "or the problems must be without") from None


def _check_one(report, f, operation, options, kind, seed, to):
    title = " ".join([kind, *(f"{name}={value}" for name, value in options.items())])
    with _Drawn(operation, kind, seed, **options) as drawn:
        passed_on = {name: options[name] for name in ("causal", "window", "softcap", "scale")
                     if options.get(name)}
        tensors = [drawn.inputs[name] for name in _ARGUMENTS[operation].split()]
        tensors = [to(x) for x in tensors] if to else tensors
        _must_take(f, tensors, passed_on, title)
        results = f(*tensors, **passed_on)
        results = results if isinstance(results, (tuple, list)) else (results,)
        names = ("dq", "dk", "dv") if operation == "backward" else ("o", "lse")
        needed = 3 if operation == "backward" else 1
        if not needed <= len(results) <= len(names):
            report.add(False, f"FAIL {title}: {len(results)} results: must be {', '.join(names)}"
                              f"{'' if needed > 1 else ' or o alone'}")
        for name, result in zip(names, results):
            ok, text = drawn.judge(name, result)
            report.add(ok, f"{'pass' if ok else 'FAIL'} {title}: {text}")


class _Drawn:
    """Inputs of an operation and the verdicts on its outputs (attn_check)."""

    def __init__(self, operation, kind, seed, **options):
        self._check = c.c_void_p()

        @_with_defaults
        def begin(operation, p):
            lib.call("attn_check_begin", operation.encode(), c.byref(p), kind.encode(), seed,
                     c.byref(self._check))
        begin(operation, **options)
        self.inputs, self._outputs = {}, {}
        for line in lib.library().attn_check_tensors(self._check).decode().splitlines():
            side, name, dtype, *shape = line.split()
            shape = tuple(int(n) for n in shape)
            if side == "out":
                self._outputs[name] = dtype, shape
                continue
            x = np.empty(shape, arrays.NUMPY_OF[dtype])
            lib.call("attn_check_input", self._check, name.encode(), x.ctypes.data, x.nbytes)
            self.inputs[name] = arrays.Bf16(x) if dtype == "bf16" else x

    def judge(self, name, result):
        dtype, shape = self._outputs[name]
        if not hasattr(result, "shape"):
            return False, f"{name}: is a {type(result).__name__}: must be an array"
        x = arrays.to_numpy(result)
        if x.shape != shape:
            return False, f"{name}: shape {list(x.shape)}: must be {list(shape)}"
        if x.dtype.kind != "f":
            return False, f"{name}: type {x.dtype}: must be a floating-point type"
        x = np.ascontiguousarray(x)
        x = arrays.bf16(x.astype(np.float32)).bits if dtype == "bf16" else x.astype(
            arrays.NUMPY_OF[dtype])
        ok, needed = c.c_int(), c.c_size_t()
        text = c.create_string_buffer(1 << 16)
        lib.call("attn_check_output", self._check, name.encode(), x.ctypes.data, x.nbytes,
                 c.byref(ok), text, len(text), c.byref(needed))
        return bool(ok.value), text.value.decode()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        lib.library().attn_check_end(self._check)


def time(f, *, repeats=50, stream=None):
    """Seconds of f() on the GPU, the median of `repeats`, by the suite's timing method.

    L2 is overwritten before each call, and the GPU spins while the host queues, so that launch
    overhead is hidden. f must queue its work in `stream` (default: PyTorch's current stream, or the
    default stream) and must not synchronise. Without a GPU it raises DeviceError.
    """
    from .calls import stream_of
    torch = arrays._torch()
    if stream is None and torch is not None and torch.cuda.is_available():
        stream = torch.cuda.current_stream()
    caught = []

    @lib.LAUNCH
    def launch(_):
        try:
            f()
            return 0
        except BaseException as error:  # must not pass through C
            caught.append(error)
            return 1
    seconds, samples = c.c_double(), []
    for _ in range(repeats + 2):  # two to warm up
        try:
            lib.call("attn_time", launch, None, stream_of(stream) or None, c.byref(seconds), None)
        finally:
            if caught:
                raise caught[0]
        samples.append(seconds.value)
    return statistics.median(samples[2:])
