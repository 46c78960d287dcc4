"""qv of flash_attn_with_kvcache, absorbed MLA: heads, queries, pages, splits, masks, append,
layouts; poison around all of it. Held to the oracle of tests/support/cache_oracle.py.

Graphs and streams: test_kvcache_graphs.py.
"""
from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from flash_attn3 import flash_attn_with_kvcache

from tests.support import compare
from tests.support.cache_cases import LAYOUTS, CacheCase, as_bits, call, copied
from tests.support.cache_oracle import check, check_case, check_result, check_same, one_of, run
from tests.support.lists import ints

PAGE_SIZES = (0, 1, 16, 48, 64, 256)
LENGTHS = (0, 1, 48, 49, 63, 64, 65, 1000)
every_page_size = pytest.mark.parametrize('page_size', PAGE_SIZES)
every_dtype = pytest.mark.parametrize('dtype', ['bf16', 'fp16'])
# More of e4m3: test_latent_kv8.py.
E4M3 = dict(kv8=True, blocks=4)
every_cache = pytest.mark.parametrize('cache', [{}, E4M3], ids=['16_bits', 'e4m3'])


def latent(lengths: tuple[tuple[int, int], ...], heads: int = 16, **options) -> CacheCase:
    return CacheCase(lengths, head_dim=64, head_dim_v=512, heads=(heads, 1), latent=True, **options)


def of(queries: int, *lengths: int) -> tuple[tuple[int, int], ...]:
    return tuple((queries, length) for length in lengths)


DECODE = latent(of(1, 700, 0, 1, 129, 64))
TALL = latent(of(5, 300, 5, 650), heads=5, causal=True)
PREFILL = latent(((1, 700), (130, 333), (1, 5), (70, 400), (0, 20), (1, 64)), causal=True,
                 is_packed=True)


# ------------------------------------------------------------------------------------------- shapes
@pytest.mark.smoke
@pytest.mark.parametrize('queries', [1, 2, 4, 70])
@pytest.mark.parametrize('heads', [16, 32, 64, 128, 5, 24, 40])
@every_cache
def test_heads_and_queries(cache, heads, queries, device):
    """Heads that fill a tile, several and none; lengths at the borders of a K tile."""
    lengths = LENGTHS if queries * heads < 5000 else (49, 1000)
    check_case(latent(of(queries, *lengths), heads, page_size=64, causal=queries > 1, **cache),
               device)


@pytest.mark.smoke
@every_page_size
@every_dtype
@pytest.mark.parametrize('queries', [1, 3])
def test_page_sizes(queries, dtype, page_size, device):
    """Slots without a key and pages that no sequence needs are NaN; further page ids fault."""
    check_case(latent(of(queries, 1000, 65, 64, 63, 1), dtype=dtype, page_size=page_size,
                      causal=queries > 1), device)


@pytest.mark.smoke
@pytest.mark.parametrize('length', LENGTHS)
@pytest.mark.parametrize('page_size', [0, 64])
@every_cache
def test_one_sequence(cache, page_size, length, device):
    check_case(latent(of(1, length), 128, page_size=page_size, capacity=1024, **cache), device)


@pytest.mark.parametrize('batch', [2, 3, 4, 5])
@pytest.mark.parametrize('page_size', [0, 1])
@every_cache
def test_batches(cache, page_size, batch, device):
    check_case(latent(of(2, *LENGTHS[-batch:]), page_size=page_size, **cache), device)


@pytest.mark.smoke
@pytest.mark.parametrize('num_splits', [0, 1, 3])
@pytest.mark.parametrize('page_size', [0, 16])
def test_prefill_beside_decode(page_size, num_splits, device):
    check_case(dataclasses.replace(PREFILL, page_size=page_size, num_splits=num_splits), device)


@pytest.mark.parametrize('queries', [1, 3, 4, 5, 64, 65])
@pytest.mark.parametrize('pack_gqa', [None, True, False])
def test_packing(pack_gqa, queries, device):
    """Rows of a tile that are no query."""
    check_case(latent(of(queries, 500, 70, 64), heads=6, pack_gqa=pack_gqa, causal=True), device)


@pytest.mark.smoke
@pytest.mark.parametrize('page_size', [0, 16])
@every_cache
def test_no_batch_no_queries_no_keys(cache, page_size, device):
    check_case(latent((), capacity=64, page_size=page_size, **cache), device)
    check_case(latent(of(0, 30, 50), page_size=page_size, **cache), device)
    check_case(latent(of(0, 30, 50), page_size=page_size, is_packed=True, **cache), device)
    check_case(latent(of(2, 0, 0, 0), capacity=320, page_size=page_size, sinks='fp32', **cache),
               device)


