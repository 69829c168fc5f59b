#!/usr/bin/env python3
"""library.py LIBRARY PROGRAMS: libattention under Python has the bits of the chapter programs.

The kernels run in the emulator, also those with static __shared__ variables, which the emulator
finds by the symbols of the library. Without symbols the library must say so in one line. The
package attn is found by $PYTHONPATH, and loads the library of $ATTN_LIBRARY.
"""
import os
import pathlib
import subprocess
import sys
import tempfile

LIBRARY, PROGRAMS = (pathlib.Path(path).resolve() for path in sys.argv[1:3])
os.environ["ATTN_LIBRARY"] = str(LIBRARY)
import attn  # noqa: E402
import numpy as np  # noqa: E402

# The f steps quantise with kernels that have static __shared__ variables.
STEPS = ("01_naive/v8_mma", "04_flash_v2/v13_tuned", "06_flash_v3_hopper/v14_tuned",
         "06_flash_v3_hopper/f4_block_scales", "06_flash_v3_hopper/f8_q_in_registers")


def call(name, q, k, v):
    inputs = [attn.bf16(x) for x in (q, k, v)]
    if "/f" in name:
        return attn.quantised_forward(*inputs, "e4m3", causal=True, step=name, return_lse=True)
    return attn.forward(*inputs, causal=True, step=name, return_lse=True)


def compare(name):
    chapter, step = name.split("/")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [PROGRAMS / chapter, "--device", "emulated", "--step", step, "--heads", "2",
             "--kv-heads", "1", "--seqlen-q", "70", "--seqlen-k", "150", "--head-dim", "64",
             "--dtype", "e4m3" if "/f" in name else "bf16", "--causal", "--check", "off",
             "--save", folder], check=True, stdout=subprocess.DEVNULL)
        at = pathlib.Path(folder)
        inputs = [np.load(at / f"{t}.npy") for t in "qkv"]
        expected = {t: np.load(at / step / f"{t}.npy") for t in ("o", "lse")}
    for (tensor, theirs), mine in zip(expected.items(), map(np.asarray, call(name, *inputs))):
        if mine.tobytes() != theirs.astype(np.float32).tobytes():
            sys.exit(f"{name}: {tensor} differs from the chapter program's in "
                     f"{np.count_nonzero(mine != theirs.reshape(mine.shape))} elements")
    print(f"{name}: same bits as the chapter program")


def stripped():
    """Size of the library without symbols, and what it says in the emulator."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "libattention_stripped.so"
        subprocess.run(["strip", "-o", path, LIBRARY], check=True)
        sections = subprocess.run(["size", "-A", path], check=True, capture_output=True,
                                  text=True).stdout.splitlines()
        gpu = sum(int(line.split()[1]) for line in sections if line.startswith(".nv_fatbin"))
        size = path.stat().st_size - gpu
        print(f"stripped: {size / 2**20:.1f} MiB, and {gpu / 2**20:.1f} MiB of code for GPUs")
        if size > 56 * 2**20:
            sys.exit("the stripped library has more than 56 MiB without code for GPUs")
        script = ("import attn, numpy as np\nx = attn.bf16(np.ones((1, 2, 70, 64), 'f4'))\n"
                  "try:\n"
                  f"    attn.quantised_forward(x, x, x, 'e4m3', step='{STEPS[-1]}')\n"
                  "except attn.KernelError as error:\n    print(error)")
        said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True,
                              text=True, env={**os.environ, "ATTN_LIBRARY": str(path)}).stdout
        if "has no symbols (strip?)" not in said or said.count("\n") != 1:
            sys.exit(f"stripped library: {said!r}")
        print(f"stripped: {said}", end="")


for each in STEPS:
    compare(each)
stripped()
