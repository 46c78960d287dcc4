"""Which rows of a sequence a rank holds, and what it computes with the keys of each other rank.

Plain integers: no tensor, no communication. The rows of all ranks are one stream of positions, in
chunks of one size. An order says which chunks each rank holds. Rank r of N has two chunks, r and
2N - 1 - r (zigzag: under a causal mask all ranks have the same work), or one, r (contiguous), or
those of orders.py. Padding follows the last position; no call reads it.

A tile is a rectangle of local queries and of keys of one rank, with a window as the ops take it:
aligned to its bottom-right corner. It has only visible keys, so each side of the window is 0 or
more, or -1 if it masks nothing.

Source of the zigzag: the load balancing of Llama 3 (arXiv 2407.21783, 3.3.2) and of torch's
context_parallel.
"""
from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import groupby
from math import lcm
from typing import NamedTuple


class Layout(NamedTuple):
    """How a stream is divided among the ranks of a ring.

    Attributes:
        ranks: in the ring.
        rows: of each rank, padding included.
        seqlen: positions of the stream, up to ranks * rows.
        order: the chunks of rank 0, rising, then those of rank 1, ...; as many on each rank.
    """
    ranks: int
    rows: int
    seqlen: int
    order: tuple[int, ...]

    @property
    def chunk_rows(self) -> int:
        return self.rows * self.ranks // len(self.order)

    def chunks(self, rank: int) -> list[tuple[int, int]]:
        """(first local row, first position) of each chunk of a rank."""
        size, count = self.chunk_rows, len(self.order) // self.ranks
        own = self.order[rank * count:(rank + 1) * count]
        return [(n * size, chunk * size) for n, chunk in enumerate(own)]

    def positions_of(self, rank: int) -> int:
        """How many rows of a rank are positions: its first ones, before padding."""
        return sum(min(max(self.seqlen - start, 0), self.chunk_rows)
                   for _, start in self.chunks(rank))


def order_of(ranks: int, zigzag: bool = True) -> tuple[int, ...]:
    """Two chunks a rank, from both ends, or one."""
    if not zigzag:
        return tuple(range(ranks))
    return tuple(chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank))


