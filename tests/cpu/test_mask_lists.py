"""The lists of K tiles of an AttentionMask (flash_attn3/ops/mask_lists.py) beside an oracle that
looks at each query and key.
"""
from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flash_attn3.cpu import visible_keys
from flash_attn3.ops.mask_lists import BLOCK, QUERIES, Layout, clean_rows, key_lists, list_count

from tests.cpu.drawn import examples
from tests.support.lists import ints, starts

OUTSIDE = -2 ** 31, -1000, -1, 2 ** 31 - 1


# ------------------------------------------------------------------------------------------ oracle
def sees(intervals: list, key: int) -> bool:
    return any(begin <= key < end for begin, end in intervals)


def is_shown(blocks: Tensor | None, row_block: int, key_block: int) -> bool:
    if blocks is None:
        return True
    rows, columns = blocks.shape
    return row_block < rows and key_block < columns and bool(blocks[row_block, key_block])


def expected_list(intervals: list, blocks: Tensor | None, tile: int, seqlen_k: int,
                  keys: int) -> list[int]:
    """The list of a tile of queries without what is unspecified. intervals: of each query of the
    sequence; blocks: of the head.
    """
    rows = range(tile * QUERIES, min((tile + 1) * QUERIES, len(intervals)))
    free, others = [], []
    for k_tile in range(-(-seqlen_k // keys)):
        own = [k_tile * keys + j for j in range(keys)]
        seen = [key < seqlen_k and sees(intervals[row], key)
                and is_shown(blocks, row // BLOCK, key // BLOCK) for row in rows for key in own]
        bits = sum(is_shown(blocks, tile * QUERIES // BLOCK + i,
                            (k_tile * keys + j * (keys - BLOCK)) // BLOCK) << (2 * i + j)
                   for i in (0, 1) for j in (0, 1))
        if any(seen):
            (free if all(seen) else others).append(k_tile << 4 | bits)
    entries = free + others or [0]
    return [len(entries), len(free), *entries]


def check_list(got: Tensor, wanted: list[int]) -> None:
    assert got[:len(wanted)].tolist() == wanted


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
@given(dense(), st.sampled_from([64, 128]))
@examples(100)
def test_lists_of_dense_sequences(case, keys):
    intervals, blocks, seqlen_q, seqlen_k = case
    layout = Layout(seqlen_q, seqlen_k)
    rows = None if intervals is None else clean_rows(intervals, layout)
    got = key_lists(rows, blocks, layout, keys)
    batch = max(x.size(0) for x in (intervals, blocks) if x is not None)
    heads = 1 if blocks is None else blocks.size(1)
    tiles = max(1, -(-seqlen_k // keys))
    assert got.shape == (batch, heads, -(-seqlen_q // QUERIES), 2 + tiles)
    assert got.dtype == torch.int32 and got.is_contiguous()
    for b in range(batch):
        own = ([[(0, seqlen_k)]] * seqlen_q if intervals is None
               else intervals[b % intervals.size(0)].tolist())
        for h in range(heads):
            shown = None if blocks is None else blocks[b % blocks.size(0), h]
            for tile in range(got.size(2)):
                check_list(got[b, h, tile], expected_list(own, shown, tile, seqlen_k, keys))


@given(packed(), st.sampled_from([64, 128]))
@examples(100)
def test_lists_of_packed_sequences(case, keys):
    intervals, blocks, lengths_q, lengths_k, behind = case
    longest = max(lengths_k, default=0)
    starts_q = starts(lengths_q, 'cpu')
    layout = Layout(sum(lengths_q) + behind, longest, starts_q, starts(lengths_k, 'cpu'))
    rows = None if intervals is None else clean_rows(intervals, layout)
    got = key_lists(rows, blocks, layout, keys)
    heads = got.size(1)
    assert got.shape == (1, heads, layout.queries // QUERIES + len(lengths_q),
                         2 + max(1, -(-longest // keys)))
    assert heads in (1, 1 if blocks is None else blocks.size(1))
    wanted = {tile: [[1, 0, 0]] * heads for tile in range(list_count(layout))}
    for b, (first, length) in enumerate(zip(starts_q.tolist(), lengths_q)):
        own = ([[(0, lengths_k[b])]] * length if intervals is None
               else intervals[first:first + length].tolist())
        for tile in range(-(-length // QUERIES)):
            wanted[first // QUERIES + b + tile] = [
                expected_list(own, None if blocks is None else blocks[b, h], tile, lengths_k[b],
                              keys) for h in range(heads)]
    for tile, lists in wanted.items():
        for h, one in enumerate(lists):
            check_list(got[0, h, tile], one)


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


def test_wrong_lengths_leave_no_tensor():
    """Unchecked lists of lengths on a GPU may hold anything."""
    blocks = torch.ones(3, 2, 2, 3, dtype=torch.bool)
    for lengths in ([0, 900, 100, 2 ** 31 - 1], [-5, -9, 3, 200], [2 ** 31 - 1] * 4, [7, 3, 1, 0]):
        wrong = ints(lengths)
        for starts_q, starts_k in ((wrong, wrong), (starts([50, 60, 70], 'cpu'), wrong),
                                   (wrong, starts([50, 60, 70], 'cpu'))):
            layout = Layout(180, 150, starts_q, starts_k)
            rows = clean_rows(torch.randint(-300, 300, (180, 2, 2), dtype=torch.int32), layout)
            got = key_lists(rows, blocks, layout, 64)
            count, free = got[..., 0], got[..., 1]
            assert ((1 <= count) & (count <= 3) & (0 <= free) & (free <= count)).all()
            assert ((got[..., 2:] >> 4 >= 0) & (got[..., 2:] >> 4 < 3)).all()
