"""Keys that each query chooses by index, on the GPU: against float64, with NaN in every slot that
nobody has chosen. The CPU path: tests/cpu/test_chosen_keys.py.
"""
from __future__ import annotations

import dataclasses

import pytest
import torch

from flash_attn3 import env, flash_attn_with_kvcache

from tests.gpu.common import spoil_allocator
from tests.support import compare
from tests.support.cache_cases import as_bits
from tests.support.cache_oracle import check_same
from tests.support.chosen_cases import LATENT, ChosenCase, call, check, check_case
from tests.support.lists import ints

GQA = dict(pages=40, count=300)
KINDS = {
    'latent': dict(LATENT, **GQA), 'latent_fp16': dict(LATENT, dtype='fp16', **GQA),
    'rows_of_656': dict(LATENT, kv8=True, **GQA),
    'gqa_64': GQA, 'gqa_128': dict(GQA, head_dim=128, head_dim_v=128),
    'gqa_128_fp16': dict(GQA, head_dim=128, head_dim_v=128, dtype='fp16', heads=(32, 4)),
    'kv8': dict(GQA, head_dim=128, head_dim_v=128, kv8=True),
}
every_kind = pytest.mark.parametrize('kind', KINDS)
LATENTS = 'latent', 'latent_fp16', 'rows_of_656'
OPTIONS = {
    'plain': {}, 'one_key': dict(count=1), 'empty': dict(count=0), 'tile': dict(count=64),
    'counts': dict(counts=True), 'long': dict(count=2048, pages=80), 'alike': dict(alike=True),
    'prefill': dict(tokens=(2, 37), counts=True), 'packed': dict(tokens=(33,), counts=True),
    'sinks': dict(sinks=True, tokens=(3, 2)), 'outside': dict(wild=True, counts=True),
    'one_part': dict(num_splits=1), 'parts': dict(num_splits=7, count=1000),
    'fixed': dict(split_size=128, count=1000), 'margin': dict(sm_margin=100, count=1000),
    'out': dict(out=True, tokens=(2, 3)), 'no_lse': dict(lse=False), 'pages_of_1': dict(
        page_size=1, pages=900), 'one_query': dict(tokens=(1, 1), count=1000),
    'maxima': dict(max_logits=True, counts=True, tokens=(3, 2), sinks=True),
    'maxima_of_parts': dict(max_logits=True, num_splits=7, count=1000, lse=False),
}


def case_of(kind: str, **options) -> ChosenCase:
    return ChosenCase(**KINDS[kind] | options)


@pytest.mark.smoke
@pytest.mark.parametrize('option', OPTIONS)
@every_kind
def test_against_float64(kind, option, device):
    spoil_allocator(device)
    check_case(case_of(kind, **OPTIONS[option]), device)


@pytest.mark.parametrize('heads', [1, 8, 16, 40, 64, 128])
@pytest.mark.parametrize('kind', LATENTS)
def test_heads(kind, heads, device):
    for tokens in ((5, 1), (2, 9)):
        check_case(case_of(kind, heads=(heads, 1), tokens=tokens, counts=True), device)


@pytest.mark.parametrize('heads', [(1, 1), (16, 1), (8, 8), (14, 2)])
@pytest.mark.parametrize('kind', ['gqa_64', 'gqa_128', 'kv8'])
def test_heads_of_gqa(kind, heads, device):
    check_case(case_of(kind, heads=heads, counts=True), device)


@pytest.mark.smoke
@pytest.mark.parametrize('block', [64, 128])
@pytest.mark.parametrize('page_size', [64, 128, 256])
@every_kind
def test_blocks(kind, page_size, block, device):
    if page_size % block:
        pytest.skip('a page has whole blocks')
    for options in ({}, dict(wild=True, counts=True, tokens=(2, 3)), dict(sinks=True)):
        check_case(case_of(kind, page_size=page_size, block=block, count=9, pages=12, **options),
                   device)


