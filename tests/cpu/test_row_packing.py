"""core/row_packing.h: the 64 rows of a warpgroup, shared by the query heads of a KV head."""
from hypothesis import given
from hypothesis import strategies as st
import pytest

from tests.cpu.drawn import examples
from tests.host import _host

ROWS = 64


@pytest.mark.parametrize('group', range(1, 200))
def test_largest_pack_is_the_largest_divisor_that_fits(group):
    expected = max(d for d in range(1, ROWS + 1) if group % d == 0)
    assert _host.largest_pack(group) == expected


@pytest.mark.parametrize('pack', range(1, ROWS + 1))
def test_rows_hold_every_pair_of_position_and_head_once(pack):
    positions = _host.positions_per_warpgroup(pack)
    pairs = [(row // pack, row % pack) for row in range(ROWS)]
    kept = [pair for pair in pairs if pair[0] < positions]
    assert kept == [(position, head) for position in range(positions) for head in range(pack)]
    assert ROWS - len(kept) < pack, 'another position would have fitted'


@pytest.mark.parametrize('warpgroups', [1, 2, 3])
@pytest.mark.parametrize('pack', [1, 3, 8, 64])
def test_a_tile_is_its_warpgroups(pack, warpgroups):
    assert _host.positions_per_tile(pack, warpgroups) == warpgroups * (ROWS // pack)


@given(st.integers(1, 2000), st.integers(1, 3), st.integers(1, ROWS))
@examples(500)
def test_with_a_lead_the_first_tile_is_the_one_that_is_not_full(seqlen_q, warpgroups, pack):
    of_warpgroup = _host.positions_per_warpgroup(pack)
    of_tile = warpgroups * of_warpgroup
    tiles = -(-seqlen_q // of_tile)
    lead = _host.lead_positions(tiles, seqlen_q, warpgroups, of_warpgroup)
    begins = [begin for begin in range(-lead, tiles * of_tile - lead, of_warpgroup) if begin >= 0]
    assert begins == list(range(0, len(begins) * of_warpgroup, of_warpgroup))
    assert (len(begins) - 1) * of_warpgroup < seqlen_q <= len(begins) * of_warpgroup
    assert lead <= of_tile - of_warpgroup, 'no warpgroup of the first tile has rows'


def test_no_tiles_have_no_lead():
    assert _host.lead_positions(0, 0, 3, ROWS) == 0
