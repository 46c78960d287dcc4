"""Attention and its gradients in plain PyTorch, with any operand of any GEMM rounded to FP8.

The GEMMs, their operands by name, and what shares a scale where scales are by block:

    S  = Q K^T     s.q, s.k      64 rows of q, 384 of k, as in the FP8 forward
    O  = P V       o.p, o.v      a row of P, 384 rows of v
    dP = dO V^T    dp.do, dp.v   64 rows, 384 rows
    dV = P^T dO    dv.p, dv.do   a tile of 64 queries and 128 keys, 64 rows
    dK = dS^T Q    ds, dk.q      a tile, 64 rows
    dQ = dS K      ds, dq.k      a tile, 384 rows
    delta          delta.do      64 rows: the dO that meets O in rowsum(dO O)

A rounding is: rotate, divide by a scale, cast, and all of it back. Rotating back is exact besides
float32, so that a GEMM of two operands with the same rotation gives what it gives with both rotated
back. An operand without a rounding keeps the dtype of the inputs, as do all sums: the 14 bits with
which Hopper's tensor cores accumulate e4m3 are not emulated. fp8_backward.py measures with this.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_attn3.cpu.quantize import SMALLEST_AMAX, hadamard, norms, signs
from flash_attn3.cpu.reference import without_autocast

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
HEAD, TENSOR = (0, 0), None
ROWS, KEYS, TILE = (64, 0), (384, 0), (64, 128)
BLOCKS = {'s.q': ROWS, 's.k': KEYS, 'o.p': (1, 0), 'o.v': KEYS, 'dp.do': ROWS, 'dp.v': KEYS,
          'delta.do': ROWS, 'dv.p': TILE, 'dv.do': ROWS, 'ds': TILE, 'dk.q': ROWS, 'dq.k': KEYS}
FORWARD = 's.q', 's.k', 'o.p', 'o.v'
BACKWARD = tuple(name for name in BLOCKS if not name.startswith('o.'))


class Rounding(NamedTuple):
    """block: rows and columns that share a scale, 0 for all of a head; TENSOR: one scale for all.

    bfloat16 has no scales.
    """
    dtype: torch.dtype = E4M3
    block: tuple[int, int] | None = HEAD
    is_rotated: bool = False


Roundings = Mapping[str, Rounding]    # by operand; an operand without one is not rounded


def roundings(operands: Iterable[str], scales: str = 'block', rotated: Iterable[str] = (),
              dtype: torch.dtype = E4M3) -> dict[str, Rounding]:
    """One for each operand. scales: 'tensor', 'head' or 'block'. rotated: operands."""
    blocks = {'tensor': dict.fromkeys(BLOCKS, TENSOR), 'head': dict.fromkeys(BLOCKS, HEAD),
              'block': BLOCKS}[scales]
    return {name: Rounding(dtype, blocks[name], name in rotated) for name in operands}


# ------------------------------------------------------------------------------------- one operand
def rounded(x: Tensor, rounding: Rounding | None) -> Tensor:
    """x (batch, heads, rows, columns) as the GEMM sees it, in the dtype of x."""
    if rounding is None:
        return x
    dtype, block, is_rotated = rounding
    if dtype == BF16:
        return x.to(dtype).to(x.dtype)
    if is_rotated:
        basis = rotation(x.size(1), x.size(-1), x.device).to(x.dtype)
        return _cast(x @ basis, dtype, block) @ basis.mT
    return _cast(x, dtype, block)


@functools.cache
def rotation(heads: int, head_dim: int, device: torch.device) -> Tensor:
    """(heads, head_dim, head_dim), orthogonal: the signs and Hadamard matrices of quantize_fp8."""
    own = signs(0, heads, head_dim, device)
    return hadamard(torch.diag_embed(own)) * norms(head_dim, device)


def _cast(x: Tensor, dtype: torch.dtype, block: tuple[int, int] | None) -> Tensor:
    rows, columns = x.shape[-2:]
    height, width = (min(a, b) or b for a, b in zip(block or HEAD, (rows, columns)))
    padding = -columns % width, -rows % height
    padded = F.pad(x, (0, padding[0], 0, padding[1])) if any(padding) else x
    tiles = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
    amax = torch.linalg.vector_norm(tiles, math.inf, dim=(-3, -1), keepdim=True)
    if block is TENSOR:
        amax = amax.max()
    scale = amax.clamp_min(SMALLEST_AMAX) / torch.finfo(dtype).max
    cast = tiles.div(scale).to(dtype).to(x.dtype).mul_(scale)
    return cast.flatten(-4, -3).flatten(-2)[..., :rows, :columns]


# --------------------------------------------------------------------------------------- attention
class Outputs(NamedTuple):
    out: Tensor    # (batch, heads, queries, head_dim)
    lse: Tensor    # (batch, heads, queries, 1)


@without_autocast
def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, by: Roundings) -> Outputs:
    """Each (batch, heads, rows, head_dim), of one shape."""
    s = _scores(q, k, is_causal, by)
    lse = s.logsumexp(-1, keepdim=True)
    p = s.sub_(lse).exp_()
    return Outputs(rounded(p, by.get('o.p')) @ rounded(v, by.get('o.v')), lse)


@without_autocast
def backward(q: Tensor, k: Tensor, v: Tensor, outputs: Outputs, dout: Tensor, is_causal: bool,
             by: Roundings) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv. Scores are computed again; their probabilities come from the forward's LSE."""
    def at(name: str, x: Tensor) -> Tensor:
        return rounded(x, by.get(name))

    p = _scores(q, k, is_causal, by).sub_(outputs.lse).exp_()
    dp = at('dp.do', dout) @ at('dp.v', v).mT
    delta = (at('delta.do', dout) * outputs.out).sum(-1, keepdim=True)
    dv = at('dv.p', p).mT @ at('dv.do', dout)
    ds = at('ds', dp.sub_(delta).mul_(p)) * q.size(-1) ** -0.5
    return ds @ at('dq.k', k), ds.mT @ at('dk.q', q), dv


def _scores(q: Tensor, k: Tensor, is_causal: bool, by: Roundings) -> Tensor:
    s = (rounded(q, by.get('s.q')) * q.size(-1) ** -0.5) @ rounded(k, by.get('s.k')).mT
    return s.masked_fill_(_hidden(q.size(2), q.device), -math.inf) if is_causal else s


@functools.cache
def _hidden(seqlen: int, device: torch.device) -> Tensor:
    return torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).triu_(1)


class _Attention(torch.autograd.Function):
    """In float32; the output and the gradients have the inputs' dtype."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal, forward_by, backward_by):
        found = forward(q.float(), k.float(), v.float(), is_causal, forward_by)
        found = Outputs(found.out.to(q.dtype), found.lse)
        ctx.save_for_backward(q, k, v, *found)
        ctx.options = is_causal, backward_by
        return found.out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        gradients = backward(q.float(), k.float(), v.float(), Outputs(out.float(), lse),
                             dout.float(), *ctx.options)
        return *(x.to(q.dtype) for x in gradients), None, None, None


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, forward_by: Roundings,
              backward_by: Roundings) -> Tensor:
    """Differentiable attention of (batch, rows, heads, head_dim); kv heads may be fewer.

    Args:
        forward_by, backward_by: the roundings of the operands of both passes.
    """
    group = q.size(2) // k.size(2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return _Attention.apply(q, k, v, is_causal, forward_by, backward_by).transpose(1, 2)
