"""plan/plan_backward.cpp through flash_attn3._plan: the facts of a plan against arithmetic
written here, for every variant there is.
"""
import heapq
from itertools import product

from hypothesis import given
from hypothesis import strategies as st
import pytest

from csrc.plan.variants import BACKWARD
from flash_attn3 import _plan
from tests.cpu.drawn import examples
from tests.cpu.masks import FULL
from tests.cpu.test_backward_work import each_packed, some_mask, work_of
from tests.cpu.test_plan import call_of_sizes, ceil_div
from tests.host import _host

VARIANTS = _plan.backward_variants()
DTYPES, MASKS = ('float16', 'bfloat16'), ('full', 'causal', 'general', 'softcap')


def plan(seqlen_q=1024, seqlen_k=1024, *, head_dim=64, **others):
    return _plan.plan_backward(**call_of_sizes(seqlen_q, seqlen_k, head_dim=head_dim, **others))


def head_dims(dtype, mask):
    """Head dims of the variants for a mask: one for q and k, one for v."""
    return [(row['head_dim'], row['head_dim_v']) for row in VARIANTS
            if (row['dtype'], row['mask']) == (dtype, mask)]


def least(dtype, mask, head_dim, head_dim_v):
    """(mask, head dims) of the variant that serves a problem and computes least, in three products
    with the columns of q and k and two with those of v: for its mask, or else for any.
    """
    masks = [mask] + ['general'] * (mask in ('full', 'causal'))
    return min((3 * dims[0] + 2 * dims[1], masks.index(of), of, dims) for of in masks
               for dims in head_dims(dtype, of)
               if dims[0] >= head_dim and dims[1] >= head_dim_v)[2:]


def test_the_table_is_the_list():
    assert [row['name'] for row in VARIANTS] == [variant.name for variant in BACKWARD]
    for row, variant in zip(VARIANTS, BACKWARD):
        assert row['dtype'] == {'Fp16': 'float16', 'Bf16': 'bfloat16'}[variant.dtype]
        assert row['mask'] == variant.kind.replace('ListsSoftcap', 'Lists, softcap').lower()
        assert row['causal'] == (variant.kind == 'Causal')
        assert (row['head_dim'], row['head_dim_v']) == variant.head_dims
        tile = _host.backward_tiles[variant.shape]
        for name in ('tile_m', 'head_dim', 'head_dim_v', 'cluster_size', 'consumer_warpgroups'):
            assert row[name] == tile[name]
        assert row['tile_n'] * row['column_ctas'] == tile['tile_n'] * row['cluster_size']


def test_every_dtype_has_the_same_head_dims_and_every_mask_the_same_square_ones():
    for mask in MASKS:
        bf16, fp16 = (head_dims(dtype, mask) for dtype in DTYPES)
        assert bf16 == fp16 and len(set(bf16)) == len(bf16)
        square = [dims for dims in bf16 if dims[0] == dims[1] <= 256]
        assert square == head_dims('bfloat16', 'full')
        assert (256, 256) in bf16
    assert set(head_dims('bfloat16', 'causal')) == set(head_dims('bfloat16', 'general'))


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('mask', MASKS)
def test_the_variant_of_the_next_head_dim(dtype, mask):
    for head_dim, head_dim_v in product([*range(8, 257, 8), 264, 512], repeat=2):
        index = _host.find_backward_variant(dtype == 'bfloat16', MASKS.index(mask), head_dim,
                                            head_dim_v)
        chosen = VARIANTS[index]
        assert chosen['dtype'] == dtype
        assert (chosen['mask'], (chosen['head_dim'], chosen['head_dim_v'])) == least(
            dtype, mask, head_dim, head_dim_v)


@pytest.mark.parametrize('head_dim, head_dim_v, served', [
    (64, 32, '64Full'), (32, 64, '64Full'), (64, 128, '64x128General'), (40, 200, '64x256General'),
    (192, 128, '192x128General'), (128, 192, '192Full'), (96, 64, '96x64General'),
    (72, 88, '96Full'), (64, 96, '64x128General'), (104, 64, '128x64General'),
    (256, 64, '256Full'), (512, 512, '512General'), (264, 64, '512General'),
    (64, 264, '512General')])
