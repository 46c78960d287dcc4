"""core/block_range.h against an O(n^2) mask: which K tiles a tile of queries needs, and which of
them without masking.
"""
from hypothesis import given
from hypothesis import strategies as st
import pytest

from tests.cpu.drawn import examples
from tests.cpu.drawn_masks import Drawn, masks
from tests.host import _host

TILE_N = (16, 48, 80, 128, 176)


def tiles_of_keys(visible, tile_n, seqlen_k):
    """For each K tile whether a row sees one of its keys, and whether all rows see all tile_n."""
    some, whole = [], []
    for begin in range(0, seqlen_k, tile_n):
        of_tile = visible[:, begin:begin + tile_n]
        some.append(of_tile.any().item())
        whole.append(of_tile.size(1) == tile_n and of_tile.all().item())
    return some, whole


def check_tile(mask, begin, end, seqlen_q, seqlen_k, tile_n):
    first, free_first, free_end, last = mask.of_kernels.block_range(begin, end, seqlen_q, seqlen_k,
                                                                    tile_n)
    visible = mask.visible(seqlen_q, seqlen_k)[begin:end]
    some, whole = tiles_of_keys(visible, tile_n, seqlen_k)
    needed = [n for n, is_needed in enumerate(some) if is_needed]
    assert list(range(first, last)) == needed
    free = [n for n in range(first, last) if free_first <= n < free_end]
    assert free == [n for n in needed if whole[n]]


LENGTHS = st.integers(1, 400), st.integers(0, 700)


@given(masks(300), *LENGTHS, st.integers(1, 200), st.sampled_from(TILE_N), st.integers(0, 2**16))
@examples(600)
def test_against_every_key_of_every_query(mask, seqlen_q, seqlen_k, positions, tile_n, pick):
    begin = pick % seqlen_q // positions * positions
    check_tile(mask, begin, begin + positions, seqlen_q, seqlen_k, tile_n)


MASKS = {'full': Drawn('full'), 'causal': Drawn('causal'), 'left': Drawn('general', 130, 0),
         'sides': Drawn('general', 5, 140), 'own key': Drawn('general', 0, 0),
         'chunks': Drawn('general', chunk=96), 'all': Drawn('general', 50, 20, 64),
         'none': Drawn('general')}


@pytest.mark.parametrize('mask', MASKS.values(), ids=MASKS)
@pytest.mark.parametrize('tile_n', TILE_N)
@pytest.mark.parametrize('seqlen_q, seqlen_k', [
    (1, 1), (128, 128), (129, 127), (255, 512), (300, 20), (64, 0), (1, 351), (352, 352)])
def test_every_tile_of_a_problem(mask, seqlen_q, seqlen_k, tile_n):
    for begin in range(0, seqlen_q, 128):
        check_tile(mask, begin, begin + 128, seqlen_q, seqlen_k, tile_n)


@given(masks(300), *LENGTHS, st.sampled_from([1, 3, 64]), st.integers(1, 3),
       st.sampled_from(TILE_N), st.integers(0, 2**16))
@examples(300)
def test_the_share_of_a_warpgroup(mask, seqlen_q, seqlen_k, pack, warpgroups, tile_n, pick):
    """A warpgroup visits the K tiles of its tile, and masks those that its own rows do not wholly
    see: with no masking in the others, nothing masked is let through.
    """
    positions = 64 // pack
    begin = pick % seqlen_q // (warpgroups * positions) * warpgroups * positions
    first, _, _, last = mask.of_kernels.block_range(begin, begin + warpgroups * positions,
                                                    seqlen_q, seqlen_k, tile_n)
    visible = mask.visible(seqlen_q, seqlen_k)
    for own in range(begin, min(begin + warpgroups * positions, seqlen_q), positions):
        _, free_first, free_end, _ = mask.of_kernels.block_range(own, own + positions, seqlen_q,
                                                                 seqlen_k, tile_n)
        some, whole = tiles_of_keys(visible[own:own + positions], tile_n, seqlen_k)
        assert not any(some[:max(0, first)]) and not any(some[max(0, last):])
        free = [n for n in range(first, last) if free_first <= n < free_end]
        assert free == [n for n in range(first, last) if whole[n]]


