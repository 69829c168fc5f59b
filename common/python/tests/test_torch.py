"""attn with PyTorch: tensor paths, strides, gradients, FlashAttention's names. On the CPU, that is
in the emulator; what needs a GPU or a newer PyTorch is skipped, by name."""
import inspect
import pathlib
import sys
import unittest
from unittest import mock

try:
    import torch
except ImportError:
    print("skipped: PyTorch is not installed (python3-torch)")
    sys.exit(77)
import attn
import attn.flash_attn
import attn.flash_attn_interface
import attn.torch
from small_model import losses_of

GPU = torch.cuda.is_available()
COMPILES = hasattr(torch.library, "register_fake")


def normal(seed, *shape, dtype=torch.bfloat16, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def error(a, b):
    a, b = (torch.as_tensor(x).double().cpu() for x in (a, b))
    return (a - b).abs().max().item()


def plain_attention(q, k, v):
    s = q.float() @ k.float().transpose(2, 3) * q.shape[3] ** -0.5
    s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
    return (torch.softmax(s, 3).to(v.dtype).float() @ v.float()).to(v.dtype)


class Torch(unittest.TestCase):
    device = "cpu"
    training = {"steps": 25, "length": 24}

    def test_training(self):
        ours = losses_of(lambda *x: attn.torch.attention(*x, causal=True), self.device,
                         **self.training)
        theirs = losses_of(plain_attention, self.device, **self.training)
        self.assertLess((ours - theirs).abs().max().item(), 0.02)
        self.assertLess(ours[-5:].mean(), ours[0] - 0.2)  # it has learnt something

    def test_forward_and_types(self):
        for dtype, most in ((torch.float32, 1e-5), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)):
            q, k, v = (normal(n, 1, 2, 70, 64, dtype=dtype, device=self.device) for n in range(3))
            o = attn.forward(q, k, v, causal=True)
            self.assertEqual((o.dtype, o.device, o.shape), (q.dtype, q.device, q.shape))
            self.assertLess(error(o, attn.reference(q, k, v, causal=True)), most)

    def test_gradients_against_float64(self):
        for causal in (False, True):
            q, k, v = (normal(n, 2, 2, 40, 64, device=self.device).requires_grad_()
                       for n in range(3))
            dout = normal(3, 2, 2, 40, 64, device=self.device)
            attn.torch.attention(q, k, v, causal=causal).backward(dout)
            expected = attn.reference(q, k, v, dout, causal=causal)
            for x, want in zip((q, k, v), expected):
                self.assertLess(error(x.grad, want), 6e-2)

    def test_gradients_with_dropout(self):
        q, k, v = (normal(n, 1, 2, 40, 64, device=self.device).requires_grad_() for n in range(3))
        dout = normal(3, 1, 2, 40, 64, device=self.device)
        out = attn.torch.attention(q, k, v, dropout=0.25, seed=9)
        self.assertLess(error(out, attn.reference(q, k, v, dropout=0.25, seed=9)), 3e-2)
        out.backward(dout)
        for x, want in zip((q, k, v), attn.reference(q, k, v, dout, dropout=0.25, seed=9)):
            self.assertLess(error(x.grad, want), 6e-2)

    def test_options_reach_both_passes(self):
        q = normal(0, 1, 4, 40, 64, device=self.device).requires_grad_()
        k, v = (normal(n, 1, 2, 60, 64, device=self.device).requires_grad_() for n in (1, 2))
        dout = normal(3, 1, 4, 40, 64, device=self.device)
        for options in ({"window": (9, 2)}, {"softcap": 2.0}, {"scale": 0.3}):
            for x in (q, k, v):
                x.grad = None
            out = attn.torch.attention(q, k, v, **options)
            self.assertLess(error(out, attn.reference(q, k, v, **options)), 3e-2)
            out.backward(dout)
            for x, want in zip((q, k, v), attn.reference(q, k, v, dout, **options)):
                self.assertLess(error(x.grad, want), 0.12)
        with self.assertRaisesRegex(attn.InvalidValue, "step 04_flash_v2/none: no such step"):
            attn.torch.attention(q, k, v, backward_step="04_flash_v2/none").sum().backward()

    def test_deterministic(self):
        q, k, v = (normal(n, 1, 2, 300, 64, device=self.device).requires_grad_() for n in range(3))

        def gradients(**options):  # whether they had to be deterministic, and what they are
            out = attn.torch.attention(q, k, v, causal=True, **options)
            with mock.patch.object(attn.operations, "backward",
                                   wraps=attn.operations.backward) as backward:
                found = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            return backward.call_args.kwargs["deterministic"], found

        if q.is_cuda and torch.cuda.get_device_capability() != (9, 0):
            self.skipTest("b10 needs compute capability 9.0")
        b10 = "06_flash_v3_hopper/b10_deterministic"
        device = "gpu" if q.is_cuda else "emulated"
        self.assertEqual(attn.which("backward", seqlen_q=300, causal=True, device=device,
                                    deterministic=True)[b10], "best")
        asked, found = gradients(deterministic=True)
        self.assertTrue(asked)
        _, named = gradients(backward_step=b10)
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(found, named)))
        with self.assertRaisesRegex(attn.Unsupported, "b7_tuned: deterministic 1: results differ"):
            gradients(backward_step="04_flash_v2/b7_tuned", deterministic=True)
        self.assertFalse(gradients()[0])
        before = (torch.are_deterministic_algorithms_enabled(),
                  torch.is_deterministic_algorithms_warn_only_enabled())
        try:
            torch.use_deterministic_algorithms(True)
            self.assertTrue(gradients()[0])
            self.assertFalse(gradients(deterministic=False)[0])
            torch.use_deterministic_algorithms(True, warn_only=True)
            with self.assertWarnsRegex(UserWarning, "attn: gradients may differ"):
                self.assertFalse(gradients()[0])
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])

    def test_alibi_and_second_derivatives(self):
        q, k, v = (normal(n, 1, 2, 40, 64, device=self.device) for n in range(3))
        slopes = torch.tensor([0.5, 0.25], device=self.device)
        self.assertLess(error(attn.torch.attention(q, k, v, alibi=slopes),
                              attn.reference(q, k, v, alibi=slopes)), 3e-2)
        q.requires_grad_()
        with self.assertRaisesRegex(attn.Unsupported, "alibi: no step has gradients"):
            attn.torch.attention(q, k, v, alibi=slopes)
        for f in (attn.torch.attention, attn.torch.reference):
            for loss in (f(q, k, v).pow(2).sum(), f(q, k, v).sum()):
                with self.assertRaisesRegex(attn.Unsupported, "no second derivatives"):
                    torch.autograd.grad(loss, q, create_graph=True)

    def test_gradcheck_of_the_reference(self):
        q, k, v = (normal(n, 1, 2, 5, 8, dtype=torch.float64).requires_grad_() for n in range(3))
        for options in ({}, {"causal": True}, {"softcap": 2.0}, {"window": (1, 1)},
                        {"dropout": 0.5, "seed": 3}):
            self.assertTrue(torch.autograd.gradcheck(
                lambda q, k, v: attn.torch.reference(q, k, v, **options), (q, k, v)))

    def test_a_repeated_call_has_its_own_tensors_and_checks(self):
        from attn.calls import _repeated as repeated
        calls = [[normal(3 * c + n, 1, 2, 33, 64, dtype=torch.float32, device=self.device)
                  for n in range(3)] for c in range(3)]
        outputs = [attn.forward(*tensors) for tensors in calls]
        for tensors, o in zip(calls, outputs):
            self.assertLess(error(o, attn.reference(*tensors)), 1e-5)
        count = len(repeated)
        q, k, v = calls[0]
        moved = torch.empty(q.numel() + 1, device=self.device)[1:].view_as(q).copy_(q)
        self.assertLess(error(attn.forward(moved, k, v), outputs[0]), 1e-6)
        negative = torch.complex(k, q).conj().imag  # -q, as a view that is not computed
        with self.assertRaisesRegex(attn.InvalidValue, "lazy conjugate or negative"):
            attn.forward(negative, k, v)
        self.assertEqual(len(repeated), count)  # a tensor that is not aligned is checked each time
        with self.assertRaisesRegex(attn.InvalidValue, "q: requires a gradient"):
            attn.forward(q.clone().requires_grad_(), k, v)
        for options in ({"causal": True}, {"scale": 0.3}, {"window": (5, 5)}):
            for _ in range(2):
                self.assertLess(error(attn.forward(q, k, v, **options),
                                      attn.reference(q, k, v, **options)), 1e-5)
        self.assertEqual(attn.forward(q, k, v, layout="bnhd").shape, q.shape)
        with self.assertRaisesRegex(attn.InvalidValue, "no such step"):
            attn.forward(q, k, v, step="none")
        with self.assertRaisesRegex(attn.InvalidValue, "cu_seqlens_q, cu_seqlens_k: both"):
            attn.forward(q, k, v, cu_seqlens_k=torch.tensor([0, 33], dtype=torch.int32))

    def test_strides_of_views(self):
        x = normal(0, 2, 50, 3, 2, 64, device=self.device)  # [B, N, 3, H, d]
        q, k, v = x.unbind(2)
        expected = attn.reference(*(t.transpose(1, 2) for t in (q, k, v)))
        self.assertLess(error(attn.forward(q, k, v, layout="bnhd").transpose(1, 2), expected), 2e-2)
        o = attn.forward(*(t.transpose(1, 2) for t in (q, k, v)))
        self.assertTrue(o.is_contiguous())
        self.assertLess(error(o, expected), 2e-2)

    def test_gradient_of_a_sum_is_expanded(self):
        q, k, v = (normal(n, 1, 2, 33, 64, device=self.device).requires_grad_() for n in range(3))
        attn.torch.attention(q, k, v).sum().backward()
        self.assertLess(error(v.grad, attn.reference(q, k, v, torch.ones_like(q))[2]), 6e-2)

    def test_lse_alone_has_no_gradient(self):
        q, k, v = (normal(n, 1, 2, 33, 64, device=self.device).requires_grad_() for n in range(3))
        _, lse = attn.torch.attention(q, k, v, return_lse=True)
        self.assertFalse(lse.requires_grad)

    def test_operators(self):
        q, k, v = (normal(n, 1, 2, 33, 64, device=self.device) for n in range(3))
        options = (0.0, 0.0, False, -1, -1, "bhnd", "")
        o, lse = torch.ops.attn.forward(q, k, v, None, None, None, 0, 0, 0.0, 0, *options)
        self.assertLess(error(o, attn.reference(q, k, v)), 2e-2)
        for t in torch.ops.attn.backward(q, k, v, o, lse, q, None, None, None, 0, 0, 0.0, 0,
                                         *options):
            self.assertEqual(t.shape, q.shape)

    def test_shapes_are_known_without_running(self):
        options = (0.0, 0.0, False, -1, -1)
        q, k = normal(0, 2, 30, 4, 64), normal(1, 2, 50, 2, 64)  # [B, N, H, d]
        begins = torch.tensor([0, 20, 30], dtype=torch.int32)
        begins_k = torch.tensor([0, 20, 50], dtype=torch.int32)
        lengths = torch.tensor([50, 7], dtype=torch.int32)
        table = torch.arange(8, dtype=torch.int32).view(2, 4)
        pool, latent = normal(2, 8, 16, 2, 64), normal(3, 8, 64, 1, 576)
        for name, arguments in (
                ("forward", (q, k, k, None, None, None, 0, 0, 0.0, 0, *options, "bnhd", "")),
                ("forward", (q.transpose(1, 2), *[k.transpose(1, 2)] * 2, None, None, None, 0, 0,
                             0.0, 0, *options, "bhnd", "")),
                ("forward", (q[0], k[0], k[0], None, begins, begins_k, 20, 30, 0.0, 0, *options,
                             "bnhd", "")),
                ("backward", (q, k, k, q, torch.zeros(2, 4, 30), q, None, None, None, 0, 0,
                              0.0, 0, *options, "bnhd", "")),
                ("quantised_forward", (q, k, k, "int8", 0.0, False, -1, -1, "bnhd", "")),
                ("decode", (q[:, :1], k, k, lengths, None, *options, "bnhd", "")),
                ("paged_decode", (q[:, :1], pool, pool, table, lengths, *options, "bnhd", "")),
                ("paged_decode", (normal(4, 2, 1, 16, 576), latent, None, table, lengths, *options,
                                  "bnhd", ""))):
            found = getattr(torch.ops.attn, name)(*arguments)
            expected = attn.torch.SHAPES[name](*arguments)
            self.assertEqual([(x.shape, x.dtype, x.stride()) for x in found],
                             [(x.shape, x.dtype, x.stride()) for x in expected], name)

    def test_refusals(self):
        q = normal(0, 1, 2, 16, 64, device=self.device)
        for line, arguments in (
                ("q: requires a gradient", (q.clone().requires_grad_(), q, q)),
                ("q: type torch.complex64", (q.to(torch.complex64),) * 3),
                ("q: layout torch.sparse_coo", (q.float().to_sparse(), q, q)),
                ("q: device meta", (q.to("meta"), q, q)),
                ("overlap rows of 64", (q[:, :1].expand(1, 2, 16, 64), q, q)),
                ("lazy conjugate or negative",
                 (q.to(torch.complex64).conj().imag, q.float(), q.float()))):
            with self.subTest(line), self.assertRaises(attn.InvalidValue) as caught:
                attn.forward(*arguments)
            self.assertIn(line, str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))

    def test_strides_of_more_than_31_bits(self):
        far = torch.empty(2 ** 31 + 128, dtype=torch.bfloat16)  # only its ends are touched
        x = torch.as_strided(far, (2, 1, 1, 64), (2 ** 31, 64, 64, 1))
        x.copy_(normal(0, 2, 1, 1, 64))
        self.assertLess(error(attn.forward(x, x, x), attn.reference(x, x, x)), 2e-2)

    def test_names_of_flash_attention(self):
        recorded = pathlib.Path(__file__).with_name("signatures.txt").read_text().splitlines()
        for line in recorded:
            name, _, parameters = line.partition("(")
            module, _, function = name.rpartition(".")
            ours = inspect.signature(getattr(getattr(attn, module), function))
            plain = ours.replace(parameters=[p.replace(annotation=p.empty)
                                             for p in ours.parameters.values()])
            self.assertEqual(str(plain), "(" + parameters)

    def test_flash_attn(self):
        fa = attn.flash_attn
        q, k, v = (normal(n, 2, 40, 2, 64, device=self.device).requires_grad_() for n in range(3))
        turned = [x.detach().transpose(1, 2) for x in (q, k, v)]
        expected = attn.reference(*turned, causal=True)
        out, lse, matrix = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        self.assertLess(error(out.transpose(1, 2), expected), 2e-2)
        self.assertEqual((lse.shape, matrix), ((2, 2, 40), None))
        out.sum().backward()
        self.assertLess(error(fa.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), causal=True),
                              out), 1e-6)
        self.assertLess(error(fa.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True),
                              out), 1e-6)
        for options, same in (({"window_size": (9, 3)}, {"window": (9, 3)}),
                              ({"softmax_scale": 0.3}, {"scale": 0.3}), ({"softcap": 3.0},) * 2):
            self.assertLess(error(fa.flash_attn_func(q, k, v, **options).transpose(1, 2),
                                  attn.reference(*turned, **same)), 2e-2)
        slopes = torch.tensor([0.5, 0.25], device=self.device)
        with torch.no_grad():
            self.assertLess(error(
                fa.flash_attn_func(q, k, v, alibi_slopes=slopes).transpose(1, 2),
                attn.reference(*turned, alibi=slopes)), 2e-2)
        for deterministic in (True, False):
            out_d = fa.flash_attn_func(q, k, v, deterministic=deterministic)
            self.assertEqual(out_d.grad_fn.options[-1], deterministic or None)
        begins = torch.tensor([0, 40, 80], dtype=torch.int32, device=self.device)
        flat = [x.detach().flatten(0, 1) for x in (q, k, v)]
        packed = fa.flash_attn_varlen_func(*flat, begins, begins, 40, 40, causal=True)
        self.assertLess(error(packed.view_as(out), out), 2e-2)
        one = fa.flash_attn_varlen_qkvpacked_func(torch.stack(flat, 1), begins, 40, causal=True)
        self.assertLess(error(one, packed), 1e-6)
        two = fa.flash_attn_varlen_kvpacked_func(flat[0], torch.stack(flat[1:], 1), begins, begins,
                                                 40, 40, causal=True)
        self.assertLess(error(two, packed), 1e-6)
        torch.manual_seed(5)
        first = fa.flash_attn_func(q, k, v, dropout_p=0.5)
        second = fa.flash_attn_func(q, k, v, dropout_p=0.5)
        torch.manual_seed(5)
        self.assertTrue(torch.equal(first, fa.flash_attn_func(q, k, v, dropout_p=0.5)))
        self.assertFalse(torch.equal(first, second))
        with self.assertRaisesRegex(attn.Unsupported, "block_table: must be None"):
            fa.flash_attn_varlen_func(*flat, begins, begins, 40, 40, block_table=begins)

    def test_flash_attn_interface(self):
        fa = attn.flash_attn_interface
        q, k, v = (normal(n, 1, 40, 2, 64, device=self.device) for n in range(3))
        out, lse = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        self.assertLess(error(out, attn.flash_attn.flash_attn_func(q, k, v, causal=True)), 1e-6)
        gqa = torch.cat([q, k[:, :, :1], v[:, :, :1]], 2)
        self.assertEqual(fa.flash_attn_qkvpacked_func(gqa, num_heads_q=2).shape, q.shape)
        with self.assertRaisesRegex(attn.Unsupported, "attention_chunk"):
            fa.flash_attn_func(q, k, v, attention_chunk=64)

    def test_kv_cache(self):
        for fa, table in ((attn.flash_attn, "block_table"),
                          (attn.flash_attn_interface, "page_table")):
            q, k, v = (normal(n, 2, 1, 2, 64, device=self.device) for n in range(3))
            kc, vc = (normal(n, 2, 64, 2, 64, device=self.device) for n in (3, 4))
            filled = torch.tensor([30, 9], dtype=torch.int32, device=self.device)
            pools = [x.reshape(8, 16, 2, 64).clone() for x in (kc, vc)]
            out = fa.flash_attn_with_kvcache(q, kc, vc, k, v, cache_seqlens=filled)
            self.assertTrue(torch.equal(kc[0, 30], k[0, 0]) and torch.equal(vc[1, 9], v[1, 0]))
            expected = attn.reference(*(x.transpose(1, 2) for x in (q, kc, vc)),
                                      lengths=filled.cpu() + 1)
            self.assertLess(error(out.transpose(1, 2), expected), 2e-2)
            pages = torch.arange(8, dtype=torch.int32, device=self.device).view(2, 4)
            paged = fa.flash_attn_with_kvcache(q, *pools, k, v, cache_seqlens=filled,
                                               **{table: pages})
            self.assertLess(error(paged, out), 2e-2)
            self.assertTrue(torch.equal(pools[0][1, 14], k[0, 0]))
            for options, same in (({"causal": True},) * 2, ({"softcap": 3.0},) * 2,
                                  ({"window_size": (5, 0)}, {"window": (5, 0)}),
                                  ({"softmax_scale": 0.3}, {"scale": 0.3})):
                rows = normal(5, 2, 3, 2, 64, device=self.device)
                turned = [x.transpose(1, 2) for x in (rows, kc, vc)]
                want = attn.reference(*turned, lengths=filled.cpu(), **same)
                self.assertLess(error(fa.flash_attn_with_kvcache(
                    rows, kc, vc, cache_seqlens=filled, **options).transpose(1, 2), want), 2e-2)
            before = kc.clone()
            for wrong in ({"q": q.float()}, {"cache_seqlens": 64}, {"cache_seqlens": -1},
                          {"k": k[..., :32]}):
                given = {"q": q, "k_cache": kc, "v_cache": vc, "k": 2 * k, "v": v,
                         "cache_seqlens": filled, **wrong}
                if self.device == "cpu" or "cache_seqlens" not in wrong:
                    with self.assertRaises(attn.InvalidValue):
                        fa.flash_attn_with_kvcache(**given)
            self.assertTrue(torch.equal(kc, before))

    def test_repeated_decoding(self):
        """On a GPU lengths may change between calls. On the CPU plans know them: there decoding is
        repeated in this test alone, with equal ones."""
        from attn import calls, operations
        lengths = [torch.tensor([90, 33], dtype=torch.int32, device=self.device),
                   torch.tensor([90, 33] if self.device == "cpu" else [1, 96], dtype=torch.int32,
                                device=self.device)]
        pages = torch.arange(6, dtype=torch.int32, device=self.device).view(2, 3).flip(1)
        kept = len(calls._repeated)
        with mock.patch.object(operations, "_on_gpu", lambda x: isinstance(x, torch.Tensor)):
            for n, used in enumerate((*lengths, lengths[0])):
                q, k, v = (normal(3 * n + i, 2, heads, rows, 64, device=self.device)
                           for i, (heads, rows) in enumerate(((4, 1), (2, 96), (2, 96))))
                for causal in (False, True):
                    want = attn.reference(q, k, v, lengths=used.cpu(), causal=causal)
                    o, lse = attn.decode(q, k, v, used, causal=causal, return_lse=True)
                    self.assertLess(error(o, want), 2e-2)
                    self.assertEqual(lse.shape, (2, 4, 1))
                    self.assertTrue(torch.equal(attn.decode(q, k, v, used, causal=causal), o))
                for options in ({"window": (5, 0)}, {"scale": 0.3}, {"softcap": 3.0},
                                {"scale": torch.tensor(0.2)}, {"scale": torch.tensor(0.4)}):
                    want = attn.reference(q, k, v, lengths=used.cpu(), **options)
                    for _ in range(2):
                        self.assertLess(error(attn.decode(q, k, v, used, **options), want), 2e-2)
                pools = [x.view(2, 2, 3, 32, 64).permute(0, 2, 3, 1, 4).flip(1).reshape(
                    6, 32, 2, 64).contiguous() for x in (k, v)]
                paged = attn.paged_decode(q, *pools, pages, used)
                self.assertLess(error(paged, attn.reference(q, k, v, lengths=used.cpu())), 2e-2)
        self.assertEqual(len(calls._repeated), kept + 6)

    def test_an_option_that_is_changed_in_place(self):
        q, k, v = (normal(n, 1, 2, 40, 64, device=self.device) for n in range(3))
        scale = torch.tensor(0.1)
        for value in (0.1, 1.0):
            scale.fill_(value)
            self.assertLess(error(attn.forward(q, k, v, scale=scale),
                                  attn.reference(q, k, v, scale=value)), 3e-2)

    def test_calls_of_graphs_are_not_forgotten(self):
        from attn import calls
        x = normal(0, 1, 2, 40, 64, device=self.device)
        with mock.patch.object(calls, "_MOST_PLANS", 2), \
                mock.patch.object(calls, "_repeated", type(calls._repeated)()):
            attn.forward(x, x, x, scale=0.5)
            (key, kept), = calls._repeated.items()
            with mock.patch.object(kept._plan, "of_graphs", ["a workspace"]):
                for n in range(4):
                    attn.forward(x, x, x, scale=0.6 + n)
                self.assertIs(calls._repeated.get(key), kept)
                self.assertEqual(len(calls._repeated), 2)

    @unittest.skipUnless(COMPILES, "needs PyTorch 2.4: opcheck and torch.compile")
    def test_compile(self):
        q, k, v = (normal(n, 1, 2, 64, 64, device=self.device) for n in range(3))
        options = (0.0, 0.0, False, -1, -1, "bhnd", "")
        torch.library.opcheck(torch.ops.attn.forward.default,
                              (q, k, v, None, None, None, 0, 0, 0.0, 0, *options))
        compiled = torch.compile(lambda *x: attn.torch.attention(*x, causal=True) * 2,
                                 fullgraph=True)
        for _ in range(2):
            inputs = [x.clone().requires_grad_() for x in (q, k, v)]
            out = compiled(*inputs)
            out.sum().backward()
            self.assertLess(error(out, 2 * attn.forward(q, k, v, causal=True)), 1e-2)
            self.assertIsNotNone(inputs[1].grad)


