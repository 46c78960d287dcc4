"""Latents of e4m3 with scales by key, under 16-bit queries, beside what test_latent.py has of them:
one scale a key and four, rows of 656 bytes, exactness, what an append sets.
"""
from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.gpu import test_latent
from tests.gpu.test_latent import E4M3, every_dtype, every_page_size, of
from tests.support import compare
from tests.support.cache_cases import as_bits, call
from tests.support.cache_oracle import check_case, check_same

every_blocks = pytest.mark.parametrize('blocks', [1, 4])


def latent(lengths: tuple[tuple[int, int], ...], heads: int = 16, **options):
    return test_latent.latent(lengths, heads, **E4M3 | options)


DECODE = latent(of(1, 700, 0, 1, 129, 64))
TALL = latent(of(5, 300, 5, 650), heads=5, causal=True)


@pytest.mark.smoke
@every_blocks
@every_page_size
@every_dtype
@pytest.mark.parametrize('queries', [1, 3])
def test_page_sizes(queries, dtype, page_size, blocks, device):
    check_case(latent(of(queries, 1000, 65, 64, 63, 1), dtype=dtype, page_size=page_size,
                      blocks=blocks, causal=queries > 1), device)


@pytest.mark.parametrize('changes', [{}, dict(page_size=16), dict(num_splits=3)], ids=str)
def test_trees(changes, device):
    check_case(dataclasses.replace(TALL, tree=True, causal=False, **changes), device)


@every_blocks
@pytest.mark.parametrize('page_size', [0, 16])
@pytest.mark.parametrize('changes', [{}, {'is_packed': True}, {'causal': True}], ids=str)
def test_a_shared_prefix(changes, page_size, blocks, device):
    check_case(latent(of(2, 200, 98, 130), shared=96, page_size=page_size, blocks=blocks,
                      **changes), device)


@pytest.mark.parametrize('page_size', [1, 64])
def test_rows_of_656_bytes(page_size, device):
    """512 latent columns, four scales and 64 rotary columns: the bits of three tensors."""
    case = dataclasses.replace(DECODE, page_size=page_size)
    arguments = case.arguments(device)
    k, v, scale = (arguments[name] for name in ('k_cache', 'v_cache', 'v_descale'))
    rows = torch.cat([x.contiguous().view(torch.uint8) for x in (v, scale[:, :, None], k)], -1)
    moved = dict(v_cache=rows[..., :512].view(v.dtype),
                 v_descale=rows[..., 512:528].view(torch.float32)[:, :, 0],
                 k_cache=rows[..., 528:].view(k.dtype))
    check_same(call(case, arguments | moved), call(case, arguments))


def test_without_scales(device):
    """They are 1."""
    case = dataclasses.replace(DECODE, descales=False)
    arguments = case.arguments(device)
    ones = torch.ones(*arguments['v_cache'].shape[:2], 1, device=device)
    check_same(call(case, arguments), call(case, arguments | {'v_descale': ones}))


def test_powers_of_two_are_exact(device):
    """The bits of a 16-bit cache of the same values."""
    case = latent(of(2, 700, 65, 130), page_size=64, dtype='bf16')
    arguments = case.arguments(device)
    scale = 2.0 ** torch.randint(-3, 4, arguments['v_descale'].shape, device=device)
    wide = (arguments['v_cache'].float().unflatten(-1, (4, 128)) * scale[:, :, None, :, None])
    wanted = call(case, {name: x for name, x in arguments.items() if name != 'v_descale'} | dict(
        v_cache=wide.flatten(-2).bfloat16()))
    got = call(case, arguments | {'v_descale': scale})
    compare.check_equal(got.out, wanted.out, 'out')


@pytest.mark.smoke
@every_blocks
@every_page_size
@every_dtype
def test_append(dtype, page_size, blocks, device):
    """New keys set their scales; k and q are rotated."""
    for new in (1, 70):
        check_case(latent(of(new, 0, 63, 300), heads=5, page_size=page_size, new=(new,) * 3,
                          dtype=dtype, blocks=blocks, rotary=1.0, causal=True), device)


def test_append_of_large_and_small_numbers(device):
    """Zeros, infinity, NaN, subnormal: as on a CPU, whose values the reference has."""
    case = latent(of(1, 3), page_size=4, new=(1,), causal=True)
    arguments = case.arguments(device)
    v = arguments['v']
    for column, value in ((0, 0.0), (128, math.inf), (256, 3e-38), (384, 3e38)):
        v[..., column:column + 128] = value
    v[..., 300] = math.nan
    on_cpu = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    call(case, arguments)
    call(case, on_cpu)
    for name in ('v_cache', 'v_descale'):
        assert torch.equal(as_bits(arguments[name]).cpu(), as_bits(on_cpu[name])), name
