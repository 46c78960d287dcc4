"""Attention with an AttentionMask (api/masks.py): what it refuses, and which path it takes.

Called by interface.py. The CPU and Hopper GPUs take the op `attend`, with the gradients of the
general op; under torch.compile `fwd_general`. Other GPUs take the plain path, which PyTorch
differentiates.
"""
from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn3.cpu import fallback
from flash_attn3.ops import (checks, dense_and_varlen, derivatives, fp8, invariance, library,
                             mask_lists, splits)
from flash_attn3.ops.autograd import general_attention
from flash_attn3.ops.dense_and_varlen import General, MaskTensors, rank_of
from flash_attn3.ops.fp8 import EightBit
from flash_attn3.ops.mask_lists import Tiles
from flash_attn3.ops.splits import Call

_attend = torch.ops.flash_attn3.attend.default
_fwd_traced = torch.ops.flash_attn3.fwd_general.default


def problem_text(call: Call, num_splits: int) -> str:
    """Why the arguments of a call do not go together with its mask, or ''."""
    general = call.general
    if text := splits.problem_text(call.op, num_splits):
        return text
    if not hasattr(call.mask, 'tensors_of'):
        return checks.error(call.op, 'mask to be an AttentionMask', type(call.mask).__name__)
    asked = {'causal': general.causal, 'attention_chunk': general.attention_chunk != 0,
             'window_size': (general.window_left, general.window_right) != (-1, -1),
             'seqused_q': general.seqused_q is not None,
             'seqused_k': general.seqused_k is not None}
    for name, is_asked in asked.items():
        if is_asked:
            return checks.error(call.op, f'no {name} with mask', name,
                                'the mask says all that a query sees')
    name = splits.asked_for_parts(call, num_splits)
    return name and checks.error(call.op, f'no {name} with mask', name,
                                 invariance.HINT if invariance.OPEN else '')


def sizes_of(call: Call) -> MaskTensors:
    """Empty tensors with the shapes that a mask of intervals has, for the planner."""
    q, *_ = call.tensors
    rows, (starts, *_) = q.size(-3), call.general
    lists = mask_lists.Layout(rows, 0, starts).lists()
    return MaskTensors(q.new_empty((*[1] * (starts is None), rows, 4), dtype=torch.int32), None,
                       q.new_empty((1, 1, lists, mask_lists.HEADER + 1), dtype=torch.int32))


def _is_served(q: Tensor) -> bool:
    return not q.is_cuda or library.kernels_serve(q.device)


def tiles_of(q: Tensor, v: Tensor, general: General, with_gradients: bool,
             is_fp8: bool = False) -> Tiles | None:
    """Tiles of the kernels that read lists in a call; None: the plain path, which reads none.
    is_fp8: the forward is, and the gradients are of 16 bits.
    """
    if not q.is_cuda or not _is_served(q):
        return None
    return Tiles.of(max(q.size(-1), v.size(-1)), bool(general.softcap), with_gradients, is_fp8)


def _tensors_of(call: Call, with_gradients: bool, is_fp8: bool) -> MaskTensors:
    """The mask of a call as its ops take it."""
    q, k, v, _ = call.tensors
    general = call.general
    lengths = ((*general[:2], general.max_seqlen_q, general.max_seqlen_k) if rank_of(general) == 3
               else ())
    return call.mask.tensors_of(call.op, (q, k), lengths,
                                tiles_of(q, v, general, with_gradients, is_fp8),
                                lambda: _check(call), is_fp8)


def _has_other_rank(call: Call) -> bool:
    """Whether sizes of q, k or v cannot be compared with a mask."""
    return any(x.dim() != rank_of(call.general) for x in call.tensors[:3])


