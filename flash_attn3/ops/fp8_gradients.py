"""The backward of FP8 attention at the values that its forward used: q, k and v rounded to e4m3.

autograd.py calls it if `fp8_backward='rounded'` asks for it. The forward computed LSE and output
from these values. Scores of the given q, k and v differ from theirs by some percent. Where scores
are in the hundreds, that makes exp(S - LSE), which is at most 1, arbitrarily wrong.

WHY quantise again: the formula of a traced op sees only its inputs and outputs, and quantising here
needs no memory between forward and backward.
"""
from __future__ import annotations

import torch
from torch import Tensor

from flash_attn3.ops import fp8
from flash_attn3.ops.fp8 import Quantization
from flash_attn3.ops.dense_and_varlen import General, from_backward, sequences_of
from flash_attn3.cpu.quantize import PER_HEAD, pieces, row_scales
from flash_attn3.cpu.reference import without_autocast

_quantize = torch.ops.flash_attn3.quantize_fp8.default
_bwd = torch.ops.flash_attn3.bwd.default
# Replaces 1, so that sums of up to 256 e4m3 values, each at most 448, fit float16.
SIGN = 0.125


def of_rounded(quantization: Quantization, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor,
               v: Tensor, out: Tensor, lse: Tensor, *arguments) -> tuple[Tensor, ...]:
    """The op `bwd` of the rounded q, k and v."""
    rounded = round_inputs(q, k, v, from_backward(arguments), quantization)
    return _bwd(dout, dlse, *rounded, out, lse, *arguments)


@without_autocast
def round_inputs(q: Tensor, k: Tensor, v: Tensor, own: General,
                 quantization: Quantization) -> tuple[Tensor, Tensor, Tensor]:
    """The rounded q, k and v of the forward, rotated back, in their dtype and with any strides."""
    q8, q_scale, k8, k_scale, v8, v_scale = fp8.quantize_inputs(q, k, v, own, quantization)
    block_q, block_kv = fp8.blocks_of(quantization)
    starts_q, starts_k = (None if side.cu_seqlens is None else side.cu_seqlens.long()
                          for side in sequences_of(own))
    rows_q, rows_k, rows_v = (row_scales(*parts) for parts in (
        (q_scale, q8, block_q, starts_q), (k_scale, k8, block_kv, starts_k),
        (v_scale, v8, block_kv, starts_k)))
    v = _times(v8.to(v.dtype), rows_v)
    if quantization.rotation_seed is None:
        return _times(q8.to(q.dtype), rows_q), _times(k8.to(k.dtype), rows_k), v
    signs = _rotation_back(k, quantization.rotation_seed)
    return _rotated_back(q8, rows_q, signs, q.dtype), _rotated_back(k8, rows_k, signs, k.dtype), v


def _times(values: Tensor, by_row: Tensor) -> Tensor:
    """16-bit values times float32 (rows, heads), in place and rounded once."""
    return values.mul_(by_row.unsqueeze(-1))


def _rotation_back(k: Tensor, seed: int) -> Tensor:
    """The inverse rotation, up to a factor of each piece: float16 (heads_k, head_dim, head_dim) of
    1/8, -1/8 and 0.

    Quantising the identity with rotation gives its transposed signs, whatever the scales.
    """
    heads, head_dim = k.shape[-2:]
    identity = torch.eye(head_dim, dtype=torch.float16, device=k.device)
    rows = identity[None, :, None].expand(1, head_dim, heads, head_dim).contiguous()
    forth, _ = _quantize(rows, None, None, PER_HEAD, 1, seed)               # (1, i, h, j)
    return forth[0].half().sign().mul_(SIGN).permute(1, 2, 0)               # (h, j, i)


def _rotated_back(values: Tensor, by_row: Tensor, signs: Tensor, dtype: torch.dtype) -> Tensor:
    """x rotated back, rounded to float16, then converted to dtype."""
    signs = signs.repeat_interleave(values.size(-2) // signs.size(0), 0)
    back = torch.einsum('...hj,hji->...hi', values.half(), signs)
    result, widths = torch.empty_like(back, dtype=dtype), pieces(values.size(-1))
    for width, piece, target in zip(widths, back.split(widths, -1), result.split(widths, -1)):
        torch.mul(piece, (by_row * (width ** -0.5 / SIGN)).unsqueeze(-1), out=target)
    return result