@pytest.mark.parametrize('options', [{}, dict(tokens=(2, 5), counts=True), dict(sinks=True),
                                     dict(tokens=(7,), sinks=True, out=True), dict(wild=True),
                                     dict(block=64, page_size=64, count=5, heads_first=True),
                                     dict(block=64, page_size=128, count=5, wild=True),
                                     dict(block=128, page_size=128, count=3, tokens=(2, 5)),
                                     dict(max_logits=True, sinks=True, tokens=(3, 2))],
                         ids=str)
@pytest.mark.parametrize('kind', ['gqa_64', 'gqa_128', 'gqa_128_fp16', 'kv8'])
def test_lists_by_head(kind, options, device):
    check_case(case_of(kind, by_head=True, **options), device)


@pytest.mark.parametrize('options', [{}, dict(block=64, count=7), dict(sinks=True, counts=True),
                                     dict(max_logits=True)],
                         ids=str)
@pytest.mark.parametrize('kind', ['latent', 'gqa_128', 'gqa_64'])
def test_packed_tokens(kind, options, device):
    """flash_attn_sparse_func."""
    check_case(case_of(kind, sparse=True, tokens=(65,), **options), device)


@pytest.mark.smoke
@pytest.mark.parametrize('heads', [16, 128])
@pytest.mark.parametrize('options', [dict(sinks=True, tokens=(3, 2)), dict(page_size=1, pages=900),
                                     dict(tokens=(70,), counts=True)], ids=str)
@pytest.mark.parametrize('kind', ['latent', 'rows_of_656'])
def test_latents_without_rotary_columns(kind, options, heads, device):
    """The bits of a call with q and k_cache of zeros."""
    case = case_of(kind, **options, heads=(heads, 1))
    given = case.arguments(device)
    zeros = {name: torch.zeros_like(given[name]) for name in ('q', 'k_cache')}
    wanted = call(case, given | zeros | dict(softmax_scale=512 ** -0.5))
    check_same(call(case, given | dict(q=None, k_cache=None)), wanted)


@pytest.mark.parametrize('kind', ['latent', 'rows_of_656', 'gqa_128'])
def test_prefill(kind, device):
    check_case(case_of(kind, tokens=(700,), count=512, pages=64, counts=True), device)


@pytest.mark.parametrize('options', [dict(softcap=5.0), dict(softmax_scale=0.3)], ids=str)
@pytest.mark.parametrize('kind', ['gqa_64', 'gqa_128'])
def test_scores(kind, options, device):
    check_case(case_of(kind, **options), device)


@every_kind
def test_the_order_of_a_list_of_a_page_is_free(kind, device):
    """As the dense cache: all slots of a page, each once, in any order."""
    case = case_of(kind, pages=3, page_size=64, tokens=(3, 1), count=64)
    given = case.arguments(device)
    order = torch.randperm(64, device=device).int()
    given['indices'] = (64 * torch.arange(3, device=device).int()[:, None] + order)[:, None]
    for name in ('k_cache', 'v_cache'):
        x = torch.randn(given[name].shape, device=device).to(given[name].dtype)
        as_bits(given[name]).copy_(as_bits(x))
    if 'v_descale' in given and case.latent:
        given['v_descale'].fill_(0.5)
    check(case, given, call(case, given))


