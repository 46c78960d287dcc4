"""dispatch/plan_backward.cpp through flash_attn3._plan: the facts of a plan against arithmetic
written here, for every variant there is.
"""
from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from csrc.instances.variants import BACKWARD
from flash_attn3 import _plan
from tests import _host
from tests.cpu.test_plan import ceil_div

VARIANTS = _plan.backward_variants()
DTYPES, MASKS = ('float16', 'bfloat16'), (False, True)


def plan(seqlen_q=1024, seqlen_k=1024, *, batch=2, heads_q=8, heads_k=8, head_dim=64, causal=False,
         dtype='bfloat16', sm_count=132, l2_bytes=50 << 20, head_dim_v=None,
         deterministic=False):
    return _plan.plan_backward(
        dtype=dtype, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads_q,
        heads_k=heads_k, head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v, causal=causal,
        sm_count=sm_count, l2_bytes=l2_bytes, deterministic=deterministic)


def head_dims(dtype, causal):
    return sorted({row['head_dim'] for row in VARIANTS
                   if (row['dtype'], row['causal']) == (dtype, causal)})


def dq_columns(head_dim):
    """Of the accumulator: where the warpgroups of a tile share out the columns, whole slices."""
    return 128 if head_dim == 96 else head_dim


def test_the_table_is_the_list():
    assert [row['name'] for row in VARIANTS] == [variant.name for variant in BACKWARD]
    for row, variant in zip(VARIANTS, BACKWARD):
        assert row['dtype'] == {'Fp16': 'float16', 'Bf16': 'bfloat16'}[variant.dtype]
        assert row['causal'] == (variant.mask == 'Causal')
        assert row['head_dim'] == variant.head_dim
        tile = _host.backward_tiles[variant.tile]
        for name in ('tile_m', 'head_dim', 'cluster_size', 'consumer_warpgroups'):
            assert row[name] == tile[name]
        assert row['tile_n'] == tile['tile_n'] * row['cluster_size']


def test_every_dtype_and_mask_has_the_same_head_dims():
    assert len({tuple(head_dims(dtype, causal)) for dtype in DTYPES for causal in MASKS}) == 1
    problems = {(row['dtype'], row['causal'], row['head_dim']) for row in VARIANTS}
    assert len(problems) == len(VARIANTS)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('causal', MASKS)
def test_the_variant_of_the_next_head_dim(dtype, causal):
    for head_dim in range(8, 257, 8):
        larger = [dim for dim in head_dims(dtype, causal) if dim >= head_dim]
        index = _host.find_backward_variant(dtype == 'bfloat16', causal, head_dim)
        facts = plan(head_dim=head_dim, causal=causal, dtype=dtype)
        chosen = VARIANTS[index]
        assert (chosen['dtype'], chosen['causal'], chosen['head_dim']) == (dtype, causal, larger[0])
        assert chosen.items() <= facts.items()


@given(head_dim=st.sampled_from(head_dims('bfloat16', False)), batch=st.integers(1, 9),
       seqlen_q=st.integers(1, 50000), seqlen_k=st.integers(1, 50000), heads_k=st.integers(1, 9),
       group=st.integers(1, 70), causal=st.booleans(), dtype=st.sampled_from(DTYPES),
       deterministic=st.booleans())
@settings(max_examples=200, deadline=None)
def test_tiles_grid_and_workspace(head_dim, batch, seqlen_q, seqlen_k, heads_k, group, causal,
                                  dtype, deterministic):
    facts = plan(seqlen_q, seqlen_k, batch=batch, heads_q=heads_k * group, heads_k=heads_k,
                 head_dim=head_dim, causal=causal, dtype=dtype, deterministic=deterministic)
    assert facts['m_tiles'] == ceil_div(seqlen_q, facts['tile_m'])
    assert facts['n_tiles'] == ceil_div(seqlen_k, facts['tile_n'])
    assert facts['grid'] == facts['n_tiles'] * heads_k * batch * facts['cluster_size']
    assert facts['rows'] == facts['m_tiles'] * facts['tile_m'] * heads_k * group * batch
    assert facts['lse_bytes'] == facts['delta_bytes'] == 4 * facts['rows']
    assert facts['dq_bytes'] == 4 * facts['rows'] * dq_columns(head_dim)
    flags = facts['m_tiles'] * facts['dq_adders'] * heads_k * group * batch
    assert facts['flags_bytes'] == (4 * (flags + 1) if deterministic else 0)
    # The parts lie behind one another; TMA and 16-byte loads read them.
    assert facts['lse_bytes'] % 16 == 0
    assert 0 <= facts['lse_bytes'] - 4 * seqlen_q * heads_k * group * batch < (
        4 * facts['tile_m'] * heads_k * group * batch)


