"""flash_attn_with_kvcache: upstream's grid, page sizes, features, layouts, append, rotary, packed
queries; poison around all of it. Held to the oracle of tests/support/cache_oracle.py.
"""
from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from flash_attn3 import (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache,
                         pack_tree_mask)

from tests.support import compare
from tests.support.cache_cases import LAYOUTS, CacheCase, as_bits, call, copied, mixed
from tests.support.cache_oracle import (check, check_cache, check_case, check_result, check_same,
                                        expected, packed, run)
from tests.support.general_cases import SINKS
from tests.support.lists import ints, starts

# ------------------------------------------------------------------------------- upstream's grid
SHAPES = [(1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000),
          (128, 128), (256, 512), (2048, 3577)]
GRID, GRID_SEED, SMOKE = 400, 1, 33


def drawn_mask(pick: random.Random, keys: int) -> dict:
    kind = pick.choice(('full', 'causal', 'local', 'chunk'))
    window = (pick.randrange(keys), pick.randrange(keys)) if kind == 'local' else (-1, -1)
    return {'causal': kind in ('causal', 'chunk') and pick.random() < 0.7 or kind == 'causal',
            'window': window, 'chunk': pick.randint(1, 2 * keys) if kind == 'chunk' else 0}


def drawn_append(pick: random.Random, rows: list[int], is_packed: bool, dtype: str) -> dict:
    """As many new tokens as queries, or fewer."""
    new = rows if pick.random() < 0.5 else [pick.randint(1, max(1, n)) for n in rows]
    given = {'new': tuple(new) if is_packed else (new[0],) * len(rows), 'new_packed': is_packed}
    if dtype == 'e4m3':    # rotating e4m3 is an error
        return given
    return given | {'rotary': pick.choice((0.0, 0.5, 1.0)), 'interleaved': pick.random() < 0.5,
                    'own_positions': pick.random() < 0.2}


def grid_case(number: int) -> CacheCase:
    """Each shape in turn, the other axes at random."""
    pick = random.Random(f'{GRID_SEED}/{number}')
    queries, capacity = SHAPES[number % len(SHAPES)]
    batch = 5 if queries * capacity < 10 ** 6 and capacity < 10 ** 4 else 2
    dtype = pick.choice(('bf16', 'bf16', 'fp16', 'e4m3'))
    is_packed, page_size = pick.random() < 0.5, pick.choice((0, 1, 4, 128))
    rows = [pick.randint(1, queries) if is_packed else queries for _ in range(batch)]
    own = drawn_append(pick, rows, is_packed, dtype) if pick.random() < 0.6 else {}
    new = own.get('new', (0,) * batch)
    used = [pick.randint(0 if own else 1, capacity - more) for more in new]
    if pick.random() < 0.3:
        own['leftpad'] = tuple(pick.randint(0, count) for count in used)
    mask = drawn_mask(pick, capacity)
    if mask['chunk'] and not mask['causal']:
        own.pop('rotary', None)
    return CacheCase(
        tuple(zip(rows, used)), capacity, page_size, dtype=dtype, is_packed=is_packed,
        heads=pick.choice(((6, 6), (6, 1), (6, 2), (6, 3))),
        batch_idx=not page_size and pick.random() < 0.5, num_splits=pick.choice((0, 0, 1)),
        metadata=pick.random() < 0.3, kv8=dtype != 'e4m3' and pick.random() < 0.3, **own, **mask)


@pytest.mark.parametrize('number', [pytest.param(number, marks=[pytest.mark.smoke] * (
    number < SMOKE)) for number in range(GRID)])
def test_grid(number, device):
    """Upstream's axes."""
    check_case(grid_case(number), device)


