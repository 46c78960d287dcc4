"""flash_attn_combine and merge_states: against attention over all keys, odd strides, empty parts,
gradients.
"""
from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck

from flash_attn3 import flash_attn_combine, flash_attn_func, flash_attn_varlen_func, merge_states
from flash_attn3.api import merging


def parts_of(count: int, shape: tuple[int, ...], dtype=torch.float32) -> tuple:
    generator = torch.Generator().manual_seed(count)
    outs = torch.randn(count, *shape, generator=generator, dtype=dtype)
    lses = 3 * torch.randn(count, *shape[:-1], generator=generator, dtype=dtype)
    lses[torch.rand(lses.shape, generator=generator) < 0.3] = -math.inf
    return outs, lses


def merged(outs: torch.Tensor, lses: torch.Tensor) -> tuple:
    """In float64, part by part; parts without keys count nothing."""
    total = torch.zeros(lses.shape[1:], dtype=torch.float64)
    result = torch.zeros(outs.shape[1:], dtype=torch.float64)
    for out, lse in zip(outs.double(), lses.double()):
        total += lse.exp()
        result += torch.where(lse == -math.inf, 0, lse).exp().mul(lse > -math.inf)[..., None] * out
    is_empty = (total == 0)[..., None]
    return torch.where(is_empty, 0, result / total[..., None]), total.log()


@pytest.mark.parametrize('count', [1, 2, 5, 17, 133])
@pytest.mark.parametrize('shape', [(2, 3, 4, 64), (7, 3, 96), (1, 1, 1, 512)], ids=str)
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
def test_combine(dtype, shape, count):
    outs, lses = parts_of(count, shape)
    out, lse = flash_attn_combine(outs, lses, out_dtype=dtype)
    wanted, wanted_lse = merged(outs, lses)
    assert out.dtype == dtype and lse.dtype == torch.float32 and lse.shape == shape[:-1]
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(out.double(), wanted, rtol=bound, atol=bound)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


def test_combine_takes_any_strides_and_writes_into_out():
    outs, lses = parts_of(4, (2, 5, 3, 16))
    wanted, wanted_lse = flash_attn_combine(outs, lses)
    wider = torch.full((8, 2, 3, 5, 32), 7.0).transpose(2, 3)
    wider[:4, ..., 16:] = outs
    turned = lses.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)
    out = torch.empty(3, 5, 2, 16).transpose(0, 2)
    got, lse = flash_attn_combine(wider[:4, ..., 16:], turned, out=out)
    assert got is out and torch.equal(out, wanted) and torch.equal(lse, wanted_lse)


def test_parts_without_keys_are_neutral_whatever_they_hold():
    outs, lses = parts_of(3, (2, 5, 3, 16))
    outs[lses == -math.inf] = math.nan
    out, _ = flash_attn_combine(outs, lses)
    assert out.isfinite().all()
    lses[:] = -math.inf
    out, lse = flash_attn_combine(outs, lses)
    assert (out == 0).all() and (lse == -math.inf).all()


def test_large_scores():
    outs, lses = parts_of(2, (1, 2, 3, 8))
    out, lse = flash_attn_combine(outs, lses + 3e4)
    wanted, wanted_lse = flash_attn_combine(outs, lses)
    torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse - 3e4, wanted_lse, rtol=0, atol=1e-2)


@pytest.mark.parametrize('stacked', [True, False])
def test_merging_parts_of_the_keys_is_attention_on_all(stacked):
    q, k, v = (torch.randn(2, rows, heads, 16, dtype=torch.float64)
               for rows, heads in ((5, 4), (40, 2), (40, 2)))
    pairs = [flash_attn_func(q, k[:, a:b], v[:, a:b], return_attn_probs=True)
             for a, b in ((0, 7), (7, 7), (7, 40))]
    outs, lses = zip(*pairs)
    if stacked:
        outs, lses = torch.stack(outs), torch.stack(lses)
    out, lse = merge_states(outs, lses)
    wanted, wanted_lse = flash_attn_func(q, k, v, return_attn_probs=True)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)


def test_merging_packed_sequences():
    q, k = torch.randn(8, 4, 16), torch.randn(20, 4, 16)
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)

    def attend(begin: int, end: int) -> tuple:
        keys = torch.cat([k[begin:end], k[10 + begin:10 + end]])
        starts_k = torch.tensor([0, end - begin, 2 * (end - begin)], dtype=torch.int32)
        return flash_attn_varlen_func(q, keys, keys, starts, starts_k, 5, 10,
                                      return_attn_probs=True)

    out, lse = merge_states(*zip(attend(0, 4), attend(4, 10)))
    wanted, wanted_lse = attend(0, 10)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)