def layout_of(seqlen: int, ranks: int, order: tuple[int, ...], parts: int = 1) -> Layout:
    """The layout with the least padding in which the rows of a rank divide into equal parts, and
    into its chunks.
    """
    unit = lcm(parts, len(order) // ranks)
    return Layout(ranks, -(-seqlen // (ranks * unit)) * unit, seqlen, order)


class Segment(NamedTuple):
    """Rows of a rank that are positions of one document: `size` of both, from `row` and `start`."""
    document: int
    row: int
    start: int
    size: int


class Tile(NamedTuple):
    """Local queries [q0, q1) with keys [k0, k1) of a rank. is_own: each query meets its own key."""
    q0: int
    q1: int
    k0: int
    k1: int
    left: int = -1
    right: int = -1
    is_own: bool = False


class Call(NamedTuple):
    """One call of attention: tiles of the same window, of ascending queries and keys."""
    tiles: tuple[Tile, ...]

    @property
    def rows(self) -> tuple[int, int]:
        return self.tiles[0].q0, self.tiles[-1].q1

    @property
    def keys(self) -> tuple[int, int]:
        return self.tiles[0].k0, self.tiles[-1].k1


class Step(NamedTuple):
    """What a rank does with the keys of another: it needs the rows `keys` of `source`, and sends
    its own rows `sent` to `target`. None: no rows.
    """
    source: int
    target: int
    keys: tuple[int, int] | None
    sent: tuple[int, int] | None
    calls: tuple[Call, ...]


class Plan(NamedTuple):
    """The steps of a rank; the first is on its own keys. cells: ranges of its rows, each of which a
    call covers as a whole or not at all.
    """
    steps: tuple[Step, ...]
    cells: tuple[tuple[int, int], ...]


def segments(layout: Layout, rank: int, starts: tuple[int, ...]) -> list[Segment]:
    """The rows of a rank by document; starts: of the documents, and the end of the last."""
    found, size = [], layout.chunk_rows
    for row, first in layout.chunks(rank):
        document = max(0, bisect_right(starts, first) - 1)
        while document + 1 < len(starts) and starts[document] < first + size:
            begin = max(starts[document], first)
            end = min(starts[document + 1], first + size)
            if begin < end:
                found.append(Segment(document, row + begin - first, begin, end - begin))
            document += 1
    return found


def tile_of(q: Segment, k: Segment, left: int, right: int) -> Tile | None:
    """The keys of one segment that the queries of another see: p - left to p + right, where -1 is
    no limit. None if they see none.
    """
    a, a_end, b, b_end = q.start, q.start + q.size, k.start, k.start + k.size
    if right != -1:
        a = max(a, b - right)
    if left != -1:
        a_end = min(a_end, b_end + left)
        b = max(b, a - left)
    if right != -1:
        b_end = min(b_end, a_end + right)
    if a >= a_end or b >= b_end:
        return None
    rows, keys = a_end - a, b_end - b
    corner = b_end - a_end    # how far the last key is after the last query
    left = -1 if left == -1 or left + corner >= keys - 1 else left + corner
    right = -1 if right == -1 or right - corner >= rows - 1 else right - corner
    q0, k0 = q.row + a - q.start, k.row + b - k.start
    return Tile(q0, q0 + rows, k0, k0 + keys, left, right, q.start == k.start)


def _join(a: Tile, b: Tile) -> Tile | None:
    """One tile that covers both, or None; b is to the right of a or below it."""
    if a.left != -1 or b.left != -1 or a.right > 0 or b.right > 0:
        return None
    if (a.q0, a.q1, a.right, a.k1) == (b.q0, b.q1, -1, b.k0):
        return b._replace(k0=a.k0, is_own=a.is_own or b.is_own)
    if (a.q1, a.k0, a.right, a.is_own) == (b.q0, b.k0, b.right, b.is_own):
        grows_by = 0 if a.right == -1 else b.q1 - b.q0
        return b._replace(q0=a.q0) if b.k1 - a.k1 == grows_by else None
    return None


def joined(tiles: list[Tile]) -> list[Tile]:
    """The tiles after adjacent pairs are joined where possible."""
    for i, a in enumerate(tiles):
        for j, b in enumerate(tiles):
            if i != j and (both := _join(a, b)) is not None:
                return joined([both, *(x for n, x in enumerate(tiles) if n not in (i, j))])
    return tiles


def calls_of(queries: list[Segment], keys: list[Segment], window: tuple[int, int],
             one_tile: bool) -> tuple[Call, ...]:
    """The calls of a rank that holds these queries, on these keys. one_tile: one in each call."""
    keys_by_document = {document: list(group) for document, group in groupby(
        sorted(keys), key=lambda segment: segment.document)}
    tiles = []
    for document, group in groupby(sorted(queries), key=lambda segment: segment.document):
        pairs = [tile_of(q, k, *window) for q in group for k in keys_by_document.get(document, ())]
        tiles += joined([tile for tile in pairs if tile is not None])
    calls: dict[tuple, list[list[Tile]]] = {}
    for tile in sorted(tiles):
        alike = calls.setdefault(tile[4:], [])
        if not one_tile and alike and tile.q0 >= alike[-1][-1].q1 \
                and tile.k0 >= alike[-1][-1].k1:
            alike[-1].append(tile)
        else:
            alike.append([tile])
    return tuple(Call(tuple(group)) for alike in calls.values() for group in alike)


def _extent(calls: tuple[Call, ...]) -> tuple[int, int] | None:
    """The range of keys that the calls read."""
    return (min(call.keys[0] for call in calls), max(call.keys[1] for call in calls)) \
        if calls else None


@lru_cache(maxsize=256)
def plan_of(layout: Layout, rank: int, window: tuple[int, int],
            starts: tuple[int, ...] | None = None) -> Plan:
    """What a rank computes, step by step.

    window: (left, right) as in flash_attn_func, causal as right = 0. starts: of the documents of a
    packed stream, and the end of the last; None: one document, dense tensors.
    """
    one_tile = starts is None
    starts = (0, layout.seqlen) if starts is None else starts
    segments_by_rank = [segments(layout, other, starts) for other in range(layout.ranks)]
    steps = []
    for distance in range(layout.ranks):
        source, target = ((rank - distance) % layout.ranks, (rank + distance) % layout.ranks)
        calls = calls_of(segments_by_rank[rank], segments_by_rank[source], window, one_tile)
        theirs = calls_of(segments_by_rank[target], segments_by_rank[rank], window, one_tile)
        steps.append(Step(source, target, _extent(calls), _extent(theirs), calls))
    return Plan(tuple(steps), cells_of(steps))


def cells_of(steps: list[Step]) -> tuple[tuple[int, int], ...]:
    """The cells of a Plan with these steps."""
    ranges = {call.rows for step in steps for call in step.calls}
    bounds = sorted({bound for pair in ranges for bound in pair})
    return tuple(pair for pair in zip(bounds, bounds[1:])
                 if any(first <= pair[0] and pair[1] <= end for first, end in ranges))