# ------------------------------------------------------------------------------ pages and layouts
PAGE_SIZES = (0, 1, 4, 7, 16, 48, 64, 128, 256, 272)
DECODE = CacheCase(mixed(7, 700), heads=(8, 2))
TALL = CacheCase(((5, 300), (5, 4), (5, 650)), heads=(4, 2), causal=True)
KINDS = [('bf16', 64, 64), ('fp16', 128, 128), ('bf16', 192, 192), ('bf16', 192, 128),
         ('bf16', 64, 512), ('fp16', 40, 304),    # values by two launches
         ('fp16', 256, 256), ('bf16', 96, 96), ('fp16', 40, 40), ('e4m3', 64, 64),
         ('e4m3', 128, 128), ('e4m3', 256, 256), ('e4m3', 192, 128),
         ('bf16_kv8', 64, 64), ('fp16_kv8', 64, 64), ('bf16_kv8', 128, 128),
         ('fp16_kv8', 128, 128), ('bf16_kv8', 192, 128), ('fp16_kv8', 256, 256),
         ('bf16_kv8', 96, 96),
         ('bf16', 512, 512), ('fp16', 320, 392),
         ('bf16_kv8', 512, 512), ('fp16_kv8', 272, 272)]    # a cache of e4m3 under these queries
every_page_size = pytest.mark.parametrize('page_size', PAGE_SIZES)
every_kind = pytest.mark.parametrize('numbers', KINDS, ids=lambda x: f'{x[0]}-{x[1]}x{x[2]}')


def of(case: CacheCase, numbers: tuple[str, int, int], **changes) -> CacheCase:
    dtype, head_dim, head_dim_v = numbers
    return dataclasses.replace(case, dtype=dtype.removesuffix('_kv8'), head_dim=head_dim,
                               head_dim_v=head_dim_v, kv8=dtype.endswith('_kv8'), **changes)


@pytest.mark.smoke
@every_page_size
@every_kind
def test_page_sizes(numbers, page_size, device):
    """Equal to a dense cache, with page borders inside a K tile, e4m3 too; behind the need the
    page ids are -1 and 2**30, where following one faults, also one read ahead.
    """
    check_case(of(DECODE, numbers, page_size=page_size), device)


@every_page_size
@pytest.mark.parametrize('window', [(100, 0), (7, 3), (-1, 20)], ids=str)
def test_windows_over_pages(window, page_size, device):
    """Pages of more than one token together with a window that begins inside a page."""
    check_case(dataclasses.replace(TALL, causal=False, page_size=page_size, window=window), device)


@every_page_size
@pytest.mark.parametrize('dtype', ['bf16', 'e4m3', 'bf16_kv8', 'fp16_kv8'])
def test_page_sizes_with_append(page_size, dtype, device):
    """New tokens across page borders; the tail of the last page keeps its bits."""
    check_case(of(TALL, (dtype, 128, 128), new=(9,) * 3, page_size=page_size), device)


@pytest.mark.parametrize('descales', [True, False])
@pytest.mark.parametrize('rotary,interleaved', [(0.0, True), (0.5, True), (1.0, False)])
@pytest.mark.parametrize('dtype', ['bf16_kv8', 'fp16_kv8'])
def test_new_keys_are_quantised(dtype, rotary, interleaved, descales, device):
    """Rotated first; values beyond 448 times the scale become that."""
    case = of(TALL, (dtype, 128, 128), new=(9,) * 3, rotary=rotary, interleaved=interleaved,
              descales=descales)
    arguments = case.arguments(device)
    arguments['v'][:, 1, :, 3] = 1e4
    got, after = run(case, arguments)
    check_cache(case, arguments, after)
    check_result(case, after, got)


@pytest.mark.parametrize('dtype', ['bf16_kv8', 'fp16_kv8'])
@pytest.mark.parametrize('changes', [
    dict(window=(100, 0)), dict(causal=True, softcap=5.0), dict(chunk=50, causal=True),
    dict(causal=True, sinks=next(iter(SINKS))), dict(leftpad=(7, 4, 300)), dict(num_splits=3),
    dict(split_size=128), dict(is_packed=True), dict(out=True)], ids=str)
