"""flash_attn_completions_func on CPU tensors: values and gradients against dense float64 attention
that is written out here, the same as with copies of the prompt, every error.
"""
from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import warnings
from unittest import mock

import pytest
import torch
from hypothesis import given as drawn_from, strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck

from flash_attn3 import AttentionMask, flash_attn_completions_func, flash_attn_func
from flash_attn3.cpu import fallback
from flash_attn3.ops import library

from tests.cpu.drawn import examples
from tests.support.completion_cases import (Results, Tensors, TreeCase, check_case, check_same,
                                            expected, run)
from tests.support.lists import ints

# A tree with an empty completion, a prompt of no rows, one alone, no segment, rows of one.
TREES = ((4, 3, 0, 2), (0, 2, 1), (3,), (), (1, 1, 1))
OTHER_TREES = (9, 2, 5), (1, 3, 3, 2), (2, 1)
CASE = TreeCase(TREES, 8, 6, 'fp64', behind=2)


# ------------------------------------------------------------------------------------------- values
def dense(case: TreeCase, tensors: Tensors) -> Results:
    """One row after the other, from lists of the rows that each sees; gradients by autograd."""
    q, k, v = leaves = [x.detach().double().requires_grad_() for x in tensors[:3]]
    group = q.size(1) // k.size(1)
    seen, first = [], 0
    for tree in case.trees:
        prompt = list(range(first, first + sum(tree[:1])))
        for number, rows in enumerate(tree):
            before = prompt if number else []
            seen += [[*before, *range(first, row + 1)] for row in range(first, first + rows)]
            first += rows
    out = [v.new_zeros(q.size(1), v.size(2))] * case.rows
    lse = [q.new_full((q.size(1),), -math.inf)] * case.rows
    for row, keys in enumerate(seen):
        k_row, v_row = (x[keys].repeat_interleave(group, 1) for x in (k, v))
        logits = torch.einsum('hd,khd->hk', q[row], k_row) * case.scale
        if case.softcap:
            logits = case.softcap * torch.tanh(logits / case.softcap)
        lse[row] = logits.exp().sum(-1).log()
        out[row] = torch.einsum('hk,khd->hd', (logits - lse[row][:, None]).exp(), v_row)
    out, lse = torch.stack(out), torch.stack(lse, 1)
    gradients = torch.autograd.grad((out, lse), leaves, (tensors.dout.double(),
                                                         tensors.dlse.double()))
    return Results(out.detach(), lse.detach(), *gradients)


def check_dense(case: TreeCase, got: Results | None = None) -> None:
    tensors = case.tensors('cpu')
    for name, *pair in zip(Results._fields, got or run(case, tensors), dense(case, tensors)):
        torch.testing.assert_close(*pair, msg=lambda text, name=name: f'{case}, {name}: {text}')


@st.composite
def drawn_cases(draw) -> TreeCase:
    lengths = st.one_of(st.integers(0, 2), st.integers(0, 9))
    trees = draw(st.lists(st.lists(lengths, max_size=4).map(tuple), min_size=1, max_size=4))
    if sum(map(sum, trees)) == 0:
        trees.append((2, 1))
    return TreeCase(
        tuple(trees), draw(st.sampled_from([5, 8])), draw(st.sampled_from([0, 3])), 'fp64',
        draw(st.sampled_from([(4, 4), (4, 2), (3, 1)])), draw(st.integers(0, 3)),
        draw(st.sampled_from([0.0, 2.5])), draw(st.sampled_from([None, 0.7])),
        max_seqlen=draw(st.integers(0, 12)), logit_std=draw(st.sampled_from([1.0, 6.0])))


@examples(60, derandomize=True)
@drawn_from(drawn_cases())
def test_values_and_gradients(case):
    check_dense(case)


@pytest.mark.parametrize('changes', [
    {}, {'softmax_scale': 0.2}, {'heads': (3, 3)}, {'heads': (6, 1)},
    {'pack_gqa': True}, {'deterministic': True}, {'max_seqlen': 3}, {'behind': 0},
    {'trees': ((5, 1, 2),)}, {'trees': ((0, 3), (0, 0, 2))}, {'trees': ((2,), (3,))},
    {'trees': ((1, 1, 1, 1),) * 3}, {'trees': ((3, 0, 0),)}], ids=str)
def test_cases(changes):
    check_dense(dataclasses.replace(CASE, **changes))


