"""mask= on the GPU: against float64, with NaN in keys that no query sees and in values whose tile
no query sees. The CPU path: tests/cpu/test_attention_mask.py.
"""
from __future__ import annotations

import dataclasses

import pytest
import torch

from flash_attn3 import AttentionMask, flash_attn_func, flash_attn_varlen_func

from tests.gpu.common import check_same, spoil_allocator
from tests.support import compare
from tests.support.lists import ints, starts
from tests.support.mask_cases import (INTERVALS, Blocks, Given, MaskCase, call, check, check_case,
                                      check_documents, made)

HEAD_DIMS = {64: {}, 128: {}, 256: {}, 72: {}, 192: dict(head_dim_v=128), 512: {}, 304: {}}
every_head_dim = pytest.mark.parametrize('head_dim', HEAD_DIMS)
every_dtype = pytest.mark.parametrize('dtype', ['bf16', 'fp16'])
SHAPES = {
    'square': {}, 'long_keys': dict(lengths=((10, 700),) * 2), 'few_keys': dict(
        lengths=((400, 30),)), 'edges': dict(lengths=((128, 256),)), 'one_more': dict(
        lengths=((129, 257),)), 'no_keys': dict(lengths=((70, 0),)), 'packed': dict(
        is_packed=True, lengths=((3, 5), (200, 100), (0, 7), (130, 0), (300, 400)), behind=9),
    'rows_after': dict(is_packed=True, lengths=((30, 5), (226, 123)), behind=100),
    'mqa': dict(heads=(5, 1)), 'mha': dict(heads=(3, 3), lengths=((257, 600),) * 3),
}
OPTIONS = {
    'sinks': dict(s_aux=True), 'softcap': dict(softcap=3.0), 'rows': dict(max_logits=True),
    'no_lse': dict(lse=False), 'out': dict(out=True), 'margin': dict(sm_margin=100),
    'all': dict(s_aux=True, softcap=5.0, max_logits=True, out=True, pack_gqa=True),
}
BLOCKS = {'128': Blocks(), '64': Blocks(64, 64, heads='q'), 'both': Blocks(128, 64, 0.3, 'k', True),
          'few': Blocks(64, 128, 0.1, 'q', True)}
MANY = dict(lengths=((1100, 1300),) * 2, heads=(6, 2))


def case_of(head_dim: int, **options) -> MaskCase:
    return MaskCase(head_dim=head_dim, **HEAD_DIMS[head_dim] | options)


@pytest.mark.smoke
@every_head_dim
@pytest.mark.parametrize('intervals', [*INTERVALS, 'one', 'two'])
def test_intervals(intervals, head_dim, device):
    spoil_allocator(device)
    check_case(case_of(head_dim, intervals=intervals), device)


@pytest.mark.smoke
@every_head_dim
@pytest.mark.parametrize('blocks', BLOCKS)
def test_blocks(blocks, head_dim, device):
    spoil_allocator(device)
    for intervals in ('', 'tree'):
        check_case(case_of(head_dim, blocks=BLOCKS[blocks], intervals=intervals), device)


@every_head_dim
@every_dtype
@pytest.mark.parametrize('shape', SHAPES)
def test_shapes(shape, dtype, head_dim, device):
    for options in (dict(intervals='two'), dict(blocks=BLOCKS['64']),
                    dict(intervals='sinks', blocks=BLOCKS['both'])):
        check_case(case_of(head_dim, dtype=dtype, **options | SHAPES[shape]), device)


@pytest.mark.parametrize('head_dim, option', [
    (head_dim, option) for head_dim in HEAD_DIMS for option in OPTIONS
    if head_dim <= 256 or 'softcap' not in OPTIONS[option]])
def test_options(option, head_dim, device):
    for shape in ('square', 'packed'):
        check_case(case_of(head_dim, intervals='blind', blocks=BLOCKS['64'],
                           **SHAPES[shape] | OPTIONS[option]), device)


@every_head_dim
@pytest.mark.parametrize('intervals', [*INTERVALS, 'two'])
def test_many_tiles(intervals, head_dim, device):
    """Lists of free tiles, and of others, of several lengths."""
    check_case(case_of(head_dim, intervals=intervals, **MANY), device)
    check_case(case_of(head_dim, intervals=intervals, by_batch=True, blocks=BLOCKS['few'], **MANY),
               device)


