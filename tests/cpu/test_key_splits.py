"""core/key_splits.h: the parts of all CTAs, against every K tile counted one by one."""
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st
import pytest

from tests import _host
from tests.cpu.drawn import examples

CTAS = st.integers(1, 140)
GROUPS = st.lists(st.integers(1, 40), max_size=12)


def parts_by_tile(work):
    """The parts of each output tile, in the order of the CTAs: (begin, end, index, parts)."""
    tiles = defaultdict(list)
    for parts in work:
        for group, head, *part in parts:
            tiles[group, head].append(tuple(part))
    return tiles


def assert_in_order(parts, k_tiles):
    """Every K tile is in one part, parts follow each other and know their number."""
    assert [index for *_, index, _ in parts] == list(range(len(parts)))
    assert {count for *_, count in parts} == {len(parts)}
    assert [begin for begin, *_ in parts] == [0] + [end for _, end, *_ in parts[:-1]]
    assert parts[-1][1] == k_tiles and all(begin < end for begin, end, *_ in parts)


@given(GROUPS, st.integers(1, 9), CTAS)
@examples(500)
def test_each_k_tile_is_in_one_part(k_tiles, heads, ctas):
    tiles = parts_by_tile(_host.even_split(k_tiles, heads, ctas))
    assert set(tiles) == {(group, head) for group in range(len(k_tiles)) for head in range(heads)}
    for (group, _), parts in tiles.items():
        assert_in_order(parts, k_tiles[group])


@given(GROUPS, st.integers(1, 9), CTAS)
@examples(500)
def test_ctas_have_equal_stretches_and_at_most_two_shared_tiles(k_tiles, heads, ctas):
    work = _host.even_split(k_tiles, heads, ctas)
    lengths = [sum(end - begin for _, _, begin, end, *_ in parts) for parts in work]
    assert sum(lengths) == heads * sum(k_tiles)
    used = [length for length in lengths if length]
    assert len(used) == min(ctas, sum(lengths)) and lengths[:len(used)] == used
    assert max(used, default=0) - min(used, default=0) <= 1
    for parts in work:
        shared = [i for i, (*_, count) in enumerate(parts) if count > 1]
        assert set(shared) <= {0, len(parts) - 1}


@given(st.integers(1, 1 << 44), CTAS, st.integers(0, 1 << 44))
@examples(300)
def test_positions_have_64_bits(total, ctas, position):
    position %= total
    begin, end, cta = _host.stretch_of(total, ctas, position)
    assert begin <= position < end and cta < min(ctas, total)
    assert end - begin in (total // min(ctas, total), -(-total // min(ctas, total)))


@given(st.integers(1, 64), st.integers(1, 300))
@examples(300)
def test_at_most_so_many_parts(most, k_tiles):
    parts = _host.split_into(most, k_tiles)
    assert 1 <= len(parts) <= most
    assert [begin for begin, _ in parts] == [0] + [end for _, end in parts[:-1]]
    assert parts[-1][1] == k_tiles
    assert len({end - begin for begin, end in parts[:-1]}) <= 1


@given(st.integers(1, 5000), st.sampled_from((48, 64, 80, 96, 128)), st.integers(1, 200))
@examples(300)
def test_parts_of_a_size_begin_at_its_multiples(keys, tile_n, k_tiles):
    size = -(-keys // tile_n)
    parts = _host.split_by_size(keys, tile_n, k_tiles)
    assert [begin for begin, _ in parts] == list(range(0, k_tiles, size))
    assert parts[-1][1] == k_tiles and all(end > begin for begin, end in parts)


@pytest.mark.parametrize('keys', [1, 64, 65, 4096])
def test_a_longer_sequence_keeps_its_first_parts(keys):
    """Bits of a part depend on its own keys alone."""
    short, long = (_host.split_by_size(keys, 64, k_tiles) for k_tiles in (90, 190))
    assert long[:len(short) - 1] == short[:-1]
