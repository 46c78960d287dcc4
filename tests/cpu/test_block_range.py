"""core/block_range.h against an O(n^2) mask: which K tiles a tile of queries needs, and which of
them without masking.
"""
from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from tests import _host

TILE_N = (16, 80, 128, 176)


def key_limits(begin, end, seqlen_q, seqlen_k, causal):
    """For each query of the tile that exists, how many keys it sees: counted, not computed."""
    shift = seqlen_k - seqlen_q
    return [sum(1 for key in range(seqlen_k) if not causal or key <= query + shift)
            for query in range(begin, min(end, seqlen_q))]


def check_tile(begin, end, seqlen_q, seqlen_k, tile_n, causal):
    free_end, tile_end = _host.block_range(begin, end, seqlen_q, seqlen_k, tile_n, causal)
    limits = key_limits(begin, end, seqlen_q, seqlen_k, causal)
    needed = [n for n in range(seqlen_k // tile_n + 2) if max(limits) > n * tile_n]
    free = [n for n in needed if min(limits) >= (n + 1) * tile_n]
    assert list(range(tile_end)) == needed
    assert list(range(free_end)) == free


@given(st.integers(1, 400), st.integers(0, 700), st.integers(1, 200), st.sampled_from(TILE_N),
       st.booleans(), st.integers(0, 2**16))
@settings(max_examples=400, deadline=None)
def test_against_every_key_of_every_query(seqlen_q, seqlen_k, positions, tile_n, causal, pick):
    begin = pick % seqlen_q // positions * positions
    check_tile(begin, begin + positions, seqlen_q, seqlen_k, tile_n, causal)


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('tile_n', TILE_N)
@pytest.mark.parametrize('seqlen_q, seqlen_k', [
    (1, 1), (128, 128), (129, 127), (255, 512), (300, 20), (64, 0), (1, 351), (352, 352)])
def test_every_tile_of_a_problem(seqlen_q, seqlen_k, tile_n, causal):
    for begin in range(0, seqlen_q, 128):
        check_tile(begin, begin + 128, seqlen_q, seqlen_k, tile_n, causal)


def test_a_full_tile_of_keys_is_free_and_a_cut_one_is_not():
    assert _host.block_range(0, 128, 128, 256, 128, False) == (2, 2)
    assert _host.block_range(0, 128, 128, 257, 128, False) == (2, 3)


def test_the_diagonal_is_masked():
    assert _host.block_range(0, 128, 256, 256, 128, True) == (0, 1)
    assert _host.block_range(128, 256, 256, 256, 128, True) == (1, 2)


def test_long_sequences_do_not_overflow():
    length, tiles = 2**30, 2**23
    assert _host.block_range(length - 128, length, length, length, 128, True) == (tiles - 1, tiles)
