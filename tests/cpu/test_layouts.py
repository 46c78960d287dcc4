"""CuTe's layouts on the CPU, of the kernel's own types: the 128-byte swizzle against a formula
written by hand, and the registers of the products.
"""
from functools import cache

import pytest

from csrc.plan.variants import FORWARD
from flash_attn3 import _plan
from tests.host import _host

TILES = sorted(_host.layouts)
each_tile = pytest.mark.parametrize('tile', TILES)
THREADS = 128
SLICE = 64  # columns of a TMA box: 128 bytes
CHUNK = 8   # elements in the 16 bytes that the swizzle moves as one


def swizzled(row, column, rows):
    """Element offset in a tile of slices of 64 columns.

    In a 128-byte row, 16-byte chunk c lies at c XOR row % 8.
    """
    slice_begin = column // SLICE * rows * SLICE
    chunk = column % SLICE // CHUNK ^ row % 8
    return slice_begin + row * SLICE + chunk * CHUNK + column % CHUNK


@cache
def shared(tile, operand):
    rows, columns, values = _host.layouts[tile]['shared'](operand)
    return rows, columns, values


@each_tile
@pytest.mark.parametrize('operand', ['q', 'k', 'o'])
def test_rows_of_queries_keys_and_outputs_are_swizzled(tile, operand):
    rows, columns, values = shared(tile, operand)
    assert values == [swizzled(row, column, rows)
                      for row in range(rows) for column in range(columns)]


@each_tile
def test_o_is_staged_where_tma_reads_it(tile):
    rows, columns, values = shared(tile, 'o')
    for row in range(rows):
        for chunk in range(columns // CHUNK):
            offset = _host.chunk_offset_bytes(row, chunk)
            assert offset == 2 * values[row * columns + chunk * CHUNK]


@each_tile
def test_v_is_the_same_bytes_read_the_other_way(tile):
    """As the B operand of PV, V is (columns, keys); in memory it lies as K: (keys, columns)."""
    columns, keys, values = shared(tile, 'v')
    assert values == [swizzled(key, column, keys)
                      for column in range(columns) for key in range(keys)]


@each_tile
def test_shapes(tile):
    tile_n, columns, columns_v = (_host.layouts[tile][name]
                                  for name in ('tile_n', 'columns', 'columns_v'))
    assert shared(tile, 'q')[:2] == (64, columns) and shared(tile, 'o')[:2] == (64, columns_v)
    assert shared(tile, 'k')[:2] == (tile_n, columns)
    assert shared(tile, 'v')[:2] == (columns_v, tile_n)


def expected_accumulator(thread, columns):
    """Rows 16 * warp + lane / 4 (+ 8), columns 8 j + 2 * (lane % 4) (+ 1).

    In the registers: the pair of columns first, then the two rows, then j.
    """
    warp, lane = divmod(thread, 32)
    row, column = 16 * warp + lane // 4, 2 * (lane % 4)
    return [[row + 8 * r, 8 * j + column + c]
            for j in range(columns // 8) for r in range(2) for c in range(2)]


@each_tile
def test_accumulators(tile):
    tile_n, head_dim_v = _host.layouts[tile]['tile_n'], _host.layouts[tile]['head_dim_v']
    for thread in range(THREADS):
        assert _host.layouts[tile]['scores'](thread) == expected_accumulator(thread, tile_n)
        assert _host.layouts[tile]['output'](thread) == expected_accumulator(thread, head_dim_v)


def test_every_width_in_shared_memory_is_looked_at():
    assert set(TILES) <= {variant.shape for variant in FORWARD}
    assert {_host.layouts[tile]['columns'] for tile in TILES} == {
        facts['columns'] for facts in _plan.variants()}


def test_value_3_of_thread_5():
    assert _host.layouts['FwdTileD128']['scores'](5)[3] == [9, 3]


@each_tile
def test_scores_are_held_by_one_thread_each(tile):
    tile_n = _host.layouts[tile]['tile_n']
    held = [tuple(at) for thread in range(THREADS) for at in _host.layouts[tile]['scores'](thread)]
    assert sorted(held) == [(row, column) for row in range(64) for column in range(tile_n)]


@each_tile
def test_probabilities_stay_in_the_registers_of_the_scores(tile):
    """P is the A operand of PV without a move between threads or registers."""
    for thread in range(THREADS):
        expected = _host.layouts[tile]['probabilities_expected'](thread)
        assert len(expected) == 64 * _host.layouts[tile]['tile_n'] // THREADS
        assert _host.layouts[tile]['probabilities_found'](thread) == expected


def test_first_row_and_column_of_a_thread():
    for thread in range(THREADS):
        first = _host.layouts['FwdTileD64']['scores'](thread)[0]
        assert first == [_host.fragment_row(thread), _host.fragment_column(thread)]
