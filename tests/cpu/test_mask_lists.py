"""The lists of an AttentionMask in plain PyTorch (support/plain_lists.py) beside an oracle that
looks at each query and key. Those of the kernels: tests/gpu/test_mask_lists.py.
"""
from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flash_attn3.cpu import visible_keys
from flash_attn3.ops.mask_lists import BLOCK, HEADER, KEYS, QUERIES, Layout, clean_rows

from tests.cpu.drawn import examples
from tests.support.lists import starts
from tests.support.plain_lists import key_lists, query_lists

OUTSIDE = -2 ** 31, -1000, -1, 2 ** 31 - 1


# ------------------------------------------------------------------------------------------ oracle
def sees(intervals: list, key: int) -> bool:
    return any(begin <= key < end for begin, end in intervals)


def is_shown(blocks: Tensor | None, row_block: int, key_block: int) -> bool:
    if blocks is None:
        return True
    rows, columns = blocks.shape
    return row_block < rows and key_block < columns and bool(blocks[row_block, key_block])


def shown_to(intervals: list, blocks: Tensor | None, seqlen_k: int) -> Tensor:
    """(seqlen_q, seqlen_k) bool. intervals: of each query; blocks: of the head."""
    visible = torch.zeros(len(intervals), seqlen_k, dtype=torch.bool)
    for row, own in zip(visible, intervals):
        for begin, end in own:
            row[max(begin, 0):max(end, 0)] = True
    for row in range(0, len(intervals), BLOCK):
        for key in range(0, seqlen_k, BLOCK):
            if not is_shown(blocks, row // BLOCK, key // BLOCK):
                visible[row:row + BLOCK, key:key + BLOCK] = False
    return visible


def expected_bits(blocks: Tensor | None, first: tuple[int, int], sizes: tuple[int, int]) -> int:
    """Those of an entry for so many queries and keys from the first ones on."""
    rows = range(2) if sizes[1] == BLOCK else range(sizes[0] // BLOCK)
    return sum(is_shown(blocks, (first[0] + i * (sizes[0] - BLOCK)) // BLOCK,
                        (first[1] + j * (sizes[1] - BLOCK)) // BLOCK) << (2 * i + j)
               for i in rows for j in (0, 1))


def expected_lists(visible: Tensor, blocks: Tensor | None, queries: int, keys: int,
                   of_queries: bool) -> list[list[int]]:
    """The lists of a sequence without what is unspecified: of K tiles for each tile of queries, or
    of_queries for each tile of keys. visible: shown_to().
    """
    tiles = [(row, key) for row in range(0, visible.size(0), queries)
             for key in range(0, visible.size(1), keys)]
    some, every = ({(row, key) for row, key in tiles if function(
        visible[row:row + queries, key:key + keys])} for function in (
            torch.any, lambda x: x.all() and x.size(1) == keys))
    lists = []
    for own in range(0, visible.size(int(of_queries)), keys if of_queries else queries):
        found = [tile for tile in tiles if tile[int(of_queries)] == own and tile in some]
        entries = []
        for row, key in sorted(found, key=lambda tile: (tile not in every, tile)):
            bits = expected_bits(blocks, (row, key), (queries, keys))
            later = [tile for tile in some if tile[0] == row and tile[1] > key]
            entries += ([row // queries << 4 | bits, len(later)] if of_queries
                        else [key // keys << 4 | bits])
        counts = [len(found), sum(tile in every for tile in found)]
        lists.append([*counts, *entries] if found or of_queries else [1, 0, 0])
    return lists


def check_lists(got: Tensor, wanted: list[list[int]]) -> None:
    """got: the lists of a head, with their order."""
    assert len(got) == len(wanted)
    for own, one in zip(got, wanted):
        assert [*own[:2].tolist(), *own[HEADER:].tolist()][:len(one)] == one
    lengths = [one[0] for one in wanted]
    order = got[:, 2].tolist()
    assert sorted(order, key=lambda i: (-lengths[i], i)) == order
    assert set(got[:, 3].tolist()) <= {sum(x * len(lengths) > 4 * sum(lengths) for x in lengths)}


# ------------------------------------------------------------------------------------------- drawn
@st.composite
def edges(draw, most: int, is_wild: bool) -> tuple[int, int]:
    """begin and end; often at edges of blocks."""
    near = st.integers(0, most // BLOCK + 1).map(lambda n: n * BLOCK)
    values = [st.integers(0, most), near, st.just(0), st.just(most)]
    if is_wild:
        values += [st.sampled_from(OUTSIDE), st.integers(-most, 2 * most)]
    one = st.one_of(*values)
    return draw(one), draw(one)


@st.composite
def interval_rows(draw, rows: int, most: int) -> Tensor:
    """(rows, n, 2) int32: stretches of queries that see the same keys, or keys up to themselves."""
    count = draw(st.integers(1, 2))
    intervals = torch.zeros(rows, count, 2, dtype=torch.int32)
    for _ in range(draw(st.integers(1, 4))):
        first, last = sorted(draw(st.tuples(*[st.integers(0, rows)] * 2)))
        drawn = [draw(edges(most, True)) for _ in range(count)]
        intervals[first:last] = torch.tensor(drawn, dtype=torch.int32)
        if draw(st.booleans()):
            intervals[first:last, -1, 1] = torch.arange(first, last, dtype=torch.int32) + 1
    return intervals


def draw_blocks(draw, *shape: int) -> Tensor:
    share = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2 ** 31)))
    return torch.rand(shape, generator=generator) < share


@st.composite
def dense(draw) -> tuple:
    """(intervals, blocks, seqlen_q, seqlen_k)"""
    seqlen_q, seqlen_k = draw(st.integers(1, 300)), draw(st.integers(0, 400))
    batches, heads = draw(st.sampled_from([(1, 1), (2, 2), (1, 2), (2, 1)])), draw(
        st.integers(1, 2))
    what = draw(st.sampled_from(['rows', 'blocks', 'both']))
    intervals = blocks = None
    if what != 'blocks':
        intervals = torch.stack([draw(interval_rows(seqlen_q, seqlen_k))] * batches[0])
        if intervals.size(0) > 1:
            intervals[1] = intervals[1].flip(0)
    if what != 'rows':
        blocks = draw_blocks(draw, batches[1], heads, -(-seqlen_q // BLOCK), -(-seqlen_k // BLOCK))
    return intervals, blocks, seqlen_q, seqlen_k


@st.composite
def packed(draw) -> tuple:
    """(intervals, blocks, lengths of q, of k, rows behind the last sequence)"""
    batch = draw(st.integers(0, 3))
    lengths_q, lengths_k = ([draw(st.integers(0, 200)) for _ in range(batch)] for _ in 'qk')
    behind = draw(st.integers(0, 130))
    what = draw(st.sampled_from(['rows', 'blocks', 'both']))
    intervals = blocks = None
    if what != 'blocks':
        intervals = draw(interval_rows(sum(lengths_q) + behind, max(lengths_k, default=0)))
    if what != 'rows':
        longest = (-(-max(lengths, default=0) // BLOCK) for lengths in (lengths_q, lengths_k))
        blocks = draw_blocks(draw, batch, draw(st.integers(1, 2)), *longest)
    return intervals, blocks, lengths_q, lengths_k, behind


# -------------------------------------------------------------------------------------------- tests
@given(dense(), st.sampled_from([(64, 128), (128, 128), (64, 64)]), st.sampled_from([64, 128]))
@examples(60)
def test_lists_of_dense_sequences(case, tile, queries):
    keys, rows_of_list = tile
    intervals, blocks, seqlen_q, seqlen_k = case
    layout = Layout(seqlen_q, seqlen_k)
    rows = None if intervals is None else clean_rows(intervals, layout)
    got = key_lists(rows, blocks, layout, *tile)
    of_keys = query_lists(rows, blocks, layout, queries)
    batch = max(x.size(0) for x in (intervals, blocks) if x is not None)
    heads = 1 if blocks is None else blocks.size(1)
    tiles = max(1, -(-seqlen_k // keys))
    assert got.shape == (batch, heads, -(-seqlen_q // rows_of_list), HEADER + tiles)
    assert of_keys.shape == (batch, heads, -(-seqlen_k // KEYS),
                             HEADER + 2 * -(-seqlen_q // queries))
    assert got.dtype == torch.int32 and got.is_contiguous()
    for b in range(batch):
        own = ([[(0, seqlen_k)]] * seqlen_q if intervals is None
               else intervals[b % intervals.size(0)].tolist())
        for h in range(heads):
            shown = None if blocks is None else blocks[b % blocks.size(0), h]
            visible = shown_to(own, shown, seqlen_k)
            wanted = expected_lists(visible, shown, rows_of_list, keys, False)
            check_lists(got[b, h], wanted)
            check_lists(of_keys[b, h], expected_lists(visible, shown, queries, KEYS, True))


@given(packed(), st.sampled_from([64, 128]), st.sampled_from([64, 128]))
@examples(100)
def test_lists_of_packed_sequences(case, keys, queries):
    intervals, blocks, lengths_q, lengths_k, behind = case
    longest = max(lengths_k, default=0)
    starts_q, starts_k = (starts(lengths, 'cpu') for lengths in (lengths_q, lengths_k))
    layout = Layout(sum(lengths_q) + behind, longest, starts_q, starts_k, sum(lengths_k) + behind)
    rows = None if intervals is None else clean_rows(intervals, layout)
    got = key_lists(rows, blocks, layout, keys)
    of_keys = query_lists(rows, blocks, layout, queries)
    heads = 1 if blocks is None else blocks.size(1)
    lists, lists_of_keys = (total // 128 + len(lengths_q) + 1
                            for total in (layout.queries, layout.all_keys))
    assert got.shape == (1, heads, lists, HEADER + max(1, -(-longest // keys)))
    assert of_keys.shape == (1, heads, lists_of_keys,
                             HEADER + 2 * max(1, -(-layout.queries // queries)))
    for h in range(heads):
        wanted, wanted_of_keys = [[1, 0, 0]] * lists, [[0, 0]] * lists_of_keys
        for b, (first, length) in enumerate(zip(starts_q.tolist(), lengths_q)):
            own = ([[(0, lengths_k[b])]] * length if intervals is None
                   else intervals[first:first + length].tolist())
            shown = None if blocks is None else blocks[b, h]
            visible = shown_to(own, shown, lengths_k[b])
            for found, begin, all_lists in (
                    (expected_lists(visible, shown, QUERIES, keys, False), first, wanted),
                    (expected_lists(visible, shown, queries, KEYS, True), int(starts_k[b]),
                     wanted_of_keys)):
                begin = begin // 128 + b
                all_lists[begin:begin + len(found)] = found
        check_lists(got[0, h], wanted)
        check_lists(of_keys[0, h], wanted_of_keys)


@given(st.data())
@examples(100)
def test_clean_rows(data):
    """The same keys, in disjoint intervals that ascend."""
    seqlen_k = data.draw(st.integers(0, 300))
    intervals = data.draw(interval_rows(40, seqlen_k))
    rows = clean_rows(intervals, Layout(40, seqlen_k))
    assert rows.dtype == torch.int32 and rows.is_contiguous()
    for (begin, end, other_begin, other_end), given_ones in zip(rows.tolist(), intervals.tolist()):
        assert 0 <= begin <= end <= seqlen_k
        assert (other_begin, other_end) == (0, 0) or end < other_begin < other_end <= seqlen_k
        assert begin < end or (begin, end, other_begin, other_end) == (0, 0, 0, 0)
        assert [sees([(begin, end), (other_begin, other_end)], key) for key in range(seqlen_k)] == [
            sees(given_ones, key) for key in range(seqlen_k)]


@given(dense())
@examples(50)
def test_visible_keys(case):
    """The dense mask of the CPU path shows what the oracle shows."""
    intervals, blocks, seqlen_q, seqlen_k = case
    rows = None if intervals is None else clean_rows(intervals, Layout(seqlen_q, seqlen_k))
    got = visible_keys.visible(rows, blocks, seqlen_q, seqlen_k)
    wanted = torch.ones(1, 1, seqlen_q, seqlen_k, dtype=torch.bool)
    if intervals is not None:
        key = torch.arange(seqlen_k)
        begin, end = intervals[..., None, 0], intervals[..., None, 1]
        wanted = wanted & ((begin <= key) & (key < end)).any(2)[:, None]
    if blocks is not None:
        wide = blocks.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)
        wanted = wanted & wide[:, :, :seqlen_q, :seqlen_k]
    assert torch.equal(got, wanted)
