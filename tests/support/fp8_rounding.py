"""Attention on e4m3 tensors with the roundings of the kernels and no others, in plain PyTorch. The
tests compare the kernels' error with that of this emulation; benchmarks/fp8_accuracy.py prints it.

This is where the kernels round. q8, k8 and v8 are e4m3 values, q_s the scale of a row of q, k_s and
v_s those of a key:
- s = (q8 . k8) * (q_s * k_s * softmax_scale) in float32, then softcap and mask. Tensor cores add
  with fewer bits than float32; that is not emulated.
- t = s + log(v_s): the scale of v is part of the exponent. m = max t over the keys of the row.
- p8 = e4m3(2^8 exp(t - m)). 2^8, of at most 448, puts probabilities down to 2^-17 of the largest
  into e4m3's range. A kernel whose m lags by up to x exponents gives up to 2^(8 + x).
- The denominator is sum exp(s - m), unrounded and without the scales of v, plus the sink; lse is m
  plus its logarithm. As m >= t, s - m is at most -log(v_s): nothing overflows.
- out = (sum p8 v8) / (2^8 sum exp(s - m)) in float32, rounded once to the output's dtype.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_attn3.cpu.quantize import E4M3, KV_BLOCK, row_scales
from flash_attn3.cpu.reference import Inputs, Lengths, Score
from flash_attn3.cpu.reference_fp8 import Scales, dequantize

P_FACTOR = 2.0 ** 8


def emulate(inputs: Inputs, scales: Scales, score: Score,
            lengths: Lengths | None = None) -> Tensor:
    """The output, float32 before it is rounded, with the kernels' other roundings.

    The scales of q and k are multiplied in before q k^T here, in float32, which is no rounding of
    e4m3.
    """
    q, k, _, s_aux = dequantize(inputs, scales, lengths, torch.float32)
    v = inputs.v.float()
    starts = None if lengths is None else lengths.k.cu_seqlens.long()
    v_scales = row_scales(scales.v, inputs.v, KV_BLOCK, starts)
    v_scales = v.new_ones(v.shape[:-1]) if v_scales is None else v_scales.contiguous()
    if lengths is None:
        return _emulate(Inputs(q, k, v, s_aux), v_scales, score)
    out = q.new_zeros(*q.shape[:2], v.size(2))
    for number, (rows, keys) in enumerate(lengths.slices()):
        one = Inputs(q[None, rows], k[None, keys], v[None, keys], s_aux)
        out[rows] = _emulate(one, v_scales[None, keys], score.of_sequence(number))[0]
    return out


def _emulate(inputs: Inputs, v_scales: Tensor, score: Score) -> Tensor:
    """`emulate` of q and k with their scales, v without those of its rows, (batch, sk, h_k)."""
    q, k, v, s_aux = inputs
    if k.size(1) == 0:
        return q.new_zeros(*q.shape[:3], v.size(3))
    s, _ = score.logits(q, k)                                       # (b, h_k, group, sq, sk)
    lse = s.logsumexp(-1, keepdim=True)
    if s_aux is not None:
        lse = torch.logaddexp(lse, s_aux.unflatten(0, s.shape[1:3])[..., None, None])
    t = s + v_scales.log().transpose(1, 2)[:, :, None, None]
    m = t.amax(-1, keepdim=True)
    m = m.masked_fill(m == -math.inf, 0)
    p = (P_FACTOR * (t - m).exp()).to(E4M3).float()
    out = torch.einsum('bhgqk,bkhd->bhgqd', p, v) / (P_FACTOR * (lse - m).exp())
    out = out.masked_fill(lse == -math.inf, 0)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3).contiguous()
