"""Scales by (page, KV head) of an e4m3 cache under 16-bit queries: every page size, append,
features; NaN in pages, and their scales, that no sequence needs. Held to the oracle of
tests/support/cache_oracle.py, and to float64 of the dequantised cache.
"""
from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from flash_attn3 import flash_attn_with_kvcache
from flash_attn3.ops.attend_cache import Attend, Rotary

from tests.support.cache_cases import CacheCase, as_bits, mixed
from tests.support.cache_oracle import (check, check_case, check_same, expected, one_of, packed,
                                        power_from, run)
from tests.support.lists import ints

DECODE = CacheCase(mixed(7, 700), heads=(8, 2), kv8=True, by_page=True)
TALL = CacheCase(((5, 300), (5, 4), (5, 650)), heads=(4, 2), causal=True, kv8=True, by_page=True)
MOST_ERROR = 5e-3    # relative, in out
every_page_size = pytest.mark.parametrize('page_size', [1, 16, 48, 64, 256])
every_kind = pytest.mark.parametrize('dtype, head_dim', [
    ('bf16', 64), ('fp16', 64), ('bf16', 128), ('fp16', 128)])
wide = pytest.mark.parametrize('dtype', ['bf16', 'fp16'])


def of(case: CacheCase, dtype: str, head_dim: int, page_size: int, **changes) -> CacheCase:
    return dataclasses.replace(case, dtype=dtype, head_dim=head_dim, page_size=page_size, **changes)


def check_error(case: CacheCase, device: torch.device) -> None:
    """Also against float64 of the cache as the call has left it."""
    arguments = case.arguments(device)
    got, after = run(case, arguments)
    out, ref = packed(case, got).out.double(), expected(case, after).ref.out
    assert (out - ref).norm() <= MOST_ERROR * ref.norm()
    check_case(case, device)


@pytest.mark.smoke
@every_page_size
@every_kind
def test_page_sizes(dtype, head_dim, page_size, device):
    check_error(of(DECODE, dtype, head_dim, page_size), device)


@pytest.mark.smoke
@every_page_size
@every_kind
@pytest.mark.parametrize('rotary', [0.0, 0.5])
def test_append(rotary, dtype, head_dim, page_size, device):
    """Into pages that are begun and new ones, whose scales are NaN before."""
    check_error(of(TALL, dtype, head_dim, page_size, new=(70,) * 3, rotary=rotary), device)
    check_error(of(DECODE, dtype, head_dim, page_size, new=(1,) * 7, rotary=rotary), device)


@pytest.mark.smoke
@pytest.mark.parametrize('num_splits', [0, 3, 256])
@pytest.mark.parametrize('page_size', [16, 48, 272])
@pytest.mark.parametrize('head_dim', [128, 192, 256, 272, 512])
def test_parts(head_dim, page_size, num_splits, device):
    """CTAs compute parts of one K tile, in turn, of sequences whose pages have other scales."""
    lengths = tuple((5, keys) for keys in (64, 16, 224, 258, 176, 183, 257, 34, 80))
    for case in (dataclasses.replace(TALL, lengths=lengths, heads=(6, 2), pack_gqa=False),
                 dataclasses.replace(DECODE, lengths=mixed(40, 300), logit_std=4.0)):
        check_case(of(case, 'bf16', head_dim, page_size, num_splits=num_splits), device)


@every_page_size
def test_packed_append(page_size, device):
    """Sequences with nothing new between the others; queries and new keys packed."""
    case = CacheCase(((3, 300), (0, 0), (1, 63), (40, 0), (9, 16), (2, 500)), heads=(4, 2),
                     is_packed=True, new=(3, 0, 1, 40, 0, 130), new_packed=True, kv8=True,
                     by_page=True, page_size=page_size, rotary=1.0, interleaved=False)
    check_error(case, device)


@wide
@pytest.mark.parametrize('head_dims', [(192, 128), (256, 256), (96, 96), (64, 128), (512, 512)],
                         ids=str)
