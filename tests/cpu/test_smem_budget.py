"""Shared memory, registers and threads of every variant against the limits of sm_90."""
import pytest

from flash_attn3 import _plan

VARIANTS = _plan.variants()
each_variant = pytest.mark.parametrize('variant', VARIANTS, ids=[row['name'] for row in VARIANTS])

SHARED_BYTES_PER_CTA = 227 * 1024
REGISTERS_PER_SM = 64 * 1024
WARPGROUP_THREADS = 128
ELEMENT_BYTES = 2


@each_variant
def test_shared_memory_holds_the_rings_and_fits(variant):
    rows = variant['tile_m'] * variant['q_stages'] * variant['columns']
    keys = variant['tile_n'] * variant['stages'] * (variant['columns'] + variant['columns_v'])
    rings = ELEMENT_BYTES * (rows + keys)
    assert rings < variant['shared_bytes'] <= SHARED_BYTES_PER_CTA
    assert variant['shared_bytes'] - rings <= 2048, 'barriers take at most a few hundred bytes'


@each_variant
def test_rings_stay_aligned_for_the_swizzle(variant):
    """The 128-byte swizzle repeats every 1024 bytes: every buffer must be a multiple of them."""
    for rows, columns in ((64, variant['columns']), (variant['tile_n'], variant['columns']),
                          (variant['tile_n'], variant['columns_v'])):
        assert rows % 8 == 0 and rows * columns * ELEMENT_BYTES % 1024 == 0


@each_variant
def test_registers_after_setmaxnreg_fit_in_the_pool(variant):
    producer, consumer = variant['producer_registers'], variant['consumer_registers']
    assert producer % 8 == 0 and consumer % 8 == 0 and 24 <= producer <= consumer <= 256
    pool = WARPGROUP_THREADS * (producer + variant['consumer_warpgroups'] * consumer)
    assert pool <= REGISTERS_PER_SM
    # At launch every thread has the same number of registers, rounded down to a multiple of 8.
    at_launch = REGISTERS_PER_SM // variant['threads'] // 8 * 8
    assert pool <= at_launch * variant['threads'], 'setmaxnreg would wait for ever'


@each_variant
def test_accumulators_leave_registers_for_the_rest(variant):
    """A thread holds tile_n / 2 scores, head_dim_v / 2 outputs and tile_n / 4 registers of P."""
    output = variant['head_dim_v'] // 2
    scores = variant['tile_n'] // 2
    probabilities = variant['tile_n'] // 4 if variant['intra_overlap'] else 0
    assert output + scores + probabilities <= variant['consumer_registers'] - 24


@each_variant
def test_products_and_copies_have_legal_shapes(variant):
    assert variant['tile_n'] % 16 == 0 and variant['tile_n'] <= 256
    for name in ('', '_v'):
        head_dim, columns = variant[f'head_dim{name}'], variant[f'columns{name}']
        assert head_dim % 16 == 0 and columns % 64 == 0 and columns - 64 < head_dim <= columns
    assert variant['tile_m'] == 64 * variant['consumer_warpgroups']
    assert variant['threads'] == WARPGROUP_THREADS * (variant['consumer_warpgroups'] + 1) <= 1024
    assert not variant['ping_pong'] or variant['consumer_warpgroups'] == 2
