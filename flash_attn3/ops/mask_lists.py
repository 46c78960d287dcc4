"""The lists of K tiles that kernels visit for an AttentionMask (api/masks.py).

For each tile of 128 queries a list holds first the K tiles of which every query sees every key,
then those of which some query sees some key. Nothing here reads a tensor on the host, and no tensor
has the size of the scores: queries are counted in blocks of 64 x 64.

    [count, free, entry_0, ..., entry_{count - 1}, unspecified]      entry: K tile << 4 | bits

The first `free` entries need no mask. Both parts ascend. Bit 2 * i + j says whether mask_blocks
shows the keys of half j of the tile to the queries of half i; a tile of 64 keys is both halves. A
list without a tile has an entry of 0. Packed sequences: tile m of sequence b is number
cu_seqlens_q[b] // 128 + b + m.

For gradients, each tile of 128 keys has a list of tiles of queries in the same way, possibly empty:

    [count, free, word_0, rank_0, word_1, rank_1, ..., unspecified]

word: tile of queries << 4 | bits; rank: how many later tiles of keys list the same queries.

csrc/core/key_list.h reads the lists.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

QUERIES = 128    # queries that share a list of K tiles
KEYS = 128       # keys that share a list of tiles of queries
BLOCK = 64       # a block of mask_blocks has 64 queries and 64 keys
_HALVES = QUERIES // BLOCK
_ENTRY_BITS = 4


class Layout(NamedTuple):
    """Where queries and keys lie.

    queries: seqlen_q; packed: total_q. keys: seqlen_k; packed: a bound of the longest. cu_seqlens:
    of packed sequences, else None.
    """
    queries: int
    keys: int
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    all_keys: int = 0    # packed: total_k

    @property
    def batch(self) -> int:
        """The number of packed sequences."""
        return self.cu_seqlens_q.size(0) - 1

    def sequence_of(self, rows: Tensor) -> Tensor:
        """The sequence of each packed query. Unspecified for queries after the last sequence."""
        ends = self.cu_seqlens_q[1:].contiguous()
        return torch.searchsorted(ends, rows, right=True).clamp(max=self.batch - 1)

    def keys_of(self, rows: Tensor) -> Tensor:
        """How many keys the sequence of each packed query has; 0 for those after the last."""
        if self.batch == 0:
            return torch.zeros_like(rows)
        counts = (self.cu_seqlens_k[1:] - self.cu_seqlens_k[:-1]).clamp(0, self.keys)
        return torch.where(rows < self.cu_seqlens_q[-1], counts[self.sequence_of(rows)], 0)

    def rows(self, device: torch.device) -> Tensor:
        return torch.arange(self.queries, dtype=torch.int32, device=device)


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def tile_keys(head_dim: int, softcap: bool) -> int:
    """Keys of a K tile of the kernels that read lists, of which one has a softcap. head_dim: the
    larger one of q and v.
    """
    return 128 if head_dim <= 128 and not softcap else 64


def tile_queries(head_dim: int) -> int:
    """Queries of a tile of the kernels of gradients. head_dim: the larger one of q and v."""
    return 128 if head_dim <= 64 else 64


def clean_rows(intervals: Tensor, layout: Layout) -> Tensor:
    """(..., n, 2) as (..., 4): the same keys as two intervals that neither overlap nor touch.

    They ascend and lie inside the sequence. An empty one is (0, 0); the first is empty only if both
    are.
    """
    rows = layout.rows(intervals.device)
    most = (torch.full_like(rows, layout.keys) if layout.cu_seqlens_q is None
            else layout.keys_of(rows))
    begin, end = torch.minimum(intervals.clamp(min=0), most[:, None, None]).unbind(-1)
    begin, end = (x.masked_fill(begin >= end, 0) for x in (begin, end))
    if intervals.size(-2) == 1:
        return F.pad(torch.cat([begin, end], -1), (0, 2))
    begin_0, begin_1, end_0, end_1 = *begin.unbind(-1), *end.unbind(-1)
    is_swapped = (end_1 > 0) & ((end_0 == 0) | (begin_1 < begin_0))
    begin_0, begin_1 = _swapped(is_swapped, begin_0, begin_1)
    end_0, end_1 = _swapped(is_swapped, end_0, end_1)
    is_one = (end_1 > 0) & (begin_1 <= end_0)
    end_0 = torch.where(is_one, torch.maximum(end_0, end_1), end_0)
    begin_1, end_1 = (x.masked_fill(is_one, 0) for x in (begin_1, end_1))
    return torch.stack([begin_0, end_0, begin_1, end_1], -1)


def _swapped(condition: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(condition, y, x), torch.where(condition, x, y)


class _Halves(NamedTuple):
    """Where queries stand in the halves of lists, and the halves in blocks of a sequence.

    half: (queries,) the half of each. counts: (queries,) 1, or 0 of those after the last sequence.
    sequence, block: (halves,) of packed sequences, else None and the number of the half.
    """
    half: Tensor
    counts: Tensor
    sequence: Tensor | None
    block: Tensor


def list_count(layout: Layout) -> int:
    """How many lists a head has; between those of packed sequences some are of no queries."""
    if layout.cu_seqlens_q is None:
        return ceil_div(layout.queries, QUERIES)
    return layout.queries // QUERIES + layout.batch


def _halves_of(layout: Layout, device: torch.device) -> _Halves:
    rows = layout.rows(device).long()
    half = torch.arange(_HALVES * list_count(layout), device=device)
    if layout.cu_seqlens_q is None:
        return _Halves(rows // BLOCK, torch.ones_like(rows, dtype=torch.int32), None, half)
    starts = layout.cu_seqlens_q[:-1].long()
    first = _HALVES * (starts // QUERIES + torch.arange(layout.batch, device=device))
    sequence = layout.sequence_of(rows.int())
    own = first[sequence] + (rows - starts[sequence]) // BLOCK
    counts = (rows < layout.cu_seqlens_q[-1]).int()
    # The clamps matter for unchecked lengths alone: no index leaves its tensor.
    of_half = (torch.searchsorted(first, half, right=True) - 1).clamp(min=0)
    return _Halves(own.clamp(0, half.size(0) - 1), counts, of_half, half - first[of_half])


def _counted(rows: Tensor, halves: _Halves, blocks: int) -> tuple[Tensor, Tensor]:
    """How many queries of a half see some key of a block, and how many see all of its 64 keys; each
    (batch or 1, halves, blocks).

    Each interval meets a range of blocks and covers a range: +1 is added at the first block of a
    range and -1 after its last, and sums along the blocks count the queries.
    """
    begin, end = rows[..., 0::2].long(), rows[..., 1::2].long()    # (batch or 1, queries, 2)
    shape = (rows.size(0), halves.block.size(0), blocks + 1)
    offset = (halves.half * (blocks + 1))[:, None]
    weight = halves.counts[:, None].expand(begin.shape).flatten(1)

    def counts_of(first: Tensor, after: Tensor) -> Tensor:
        changes = rows.new_zeros(shape).flatten(1)
        changes.scatter_add_(1, (offset + first).flatten(1), weight)
        changes.scatter_add_(1, (offset + after).flatten(1), -weight)
        return changes.view(shape).cumsum(-1, dtype=torch.int32)[..., :-1]

    first, after = begin // BLOCK, (end + BLOCK - 1) // BLOCK
    met = counts_of(first, torch.where(end > begin, after, first))
    first, after = (begin + BLOCK - 1) // BLOCK, end // BLOCK
    return met, counts_of(first, torch.maximum(first, after))


def _shown(mask_blocks: Tensor, halves: _Halves, blocks: int) -> Tensor:
    """(batch or 1, heads_q or 1, halves, blocks) bool, False outside of mask_blocks."""
    rows, columns = mask_blocks.shape[2:]
    if halves.sequence is None:
        return F.pad(mask_blocks, (0, blocks - columns, 0, halves.block.size(0) - rows))
    # The row that is added holds what is outside.
    padded = F.pad(mask_blocks, (0, blocks - columns, 0, 1))
    shown = padded[halves.sequence, :, halves.block.clamp(0, rows)]    # (halves, heads, blocks)
    return shown.transpose(0, 1)[None]


def key_lists(mask_rows: Tensor | None, mask_blocks: Tensor | None, layout: Layout,
              keys: int) -> Tensor:
    """The lists, (batch or 1, heads_q or 1, lists, 2 + K tiles, at least 3) int32; the first size
    is 1 for packed sequences.

    mask_rows, mask_blocks: those of the op `attend`, of which one may be None; mask_rows is clean
    (clean_rows). keys: 64 or 128, those of a K tile.
    """
    device = (mask_blocks if mask_rows is None else mask_rows).device
    tiles, lists = max(1, ceil_div(layout.keys, keys)), list_count(layout)
    if layout.queries == 0 or (layout.cu_seqlens_q is not None and layout.batch == 0):
        return F.pad(torch.ones(1, 1, lists, 1, dtype=torch.int32, device=device), (0, 1 + tiles))
    seen = _seen(mask_rows, mask_blocks, layout, _halves_of(layout, device), tiles * keys // BLOCK)
    return _listed(*seen, keys)


class _Seen(NamedTuple):
    """What queries see, in blocks of 64 x 64, (batch or 1, heads_q or 1, halves, blocks) bool each.

    some: some query sees some key. all: every existing query sees each of 64 keys. shown: of
    mask_blocks; None: all.
    """
    some: Tensor
    all: Tensor
    shown: Tensor | None


def _seen(mask_rows: Tensor | None, mask_blocks: Tensor | None, layout: Layout, halves: _Halves,
          blocks: int) -> _Seen:
    if mask_rows is None:
        whole = F.pad(layout.rows(mask_blocks.device)[:, None, None] * 0 + layout.keys, (1, 0))
        mask_rows = clean_rows(whole, layout)
    rows = mask_rows if mask_rows.dim() == 3 else mask_rows[None]
    met, covered = (x[:, None] for x in _counted(rows, halves, blocks))
    queries = rows.new_zeros(halves.block.size(0)).scatter_add_(0, halves.half, halves.counts)
    is_full = covered == queries[:, None]
    if mask_blocks is None:
        return _Seen(met > 0, is_full, None)
    shown = _shown(mask_blocks, halves, blocks)
    return _Seen((met > 0) & shown, is_full & (shown | (queries == 0)[:, None]), shown)


def query_lists(mask_rows: Tensor | None, mask_blocks: Tensor | None, layout: Layout, queries: int,
                longest_q: int) -> Tensor:
    """The lists of tiles of queries, (batch or 1, heads_q or 1, lists, 2 + 2 tiles) int32, from
    what key_lists() takes. queries: 64 or 128, those of a tile. longest_q: a bound of seqlen_q.
    """
    device = (mask_blocks if mask_rows is None else mask_rows).device
    is_packed = layout.cu_seqlens_q is not None
    tiles, step = max(1, ceil_div(longest_q, queries)), queries // BLOCK
    lists = (layout.all_keys // KEYS + layout.batch if is_packed else ceil_div(layout.keys, KEYS))
    if 0 in (layout.queries, lists) or (is_packed and layout.batch == 0):
        return torch.zeros(1, 1, lists, 2 + 2 * tiles, dtype=torch.int32, device=device)
    halves = _halves_of(layout, device)
    blocks = max(1, ceil_div(layout.keys, KEYS)) * KEYS // BLOCK
    seen = _seen(mask_rows, mask_blocks, layout, halves, blocks)
    if is_packed:
        some, full, shown, ends = _by_keys_packed(seen, layout, lists, tiles, step)
    else:
        some, full, shown = (None if x is None else _by_keys(x, tiles, step) for x in seen)
        ends = None
    is_listed = some.flatten(-2).any(-1)    # (batch or 1, heads_q or 1, lists, tiles)
    is_free = is_listed & full.flatten(-2).all(-1)
    word = torch.arange(tiles, dtype=torch.int32, device=device) << _ENTRY_BITS
    if shown is None:
        word = (word + (1 << _ENTRY_BITS) - 1).expand_as(is_listed)
    else:
        bits = shown.expand(*is_listed.shape, step, 2).flatten(-2)
        word = word + sum(bits[..., i].int() << i for i in range(2 * step))
    before = is_listed.cumsum(-2, dtype=torch.int32)    # lists up to this one, with it
    rank = (before[..., -1:, :] if ends is None else before[..., ends, :]) - before
    order = torch.where(is_free, 0, torch.where(is_listed, 1, 2)).argsort(dim=-1, stable=True)
    counts = [x.sum(-1, keepdim=True, dtype=torch.int32) for x in (is_listed, is_free)]
    entries = torch.stack([word.gather(-1, order), rank.gather(-1, order)], -1).flatten(-2)
    return torch.cat([*counts, entries], -1)


def _by_keys(x: Tensor, tiles: int, step: int) -> Tensor:
    """Blocks (.., halves, blocks) as (.., lists, tiles, halves of a tile, halves of 128 keys)."""
    x = F.pad(x, (0, 0, 0, tiles * step - x.size(-2))) if x.size(-2) < tiles * step else x
    x = x[..., :tiles * step, :].unflatten(-1, (-1, KEYS // BLOCK)).unflatten(-3, (-1, step))
    return x.permute(*range(x.dim() - 4), -2, -4, -3, -1)


def _by_keys_packed(seen: _Seen, layout: Layout, lists: int, tiles: int,
                    step: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """_by_keys() of packed sequences; also the last list of the sequence of each list."""
    device = seen.some.device
    number = torch.arange(layout.batch, device=device)
    starts_q, starts_k = (x[:-1].long() for x in layout[2:4])
    lengths_q, lengths_k = (x.diff().long() for x in layout[2:4])
    first = starts_k // KEYS + number
    own = torch.arange(lists, device=device)
    sequence = (torch.searchsorted(first, own, right=True) - 1).clamp(min=0)
    tile = own - first[sequence]
    half = torch.arange(tiles * step, device=device)
    exists = ((half < ((lengths_q + BLOCK - 1) // BLOCK)[sequence, None])[:, :, None]
              & (tile * KEYS < lengths_k[sequence])[:, None, None])
    at_q = (_HALVES * (starts_q // QUERIES + number)[sequence])[:, None] + half
    at_q = at_q.clamp(max=seen.some.size(-2) - 1)[:, :, None]
    at_k = KEYS // BLOCK * tile[:, None] + torch.arange(KEYS // BLOCK, device=device)
    at_k = at_k.clamp(0, seen.some.size(-1) - 1)[:, None]

    def taken(x: Tensor, outside: bool) -> Tensor:
        """(1, heads_q or 1, lists, tiles, halves of a tile, halves of 128 keys)"""
        return x[0][:, at_q, at_k].where(exists, outside)[None].unflatten(-2, (-1, step))

    last = (first + ((lengths_k + KEYS - 1) // KEYS - 1).clamp(min=0))[sequence]
    return (taken(seen.some, False), taken(seen.all, True),
            None if seen.shown is None else taken(seen.shown, True), last.clamp(max=lists - 1))


def _listed(is_seen: Tensor, is_full: Tensor, shown: Tensor | None, keys: int) -> Tensor:
    """key_lists() from _Seen."""
    def in_tiles(x: Tensor) -> Tensor:
        """(..., lists, tiles, queries' halves, keys' halves)"""
        return x.unflatten(-1, (-1, keys // BLOCK)).unflatten(-3, (-1, _HALVES)).transpose(-3, -2)

    is_listed = in_tiles(is_seen).flatten(-2).any(-1)
    is_free = is_listed & in_tiles(is_full).flatten(-2).all(-1)
    entry = torch.arange(is_listed.size(-1), dtype=torch.int32,
                         device=is_listed.device) << _ENTRY_BITS
    if shown is None:
        entry = (entry + (1 << _ENTRY_BITS) - 1).expand_as(is_listed)
    else:
        by_half = in_tiles(shown).expand(*is_listed.shape, _HALVES, _HALVES).flatten(-2)
        entry = entry + sum(by_half[..., bit].int() << bit for bit in range(_ENTRY_BITS))
    order = torch.where(is_free, 0, torch.where(is_listed, 1, 2)).argsort(dim=-1, stable=True)
    counts = [x.sum(-1, keepdim=True, dtype=torch.int32) for x in (is_listed, is_free)]
    entries = entry.gather(-1, order).masked_fill(counts[0] == 0, 0)
    return torch.cat([counts[0].clamp(min=1), counts[1], entries], -1)
