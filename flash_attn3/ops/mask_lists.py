"""The lists of K tiles that kernels visit for an AttentionMask (api/masks.py), and the op
`mask_lists`, which makes them.

For each tile of 128 queries (64 in kernels for blocks of 64) a list holds first the K tiles of
which every query sees every key, then those of which some query sees some key:

    [count, free, order, outliers, entry_0, ..., entry_{count - 1}, unspecified]

An entry is K tile << 4 | bits. In list i of a head `order` is the list that is the i-th longest of
the head, and `outliers` says how many of its lists are more than four times as long as the mean.

The first `free` entries need no mask. Both parts ascend. Bit 2 * i + j says whether mask_blocks
shows the keys of half j of the tile to the queries of half i; a tile of 64 keys is both halves. A
list without a tile has an entry of 0. Packed sequences: tile m of sequence b is number
cu_seqlens_q[b] // 128 + b + m; rows after the last sequence are one more sequence, without keys.

For gradients, each tile of 128 keys has a list of tiles of queries in the same way, possibly empty:

    [count, free, order, outliers, word_0, rank_0, word_1, rank_1, ..., unspecified]

word: tile of queries << 4 | bits; rank: how many later tiles of keys list the same queries.

csrc/mask makes the lists, and csrc/core/key_list.h reads them. Kernels alone read lists, so the op
has no implementation for CPU tensors: tests/support/plain_lists.py is what the tests compare with.
Rows are cleaned here for the CPU, and for GPUs without kernels.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn3.arguments import OPS, tuple_of
from flash_attn3.ops import library

QUERIES = 128    # queries that share a list of K tiles
KEYS = 128       # keys that share a list of tiles of queries
BLOCK = 64       # a block of mask_blocks has 64 queries and 64 keys
HEADER = 4       # ints of a list before its entries


class Layout(NamedTuple):
    """Where queries and keys lie.

    queries: seqlen_q; packed: total_q. keys: seqlen_k; packed: a bound of the longest. starts:
    cu_seqlens of packed sequences, else None.
    """
    queries: int
    keys: int
    starts_q: Tensor | None = None
    starts_k: Tensor | None = None
    all_keys: int = 0    # packed: total_k

    @property
    def is_packed(self) -> bool:
        return self.starts_q is not None

    @property
    def batch(self) -> int:
        """The number of packed sequences."""
        return self.starts_q.size(0) - 1

    def sequence_of(self, rows: Tensor) -> Tensor:
        """The sequence of each packed query. Unspecified for queries after the last sequence."""
        ends = self.starts_q[1:].contiguous()
        return torch.searchsorted(ends, rows, right=True).clamp(max=self.batch - 1)

    def keys_of(self, rows: Tensor) -> Tensor:
        """How many keys the sequence of each packed query has; 0 for those after the last."""
        if self.batch == 0:
            return torch.zeros_like(rows)
        counts = (self.starts_k[1:] - self.starts_k[:-1]).clamp(0, self.keys)
        return torch.where(rows < self.starts_q[-1], counts[self.sequence_of(rows)], 0)

    def rows(self, device: torch.device) -> Tensor:
        return torch.arange(self.queries, dtype=torch.int32, device=device)

    def lists(self, rows: int = QUERIES) -> int:
        """How many lists of K tiles a head has, of so many queries. Some between packed sequences
        have no queries; the last is for rows after them.
        """
        if not self.is_packed:
            return ceil_div(self.queries, rows)
        return self.queries // QUERIES + self.batch + 1

    def query_lists(self) -> int:
        if not self.is_packed:
            return ceil_div(self.keys, KEYS)
        return self.all_keys // KEYS + self.batch + 1


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


class Tiles(NamedTuple):
    """Tiles of kernels that read lists. keys: of a K tile. rows: queries that share a list of K
    tiles. queries: of a tile of gradients; 0: none.
    """
    keys: int
    rows: int = QUERIES
    queries: int = 0

    @staticmethod
    def of(head_dim: int, has_softcap: bool, with_gradients: bool, is_fp8: bool = False) -> Tiles:
        """head_dim: the larger one of q and v."""
        return Tiles(KEYS if is_fp8 or (head_dim <= 128 and not has_softcap) else 64, QUERIES,
                     0 if not with_gradients else 128 if head_dim <= 64 else 64)

    def of_blocks(self) -> Tiles:
        """The same for a mask of blocks of 64, which head dims up to 128 have kernels for."""
        return self._replace(keys=BLOCK, rows=BLOCK) if self.keys == KEYS else self

    def of_calls(self) -> list[Tiles]:
        """What calls of the op make: lists for gradients come with those of the widest tiles."""
        if not self.queries or (self.keys, self.rows) == (KEYS, QUERIES):
            return [self]
        return [self._replace(queries=0), Tiles(KEYS, QUERIES, self.queries)]


def clean_rows(intervals: Tensor, layout: Layout) -> Tensor:
    """(..., n, 2) as (..., 4): the same keys as two intervals that neither overlap nor touch.

    They ascend and lie inside the sequence. An empty one is (0, 0); the first is empty only if both
    are.
    """
    rows = layout.rows(intervals.device)
    most = layout.keys_of(rows) if layout.is_packed else torch.full_like(rows, layout.keys)
    given = torch.minimum(intervals.clamp(min=0), most[:, None, None])
    begin, end = F.pad(given, (0, 0, 0, 2 - given.size(-2))).unbind(-1)
    is_empty = begin >= end
    order = begin.masked_fill(is_empty, layout.keys).argsort(-1)
    begin, end = (x.masked_fill(is_empty, 0).gather(-1, order) for x in (begin, end))
    is_one = (end[..., 1:] > 0) & (begin[..., 1:] <= end[..., :1])
    first_end = torch.where(is_one, end.amax(-1, keepdim=True), end[..., :1])
    other = (x[..., 1:].masked_fill(is_one, 0) for x in (begin, end))
    return torch.cat([begin[..., :1], first_end, *other], -1)


def expanded_blocks(blocks: Tensor, layout: Layout, heads: int) -> Tensor:
    """The blocks of a mask as the op `attend` takes them; heads: those of q."""
    if layout.is_packed:
        blocks = blocks.expand(layout.batch, -1, -1, -1)
    if blocks.size(1) > 1:
        blocks = blocks.repeat_interleave(heads // blocks.size(1), 1)
    return blocks.contiguous()


# ------------------------------------------------------------------------------------------ the op
def _no_lists(rows: Tensor | None, blocks: Tensor | None, layout: Layout, lists: int,
              width: int) -> Tensor:
    """(batch or 1, heads_q or 1, lists, width) zeros; packed: 1 instead of a batch."""
    given = [x for x in (rows, blocks) if x is not None]
    batches = [1 if layout.is_packed else x.size(0) for x in given]
    batch = batches[0] if batches[-1] == 1 else batches[-1]
    return torch.zeros(batch, 1 if blocks is None else blocks.size(1), lists, width,
                       dtype=torch.int32, device=given[0].device)


def empty_key_lists(rows: Tensor | None, blocks: Tensor | None, layout: Layout, keys: int,
                    queries: int) -> Tensor:
    lists = _no_lists(rows, blocks, layout, layout.lists(queries),
                      HEADER + max(1, ceil_div(layout.keys, keys)))
    lists[..., 0] = 1
    return lists


def empty_query_lists(rows: Tensor | None, blocks: Tensor | None, layout: Layout,
                      queries: int) -> Tensor:
    tiles = max(1, ceil_div(layout.queries, queries))
    return _no_lists(rows, blocks, layout, layout.query_lists(), HEADER + 2 * tiles)


Arguments = tuple_of('Arguments', __name__, *OPS['mask_lists'].takes)


def layout_of(own: Arguments) -> Layout:
    return Layout(own.queries, own.keys, own.starts_q, own.starts_k, own.all_keys)


def _lists_fake(*arguments) -> tuple[Tensor, ...]:
    own = Arguments(*arguments)
    layout = layout_of(own)
    rows = (None if own.intervals is None
            else own.intervals.new_empty((*own.intervals.shape[:-2], 4)))
    blocks = None if own.block_mask is None else expanded_blocks(own.block_mask, layout, own.heads)
    of_queries = (empty_query_lists(rows, blocks, layout, own.tile_queries) if own.tile_queries
                  else None)
    of_keys = empty_key_lists(rows, blocks, layout, own.tile_keys, own.tile_rows)
    return results_of(rows, of_keys, of_queries)


def results_of(rows: Tensor | None, lists: Tensor, of_queries: Tensor | None) -> tuple[Tensor, ...]:
    """What there is not is empty."""
    return tuple(lists.new_empty(0) if x is None else x for x in (rows, lists, of_queries))


torch.library.register_fake('flash_attn3::mask_lists', _lists_fake, lib=library.LIBRARY)
