"""core/row_packing.h: the 64 rows of a warpgroup, shared by the query heads of a KV head."""
import pytest

from tests import _host

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