@unittest.skipUnless(GPU, "needs a GPU")
class TorchOnGpu(Torch):
    device = "cuda"
    training = {"steps": 100, "length": 256}

    def test_cuda_graph(self):
        q, k, v = (normal(n, 2, 4, 256, 128, device="cuda") for n in range(3))
        attn.forward(q, k, v, causal=True)  # prepares a workspace
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = attn.forward(q, k, v, causal=True)
        q.copy_(normal(7, 2, 4, 256, 128))
        graph.replay()
        torch.cuda.synchronize()
        self.assertLess(error(o, attn.reference(q, k, v, causal=True)), 3e-2)

    def test_two_streams(self):
        inputs = [[normal(3 * s + n, 2, 4, 512, 128, device="cuda") for n in range(3)]
                  for s in range(2)]
        torch.cuda.synchronize()
        streams, outputs = [torch.cuda.Stream() for _ in range(2)], []
        for _ in range(20):
            for stream, tensors in zip(streams, inputs):
                with torch.cuda.stream(stream):
                    outputs.append(attn.forward(*tensors, causal=True))
        torch.cuda.synchronize()
        for n, o in enumerate(outputs):
            self.assertTrue(torch.equal(o, outputs[n % 2]))

    def test_two_devices_are_refused(self):
        q = normal(0, 1, 2, 16, 64)
        with self.assertRaisesRegex(attn.InvalidValue, "k: is on cpu, q on cuda:0"):
            attn.forward(q.cuda(), q, q)


unittest.main(verbosity=2)
