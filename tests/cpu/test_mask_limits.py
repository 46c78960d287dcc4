"""core/mask_limits.h and core/visible_pairs.h against the definition of the mask, key by key."""
from hypothesis import given
from hypothesis import strategies as st
import pytest

from tests.cpu.drawn import examples
from tests.cpu.drawn_masks import Drawn, limits, masks
from tests.host import _host

LONGEST = 2**30
NO_LIMIT = _host.no_limit


def assert_interval(interval, visible):
    """The interval holds the visible ones and no others; an empty one may lie anywhere."""
    begin, end = interval
    found = visible.nonzero().flatten().tolist()
    assert list(range(begin, end)) == found


@given(masks(40), st.integers(1, 50), st.integers(0, 50))
@examples(300)
def test_keys_that_a_query_sees(mask, seqlen_q, seqlen_k):
    visible = mask.visible(seqlen_q, seqlen_k)
    for query in range(seqlen_q):
        assert_interval(mask.of_kernels.keys(query, seqlen_q, seqlen_k), visible[query])


@given(masks(40), st.integers(1, 50), st.integers(1, 50))
@examples(300)
def test_queries_that_see_a_key(mask, seqlen_q, seqlen_k):
    visible = mask.visible(seqlen_q, seqlen_k)
    for key in range(seqlen_k):
        assert_interval(mask.of_kernels.queries(key, seqlen_q, seqlen_k), visible[:, key])


@given(masks(40), st.integers(1, 50), st.integers(1, 50))
@examples(200)
def test_intervals_grow_at_neither_end_when_the_place_goes_down(mask, seqlen_q, seqlen_k):
    """What the ranges of tiles rely on: they look at the first and the last query alone."""
    of_keys = [mask.of_kernels.keys(query, seqlen_q, seqlen_k) for query in range(seqlen_q)]
    of_queries = [mask.of_kernels.queries(key, seqlen_q, seqlen_k) for key in range(seqlen_k)]
    for intervals in (of_keys, of_queries):
        for before, after in zip(intervals, intervals[1:]):
            assert before[0] <= after[0] and before[1] <= after[1]


@given(masks(40), st.integers(1, 50), st.integers(0, 50))
@examples(300)
def test_visible_pairs_are_counted(mask, seqlen_q, seqlen_k):
    right = 0 if mask.kind == 'causal' else mask.right
    general = Drawn('general', mask.left, right, mask.chunk)
    pairs = mask.visible(seqlen_q, seqlen_k).sum().item()
    assert _host.count_visible(seqlen_q, seqlen_k, general.of_kernels) == pairs


# ---------------------------------------------------------------------------------- large numbers
def keys_of(mask, position, seqlen_q, seqlen_k):
    """keys() in Python's integers."""
    own = position + seqlen_k - seqlen_q
    begin, end = 0, seqlen_k
    if mask.left >= 0:
        begin = max(begin, own - mask.left)
    if mask.right >= 0:
        end = min(end, own + mask.right + 1)
    if mask.chunk:
        first = own // mask.chunk * mask.chunk
        begin, end = max(begin, first), min(end, first + mask.chunk)
    return begin, end


def queries_of(mask, key, seqlen_q, seqlen_k):
    own = key + seqlen_q - seqlen_k
    begin, end = 0, seqlen_q
    if mask.right >= 0:
        begin = max(begin, own - mask.right)
    if mask.left >= 0:
        end = min(end, own + mask.left + 1)
    if mask.chunk:
        first = key // mask.chunk * mask.chunk + seqlen_q - seqlen_k
        begin, end = max(begin, first), min(end, first + mask.chunk)
    return begin, end


def assert_same(interval, expected):
    is_empty = expected[0] >= expected[1]
    assert interval[0] >= interval[1] if is_empty else interval == expected


def near_the_ends(most):
    return st.one_of(st.integers(1, most), st.integers(most - 3, most), st.integers(1, 3))


@given(st.builds(Drawn, st.just('general'), limits(NO_LIMIT), limits(NO_LIMIT),
                 st.one_of(st.just(0), near_the_ends(NO_LIMIT))),
       near_the_ends(LONGEST), near_the_ends(LONGEST), st.data())
@examples(500)
def test_huge_lengths_and_limits(mask, seqlen_q, seqlen_k, data):
    """Nothing overflows, whatever the lengths up to 2^30 and the limits that are kept."""
    position = data.draw(st.one_of(st.integers(0, seqlen_q - 1),
                                   st.sampled_from([0, seqlen_q - 1])))
    key = data.draw(st.one_of(st.integers(0, seqlen_k - 1), st.sampled_from([0, seqlen_k - 1])))
    assert_same(mask.of_kernels.keys(position, seqlen_q, seqlen_k),
                keys_of(mask, position, seqlen_q, seqlen_k))
    assert_same(mask.of_kernels.queries(key, seqlen_q, seqlen_k),
                queries_of(mask, key, seqlen_q, seqlen_k))


@given(masks(40), st.integers(1, 50), st.integers(1, 50))
@examples(100)
def test_the_formulas_of_this_file(mask, seqlen_q, seqlen_k):
    right = 0 if mask.kind == 'causal' else mask.right
    general = Drawn('general', mask.left, right, mask.chunk)
    visible = mask.visible(seqlen_q, seqlen_k)
    for query in range(seqlen_q):
        assert_interval(keys_of(general, query, seqlen_q, seqlen_k), visible[query])
    for key in range(seqlen_k):
        assert_interval(queries_of(general, key, seqlen_q, seqlen_k), visible[:, key])


# --------------------------------------------------------------------------------------- by hand
def test_the_last_causal_query_sees_everything():
    assert _host.CausalMask().keys(99, 100, 7) == (0, 7)
    assert _host.CausalMask().keys(0, 1, 2**30) == (0, 2**30)


@pytest.mark.parametrize('query, end', [(0, -92), (92, 0), (93, 1)])
def test_causal_queries_above_the_keys_see_nothing(query, end):
    assert _host.CausalMask().keys(query, 100, 7) == (0, end)


def test_a_window_is_cut_by_the_chunk():
    """Keys 8 to 11 are a chunk; of 9 and its window of 3 keys to the left stay 8 and 9."""
    assert _host.IntervalMask(3, 0, 4).keys(9, 16, 16) == (8, 10)
    assert _host.IntervalMask(3, 0, 4).queries(9, 16, 16) == (9, 12)


def test_a_query_before_the_first_key_is_in_no_chunk():
    assert _host.IntervalMask(None, None, 8).keys(0, 4, 3) == (0, 0)
    assert _host.IntervalMask(None, None, 8).keys(1, 4, 3) == (0, 3)


def test_a_mask_without_limits_counts_every_pair_of_the_longest():
    count = _host.count_visible(LONGEST, LONGEST, _host.IntervalMask(None, None, 0))
    assert count == float(LONGEST) ** 2
    band = _host.count_visible(2**24, 2**24, _host.IntervalMask(1, 1, 0))
    assert band == 3 * 2**24 - 2
