"""Attention with an AttentionMask (api/masks.py): what it refuses, and which path it takes.

Called by interface.py. CPU tensors without gradients and Hopper GPUs take the op `attend`; with
gradients the CPU, and other GPUs, take the plain path, which PyTorch differentiates.
"""
from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn3.cpu import fallback
from flash_attn3.ops import checks, dense_and_varlen, dtensors, library, mask_lists, splits
from flash_attn3.ops.autograd import first_derivatives
from flash_attn3.ops.dense_and_varlen import MaskTensors, rank_of
from flash_attn3.ops.fp8 import EightBit
from flash_attn3.ops.splits import Call

_attend = torch.ops.flash_attn3.attend.default
_bwd = torch.ops.flash_attn3.bwd.default


def problem_text(call: Call, num_splits: int) -> str:
    """Why the arguments of a call do not go together with its mask, or ''."""
    general, execution = call.general, call.execution
    if text := splits.problem_text(call.op, num_splits):
        return text
    if not hasattr(call.mask, 'tensors_of'):
        return checks.error(call.op, 'mask to be an AttentionMask', type(call.mask).__name__)
    asked = {'causal': general.causal, 'attention_chunk': general.attention_chunk != 0,
             'window_size': (general.window_left, general.window_right) != (-1, -1),
             'seqused_q': general.seqused_q is not None,
             'seqused_k': general.seqused_k is not None, 'num_splits': num_splits > 1,
             'split_size': execution.split_size != 0}
    for name, is_asked in asked.items():
        if is_asked:
            return checks.error(call.op, f'no {name} with mask', name,
                                'the mask says all that a query sees' if name != 'split_size'
                                and name != 'num_splits' else '')
    if call.eight_bit is not None:
        return checks.error(call.op, 'q of 16 bits with mask', 'float8_e4m3fn')
    return ''


def gradient_text(op: str, softcap: float) -> str:
    """Why our kernels have no gradients for a call with a mask, or ''."""
    return softcap and checks.error(op, 'no softcap for gradients with mask on a GPU', str(softcap))


