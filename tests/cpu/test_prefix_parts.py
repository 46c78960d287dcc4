"""plan/shared_prefix.cpp: the launch on shared keys. Its parts are sequences; the strides of their
queries, pages, keys and scales are compared with those of the call.
"""
from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, strategies as st

from flash_attn3.tools import planning, planning_cache
from tests.cpu.drawn import examples
from tests.cpu.test_planning import explained
from tests.host import _host

BF16, E4M3 = 1, 2
SMS = 132


def launch(batch, queries, heads, keys, *, page_size=0, head_dims=(64, 64), dtype=BF16, sms=SMS,
           row_gap=0, table_gap=0, slots=None, scales=(), packed=False, **numbers):
    """(parts, kernel, tensors by name as (sizes, strides), keys of a part, strides of the call)."""
    (heads_q, heads_k), (dim, dim_v), slots = heads, head_dims, slots or keys + 64
    slots += -slots % (page_size or 1)
    q = (batch * queries, heads_q, dim) if packed else (batch, queries, heads_q, dim)
    entries = (batch * (slots // page_size), page_size) if page_size else (batch, slots)
    shapes = dict(q=q, k=(*entries, heads_k, dim), v=(*entries, heads_k, dim_v))
    strides = {}
    for name in 'kv':
        row = heads_k * shapes[name][3] + row_gap
        strides[name] = [entries[1] * row + row_gap, row, shapes[name][3], 1]
    if packed:
        shapes['cu_seqlens_q'] = (batch + 1,)
    if page_size:
        shapes['page_table'] = batch, slots // page_size
        strides['page_table'] = [slots // page_size + table_gap, 1]
    for name in scales:
        shapes[f'{name}_descale'] = batch, heads_k
    numbers = dict(shared_prefix=keys, cache_length=slots) | numbers
    result = _host.launch_of_prefix(dtype, shapes, numbers, strides, sms)
    return *result, strides


@given(batch=st.integers(2, 70), queries=st.integers(1, 5), heads_k=st.integers(1, 9),
       group=st.integers(1, 40), page_size=st.sampled_from([0, 1, 3, 16, 48, 64, 256]),
       units=st.integers(1, 3000), sms=st.integers(1, 150), margin=st.integers(0, 149),
       row_gap=st.sampled_from([0, 8, 200]), packed=st.booleans(),
       dims=st.sampled_from([(64, 64), (8, 512), (264, 8), (192, 128)]))
@examples(300)
def test_parts_are_the_shared_keys(batch, queries, heads_k, group, page_size, units, sms, margin,
                                   row_gap, packed, dims):
    """Each part has the queries of all, and its own whole pages, or keys, of the first sequence."""
    assume(margin < sms)
    unit = page_size or 128
    keys = units * unit
    assume(keys <= 40_000)
    heads = heads_k * group, heads_k
    parts, kernel, tensors, own, strides = launch(
        batch, queries, heads, keys, page_size=page_size, head_dims=dims, sms=sms, row_gap=row_gap,
        table_gap=5, packed=packed, sm_margin=margin)
    assert 1 <= parts <= 64 and own % unit == 0
    assert (parts - 1) * own < keys <= parts * own    # the last part may have fewer
    assert parts == 1 or own >= 256
    assert tensors['q'][0] == [parts, batch * queries, heads[0], dims[0]]
    assert tensors['q'][1][1:] == [heads[0] * dims[0], dims[0], 1]
    assert parts == 1 or tensors['q'][1][0] == 0
    assert ('Decode' in kernel) <= (parts == 1)
    if page_size and parts > 1:    # parts follow one another in the first row of the table
        pages = own // page_size
        assert tensors['page_table'] == ([parts, pages], [pages, 1])
    for name in () if page_size else 'kv':
        sizes, found = tensors[name]
        assert found[1:] == strides[name][1:]
        assert parts == 1 or (sizes[:2] == [parts, own] and found[0] == own * found[1])


@pytest.mark.parametrize('page_size', [0, 16])
def test_every_part_has_the_scales_of_the_first_sequence(page_size):
    parts, _, tensors, *_ = launch(64, 1, (64, 8), 8192, page_size=page_size, head_dims=(128, 128),
                                   dtype=E4M3, scales='qkv')
    assert parts > 1
    for name in 'qkv':
        assert tensors[f'{name}_descale'] == ([parts, 8], [0, 1])


WHOLE = {'few rows': dict(batch=4), 'num_splits': dict(num_splits=4), 'one': dict(num_splits=1),
         'split_size': dict(split_size=1024), 'short': dict(keys=256), 'odd': dict(keys=8200),
         'no queries': dict(queries=0), 'many queries': dict(queries=512),
         'rows': dict(cache_batch_idx=True)}


@pytest.mark.parametrize('changes', WHOLE.values(), ids=WHOLE)
def test_one_part(changes):
    own = dict(batch=64, queries=1, heads=(64, 8), keys=8192, head_dims=(128, 128))
    assert launch(**own)[0] > 1
    if changes.pop('cache_batch_idx', False):
        shapes = dict(q=(64, 1, 64, 128), k=(64, 8256, 8, 128), v=(64, 8256, 8, 128),
                      cache_batch_idx=(64,))
        parts, *_ = _host.launch_of_prefix(BF16, shapes, dict(shared_prefix=8192,
                                                              cache_length=8256), {}, SMS)
    else:
        parts, *_ = launch(**own | changes)
    assert parts == 1


@given(batch=st.integers(2, 200), queries=st.integers(1, 40), heads_k=st.integers(1, 16),
       group=st.integers(1, 16), units=st.integers(2, 1024), sms=st.integers(2, 144))
@examples(200)
def test_parts_fill_the_gpu_without_a_flood_of_tiles(batch, queries, heads_k, group, units, sms):
    """Results of parts are written and read: at most a few tiles a multiprocessor."""
    keys = 128 * units
    parts, *_ = launch(batch, queries, (heads_k * group, heads_k), keys, sms=sms)
    rows = batch * queries * group
    tiles = heads_k * -(-rows // 128)
    assert parts == 1 or tiles * parts <= 8 * sms


@pytest.mark.parametrize('batch, bytes_text', [(64, '100.7 MB'), (4, '37.75 MB'), (1, '34.6 MB')])
def test_explain_shows_parts_kernel_and_bytes(batch, bytes_text, capsys):
    """One sequence shares nothing: its plan is that without a prefix."""
    cache = batch * 528, 16, 8, 128
    given = dict(q=(batch, 1, 64, 128), k=cache, page_table=(batch, 528))
    rows = explained(capsys, **given, shared_prefix=8192)
    plain = explained(capsys, **given)
    assert rows.pop('bytes') == f'{bytes_text}: K and V of full caches'
    if batch > 1:
        parts, kernel, *_ = launch(batch, 1, (64, 8), 8192, page_size=16, head_dims=(128, 128),
                                   slots=8448, cache_length=-1)
        assert rows.pop('shared keys') == (
            f'8192, read once for all queries in {parts} part(s) by {kernel}')
    own = 'bytes', 'expected'
    assert ({name: text for name, text in rows.items() if name not in own}
            == {name: text for name, text in plain.items() if name not in own})


def test_can_use_asks_for_the_kernel_of_the_prefix(monkeypatch):
    monkeypatch.setattr(planning, 'built_variants', lambda: ['FwdBf16D64CacheDecode'])
    q, cache = torch.zeros(64, 1, 8, 64).bfloat16(), torch.zeros(64, 512, 1, 64).bfloat16()
    given = dict(k_cache=cache, v_cache=cache, cache_seqlens=512)
    facts = [planning_cache.reasons_and_plan(dict(q=q, **given, shared_prefix=count))[1]
             for count in (0, 384)]
    assert [planning.missing_kernels(own) for own in facts] == [[], [facts[1]['prefix']]]


def test_rows_that_overlap_are_one_part():
    """The last part may be read past its keys, where an expanded cache has no next row."""
    shapes = dict(q=(64, 1, 64, 128), k=(64, 8320, 8, 128), v=(64, 8320, 8, 128))
    numbers = dict(shared_prefix=8192, cache_length=8320)
    for batch_stride in (8320 * 1024, 0):
        strides = {name: [batch_stride, 1024, 128, 1] for name in 'kv'}
        parts, *_ = _host.launch_of_prefix(BF16, shapes, numbers, strides, SMS)
        assert (parts > 1) == (batch_stride > 0)