def test_features_on_a_cache_of_fp8(dtype, changes, device):
    check_case(of(TALL, (dtype, 128, 128), page_size=16, **changes), device)


TREE = CacheCase(((5, 300), (5, 5), (5, 650)), heads=(4, 2), tree=True)
BUSHY = dataclasses.replace(TREE, lengths=((64, 300), (64, 64), (64, 650)))    # two warpgroups


@pytest.mark.smoke
@pytest.mark.parametrize('dtype', ['bf16', 'fp16', 'e4m3', 'bf16_kv8'])
@pytest.mark.parametrize('head_dims', [(64, 64), (128, 128), (192, 128), (256, 256), (512,) * 2])
@pytest.mark.parametrize('page_size', [0, 16])
@pytest.mark.parametrize('tree', [TREE, BUSHY], ids=['small', 'bushy'])
def test_trees(tree, page_size, head_dims, dtype, device):
    """Bits at random; a sequence of no other keys than those of its tree."""
    head_dims = (256, 256) if dtype == 'e4m3' and head_dims[0] > 256 else head_dims
    check_case(of(tree, (dtype, *head_dims), page_size=page_size), device)


@pytest.mark.parametrize('changes', [
    dict(causal=True), dict(window=(100, -1)), dict(window=(3, 1)), dict(softcap=5.0),
    dict(num_splits=3), dict(split_size=128), dict(leftpad=(7, 0, 300)), dict(pack_gqa=False),
    dict(heads=(6, 1)), dict(new=(5, 5, 5), page_size=7, rotary=0.5, causal=True),
    dict(lengths=((128, 300), (128, 128), (128, 193))), dict(lengths=((77, 300), (77, 130))),
    dict(lengths=((70, 300), (1, 4), (0, 9), (128, 1000), (13, 20)), is_packed=True),
    dict(lengths=((9, 5), (9, 0), (9, 100)))], ids=str)
def test_trees_with(changes, device):
    """Other masks hold too. Trees across borders of K tiles and warpgroups; fewer keys than
    queries.
    """
    check_case(dataclasses.replace(TREE, **changes), device)


@pytest.mark.parametrize('changes', [
    dict(causal=True), dict(window=(100, -1)), dict(window=(3, 1)), dict(num_splits=3),
    dict(leftpad=(7, 0, 300)), dict(pack_gqa=False), dict(heads=(6, 1)), dict(heads=(32, 8)),
    dict(new=(64, 64, 64), page_size=7, rotary=0.5, causal=True),
    dict(lengths=((128, 1000), (128, 260), (128, 100))),
    dict(lengths=((33, 290), (64, 70), (0, 9), (128, 1000), (1, 20)), is_packed=True)], ids=str)
def test_bushy_trees_with(changes, device):
    """A warpgroup may lack rows, or see none of the keys of a K tile."""
    check_case(dataclasses.replace(BUSHY, **changes), device)


def test_a_causal_tree_is_causal(device):
    """Bit for bit."""
    case = dataclasses.replace(TREE, tree=False, lengths=((64, 700), (64, 64)), causal=True)
    arguments = case.arguments(device)
    tree = pack_tree_mask(torch.ones(2, 64, 64, dtype=torch.bool, device=device).tril())
    check_same(run(case, arguments | dict(causal=False, tree_mask=tree))[0],
               run(case, arguments)[0])


def test_nan_in_a_cache_of_fp8(device):
    """A NaN that a query sees reaches out."""
    case = of(DECODE, ('bf16_kv8', 128, 128))
    arguments = case.arguments(device)
    as_bits(arguments['v_cache'])[0, 5, 0, 3] = 0x7f
    out = run(case, arguments)[0].out
    assert out[0, 0, :4, 3].isnan().all() and not out[0, 0, 4:].isnan().any()


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('page_size', [0, 16])
@pytest.mark.parametrize('layout', LAYOUTS[1:])
def test_layouts(layout, page_size, numbers, device):
    """K and V interleaved in the last dimension, heads before slots, gaps between all: strided
    views, which the cache must not be copied for: an append goes into them.
    """
    case = of(TALL, numbers, page_size=page_size, layout=layout, new=(5,) * 3)
    check_case(case, device)


