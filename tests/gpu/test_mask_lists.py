"""The op `mask_lists` beside plain PyTorch (support/plain_lists.py): each list up to what is
unspecified, to the bit.
"""
from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from flash_attn3.ops import mask_lists
from flash_attn3.ops.mask_lists import (
    BLOCK, HEADER, Layout, Tiles, ceil_div, expanded_blocks)

from tests.gpu.common import spoil_allocator
from tests.support import plain_lists
from tests.support.lists import ints, starts

SEEDS = [pytest.param(seed, marks=pytest.mark.smoke) for seed in range(3)] + list(range(3, 24))
TILES = [Tiles(64), Tiles(128), Tiles(128, queries=64), Tiles(128, queries=128)]
OF_BLOCKS = Tiles(128).of_blocks()
EXTREMES = -2 ** 31, -1000, -1, 2 ** 31 - 1
KINDS = 'intervals', 'blocks', 'both'


class Given(NamedTuple):
    """What the op takes before the tiles, on the CPU. heads: of q."""
    intervals: Tensor | None
    blocks: Tensor | None
    heads: int
    layout: Layout


def called(given: Given, tiles: Tiles, device: torch.device) -> tuple[Tensor, ...]:
    """The results of the op. Non-contiguous tensors stay so."""
    def moved(x: Tensor | None) -> Tensor | None:
        if x is None or x.device == device:
            return x
        return x.to(device) if x.is_contiguous() else torch.empty_strided(
            x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)

    layout = given.layout
    return torch.ops.flash_attn3.mask_lists(
        moved(given.intervals), moved(given.blocks), *map(moved, layout[2:4]), given.heads,
        layout.queries, layout.keys, layout.all_keys, *tiles)


def check_lists(name: str, got: Tensor, wanted: Tensor, words: int) -> None:
    """words: of an entry."""
    assert got.shape == wanted.shape and got.dtype == torch.int32, name
    got = got.cpu()
    count = wanted[..., :1].clamp(min=1 if words == 1 else 0)
    is_specified = torch.arange(wanted.size(-1)) < HEADER + words * count
    differs = ((got != wanted) & is_specified).nonzero()
    assert not len(differs), f'{name}: {differs[0].tolist()} differs'


def check(given: Given, tiles: Tiles, device: torch.device) -> None:
    intervals, blocks, heads, layout = given
    rows, lists, of_queries = called(given, tiles, device)
    clean = None if intervals is None else mask_lists.clean_rows(intervals, layout)
    blocks = None if blocks is None else expanded_blocks(blocks, layout, heads)
    if clean is None:
        assert rows.numel() == 0
    else:
        assert rows.dtype == torch.int32 and torch.equal(rows.cpu(), clean)
    check_lists('key_lists', lists, plain_lists.key_lists(clean, blocks, layout, *tiles[:2]), 1)
    if not tiles.queries:
        assert of_queries.numel() == 0
        return
    wanted = plain_lists.query_lists(clean, blocks, layout, tiles.queries)
    check_lists('query_lists', of_queries, wanted, 2)


