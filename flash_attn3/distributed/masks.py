"""A mask of intervals on a ring: what each rank computes, and which keys travel.

The keys of a rank are chunks of the stream, one after another. So what a query sees of them is an
interval again: key p becomes the number of keys of that rank before p. Each step is one call, on
the rows that see one of its keys. The first is on all rows, because sinks enter there.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flash_attn3.api.masks import AttentionMask
from flash_attn3.ops import checks
from flash_attn3.distributed.tiles import Call, Layout, Plan, Step, Tile, cells_of

_MOST_KEPT = 4    # how many kinds of call (layouts) are kept for a mask


class MaskedPlan(NamedTuple):
    """masks: of the steps that have calls, if there is a mask."""
    plan: Plan
    masks: dict[Step, AttentionMask]


# By the tensor of intervals, which a mask keeps alive; then by its version, layout and rank.
_plans: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def plan_of(intervals: Tensor, layout: Layout, rank: int) -> MaskedPlan:
    """What a rank computes with a mask of the whole stream. The first call waits for the device.

    intervals: (batch or 1, layout.seqlen, n, 2) int32.
    """
    kept = _plans.setdefault(intervals, {})
    key = None if intervals.is_inference() else intervals._version, layout, rank
    if key not in kept:
        if len(kept) >= _MOST_KEPT:
            kept.pop(next(iter(kept)))
        kept[key] = _plan(intervals, layout, rank)
    return kept[key]


def _plan(intervals: Tensor, layout: Layout, rank: int) -> MaskedPlan:
    pairs = [((rank - step) % layout.ranks, (rank + step) % layout.ranks)
             for step in range(layout.ranks)]
    own = [_seen(intervals, layout, rank, source) for source, _ in pairs]
    theirs = [_seen(intervals, layout, target, rank) for _, target in pairs]
    extents = torch.stack([_extent(x) for x in (*own, *theirs)]).tolist()
    rows = layout.positions_of(rank)
    extents[0] = [0, rows, 0, rows]
    steps, masks = [], {}
    for step, (source, target) in enumerate(pairs):
        q0, q1, k0, k1 = extents[step]
        sent = extents[layout.ranks + step][2:]
        calls = (Call((Tile(q0, q1, k0, k1, is_own=step == 0),)),) if q0 < q1 else ()
        steps.append(Step(source, target, (k0, k1) if calls else None,
                          tuple(sent) if sent[0] < sent[1] else None, calls))
        if calls:
            masks[steps[-1]] = _mask(own[step][:, q0:q1], k0, k1)
    return MaskedPlan(Plan(tuple(steps), cells_of(steps)), masks)


def _seen(intervals: Tensor, layout: Layout, rank: int, source: int) -> Tensor:
    """(batch or 1, rows of rank, n, 2): what its queries see of the keys of source, in its rows."""
    size = layout.chunk_rows
    rows = torch.cat([intervals[:, start:start + size] for _, start in layout.chunks(rank)], 1)
    rows = rows.clamp(0, layout.seqlen)
    return sum((rows - start).clamp(0, size) for _, start in layout.chunks(source))


def _extent(seen: Tensor) -> Tensor:
    """(4,): the first and the end of the queries that see a key, and of the keys they see."""
    begin, end = seen.unbind(-1)
    is_seen = begin < end
    row = torch.arange(seen.size(1), dtype=torch.int32, device=seen.device)[:, None]

    def most(x: Tensor) -> Tensor:
        return F.pad(x.where(is_seen, 0).flatten(), (0, 1)).amax()    # without rows too

    last = 2 ** 31 - 1    # the first is the most before it
    first_row, first_key = (last - most(last - x) for x in (row, begin))
    return torch.stack([first_row, most(row + 1), first_key, most(end)])


def _mask(seen: Tensor, first: int, end: int) -> AttentionMask:
    return AttentionMask.from_intervals((seen - first).clamp(0, end - first).contiguous())


def fact_of(intervals: Tensor | None) -> int | None:
    """A number that tells masks apart. Waits for the device."""
    if intervals is None:
        return None
    ends = intervals.flatten().long()
    return int((ends * torch.arange(1, len(ends) + 1, device=ends.device)).sum())


def check_alone(op: str, mask: AttentionMask, window: tuple[int, int]) -> None:
    """Raises RuntimeError for another type, or if there is a window besides."""
    if not hasattr(mask, 'of_stream'):
        raise RuntimeError(checks.error(op, 'mask to be an AttentionMask', type(mask).__name__))
    if window != (-1, -1):
        raise RuntimeError(checks.error(op, 'no causal and no window_size with mask', str(window),
                                        'the mask says all that a query sees'))


def check_intervals(op: str, mask: AttentionMask) -> None:
    """Raises NotImplementedError for a mask of blocks."""
    if mask.has_blocks:
        raise NotImplementedError(checks.error(
            op, 'a mask of intervals', repr(mask), 'ulysses_attention without ring_group takes '
            'blocks'))


def intervals_of(op: str, mask: AttentionMask, q: Tensor, seqlen: int | None,
                 cu_seqlens: Tensor | None) -> Tensor:
    """The intervals of a mask in the whole stream, as plan_of() takes them. q: (batch or 1, rows of
    this rank, heads, head_dim). seqlen: None: that of the mask.

    Raises:
        NotImplementedError: a mask of blocks.
        RuntimeError: one that does not fit the call.
    """
    check_intervals(op, mask)
    return mask.of_stream(op, q, seqlen, cu_seqlens)
