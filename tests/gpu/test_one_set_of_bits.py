"""With split_size training, prompt, chunk and step have equal bits: 300 draws of tests/bits;
`python -m tests.bits --draws 2000 --seed S` runs others. Gradients have them in every packing.
"""
from __future__ import annotations

import math
import random
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn3 import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

from tests.bits.draw import LONGEST, draw_of
from tests.bits.runner import LONGEST_ON_CPU
from tests.bits.ways import check
from tests.support import compare
from tests.support.general_cases import GeneralCase, run
from tests.support.general_oracle import check as check_results
from tests.support.lists import ints, starts

PARTS = 2    # tests.record runs so many processes

DRAWS, SMOKE, SEED = 300, 60, 0
HEAD_DIMS = pytest.mark.parametrize('dims', [(64, 64), (128, 128), (192, 128), (256, 256)],
                                    ids=lambda dims: f'd{dims[0]}')


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


@pytest.mark.parametrize('features', [{}, {'causal': True}, {'window_size': (150, 20)},
                                      {'causal': True, 'softcap': 15.0}], ids=str)
@HEAD_DIMS
def test_max_logits_change_no_bit(dims, features, device):
    """Of out and LSE; they are themselves those of a call without parts."""
    q, k, v = (torch.randn(2, 600, heads, dim, device=device).bfloat16() for heads, dim in (
        (4, dims[0]), (2, dims[0]), (2, dims[1])))
    sinks = torch.randn(4, device=device)
    options = dict(features, s_aux=sinks, return_attn_probs=True)
    wanted = [*flash_attn_func(q, k, v, **options, split_size=256),
              flash_attn_func(q, k, v, **options, return_max_logits=True)[2]]
    got = flash_attn_func(q, k, v, **options, return_max_logits=True, split_size=256)
    for name, x, y in zip(('out', 'lse', 'max_logits'), got, wanted, strict=True):
        compare.check_equal(x, y, name)


def test_parts_of_negative_zeros(kernels):
    """O of each part is -0: its first 128 keys have values of -0 and such large scores that the
    negative values of the others have a weight of 0.
    """
    keys, loud = 1024, torch.arange(1024, device=kernels) % 256 < 128
    q = torch.ones(1, 2, 2, 64, device=kernels).bfloat16()
    k = torch.where(loud, 100.0, -100.0)[None, :, None, None].expand(1, keys, 2, 64).bfloat16()
    v = torch.where(loud, -0.0, -3.0)[None, :, None, None].expand(1, keys, 2, 64).bfloat16()
    options = {'causal': True, 'split_size': 256}
    wanted = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    got = flash_attn_with_kvcache(q, k, v, cache_seqlens=keys, return_softmax_lse=True, **options)
    for name, x, y in zip(('out', 'lse'), got, wanted):
        compare.check_equal(x, y, name)


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


class Sequence(NamedTuple):
    """A sequence, and the gradients of its out and LSE: (rows, heads, head_dim), (heads, rows)."""
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


def sequence(queries: int, keys: int, heads: tuple[int, int], dims: tuple[int, int],
             device: torch.device) -> Sequence:
    shapes = ((queries, heads[0], dims[0]), (keys, heads[1], dims[0]), (keys, heads[1], dims[1]),
              (queries, heads[0], dims[1]))
    return Sequence(*(torch.randn(shape, device=device).bfloat16() for shape in shapes),
                    torch.randn(heads[0], queries, device=device))


