"""mask= on float8_e4m3fn, held to the bar of tests/support/fp8_data.py, and of the functions that
quantise. Keys that no query sees, and on a GPU values whose tile no query sees, hold NaN.
"""
from __future__ import annotations

import pytest
import torch

from flash_attn3 import AttentionMask, flash_attn_fp8_func, flash_attn_func

from tests.gpu.common import check_same, spoil_allocator
from tests.support.fp8_data import E4M3
from tests.support.lists import ints
from tests.support.mask_cases import INTERVALS, Blocks, MaskCase
from tests.support.mask_cases_fp8 import (check_case, check_in_one_call, check_straight_through,
                                          run)

HEAD_DIMS = {64: {}, 128: {}, 256: {}, 80: {}, 192: dict(head_dim_v=128)}
every_head_dim = pytest.mark.parametrize('head_dim', HEAD_DIMS)
BLOCKS = {'128': Blocks(), '64': Blocks(64, 64, heads='q'), 'both': Blocks(128, 64, 0.3, 'k', True),
          'few': Blocks(64, 128, 0.1, 'q', True)}
PACKED = dict(is_packed=True, lengths=((3, 5), (200, 100), (0, 7), (130, 0), (300, 900)))
MANY = dict(lengths=((1100, 1300),) * 2, heads=(6, 2))
SHAPES = {'square': {}, 'long_keys': dict(lengths=((10, 1700),) * 2), 'no_keys': dict(
    lengths=((70, 0),)), 'packed': PACKED, 'rows_after': PACKED | dict(behind=100),
    'mqa': dict(heads=(5, 1)), 'many': MANY, 'sinks': dict(s_aux=True),
    'margin': dict(sm_margin=100), 'maxima': dict(max_logits=True)}


def case_of(head_dim: int, **options) -> MaskCase:
    return MaskCase(head_dim=head_dim, **HEAD_DIMS[head_dim] | options)


@pytest.mark.smoke
@every_head_dim
@pytest.mark.parametrize('granularity', ['head', 'block'])
@pytest.mark.parametrize('intervals', [*INTERVALS, 'one', 'two'])
def test_intervals(intervals, granularity, head_dim, device):
    spoil_allocator(device)
    check_case(case_of(head_dim, intervals=intervals), device, granularity)


@every_head_dim
@pytest.mark.parametrize('blocks', BLOCKS)
def test_blocks(blocks, head_dim, device):
    for intervals in ('', 'tree'):
        check_case(case_of(head_dim, blocks=BLOCKS[blocks], intervals=intervals), device)


@pytest.mark.smoke
@every_head_dim
@pytest.mark.parametrize('shape', SHAPES)
def test_shapes(shape, head_dim, device):
    """Some have several blocks of keys, which have scales of their own."""
    for options in (dict(intervals='two'), dict(blocks=BLOCKS['few']),
                    dict(intervals='sinks', blocks=BLOCKS['both'])):
        check_case(case_of(head_dim, **options | SHAPES[shape]), device)


@every_head_dim
def test_documents(head_dim, device):
    """They take the lists, as the scales of packed sequences have another layout."""
    def shown(case, _):
        cu = ints([0, 120, 300], device)
        row = torch.arange(300, device=device)
        own = (row[:, None] >= 120) == (row >= 120)
        return AttentionMask.documents(cu, 300), [own & (row <= row[:, None])] * 2
    for check in (check_case, check_in_one_call):
        check(case_of(head_dim), device, maker=shown)


@pytest.mark.smoke
@pytest.mark.parametrize('head_dim, shape', [
    *((128, shape) for shape in SHAPES), *((head_dim, 'square') for head_dim in (64, 256, 192))])
def test_in_one_call(shape, head_dim, device):
    for granularity, options in (('block', dict(intervals='two', dtype='fp16')), (
            'head', dict(blocks=BLOCKS['few'])), ('block', dict(blocks=BLOCKS['64']))):
        check_in_one_call(case_of(head_dim, **options | SHAPES[shape]), device, granularity)


@pytest.mark.parametrize('fp8_backward', ['given', 'rounded'])
@pytest.mark.parametrize('head_dim', [64, 128, 256])
def test_straight_through(head_dim, fp8_backward, device):
    for options in (dict(intervals='prefix', s_aux=True), dict(blocks=BLOCKS['64']),
                    dict(intervals='tree', blocks=BLOCKS['128']),
                    dict(intervals='documents', **PACKED)):
        check_straight_through(case_of(head_dim, **options), device, fp8_backward)


def test_the_same_bits_each_time(cuda):
    case = case_of(128, intervals='two', blocks=BLOCKS['few'], **MANY)
    wanted, _ = run(case, cuda, 'block')
    for _ in range(5):
        check_same(run(case, cuda, 'block')[0], wanted)


def test_gradients_are_refused(device):
    q, k, v = (x.to(E4M3).requires_grad_() for x in torch.randn(3, 1, 130, 2, 64, device=device))
    mask = AttentionMask.prefix_lm(ints([30], device), 130)
    out = flash_attn_func(q, k, v, mask=mask)
    with pytest.raises(NotImplementedError, match='requires_grad=False with float8_e4m3fn'):
        out.sum().backward()


@pytest.mark.parametrize('changes, text', [
    (dict(softcap=3.0), "no softcap or fp8_accum of 'promote' with float8_e4m3fn and mask on a "
     'GPU'),
    (dict(fp8_accum='promote'), 'with float8_e4m3fn and mask on a GPU')])
def test_what_kernels_do_not_have(changes, text, cuda):
    tensors = torch.randn(3, 1, 130, 2, 64, device=cuda)
    mask = AttentionMask.prefix_lm(ints([30], cuda), 130)
    with pytest.raises((RuntimeError, NotImplementedError), match=text):
        flash_attn_func(*tensors.to(E4M3), mask=mask, **changes)
    with pytest.raises((RuntimeError, NotImplementedError), match='flash_attn_fp8_func: expected'):
        flash_attn_fp8_func(*tensors.bfloat16(), mask=mask, **changes)
