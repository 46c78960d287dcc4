"""num_splits of flash_attn_func and flash_attn_varlen_func: which op serves a call, what it gives,
gradients, errors.
"""
from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from flash_attn3 import flash_attn_func, flash_attn_varlen_func, quantize_fp8
from flash_attn3.ops import splits
from flash_attn3.ops.dense_and_varlen import General

from tests.support.called_ops import CalledOps

KEYS = 2048
OPTIONS = [{}, {'causal': True}, {'window_size': (9, 3)}, {'softcap': 3.0, 'causal': True},
           {'s_aux': True, 'attention_chunk': 64}]


def dense(*, seqlen_q: int = 3, seqlen_k: int = 50, dtype=torch.float64, requires_grad=False,
          **options) -> dict:
    q = torch.randn(2, seqlen_q, 4, 16, dtype=dtype)
    k, v = (torch.randn(2, seqlen_k, 2, 16, dtype=dtype) for _ in range(2))
    given = dict(q=q, k=k, v=v)
    if options.pop('s_aux', False):
        given['s_aux'] = torch.randn(4)
    for x in given.values():
        x.requires_grad_(requires_grad)
    return given | options


def packed(**options) -> dict:
    """With rows behind the last sequence, and unused ones."""
    given = dense(seqlen_q=8, seqlen_k=60, **options)
    given |= {name: given[name].flatten(0, 1).detach().requires_grad_(given[name].requires_grad)
              for name in 'qkv'}
    starts_q, starts_k, used = torch.tensor([[0, 5, 5, 14], [0, 50, 60, 110], [2, 0, 9, 0]],
                                            dtype=torch.int32)
    return given | dict(cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=9,
                        max_seqlen_k=50, seqused_q=used[:3])


def called(call) -> list[str]:
    with CalledOps() as ops:
        call()
    return ops.names


def function_of(given: dict):
    return flash_attn_varlen_func if 'cu_seqlens_q' in given else flash_attn_func