@pytest.mark.parametrize('page_size', [0, 1, 64])
def test_pages_that_sequences_share(page_size, device):
    """A common prefix, stored once; or the same row of a dense cache read by all sequences."""
    case = CacheCase(((3, 400),) * 3, page_size=page_size, causal=True, batch_idx=not page_size)
    arguments = case.arguments(device)
    name = 'page_table' if page_size else 'cache_batch_idx'
    table = arguments[name]
    table[1:] = table[0]
    arguments['q'][1:] = arguments['q'][0]
    got = call(case, arguments)
    for b in (1, 2):
        compare.check_equal(got.out[b], got.out[0], 'out')
    check_result_of(case, arguments, got)


def check_result_of(case: CacheCase, arguments: dict, got) -> None:
    want = expected(case, arguments)
    compare.check_close(packed(case, got).out, want.ref.out, want.pt.out, 'out')


# ------------------------------------------------------------------------------- heads and scores
@pytest.mark.smoke
@pytest.mark.parametrize('page_size', [0, 16])
@pytest.mark.parametrize('dtype', ['bf16', 'e4m3'])
@pytest.mark.parametrize('heads', [(4, 4), (6, 2), (8, 2), (14, 2), (16, 2), (32, 2), (128, 1)],
                         ids=str)
def test_groups(heads, dtype, page_size, device):
    """1, 3, 4, 7, 8, 16 and 128 query heads of a KV head, in the rows of a tile."""
    for queries in (1, 3):
        check_case(CacheCase(mixed(4, 300, queries), heads=heads, dtype=dtype,
                             page_size=page_size, causal=queries > 1), device)


@pytest.mark.parametrize('pack_gqa', [None, True, False])
@pytest.mark.parametrize('queries', [1, 2, 5, 64, 65, 200])
def test_packing(queries, pack_gqa, device):
    """Rows of a tile that are no query, for all ways to fill it."""
    check_case(CacheCase(mixed(3, 500, queries), heads=(6, 2), pack_gqa=pack_gqa, causal=True),
               device)


FEATURES = {
    'window': {'window': (70, 40)}, 'left': {'window': (100, -1)}, 'diagonal': {'window': (0, 0)},
    'causal_window': {'causal': True, 'window': (64, 0)}, 'chunk': {'chunk': 100},
    'causal_chunk': {'causal': True, 'chunk': 64}, 'softcap': {'softcap': 15.0},
    'sinks': {'sinks': 'fp32'}, 'huge_sinks': {'sinks': 'huge'}, 'no_sinks': {'sinks': '-inf'},
    'scale': {'softmax_scale': 0.3}, 'sharp': {'logit_std': 6.0}, 'onehot': {'data': 'onehot'},
    'all': {'causal': True, 'window': (150, -1), 'chunk': 180, 'softcap': 15.0, 'sinks': 'bf16'},
}
every_feature = pytest.mark.parametrize('features', FEATURES.values(), ids=FEATURES)


@pytest.mark.smoke
@every_feature
@pytest.mark.parametrize('page_size', [0, 16])
@pytest.mark.parametrize('dtype', ['bf16', 'e4m3'])
@pytest.mark.parametrize('num_splits', [1, 4])
def test_features(num_splits, dtype, page_size, features, device):
    """Windows and chunks from the first valid key, behind a leftpad; a sink once, also with
    splits.
    """
    case = CacheCase(((3, 500), (3, 77), (3, 2)), heads=(6, 2), leftpad=(30, 76, 0), dtype=dtype,
                     page_size=page_size, num_splits=num_splits, **features)
    check_case(case, device)


