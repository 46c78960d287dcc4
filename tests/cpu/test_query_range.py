"""backward/query_range.h against an O(n^2) mask: which tiles of queries a tile of keys meets, which
of them without masking, and that core/block_range.h says the same from the side of the queries.
"""
from hypothesis import given
from hypothesis import strategies as st
import pytest

from flash_attn3 import _plan
from tests.cpu.drawn import examples
from tests.cpu.masks import CAUSAL, FULL, MASKS, any_mask, sees
from tests.host import _host

# (queries, keys): those of the kernels, and some that are no multiples of each other.
TILES = sorted({(facts['tile_m'], facts['tile_n']) for facts in _plan.backward_variants()}
               | {(16, 48), (80, 64), (64, 192)})
lengths = st.integers(1, 300), st.integers(1, 400)


def check_tile(key_begin, seqlen_q, seqlen_k, tile, mask):
    tile_m, tile_n = tile
    begin, free_begin, free_end, end = _host.query_range(key_begin, seqlen_q, seqlen_k, tile_m,
                                                         tile_n, mask)
    needed, free = [], []
    for m in range(seqlen_q // tile_m + 2):
        seen = [sees(query, key, seqlen_q, seqlen_k, mask)
                for query in range(m * tile_m, min((m + 1) * tile_m, seqlen_q))
                for key in range(key_begin, key_begin + tile_n)]
        needed += [m] if any(seen) else []
        free += [m] if seen and all(seen) else []
    assert begin >= 0
    assert list(range(begin, end)) == needed
    assert [m for m in needed if free_begin <= m < free_end] == free


@given(*lengths, st.sampled_from(TILES), any_mask)
@examples(250)
def test_the_key_tiles_of_a_tile_of_queries(seqlen_q, seqlen_k, tile, mask):
    """Those that the forward would visit for it, which is what turns are counted by."""
    tile_m, tile_n = tile
    ranges = [_host.query_range(key_begin, seqlen_q, seqlen_k, *tile, mask)
              for key_begin in range(0, seqlen_k, tile_n)]
    for m in range(-(-seqlen_q // tile_m)):
        meeting = [n for n, (begin, _, _, end) in enumerate(ranges) if begin <= m < end]
        first, end = _host.key_tiles(m, seqlen_q, seqlen_k, tile_m, tile_n, mask)
        assert meeting == list(range(first, end))


@given(*lengths, st.sampled_from(TILES), any_mask, st.integers(0, 2**16))
@examples(150)
def test_against_every_key_of_every_query(seqlen_q, seqlen_k, tile, mask, pick):
    check_tile(pick % seqlen_k // tile[1] * tile[1], seqlen_q, seqlen_k, tile, mask)


@pytest.mark.parametrize('mask', MASKS, ids=str)
@pytest.mark.parametrize('tile', [(64, 128), (128, 128), (80, 64)], ids=str)
@pytest.mark.parametrize('seqlen_q, seqlen_k', [
    (1, 1), (129, 127), (20, 300), (300, 20), (256, 256)])
def test_every_tile_of_a_problem(seqlen_q, seqlen_k, tile, mask):
    for key_begin in range(0, seqlen_k, tile[1]):
        check_tile(key_begin, seqlen_q, seqlen_k, tile, mask)


@given(st.integers(1, 120), st.integers(1, 120), any_mask)
@examples(150)
def test_the_queries_of_each_key(seqlen_q, seqlen_k, mask):
    for key in range(seqlen_k):
        seeing = [query for query in range(seqlen_q) if sees(query, key, seqlen_q, seqlen_k, mask)]
        assert list(range(*_host.queries_of_key(key, seqlen_q, seqlen_k, mask))) == seeing


@given(st.integers(1, 300), st.sampled_from(TILES), any_mask)
@examples(50)
def test_without_queries_there_is_no_step(seqlen_k, tile, mask):
    for key_begin in range(0, seqlen_k, tile[1]):
        begin, _, _, end = _host.query_range(key_begin, 0, seqlen_k, *tile, mask)
        assert end <= begin


def test_a_tile_past_the_end_of_the_keys_is_masked_throughout():
    assert _host.query_range(128, 512, 256, 64, 128, FULL) == (0, 0, 8, 8)
    assert _host.query_range(128, 512, 255, 64, 128, FULL) == (0, 8, 8, 8)


def test_the_diagonal_is_masked():
    assert _host.query_range(128, 512, 512, 64, 128, CAUSAL) == (2, 4, 8, 8)
    assert _host.query_range(384, 512, 512, 128, 128, CAUSAL) == (3, 4, 4, 4)


def test_a_window_is_masked_at_both_ends():
    assert _host.query_range(128, 512, 512, 64, 128, (2, 200, 0, 0)) == (2, 4, 5, 8)


def test_long_sequences_do_not_overflow():
    length, tiles = 2**30, 2**24
    assert _host.query_range(length - 128, length, length, 64, 128, CAUSAL) == (
        tiles - 2, tiles, tiles, tiles)
    assert _host.query_range(0, length, 1, 64, 128, CAUSAL)[0] == tiles - 1
    assert _host.key_tiles(tiles - 1, length, length, 64, 128, CAUSAL) == (0, length // 128)
    assert _host.key_tiles(0, 1, length, 64, 128, CAUSAL) == (0, length // 128)
    first, end = _host.key_tiles(0, length, 1, 64, 128, CAUSAL)
    assert end <= first
    assert _host.query_range(0, length, length, 64, 128, (2, 127, -1, 0)) == (0, 0, 2, 4)
    assert _host.query_range(0, 1, length, 64, 128, (2, length - 2, -1, 0))[3] == 1