@pytest.mark.smoke
@pytest.mark.parametrize('heads', [16, 128])
@pytest.mark.parametrize('page_size', [0, 64])
@every_cache
def test_long(cache, page_size, heads, device):
    """As a server decodes: 4 sequences of up to 4k keys."""
    check_case(latent(of(1, 4096, 4000, 3001, 4096), heads, page_size=page_size, **cache),
               device)


# ------------------------------------------------------------------------------------------- splits
SPLITS = [dict(num_splits=1), dict(num_splits=3), dict(num_splits=40), dict(num_splits=256),
          dict(split_size=128), dict(split_size=1), dict(sm_margin=100), dict(num_splits=2,
                                                                            sm_margin=131)]


@pytest.mark.smoke
@pytest.mark.parametrize('splits', SPLITS, ids=str)
@pytest.mark.parametrize('case', [DECODE, TALL, PREFILL], ids=['decode', 'tall', 'prefill'])
@every_cache
def test_splits(cache, case, splits, device):
    check_case(dataclasses.replace(case, page_size=16, **splits, **cache), device)


@pytest.mark.parametrize('heads', [16, 128])
def test_more_parts_than_are_kept(heads, cuda):
    """Beyond 256 the kernel that combines parts reads their LSEs again (csrc/mla/combine.h)."""
    check_case(latent(of(1, 64 * 256 + 1, 64 * 300, 65), heads, page_size=64, split_size=64), cuda)


@pytest.mark.parametrize('fewer', [0, 4])
def test_equal_sequences_are_not_split(fewer, cuda):
    """Where a multiprocessor has one of them, or nearly all have: 63 K tiles, not 62."""
    batch = torch.cuda.get_device_properties(cuda).multi_processor_count - fewer
    case = latent(of(1, *[4000] * batch), page_size=64)
    arguments = case.arguments(cuda)
    check_same(call(case, arguments), call(case, arguments, num_splits=1))


@pytest.mark.parametrize('changes', [{}, {'num_splits': 3}], ids=str)
def test_more_queries_than_the_hint(changes, device):
    """max_seqlen_q is a hint: more tiles than it says have parts."""
    case = latent(((130, 3000), (1, 700)), is_packed=True, causal=True, **changes)
    arguments = case.arguments(device)
    check_result(case, arguments, call(case, arguments, max_seqlen_q=1))


def test_bits_of_a_sequence_depend_on_it_alone(device):
    """With split_size, in any batch; and with one part."""
    lengths = (900, 129, 64, 1)
    for splits in (dict(split_size=128), dict(num_splits=1)):
        case = latent(of(1, *lengths), page_size=64, **splits)
        arguments = case.arguments(device)
        together, _ = run(case, arguments)
        for b in range(len(lengths)):
            alone = arguments | {name: arguments[name][b:b + 1] for name in (
                'q', 'qv', 'page_table', 'cache_seqlens')}
            got, _ = run(case, alone)
            check_same(one_of(case, got, 0), one_of(case, together, b))


@pytest.mark.smoke
@pytest.mark.parametrize('changes', [{}, {'page_size': 16}, {'num_splits': 3}, {'split_size': 64}],
                         ids=str)
@every_cache
def test_the_same_bits_on_every_call(cache, changes, device):
    for case in (DECODE, TALL):
        wanted, arguments = check(dataclasses.replace(case, **changes, **cache), device)
        for _ in range(5):
            check_same(run(case, arguments)[0], wanted)


# --------------------------------------------------------------------------------- masks and scores
FEATURES = {
    'window': {'window': (70, 40)}, 'left': {'window': (100, -1)}, 'diagonal': {'window': (0, 0)},
    'causal': {'causal': True}, 'causal_window': {'causal': True, 'window': (64, 0)},
    'chunk': {'chunk': 100}, 'causal_chunk': {'causal': True, 'chunk': 64},
    'sinks': {'sinks': 'fp32'}, 'huge_sinks': {'sinks': 'huge'}, 'no_sinks': {'sinks': '-inf'},
    'scale': {'softmax_scale': 192 ** -0.5}, 'sharp': {'logit_std': 6.0},
    'onehot': {'data': 'onehot'},
    'all': {'causal': True, 'window': (150, -1), 'chunk': 180, 'sinks': 'bf16'},
}


