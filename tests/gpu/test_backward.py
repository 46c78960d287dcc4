"""The gradients over kernels, shapes, data and strides, held to the bar of
tests/support/compare.py.
"""
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flash_attn3 import flash_attn_func

from tests.gpu.common import spoil_allocator
from tests.support import compare, plain
from tests.support.cases import GRADIENT_KINDS, Case
from tests.support.layouts import COPIED, DIRECT, Layout

PARTS = 4    # tests.record runs so many processes

KINDS = GRADIENT_KINDS
every_kind = pytest.mark.parametrize('kind', KINDS, ids=str)
one_dtype = pytest.mark.parametrize('kind', [kind for kind in KINDS if kind.dtype == 'bf16'],
                                    ids=str)
NAMES = ('dq', 'dk', 'dv')


def gradients(inputs: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None = None,
              **arguments) -> tuple[Tensor, ...]:
    """Gradients of flash_attn_func, by autograd; dlse: gradient of its LSE."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = flash_attn_func(*leaves, return_attn_probs=True, **arguments)
    outputs, given = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    return torch.autograd.grad(outputs, leaves, given)


def check(case: Case, device: torch.device, dout_scale: float = 1.0, with_lse: bool = False,
          layout: Layout | None = None) -> None:
    """Runs a case and holds its three gradients to the bar."""
    inputs = case.tensors(device)
    generator = torch.Generator(device).manual_seed(case.seed + 1)
    dout = torch.randn(inputs[0].shape, generator=generator, device=device) * dout_scale
    dout = dout.to(inputs[0].dtype)
    dlse = None
    if with_lse:
        batch, seqlen, heads, _ = inputs[0].shape
        dlse = torch.randn((batch, heads, seqlen), generator=generator, device=device) * dout_scale
    used = [x if layout is None else layout.place(x) for x in (*inputs, dout)]
    got = gradients(used[:3], used[3], dlse, causal=case.causal)
    check_gradients(got, inputs, dout, dlse, case)


def check_gradients(got: tuple[Tensor, ...], inputs: tuple[Tensor, ...], dout: Tensor,
                    dlse: Tensor | None, case: Case) -> None:
    wide = [x.double() for x in inputs]
    wide_dlse = None if dlse is None else dlse.double()
    ref = plain.backward(dout.double(), wide_dlse, *wide, case.softmax_scale, case.causal)
    pt = plain.backward(dout, dlse, *inputs, case.softmax_scale, case.causal)
    floors = compare.cancellation_floors(inputs, dout, case.softmax_scale)
    for name, *tensors in zip(NAMES, got, ref, pt):
        assert tensors[0].shape == tensors[1].shape and tensors[0].dtype == inputs[0].dtype
        compare.check_close(*tensors, name, floors[name])


SHAPES = [(1, 1), (64, 128), (239, 1), (799, 3), (113, 203), (108, 256), (1023, 1024), (1024, 1023),
          (128, 128), (129, 127), (65, 321), (300, 10), (10, 300), (513, 512)]


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('seqlens', [(113, 203), (256, 256)], ids=str)
def test_smoke(seqlens, kind, device):
    check(Case(*seqlens, heads_q=6, heads_k=2).of(kind), device)


@every_kind
@pytest.mark.parametrize('heads', [(4, 4), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize('seqlens', SHAPES, ids=str)
def test_shapes(seqlens, heads, kind, device):
    check(Case(*seqlens, heads_q=heads[0], heads_k=heads[1]).of(kind), device)


@one_dtype
@pytest.mark.parametrize('remainder', range(128))
def test_every_remainder(remainder, kind, device):
    """Remainders of queries and of keys, in opposite directions."""
    check(Case(128 + remainder, 384 - remainder, batch=1, heads_q=2, heads_k=1).of(kind), device)


@every_kind
@pytest.mark.parametrize('seqlens', [(1, 8192), (4096, 64), (2000, 4096), (4096, 4096)], ids=str)
def test_long(seqlens, kind, device):
    check(Case(*seqlens, batch=1, heads_q=2, heads_k=1).of(kind), device)


@pytest.mark.parametrize('causal', [False, True], ids=['full', 'causal'])
@pytest.mark.parametrize('dtype', ['bf16', 'fp16'])
@pytest.mark.parametrize('head_dim', [*range(8, 257, 8), 264, 320, 392, 504, 512])
def test_every_head_dim(head_dim, dtype, causal, device):
    check(Case(200, 333, heads_k=2, head_dim=head_dim, dtype=dtype, causal=causal), device)


@every_kind
@pytest.mark.parametrize('seqlens', [(0, 7), (7, 0), (0, 0)], ids=str)
def test_empty(seqlens, kind, device):
    check(Case(*seqlens).of(kind), device)
    check(Case(5, 7, batch=0).of(kind), device)


# ------------------------------------------------------------------------------------------- data
@one_dtype
@pytest.mark.parametrize('less', [6.0, 12.0])
def test_an_lse_that_is_too_small(less, kind, device):
    """As another forward may have it, one in FP8: P beyond 1 makes gradients large, not NaN."""
    case = Case(65, 130, heads_q=2, heads_k=1).of(kind)
    inputs = case.tensors(device)
    out, lse = flash_attn_func(*inputs, causal=case.causal, return_attn_probs=True)
    dout = torch.randn_like(out)
    exact, large = (torch.ops.flash_attn3.bwd(dout, None, *inputs, out, x, case.softmax_scale,
                                              case.causal, False) for x in (lse, lse - less))
    assert all(x.isfinite().all() for x in large)
    if less == 6:
        torch.testing.assert_close(large[2].float() / math.exp(less), exact[2].float(), rtol=0.02,
                                   atol=0.02)


@every_kind
@pytest.mark.parametrize('logit_std', [1, 3, 10, 30])
@pytest.mark.parametrize('data', ['normal', 'onehot'])
def test_spiky_logits(data, logit_std, kind, device):
    check(Case(333, 700, heads_k=2, logit_std=logit_std, data=data).of(kind), device)


@every_kind
@pytest.mark.parametrize('dout_scale', [1e-3, 30.0, 1e3])
def test_dout_scale(dout_scale, kind, device):
    check(Case(200, 333).of(kind), device, dout_scale=dout_scale)


@every_kind
@pytest.mark.parametrize('seqlens', [(113, 203), (300, 10), (512, 512)], ids=str)
def test_lse_gradient(seqlens, kind, device):
    check(Case(*seqlens, heads_q=6, heads_k=2).of(kind), device, with_lse=True)


@one_dtype
def test_lse_gradient_alone(kind, device):
    case = Case(113, 203).of(kind)
    inputs = case.tensors(device)
    leaves = [x.clone().requires_grad_() for x in inputs]
    lse = flash_attn_func(*leaves, causal=case.causal, return_attn_probs=True)[1]
    got = torch.autograd.grad(lse.sum(), leaves)
    check_gradients(got, inputs, torch.zeros_like(inputs[0]), torch.ones_like(lse), case)


@every_kind
@pytest.mark.parametrize('seqlen', [64, 192, 320, 65])
def test_padded_keys_with_a_very_low_lse_stay_finite(seqlen, kind, device):
    """All scores far below zero: a key past the end, of score 0, would have P = exp(-LSE) = inf."""
    case = Case(seqlen, seqlen, batch=1).of(kind)
    q, k, v = case.tensors(device)
    q = torch.full_like(q, 4.0)
    k = torch.full_like(k, -4.0) + 0.01 * k
    dout = torch.randn_like(q)
    got = gradients((q, k, v), dout, causal=case.causal)
    assert all(x.isfinite().all() for x in got)
    check_gradients(got, (q, k, v), dout, None, case)


# ---------------------------------------------------------------------------------------- strides
@one_dtype
@pytest.mark.parametrize('layout', DIRECT + COPIED, ids=str)
def test_strides(layout, kind, device):
    check(Case(130, 200, heads_q=6, heads_k=2).of(kind), device, layout=layout)


@every_kind
def test_dout_of_a_sum_has_stride_zero(kind, device):
    case = Case(130, 200).of(kind)
    inputs = case.tensors(device)
    leaves = [x.clone().requires_grad_() for x in inputs]
    flash_attn_func(*leaves, causal=case.causal).sum().backward()
    check_gradients(tuple(x.grad for x in leaves), inputs, torch.ones_like(inputs[0]), None, case)


@one_dtype
@pytest.mark.parametrize('expanded', [(0,), (1,), (2,), (0, 1, 2, 3)], ids=str)
def test_expanded_dout(expanded, kind, device):
    case = Case(130, 200).of(kind)
    inputs = case.tensors(device)
    dout = torch.randn_like(inputs[0])
    for dim in expanded:
        dout = dout.narrow(dim, 0, 1)
    dout = dout.expand_as(inputs[0])
    got = gradients(inputs, dout, causal=case.causal)
    check_gradients(got, inputs, dout.contiguous(), None, case)


# --------------------------------------------------------------------------------------- workspace
@every_kind
@pytest.mark.parametrize('seqlens', [(333, 401), (401, 333), (333, 1025), (130, 4096), (130, 4097)],
                         ids=str)
def test_what_the_workspace_holds_does_not_matter(seqlens, kind, device):
    """The allocator returns memory full of NaN: gradients and workspace are written whole, whether
    dQ is zeroed or stored by the first to add to it (BwdConfig::stored_keys).
    """
    case = Case(*seqlens, heads_q=6, heads_k=2).of(kind)
    inputs = case.tensors(device)
    dout = torch.randn_like(inputs[0])
    spoil_allocator(device)
    got = gradients(inputs, dout, causal=case.causal)
    check_gradients(got, inputs, dout, None, case)


@one_dtype
def test_dk_and_dv_repeat_bitwise(kind, device):
    """No atomics in them; dQ sums up in any order."""
    case = Case(700, 900, heads_q=6, heads_k=2).of(kind)
    inputs = case.tensors(device)
    dout = torch.randn_like(inputs[0])
    first = gradients(inputs, dout, causal=case.causal)
    for _ in range(20):
        again = gradients(inputs, dout, causal=case.causal)
        for name, a, b in list(zip(NAMES, again, first))[1:]:
            compare.check_equal(a, b, name)


# ----------------------------------------------------------------------------------------- errors
BAD_CALLS = {
    'dout shape': ('dout', lambda x: x[:, 1:], 'expected dout to have the shape'),
    'dout dtype': ('dout', lambda x: x.float(),
                   r'expected dout.dtype to be that of q, bfloat16, got float32'),
    'out dtype': ('out', lambda x: x.half(),
                  r'expected out.dtype to be that of q, bfloat16, got float16'),
    'lse shape': ('lse', lambda x: x.transpose(1, 2), 'expected lse to have the shape'),
    'lse dtype': ('lse', lambda x: x.double(), r'expected lse.dtype to be float32, got float64'),
    'dlse shape': ('dlse', lambda x: x[..., :1], 'expected dlse to have the shape'),
    'k heads': ('k', lambda x: x[:, :, :3], 'expected the heads of q to be a multiple'),
}


@pytest.mark.smoke
@pytest.mark.parametrize('name', BAD_CALLS)
def test_bad_calls(name, cuda):
    q, k, v = Case(33, 65).tensors(cuda)
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    arguments = {'dout': torch.ones_like(out), 'dlse': torch.ones_like(lse), 'q': q, 'k': k,
                 'v': v, 'out': out, 'lse': lse}
    which, change, text = BAD_CALLS[name]
    arguments[which] = change(arguments[which])
    if which == 'k':
        arguments['v'] = change(arguments['v'])
    with pytest.raises(RuntimeError, match=f'flash_attn3.flash_attn_func: {text}'):
        torch.ops.flash_attn3.bwd(*arguments.values(), 0.1, False)
