"""Address, shape, strides, type and device of another library's tensor.

NumPy arrays, CPU tensors of PyTorch and everything else on the CPU that has __dlpack__ run in the
emulator; tensors on a CUDA device run there.
"""
import ctypes
import sys

import numpy as np

from . import dlpack
from .library import EMULATED, GPU, InvalidValue

_NUMPY = {"float16": "fp16", "float32": "fp32", "float64": "fp64", "int32": "int32",
          "int64": "int64", "bfloat16": "bf16"}
NUMPY_OF = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64, "int32": np.int32,
            "int64": np.int64, "bf16": np.uint16}


class Bf16:
    """A NumPy array of bf16: `bits` is its uint16 array; np.asarray(x) is float32."""

    def __init__(self, bits):
        self.bits = bits
        self.shape = bits.shape

    def __array__(self, dtype=None, copy=None):
        wide = (self.bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide if dtype is None else wide.astype(dtype)

    def __getitem__(self, index):
        return Bf16(self.bits[index])

    def __repr__(self):
        return f"attn.bf16({np.asarray(self)!r})"


def bf16(x):
    """bf16 for NumPy: the bits of uint16 as they are, floats rounded to nearest even."""
    x = np.asarray(x)
    if x.dtype == np.uint16:
        return Bf16(x)
    if x.dtype.kind != "f":
        raise InvalidValue(f"bf16: type {x.dtype}: must be uint16 (bits) or a floating-point type")
    wide = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (wide + np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return Bf16(np.where(nan, (wide >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16))


class View:
    """One tensor of a call; strides in elements. `owner` keeps its memory alive."""
    __slots__ = ("name", "pointer", "shape", "strides", "dtype", "device", "owner", "family",
                 "read_only")

    def __init__(self, name, pointer, shape, strides, dtype, device, owner, family,
                 read_only=False):
        self.name, self.pointer, self.shape, self.strides = name, pointer, shape, strides
        self.dtype, self.device, self.owner, self.family = dtype, device, owner, family
        self.read_only = read_only

    @property
    def backend(self):
        return EMULATED if self.device == "cpu" else GPU


def _torch():
    return sys.modules.get("torch")


def _torch_types():
    torch = _torch()
    return {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32",
            torch.float64: "fp64", torch.int32: "int32", torch.int64: "int64"}


def is_torch(x):
    torch = _torch()
    return torch is not None and isinstance(x, torch.Tensor)


def _of_numpy(x, name):
    bits, family = x, "numpy"
    if isinstance(x, Bf16):
        bits, dtype, family = x.bits, "bf16", "bf16"
    else:
        dtype = _NUMPY.get(x.dtype.name)
        if dtype == "bf16":
            family = "ml_dtypes"
        if dtype is None or not x.dtype.isnative:
            hint = " (attn.bf16 makes bf16 of it)" if x.dtype == np.uint16 else ""
            raise InvalidValue(f"{name}: type {x.dtype}: must be float16, float32, float64, int32, "
                               f"int64 or bf16, in native byte order{hint}")
    if any(stride % bits.itemsize for stride in bits.strides):
        raise InvalidValue(f"{name}: strides {bits.strides} are not multiples of an element")
    strides = tuple(stride // bits.itemsize for stride in bits.strides)
    return View(name, bits.ctypes.data, bits.shape, strides, dtype, "cpu", bits, family,
                not bits.flags.writeable)


def _of_torch(x, name):
    dtype = _torch_types().get(x.dtype)
    if dtype is None:
        raise InvalidValue(f"{name}: type {x.dtype}: must be float16, bfloat16, float32, float64, "
                           "int32 or int64")
    if x.is_conj() or x.is_neg():
        raise InvalidValue(f"{name}: is a lazy conjugate or negative: resolve it "
                           "(resolve_conj, resolve_neg)")
    if x.layout != _torch().strided:
        raise InvalidValue(f"{name}: layout {x.layout}: must be strided (dense)")
    if x.requires_grad and _torch().is_grad_enabled():
        raise InvalidValue(f"{name}: requires a gradient: use attn.torch.attention, or detach it")
    device = "cpu" if x.device.type == "cpu" else f"cuda:{x.device.index}"
    if x.device.type not in ("cpu", "cuda"):
        raise InvalidValue(f"{name}: device {x.device}: must be cpu or cuda")
    return View(name, x.data_ptr(), tuple(x.shape), x.stride(), dtype, device, x, "torch")


def view(x, name, stream=None):
    """Reads an array. Raises InvalidValue with one line for what no call accepts."""
    if isinstance(x, (np.ndarray, Bf16)):
        found = _of_numpy(x, name)
    elif is_torch(x):
        found = _of_torch(x, name)
    elif hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):  # a traced array lacks one
        t = dlpack.Import(x, name, stream)
        if t.device_type not in (dlpack.CPU, dlpack.CUDA, dlpack.CUDA_HOST, dlpack.CUDA_MANAGED):
            raise InvalidValue(f"{name}: DLPack device type {t.device_type}: must be CPU or CUDA")
        device = (f"cuda:{t.device_id}" if t.device_type in (dlpack.CUDA, dlpack.CUDA_MANAGED)
                  else "cpu")
        found = View(name, t.pointer, t.shape, t.strides, t.dtype, device, t,
                     type(x).__module__.split(".")[0], t.read_only)
    else:
        raise InvalidValue(f"{name}: is a {type(x).__name__}: must be a NumPy array, a PyTorch "
                           "tensor, or have __dlpack__ and __dlpack_device__")
    if 0 in found.shape:
        raise InvalidValue(f"{name}: shape {list(found.shape)}: no dimension may be 0")
    for extent, stride in zip(found.shape, found.strides):
        if extent > 1 and stride < 0:
            raise InvalidValue(f"{name}: strides {found.strides}: negative ones are not accepted; "
                               "copy it")
    return found


def writable(x, name, stream=None):
    """The same for a tensor that the call changes."""
    found = view(x, name, stream)
    if found.read_only:
        raise InvalidValue(f"{name}: is read-only, and the call writes to it")
    return found


def empty_like(of, name, shape, dtype, stream=0):
    """A new contiguous tensor of the same library and device: (the object, its view)."""
    strides = dlpack.contiguous(shape)
    if of.family in ("numpy", "bf16", "ml_dtypes"):
        bits = np.empty(shape, NUMPY_OF[dtype])
        x = bits
        if dtype == "bf16":
            x = bits.view("bfloat16") if of.family == "ml_dtypes" else Bf16(bits)
        return x, View(name, bits.ctypes.data, tuple(shape), strides, dtype, "cpu", bits, of.family)
    if of.family == "torch":
        torch = _torch()
        kind = next(t for t, known in _torch_types().items() if known == dtype)
        x = torch.empty(shape, dtype=kind, device=of.owner.device)
        return x, View(name, x.data_ptr(), tuple(shape), strides, dtype, of.device, x, "torch")
    if of.family == "cupy":
        x = sys.modules["cupy"].empty(shape, {"bf16": "uint16"}.get(dtype, NUMPY_OF[dtype]))
        if dtype != "bf16":
            return x, View(name, x.data.ptr, tuple(shape), strides, dtype, of.device, x, "cupy")
    on_gpu = of.device != "cpu"
    x = dlpack.Array(shape, dtype, dlpack.CUDA if on_gpu else dlpack.CPU,
                     int(of.device.split(":")[1]) if on_gpu else 0, stream)
    return x, View(name, x.pointer, tuple(shape), strides, dtype, of.device, x, of.family)


def same_device(views):
    """The device of all of them."""
    first = views[0]
    for other in views[1:]:
        if other.device != first.device:
            raise InvalidValue(f"{other.name}: is on {other.device}, {first.name} on "
                               f"{first.device}: all must be on one device")
    return first.device


def integers(x):
    """A list of integers, or an array on the CPU, as an int64 array; None if it is neither."""
    found = np.asarray(x) if isinstance(x, (list, tuple)) else to_numpy(x)
    return found.astype(np.int64) if found.dtype.kind in "iu" else None


def to_numpy(x):
    """A copy on the host as a NumPy array; bf16 becomes float32."""
    if is_torch(x):
        x = x.detach().cpu()
        return (x.float() if x.dtype == _torch().bfloat16 else x).numpy()
    if isinstance(x, Bf16):
        return np.asarray(x)
    if hasattr(x, "get") and type(x).__module__.startswith("cupy"):
        return x.get()
    if isinstance(x, dlpack.Import):
        return _host_copy(x)
    if hasattr(x, "__dlpack__") and not hasattr(x, "__array__"):
        return _host_copy(dlpack.Import(x, "array", None))
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype.name == "bfloat16" else x


def _host_copy(t):
    if t.device_type not in (dlpack.CPU, dlpack.CUDA_HOST):
        raise InvalidValue("array: is on a GPU: copy it with the framework that uses it")
    size = dlpack.ITEM_BYTES[t.dtype]
    count = 1 + sum((extent - 1) * stride for extent, stride in zip(t.shape, t.strides))
    flat = np.frombuffer(ctypes.string_at(t.pointer, count * size), NUMPY_OF[t.dtype])
    x = np.lib.stride_tricks.as_strided(flat, t.shape, [s * size for s in t.strides]).copy()
    return np.asarray(Bf16(x)) if t.dtype == "bf16" else x
