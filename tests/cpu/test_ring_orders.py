"""Which chunks of a sequence each rank of a ring gets for a mask; no processes."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from flash_attn3 import AttentionMask
from flash_attn3.distributed import balanced_order, orders
from flash_attn3.distributed.tiles import layout_of, order_of

from tests.cpu.drawn import examples
from tests.support.lists import ints


@st.composite
def masks(draw) -> tuple[AttentionMask, list[int]]:
    """A mask of any intervals, of one sequence or several, and how many keys each query sees."""
    rows, count = draw(st.integers(0, 70)), draw(st.integers(1, 2))
    batch = draw(st.integers(0, 2))
    starts = None if batch else draw(st.one_of(st.none(), st.lists(
        st.integers(0, rows), max_size=4).map(lambda cuts: [0, *sorted(cuts)])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2 ** 32)))
    shape = (*[batch] * (batch > 0), rows, count, 2)
    longest = rows // draw(st.sampled_from([1, 7]))
    intervals = (torch.randint(0, longest + 1, shape, generator=generator)
                 + torch.arange(rows)[:, None, None] * draw(st.integers(0, 1))).clamp(max=rows)
    intervals = intervals.sort(-1).values.to(torch.int32)
    most = [rows] * rows
    if starts is not None:
        most = [0] * rows
        for first, end in zip(starts, starts[1:]):
            most[first:end] = [end - first] * (end - first)
        starts = ints(starts)
    seen = [sum(len({key for begin, end in x[row].tolist() for key in range(begin, end)
                     if key < most[row]}) for x in intervals.view(-1, *shape[-3:]))
            for row in range(rows)]
    return AttentionMask.from_intervals(intervals, starts), seen


def works_of(order: tuple[int, ...], seen: list[int], ranks: int) -> list[int]:
    """How many keys the queries of each rank see."""
    layout = layout_of(len(seen), ranks, order)
    return [sum(sum(seen[start:start + layout.chunk_rows]) for _, start in layout.chunks(rank))
            for rank in range(ranks)]


@examples(300)
@given(masks(), st.integers(1, 5), st.integers(2, 6))
def test_orders_are_even(mask_and_seen, ranks, chunks):
    """As many rising chunks of each rank, never less even than a zigzag."""
    mask, seen = mask_and_seen
    assert mask.seen_by_query().tolist() == seen
    order = balanced_order(mask, ranks, chunks=chunks)
    assert orders.problem('', order, ranks) == '' and len(order) <= ranks * chunks
    works = works_of(order, seen, ranks)
    assert sum(works) == sum(seen)
    zigzag = works_of(order_of(ranks), seen, ranks)
    assert max(works) <= max(1.02 * sum(seen) / ranks, max(zigzag))


def cuts_of(count: int) -> list[int]:
    """Where so many documents of a sequence of 8192 begin, of any lengths, and its end."""
    generator = torch.Generator().manual_seed(count)
    return [0, *sorted(torch.randperm(8191, generator=generator)[:count - 1] + 1), 8192]


ROWS = torch.arange(8192, dtype=torch.int32)
WINDOW = [0 * ROWS, (ROWS + 1).clamp(max=128), (ROWS - 1023).clamp(min=0), ROWS + 1]
USUAL = {    # and the chunks of a rank that are expected
    'causal': (AttentionMask.documents(ints([0, 8192]), 8192), 2),
    'full': (AttentionMask.documents(ints([0, 8192]), 8192, causal=False), 1),
    'prefix': (AttentionMask.prefix_lm(ints([4096]), 8192), 8),
    'documents': (AttentionMask.documents(ints(cuts_of(8)), 8192), 8),
    'whole documents': (AttentionMask.documents(ints(cuts_of(5)), 8192, causal=False), 8),
    'packed': (AttentionMask.prefix_lm(ints([0] * 6), 8192, ints(cuts_of(6))), 8),
    'window': (AttentionMask.from_intervals(torch.stack(WINDOW, -1).view(-1, 2, 2)), 8),
    'completions': (AttentionMask.completions(ints(cuts_of(9)), ints([0, 4, 9]), 8192), 8)}


@pytest.mark.parametrize('name', USUAL)
def test_usual_masks(name):
    """The busiest of eight ranks has at most 1.06 times the mean."""
    mask, chunks = USUAL[name]
    order = balanced_order(mask, 8)
    works = works_of(order, mask.seen_by_query().tolist(), 8)
    assert len(order) == 8 * chunks and max(works) * 8 <= 1.06 * sum(works)


def test_fewest_chunks():
    mask, _ = USUAL['prefix']
    assert balanced_order(mask, 4, chunks=1) == (0, 1, 2, 3) and balanced_order(mask, 1) == (0,)
    assert balanced_order(USUAL['causal'][0], 3) == (0, 5, 1, 4, 2, 3)


@pytest.mark.parametrize('order', [(), (0, 1, 2), (0, 1, 1, 3), (1, 0, 2, 3), (0, 1, 2, 4)],
                         ids=str)
def test_wrong_orders(order):
    assert orders.problem('shard', order, 2).startswith(
        'flash_attn3.shard: expected order to hold each chunk from 0 to ')


def test_wrong_arguments():
    mask, _ = USUAL['prefix']
    blocks = AttentionMask.from_blocks(torch.ones(1, 64, 64, dtype=torch.bool))
    for call, error, text in (
            (lambda: balanced_order(ROWS, 2), RuntimeError, 'mask to be an AttentionMask, got Te'),
            (lambda: balanced_order(mask & blocks, 2), NotImplementedError, 'a mask of intervals'),
            (lambda: balanced_order(mask, 0), RuntimeError, 'ranks to be an int of 1 or more, got'),
            (lambda: balanced_order(mask, 2, chunks=2.0), RuntimeError, 'chunks to be an int of')):
        with pytest.raises(error, match=f'flash_attn3.balanced_order: expected {text}'):
            call()
