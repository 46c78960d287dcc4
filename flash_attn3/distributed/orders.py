"""Which chunks of a sequence each rank of a ring holds, so that all ranks have the same work.

Source: longest processing time first (R. L. Graham, 1969), here with as many chunks on each rank.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from flash_attn3.api.masks import AttentionMask
from flash_attn3.ops import checks
from flash_attn3.distributed import masks, tiles

_OP = 'balanced_order'
_EVEN = 1.02    # the busiest rank over the mean, up to which more chunks are not worth messages

Order = Sequence[int] | None


def balanced_order(mask: AttentionMask, ranks: int, *, chunks: int = 8) -> tuple[int, ...]:
    """The `order` in which the queries of all ranks see about as many keys. `ring_attention` takes
    it, and `shard`, `shard_batch`, `positions` and `unshard`, which divide its rows.

    It is contiguous or zigzag where that is even to 2 %. Otherwise each rank gets `chunks` chunks:
    the chunk that sees the most keys goes first, each to the rank that sees the fewest so far. So
    the busiest rank sees at most 1.02 times the mean, or no more than with zigzag. torch.compile
    makes a graph for each order.

    Args:
        mask: of intervals, of the whole sequence, on any device. The host waits for a GPU.
        ranks: of the ring. No process group is needed, so a data loader can call it.
        chunks: the most of a rank. Those of less than 128 rows do not fill tiles. Default 8.

    Returns:
        The chunks of rank 0, rising, then those of rank 1, ...; as many of each rank.

    Raises:
        RuntimeError: mask is no AttentionMask; ranks or chunks is not 1 or more.
        NotImplementedError: a mask of blocks.

    Example:
        >>> order = flash_attn3.distributed.balanced_order(mask, dist.get_world_size())
        >>> mine = flash_attn3.distributed.shard(tokens, order=order)
        >>> out = flash_attn3.distributed.ring_attention(*project(mine), mask=mask, order=order)
    """
    masks.check_alone(_OP, mask, (-1, -1))
    masks.check_intervals(_OP, mask)
    for name, number in (('ranks', ranks), ('chunks', chunks)):
        if type(number) is not int or number < 1:
            raise RuntimeError(checks.error(_OP, f'{name} to be an int of 1 or more', repr(number)))
    seen = mask.seen_by_query().cpu()
    even, works = _EVEN * int(seen.sum()) / ranks, {}
    for zigzag in (False, True)[:chunks]:
        order = tiles.order_of(ranks, zigzag)
        works[order] = _work(order, seen, ranks)
        if works[order] <= even:
            return order
    order = _longest_first(_costs(seen, ranks, chunks), ranks)
    works[order] = _work(order, seen, ranks)
    return min(works, key=works.__getitem__)


def _costs(seen: Tensor, ranks: int, chunks: int) -> list[int]:
    """How many keys the queries of each chunk see, all together."""
    order = tuple(range(ranks * chunks))
    size = tiles.layout_of(len(seen), ranks, order).chunk_rows
    padding = size * len(order) - len(seen)
    return F.pad(seen, (0, padding)).view(len(order), size).sum(1).tolist()


def _work(order: tuple[int, ...], seen: Tensor, ranks: int) -> int:
    """How many keys the queries of the busiest rank see, all together."""
    count = len(order) // ranks
    costs = _costs(seen, ranks, count)
    return max(sum(costs[chunk] for chunk in order[first:first + count])
               for first in range(0, len(order), count))


def _longest_first(costs: list[int], ranks: int) -> tuple[int, ...]:
    """Costs of chunks, as many for each rank."""
    held: list[list[int]] = [[] for _ in range(ranks)]
    works = [0] * ranks
    for chunk in sorted(range(len(costs)), key=lambda chunk: -costs[chunk]):
        free = [rank for rank in range(ranks) if len(held[rank]) < len(costs) // ranks]
        rank = min(free, key=works.__getitem__)
        held[rank].append(chunk)
        works[rank] += costs[chunk]
    return tuple(chunk for own in sorted(map(sorted, held)) for chunk in own)


# ------------------------------------------------------------------------- the argument of calls
def order_of(ranks: int, zigzag: bool, order: Order) -> tuple[int, ...]:
    """The order that the arguments of these names mean, not checked."""
    return tiles.order_of(ranks, zigzag) if order is None else tuple(order)


def problem(op: str, order: Sequence[int], ranks: int) -> str:
    """What is wrong with it as an order of so many ranks, or ''."""
    order = list(order)
    count, rest = divmod(len(order), ranks)
    parts = [order[first:first + count] for first in range(0, len(order), max(1, count))]
    if order and not rest and all(part == sorted(part) for part in parts) and (
            sorted(order) == list(range(len(order)))):
        return ''
    return checks.error(op, f'order to hold each chunk from 0 to {len(order) - 1} once, as many of '
                        f'each of {ranks} ranks, rising within a rank', str(tuple(order)),
                        'flash_attn3.distributed.balanced_order gives one')


def checked(op: str, ranks: int, zigzag: bool, order: Order) -> tuple[int, ...]:
    """order_of(), or a RuntimeError."""
    found = order_of(ranks, zigzag, order)
    if text := problem(op, found, ranks):
        raise RuntimeError(text)
    return found