@every_feature
@every_kind
def test_features_of_every_head_dim(numbers, features, device):
    check_case(of(TALL, numbers, page_size=64, **{'causal': False, **features}), device)


@pytest.mark.parametrize('sinks', SINKS)
@pytest.mark.parametrize('num_splits', [1, 2, 16])
def test_a_sink_enters_once(num_splits, sinks, device):
    """And a sequence without a key has the sink alone: out 0, LSE the sink."""
    check_case(CacheCase(((1, 900), (1, 0), (1, 40)), sinks=sinks, num_splits=num_splits), device)


def test_scores_far_below_zero(device):
    """Scores of about -1e5 still normalise: a finite stand-in for minus infinity would show."""
    case = CacheCase(((1, 300), (1, 64)), softmax_scale=1.0)
    arguments = case.arguments(device)
    arguments['q'].fill_(30.0)
    k = arguments['k_cache']
    k.copy_(torch.where(k.isnan(), k, torch.full_like(k, -25.0)))
    got = call(case, arguments)
    assert got.lse.isfinite().all() and (got.lse < -9e4).all()
    check_result_of(case, arguments, got)


# --------------------------------------------------------------------- lengths, none and too many
@pytest.mark.smoke
@pytest.mark.parametrize('page_size', [0, 1, 64])
@pytest.mark.parametrize('num_splits', [0, 1, 5])
@pytest.mark.parametrize('dtype', ['bf16', 'e4m3'])
def test_empty_sequences(dtype, num_splits, page_size, device):
    """No keys at all, and none of some sequences: out is 0 and the LSE -inf, never NaN; a split
    without keys counts for nothing when parts are combined.
    """
    for lengths in (((2, 0),) * 3, ((2, 0), (2, 300), (2, 0), (2, 1))):
        check_case(CacheCase(lengths, 320, page_size, dtype=dtype, num_splits=num_splits,
                             causal=True), device)


@pytest.mark.smoke
@pytest.mark.parametrize('page_size', [0, 16])
def test_no_batch_and_no_queries(page_size, device):
    check_case(CacheCase((), 64, page_size), device)
    check_case(CacheCase(((0, 30), (0, 50)), page_size=page_size), device)
    check_case(CacheCase(((0, 30), (0, 50)), page_size=page_size, is_packed=True), device)
    check_case(CacheCase(((0, 30), (4, 50), (0, 0)), page_size=page_size, is_packed=True), device)


@pytest.mark.parametrize('page_size', [0, 64])
@pytest.mark.parametrize('length_as', ['int', 'none'])
def test_lengths_as_a_number_and_by_default(length_as, page_size, device):
    used = 320 if length_as == 'none' else 200
    check_case(CacheCase(((2, used),) * 3, 320, page_size, length_as=length_as, causal=True),
               device)


@pytest.mark.parametrize('page_size', [0, 4])
def test_a_number_for_the_length_of_an_append(page_size, device):
    check_case(CacheCase(((2, 197),) * 3, 320, page_size, length_as='int', new=(7,) * 3,
                         rotary=1.0, causal=True), device)


@pytest.mark.parametrize('pads', [(0, 63, 64), (200, 1, 65)], ids=str)
@pytest.mark.parametrize('page_size', [0, 1, 48])
@pytest.mark.parametrize('mask', [{}, {'causal': True}, {'window': (40, 0)}, {'chunk': 50}],
                         ids=str)
def test_leftpad(mask, page_size, pads, device):
    """What lies before the first valid key is NaN; masks count from that key on, and a pad as
    long as the sequence leaves no key.
    """
    check_case(CacheCase(tuple(zip((4, 4, 4), (200, 330, 129))), page_size=page_size, leftpad=pads,
                         **mask), device)


