"""attn on NumPy arrays: results against the reference, and what is refused, in one line each."""
import concurrent.futures
import unittest

import attn
import numpy as np


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def naive(q, k, v, causal=False, scale=None):
    """The formula in float64, by NumPy alone."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    s = q @ np.repeat(k, group, 1).swapaxes(2, 3) * (scale or q.shape[3] ** -0.5)
    if causal:
        rows, keys = s.shape[2:]
        s = np.where(np.arange(keys) <= np.arange(rows)[:, None] + keys - rows, s, -np.inf)
    p = np.exp(s - np.maximum(s.max(3, keepdims=True), -1e300))
    total = p.sum(3, keepdims=True)
    return p / np.where(total == 0, 1, total) @ np.repeat(v, group, 1)


class Numpy(unittest.TestCase):
    def close(self, got, expected, most):
        error = np.abs(np.asarray(got, np.float64) - expected).max()
        self.assertLess(error, most)

    def refused(self, line, f, *arguments, error=attn.InvalidValue, **keywords):
        with self.assertRaises(error) as caught:
            f(*arguments, **keywords)
        self.assertIn(line, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))

    def test_reference_is_the_formula(self):
        q, k, v = normal(0, 2, 4, 9, 24), normal(1, 2, 2, 13, 24), normal(2, 2, 2, 13, 24)
        for causal in (False, True):
            expected = naive(q, k, v, causal)
            self.close(attn.reference(q, k, v, causal=causal), expected, 1e-13)

    def test_reference_takes_all_bits_of_doubles(self):
        q, k, v = (normal(n, 1, 1, 3, 8).astype(np.float64) for n in range(3))
        moved = q.copy()
        moved[0, 0, 1, 2] += 1e-9  # a float32 would not notice
        by = (attn.reference(moved, k, v) - attn.reference(q, k, v)) / 1e-9
        slope = attn.reference(q, k, v, np.ones_like(q))[0]
        self.assertAlmostEqual(by.sum(), slope[0, 0, 1, 2], delta=1e-5)

    def test_gradients_of_the_reference_are_differences(self):
        tensors = [normal(n, 1, 2, 5, 8).astype(np.float64) for n in range(3)]
        dout = normal(3, 1, 2, 5, 8).astype(np.float64)
        gradients = attn.reference(*tensors, dout, causal=True)
        for n, gradient in enumerate(gradients):
            for at in ((0, 0, 0, 0), (0, 1, 4, 7), (0, 1, 2, 3)):
                sides = []
                for step in (1e-6, -1e-6):
                    moved = [x.copy() for x in tensors]
                    moved[n][at] += step
                    sides.append((attn.reference(*moved, causal=True) * dout).sum())
                self.assertAlmostEqual((sides[0] - sides[1]) / 2e-6, gradient[at], delta=1e-6)

    def test_forward(self):
        q, k, v = normal(0, 1, 4, 70, 64), normal(1, 1, 2, 150, 64), normal(2, 1, 2, 150, 64)
        for kind, most in ((lambda x: x, 1e-5), (np.float16, 3e-3), (attn.bf16, 2e-2)):
            for causal in (False, True):
                inputs = [kind(x) for x in (q, k, v)]
                o, lse = attn.forward(*inputs, causal=causal, return_lse=True)
                expected = attn.reference(*inputs, causal=causal, return_lse=True)
                self.close(o, expected[0], most)
                self.close(lse, expected[1], 1e-4)
                self.assertEqual(type(o), type(inputs[0]))

    def test_every_forward_step_by_name(self):
        q, k, v = (attn.bf16(normal(n, 1, 2, 65, 64)) for n in range(3))
        expected = attn.reference(q, k, v)
        for name, verdict in attn.which("forward", seqlen_q=65).items():
            if not verdict.startswith("no"):
                with self.subTest(name):
                    self.close(attn.forward(q, k, v, step=name), expected, 2e-2)

    def test_layout_and_strides(self):
        q, k, v = normal(0, 2, 70, 2, 64), normal(1, 2, 60, 2, 64), normal(2, 2, 60, 2, 64)
        expected = naive(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)
        self.close(attn.forward(q, k, v, layout="bnhd"), expected, 1e-5)
        turned = attn.forward(*(x.swapaxes(1, 2) for x in (q, k, v)))
        self.close(turned, expected.swapaxes(1, 2), 1e-5)
        wide = np.zeros((2, 70, 2, 65), np.float32)  # rows of 65: not aligned
        wide[..., 1:] = q
        self.close(attn.forward(wide[..., 1:], k, v, layout="bnhd"), expected, 1e-5)

    def test_tensors_that_are_not_aligned(self):
        q = normal(0, 1, 2, 33, 64)
        expected = attn.reference(q, q, q)
        memory = np.zeros(q.nbytes + 64, np.uint8)
        slopes = np.zeros(3, np.float32)[1:]
        slopes[:] = 0.5, 0.25
        self.close(attn.forward(*[attn.bf16(q)] * 3, alibi=slopes),
                   attn.reference(*[attn.bf16(q)] * 3, alibi=slopes), 2e-2)
        for offset in (4, 8, 20):
            moved = memory[offset:offset + q.nbytes].view(np.float32).reshape(q.shape)
            moved[:] = q
            self.close(attn.forward(moved, moved, q), expected, 1e-5)

    def test_packed_sequences(self):
        lengths = [5, 130, 17]
        begins = np.array([0, 5, 135, 152], np.int32)
        q, k, v = (attn.bf16(normal(n, 152, 2, 64)) for n in range(3))
        o, lse = attn.forward(q, k, v, cu_seqlens_q=begins, cu_seqlens_k=begins, causal=True,
                              return_lse=True)
        self.assertEqual(lse.shape, (2, 152))
        for n, length in enumerate(lengths):
            part = slice(begins[n], begins[n] + length)
            one = [np.asarray(x[part]).swapaxes(0, 1)[None] for x in (q, k, v)]
            self.close(np.asarray(o[part]).swapaxes(0, 1)[None],
                       attn.reference(*one, causal=True), 2e-2)

    def test_sparse_masks(self):
        q, k, v = (attn.bf16(normal(n, 1, 2, 300, 64)) for n in range(3))
        blocks = np.array([[[[1, 0, 1], [0, 1, 1], [1, 1, 0]], [[1, 1, 1], [0, 0, 0], [0, 0, 1]]]])
        begin = np.array([[[[j % 200 for j in range(300)]]]])
        hidden = (begin, begin + 50)
        rows = np.arange(300)[:, None]
        seen_blocks = blocks.repeat(128, 2).repeat(128, 3)[:, :, :300, :300] > 0
        seen_columns = ~((rows >= begin) & (rows < begin + 50)) & (rows >= np.arange(300))

        def expected(seen):
            qf, kf, vf = (np.asarray(x, np.float64) for x in (q, k, v))
            s = np.where(seen, qf @ kf.swapaxes(2, 3) / 8, -np.inf)
            p = np.exp(s - np.maximum(s.max(3, keepdims=True), -1e30))
            return p @ vf / np.maximum(p.sum(3, keepdims=True), 1e-30)
        text = np.arange(300) >= 256  # a canvas of two tiles, each of which attends to itself
        tile = np.where(text, -1, np.arange(300) // 128)
        seen_tiles = (tile[:, None] == tile) | text | text[:, None]
        sides = ((2, 8, 16), (2, 8, 8))
        for options, seen in (({"sliding_tiles": (*sides, (2, 8, 8))}, seen_tiles),
                              ({"sliding_tiles": (*sides, [[2, 8, 16], [2, 8, 8]])},
                               np.stack([seen_tiles | True, seen_tiles])),
                              ({"block_mask": blocks}, seen_blocks),
                              ({"block_mask": (blocks > 0).tolist()}, seen_blocks),
                              ({"hidden": hidden, "causal": True}, seen_columns)):
            o = attn.forward(q, k, v, **options)
            self.assertLess(np.abs(np.asarray(o) - expected(seen)).max(), 2e-2)
        self.assertEqual(np.abs(np.asarray(attn.forward(q, k, v, block_mask=blocks))
                                [0, 1, 128:256]).max(), 0)  # nothing visible
        for options, line in (
                ({"block_mask": blocks[:, :, :2]},
                 r"block_mask: \[1, 2, 2, 3\]: must be \[1, 1 or 2, 3, 3\]"),
                ({"block_mask": blocks * 3}, r"block_mask\[0\] is 3: must be 0 or 1"),
                ({"block_mask": blocks * 0.5}, "block_mask: type float64: must be integers"),
                ({"block_mask": blocks, "hidden": hidden}, "at most one of them"),
                ({"sliding_tiles": sides}, r"sliding_tiles: must be \(canvas, tile, windows\)"),
                ({"sliding_tiles": (*sides, [2, 8])}, r"tile_windows: int64 \[2\]: must be"),
                ({"sliding_tiles": (*sides, [2, 8, 32])}, "tile_windows: a window of 2x8x32"),
                ({"sliding_tiles": ((2, 8), *sides)}, r"canvas: \(2, 8\): must be \(time"),
                ({"block_mask": blocks, "block_size": (0, 128)}, "block_size: 0: must be from 1"),
                ({"hidden": begin}, r"hidden: must be a pair \(begin, end\)"),
                ({"hidden": (begin, np.concatenate([begin, begin], 2))},
                 r"hidden_end: \[1, 1, 2, 300\]: must be \[1, 1, 1, 300\]"),
                ({"hidden": (begin, begin + 2 ** 40)}, "hidden_end: must be from -2147483648")):
            with self.assertRaisesRegex(attn.InvalidValue, line):
                attn.forward(q, k, v, **options)
        with self.assertRaisesRegex(attn.Unsupported, "s1_block_mask"):
            attn.forward(q, k, v, block_mask=np.ones((1, 1, 4, 3), int), block_size=(96, 128))

    def test_window_softcap_alibi_scale(self):
        q, k, v = (attn.bf16(2 * normal(n, 1, 2, 70, 64)) for n in range(3))
        for options in ({"window": (9, 0)}, {"softcap": 5.0}, {"scale": 0.3},
                        {"alibi": np.array([0.5, 0.25], np.float32)}):
            self.close(attn.forward(q, k, v, **options), attn.reference(q, k, v, **options), 4e-2)

    def test_dropout_is_that_of_the_seed(self):
        q, k, v = (attn.bf16(normal(n, 1, 2, 70, 64)) for n in range(3))
        for seed in (1, 2 ** 63 + 5):
            options = {"dropout": 0.5, "seed": seed}
            self.close(attn.forward(q, k, v, **options), attn.reference(q, k, v, **options), 4e-2)
        self.refused("dropout 1: must be from 0 to 255/256", attn.forward, q, k, v, dropout=1.0)

    def test_a_shared_prefix_is_found_in_the_page_table(self):
        q = attn.bf16(normal(0, 2, 4, 1, 64))
        pools = [attn.bf16(normal(n, 8, 64, 2, 64)) for n in (1, 2)]
        table = np.array([[0, 1], [0, 3]], np.int32)
        o = attn.paged_decode(q, *pools, table, [100, 90], step="07_paged/v8_shared_prefix")
        self.close(np.asarray(o), np.asarray(attn.paged_decode(q, *pools, table, [100, 90])), 2e-2)

    def test_describe(self):
        found = attn.describe("04_flash_v2/b8_deterministic")
        self.assertEqual((found["operation"], found["deterministic"]), ("backward", True))
        self.assertIn("dropout", attn.describe("04_flash_v2/v13_tuned")["features"])
        self.assertFalse(attn.describe("04_flash_v2/b7_tuned")["deterministic"])
        self.refused("step none: no such step", attn.describe, "none")
        self.assertEqual(len([attn.describe(s) for s in attn.steps()]), len(attn.steps()))

    def test_backward(self):
        q, dout = (attn.bf16(normal(n, 2, 4, 70, 64)) for n in range(2))
        k, v = (attn.bf16(normal(n, 2, 2, 90, 64)) for n in (2, 3))
        for options in ({"causal": True}, {"window": (20, 3)}, {"scale": 0.3}, {"softcap": 2.0}):
            o, lse = attn.forward(q, k, v, return_lse=True, **options)
            got = attn.backward(q, k, v, o, lse, dout, **options)
            for x, expected in zip(got, attn.reference(q, k, v, dout, **options)):
                self.close(x, expected, 0.12)

    def test_decode_and_quantised_cache(self):
        q, k, v = normal(0, 3, 4, 1, 64), normal(1, 3, 2, 200, 64), normal(2, 3, 2, 200, 64)
        lengths = [200, 1, 77]
        inputs = [attn.bf16(x) for x in (q, k, v)]
        expected = attn.reference(*inputs, lengths=lengths)
        self.close(attn.decode(*inputs, lengths), expected, 2e-2)
        for _ in range(2):  # the cache is quantised at each call
            self.close(attn.decode(*inputs, lengths, dtype="int8"), expected, 4e-2)
            inputs[1] = attn.bf16(k[::-1])
            expected = attn.reference(*inputs, lengths=lengths)

        inputs[1] = attn.bf16(k)
        for options in ({"causal": True}, {"window": (20, 0)}, {"scale": 0.5}, {"softcap": 3.0},
                        {"alibi": np.array([0.5, 0.25, 1, 0], np.float32)}):
            self.close(attn.decode(*inputs, lengths, **options),
                       attn.reference(*inputs, lengths=lengths, **options), 2e-2)

    def test_quantised_forward(self):
        q, k, v = (attn.bf16(normal(n, 1, 2, 128, 64)) for n in range(3))
        for dtype in ("int8", "e4m3"):
            for options in ({}, {"causal": True}, {"window": (9, 2)}, {"scale": 0.3}):
                self.close(attn.quantised_forward(q, k, v, dtype, **options),
                           attn.reference(q, k, v, **options), 0.2)

    def test_pages(self):
        rng = np.random.default_rng(3)
        keys, values = normal(1, 2, 64, 2, 64), normal(2, 2, 64, 2, 64)
        table = rng.permutation(8).reshape(2, 4).astype(np.int32)
        pools = [attn.bf16(np.full((8, 16, 2, 64), np.nan, np.float32)) for _ in range(2)]
        lengths = np.array([64, 37], np.int32)
        for new, pool in ((keys, pools[0]), (values, pools[1])):
            for b in range(2):
                for t in range(lengths[b] - 3):
                    pool.bits[table[b, t // 16], t % 16] = attn.bf16(new[b, t]).bits
        last = [np.stack([x[b, lengths[b] - 3:lengths[b]] for b in range(2)])
                for x in (keys, values)]
        attn.paged_append(*(attn.bf16(x) for x in last), *pools, table, lengths)
        q = attn.bf16(normal(0, 2, 4, 1, 64))
        whole = [np.asarray(attn.bf16(x)).swapaxes(1, 2) for x in (keys, values)]
        fewer = np.array([1, 20], np.int32)  # another schedule
        self.close(attn.paged_decode(q, *pools, table, fewer),
                   attn.reference(q, *whole, lengths=fewer), 2e-2)
        o, lse = attn.paged_decode(q, *pools, table, lengths, return_lse=True)
        self.close(o, attn.reference(q, *whole, lengths=lengths), 2e-2)
        for options in ({"window": (20, 0)}, {"scale": 0.5}, {"softcap": 3.0}):
            self.close(attn.paged_decode(q, *pools, table, lengths, **options),
                       attn.reference(q, *whole, lengths=lengths, **options), 2e-2)
        sinks = np.array([1, -np.inf, 2, 3], np.float32)
        sunk = attn.paged_decode(q, *pools, table, lengths, sinks=sinks)
        weight = 1 / (1 + np.exp(sinks[:, None] - lse))[..., None]  # of the keys, against the sink
        self.close(sunk, np.asarray(o) * weight, 2e-2)
        q = attn.bf16(normal(4, 2, 4, 3, 64))
        o = attn.paged_prefill(q, *pools, table, lengths)
        for b in range(2):
            one = [x[b:b + 1, :, :lengths[b]] for x in whole]
            expected = attn.reference(np.asarray(q)[b:b + 1], *one, causal=True)
            self.close(np.asarray(o)[b:b + 1], expected, 2e-2)
            flat = attn.bf16(np.asarray(q)[b].swapaxes(0, 1))
            packed = attn.paged_prefill(flat, *pools, table[b:b + 1], lengths[b:b + 1],
                                        cu_seqlens_q=[0, 3])
            self.close(np.asarray(packed).swapaxes(0, 1)[None], expected, 2e-2)

    def test_plans_are_bounded_and_freed(self):
        freed = []
        destroy = attn.library.library().attn_plan_destroy
        q = normal(0, 1, 1, 1, 4)
        attn.library.library().attn_plan_destroy = lambda plan: (freed.append(1), destroy(plan))
        try:
            for n in range(2 * attn.calls._MOST_PLANS):
                attn.forward(q, q, q, scale=1 + n / 1000, step="01_naive/v1_global")
        finally:
            attn.library.library().attn_plan_destroy = destroy
        self.assertGreater(len(freed), attn.calls._MOST_PLANS // 2)
        self.assertLessEqual(len(attn.calls._plans), attn.calls._MOST_PLANS)

    def test_threads(self):
        def work(seed):
            q, k, v = (attn.bf16(normal(seed + n, 1, 2, 40, 64)) for n in range(3))
            lengths = [40]
            for _ in range(4):  # a cache that is quantised at each call: prepare and run belong
                got = attn.decode(attn.bf16(np.asarray(q)[:, :, :1]), k, v, lengths, dtype="int8")
                self.close(got, attn.reference(np.asarray(q)[:, :, :1], k, v), 5e-2)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for result in [pool.submit(work, 10 * n) for n in range(8)]:
                result.result()

    def test_a_plan_is_for_its_lengths(self):
        fields = {"backend": attn.library.EMULATED, "batch": 2, "heads": 2, "kv_heads": 2,
                  "seqlen_q": 1, "seqlen_k": 64, "head_dim": 64}
        plans = [attn.calls.plan_of("decode", fields, {"lengths_k": np.array(lengths)})
                 for lengths in ([64, 5], [64, 5], [64, 6])]
        self.assertIs(plans[0], plans[1])
        self.assertIsNot(plans[0], plans[2])

    def test_check_tells_a_mistake_in_words(self):
        self.assertTrue(attn.check(naive))
        wrong = attn.check(lambda q, k, v, causal=False: naive(q, k, v))
        self.assertFalse(wrong)
        self.assertIn("only partially masked rows", str(wrong))
        scaled = attn.check(lambda q, k, v, causal=False: naive(q, k, v, causal, 1.0),
                            inputs=("random",))
        self.assertFalse(scaled)
        short = attn.check(lambda q, k, v: q[:, :, :1], problems=({},), inputs=("random",))
        self.assertIn("o: shape [1, 2, 1, 64]: must be [1, 2, 128, 64]", str(short))
        self.assertFalse(short)
        self.assertFalse(attn.check(naive, problems=()))  # nothing was checked
        none = attn.check(lambda q, k, v: None, problems=({},), inputs=("random",))
        self.assertIn("o: is a NoneType: must be an array", str(none))
        many = attn.check(lambda q, k, v, **_: q * 0)
        self.assertIn(f"... and {len(many.failures) - 4} more failures", str(many))
        self.refused("it must take causal=True", attn.check, lambda q, k, v: naive(q, k, v))
        self.refused("operation prefill: must be forward, backward", attn.check, naive, "prefill")

    def test_check_finds(self):
        def found(f, operation="forward", **options):
            self.assertFalse(attn.check(f, operation, inputs=("random",), **options))
        found(lambda q, k, v, causal=False: naive(q, np.concatenate(
            [k] * (q.shape[1] // k.shape[1]), 1), np.concatenate(
                [v] * (q.shape[1] // v.shape[1]), 1), causal))  # the wrong K/V head
        found(lambda q, k, v, causal=False: naive(q, k[:1].repeat(len(q), 0), v, causal))
        found(lambda q, k, v, causal=False: naive(q, k, v, causal, 0.125))
        found(lambda q, k, v, causal=False: () if causal else naive(q, k, v))
        found(lambda q, k, v, causal=False: naive(q, k, v, causal).reshape(-1))
        found(lambda q, k, v, causal=False: naive(q, k, v, causal) + 0j)
        found(lambda q, k, v, causal=False: (naive(q, k, v, causal), np.zeros(q.shape[:3])))
        found(lambda q, k, v, o, lse, do, causal=False:
              attn.reference(q, k, v, do, causal=causal)[:1], "backward")
        found(lambda q, k, v, lengths, causal=False: attn.reference(q, k, v, causal=causal),
              "decode", dtype="bf16")
        only_peaked = attn.check(lambda q, k, v, causal=False: naive(
            q, k, v, causal) * (1 + (np.abs(q).max() > 100)), inputs=("random", "peaked"))
        self.assertTrue(only_peaked.failures)

    def test_check_of_library_functions(self):
        for dtype in ("fp16", "bf16"):
            self.assertTrue(attn.check(attn.forward, dtype=dtype, inputs=("random", "needle")))
        self.assertTrue(attn.check(lambda *x, causal=False: attn.forward(
            *x, causal=causal, return_lse=True), dtype="bf16"))
        for operation in ("backward", "decode", "paged_decode"):
            report = attn.check(getattr(attn, operation), operation, dtype="bf16",
                                inputs=("random", "needle"))
            self.assertTrue(report, report)

    def test_defaults_of_which_suit_the_operation(self):
        for operation in attn.library.OPERATIONS:
            self.assertIn("best", attn.which(operation).values(), operation)

    def test_cost_counts_the_formula(self):
        found = attn.cost("forward", heads=8, seqlen_q=1024, head_dim=64, gpu="h200")
        self.assertEqual(found["useful_flop"], 4 * 64 * 8 * 1024 * 1024)
        self.assertEqual(found["gpu"], "NVIDIA H200 SXM")
        self.assertGreater(found["seconds"], found["useful_flop"] / 1e15)

    def test_time_needs_a_gpu(self):
        try:
            self.assertGreater(attn.time(lambda: None, repeats=1), 0)
        except attn.DeviceError as error:
            self.assertIn("times of the emulator mean nothing", str(error))

    def test_refusals(self):
        q = normal(0, 1, 2, 16, 64)
        b = attn.bf16(q)
        self.refused("q: is a list", attn.forward, [1.0], q, q)
        self.refused("q: type complex64", attn.forward, *[q.astype(np.complex64)] * 3)
        self.refused("attn.reference takes float64", attn.forward, *[q.astype(np.float64)] * 3)
        self.refused("k: type fp16, q fp32", attn.forward, q, q.astype(np.float16), q)
        self.refused("attn.bf16 makes bf16 of it", attn.forward, *[b.bits] * 3)
        self.refused("native byte order", attn.forward, *[q.astype(">f4")] * 3)
        self.refused("q: 3 dimensions", attn.forward, *[q[0]] * 3)
        self.refused("v: [1, 2, 8, 64]: must have the shape of k", attn.forward, q, q, q[:, :, :8])
        self.refused("negative ones are not accepted", attn.forward, q[:, :, ::-1], q, q)
        self.refused("stride 2 in the last dimension", attn.forward, q[..., ::2], q[..., ::2],
                     q[..., ::2])
        self.refused("all strides are 0", attn.forward,
                     *[np.broadcast_to(np.float32([1] * 64), (2, 2, 16, 64))] * 3)
        self.refused("no such step", attn.forward, q, q, q, step="09_none/v1")
        self.refused("this step takes fp16 and bf16", attn.forward, q, q, q,
                     step="06_flash_v3_hopper/v14_tuned", error=attn.Unsupported)
        self.refused("layout hbnd: must be bhnd or bnhd", attn.forward, q, q, q, layout="hbnd")
        for f in (attn.forward, attn.reference):
            self.refused("scale: 0: must not be 0", f, q, q, q, scale=0)
            self.refused("window: 3: must be (left, right)", f, q, q, q, window=3)
            self.refused("window: 1.5: must be an integer", f, q, q, q, window=(1.5, 0))
            self.refused("seed: -1: must be from 0", f, q, q, q, dropout=0.5, seed=-1)
        self.refused("window: 18446744073709551619", attn.forward, q, q, q, window=(2 ** 64 + 3, 0))
        self.refused("scale: 'a': must be a number", attn.forward, q, q, q, scale="a")
        self.refused("step: 7: must be a name", attn.forward, q, q, q, step=7)
        self.refused("stream: 'x': must be an integer", attn.forward, q, q, q, stream="x")
        self.refused("batch: '3': must be an integer", attn.which, batch="3")
        self.refused("shape [0, 2, 16, 64]: no dimension may be 0", attn.forward, q[:0], q[:0],
                     q[:0])
        self.refused("cu_seqlens_k: both must be given", attn.forward, b[0], b[0], b[0],
                     cu_seqlens_k=np.array([0, 2], np.int32))
        for begins in ([0, 900], [5, 2], [-5, 2], [0, 1], []):
            self.refused("cu_seqlens_q:", attn.forward, b[0], b[0], b[0],
                         cu_seqlens_q=np.array(begins, np.int32), cu_seqlens_k=[0, 2])
            self.refused("cu_seqlens_q:", attn.paged_prefill, b[0],
                         *[attn.bf16(normal(0, 4, 16, 2, 64))] * 2, np.array([[0, 1]], np.int32),
                         [20], cu_seqlens_q=np.array(begins, np.int32))
        self.refused("lengths: must be [1] integers", attn.reference, q, q, q, lengths=[5, 5])
        self.refused("lengths: must be [1] integers", attn.reference, q, q, q, lengths=[3.7])
        half = q[:, :, :1].astype(np.float16)
        self.refused("q: type fp16: must be bf16", attn.decode, half, half, half, [1], dtype="int8")
        self.refused("dtype fp8: must be int8", attn.decode, half, half, half, [1], dtype="fp8")
        self.refused("v13_tuned: dtype fp32: this step takes", attn.forward, q, q, q,
                     step="04_flash_v2/v13_tuned", error=attn.Unsupported)
        blocks = np.ones((1, 1, 1, 1), int)
        self.refused("block_size: must be a pair", attn.forward, b, b, b, block_mask=blocks,
                     block_size=128)
        self.refused("block_size: must be a pair", attn.forward, b, b, b, block_mask=blocks,
                     block_size=(1, 2, 3))
        self.refused("canvas: 8: must be (time", attn.forward, b, b, b, sliding_tiles=(8, 8, 8))
        pool = attn.bf16(normal(0, 4, 16, 2, 64))
        self.refused("lengths: 1: must count the 3 new tokens", attn.paged_append,
                     *[attn.bf16(normal(n, 1, 3, 2, 64)) for n in (1, 2)], pool, pool,
                     np.array([[0, 1]], np.int32), [1])
        self.refused("operation fwd: must be one of backward, decode", attn.steps, "fwd")
        self.refused("foo: no keyword of a problem", attn.check, naive, problems=[{"foo": 1}])
        self.refused("inputs random: must be a list", attn.check, naive, inputs="random")
        self.refused("step 04_flash_v2/b7_tuned: no step of forward", attn.which, "forward",
                     step="04_flash_v2/b7_tuned")
        self.assertEqual(list(attn.which("forward", step="04_flash_v2/v13_tuned")),
                         ["04_flash_v2/v13_tuned"])
        self.refused("host_lengths: differ from lengths", attn.decode, b[:, :, :1], b, b, [16],
                     host_lengths=[3])
        latent = attn.bf16(normal(0, 4, 16, 1, 576))
        self.refused("v_pages: must be None for k_pages [4, 16, 1, 576]", attn.paged_decode,
                     attn.bf16(normal(0, 1, 1, 1, 576)), latent, latent,
                     np.array([[0, 1]], np.int32), [20])
        apart = np.concatenate([pool, pool], axis=1)[:, ::2]
        self.refused("k_pages: strides", attn.paged_decode, b[:, :, :1], apart, apart,
                     np.array([[0, 1]], np.int32), [20])
        self.refused("v_pages: must be given", attn.paged_decode, b[:, :, :1],
                     attn.bf16(normal(0, 4, 16, 2, 64)), None, np.array([[0, 1]], np.int32), [20])
        self.refused("cu_seqlens_q: must ascend", attn.forward, b[0], b[0], b[0],
                     cu_seqlens_q=np.array([0, 9], np.int32),
                     cu_seqlens_k=np.array([0, 9], np.int32))
        out = np.zeros_like(q)
        self.assertIs(attn.forward(q, q, q, out=out), out)
        out.flags.writeable = False
        self.refused("o: is read-only", attn.forward, q, q, q, out=out)
        self.refused("lengths_k[0] is 17: must be from 0 to 16", attn.decode, b[:, :, :1], b, b,
                     np.array([17], np.int32))
        self.refused("page_table: indices from 0 to 5", attn.paged_decode, b[:, :, :1],
                     *[attn.bf16(normal(0, 4, 16, 2, 64))] * 2, np.array([[0, 5]], np.int32),
                     np.array([20], np.int32))
        self.refused("lengths: fp32 [1]: must be int32 [1]", attn.decode, b[:, :, :1], b, b,
                     np.float32([3]))
        self.refused("dtype int9", attn.quantised_forward, b, b, b, "int9")
        self.refused("inputs far", attn.check, naive, inputs=("far",))

    def test_bf16_rounds_to_even(self):
        x = np.array([1.0, 1.00390625, 1.01171875, np.inf, -np.inf, np.nan, 3.4e38], np.float32)
        got = np.asarray(attn.bf16(x))
        self.assertEqual(list(got[:3]), [1.0, 1.0, 1.015625])
        self.assertTrue(np.isinf(got[3:5]).all() and np.isnan(got[5]) and np.isinf(got[6]))
        nan = np.array([0x7F800001], np.uint32).view(np.float32)  # its upper bits are those of inf
        self.assertTrue(np.isnan(np.asarray(attn.bf16(nan))[0]))


unittest.main(verbosity=2)