class _MaskedAttention(torch.autograd.Function):
    """The op `attend` with a mask, on a Hopper GPU; q, k, v and sinks have gradients."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, general, execution, given):
        out, lse, max_logits = _attend(q, k, v, None, *general, *execution[:-1], *EightBit(),
                                       *given)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *general[:2])
        ctx.given = given    # save_for_backward() refuses inference tensors
        ctx.general = general._replace(sinks=None, cu_seqlens_q=None, cu_seqlens_k=None)
        ctx.deterministic = checks.wants_determinism(execution.deterministic)
        ctx.mark_non_differentiable(max_logits)
        ctx.set_materialize_grads(False)
        return out, lse, max_logits

    @staticmethod
    def backward(ctx, dout, dlse, _):
        q, k, v, out, lse, sinks, starts_q, starts_k = ctx.saved_tensors
        general = ctx.general._replace(sinks=sinks, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)
        dout = torch.zeros_like(out) if dout is None else dout
        own = dense_and_varlen.for_backward(general, ctx.deterministic, ctx.given)
        op = 'flash_attn_func' if starts_q is None else 'flash_attn_varlen_func'
        dq, dk, dv, dsinks = first_derivatives(op, _bwd, dout, dlse, q, k, v, out, lse, *own)
        return dq, dk, dv, None if sinks is None else dsinks, None, None, None


def sizes_of(call: Call) -> MaskTensors:
    """Empty tensors with the shapes that a mask of intervals has, for the planner."""
    q, *_ = call.tensors
    rows, starts = q.size(-3), call.general.cu_seqlens_q
    lists = mask_lists.Layout(rows, 0, starts).lists()
    return MaskTensors(q.new_empty((*[1] * (starts is None), rows, 4), dtype=torch.int32), None,
                       q.new_empty((1, 1, lists, mask_lists.HEADER + 1), dtype=torch.int32))


def _is_served(q: Tensor) -> bool:
    return not q.is_cuda or library.kernels_serve(q.device)


def _check(call: Call) -> None:
    q, k, _, _ = call.tensors
    is_served = _is_served(q)
    if checks.has_no_data(q):
        return
    checks.check_forward(dict(zip(('q', 'k', 'v', 'out'), call.tensors)), call.general,
                         call.execution, rules_of=None if is_served else 'cpu')
    if checks.reads_contents(q) or not is_served:
        dense_and_varlen.check_contents(q, k, call.general)


def refuse(call: Call, num_splits: int) -> None:
    """Raises an error if the call has what does not go with a mask."""
    if text := problem_text(call, num_splits):
        raise RuntimeError(text)
    dtensors.reject(f'{call.op} with mask', call.tensors[0])
    if is_compiling():
        raise NotImplementedError(checks.error(
            call.op, 'an eager call with mask', 'torch.compile or torch.export',
            'torch.compiler.disable the function that calls it'))
    call.reject_forward_mode()
    if call.tensors[3] is not None and call.needs_grad():
        raise RuntimeError(checks.gradient_with_out_text(call.op, **call.named()))


def packed_call(call: Call, is_planned: bool = False) -> Call | None:
    """The same attention on packed sequences, if the mask shows documents one after another: packed
    sequences need no lists. None: it is not that, or its tensors have no view as packed ones.
    is_planned: nothing is checked, and the mask may be on another device.
    """
    if rank_of(call.general) == 3 or any(x is not None and not _is_one(x) for x in call.tensors):
        return None
    q, k, _, _ = call.tensors
    packed = call.mask.as_packed(call.op, q, k, call.needs_grad(),
                                 None if is_planned else lambda: _check(call))
    if packed is None:
        return None
    *lists, causal = packed
    starts, used = (x.to(q.device) for x in lists) if is_planned else lists
    general = call.general._replace(
        cu_seqlens_q=starts, cu_seqlens_k=starts, seqused_k=used, causal=causal,
        max_seqlen_q=q.size(1), max_seqlen_k=k.size(1))
    rows = tuple(None if x is None else x.flatten(0, 1) for x in call.tensors)
    return call._replace(tensors=rows, general=general, mask=None)


def _is_one(x: Tensor) -> bool:
    """Whether the sequences of (batch, seqlen, heads, head_dim) are a view as one."""
    return x.dim() == 4 and (x.size(0) == 1 or x.stride(0) == x.size(1) * x.stride(1))


def by_batch(results: tuple[Tensor, Tensor | None, Tensor | None],
             tensors: tuple[Tensor, Tensor, Tensor, Tensor | None]) -> tuple[Tensor, ...]:
    """(out, lse, max_logits) of a packed_call() for the tensors of the call. lse and max_logits,
    where they were asked for: (heads, batch * seqlen) as (batch, heads, seqlen).
    """
    q, _, _, out = tensors
    rows = results[0].view(*q.shape[:2], *results[0].shape[1:]) if out is None else out
    return rows, *(x if x is None or x.dim() != 2 else
                   x.view(x.size(0), *q.shape[:2]).transpose(0, 1).contiguous()
                   for x in results[1:])


def attention(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, lse, max_logits) of a call with a mask that refuse() has seen."""
    q, k, v, out = tensors = call.tensors
    general, execution = call.general, call.execution
    needs_grad, is_served = call.needs_grad(), _is_served(q)
    rank = rank_of(general)
    if needs_grad or not is_served or any(x.dim() != rank for x in tensors[:3]):
        _check(call)    # else the op does, and a mask before it is compared with a call
    lengths = (*general[:2], general.max_seqlen_q, general.max_seqlen_k) if rank == 3 else ()
    has_kernels = is_served and (q.is_cuda or not needs_grad)
    with_gradients = needs_grad and has_kernels
    if with_gradients and (text := gradient_text(call.op, general.softcap)):
        raise NotImplementedError(text)
    tiles = (mask_lists.Tiles.of(max(q.size(-1), v.size(-1)), bool(general.softcap), needs_grad)
             if q.is_cuda and is_served else None)
    given = call.mask.tensors_of(call.op, (q, k), lengths, tiles, lambda: _check(call))
    if has_kernels:
        if q.is_cuda:
            dense_and_varlen.check_cuda_contents(q, k, general)
        if needs_grad:
            return _MaskedAttention.apply(q, k, v, general.sinks, general, execution, given)
        results = _attend(q, k, v, out, *general, *execution[:-1], *EightBit(), *given)
        return results[0] if out is None else out, *results[1:]
    if not is_served:
        fallback.warn_once(q.device, call.op)
    result, lse, row_max = dense_and_varlen.attend(q, k, v, general, execution.return_max_logits,
                                                   given)
    return (result if out is None else out.copy_(result), lse,
            None if row_max is None else row_max.detach())
