"""What the compiler made of every kernel: ptxas' log in build/logs, the SASS of the library.

A kernel that spills in its main loop, or whose wgmma ptxas serialises, is right and slow: nothing
else would show it. Needs no GPU.
"""
from __future__ import annotations

import math
import os
import re
from functools import cache
from pathlib import Path

import pytest

from csrc.plan.generate import FAMILIES, units_of
from csrc.plan.variants import BACKWARD, FORWARD, Variant
from flash_attn3 import _plan
from tests import sass
from tests.cpu.test_smem_budget import registers_of_warpgroups
from tests.host import _host

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / 'flash_attn3' / '_C.abi3.so'

# Bytes that a kernel may spill outside its main loop. More than none needs a measured reason.
SPILLED_BYTES: dict[str, int] = {
    # Once a tile of queries, the warps that load and that read scales, which have 24 registers;
    # promoted, one word of the consumers too. With 96 keys and 56 registers for the producer
    # packed sequences and windows take 1.4 to 1.5 times as long (H200, 2026-11-24).
    'FwdE4m3D256General': 12, 'FwdE4m3D256Softcap': 12,
    'FwdE4m3D256GeneralPromote': 16, 'FwdE4m3D256SoftcapPromote': 16,
    # The same; and two words a K tile: d256 causal as a mask 1049 TFLOP/s, 984 by the causal kernel
    # (32k, H200, 2026-11-28). Four more words since it keeps the largest scores; not timed.
    'FwdE4m3D256Lists': 72,
    # Once a tile, outside the loop over K tiles: addresses of O in shared memory.
    'FwdBf16D256Softcap': 16, 'FwdFp16D256Softcap': 16,
    # Once a tile: addresses of O, and of what the other CTA of a cluster receives. General kernels
    # and those on a cache also load words between masked K tiles.
    **{f'Fwd{dtype}D512{kind}': count for dtype in ('Bf16', 'Fp16') for kind, count in (
        ('Full', 72), ('Causal', 84), ('General', 148), ('Softcap', 64), ('Lists', 72),
        ('Cache', 32), ('CacheSoftcap', 64), ('CacheKv8', 24), ('CacheSoftcapKv8', 24))},
    # Once a tile, the warps that find and that load tiles, which have 48 registers; with e4m3 the
    # output warpgroups too. ptxas serialises the products of O with fewer than 160.
    'FwdBf16D64x512Latent': 160, 'FwdFp16D64x512Latent': 160,
    'FwdBf16D64x512LatentKv8': 160, 'FwdFp16D64x512LatentKv8': 160,
    # One word a K tile; not timed.
    'FwdBf16D256CacheSoftcapKv8': 44, 'FwdFp16D256CacheSoftcapKv8': 44,
    # Where a part or a tile ends; general kernels between masked K tiles too.
    'FwdBf16D64GeneralFolded': 32, 'FwdFp16D64GeneralFolded': 32,
    'FwdBf16D64SoftcapFolded': 48, 'FwdFp16D64SoftcapFolded': 48,
    'FwdBf16D192x128CausalFolded': 24, 'FwdFp16D192x128CausalFolded': 24,
    'FwdBf16D192x128GeneralFolded': 16, 'FwdFp16D192x128GeneralFolded': 16,
    'FwdBf16D192x128SoftcapFolded': 16, 'FwdFp16D192x128SoftcapFolded': 16,
    'FwdBf16D256FullFolded': 72, 'FwdFp16D256FullFolded': 72,
    'FwdBf16D256CausalFolded': 84, 'FwdFp16D256CausalFolded': 84,
    'FwdBf16D256GeneralFolded': 172, 'FwdFp16D256GeneralFolded': 172,
    'FwdBf16D256SoftcapFolded': 172, 'FwdFp16D256SoftcapFolded': 172,
    # Once a tile; tiles of 64 rows of (192, 128) load a word a K tile. 64 x 4k: 312 us, 330 by
    # the tile of one warpgroup; e4m3 149, before 16 rows had a loop of their own and without spills
    # 146; with 8 registers more for consumers 155 (H200, 2026-11-27).
    'FwdBf16D192x128CacheDecode': 12, 'FwdFp16D192x128CacheDecode': 12,
    'FwdFp16D96CacheDecodeKv8': 40, 'FwdFp16D128CacheDecodeKv8': 120,
    # Once a part; 88 and 168 registers for the two producers and the consumers spill 164.
    **{f'Fwd{dtype}D64x512LatentDecodeKv8': 64 for dtype in ('Bf16', 'Fp16')},
    # A step: addresses of dS, and of what the other CTA of the cluster receives.
    **{f'Bwd{dtype}D512{kind}': count for dtype in ('Bf16', 'Fp16') for kind, count in (
        ('Causal', 52), ('General', 76), ('Softcap', 40), ('Lists', 56), ('ListsSoftcap', 48))}}
