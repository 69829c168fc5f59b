#!/usr/bin/env python3
"""library.py LIBRARY PROGRAMS: libattention under Python has the bits of the chapter programs.

The kernels run in the emulator, also those with static __shared__ variables, which the emulator
finds by the symbols of the library. Without symbols the library must say so in one line.
"""
import ctypes as c
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

LIBRARY, PROGRAMS = (pathlib.Path(path).resolve() for path in sys.argv[1:3])
EMULATED, BF16, E4M3, KERNEL_ERROR = 1, 0, 4, 5


class Problem(c.Structure):
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
        ("copy_strided", c.c_int32)]


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("stride_batch", c.c_int64), ("stride_head", c.c_int64),
                ("stride_row", c.c_int64)]


class Tensors(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        *[(name, Tensor) for name in
          ("q", "k", "v", "o", "dout", "dq", "dk", "dv", "k_new", "v_new")],
        *[(name, c.c_void_p) for name in
          ("lse", "alibi", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table")]]


def load(path):
    lib = c.CDLL(str(path))
    lib.attn_last_error.restype = c.c_char_p
    return lib


def aligned(count, dtype):
    store = np.zeros(count + 256, dtype)
    first = -store.ctypes.data % 256 // store.itemsize
    return store[first:first + count]


def bf16(x):
    array = aligned(x.size, np.uint16)
    array[:] = (x.ravel().view(np.uint32) >> 16).astype(np.uint16)
    return array


def call(lib, function, step, dtype, q, k, v, causal):
    problem = Problem()
    lib.attn_problem_defaults(c.byref(problem))
    problem.backend, problem.dtype, problem.step = EMULATED, dtype, step.encode()
    problem.batch, problem.heads, problem.seqlen_q, problem.head_dim = q.shape
    problem.kv_heads, problem.seqlen_k, problem.causal = k.shape[1], k.shape[2], causal
    arrays = {"q": bf16(q), "k": bf16(k), "v": bf16(v), "o": aligned(q.size, np.uint16)}
    lse = aligned(q.size // q.shape[3], np.float32)
    tensors = Tensors(size=c.sizeof(Tensors), lse=lse.ctypes.data)
    for name, array in arrays.items():
        getattr(tensors, name).data = array.ctypes.data
    needed = c.c_size_t()
    status = getattr(lib, function + "_workspace_bytes")(c.byref(problem), c.byref(needed))
    workspace = aligned(needed.value, np.uint8)
    if status == 0:
        status = getattr(lib, function)(c.byref(problem), c.byref(tensors),
                                        c.c_void_p(workspace.ctypes.data), needed, None)
    o = (arrays["o"].astype(np.uint32) << 16).view(np.float32)
    return status, o.reshape(q.shape), lse.reshape(q.shape[:3])


def main():
    lib = load(LIBRARY)
    cases = [  # the f steps quantise with kernels that have static __shared__ variables
        ("attn_forward", BF16, "01_naive/v8_mma"),
        ("attn_forward", BF16, "04_flash_v2/v13_tuned"),
        ("attn_forward", BF16, "06_flash_v3_hopper/v14_tuned"),
        ("attn_quantised_forward", E4M3, "06_flash_v3_hopper/f4_block_scales"),
        ("attn_quantised_forward", E4M3, "06_flash_v3_hopper/f6_smooth_v_chunks"),
    ]
    for function, dtype, name in cases:
        chapter, step = name.split("/")
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [PROGRAMS / chapter, "--device", "emulated", "--step", step, "--heads", "2",
                 "--kv-heads", "1", "--seqlen-q", "70", "--seqlen-k", "150", "--head-dim", "64",
                 "--dtype", "bf16" if dtype == BF16 else "e4m3", "--causal", "--check", "off",
                 "--save", folder], check=True, stdout=subprocess.DEVNULL)
            at = pathlib.Path(folder)
            q, k, v = (np.load(at / f"{t}.npy") for t in "qkv")
            o, lse = (np.load(at / step / f"{t}.npy") for t in ("o", "lse"))
        status, *got = call(lib, function, name, dtype, q, k, v, 1)
        if status != 0:
            sys.exit(f"{name}: {lib.attn_last_error().decode()}")
        for tensor, mine, theirs in (("o", got[0], o), ("lse", got[1], lse)):
            if mine.tobytes() != theirs.astype(np.float32).tobytes():
                sys.exit(f"{name}: {tensor} differs from the chapter program's in "
                         f"{np.count_nonzero(mine != theirs.reshape(mine.shape))} elements")
        print(f"{name}: same bits as the chapter program")

    with tempfile.TemporaryDirectory() as folder:
        stripped = pathlib.Path(folder) / "libattention_stripped.so"
        subprocess.run(["strip", "-o", stripped, LIBRARY], check=True)
        sections = subprocess.run(["size", "-A", stripped], check=True, capture_output=True,
                                  text=True).stdout.splitlines()
        gpu = sum(int(line.split()[1]) for line in sections if line.startswith(".nv_fatbin"))
        size = stripped.stat().st_size - gpu
        print(f"stripped: {size / 2**20:.1f} MiB, and {gpu / 2**20:.1f} MiB of code for GPUs")
        if size > 48 * 2**20:
            sys.exit("the stripped library has more than 48 MiB without code for GPUs")
        bare = load(stripped)
        status, *_ = call(bare, function, name, dtype, q, k, v, 1)
        line = bare.attn_last_error().decode()
        if status != KERNEL_ERROR or "has no symbols (strip?)" not in line or "\n" in line:
            sys.exit(f"stripped library: status {status}, {line!r}")
        print(f"stripped: {line}")


main()
