"""attn with arrays of ml_dtypes, CuPy and JAX; what is not installed is skipped, by name."""
import gc
import importlib.util
import os
import sys
import unittest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory to the others

import attn
import numpy as np
from attn.library import InvalidValue


def installed(name):
    return importlib.util.find_spec(name) is not None


if not any(installed(name) for name in ("ml_dtypes", "cupy", "jax")):
    print("skipped: none of ml_dtypes, CuPy and JAX is installed")
    sys.exit(77)


def on_gpu():
    """Whether both frameworks and attn would use a GPU."""
    if not installed("cupy"):
        return False
    import cupy
    try:
        return cupy.cuda.runtime.getDeviceCount() > 0
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def qkv(dtype=np.float32, n=70, heads=2):
    return [normal(s, 1, heads, n, 64, dtype=dtype) for s in range(3)]


class Frameworks(unittest.TestCase):
    def near(self, o, inputs, most, **options):
        expected = attn.reference(*[np.asarray(x, np.float32) for x in inputs], **options)
        self.assertLess(np.abs(np.asarray(o, np.float64) - expected).max(), most)


@unittest.skipUnless(installed("ml_dtypes"), "ml_dtypes is not installed")
class MlDtypes(Frameworks):
    def test_bf16_in_and_out(self):
        import ml_dtypes
        inputs = qkv(ml_dtypes.bfloat16)
        o = attn.forward(*inputs, causal=True)
        self.assertEqual(o.dtype, ml_dtypes.bfloat16)
        self.near(o, inputs, 2e-2, causal=True)
        same = attn.forward(*[attn.bf16(np.asarray(x, np.float32)) for x in inputs], causal=True)
        np.testing.assert_array_equal(o.view(np.uint16), same.bits)

    def test_other_types_are_refused(self):
        import ml_dtypes
        inputs = qkv(ml_dtypes.float8_e4m3fn)
        with self.assertRaisesRegex(InvalidValue, "^q: type float8_e4m3fn: must be "):
            attn.forward(*inputs)


@unittest.skipUnless(on_gpu(), "CuPy is not installed, or has no GPU")
class CuPy(Frameworks):
    def test_forward_and_types(self):
        import cupy
        for dtype, most in ((np.float32, 1e-5), (np.float16, 3e-3)):
            inputs = qkv(dtype)
            o = attn.forward(*[cupy.asarray(x) for x in inputs], causal=True)
            self.assertIsInstance(o, cupy.ndarray)
            self.assertEqual((o.dtype, o.shape), (dtype, (1, 2, 70, 64)))
            self.near(o.get(), inputs, most, causal=True)

    def test_backward(self):
        import cupy
        inputs = qkv(np.float16)
        dout = normal(3, 1, 2, 70, 64, dtype=np.float16)
        q, k, v, do = (cupy.asarray(x) for x in (*inputs, dout))
        o, lse = attn.forward(q, k, v, return_lse=True)
        found = attn.backward(q, k, v, o, lse, do)
        expected = attn.backward(*inputs, o.get(), lse.get(), dout)  # in the emulator
        for a, b in zip(found, expected):
            self.assertIsInstance(a, cupy.ndarray)
            self.assertLess(np.abs(a.get().astype(np.float64) - b).max(), 2e-2)

    def test_views_are_read_by_their_strides(self):
        import cupy
        inputs = qkv()
        views = [cupy.asarray(x.transpose(0, 2, 1, 3).copy()).transpose(0, 2, 1, 3)
                 for x in inputs]
        self.near(attn.forward(*views).get(), inputs, 1e-5)

    def test_the_current_stream(self):
        """The inputs are still being written when attn is called; the result is read in order."""
        import cupy
        inputs = qkv(np.float16, n=256)
        stream = cupy.cuda.Stream(non_blocking=True)
        for given in (None, stream):
            with stream:
                work = cupy.ones((2048, 2048), np.float32)
                for _ in range(50):
                    work = work @ work / 2048  # all ones, for some milliseconds
                one = work[0, 0].astype(np.float16)
                o = attn.forward(*[cupy.asarray(x) * one for x in inputs], stream=given)
                twice = o + o
            stream.synchronize()
            self.near(twice.get() / 2, inputs, 3e-3)

    def test_other_types_are_refused(self):
        import cupy
        with self.assertRaisesRegex(InvalidValue, "^q: .*must be "):
            attn.forward(*[cupy.asarray(x).view(np.uint16) for x in qkv(np.float16)])


@unittest.skipUnless(installed("jax"), "JAX is not installed")
class Jax(Frameworks):
    def each_device(self):
        import jax
        devices = [jax.devices("cpu")[0]]
        return devices + (jax.devices("gpu")[:1] if on_gpu() else [])

    def test_forward_and_types(self):
        import jax
        import jax.numpy as jnp
        for device in self.each_device():
            for dtype, most in ((jnp.float32, 1e-5), (jnp.float16, 3e-3), (jnp.bfloat16, 2e-2)):
                with self.subTest(device=str(device), dtype=str(dtype)):
                    q, k, v = (jax.device_put(jnp.asarray(x).astype(dtype), device)
                               for x in qkv())
                    o = jax.dlpack.from_dlpack(attn.forward(q, k, v, causal=True))
                    self.assertEqual((o.dtype, o.shape, o.devices()),
                                     (q.dtype, q.shape, {device}))
                    self.near(jnp.asarray(o, jnp.float32), (q, k, v), most, causal=True)

    def test_pending_work_and_lifetime(self):
        """JAX computes asynchronously: the inputs need not be there when attn is called."""
        import jax
        import jax.numpy as jnp
        for device in self.each_device():
            with self.subTest(device=str(device)):
                inputs = qkv()
                work = jax.device_put(jnp.ones((1024, 1024)), device)
                for _ in range(50):
                    work = work @ work / 1024
                pending = [jax.device_put(x, device) * work[0, 0] for x in inputs]
                o = jax.dlpack.from_dlpack(attn.forward(*pending))
                del pending, work
                gc.collect()
                self.near(o + 0, inputs, 1e-3)

    def test_traced_arrays_are_refused(self):
        import jax
        q, k, v = (jax.numpy.asarray(x) for x in qkv())
        with self.assertRaisesRegex(InvalidValue, "^q: is a .*Tracer: must be "):
            jax.jit(lambda q: attn.forward(q, k, v))(q)


if __name__ == "__main__":
    unittest.main(verbosity=2)
