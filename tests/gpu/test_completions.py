"""flash_attn_completions_func, held to the oracle of tests/support/completion_cases.py: dense
attention with the mask written out, in float64. Graphs, repeats and what must not wait.
"""
from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from flash_attn3 import flash_attn_completions_func, flash_attn_varlen_func

from tests.support import compare
from tests.support.completion_cases import (Results, TreeCase, check, check_case, check_same,
                                            run)
from tests.support.lists import starts

# Segments that fill no tile, of one row, empty ones; prompts without rows or completions.
TREES = ((200, 65, 1, 130), (1, 1, 1), (0, 40, 33), (97,), (), (128, 0, 64, 0))
CASE = TreeCase(TREES, heads=(6, 2))
KINDS = [('bf16', 64, 64), ('fp16', 128, 128), ('bf16', 128, 128), ('bf16', 256, 256),
         ('bf16', 192, 128), ('fp16', 96, 96), ('fp16', 40, 40), ('bf16', 72, 24)]
every_kind = pytest.mark.parametrize('numbers', KINDS, ids=lambda x: f'{x[0]}-{x[1]}x{x[2]}')


def of_kind(case: TreeCase, numbers: tuple[str, int, int]) -> TreeCase:
    dtype, head_dim, head_dim_v = numbers
    return dataclasses.replace(case, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v)


# ------------------------------------------------------------------------------------------ values
SHAPES = {
    'mixed': {}, 'behind': {'behind': 37}, 'one': {'trees': ((300, 100, 77, 1, 200),)},
    'long_prompt': {'trees': ((900, 5, 1, 16, 3, 128),)}, 'one_row': {'trees': ((1, 1, 1, 1),) * 3},
    'many': {'trees': ((130, *range(1, 40)),)}, 'no_prompts': {'trees': ((0, 70, 3), (0, 129))},
    'no_completions': {'trees': ((70,), (3,), (129,))},
    'many_trees': {'trees': ((20, 5, 7),) * 30},
}


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('changes', SHAPES.values(), ids=SHAPES)
def test_shapes(changes, numbers, device):
    check_case(of_kind(dataclasses.replace(CASE, **changes), numbers), device)


FEATURES = {
    'scale': {'softmax_scale': 0.3}, 'sharp': {'logit_std': 6.0},
    'deterministic': {'deterministic': True}, 'hint': {'max_seqlen': 200},
    'wrong_hint': {'max_seqlen': 1}, 'packed': {'pack_gqa': True}, 'unpacked': {'pack_gqa': False},
    'each_head': {'heads': (3, 3)}, 'one_kv_head': {'heads': (8, 1)}, 'softcap': {'softcap': 2.0},
}


@pytest.mark.smoke
@pytest.mark.parametrize('numbers', [('bf16', 128, 128), ('fp16', 64, 64)], ids=str)
@pytest.mark.parametrize('changes', FEATURES.values(), ids=FEATURES)
def test_features(changes, numbers, device):
    check_case(of_kind(dataclasses.replace(CASE, **changes), numbers), device)


@pytest.mark.parametrize('seed', range(20))
def test_random_trees(seed, device):
    generator = torch.Generator().manual_seed(seed)

    def number(most: int) -> int:
        return int(torch.randint(most + 1, (), generator=generator))

    trees = tuple(tuple(number(180) * (number(4) > 0) for _ in range(number(5)))
                  for _ in range(1 + number(4)))
    check_case(of_kind(TreeCase((*trees, (3, 2)), behind=number(9)), KINDS[seed % 5]), device)


@pytest.mark.parametrize('trees', [(), ((),), ((), ()), ((0,),), ((0, 0), (0,))], ids=str)
@pytest.mark.parametrize('behind', [0, 5])
def test_nothing_to_do(behind, trees, device):
    case = TreeCase(trees, behind=behind)
    got = run(case, case.tensors(device))
    assert got.lse.isneginf().all()
    assert all((x == 0).all() and x.size(0) == behind for x in (got.out, *got[2:]))


def test_rows_behind_are_never_read(device):
    case = dataclasses.replace(CASE, behind=70)
    tensors = case.tensors(device)
    wanted = run(dataclasses.replace(case, deterministic=True), tensors)
    at = torch.arange(case.rows, device=device) >= case.rows - 70
    spoiled = tensors._replace(
        dlse=tensors.dlse.masked_fill(at, math.nan),
        **{name: getattr(tensors, name).masked_fill(at[:, None, None], math.nan)
           for name in ('q', 'k', 'v', 'dout')})
    check_same(run(dataclasses.replace(case, deterministic=True), spoiled), wanted)