@pytest.mark.parametrize('page_size', [0, 16])
def test_lengths_beyond_the_capacity_are_clamped(page_size, cuda):
    """The host cannot see them; nothing beyond the cache is read or written, and the results are
    those of a full cache.
    """
    case = CacheCase(((2, 320),) * 3, 320, page_size, causal=True)
    arguments = case.arguments(cuda)
    wanted = call(case, arguments)
    for beyond in (321, 10 ** 6, 2 ** 31 - 1):
        arguments['cache_seqlens'] = ints([beyond] * 3, cuda)
        check_same(call(case, arguments), wanted)
    for name in 'kv':
        arguments[name] = torch.ones_like(arguments[f'{name}_cache'][:1, :1]).expand(
            3, 4, -1, -1).contiguous()
    before = copied(arguments)
    call(case, arguments)
    for name in ('k_cache', 'v_cache'):
        assert torch.equal(as_bits(arguments[name]), as_bits(before[name]))


def test_an_append_that_fits_in_part(cuda):
    """The rows that fit are written and attended to, no other slot changes."""
    case = CacheCase(((2, 310),) * 2, 320, causal=True, new=(10, 10))
    arguments = case.arguments(cuda)
    wanted, after = run(case, arguments)
    longer = copied(arguments)
    for name in 'kv':
        longer[name] = torch.nn.functional.pad(arguments[name], (0, 0, 0, 0, 0, 5), value=3.0)
    check_same(call(case, longer), wanted)
    for name in ('k_cache', 'v_cache'):
        assert torch.equal(as_bits(longer[name]), as_bits(after[name]))


# ------------------------------------------------------------------------------- append and rotary
@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('page_size', [0, 1, 7, 64])
def test_append(page_size, numbers, device):
    """One token, and many that begin and end inside pages."""
    for new in (1, 70):
        case = of(CacheCase(((new, 0), (new, 63), (new, 300))), numbers, page_size=page_size,
                  new=(new,) * 3, causal=True)
        check_case(case, device)


@pytest.mark.smoke
@pytest.mark.parametrize('dtype', ['bf16', 'fp16'])
@pytest.mark.parametrize('page_size', [0, 16])
@pytest.mark.parametrize('interleaved', [True, False])
@pytest.mark.parametrize('share', [0.25, 0.5, 1.0])
@pytest.mark.parametrize('mask', [{}, {'causal': True}, {'window': (100, 5)}], ids=str)
def test_rotary(mask, share, interleaved, page_size, dtype, device):
    """The position of a new token is that of its slot; without causal or a window all queries of
    a sequence are at its length before the call.
    """
    for own_positions in (False, True):
        check_case(CacheCase(((3, 100), (3, 0), (3, 333)), page_size=page_size, dtype=dtype,
                             new=(3,) * 3, rotary=share, interleaved=interleaved,
                             own_positions=own_positions, **mask), device)


@pytest.mark.parametrize('head_dim', [64, 96, 128, 192, 256, 512])
def test_rotary_of_every_head_dim(head_dim, device):
    check_case(CacheCase(((2, 100), (2, 0)), head_dim=head_dim, new=(2, 2), rotary=1.0,
                         causal=True, page_size=16), device)


@pytest.mark.parametrize('page_size', [0, 16])
def test_rotary_ignores_a_leftpad(page_size, device):
    """Slot 0 of the cache is position 0."""
    check_case(CacheCase(((2, 100), (2, 40)), page_size=page_size, leftpad=(30, 7), new=(2, 2),
                         rotary=1.0, causal=True), device)


@pytest.mark.parametrize('page_size', [0, 1, 48])
def test_many_appends_fill_a_cache(page_size, device):
    """Token by token, as a decoder does it; each step is that of a longer cache."""
    used = [0, 37, 90]
    case = CacheCase(tuple((1, n) for n in used), 128, page_size, causal=True, new=(1,) * 3,
                     rotary=1.0)
    arguments = case.arguments(device)
    for step in range(30):
        case = dataclasses.replace(case, lengths=tuple((1, n + step) for n in used))
        arguments['cache_seqlens'] = ints([n + step for n in used], device)
        if case.page_size:    # a new page where a sequence needs one
            give_pages(case, arguments)
        before = copied(arguments)
        got = call(case, arguments)
        check_step(case, before, arguments, got)


