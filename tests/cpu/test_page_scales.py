"""Scales by (page, KV head) of an e4m3 cache on CPU tensors: values against float64 of the
dequantised cache, what an append sets, sharing, tracing, can_use.
"""
from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from torch.library import opcheck

from flash_attn3 import can_use, flash_attn_with_kvcache
from flash_attn3.ops import attend_cache

from tests.support.cache_cases import CacheCase, mixed
from tests.support.cache_oracle import check_case
from tests.support.lists import ints

E4M3 = torch.float8_e4m3fn
OPS = torch.ops.flash_attn3
PAGE, HEADS, DIM = 4, 2, 16


def pages(count: int = 8, element: torch.dtype = torch.float32) -> dict:
    """Two sequences of 7 and 5 slots with pages in falling order; scales are no powers of two."""
    torch.manual_seed(0)
    scales = [torch.rand(count, HEADS) + 0.5 for _ in 'kv']
    k_cache, v_cache = torch.randn(2, count, PAGE, HEADS, DIM).to(E4M3)
    table = ints(list(range(count))[::-1]).view(2, -1)
    return dict(q=torch.randn(2, 1, 4, DIM).to(element), k_cache=k_cache, v_cache=v_cache,
                cache_seqlens=ints([7, 5]), page_table=table, k_descale=scales[0],
                v_descale=scales[1], descale_by_page=True)


def new_rows(count: int = 3, element: torch.dtype = torch.float32) -> dict:
    return dict(zip('kv', torch.randn(2, 2, count, HEADS, DIM).to(element)))