def test_the_oracle_of_the_gpu_tests_is_that_of_this_file():
    tensors = CASE.tensors('cpu')
    torch.testing.assert_close(expected(CASE, tensors, torch.float64), dense(CASE, tensors))


@pytest.mark.parametrize('dtype, head_dim, head_dim_v', [
    ('bf16', 64, 64), ('fp16', 128, 128), ('bf16', 256, 256), ('bf16', 192, 128), ('fp32', 64, 64)])
def test_dtypes_and_head_dims(dtype, head_dim, head_dim_v):
    """Within the bar of 16-bit results."""
    trees = ((70, 33, 0, 1), (0, 20), (5,))
    check_case(TreeCase(trees, head_dim, head_dim_v, dtype, (6, 2), behind=3), 'cpu')


def test_as_behind_copies_of_the_prompt():
    """Each completion behind its own copy, by flash_attn_func; gradients of copies add up."""
    case = TreeCase(((5, 3, 0, 4),), 8, dtype='fp64')
    tensors = case.tensors('cpu')
    leaves = [x.requires_grad_() for x in tensors[:3]]
    prompt, *others = torch.arange(case.rows).split(case.lengths)
    loss, results = 0, {}
    for rows in (prompt, *(torch.cat((prompt, one)) for one in others)):
        out, lse = flash_attn_func(*(x[None, rows] for x in leaves), causal=True,
                                   return_attn_probs=True)
        new = slice(5 * (len(rows) > 5), None)
        results |= {int(row): (out[0, i], lse[0, :, i]) for i, row in enumerate(rows)}
        if rows is prompt or len(rows) > 5:
            at = rows[new]
            loss = loss + ((out[0, new] * tensors.dout[at]).sum()
                           + (lse[0, :, new] * tensors.dlse[:, at]).sum())
    got = run(case, tensors)
    torch.testing.assert_close(got.out, torch.stack([results[i][0] for i in range(case.rows)]))
    torch.testing.assert_close(got.lse, torch.stack([results[i][1] for i in range(case.rows)], 1))
    torch.testing.assert_close(got[2:], torch.autograd.grad(loss, leaves))


def test_a_warning_names_the_mask_that_replaces_it():
    """The same numbers."""
    tensors = CASE.tensors('cpu')
    mask = AttentionMask.completions(*tensors.lists, CASE.rows)
    with pytest.warns(DeprecationWarning, match=r'mask=AttentionMask.completions\(') as caught:
        got = run(CASE, tensors)
    assert caught[0].filename.endswith('completion_cases.py')

    def masked(*given, **_):
        results = flash_attn_func(*(x[None] for x in given[:3]), mask=mask, return_attn_probs=True)
        return [x[0] for x in results]

    torch.testing.assert_close(run(CASE, tensors, masked), got)


def test_softcap():
    """On the CPU with gradients."""
    check_dense(dataclasses.replace(CASE, softcap=2.0))


def test_gradcheck():
    """Numerical derivatives of out and of the LSE, along random directions."""
    case = dataclasses.replace(CASE, trees=((3, 2, 1), (1, 2)), behind=0)
    tensors = case.tensors('cpu')
    assert gradcheck(lambda *x: flash_attn_completions_func(*x, *tensors.lists,
                                                            return_attn_probs=True),
                     [x.requires_grad_() for x in tensors[:3]], fast_mode=True)


@pytest.mark.parametrize('trees', [(), ((),), ((), ()), ((0,),), ((0, 0), (0,))], ids=str)
@pytest.mark.parametrize('behind', [0, 2])
def test_nothing_to_do(behind, trees):
    case = dataclasses.replace(CASE, trees=trees, behind=behind)
    got = run(case, case.tensors('cpu'))
    assert got.out.shape == (behind, 4, 6) and got.lse.shape == (4, behind)
    assert got.lse.isneginf().all() and all((x == 0).all() for x in (got.out, *got[2:]))


# -------------------------------------------------------------------------------------- invariance
def test_rows_behind_change_no_bit():
    tensors = CASE.tensors('cpu')
    wanted, at = run(CASE, tensors), torch.arange(CASE.rows) >= CASE.rows - CASE.behind
    spoiled = tensors._replace(dlse=tensors.dlse.masked_fill(at, math.nan), **{
        name: getattr(tensors, name).masked_fill(at[:, None, None], math.nan)
        for name in ('q', 'k', 'v', 'dout')})
    check_same(run(CASE, spoiled), wanted)