@pytest.mark.smoke
@pytest.mark.parametrize('features', FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize('page_size', [0, 16])
@pytest.mark.parametrize('num_splits', [1, 4])
@every_cache
def test_features(cache, num_splits, page_size, features, device):
    """Windows and chunks from the first valid key, behind a leftpad; a sink once."""
    check_case(latent(of(3, 500, 77, 2), leftpad=(30, 76, 0), page_size=page_size,
                      num_splits=num_splits, **features, **cache), device)


@pytest.mark.smoke
@every_dtype
@pytest.mark.parametrize('changes', [
    {}, dict(causal=True), dict(page_size=16), dict(num_splits=3), dict(leftpad=(7, 0, 300)),
    dict(lengths=of(128, 300, 128, 193)), dict(lengths=of(9, 5, 0, 100)),
    dict(new=(5, 5, 5), page_size=7, rotary=0.5, causal=True),
    dict(lengths=((70, 300), (1, 4), (0, 9), (128, 1000)), is_packed=True)], ids=str)
def test_trees(changes, dtype, device):
    case = dataclasses.replace(TALL, tree=True, dtype=dtype, **{'causal': False, **changes})
    check_case(case, device)


@pytest.mark.parametrize('pads', [(0, 63, 64), (200, 1, 65)], ids=str)
@every_page_size
def test_leftpad(page_size, pads, device):
    check_case(latent(tuple(zip((4, 4, 4), (200, 330, 129))), page_size=page_size, leftpad=pads,
                      window=(40, 0)), device)


@pytest.mark.parametrize('page_size', [0, 16])
@pytest.mark.parametrize('changes', [{}, {'is_packed': True}, {'causal': True}], ids=str)
def test_a_shared_prefix(changes, page_size, device):
    check_case(latent(of(2, 200, 98, 130), shared=96, page_size=page_size, **changes), device)


# ----------------------------------------------------------------------------------- where keys lie
@pytest.mark.smoke
@pytest.mark.parametrize('layout', LAYOUTS[1:])
@pytest.mark.parametrize('page_size', [0, 16])
@every_dtype
@every_cache
def test_layouts(cache, dtype, page_size, layout, device):
    """K and V columns of one tensor, gaps between rows: an append goes into them."""
    check_case(dataclasses.replace(TALL, dtype=dtype, page_size=page_size, layout=layout,
                                   new=(5,) * 3, **cache), device)


@every_page_size
def test_a_joint_cache(page_size, device):
    """The latent columns first, as servers have it: the bits of two tensors."""
    case = dataclasses.replace(DECODE, page_size=page_size)
    arguments = case.arguments(device)
    v, k = torch.cat([arguments['v_cache'], arguments['k_cache']], -1).split((512, 64), -1)
    check_same(call(case, arguments | dict(k_cache=k, v_cache=v)), call(case, arguments))


@pytest.mark.smoke
@pytest.mark.parametrize('case', [DECODE, TALL, PREFILL], ids=['decode', 'tall', 'prefill'])
@every_page_size
@every_cache
def test_without_rotary_columns(cache, page_size, case, device):
    """The bits of a call with q and k_cache of zeros."""
    case = dataclasses.replace(case, page_size=page_size, **cache)
    given = case.arguments(device)
    zeros = {name: torch.zeros_like(given[name]) for name in ('q', 'k_cache')}
    scale = dict(softmax_scale=512 ** -0.5)
    wanted = call(case, given | zeros | scale)
    nothing = dict(q=None, k_cache=None)
    check_same(call(case, given | nothing | dict(softmax_scale=None)), wanted)


@pytest.mark.parametrize('changes', [
    dict(batch_idx=True), dict(length_as='int', lengths=of(2, 200, 200)),
    dict(length_as='none', lengths=of(2, 320, 320), capacity=320)], ids=str)
def test_rows_and_lengths(changes, device):
    check_case(dataclasses.replace(DECODE, **changes), device)


def odd(x: Tensor, columns: int) -> Tensor:
    """With rows that no copy engine reads: strides of no 16 bytes."""
    wide = torch.full((*x.shape[:-1], columns), math.nan, dtype=x.dtype, device=x.device)
    wide[..., :x.size(-1)] = x
    return wide[..., :x.size(-1)]


@pytest.mark.parametrize('is_packed', [False, True])
def test_queries_with_any_strides(is_packed, device):
    case = dataclasses.replace(TALL, is_packed=is_packed)
    arguments = case.arguments(device)
    wanted = call(case, arguments)
    for q, qv in ((odd(arguments['q'], 67), odd(arguments['qv'], 514)),
                  (arguments['q'], odd(arguments['qv'], 520)),
                  (arguments['q'], arguments['qv'].transpose(-2, -3).contiguous().transpose(
                      -2, -3))):
        check_same(call(case, arguments | dict(q=q, qv=qv)), wanted)
    both = torch.cat([arguments['qv'], arguments['q']], -1)
    qv, q = both.split((512, 64), -1)
    check_same(call(case, arguments | dict(q=q, qv=qv)), wanted)


# ------------------------------------------------------------------------------------------- append
@pytest.mark.smoke
@every_page_size
@pytest.mark.parametrize('rotary', [0.0, 0.5, 1.0])
def test_append(rotary, page_size, device):
    """q and k are rotated, qv and v are not."""
    for new in (1, 70):
        check_case(latent(of(new, 0, 63, 300), heads=5, page_size=page_size, new=(new,) * 3,
                          rotary=rotary, causal=True), device)


@pytest.mark.parametrize('page_size', [0, 7, 64])
@every_cache
def test_packed_append(cache, page_size, device):
    check_case(latent(((1, 300), (90, 0), (5, 64), (0, 10)), new=(1, 90, 5, 0), new_packed=True,
                      is_packed=True, page_size=page_size, causal=True, rotary=1.0, **cache),
               device)


# ------------------------------------------------------------------------------------------ outputs
@pytest.mark.smoke
@every_dtype
@pytest.mark.parametrize('lse', [False, True])
@pytest.mark.parametrize('num_splits', [0, 1, 6])
def test_a_given_output(num_splits, lse, dtype, device):
    check_case(dataclasses.replace(DECODE, dtype=dtype, lse=lse, num_splits=num_splits, out=True),
               device)


def test_a_given_output_with_odd_strides(device):
    case = TALL
    arguments = case.arguments(device)
    wanted = call(case, arguments)
    out = odd(torch.zeros_like(wanted.out), 514)
    got = call(case, arguments | {'out': out})
    assert got.out.data_ptr() == out.data_ptr()
    check_same(got._replace(out=got.out.contiguous()), wanted)


def test_bad_numbers_spoil_who_sees_them(device):
    """A NaN of qv its row; of a latent column, as it is a key too, all of the sequence."""
    case = latent(of(2, 300, 200))
    arguments = case.arguments(device)
    wanted = call(case, arguments)
    qv = arguments['qv'].clone()
    qv[1, 1, 3, 500] = math.nan
    got = call(case, arguments | {'qv': qv})
    assert got.out[1, 1, 3].isnan().all() and not got.lse[1, 3, 1].isfinite()
    got.out[1, 1, 3], got.lse[1, 3, 1] = wanted.out[1, 1, 3], wanted.lse[1, 3, 1]
    check_same(got, wanted)
    v = arguments['v_cache'].clone()
    v[1, 150, 0, 7] = math.nan
    got = call(case, arguments | {'v_cache': v})
    assert got.out[1].isnan().all() and got.lse[1].isnan().all()
    compare.check_equal(got.out[0], wanted.out[0], 'out')


def test_scores_far_below_zero(device):
    """Scores of about -1e5 still normalise."""
    case = latent(of(1, 300, 64), softmax_scale=1.0)
    arguments = case.arguments(device)
    for name, x in (('q', 30.0), ('qv', 5.0), ('k_cache', -25.0), ('v_cache', -20.0)):
        own = arguments[name]
        own.copy_(torch.where(own.isnan(), own, torch.full_like(own, x)))
    got = call(case, arguments)
    assert got.lse.isfinite().all() and (got.lse < -9e4).all()
    check_result(case, arguments, got)


@pytest.mark.parametrize('page_size', [0, 16])
def test_lengths_beyond_the_capacity_are_clamped(page_size, cuda):
    case = latent(of(2, 320, 320), capacity=320, page_size=page_size, causal=True)
    arguments = case.arguments(cuda)
    wanted = call(case, arguments)
    for beyond in (321, 10 ** 6, 2 ** 31 - 1):
        arguments['cache_seqlens'] = ints([beyond] * 2, cuda)
        check_same(call(case, arguments), wanted)


def test_large_offsets(needs_memory, cuda):
    """A page whose first byte is beyond 2**31 elements, of a joint cache."""
    needs_memory(12)
    case = latent(of(1, 200, 300), page_size=64)
    arguments = case.arguments(cuda)
    wanted = call(case, arguments)
    small = torch.cat([arguments['v_cache'], arguments['k_cache']], -1)
    shift = 2 ** 31 // (64 * 576) + 70
    large = torch.empty(shift + small.size(0), *small.shape[1:], dtype=small.dtype, device=cuda)
    large[shift:] = small
    v, k = large.split((512, 64), -1)
    table = arguments['page_table']
    moved = torch.where((table >= 0) & (table < 2 ** 30), table + shift, table)
    check_same(call(case, arguments | dict(k_cache=k, v_cache=v, page_table=moved)), wanted)


def test_a_bad_qv_writes_nothing(device):
    """Also on a GPU: attention is not launched, out stays as it is."""
    arguments = DECODE.arguments(device)
    out = torch.full_like(arguments['qv'], 7.0)
    before = copied(arguments)
    for bad, text in ((arguments['q'], 'qv to have the shape'),
                      (arguments['qv'].float(), 'qv.dtype to be that of q, bfloat16')):
        with pytest.raises(RuntimeError,
                           match=f'flash_attn3.flash_attn_with_kvcache: expected {text}'):
            flash_attn_with_kvcache(**arguments | dict(qv=bad, out=out))
    assert (out == 7).all()
    assert torch.equal(as_bits(arguments['v_cache']), as_bits(before['v_cache']))