def give_pages(case: CacheCase, arguments: dict) -> None:
    """Further pages, behind the others, for what the call fills."""
    table = arguments['page_table']
    for b, (_, end) in enumerate(case.filled()):
        for place in range(-(-end // case.page_size)):
            if not 0 <= table[b, place] < 2 ** 30:
                grown = [torch.cat([arguments[f'{name}_cache'],
                                    torch.full_like(arguments[f'{name}_cache'][:1], torch.nan)])
                         for name in 'kv']
                arguments['k_cache'], arguments['v_cache'] = grown
                table[b, place] = grown[0].size(0) - 1


def check_step(case: CacheCase, before: dict, after: dict, got) -> None:
    check_cache(case, before, after)
    check_result(case, after, got)


# ----------------------------------------------------------------------------------- packed queries
PREFILL = ((1, 700), (333, 333), (1, 5), (70, 400), (0, 20), (1, 64))


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('page_size', [0, 16])
def test_prefill_beside_decode(page_size, numbers, device):
    """Long and short lists of queries in one call, with splits or without."""
    for num_splits in (0, 1, 3):
        check_case(of(CacheCase(PREFILL, heads=(4, 2)), numbers, is_packed=True, causal=True,
                      page_size=page_size, num_splits=num_splits), device)


@pytest.mark.smoke
@pytest.mark.parametrize('dtype', ['bf16', 'e4m3'])
@pytest.mark.parametrize('page_size', [0, 1, 7, 64])
@pytest.mark.parametrize('rotary', [0.0, 1.0])
def test_packed_append(rotary, page_size, dtype, device):
    """Each sequence has its own number of new tokens, none too."""
    case = CacheCase(((1, 300), (90, 0), (5, 64), (0, 10)), new=(1, 90, 5, 0), new_packed=True,
                     is_packed=True, page_size=page_size, causal=True, dtype=dtype,
                     rotary=rotary * (dtype != 'e4m3'))
    check_case(case, device)


@pytest.mark.parametrize('batch', [1, 31, 33, 64, 100, 257, 384, 385, 900])
def test_many_sequences(batch, device):
    """Numbers of sequences that are no multiple of a warp, of 1 to 300 keys."""
    pick = random.Random(batch)
    lengths = tuple((pick.choice((0, 1, 1, 1, 4)), pick.randint(0, 300)) for _ in range(batch))
    check_case(CacheCase(lengths, heads=(2, 1), head_dim=64, page_size=16, is_packed=True,
                         causal=True), device)


# ------------------------------------------------------------------------------------------ outputs
@pytest.mark.smoke
@pytest.mark.parametrize('num_splits', [0, 1, 6])
@pytest.mark.parametrize('lse', [False, True])
@pytest.mark.parametrize('dtype', ['bf16', 'fp16', 'e4m3'])
def test_a_given_output(dtype, lse, num_splits, device):
    """All of it is written, and no LSE is made where none is asked for."""
    case = CacheCase(mixed(4, 400, 2), dtype=dtype, lse=lse, num_splits=num_splits, out=True)
    check_case(case, device)


@pytest.mark.parametrize('float16_out', [False, True])
@pytest.mark.parametrize('descales', [False, True])
@pytest.mark.parametrize('page_size', [0, 16])
def test_e4m3(page_size, descales, float16_out, device):
    """Scales of every sequence and KV head, or none."""
    check_case(CacheCase(mixed(4, 400, 2), dtype='e4m3', descales=descales,
                         float16_out=float16_out, page_size=page_size), device)


def test_scales_with_any_strides(device):
    """One scale for all, by strides of 0; and a column of a larger tensor."""
    case = CacheCase(mixed(3, 200), dtype='e4m3')
    arguments = case.arguments(device)
    for scale in (torch.full((), 0.75, device=device).expand(3, 2),
                  (0.5 + torch.rand(2, 3, device=device)).T):
        own = arguments | {f'{name}_descale': scale for name in 'qkv'}
        got = call(case, own)
        wanted = call(case, own | {f'{name}_descale': scale.contiguous() for name in 'qkv'})
        check_same(got, wanted)


@pytest.mark.smoke
@pytest.mark.parametrize('dtype', ['bf16', 'e4m3'])
@pytest.mark.parametrize('changes', [{}, {'page_size': 16}, {'new': (3,) * 7, 'causal': True}],
                         ids=['dense', 'paged', 'append'])
def test_the_same_bits_on_every_call(changes, dtype, device):
    case = dataclasses.replace(DECODE, dtype=dtype, **changes)
    wanted, arguments = check(case, device)
    for _ in range(5):
        check_same(run(case, arguments)[0], wanted)


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('head_dim', [64, 128, 512])
def test_one_part_has_the_bits_of_the_other_functions(head_dim, causal, device):
    """num_splits=1 on a dense cache is attention as flash_attn_varlen_func computes it."""
    case = CacheCase(((70, 300),) * 2, head_dim=head_dim, heads=(4, 4), causal=causal, num_splits=1)
    arguments = case.arguments(device)
    got = call(case, arguments)
    q, k, v = (arguments[name] for name in ('q', 'k_cache', 'v_cache'))
    lists = starts((70, 70), device), starts((300, 300), device)
    out, lse = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), *lists, 70, 300,
                                      causal=causal, return_attn_probs=True)
    compare.check_equal(packed(case, got).out, out, 'out')
    compare.check_equal(packed(case, got).lse.contiguous(), lse, 'lse')


