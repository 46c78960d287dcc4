"""Merging of attention over parts of the keys: out and LSE of all keys from those of the parts.

The op `combine` on Hopper GPUs, else plain PyTorch, float32 or wider. With o_i
and l_i of part i: l = log sum exp l_i and o = sum exp(l_i - l) o_i. A part without keys (LSE -inf)
adds nothing, whatever its out holds; a row without keys in all parts gives 0 and -inf.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn3 import _plan
from flash_attn3.ops import checks, derivatives, library

# What the op reads and writes in stacks; apart the 16-bit ones.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_PARTS = 4    # results that are no stack
_combine = torch.ops.flash_attn3.combine.default
_combine_eager = library.bare(_combine)


def flash_attn_combine(out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None,
                       out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Merges parts as upstream's split kernels lay them out. No gradients; `merge_states` has them.

    Args:
        out_partial: (parts, batch, seqlen, heads, head_dim) or (parts, total, heads, head_dim), any
            strides.
        lse_partial: the same without head_dim, natural logarithm, without sinks.
        out: where the result is written. Default: a new tensor.
        out_dtype: default: that of out, or of out_partial.

    Returns:
        out, (batch, seqlen, heads, head_dim), and lse, (batch, seqlen, heads), float32; or both
        without batch.

    Raises:
        RuntimeError: a wrong shape, dtype or device; a tensor requires grad.
    """
    op = 'flash_attn_combine'
    _check(op, out_partial, lse_partial, (4, 5))
    if checks.needs_grad(out_partial, lse_partial, out):
        raise RuntimeError(checks.error(op, 'requires_grad=False', checks.requires_grad_text(
            out_partial=out_partial, lse_partial=lse_partial, out=out),
            'use merge_states, which has gradients'))
    dtype = out_dtype or (out_partial.dtype if out is None else out.dtype)
    if not _is_wide(dtype):
        raise RuntimeError(checks.error(op, f'{"out.dtype" if out_dtype is None else "out_dtype"} '
                                        'to be floating, of 16 bits or more', str(dtype)))
    if out is not None and (out.shape != out_partial.shape[1:] or out.dtype != dtype
                            or out.device != out_partial.device):
        raise RuntimeError(checks.error(
            op, f'out to be {tuple(out_partial.shape[1:])}, {dtype} on {out_partial.device}',
            f'{tuple(out.shape)}, {out.dtype} on {out.device}'))
    if out is not None and any(size > 1 and stride == 0
                               for size, stride in zip(out.shape, out.stride())):
        raise RuntimeError(checks.error(op, 'out not to be expanded', f'strides {out.stride()}'))
    if _op_serves(out_partial, lse_partial, dtype):
        return _by_op(out_partial, lse_partial, out, dtype)
    result, lse = _merge(out_partial, lse_partial)
    return result.to(dtype) if out is None else out.copy_(result), lse


