"""Attention of a sequence whose rows are divided among the ranks of a group.

In step s a rank attends to the keys of the rank s places before it, which are sent while step s - 1
runs. Only rows that the receiver sees are sent. Results are merged by their LSE (merging.py), four
at a time, so that a result of N ranks is rounded 1 + log4 N times. The backward takes the same
steps: `bwd`, given out and LSE over all keys, computes the part of a step. The gradients of keys go
straight back to their rank, which adds them in float32, in the order of the steps.

Sources: Ring Attention (arXiv 2310.01889); the merge by LSE of FlashAttention-2 (arXiv 2307.08691,
3.1). Messages go directly from rank to rank, not around the ring. The bytes of a step are the same,
and ranks whose rows do not attend to each other exchange nothing.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flash_attn3 import env
from flash_attn3.api import merging
from flash_attn3.api.interface import asked_for
from flash_attn3.api.masks import AttentionMask
from flash_attn3.cpu import reference
from flash_attn3.ops import autograd, checks, derivatives, dtensors, library, masked
from flash_attn3.distributed import agreement, copies, exchange, masks, orders
from flash_attn3.distributed.tiles import Call, Layout, Plan, Step, plan_of
from flash_attn3.ops.dense_and_varlen import (Execution, General, MaskTensors, for_backward,
                                              general_of)
from flash_attn3.ops.fp8 import EightBit

_OP = 'ring_attention'
_attend = torch.ops.flash_attn3.attend.default
_bwd = torch.ops.flash_attn3.bwd.default


class Ring(NamedTuple):
    """The arguments after q, k, v and other tensors in the schemas. seqlen -1: all rows. group:
    the name of a process group, '' for none.
    """
    group: str
    order: Sequence[int]                # the chunks of rank 0, then of rank 1, ...
    softmax_scale: float
    window: Sequence[int] = (-1, -1)    # (left, right); causal: (left, 0)
    softcap: float = 0.0
    seqlen: int = -1
    deterministic: bool = False
    return_max_logits: bool = False


_ARGUMENTS = ('Tensor? sinks, Tensor? cu_seqlens, Tensor? intervals, str group, int[] order, '
              'float softmax_scale, SymInt[] window=[-1, -1], float softcap=0.0, '
              'SymInt seqlen=-1, bool deterministic=False, bool return_max_logits=False')
LIBRARY = torch.library.Library('flash_attn3', 'FRAGMENT')
LIBRARY.define(f'fwd_ring(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor, Tensor, '
               'Tensor)', tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define('bwd_ring(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, '
               f'Tensor lse, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)',
               tags=(torch.Tag.pt2_compliant_tag,))


@checks.names_errors
def ring_attention(
        q: Tensor, k: Tensor, v: Tensor, *, group: dist.ProcessGroup | DeviceMesh | None = None,
        softmax_scale: float | None = None, causal: bool = False,
        window_size: Sequence[int] | Tensor = (-1, -1), softcap: float = 0.0,
        s_aux: Tensor | None = None, cu_seqlens: Tensor | Sequence[int] | None = None,
        seqlen: int | None = None, zigzag: bool = True, order: Sequence[int] | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False, mask: AttentionMask | None = None,
        return_max_logits: bool = False) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_func` on a sequence whose rows are divided among the ranks of a group.

    Each rank calls it with the rows that `shard` gives it and gets these rows of the result.
    Communication overlaps with attention. A rank needs the memory of `flash_attn_func` on its rows,
    of the keys and values of up to two other ranks (which stay allocated between GPUs of one host:
    env.py) and of up to 3 log4(ranks) partial results; the backward also that of gradients in
    float32 and of those being sent. It is one op under `torch.compile`, without a graph break.

    Args:
        q: (batch, rows, heads_q, head_dim), or (rows, heads_q, head_dim); dtypes, head dims and
            strides as in `flash_attn_func`, here on the CPU (gloo) or a Hopper GPU (NCCL).
        k, v: likewise with heads_k, which divides heads_q; the same rows as q.
        group: the ranks that hold the rows, in order; or a mesh of one axis. Default: all ranks.
        seqlen: rows of the whole sequence. Further rows at its end are padding: they are never
            read, out is 0 there, lse -inf, and the gradients 0. Default: the rows of all ranks.
        zigzag: each rank holds two chunks, as `shard` divides rows, which balances causal attention
            and needs an even number of rows; False: one chunk. Default True.
        order: in place of zigzag, which chunks of the sequence each rank holds, from
            `balanced_order`: those of rank 0, rising, then those of rank 1, ..., as many of each.
            shard, positions and unshard take the same order. Default: None.
        cu_seqlens: with three dimensions: where the sequences of the whole stream begin, and the
            end of the last, as in `flash_attn_varlen_func`: numbers, or a tensor of them. Each call
            reads a tensor on a GPU, for which the host waits. Padding follows the last sequence.
            Ranks that share no sequence exchange nothing. Default: one sequence.
        softmax_scale, causal, window_size, softcap, s_aux: as in `flash_attn_func`, of the whole
            sequence.
        deterministic: as in `flash_attn_func`; here the gradients of q, k and v repeat. The forward
            always does.
        return_attn_probs: also return lse. Default False.
        mask: an AttentionMask of intervals of the whole sequence, or of the stream if made with
            cu_seqlens, in place of causal and windows; the same on all ranks. Its first call waits
            for the GPU, to see which keys each rank needs. seqlen is then that of the mask.
        return_max_logits: append max_logits, as in `flash_attn_func`. Default False.

    Returns:
        out, of the shape of q with the head_dim of v, or a tuple of it, lse and max_logits, where
        those are (batch, heads_q, rows), or (heads_q, rows), float32 (float64 for float64).
        max_logits: the largest score of each query over the keys of all ranks, without s_aux; -inf
        where it sees none and in padding. Gradients of q, k, v and s_aux; that of s_aux is the part
        from the rows of this rank, as for any weight.

    Raises:
        RuntimeError: a wrong rank, shape, dtype, device or number on this rank; no process group; a
            peer that does not answer within the group's time limit. With FLASH_ATTN3_CHECKS=1 all
            ranks raise it if one has a wrong argument or if they differ.
        NotImplementedError: DTensors; a mask of blocks; derivatives as in `flash_attn_func`.

    Example:
        >>> mine = flash_attn3.distributed.shard(tokens)    # (batch, seqlen) -> (batch, rows)
        >>> out = flash_attn3.distributed.ring_attention(*project(mine), causal=True)
    """
    name, _, ranks = exchange.named(_OP, group)
    results = attend_in_group(_OP, (q, k, v), name, dict(
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        s_aux=s_aux, cu_seqlens=cu_seqlens, seqlen=seqlen,
        order=orders.order_of(ranks, zigzag, order), deterministic=deterministic, mask=mask,
        return_max_logits=return_max_logits))
    return asked_for(results, return_attn_probs, return_max_logits)