MOST_SPILLED_BYTES = 172
# What lies between the first and the last product: loaded for each K tile, or with e4m3 latents
# and parts of the keys stored and loaded where a tile or a part ends.
LOADED_IN_LOOPS = {
    'FwdE4m3D256Lists': 6,
    'FwdBf16D192x128CacheDecode': 1, 'FwdFp16D192x128CacheDecode': 1,
    'FwdFp16D128CacheDecodeKv8': 1,
    **{f'Fwd{dtype}D512{kind}': count for dtype in ('Bf16', 'Fp16') for kind, count in (
        ('Causal', 4), ('General', 13), ('Cache', 4), ('CacheSoftcap', 12))},
    'FwdBf16D64x512LatentKv8': 4, 'FwdFp16D64x512LatentKv8': 4,
    'FwdBf16D256CacheSoftcapKv8': 1, 'FwdFp16D256CacheSoftcapKv8': 1,
    'FwdBf16D64GeneralFolded': 8, 'FwdFp16D64GeneralFolded': 8,
    'FwdBf16D64SoftcapFolded': 13, 'FwdFp16D64SoftcapFolded': 13,
    'FwdBf16D256GeneralFolded': 10, 'FwdFp16D256GeneralFolded': 10,
    'FwdBf16D256SoftcapFolded': 10, 'FwdFp16D256SoftcapFolded': 10,
    **{f'Fwd{dtype}D64x512LatentDecodeKv8': 1 for dtype in ('Bf16', 'Fp16')},
    **{f'Bwd{dtype}D512{kind}': count for dtype in ('Bf16', 'Fp16') for kind, count in (
        ('Causal', 21), ('General', 31), ('Softcap', 19), ('Lists', 22), ('ListsSoftcap', 20))},
}

# 64 x N x 16: the scores have the keys of a tile as columns, the output has V's head dim. With
# e4m3 64 x N x 32.
HGMMA = re.compile(r'\bHGMMA\.64x(\d+)x16\.F32(\.BF16)?\b')
QGMMA = re.compile(r'\bQGMMA\.64x(\d+)x32\.F32\.E4M3\.E4M3\b')
LOCAL_MEMORY = re.compile(r'\b(LDL|STL)\b')
PER_VARIANT = pytest.mark.parametrize('variant', FORWARD, ids=lambda variant: variant.name)
PER_BACKWARD = pytest.mark.parametrize('variant', BACKWARD, ids=lambda variant: variant.name)
PER_ANY = pytest.mark.parametrize('variant', FORWARD + BACKWARD, ids=lambda variant: variant.name)
BACKWARD_KERNELS = ('backward', 'backward_preprocess', 'backward_postprocess')
LATENT_KERNELS = ('mla', 'mla_combine')


