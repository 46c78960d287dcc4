"""Which tiles the ranks of a ring compute, against the mask of the whole sequence; no processes."""
from __future__ import annotations

import math

from hypothesis import given, strategies as st

from flash_attn3.distributed.tiles import (Call, Layout, Plan, Step, Tile, layout_of, order_of,
                                           plan_of)

from tests.cpu.drawn import examples

WINDOWS = st.tuples(st.integers(-1, 12), st.integers(-1, 12))


@st.composite
def orders(draw, ranks: int):
    """Contiguous, zigzag, or up to three chunks of each rank."""
    if draw(st.booleans()):
        return order_of(ranks, draw(st.booleans()))
    count = draw(st.integers(1, 3))
    chunks = draw(st.permutations(range(ranks * count)))
    return tuple(chunk for first in range(0, len(chunks), count)
                 for chunk in sorted(chunks[first:first + count]))


@st.composite
def problems(draw):
    """(layout, window, starts): starts of documents, or None."""
    ranks = draw(st.integers(1, 5))
    order = draw(orders(ranks))
    rows = draw(st.integers(0, 6)) * (len(order) // ranks)
    seqlen = draw(st.integers(0, ranks * rows))
    starts = None
    if draw(st.booleans()):
        cuts = draw(st.lists(st.integers(0, seqlen), max_size=6))
        starts = (0, *sorted(cuts), seqlen)
    window = draw(st.one_of(st.just((-1, 0)), st.just((-1, -1)), WINDOWS))
    return Layout(ranks, rows, seqlen, order), window, starts


def position_of(layout: Layout, rank: int, row: int) -> int:
    first, start = [chunk for chunk in layout.chunks(rank) if chunk[0] <= row][-1]
    return start + row - first


def expected(layout: Layout, window: tuple[int, int], starts) -> set[tuple[int, int]]:
    """Pairs of a query and a key that it sees."""
    left, right = window
    bounds = (0, layout.seqlen) if starts is None else starts
    return {(p, j) for first, end in zip(bounds, bounds[1:]) for p in range(first, end)
            for j in range(first, end)
            if (left == -1 or p - j <= left) and (right == -1 or j - p <= right)}


def computed(layout: Layout, rank: int, plan: Plan) -> list[tuple[int, int]]:
    """Those that the calls of a rank compute, as the ops read a window."""
    return [(position_of(layout, rank, tile.q0 + i), position_of(layout, source, tile.k0 + j))
            for source, tile in tiles_of(plan) for i, j in pairs_in(tile)]


def tiles_of(plan: Plan) -> list[tuple[int, Tile]]:
    return [(step.source, tile) for step in plan.steps for call in step.calls
            for tile in call.tiles]


def pairs_in(tile: Tile) -> list[tuple[int, int]]:
    rows, keys = tile.q1 - tile.q0, tile.k1 - tile.k0
    pairs = []
    for i in range(rows):
        position = i + keys - rows
        first = 0 if tile.left == -1 else max(0, position - tile.left)
        end = keys if tile.right == -1 else min(keys, position + tile.right + 1)
        pairs += [(i, j) for j in range(first, end)]
    return pairs


@examples(400)
@given(problems())
def test_each_pair_is_computed_once(problem):
    layout, window, starts = problem
    pairs = []
    for rank in range(layout.ranks):
        plan = plan_of(layout, rank, window, starts)
        pairs += computed(layout, rank, plan)
    assert len(pairs) == len(set(pairs)) and set(pairs) == expected(layout, window, starts)


@examples(400)
@given(problems())
def test_calls(problem):
    """Windows that the ops take, rising tiles, sinks once a row, and messages that match."""
    layout, window, starts = problem
    plans = [plan_of(layout, rank, window, starts) for rank in range(layout.ranks)]
    for rank, plan in enumerate(plans):
        for distance, step in enumerate(plan.steps):
            assert plans[step.source].steps[distance].target == rank
            assert plans[step.source].steps[distance].sent == step.keys
            assert (step.keys is None) == (not step.calls)
            for call in step.calls:
                check_call(call, step, plan)
                assert len(call.tiles) == 1 or starts is not None
        own = [row for _, tile in tiles_of(plan) if tile.is_own for row in range(tile.q0, tile.q1)]
        assert sorted(own) == [row for row in range(layout.rows) if position_of(
            layout, rank, row) < (starts or (layout.seqlen,))[-1]]


def check_call(call: Call, step: Step, plan: Plan) -> None:
    assert len({tile[4:] for tile in call.tiles}) == 1 and min(call.tiles[0][4:6]) >= -1
    assert all(tile.q0 < tile.q1 and tile.k0 < tile.k1 for tile in call.tiles)
    assert all(a.q1 <= b.q0 and a.k1 <= b.k0 for a, b in zip(call.tiles, call.tiles[1:]))
    assert step.keys[0] <= call.keys[0] and call.keys[1] <= step.keys[1]
    assert list(range(*call.rows)) == [
        row for cell in plan.cells for row in range(*cell)
        if call.rows[0] <= cell[0] and cell[1] <= call.rows[1]]


def test_zigzag_balances_causal_attention():
    """Each rank has one call a step, all of the same work, and half of the keys travel once."""
    layout = Layout(4, 16, 64, order_of(4))
    for rank in range(4):
        plan = plan_of(layout, rank, (-1, 0))
        for step in plan.steps[1:]:
            (call,), sizes = step.calls, [layout.rows, layout.chunk_rows]
            tile = call.tiles[0]
            assert sorted((tile.q1 - tile.q0, tile.k1 - tile.k0), reverse=True) == sizes
            assert (tile.left, tile.right) == (-1, -1)
        (own,) = plan.steps[0].calls
        assert own.tiles == ((0, 16, 0, 16, -1, 0, True),)


def test_full_attention_is_a_call_a_step():
    for zigzag in (True, False):
        plan = plan_of(Layout(3, 8, 24, order_of(3, zigzag)), 1, (-1, -1))
        assert [len(step.calls) for step in plan.steps] == [1, 1, 1] and plan.cells == ((0, 8),)


def test_only_ranks_that_see_each_other_exchange():
    """A window of a chunk reaches the chunk before; documents of a chunk reach nobody."""
    plan = plan_of(Layout(8, 8, 64, order_of(8, False)), 3, (5, 0))
    assert [step.source for step in plan.steps if step.keys] == [3, 2]
    assert plan.steps[1].keys == (3, 8)    # five of its keys
    plan = plan_of(Layout(8, 8, 64, order_of(8)), 3, (-1, 0), tuple(range(0, 65, 4)))
    assert [step.source for step in plan.steps if step.keys] == [3]
    (call,) = plan.steps[0].calls
    assert len(call.tiles) == 2


@examples(200)
@given(st.integers(0, 200), st.integers(1, 6).flatmap(lambda ranks: st.tuples(
    st.just(ranks), orders(ranks))), st.integers(1, 4))
def test_layouts_pad_little(seqlen, ranks_and_order, parts):
    ranks, order = ranks_and_order
    layout, count = layout_of(seqlen, ranks, order, parts), len(order) // ranks
    assert layout.rows % parts == 0 and layout.rows % count == 0
    assert 0 <= ranks * layout.rows - seqlen < ranks * math.lcm(parts, count)
    chunks = [start for rank in range(ranks) for _, start in layout.chunks(rank)]
    assert sorted(chunks) == [i * layout.chunk_rows for i in range(len(chunks))]
