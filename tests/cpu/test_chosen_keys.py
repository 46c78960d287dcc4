"""Keys that each query chooses by index: flash_attn_with_kvcache with `indices` and
flash_attn_sparse_func on the CPU, against float64; index math, bad input, tracing.
"""
from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from flash_attn3 import (can_use, env, explain, flash_attn_sparse_func, flash_attn_with_kvcache,
                         invariant)
from flash_attn3.api import kvcache
from flash_attn3.ops import attend_cache, chosen_keys
from flash_attn3.ops.chosen_keys import Choice

from tests.support.cache_cases import as_bits
from tests.support.called_ops import compilations
from tests.support.chosen_cases import LATENT, ChosenCase, call, check_case, named
from tests.support.lists import ints
from tests.support.wrong_appends import expect_refused
from tests.support.wrong_choices import wrong_calls

SMALL = dict(count=12, pages=3, page_size=16, head_dim=16, head_dim_v=24, dtype='fp32')
SMALL_LATENT = dict(heads=(4, 1), head_dim=16, head_dim_v=32, latent=True)
LATENTS = LATENT | dict(pages=3, page_size=16, count=20, dtype='bf16')
CASES = {
    'plain': {}, 'queries': dict(tokens=(2, 3)), 'packed': dict(tokens=(5,)),
    'by_head': dict(tokens=(2, 3), by_head=True), 'packed_by_head': dict(tokens=(5,), by_head=True),
    'counts': dict(tokens=(2, 3), counts=True),
    'counts_by_head': dict(tokens=(2, 3), counts=True, by_head=True),
    'sinks': dict(tokens=(2, 3), sinks=True),
    'sinks_by_head': dict(tokens=(2, 3), sinks=True, by_head=True, out=True),
    'blocks': dict(tokens=(2, 3), page_size=128, block=64, count=4, counts=True),
    'blocks_of_pages': dict(page_size=64, block=64, count=4),
    'blocks_by_head': dict(tokens=(2, 2), page_size=128, block=64, count=3, by_head=True,
                           counts=True, sinks=True),
    'heads_first': dict(tokens=(2, 2), page_size=128, block=128, count=3, by_head=True,
                        heads_first=True),
    'out': dict(tokens=(2, 3), out=True, lse=False),
    'softcap': dict(softcap=3.0), 'scale': dict(softmax_scale=0.7), 'alike': dict(alike=True),
    'splits': dict(num_splits=3), 'parts': dict(split_size=128), 'margin': dict(sm_margin=2),
    'no_index': dict(count=0), 'no_slot': dict(pages=0), 'no_query': dict(tokens=(0, 2)),
    'latent': dict(tokens=(2, 3), **SMALL_LATENT),
    'latent_packed': dict(tokens=(5,), counts=True, sinks=True, **SMALL_LATENT),
    'rows_of_656': dict(LATENTS, kv8=True, counts=True), 'latent_bf16': LATENTS,
    'kv8': dict(kv8=True, tokens=(2, 3), dtype='bf16', head_dim_v=16),
    'kv8_by_head': dict(kv8=True, tokens=(2, 3), by_head=True, dtype='bf16'),
    'kv8_packed': dict(kv8=True, tokens=(5,), dtype='bf16'),
    'gqa_64': dict(head_dim=64, head_dim_v=64, dtype='fp16', heads=(8, 2)),
    'gqa_128': dict(head_dim=128, head_dim_v=128, dtype='bf16', heads=(4, 4), by_head=True),
}
CASES = {name: ChosenCase(**SMALL | own) for name, own in CASES.items()}
SPARSE = {f'sparse_{name}': dataclasses.replace(CASES[name], sparse=True) for name in (
    'packed', 'packed_by_head', 'latent_packed')} | {
        f'sparse_blocks{name}': ChosenCase(**SMALL | dict(
            tokens=(5,), page_size=64, pages=2, block=64, count=2, sparse=True, counts=True,
            lse=False, by_head=by_head)) for name, by_head in (('', False), ('_by_head', True))}


@pytest.mark.parametrize('case', (CASES | SPARSE).values(), ids=CASES | SPARSE)
def test_against_float64(case):
    check_case(case, 'cpu')


