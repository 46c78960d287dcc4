"""mask= on CPU tensors: results beside float64, gradients, constructors, refusals. On a GPU:
tests/gpu/test_attention_mask.py; the lists for kernels: test_mask_lists.py.
"""
from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import flash_attn3
from flash_attn3 import AttentionMask, flash_attn_func, flash_attn_varlen_func
from flash_attn3.cpu import fallback
from flash_attn3.ops import checks, library
from flash_attn3.ops.mask_lists import Tiles

from tests.support.completion_cases import TreeCase
from tests.support.lists import ints, starts
from tests.support.mask_cases import (INTERVALS, Blocks, MaskCase, call, check, check_case,
                                      check_documents, made)

PACKED = (3, 5), (200, 100), (0, 7), (130, 0), (300, 400)
OPTIONS = {
    'plain': {}, 'mha': dict(heads=(3, 3)), 'mqa': dict(heads=(5, 1)), 'sinks': dict(s_aux=True),
    'softcap': dict(softcap=3.0), 'rows': dict(max_logits=True), 'no_lse': dict(lse=False),
    'out': dict(out=True, max_logits=True), 'head_dim_v': dict(head_dim_v=40),
    'execution': dict(pack_gqa=True, sm_margin=7), 'fp16': dict(dtype='fp16'),
    'fp64': dict(dtype='fp64'), 'packed': dict(is_packed=True, lengths=PACKED, behind=9),
    'long_keys': dict(lengths=((10, 500),) * 2), 'few_keys': dict(lengths=((200, 30),)),
    'no_keys': dict(lengths=((70, 0),)), 'no_queries': dict(lengths=((0, 70),)),
}
every_option = pytest.mark.parametrize('option', OPTIONS)


# --------------------------------------------------------------------------------------- results
@pytest.mark.parametrize('intervals', [*INTERVALS, 'one', 'two'])
def test_intervals(intervals):
    check_case(MaskCase(intervals=intervals, head_dim=24), 'cpu')


@pytest.mark.parametrize('blocks', [Blocks(), Blocks(64, 128, heads='q'),
                                    Blocks(128, 64, heads='k', by_batch=True)], ids=str)
def test_blocks(blocks):
    for intervals in ('', 'sinks'):
        check_case(MaskCase(intervals=intervals, blocks=blocks, head_dim=24), 'cpu')


@every_option
def test_both(option):
    options = dict(intervals='two', head_dim=24) | OPTIONS[option]
    check_case(MaskCase(**options), 'cpu')
    check_case(MaskCase(blocks=Blocks(64, 64, heads='k', by_batch=True), **options), 'cpu')


@pytest.mark.parametrize('intervals', ['one', 'two'])
def test_intervals_of_each_sequence(intervals):
    for blocks in (None, Blocks(by_batch=True, heads='q')):
        check_case(MaskCase(intervals=intervals, by_batch=True, blocks=blocks, head_dim=24), 'cpu')


def test_a_mask_serves_many_calls():
    """Calls with other heads, dtypes and head dims; the mask keeps few lists."""
    case = MaskCase(intervals='two', blocks=Blocks(heads='k'), lengths=((40, 90),))
    given = made(case, 'cpu')
    for heads in (2, 4, 6, 8, 10, 12, 14, 16, 18, 20):
        other = dataclasses.replace(case, heads=(heads, 2))
        tensors = made(other, 'cpu')
        check(other, tensors._replace(visible=_of_heads(given.visible, heads),
                                      k=tensors.k.nan_to_num()),
              call(other, tensors._replace(mask=given.mask, k=tensors.k.nan_to_num())))
    assert len(given.mask._kept) <= 8


def _of_heads(visible: list[Tensor], heads: int) -> list[Tensor]:
    """Masks of 4 query heads of 2 KV heads for other query heads."""
    return [x[::2].repeat_interleave(heads // 2, 0) for x in visible]


# ------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize('case', [
    MaskCase(intervals='two', by_batch=True, lengths=((9, 11),) * 2, dtype='fp64', head_dim=3),
    MaskCase(intervals='blind', blocks=Blocks(64, 64), lengths=((70, 80),), dtype='fp64',
             head_dim=2, heads=(2, 1), s_aux=True, softcap=2.0),
    MaskCase(intervals='two', is_packed=True, lengths=((3, 5), (0, 2), (4, 0), (6, 7)), behind=2,
             dtype='fp64', head_dim=3)], ids=str)