def gradients(results: tuple[Tensor, ...], leaves: list[Tensor], sinks: Tensor | None,
              *given: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """dq, dk and dv, and the gradient of the sinks."""
    found = torch.autograd.grad(results[:2], [*leaves, *[sinks] * (sinks is not None)], given)
    return list(found[:3]), None if sinks is None else found[3]


def dense(batch: list[Sequence], index: int, sinks: Tensor | None,
          options: dict) -> tuple[list[Tensor], Tensor | None]:
    """Gradients of the sequence with this index in a batch of equal lengths."""
    *leaves, dout, dlse = map(torch.stack, zip(*batch))
    leaves = [x.requires_grad_() for x in leaves]
    results = flash_attn_func(*leaves, s_aux=sinks, return_attn_probs=True, **options)
    found, dsinks = gradients(results, leaves, sinks, dout, dlse)
    return [x[index] for x in found], dsinks


def packed(batch: list[Sequence], index: int, sinks: Tensor | None, options: dict, hint: int = 0,
           spare: int = 0) -> tuple[list[Tensor], Tensor | None]:
    """Gradients of the sequence with this index in packed sequences. Each has `spare` rows with NaN
    that do not count.
    """
    device = batch[0].q.device
    lengths = [[x.size(0) for x in column] for column in list(zip(*batch))[:2]]
    lists = {}
    for name, used in zip('qk', lengths):
        lists[f'cu_seqlens_{name}'] = starts([x + spare for x in used], device)
        lists[f'max_seqlen_{name}'] = max(used) + spare + hint
        if spare:
            lists[f'seqused_{name}'] = ints(used, device)
    padded = [[F.pad(x, (0, 0, 0, 0, 0, spare), value=math.nan) for x in one[:4]] for one in batch]
    *leaves, dout = map(torch.cat, zip(*padded))
    dlse = torch.cat([F.pad(one.dlse, (0, spare), value=math.nan) for one in batch], 1)
    leaves = [x.requires_grad_() for x in leaves]
    results = flash_attn_varlen_func(*leaves, **lists, s_aux=sinks, return_attn_probs=True,
                                     **options)
    found, dsinks = gradients(results, leaves, sinks, dout, dlse)
    counts = [[x + spare for x in lengths[side]] for side in (0, 1, 1)]
    rows = [lengths[side][index] for side in (0, 1, 1)]
    return [x.split(count)[index][:row] for x, count, row in zip(found, counts, rows)], dsinks


MASKS = {'causal': {'causal': True}, 'full': {},
         'window': {'causal': True, 'window_size': (200, 0)},
         'both sides': {'window_size': (90, 60)}, 'softcap': {'causal': True, 'softcap': 15.0},
         'chunk': {'causal': True, 'attention_chunk': 300},
         'sinks': {'causal': True, 'has_sinks': True}}


@pytest.mark.parametrize('options', MASKS.values(), ids=MASKS)
@pytest.mark.parametrize('heads', [(4, 4), (8, 2)], ids=str)
@HEAD_DIMS
def test_gradients_of_a_sequence(dims, heads, options, kernels):
    """Its dq, dk and dv have the same bits alone, dense or packed, and at any place among any
    others. The gradient of the sinks is a sum over all: it is compared alone. In the emulator the
    sequences are short.
    """
    pick = random.Random(str((dims, heads, options)))
    torch.manual_seed(pick.randint(0, 1000))
    scale = 1 if kernels.type == 'cuda' else 6
    length = pick.randint(700, 1500) // scale
    keys = length + pick.choice((0, 0, -40, 333 // scale))
    options = dict(options, deterministic=True, split_size=512 // scale)
    sinks = torch.randn(heads[0], device=kernels) if options.pop('has_sinks', False) else None
    if sinks is not None:
        sinks.requires_grad_()

    def made(*sizes: tuple[int, int]) -> list[Sequence]:
        return [sequence(*size, heads, dims, kernels) for size in sizes]
    own, = made((length, keys))
    wanted, dsinks = dense([own], 0, sinks, options)
    alone, dsinks_alone = packed([own], 0, sinks, options, hint=3)
    ways = {'packed, alone': alone}
    before, after = made((length, keys), (length, keys))
    for at, batch in enumerate(([own, before, after], [before, own], [before, after, own])):
        ways[f'dense, entry {at} of {len(batch)}'], _ = dense(batch, at, sinks, options)
    for count in (1, 4):
        others = [made(*((pick.randint(0, 900) // scale, pick.randint(0, 900) // scale)
                         for _ in range(count))) for _ in 'ab']
        nothing = made((0, 0), (0, 60), (5, 0))
        batch = [*nothing, *others[0], own, *nothing, *others[1]]
        for spare in (0, 7):
            ways[f'packed, between {count} and {count}, {spare} rows unused'], _ = packed(
                batch, 3 + count, sinks, options, hint=700, spare=spare)
    for way, found in ways.items():
        for name, x, y in zip(('dq', 'dk', 'dv'), found, wanted):
            compare.check_equal(x, y, f'{name}: {way}')
    if sinks is not None:
        compare.check_equal(dsinks_alone, dsinks, 'gradient of the sinks')