def test_as_with_copies_of_the_prompt(device):
    """flash_attn_varlen_func of each completion behind its own copy meets the same oracle."""
    case = TreeCase(((500, 100, 31, 64, 200),), 128)
    tensors = case.tensors(device)
    got = run(case, tensors)
    prompt, *completions = torch.arange(case.rows, device=device).split(case.lengths)
    rows = torch.cat([torch.cat((prompt, one)) for one in completions])
    cu = starts([500 + len(one) for one in completions], device)
    out, lse = flash_attn_varlen_func(*(x[rows] for x in tensors[:3]), cu, cu, 700, 700,
                                      causal=True, return_attn_probs=True)
    check(case, tensors, got)
    check(case, tensors, got._replace(    # the prompt's rows are the same in every copy
        out=torch.empty_like(got.out).index_copy_(0, rows, out),
        lse=torch.empty_like(got.lse).index_copy_(1, rows, lse)))


# ----------------------------------------------------------------------------------- repeats, waits
@every_kind
def test_the_same_bits_every_time(numbers, device):
    case = dataclasses.replace(of_kind(CASE, numbers), deterministic=True)
    tensors = case.tensors(device)
    first = run(case, tensors)
    for _ in range(5 if device.type == 'cuda' else 1):
        check_same(run(case, tensors), first)


def test_a_tree_changes_no_other(device):
    """Other rows and lengths of the first: the bits of the second stay."""
    one, other = (TreeCase((first, (100, 30, 1)), deterministic=True) for first in (
        (200, 65, 130), (150, 200, 45)))
    tensors = one.tensors(device)
    wanted, rows = run(one, tensors), slice(395, None)
    changed = [torch.cat((torch.randn_like(x[:395]), x[rows])) for x in tensors[:3]]
    got = run(other, tensors._replace(**dict(zip('qkv', changed)), lists=other.lists(device)))
    for name in ('out', 'dq', 'dk', 'dv'):
        compare.check_equal(getattr(got, name)[rows], getattr(wanted, name)[rows], name)
    compare.check_equal(got.lse[:, rows], wanted.lse[:, rows], 'lse')


def test_empty_segments_and_trees_at_the_end_change_no_bit(device):
    """As lists of a fixed size are filled up."""
    case = dataclasses.replace(CASE, deterministic=True)
    tensors = case.tensors(device)
    longer = dataclasses.replace(case, trees=(*case.trees, (0, 0, 0), (), ()))
    check_same(run(longer, tensors._replace(lists=longer.lists(device))), run(case, tensors))


@pytest.mark.smoke
def test_nothing_waits_for_the_gpu(cuda):
    case = dataclasses.replace(CASE, head_dim=128)
    tensors = case.tensors(cuda)
    run(case, tensors)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        torch.cuda._sleep(50_000_000)
        run(case, tensors)
        assert not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode('default')


@pytest.mark.parametrize('seed', range(10))
def test_lists_of_nonsense_do_no_harm(seed, cuda):
    """The call ends, and the next one is right."""
    tensors = CASE.tensors(cuda)
    generator = torch.Generator(cuda).manual_seed(seed)
    low, high = ((-2 ** 31, 2 ** 31 - 1), (-20, 1000), (0, 30))[seed % 3]
    for bad in ((0,), (1,), (0, 1)):
        lists = [torch.randint(low, high, x.shape, generator=generator, device=cuda,
                               dtype=torch.int32) if number in bad else x
                 for number, x in enumerate(tensors.lists)]
        run(CASE, tensors._replace(lists=tuple(lists)))
        torch.cuda.synchronize()
    check(CASE, tensors, run(CASE, tensors))


@pytest.mark.smoke
@pytest.mark.parametrize('head_dim', [64, 128])
def test_replays_with_other_trees(head_dim, cuda):
    """Forward and backward in a graph; other lengths, tensors and numbers of completions later."""
    case = TreeCase(((200, 65, 1, 130), (100, 0, 28), (60, 16)), head_dim, deterministic=True)
    static = case.tensors(cuda)
    leaves = [x.requires_grad_() for x in static[:3]]

    def step() -> tuple:
        out, lse = flash_attn_completions_func(*leaves, *static.lists, return_attn_probs=True,
                                               deterministic=True)
        return out, lse, *torch.autograd.grad((out, lse), leaves, (static.dout, static.dlse))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for trees in (case.trees, ((0, 300, 1), (99, 0), (100, 50, 25, 25)),
                  ((590, 1, 1), (1, 1, 1, 1), (1, 1))):
        other = dataclasses.replace(case, trees=trees, behind=600 - sum(map(sum, trees)))
        given = other.tensors(cuda)
        with torch.no_grad():
            for mine, x in zip((*static[:3], *static.lists, *static[4:]),
                               (*given[:3], *given.lists, *given[4:])):
                mine.copy_(x)
            for x in results:
                x.detach().fill_(math.nan)
        graph.replay()
        got = Results(*(x.detach() for x in results))
        check(other, given, got)
        check_same(got, run(other, given))


def test_compiled(device):
    """Forward and backward, as one graph each; the bits of the eager call."""
    torch._dynamo.reset()
    case = dataclasses.replace(CASE, deterministic=True)
    tensors = case.tensors(device)
    compiled = torch.compile(flash_attn_completions_func, fullgraph=True, backend='aot_eager')
    check_same(run(case, tensors, compiled), run(case, tensors))