# ------------------------------------------------------------------------------------------- drawn
def draw_intervals(draw: random.Random, rows: int, most: int) -> Tensor:
    """(rows, n, 2): stretches of queries that see alike, often at edges of blocks."""
    count = draw.randint(1, 2)
    intervals = torch.zeros(rows, count, 2, dtype=torch.int32)

    def end() -> int:
        return draw.choice([draw.randint(0, most), draw.randint(0, most // BLOCK + 1) * BLOCK, 0,
                            most, draw.choice(EXTREMES), draw.randint(-most, 2 * most)])

    for _ in range(draw.randint(1, 6)):
        first, last = sorted(draw.randint(0, rows) for _ in range(2))
        intervals[first:last] = ints([end() for _ in range(2 * count)]).view(count, 2)
        if draw.random() < 0.5:
            intervals[first:last, -1, 1] = torch.arange(first, last, dtype=torch.int32) + 1
    return intervals


def draw_blocks(draw: random.Random, *shape: int) -> Tensor:
    share = draw.choice([0.0, 0.1, 0.5, 0.9, 1.0])
    generator = torch.Generator().manual_seed(draw.randint(0, 2 ** 31))
    wide = torch.rand(*shape[:-1], 2 * shape[-1], generator=generator) < share
    return draw.choice([wide[..., ::2], wide[..., :shape[-1]].contiguous(),
                        wide[..., :shape[-1]].transpose(0, 1).contiguous().transpose(0, 1)])


def draw_dense(seed: int, kind: str) -> Given:
    draw = random.Random(seed)
    queries, keys = draw.choice([(draw.randint(1, 300), draw.randint(0, 400)),
                                 (draw.randint(1, 700), draw.randint(1, 5000)),
                                 (draw.randint(1, 5000), draw.randint(1, 700))])
    batch, heads = draw.randint(1, 3), draw.choice([1, 2, 6])
    intervals = blocks = None
    if kind != 'blocks':
        intervals = torch.stack([draw_intervals(draw, queries, keys)] * draw.choice([1, batch]))
        if intervals.size(0) > 1:
            intervals[1] = intervals[1].flip(0)
        if draw.random() < 0.3:
            intervals = intervals.transpose(1, 3).contiguous().transpose(1, 3)
    if kind != 'intervals':
        own_heads = draw.choice([size for size in (1, 2, 3, heads) if heads % size == 0])
        blocks = draw_blocks(draw, draw.choice([1, batch]), own_heads,
                             ceil_div(queries, BLOCK) + draw.randint(0, 1),
                             ceil_div(keys, BLOCK) + draw.randint(0, 2))
    return Given(intervals, blocks, heads, Layout(queries, keys))


def draw_packed(seed: int, kind: str) -> Given:
    draw = random.Random(seed)
    batch, most = draw.choice([(draw.randint(0, 3), 400), (draw.randint(4, 40), 150), (2, 3000)])
    lengths_q, lengths_k = ([draw.choice([0, draw.randint(0, most)]) for _ in range(batch)]
                            for _ in 'qk')
    behind, heads = draw.choice([0, draw.randint(0, 300)]), draw.choice([1, 2, 6])
    longest = max(lengths_k, default=0) + draw.choice([0, 0, 70])
    layout = Layout(sum(lengths_q) + behind, longest, starts(lengths_q), starts(lengths_k),
                    sum(lengths_k) + draw.choice([0, behind]))
    intervals = blocks = None
    if kind != 'blocks':
        intervals = draw_intervals(draw, layout.queries, longest)
    if kind != 'intervals':
        own_heads = draw.choice([size for size in (1, 2, 3, heads) if heads % size == 0])
        blocks = draw_blocks(draw, draw.choice([1, max(1, batch)]), own_heads,
                             ceil_div(max(lengths_q, default=0), BLOCK),
                             ceil_div(max(lengths_k, default=0), BLOCK))
    return Given(intervals, blocks, heads, layout)


# ------------------------------------------------------------------------------------------- tests
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('seed', SEEDS)
def test_dense_sequences(seed, kind, device):
    spoil_allocator(device)
    for tiles in (*TILES, OF_BLOCKS):
        check(draw_dense(seed, kind), tiles, device)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('seed', SEEDS)
def test_packed_sequences(seed, kind, device):
    spoil_allocator(device)
    for tiles in TILES:
        check(draw_packed(seed, kind), tiles, device)


@pytest.mark.smoke
def test_nothing(device):
    """A batch, queries or keys of 0, and blocks without one."""
    intervals, blocks = torch.zeros(1, 5, 1, 2, dtype=torch.int32), torch.ones(1, 1, 2, 3) > 0
    zeros = starts([])
    for given in (Given(intervals[:0], None, 2, Layout(5, 9)),
                  Given(intervals[:, :0], None, 2, Layout(0, 300)),
                  Given(intervals, blocks[..., :0], 2, Layout(5, 0)),
                  Given(None, blocks[:0], 2, Layout(100, 150)),
                  Given(intervals[0], None, 1, Layout(5, 7, zeros, zeros, 500)),
                  Given(None, blocks, 3, Layout(0, 0, starts([0, 0]), starts([0, 0]), 0)),
                  Given(intervals[0, :0], None, 3,
                        Layout(0, 300, starts([0]), starts([300]), 300))):
        for tiles in TILES:
            check(given, tiles, device)


def check_range(lists: Tensor, most: int, words: int) -> None:
    """Counts and tiles of what may be any lists of up to so many tiles."""
    count, free, tile = lists[..., 0], lists[..., 1], lists[..., HEADER::words] >> 4
    assert ((0 <= free) & (free <= count) & (count <= most)).all()
    is_entry = torch.arange(tile.size(-1)) < count[..., None]
    assert (((0 <= tile) & (tile < most)) | ~is_entry).all()


@pytest.mark.parametrize('lengths', [
    [0, 900, 100, 2 ** 31 - 1], [-5, -9, 3, 200], [2 ** 31 - 1] * 4, [7, 3, 1, 0],
    [-2 ** 31, 2 ** 31 - 1, -2 ** 31, 2 ** 31 - 1]], ids=str)
def test_wrong_lengths_leave_no_tensor(lengths, kernels):
    """Unchecked lists of lengths on a GPU may hold anything."""
    wrong, right = ints(lengths), starts([50, 60, 70])
    blocks = torch.ones(3, 2, 2, 3, dtype=torch.bool)
    intervals = torch.randint(-300, 300, (180, 2, 2), dtype=torch.int32)
    layouts = [Layout(180, 150, *pair, 180) for pair in ((wrong, wrong), (right, wrong),
                                                         (wrong, right))]
    for layout, tiles in itertools.product(layouts, TILES):
        for given in (Given(intervals, blocks, 2, layout), Given(None, blocks, 4, layout)):
            rows, lists, of_queries = (x.cpu() for x in called(given, tiles, kernels))
            assert ((0 <= rows) & (rows <= 150)).all()
            assert (lists[..., 0] >= 1).all()
            check_range(lists, ceil_div(150, tiles.keys), 1)
            if tiles.queries:
                check_range(of_queries, ceil_div(180, tiles.queries), 2)


@pytest.mark.parametrize('kind', KINDS)
def test_opcheck(kind, device):
    """But for the comparison of results, part of which is unspecified."""
    for given in (draw_dense(1, kind), draw_packed(4, kind)):
        layout = given.layout
        arguments = *given[:2], *layout[2:4], given.heads, layout.queries, layout.keys, 500
        opcheck(torch.ops.flash_attn3.mask_lists.default,
                [x.to(device) if isinstance(x, Tensor) else x for x in (*arguments, 128, 128, 64)],
                test_utils=('test_schema', 'test_autograd_registration', 'test_faketensor'))


def test_long_sequences(device):
    """More tiles than a warp has lanes, more than once."""
    draw = random.Random(7)
    for queries, keys in ((300, 40_000), (9_000, 1_000)):
        intervals = torch.stack([draw_intervals(draw, queries, keys)])
        blocks = draw_blocks(draw, 1, 2, ceil_div(queries, BLOCK), ceil_div(keys, BLOCK))
        for given in (Given(intervals, None, 2, Layout(queries, keys)),
                      Given(intervals, blocks, 2, Layout(queries, keys))):
            for tiles in (*TILES, OF_BLOCKS):
                check(given, tiles, device)


@pytest.mark.parametrize('changes, text', [
    (dict(intervals=None, block_mask=None), 'expected intervals or block_mask, got None'),
    (dict(queries=99), 'expected intervals of a mask'),
    (dict(intervals=torch.zeros(2, 100, 3, 2, dtype=torch.int32)), 'intervals of a mask'),
    (dict(intervals=torch.zeros(2, 100, 2, 2, dtype=torch.int64)), 'intervals of .* int64'),
    (dict(block_mask=torch.ones(3, 2, 2, 2) > 0), 'expected intervals of a mask'),
    (dict(block_mask=torch.ones(1, 3, 2, 2) > 0), 'block_mask of a mask, bool'),
    (dict(block_mask=torch.ones(1, 2, 2, 2)), 'block_mask of .* float32'),
    (dict(tile_keys=96), 'tile_keys to be'), (dict(tile_keys=64), 'tile_keys of 128 with'),
    (dict(tile_queries=32), 'tile_queries to be'), (dict(tile_rows=32), 'tile_rows to be'),
    (dict(tile_rows=64), 'tile_rows of 128 with tile_queries or starts_q'),
    (dict(heads=-1), 'heads to be'),
    (dict(keys=-1), 'keys to be'), (dict(queries=2 ** 31), 'queries to be'),
    (dict(starts_q=starts([100])), 'both of starts_q and starts_k'),
], ids=lambda x: x if isinstance(x, str) else '')
def test_refusals(changes, text, kernels):
    arguments = dict(intervals=torch.zeros(2, 100, 1, 2, dtype=torch.int32),
                     block_mask=torch.ones(1, 2, 2, 2) > 0, starts_q=None, starts_k=None,
                     heads=4, queries=100, keys=120, all_keys=0, tile_keys=128,
                     tile_rows=128, tile_queries=64) | changes
    arguments = {name: x.to(kernels) if isinstance(x, Tensor) else x
                 for name, x in arguments.items()}
    if text.startswith('expected intervals or'):
        arguments['starts_q'] = starts([100], kernels)    # says where the op runs
    with pytest.raises(RuntimeError, match=f'^flash_attn3.mask_lists: .*{text}'):
        torch.ops.flash_attn3.mask_lists(**arguments)
