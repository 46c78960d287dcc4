"""core/key_splits.h: the parts of a line of output tiles, with every K tile counted one by one."""
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st
import pytest

from tests.cpu.drawn import examples
from tests.host import _host

EVEN, PARTS, SIZE = 0, 1, 2
# The output tiles of a line, each with its K tiles, their weight as a power of two, and its first K
# tile, counted from key 0.
TILES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2), st.integers(0, 200)), min_size=1,
                 max_size=30)
splits = st.one_of(st.tuples(st.just(EVEN), st.integers(0, 3)),
                   st.tuples(st.sampled_from((PARTS, SIZE)), st.integers(1, 50)))


def members(split, tile):
    """K tiles, weight and phase."""
    k_tiles, weight, first = tile
    return k_tiles, weight, _host.phase_of(split, first)


def units_of_line(split, tiles):
    return [_host.units(split, *members(split, tile)) for tile in tiles]


def parts_of_line(split, tiles, per_cta, lane=(0, 1)):
    """For each output tile its parts, as _host.part_at gives them, in the order of the line. A
    stretch has at least the units of a K tile.
    """
    firsts = [0, *accumulate(units_of_line(split, tiles))]
    total = firsts[-1]
    line = [[] for _ in tiles]
    for begin in range(0, total, per_cta):
        end, unit, index = min(begin + per_cta, total), begin, 0
        while unit < end:
            while unit >= firsts[index + 1]:
                index += 1
            tile = firsts[index], *members(split, tiles[index])
            *part, after = _host.part_at(split, per_cta, unit, end, tile, lane, total)
            is_empty = part[0] >= part[1]
            assert is_empty or unit < after <= firsts[index + 1]
            if not is_empty:
                line[index].append(part)
            unit = firsts[index + 1] if is_empty else after
    return line


@st.composite
def lines(draw):
    """(split, tiles, per_cta)"""
    split, tiles = draw(splits), draw(TILES)
    least = max(_host.units(split, 1, weight) for _, weight, _ in tiles)
    return split, tiles, max(least, draw(st.integers(1, 90)))


@given(lines())
@examples(500)
def test_each_k_tile_is_in_one_part(line):
    for (count, *_), parts in zip(line[1], parts_of_line(*line)):
        assert [key for begin, end, *_ in parts for key in range(begin, end)] == list(range(count))
        assert [index for _, _, index, *_ in parts] == list(range(len(parts)))
        assert {number for _, _, _, number, *_ in parts} == {len(parts)}


