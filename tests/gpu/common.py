"""Helpers of several files of tests/gpu."""
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flash_attn3 import flash_attn_func

from tests.support import compare
from tests.support.cases import MAIN_KINDS, Case

every_kind = pytest.mark.parametrize('kind', MAIN_KINDS, ids=str)


def run(tensors: tuple[Tensor, Tensor, Tensor], case: Case, **options) -> tuple[Tensor, Tensor]:
    """(out, lse) of the case's mask; options of flash_attn_func."""
    return flash_attn_func(*tensors, causal=case.causal, return_attn_probs=True, **options)


def check_same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Output and LSE, bit for bit."""
    compare.check_equal(got[0], expected[0], 'out')
    compare.check_equal(got[1], expected[1], 'lse')


def spoil_allocator(device: torch.device) -> None:
    """Leaves NaN in the memory that the next results get."""
    blocks = [torch.full((size,), math.nan, device=device)
              for size in (1 << n for n in (10, 14, 16, 18, 20, 21, 22)) for _ in range(6)]
    del blocks
