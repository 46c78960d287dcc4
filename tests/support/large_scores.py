"""Scores up to the bound that `flash_attn_func` has. q and k have few values: sums are exact, and
keys are either equal or far apart, whatever rounding does to scores this large.
"""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_attn3 import flash_attn_func, flash_attn_varlen_func

from tests.support import compare, plain
from tests.support.cases import DTYPES
from tests.support.lists import starts

KEYS = 200
# Key j is so much of the largest one, which q is too.
PATTERNS = {
    'equal': lambda key: torch.ones_like(key),
    'negative': lambda key: -torch.ones_like(key),
    'one': lambda key: torch.where(key == 130, 1.0, -1.0),
    'zero_or_all': lambda key: (key % 3 == 0).float(),
    'rising': lambda key: (key // 8 - 12) / 16}
every_pattern = pytest.mark.parametrize('pattern', PATTERNS)


def inputs(pattern: str, dtype: str, score: float, head_dim: int,
           device: str | torch.device) -> tuple[tuple[Tensor, Tensor, Tensor], float]:
    """(q, k, v) and the softmax_scale with which the largest |softmax_scale * q k| is `score`."""
    largest = 1000.0    # no power of two: the scaled scores are rounded
    generator = torch.Generator(device).manual_seed(0)
    factor = PATTERNS[pattern](torch.arange(KEYS, device=device, dtype=torch.float32))
    q = torch.full((2, 70, 4, head_dim), largest, device=device)
    k = largest * factor[None, :, None, None].expand(2, -1, 2, head_dim)
    v = torch.randn((2, KEYS, 2, head_dim), generator=generator, device=device)
    scale = score / (largest * largest * head_dim * factor.abs().max().item())
    return tuple(x.to(DTYPES[dtype]) for x in (q, k, v)), scale


def check(pattern: str, dtype: str, score: float, head_dim: int,
          device: str | torch.device) -> None:
    """Dense and packed, with and without a mask: the LSE by compare.py, and out to what rounding P
    and the output once can cost, |out - ref| <= 3 u sum_j p_j |v_j|.
    """
    (q, k, v), scale = inputs(pattern, dtype, score, head_dim, device)
    wide = q.double(), k.double()
    for causal in (False, True):
        options = {'softmax_scale': scale, 'causal': causal, 'return_attn_probs': True}
        ref, ref_lse = plain.forward(*wide, v.double(), scale, causal)
        weighted, _ = plain.forward(*wide, v.double().abs(), scale, causal)
        limit = 3 * torch.finfo(v.dtype).eps / 2 * weighted + 1e-6    # sums are float32
        lists = [starts([length] * 2, device) for length in (70, KEYS)]
        packed = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), *lists, 70, KEYS,
                                        **options)
        for out, lse in (flash_attn_func(q, k, v, **options), (
                packed[0].unflatten(0, (2, -1)), packed[1].unflatten(1, (2, -1)).transpose(0, 1))):
            assert lse.isfinite().all()
            compare.check_lse(lse, ref_lse)
            assert ((out.double() - ref).abs() <= limit).all()
