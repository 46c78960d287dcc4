"""backward/work.h, the kernel's own code on the CPU: which keys a CTA has, and its steps over the
queries, under the schedule of plan/plan_backward.cpp. Packed sequences: test_packed_tiles.py.

A tile of keys is that of a cluster: its CTAs share it out, and have the same steps.
"""
import functools
from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st
import pytest
import torch

from csrc.plan.variants import BACKWARD
from flash_attn3 import _plan
from flash_attn3.ops.mask_lists import KEYS, Layout
from tests.cpu.drawn import examples
from tests.cpu.masks import CAUSAL, FULL, GENERAL, mask_of_kind, sees
from tests.cpu.masks import NAMES as MASK_KINDS
from tests.cpu.test_plan import ceil_div
from tests.host import _host
from tests.support.plain_lists import query_lists

# One dtype: the other one has the same work.
TILE_OF = {variant.name: _host.backward_tiles[variant.shape] for variant in BACKWARD
           if variant.dtype == 'Bf16'}
FACTS = {facts['name']: facts for facts in _plan.backward_variants()}
DEVICE = {'sm_count': 132, 'l2_bytes': 50 << 20}
# Variants with a softcap have the work of the general ones: one stands for all.
NAMES = [name for name in TILE_OF if not name.endswith(('Softcap', 'Lists'))]
NAMES += ['BwdBf16D64Softcap']
each_variant = pytest.mark.parametrize('name', NAMES)
# Full and causal ones serve dense batches only.
each_packed = pytest.mark.parametrize('name', [name for name in NAMES
                                               if FACTS[name]['mask'] in ('general', 'softcap')])


def some_mask(name):
    """The first that a variant serves: windows are further down."""
    return {'full': FULL, 'causal': CAUSAL, 'general': GENERAL[4],
            'softcap': (3, *GENERAL[4][1:])}[FACTS[name]['mask']]


def causal_or_full(name):
    """Causal, where a variant serves it."""
    kind = MASK_KINDS[FACTS[name]['mask']]
    return (kind, -1, 0, 0) if kind >= 2 else some_mask(name)


def work_of(name, sizes, mask, deterministic=False, lengths=None, **changes):
    """(plan, rows of the packed tiles of queries, what every CTA does), the CTAs of a cluster one
    behind the other.

    sizes: (batch, seqlen_q, seqlen_k, heads_q, heads_k). lengths: those of a packed batch.
    """
    device = DEVICE | changes
    plan, row_tiles, ctas = TILE_OF[name]['work'](
        sizes, mask, deterministic, lengths, (device['sm_count'], device['l2_bytes']))
    assert (plan['tile_m'], plan['tile_n']) == (FACTS[name]['tile_m'], FACTS[name]['tile_n'])
    return FACTS[name] | plan, row_tiles, ctas


def keys_of_cta(plan):
    return TILE_OF[plan['name']]['tile_n']


def first_key(plan, rank):
    """Of a CTA in the tile of its cluster."""
    return 0 if plan['column_ctas'] > 1 else rank * keys_of_cta(plan)


def clusters_of(plan, ctas):
    """The CTAs of every cluster, in the order of their ranks."""
    size = plan['cluster_size']
    assert len(ctas) == plan['works'] * size
    return [ctas[first:first + size] for first in range(0, len(ctas), size)]


sizes = st.tuples(st.integers(1, 4), st.integers(1, 700), st.integers(1, 1500), st.integers(1, 5),
                  st.integers(1, 4)).map(lambda x: (*x[:3], x[3] * x[4], x[4]))


@each_variant
@given(sizes, st.data(), st.booleans(), st.integers(1, 140), st.integers(0, 1 << 22))
@examples(60)
def test_every_tile_of_keys_has_one_cluster(name, sizes, data, deterministic, sm_count, l2_bytes):
    """Also where causal sections are small: few multiprocessors, little L2."""
    batch, seqlen_q, seqlen_k, heads_q, heads_k = sizes
    mask = data.draw(mask_of_kind(FACTS[name]['mask']))
    plan, _, ctas = work_of(name, sizes, mask, deterministic, sm_count=sm_count, l2_bytes=l2_bytes)
    tile_m, tile_n = plan['tile_m'], plan['tile_n']
    group = heads_q // heads_k
    tiles = Counter()
    for cluster in clusters_of(plan, ctas):
        (kv_head, heads, tile_begin, queries, lengths, (entry, *place)), steps = cluster[0]
        assert heads == (kv_head * group, (kv_head + 1) * group)
        assert lengths == (seqlen_q, seqlen_k)
        assert queries == _host.query_range(tile_begin, seqlen_q, seqlen_k, tile_m, tile_n, mask)
        for rank, (work, other_steps) in enumerate(cluster):
            key_begin = tile_begin + first_key(plan, rank)
            assert work == (kv_head, heads, key_begin, queries, lengths,
                            (entry, 0, 0, key_begin, 0))
            assert other_steps == steps
        tiles[kv_head, entry, tile_begin] += 1
    assert tiles == Counter(product(range(heads_k), range(batch), range(0, seqlen_k, tile_n)))


