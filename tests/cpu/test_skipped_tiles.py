"""K tiles that the warpgroups of the forward skip (core/block_range.h): the roles of a CTA,
played through with the waits of csrc/forward/producer.h, fp8/values_transposed.h and consumer.h.
Nobody waits forever.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st
import pytest

from tests.cpu.drawn import examples
from tests.host import _host

WARPGROUPS = 3
Q_STAGES = 2
RINGS = [(2, 0), (3, 0), (3, 2), (3, 3)]    # K tiles, and V on its way to its ring


class Tile(NamedTuple):
    """A tile of queries. K tiles are counted over all tiles, in the order of their visits."""
    begin: int
    end: int
    skipped: list[tuple[int, int]]    # by each warpgroup, first and last


class Cta:
    """Counts how often each thing has happened: ('k', 7) that K tile 7 came, ('k free', 7) how many
    warpgroups are through with it. A role is a generator of what it waits for.
    """

    def __init__(self, tiles: list[Tile], stages: int, raw_stages: int):
        self.tiles, self.stages, self.raw_stages = tiles, stages, raw_stages
        self.happened = defaultdict(int)

    def load(self, name: str, number: int, before: int, freed: str) -> Iterator[tuple]:
        yield freed, number - before, WARPGROUPS if 'free' in freed else 1
        self.happened[name, number] += 1

    def load_v(self, number: int) -> Iterator[tuple]:
        if self.raw_stages:
            return self.load('raw v', number, self.raw_stages, 'v')
        return self.load('v', number, self.stages, 'v free')

    def producer(self) -> Iterator[tuple]:
        for t, tile in enumerate(self.tiles):
            yield from self.load('k', tile.begin, self.stages, 'k free')
            if t > 0:
                yield from self.load_v(tile.begin - 1)
            yield from self.load('q', t, Q_STAGES, 'q free')
            for number in range(tile.begin + 1, tile.end):
                yield from self.load('k', number, self.stages, 'k free')
                yield from self.load_v(number - 1)
        yield from self.load_v(self.tiles[-1].end - 1)

    def transposing_warps(self) -> Iterator[tuple]:
        for number in range(self.tiles[-1].end if self.raw_stages else 0):
            yield 'raw v', number, 1
            yield from self.load('v', number, self.stages, 'v free')

    def skip_tiles(self, name: str, numbers: range) -> Iterator[tuple]:
        for number in numbers:
            yield name, number, 1
            self.happened[f'{name} free', number] += 1

    def warpgroup(self, index: int) -> Iterator[tuple]:
        before = skipped = None    # K tile whose V is still to be multiplied; those after it
        for t, tile in enumerate(self.tiles):
            yield 'q', t, 1
            first, last = tile.skipped[index]
            for own in range(tile.begin + first, tile.end - last):
                if own == tile.begin + first:
                    skipped = range(0 if before is None else before + 1, own)
                    yield from self.skip_tiles('k', skipped)
                yield 'k', own, 1
                if before is not None:
                    yield 'v', before, 1
                self.happened['k free', own] += 1
                if before is not None:
                    self.happened['v free', before] += 1
                if own == tile.begin + first:
                    yield from self.skip_tiles('v', skipped)
                    self.happened['q free', t - 1] += 1
                before = own
        yield 'v', before, 1

    def is_ready(self, what: tuple) -> bool:
        name, number, count = what
        return number < 0 or self.happened[name, number] >= count

    def ends(self) -> bool:
        """Waits only end what comes after them, so the order in which roles go on is no matter."""
        roles = [self.producer(), self.transposing_warps(), *map(self.warpgroup, range(WARPGROUPS))]
        waiting = {role: next(role, None) for role in roles}
        while any(waiting.values()):
            ready = [role for role, what in waiting.items() if what and self.is_ready(what)]
            if not ready:
                return False
            waiting.update((role, next(role, None)) for role in ready)
        return True


def tiles_of(counts: list[int], skipped: list[list[tuple[int, int]]], most: int) -> list[Tile]:
    """Tiles of so many K tiles; those skipped leave one, and are at most `most` at either end."""
    tiles, begin = [], 0
    for count, of_warpgroups in zip(counts, skipped):
        firsts = [min(first, most, count - 1) for first, _ in of_warpgroups]
        lasts = [min(last, most, count - 1 - first)
                 for first, (_, last) in zip(firsts, of_warpgroups)]
        tiles.append(Tile(begin, begin + count, list(zip(firsts, lasts))))
        begin += count
    return tiles


any_skipped = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=WARPGROUPS,
                      max_size=WARPGROUPS)


@pytest.mark.parametrize('stages, raw_stages', RINGS)
@given(st.lists(st.tuples(st.integers(1, 12), any_skipped), min_size=1, max_size=8))
@examples(300)
def test_no_warpgroup_waits_forever(stages, raw_stages, tiles):
    tiles = tiles_of(*zip(*tiles), _host.most_skipped_tiles(stages, raw_stages))
    assert Cta(tiles, stages, raw_stages).ends()


@pytest.mark.parametrize('stages, raw_stages', RINGS)
def test_with_one_more_they_can(stages, raw_stages):
    """The end of a chunk: one warpgroup is in the next one, the others are not, and back."""
    most = _host.most_skipped_tiles(stages, raw_stages) + 1
    skipped = [[(0, 0), (0, 0), (0, most)], [(0, 0), (0, 0), (most, 0)]]
    assert not Cta(tiles_of([9, 9], skipped, most), stages, raw_stages).ends()
    assert Cta(tiles_of([9, 9], skipped, most - 1), stages, raw_stages).ends()


def test_kernels_leave_some_out():
    assert [_host.most_skipped_tiles(*ring) for ring in RINGS] == [1, 1, 2, 2]
