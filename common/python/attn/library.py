"""libattention through ctypes: the structures of attention.h, and errors.

The library is the file named by $ATTN_LIBRARY, or libattention.so next to this package, or that of
the newest build folder of the source tree (build/*/lib). Nothing is compiled here.
"""
import ctypes as c
import glob
import operator
import os
import pathlib
import threading

GPU, EMULATED = 0, 1
DTYPES = {"bf16": 0, "fp16": 1, "fp32": 2, "int8": 3, "e4m3": 4, "int4": 5}
OPERATIONS = ("forward", "backward", "decode", "paged_decode", "paged_prefill", "paged_append",
              "quantised_forward")


class Error(Exception):
    """A call that was refused, or that failed; one line."""


class InvalidValue(Error, ValueError):
    """A shape, stride, type or name that is not accepted."""


class Unsupported(Error, NotImplementedError):
    """No step, or not the named one, takes the problem on this device."""


class DeviceError(Error, RuntimeError):
    """No GPU, another GPU than the tensors', or an error of CUDA."""


class KernelError(Error, RuntimeError):
    """The emulator found an error of a kernel."""


_ERRORS = {1: InvalidValue, 2: Unsupported, 3: InvalidValue, 4: DeviceError, 5: KernelError}


class Problem(c.Structure):
    """attn_problem."""
    _fields_ = [
        ("size", c.c_size_t), ("backend", c.c_int32), ("dtype", c.c_int32), ("step", c.c_char_p),
        *[(name, c.c_int64) for name in
          ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim")],
        ("causal", c.c_int32), ("window_left", c.c_int64), ("window_right", c.c_int64),
        ("softmax_scale", c.c_double), ("softcap", c.c_double), ("alibi", c.c_int32),
        ("dropout", c.c_double), ("seed", c.c_uint64), ("sinks", c.c_int32),
        ("packed", c.c_int32), ("total_q", c.c_int64), ("total_k", c.c_int64),
        ("lengths_q", c.c_void_p), ("lengths_k", c.c_void_p),
        ("page_size", c.c_int64), ("num_pages", c.c_int64), ("max_pages", c.c_int64),
        ("host_page_table", c.c_void_p),
        *[(name, c.c_void_p) for name in
          ("block_mask", "hidden_begin", "hidden_end", "tile_windows")],
        *[(name, c.c_int64) for name in
          ("block_m", "block_n", "mask_intervals", "mask_batch", "mask_heads")],
        ("canvas", c.c_int64 * 3), ("tile", c.c_int64 * 3),
        ("copy_strided", c.c_int32), ("deterministic", c.c_int64)]


class Tensor(c.Structure):
    """attn_tensor."""
    _fields_ = [("data", c.c_void_p), ("stride_batch", c.c_int64), ("stride_head", c.c_int64),
                ("stride_row", c.c_int64)]


TENSORS = ("q", "k", "v", "o", "dout", "dq", "dk", "dv", "k_new", "v_new")
ARRAYS = ("lse", "alibi", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table")


class Tensors(c.Structure):
    """attn_tensors."""
    _fields_ = [("size", c.c_size_t), *[(name, Tensor) for name in TENSORS],
                *[(name, c.c_void_p) for name in ARRAYS]]


class Doubles(c.Structure):
    """attn_doubles."""
    _fields_ = [("size", c.c_size_t),
                *[(name, c.c_void_p) for name in
                  ("q", "k", "v", "dout", "alibi", "o", "lse", "dq", "dk", "dv")]]


LAUNCH = c.CFUNCTYPE(c.c_int, c.c_void_p)
_lock = threading.Lock()
_library = None


def candidates():
    """The paths at which the library is looked for, in this order."""
    if "ATTN_LIBRARY" in os.environ:
        return [os.environ["ATTN_LIBRARY"]]
    here = pathlib.Path(__file__).resolve().parent
    builds = glob.glob(str(here.parents[2] / "build" / "*" / "lib" / "libattention.so"))
    return [str(here / "libattention.so"), *sorted(builds, key=os.path.getmtime, reverse=True)]


def _declare(lib):
    text = [c.c_char_p, c.c_size_t, c.POINTER(c.c_size_t)]
    problem, tensors, pointer = c.POINTER(Problem), c.POINTER(Tensors), c.c_void_p
    for operation in OPERATIONS:
        getattr(lib, f"attn_{operation}_plan").argtypes = [problem, c.POINTER(pointer)]
    for name, result, arguments in (
            ("attn_plan_workspace_bytes", c.c_size_t, [pointer]),
            ("attn_plan_step", c.c_char_p, [pointer]),
            ("attn_plan_prepare_reads_tensors", c.c_int, [pointer]),
            ("attn_plan_destroy", None, [pointer]),
            ("attn_prepare", c.c_int, [pointer, pointer, pointer, c.c_size_t, pointer]),
            ("attn_run", c.c_int, [pointer, pointer, pointer, c.c_size_t, pointer]),
            ("attn_allocate", c.c_int, [c.c_int32, c.c_size_t, c.POINTER(pointer)]),
            ("attn_free", None, [c.c_int32, pointer]),
            ("attn_stream_wait", c.c_int, [pointer, pointer]),
            ("attn_current_gpu", c.c_int, []),
            ("attn_record", c.c_int, [pointer, c.POINTER(pointer)]),
            ("attn_done", c.c_int, [pointer]),
            ("attn_last_error", c.c_char_p, []),
            ("attn_steps", c.c_char_p, []),
            ("attn_which", c.c_int, [c.c_char_p, problem, *text]),
            ("attn_describe", c.c_int, [c.c_char_p, *text]),
            ("attn_reference", c.c_int, [problem, c.POINTER(Doubles)]),
            ("attn_check_begin", c.c_int,
             [c.c_char_p, problem, c.c_char_p, c.c_uint64, c.POINTER(pointer)]),
            ("attn_check_tensors", c.c_char_p, [pointer]),
            ("attn_check_input", c.c_int, [pointer, c.c_char_p, pointer, c.c_size_t]),
            ("attn_check_output", c.c_int,
             [pointer, c.c_char_p, pointer, c.c_size_t, c.POINTER(c.c_int), *text]),
            ("attn_check_end", None, [pointer]),
            ("attn_cost", c.c_int, [c.c_char_p, problem, c.c_char_p, *text]),
            ("attn_time", c.c_int,
             [LAUNCH, pointer, pointer, c.POINTER(c.c_double), c.POINTER(c.c_int)])):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def library():
    """The loaded library. Raises ImportError with one line if there is none."""
    global _library
    with _lock:
        if _library is None:
            paths = candidates()
            found = next((path for path in paths if os.path.exists(path)), None)
            if found is None:
                raise ImportError(f"libattention.so is not at {' or '.join(paths)}: build the "
                                  "target attention, or set ATTN_LIBRARY to the file")
            try:
                _library = _declare(c.CDLL(found))
            except (OSError, AttributeError) as error:
                raise ImportError(f"{found}: {error}") from None
        return _library


def call(name, *arguments):
    """Calls a function that returns a status, and raises its error."""
    check(getattr(_library or library(), name)(*arguments))


def check(status):
    """Raises the error of a call of this thread that did not return 0."""
    if status:
        raise _ERRORS.get(status, Error)(library().attn_last_error().decode())


def text_of(name, *arguments):
    """The text that a function writes to (text, bytes, needed), its last arguments."""
    needed = c.c_size_t()
    call(name, *arguments, None, 0, c.byref(needed))
    buffer = c.create_string_buffer(needed.value)
    call(name, *arguments, buffer, needed, None)
    return buffer.value.decode()


def problem(**fields):
    """An attn_problem with its defaults and these fields."""
    p = Problem()
    library().attn_problem_defaults(c.byref(p))
    for name, value in fields.items():
        setattr(p, name, value)
    return p


def whole(name, x, least=-2 ** 62, most=2 ** 62):
    """An integer argument in a range."""
    try:
        value = operator.index(x)
    except TypeError:
        raise InvalidValue(f"{name}: {x!r}: must be an integer") from None
    if not least <= value <= most:
        raise InvalidValue(f"{name}: {value}: must be from {least} to {most}")
    return value


def number(name, x):
    """A real argument."""
    try:
        return float(x)
    except (TypeError, ValueError):
        raise InvalidValue(f"{name}: {x!r}: must be a number") from None


def window_of(window):
    """(left, right), -1 for no limit on that side."""
    if window is None:
        return -1, -1
    try:
        left, right = window
    except (TypeError, ValueError):
        raise InvalidValue(f"window: {window!r}: must be (left, right), -1 for no limit") from None
    return tuple(-1 if side is None else whole("window", side, -1) for side in (left, right))


def scale_of(scale):
    """0 for the default, 1/sqrt(d), as in attn_problem; a scale of 0 itself is refused."""
    value = 0.0 if scale is None else number("scale", scale)
    if scale is not None and value == 0:
        raise InvalidValue("scale: 0: must not be 0; leave it out for 1/sqrt(d)")
    return value


def step_of(step):
    """The bytes of a step's name, or None."""
    if step is None or step == "":
        return None
    if not isinstance(step, str) or "\0" in step:
        raise InvalidValue(f"step: {step!r}: must be a name, as 04_flash_v2/v13_tuned")
    return step.encode()
