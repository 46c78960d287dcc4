"""Shared memory, registers and threads of every variant against the limits of sm_90."""
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


def bytes_of_buffers(variant):
    """Without barriers, scales, coordinates of tiles."""
    return sum(count * size for name, count, size in variant['shared_memory']
               if name != 'small data')


def is_latent(variant):
    return variant['mask'] == 'latent'


def holds_sums(variant):
    """Whether O is summed in fp32 beside the products."""
    return variant['promotes'] and variant['intra_overlap']


def output_registers(variant):
    """Registers of a thread for O; for both where it is summed next to the products."""
    of_product = variant['head_dim_v'] // variant['column_ctas'] // 2
    return of_product + (of_product - variant['shared_sums'] if holds_sums(variant) else 0)


@each_variant
def test_sums_in_shared_memory_come_in_fours(variant):
    assert variant['shared_sums'] % 4 == 0
    assert 0 <= variant['shared_sums'] <= (variant['head_dim_v'] // 2 if holds_sums(variant) else 0)


@of_both
def test_shared_memory_is_its_list_and_fits(variant):
    """The kernels assert that the buffers of their storage have the sizes in the list."""
    buffers = variant['shared_memory']
    assert sum(count * size for _, count, size in buffers) == variant['shared_bytes']
    assert variant['shared_bytes'] <= SHARED_BYTES_PER_CTA == 232448
    assert variant.get('ctas_per_sm', 1) * (variant['shared_bytes'] + 1024) <= SHARED_BYTES_PER_SM
    assert {'Q', 'small data'} < {name for name, _, _ in buffers}
    assert min(min(count, size) for _, count, size in buffers) > 0


@of_both
def test_small_data_is_small(variant):
    """Barriers take at most a few hundred bytes; scales of the rows of Q, or of converted keys, 4
    bytes each; a decode kernel has limits, maxima and sums of rows and a sequence a thread.
    """
    scales = 0
    if variant['dtype'] == E4M3:
        scales = 4 * 64 * variant['q_stages'] * variant['consumer_warpgroups']
    if variant.get('swapped'):
        rows = 64 * (20 + 8 * 4) + 28 * variant['threads']
        scales = rows + 4 * variant['tile_n'] * variant['stages']
    elif is_latent(variant):    # scales of 4 groups of columns of a key
        scales = 1024 + 16 * variant['tile_n'] * (variant['raw_stages'] > 0)
    elif variant.get('converter_registers'):
        scales = 2 * 4 * variant['tile_n'] * variant['raw_stages']
    if 'cluster_size' in variant:    # LSE, delta and limits of the backward
        scales = (4 * variant['tile_m'] * (variant['q_stages'] + variant['dout_stages'])
                  + 8 * keys_of_cta(variant))
    assert variant['shared_bytes'] - bytes_of_buffers(variant) <= 2048 + scales


@of_both
def test_buffers_stay_aligned_for_the_swizzle(variant):
    """The 128-byte swizzle repeats every 1024 bytes: every buffer must be a multiple of them."""
    assert all(size % 1024 == 0 for _, _, size in variant['shared_memory'])
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
    producers = [variant['producer_registers']] * variant.get('producers', 1)
    return ([*producers, *consumers] + [converter] * (converter > 0)
            + [output] * (OUTPUT_WARPGROUPS if output else 0))


@of_both
def test_registers_after_setmaxnreg_fit_in_the_pool(variant):
    of_warpgroups = registers_of_warpgroups(variant)
    for registers in of_warpgroups:
        assert registers % 8 == 0 and 24 <= registers <= 256
    pool = WARPGROUP_THREADS * sum(of_warpgroups)
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
        columns = variant[f'columns{name}']
        head_dim = variant[f'head_dim{name}'] // variant['column_ctas']    # of a CTA
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
    return variant['tile_n'] * variant['column_ctas'] // variant['cluster_size']


@each_backward
def test_products_of_the_backward_have_legal_shapes(variant):
    """The head dims are the columns of dK and dV, the queries of a step those of S and dP."""
    for name in ('', '_v'):
        head_dim = variant[f'head_dim{name}'] // variant['column_ctas']
        columns = variant[f'columns{name}']
        assert head_dim % 16 == 0 and head_dim <= 256
        assert columns % 64 == 0 and columns - 64 < head_dim <= columns
    assert variant['tile_m'] % 16 == 0 and variant['tile_m'] <= 256
    assert variant['threads'] == WARPGROUP_THREADS * (variant['consumer_warpgroups'] + 1) <= 1024
