"""Gradients of attention to keys that each query chooses (chosen_keys.py), and the op `bwd_chosen`.

dk and dv of a row are sums over all queries that have chosen it. On a Hopper GPU a kernel adds them
up in float32, in any order (csrc/chosen). The plain path gathers the rows of some queries at a
time, so its memory is linear in the tokens. It serves CPU tensors, other head dims, GPUs without
kernels, and deterministic gradients, which it sums in a fixed order.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn3.arguments import OPS, tuple_of
from flash_attn3.cpu import reference
from flash_attn3.ops import checks, library
from flash_attn3.ops.autograd import first_derivatives

# (head_dim, head_dim_v, whether there are latents) with kernels.
WIDTHS = (64, 512, True), (64, 64, False), (128, 128, False)
# What the plain path works on at a time: bytes of keys and values that it gathers, and queries.
_CHUNK_BYTES = 32 << 20
_DELTA_ROWS = 256

# The arguments of the op.
Backward = tuple_of('Backward', __name__, *OPS['bwd_chosen'].takes)
_bwd_chosen = torch.ops.flash_attn3.bwd_chosen.default


# --------------------------------------------------------------------------------- the plain path
class _Part(NamedTuple):
    """Some queries. slots: (queries, lists, keys) rows of k; exists: whether they hold a key."""
    rows: slice
    slots: Tensor
    exists: Tensor


def _parts(own: Backward) -> Iterator[_Part]:
    queries, lists, count = own.indices.shape
    total, heads, width = own.k.size(0), own.k.size(1), own.k.size(2) + own.v.size(2)
    blocks, of_block = total // own.index_block, torch.arange(own.index_block,
                                                              device=own.indices.device)
    wide = reference.wide_dtype(own.q.dtype).itemsize
    row_bytes = count * own.index_block * heads * width * wide
    step = max(1, _CHUNK_BYTES // max(1, row_bytes))
    if count == 0 or total == 0:
        return
    for first in range(0, queries, step):
        rows = slice(first, min(queries, first + step))
        indices = own.indices[rows].long()
        exists = (indices >= 0) & (indices < blocks)
        if own.index_counts is not None:
            place = torch.arange(count, device=indices.device)
            exists &= place < own.index_counts[rows, None, None]
        slots = (indices.masked_fill(~exists, 0)[..., None] * own.index_block + of_block).flatten(2)
        yield _Part(rows, slots, exists.repeat_interleave(own.index_block, -1))


def _add_rows(sums: Tensor, part: _Part, values: Tensor) -> None:
    """Adds values (queries, heads_k, keys, columns) to the rows of sums (total_k, heads_k, columns)
    that a part has chosen.
    """
    heads = sums.size(1)
    head = torch.arange(heads, device=sums.device)[:, None]
    at = (part.slots * heads + head).flatten()
    values = values.masked_fill(~part.exists[..., None], 0).flatten(0, 2)
    flat = sums.view(-1, sums.size(-1))
    if sums.is_cuda:    # sorts the places, and then sums those of a row in their order
        flat.index_put_((at,), values, accumulate=True)
    else:
        flat.index_add_(0, at, values)


def _delta(own: Backward, wide: torch.dtype) -> Tensor:
    """(queries, heads_q): rowsum(dO * O) - dLSE."""
    parts = [(dout.to(wide) * out.to(wide)).sum(-1)
             for dout, out in zip(own.dout.split(_DELTA_ROWS), own.out.split(_DELTA_ROWS))]
    delta = torch.cat(parts)
    return delta if own.dlse is None else delta - own.dlse.to(wide).transpose(0, 1)


@reference.without_autocast
def gradients_plainly(*arguments) -> tuple[Tensor, ...]:
    """The op `bwd_chosen` on any device, each sum in an order that the arguments determine."""
    own = Backward(*arguments)
    wide = reference.wide_dtype(own.q.dtype)
    lse, delta = own.lse.transpose(0, 1), _delta(own, wide)    # (queries, heads_q)
    q = own.q if own.q_latent is None else torch.cat([own.q, own.q_latent], -1)
    heads_k = own.k.size(1)
    grouped = heads_k, -1
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros(x.shape, dtype=wide, device=q.device) for x in (own.k, own.v))
    head = torch.arange(heads_k, device=q.device)[:, None]
    for part in _parts(own):
        k, v = (x[part.slots, head].to(wide).masked_fill(~part.exists[..., None], 0)
                for x in (own.k, own.v))    # (queries, heads_k, keys, columns)
        if own.q_latent is not None:
            k = torch.cat([k, v], -1)
        part_q, part_dout, part_lse, part_delta = (
            x[part.rows].to(wide).unflatten(1, grouped) for x in (q, own.dout, lse, delta))
        scores = torch.einsum('thgd,thnd->thgn', part_q, k) * own.scale
        is_none = ~part.exists[:, :, None] | (part_lse == -math.inf)[..., None]
        p = torch.exp(scores - part_lse[..., None]).masked_fill(is_none, 0)
        ds = p * (torch.einsum('thgd,thnd->thgn', part_dout, v) - part_delta[..., None]) * own.scale
        ds = ds.masked_fill(is_none, 0)
        dq[part.rows] = torch.einsum('thgn,thnd->thgd', ds, k).flatten(1, 2)
        part_dk = torch.einsum('thgn,thgd->thnd', ds, part_q)
        part_dv = torch.einsum('thgn,thgd->thnd', p, part_dout)
        if own.q_latent is not None:
            part_dv += part_dk[..., own.k.size(2):]
        _add_rows(dk, part, part_dk[..., :own.k.size(2)])
        _add_rows(dv, part, part_dv)
    columns = own.q.size(2)
    dq_latent = dq[..., columns:] if own.q_latent is not None else dq.new_empty(0)
    results = (x.to(own.q.dtype).contiguous() for x in (dq[..., :columns], dk, dv, dq_latent))
    return *results, delta.transpose(0, 1).contiguous()


def _fake(*arguments) -> tuple[Tensor, ...]:
    own = Backward(*arguments)
    dq, dk, dv = (x.new_empty(x.shape) for x in (own.q, own.k, own.v))
    dq_latent = own.q.new_empty((0,) if own.q_latent is None else own.q_latent.shape)
    return dq, dk, dv, dq_latent, own.lse.new_empty(own.lse.shape)


library.register('bwd_chosen', gradients_plainly, _fake)


# -------------------------------------------------------------------------------------- autograd
def _has_kernel(own: Backward) -> bool:
    return (own.q.dtype in (torch.float16, torch.bfloat16) and library.kernels_serve(own.q.device)
            and (own.k.size(2), own.v.size(2), own.q_latent is not None) in WIDTHS)


def _gradients(in_order: bool, *arguments) -> tuple[Tensor, ...]:
    own = Backward(*arguments)
    if own.q.is_cuda and (in_order or not _has_kernel(own)):
        return gradients_plainly(*arguments)
    return _bwd_chosen(*arguments)


class _ChosenAttention(torch.autograd.Function):
    """compute(*call) with gradients; the tensors after them are the call's."""

    @staticmethod
    def forward(ctx, compute: Callable, call: tuple, scale: float, in_order: bool,
                *given: Tensor | None):
        _, _, _, choice, _, function = call
        out, lse = compute(*call)
        q, k, v, latent, s_aux = given
        indices = choice.indices if choice.indices.dim() == 3 else choice.indices.unsqueeze(1)
        ctx.save_for_backward(q, k, v, out, lse, latent, indices, choice.counts, s_aux)
        ctx.scalars = choice.block, scale
        ctx.in_order = checks.wants_determinism(in_order)
        ctx.function = function.name
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        *tensors, s_aux = ctx.saved_tensors
        _, _, _, out, lse, latent, *_ = tensors
        if dout is None:
            dout = torch.zeros_like(out)
        dq, dk, dv, dq_latent, delta = first_derivatives(
            ctx.function, _gradients, ctx.in_order, dout, dlse, *tensors, *ctx.scalars)
        return (None, None, None, None, dq, dk, dv, None if latent is None else dq_latent,
                None if s_aux is None else _gradient_of_sinks(s_aux, lse, delta))


def attention(compute: Callable, call: tuple, latent: Tensor | None, s_aux: Tensor | None,
              scale: float | None, in_order: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) = compute(*call) with gradients of q, k, v, latent and s_aux. call: the op, its
    tensors, arguments, a Choice, a Layout, a Function. in_order: the gradients are deterministic.
    """
    _, (q, k, v, _), *_ = call
    if scale is None:
        scale = (q.size(-1) + (0 if latent is None else latent.size(-1))) ** -0.5
    return _ChosenAttention.apply(compute, call, scale, in_order, q, k[0], v[0], latent, s_aux)


def _gradient_of_sinks(s_aux: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """(heads_q,): a sink is a key of value 0, so its score has the gradient -P * delta."""
    p = torch.exp(s_aux[:, None] - lse).masked_fill(lse == -math.inf, 0)
    return -(p * delta).sum(1)