@pytest.mark.parametrize('page_size', [1, 12, 64])
def test_head_dims(page_size, head_dims, dtype, device):
    check_error(of(TALL, dtype, head_dims[0], page_size, head_dim_v=head_dims[1], new=(9,) * 3),
                device)


@wide
@pytest.mark.parametrize('changes', [
    dict(window=(100, 0)), dict(softcap=5.0), dict(chunk=50), dict(sinks='fp32'),
    dict(leftpad=(7, 4, 300)), dict(num_splits=3), dict(split_size=128), dict(is_packed=True),
    dict(out=True), dict(layout='rows_of_both'), dict(layout='heads_first', new=(40,) * 3),
    dict(tree=True, lengths=((5, 300), (5, 5), (5, 650))), dict(data='onehot', new=(17,) * 3),
    dict(shared=160, lengths=((5, 300), (5, 170), (5, 650))), dict(heads=(16, 1)),
    dict(lengths=((70, 300), (70, 100), (70, 650)), heads=(4, 4))], ids=str)
@pytest.mark.parametrize('page_size', [1, 16])
def test_features(page_size, changes, dtype, device):
    check_case(of(TALL, dtype, 64, page_size, **changes), device)


@pytest.mark.parametrize('page_size', [1, 16, 256])
def test_nan_of_a_page_that_is_needed(page_size, device):
    """It reaches the queries of its head, of its sequence."""
    case = of(DECODE, 'bf16', 64, page_size)
    arguments = case.arguments(device)
    arguments['v_descale'][arguments['page_table'][0, 0], 1] = math.nan
    out = run(case, arguments)[0].out
    assert out[0, 0, 4:].isnan().all()
    assert not out[0, 0, :4].isnan().any() and not out[1:].isnan().any()


@wide
@pytest.mark.parametrize('scale', [1.0, 2.0 ** -10, 2.0 ** 6], ids=str)
def test_powers_of_two_are_exact(scale, dtype, device):
    """As one scale of all, to the bit, where nothing is rounded: with scores of 0."""
    case = of(DECODE, dtype, 128, 16)
    arguments = case.arguments(device)
    arguments['q'].zero_()
    by_page = {name: torch.full_like(arguments[name], scale) for name in ('k_descale', 'v_descale')}
    by_head = {name: x[:1].expand(case.batch, -1) for name, x in by_page.items()}
    got = run(case, arguments | by_page)[0]
    check_same(got, run(case, arguments | by_head | dict(descale_by_page=False))[0])


def test_a_sequence_alone_has_the_same_bits(device):
    """With parts that begin at the same keys."""
    case = of(DECODE, 'bf16', 128, 16, split_size=256)
    arguments = case.arguments(device)
    got = run(case, arguments)[0]
    for b in (0, 3, 4):
        alone = dataclasses.replace(case, lengths=case.lengths[b:b + 1])
        own = arguments | {name: arguments[name][b:b + 1]
                           for name in ('q', 'page_table', 'cache_seqlens')}
        check_same(one_of(alone, run(alone, own)[0], 0), one_of(case, got, b))


# ------------------------------------------------------------------------------------------ append
def pages(device: torch.device, count: int = 6, page_size: int = 4, heads: int = 2) -> dict:
    """An empty cache, a sequence with pages in falling order, scales of NaN."""
    scales = torch.full((count, heads), math.nan, device=device)
    caches = torch.zeros(2, count, page_size, heads, 64, device=device).to(torch.float8_e4m3fn)
    table = ints([list(range(count))[::-1]], device)
    return dict(zip(('k_cache', 'v_cache'), caches), page_table=table, k_descale=scales,
                v_descale=scales.clone(), descale_by_page=True)


def append(given: dict, k: torch.Tensor, v: torch.Tensor, length: int) -> torch.Tensor:
    """k, v: (new, heads, head_dim)."""
    q = torch.ones(1, 1, 2 * k.size(1), 64, device=k.device, dtype=k.dtype)
    return flash_attn_with_kvcache(q, k=k[None], v=v[None], cache_seqlens=ints([length], k.device),
                                   **given)


