"""From views of tensors to a launch: the problem, cached plans, workspaces, streams."""
import collections
import contextlib
import ctypes as c
import functools
import sys
import threading

import numpy as np

from . import arrays, dlpack, library as lib

_MOST_PLANS = 256
_plans = collections.OrderedDict()
_plans_lock = threading.Lock()
_repeated = collections.OrderedDict()  # key -> Repeated
_IMMUTABLE = frozenset((bool, int, float, str, type(None)))


class Plan:
    """An attn_plan with a workspace per stream."""

    def __init__(self, operation, fields, lists):
        self.lists = lists  # host lists that the problem points to, read by attn_X_plan alone
        problem = lib.problem(**fields)
        for name, values in lists.items():
            setattr(problem, name, values.ctypes.data)
        handle = c.c_void_p()
        lib.call(f"attn_{operation}_plan", c.byref(problem), c.byref(handle))
        self._library = lib.library()
        self._handle = handle
        self.bytes = self._library.attn_plan_workspace_bytes(handle)
        self.step = self._library.attn_plan_step(handle).decode()
        self._prepare_reads = bool(self._library.attn_plan_prepare_reads_tensors(handle))
        self._workspaces, self._lock = {}, threading.Lock()
        self.of_graphs = []  # workspaces of captured graphs, whose end is not known

    def __del__(self):
        if getattr(self, "_handle", None):
            self._library.attn_plan_destroy(self._handle)

    def run(self, tensors, stream, of):
        """Launches. `tensors`: an attn_tensors, or its words. `of`: a view whose library allocates
        the workspace."""
        stream = stream or None
        if self.bytes == 0:
            lib.check(self._library.attn_run(self._handle, c.byref(tensors), None, 0, stream))
            return
        with self._lock:  # so that no other thread prepares between the two calls
            if of.family == "torch" and of.device != "cpu" and _capturing():
                workspace, prepared = self._for_graph(stream), True
            else:
                workspace, prepared = self._workspace(stream, of)
            arguments = (self._handle, c.byref(tensors), workspace.pointer, self.bytes, stream)
            if not prepared or self._prepare_reads:
                lib.check(self._library.attn_prepare(*arguments))
            lib.check(self._library.attn_run(*arguments))
            if not prepared:  # kept once it was prepared without an error
                self._workspaces[stream] = workspace

    def _for_graph(self, stream):
        """A prepared workspace for a capture, which the graph keeps: later calls get another."""
        if self._prepare_reads:
            raise lib.Unsupported(f"{self.step}: quantises its cache at each call, which cannot be "
                                  "captured in a graph")
        if not self._workspaces:
            raise lib.Unsupported("capturing: call it once with these sizes before each capture, "
                                  "so that a workspace is prepared (dropout cannot be captured)")
        key = stream if stream in self._workspaces else next(iter(self._workspaces))
        self.of_graphs.append(self._workspaces.pop(key))
        return self.of_graphs[-1]

    def _workspace(self, stream, of):
        found = self._workspaces.get(stream)
        if found is not None:
            return found, True
        if of.family == "torch" and of.device != "cpu":
            _, made = arrays.empty_like(of, "workspace", ((self.bytes + 3) // 4,), "int32")
            return made, False
        return dlpack.Memory(of.backend, self.bytes), False


# PyTorch's functions of Python take longer than these, which they call.
def _capturing():
    return arrays._torch()._C._cuda_isCurrentStreamCapturing()


def _current_device():
    return arrays._torch()._C._cuda_getDevice()


def _current_stream(device):
    return arrays._torch()._C._cuda_getCurrentRawStream(device)


def plan_of(operation, fields, lists):
    """The cached plan of a problem, or a new one."""
    key = (operation, tuple(sorted(fields.items())),
           tuple((name, values.tobytes()) for name, values in sorted(lists.items())))
    with _plans_lock:
        plan = _plans.get(key)
        if plan is not None:
            _plans.move_to_end(key)
            return plan
    plan = Plan(operation, fields, lists)
    with _plans_lock:
        _plans[key] = plan
        idle = [k for k, p in _plans.items() if not p.of_graphs]
        for old in idle[:max(0, len(_plans) - _MOST_PLANS)]:
            del _plans[old]
    return plan


def stream_of(stream, of=None):
    """A stream as a number. Without one: PyTorch's current stream, or the default stream."""
    if stream is None:
        if of is not None and of.family == "torch" and of.device != "cpu":
            return arrays._torch().cuda.current_stream(of.owner.device).cuda_stream
        if of is not None and of.family == "cupy":
            return sys.modules["cupy"].cuda.get_current_stream().ptr
        return 0
    for attribute in ("cuda_stream", "ptr"):  # PyTorch, CuPy
        if hasattr(stream, attribute):
            return getattr(stream, attribute)
    return lib.whole("stream", stream, 0, 2 ** 64 - 1)


class Call:
    """Collects the tensors and the problem of one call, checks them, and runs it."""

    def __init__(self, operation, layout="bhnd", step=None, stream=None):
        if layout not in ("bhnd", "bnhd"):
            raise lib.InvalidValue(f"layout {layout}: must be bhnd or bnhd")
        self.operation, self.layout, self._stream = operation, layout, stream
        self.fields = {"step": lib.step_of(step)}
        self.lists, self.views = {}, []
        self.tensors = lib.Tensors(size=c.sizeof(lib.Tensors))

    def view(self, name, x, dims=None, written=False):
        read = arrays.writable if written else arrays.view
        stream = self._stream if self._stream is None else stream_of(self._stream)
        found = read(x, name, stream)
        if dims is not None and len(found.shape) != len(dims):
            raise lib.InvalidValue(f"{name}: {len(found.shape)} dimensions {list(found.shape)}: "
                                   f"must be {list(dims)}")
        self.views.append(found)
        return found

    def heads_view(self, name, x, packed=False, written=False):
        """A tensor [B, H, N, d] in the call's layout, or packed [tokens, H, d]."""
        dims = ("tokens", "H", "d") if packed else (
            ("B", "H", "N", "d") if self.layout == "bhnd" else ("B", "N", "H", "d"))
        found = self.view(name, x, dims, written)
        self.set_tensor(name, found, packed)
        return found

    def sizes(self, found, packed=False):
        """(B, H, N, d) of such a view; B is 0 for packed ones, N the tokens."""
        if packed:
            return 0, found.shape[1], found.shape[0], found.shape[2]
        b, x, y, d = found.shape
        return (b, x, y, d) if self.layout == "bhnd" else (b, y, x, d)

    def set_tensor(self, name, found, packed=False, pool=False):
        title = f"{name}_pages" if pool else name
        columns = found.strides[-1] if found.shape[-1] > 1 else 1
        if columns != 1:
            raise lib.InvalidValue(f"{title}: stride {columns} in the last dimension: must be 1; "
                                   "make it contiguous")
        if pool:
            if found.strides != dlpack.contiguous(found.shape):
                raise lib.InvalidValue(f"{title}: strides {list(found.strides)}: pages must be "
                                       "contiguous")
            getattr(self.tensors, name).data = found.pointer
            return
        b, h, n, d = self.sizes(found, packed)
        if packed:
            steps = [n * h * d, found.strides[1], found.strides[0]]
            usual, extents = [n * h * d, d, h * d], [1, h, n]
        else:
            s = found.strides
            steps = [s[0], s[1], s[2]] if self.layout == "bhnd" else [s[0], s[2], s[1]]
            usual, extents = [h * n * d, n * d, d], [b, h, n]
        steps = [u if e == 1 else s for s, u, e in zip(steps, usual, extents)]
        if not any(steps) and any(usual):
            raise lib.InvalidValue(f"{name}: all strides are 0 (expanded): copy it")
        if steps != usual or found.pointer % 16:
            self.fields["copy_strided"] = 1
        t = getattr(self.tensors, name)
        t.data, t.stride_batch, t.stride_head, t.stride_row = (found.pointer, *steps)

    def array(self, name, x, dtype, shape, title=None):
        """An array that is read and has no strides: lengths, tables, slopes, lse. `shape` may be
        None for a list of any length."""
        title = title or name
        if isinstance(x, (list, tuple)) and all(v.device == "cpu" for v in self.views):
            x = np.array(x)
            if dtype == "int32" and x.dtype.kind == "i" and (x == x.astype(np.int32)).all():
                x = x.astype(np.int32)
            elif dtype == "fp32" and x.dtype.kind in "if":
                x = x.astype(np.float32)
        found = self.view(title, x)
        if shape is None and len(found.shape) == 1:
            shape = found.shape
        if found.dtype != dtype or shape is None or found.shape != tuple(shape):
            raise lib.InvalidValue(f"{title}: {found.dtype} {list(found.shape)}: must be {dtype} "
                                   f"{list(shape or ['B + 1'])}")
        if found.strides != dlpack.contiguous(found.shape) and found.shape[0] > 1:
            raise lib.InvalidValue(f"{title}: strides {list(found.strides)}: must be contiguous")
        if found.pointer % 16 and found.family in ("numpy", "torch"):
            copy = found.owner.clone() if found.family == "torch" else found.owner.copy()
            found = self.view(title, copy)
        setattr(self.tensors, name, found.pointer)
        return found

    def output(self, name, of, shape, dtype, given=None, packed=False):
        """A tensor that the call writes: `given`, or a new one."""
        if given is not None:
            found = self.view(name, given, None, written=True)
            if found.shape != tuple(shape) or found.dtype != dtype:
                raise lib.InvalidValue(f"{name}: {found.dtype} {list(found.shape)}: must be "
                                       f"{dtype} {list(shape)}")
            x = given
        else:
            with self.allocating(of):
                x, found = arrays.empty_like(of, name, shape, dtype, stream_of(self._stream, of))
        if name in lib.TENSORS:
            self.set_tensor(name, found, packed)
        else:
            setattr(self.tensors, name, found.pointer)
        return x

    def element_type(self, *views, accepted=("bf16", "fp16", "fp32")):
        first = views[0]
        if first.dtype not in accepted:
            hint = "; attn.reference takes float64" if first.dtype == "fp64" else ""
            raise lib.InvalidValue(f"{first.name}: type {first.dtype}: must be "
                                   f"{', '.join(accepted)}{hint}")
        for other in views[1:]:
            if other.dtype != first.dtype:
                raise lib.InvalidValue(f"{other.name}: type {other.dtype}, {first.name} "
                                       f"{first.dtype}: must be equal")
        return first.dtype

    def host_list(self, name, values):
        values = np.ascontiguousarray(values, np.int64)
        if values.shape != (self.fields["batch"],):
            raise lib.InvalidValue(f"{name}: shape {list(values.shape)}: must be "
                                   f"[{self.fields['batch']}]")
        self.lists[name] = values

    def host_mask(self, name, values, dtype, choices):
        """A mask that the plan reads on the host. `choices`: the extents that each dimension may
        have. Returns its shape."""
        values = np.asarray(values) if isinstance(values, (list, tuple)) else (
            arrays.to_numpy(values))
        if values.dtype.kind not in "biu":
            raise lib.InvalidValue(f"{name}: type {values.dtype}: must be integers or bools")
        if values.ndim != 4 or any(n not in some for n, some in zip(values.shape, choices)):
            raise lib.InvalidValue(
                f"{name}: {list(values.shape)}: must be "
                f"[{', '.join(' or '.join(map(str, sorted(set(some)))) for some in choices)}]")
        limits = np.iinfo(dtype)
        if values.size and (values.min() < limits.min or values.max() > limits.max):
            raise lib.InvalidValue(f"{name}: must be from {limits.min} to {limits.max}")
        self.lists[name] = np.ascontiguousarray(values, dtype)
        return values.shape

    def host_windows(self, name, values):
        """Windows of three sides, of each head or of all; returns for how many heads."""
        values = np.asarray(values)
        heads = self.fields["heads"]
        if values.dtype.kind not in "iu" or values.shape not in ((3,), (1, 3), (heads, 3)):
            raise lib.InvalidValue(f"{name}: {values.dtype} {list(values.shape)}: must be integers "
                                   f"[3] or [{heads}, 3]")
        self.lists[name] = np.ascontiguousarray(values, np.int64)
        return values.size // 3

    def run(self, of):
        device = arrays.same_device(self.views)
        self.fields["backend"] = lib.EMULATED if device == "cpu" else lib.GPU
        stream = stream_of(self._stream, of)
        if device == "cpu":
            return self._run(device, 0, of)
        if of.family == "torch":
            with arrays._torch().cuda.device(of.owner.device), self.allocating(of):
                return self._run(device, stream, of)
        current = lib.library().attn_current_gpu()
        if device != f"cuda:{current}":
            raise lib.DeviceError(f"{of.name}: is on {device}, the current GPU is {current}: "
                                  "select its GPU before the call")
        plan = self._run(device, stream, of)
        dlpack.hold([v.owner for v in self.views if isinstance(v.owner, dlpack.Import)], stream)
        return plan

    def allocating(self, of):
        """A context in which PyTorch allocates outputs and workspaces for the call's stream."""
        if self._stream is None or of.family != "torch" or of.device == "cpu":
            return contextlib.nullcontext()
        torch = arrays._torch()
        return torch.cuda.stream(torch.cuda.ExternalStream(stream_of(self._stream),
                                                           device=of.owner.device))

    def _run(self, device, stream, of):
        if self.fields.get("dropout"):  # a plan has its seed: it is not used again
            plan = Plan(self.operation, self.fields, self.lists)
        else:
            plan = plan_of(self.operation, {**self.fields, "_device": device}, self.lists)
        plan.run(self.tensors, stream, of)
        return plan


class Repeated:
    """A call on PyTorch tensors whose checks need not be repeated for tensors of the same shapes,
    strides, types, device and alignment: the checks take longer than a short kernel."""

    def __init__(self, call, plan, of, inputs, outputs):
        """`inputs`, `outputs`: (name, tensor, ...) in the order of `run`."""
        torch = arrays._torch()
        self._plan = plan
        self._words = (c.c_uint64 * (c.sizeof(lib.Tensors) // 8)).from_buffer_copy(call.tensors)
        self._places = [getattr(lib.Tensors, name).offset // 8 for name, _ in inputs + outputs]
        self._device = of.owner.device.index if of.device != "cpu" else None
        # An input that an output can be made like, which is faster than by shape and type.
        self._like = [next((n for n, (_, y) in enumerate(inputs) if y.is_contiguous() and
                            y.shape == x.shape and y.dtype == x.dtype), None) for _, x in outputs]
        self._empty = [functools.partial(torch.empty, tuple(x.shape), dtype=x.dtype,
                                         device=of.owner.device) for _, x in outputs]
        self._unread = {}  # stream -> the last output of calls that do not want it
        # For workspaces: the device without the tensor.
        self._of = arrays.View("", 0, (), (), of.dtype, of.device,
                               torch.empty(0, device=of.owner.device), "torch")

    @staticmethod
    def find(tensors, *options):
        """(key, call): what must be equal for a call to be repeated, and the kept call or None.
        The key is None if the call has to be checked each time."""
        torch = arrays._torch()
        if torch is None:
            return None, None
        for option in options:  # what may be changed in place cannot be in a key
            if type(option) not in _IMMUTABLE and not (
                    type(option) is tuple and all(type(x) in _IMMUTABLE for x in option)):
                return None, None
        grad, key = torch.is_grad_enabled(), options
        for x in tensors:
            if (not isinstance(x, torch.Tensor) or x.layout is not torch.strided or
                    x.data_ptr() % 16 or x.is_neg() or grad and x.requires_grad):
                return None, None
            key += x.shape, x.stride(), x.dtype, x.device
        return key, _repeated.get(key)

    def keep(self, key):
        """Keeps this call for `key`; the oldest is forgotten whose workspaces no graph holds."""
        with _plans_lock:
            _repeated[key] = self
            idle = [k for k, call in _repeated.items() if not call._plan.of_graphs]
            for old in idle[:max(0, len(_repeated) - _MOST_PLANS)]:
                del _repeated[old]

    def run(self, inputs, wants_all=True):
        """Launches, and returns the outputs: new tensors, the last one only if `wants_all`."""
        if self._device is None or _current_device() == self._device:
            return self._run(inputs, wants_all)
        with arrays._torch().cuda.device(self._device):
            return self._run(inputs, wants_all)

    def _run(self, inputs, wants_all):
        stream = 0 if self._device is None else _current_stream(self._device)
        like = arrays._torch().empty_like
        results = [empty() if n is None else like(inputs[n])
                   for n, empty in zip(self._like[:-1], self._empty)]
        keeps = not (wants_all or self._device is not None and _capturing())  # a graph has its own
        last = self._unread.get(stream) if keeps else None
        if last is None:
            last = self._empty[-1]()
            if keeps:
                self._unread[stream] = last
        words = type(self._words).from_buffer_copy(self._words)
        for place, x in zip(self._places, (*inputs, *results, last)):
            words[place] = x.data_ptr()
        self._plan.run(words, stream, self._of)
        return (*results, last) if wants_all else results


def masks(call, causal, window, scale, softcap):
    """The part of a problem that most operations have."""
    left, right = lib.window_of(window)
    call.fields.update(causal=int(bool(causal)), window_left=left, window_right=right,
                       softmax_scale=lib.scale_of(scale),
                       softcap=lib.number("softcap", softcap or 0))