@given(masks(300), *LENGTHS, st.sampled_from([1, 3, 64]), st.integers(2, 3),
       st.sampled_from(TILE_N), st.integers(0, 3), st.integers(0, 2**16))
@examples(400)
def test_what_a_warpgroup_skips(mask, seqlen_q, seqlen_k, pack, warpgroups, tile_n, most,
                                     pick):
    """K tiles that it does not see, as many as allowed; one that it does is always left."""
    positions = 64 // pack
    begin = pick % seqlen_q // (warpgroups * positions) * warpgroups * positions
    tile = mask.of_kernels.block_range(begin, begin + warpgroups * positions, seqlen_q, seqlen_k,
                                       tile_n)
    visible = mask.visible(seqlen_q, seqlen_k)
    for own in range(begin, min(begin + warpgroups * positions, seqlen_q), positions):
        share = mask.of_kernels.block_range(own, own + positions, seqlen_q, seqlen_k, tile_n)
        some, _ = tiles_of_keys(visible[own:own + positions], tile_n, seqlen_k)
        seen = [n for n, is_seen in enumerate(some) if is_seen]
        skipped = (tile[3] - 1 - seen[-1], seen[0] - tile[0]) if seen else (0, 0)
        assert _host.skipped_tiles(tile, share, most) == tuple(min(most, n) for n in skipped)


def test_visits_go_from_the_last_k_tile_to_the_first():
    assert _host.visits((2, 3, 4, 6), (0, 0)) == ([5, 4, 3, 2], [5, 4, 3, 2])
    assert _host.visits((2, 3, 4, 6), (1, 2)) == ([4], [5, 4, 3, 2])


def test_warpgroups_of_a_window_leave_out_as_much_as_each_other():
    """192 queries, 1024 keys before each: of 13 K tiles of 96 keys a warpgroup sees 12."""
    window = _host.IntervalMask(1024, 0, 0)
    tile = window.block_range(1920, 2112, 4096, 4096, 96)
    shares = [window.block_range(own, own + 64, 4096, 4096, 96) for own in (1920, 1984, 2048)]
    assert tile[3] - tile[0] == 13
    assert [_host.skipped_tiles(tile, share, 2) for share in shares] == [(1, 0), (0, 1), (0, 1)]


def test_a_full_tile_of_keys_is_free_and_a_cut_one_is_not():
    assert _host.FullMask().block_range(0, 128, 128, 256, 128) == (0, 0, 2, 2)
    assert _host.FullMask().block_range(0, 128, 128, 257, 128) == (0, 0, 2, 3)


def test_the_diagonal_is_masked():
    assert _host.CausalMask().block_range(0, 128, 256, 256, 128) == (0, 0, 0, 1)
    assert _host.CausalMask().block_range(128, 256, 256, 256, 128) == (0, 0, 1, 2)


def test_both_ends_of_a_window_are_masked():
    """Queries 512 to 639 and 256 keys before each: keys 256 to 639, of which all see 383 to 512."""
    window = _host.IntervalMask(256, 0, 0)
    assert window.block_range(512, 640, 1024, 1024, 128) == (2, 3, 4, 5)
    assert window.block_range(512, 640, 1024, 1024, 64) == (4, 6, 8, 10)


@pytest.mark.parametrize('name', ['CausalMask', 'IntervalMask'])
def test_long_sequences_do_not_overflow(name):
    length, tiles = 2**30, 2**23
    mask = _host.CausalMask() if name == 'CausalMask' else _host.IntervalMask(None, 0, 0)
    assert mask.block_range(length - 128, length, length, length, 128) == (
        0, 0, tiles - 1, tiles)