def test_gradients_are_an_error(device):
    """By name, before anything is written."""
    case = CacheCase(((2, 30),) * 2, 64, new=(2, 2))
    arguments = case.arguments(device)
    before = copied(arguments)
    for name in ('q', 'k', 'v_cache'):
        own = arguments | {name: arguments[name].detach().clone().requires_grad_()}
        with pytest.raises(RuntimeError, match=r'flash_attn3\.flash_attn_with_kvcache: expected .*'
                                               'grad'):
            flash_attn_with_kvcache(**own)
    assert torch.equal(as_bits(arguments['k_cache']), as_bits(before['k_cache']))
    with torch.no_grad():
        call(case, arguments | {'q': arguments['q'].requires_grad_()})


def test_large_offsets(needs_memory, cuda):
    """A page whose first byte is beyond 2**31 elements."""
    needs_memory(20)
    pages = 2 ** 31 // (64 * 2 * 128) + 70
    case = CacheCase(((1, 200),) * 2, page_size=64, heads=(4, 2))
    arguments = case.arguments(cuda)
    small = {name: arguments[f'{name}_cache'] for name in 'kv'}
    wanted = call(case, arguments)
    shift = pages - small['k'].size(0)
    for name, x in small.items():
        large = torch.empty((pages, *x.shape[1:]), dtype=x.dtype, device=cuda)
        large[shift:] = x
        arguments[f'{name}_cache'] = large
    table = arguments['page_table']
    arguments['page_table'] = torch.where((table >= 0) & (table < 2 ** 30), table + shift, table)
    check_same(call(case, arguments), wanted)


def test_a_dense_call_agrees(device):
    """With flash_attn_func, for a full cache, to the bar of both."""
    case = CacheCase(((5, 128),) * 2, 128, causal=True, length_as='none')
    arguments = case.arguments(device)
    q, k, v = (arguments[name] for name in ('q', 'k_cache', 'v_cache'))
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    got = call(case, arguments)
    compare.check_lse(got.lse, lse.double())
    want = expected(case, arguments)
    compare.check_close(out.flatten(0, 1), want.ref.out, want.pt.out, 'out')
    check_result_of(case, arguments, got)