def attend_in_group(op: str, tensors: tuple[Tensor, Tensor, Tensor], group: str,
                    options: dict) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logits) of `ring_attention` in the group of this name. options: its other
    arguments. max_logits is empty unless asked for.
    """
    q, k, v = tensors
    for x in (q, k, v):
        dtensors.reject(op, x)
    derivatives.reject_of_scalars(op, **{name: options[name]
                                         for name in ('softmax_scale', 'softcap')})
    is_packed = q.dim() == 3
    starts = options['cu_seqlens']
    if not (q.dim() == k.dim() == v.dim() and q.dim() in (3, 4)) or (
            starts is not None and not is_packed):
        raise RuntimeError(checks.error(
            op, 'q, k and v of 4 dimensions (batch, rows, heads, head_dim), or 3 without batch '
            'with cu_seqlens', f'{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}'))
    if starts is not None and not isinstance(starts, Tensor):
        starts = torch.tensor(starts, dtype=torch.int32)
    left, right = checks.window_sides(options['window_size'], op)
    window = left, 0 if options['causal'] else right
    if is_packed:
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    seqlen, mask, intervals = options['seqlen'], options['mask'], None
    if seqlen is not None and seqlen < 0:    # -1 is no length in the schema
        raise RuntimeError(checks.error(op, 'seqlen to be 0 or more, or None', str(seqlen)))
    sinks = checks.sinks_of(options['s_aux'], q, op)
    if mask is not None:
        masks.check_alone(op, mask, window)
        intervals = masks.intervals_of(op, mask, q, seqlen, starts)
        seqlen, starts = intervals.size(1), None
    own = Ring(group, options['order'], library.softmax_scale_of(q, options['softmax_scale']),
               window, options['softcap'], -1 if seqlen is None else seqlen,
               checks.wants_determinism(options['deterministic']), options['return_max_logits'])
    results = torch.ops.flash_attn3.fwd_ring(q, k, v, sinks, starts, intervals, *own)
    return tuple(x.squeeze(0) for x in results) if is_packed else results


# ----------------------------------------------------------------------------- checks and the plan
def _starts_of(cu_seqlens: Tensor | None) -> tuple[int, ...] | None:
    return None if cu_seqlens is None else tuple(cu_seqlens.tolist())


def _plan(q: Tensor, own: Ring, starts: tuple[int, ...] | None,
          intervals: Tensor | None) -> masks.MaskedPlan:
    rank, ranks = exchange.place_of(own.group)
    rows = q.size(1)
    seqlen = ranks * rows if own.seqlen == -1 else own.seqlen
    layout = Layout(ranks, rows, seqlen, tuple(own.order))
    if intervals is not None:
        return masks.plan_of(intervals, layout, rank)
    return masks.MaskedPlan(plan_of(layout, rank, tuple(own.window), starts), {})


def _problem(tensors: dict[str, Tensor | None], starts: tuple[int, ...] | None, own: Ring) -> str:
    """What is wrong with the arguments of this rank, or ''."""
    q, k, v = (tensors[name] for name in 'qkv')
    if q.is_cuda and not library.kernels_serve(q.device):
        return checks.error(_OP, 'a Hopper GPU and its kernels, or CPU tensors', str(q.device),
                            library.KERNELS_MISSING)
    if text := checks.problem_text(dict(q=q, k=k, v=v),
                                   _general(q, own.window, tensors['s_aux'], own)):
        return text
    rows, ranks = q.size(1), exchange.place_of(own.group)[1]
    all_rows = ranks * rows
    if k.size(1) != rows:
        return checks.error(_OP, f'k and v to have as many rows as q, {rows}', str(k.size(1)))
    if text := orders.problem(_OP, own.order, ranks):
        return text
    if rows % (count := len(own.order) // ranks):
        return checks.error(_OP, f'rows of q to be divisible by {count}, the chunks of a rank',
                            str(rows), 'pad with flash_attn3.distributed.shard, or pass '
                            'zigzag=False')
    if own.seqlen > all_rows:
        return checks.error(_OP, f'seqlen to be at most {all_rows}, the rows of all ranks',
                            str(own.seqlen))
    if starts is not None and (problem := checks.sequences_problem('all ranks', starts, [],
                                                                   all_rows, suffix='')):
        return checks.error(_OP, *problem)
    return ''


def _check(tensors: dict[str, Tensor | None], starts: tuple[int, ...] | None, own: Ring) -> None:
    scalars = own._asdict() | {'causal or window_size': tuple(own.window),
                               'cu_seqlens': starts}
    del scalars['group'], scalars['window']
    if env.CHECK_CONTENTS:
        scalars['contents of mask'] = masks.fact_of(tensors['mask'])
    agreement.check(_OP, own.group, _problem(tensors, starts, own),
                    agreement.facts_of(tensors, scalars))


# ------------------------------------------------------------------------------------ one call
def _cut(x: Tensor, rows: tuple[int, int], call: Call) -> Tensor:
    """Rows of (batch, rows, heads, head_dim); several tiles go without the batch, which is 1."""
    x = exchange.rows_of(x, rows)
    return x[0] if len(call.tiles) > 1 else x


def _cut_lse(x: Tensor | None, call: Call) -> Tensor | None:
    """Rows of a tensor (batch, heads, rows)."""
    if x is None:
        return None
    x = x[..., slice(*call.rows)]
    return x[0] if len(call.tiles) > 1 else x


def _cut_keys(keys: Sequence[Tensor], step: Step, call: Call) -> list[Tensor]:
    """The keys and values of a call, from those of its step."""
    rows = tuple(row - step.keys[0] for row in call.keys)
    return [_cut(x, rows, call) for x in keys]


def _general(q: Tensor, window: Sequence[int], sinks: Tensor | None, own: Ring,
             **lists) -> General:
    return general_of(q, window_size=tuple(window), s_aux=sinks, softcap=own.softcap,
                      softmax_scale=own.softmax_scale, op='ring_attention', **lists)


def _general_of_call(q: Tensor, call: Call, sinks: Tensor | None, own: Ring) -> General:
    """The arguments of a call. A sink enters once: in the call where a query meets its own key."""
    tile = call.tiles[0]
    lists = _lists(call, q.device) if len(call.tiles) > 1 else {}
    return _general(q, (tile.left, tile.right), sinks if tile.is_own else None, own, **lists)


def _of_mask(mask: AttentionMask | None, q: Tensor, keys: list[Tensor], general: General,
             with_gradients: bool) -> MaskTensors:
    """What the ops take of the mask of a step, whose lists it keeps."""
    if mask is None:
        return MaskTensors()
    tiles = masked.tiles_of(q, keys[1], general, with_gradients)
    return mask.tensors_of(_OP, (q, keys[0]), (), tiles, lambda: None)


@lru_cache(maxsize=256)
def _lists(call: Call, device: torch.device) -> dict[str, Tensor | int]:
    """The tiles as sequences of a packed call. Rows between them may belong to none."""
    lists = {}
    for name, ends in (('q', [tile[0:2] for tile in call.tiles]),
                       ('k', [tile[2:4] for tile in call.tiles])):
        sizes = [end - begin for begin, end in ends]
        starts = [begin - ends[0][0] for begin, _ in ends] + [ends[-1][1] - ends[0][0]]
        lists[f'cu_seqlens_{name}'] = torch.tensor(starts, dtype=torch.int32, device=device)
        if sum(sizes) < starts[-1]:
            lists[f'seqused_{name}'] = torch.tensor(sizes, dtype=torch.int32, device=device)
        lists[f'max_seqlen_{name}'] = max(sizes)
    return lists


# -------------------------------------------------------------------------------------- the forward
class _Parts:
    """Results over parts of the keys, merged by cells: ranges of rows that calls cover as a whole.

    Four results of one level merge into one of the next, so each level holds at most three.
    """

    def __init__(self, plan: Plan, rows: int):
        self._of_cell: dict[tuple[int, int], list] = {cell: [] for cell in plan.cells}
        self._rows = rows

    def add(self, rows: tuple[int, int], out: Tensor, lse: Tensor) -> None:
        """out (batch, rows, heads, head_dim) and lse (batch, heads, rows) of these rows."""
        for cell, parts in self._of_cell.items():
            if rows[0] <= cell[0] and cell[1] <= rows[1]:
                first, end = (row - rows[0] for row in cell)
                parts.append((0, out[:, first:end], lse[..., first:end]))
                while len(parts) >= merging.MOST_PARTS and parts[-1][0] == parts[-4][0]:
                    level, *last = parts[-1][0] + 1, *parts[-4:]
                    parts[-4:] = [(level, *merging.merge_states(*zip(*(x[1:] for x in last))))]

    def result(self, out: Callable[[], Tensor], lse: Callable[[], Tensor]) -> tuple[
            Tensor, Tensor]:
        """The result for all rows. out, lse: allocate it, if no part is already the result."""
        for parts in self._of_cell.values():
            while len(parts) > merging.MOST_PARTS:    # the highest level is first
                parts[-4:] = [(0, *merging.merge_states(*zip(*(x[1:] for x in parts[-4:]))))]
        if list(self._of_cell) == [(0, self._rows)]:
            outs, lses = zip(*(x[1:] for x in self._of_cell[0, self._rows]))
            return merging.merge_states(outs, lses) if len(outs) > 1 else (outs[0], lses[0])
        out, lse = out(), lse()
        for (first, end), parts in self._of_cell.items():
            outs, lses = zip(*(x[1:] for x in parts))
            lse[..., first:end] = merging.merge_into(out[:, first:end], outs, lses)
        return out, lse


def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor | None,
             intervals: Tensor | None, *arguments) -> tuple[Tensor, Tensor, Tensor]:
    """The op `fwd_ring` on CPU and CUDA tensors."""
    own = Ring(*arguments)
    starts = _starts_of(cu_seqlens)
    _check(dict(q=q, k=k, v=v, s_aux=sinks, mask=intervals), starts, own)
    plan, masks_by_step = _plan(q, own, starts, intervals)
    parts, link = _Parts(plan, q.size(1)), copies.link_of(_OP, own.group, (k, v))
    (batch, rows, heads, _), wide = q.shape, reference.lse_dtype(q.dtype)

    def blind() -> Tensor:
        """The LSE or the largest score of queries without keys."""
        return q.new_full((batch, heads, rows), -math.inf, dtype=wide)

    largest = blind() if own.return_max_logits else q.new_empty(0, dtype=wide)
    execution = Execution(return_max_logits=own.return_max_logits)

    def attend(step: Step, keys: list[Tensor], call: Call) -> None:
        own_rows, general = _cut(q, call.rows, call), _general_of_call(q, call, sinks, own)
        cut = _cut_keys(keys, step, call)
        given = _of_mask(masks_by_step.get(step), own_rows, cut, general, False)
        out, lse, max_logits = _attend(own_rows, *cut, None, *general, *execution[:-1],
                                       *EightBit(), *given)
        if len(call.tiles) > 1:
            out, lse = out.unsqueeze(0), lse.unsqueeze(0)
        parts.add(call.rows, out, lse)
        if own.return_max_logits:
            seen = largest[..., slice(*call.rows)]
            torch.maximum(seen, max_logits, out=seen)

    for step, keys in exchange.travel(link, plan, (k, v)):
        for call in step.calls:
            attend(step, keys, call)
        keys.clear()
    return *parts.result(lambda: q.new_zeros((batch, rows, heads, v.size(3))), blind), largest


# ------------------------------------------------------------------------------------ the backward
class _Total:
    """The sum of gradients of some of the rows of a tensor. Two parts are added in its dtype, for
    which torch rounds once; more in float32.
    """

    def __init__(self, x: Tensor, has_two: bool):
        self._x, self._total = x, None
        self._dtype = x.dtype if has_two else reference.wide_dtype(x.dtype)

    def add(self, rows: tuple[int, int], part: Tensor) -> None:
        """Adds a part. The first one may be modified later."""
        if self._total is None and part.size(1) == self._x.size(1):
            self._total = part.to(self._dtype)
            return
        if self._total is None:
            self._total = self._x.new_zeros(self._x.shape, dtype=self._dtype)
        exchange.rows_of(self._total, rows).add_(part)

    def result(self) -> Tensor:
        if self._total is None:
            return self._x.new_zeros(self._x.shape)
        return self._total.to(self._x.dtype)


class _KeyGradients:
    """dk and dv of this rank, and those of other ranks' keys that are being sent to them."""

    def __init__(self, link: exchange.Link, tensors: tuple[Tensor, Tensor],
                 has_two: bool):
        self._totals = [_Total(x, has_two) for x in tensors]
        self._link, self._like, self._pending, self._rows = link, tensors, None, None

    def add(self, rows: tuple[int, int] | None, gradients: Sequence[Tensor]) -> None:
        for total, part in zip(self._totals, gradients):
            total.add(rows, part)

    def send(self, step: Step, gradients: Sequence[Tensor]) -> None:
        """Sends the gradients of the step's keys to their rank and expects those of own keys."""
        self.take()
        shapes = [] if step.sent is None else [
            (x.size(0), step.sent[1] - step.sent[0], *x.shape[2:]) for x in self._like]
        self._rows = step.sent
        self._pending = self._link.start(gradients, step.source, shapes, step.target,
                                         self._like[0])

    def take(self) -> None:
        """Adds the gradients that are in flight."""
        if self._pending is not None:
            self.add(self._rows, self._pending.wait())
        self._pending = None

    def result(self) -> list[Tensor]:
        self.take()
        return [total.result() for total in self._totals]