def test_lists_that_are_filled_up_change_no_bit():
    """With empty segments, and empty trees behind them."""
    tensors = CASE.tensors('cpu')
    longer = dataclasses.replace(CASE, trees=(*TREES, (0, 0), (), ()))
    check_same(run(longer, tensors._replace(lists=longer.lists('cpu'))), run(CASE, tensors))


@pytest.mark.parametrize('changes', [
    {'max_seqlen': torch.tensor(4)}, {'max_seqlen': torch.tensor([1])}, {'pack_gqa': False},
    {'sm_margin': 3}, {'softmax_scale': 8 ** -0.5}, {'softmax_scale': torch.tensor(8 ** -0.5)}],
    ids=str)
def test_arguments_that_do_not_change_the_result(changes):
    tensors = CASE.tensors('cpu')
    torch.testing.assert_close(run(CASE, tensors, **changes), run(CASE, tensors))


def test_strides():
    tensors = CASE.tensors('cpu')
    turned = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in (*tensors[:3], tensors.dout)]
    got = run(CASE, tensors._replace(**dict(zip(('q', 'k', 'v', 'dout'), turned))))
    torch.testing.assert_close(got, run(CASE, tensors))


def test_one_output_alone():
    """The gradients of out without the LSE, and the other way round."""
    tensors = CASE.tensors('cpu')
    leaves = [x.requires_grad_() for x in tensors[:3]]
    out = flash_attn_completions_func(*leaves, *tensors.lists)
    assert isinstance(out, Tensor)
    of_out = torch.autograd.grad(out, leaves, tensors.dout)
    _, lse = flash_attn_completions_func(*leaves, *tensors.lists, return_attn_probs=True)
    of_lse = torch.autograd.grad(lse, leaves, tensors.dlse)
    wanted = run(CASE, tensors)[2:]
    torch.testing.assert_close([a + b for a, b in zip(of_out, of_lse)], list(wanted))


def test_autocast_changes_no_bit():
    for dtype in ('bf16', 'fp32'):
        case = dataclasses.replace(CASE, dtype=dtype)
        tensors = case.tensors('cpu')
        with torch.autocast('cpu', torch.bfloat16):
            got = run(case, tensors)
        check_same(got, run(case, tensors))


def test_compiled():
    """Forward and backward, as one graph."""
    compiled = torch.compile(flash_attn_completions_func, fullgraph=True, backend='aot_eager')
    tensors = CASE.tensors('cpu')
    torch.testing.assert_close(run(CASE, tensors, compiled), run(CASE, tensors))


@pytest.mark.parametrize('device', ['cpu', 'cuda', 'meta'])
def test_fakes(device):
    """Shapes and dtypes without data: also of a GPU that is not there."""
    with contextlib.nullcontext() if device == 'meta' else FakeTensorMode():
        q, k, v = (torch.empty(20, heads, dim, dtype=torch.bfloat16, device=device)
                   for heads, dim in ((4, 8), (2, 8), (2, 6)))
        lists = [torch.empty(size, dtype=torch.int32, device=device) for size in (12, 6)]
        out, lse = flash_attn_completions_func(q, k, v, *lists, return_attn_probs=True)
    assert out.shape == (20, 4, 6) and out.dtype == torch.bfloat16 and out.device.type == device
    assert lse.shape == (4, 20) and lse.dtype == torch.float32 and lse.device.type == device


# ------------------------------------------------------------------------------------------- errors
def good(**changes) -> dict:
    tensors = CASE.tensors('cpu')
    q, k, v = tensors[:3]
    return dict(q=q, k=k, v=v, cu_seqlens=tensors.lists[0], cu_trees=tensors.lists[1]) | changes