@wide
def test_numbers(dtype, device):
    """Largest elements of 1, 224, 225 and 0 give 2^-7, 1, 2 and the least scale."""
    element = {'bf16': torch.bfloat16, 'fp16': torch.float16}[dtype]
    given = pages(device)
    k = torch.zeros(8, 2, 64, device=device, dtype=element)
    k[:4, 0, 5], k[:4, 1, 63] = torch.tensor([[0.5, 1, -0.25, 0], [1, -224, 3, 4]], device=device)
    k[5, 0, 0] = -225
    append(given, k, -k, 0)
    wanted = torch.tensor([[2.0 ** -7, 1.0], [2.0, 2.0 ** -60]], device=device)
    for name, sign in (('k', 1), ('v', -1)):
        assert torch.equal(given[f'{name}_descale'][[5, 4]], wanted)
        assert given[f'{name}_descale'][:4].isnan().all()
        rows = given[f'{name}_cache'][[5, 4]].float() * wanted[:, None, :, None]
        assert torch.equal(rows.flatten(0, 1), sign * k.float().where(k.abs() != 225, -224.0))


@wide
def test_later_rows_have_twice_the_room(dtype, device):
    """And become the largest e4m3 beyond it; the scale stays."""
    element = {'bf16': torch.bfloat16, 'fp16': torch.float16}[dtype]
    given = pages(device)
    x = torch.ones(1, 2, 64, device=device, dtype=element)
    for slot, factor in enumerate((1.0, 1.75, 448 / 128, 100.0, 7.0)):
        append(given, x * factor, x * -factor, slot)
    for name, sign in (('k', 1), ('v', -1)):
        scale, cache = given[f'{name}_descale'], given[f'{name}_cache'].float()
        assert (scale[5] == 2.0 ** -7).all() and (scale[4] == 2.0 ** -5).all()
        values = sign * cache[5, :, 0, 0] * scale[5, 0]
        assert values.tolist() == [1.0, 1.75, 3.5, 3.5] and cache[4, 0, 0, 0] * sign == 224.0


def test_nan_and_infinity_of_new_rows(device):
    """NaN does not count; with infinity the others become 0."""
    given = pages(device)
    k = torch.ones(2, 2, 64, device=device, dtype=torch.bfloat16)
    v = k.clone()
    k[0, 0, 3], v[1, 1, 7] = math.nan, math.inf
    append(given, k, v, 0)
    assert (given['k_descale'][5] == 2.0 ** -7).all() and given['v_descale'][5, 0] == 2.0 ** -7
    assert given['v_descale'][5, 1] == 2.0 ** 121
    assert as_bits(given['k_cache'])[5, 0, 0, 3] & 0x7f == 0x7f
    assert given['v_cache'][5, 1, 1].float().sum() == 448


