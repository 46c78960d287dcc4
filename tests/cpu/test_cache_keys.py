"""core/cache_keys.h: where the keys of a sequence lie, and the parts of all CTAs, against masks and
K tiles counted one by one.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st
import pytest
import torch

from tests.cpu.drawn import examples
from tests.cpu.drawn_masks import Drawn, limits
from tests.cpu.packed import running_sum
from tests.cpu.test_key_splits import EVEN, PARTS, splits
from tests.host import _host

INT_MIN, INT_MAX = -2**31, 2**31 - 1
MOST_PARTS = 64    # that a tile has, where all sequences have as many keys


def clamp(x, low, high):
    return max(low, min(x, high))


# ------------------------------------------------------------------------------------- sequences
def rows_of(cu, used, b, total):
    begin = clamp(cu[b], 0, total)
    end = clamp(cu[b + 1], begin, total)
    return begin, end - begin if used is None else clamp(used[b], 0, end - begin)


@dataclass
class Lengths:
    """As _host.CacheLengths takes them."""
    batch: int
    given: dict = field(default_factory=dict)

    @property
    def of_kernels(self):
        return _host.CacheLengths(**{k: v for k, v in self.given.items() if v is not None})

    def expected(self, b):
        """(q_begin, queries, keys, first slot, first row, entry): the definition."""
        get = self.given.get
        q_begin, queries = 0, get('seqlen_q', 0)
        if get('cu_q') is not None:
            q_begin, queries = rows_of(get('cu_q'), get('used_q'), b, get('total_q'))
        if get('cu_k') is not None:
            row, keys = rows_of(get('cu_k'), get('used_k'), b, get('capacity'))
            return q_begin, queries, keys, 0, row, 0
        capacity = get('capacity')
        held = get('held_by_all', 0) - b * get('held_step', 0)
        held = held if get('held') is None else get('held')[b]
        starts = get('new_starts')
        new = get('appended', 0) if starts is None else starts[b + 1] - starts[b]
        end = min(capacity, clamp(held, 0, capacity) + clamp(new, 0, capacity))
        pad = get('first_slot', 0) if get('leftpad') is None else get('leftpad')[b]
        first = clamp(pad, 0, end)
        entry = b if get('entry_of') is None else get('entry_of')[b]
        return q_begin, queries, end - first, first, 0, entry


def maybe(strategy):
    return st.one_of(st.none(), strategy)


def ints(count, values):
    return st.lists(values, min_size=count, max_size=count)


@st.composite
def all_lengths(draw, is_nonsense=False, most_keys=700):
    """Fine ones, or whatever may stand in device memory."""
    batch, capacity = draw(st.integers(1, 6)), draw(st.integers(1, most_keys))
    wild = st.one_of(st.integers(-900, 900), st.sampled_from([INT_MIN, INT_MAX]))
    queries = st.one_of(st.integers(0, 3), st.integers(0, 300))
    given = {'capacity': capacity}

    def starts(lengths):
        if is_nonsense:
            return draw(ints(batch + 1, wild))
        return running_sum(draw(ints(batch, lengths)), draw(st.integers(0, 5)))

    def used():
        return draw(maybe(ints(batch, wild if is_nonsense else st.integers(0, 300))))

    if draw(st.booleans()):
        cu_q = starts(queries)
        total = draw(st.integers(1, 500)) if is_nonsense else max(cu_q[-1], 1)
        given |= dict(cu_q=cu_q, used_q=used(), total_q=total)
    else:
        given['seqlen_q'] = draw(queries)
    if 'cu_q' in given and draw(st.booleans()):
        cu_k = starts(st.integers(0, most_keys))
        given |= dict(cu_k=cu_k, used_k=used())
        given['capacity'] = capacity if is_nonsense else max(cu_k[-1], 1)
        return Lengths(batch, given)
    slot = wild if is_nonsense else st.integers(0, capacity)
    given |= dict(held=draw(maybe(ints(batch, slot))), leftpad=draw(maybe(ints(batch, slot))),
                  held_by_all=draw(st.integers(0, capacity)),
                  held_step=draw(st.one_of(st.just(0), st.integers(0, capacity))),
                  first_slot=draw(st.one_of(st.just(0), slot)),
                  appended=draw(st.integers(0, capacity)),
                  new_starts=starts(st.integers(0, 90)) if draw(st.booleans()) else None,
                  entry_of=draw(maybe(ints(batch, st.integers(0, 99)))))
    return Lengths(batch, given)


def sequences(lengths):
    return [tuple(_host.cache_sequence(lengths.of_kernels, b)) for b in range(lengths.batch)]


@given(all_lengths())
@examples(500)
def test_where_the_keys_of_a_sequence_lie(lengths):
    assert sequences(lengths) == [lengths.expected(b) for b in range(lengths.batch)]


@given(all_lengths(is_nonsense=True))
@examples(1000)
def test_nonsense_stays_inside_the_tensors(lengths):
    """Negative, beyond the capacity, a leftpad behind the last key."""
    given = lengths.given
    for q_begin, queries, keys, first_slot, row, _ in sequences(lengths):
        assert queries >= 0 and keys >= 0 and first_slot >= 0
        assert 0 <= row and row + first_slot + keys <= given['capacity']
        if 'cu_q' in given:
            assert 0 <= q_begin and q_begin + queries <= given['total_q']
        else:
            assert (q_begin, queries) == (0, given['seqlen_q'])


@pytest.mark.parametrize('lengths, keys, first_slot', [
    (dict(held=[5]), 5, 0), (dict(held=[5], appended=3), 8, 0), (dict(held_by_all=7), 7, 0),
    (dict(held=[5], new_starts=[4, 6]), 7, 0), (dict(held=[99], appended=1), 10, 0),
    (dict(held=[-3], appended=2), 2, 0), (dict(held=[9], appended=9), 10, 0),
    (dict(held=[6], leftpad=[2]), 4, 2), (dict(held=[6], leftpad=[8]), 0, 6),
    (dict(held=[6], first_slot=2), 4, 2), (dict(held=[6], first_slot=8), 0, 6),
    (dict(held=[6], first_slot=2, leftpad=[1]), 5, 1), (dict(held=[6], leftpad=[-8]), 6, 0),
    (dict(held=[0], appended=4, leftpad=[2]), 2, 2)])
def test_examples_of_sequences(lengths, keys, first_slot):
    _, _, found, slot, *_ = _host.cache_sequence(_host.CacheLengths(capacity=10, **lengths), 0)
    assert (found, slot) == (keys, first_slot)


# ---------------------------------------------------------------------------------- line of work
@dataclass
class Line:
    lengths: Lengths
    heads: int
    positions: int
    ctas: int    # that share a line
    lines: int
    split: tuple[int, int]
    mask: Drawn
    tile_n: int
    weight_log2: int = 0   # that a K tile has if the queries fill more than half of a tile
    gap: int = 0           # tile_units, of an even split in units of a K tile
    shared: tuple[int, int, int, int, int, float] = (0, 0, 1, 0, 0, 1.0)
    keeps_whole: bool = False   # LineKind
    early: tuple[int, int] = (0, 0)    # early_ctas, late_units

    @property
    def tile_units(self):
        return self.gap if self.split == (EVEN, 0) and not self.keeps_whole else 0

    @property
    def numbers(self):
        return (self.lengths.batch, self.heads, self.positions, self.ctas, self.lines,
                self.weight_log2, self.tile_units, self.shared, self.early)

    def takes(self, queries):
        fewest, most, *_ = self.shared
        return most == 0 or fewest <= queries <= most

    def units(self, tile, keys):
        """keys: its K tiles [begin, end)."""
        b, m, _ = tile
        queries = self.lengths.expected(b)[1] - m * self.positions
        is_heavy = 2 * queries > self.positions
        return self.tile_units + _host.units(
            self.split, keys[1] - keys[0], self.weight_log2 if is_heavy else 0,
            _host.phase_of(self.split, keys[0]))

    def parts(self, starts_late=True, most=0):
        """(units of a line, units of a stretch, parts of each CTA)."""
        find = _host.cache_parts_of_whole_tiles if self.keeps_whole else _host.cache_parts
        return find(self.lengths.of_kernels, self.numbers, self.split, self.mask.of_kernels,
                    self.tile_n, starts_late, most)

    def tiles(self):
        """(sequence, tile of queries) -> the K tiles [begin, end) that hold a visible key, or None
        where no query of the tile sees one: from the mask, pair by pair.
        """
        found = {}
        for b, (_, queries, keys, first_slot, *_) in enumerate(sequences(self.lengths)):
            visible = self.mask.visible(queries, keys)
            queries *= self.takes(queries)
            for m in range(-(-queries // self.positions)):
                seen = visible[m * self.positions:(m + 1) * self.positions].any(0).nonzero()
                slots = (seen.flatten() + first_slot) // self.tile_n
                found[b, m] = (slots[0].item(), slots[-1].item() + 1) if len(slots) else None
        return found


general = st.builds(Drawn, st.just('general'), limits(300), limits(300),
                    st.one_of(st.just(0), st.integers(1, 300)))


@st.composite
def lines(draw, lengths=None, split=splits, weights=st.integers(0, 2), gaps=st.integers(0, 7)):
    return Line(draw(all_lengths() if lengths is None else lengths), draw(st.integers(1, 4)),
                draw(st.sampled_from((1, 2, 16, 64, 128))), draw(st.integers(1, 40)),
                draw(st.integers(1, 4)), draw(split), draw(general),
                draw(st.sampled_from((16, 48, 64, 80, 128))), draw(weights), draw(gaps),
                keeps_whole=draw(st.booleans()))


def by_tile(ctas):
    """The parts of each (sequence, tile of queries, head), in the order of the line; each with the
    tile's range of K tiles.
    """
    found = {}
    for parts in ctas:
        for tile, keys, part, slots in parts:
            found.setdefault(tile, []).append((*part, *keys, *slots))
    return found


def assert_is_split(parts, k_tiles):
    """Every K tile is in one part, parts follow each other and know their number."""
    assert [n for begin, end, *_ in parts for n in range(begin, end)] == list(range(k_tiles))
    assert [(part[2], part[3]) for part in parts] == [(i, len(parts)) for i in range(len(parts))]


@given(lines(), st.one_of(st.just((0, 0)), st.tuples(st.integers(1, 40), st.integers(0, 99))))
@examples(600)
def test_each_k_tile_is_in_one_part(line, early):
    """And those of a tile are exactly the ones from its first visible key to its last."""
    total, _, ctas = replace(line, early=(min(early[0], line.ctas), early[1])).parts()
    wanted, found = line.tiles(), by_tile(ctas)
    heads = range(line.heads * line.lines)
    assert set(found) == {(*tile, head) for tile in wanted for head in heads}
    for (b, m, _), parts in found.items():
        (keys,) = {part[4:6] for part in parts}
        if wanted[b, m] is None:
            assert keys[1] == keys[0] + 1, 'one K tile, masked as a whole'
        else:
            assert keys == wanted[b, m]
        assert_is_split(parts, keys[1] - keys[0])
    assert line.lines * total == sum(line.units(tile, parts[0][4:6])
                                     for tile, parts in found.items())


@given(lines(split=st.just((EVEN, 0))), st.integers(1, 39), st.integers(0, 99))
@examples(300)
def test_early_ctas_compute_all_where_they_end_sooner(line, early, late):
    """Otherwise the stretches are those of a launch that starts at once."""
    line = replace(line, keeps_whole=False)
    early = min(early, line.ctas)
    total, stretch, _ = line.parts()
    _, found, ctas = replace(line, early=(early, late)).parts()
    alone = -(-total // early)
    if alone > -(-total // line.ctas) + late:
        assert found == stretch
    else:
        assert found >= alone and not any(ctas[early * line.lines:])


@given(lines())
@examples(300)
def test_the_walk_may_begin_at_any_sequence_before(line):
    """A warp looks for the last one (forward/cache/cache_batch.h)."""
    assert line.parts(starts_late=True) == line.parts(starts_late=False)


@given(lines())
@examples(400)
def test_slots_and_counters_are_unique(line):
    total, _, ctas = line.parts()
    shared = [parts for parts in by_tile(ctas).values() if len(parts) > 1]
    slots = [part[7] for parts in shared for part in parts]
    assert len(set(slots)) == len(slots)
    limit = line.lines * (2 * line.ctas if line.split[0] == EVEN else total)
    assert all(0 <= slot < limit for slot in slots)
    for parts in shared:
        assert {part[6] for part in parts} == {parts[0][7]}, 'the counter: the slot of part 0'


def of_whole_tiles(even, tiles):
    """The stretch where tiles stay whole: if all are equal and it gets at most 1 / 16 longer."""
    lengths = {parts[0][5] - parts[0][4] for parts in tiles.values()}
    if len(lengths) != 1:
        return even
    (length,) = lengths
    whole = -(-even // length) * length
    return whole if whole <= even + even // 16 else even


@given(lines(split=st.just((EVEN, 0)), weights=st.just(0), gaps=st.just(0)))
@examples(400)
def test_even_stretches(line):
    total, per_cta, ctas = line.parts()
    lengths = [sum(end - begin for _, _, (begin, end, *_), _ in parts) for parts in ctas]
    tiles = max(1, line.lengths.batch * line.heads)
    even = max(1, -(-total // line.ctas), -(-total // (MOST_PARTS * tiles)))
    assert per_cta == (of_whole_tiles(even, by_tile(ctas)) if line.keeps_whole else even)
    used = -(-total // per_cta)
    of_line = [per_cta] * (used - 1) + [total - (used - 1) * per_cta] * (used > 0) + [
        0] * (line.ctas - used)
    assert lengths == [length for length in of_line for _ in range(line.lines)]
    for parts in ctas:
        is_shared = [part[3] > 1 for _, _, part, _ in parts]
        assert not any(is_shared[1:-1]), 'at most the first and the last tile'


@given(lines(split=st.just((EVEN, 0))), st.integers(1, 40), st.sampled_from((1, 8, 64)),
       st.sampled_from((0.5, 1.0, 2.0)))
@examples(300)
def test_two_launches_share_the_sequences(line, most, positions, cost):
    """And the CTAs: at most as many have work as there are, but for one of each line."""
    line = replace(line, keeps_whole=False)
    steps = replace(line, positions=positions, weight_log2=0, gap=0, heads=line.heads * line.lines,
                    ctas=line.ctas * line.lines, lines=1, shared=(
                        1, most, line.positions, line.weight_log2, line.gap, 1 / cost))
    line = replace(line, shared=(most + 1, 1 << 30, positions, 0, 0, cost))
    working = 0
    for launch in (line, steps):
        _, _, ctas = launch.parts()
        wanted = {(*tile, head) for tile in launch.tiles()
                  for head in range(launch.heads * launch.lines)}
        found = by_tile(ctas)
        assert set(found) == wanted
        for parts in found.values():
            assert_is_split(parts, parts[0][5] - parts[0][4])
        working += sum(map(bool, ctas))
    assert working <= line.ctas * line.lines + 2 * line.lines


@given(lines())
@examples(300)
def test_ctas_of_all_lines_do_the_same_for_their_heads(line):
    _, _, ctas = line.parts()
    for first in range(0, len(ctas), line.lines):
        of_lines = [[(b, m, head // line.lines, *rest) for (b, m, head), *rest in
                     ((tile, keys, part) for tile, keys, part, _ in ctas[first + i])]
                    for i in range(line.lines)]
        assert all(parts == of_lines[0] for parts in of_lines)
        for i in range(line.lines):
            assert all(head % line.lines == i for (_, _, head), *_ in ctas[first + i])


def of_one_length(batch, heads, queries, ctas):
    keys = 64 * 1000
    lengths = Lengths(batch, dict(seqlen_q=queries, held_by_all=keys, capacity=keys))
    return Line(lengths, heads, 64, ctas, 1, (EVEN, 0), Drawn('general'), 64)


@pytest.mark.parametrize('batch, heads', [(1, 1), (3, 2)])
def test_sequences_of_one_length_have_no_more_parts(batch, heads):
    """However many CTAs there are."""
    found = by_tile(of_one_length(batch, heads, 1, 1000).parts()[2])
    assert len(found) == batch * heads
    assert all(len(parts) <= MOST_PARTS + 1 for parts in found.values())


@pytest.mark.parametrize('batch, ctas, is_whole', [
    (128, 132, True), (128, 133, True), (64, 132, False), (512, 132, True), (100, 132, False)])
def test_equal_tiles_stay_whole_where_that_is_cheap(batch, ctas, is_whole):
    """128 tiles on 132 CTAs: 4 CTAs have nothing to do, and nothing is to be combined."""
    line = replace(of_one_length(batch, 1, 1, ctas), keeps_whole=True)
    found = by_tile(line.parts()[2])
    assert len(found) == batch
    assert all(len(parts) == 1 for parts in found.values()) is is_whole


def test_more_tiles_than_an_int_counts_parts_of():
    assert of_one_length(1 << 25, 1, 0, 1).parts() == (0, 1, [[]])


@given(lines(split=st.tuples(st.sampled_from((1, 2)), st.integers(1, 50))))
@examples(300)
def test_other_stretches_are_whole_parts(line):
    total, per_cta, ctas = line.parts()
    assert per_cta == -(-total // line.ctas)
    assert all(len(parts) <= per_cta for parts in ctas)
    for parts in ctas:
        for _, (first, last), (begin, end, *_), _ in parts:
            size = _host.part_tiles(line.split, last - first)
            at = begin + _host.phase_of(line.split, first)
            assert begin == 0 or at % size == 0
            assert end == min(last - first, begin + size - at % size)


@given(lines(), st.integers(1, 40))
@examples(200)
def test_parts_do_not_depend_on_the_rest_of_a_launch(line, ctas):
    """Unless the split is even: neither on the CTAs nor on the other sequences."""
    if line.split[0] == EVEN:
        line.split = PARTS, 3
    line.lengths.given['held_step'] = 0

    def ranges(line, b):
        return {tile[1:]: [part[:6] for part in parts]
                for tile, parts in by_tile(line.parts()[2]).items() if tile[0] == b}

    b = line.lengths.batch - 1
    of_all, line.ctas = ranges(line, b), ctas
    assert ranges(line, b) == of_all
    given = dict(line.lengths.given)
    for name in ('held', 'leftpad', 'entry_of', 'used_q', 'used_k'):
        given[name] = given[name][b:] if given.get(name) else None
    for name in ('cu_q', 'cu_k', 'new_starts'):
        given[name] = given[name][b:] if given.get(name) else None
    line.lengths = Lengths(1, given)
    assert ranges(line, 0) == of_all


@given(lines(lengths=all_lengths(is_nonsense=True)))
@examples(500)
def test_nonsense_lengths_give_a_line_of_work_too(line):
    """Each K tile in one part, inside the capacity, whatever the lengths are."""
    _, _, ctas = line.parts()
    most = -(-line.lengths.given['capacity'] // line.tile_n)
    for (b, _, _), parts in by_tile(ctas).items():
        (first, last), = {part[4:6] for part in parts}
        assert_is_split(parts, last - first)
        has_keys = line.lengths.expected(b)[2] > 0
        assert 0 <= first and last <= most + (not has_keys)
        assert last - first <= most


def test_sequences_without_queries_have_no_tile():
    lengths = Lengths(4, dict(cu_q=[0, 0, 3, 3, 3], total_q=3, held=[9, 9, 9, 9], capacity=16))
    line = Line(lengths, 1, 64, 3, 2, (EVEN, 0), Drawn('general'), 16)
    assert set(by_tile(line.parts()[2])) == {(1, 0, 0), (1, 0, 1)}
    lengths.given['cu_q'] = [0, 0, 0, 0, 0]
    assert line.parts() == (0, 1, 6 * [[]])


def test_a_tile_without_keys_has_a_masked_one():
    lengths = Lengths(2, dict(seqlen_q=1, held=[0, 64], leftpad=[0, 64], capacity=64))
    line = Line(lengths, 1, 64, 2, 1, (EVEN, 0), Drawn('general', right=0), 64)
    assert [part[0][1] for part in line.parts()[2]] == [(0, 1), (1, 2)]


def test_a_line_with_too_few_slots_is_not_worked_on():
    """Sequences of queries that overlap have more tiles than the tensor: nothing is written past
    the buffers of the parts.
    """
    lengths = Lengths(3, dict(cu_q=[0, 128, 0, 128], total_q=128, held=[640] * 3, capacity=640))
    line = Line(lengths, 1, 64, 5, 1, (2, 2), Drawn('general'), 64)
    total, _, ctas = line.parts()
    assert total == 4 * 5
    assert line.parts(most=total)[2] == ctas
    assert not any(line.parts(most=total - 1)[2])


# ------------------------------------------------------------------------------------------ pages
@pytest.mark.parametrize('tile_n', [48, 64, 80, 96, 128])
def test_keys_of_a_copy(tile_n):
    """The largest number that divides pages and K tiles, if it is a multiple of 8."""
    for page_size in [*range(1, 300), 512, 1000, 1024, 4096]:
        common = torch.gcd(torch.tensor(page_size), torch.tensor(tile_n)).item()
        assert _host.boxed_keys(page_size, tile_n) == (common if common % 8 == 0 else 0)
