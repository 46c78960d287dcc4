"""Attention in plain PyTorch, obvious rather than fast: CPU implementation and tests' oracle.

Called by `_library.py` (CPU tensors), `fallback.py` and the tests (usually in float64, on any
device). Memory is that of the scores: (batch, heads_q, seqlen_q, seqlen_k) of the compute dtype.

What it defines, and what the kernels must agree with:
- Causal is aligned bottom-right: query i sees keys up to i + seqlen_k - seqlen_q.
- A row without a visible key gives O = 0, LSE = -inf and gradients 0. NaN in the inputs reaches
  the outputs.
- Query head h uses KV head h // (heads_q / heads_k).
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

_WIDE_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the CPU path computes in: float32 for 16-bit types, else the type itself."""
    return _WIDE_DTYPES.get(dtype, dtype)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the LSE of inputs of `dtype`: float32, and float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _without_autocast(function: Callable) -> Callable:
    """The function, with products in the dtype that it says: autocast would take 16 bits."""
    @functools.wraps(function)
    def wrapped(first: Tensor, *others, **options):
        with torch.autocast(first.device.type, enabled=False):
            return function(first, *others, **options)
    return wrapped


@_without_autocast
def forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool,
            compute_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """softmax(softmax_scale * q k^T) v and the log of its denominator (arXiv 2407.08608, 2.2).

    Args:
        q: (batch, seqlen_q, heads_q, head_dim).
        k: (batch, seqlen_k, heads_k, head_dim); heads_k divides heads_q.
        v: (batch, seqlen_k, heads_k, head_dim_v).
        softmax_scale: factor on q k^T.
        causal: hide the keys behind the diagonal that ends in the bottom-right corner.
        compute_dtype: dtype of every step in between; default: the dtype of q.

    Returns:
        out: (batch, seqlen_q, heads_q, head_dim_v), dtype of q, contiguous.
        lse: (batch, heads_q, seqlen_q), natural logarithm, float32 (float64 when computed in
            float64), contiguous.
    """
    out_dtype = q.dtype
    q, k, v = (x.to(compute_dtype or out_dtype) for x in (q, k, v))
    scores = masked_scores(q, k, softmax_scale, causal)             # (b, h_k, group, sq, sk)
    lse = torch.logsumexp(scores.to(lse_dtype(q.dtype)), dim=-1)    # (b, h_k, group, sq)
    p = _probabilities(scores, lse)
    out = torch.einsum('bhgqk,bkhd->bqhgd', p, v).flatten(2, 3)
    return out.to(out_dtype).contiguous(), lse.flatten(1, 2).contiguous()


@_without_autocast
def backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
             softmax_scale: float, causal: bool, compute_dtype: torch.dtype | None = None,
             ) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `forward`, everything recomputed from the inputs (arXiv 2407.08608, 2.2).

    With P = softmax(S): dV = P^T dO, dP = dO V^T, dS = P * (dP - rowsum(P * dP) + dLSE),
    dQ = scale dS K, dK = scale dS^T Q. A KV head sums over the query heads that use it.

    Args:
        dout: gradient of out, (batch, seqlen_q, heads_q, head_dim_v).
        dlse: gradient of lse, (batch, heads_q, seqlen_q), or None for zero.
        q, k, v, softmax_scale, causal, compute_dtype: as in `forward`.

    Returns:
        dq, dk, dv: shapes and dtypes of q, k, v; contiguous.
    """
    in_dtypes = q.dtype, k.dtype, v.dtype
    q, k, v, dout = (x.to(compute_dtype or q.dtype) for x in (q, k, v, dout))
    heads = (k.size(2), q.size(2) // k.size(2))
    scores = masked_scores(q, k, softmax_scale, causal)             # (b, h_k, group, sq, sk)
    p = _probabilities(scores, torch.logsumexp(scores, dim=-1))
    dout = dout.unflatten(2, heads)                                 # (b, sq, h_k, group, d_v)

    dv = torch.einsum('bhgqk,bqhgd->bkhd', p, dout)
    dp = torch.einsum('bqhgd,bkhd->bhgqk', dout, v)
    ds = dp - (p * dp).sum(-1, keepdim=True)
    if dlse is not None:
        ds = ds + dlse.to(ds.dtype).unflatten(1, heads).unsqueeze(-1)
    ds = p * ds * softmax_scale
    dq = torch.einsum('bhgqk,bkhd->bqhgd', ds, k).flatten(2, 3)
    dk = torch.einsum('bhgqk,bqhgd->bkhd', ds, q.unflatten(2, heads))
    return tuple(x.to(dtype).contiguous() for x, dtype in zip((dq, dk, dv), in_dtypes))


@_without_autocast
def masked_scores(q: Tensor, k: Tensor, softmax_scale: float, causal: bool) -> Tensor:
    """Scaled scores, -inf where hidden: (batch, heads_k, heads_q / heads_k, seqlen_q, seqlen_k)."""
    q = q.unflatten(2, (k.size(2), q.size(2) // k.size(2)))
    scores = torch.einsum('bqhgd,bkhd->bhgqk', q, k) * softmax_scale
    if causal:
        scores = scores.masked_fill(hidden_keys(q.size(1), k.size(1), q.device), -math.inf)
    return scores


def hidden_keys(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """(seqlen_q, seqlen_k), True where a causal query does not see the key."""
    every = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    return every.triu(1 + seqlen_k - seqlen_q)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """softmax over keys; rows that see no key (LSE = -inf), 0/0 in the formula, are 0."""
    return torch.softmax(scores, dim=-1).masked_fill((lse == -math.inf).unsqueeze(-1), 0)