def merge_states(outs: Sequence[Tensor] | Tensor,
                 lses: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Attention over all keys from results over parts of them, differentiable in outs and lses.

    The results of `flash_attn_func` and `flash_attn_varlen_func` with return_attn_probs=True on the
    same queries, and what this function returns. An LSE that holds a sink counts it: only one part
    may have it.

    Args:
        outs: a result each, (batch, seqlen, heads, head_dim) or (total, heads, head_dim); or one
            tensor of them, with the parts first.
        lses: likewise, (batch, heads, seqlen) or (heads, total).

    Returns:
        out, dtype of outs, and lse, each shaped like those of a part.

    Raises:
        RuntimeError: no part, or a wrong shape or device.
    """
    if len(outs) == 0 or len(outs) != len(lses):
        raise RuntimeError(checks.error('merge_states', 'as many outs as lses, at least one',
                                        f'{len(outs)} and {len(lses)}'))
    if not isinstance(outs, Tensor) and _list_is_served(outs, lses):
        out = torch.empty_like(outs[0], memory_format=torch.contiguous_format)
        return out, merge_parts(out, *itertools.chain(*zip(outs, lses)))
    stacked = outs if isinstance(outs, Tensor) else torch.stack(tuple(outs))
    parts = (lses if isinstance(lses, Tensor) else torch.stack(tuple(lses))).transpose(-1, -2)
    _check('merge_states', stacked, parts, (4, 5))
    if _op_serves(stacked, parts, stacked.dtype) and _has_no_derivative(stacked, parts):
        result, lse = _by_op(stacked, parts, None, stacked.dtype)
    else:
        result, lse = _merge(stacked, parts)
    return result.to(stacked.dtype), lse.transpose(-1, -2).contiguous()


def merge_parts(out: Tensor, *parts: Tensor) -> Tensor:
    """Merges into out, without a gradient; gives the LSE. parts: two to four results with their
    LSEs as attention returns them, out_0, lse_0, ...; the rows of a batch may be one entry.
    """
    if is_compiling():
        return _combine(out, *parts)
    if out.is_cuda and not library.kernels_serve(out.device):
        return _combine_plainly(out, *parts)
    return _combine_eager(out, *parts)


def merge_into(out: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    """Merges up to four results, as `merge_states` takes them, into out; gives the LSE. A single
    one is copied. Without a gradient.
    """
    if len(outs) > 1 and _list_is_served(outs, lses):
        return merge_parts(out, *itertools.chain(*zip(outs, lses)))
    result, lse = merge_states(outs, lses) if len(outs) > 1 else (outs[0], lses[0])
    out.copy_(result)
    return lse


def _check(op: str, outs: Tensor, lses: Tensor, ranks: tuple[int, int]) -> None:
    """lses with the heads last."""
    if outs.dim() not in ranks or lses.shape != outs.shape[:-1] or outs.size(0) == 0:
        raise RuntimeError(checks.error(
            op, 'results (parts, [batch,] rows, heads, head_dim) of one part or more, and LSEs of '
            'the same rows and heads', f'{tuple(outs.shape)} and, with the heads last, '
            f'{tuple(lses.shape)}'))
    if outs.device != lses.device:
        raise RuntimeError(checks.error(op, f'LSEs on the device of the results, {outs.device}',
                                        str(lses.device)))
    if not (_is_wide(outs.dtype) and _is_wide(lses.dtype)):
        raise RuntimeError(checks.error(op, 'floating dtypes of 16 bits or more',
                                        f'{outs.dtype} and {lses.dtype}'))


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def _op_serves(out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype) -> bool:
    return (out_partial.is_cuda and lse_partial.dtype == torch.float32
            and out_partial.dtype in _DTYPES and dtype in _DTYPES
            and library.kernels_serve(out_partial.device))


def _list_is_served(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> bool:
    """Whether `combine` serves the call without stacking, which takes time and also checks."""
    first, shape = outs[0], outs[0].shape
    return (2 <= len(outs) <= MOST_PARTS and first.is_cuda and first.dtype in _DTYPES[1:]
            and first.dim() in (3, 4)
            and all(x.shape == shape and x.dtype == first.dtype and x.device == first.device
                    for x in outs)
            and all(x.shape == (*shape[:-3], shape[-2], shape[-3]) and x.dtype == torch.float32
                    and x.device == first.device for x in lses)
            and library.kernels_serve(first.device) and _has_no_derivative(*outs, *lses))


def _has_no_derivative(*tensors: Tensor) -> bool:
    return not (checks.needs_grad(*tensors) or derivatives.is_forward_mode())


def _by_op(out_partial: Tensor, lse_partial: Tensor, out: Tensor | None,
           dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if out is None:
        out = out_partial.new_empty(out_partial.shape[1:], dtype=dtype)
    if out_partial.dim() == 5:
        return out, _combine(out, out_partial, lse_partial)
    lse = _combine(out.unsqueeze(0), out_partial.unsqueeze(1), lse_partial.unsqueeze(1))
    return out, lse.squeeze(0)


def _merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """outs (parts, ..., head_dim), lses (parts, ...)."""
    wide = torch.promote_types(torch.promote_types(outs.dtype, lses.dtype), torch.float32)
    lses = lses.to(wide)
    largest = lses.detach().amax(0)
    largest = largest.masked_fill(largest == -math.inf, 0)
    weights = torch.exp(lses - largest)                             # 0 for a part without keys
    total = weights.sum(0)
    is_empty = total == 0
    total = total.masked_fill(is_empty, 1)    # no 0 / 0, nor a gradient of it
    outs = outs.to(wide).masked_fill((lses == -math.inf).unsqueeze(-1), 0)
    merged = (weights.unsqueeze(-1) * outs).sum(0) / total.unsqueeze(-1)
    return merged, (total.log() + largest).masked_fill(is_empty, -math.inf)


# ---------------------------------------------------------------------------------------- the ops
def _combine_plainly(out: Tensor, out_0: Tensor, lse_0: Tensor, *others: Tensor | None) -> Tensor:
    """The op `combine` on any device."""
    if any(x is not None for x in others):
        return _merge_apart(out, out_0, lse_0, *others)
    return _merge_stack(out, out_0, lse_0)


def _merge_stack(out: Tensor, outs: Tensor, lses: Tensor) -> Tensor:
    tensors = dict(out_partial=outs, lse_partial=lses, out=out)
    if text := _plan.check_combine(**{name: checks.describe(x) for name, x in tensors.items()}):
        raise RuntimeError(text)
    if outs.size(0) == 0:
        out.zero_()
        return lses.new_full(lses.shape[1:], -math.inf)
    result, lse = _merge(outs, lses)
    out.copy_(result)
    return lse


def _merge_apart(out: Tensor, *parts: Tensor | None) -> Tensor:
    names = (f'{name}_{i // 2}' for i, name in enumerate(('out', 'lse') * MOST_PARTS))
    tensors = dict(out=out) | {name: x for name, x in zip(names, parts) if x is not None}
    rules_of = 'cpu' if len({x.device for x in tensors.values()}) == 1 else None
    if text := _plan.check_merge(**{name: checks.describe(x, rules_of)
                                    for name, x in tensors.items()}):
        raise RuntimeError(text)
    rows = out.shape[:-1]
    outs = torch.stack([x.reshape(out.shape) for x in parts[0::2] if x is not None])
    lses = torch.stack([x.transpose(-1, -2).reshape(rows) for x in parts[1::2] if x is not None])
    result, lse = _merge(outs, lses)
    out.copy_(result)
    return lse.transpose(-1, -2).contiguous()


def _combine_fake(out: Tensor, out_0: Tensor, lse_0: Tensor, *others: Tensor | None) -> Tensor:
    if all(x is None for x in others):
        return lse_0.new_empty(lse_0.shape[1:])
    *batch, rows, heads, _ = out.shape
    return lse_0.new_empty((*batch, heads, rows))


library.register('combine', _combine_plainly, _combine_fake)