def results(given: dict, num_splits: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, lse and gradients."""
    out, lse = function_of(given)(**given, num_splits=num_splits, return_attn_probs=True)
    leaves = [x for x in given.values() if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        return out, lse, []
    torch.manual_seed(1)
    return out, lse, list(torch.autograd.grad((out, lse), leaves, (
        torch.randn_like(out), torch.randn_like(lse))))


@pytest.mark.parametrize('requires_grad', [False, True])
@pytest.mark.parametrize('options', OPTIONS, ids=str)
@pytest.mark.parametrize('make', [dense, packed])
def test_as_without_splits(make, options, requires_grad):
    given = make(requires_grad=requires_grad, **options)
    got, wanted = results(given, 3), results(given, 1)
    assert len(got[2]) == len(wanted[2]) == requires_grad * (3 + ('s_aux' in given))
    for x, y in zip((*got[:2], *got[2]), (*wanted[:2], *wanted[2])):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize('make', [dense, packed])
def test_the_op(make):
    given = make()
    with torch.no_grad():
        names = called(lambda: function_of(given)(**given, num_splits=2))
    assert names == ['attend_cache']
    out = torch.empty_like(given['q'])
    assert called(lambda: function_of(given)(**given, num_splits=2, out=out)) == [
        'attend_cache']


@pytest.mark.parametrize('requires_grad', [False, True])
@pytest.mark.parametrize('make', [dense, packed])
def test_max_logits_of_parts(make, requires_grad):
    given = make(requires_grad=requires_grad) | dict(return_max_logits=True)
    results = []
    assert 'attend_cache' in called(
        lambda: results.extend(function_of(given)(**given, num_splits=4)))
    for x, y in zip(results, function_of(given)(**given), strict=True):
        torch.testing.assert_close(x, y)


def test_by_plan():
    """Splits for few queries over many keys, without gradients."""
    few = dense(seqlen_q=1, seqlen_k=KEYS)
    assert called(lambda: flash_attn_func(**few, num_splits=0)) == ['attend_cache']
    torch.testing.assert_close(flash_attn_func(**few, num_splits=0), flash_attn_func(**few))
    for other in (dense(seqlen_q=1, seqlen_k=KEYS - 1), dense(seqlen_q=600, seqlen_k=KEYS),
                  dense(seqlen_q=1, seqlen_k=KEYS, requires_grad=True)):
        assert 'attend_cache' not in called(partial(flash_attn_func, **other, num_splits=0))


def test_by_plan_packed():
    given = packed()
    few = given | dict(max_seqlen_k=KEYS)
    assert called(lambda: flash_attn_varlen_func(**few, num_splits=0)) == ['attend_cache']
    assert called(lambda: flash_attn_varlen_func(**given, num_splits=0)) == ['attend']


def test_fp8():
    values = {}
    for name, rows in (('q', 3), ('k', 50), ('v', 50)):
        values[name], values[f'{name}_descale'] = quantize_fp8(torch.randn(2, rows, 2, 16).half())
    wanted = flash_attn_func(**values, out_dtype=torch.float16)
    assert torch.equal(flash_attn_func(**values, out_dtype=torch.float16, num_splits=4), wanted)
    with pytest.raises(RuntimeError, match='num_splits of 0 or 1 with fp8_accum'):
        flash_attn_func(**values, fp8_accum='promote', num_splits=4)
    values['q_descale'].requires_grad_()
    out = flash_attn_func(**values, num_splits=4)
    with pytest.raises(NotImplementedError, match='requires_grad=False with float8_e4m3fn'):
        out.float().sum().backward()


@pytest.mark.parametrize('num_splits', [-1, 257, 2.0, None], ids=str)
@pytest.mark.parametrize('make', [dense, packed])
def test_wrong_numbers(make, num_splits):
    given = make()
    with pytest.raises(RuntimeError, match=rf'{function_of(given).__name__}: expected num_splits '
                                           rf'to be from 0 \(by plan\) to 256, got {num_splits}'):
        function_of(given)(**given, num_splits=num_splits)


def test_what_does_not_go_together():
    given = dense(requires_grad=True)
    with pytest.raises(RuntimeError, match='requires_grad=False together with out='):
        flash_attn_func(**given, out=torch.empty_like(given['q']), num_splits=2)
    with pytest.raises(RuntimeError, match='flash_attn3.flash_attn_func: expected k.dtype'):
        flash_attn_func(**dense() | {'k': torch.randn(2, 50, 2, 16)}, num_splits=2)


def test_compiled():
    given = dense(dtype=torch.float32)
    compiled = torch.compile(lambda **given: flash_attn_func(**given, num_splits=3),
                             backend='aot_eager', fullgraph=True)
    torch.testing.assert_close(compiled(**given), flash_attn_func(**given))


def test_rows_of_no_sequence_are_cleared(monkeypatch):
    """What is done behind the kernel, with CPU tensors in place of those of a GPU."""
    monkeypatch.setattr(torch.Tensor, 'is_cuda', True)
    starts = torch.tensor([0, 0, 3, 5, 5], dtype=torch.int32)
    for used, kept in ((None, [0, 1, 2, 3, 4]), ([0, 2, 0, 0], [0, 1])):
        general = General(cu_seqlens_q=starts,
                          seqused_q=None if used is None else torch.tensor(used).int())
        out, lse = splits._cleared(torch.ones(7, 2, 4), torch.ones(2, 7), general)
        assert (out != 0).all(-1).all(-1).nonzero().flatten().tolist() == kept
        assert lse[0].isfinite().nonzero().flatten().tolist() == kept


@pytest.mark.parametrize('change, is_copied', [
    (lambda x: x, False), (lambda x: x[:, :, :, ::2], False),
    (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), False),
    (lambda x: x[:, :1, :1], False), (lambda x: x[:1, :, :, 1:9], True),
    (lambda x: x[:1].expand(2, -1, -1, -1), True)])
def test_keys_that_tma_cannot_take_are_copied(change, is_copied, monkeypatch):
    x = change(torch.randn(2, 6, 2, 16).bfloat16())
    monkeypatch.setattr(torch.Tensor, 'is_cuda', True)
    got = splits._aligned(x)
    assert torch.equal(got, x) and (got is not x) is is_copied