# Kernels that are no variants: the tables of packed sequences, the gradients of sinks; appending
# rotated keys of both dtypes, keys of both dtypes to a cache of e4m3, and bytes; the same keys with
# scales by page, and by key; combining results, float32 in one tensor, 16 bits also in several,
# with rows of 4 columns at a time, and others; of quantize_fp8 four passes, rotated and not, for
# each dtype; those of the lists of a mask; of gradients of chosen keys three widths of both dtypes.
OTHER_KERNELS = {'prepare_kernel': 1, 'sinks_kernel': 1, 'append_kernel': 6,
                 'append_pages_kernel': 2, 'append_latents_kernel': 2, '14combine_kernel': 10,
                 'quantize_kernelIf': 8, 'quantize_kernelIN7cutlass10bfloat16_t': 8,
                 'quantize_kernelIN7cutlass6half_t': 8, 'mask_rows_kernel': 1,
                 'seen_blocks_kernel': 1, 'key_lists_kernel': 1, 'query_lists_kernel': 1,
                 'list_order_kernel': 1, 'chosen_gradients_kernel': 6, 'chosen_rounding_kernel': 2}


def kernels_of(variant: Variant) -> tuple[str, ...]:
    """The main one first."""
    if variant.folder == 'backward':
        return BACKWARD_KERNELS
    return LATENT_KERNELS if variant.folder == 'mla' else (variant.folder,)


def is_built(variant: Variant) -> bool:
    """Only a build that was told which variants to make may lack one."""
    return 'FLASH_ATTN3_VARIANTS' not in os.environ or facts_of(variant)['built']


def skip_unless_built(variant: Variant) -> None:
    if not is_built(variant):
        pytest.skip(f'{variant.name} not in this build')


def log_of(variant: Variant) -> str:
    skip_unless_built(variant)
    unit = next(name for family in FAMILIES
                for name, variants in units_of(family, family.variants).items()
                if variant.name in [built.name for built in variants])
    path = ROOT / 'build' / 'logs' / f'instances_{unit}.log'
    assert path.exists(), f'{path} does not exist; hint: make build'
    return path.read_text()


def ptxas_lines(variant: Variant, kernel: str = '') -> str:
    """What ptxas says about one kernel: the lines up to the next kernel's."""
    parts = re.split(r'(?=ptxas info\s+: Compiling entry function)', log_of(variant))
    found = [part for part in parts[1:] if mangled(variant, kernel) in part.splitlines()[0]]
    assert len(found) == 1, f'{variant.name} is not in the log of its unit'
    return found[0]


def mangled(variant: Variant, kernel: str = '') -> str:
    return f'{kernel or kernels_of(variant)[0]}_kernelINS_{len(variant.name)}{variant.name}E'


@cache
def library() -> dict[str, list[str]]:
    """The instructions of every kernel in the library, by mangled name."""
    return sass.disassemble(LIBRARY)


def sass_of(variant: Variant, kernel: str = '') -> list[str]:
    skip_unless_built(variant)
    found = [lines for name, lines in library().items() if mangled(variant, kernel) in name]
    assert len(found) == 1, f'{variant.name} is not in {LIBRARY.name}; hint: make build'
    return found[0]


def facts_of(variant: Variant) -> dict:
    return next(facts for facts in _plan.variants() + _plan.backward_variants()
                if facts['name'] == variant.name)


def test_the_library_has_the_listed_kernels_and_no_others():
    found = {other: sum(other in name for name in library()) for other in OTHER_KERNELS}
    assert found == OTHER_KERNELS
    of_variants = sum(len(kernels_of(one)) for one in FORWARD + BACKWARD if is_built(one))
    assert len(library()) == of_variants + sum(found.values())


def test_every_kernel_has_a_name_of_its_own_in_a_fingerprint():
    keys = {sass.key_of(name) for name in library()}
    assert len(keys) == len(library())
    built = list(filter(is_built, FORWARD + BACKWARD))
    assert {f'{kernels_of(one)[0]}_kernel:{one.name}' for one in built} <= keys
    assert sass.kernel_of(sass_of(built[0])).opcodes['EXIT'] > 0