def test_head_dims_of_dense_batches(head_dim, head_dim_v, served):
    """A full mask of unequal head dims is a case of the general one."""
    for causal in (False, True):
        facts = plan(head_dim=head_dim, head_dim_v=head_dim_v, causal=causal)
        name = served.replace('Full', 'Causal').replace('General', 'Causal') if causal else served
        assert facts['name'] == f'BwdBf16D{name}'


def test_a_softcap_has_square_variants():
    facts = plan(head_dim=192, head_dim_v=128, softcap=20.)
    assert facts['name'] == 'BwdBf16D192Softcap'


@given(dims=st.sampled_from(head_dims('bfloat16', 'causal')), batch=st.integers(1, 9),
       seqlen_q=st.integers(1, 50000), seqlen_k=st.integers(1, 50000), heads_k=st.integers(1, 9),
       group=st.integers(1, 70), causal=st.booleans(), dtype=st.sampled_from(DTYPES),
       deterministic=st.booleans())
@examples(200)
def test_tiles_grid_and_workspace(dims, batch, seqlen_q, seqlen_k, heads_k, group, causal, dtype,
                                  deterministic):
    facts = plan(seqlen_q, seqlen_k, batch=batch, heads_q=heads_k * group, heads_k=heads_k,
                 head_dim=dims[0], head_dim_v=dims[1], causal=causal, dtype=dtype,
                 deterministic=deterministic)
    assert facts['m_tiles'] == ceil_div(seqlen_q, facts['tile_m'])
    assert facts['n_tiles'] == ceil_div(seqlen_k, facts['tile_n'])
    assert facts['works'] == facts['n_tiles'] * heads_k * batch
    assert facts['grid'] == grid_of(facts)
    assert facts['rows'] == facts['m_tiles'] * facts['tile_m'] * heads_k * group * batch
    assert facts['lse_bytes'] == facts['delta_bytes'] == 4 * facts['rows']
    assert facts['dq_bytes'] == 4 * facts['rows'] * dims[0]
    flags = facts['m_tiles'] * facts['dq_adders'] * heads_k * group * batch + 1    # the ticket
    assert facts['flags_bytes'] == 4 * flags
    # The parts lie behind one another; TMA and 16-byte loads read them.
    assert facts['lse_bytes'] % 16 == 0
    assert 0 <= facts['lse_bytes'] - 4 * seqlen_q * heads_k * group * batch < (
        4 * facts['tile_m'] * heads_k * group * batch)


@given(batch=st.integers(1, 50), seqlen_q=st.integers(1, 20000), seqlen_k=st.integers(1, 20000),
       heads_k=st.integers(1, 40), group=st.integers(1, 8), sm_count=st.integers(1, 200),
       l2_bytes=st.integers(0, 100 << 20), deterministic=st.booleans(),
       dims=st.sampled_from(head_dims('bfloat16', 'causal')))