@every_head_dim
def test_packed_blocks_and_intervals(head_dim, device):
    """With many sequences, shorter and longer than a tile."""
    lengths = tuple((n % 400, (n * 7) % 500) for n in range(1, 700, 37))
    for options in (dict(intervals='two'), dict(blocks=BLOCKS['both']),
                    dict(intervals='window', blocks=BLOCKS['few'])):
        check_case(case_of(head_dim, is_packed=True, lengths=lengths, behind=70, **options), device)


@pytest.mark.smoke
@every_head_dim
def test_unchecked_values_are_clamped(head_dim, kernels):
    """The CPU path refuses them."""
    case = case_of(head_dim, intervals='two')
    given = made(case, kernels)
    intervals = given.mask._intervals.clone()
    begin, end = intervals.unbind(-1)
    begin[begin == 0] = -2 ** 31
    end[end == 300] = 2 ** 31 - 1
    is_empty = begin.clamp(min=0) == end
    begin[is_empty], end[is_empty] = 200, -5
    wild = AttentionMask.from_intervals(intervals)
    results = call(case, given._replace(mask=wild))
    check(case, given, results)
    check_same(results[:2], call(case, given)[:2])


@pytest.mark.smoke
@every_head_dim
def test_the_same_as_causal(head_dim, device):
    """To the bar of both: the kernels differ."""
    q, k, v = (torch.randn(2, 500, 4, head_dim, device=device).bfloat16() for _ in range(3))
    mask = AttentionMask.prefix_lm(ints([0], device), 500)
    out, lse = flash_attn_func(q, k, v, mask=mask, return_attn_probs=True)
    compare.check_forward(out, lse, (q, k, v), causal=True)
    starts_of = starts([100, 400], device)
    rows = [x[0] for x in (q, k, v)]
    packed = flash_attn_varlen_func(*rows, starts_of, starts_of, 400, 400,
                                    mask=AttentionMask.prefix_lm(ints([0, 0], device), 500,
                                                                 starts_of))
    one = flash_attn_func(*(x[:1] for x in (q, k, v)), mask=AttentionMask.documents(starts_of, 500))
    torch.testing.assert_close(packed, one[0], atol=2e-2, rtol=2e-2)


@every_head_dim
def test_the_same_bits_each_time(head_dim, device):
    case = case_of(head_dim, intervals='two', blocks=BLOCKS['few'], **MANY)
    given = made(case, device)
    wanted = call(case, given)
    for _ in range(5):
        check_same(call(case, given)[:2], wanted[:2])