def test_quantisation_keeps_its_columns_in_registers():
    """And loads, keeps and stores 16 bytes at a time."""
    kernels = {name: '\n'.join(code) for name, code in library().items()
               if 'quantize_kernel' in name}
    assert kernels
    for code in kernels.values():
        assert not LOCAL_MEMORY.search(code)
        assert re.search(r'LDG\.E\.128', code)
        assert bool(re.search(r'STS\.128', code)) is bool(re.search(r'LDS\.128', code))
        assert 'STG' not in code or re.search(r'STG\.E\.128', code)


@PER_ANY
def test_spills(variant: Variant):
    allowed = SPILLED_BYTES.get(variant.name, 0)
    assert allowed <= MOST_SPILLED_BYTES
    for kernel in kernels_of(variant):
        numbers = re.findall(r'(\d+) bytes (?:stack frame|spill stores|spill loads)',
                             ptxas_lines(variant, kernel))
        # A kernel on a cache calls two functions, which gather K and V.
        is_gathering = facts_of(variant)['mask'].startswith('cache') and variant.folder != 'decode'
        functions = 3 if is_gathering else 1
        assert len(numbers) == 3 * functions and max(map(int, numbers)) <= allowed


@PER_ANY
def test_ptxas_has_no_complaint(variant: Variant):
    """Serialised wgmma, an ignored setmaxnreg: some fifteen messages, all with these words."""
    for line in log_of(variant).splitlines():
        assert 'Potential Performance Loss' not in line
        assert not line.startswith('ptxas warning')


@PER_ANY
def test_no_local_memory_in_the_main_loop(variant: Variant):
    """A decode kernel has a loop for each width of its products."""
    lines = sass_of(variant)
    loops: dict[str, list[int]] = {}
    for index, line in enumerate(lines):
        if found := re.search(r'GMMA\.64x(\d+)x', line):
            width = found[1] if variant.folder == 'decode' else ''
            loops.setdefault(width, []).append(index)
    found = [line for products in loops.values() for line in lines[products[0]:products[-1] + 1]
             if LOCAL_MEMORY.search(line)]
    assert len(found) == LOADED_IN_LOOPS.get(variant.name, 0)


@pytest.mark.parametrize('variant', [
    one for one in FORWARD if one.folder == 'decode' and 'LatentDecodeKv8' not in one.name],
    ids=lambda variant: variant.name)
def test_whole_rows_are_copied_without_predicates(variant: Variant):
    """A copy with zeros holds its predicate until it has read it, and ptxas may use the same one
    for all. A thread copies 8 rows or more of K and V at a time. Of e4m3 latents it copies 20
    chunks of a K tile, with a predicate each; without any was not tried.
    """
    copies = [line for line in sass_of(variant) if line.startswith('LDGSTS.E.BYPASS')]
    plain = [line for line in copies if not re.search(r', !?P\d', line)]
    assert len(plain) >= 8, f'{len(plain)} of {len(copies)}'


@pytest.mark.parametrize('variant', [one for one in FORWARD if facts_of(one)['late_wait']],
                         ids=lambda variant: variant.name)
def test_the_late_wait(variant: Variant):
    """In a step the wait for PV follows half of the exponentials, and precedes some of them. A
    thread computes tile_n / 2; with a softcap also one for each tanh.
    """
    counts = []
    for line in sass_of(variant):
        if 'WARPGROUP.DEPBAR' in line:
            counts.append(0)
        elif counts and 'MUFU.EX2' in line:
            counts[-1] += 1
    half = facts_of(variant)['tile_n'] // 4
    of_tanh = 2 * half if facts_of(variant)['mask'] == 'softcap' else 0
    assert any(half <= count - of_tanh < 2 * half for count in counts), counts


