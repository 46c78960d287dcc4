"""core/key_splits.h: the parts of a line of output tiles, with every K tile counted one by one."""
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st
import pytest

from tests import _host
from tests.cpu.drawn import examples

EVEN, PARTS, SIZE = 0, 1, 2
K_TILES = st.lists(st.integers(1, 40), min_size=1, max_size=30)   # of the output tiles of a line
splits = st.one_of(st.just((EVEN, 0)), st.tuples(st.sampled_from((PARTS, SIZE)),
                                                 st.integers(1, 50)))


def parts_of_line(split, k_tiles, per_cta, lane=(0, 1)):
    """For each output tile its parts, as _host.part_at gives them, in the order of the line."""
    units = [_host.units(split, tiles)[0] for tiles in k_tiles]
    firsts = [0, *accumulate(units)]
    total = firsts[-1]
    line = [[] for _ in k_tiles]
    for begin in range(0, total, per_cta):
        end, unit, tile = min(begin + per_cta, total), begin, 0
        while unit < end:
            while unit >= firsts[tile + 1]:
                tile += 1
            part = _host.part_at(split, per_cta, unit, end, firsts[tile], k_tiles[tile], lane,
                                 total)
            line[tile].append(part)
            unit += part[1] - part[0] if split[0] == EVEN else 1
        assert unit == end, 'a stretch holds whole parts'
    return line


@given(splits, K_TILES, st.integers(1, 90))
@examples(500)
def test_each_k_tile_is_in_one_part(split, k_tiles, per_cta):
    for tiles, parts in zip(k_tiles, parts_of_line(split, k_tiles, per_cta)):
        assert [key for begin, end, *_ in parts for key in range(begin, end)] == list(range(tiles))
        assert [index for _, _, index, *_ in parts] == list(range(len(parts)))
        assert {count for _, _, _, count, *_ in parts} == {len(parts)}


@given(splits, K_TILES, st.integers(1, 90), st.integers(1, 5))
@examples(500)
def test_no_two_parts_have_the_same_slot(split, k_tiles, per_cta, lines):
    """Nor those of another line. And all parts of a tile agree on the slot of the first one, where
    its counter is.
    """
    tiles = [parts for lane in range(lines)
             for parts in parts_of_line(split, k_tiles, per_cta, (lane, lines)) if len(parts) > 1]
    slots = [slot for parts in tiles for *_, slot in parts]
    assert len(set(slots)) == len(slots)
    for parts in tiles:
        assert {first for *_, first, _ in parts} == {parts[0][-1]}
    units = sum(_host.units(split, count)[0] for count in k_tiles)
    limit = lines * (2 * -(-units // per_cta) if split[0] == EVEN else units)
    assert all(0 <= slot < limit for slot in slots)


@given(K_TILES, st.integers(1, 90))
@examples(300)
def test_an_even_stretch_shares_its_first_and_last_tile_alone(k_tiles, per_cta):
    firsts = [0, *accumulate(k_tiles)]
    of_cta = {}
    for first, parts in zip(firsts, parts_of_line((EVEN, 0), k_tiles, per_cta)):
        for part in parts:
            of_cta.setdefault((first + part[0]) // per_cta, []).append(len(parts) > 1)
    for is_shared in of_cta.values():
        assert not any(is_shared[1:-1])


@given(st.integers(0, 1 << 44), st.integers(1, 1 << 44), st.integers(0, 200), st.integers(1, 500))
@examples(300)
def test_units_have_64_bits(first, per_cta, offset, k_tiles):
    """A part in the midst of a line whose stretches end where they may. Only the slots are ints:
    there is no memory for more.
    """
    per_cta = max(per_cta, first >> 29, 1)
    offset %= k_tiles
    unit = first + offset
    end = (unit // per_cta + 1) * per_cta
    begin, last, index, parts, first_slot, slot = _host.part_at((EVEN, 0), per_cta, unit, end,
                                                                first, k_tiles, (0, 1),
                                                                first + k_tiles)
    first_cta, cta, last_cta = (at // per_cta for at in (first, unit, first + k_tiles - 1))
    assert (begin, last) == (offset, min(k_tiles, offset + end - unit))
    assert (index, parts) == (cta - first_cta, last_cta - first_cta + 1)
    assert first_slot == 2 * first_cta + 1 and slot == (2 * cta if index else first_slot)


@given(st.integers(1, 64), st.integers(1, 300))
@examples(300)
def test_at_most_so_many_parts(most, k_tiles):
    """Of equal numbers of K tiles, but for the last."""
    units, size = _host.units((PARTS, most), k_tiles)
    assert 1 <= units <= min(most, k_tiles)
    assert (units - 1) * size < k_tiles <= units * size
    assert size == -(-k_tiles // most)


@given(st.integers(1, 100), st.integers(1, 300))
@examples(300)
def test_parts_of_a_size_begin_at_its_multiples(size, k_tiles):
    (parts,) = parts_of_line((SIZE, size), [k_tiles], 1)
    assert [begin for begin, *_ in parts] == list(range(0, k_tiles, size))


@pytest.mark.parametrize('size', [1, 2, 64])
def test_a_longer_sequence_keeps_its_first_parts(size):
    """Bits of a part depend on its own keys alone."""
    (short,), (long,) = (parts_of_line((SIZE, size), [k_tiles], 7) for k_tiles in (90, 190))
    ranges = [[(begin, end) for begin, end, *_ in parts] for parts in (short, long)]
    assert ranges[1][:len(short) - 1] == ranges[0][:-1]