def test_out_with_rows_apart():
    """No view has a row a query: the result is copied."""
    case = dataclasses.replace(CASES['by_head'], sinks=True)
    given = case.arguments('cpu')
    wanted = call(case, given)
    wide = torch.zeros(3, 3, 8, 24).transpose(0, 1)[:, :2].transpose(0, 1)
    got = call(case, given, out=wide)
    assert got.out is wide and torch.equal(wide, wanted.out) and torch.equal(got.lse, wanted.lse)


# ----------------------------------------------------------------------------------- index math
@drawn(pages=st.integers(1, 4), per_page=st.integers(1, 3), block=st.sampled_from((1, 64, 128)),
       heads=st.integers(1, 3), by_head=st.booleans(), is_packed=st.booleans(),
       heads_first=st.booleans(), is_interleaved=st.booleans(), data=st.data())
def test_views_hold_what_the_indices_name(pages, per_page, block, heads, by_head, is_packed,
                                          heads_first, is_interleaved, data):
    """Page p of the lowered call holds the slots i % size of page i // size of the cache.
    heads_first: of the memory of a page. is_interleaved: other pages lie between.
    """
    per_page = 1 if heads_first or is_interleaved else per_page
    size, blocks = per_page * block, pages * per_page
    apart = 1 + is_interleaved
    k = torch.arange(apart * pages * size * heads).view(apart * pages, size, heads, 1)[::apart]
    if heads_first:
        k = k.view(pages, heads, size, 1).transpose(1, 2)
    tokens = (3,) if is_packed else (3, 2)
    lists = (*tokens, heads, 4) if by_head else (*tokens, 4)
    numbers = data.draw(st.lists(st.sampled_from((-1, -2 ** 31, 2 ** 31 - 1, blocks, *range(
        blocks))), min_size=torch.Size(lists).numel(), max_size=torch.Size(lists).numel()))
    choice = Choice(ints(numbers).view(lists), block)
    q = torch.zeros(*tokens, 2 * heads, 1)
    own = attend_cache.Attend(keys_chosen=True)
    tensors = q, k, k, None
    known = choice._replace(indices=torch.zeros_like(choice.indices))    # the CPU refuses others
    layout = kvcache.layout_of(tensors, own, known, chosen_keys.KVCACHE)
    (rows, view, _, _), lowered = kvcache.lower(tensors, own, choice, layout)
    assert view.data_ptr() == k.data_ptr() and len(rows) == len(lowered['page_table'])
    per_row = 1 if by_head else heads
    wanted = choice.indices.view(-1, 4)
    for row, (table, index) in enumerate(zip(lowered['page_table'].tolist(), wanted.tolist())):
        for page, i in zip(table, index):
            assert (0 <= page < view.size(0)) == (0 <= i < blocks)
            if 0 <= i < blocks:
                slot = i * block
                keys = k[slot // size, slot % size:slot % size + block]
                head = slice(row % heads, row % heads + 1) if by_head else slice(None)
                assert torch.equal(view[page], keys[:, head]) and view.size(2) == per_row


# ------------------------------------------------------------------------------------- bad input
def tensors() -> dict:
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(2, 3, 16, 2, 16)
    return dict(q=torch.randn(2, 1, 4, 16), k_cache=k_cache, v_cache=v_cache,
                indices=ints([[[0, 47, -1]], [[5, 5, 6]]]))


NEW = dict(k=torch.randn(2, 1, 2, 16), v=torch.randn(2, 1, 2, 16), page_table=ints([[0], [2]]),
           cache_seqlens=ints([3, 0]))
INDICES = tensors()['indices']
WIDER = torch.randn(3, 17, 2, 16)
BAD = {
    'dtype': (dict(indices=INDICES.long()), 'indices to be int32 on cpu, got int64 on cpu'),
    'device': (dict(indices=INDICES.to('meta')), 'indices to be int32 on cpu, got int32 on meta'),
    'shape': (dict(indices=INDICES[:1]), 'indices of shape (2, 1, n) or (2, 1, 2, n), got (1, 1, '),
    'rank': (dict(indices=INDICES[0]), 'indices of shape'),
    'heads': (dict(indices=INDICES[:, :, None].expand(2, 1, 3, 3)), 'indices of shape'),
    'columns': (dict(indices=INDICES.transpose(0, 2).contiguous().transpose(0, 2)),
                'indices with a contiguous last dimension'),
    'above': (dict(indices=INDICES + 1), 'indices[0, 0, 1] to be from -1 to 47, got 48'),
    'below': (dict(indices=INDICES - 1), 'indices[0, 0, 2] to be from -1 to 47, got -2'),
    'counts': (dict(index_counts=ints([[3], [4]])), 'index_counts[1, 0] to be from 0 to 3, got 4'),
    'counts below': (dict(index_counts=ints([[-1], [1]])), 'index_counts[0, 0] to be from 0 to 3'),
    'shape of counts': (dict(index_counts=ints([3, 3])), 'index_counts of shape (2, 1), got (2,)'),
    'dtype of counts': (dict(index_counts=ints([[3], [3]]).long()), 'index_counts to be int32'),
    'counts alone': (dict(indices=None, index_counts=ints([[3], [3]])), 'indices to be a tensor'),
    'block alone': (dict(indices=None, index_block=64), 'indices to be a tensor, got None'),
    'block': (dict(index_block=32), 'index_block to be one of (1, 64, 128), got 32'),
    'block of True': (dict(index_block=True), 'index_block to be one of (1, 64, 128), got True'),
    'size': (dict(index_block=64), 'k_cache.size(1) to be a multiple of index_block, 64, got 16'),
    'pages apart': (dict(k_cache=WIDER[:, :16]), 'k_cache with a page stride of 16 * 32'),
    'pages of v apart': (dict(v_cache=WIDER[:, :16]), 'v_cache with a page stride of 16 * 32'),
    'heads apart': (dict(k_cache=torch.randn(3, 16, 3, 16)[:, :, :2],
                         indices=INDICES[:, :, None].expand(2, 1, 2, 3)),
                    'k_cache and v_cache contiguous, or (pages, heads_k, slots, head_dim) in mem'),
    'rank of q': (dict(q=torch.randn(2, 16)), 'q to have 3 or 4 dimensions, got 2'),
    'rank of k': (dict(k_cache=torch.randn(3, 2, 16)), 'k_cache to have 4 dimensions, got 3'),
    'head dim of q': (dict(q=torch.randn(2, 1, 4, 8)),
                      'the head_dim of k_cache to be that of q, 8, got 16'),
    'heads of q': (dict(q=torch.randn(2, 1, 3, 16)),
                   'the heads of q to be a multiple of the heads of k_cache'),
    'v': (dict(v_cache=torch.randn(3, 16, 1, 16)), 'v_cache of shape (3, 16, 2, 16), got (3, '),
    'dtype of v': (dict(v_cache=tensors()['v_cache'].double()), 'v_cache.dtype'),
    'out': (dict(out=torch.empty(2, 1, 4, 8)),
            'out of shape (2, 1, 4, 16), got (2, 1, 4, 8)'),
    'causal': (dict(causal=True), 'no causal with indices, got both'),
    'window': (dict(window_size=(3, -1)), 'no window_size with indices, got both'),
    'chunk': (dict(attention_chunk=4), 'no attention_chunk with indices, got both'),
    'tree': (dict(tree_mask=torch.zeros(2, 1, 4, dtype=torch.int32)),
             'no tree_mask with indices, got both'),
    'leftpad': (dict(cache_leftpad=ints([0, 0])), 'no cache_leftpad with indices, got both'),
    'prefix': (dict(shared_prefix=16), 'no shared_prefix with indices, got both'),
    'table': (dict(page_table=ints([[0], [2]])),
              'page_table to be None with indices, got a tensor'),
    'rows': (dict(cache_batch_idx=ints([0, 1])), 'cache_batch_idx to be None with indices'),
    'lengths': (dict(cache_seqlens=ints([3, 3])), 'cache_seqlens to be None with indices'),
    'length': (dict(cache_seqlens=3), 'cache_seqlens to be None with indices, got 3'),
    'splits': (dict(num_splits=-1), 'num_splits to be from 0 to 256'),
    'parts': (dict(split_size=64, num_splits=2), 'no num_splits above 1 with split_size'),
    'gradients': (dict(q=torch.randn(2, 1, 4, 16, requires_grad=True)), 'requires_grad=False'),
    'e4m3': ({name: tensors()[name].to(torch.float8_e4m3fn) for name in (
        'q', 'k_cache', 'v_cache')}, 'no q of float8_e4m3fn with indices'),
    'scales by page': (dict(descale_by_page=True, k_descale=torch.ones(3, 2),
                            v_descale=torch.ones(3, 2)),
                       'index_block to be the page size, 16, with descale_by_page, got 1'),
}


@pytest.mark.parametrize('appends', [False, True])
@pytest.mark.parametrize(('change', 'text'), BAD.values(), ids=BAD)
def test_bad_input(change, text, appends):
    """Each is an error with its name, and writes nothing."""
    given = tensors() | (NEW if appends else {}) | change
    if appends and {'page_table', 'cache_batch_idx', 'cache_seqlens'} & {*change}:
        pytest.skip('there it belongs to the append')
    before = {name: as_bits(given[name]).clone() for name in ('k_cache', 'v_cache')}
    with pytest.raises(RuntimeError, match=re.escape('flash_attn_with_kvcache: expected') + '.*' +
                       re.escape(text)):
        flash_attn_with_kvcache(**given)
    for name, x in before.items():
        assert torch.equal(as_bits(given[name]), x)


@pytest.mark.parametrize(('change', 'text'), {
    'k': (dict(k=torch.randn(1, 8, 2, 16)), 'k to have 3 dimensions, got 4'),
    'rows': (dict(index_block=64), 'k.size(0) to be a multiple of index_block, 64, got 8'),
    'index': (dict(indices=ints([[8], [0]])), 'indices[0, 0] to be from -1 to 7, got 8'),
    'v': (dict(v=torch.randn(9, 2, 16)), 'v of shape (8, 2, 16), got (9, 2, 16)'),
    'dtype of v': (dict(v=torch.randn(8, 2, 16).double()), 'v.dtype to be that of q'),
    'no indices': (dict(indices=None), 'indices to be a tensor, got None'),
    'heads apart': (dict(k=torch.randn(2, 8, 16).transpose(0, 1), indices=ints([[[0]] * 2] * 2)),
                    'k and v contiguous, for indices by KV head'),
    'head dim': (dict(q=torch.randn(2, 4, 8)), 'the head_dim of k to be that of q, 8'),
}.values())
def test_bad_input_of_the_function_of_packed_tokens(change, text):
    given = dict(q=torch.randn(2, 4, 16), k=torch.randn(8, 2, 16), v=torch.randn(8, 2, 16),
                 indices=ints([[0, 1], [7, -1]]))
    with pytest.raises(RuntimeError, match=re.escape('flash_attn_sparse_func: expected') + '.*' +
                       re.escape(text)):
        flash_attn_sparse_func(**given | change)


MANY = dict(SMALL, tokens=(2, 3), counts=True, sinks=True, out=True)
WHOLE = {
    'dense': ChosenCase(**MANY), 'by_head': ChosenCase(**MANY | dict(by_head=True)),
    'kv8': ChosenCase(**MANY | dict(kv8=True, dtype='bf16')),
    'kv8_packed': ChosenCase(**MANY | dict(tokens=(6,), kv8=True, dtype='bf16', by_head=True)),
    'latent': ChosenCase(**MANY | SMALL_LATENT),
    'rows_of_656': ChosenCase(**LATENTS | dict(tokens=(2, 3), kv8=True, out=True)),
    'sparse': dataclasses.replace(SPARSE['sparse_packed'], counts=True, sinks=True),
}


@pytest.mark.parametrize('name', WHOLE)
def test_each_wrong_tensor_and_number(name):
    """Also for a wrong shape with the right number of elements, and for lists by KV head."""
    case = WHOLE[name]
    function, given = named(case, case.arguments('cpu'))
    changes = wrong_calls(given)
    assert len(changes) > 30
    for what, change in changes.items():
        expect_refused(given, what, change, function)


OUT = torch.zeros(2, 3, 8, 24)
APART = {
    'dtype': (OUT.double()[..., ::2, :], 'out.dtype'),
    'expanded': (OUT[:1, :1, ::2].expand(2, 3, 4, 24), 'out.stride(1) not to be 0'),
}


@pytest.mark.parametrize(('out', 'text'), APART.values(), ids=APART)
@pytest.mark.parametrize('by_head', [False, True])
def test_out_without_rows_is_checked(out, text, by_head):
    case = dataclasses.replace(CASES['queries'], by_head=by_head, heads=(4, 2))
    given = case.arguments('cpu') | dict(out=out.transpose(0, 1).contiguous().transpose(0, 1)
                                         if text == 'out.dtype' else out)
    with pytest.raises(RuntimeError, match='expected ' + re.escape(text)):
        flash_attn_with_kvcache(**given)


def test_out_without_rows_apart_from_q():
    case = dataclasses.replace(CASES['by_head'], head_dim_v=16)
    given = case.arguments('cpu')
    given['q'] = given['out'] = given['q'].transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(RuntimeError, match='expected out with memory of its own, got the memory'):
        flash_attn_with_kvcache(**given)


@pytest.mark.parametrize(('starts', 'text'), [
    ([0, 1, 7], r'cu_seqlens_q\[2\], the end of sequence 1'),
    ([1, 2, 5], r'cu_seqlens_q\[0\] to be 0'),
    ([0, 3, 2], r'cu_seqlens_q\[2\]'), ([0], 'cu_seqlens_q of one sequence'),
    ([], 'cu_seqlens_q of shape'), ([[0, 5]], 'cu_seqlens_q of shape')], ids=str)
@pytest.mark.parametrize('name', ['packed', 'packed_by_head'])
def test_wrong_starts(name, starts, text):
    given = CASES[name].arguments('cpu') | dict(cu_seqlens_q=ints(starts))
    with pytest.raises(RuntimeError, match=text):
        flash_attn_with_kvcache(**given)


# ---------------------------------------------------------------------------------------- append
@pytest.mark.parametrize('rotary', [False, True])
@pytest.mark.parametrize('is_packed', [False, True])
def test_append_then_attend(is_packed, rotary):
    """New keys go where page_table and cache_seqlens say, and can be chosen."""
    given = tensors() | NEW
    if is_packed:
        given |= dict(q=given['q'][:, 0], indices=given['indices'][:, 0],
                      cu_seqlens_q=ints([0, 1, 2]))
    tables = {}
    if rotary:
        angle = torch.rand(16, 4)
        tables = dict(rotary_cos=angle.cos(), rotary_sin=angle.sin())
    given['indices'][..., 0] = ints([3, 32]).view(-1, *[1] * (not is_packed))    # the new ones
    own = {name: given[name].clone() for name in ('k_cache', 'v_cache')}
    plain = {name: x for name, x in given.items() if name != 'indices'}
    flash_attn_with_kvcache(**plain | own | tables)
    *_, rotated = torch.ops.flash_attn3.append_and_attend(
        given['q'], *(x.clone() for x in own.values()), None, None, None, None, None,
        *tables.values() or (None, None), ints([3, 0]), True, True, None, ints([[0], [2]]),
        cu_seqlens_q=given.get('cu_seqlens_q'))
    out = flash_attn_with_kvcache(**given | tables)
    for name, x in own.items():
        assert torch.equal(given[name], x)
    wanted = flash_attn_with_kvcache(rotated if rotary else given['q'], *own.values(),
                                     indices=given['indices'])
    torch.testing.assert_close(out, wanted)


def test_queries_in_the_cache_count_as_before_the_append():
    given = tensors() | NEW | dict(heads=None)
    del given['heads']
    given['q'] = given['k_cache'][:2, 3:4]
    q = given['q'].clone()
    out = flash_attn_with_kvcache(**given)
    wanted = flash_attn_with_kvcache(q, given['k_cache'], given['v_cache'],
                                     indices=given['indices'])
    assert torch.equal(out, wanted)


@pytest.mark.parametrize('name', ['packed', 'sparse_packed'])
def test_invariant(name, monkeypatch):
    """Parts have the size of the context."""
    sizes = []

    def attend(*tensors, **own):
        sizes.append(own['split_size'])
        return attend_cache.attend_plainly(*tensors, *attend_cache.Attend(**own))

    case = (CASES | SPARSE)[name]
    monkeypatch.setattr(kvcache, 'functions_for', lambda *_: (attend, None))
    with invariant(split_size=256):
        call(case, case.arguments('cpu'))
    assert sizes == [256]


# --------------------------------------------------------------------------------------- tracing
@pytest.mark.parametrize('dynamic', [False, True])
@pytest.mark.parametrize('name', ['queries', 'sinks_by_head', 'blocks', 'latent_packed', 'append'])
def test_compiled(name, dynamic):
    """One graph, and the same result."""
    def step(given: dict) -> tuple:
        return flash_attn_with_kvcache(**given | dict(return_softmax_lse=True))[:2]

    given = tensors() | NEW if name == 'append' else CASES[name].arguments('cpu')
    wanted = step({key: x.clone() if isinstance(x, torch.Tensor) else x
                   for key, x in given.items()})
    torch._dynamo.reset()
    counter = CompileCounterWithBackend('aot_eager')
    got = torch.compile(step, backend=counter, fullgraph=True, dynamic=dynamic)(given)
    assert compilations(counter) == 1
    for x, y in zip(got, wanted):
        torch.testing.assert_close(x, y)


def test_a_compiled_append_is_never_refused_after_it_has_written():
    """Compiled code clamps counts, which the CPU path would refuse behind the append."""
    def step(given: dict) -> torch.Tensor:
        return flash_attn_with_kvcache(**given)

    given, own = (tensors() | NEW for _ in range(2))
    wanted = step(own | dict(index_counts=ints([[3], [0]])))
    torch._dynamo.reset()
    compiled = torch.compile(step, backend='aot_eager', fullgraph=True)
    torch.testing.assert_close(compiled(given | dict(index_counts=ints([[9], [-4]]))), wanted)
    for change in (dict(out=torch.empty(1, 2, 4, 16)), dict(s_aux=torch.zeros(1)),
                   dict(indices=INDICES.long()), dict(num_splits=-1), dict(causal=True)):
        before = {name: given[name].clone() for name in ('k_cache', 'v_cache')}
        other = dict(k=torch.ones(2, 1, 2, 16), v=torch.ones(2, 1, 2, 16))
        with pytest.raises(Exception, match='expected'):
            compiled(given | other | change)
        for name, x in before.items():
            assert torch.equal(given[name], x), change


def test_vmap():
    """Over caches and lists, whose values are not read."""
    case = CASES['sinks_by_head']
    given = [dataclasses.replace(case, seed=seed, out=False).arguments('cpu') for seed in (0, 1)]
    names = [name for name, x in given[0].items() if isinstance(x, torch.Tensor)]
    options = {name: x for name, x in given[0].items() if name not in names}
    got = torch.func.vmap(lambda *own: flash_attn_with_kvcache(**dict(zip(names, own)), **options)[
        :2])(*(torch.stack([own[name] for own in given]) for name in names))
    for i, own in enumerate(given):
        for x, y in zip(got, flash_attn_with_kvcache(**own)):
            torch.testing.assert_close(x[i], y)


def test_compiled_sparse():
    given = SPARSE['sparse_packed'].arguments('cpu')
    q, k, v = given['q'], *(given[name].flatten(0, 1) for name in ('k_cache', 'v_cache'))
    compiled = torch.compile(flash_attn_sparse_func, backend='aot_eager', fullgraph=True)
    out = compiled(q, k, v, given['indices'])
    torch.testing.assert_close(out, flash_attn_sparse_func(q, k, v, given['indices']))


def test_checks_of_values(monkeypatch):
    """Without data they cannot be read; env.CHECK_CONTENTS is for GPUs."""
    monkeypatch.setattr(env, 'CHECK_CONTENTS', True)
    given = {name: x.to('meta') for name, x in tensors().items()}
    out = flash_attn_with_kvcache(**given)
    assert out.shape == (2, 1, 4, 16) and out.is_meta


# -------------------------------------------------------------------------------- can_use, explain
def test_can_use_and_explain(capsys):
    given = dict(indices=INDICES, k_cache=torch.randn(3, 16, 2, 64).bfloat16(),
                 v_cache=torch.randn(3, 16, 2, 64).bfloat16())
    q = torch.randn(2, 1, 4, 64).bfloat16()
    _, reasons = can_use(q, **given)
    assert not any('indices' in reason for reason in reasons)
    _, reasons = can_use(q, **given, causal=True)
    assert any('no causal with indices' in reason for reason in reasons)
    _, reasons = can_use(q, **given | dict(indices=INDICES.long()))
    assert any('indices to be int32' in reason for reason in reasons)
    explain(q, given['k_cache'], given['v_cache'], cache=True, indices=(2, 1, 3))
    assert 'pages of 1, 3 a sequence' in capsys.readouterr().out