@PER_VARIANT
def test_hopper_instructions(variant: Variant):
    """TMA loads and stores, registers handed from the producer to the consumers, no plain mma;
    the wait for the launch before, and the word that the next one may begin. On a cache rows are
    gathered, O is stored from registers, and parts are counted. FP8: V is transposed in shared
    memory, and O stored from registers where it is not staged. A decode kernel has no TMA.
    """
    text = '\n'.join(sass_of(variant))
    own = ('UTMASTG',)
    if variant.dtype == 'E4m3':
        store = 'UTMASTG' if facts_of(variant)['output_stages'] else 'STG.E.64'
        own = (store, 'LDSM.16.MT88.4', 'STSM.16.M88.4')
    if facts_of(variant)['mask'] == 'latent':
        own = ('STG.E.128', 'LDGSTS', 'ATOMG', 'LDSM.16.M88.4', 'STSM.16.M88.4')
    if facts_of(variant)['mask'].startswith('cache'):
        own = ('STG.E.128', 'LDGSTS', 'ATOMG', *own[1:])
    loads = ('UTMALDG',)
    if facts_of(variant)['swapped']:
        converts = variant.name.endswith('Kv8') and facts_of(variant)['mask'] != 'latent'
        loads = ('LDGSTS', *converts * ('LDSM.16.M88.4', 'LDSM.16.MT88.4'))
        own = ('ATOMG', 'ATOMS.MAX')
        assert 'UTMA' not in text
    for name in (*loads, *own, 'USETMAXREG.DEALLOC', 'USETMAXREG.TRY_ALLOC', 'SYNCS', 'ACQBULK',
                 'PREEXIT'):
        assert name in text, f'no {name}'
    assert not re.search(r'\bHMMA\b', text)


@PER_VARIANT
def test_wgmma_shapes(variant: Variant):
    """Scores: 64 x tile_n per 16 of the head dim. Output: 64 x head_dim_v per 16 keys, with sums in
    fp32, and of a latent cache, at most 128 columns at a time. A latent cache: scores also per 16
    of head_dim_v. FP8: per 32. A decode kernel: 64 keys, or columns, by the rows of a tile.
    """
    facts, text = facts_of(variant), '\n'.join(sass_of(variant))
    if facts['swapped']:
        has_few = variant.name.endswith('Kv8') or facts['head_dim_v'] > 128
        all_rows = (16,) if 'Latent' in variant.name else (8, 16, 32) if has_few else (
            8, 16, 32, 64)
        assert {(int(rows), bool(bf16)) for rows, bf16 in HGMMA.findall(text)} == {
            (rows, variant.dtype == 'Bf16') for rows in all_rows}
        return
    is_fp8 = variant.dtype == 'E4m3'
    assert bool(QGMMA.search(text)) is is_fp8 and bool(HGMMA.search(text)) is not is_fp8
    assert {bool(bf16) for _, bf16 in HGMMA.findall(text)} <= {variant.dtype == 'Bf16'}
    shapes = [int(shape[0]) for shape in re.findall(r'GMMA\.64x(\d+)x(\d+)', text)]
    is_latent = facts['mask'] == 'latent'
    is_split = facts['promotes'] or is_latent
    of_cta = facts['head_dim_v'] // facts['column_ctas']
    of_output = min(of_cta, 128) if is_split else of_cta
    assert set(shapes) == {facts['tile_n'], of_output}
    step = 32 if is_fp8 else 16
    columns = facts['head_dim'] // facts['column_ctas'] + is_latent * facts['head_dim_v']
    of_scores, of_products = columns // step, facts['tile_n'] // step
    if facts['tile_n'] == of_output:
        assert len(shapes) % math.gcd(of_scores, of_products) == 0
    else:
        assert shapes.count(facts['tile_n']) % of_scores == 0
        assert shapes.count(of_output) % of_products == 0