@given(batch=st.integers(1, 50), seqlen_q=st.integers(1, 20000), seqlen_k=st.integers(1, 20000),
       heads_k=st.integers(1, 40), group=st.integers(1, 8), sm_count=st.integers(1, 200),
       l2_bytes=st.integers(0, 100 << 20),
       head_dim=st.sampled_from(head_dims('bfloat16', True)))
@settings(max_examples=200, deadline=None)
def test_causal_sections(batch, seqlen_q, seqlen_k, heads_k, group, sm_count, l2_bytes, head_dim):
    """Q and dO (2 bytes) and dQ (4) of a section fit into 30 % of L2; a tile for each SM."""
    facts = plan(seqlen_q, seqlen_k, batch=batch, heads_q=heads_k * group, heads_k=heads_k,
                 head_dim=head_dim, causal=True, sm_count=sm_count, l2_bytes=l2_bytes)
    pairs = facts['section_pairs']
    bytes_of_pair = seqlen_q * group * facts['head_dim'] * (2 + 2 + 4)
    fits = bytes_of_pair * pairs <= l2_bytes * 30 // 100
    more_fits = bytes_of_pair * (pairs + 1) <= l2_bytes * 30 // 100
    feeds_all = facts['n_tiles'] * pairs >= sm_count
    fewer_feed_all = facts['n_tiles'] * (pairs - 1) >= sm_count
    assert 1 <= pairs <= heads_k * batch
    assert pairs == heads_k * batch or (feeds_all and not more_fits)
    assert pairs == 1 or fits or not fewer_feed_all


@pytest.mark.parametrize('empty', [{'batch': 0}, {'seqlen_q': 0}, {'seqlen_k': 0}, {'heads_q': 0}],
                         ids=str)
def test_nothing_is_launched_for_an_empty_problem(empty):
    facts = plan(**empty, deterministic=True)
    assert facts['name'] == plan()['name']
    assert facts['grid'] == facts['rows'] == facts['dq_bytes'] == facts['flags_bytes'] == 0


@pytest.mark.parametrize('head_dim', head_dims('bfloat16', False))
def test_the_largest_problem(head_dim):
    """2^29 tiles of 64 queries and of 64 keys, the limit of the checks; sizes in 64 bits."""
    facts = plan(1 << 30, 1 << 30, batch=1, heads_q=32, heads_k=32, head_dim=head_dim)
    assert facts['grid'] * facts['tile_n'] == facts['rows'] * facts['cluster_size']
    assert facts['rows'] == 1 << 35
    assert facts['dq_bytes'] == (1 << 37) * dq_columns(head_dim)


@pytest.mark.parametrize('change, reason', [
    ({'head_dim': 100}, 'bwd: expected q.size(3), the head_dim, to be a multiple of 8 from 8 to '
                        '256, got 100'),
    ({'head_dim_v': 32}, 'bwd: expected v.size(3), the head_dim, to be that of q and k, 64, '
                         'got 32'),
    ({'dtype': 'float32'}, 'bwd: expected q.dtype to be float16 or bfloat16, got float32'),
    ({'heads_q': 7, 'heads_k': 2}, 'bwd: expected the heads of q to be a multiple of the heads '
                                   'of k, 2, got 7'),
    ({'batch': -1}, 'explain: expected sizes of 0 or more, got -1'),
    ({'sm_count': 0}, 'explain: expected sm_count to be 1 or more, got 0')], ids=str)
def test_no_plan_says_why(change, reason):
    facts = plan(**change)
    assert list(facts) == ['reason']
    assert facts['reason'].startswith(f'flash_attn3.{reason}')