@wide
@pytest.mark.parametrize('page_size', [1, 4, 16])
def test_decoding(page_size, dtype, device):
    """A prompt, then token by token: the same scales as the rule, and the error of e4m3."""
    element = {'bf16': torch.bfloat16, 'fp16': torch.float16}[dtype]
    torch.manual_seed(page_size)
    given = pages(device, 48 // page_size, page_size)
    k, v = torch.randn(2, 40, 2, 64, device=device).to(element)
    bounds = [0, 7, *range(8, 41)]
    for first, end in zip(bounds, bounds[1:]):
        append(given, k[first:end], v[first:end], first)
    for name, x in (('k', k), ('v', v)):
        scale, cache = given[f'{name}_descale'].flip(0), given[f'{name}_cache'].flip(0)
        rows = (cache.double() * scale.double()[:, None, :, None]).flatten(0, 1)[:40]
        own = scale.repeat_interleave(page_size, 0)[:40, :, None].double()
        wanted = x.double().clamp(-448 * own, 448 * own)
        assert ((rows - wanted).abs() <= wanted.abs() / 16 + own * 2.0 ** -10).all()
        begun = [i for i, end in zip(bounds, bounds[1:]) for i in range(i, end)
                 if i % page_size == 0]
        for slot in begun:
            end = next(end for end in bounds if end > slot)
            largest = x[slot:min(end, slot + page_size)].double().abs().amax((0, 2))
            assert torch.equal(scale[slot // page_size].double(), power_from(largest / 224))


def append_alone(given: dict, x: torch.Tensor, lengths: list[int], **others) -> None:
    """The op, which on a GPU reads no lists before it runs."""
    names = 'k_cache', 'v_cache', 'k_descale', 'v_descale'
    lists = dict(page_table=given['page_table'], cache_seqlens=ints(lengths, x.device)) | others
    k_cache, v_cache, *scales = (given[name] for name in names)
    q = x.new_zeros(lists['page_table'].size(0), 1, *k_cache.shape[2:])
    own = Attend(**lists, descale_by_page=True, appended=x.size(1) if x.dim() == 4 else 0)
    torch.ops.flash_attn3.append_and_attend(q, k_cache, v_cache, x, x, None, *scales, *Rotary(),
                                            *own)


def test_rows_that_do_not_fit(kernels):
    """Nothing is written past the table, nor for negative lengths or pages that are none; no scale
    changes there.
    """
    given = pages(kernels)
    before = {name: as_bits(given[name]).clone() for name in ('k_cache', 'k_descale')}
    x = torch.ones(1, 3, 2, 64, device=kernels, dtype=torch.bfloat16)
    for length in (24, 25, -1, -4, 2 ** 31 - 1, -2 ** 31):
        append_alone(given, x, [length])
    for page in (-1, 6, 2 ** 31 - 1, -2 ** 31):
        append_alone(given, x, [4], page_table=torch.full_like(given['page_table'], page))
    for name, bits in before.items():
        assert torch.equal(as_bits(given[name]), bits)
    given['k_descale'].fill_(1.0)
    append_alone(given, x, [22])    # two of three
    assert (given['k_cache'][0, 2:].float() == 1).all() and (given['k_descale'] == 1).all()
    assert torch.equal(as_bits(given['k_cache'])[1:], before['k_cache'][1:])


@pytest.mark.parametrize('cu', [[500, 0, 500], [0, -7, 40], [0, 1 << 30, -(1 << 31)],
                                [(1 << 31) - 1] * 3, [7, 6, 5], [-(1 << 31)] * 3], ids=str)
def test_nonsense_stays_inside(cu, kernels):
    """The emulator sees every access."""
    given = pages(kernels)
    x = torch.ones(9, 2, 64, device=kernels, dtype=torch.bfloat16)
    table = given['page_table'].expand(2, -1).contiguous()
    append_alone(given, x, [3, 18], page_table=table, cu_seqlens_k_new=ints(cu, kernels))
    for name in ('k_descale', 'v_descale'):
        scales = given[name]
        assert (scales.isnan() | (scales == 2.0 ** -7)).all()


def test_e4m3_rows_are_copied(device):
    """Their scales are the caller's, who has quantised them."""
    given = pages(device)
    for name in ('k_descale', 'v_descale'):
        given[name].fill_(0.25)
    x = torch.randn(3, 2, 64, device=device).to(torch.float8_e4m3fn)
    q = torch.ones(1, 1, 4, 64, device=device, dtype=torch.bfloat16)
    flash_attn_with_kvcache(q, k=x[None], v=x[None], cache_seqlens=ints([0], device), **given)
    assert torch.equal(as_bits(given['k_cache'])[5, :3], as_bits(x))
    assert (given['k_descale'] == 0.25).all()


def test_check_is_repeatable(device):
    case = of(TALL, 'bf16', 128, 48, new=(70,) * 3, rotary=0.5)
    got, arguments = check(case, device)
    check_same(run(case, arguments)[0], got)
