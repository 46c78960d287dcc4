"""What the op `mask_lists` makes, in plain PyTorch: loops, with a bool for each query and key.

Importing this file gives the op an implementation for CPU tensors, if it has none.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn3.cpu import visible_keys
from flash_attn3.ops import library
from flash_attn3.ops.mask_lists import (
    BLOCK, HEADER, KEYS, QUERIES, Arguments, Layout, ceil_div, clean_rows, empty_key_lists,
    empty_query_lists, expanded_blocks, layout_of, results_of)

_ENTRY_BITS = 4


class _Sequence(NamedTuple):
    """A packed sequence, or the whole of a batch. visible: (batch or 1, heads_q or 1, queries,
    keys). blocks: those of it. first, first_of_keys: the numbers of its first lists.
    """
    visible: Tensor
    blocks: Tensor | None
    first: int = 0
    first_of_keys: int = 0


def _sequences(rows: Tensor | None, blocks: Tensor | None, layout: Layout) -> Iterator[_Sequence]:
    if not layout.is_packed:
        yield _Sequence(visible_keys.visible(rows, blocks, layout.queries, layout.keys), blocks)
        return
    starts_q, starts_k = (x.tolist() for x in layout[2:4])
    for b in range(layout.batch):
        own = slice(*starts_q[b:b + 2])
        of_rows = None if rows is None else rows[None, own]
        of_blocks = None if blocks is None else blocks[b:b + 1]
        visible = visible_keys.visible(of_rows, of_blocks, own.stop - own.start,
                                       starts_k[b + 1] - starts_k[b])
        yield _Sequence(visible, of_blocks, own.start // QUERIES + b, starts_k[b] // KEYS + b)


class _Tiles(NamedTuple):
    """Tiles of queries and keys, each (batch or 1, heads_q or 1, tiles, tiles). listed: some query
    sees some key. free: and every query sees every key. bits: of an entry.
    """
    listed: Tensor
    free: Tensor
    bits: Tensor


def _tiles(sequence: _Sequence, queries: int, keys: int) -> _Tiles:
    visible, blocks = sequence.visible, sequence.blocks
    counts = ceil_div(visible.size(-2), queries), ceil_div(visible.size(-1), keys)

    def in_tiles(x: Tensor, wanted: tuple[int, int], outside: bool = False) -> Tensor:
        """(..., tiles of queries, tiles of keys, what a tile holds), of so many in a tile."""
        rows, columns = (count * size for count, size in zip(counts, wanted))
        x = F.pad(x[..., :rows, :columns], (0, max(0, columns - x.size(-1))))
        x = F.pad(x, (0, 0, 0, max(0, rows - x.size(-2))), value=outside)
        return x.unflatten(-1, (counts[1], wanted[1])).unflatten(-3, (counts[0], wanted[0])
                                                                 ).transpose(-3, -2).flatten(-2)

    listed = in_tiles(visible, (queries, keys)).any(-1)
    free = listed & in_tiles(visible, (queries, keys), outside=True).all(-1)
    weights = 2 ** torch.arange(queries // BLOCK * 2, dtype=torch.int32)
    if blocks is None:
        return _Tiles(listed, free, weights.sum().int().expand_as(listed))
    shown = in_tiles(blocks.repeat_interleave(2 * BLOCK // keys, -1), (queries // BLOCK, 2))
    return _Tiles(listed, free, (shown * weights).sum(-1).int().expand_as(listed))


def _write(entries: Tensor, listed: Tensor, free: Tensor, words: Tensor) -> None:
    """Writes a list. listed, free: of each tile. words: the words of each tile's entry."""
    order = torch.cat([free.nonzero(), (listed & ~free).nonzero()]).flatten()
    if len(order):
        entries[0], entries[1] = len(order), free.sum()
        entries[HEADER:HEADER + words[order].numel()] = words[order].flatten()


def _write_order(lists: Tensor) -> Tensor:
    counts = lists[..., 0].long()
    lists[..., 2] = counts.argsort(dim=-1, descending=True, stable=True)
    is_outlier = counts * counts.size(-1) > 4 * counts.sum(-1, keepdim=True)
    lists[..., 3] = is_outlier.sum(-1, keepdim=True)
    return lists


def key_lists(mask_rows: Tensor | None, mask_blocks: Tensor | None, layout: Layout,
              keys: int, queries: int = QUERIES) -> Tensor:
    """The lists, (batch or 1, heads_q or 1, lists, 4 + K tiles, at least 5) int32; the first size
    is 1 for packed sequences.

    mask_rows, mask_blocks: those of the op `attend`, of which one may be None; mask_rows is clean
    (clean_rows). keys, queries: 64 or 128, those of a K tile and of a list.
    """
    lists = empty_key_lists(mask_rows, mask_blocks, layout, keys, queries)
    for sequence in _sequences(mask_rows, mask_blocks, layout):
        listed, free, bits = _tiles(sequence, queries, keys)
        bits = bits * 5 if queries == BLOCK else bits    # those of both halves of the queries
        words = torch.arange(listed.size(-1), dtype=torch.int32) << _ENTRY_BITS | bits
        for b, head, tile in itertools.product(*map(range, listed.shape[:-1])):
            at = b, head, tile
            _write(lists[b, head, sequence.first + tile], listed[at], free[at], words[at])
    return _write_order(lists)


def query_lists(mask_rows: Tensor | None, mask_blocks: Tensor | None, layout: Layout,
                queries: int) -> Tensor:
    """The lists of tiles of queries, (batch or 1, heads_q or 1, lists, 4 + 2 tiles) int32, from
    what key_lists() takes. queries: 64 or 128, those of a tile.
    """
    lists = empty_query_lists(mask_rows, mask_blocks, layout, queries)
    for sequence in _sequences(mask_rows, mask_blocks, layout):
        listed, free, bits = _tiles(sequence, queries, KEYS)
        tiles = torch.arange(listed.size(-2), dtype=torch.int32)[:, None]
        ranks = listed.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1) - listed.int()
        words = torch.stack([tiles << _ENTRY_BITS | bits, ranks], -1)
        for b, head, tile in itertools.product(*map(range, (*listed.shape[:2], listed.size(-1)))):
            at = b, head, slice(None), tile
            _write(lists[b, head, sequence.first_of_keys + tile], listed[at], free[at], words[at])
    return _write_order(lists)


def _lists_cpu(*arguments) -> tuple[Tensor, ...]:
    own = Arguments(*arguments)
    layout = layout_of(own)
    rows = None if own.intervals is None else clean_rows(own.intervals, layout)
    blocks = None if own.block_mask is None else expanded_blocks(own.block_mask, layout, own.heads)
    of_keys = key_lists(rows, blocks, layout, own.tile_keys, own.tile_rows)
    of_queries = query_lists(rows, blocks, layout, own.tile_queries) if own.tile_queries else None
    return results_of(rows, of_keys, of_queries)


# The emulator of the kernels has one too.
if not torch._C._dispatch_has_kernel_for_dispatch_key('flash_attn3::mask_lists', 'CPU'):
    library.LIBRARY.impl('mask_lists', _lists_cpu, 'CPU')