# ------------------------------------------------------------------------------------------- values
def attended(given: dict, lengths: list[int]) -> torch.Tensor:
    """In float64, head by head, from the dequantised cache."""
    scales = {name: given[f'{name}_descale'].double()[:, None, :, None] for name in 'kv'}
    wide = {name: given[f'{name}_cache'].double() * scale for name, scale in scales.items()}
    out = torch.zeros(given['q'].shape, dtype=torch.float64)
    for b, length in enumerate(lengths):
        k, v = (x[given['page_table'][b].long()].flatten(0, 1)[:length] for x in wide.values())
        for head in range(4):
            scores = k[:, head // 2] @ given['q'][b, 0, head].double() * DIM ** -0.5
            out[b, 0, head] = scores.softmax(0) @ v[:, head // 2]
    return out


@pytest.mark.parametrize('element, bound', [(torch.float64, 1e-12), (torch.float32, 1e-6),
                                            (torch.bfloat16, 5e-3), (torch.float16, 1e-3)], ids=str)
def test_values(element, bound):
    given = pages(element=element)
    for name in ('k_descale', 'v_descale'):    # pages 7, 6 and 3, 2 are needed
        given[name][[0, 1, 4, 5]] = math.nan
    out, wanted = flash_attn_with_kvcache(**given), attended(given, [7, 5])
    assert out.dtype == element and (out.double() - wanted).norm() <= bound * wanted.norm()
    given |= new_rows(3, element)
    out, wanted = flash_attn_with_kvcache(**given), attended(given, [10, 8])
    assert (out.double() - wanted).norm() <= bound * wanted.norm()


def drawn(number: int) -> CacheCase:
    pick = random.Random(number)
    count, queries = pick.choice([1, 2, 5]), pick.choice([1, 1, 3])
    case = CacheCase(mixed(count, 70, queries), page_size=pick.choice([1, 7, 16, 48, 64, 256]),
                     head_dim=pick.choice([64, 128]), dtype=pick.choice(['bf16', 'fp16', 'fp32']),
                     heads=(8, 2), causal=pick.random() < 0.5, kv8=True, by_page=True,
                     layout=pick.choice(['', 'heads_first']))
    if pick.random() < 0.7:
        case = dataclasses.replace(case, new=(pick.choice([1, 2, 40]),) * count,
                                   rotary=pick.choice([0.0, 0.5]))
    return case


@pytest.mark.parametrize('number', range(30))
def test_grid(number):
    """Results, the cache and every scale; NaN wherever nothing is needed."""
    check_case(drawn(number), 'cpu')


# ------------------------------------------------------------------------------------------- append
def test_an_append_sets_the_scales_of_new_pages():
    """Sequence 0 fills slot 7 of its second page and begins a third; sequence 1 begins none."""
    given = pages() | new_rows()
    before = {name: given[name].clone() for name in ('k_descale', 'v_descale')}
    flash_attn_with_kvcache(**given)
    for name in 'kv':
        wanted = before[f'{name}_descale']
        largest = given[name][0, 1:].abs().amax((0, 2))
        wanted[5] = 2.0 ** (largest / 224).log2().ceil()
        assert torch.equal(given[f'{name}_descale'], wanted)
        rows = given[name][0, 1:] / wanted[5][:, None]
        assert torch.equal(given[f'{name}_cache'][5, :2].float(), rows.to(E4M3).float())
        old = (given[name][1] / wanted[2][:, None]).clamp(-448, 448).to(E4M3)
        assert torch.equal(given[f'{name}_cache'][2, 1:].float(), old.float())


@pytest.mark.parametrize('largest, scale', [
    (1.0, 2.0 ** -7), (224.0, 1.0), (225.0, 2.0), (112.0, 0.5), (0.0, 2.0 ** -60),
    (1e-30, 2.0 ** -60), (math.nan, 2.0 ** -60), (math.inf, 2.0 ** 121)])
def test_scales_of_new_pages(largest, scale):
    """Powers of two by which the largest element becomes 112 to 224; NaN does not count."""
    given = pages() | dict(cache_seqlens=ints([8, 8]))
    k = torch.zeros(2, 1, HEADS, DIM)
    k[:, 0, :, 3] = -largest
    flash_attn_with_kvcache(**given, k=k, v=k)
    for name in ('k_descale', 'v_descale'):
        assert (given[name][[5, 1]] == scale).all()


def test_a_call_that_is_refused_sets_nothing():
    given = pages() | new_rows() | dict(softcap=-1.0)
    before = given['k_descale'].clone()
    with pytest.raises(RuntimeError, match='softcap'):
        flash_attn_with_kvcache(**given)
    assert torch.equal(given['k_descale'], before)


# ------------------------------------------------------------------------------------------ sharing
def test_shared_prefix():
    """The same as without, also with an append."""
    given = pages() | dict(cache_seqlens=ints([7, 5]))
    given['page_table'][1, 0] = given['page_table'][0, 0]
    wanted = flash_attn_with_kvcache(**given)
    given['page_table'][1, 0] = -1    # never followed
    torch.testing.assert_close(flash_attn_with_kvcache(**given, shared_prefix=4), wanted)
    same = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    new = new_rows()
    got = flash_attn_with_kvcache(**given, **new, shared_prefix=4)
    same['page_table'][1, 0] = same['page_table'][0, 0]
    wanted = flash_attn_with_kvcache(**same, **new)
    torch.testing.assert_close(got, wanted)
    assert torch.equal(given['k_descale'], same['k_descale'])


# ------------------------------------------------------------------------------------------ tracing
def test_opcheck():
    """But for test_schema, which compares e4m3 by what it lacks."""
    utils = 'test_autograd_registration', 'test_faketensor', 'test_aot_dispatch_dynamic'
    given, new = pages(), new_rows()
    fields = attend_cache.Attend._fields
    attend = attend_cache.Attend(**{name: given[name] for name in fields if name in given})
    opcheck(OPS.attend_cache.default, (given['q'], given['k_cache'], given['v_cache'], None,
                                       *attend), test_utils=utils)
    own = attend._replace(appended=3, k_descale=None, v_descale=None)
    q, k_cache, v_cache, *scales = (given[name] for name in (
        'q', 'k_cache', 'v_cache', 'k_descale', 'v_descale'))
    opcheck(OPS.append_and_attend.default, (q, k_cache, v_cache, new['k'], new['v'], None, *scales,
                                            *attend_cache.Rotary(), *own), test_utils=utils)


@pytest.mark.parametrize('dynamic', [False, True])
def test_compiled(dynamic):
    """One graph; caches and scales are written in place."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda given: flash_attn_with_kvcache(**given), fullgraph=True,
                             backend='aot_eager', dynamic=dynamic)
    given, same = (pages() | new_rows() for _ in range(2))
    with torch.no_grad():
        assert torch.equal(compiled(given), flash_attn_with_kvcache(**same))
    for name in ('k_descale', 'v_descale', 'k_cache', 'v_cache'):
        assert torch.equal(given[name].float(), same[name].float())


@pytest.mark.parametrize('change, text', [
    ({}, ''),
    ({'page_table': None},
     'flash_attn_with_kvcache: expected k_cache to have the shape'),
    ({'k_descale': None},
     'flash_attn_with_kvcache: expected k_descale with descale_by_page'),
    ({'v_descale': torch.ones(2, 2)},
     'flash_attn_with_kvcache: expected v_descale to have the shape (8, 2)')],
    ids=str)
def test_can_use(change, text):
    given = pages(element=torch.bfloat16) | new_rows(element=torch.bfloat16)
    reasons = can_use(**given | change)[1]
    assert len(reasons) == 1 if not text else any(text in reason for reason in reasons), reasons