def test_gradients():
    """Also of rows that one part or none has keys for."""
    outs, lses = parts_of(3, (2, 4, 3, 5), torch.float64)
    lses[:, 0, 0] = -math.inf
    assert gradcheck(lambda outs, lses: merge_states(outs, lses.transpose(-1, -2))[0],
                     (outs.requires_grad_(), lses.requires_grad_()), nondet_tol=0)
    out, lse = merge_states(outs, lses.transpose(-1, -2))
    gradients = torch.autograd.grad((out.sum(), lse[lse.isfinite()].sum()), (outs, lses))
    assert all(x.isfinite().all() for x in gradients)


def test_gradients_of_attention_in_parts():
    q, k, v = (torch.randn(1, 6, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    halves = [flash_attn_func(q, k[:, part], v[:, part], return_attn_probs=True)
              for part in (slice(0, 2), slice(2, 6))]
    out, _ = merge_states(*zip(*halves))
    wanted = flash_attn_func(q, k, v)
    dout = torch.randn_like(out)
    for got, want in zip(torch.autograd.grad(out, (q, k, v), dout),
                         torch.autograd.grad(wanted, (q, k, v), dout)):
        torch.testing.assert_close(got, want)


OUTS, LSES = parts_of(2, (2, 5, 3, 16))


@pytest.mark.parametrize('call, text', [
    (lambda: flash_attn_combine(OUTS, LSES[:1]), 'results '),
    (lambda: flash_attn_combine(OUTS[0, 0], LSES[0, 0]), 'results '),
    (lambda: flash_attn_combine(OUTS[:0], LSES[:0]), 'results '),
    (lambda: flash_attn_combine(OUTS, LSES.int()), 'floating dtypes of 16 bits or more'),
    (lambda: flash_attn_combine(OUTS.to(torch.float8_e4m3fn), LSES), 'floating dtypes of 16 bits'),
    (lambda: flash_attn_combine(OUTS, LSES, out_dtype=torch.int64), 'out_dtype to be floating'),
    (lambda: flash_attn_combine(OUTS, LSES, out=OUTS[0].bool()), 'out.dtype to be floating, of'),
    (lambda: flash_attn_combine(OUTS, LSES, out=OUTS[0, :1].expand(OUTS.shape[1:])),
     'out not to be expanded'),
    (lambda: flash_attn_combine(OUTS, LSES, out=OUTS[0, :1]), 'out to be '),
    (lambda: flash_attn_combine(OUTS, LSES, OUTS[0], torch.float16), 'out to be '),
    (lambda: flash_attn_combine(OUTS, LSES.clone().requires_grad_()), 'requires_grad='),
    (lambda: merge_states([], []), 'as many outs as lses'),
    (lambda: merge_states([OUTS[0]], [LSES[0]]), 'results '),
])
def test_errors(call, text):
    with pytest.raises(RuntimeError, match=r'flash_attn3\.(flash_attn_combine|merge_states): '
                                           rf'expected {text}'):
        call()


def op_parts(out_dtype: torch.dtype) -> tuple:
    outs, lses = parts_of(3, (2, 4, 3, 16))
    return torch.empty(2, 4, 3, 16, dtype=out_dtype), outs, lses


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_opcheck_combine(dtype):
    opcheck(torch.ops.flash_attn3.combine.default, op_parts(dtype))


@pytest.mark.parametrize('change, text', [
    (lambda out, outs, lses: (out, outs[0], lses), 'out_partial to have the shape'),
    (lambda out, outs, lses: (out, outs.double(), lses),
     'out_partial.dtype to be float16, bfloat16 or float32'),
    (lambda out, outs, lses: (out, outs, lses[:, :1]), 'lse_partial to have the shape'),
    (lambda out, outs, lses: (out.double(), outs, lses), 'out.dtype to be '),
    (lambda out, outs, lses: (outs[0], outs, lses), 'out with memory of its own'),
])
def test_errors_of_the_op(change, text):
    with pytest.raises(RuntimeError, match=f'flash_attn3.flash_attn_combine: expected {text}'):
        torch.ops.flash_attn3.combine(*change(*op_parts(torch.float32)))


def test_the_way_to_the_op(monkeypatch):
    """What a GPU takes, tried with the op on the CPU: with and without a batch."""
    monkeypatch.setattr(merging, '_op_serves', lambda *_: True)
    for shape in ((2, 5, 3, 16), (7, 3, 16)):
        outs, lses = parts_of(4, shape)
        given = torch.empty(shape, dtype=torch.bfloat16)
        wanted, wanted_lse = merging._merge(outs, lses)
        out, lse = flash_attn_combine(outs, lses, given)
        assert out is given and torch.equal(out, wanted.bfloat16())
        assert torch.equal(lse, wanted_lse)
        assert torch.equal(flash_attn_combine(outs, lses)[0], wanted)


# -------------------------------------------------------------------------------- the op of a list
def separate(count: int, dtype: torch.dtype, packed: bool) -> tuple:
    """out of the op, and its parts: all rows as one batch entry, packed, as out in turns."""
    outs, lses = parts_of(count, (2, 4, 3, 16), torch.float32)
    parts = []
    for number, (out, lse) in enumerate(zip(outs.to(dtype), lses.transpose(-1, -2))):
        if packed or number % 3 < 2:
            out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1).contiguous()
            out, lse = (out, lse) if packed or number % 3 else (out[None], lse[None])
        parts += [out, lse.contiguous()]
    shape = (8, 3, 16) if packed else (2, 4, 3, 16)
    return torch.full(shape, math.nan, dtype=dtype), *parts


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('count', [2, 3, 4])
def test_merging_separate_parts(count, packed, dtype):
    out, *parts = separate(count, dtype, packed)
    lse = torch.ops.flash_attn3.combine(out, *parts)
    outs, lses = parts_of(count, (2, 4, 3, 16), torch.float32)
    wanted, wanted_lse = merged(outs.to(dtype), lses)
    bound = 1.6e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(out.double().view(wanted.shape), wanted, rtol=bound, atol=bound)
    wanted_lse = wanted_lse.transpose(-1, -2)
    wanted_lse = wanted_lse.transpose(0, 1).flatten(1) if packed else wanted_lse
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('count', [2, 4])
def test_opcheck_combine_of_parts(count):
    opcheck(torch.ops.flash_attn3.combine.default,
            tuple(x.nan_to_num() for x in separate(count, torch.float32, False)))


@pytest.mark.parametrize('change, text', [
    (lambda out, a, b, *others: (out[0, 0], a, b, *others), r'out to have the shape \(batch, rows'),
    (lambda out, a, b, *others: (out, a[:, :7], b, *others), r'outs\[0\] to have the shape'),
    (lambda out, a, b, c, *others: (out, a, b, c[..., :8], *others),
     r'outs\[1\] to have the shape'),
    (lambda out, a, b, *others: (out, a.half(), b, *others), r'outs\[0\].dtype to be that of out'),
    (lambda out, a, b, *others: (out, a, b[..., :3], *others), r'lses\[0\] to have the shape'),
    (lambda out, a, b, *others: (out, a, b.half(), *others), r'lses\[0\].dtype to be float32'),
    (lambda out, a, b, *others: (a.view(out.shape), a, b, *others), 'out with memory of its own'),
    (lambda out, *others: (out[:, :1].expand(2, 4, 3, 16), *others), r'out.stride\(1\) not to be'),
    (lambda *given: (*given, given[1]), r'two parts or more, .*, got outs\[2\] alone'),
    (lambda *given: (*given, None, None, *given[1:3]), r'two parts .*, got outs\[3\] alone'),
    (lambda out, a, b, c, d: (out[:1, :2], *(x[:0] for x in (a, b, c, d))),
     r'outs\[0\] to have the'),
])
def test_errors_of_merge_parts(change, text):
    with pytest.raises(RuntimeError, match=f'flash_attn3.merge_states: expected {text}'):
        torch.ops.flash_attn3.combine(*change(*separate(2, torch.float32, False)))


def test_what_merge_states_gives_to_the_ops(monkeypatch):
    """As on a GPU, tried with the ops of the CPU: a list unstacked, and a stack as it is; with a
    gradient neither.
    """
    outs, lses = parts_of(3, (2, 4, 3, 16))
    lists = list(outs), [lse.transpose(-1, -2).contiguous() for lse in lses]
    wanted = merge_states(*lists)
    taken = []
    monkeypatch.setattr(merging, '_list_is_served', lambda *given: merging._has_no_derivative(
        *given[0], *given[1]) and not taken.append('list'))
    monkeypatch.setattr(merging, '_op_serves', lambda *_: not taken.append('stack'))
    for given in (lists, [torch.stack(x) for x in lists]):
        for got, want in zip(merge_states(*given), wanted):
            assert torch.equal(got, want)
    assert taken == ['list', 'stack']
    lists[0][0].requires_grad_()
    assert merge_states(*lists)[0].requires_grad
