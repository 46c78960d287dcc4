"""config/dq_layout.h: where the accumulator of dQ keeps the elements of a tile, against the
registers of the GEMM that wrote them.
"""
from collections import Counter
from itertools import product

import pytest

from csrc.plan.variants import BACKWARD
from tests.cpu.test_layouts import THREADS, expected_accumulator
from tests.host import _host

TILES = sorted(_host.backward_tiles)
each_tile = pytest.mark.parametrize('tile', [_host.backward_tiles[name] for name in TILES],
                                    ids=TILES)
each_layout = pytest.mark.parametrize(
    'layout', [_host.DqLayout(columns, side_by_side)
               for columns in (32, 64, 96, 128, 192, 256) for side_by_side in (False, True)],
    ids=lambda layout: f'{layout.columns}-{"beside" if layout.side_by_side else "below"}')
BLOCKS = 3


def place(layout, block, row, column):
    """The float of an element of a tile's block, by the text of the header."""
    upper = row % 16 % 8 + row // 16 * 16
    pair = layout.chunk_pair(block, upper, column // 8)
    return pair + column % 8 // 2 * 4 + (row - upper) // 8 * 2 + column % 2


@each_layout
def test_every_element_of_a_block_has_a_float_of_its_own(layout):
    assert layout.block_floats() == 64 * layout.columns
    places = Counter(place(layout, block, row, column) for block, row, column in product(
        range(BLOCKS), range(64), range(layout.columns)))
    assert places == Counter(range(BLOCKS * layout.block_floats()))


@each_layout
def test_floats_lie_in_the_order_of_the_accumulators_registers(layout):
    """A thread writes 4 registers of 8 columns at once; threads lie beside each other."""
    for thread in range(THREADS):
        for register, (row, column) in enumerate(expected_accumulator(thread, layout.columns)):
            chunk, rest = divmod(register, 4)
            assert place(layout, 1, row, column) == (
                layout.block_floats() + (chunk * THREADS + thread) * 4 + rest)


def test_the_registers_are_those_of_cute():
    scores = _host.layouts['FwdTileD128']['scores']
    columns = _host.layouts['FwdTileD128']['tile_n']
    assert all(scores(thread) == expected_accumulator(thread, columns) for thread in range(THREADS))


@each_tile
def test_the_blocks_of_a_tile_cover_it_once(tile):
    """The columns of the accumulator are those of the head dim."""
    layout = tile['dq']
    covered = Counter((layout.first_row(block) + row, layout.first_column(block) + column)
                      for block in range(tile['dq_blocks'])
                      for row, column in product(range(64), range(layout.columns)))
    assert covered == Counter(product(range(tile['tile_m']), range(tile['dq_columns'])))
    assert tile['dq_columns'] == tile['head_dim']


def test_every_tile_is_looked_at():
    """A new one: a line in bind_backward() of tests/host/host_module.cpp."""
    assert set(TILES) == {variant.shape for variant in BACKWARD}


@pytest.mark.parametrize('blocks', range(1, 9))
@pytest.mark.parametrize('m', range(4))
def test_two_ctas_share_out_the_blocks(blocks, m):
    """All of them, evenly over two tiles of queries."""
    bounds = [_host.DqLayout.first_of(rank, blocks, m) for rank in range(3)]
    assert bounds[0] == 0 and bounds[2] == blocks
    here, there = (_host.DqLayout.first_of(1, blocks, tile) for tile in (m, m + 1))
    assert here + there == blocks