@examples(200)
def test_causal_sections(batch, seqlen_q, seqlen_k, heads_k, group, sm_count, l2_bytes,
                         deterministic, dims):
    """As many heads as fill 30 % of L2 with Q and dO (2 bytes) and dQ (4), but a tile for most CTAs
    or clusters that run; in the last section 7/4 for each. Deterministic: 2 for each SM in all.
    """
    facts = plan(seqlen_q, seqlen_k, batch=batch, heads_q=heads_k * group, heads_k=heads_k,
                 head_dim=dims[0], head_dim_v=dims[1], causal=True, sm_count=sm_count,
                 l2_bytes=l2_bytes, deterministic=deterministic)
    bytes_of_pair = seqlen_q * group * (facts['head_dim'] * (2 + 4) + facts['head_dim_v'] * 2)
    tiles, running = facts['n_tiles'], sm_count // facts['cluster_size']
    last = -(-2 * sm_count // tiles) if deterministic else -(-7 * running // (4 * tiles))
    least = last if deterministic else running // tiles
    wanted = max(1, l2_bytes * 30 // 100 // bytes_of_pair, least)
    assert facts['section_pairs'] == min(wanted, heads_k * batch)
    assert facts['least_last_pairs'] == last


@pytest.mark.parametrize('seqlen', [1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize('head_dim, heads, group', [(64, 32, 1), (128, 16, 1), (128, 8, 4),
                                                    (256, 8, 1)])
def test_causal_tiles_end_together(head_dim, heads, group, seqlen):
    """Taken in the order of work by whoever is free; a tile costs three steps more than it has."""
    batch = 16384 // seqlen
    facts = plan(seqlen, seqlen, batch=batch, heads_q=heads * group, heads_k=heads,
                 head_dim=head_dim, head_dim_v=head_dim, causal=True, sm_count=132)
    ends = [0] * (132 // facts['cluster_size'])
    pairs, steps = heads * batch, facts['tile_n'] // facts['tile_m']
    in_all = 0
    full = max(0, pairs - facts['least_last_pairs']) // facts['section_pairs']
    for section in [facts['section_pairs']] * full + [pairs - full * facts['section_pairs']]:
        for tile in range(facts['n_tiles']):
            cost = (facts['m_tiles'] - tile * steps) * group + 3
            in_all += cost * section
            for _ in range(section):
                heapq.heapreplace(ends, ends[0] + cost)
    assert in_all / len(ends) > 0.96 * max(ends)


def grid_of(facts, sm_count=132):
    """Where warpgroups split the keys, a CTA goes from one tile to the next; else one for each."""
    size = facts['cluster_size']
    return facts['works'] * size if size > 1 else min(facts['works'], sm_count)


def packed_plan(name, batch, total_q, total_k, heads_q, heads_k, *, mask=FULL, deterministic=False,
                seqlens=None, sm_count=132, l2_bytes=50 << 20):
    """Sequences of equal lengths; seqlens: the longest ones that the caller names."""
    lengths = [[total * i // batch for i in range(batch + 1)] for total in (total_q, total_k)]
    sizes = (batch, *(seqlens or (total_q, total_k)), heads_q, heads_k)
    return work_of(name, sizes, mask, deterministic, (*lengths, None, None, total_q, total_k),
                   sm_count=sm_count, l2_bytes=l2_bytes)[0]


@each_packed
@given(batch=st.integers(1, 40), total_q=st.integers(1, 3000), total_k=st.integers(0, 3000),
       heads_k=st.integers(1, 4), group=st.integers(1, 3), deterministic=st.booleans())
@examples(25)
def test_packed_tiles_and_workspace(name, batch, total_q, total_k, heads_k, group, deterministic):
    """One grid for all lengths that there can be; parts that are copied as a whole lie at multiples
    of 32 bytes.
    """
    mask = some_mask(name)
    heads_q = heads_k * group
    facts = packed_plan(name, batch, total_q, total_k, heads_q, heads_k, mask=mask,
                        deterministic=deterministic)
    entries = batch + 1    # and the rows behind the last sequence
    assert facts['m_tiles'] == _host.most_tiles(total_q, entries, facts['tile_m'])
    assert facts['n_tiles'] == _host.most_tiles(total_k, entries, facts['tile_n'])
    assert facts['works'] == facts['n_tiles'] * heads_k
    assert facts['grid'] == grid_of(facts)
    assert facts['rows'] == facts['m_tiles'] * facts['tile_m'] * heads_q
    assert facts['dq_floats'] == facts['rows'] * facts['head_dim']
    assert facts['flags'] == facts['m_tiles'] * heads_q * facts['dq_adders'] + 1    # the ticket
    least = 8 + facts['n_tiles'] + 2 * facts['m_tiles'] + 8 * entries
    assert least <= facts['table_ints'] <= least + 14
    assert all(facts[part] % 8 == 0 for part in ('rows', 'dq_floats', 'table_ints'))
    assert heads_k % facts['section_heads'] == 0


def test_sections_of_heads():
    """Q, dO and dQ of a head of 4096 queries take 4 MiB: 30 % of L2 have room for 4 of 12."""
    name, causal = 'BwdBf16D128General', (2, -1, 0, 0)
    for l2_bytes, sm_count, heads in ((56 << 20, 32, 4), (56 << 20, 1, 4), (72 << 20, 1, 4),
                                      (0, 1, 1), (0, 65, 4), (1 << 40, 1, 12)):
        facts = packed_plan(name, 2, 8192, 8192, 12, 12, mask=causal, seqlens=(4096, 4096),
                            l2_bytes=l2_bytes, sm_count=sm_count)
        assert facts['section_heads'] == heads
    full = packed_plan(name, 2, 8192, 8192, 12, 12, mask=(2, -1, -1, 0))
    assert full['section_heads'] == 1


@pytest.mark.parametrize('mask, most', [
    ((2, 100, 0, 0), 228), ((2, 100, 30, 0), 258), ((2, 100, 0, 64), 192), ((2, -1, 0, 64), 192),
    ((2, -1, 0, 0), (1 << 30) - 1), ((2, -1, -1, 0), (1 << 30) - 1)], ids=str)
def test_queries_that_a_tile_of_keys_meets(mask, most):
    facts = packed_plan('BwdBf16D128General', 1, 512, 512, 1, 1, mask=mask)
    assert facts['most_queries'] == most


@each_packed
def test_without_keys_there_is_a_workspace_but_no_grid(name):
    """Sinks have gradients all the same."""
    for facts in (packed_plan(name, 3, 200, 0, 4, 2, mask=some_mask(name)),
                  work_of(name, (2, 100, 0, 4, 2), some_mask(name))[0]):
        assert facts['grid'] == 0 and facts['rows'] > 0 and facts['dq_floats'] > 0


@pytest.mark.parametrize('empty', [{'batch': 0}, {'seqlen_q': 0}, {'seqlen_k': 0}, {'heads_q': 0}],
                         ids=str)
def test_nothing_is_launched_for_an_empty_problem(empty):
    facts = plan(**empty, deterministic=True)
    assert facts['name'] == plan()['name']
    assert facts['grid'] == facts['rows'] == facts['dq_bytes'] == facts['flags_bytes'] == 0


@pytest.mark.parametrize('head_dim', [dims[0] for dims in head_dims('bfloat16', 'full')])
def test_the_largest_problem(head_dim):
    """2^29 tiles of 64 queries and of 64 keys, the limit of the checks; sizes in 64 bits."""
    facts = plan(1 << 30, 1 << 30, batch=1, heads_q=32, heads_k=32, head_dim=head_dim)
    assert facts['works'] * facts['tile_n'] == facts['rows']
    assert facts['grid'] == grid_of(facts)
    assert facts['rows'] == 1 << 35
    assert facts['dq_bytes'] == (1 << 37) * head_dim


@pytest.mark.parametrize('change, reason', [
    ({'head_dim': 100}, 'flash_attn_func: expected the head_dim of q to be a multiple of 8 from 8 '
                        'to 512, got 100'),
    ({'dtype': 'float32'}, 'flash_attn_func: expected q.dtype to be float16 or bfloat16, got '
                           'float32'),
    ({'heads_q': 7, 'heads_k': 2}, 'flash_attn_func: expected the heads of q to be a multiple of '
                                   '2, the KV heads, got 7'),
    ({'batch': -1}, 'explain: expected sizes of 0 or more, got -1'),
    ({'sm_count': 0}, 'explain: expected sm_count to be 1 or more, got 0')], ids=str)
def test_no_plan_says_why(change, reason):
    facts = plan(**change)
    assert list(facts) == ['reason']
    assert facts['reason'].startswith(f'flash_attn3.{reason}')
