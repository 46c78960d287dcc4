"""Attention of a sequence whose rows are divided among ranks, each of which computes some heads: an
all-to-all gives it all rows of these heads, and another returns the results.

Source: DeepSpeed Ulysses (arXiv 2309.14509). Combined with a ring, each rank of the ring is a group
of ranks that divide its rows.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flash_attn3.api.interface import asked_for, flash_attn_func, flash_attn_varlen_func
from flash_attn3.api.masks import AttentionMask
from flash_attn3.ops import autograd, checks, derivatives, dtensors
from flash_attn3.distributed import agreement, exchange, masks, orders, ring
from flash_attn3.ops.dense_and_varlen import General, general_of

_OP = 'ulysses_attention'
ring.LIBRARY.define('all_to_all(Tensor x, str group) -> Tensor',
                    tags=(torch.Tag.pt2_compliant_tag,))


@checks.names_errors
def ulysses_attention(
        q: Tensor, k: Tensor, v: Tensor, *, group: dist.ProcessGroup | DeviceMesh | None = None,
        ring_group: dist.ProcessGroup | DeviceMesh | None = None,
        softmax_scale: float | None = None, causal: bool = False,
        window_size: Sequence[int] | Tensor = (-1, -1), softcap: float = 0.0,
        s_aux: Tensor | None = None, cu_seqlens: Tensor | Sequence[int] | None = None,
        seqlen: int | None = None, zigzag: bool = True, order: Sequence[int] | None = None,
        deterministic: bool = False, return_attn_probs: bool = False,
        mask: AttentionMask | None = None,
        return_max_logits: bool = False) -> Tensor | tuple[Tensor, ...]:
    """`ring_attention` with the heads divided among the ranks of a group: two all-to-alls a call.

    Args:
        q, k, v: as in `ring_attention`, the rows that `shard` gives this rank. The ranks of the
            group divide heads_q. If they do not divide heads_k, KV heads are repeated until they
            do; the repeated heads must divide heads_q.
        group: the ranks that hold the rows, in order; with ring_group those of one rank of the
            ring. Default: all ranks.
        ring_group: the ranks with the same place in their groups, such as the other axis of a mesh
            of two, which form a ring. Default: no ring.
        softmax_scale, causal, window_size, softcap, s_aux, cu_seqlens, seqlen, zigzag, order,
            deterministic, return_attn_probs, return_max_logits: as in `ring_attention`. s_aux: of
            all heads. zigzag, order: of the ring, for the rows of the whole group.
        mask: as in `ring_attention`; without ring_group it may have blocks, of all heads.

    Returns:
        As `ring_attention`. The gradient of s_aux is 0 for heads of other ranks.

    Raises:
        RuntimeError, NotImplementedError: as in `ring_attention`; heads that do not divide.

    Example:
        >>> mesh = init_device_mesh('cuda', (2, 4), mesh_dim_names=('ring', 'ulysses'))
        >>> groups = dict(group=mesh['ulysses'], ring_group=mesh['ring'])
        >>> out = flash_attn3.distributed.ulysses_attention(q, k, v, causal=True, **groups)
    """
    name, rank, ranks = exchange.named(_OP, group)
    ring_name, _, ring_ranks = ('', 0, 1) if ring_group is None else exchange.named(
        _OP, ring_group)
    order = orders.order_of(ring_ranks, zigzag, order)
    for x in (q, k, v):
        dtensors.reject(_OP, x)
    derivatives.reject_of_scalars(_OP, softmax_scale=softmax_scale, softcap=softcap)
    if not torch.compiler.is_compiling():
        general = general_of(q, window_size=window_size, s_aux=s_aux, softcap=softcap,
                             softmax_scale=softmax_scale, op=_OP)
        text = orders.problem(_OP, order, ring_ranks) or _problem((q, k, v), general, ranks)
        agreement.check(_OP, name, text, agreement.facts_of(
            dict(q=q, k=k, v=v, s_aux=s_aux), dict(return_attn_probs=return_attn_probs,
                                                   return_max_logits=return_max_logits)))
    if mask is not None:
        masks.check_alone(_OP, mask, (-1, 0) if causal else checks.window_sides(window_size, _OP))
        mask = mask.of_heads(_OP, (q.size(-2), k.size(-2)), rank, ranks)
    repeats = ranks // math.gcd(k.size(-2), ranks)
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, -2) for x in (k, v))
    heads = q.size(-2) // ranks
    tensors = tuple(_rows_of_heads(x, ranks, name) for x in (q, k, v))
    options = dict(softmax_scale=softmax_scale, softcap=softcap, deterministic=deterministic,
                   s_aux=None if s_aux is None else s_aux[rank * heads:][:heads], mask=mask,
                   return_max_logits=return_max_logits)
    if mask is not None and not ring_name:
        out, *by_row = _attend_all(tensors, cu_seqlens, seqlen, options)
    else:
        out, *by_row = ring.attend_in_group(_OP, tensors, ring_name, options | dict(
            causal=causal, window_size=window_size, cu_seqlens=cu_seqlens, seqlen=seqlen,
            order=order))
    out = _heads_of_rows(out, ranks, name)
    lse = _numbers_of_rows(by_row[0], ranks, name) if return_attn_probs else None
    max_logits = _numbers_of_rows(by_row[-1], ranks, name) if return_max_logits else None
    return asked_for((out, lse, max_logits), return_attn_probs, return_max_logits)


def _attend_all(tensors: tuple[Tensor, Tensor, Tensor], cu_seqlens: Tensor | Sequence[int] | None,
                seqlen: int | None, options: dict) -> tuple[Tensor, ...]:
    """out, lse and, if asked for, max_logits of all rows with a mask, which needs no ring. options:
    of `flash_attn_func`.
    """
    rows = tensors[0].size(-3)
    seqlen = options['mask'].rows if seqlen is None else seqlen
    padding = 0 if seqlen is None else rows - seqlen
    if padding < 0:
        raise RuntimeError(checks.error(_OP, f'seqlen to be at most {rows}, the rows of all ranks',
                                        str(seqlen)))
    q, k, v = (x.narrow(-3, 0, rows - padding) for x in tensors)
    if q.dim() == 4:
        out, *by_row = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    else:
        starts = torch.as_tensor(cu_seqlens, dtype=torch.int32, device=q.device)
        out, *by_row = flash_attn_varlen_func(q, k, v, starts, starts, 0, 0,
                                              return_attn_probs=True, **options)
    return F.pad(out, (0, 0, 0, 0, 0, padding)), *(F.pad(x, (0, padding), value=-math.inf)
                                                   for x in by_row)


def _problem(tensors: tuple[Tensor, Tensor, Tensor], general: General, ranks: int) -> str:
    """What is wrong with the arguments of this rank, or '', before it sends anything.
    `ring_attention` checks the rest.
    """
    q, k, v = tensors
    if not (q.dim() == k.dim() == v.dim() and q.dim() in (3, 4)):
        return checks.error(_OP, 'q, k and v of 3 or 4 dimensions',
                            f'{q.dim()}, {k.dim()} and {v.dim()}')
    if q.size(-3) != k.size(-3):
        return checks.error(_OP, f'k and v to have as many rows as q, {q.size(-3)}',
                            str(k.size(-3)))
    whole = (x if x.dim() == 4 else x.unsqueeze(0) for x in tensors)
    if text := checks.problem_text(dict(zip('qkv', whole)), general):
        return text
    heads_q, heads_k = q.size(-2), max(1, k.size(-2))
    common = math.lcm(heads_k, ranks)
    if heads_q % ranks or heads_q % common:
        return checks.error(_OP, f'the heads of q to be divisible by {common}, for {ranks} ranks '
                            f'and {heads_k} KV heads', str(heads_q),
                            'use ring_attention, which does not divide heads')
    return ''


def _rows_of_heads(x: Tensor, ranks: int, group: str) -> Tensor:
    """([batch,] rows of this rank, all heads, head_dim) -> (..., all rows, heads of this rank,
    head_dim).
    """
    parts = x.unflatten(-2, (ranks, -1)).movedim(-3, 0)      # (ranks, [batch,] rows, heads, dim)
    return _all_to_all(parts.contiguous(), group).movedim(0, -4).flatten(-4, -3)


def _heads_of_rows(x: Tensor, ranks: int, group: str) -> Tensor:
    """The inverse of _rows_of_heads()."""
    parts = x.unflatten(-3, (ranks, -1)).movedim(-4, 0)      # (ranks, [batch,] rows, heads, dim)
    return _all_to_all(parts.contiguous(), group).movedim(0, -3).flatten(-3, -2)


def _numbers_of_rows(x: Tensor, ranks: int, group: str) -> Tensor:
    """([batch,] heads of this rank, all rows) -> ([batch,] all heads, rows of this rank)."""
    x = _heads_of_rows(x.transpose(-1, -2).unsqueeze(-1), ranks, group)
    return x.squeeze(-1).transpose(-1, -2).contiguous()


_all_to_all = torch.ops.flash_attn3.all_to_all.default


def _exchange(x: Tensor, group: str) -> Tensor:
    return exchange.all_to_all(_OP, x, group)


def _setup_context(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.group = inputs[1]


def _formula(ctx, gradient: Tensor) -> tuple[Tensor, None]:
    return _all_to_all(gradient.contiguous(), ctx.group), None


for _device in ('CPU', 'CUDA'):
    ring.LIBRARY.impl('all_to_all', _exchange, _device)
torch.library.register_fake('flash_attn3::all_to_all', lambda x, group: x.new_empty(x.shape),
                            lib=ring.LIBRARY)
torch.library.register_autograd('flash_attn3::all_to_all', _formula, setup_context=_setup_context,
                                lib=autograd.FORMULAS)