def captured(case: MaskCase, given: Given) -> tuple[torch.cuda.CUDAGraph, tuple]:
    """A graph of a call that was made once before, and the call's results."""
    call(case, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, call(case, given)


@every_head_dim
def test_a_graph(head_dim, cuda):
    """Captured after a call, and replayed on other inputs."""
    case = case_of(head_dim, intervals='sinks', blocks=BLOCKS['64'])
    given = made(case, cuda)
    graph, results = captured(case, given)
    for _ in range(3):
        for x in given[:3]:
            x.copy_(torch.randn_like(x, dtype=torch.float32))
        results[0].fill_(torch.nan)
        graph.replay()
        check(case, given, results)


def test_a_graph_that_makes_the_lists(cuda):
    """A mask whose first call is captured keeps nothing of the graph."""
    case = case_of(64, intervals='two', is_packed=True, lengths=((200, 300), (100, 70)))
    given = made(case, cuda)
    call(case, made(dataclasses.replace(case, lse=True), cuda))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    lists = {f'cu_seqlens_{name}': starts((one[i] for one in case.lengths), cuda)
             for i, name in enumerate('qk')}
    with torch.cuda.graph(graph):
        out = flash_attn_varlen_func(*given[:3], **lists, max_seqlen_q=200, max_seqlen_k=300,
                                     mask=given.mask)
    assert not given.mask._kept
    graph.replay()
    check_same((out, out), (call(case, given)[0],) * 2)


def test_a_graph_keeps_its_lists(cuda):
    """A replay reads lists that the mask has dropped since."""
    case = case_of(128, intervals='two')
    given = made(case, cuda)
    graph, results = captured(case, given)
    given.mask._kept.clear()
    spoil_allocator(cuda)
    graph.replay()
    check(case, given, results)


def test_lists_on_another_stream(cuda):
    """A stream that uses lists waits for the one that makes them."""
    case = case_of(128, intervals='two')
    given = made(case, cuda)
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    call(case, given)
    with torch.cuda.stream(torch.cuda.Stream()):
        results = call(case, given)
    torch.cuda.synchronize()
    check(case, given, results)


def test_a_mask_of_inference_mode_has_gradients(cuda):
    q = torch.randn(1, 300, 2, 64, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    visible = torch.ones(1, 3, 3, dtype=torch.bool, device=cuda).tril()
    with torch.inference_mode():
        masks = [AttentionMask.from_blocks(visible.clone())]
    masks.append(AttentionMask.from_blocks(visible))
    one, other = (torch.autograd.grad(flash_attn_func(q, q, q, mask=mask, deterministic=True).sum(),
                                      q)[0] for mask in masks)
    check_same((one, one), (other, other))


def test_nothing_waits_for_the_gpu(cuda):
    """Making a mask and its lists, and the call."""
    given = made(case_of(128, intervals='two'), cuda)
    q, k, v = (x.unflatten(0, (2, 300)) for x in given[:3])
    intervals = given.mask._intervals
    blocks = torch.rand(2, 2, 3, 5, device=cuda) < 0.5
    documents, prefix = ints([0, 70, 300], cuda), ints([50, 9], cuda)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode('error')
    try:
        for mask in (AttentionMask.from_intervals(intervals),
                     AttentionMask.from_blocks(blocks, 128, 64),
                     AttentionMask.documents(documents, 300), AttentionMask.prefix_lm(prefix, 300)):
            flash_attn_func(q, k, v, mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode(before)


# ------------------------------------------------------------------------------------- gradients
def plain(q, k, v, visible, dout):
    """out, dq, dk and dv in plain PyTorch, of heads that are all there."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    group = q.size(2) // k.size(2)
    scores = torch.einsum('bqhd,bkhd->bhqk', q, k.repeat_interleave(group, 2)) * q.size(3) ** -0.5
    scores = scores.masked_fill(~visible, -torch.inf)
    probabilities = scores.softmax(-1).masked_fill(~visible.any(-1, keepdim=True), 0)
    out = torch.einsum('bhqk,bkhd->bqhd', probabilities, v.repeat_interleave(group, 2))
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def check_gradients(q, k, v, visible, dout, got):
    ref = plain(*(x.double() for x in (q, k, v)), visible, dout.double())
    pt = plain(q, k, v, visible, dout)
    for name, own, wanted, usual in zip(('out', 'dq', 'dk', 'dv'), got, ref, pt):
        compare.check_close(own, wanted, usual, name, 1e-3)


every_gradient = pytest.mark.parametrize('head_dim', [64, 128, 72, 192, 256, 512, 304])


@pytest.mark.smoke
@every_gradient
@pytest.mark.parametrize('deterministic', [False, True])
@pytest.mark.parametrize('kind', ['intervals', 'blocks', 'both'])
def test_gradients(kind, deterministic, head_dim, cuda):
    for batch, rows, keys, heads in ((2, 300, 300, (4, 2)), (1, 513, 700, (2, 1))):
        q = torch.randn(batch, rows, heads[0], head_dim, device=cuda).bfloat16()
        k, v = (torch.randn(batch, keys, heads[1], head_dim, device=cuda).bfloat16()
                for _ in range(2))
        intervals = torch.randint(0, keys + 1, (batch, rows, 2, 2), device=cuda, dtype=torch.int32)
        intervals = intervals.sort(-1).values.contiguous()
        intervals[:, 5] = 0    # a query without keys
        intervals[:, 128:256, 0] = ints([0, keys], cuda)
        blocks = torch.rand(batch, heads[0], -(-rows // 64), -(-keys // 64), device=cuda) < 0.4
        key = torch.arange(keys, device=cuda)
        seen = ((key >= intervals[..., :1]) & (key < intervals[..., 1:])).any(2)[:, None]
        shown = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :rows, :keys]
        masks = {'intervals': (AttentionMask.from_intervals(intervals), seen),
                 'blocks': (AttentionMask.from_blocks(blocks, 64, 64), shown)}
        masks['both'] = masks['intervals'][0] & masks['blocks'][0], seen & shown
        mask, visible = masks[kind]
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        dout = torch.randn_like(q)
        out = flash_attn_func(*leaves, mask=mask, deterministic=deterministic)
        got = torch.autograd.grad(out, leaves, dout, retain_graph=deterministic)
        check_gradients(q, k, v, visible.expand(batch, heads[0], -1, -1), dout, (out, *got))
        if deterministic:
            again = torch.autograd.grad(out, leaves, dout)
            assert all(torch.equal(x, y) for x, y in zip(got, again))


@every_gradient
def test_gradients_of_packed_sequences(head_dim, cuda):
    """Those of each sequence alone; sinks and the LSE have gradients too."""
    lengths = (5, 300, 0, 129, 77)
    cu = starts(lengths, cuda)
    prefix = ints([2, 100, 0, 64, 10], cuda)
    q, k, v = (torch.randn(sum(lengths), 4, head_dim, device=cuda).bfloat16().requires_grad_()
               for _ in range(3))
    sinks = torch.randn(4, device=cuda).requires_grad_()
    dout, dlse = torch.randn_like(q), torch.randn(4, sum(lengths), device=cuda)
    out, lse = flash_attn_varlen_func(
        q, k, v, cu, cu, 300, 300, mask=AttentionMask.prefix_lm(prefix, sum(lengths), cu),
        s_aux=sinks, return_attn_probs=True)
    got = torch.autograd.grad((out, lse), (q, k, v, sinks), (dout, dlse))
    of_sinks = torch.zeros_like(sinks)
    for b, rows in enumerate(lengths):
        own = slice(int(cu[b]), int(cu[b]) + rows)
        if not rows:
            continue
        alone = [x[None, own].detach().requires_grad_() for x in (q, k, v)]
        its_out, its_lse = flash_attn_func(
            *alone, mask=AttentionMask.prefix_lm(prefix[b:b + 1], rows), s_aux=sinks,
            return_attn_probs=True)
        its = torch.autograd.grad((its_out, its_lse), (*alone, sinks),
                                  (dout[None, own], dlse[None, :, own]))
        of_sinks += its[3]
        torch.testing.assert_close(out[own], its_out[0], atol=0, rtol=0)
        for whole, part in zip(got, its[:3]):
            torch.testing.assert_close(whole[own], part[0], atol=1e-2, rtol=2e-2)
    torch.testing.assert_close(got[3], of_sinks, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize('head_dim', [64, 128, 192, 256, 512])
@pytest.mark.parametrize('options', [{}, dict(causal=False), dict(by_batch=True), dict(s_aux=True),
                                     dict(out=True), dict(deterministic=True),
                                     dict(s_aux=True, softcap=2.0)], ids=str)
def test_documents(options, head_dim, cuda):
    if head_dim > 256 and 'softcap' in options:
        pytest.skip('refused')
    for has_rows in (True, False):
        check_documents(cuda, torch.bfloat16, head_dim, has_rows, **options)


def test_wide_heads_with_softcap_are_refused(cuda):
    q = torch.randn(1, 130, 2, 512, device=cuda, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match='the head_dim of q to be a multiple of 8 from 8 to 256 '
                                           'with mask and softcap, got 512'):
        flash_attn_func(q, q, q, mask=AttentionMask.prefix_lm(ints([30], cuda), 130), softcap=3.0)


def test_long_sequences(cuda, needs_memory):
    """Lists of 32,768 queries and keys: a sample of the rows beside float64."""
    needs_memory(4)
    rows, heads, head_dim = 32768, 2, 128
    q, k, v = (torch.randn(1, rows, heads, head_dim, device=cuda).bfloat16() for _ in range(3))
    row = torch.arange(rows, device=cuda, dtype=torch.int32)
    zero = torch.zeros_like(row)
    intervals = torch.stack([zero, torch.full_like(row, 100).minimum(row + 1),
                             (row - 1000).clamp(min=0), row + 1], -1).view(rows, 2, 2)
    blocks = torch.rand(heads, rows // 128, rows // 128, device=cuda) < 0.3
    out = flash_attn_func(q, k, v, mask=AttentionMask.from_intervals(intervals)
                          & AttentionMask.from_blocks(blocks))
    key = torch.arange(rows, device=cuda)
    for i in range(0, rows, 1013):
        shown = (key < intervals[i, 0, 1]) | ((intervals[i, 1, 0] <= key) & (key <= i))
        for h in range(heads):
            seen = (shown & blocks[h, i // 128].repeat_interleave(128)).nonzero()[:, 0]
            p = (k[0, seen, h].double() @ q[0, i, h].double() * head_dim ** -0.5).softmax(0)
            torch.testing.assert_close(out[0, i, h].double(), p @ v[0, seen, h].double(),
                                       atol=2e-2, rtol=2e-2)
