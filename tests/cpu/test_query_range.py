"""core/query_range.h against an O(n^2) mask: which tiles of queries a tile of keys meets, and which
of them without masking.
"""
from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from flash_attn3 import _plan
from tests import _host

# (queries, keys): those of the kernels, and some that are no multiples of each other.
TILES = sorted({(facts['tile_m'], facts['tile_n']) for facts in _plan.backward_variants()}
               | {(16, 48), (80, 64), (64, 192)})


def sees(query, key, seqlen_q, seqlen_k, causal):
    """The definition: aligned bottom-right."""
    return key < seqlen_k and (not causal or key <= query + seqlen_k - seqlen_q)


def check_tile(key_begin, seqlen_q, seqlen_k, tile, causal):
    tile_m, tile_n = tile
    begin, free_begin, end = _host.query_range(key_begin, seqlen_q, seqlen_k, tile_m, tile_n,
                                               causal)
    assert 0 <= begin <= free_begin <= end
    needed, free = [], []
    for m in range(seqlen_q // tile_m + 2):
        seen = [sees(query, key, seqlen_q, seqlen_k, causal)
                for query in range(m * tile_m, min((m + 1) * tile_m, seqlen_q))
                for key in range(key_begin, key_begin + tile_n)]
        needed += [m] if any(seen) else []
        free += [m] if seen and all(seen) else []
    assert list(range(begin, end)) == needed
    assert list(range(free_begin, end)) == free


@given(st.integers(1, 300), st.integers(1, 400), st.sampled_from(TILES), st.booleans())
@settings(max_examples=120, deadline=None)
def test_the_key_tiles_of_a_tile_of_queries(seqlen_q, seqlen_k, tile, causal):
    """All from the first to last_key_tile."""
    tile_m, tile_n = tile
    ranges = [_host.query_range(key_begin, seqlen_q, seqlen_k, *tile, causal)
              for key_begin in range(0, seqlen_k, tile_n)]
    for m in range(-(-seqlen_q // tile_m)):
        meeting = [n for n, (begin, _, end) in enumerate(ranges) if begin <= m < end]
        last = _host.last_key_tile(m, seqlen_q, seqlen_k, tile_m, tile_n, causal)
        assert meeting == list(range(last + 1))


@given(st.integers(1, 300), st.integers(1, 400), st.sampled_from(TILES), st.booleans(),
       st.integers(0, 2**16))
@settings(max_examples=120, deadline=None)
def test_against_every_key_of_every_query(seqlen_q, seqlen_k, tile, causal, pick):
    check_tile(pick % seqlen_k // tile[1] * tile[1], seqlen_q, seqlen_k, tile, causal)


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('tile', TILES, ids=str)
@pytest.mark.parametrize('seqlen_q, seqlen_k', [
    (1, 1), (128, 128), (129, 127), (127, 129), (20, 300), (300, 20), (1, 129), (256, 256)])
def test_every_tile_of_a_problem(seqlen_q, seqlen_k, tile, causal):
    for key_begin in range(0, seqlen_k, tile[1]):
        check_tile(key_begin, seqlen_q, seqlen_k, tile, causal)


@given(st.integers(1, 200), st.integers(1, 200), st.booleans())
@settings(max_examples=50, deadline=None)
def test_the_first_query_of_each_key(seqlen_q, seqlen_k, causal):
    for key in range(seqlen_k):
        first = next(query for query in range(seqlen_q)
                     if sees(query, key, seqlen_q, seqlen_k, causal))
        assert _host.first_position(key, seqlen_q, seqlen_k, causal) == first


def test_a_tile_past_the_end_of_the_keys_is_masked_throughout():
    assert _host.query_range(128, 512, 256, 64, 128, False) == (0, 0, 8)
    assert _host.query_range(128, 512, 255, 64, 128, False) == (0, 8, 8)


def test_the_diagonal_is_masked():
    assert _host.query_range(128, 512, 512, 64, 128, True) == (2, 4, 8)
    assert _host.query_range(384, 512, 512, 128, 128, True) == (3, 4, 4)


def test_long_sequences_do_not_overflow():
    length, tiles = 2**30, 2**24
    assert _host.query_range(length - 128, length, length, 64, 128, True) == (
        tiles - 2, tiles, tiles)
    assert _host.query_range(0, length, 1, 64, 128, True)[0] == tiles - 1
    assert _host.last_key_tile(tiles - 1, length, length, 64, 128, True) == length // 128 - 1
    assert _host.last_key_tile(0, 1, length, 64, 128, True) == length // 128 - 1
    assert _host.last_key_tile(0, length, 1, 64, 128, True) < 0
