"""With split_size training, prompt, chunk and step have equal bits: 300 draws of tests/bits;
`python -m tests.bits --draws 2000 --seed S` runs others. Gradients have them in every packing.
"""
from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from flash_attn3 import flash_attn_func, flash_attn_varlen_func

from tests.bits.draw import LONGEST, draw_of
from tests.bits.runner import LONGEST_ON_CPU
from tests.bits.ways import check
from tests.support import compare
from tests.support.general_cases import GeneralCase, run
from tests.support.general_oracle import check as check_results
from tests.support.lists import starts

PARTS = 2    # tests.record runs so many processes

DRAWS, SMOKE, SEED = 300, 60, 0
HEAD_DIMS = pytest.mark.parametrize('dims', [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)


@pytest.mark.parametrize('number', [pytest.param(number, marks=[pytest.mark.smoke] * (
    number < SMOKE)) for number in range(DRAWS)])
def test_draw(number, device, request):
    """On the CPU and in the emulator short sequences; on the CPU the values are compared."""
    where = request.config.getoption('--device')
    draw = draw_of(SEED, number, LONGEST if where == 'cuda' else LONGEST_ON_CPU)
    try:
        check(draw, device, has_bits=where != 'cpu')
    except AssertionError as error:
        raise AssertionError(f'--seed {SEED} --draw {number}: {error}') from error


@pytest.mark.parametrize('is_packed', [False, True])
@HEAD_DIMS
def test_compiled(dims, is_packed, cuda, fresh_compiler):
    """torch.compile gives the bits of an eager call, with gradients or not."""
    q, k, v = (torch.randn(700, heads, dim, device=cuda).bfloat16() for heads, dim in (
        (8, dims[0]), (2, dims[0]), (2, dims[1])))
    lists = (starts([300, 400], cuda),) * 2 + (400, 400) if is_packed else ()
    inputs = (q, k, v) if is_packed else (q[None], k[None], v[None])

    def attention(*inputs: Tensor) -> tuple[Tensor, ...]:
        function = flash_attn_varlen_func if is_packed else flash_attn_func
        return function(*inputs, *lists, causal=True, return_attn_probs=True, split_size=256)[:2]

    wanted = attention(*inputs)
    compiled = torch.compile(attention, fullgraph=True)
    leaves = [x.detach().requires_grad_() for x in inputs]
    for got in (compiled(*inputs), compiled(*leaves)):
        for name, x, y in zip(('out', 'lse'), got, wanted):
            compare.check_equal(x.detach(), y, name)


# ---------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize('features', [
    {'causal': True}, {}, {'causal': True, 'window': (150, 0)}, {'causal': True, 'sinks': 'fp32'},
    {'causal': True, 'softcap': 15.0}], ids=str)
@pytest.mark.parametrize('is_packed', [False, True])
@HEAD_DIMS
def test_gradients(dims, is_packed, features, device):
    lengths = ((300, 300), (129, 517)) if is_packed else ((400, 400),) * 2
    case = GeneralCase(lengths, *dims, heads=(6, 2), is_packed=is_packed, deterministic=True,
                       **features)
    tensors = case.tensors(device)
    with compare.naming(case):
        check_results(case, tensors, run(case, tensors, split_size=128))


def gradients(inputs: list[Tensor], dout: Tensor, lists: dict, **options) -> tuple[Tensor, ...]:
    """dq, dk and dv of a packed batch."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = flash_attn_varlen_func(*leaves, **lists, **options)
    return torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize('options', [
    {'causal': True}, {}, {'causal': True, 'window_size': (200, 0)},
    {'causal': True, 'softcap': 15.0}, {'causal': True, 'attention_chunk': 300}], ids=str)
@pytest.mark.parametrize('heads', [(4, 4), (8, 2)], ids=str)
@HEAD_DIMS
def test_gradients_alone_and_in_a_packed_batch(dims, heads, options, cuda):
    """The bits of a sequence are the same alone, as a dense call, and in any batch."""
    pick = random.Random(str((dims, heads, options)))
    options = dict(options, deterministic=True, split_size=512)
    length = pick.randint(700, 1500)
    around = [pick.randint(1, 900) for _ in range(4)]
    all_of = [*around[:2], length, *around[2:]]
    q, k, v, dout = (torch.randn(sum(all_of), count, dim, device=cuda).bfloat16()
                     for count, dim in zip((heads[0], *heads[1:] * 2, heads[0]),
                                           (dims[0], dims[0], dims[1], dims[1])))
    rows = slice(sum(around[:2]), sum(around[:2]) + length)

    def packed(lengths: list[int], given: slice, hint: int) -> tuple[Tensor, ...]:
        lists = {f'cu_seqlens_{name}': starts(lengths, cuda) for name in 'qk'}
        lists |= {f'max_seqlen_{name}': max(lengths) + hint for name in 'qk'}
        return gradients([x[given] for x in (q, k, v)], dout[given], lists, **options)

    alone = packed([length], rows, 0)
    together = packed(all_of, slice(None), 700)
    leaves = [x[None, rows].detach().requires_grad_() for x in (q, k, v)]
    dense = torch.autograd.grad(flash_attn_func(*leaves, **options), leaves, dout[None, rows])
    for name, one, other, third in zip(('dq', 'dk', 'dv'), alone, together, dense):
        compare.check_equal(other[rows], one, f'{name} in a batch')
        compare.check_equal(third[0], one, f'{name} of a dense call')
