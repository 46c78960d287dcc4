"""Shared memory, registers and threads of every variant against the limits of sm_90."""
from itertools import product
from math import prod

import pytest

from flash_attn3 import _plan
from flash_attn3.cpu.quantize import KV_BLOCK

VARIANTS = _plan.variants()
BACKWARD = _plan.backward_variants()
each_variant = pytest.mark.parametrize('variant', VARIANTS, ids=[row['name'] for row in VARIANTS])
each_backward = pytest.mark.parametrize('variant', BACKWARD, ids=[row['name'] for row in BACKWARD])
of_both = pytest.mark.parametrize('variant', VARIANTS + BACKWARD,
                                  ids=[row['name'] for row in VARIANTS + BACKWARD])

SHARED_BYTES_PER_CTA = 227 * 1024
SHARED_BYTES_PER_SM = 228 * 1024    # a CTA takes 1 KiB more than it asks for
REGISTERS_PER_SM = 64 * 1024
WARPGROUP_THREADS = 128
OUTPUT_WARPGROUPS = 2    # in a latent kernel
ELEMENT_BYTES = 2
E4M3 = 'float8_e4m3fn'


def element_bytes(variant):
    """Bytes of an element of q, k and v; O has 16 bits always."""
    return 1 if variant['dtype'] == E4M3 else ELEMENT_BYTES


def slice_columns(variant):
    """What the swizzle permutes: 128 bytes, at FP8 64 for small head dims."""
    return 128 if variant['dtype'] == E4M3 and variant['head_dim'] > 64 else 64