@given(lines(), st.integers(1, 5))
@examples(500)
def test_no_two_parts_have_the_same_slot(line, lanes):
    """Nor those of another line. And all parts of a tile agree on the slot of the first one, where
    its counter is.
    """
    split, tiles, per_cta = line
    shared = [parts for lane in range(lanes)
              for parts in parts_of_line(*line, (lane, lanes)) if len(parts) > 1]
    slots = [slot for parts in shared for *_, slot in parts]
    assert len(set(slots)) == len(slots)
    for parts in shared:
        assert {first for *_, first, _ in parts} == {parts[0][-1]}
    units = sum(units_of_line(split, tiles))
    limit = lanes * (2 * -(-units // per_cta) if split[0] == EVEN else units)
    assert all(0 <= slot < limit for slot in slots)


@given(lines())
@examples(300)
def test_an_even_stretch_shares_its_first_and_last_tile_alone(line):
    """And has its share of the line, but for what rounding to whole K tiles takes or gives."""
    split, tiles, per_cta = (EVEN, line[0][1] % 4), *line[1:]
    per_cta = max(per_cta, *(_host.units(split, 1, weight) for _, weight, _ in tiles), 1)
    of_cta = {}
    firsts = [0, *accumulate(units_of_line(split, tiles))]
    for first, tile, parts in zip(firsts, tiles, parts_of_line(split, tiles, per_cta)):
        cta = first // per_cta
        for begin, end, index, count, *_ in parts:
            of_cta.setdefault(cta + index, []).append(
                (count > 1, (end - begin) * 2.0 ** (tile[1] - split[1])))
    heaviest = max(_host.units(split, 1, weight) for _, weight, _ in tiles)
    for stretch in of_cta.values():
        assert not any(is_shared for is_shared, _ in stretch[1:-1])
        assert sum(units for _, units in stretch) <= per_cta + heaviest


@given(st.integers(0, 1 << 29), st.integers(1, 1 << 29), st.integers(0, 200), st.integers(1, 500))
@examples(300)
def test_a_part_in_the_midst_of_a_long_line(first, per_cta, offset, k_tiles):
    """Whose stretches end where they may."""
    offset %= k_tiles
    unit = first + offset
    end = (unit // per_cta + 1) * per_cta
    begin, last, index, parts, first_slot, slot, after = _host.part_at(
        (EVEN, 0), per_cta, unit, end, (first, k_tiles, 0, 0), (0, 1), first + k_tiles)
    first_cta, cta, last_cta = (at // per_cta for at in (first, unit, first + k_tiles - 1))
    assert (begin, last) == (offset, min(k_tiles, offset + end - unit))
    assert after == min(first + k_tiles, end)
    assert (index, parts) == (cta - first_cta, last_cta - first_cta + 1)
    assert first_slot == 2 * first_cta + 1 and slot == (2 * cta if index else first_slot)


@given(st.integers(1, 64), st.integers(1, 300))
@examples(300)
def test_at_most_so_many_parts(most, k_tiles):
    """They have equal numbers of K tiles, but for the last."""
    units, size = (of((PARTS, most), k_tiles) for of in (_host.units, _host.part_tiles))
    assert 1 <= units <= min(most, k_tiles)
    assert (units - 1) * size < k_tiles <= units * size
    assert size == -(-k_tiles // most)


@given(st.integers(1, 100), st.integers(1, 300), st.integers(0, 1000))
@examples(300)
def test_parts_of_a_size_begin_at_its_multiples(size, k_tiles, first):
    """Counted from key 0, wherever the range begins, under a window say."""
    (parts,) = parts_of_line((SIZE, size), [(k_tiles, 0, first)], 1)
    begins = [first + begin for begin, *_ in parts]
    multiples = range((first // size + 1) * size, first + k_tiles, size)
    assert begins == [first, *multiples]
    assert len(parts) == _host.units((SIZE, size), k_tiles, 0, _host.phase_of((SIZE, size), first))


@given(splits, st.integers(0, 1000))
@examples(100)
def test_other_splits_begin_at_the_first_k_tile(split, first):
    assert _host.phase_of(split, first) == (first % split[1] if split[0] == SIZE else 0)


@pytest.mark.parametrize('first', [0, 3, 64, 101])
@pytest.mark.parametrize('size', [1, 2, 64])
def test_a_longer_sequence_keeps_its_first_parts(size, first):
    """Bits of a part depend on its own keys alone."""
    (short,), (long,) = (parts_of_line((SIZE, size), [(k_tiles, 0, first)], 7)
                         for k_tiles in (90, 190))
    ranges = [[(begin, end) for begin, end, *_ in parts] for parts in (short, long)]
    assert ranges[1][:len(short) - 1] == ranges[0][:-1]


@given(st.integers(1, 50), st.integers(0, 300), st.integers(0, 300), st.integers(1, 300))
@examples(300)
def test_ranges_of_a_sequence_share_whole_parts(size, first, other, end):
    """Two rows of a windowed sequence: parts between the later begin and the earlier end agree."""
    ranges = []
    for begin in (first, other):
        (parts,) = parts_of_line((SIZE, size), [(end, 0, begin)], 1)
        ranges.append({(begin + low, begin + high) for low, high, *_ in parts})
    inner = max(first, other) + size, min(first, other) + end - size
    whole = [{(low, high) for low, high in one if inner[0] <= low and high <= inner[1]}
             for one in ranges]
    assert whole[0] == whole[1]