def test_gradients(case):
    given = made(case, 'cpu')
    given = given._replace(**{name: getattr(given, name).nan_to_num() for name in 'qkv'},
                           s_aux=None if given.s_aux is None else given.s_aux.double())
    leaves = {name: x.clone().requires_grad_() for name, x in given._asdict().items()
              if isinstance(x, Tensor)}

    def results(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, _ = call(case, given._replace(**dict(zip(leaves, tensors))))
        return out, lse.masked_fill(lse.isinf(), 0)

    assert torch.autograd.gradcheck(results, tuple(leaves.values()), fast_mode=True)
    with torch.no_grad():
        wanted = call(case, given)
    got = call(case, given._replace(**leaves))
    assert all(torch.equal(*pair) for pair in zip(got[:2], wanted[:2]))
    assert got[0].requires_grad and not wanted[0].requires_grad


# ---------------------------------------------------------------------------------- constructors
def shown_by(mask: AttentionMask, seqlen_q: int, seqlen_k: int | None = None,
             **packed: Tensor) -> Tensor:
    """(seqlen_q, seqlen_k) bool: one-hot values and equal scores say which keys count."""
    seqlen_k = seqlen_k or seqlen_q
    q, k = torch.zeros(1, seqlen_q, 1, 8), torch.zeros(1, seqlen_k, 1, 8)
    out = flash_attn_func(q, k, torch.eye(seqlen_k)[None, :, None], mask=mask)
    return out[0, :, 0] > 0


def below(size: int) -> Tensor:
    return torch.ones(size, size).tril().bool()


@pytest.mark.parametrize('blocks', [
    torch.ones(1, 2, 2, 2, dtype=torch.bool)[:, :1, :1, ::2],
    torch.ones(1, 1, 1, 3, dtype=torch.bool).transpose(2, 3)], ids=['every_other', 'transposed'])
def test_blocks_of_any_strides(blocks):
    q, k = (torch.randn(1, 64 * count, 2, 8) for count in blocks.shape[2:])
    out = flash_attn_func(q, k, k, mask=AttentionMask.from_blocks(blocks, 64, 64))
    torch.testing.assert_close(out, flash_attn_func(q, k, k))


def test_masks_without_data():
    rows = AttentionMask.from_intervals(torch.zeros(64, 1, 2, dtype=torch.int32, device='meta'),
                                        torch.zeros(3, dtype=torch.int32, device='meta'))
    blocks = AttentionMask.from_blocks(torch.ones(1, 1, 1, dtype=torch.bool, device='meta'))
    assert 'intervals (64, 1, 2)' in repr(rows & blocks & rows)


def test_documents():
    mask = AttentionMask.documents(ints([2, 5, 5, 9]), 10)
    same = torch.zeros(10, 10, dtype=torch.bool)
    same[2:5, 2:5] = same[5:9, 5:9] = True
    assert torch.equal(shown_by(mask, 10), same & below(10))
    whole = AttentionMask.documents(ints([2, 5, 5, 9]), 10, causal=False)
    assert torch.equal(shown_by(whole, 10), same)
    x = torch.randn(2, 10, 2, 8)
    both = AttentionMask.documents(torch.stack([ints([0, 4, 10]), ints([0, 10, 10])]), 10)
    out = flash_attn_func(x, x, x, mask=both)
    packed = flash_attn_varlen_func(*[x.flatten(0, 1)] * 3, *[ints([0, 4, 10, 20])] * 2, 10, 10,
                                    causal=True)
    torch.testing.assert_close(out.flatten(0, 1), packed)


@pytest.mark.parametrize('layout', ['rows', 'batch_by_columns'])
@pytest.mark.parametrize('options', [{}, dict(causal=False), dict(by_batch=True),
                                     dict(s_aux=True, softcap=2.0), dict(out=True)], ids=str)
def test_documents_as_packed_sequences(options, layout):
    check_documents('cpu', torch.float64, 24, layout == 'rows', **options)


def test_documents_of_a_batch_are_listed_once():
    """Also by a call in inference mode, after which one has gradients."""
    mask = AttentionMask.documents(ints([0, 4, 9]), 9)
    x = torch.randn(3, 9, 2, 8, requires_grad=True)
    with torch.inference_mode():
        flash_attn_func(x, x, x, mask=mask)
    first = mask.as_packed('', x, x, lambda: None)
    flash_attn_func(x, x, x, mask=mask).sum().backward()
    again = mask.as_packed('', x, x, lambda: None)
    assert first[0] is again[0] and first[1] is again[1] and len(mask._kept) == 1
    assert first[0].tolist() == [0, 0, 4, 9, 9, 9, 13, 18, 18, 18, 22, 27, 27]


def test_documents_of_none():
    assert not shown_by(AttentionMask.documents(ints([0]), 5), 5).any()


def test_prefix_lm_of_none():
    q = torch.randn(0, 5, 2, 8)
    assert flash_attn_func(q, q, q, mask=AttentionMask.prefix_lm(ints([]), 5)).shape == q.shape


def test_prefix_lm():
    mask = AttentionMask.prefix_lm(ints([4]), 9)
    wanted = below(9)
    wanted[:, :4] = True
    assert torch.equal(shown_by(mask, 9), wanted)
    x = torch.randn(11, 2, 8)
    packed = AttentionMask.prefix_lm(ints([2, 0, 3]), 11, starts([4, 0, 6]))
    out = flash_attn_varlen_func(x, x, x, *[starts([4, 0, 6])] * 2, 6, 6, mask=packed)
    for first, length, prefix in ((0, 4, 2), (4, 6, 3)):
        own = x[None, first:first + length]
        alone = AttentionMask.prefix_lm(ints([prefix]), length)
        torch.testing.assert_close(out[first:first + length],
                                   flash_attn_func(own, own, own, mask=alone)[0])
    assert (out[10] == 0).all()


def test_tree():
    """Prompt, a completion, one that continues it, another of the prompt; a second tree."""
    lengths, parents = [3, 2, 2, 1, 2, 1], [-1, 0, 1, 0, -1, 4]
    mask = AttentionMask.tree(lengths, parents)
    segment = torch.arange(6).repeat_interleave(torch.tensor(lengths))
    continued = {0: [0], 1: [0, 1], 2: [0, 1, 2], 3: [0, 3], 4: [4], 5: [4, 5]}
    wanted = torch.tensor([[b in continued[a] for b in segment.tolist()]
                           for a in segment.tolist()])
    assert torch.equal(shown_by(mask, 11), wanted & below(11))
    whole = AttentionMask.tree(lengths, parents, causal=False)
    assert torch.equal(shown_by(whole, 11), wanted)


# A tree with an empty completion, a prompt of no rows, one alone, no segment, rows of one.
TREES = ((4, 3, 0, 2), (0, 2, 1), (3,), (), (1, 1, 1))


@pytest.mark.parametrize('trees, behind', [
    (TREES, 0), (TREES, 2), ((), 1), (((),), 1), (((0, 0), ()), 3), (((5,), (1, 4)), 0)], ids=str)
def test_completions(trees, behind):
    case = TreeCase(trees, behind=behind)
    mask = AttentionMask.completions(*case.lists('cpu'), case.rows)
    assert torch.equal(shown_by(mask, case.rows), case.visible('cpu'))


@pytest.mark.parametrize('trees', [[-5, 90, 3], [2 ** 31 - 1, -2 ** 31], [7, 0, 99, 1]], ids=str)
def test_unchecked_completions_index_nothing_outside(trees, monkeypatch):
    """What a GPU would do with them: an index out of range ends the process."""
    monkeypatch.setattr(checks, 'reads_contents', lambda x: False)
    for lists in ([0, 3, 5, 9], [4, 3, 9, -1], [99, -2 ** 31, 2 ** 31 - 1, 5]):
        AttentionMask.completions(ints(lists), ints(trees), 9)


@pytest.mark.parametrize('size', [64, 128])
def test_from_block_mask(size):
    def prefix(batch, head, query, key):
        return (key <= query) | (key < 100)

    flex = create_block_mask(prefix, None, None, 300, 300, device='cpu', BLOCK_SIZE=size)
    intervals = AttentionMask.prefix_lm(ints([100]), 300)
    mask = AttentionMask.from_block_mask(flex, intervals)
    assert torch.equal(shown_by(mask, 300), shown_by(intervals, 300))
    with pytest.raises(RuntimeError, match='expected full blocks, or intervals .* got partial'):
        AttentionMask.from_block_mask(flex)
    with pytest.raises(RuntimeError, match='a seqlen_q of 320, got one for 300'):
        shown_by(mask, 320, 300)


def test_full_blocks_of_a_block_mask():
    flex = create_block_mask(lambda batch, head, query, key: (query // 128 + key // 128) % 2 == 0,
                             None, None, 256, 384, device='cpu')
    key, query = torch.arange(384) // 128, torch.arange(256)[:, None] // 128
    assert torch.equal(shown_by(AttentionMask.from_block_mask(flex), 256, 384),
                       (query + key) % 2 == 0)
    small = create_block_mask(lambda batch, head, query, key: key >= 0, None, None, 64, 64,
                              device='cpu', BLOCK_SIZE=32)
    with pytest.raises(RuntimeError, match='BLOCK_SIZE of 64 or 128, got'):
        AttentionMask.from_block_mask(small)


def test_intersections():
    ones, twos = (made(MaskCase(lengths=((90, 80),), intervals=name), 'cpu')
                  for name in ('window', 'two'))
    both = shown_by(ones.mask & twos.mask, 90, 80)
    assert torch.equal(both, ones.visible[0][0] & twos.visible[0][0])
    blocks = [torch.rand(1, 2, 3) < 0.5, torch.rand(1, 1, 2) < 0.5]
    mask = AttentionMask.from_blocks(blocks[0], 64, 64) & AttentionMask.from_blocks(blocks[1])
    wide = blocks[0] & blocks[1].repeat_interleave(2, 1).repeat_interleave(2, 2)[:, :2, :3]
    assert torch.equal(shown_by(mask, 90, 150)[::64, ::64], wide[0])
    assert 'intervals (1, 90, 2, 2)' in repr(twos.mask)


# -------------------------------------------------------------------------------------- refusals
Q = torch.randn(2, 130, 4, 8)
K = torch.randn(2, 150, 2, 8)
ROWS = torch.tensor([[0, 150]], dtype=torch.int32).repeat(130, 1, 1)
MASK = AttentionMask.from_intervals(ROWS)
ONES = torch.ones(4, 2, 2, dtype=torch.bool)


@pytest.mark.parametrize('options, text', [
    (dict(causal=True), 'no causal with mask, got causal'),
    (dict(window_size=(3, 0)), 'no window_size with mask'),
    (dict(attention_chunk=4), 'no attention_chunk with mask'),
    (dict(num_splits=2), 'no num_splits with mask'), (dict(split_size=64), 'no split_size with'),
    (dict(num_splits=-1), 'num_splits to be from 0'),
    (dict(mask=ROWS), 'mask to be an AttentionMask, got Tensor'),
    (dict(softcap=-1.0), 'softcap to be 0'),
], ids=str)
def test_what_does_not_go_with_a_mask(options, text):
    with pytest.raises(RuntimeError, match=f'^flash_attn3.*{text}'):
        flash_attn_func(Q, K, K, **dict(mask=MASK) | options)


@pytest.mark.parametrize('mask, text', [
    (AttentionMask.from_intervals(ROWS[:-1]), 'a seqlen_q of 130, got one for 129'),
    (AttentionMask.from_intervals(ROWS.expand(3, -1, -1, -1)),
     'for 2 sequences, the batch of q, or for all, got 3'),
    (AttentionMask.from_blocks(ONES[:3]), '4 heads of q, 2 heads of k, or all, got 3'),
    (AttentionMask.from_blocks(ONES, 64), 'a seqlen_q of 130, got one for 65 to 128'),
    (AttentionMask.from_blocks(ONES, 128, 64), 'a seqlen_k of 150, got one for 65 to 128'),
    (AttentionMask.from_intervals(ROWS[:, :], starts([100, 30])), 'dense sequences, made without'),
    (MASK & AttentionMask.from_blocks(ONES, 64), 'a seqlen_q of 130, got one for 130 to 128'),
], ids=str)
def test_a_mask_of_other_sizes(mask, text):
    with pytest.raises(RuntimeError, match=f'^flash_attn3.flash_attn_func: expected mask .*{text}'):
        flash_attn_func(Q, K, K, mask=mask)


@pytest.mark.parametrize('interval, text', [
    ((-1, 3), 'in 0 to 150, the keys, got -1 to 3'), ((5, 4), 'got 5 to 4'),
    ((0, 151), r'intervals\[0, 7, 0\] from begin to end, in 0 to 150, .* got 0 to 151')])
def test_wrong_values(interval, text):
    rows = ROWS.clone()
    rows[7, 0] = ints(interval)
    with pytest.raises(RuntimeError, match=text):
        flash_attn_func(Q, K, K, mask=AttentionMask.from_intervals(rows))


PACKED_Q, PACKED_K, STARTS = Q.flatten(0, 1), K.flatten(0, 1), starts([100, 160])
ALL = torch.zeros(260, 1, 2, dtype=torch.int32)


@pytest.mark.parametrize('mask, options, text', [
    (MASK, {}, 'packed sequences, made with cu_seqlens'),
    (AttentionMask.from_intervals(ALL[1:], STARTS), {}, 'total_q of 260, .* got one for 259'),
    (AttentionMask.from_intervals(ALL, starts([260])), {}, '2 sequences, .* got one for 1'),
    (AttentionMask.from_intervals(ALL, starts([90, 170])), {}, 'the cu_seqlens of the call'),
    (AttentionMask.from_blocks(ONES), dict(max_seqlen_k=100), 'max_seqlen_k of 200 or more'),
    (AttentionMask.from_blocks(ONES, 64), {}, 'longest seqlen_q of 160, got one for 128'),
    (AttentionMask.from_blocks(ONES, 128, 64), {}, 'longest seqlen_k of 200, got one for 128'),
    (AttentionMask.from_blocks(ONES.expand(3, -1, -1, -1)), {}, '2 sequences, .* got 3'),
    (AttentionMask.from_blocks(ONES), dict(seqused_k=ints([1, 2])), 'no seqused_k with mask'),
    (AttentionMask.from_intervals(ALL + ints([0, 101]), STARTS), {}, r'0 to 100, the keys, got 0'),
], ids=str)
def test_packed_refusals(mask, options, text):
    options = dict(max_seqlen_q=160, max_seqlen_k=200) | options
    with pytest.raises(RuntimeError, match=f'^flash_attn3.flash_attn_varlen_func: .*{text}'):
        flash_attn_varlen_func(PACKED_Q, PACKED_K, PACKED_K, STARTS, starts([100, 200]), mask=mask,
                               **options)


@pytest.mark.parametrize('make, text', [
    (lambda: AttentionMask.from_intervals(ROWS.long()), 'from_intervals: expected intervals'),
    (lambda: AttentionMask.from_intervals(ROWS[:, 0]), r'intervals of .* \(130, 2\), int32'),
    (lambda: AttentionMask.from_intervals(ROWS.expand(-1, 3, -1)), 'n from 1 to 2'),
    (lambda: AttentionMask.from_intervals(ROWS, STARTS.long()), 'cu_seqlens to be int32'),
    (lambda: AttentionMask.from_intervals(ROWS[None], STARTS), r'\(total_q, n, 2\)'),
    (lambda: AttentionMask.from_blocks(ONES, 32), 'block_q to be 64 or 128, got 32'),
    (lambda: AttentionMask.from_blocks(ONES, 64, 256), 'block_k to be 64 or 128, got 256'),
    (lambda: AttentionMask.from_blocks(ONES.int()), r'block_mask of bool .* got \(4, 2, 2\), int'),
    (lambda: AttentionMask.from_blocks(ONES[0]), 'block_mask of bool'),
    (lambda: AttentionMask.documents(ints([0, 3]).long(), 4), 'cu_documents to be int32 of 1 or 2'),
    (lambda: AttentionMask.prefix_lm(ints([2]), 4, starts([2, 2])), 'cu_seqlens on cpu of 2 numb'),
    (lambda: AttentionMask.completions([0, 3], ints([0, 1]), 3), r'int32 .*, got \[0, 3\]'),
    (lambda: AttentionMask.completions(ints([0, 3]), ints([]), 3), 'cu_trees to be int32 of 1'),
    (lambda: AttentionMask.completions(ints([0, 3]), ints([0]).to('meta'), 3), 'cu_trees on cpu'),
    (lambda: AttentionMask.completions(ints([1, 3]), ints([0, 1]), 3), r'cu_seqlens\[0\] to be 0'),
    (lambda: AttentionMask.completions(ints([0, 4]), ints([0, 1]), 3),
     'from 0, its start, to 3, the rows of a sequence, got 4'),
    (lambda: AttentionMask.completions(ints([0, 3]), ints([1, 1]), 3), r'cu_trees\[0\] to be 0'),
    (lambda: AttentionMask.completions(ints([0, 1, 2, 3]), ints([0, 2, 1, 3]), 3),
     r'cu_trees\[2\], the end of tree 1, to be from 2, its prompt, to 3, the segments, got 1'),
    (lambda: AttentionMask.completions(ints([0, 1, 3]), ints([0, 1]), 3),
     'cu_trees to end at 2, the segments, got 1'),
    (lambda: AttentionMask.tree([1, 2], [-1]), '2 parents, one for each segment, got 1'),
    (lambda: AttentionMask.tree([1, 2], [-1, 1]), r'parents\[1\] from -1 to 0, got 2 and 1'),
    (lambda: AttentionMask.tree([2] * 5, [-1, 0, 0, 2, 2]), 'two intervals of keys in segment 4'),
    (lambda: AttentionMask.prefix_lm(ints([2, 1]), 8, starts([4, 4]))
     & AttentionMask.from_intervals(ROWS[:8], starts([3, 5])), 'the same cu_seqlens'),
    (lambda: MASK & AttentionMask.from_intervals(ROWS[1:]), '__and__: expected intervals of'),
    (lambda: AttentionMask.from_intervals(ROWS.expand(-1, 2, -1)) & AttentionMask.from_intervals(
        ROWS.expand(-1, 2, -1)), 'one of them of one interval a query'),
], ids=lambda x: x if isinstance(x, str) else '')
def test_refusals_of_constructors(make, text):
    with pytest.raises(RuntimeError, match=f'^flash_attn3.AttentionMask.*{text}'):
        make()


@pytest.mark.parametrize(('name', 'tensor', 'text'), [
    ('mask_rows', torch.zeros(2, 6, 4, dtype=torch.int32).as_strided((2, 6, 4), (22, 4, 1)),
     ' with an address and strides of multiples of 16 bytes'),
    ('mask_rows', torch.zeros(25, dtype=torch.int32)[1:].view(1, 6, 4), ' with an address'),
    ('mask_rows', torch.zeros(1, 6, 8, dtype=torch.int32)[..., :4],
     r'.stride\(1\) to be 4, got 8; hint: call mask_rows.contiguous\(\)'),
    ('mask_rows', torch.zeros(1, 6, 4), '.dtype to be int32, got float32'),
    ('mask_blocks', torch.ones(1, 1, 1, 1, dtype=torch.int32), '.dtype to be bool, got int32'),
    ('mask_blocks', torch.ones(3, 1, 1, 1, dtype=torch.bool),
     r' to have the shape \(1 or 2, 1 or 2, q blocks, k blocks\), got \(3, 1, 1, 1\)'),
    ('mask_blocks', torch.ones(1, 3, 1, 1, dtype=torch.bool), r' .*, got \(1, 3, 1, 1\)'),
    ('key_lists', torch.zeros(1, 1, 1, 2, dtype=torch.int32),
     r' to have the shape \(1 or 2, 1 or 2, 1, entries \+ 5\), got \(1, 1, 1, 2\)'),
], ids=lambda x: x if isinstance(x, str) else '')
def test_the_op_refuses_other_tensors(name, tensor, text):
    q = torch.randn(2, 6, 2, 8)
    with pytest.raises(RuntimeError, match=f'expected {name}{text}'):
        torch.ops.flash_attn3.attend(q, q, q, **{name: tensor})


def test_other_calls_refuse():
    x = Q.clone().requires_grad_()
    with pytest.raises(RuntimeError, match='requires_grad=False together with out='):
        flash_attn_func(x, K, K, mask=MASK, out=torch.empty_like(Q))
    with pytest.raises(NotImplementedError, match='reverse-mode'):
        torch.func.jvp(lambda q: flash_attn_func(q, K, K, mask=MASK), (Q,), (Q,))
    with flash_attn3.invariant(), pytest.raises(RuntimeError, match='no split_size with mask'):
        flash_attn_func(Q, K, K, mask=MASK)
    with pytest.raises(TypeError):
        MASK & ROWS


def test_a_mask_elsewhere():
    meta = [x.to('meta') for x in (Q, K, K)]
    with pytest.raises(RuntimeError, match='mask on the device of q, meta, got cpu'):
        flash_attn_func(*meta, mask=MASK)


def test_lists_are_kept_for_calls_alike():
    """Lists hold all queries whatever max_seqlen_q says, and other calls make others."""
    mask = AttentionMask.from_intervals(torch.tensor([[[0, 100]]] * 256, dtype=torch.int32),
                                        torch.tensor([0, 256], dtype=torch.int32))
    q = torch.randn(256, 1, 64)

    starts = torch.tensor([0, 256], dtype=torch.int32)
    ends = torch.tensor([0, 200], dtype=torch.int32)

    def tensors_of(ends, keys=256, longest=256):
        return mask.tensors_of('attend', (q, q[:keys]), (starts, ends, longest, 256), None,
                               lambda: None)

    first = tensors_of(ends)
    assert tensors_of(ends, longest=1) is first
    assert tensors_of(ends, keys=200) is not first
    ends += 1
    assert tensors_of(ends) is not first
    with torch.inference_mode():
        uncounted = ends.clone()
    assert tensors_of(uncounted) is not tensors_of(uncounted)


def test_the_op_has_a_fake():
    q = torch.empty(2, 130, 4, 8, device='meta', dtype=torch.bfloat16)
    k = torch.empty(2, 150, 2, 16, device='meta', dtype=torch.bfloat16)
    rows = torch.empty(1, 130, 4, dtype=torch.int32, device='meta')
    out, lse, max_logits = torch.ops.flash_attn3.attend(q, k[..., :8], k, mask_rows=rows)
    assert out.shape == (2, 130, 4, 16) and lse.shape == (2, 4, 130) and max_logits.shape == (0,)


# ---------------------------------------------------------------------------------- other devices
@pytest.mark.parametrize('case', [
    MaskCase(intervals='two', is_packed=True, blocks=Blocks(heads='q'), max_logits=True),
    MaskCase(intervals='one', is_packed=True, lengths=PACKED, s_aux=True, out=True)], ids=str)
def test_gpus_without_kernels_take_the_plain_path(case, monkeypatch):
    """Shown on the CPU, whose tensors say that no kernel serves them."""
    warned = []
    monkeypatch.setattr(fallback, 'warn_once', lambda *arguments: warned.append(arguments))
    monkeypatch.setattr(library, 'kernels_serve', lambda device: False)

    class OnGpu(torch.Tensor):
        is_cuda = True
        __torch_function__ = torch._C._disabled_torch_function_impl

    given = made(case, 'cpu')
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)
    monkeypatch.setattr(torch.cuda, 'current_stream', mock.MagicMock())
    check(case, given, call(case, given._replace(q=given.q.as_subclass(OnGpu))))
    assert len(warned) == 1


def test_tiles_of_kernels():
    dims = 64, 72, 128, 136, 192, 256
    assert [Tiles.of(dim, False, False) for dim in dims] == [(128, 128, 0)] * 3 + [(64, 128, 0)] * 3
    assert {Tiles.of(dim, True, False) for dim in dims} == {(64, 128, 0)}
    assert {Tiles.of(dim, False, False, True) for dim in dims} == {(128, 128, 0)}
    of_gradients = [Tiles.of(dim, False, True) for dim in dims]
    assert of_gradients == [(128, 128, 128)] + [(128, 128, 64)] * 2 + [(64, 128, 64)] * 3
    calls = [tiles.of_calls() for tiles in of_gradients]
    assert calls == [[tiles] for tiles in of_gradients[:3]] + [[(64, 128, 0), (128, 128, 64)]] * 3
    assert Tiles(128).of_blocks() == (64, 64, 0) and Tiles(64).of_blocks() == (64, 128, 0)
    assert Tiles(128, queries=64).of_blocks().of_calls() == [(64, 64, 0), (128, 128, 64)]


@pytest.mark.parametrize('maker, head_dim, softcap, text', [
    ('documents', 512, 3.0, ''), ('prefix_lm', 512, 0.0, ''),
    ('prefix_lm', 512, 3.0, 'with mask and softcap'), ('prefix_lm', 256, 3.0, '')])
def test_can_use_of_gradients(maker, head_dim, softcap, text):
    """Documents run as packed sequences, other masks with lists."""
    q = torch.randn(1, 200, 2, head_dim, dtype=torch.bfloat16, requires_grad=True)
    mask = (AttentionMask.documents(ints([0, 90, 200]), 200) if maker == 'documents' else
            AttentionMask.prefix_lm(ints([7]), 200))
    _, reasons = flash_attn3.can_use(q, q, q, softcap=softcap, mask=mask)
    others = [reason for reason in reasons if 'a CUDA device' not in reason]
    assert text in ''.join(others) if text else not others
