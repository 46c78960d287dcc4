"""core/mask_limits.h against the definition of the mask, key by key."""
import itertools

import pytest

from tests import _host

LENGTHS = (1, 2, 3, 5, 8, 13)


def sees(query, key, seqlen_q, seqlen_k, causal):
    """Causal is aligned bottom-right: the last query sees the last key."""
    return not causal or key - (seqlen_k - 1) <= query - (seqlen_q - 1)


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('seqlen_q, seqlen_k', list(itertools.product(LENGTHS, (0, *LENGTHS))))
def test_a_query_sees_the_keys_below_its_end(seqlen_q, seqlen_k, causal):
    for query in range(seqlen_q):
        visible = [key for key in range(seqlen_k) if sees(query, key, seqlen_q, seqlen_k, causal)]
        end = _host.visible_end(query, seqlen_q, seqlen_k, causal)
        assert visible == list(range(max(0, end)))


def test_the_last_causal_query_sees_everything():
    assert _host.visible_end(99, 100, 7, True) == 7
    assert _host.visible_end(0, 1, 2**30, True) == 2**30


def test_causal_queries_above_the_keys_see_nothing():
    assert _host.visible_end(0, 100, 7, True) <= 0
    assert _host.visible_end(92, 100, 7, True) == 0
    assert _host.visible_end(93, 100, 7, True) == 1
