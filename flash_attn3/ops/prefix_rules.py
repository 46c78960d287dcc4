"""shared_prefix of `flash_attn_with_kvcache`: keys that all sequences share are read once.

The ops attend to them in a separate launch, which takes the queries of all sequences as one, and
merge the results (csrc/ops/forward_run.cpp). Every query sees all shared keys, so that launch needs
no mask. This file checks that a call allows it.
"""
from __future__ import annotations

import torch
from torch import Tensor

from flash_attn3.arguments import names
from flash_attn3.ops import checks
from flash_attn3.ops.attend_cache import Attend
from flash_attn3.ops.dense_and_varlen import rank_of
from flash_attn3.cpu.quantize import E4M3

_OP = 'flash_attn_with_kvcache'
Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None]    # q, the caches and out

# ------------------------------------------------------------------------------------------- checks
def check(tensors: Tensors, own: Attend) -> None:
    """Raises RuntimeError if the result of a call with shared keys would not be exact."""
    if text := problem_text(tensors, own):
        raise RuntimeError(text)


def problem_text(tensors: Tensors, own: Attend) -> str:
    """Why a call with shared keys would not be exact, or ''. Reads no contents."""
    count = own.shared_prefix
    if isinstance(count, bool) or not isinstance(count, (int, torch.SymInt)) or count < 0:
        return checks.error(_OP, 'shared_prefix to be an int of 0 or more', repr(count))
    if count == 0:
        return ''
    problem = _problem(tensors, own)
    return checks.error(_OP, *problem) if problem else ''


def _problem(tensors: Tensors, own: Attend) -> tuple | None:
    """What was expected with shared keys, what it is instead, and a hint; None where the op has an
    error.
    """
    q, *_ = tensors
    return None if q.dim() != rank_of(own) else _length_problem(q, own) or descale_problem(own)


def _length_problem(q: Tensor, own: Attend) -> tuple | None:
    """What is wrong with a length that is a number."""
    length, count = own.cache_length, own.shared_prefix
    if length < 0:
        return None
    if length < count:
        return f'cache_seqlens to be at least shared_prefix, {count}', str(length)
    after = length + own.appended - count
    is_known = rank_of(own) == 4 and own.cu_seqlens_k_new is None
    is_masked = own.causal or own.tree_mask is not None
    if is_masked and is_known and after < q.size(1):
        return ('at least as many keys after the shared ones as queries, '
                f'{q.size(1)}, under causal',
                str(after))
    return None


def descale_problem(own: Attend) -> tuple | None:
    """What is wrong with scales that differ by sequence: the kernel takes all queries as one.
    Scales by page and of latents (three dimensions) belong to the cache.
    """
    for name in names('scales')[:1 if own.descale_by_page else None]:
        scale = getattr(own, name)
        if scale is not None and scale.dim() == 2 and scale.size(0) > 1 and scale.stride(0) != 0:
            return (f'{name} to be the same for all sequences, with stride(0) == 0',
                    str(scale.stride(0)), f'{name}[:1].expand(batch, -1)')
    return None


def result_dtype(q: Tensor, out: Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype:
    if q.dtype != E4M3:
        return q.dtype
    is_half = (out_dtype if out is None else out.dtype) == torch.float16
    return torch.float16 if is_half else torch.bfloat16


def out_problem(q: Tensor, v: Tensor, out: Tensor | None, dtype: torch.dtype) -> tuple | None:
    """What is wrong with a given result."""
    shape = (*q.shape[:-1], *v.shape[-1:])
    if out is None or (out.shape == shape and out.dtype == dtype and out.device == q.device):
        return None
    return (f'out to be {tuple(shape)}, {checks.dtype_name(dtype)} on {q.device}',
            f'{tuple(out.shape)}, {checks.dtype_name(out.dtype)} on {out.device}')