@every_kind
def test_a_graph(kind, cuda):
    """Captured once, replayed with other indices and counts; each call has the bits of an eager
    one.
    """
    case = case_of(kind, tokens=(8, 1), count=500, counts=True, wild=True)
    given = case.arguments(cuda)
    call(case, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(case, given)
    for seed in range(1, 20):
        other = dataclasses.replace(case, seed=seed).arguments(cuda)
        for name, x in given.items():
            if isinstance(x, torch.Tensor) and x.is_cuda:
                as_bits(x).copy_(as_bits(other[name]))
        for x in results.tensors:
            x.fill_(torch.nan)
        graph.replay()
        check_same(results, call(case, other))
        check(case, other, results)


@every_kind
def test_the_same_bits_each_time_and_in_any_batch(kind, device):
    """With parts of a fixed size a row's bits depend on its own list."""
    case = case_of(kind, tokens=(9, 1), count=700, split_size=128)
    given = case.arguments(device)
    wanted = call(case, given)
    check_same(call(case, given), wanted)
    if 'k_descale' in given:
        return
    own = dict(given, q=given['q'][3:4], indices=given['indices'][3:4])
    own |= {'qv': given['qv'][3:4]} if case.latent else {}
    got = call(case, own)
    compare.check_equal(got.out[0], wanted.out[3], 'out')


@pytest.mark.parametrize('rotary', [False, True])
@pytest.mark.parametrize('kind', ['latent', 'rows_of_656', 'gqa_128'])
def test_append_then_attend(kind, rotary, device):
    """The cache is as after the append alone; new keys can be chosen."""
    case = case_of(kind, tokens=(3, 1))
    given = case.arguments(device)
    heads_k, size = case.heads[1], case.page_size
    table = torch.randperm(case.pages, device=device)[:3, None].int()
    new = dict(k=torch.randn(3, 1, heads_k, case.head_dim, device=device).bfloat16(),
               v=torch.randn(3, 1, heads_k, case.head_dim_v, device=device).bfloat16(),
               cache_seqlens=ints([0, 5, size - 1], device), page_table=table)
    if rotary:
        angle = torch.rand(size, case.head_dim // 2, device=device)
        new |= dict(rotary_cos=angle.cos().bfloat16(), rotary_sin=angle.sin().bfloat16())
    given['indices'][:, 0, 0] = table[:, 0] * size + new['cache_seqlens']
    own = {name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
           for name in ('k_cache', 'v_cache', 'v_descale')
           if isinstance(x := given.get(name), torch.Tensor)}
    for name, x in own.items():
        as_bits(x).copy_(as_bits(given[name]))
    *_, rotated = torch.ops.flash_attn3.append_and_attend(
        given['q'], own['k_cache'], own['v_cache'], new['k'], new['v'], None, None,
        own.get('v_descale'), new.get('rotary_cos'), new.get('rotary_sin'), None, True, True,
        new['cache_seqlens'], table, qv=given.get('qv'))
    wanted = call(case, given | own | ({'q': rotated} if rotary else {}))
    got = call(case, given | new)
    for name, x in own.items():
        assert torch.equal(as_bits(given[name]), as_bits(x)), name
    check_same(got, wanted)
    check(case, given | ({'q': rotated} if rotary else {}), got)


def test_a_refused_append_writes_nothing(device):
    case = case_of('latent')
    given = case.arguments(device)
    new = dict(k=torch.randn(3, 1, 1, 64, device=device).bfloat16(),
               v=torch.randn(3, 1, 1, 512, device=device).bfloat16(),
               cache_seqlens=ints([0, 5, 9], device), page_table=ints([[0], [1], [2]], device))
    before = {name: as_bits(given[name]).clone() for name in ('k_cache', 'v_cache')}
    wrong = (dict(causal=True), dict(indices=given['indices'].long()), dict(num_splits=-1),
             dict(out=torch.empty(3, 1, 16, 8, device=device)), dict(qv=given['qv'][:2]),
             dict(s_aux=torch.zeros(3, device=device)), dict(softcap=1.0))
    for change in wrong:
        with pytest.raises(RuntimeError, match='flash_attn_with_kvcache: expected'):
            flash_attn_with_kvcache(**given | new | change)
        for name, x in before.items():
            assert torch.equal(as_bits(given[name]), x), change


def test_checks_of_values(cuda, monkeypatch):
    monkeypatch.setattr(env, 'CHECK_CONTENTS', True)
    case = case_of('gqa_64', wild=True)
    with pytest.raises(RuntimeError, match=r'indices\[.*\] to be from -1 to 2559'):
        call(case, case.arguments(cuda))


@pytest.mark.parametrize('kind', ['latent', 'gqa_128'])
def test_compiled(kind, device):
    case = case_of(kind, tokens=(2, 3), counts=True)
    given = case.arguments(device)
    wanted = call(case, given)
    got = torch.compile(call, fullgraph=True, dynamic=False)(case, given)
    check_same(got, wanted)
