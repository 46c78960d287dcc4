"""How FP8 attention sums PV: on the tensor cores alone, or promoted, that is each K tile's part in
fp32.
"""
from __future__ import annotations

import dataclasses

import pytest
import torch

from flash_attn3 import flash_attn_func
from flash_attn3.cpu.reference import Inputs
from flash_attn3.cpu.reference_fp8 import Scales

from tests.gpu.fp8_calls import Call, check_case
from tests.gpu.test_fp8 import DENSE, FEATURES, PACKED, every_head_dim, every_mask, every_shape
from tests.support.fp8_data import E4M3
from tests.support.general_cases import GeneralCase


@pytest.mark.smoke
@every_head_dim
@pytest.mark.parametrize('features', ['full', 'causal', 'window', 'all'])
@every_shape
def test_promoted_sums(case, features, head_dim, device):
    case = dataclasses.replace(case, head_dim=head_dim, **FEATURES[features])
    check_case(case, device, fp8_accum='promote')


@every_mask
@pytest.mark.parametrize('head_dims', [(16, 16), (80, 80), (192, 192), (192, 128), (160, 64)],
                         ids=str)
def test_promoted_sums_of_other_head_dims(head_dims, causal, device):
    for case in (DENSE, PACKED):
        check_case(dataclasses.replace(case, head_dim=head_dims[0], head_dim_v=head_dims[1],
                                       causal=causal), device, fp8_accum='promote')


@every_mask
@pytest.mark.parametrize('head_dims', [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize('data', ['normal', 'onehot', 'outliers'])
def test_promoted_sums_of_long_sequences(data, head_dims, causal, device):
    case = GeneralCase(((1500, 3000),), head_dims[0], heads=(2, 1), causal=causal, is_packed=False,
                       head_dim_v=head_dims[1], data=data)
    check_case(case, device, fp8_accum='promote')


@pytest.mark.parametrize('accumulation', ['fast', 'promote'])
@pytest.mark.parametrize('head_dims', [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_every_tile_raises_the_maximum(head_dims, accumulation, device):
    """Keys are visited from the last one on: scores rise by 2^2.8 in 128 of them, and what has been
    summed is rescaled every time.
    """
    keys = 1500
    generator = torch.Generator(device).manual_seed(head_dims[0])
    noise, v = (torch.randn(1, keys, 1, columns, generator=generator, device=device)
                for columns in head_dims)
    q = torch.full((1, 130, 1, head_dims[0]), 1.0, device=device)
    rise = torch.linspace(23, 0, keys, device=device).reshape(1, -1, 1, 1)
    k = noise / 4 + rise / head_dims[0] ** 0.5
    inputs = Inputs(*(x.to(E4M3) for x in (q, k, v + 1)), None)
    case = GeneralCase(((130, keys),), head_dims[0], heads=(1, 1), is_packed=False,
                       head_dim_v=head_dims[1])
    call = Call(case, inputs, Scales(), {})
    call.check(call.run(fp8_accum=accumulation))


@every_head_dim
def test_promoted_sums_stay_exact(head_dim, cuda):
    """Equal scores on values of 1 and 0: P is 256, and sums of it run out of the bits of the tensor
    cores, not of fp32, where nothing is rounded but out.
    """
    generator = torch.Generator(cuda).manual_seed(head_dim)
    keys = 32768
    q, k = (torch.zeros(1, n, 1, head_dim, device=cuda).to(E4M3) for n in (64, keys))
    v = (torch.rand(1, keys, 1, head_dim, generator=generator, device=cuda) < 0.5).to(E4M3)
    expected = v.double().mean(1, keepdim=True)
    out = flash_attn_func(q, k, v, out_dtype=torch.float16, fp8_accum='promote')
    error = (out.double() - expected).abs().max().item()
    assert error <= 2.0 ** -12
    fast = flash_attn_func(q, k, v, out_dtype=torch.float16)
    assert 4 * error < (fast.double() - expected).abs().max().item()