SMALL = good()
HINT = 'flash_attn3.flash_attn_completions_func: expected '
LIST = 'to be int32 of 1 dimensions'
BAD = {
    'list': (dict(cu_trees=[0, 3]), f'{HINT}cu_trees {LIST}, got [0, 3]'),
    'no list': (dict(cu_seqlens=None), f'{HINT}cu_seqlens {LIST}, got None'),
    'int64': (dict(cu_seqlens=SMALL['cu_seqlens'].long()), f'{HINT}cu_seqlens {LIST}'),
    'dimensions': (dict(cu_trees=SMALL['cu_trees'][None]), f'{HINT}cu_trees {LIST}'),
    'empty list': (dict(cu_trees=ints([])), f'{HINT}cu_trees {LIST}'),
    'device': (dict(cu_trees=SMALL['cu_trees'].to('meta')),
               f'{HINT}cu_trees on cpu, got 6 on meta'),
    'rows of k': (dict(k=SMALL['k'][3:], v=SMALL['v'][3:]),
                  f'{HINT}k and v to have as many rows as q, 20, got 17'),
    'rows of v': (dict(v=SMALL['v'][1:]), f'{HINT}v'),
    'rank': (dict(q=SMALL['q'][None]), f'{HINT}q to have the shape'),
    'rank of k': (dict(k=SMALL['k'][None]), f'{HINT}k to have the shape'),
    'heads': (dict(q=SMALL['q'][:, :3]), f'{HINT}the heads of q'),
    'dtype': (dict(v=SMALL['v'].float()), f'{HINT}v.dtype to be that of q'),
    'first start': (dict(cu_seqlens=SMALL['cu_seqlens'] + 1),
                    f'{HINT}cu_seqlens[0] to be 0, got 1'),
    'rows': (dict(cu_seqlens=SMALL['cu_seqlens'] * 2),
             f'{HINT}cu_seqlens[6], the end of sequence 5, to be from 18, its start, to 20, the '
             'rows of a sequence, got 22'),
    'falling': (dict(cu_seqlens=ints([0, 4, 3] + [5] * 9)),
                f'{HINT}cu_seqlens[2], the end of sequence 1, to be from 4, its start, to 20, the '
                'rows of a sequence, got 3'),
    'first tree': (dict(cu_trees=ints([1, 11])), f'{HINT}cu_trees[0] to be 0, got 1'),
    'falling trees': (dict(cu_trees=ints([0, 4, 2, 11])),
                      f'{HINT}cu_trees[2], the end of tree 1, to be from 4, its prompt, to 11, the '
                      'segments, got 2'),
    'trees beyond': (dict(cu_trees=ints([0, 12])), f'{HINT}cu_trees[1], the end of tree 0'),
    'short trees': (dict(cu_trees=ints([0, 4])),
                    f'{HINT}cu_trees to end at 11, the segments, got 4'),
    'softcap': (dict(softcap=-1.0), f'{HINT}softcap'),
    'scale': (dict(softmax_scale=0.0), f'{HINT}softmax_scale'),
    'margin': (dict(sm_margin=-1), f'{HINT}sm_margin'),
    'hint': (dict(max_seqlen=-1), f'{HINT}max_seqlen to be an int of 0 or more, got -1'),
}


@pytest.mark.parametrize('requires_grad', [False, True])
@pytest.mark.parametrize('name', BAD)
def test_errors(name, requires_grad):
    changes, text = BAD[name]
    given = good(**changes)
    if requires_grad:
        given['q'] = given['q'].detach().requires_grad_()
    with pytest.raises(RuntimeError, match=re.escape(text)):
        flash_attn_completions_func(**given)


@pytest.mark.parametrize('name', ['window_size', 's_aux', 'out', 'causal', 'attention_chunk'])
def test_no_such_argument(name):
    with pytest.raises(TypeError, match=f'unexpected keyword argument {name!r}'):
        flash_attn_completions_func(**good(), **{name: 1})


class _OnGpu(Tensor):
    """A CPU tensor that says it is on a CUDA device."""
    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


# ------------------------------------------------------------------------------- other CUDA devices
def test_on_a_gpu_that_is_not_served(monkeypatch):
    """Plain PyTorch with a warning: results, gradients, errors."""
    monkeypatch.setattr(fallback, '_warned_devices', set())
    monkeypatch.setattr(library, 'kernels_serve', lambda device: False)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)
    monkeypatch.setattr(torch.cuda, 'current_stream', mock.MagicMock())

    def elsewhere(q, *others, **options):
        return flash_attn_completions_func(q.as_subclass(_OnGpu), *others, **options)

    tensors = dataclasses.replace(CASE, behind=0).tensors('cpu')
    wanted = run(CASE, tensors)
    with pytest.warns(UserWarning, match='varlen_func: expected a Hopper GPU'):
        got = run(CASE, tensors, elsewhere)
    torch.testing.assert_close(Results(*(x.as_subclass(Tensor) for x in got)), wanted)
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        for changes, text in (BAD['short trees'], BAD['rows of k'], BAD['heads'], BAD['list']):
            with pytest.raises(RuntimeError, match=re.escape(text)):
                elsewhere(**good(**changes))
