"""Compares a chapter's forward and backward steps with NumPy's float64.

usage: outside_float64.py PROGRAM

Nothing is shared with the program but files: the inputs are drawn here, rounded here, and handed over
with --load; what --save wrote is compared with attention as its definition says it, row by row.
Exits with 77 where NumPy is missing.
"""
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import numpy as np
except ImportError:
    print("skipped: this python3 has no NumPy")
    sys.exit(77)

# Worst row, relative to its length: rounding of the stored tensor, and of P on the way.
BOUND = {
    ("forward", "fp32"): 1e-5, ("forward", "fp16"): 2e-3, ("forward", "bf16"): 1.2e-2,
    ("backward", "fp32"): 1e-5, ("backward", "fp16"): 4e-3, ("backward", "bf16"): 3e-2,
}
LSE_BOUND = 2e-5  # absolute: scores are summed in fp32 from rounded inputs

CASES = [
    # B, Hq, Hkv, seqlen_q, seqlen_k, d, causal, window
    (1, 2, 2, 64, 64, 32, False, None),
    (2, 2, 2, 37, 70, 24, True, None),   # bottom-right aligned
    (1, 2, 1, 70, 37, 16, True, None),   # the first rows are fully masked
    (1, 6, 2, 33, 33, 40, True, None),   # grouped heads
    (1, 4, 1, 65, 65, 16, False, (7, 2)),
]


def rounded(x, dtype):
    """x in float64, rounded as `dtype` holds it: to nearest, ties to even."""
    x = x.astype(np.float32)
    if dtype == "fp16":
        x = x.astype(np.float16)
    if dtype == "bf16":
        bits = x.view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.astype(np.uint32).view(np.float32)
    return x.astype(np.float64)


def attention(q, k, v, do, causal, window):
    """o, lse, dq, dk, dv of one head, by definition."""
    scale = 1 / np.sqrt(q.shape[1])
    s = scale * q @ k.T
    distance = np.arange(len(k))[None, :] - (np.arange(len(q))[:, None] + len(k) - len(q))
    visible = np.ones_like(s, dtype=bool)
    if causal:
        visible &= distance <= 0
    if window:
        visible &= (distance >= -window[0]) & (distance <= window[1])
    some = visible.any(axis=1)
    s = np.where(visible, s, -np.inf)
    top = np.where(some, s.max(axis=1, initial=-np.inf), 0)[:, None]
    e = np.exp(s - top)
    total = e.sum(axis=1, keepdims=True)
    p = np.divide(e, total, out=np.zeros_like(e), where=total > 0)
    with np.errstate(divide="ignore"):
        lse = top[:, 0] + np.log(total[:, 0])
    dp = do @ v.T
    ds = p * (dp - (p * dp).sum(axis=1, keepdims=True))
    return p @ v, lse, scale * ds @ k, scale * ds.T @ q, p.T @ do


def worst_row(got, want):
    """Largest relative error of a row; a row far below the others is measured by their length."""
    length = np.linalg.norm(want, axis=-1)
    length = np.maximum(length, length[length > 0].mean())
    return float((np.linalg.norm(got - want, axis=-1) / length).max())


def check_case(program, folder, case, dtype, seed):
    b, hq, hkv, nq, nk, d, causal, window = case
    rng = np.random.default_rng(seed)
    draw = lambda heads, n: rng.standard_normal((b, heads, n, d)).astype(np.float32)
    inputs = {"q": draw(hq, nq), "k": draw(hkv, nk), "v": draw(hkv, nk), "do": draw(hq, nq)}
    source = folder / "in"
    source.mkdir(parents=True)
    for name, x in inputs.items():
        np.save(source / (name + ".npy"), x)

    q, k, v, do = (rounded(inputs[n], dtype) for n in ("q", "k", "v", "do"))
    want = {"o": np.zeros(q.shape), "lse": np.zeros(q.shape[:3]), "dq": np.zeros(q.shape),
            "dk": np.zeros(k.shape), "dv": np.zeros(v.shape)}
    for i in range(b):
        for h in range(hq):
            g = h // (hq // hkv)
            o, lse, dq, dk, dv = attention(q[i, h], k[i, g], v[i, g], do[i, h], causal, window)
            want["o"][i, h], want["lse"][i, h], want["dq"][i, h] = o, lse, dq
            want["dk"][i, g] += dk
            want["dv"][i, g] += dv

    failures = compared = 0
    for operation in ("forward", "backward"):
        target = folder / operation
        command = [program, "--operation", operation, "--dtype", dtype, "--check", "off",
                   "--load", str(source), "--save", str(target)]
        command += ["--causal"] if causal else []
        command += ["--window", "%d,%d" % window] if window else []
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            print("FAILED:", " ".join(command), "exits with", run.returncode)
            print(run.stdout, run.stderr)
            return 1, 0
        for step in sorted(p for p in target.iterdir() if p.is_dir()):
            for file in sorted(step.glob("*.npy")):
                got = np.load(file)
                expected = want[file.stem]
                compared += 1
                if got.dtype != np.float32 or got.shape != expected.shape:
                    print("FAILED:", file, got.dtype, got.shape, "not float32", expected.shape)
                    failures += 1
                    continue
                if file.stem == "lse":
                    same = np.isneginf(expected) == np.isneginf(got)
                    finite = np.isfinite(expected)
                    error = float(np.abs(got[finite] - expected[finite]).max())
                    good = bool(same.all()) and error <= LSE_BOUND
                    bound = LSE_BOUND
                else:
                    error, bound = worst_row(got, expected), BOUND[operation, dtype]
                    good = error <= bound  # false for NaN
                print("%-6s %-16s %-4s %.2e of %.2e %s" %
                      (dtype, step.name, file.stem, error, bound, "" if good else "FAILED"))
                failures += not good
    return failures, compared


def main():
    program = sys.argv[1]
    failures = compared = 0
    with tempfile.TemporaryDirectory() as work:
        for n, case in enumerate(CASES):
            for dtype in ("fp32", "fp16", "bf16"):
                print("case", case)
                failed, count = check_case(program, Path(work) / ("%d_%s" % (n, dtype)), case, dtype, n)
                failures += failed
                compared += count
    print(compared, "tensors compared,", failures, "failed")
    # A program that wrote nothing must not pass.
    return 1 if failures or compared < 2 * len(CASES) else 0


if __name__ == "__main__":
    sys.exit(main())