@each_variant
@given(sizes, st.data(), st.booleans())
@examples(40)
def test_steps_are_the_tiles_of_queries_of_every_head(name, sizes, data, deterministic):
    """Once each, masked at the ends; the places in the workspaces do not collide. Keys that no
    query sees have none. They begin where the keys are, or with the first if dQ is summed in a
    fixed order or onto zeros.
    """
    batch, seqlen_q, _, heads_q, _ = sizes
    plan, _, ctas = work_of(name, sizes, data.draw(mask_of_kind(FACTS[name]['mask'])),
                            deterministic)
    rows_of = {}
    for (_, heads, key_begin, queries, _, (entry, *_)), steps in ctas:
        begin, free_begin, free_end, end = queries
        tiles = list(range(begin, end))
        if tiles and not deterministic and not plan['dq_is_zeroed']:
            own = key_begin // plan['tile_n'] * plan['tile_n'] // plan['tile_m']
            first = max(0, own - begin) % len(tiles)
            tiles = tiles[first:] + tiles[:first]
        assert [(head, m) for head, m, *_ in steps] == list(product(range(*heads), tiles))
        for head, m, is_masked, place, _ in steps:
            assert is_masked == (not free_begin <= m < free_end)
            assert rows_of.setdefault(place, (entry, head, m)) == (entry, head, m)
    assert len(set(rows_of.values())) == len(rows_of)
    assert all(0 <= place < plan['rows'] // plan['tile_m'] for place in rows_of)
    assert plan['rows'] == ceil_div(seqlen_q, plan['tile_m']) * plan['tile_m'] * heads_q * batch


@functools.cache
def visible(seqlen_q, seqlen_k, mask):
    """(seqlen_q, seqlen_k): 1 where the query sees the key."""
    return torch.tensor([[int(sees(query, key, seqlen_q, seqlen_k, mask))
                          for key in range(seqlen_k)] for query in range(seqlen_q)])


@each_variant
@pytest.mark.parametrize('seqlen_q, seqlen_k', [(1, 1), (130, 257), (257, 130), (70, 192)])
def test_every_visible_pair_is_computed_once(name, seqlen_q, seqlen_k):
    """Pairs of a free step all count; those of a masked one where the query sees the key."""
    kind = FACTS[name]['mask']
    for mask in GENERAL if kind == 'general' else [some_mask(name)]:
        plan, _, ctas = work_of(name, (1, seqlen_q, seqlen_k, 2, 1), mask)
        tile_m, pairs = plan['tile_m'], visible(seqlen_q, seqlen_k, mask)
        computed = torch.zeros(2, seqlen_q, seqlen_k, dtype=torch.long)
        for (_, _, key_begin, *_), steps in ctas[::plan['column_ctas']]:
            keys = slice(key_begin, key_begin + keys_of_cta(plan))
            for head, m, is_masked, *_ in steps:
                queries = slice(m * tile_m, (m + 1) * tile_m)
                assert is_masked or keys.stop <= seqlen_k
                computed[head, queries, keys] += pairs[queries, keys] if is_masked else 1
        assert computed.equal(pairs.expand(2, -1, -1))


@each_variant
@pytest.mark.parametrize('sm_count, l2_bytes', [(132, 50 << 20), (32, 0), (32, 16 << 20)])
def test_longest_first_in_a_causal_section(name, sm_count, l2_bytes):
    """CTAs start in the order of their index: within a section no tile comes before a longer one,
    and sections come one after the other.
    """
    sizes = 6, 4096, 4096, 8, 4
    mask = causal_or_full(name)
    plan, _, ctas = work_of(name, sizes, mask, sm_count=sm_count, l2_bytes=l2_bytes)
    lengths = [(work[5][0] * 4 + work[0], len(steps)) for work, steps in ctas]
    assert plan['in_sections'] == (mask != FULL)
    if plan['in_sections']:
        last = max(0, 24 - plan['least_last_pairs']) // plan['section_pairs']
        keys = [(min(last, pair // plan['section_pairs']), -steps) for pair, steps in lengths]
        assert keys == sorted(keys)
        assert plan['section_pairs'] < 24    # so that there are several
    else:
        assert len({steps for _, steps in lengths}) == 1


@pytest.mark.parametrize('mask, in_sections', [
    ((2, 512, 0, 0), False), ((2, 2100, 0, 0), True), ((2, -1, 100, 0), True),
    ((2, -1, 3000, 0), False), ((2, -1, 0, 1024), False)], ids=str)
def test_sections_where_the_first_keys_are_seen_by_more(mask, in_sections):
    """A narrow window or chunks cut off what makes them differ."""
    plan, _, _ = work_of('BwdBf16D128General', (1, 4096, 4096, 2, 2), mask)
    assert plan['in_sections'] == in_sections


# ------------------------------------------------------------------------ lists of an AttentionMask
LISTS = 7    # of kBuiltKinds
LISTED = [name for name in FACTS if name in _host.listed_tiles]


def listed_work(name, sizes, lists, deterministic):
    """(plan, what every CTA does) with these lists of tiles of queries."""
    strides = [0 if size == 1 else stride for size, stride in zip(lists.shape, lists.stride())]
    kind = LISTS, -1, -1, 0
    plan, _, ctas = _host.listed_tiles[name]['work'](
        sizes, kind, deterministic, None, tuple(DEVICE.values()),
        (lists.flatten().tolist(), *strides[:3]))
    return FACTS[name] | plan, ctas


def listed_steps(clusters, lists, heads, rank_offset):
    """(head, tile, whether it needs the mask, predecessors) of these lists, one a head."""
    steps = []
    for head, (count, free, _, _, *entries) in zip(range(*heads), lists):
        for i, (word, rank) in enumerate(zip(entries[:2 * count:2], entries[1::2])):
            steps.append((head, word >> 4, i >= free, rank * clusters + rank_offset))
    return steps


@pytest.mark.parametrize('name', LISTED)
@given(seed=st.integers(0, 999), share=st.sampled_from([0, 0.2, 0.7, 1]),
       seqlens=st.tuples(st.integers(1, 300), st.integers(1, 400)),
       heads=st.tuples(st.integers(1, 3), st.integers(1, 3)), batch=st.integers(1, 3),
       deterministic=st.booleans())
@examples(15)
def test_works_of_lists(name, seed, share, seqlens, heads, batch, deterministic):
    """Every tile of keys with a list belongs to as many clusters as it holds tiles of keys of one,
    each with the steps of the list. In deterministic mode each waits for the clusters of later
    keys, of its own tile too, and these have smaller numbers in the order of work.
    """
    (seqlen_q, seqlen_k), (heads_k, group) = seqlens, heads
    layout, tile_m = Layout(*seqlens), FACTS[name]['tile_m']
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.rand(batch, heads_k * group, ceil_div(seqlen_q, 64), ceil_div(seqlen_k, 64),
                        generator=generator) < share
    lists = query_lists(None, blocks, layout, tile_m)
    plan, ctas = listed_work(name, (batch, *seqlens, heads_k * group, heads_k), lists,
                                deterministic)
    tile_n = FACTS[name]['tile_n']
    clusters = KEYS // tile_n
    keys_of_place = {}
    found, places = Counter(), {}
    for number, cluster in enumerate(clusters_of(plan, ctas)):
        (kv_head, own_heads, first, _, lengths, (entry, *_)), steps = cluster[0]
        assert lengths == seqlens and own_heads == (kv_head * group, (kv_head + 1) * group)
        order = clusters - 1 - first // tile_n % clusters
        wanted = listed_steps(clusters, lists[entry, slice(*own_heads), first // KEYS].tolist(),
                              own_heads, order)
        assert [(*step[:3], step[4]) for step in steps] == wanted
        for rank, (work, other_steps) in enumerate(cluster):
            assert other_steps == steps and work[2] == first + first_key(plan, rank)
        for head, m, _, place, before in steps:
            assert places.setdefault(place, (entry, head, m)) == (entry, head, m)
            keys_of_place.setdefault(place, []).append((number, before, first))
        found[kv_head, entry, first] += 1
    assert found == Counter(product(range(heads_k), range(batch),
                                    range(0, ceil_div(seqlen_k, KEYS) * KEYS, tile_n)))
    assert len(set(places.values())) == len(places)
    for visits in keys_of_place.values() if deterministic else ():
        visits.sort()
        assert [before for _, before, _ in visits] == list(range(len(visits)))
        assert [-first for *_, first in visits] == sorted(-first for *_, first in visits)
