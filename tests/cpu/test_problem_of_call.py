"""plan/problem_of_call.cpp: what becomes of a call's mask. Whatever is dropped, the visible
pairs stay the same.
"""
from hypothesis import given
from hypothesis import strategies as st
import pytest
import torch

from flash_attn3.cpu.reference import Mask
from tests.cpu.drawn import examples
from tests.cpu.drawn_masks import limits
from tests.host import _host

NONE = (-1, -1, 0)
CHUNKS = st.one_of(st.just(0), st.integers(1, 60))
CALLS = st.booleans(), limits(60), limits(60), CHUNKS


def problem(seqlen_q, seqlen_k, causal=False, limits=NONE, softcap=0.0, max_logits=False,
            packed=None):
    """(kind, mask, longest queries, longest keys)."""
    numbers = dict(zip(('window_left', 'window_right', 'attention_chunk'), limits))
    numbers |= dict(causal=causal, softcap=softcap, return_max_logits=max_logits)
    return _host.problem_of_call(seqlen_q, seqlen_k, numbers, packed)


def assert_same_pairs(kind, mask, expected, seqlen_q, seqlen_k):
    """By the mask of the kernels of this kind, and by the general form that the planner uses."""
    of_kind = {'full': _host.FullMask(), 'causal': _host.CausalMask()}.get(kind, mask)
    hidden = expected.hidden(seqlen_q, seqlen_k, torch.device('cpu'))
    for one in (of_kind, mask):
        for query in range(seqlen_q):
            begin, end = one.keys(query, seqlen_q, seqlen_k)
            assert list(range(begin, end)) == (~hidden[query]).nonzero().flatten().tolist()


@given(st.integers(1, 50), st.integers(0, 50), *CALLS, st.sampled_from([0.0, 30.0]), st.booleans())
@examples(500)
def test_dense_calls_keep_their_pairs(seqlen_q, seqlen_k, causal, left, right, chunk, softcap,
                                      max_logits):
    kind, mask, *lengths = problem(seqlen_q, seqlen_k, causal, (left, right, chunk), softcap,
                                   max_logits)
    assert lengths == [seqlen_q, seqlen_k]
    assert (kind == 'softcap') == (softcap > 0)
    assert kind in ('general', 'softcap') or not max_logits
    assert_same_pairs(kind, mask, Mask(causal, (left, right), chunk), seqlen_q, seqlen_k)


@given(st.integers(1, 30), st.integers(0, 30), *CALLS, st.data())
@examples(300)
def test_packed_calls_keep_their_pairs(total_q, total_k, causal, left, right, chunk, data):
    """For sequences of any lengths, whatever the caller says of the longest."""
    hints = data.draw(st.tuples(st.integers(0, 60), st.integers(0, 60)))
    kind, mask, *longest = problem(*hints, causal, (left, right, chunk),
                                   packed=(3, total_q, total_k))
    assert longest == [min(hint or total, total) for hint, total in zip(hints, (total_q, total_k))]
    seqlen_q = data.draw(st.integers(1, total_q))
    seqlen_k = data.draw(st.integers(0, total_k))
    assert_same_pairs(kind, mask, Mask(causal, (left, right), chunk), seqlen_q, seqlen_k)


@pytest.mark.parametrize('causal, limits, kind', [
    (False, NONE, 'full'),
    (True, NONE, 'causal'),
    (False, (-1, 0, 0), 'causal'),
    (True, (-1, 7, 0), 'causal'),        # causal replaces the right side
    (False, (99, 99, 0), 'full'),        # no query is further than that from a key
    (True, (99, 0, 0), 'causal'),
    (True, (98, 0, 0), 'general'),
    (False, (2**40, 2**40, 0), 'full'),
    (False, (-1, 98, 0), 'general'),
    (False, (-1, -1, 100), 'full'),
    (True, (-1, -1, 100), 'causal'),
    (True, (-1, -1, 2**40), 'causal'),
    (False, (-1, -1, 99), 'general'),
    (False, (0, 0, 0), 'general')])
def test_kind_of_a_dense_call(causal, limits, kind):
    assert problem(100, 100, causal, limits)[0] == kind


def test_scores_that_only_general_kernels_have():
    assert problem(100, 100, softcap=1.0)[0] == 'softcap'
    assert problem(100, 100, max_logits=True)[0] == 'general'
    assert problem(100, 100, causal=True, softcap=1.0)[0] == 'softcap'


def test_a_chunk_hides_keys_from_queries_before_the_first_key():
    """More queries than keys: those before key 0 would see keys behind their own, but no chunk."""
    assert problem(101, 100, limits=(-1, -1, 100))[0] == 'general'
    assert problem(101, 100, causal=True, limits=(-1, -1, 100))[0] == 'causal'


def test_what_the_caller_says_of_packed_lengths_drops_nothing():
    assert problem(10, 10, limits=(10, 10, 0), packed=(1, 100, 100))[0] == 'general'
    assert problem(10, 10, limits=(-1, -1, 10), packed=(1, 100, 100))[0] == 'general'
    assert problem(10, 10, limits=NONE, packed=(1, 100, 100))[0] == 'general'
    assert problem(10, 10, causal=True, packed=(1, 100, 100))[0] == 'general'
