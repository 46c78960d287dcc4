"""Attention on e4m3 tensors with scales, in plain PyTorch: CPU implementation and oracle.

`attend` defines the result: attention of the dequantised values, as in `reference`.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn3.cpu import reference
from flash_attn3.cpu.quantize import KV_BLOCK, Q_BLOCK, row_scales
from flash_attn3.cpu.reference import Inputs, Lengths, Outputs, Score


class Scales(NamedTuple):
    """What the e4m3 values of q, k and v are multiplied by; None is 1.

    (batch, heads_k) each, or by blocks, of 64 rows of q and 384 of k and v: q (batch, heads_q,
    blocks), k and v (batch, heads_k, blocks); packed as `quantize.quantize` says. float32.
    """
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None


def dequantize(inputs: Inputs, scales: Scales, lengths: Lengths | None,
               dtype: torch.dtype) -> Inputs:
    """The values that q, k and v stand for, in dtype. lengths: of packed tensors."""
    starts = ((None, None) if lengths is None
              else [side.cu_seqlens.long() for side in lengths])
    tensors = (
        _scaled(x, row_scales(scale, x, block, start), dtype) for x, scale, block, start in (
            (inputs.q, scales.q, Q_BLOCK, starts[0]), (inputs.k, scales.k, KV_BLOCK, starts[1]),
            (inputs.v, scales.v, KV_BLOCK, starts[1])))
    return Inputs(*tensors, None if inputs.s_aux is None else inputs.s_aux.to(dtype))


def _scaled(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype)
    return x if scale is None else x * scale.to(dtype).unsqueeze(-1)


def attend(inputs: Inputs, scales: Scales, score: Score, lengths: Lengths | None = None,
           compute_dtype: torch.dtype = torch.float64, with_row_max: bool = False) -> Outputs:
    """Attention of the values, out in compute_dtype; otherwise as `reference.attend`."""
    values = dequantize(inputs, scales, lengths, compute_dtype)
    return reference.attend(values, score, None, with_row_max, lengths)
