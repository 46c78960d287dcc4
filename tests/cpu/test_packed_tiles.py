"""core/packed_tiles.h: the order of tickets, and the backward's tiles of packed sequences, with the
tables filled as the kernel of schedule/prepare.cu fills them.
"""
from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st
import pytest

from tests.cpu.drawn import examples
from tests.cpu.masks import NAMES, mask_of_kind
from tests.cpu.packed import Batch, batches, nonsense
from tests.cpu.test_backward_work import FACTS, clusters_of, each_packed, first_key, work_of
from tests.cpu.test_plan import ceil_div
from tests.host import _host

ROWS_END = 1 << 30    # where sequences end for the copy engine


def sequences(batch: Batch):
    """(first row, rows that count) of the queries, and of the keys, of every sequence."""
    def rows(cu, used):
        lengths = [end - begin for begin, end in zip(cu, cu[1:])] if used is None else used
        return list(zip(cu, lengths))

    return list(zip(rows(batch.cu_q, batch.used_q), rows(batch.cu_k, batch.used_k)))


def unused(batch: Batch):
    """(first row, rows) that belong to no sequence, for queries and keys: after the last sequence,
    then after the used rows of each, if used lengths are given.
    """
    def rows(cu, used, total):
        behind = [] if used is None else [(begin + count, end - begin - count)
                                          for begin, end, count in zip(cu, cu[1:], used)]
        return [(cu[-1], total - cu[-1]), *(behind or [(end, 0) for end in cu[1:]])]

    both = list(zip(rows(batch.cu_q, batch.used_q, batch.total_q),
                    rows(batch.cu_k, batch.used_k, batch.total_k)))
    return both if batch.used_q or batch.used_k else both[:1]


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 4))
def test_every_tile_has_one_ticket(tiles, sections, section_heads):
    """A sequence after the other, in sections of heads, the last tiles first."""
    heads = sections * section_heads
    coords = _host.ticket_tiles(tiles, heads, section_heads)
    assert Counter(coords) == Counter((m, head, i) for i, count in enumerate(tiles)
                                      for m, head in product(range(count), range(heads)))
    keys = [(i, head // section_heads, -m, head) for m, head, i in coords]
    assert keys == sorted(keys)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.integers(1, 130))
def test_there_is_room_for_every_tile(lengths, rows):
    tiles = sum(ceil_div(length, rows) for length in lengths)
    assert tiles <= _host.most_tiles(sum(lengths), len(lengths), rows)


@pytest.mark.parametrize('lengths', [[1] * 9, [65] * 4, [129]], ids=str)
def test_the_room_can_be_needed(lengths):
    tiles = sum(ceil_div(length, 64) for length in lengths)
    assert tiles == _host.most_tiles(sum(lengths), len(lengths), 64)


@each_packed
@given(batches(), st.data(), st.booleans())
@examples(50)
def test_every_tile_of_keys_has_one_cluster(name, batch, data, deterministic):
    """The others have none. The sum of a row's three coordinates is the row of the tensor. Keys
    that no sequence has are those of one without queries.
    """
    mask = data.draw(mask_of_kind(FACTS[name]['mask']))
    plan, _, ctas = work_of(name, batch.sizes, mask, deterministic, batch.lengths)
    tile_m, tile_n = plan['tile_m'], plan['tile_n']
    found = Counter()
    for cluster in clusters_of(plan, ctas):
        (kv_head, _, tile_begin, queries, (len_q, len_k), _), steps = cluster[0]
        if kv_head < 0:
            assert not any(steps for _, steps in cluster)
            continue
        assert queries == _host.query_range(tile_begin, len_q, len_k, tile_m, tile_n, mask)
        for rank, (work, other_steps) in enumerate(cluster):
            _, _, key_begin, _, _, (entry, q_row, q_end, k_row, k_end) = work
            assert other_steps == steps and entry == ROWS_END
            assert key_begin == tile_begin + first_key(plan, rank)
            assert q_row + len_q == k_row - key_begin + len_k == ROWS_END
        found[kv_head, tile_begin, q_end, len_q, k_end, len_k] += 1
    without_queries = [((q_begin, 0), keys) for (q_begin, _), keys in unused(batch)]
    assert found == Counter(
        (head, tile_begin, q_begin + len_q, len_q, k_begin + len_k, len_k)
        for (q_begin, len_q), (k_begin, len_k) in sequences(batch) + without_queries
        for head, tile_begin in product(range(batch.heads_k), range(0, len_k, tile_n)))


@each_packed
@given(batches(), st.data())
@examples(50)
def test_tiles_of_queries_lie_in_the_order_of_the_batch(name, batch, data):
    """Each row is in one tile, those that no sequence has at the end; behind them there are none.
    """
    plan, row_tiles, _ = work_of(name, batch.sizes, data.draw(mask_of_kind(FACTS[name]['mask'])),
                                 lengths=batch.lengths)
    tile_m = plan['tile_m']
    expected = [(begin + first, min(tile_m, length - first))
                for (begin, length), _ in sequences(batch) + unused(batch)
                for first in range(0, length, tile_m)]
    assert len(row_tiles) == plan['m_tiles'] >= len(expected)
    assert row_tiles == expected + [(0, 0)] * (plan['m_tiles'] - len(expected))


@each_packed
@given(batches(), st.data())
@examples(50)
def test_steps_find_their_rows_in_the_workspaces(name, batch, data):
    """A step's place is that of its head's tile, of which the first kernel has written the rows."""
    plan, row_tiles, ctas = work_of(name, batch.sizes, data.draw(mask_of_kind(FACTS[name]['mask'])),
                                    lengths=batch.lengths)
    tile_m = plan['tile_m']
    for (_, _, _, _, (len_q, _), (_, _, q_end, _, _)), steps in ctas:
        for head, m, _, place, _ in steps:
            assert divmod(place, plan['m_tiles'])[0] == head
            assert row_tiles[place % plan['m_tiles']] == (
                q_end - len_q + m * tile_m, min(tile_m, len_q - m * tile_m))


@each_packed
@given(batches(most=12))
@examples(30)
def test_the_longest_sequences_come_first(name, batch):
    mask = (NAMES[FACTS[name]['mask']], 40, 9, 0)
    plan, _, ctas = work_of(name, batch.sizes, mask, lengths=batch.lengths)
    costs = [min(len_q, plan['most_queries']) for (kv_head, *_, (len_q, _), _), _ in ctas
             if kv_head >= 0]
    assert costs == sorted(costs, reverse=True)


@each_packed
@given(nonsense(), st.data(), st.booleans())
@examples(100)
def test_nonsense_stays_inside(name, batch, data, deterministic):
    """The tensors and the workspaces."""
    mask = data.draw(mask_of_kind(FACTS[name]['mask']))
    plan, row_tiles, ctas = work_of(name, batch.sizes, mask, deterministic, batch.lengths)
    for row, rows in row_tiles:
        assert 0 <= row <= row + rows <= batch.total_q and rows <= plan['tile_m']
    for work, steps in ctas:
        kv_head, heads, key_begin, _, (len_q, len_k), (_, q_row, q_end, k_row, k_end) = work
        if kv_head < 0:
            continue
        assert kv_head < batch.heads_k and heads == (kv_head * 2, kv_head * 2 + 2)
        assert 0 <= len_q <= q_end <= batch.total_q and 0 <= len_k <= k_end <= batch.total_k
        assert q_row == ROWS_END - len_q and k_row == ROWS_END - len_k + key_begin
        assert 0 <= key_begin < len_k + plan['tile_n']
        assert all(0 <= place < plan['rows'] // plan['tile_m'] for _, _, _, place, _ in steps)