def _check(call: Call) -> None:
    q, k, _, _ = call.tensors
    is_served = _is_served(q)
    if is_compiling() or checks.has_no_data(q):    # the op checks the call that runs
        return
    tensors = dict(zip(('q', 'k', 'v', 'out'), call.tensors))
    if call.eight_bit is None:
        checks.check_forward(tensors, call.general, call.execution,
                             rules_of=None if is_served else 'cpu')
    else:
        fp8.check_forward(tensors, call.eight_bit, call.general, call.execution)
    if checks.reads_contents(q) or not is_served:
        dense_and_varlen.check_contents(q, k, call.general)


def refuse(call: Call, num_splits: int) -> None:
    """Raises an error if the call has what does not go with a mask."""
    if text := problem_text(call, num_splits):
        raise RuntimeError(text)
    call.reject_forward_mode()
    if call.tensors[3] is not None and call.needs_grad():
        raise RuntimeError(checks.gradient_with_out_text(call.op, **call.named()))


def packed_call(call: Call, is_planned: bool = False) -> Call | None:
    """The same attention on packed sequences, if the mask shows documents one after another: packed
    sequences need no lists. None: it is not that, its tensors have no view as packed ones, or they
    are e4m3, whose scales have another layout there. is_planned: nothing is checked, and the mask
    may be on another device.
    """
    if (rank_of(call.general) == 3 or call.eight_bit is not None
            or any(x is not None and not _is_one(x) for x in call.tensors)):
        return None
    q, k, _, _ = call.tensors
    packed = call.mask.as_packed(call.op, q, k, None if is_planned else lambda: _check(call))
    if packed is None:
        return None
    *lists, causal = packed
    starts, used = (x.to(q.device) for x in lists) if is_planned else lists
    lengths = starts, starts, None, used, q.size(1), k.size(1)
    general = call.general._replace(causal=causal, **dict(zip(General._fields, lengths)))
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


def attention(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logits) of a call with a mask that refuse() has seen."""
    q, k, v, out = call.tensors
    general, execution = call.general, call.execution
    eight_bit, is_served = call.eight_bit, _is_served(q)
    is_fp8 = eight_bit is not None
    needs_grad = not is_fp8 and call.needs_grad()
    if is_fp8:
        fp8.reject_missing(call.op, q)
    if needs_grad or not is_served or _has_other_rank(call):
        _check(call)    # else the op does, and a mask before it is compared with a call
    given = _tensors_of(call, needs_grad, is_fp8)
    if is_served:
        if is_compiling() and out is None and not is_fp8:
            return _fwd_traced(q, k, v, *general, *execution, *given)
        if not is_compiling():
            dense_and_varlen.check_cuda_contents(q, k, general)
        if needs_grad:
            return general_attention(q, k, v, *general, *execution, *given)
        arguments = q, k, v, out, *general, *execution[:-1], *(eight_bit or EightBit()), *given
        if is_fp8 and call.needs_grad():
            text = fp8.gradient_text(call.op, **call.named())
            return derivatives.Refusal.apply(text, _attend, *arguments)
        results = _attend(*arguments)
        return results[0] if out is None else out, *results[1:]
    fallback.warn_once(q.device, call.op)
    result, lse, row_max = dense_and_varlen.attend(q, k, v, general, with_maxima=True, mask=given)
    return (result if out is None else out.copy_(result)), lse, row_max.detach()


def quantized(call: Call, promote: bool) -> MaskTensors:
    """The mask of a call that quantises q, k and v first, as the op `fwd_quantized` takes it.
    promote: as in `EightBit`.
    """
    refuse(call, 1)
    q, *_ = call.tensors
    fp8.check_quantizable(call.op, q)
    if q.is_cuda and (call.general.softcap or promote):
        raise RuntimeError(checks.error(
            call.op, "no softcap or fp8_accum of 'promote' with mask on a GPU",
            f'softcap {call.general.softcap}' if call.general.softcap else "'promote'"))
    if call.needs_grad() or _has_other_rank(call):
        _check(call)
    return _tensors_of(call, call.needs_grad(), is_fp8=True)
