"""DLPack in both directions, with stand-ins for frameworks: who frees, when, and which stream."""
import ctypes as c
import gc
import subprocess
import sys
import unittest

import attn
import numpy as np
from attn import arrays, dlpack, operations
from attn.library import InvalidValue, Unsupported


class Producer:
    """A framework's tensor: counts its deleter's calls and records what it was asked."""

    def __init__(self, array, device=(1, 0), versioned=True, flags=0, version=(1, 0),
                 code_bits=(2, 32), offset=0):
        self.array, self.device, self.versioned = array, device, versioned
        self.flags, self.version, self.code_bits = flags, version, code_bits
        self.offset = offset  # bytes before the array that its data pointer points to
        self.deleted, self.asked, self._kept = 0, [], []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **keywords):
        if not self.versioned and "max_version" in keywords:
            raise TypeError("an old producer")
        self.asked.append(keywords)
        shape = (c.c_int64 * self.array.ndim)(*self.array.shape)
        strides = None
        if not self.array.flags.c_contiguous:
            strides = (c.c_int64 * self.array.ndim)(
                *(stride // self.array.itemsize for stride in self.array.strides))
        tensor = dlpack._Tensor(self.array.ctypes.data - self.offset, *self.device,
                                self.array.ndim, *self.code_bits, 1, shape, strides, self.offset)

        def deleted(_):
            self.deleted += 1
        if self.versioned:
            deleter = dlpack._DELETER_VERSIONED(deleted)
            managed = dlpack._Versioned(*self.version, None, deleter, self.flags, tensor)
        else:
            deleter = dlpack._DELETER(deleted)
            managed = dlpack._Managed(tensor, None, deleter)
        self._kept += [managed, shape, strides, deleter]
        name = dlpack.VERSIONED if self.versioned else dlpack.LEGACY
        return dlpack._api.PyCapsule_New(c.addressof(managed), name, dlpack._DESTRUCTOR())


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Dlpack(unittest.TestCase):
    def test_tensors_of_another_framework(self):
        data = [normal(n, 1, 2, 33, 64) for n in range(3)]
        expected = attn.reference(*data)
        for versioned in (False, True):
            tensors = [Producer(x, versioned=versioned) for x in data]
            o, lse = attn.forward(*tensors, return_lse=True)
            gc.collect()
            self.assertEqual([t.deleted for t in tensors], [1, 1, 1])
            self.assertEqual([len(t.asked) for t in tensors], [1, 1, 1])
            self.assertLess(np.abs(arrays.to_numpy(o) - expected).max(), 1e-5)
            self.assertLess(np.abs(np.from_dlpack(o) - expected).max(), 1e-5)
            self.assertEqual(lse.shape, (1, 2, 33))

    def test_offsets_and_strides(self):
        data = normal(0, 3, 33, 2, 64)
        expected = attn.reference(*(x[None].swapaxes(1, 2) for x in data))
        tensors = [Producer(x[None].swapaxes(1, 2), offset=64) for x in data]
        self.assertLess(np.abs(np.asarray(attn.forward(*tensors)) - expected).max(), 1e-5)

    def test_lengths_of_another_framework(self):
        q, k = normal(0, 1, 2, 1, 64), normal(1, 1, 2, 40, 64)
        half = [attn.bf16(x) for x in (q, k, k)]
        lengths = Producer(np.array([7], np.int32), code_bits=(0, 32))
        expected = attn.reference(*half, lengths=[7])
        self.assertLess(np.abs(np.asarray(attn.decode(*half, lengths)) - expected).max(), 2e-2)

    def test_arrays_may_outlive_python(self):
        script = """if True:
            import functools, numpy as np, attn
            class D:
                def __init__(s, x): s.x = x
                def __dlpack__(s, **k): return s.x.__dlpack__()
                def __dlpack_device__(s): return s.x.__dlpack_device__()
            @functools.lru_cache
            def f(n):
                a = D(np.ones((1, 1, n, 32), 'f4'))
                return np.from_dlpack(attn.forward(a, a, a))
            f(8)
            np.keep = f
        """
        self.assertEqual(subprocess.run([sys.executable, "-c", script]).returncode, 0)

    def test_the_deleter_is_called_once_on_errors(self):
        for changes in ({"version": (2, 0)}, {"code_bits": (5, 64)}, {"device": (7, 0)}):
            t = Producer(normal(0, 1, 2, 33, 64), **changes)
            with self.assertRaises(InvalidValue):
                attn.forward(t, t, t)
            gc.collect()
            self.assertEqual(t.deleted, len(t.asked), changes)
        tensors = [Producer(normal(n, 1, 2, 33, 64)) for n in range(3)]
        with self.assertRaises(Unsupported):
            attn.forward(*tensors, step="06_flash_v3_hopper/v14_tuned")
        gc.collect()
        self.assertEqual([t.deleted for t in tensors], [1, 1, 1])

    def test_a_traced_array_is_refused(self):
        class Traced:  # as under jax.jit
            def __dlpack__(self, **_):
                raise AssertionError("asked")
        data = [normal(n, 1, 2, 33, 64) for n in range(2)]
        with self.assertRaisesRegex(InvalidValue, "^q: is a Traced: must be "):
            attn.forward(Traced(), *data)

    def test_read_only(self):
        data = [normal(n, 1, 2, 33, 64) for n in range(3)]
        attn.forward(*(Producer(x, flags=dlpack.FLAG_READ_ONLY) for x in data))  # inputs may be
        with self.assertRaisesRegex(InvalidValue, "o: is read-only"):
            attn.forward(*data, out=Producer(np.zeros_like(data[0]),
                                             flags=dlpack.FLAG_READ_ONLY))

    def test_the_stream_is_given_to_producers_on_a_gpu(self):
        for stream, told in ((None, 1), (0, 1), (1, 1), (2, 2), (77, 77)):
            t = Producer(normal(0, 1, 2, 33, 64), device=(2, 0))
            seen = arrays.view(t, "q", stream)
            self.assertEqual(t.asked[0]["stream"], told)
            self.assertEqual((seen.device, seen.backend), ("cuda:0", attn.library.GPU))
        t = Producer(normal(0, 4))
        arrays.view(t, "q", 77)
        self.assertNotIn("stream", t.asked[0])  # the CPU has none

    def test_tensors_on_two_devices_are_refused(self):
        call = operations.Call("forward")
        call.view("q", Producer(normal(0, 4), device=(2, 0)))
        call.view("k", Producer(normal(0, 4), device=(2, 1)))
        with self.assertRaisesRegex(InvalidValue, "k: is on cuda:1, q on cuda:0"):
            arrays.same_device(call.views)

    def test_a_capsule_that_was_used_is_refused(self):
        t = Producer(normal(0, 4))
        capsule = t.__dlpack__()
        t.__dlpack__ = None

        class Again:
            def __dlpack_device__(self):
                return 1, 0

            def __dlpack__(self, **_):
                return capsule
        first = dlpack.Import(Again(), "q", None)
        with self.assertRaisesRegex(InvalidValue, "no capsule that is unused"):
            dlpack.Import(Again(), "q", None)
        first.close()
        first.close()
        self.assertEqual(t.deleted, 1)

    def test_our_memory_lives_as_long_as_its_readers(self):
        before = len(dlpack._exports)
        ours = dlpack.Array((3, 5), "fp32")
        theirs = np.from_dlpack(ours)
        c.memset(ours.pointer, 0x3F, 60)
        del ours
        gc.collect()
        self.assertTrue((theirs.view(np.uint32) == 0x3F3F3F3F).all())
        self.assertEqual(len(dlpack._exports), before + 1)
        del theirs
        gc.collect()
        self.assertEqual(len(dlpack._exports), before)

    def test_a_capsule_that_is_dropped_frees_its_export(self):
        before = len(dlpack._exports)
        ours = dlpack.Array((4,), "bf16")
        for arguments in ({}, {"max_version": (1, 0)}):
            capsule = ours.__dlpack__(**arguments)
            self.assertEqual(len(dlpack._exports), before + 1)
            del capsule
            gc.collect()
            self.assertEqual(len(dlpack._exports), before)


unittest.main(verbosity=2)
