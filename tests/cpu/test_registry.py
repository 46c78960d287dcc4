"""The list of variants: Python's list, the C++ table and what a user hears about a missing one."""
from collections import defaultdict

import pytest

from csrc.plan.variants import BACKWARD, FORWARD
from flash_attn3 import _plan
from tests.host import _host
from tests.support.cases import is_folded

NAMES = [variant.name for variant in FORWARD]
# Where a kind has another name.
MASKS = {'CacheSoftcap': 'cache, softcap', 'ListsSoftcap': 'lists, softcap'}


def built(*names):
    return [name in names for name in NAMES]


def missing_text(name, *names):
    return _host.missing_variant_text('fwd', NAMES.index(name), built(*names))


def test_the_table_is_the_list():
    table = _plan.variants()
    assert [row['name'] for row in table] == NAMES
    for row, variant in zip(table, FORWARD):
        assert row['dtype'] == {'Fp16': 'float16', 'Bf16': 'bfloat16',
                                'E4m3': 'float8_e4m3fn'}[variant.dtype]
        assert row['mask'] == MASKS.get(variant.kind, variant.kind.lower())
        dims = row['head_dim'], row['head_dim_v']
        assert str(variant.head_dim) in ('{}x{}'.format(*dims), *map(str, {dims[0]} & {dims[1]}))
        assert isinstance(row['built'], bool)


def test_every_dtype_mask_and_head_dim_is_there():
    """Several rows for one problem are different tiles; the first listed is the fastest."""
    speeds = defaultdict(list)
    tiles, converting, decoding, folding = set(), [], [], set()
    for row in _plan.variants():
        if is_folded(row):
            folding.add((row['dtype'], row['mask'], row['head_dim'], row['head_dim_v']))
            continue
        if row['swapped']:
            decoding.append((row['name'].endswith('Kv8'), row['dtype'], row['head_dim'],
                             row['head_dim_v']))
            continue
        if row['name'].endswith('Kv8'):
            converting.append((row['dtype'], row['mask'], row['head_dim'], row['head_dim_v'],
                               row['promotes']))
            continue
        problem = (row['dtype'], row['mask'], row['head_dim'], row['head_dim_v'],
                   row['promotes'])
        speeds[problem].append(row['relative_speed'])
        tiles.add((*problem, row['tile_m'], row['tile_n']))
    assert folding == {(dtype, mask, *pair) for dtype in ('bfloat16', 'float16')
                       for mask in ('full', 'causal', 'general', 'softcap')
                       for pair in ((64, 64), (128, 128), (192, 128), (256, 256))}
    unequal = [(64, 128), (64, 256), (96, 64), (128, 64), (192, 128)]
    dims = {'full': [(dim, dim) for dim in (*range(32, 257, 16), 512)],
            'general': [(dim, dim) for dim in (64, 96, 128, 192, 256, 512)] + unequal,
            'softcap': [(dim, dim) for dim in (64, 128, 256, 512)],
            'lists': [(dim, dim) for dim in (64, 128, 256, 512)],
            'lists, softcap': [(256, 256)]}
    dims['causal'] = dims['full'] + unequal
    on_cache = {(mask, *pair, False) for mask in ('cache', 'cache, softcap')
                for pair in ((64, 64), (128, 128), (192, 128), (256, 256))}
    wide_on_cache = {(mask, 512, 512, False) for mask in ('cache', 'cache, softcap')}
    of_16_bits = {(dtype, mask, *pair, False) for dtype in ('bfloat16', 'float16')
                  for mask, pairs in dims.items() for pair in pairs}
    latent = 'latent', 64, 512, False
    of_16_bits |= {(dtype, *problem) for dtype in ('bfloat16', 'float16')
                   for problem in (*on_cache, *wide_on_cache, latent)}
    square = {(mask, dim, dim, False) for mask in ('full', 'causal', 'general', 'softcap')
              for dim in (64, 128, 256)}
    promoting = {(mask, dim, dim, True)
                 for mask in ('general', 'softcap') for dim in (64, 128, 256)}
    of_mla = {('causal', 192, 128, False), ('general', 192, 128, False),
              ('general', 192, 128, True), ('lists', 128, 128, False), ('lists', 256, 256, False)}
    assert set(speeds) == of_16_bits | {('float8_e4m3fn', *problem)
                                        for problem in square | promoting | of_mla | on_cache}
    assert set(converting) == {(dtype, *problem) for dtype in ('bfloat16', 'float16')
                               for problem in (*on_cache, *wide_on_cache, latent)}
    decoded = (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)
    assert set(decoding) == {
        *((False, dtype, *pair) for dtype in ('bfloat16', 'float16')
          for pair in (*decoded, (64, 512))), *((True, 'float16', *pair) for pair in decoded),
        *((True, dtype, 64, 512) for dtype in ('bfloat16', 'float16'))}
    found = [*tiles, *converting, *decoding, *folding]
    assert len(found) == len(NAMES) == len(set(NAMES))
    assert all(row[0] == max(row) and min(row) > 0 for row in speeds.values())


def test_missing_variant_names_itself_its_relatives_and_the_way_out():
    text = missing_text('FwdBf16D128Causal',
                        'FwdBf16D64Full', 'FwdBf16D64Causal', 'FwdBf16D128Full')
    assert text == (
        'flash_attn3.fwd: expected the kernel FwdBf16D128Causal in this build, '
        'got a build without it (nearest: FwdBf16D64Causal); '
        'hint: rebuild without FLASH_ATTN3_VARIANTS, '
        'or with FLASH_ATTN3_VARIANTS=FwdBf16D128Causal')


@pytest.mark.parametrize('missing, others, nearest', [
    ('FwdBf16D128Full', ['FwdFp16D128Full', 'FwdBf16D64Full', 'FwdBf16D128Causal'],
     'FwdFp16D128Full'),
    ('FwdBf16D128Full', ['FwdBf16D64Full', 'FwdBf16D256Full'],
     'FwdBf16D64Full, FwdBf16D256Full'),
    ('FwdBf16D64CausalShort', ['FwdBf16D64Causal', 'FwdFp16D64CausalShort'],
     'FwdBf16D64Causal'),
    ('FwdFp16D256Causal', ['FwdFp16D256Full', 'FwdBf16D64Causal'],
     'FwdBf16D64Causal')])
def test_nearest_relatives(missing, others, nearest):
    assert f'(nearest: {nearest})' in missing_text(missing, *others)


def test_a_build_without_kernels():
    assert 'got a build without any kernel;' in missing_text('FwdBf16D64Full')


def test_a_missing_backward():
    names = [variant.name for variant in BACKWARD]
    missing, *others = names
    text = _host.missing_backward_text(0, [False] + [True] * len(others))
    assert text.startswith(f'flash_attn3.bwd: expected the kernel {missing} in this build, got a '
                           'build without it (nearest: Bwd')
    assert text.endswith(f'or with FLASH_ATTN3_VARIANTS={missing}')
    alone = _host.missing_backward_text(0, [False] * len(names))
    assert 'got a build without any kernel;' in alone