def buffers(variant):
    """Bytes of one buffer of each ring of a forward variant, by its name: a warpgroup's rows of
    Q, or K, or V. O of 16 bits leaves through the buffers of Q, which are as wide as the wider of
    the two. FP8: V lies transposed, in rows of whole slices of keys, and has a second ring, `raw
    V`, in which it lies as it comes; O has slices of 64 columns where it is staged, and may lie in
    fp32 in part. K and V that are converted have second rings, of bytes. Where GEMMs are swapped K
    and V share a ring, of up to 128 columns, and P has a buffer.
    """
    size, keys = element_bytes(variant), variant['tile_n']
    columns, columns_v = variant['columns'], variant['columns_v']
    if variant['swapped']:
        of_stage = min(128, max(columns, columns_v))
        of_kv = 1 if variant['name'].endswith('Kv8') else size
        return {'Q': 64 * columns * size, 'K': keys * of_stage * of_kv, 'P': 64 * keys * size}
    if variant['dtype'] != E4M3:
        wide = {'Q': 64 * max(columns, columns_v) * size, 'K': keys * columns * size,
                'V': keys * columns_v * size}
        return wide | ({'raw K': keys * columns, 'raw V': keys * columns_v}
                       if variant['converter_registers'] else {})
    slice_keys = 64 if 0 < keys % 128 <= 64 else 128
    return {'Q': 64 * columns, 'K': keys * columns,
            'V': variant['head_dim_v'] * -(-keys // slice_keys) * slice_keys,
            'raw V': keys * columns_v,
            'staged O': 64 * 2 * -(-variant['head_dim_v'] // 64) * 64,
            'O in fp32': WARPGROUP_THREADS * 4 * variant['shared_sums']}


def rings(variant):
    """How many buffers each ring has; Q as (stages, warpgroups)."""
    return {'Q': (variant['q_stages'], variant['consumer_warpgroups']), 'K': (variant['stages'],),
            'V': (variant['stages'],), 'raw K': (variant['raw_stages'],),
            'raw V': (variant['raw_stages'],), 'P': (1,),
            'staged O': (variant['output_stages'], variant['consumer_warpgroups']),
            'O in fp32': (variant['consumer_warpgroups'],)}


def bytes_of_rings(variant):
    sizes, counts = buffers(variant), rings(variant)
    return sum(prod(counts[name]) * size for name, size in sizes.items())


def is_latent(variant):
    return variant['mask'] == 'latent'


def holds_sums(variant):
    """Whether O is summed in fp32 beside the products."""
    return variant['promotes'] and variant['intra_overlap']


def output_registers(variant):
    """Registers of a thread for O; for both where it is summed next to the products."""
    of_product = variant['head_dim_v'] // 2
    return of_product + (of_product - variant['shared_sums'] if holds_sums(variant) else 0)


@each_variant
def test_sums_in_shared_memory_come_in_fours(variant):
    assert variant['shared_sums'] % 4 == 0
    assert 0 <= variant['shared_sums'] <= (variant['head_dim_v'] // 2 if holds_sums(variant) else 0)


@each_variant
def test_shared_memory_holds_the_rings_and_fits(variant):
    if is_latent(variant):    # csrc/mla asserts that its struct fits
        values = variant['stages'] * variant['tile_n'] * variant['head_dim_v'] * ELEMENT_BYTES
        assert values < variant['shared_bytes'] <= SHARED_BYTES_PER_CTA
        return
    of_rings = bytes_of_rings(variant)
    assert of_rings < variant['shared_bytes'] <= SHARED_BYTES_PER_CTA
    # Barriers take at most a few hundred bytes; scales of the rows of Q, or of converted keys, 4
    # bytes each.
    of_scales = 4 * 64 * prod(rings(variant)['Q']) if variant['dtype'] == E4M3 else 0
    if variant['converter_registers'] > 0:
        of_scales = 2 * 4 * variant['tile_n'] * variant['raw_stages']
    if variant['swapped']:    # limits, maxima, sums of rows; a sequence a thread; scales of keys
        of_scales = 64 * (20 + 8 * 4) + 28 * 384 + 4 * variant['tile_n'] * variant['stages']
    assert variant['shared_bytes'] - of_rings <= 2048 + of_scales
    assert variant['ctas_per_sm'] * (variant['shared_bytes'] + 1024) <= SHARED_BYTES_PER_SM


@each_variant
def test_rings_stay_aligned_for_the_swizzle(variant):
    """The 128-byte swizzle repeats every 1024 bytes: every buffer must be a multiple of them."""
    assert all(size % 1024 == 0 for size in buffers(variant).values())
    assert variant['tile_n'] % 8 == 0 and variant['head_dim_v'] % 8 == 0


def registers_of_warpgroups(variant):
    """Registers of a thread, for the producer, each of the consumers, who converts, and those that
    compute O of a latent cache; a variant has one number for all consumers, or lists them.
    """
    consumers = [int(number) for number in str(variant['consumer_registers']).split(', ')]
    count = 2 if variant.get('swapped') else variant['consumer_warpgroups']
    if len(consumers) == 1:
        consumers *= count
    assert len(consumers) == count
    converter = variant.get('converter_registers', 0)    # the backward has none
    output = variant.get('output_registers', 0)
    return ([variant['producer_registers'], *consumers] + [converter] * (converter > 0)
            + [output] * (OUTPUT_WARPGROUPS if output else 0))


@of_both
def test_registers_after_setmaxnreg_fit_in_the_pool(variant):
    producer, *consumers = registers_of_warpgroups(variant)
    for registers in (producer, *consumers):
        assert registers % 8 == 0 and 24 <= registers <= 256
    pool = WARPGROUP_THREADS * (producer + sum(consumers))
    ctas = variant.get('ctas_per_sm', 1)    # the backward always has one
    assert ctas * pool <= REGISTERS_PER_SM
    # At launch every thread has the same number of registers, rounded down to a multiple of 8.
    at_launch = REGISTERS_PER_SM // ctas // variant['threads'] // 8 * 8
    assert pool <= at_launch * variant['threads'], 'setmaxnreg would wait for ever'


@each_variant
def test_accumulators_leave_registers_for_the_rest(variant):
    """A thread holds tile_n / 2 scores, its outputs and tile_n / 4 registers of P, or half of them.
    """
    if variant['swapped']:    # S of 64 keys twice, O of 64 columns of each stage, for all rows
        rows = 32 if variant['name'].endswith('Kv8') or variant['head_dim_v'] > 128 else 64
        stages_of_v = -(-variant['head_dim_v'] // 128)
        assert rows // 2 * (2 + stages_of_v) <= variant['consumer_registers'] - 24
        return
    output = output_registers(variant)
    if is_latent(variant):    # O is in other warpgroups, without scores
        assert output // OUTPUT_WARPGROUPS <= variant['output_registers'] - 16
        output = 0
    scores = variant['tile_n'] // 2
    of_p = variant['tile_n'] * element_bytes(variant) // 8
    probabilities = of_p if variant['intra_overlap'] else 0
    assert output + scores + probabilities <= variant['consumer_registers'] - 24


@each_variant
def test_products_and_copies_have_legal_shapes(variant):
    assert variant['tile_n'] % 16 == 0 and variant['tile_n'] <= 256
    for name in ('', '_v'):
        head_dim, columns = variant[f'head_dim{name}'], variant[f'columns{name}']
        width = slice_columns(variant)
        assert head_dim % 16 == 0 and columns % width == 0 and columns - width < head_dim <= columns
    if variant['dtype'] == E4M3:    # its products have steps of 32; a tile has one scale
        assert KV_BLOCK % variant['tile_n'] == 0
        assert variant['tile_n'] % 32 == 0 and variant['head_dim'] % 32 == 0
        assert variant['raw_stages'] >= 1
    assert variant['tile_m'] == 64 * variant['consumer_warpgroups']
    warpgroups = len(registers_of_warpgroups(variant))
    assert variant['threads'] == WARPGROUP_THREADS * warpgroups <= 1024
    assert not variant['ping_pong'] or variant['consumer_warpgroups'] == 2


def keys_of_cta(variant):
    return variant['tile_n'] // variant['cluster_size']


def handed_on(variant):
    """What leaves: dQ in float32, or dV or dK. In a cluster: P and dS of the other CTA, twice each,
    and its K for the larger half of the slices of dQ.
    """
    rows, keys, columns = variant['tile_m'], keys_of_cta(variant), variant['columns']
    if variant['cluster_size'] == 1:
        return max(4 * rows * variant['head_dim'],
                   ELEMENT_BYTES * keys * max(columns, variant['columns_v']))
    other_columns = -(-columns // 64 // 2) * 64
    return ELEMENT_BYTES * keys * (2 * 2 * rows + other_columns)


@each_backward
def test_shared_memory_of_the_backward_holds_its_tiles_and_fits(variant):
    """K (twice where a CTA goes from tile to tile), V, the rings of Q and dO with LSE and delta of
    their rows, dS twice, what is exchanged or leaves, limits of keys under a general mask; barriers
    beside them.
    """
    rows, keys = variant['tile_m'], keys_of_cta(variant)
    is_one = variant['cluster_size'] == 1
    keys_of_k = keys * (2 * variant['head_dim'] if is_one else variant['columns'])
    inputs = ELEMENT_BYTES * (keys_of_k + keys * variant['columns_v'] + rows * sum(
        variant[f'columns{name}'] * variant[f'{ring}_stages']
        for name, ring in (('', 'q'), ('_v', 'dout'))))
    row_values = 4 * rows * (variant['q_stages'] + variant['dout_stages'])
    limits = 8 * keys if variant['mask'] in ('general', 'softcap') else 0
    scores = 2 * ELEMENT_BYTES * rows * keys
    tiles = inputs + scores + handed_on(variant)
    assert tiles + row_values + limits < variant['shared_bytes'] <= SHARED_BYTES_PER_CTA == 232448
    assert variant['shared_bytes'] <= tiles + row_values + limits + 2048


@each_backward
def test_tiles_of_the_backward_stay_aligned_for_the_swizzle(variant):
    for rows, columns in product((variant['tile_m'], keys_of_cta(variant)),
                                 (variant['columns'], variant['columns_v'])):
        assert rows * columns * ELEMENT_BYTES % 1024 == 0
    assert variant['tile_m'] * keys_of_cta(variant) * ELEMENT_BYTES % 1024 == 0


@each_backward
def test_products_of_the_backward_have_legal_shapes(variant):
    """The head dims are the columns of dK and dV, the queries of a step those of S and dP."""
    for name in ('', '_v'):
        head_dim, columns = variant[f'head_dim{name}'], variant[f'columns{name}']
        assert head_dim % 16 == 0 and head_dim <= 256
        assert columns % 64 == 0 and columns - 64 < head_dim <= columns
    assert variant['tile_m'] % 16 == 0 and variant['tile_m'] <= 256
    assert variant['threads'] == WARPGROUP_THREADS * (variant['consumer_warpgroups'] + 1) <= 1024