def _backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
              lse: Tensor, sinks: Tensor | None, cu_seqlens: Tensor | None,
              intervals: Tensor | None, *arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The op `bwd_ring` on CPU and CUDA tensors."""
    own = Ring(*arguments)
    plan, masks_by_step = _plan(q, own, _starts_of(cu_seqlens), intervals)
    has_two = len(plan.steps) <= 2 and all(len(step.calls) <= 1 for step in plan.steps)
    link = copies.link_of(_OP, own.group, (k, v))
    dq, key_gradients = _Total(q, has_two), _KeyGradients(
        exchange.Link(_OP, own.group, q.device), (k, v), has_two)
    dsinks = lse.new_zeros(0) if sinks is None else torch.zeros_like(sinks)

    def attend(step: Step, keys: list[Tensor], call: Call) -> list[Tensor]:
        """dk and dv of a call."""
        rows, general = _cut(q, call.rows, call), _general_of_call(q, call, sinks, own)
        cut = _cut_keys(keys, step, call)
        given = _of_mask(masks_by_step.get(step), rows, cut, general, True)
        *part, dsinks_part = _bwd(
            _cut(dout, call.rows, call), _cut_lse(dlse, call), rows, *cut,
            _cut(out, call.rows, call), _cut_lse(lse, call),
            *for_backward(general, own.deterministic, given))
        dq_part, *part = (x if x.dim() == 4 else x.unsqueeze(0) for x in part)
        dq.add(call.rows, dq_part)
        if general.sinks is not None:
            dsinks.add_(dsinks_part)
        return part

    def step_gradients(step: Step, keys: list[Tensor]) -> list[Tensor]:
        parts = [(call.keys, attend(step, keys, call)) for call in step.calls]
        gradients = _sum(parts, step, keys)
        keys.clear()
        return gradients

    # No variable here holds tensors of a step, which would stay alive during the next.
    for step, keys in exchange.travel(link, plan, (k, v)):
        if step is plan.steps[0]:
            key_gradients.add(step.keys, step_gradients(step, keys))
        else:
            key_gradients.send(step, step_gradients(step, keys))
    return dq.result(), *key_gradients.result(), dsinks


def _sum(parts: list[tuple[tuple[int, int], list[Tensor]]], step: Step,
         keys: Sequence[Tensor]) -> list[Tensor]:
    """dk and dv of the keys of a step, (batch, rows, heads_k, head_dim), from those of its calls
    with their rows.
    """
    if len(parts) == 1:
        return parts[0][1]
    wide = [torch.zeros_like(x, dtype=reference.wide_dtype(x.dtype)) for x in keys]
    for (first, end), gradients in parts:
        for total, part in zip(wide, gradients):
            total[:, first - step.keys[0]:end - step.keys[0]].add_(part)
    return [total.to(x.dtype) for total, x in zip(wide, keys)]


# ----------------------------------------------------------------------------------------- the ops
def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, sinks, cu_seqlens, intervals, *arguments = inputs
    out, lse, max_logits = output
    ctx.own = Ring(*arguments)
    ctx.mark_non_differentiable(max_logits)
    ctx.save_for_backward(q, k, v, out, lse, sinks, cu_seqlens, intervals)
    ctx.set_materialize_grads(False)


def _formula(ctx, dout: Tensor | None, dlse: Tensor | None, _) -> tuple:
    """Gradients for the inputs of `fwd_ring`."""
    *tensors, sinks, cu_seqlens, intervals = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(tensors[3])
    *gradients, dsinks = autograd.first_derivatives(
        _OP, torch.ops.flash_attn3.bwd_ring.default, dout, dlse, *tensors, sinks, cu_seqlens,
        intervals, *ctx.own)
    return *gradients, None if sinks is None else dsinks, None, None, *(None for _ in Ring._fields)


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor | None,
              intervals: Tensor | None, *arguments) -> tuple[Tensor, Tensor, Tensor]:
    batch, rows, heads, _ = q.shape
    lse = q.new_empty((batch, heads, rows), dtype=reference.lse_dtype(q.dtype))
    return (q.new_empty((batch, rows, heads, v.shape[3])), lse,
            torch.empty_like(lse) if Ring(*arguments).return_max_logits else lse.new_empty(0))


def _bwd_fake(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
              lse: Tensor, sinks: Tensor | None, *_) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradients = [x.new_empty(x.shape) for x in (q, k, v)]
    return *gradients, lse.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


for _device in ('CPU', 'CUDA'):
    LIBRARY.impl('fwd_ring', _forward, _device)
    LIBRARY.impl('bwd_ring', _backward, _device)
torch.library.register_fake('flash_attn3::fwd_ring', _fwd_fake, lib=LIBRARY)
torch.library.register_fake('flash_attn3::bwd_ring', _bwd_fake, lib=LIBRARY)
torch.library.register_autograd('flash_attn3::fwd_ring', _formula, setup_context=_setup_context,
                                lib=autograd.FORMULAS)