@PER_VARIANT
def test_registers_after_setmaxnreg(variant: Variant):
    """The kernel deals out what the variant's facts say, out of what it got at its launch: a
    warpgroup that asks for more waits for ever.
    """
    facts = facts_of(variant)
    counts = re.findall(r'USETMAXREG\S*(?: UP\d,)? (0x[0-9a-f]+)', '\n'.join(sass_of(variant)))
    producer, consumer = facts['producer_registers'], facts['consumer_registers']
    converter, output = facts['converter_registers'], facts.get('output_registers', 0)
    dealt_out = {producer, consumer} | {converter, output} - {0}
    assert {int(count, 16) for count in counts} == dealt_out
    at_launch = int(re.search(r'Used (\d+) registers', ptxas_lines(variant))[1])
    consumers = 2 if facts.get('swapped') else facts['consumer_warpgroups']
    dealt = producer + consumers * consumer + converter + 2 * output
    assert dealt * 128 <= at_launch * facts['threads'] <= 65536 // facts['ctas_per_sm']


# --------------------------------------------------------------------------------------- backward
@PER_BACKWARD
def test_instructions_of_the_backward(variant: Variant):
    """TMA both ways, dS transposed on its way to shared memory, the order of launches in each of
    the three kernels. dQ added by bulk copies; in a cluster from registers, four values at a time,
    and dS sent by bulk copies, or S and dP where the CTAs split the columns.
    """
    text = '\n'.join(sass_of(variant))
    splits_columns = facts_of(variant)['column_ctas'] > 1
    assert ('UBLKCP.S.S' if splits_columns else 'STAS') not in text
    by_cluster = {'UBLKRED': False, 'REDG.E.ADD.F32x4': True, 'UCGABAR': True,
                  'STAS' if splits_columns else 'UBLKCP.S.S': True}
    for name in ('UTMALDG', 'UTMASTG', 'UBLKCP.S.G', 'USETMAXREG.DEALLOC', 'USETMAXREG.TRY_ALLOC',
                 'SYNCS', 'STSM.16.MT88.4'):
        assert name in text, f'no {name}'
    is_cluster = facts_of(variant)['cluster_size'] > 1
    assert {name: name in text for name in by_cluster} == {
        name: is_cluster is of_cluster for name, of_cluster in by_cluster.items()}
    assert not re.search(r'\bHMMA\b', text)
    for kernel in BACKWARD_KERNELS:
        text = '\n'.join(sass_of(variant, kernel))
        assert 'ACQBULK' in text and 'PREEXIT' in text


@PER_BACKWARD
def test_products_of_the_backward(variant: Variant):
    """dK and dV have their head dim as columns, or half of it beyond 192 (backward/traits.h); S and
    dP the queries of a step; dQ its share of the head dim. All in the right dtype.
    """
    shapes = HGMMA.findall('\n'.join(sass_of(variant)))
    tile = _host.backward_tiles[variant.shape]
    dims = [tile[name] // facts_of(variant)['column_ctas'] for name in ('head_dim', 'head_dim_v')]
    gradients = {dim // (2 if dim > 192 else 1) for dim in dims}
    assert {int(columns) for columns, _ in shapes} == gradients | {tile['tile_m'],
                                                                   tile['dq'].columns}
    assert {bool(bf16) for _, bf16 in shapes} == {variant.dtype == 'Bf16'}


@PER_BACKWARD
def test_registers_of_the_backward(variant: Variant):
    facts = facts_of(variant)
    counts = re.findall(r'USETMAXREG\S*(?: UP\d,)? (0x[0-9a-f]+)', '\n'.join(sass_of(variant)))
    registers = registers_of_warpgroups(facts)
    assert {int(count, 16) for count in counts} == set(registers)
    at_launch = int(re.search(r'Used (\d+) registers', ptxas_lines(variant))[1])
    assert sum(registers) * 128 <= at_launch * facts['threads'] <= 65536
