"""backward/work.h, the kernel's own code on the CPU: which keys a CTA has, and its steps over the
queries, under the schedule of dispatch/plan_backward.cpp.

A tile of keys is that of a cluster: its CTAs share it out, and have the same steps.
"""
from collections import Counter
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from csrc.instances.variants import BACKWARD
from flash_attn3 import _plan
from tests import _host
from tests.cpu.test_plan import ceil_div
from tests.cpu.test_query_range import sees

# One dtype: the other one has the same work.
TILE_OF = {variant.name: _host.backward_tiles[variant.tile] for variant in BACKWARD
           if variant.dtype == 'Bf16'}
FACTS = {facts['name']: facts for facts in _plan.backward_variants()}
each_variant = pytest.mark.parametrize('name', TILE_OF)


def work_of(name, sizes, deterministic=False, **changes):
    """(plan, what every CTA does), the CTAs of a cluster one behind the other.

    sizes: (batch, seqlen_q, seqlen_k, heads_q, heads_k).
    """
    facts = FACTS[name]
    device = {'sm_count': 132, 'l2_bytes': 50 << 20} | changes
    plan = _plan.plan_backward(facts['dtype'], *sizes, facts['head_dim'], facts['head_dim'],
                               facts['causal'], **device, deterministic=deterministic)
    assert plan['name'] == name
    keys = ('m_tiles', 'n_tiles', 'section_pairs', 'grid')
    return plan, TILE_OF[name]['work'](sizes, facts['causal'], deterministic,
                                       [plan[key] for key in keys])


def keys_of_cta(plan):
    return plan['tile_n'] // plan['cluster_size']


def clusters_of(plan, ctas):
    """The CTAs of every cluster, in the order of their ranks."""
    size = plan['cluster_size']
    assert len(ctas) == plan['grid'] and len(ctas) % size == 0
    return [ctas[first:first + size] for first in range(0, len(ctas), size)]


sizes = st.tuples(st.integers(1, 4), st.integers(1, 700), st.integers(1, 1500), st.integers(1, 5),
                  st.integers(1, 4)).map(lambda x: (*x[:3], x[3] * x[4], x[4]))


@each_variant
@given(sizes, st.booleans(), st.integers(1, 140), st.integers(0, 1 << 22))
@settings(max_examples=60, deadline=None)
def test_every_tile_of_keys_has_one_cluster(name, sizes, deterministic, sm_count, l2_bytes):
    """Also where causal sections are small: few multiprocessors, little L2."""
    batch, seqlen_q, seqlen_k, heads_q, heads_k = sizes
    plan, ctas = work_of(name, sizes, deterministic, sm_count=sm_count, l2_bytes=l2_bytes)
    tile_m, tile_n = plan['tile_m'], plan['tile_n']
    group = heads_q // heads_k
    tiles = Counter()
    for cluster in clusters_of(plan, ctas):
        (kv_head, heads, entry, tile_begin, queries), steps = cluster[0]
        assert heads == (kv_head * group, (kv_head + 1) * group)
        assert queries == _host.query_range(tile_begin, seqlen_q, seqlen_k, tile_m, tile_n,
                                            plan['causal'])
        assert cluster == [
            ((kv_head, heads, entry, tile_begin + rank * keys_of_cta(plan), queries), steps)
            for rank in range(plan['cluster_size'])]
        tiles[kv_head, entry, tile_begin] += 1
    assert tiles == Counter(product(range(heads_k), range(batch), range(0, seqlen_k, tile_n)))


@each_variant
@given(sizes)
@settings(max_examples=40, deadline=None)
def test_steps_are_the_tiles_of_queries_of_every_head(name, sizes):
    """Once each, masked up to free_begin; the places in the workspaces do not collide."""
    batch, seqlen_q, _, heads_q, _ = sizes
    plan, ctas = work_of(name, sizes)
    rows_of = {}
    for (_, heads, entry, _, (begin, free_begin, end)), steps in ctas:
        assert [(head, m) for head, m, *_ in steps] == list(product(range(*heads),
                                                                    range(begin, end)))
        for head, m, is_masked, place in steps:
            assert is_masked == (m < free_begin)
            assert rows_of.setdefault(place, (entry, head, m)) == (entry, head, m)
    assert len(set(rows_of.values())) == len(rows_of)
    assert all(0 <= place < plan['rows'] // plan['tile_m'] for place in rows_of)
    assert plan['rows'] == ceil_div(seqlen_q, plan['tile_m']) * plan['tile_m'] * heads_q * batch


@each_variant
@pytest.mark.parametrize('seqlen_q, seqlen_k', [(1, 1), (130, 257), (257, 130), (200, 200),
                                                (70, 192)])
def test_every_visible_pair_is_computed_once(name, seqlen_q, seqlen_k):
    """Pairs of a free step all count; those of a masked one where the query sees the key."""
    plan, ctas = work_of(name, (1, seqlen_q, seqlen_k, 2, 1))
    tile_m, causal = plan['tile_m'], plan['causal']
    computed = Counter()
    for (*_, key_begin, _), steps in ctas:
        for head, m, is_masked, _ in steps:
            queries = range(m * tile_m, min((m + 1) * tile_m, seqlen_q))
            computed.update(
                (head, query, key) for query in queries
                for key in range(key_begin, key_begin + keys_of_cta(plan))
                if not is_masked or sees(query, key, seqlen_q, seqlen_k, causal))
    assert computed == Counter(
        (head, query, key) for head, query, key in product(range(2), range(seqlen_q),
                                                           range(seqlen_k))
        if sees(query, key, seqlen_q, seqlen_k, causal))


@each_variant
@pytest.mark.parametrize('sm_count, l2_bytes', [(132, 50 << 20), (32, 0), (32, 16 << 20)])
def test_longest_first_in_a_causal_section(name, sm_count, l2_bytes):
    """CTAs start in the order of their index: within a section no tile comes before a longer one,
    and sections come one after the other.
    """
    sizes = 3, 4096, 4096, 8, 4
    plan, ctas = work_of(name, sizes, sm_count=sm_count, l2_bytes=l2_bytes)
    lengths = [(work[2] * 4 + work[0], len(steps)) for work, steps in ctas]
    if plan['causal']:
        keys = [(pair // plan['section_pairs'], -steps) for pair, steps in lengths]
        assert keys == sorted(keys)
        assert plan['section_pairs'] < 12    # so that there are several
    else:
        assert len({steps for _, steps in lengths}) == 1
