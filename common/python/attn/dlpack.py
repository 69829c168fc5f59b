"""DLPack in both directions: struct layouts, capsules, and who frees what.

Source: the DLPack specification, dlpack.h 1.0, and the Python specification of its data exchange.
"""
import atexit
import ctypes as c

from . import library as lib

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
FLAG_READ_ONLY = 1
_INT, _UINT, _FLOAT, _BFLOAT = 0, 1, 2, 4
_CODES = {(_INT, 32): "int32", (_INT, 64): "int64", (_INT, 8): "int8", (_UINT, 8): "uint8",
          (_FLOAT, 16): "fp16", (_FLOAT, 32): "fp32", (_FLOAT, 64): "fp64", (_BFLOAT, 16): "bf16"}
ITEM_BYTES = {name: bits // 8 for (_, bits), name in _CODES.items()}


class _Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("device_type", c.c_int32), ("device_id", c.c_int32),
                ("ndim", c.c_int32), ("code", c.c_uint8), ("bits", c.c_uint8),
                ("lanes", c.c_uint16), ("shape", c.POINTER(c.c_int64)),
                ("strides", c.POINTER(c.c_int64)), ("byte_offset", c.c_uint64)]


class _Managed(c.Structure):
    pass


_DELETER = c.CFUNCTYPE(None, c.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", c.c_void_p), ("deleter", _DELETER)]


class _Versioned(c.Structure):
    pass


_DELETER_VERSIONED = c.CFUNCTYPE(None, c.POINTER(_Versioned))
_Versioned._fields_ = [("major", c.c_uint32), ("minor", c.c_uint32), ("context", c.c_void_p),
                       ("deleter", _DELETER_VERSIONED), ("flags", c.c_uint64),
                       ("tensor", _Tensor)]

_api = c.pythonapi
_api.PyCapsule_IsValid.restype, _api.PyCapsule_IsValid.argtypes = c.c_int, [c.py_object, c.c_char_p]
_api.PyCapsule_GetPointer.restype = c.c_void_p
_api.PyCapsule_GetPointer.argtypes = [c.py_object, c.c_char_p]
_api.PyCapsule_SetName.argtypes = [c.py_object, c.c_char_p]
_DESTRUCTOR = c.CFUNCTYPE(None, c.c_void_p)
_api.PyCapsule_New.restype = c.py_object
_api.PyCapsule_New.argtypes = [c.c_void_p, c.c_char_p, _DESTRUCTOR]
# For the destructor, which gets a capsule that is being freed: no reference may be taken.
_raw = c.PyDLL(None)
_is_valid = _raw["PyCapsule_IsValid"]
_is_valid.restype, _is_valid.argtypes = c.c_int, [c.c_void_p, c.c_char_p]
_pointer = _raw["PyCapsule_GetPointer"]
_pointer.restype, _pointer.argtypes = c.c_void_p, [c.c_void_p, c.c_char_p]

LEGACY, VERSIONED = b"dltensor", b"dltensor_versioned"
# A consumed capsule's name must outlive it.
USED = {LEGACY: b"used_dltensor", VERSIONED: b"used_dltensor_versioned"}


class Import:
    """A tensor of another framework, read through its __dlpack__; freed exactly once.

    `stream`: the CUDA stream that will read it, which the producer orders after its own work
    (1 is the legacy default stream, 2 the per-thread one; 0 would be ambiguous).
    """

    def __init__(self, x, name, stream):
        self._managed = None
        self.device_type, self.device_id = (int(n) for n in x.__dlpack_device__())
        on_gpu = self.device_type in (CUDA, CUDA_MANAGED)
        arguments = {"stream": stream or 1} if on_gpu else {}
        try:
            capsule = x.__dlpack__(max_version=(1, 0), **arguments)
        except TypeError:  # a producer from before version 1
            capsule = x.__dlpack__(**arguments)
        kind = next((n for n in (VERSIONED, LEGACY) if _api.PyCapsule_IsValid(capsule, n)), None)
        if kind is None:
            raise lib.InvalidValue(f"{name}: its __dlpack__ returned no capsule that is unused")
        struct = _Versioned if kind == VERSIONED else _Managed
        managed = c.cast(_api.PyCapsule_GetPointer(capsule, kind), c.POINTER(struct))
        _api.PyCapsule_SetName(capsule, USED[kind])  # the deleter is ours to call from here on
        self._managed = managed
        if kind == VERSIONED and managed.contents.major != 1:
            version = managed.contents.major
            self.close()
            raise lib.InvalidValue(f"{name}: DLPack version {version}: must be 1")
        self.read_only = kind == VERSIONED and bool(managed.contents.flags & FLAG_READ_ONLY)
        t = managed.contents.tensor
        self.dtype = _CODES.get((t.code, t.bits)) if t.lanes == 1 else None
        if self.dtype is None:
            self.close()
            raise lib.InvalidValue(f"{name}: DLPack type code {t.code} of {t.bits} bits: must be "
                                   "fp16, bf16, fp32, fp64, int32 or int64")
        self.pointer = (t.data or 0) + t.byte_offset
        self.shape = tuple(t.shape[n] for n in range(t.ndim))
        if t.strides:
            self.strides = tuple(t.strides[n] for n in range(t.ndim))
        else:
            self.strides = contiguous(self.shape)

    def close(self):
        managed, self._managed = self._managed, None
        if managed is not None and managed.contents.deleter:
            managed.contents.deleter(managed)

    __del__ = close


def contiguous(shape):
    """Strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


_exports = {}  # address of the managed struct -> what must live until its deleter is called


def _forget(address):
    _exports.pop(address, None)


_deleter = _DELETER(lambda managed: _forget(c.addressof(managed.contents)))
_deleter_versioned = _DELETER_VERSIONED(lambda managed: _forget(c.addressof(managed.contents)))


@_DESTRUCTOR
def _destroy(capsule):
    for kind in (LEGACY, VERSIONED):  # one that was not consumed
        if _is_valid(capsule, kind):
            _forget(_pointer(capsule, kind))


@atexit.register
def _abandon():
    """Arrays that outlive Python: their deleters would call code that is gone, so they get none."""
    for entry in _exports.values():
        entry[0].deleter = type(entry[0].deleter)()
        for part in entry:  # leaked: a reader may still look at them
            _api.Py_IncRef(c.py_object(part))


class Array:
    """A tensor in memory of libattention, for frameworks without an allocator that can be called.

    Frameworks read it through DLPack, as in jax.dlpack.from_dlpack(array) or
    numpy.from_dlpack(array); the memory is freed when the last reader has let go of it.
    """

    def __init__(self, shape, dtype, device_type=CPU, device_id=0, stream=0):
        self.shape, self.dtype, self.stream = tuple(shape), dtype, stream
        self.strides = contiguous(self.shape)
        self._device = (device_type, device_id)
        self._memory = Memory(lib.EMULATED if device_type == CPU else lib.GPU,
                              max(1, self.size * ITEM_BYTES[dtype]))
        self.pointer = self._memory.pointer

    def __array__(self, dtype=None, copy=None):
        import numpy
        from . import arrays
        x = arrays._host_copy(Import(self, "array", None))
        return x if dtype is None else numpy.asarray(x, dtype)

    @property
    def size(self):
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    def __dlpack_device__(self):
        return self._device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if dl_device not in (None, self._device) or copy:
            raise BufferError("this array can be neither moved nor copied by __dlpack__")
        if self._device[0] == CUDA and stream != -1 and (stream or 1) != (self.stream or 1):
            lib.call("attn_stream_wait", stream, self.stream)
        versioned = max_version is not None and max_version[0] >= 1
        code, bits = next(key for key, name in _CODES.items() if name == self.dtype)
        shape = (c.c_int64 * len(self.shape))(*self.shape)
        strides = (c.c_int64 * len(self.shape))(*self.strides)
        tensor = _Tensor(self.pointer, *self._device, len(self.shape), code, bits, 1, shape,
                         strides, 0)
        if versioned:
            managed = _Versioned(1, 0, None, _deleter_versioned, 0, tensor)
        else:
            managed = _Managed(tensor, None, _deleter)
        address = c.addressof(managed)
        _exports[address] = (managed, shape, strides, self._memory)
        return _api.PyCapsule_New(address, VERSIONED if versioned else LEGACY, _destroy)


_in_flight = []  # (what a kernel reads, the mark behind it in its stream)


def hold(imports, stream):
    """Keeps imported GPU tensors until the work that `stream` has now is done: their frameworks
    may give the memory to work in other streams as soon as it is released."""
    _in_flight[:] = [(kept, mark) for kept, mark in _in_flight
                     if not lib.library().attn_done(mark)]
    if imports:
        mark = c.c_void_p()
        lib.call("attn_record", stream, c.byref(mark))
        _in_flight.append((imports, mark))


class Memory:
    """Bytes of the library's allocator, aligned to 256 bytes, freed with the last reference."""

    def __init__(self, backend, size):
        self._backend, memory = backend, c.c_void_p()
        lib.call("attn_allocate", backend, size, c.byref(memory))
        self.pointer = memory.value
        self._free = lib.library().attn_free

    def __del__(self):
        if getattr(self, "pointer", None):
            self._free(self._backend, self.pointer)

