"""shared_prefix of `flash_attn_with_kvcache`: keys that all sequences share are read once.

Three ops: the queries of all sequences as one, on the shared keys; each sequence on the rest, which
begins at first_slot; and `merge_parts`. Every query sees all shared keys, so the first needs no
mask.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn3 import _library, cache, checks, env, merging
from flash_attn3.cache import Attend
from flash_attn3.quantize import E4M3

_RETURN_LSE, _FIRST_SLOT = map(Attend._fields.index, ('return_lse', 'first_slot'))
_AFTER_FIRST_SLOT = _FIRST_SLOT + 1
_REST = tuple(Attend._field_defaults.values())[_AFTER_FIRST_SLOT:]
_CHUNK = Attend._fields.index('softcap') - 1
_OP = 'flash_attn_with_kvcache'
Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None]    # q, the caches and out
Result = Tensor | tuple[Tensor, Tensor, Tensor, Tensor]


# ------------------------------------------------------------------------------------------- checks
def checked(tensors: Tensors, arguments: tuple, count: int) -> tuple:
    """arguments of `attend_cache` for the keys behind `count` shared ones; as they are, if there is
    at most one sequence. Without the last one, float16_out.

    Raises:
        RuntimeError: the result would not be exact, or the ops refuse the call.
    """
    own = Attend(*arguments[:_FIRST_SLOT], count, *arguments[_FIRST_SLOT + 1:])
    if text := problem_text(tensors, own):
        raise RuntimeError(text)
    _check_contents(tensors, own)
    return own[:-1] if _batch_of(tensors[0], own) > 1 else arguments


def problem_text(tensors: Tensors, own: Attend) -> str:
    """Why a call with first_slot shared keys would not be exact, or ''; contents are not read."""
    count = own.first_slot
    if isinstance(count, bool) or not isinstance(count, (int, torch.SymInt)) or count < 0:
        return checks.error(_OP, 'shared_prefix to be an int of 0 or more', repr(count))
    window, chunk = (own.window_left, own.window_right), own[_CHUNK]
    if window != (-1, -1) or chunk != 0:
        return checks.error(_OP, 'no window and no chunks with shared_prefix',
                            f'{window} and {chunk}', 'each query must see all shared keys')
    problem = _problem(tensors, own)
    return checks.error(_OP, *problem) if problem else ''


def _problem(tensors: Tensors, own: Attend) -> tuple | None:
    """What was expected with shared keys, what it is instead, and a hint."""
    q, k, v, out = tensors
    count, is_paged = own.first_slot, own.page_table is not None
    if own.cache_leftpad is not None:
        return 'no cache_leftpad with shared_prefix', 'a tensor', 'shared keys begin at slot 0'
    if k.dim() != 4 or q.dim() != (4 if own.cu_seqlens_q is None else 3) or (
            is_paged and own.page_table.dim() != 2):
        return None    # the op has an error for it
    if is_paged and k.size(1) > 0 and count % k.size(1) != 0:
        return (f'shared_prefix to be a multiple of the page size, {k.size(1)}', str(count),
                'share whole pages')
    capacity = k.size(1) * (own.page_table.size(1) if is_paged else 1)
    if count > capacity:
        return f'shared_prefix of at most {capacity}, the slots of a sequence', str(count)
    return (_length_problem(q, own) or descale_problem(own)
            or out_problem(q, v, out, result_dtype(q, out, None)))


def _length_problem(q: Tensor, own: Attend) -> tuple | None:
    """The same of a length that is a number."""
    length, count = own.cache_length, own.first_slot
    if length < 0:
        return None
    if length < count:
        return f'cache_seqlens of at least shared_prefix, {count}', str(length)
    after = length + own.appended - count
    is_known = own.cu_seqlens_q is None and own.cu_seqlens_k_new is None
    is_masked = own.causal or own.tree_mask is not None
    if is_masked and is_known and after < q.size(1):
        return (f'as many keys behind the shared ones as queries, {q.size(1)}, under causal',
                str(after))
    return None


def descale_problem(own: Attend) -> tuple | None:
    """The same of scales: queries of several sequences are one for the kernel."""
    for name in ('q_descale', 'k_descale', 'v_descale')[:1 if _is_of_keys(own) else None]:
        scale = getattr(own, name)
        if scale is not None and scale.dim() == 2 and scale.size(0) > 1 and scale.stride(0) != 0:
            return (f'{name} that is the same for all sequences, with stride(0) of 0',
                    str(scale.stride(0)), f'{name}[:1].expand(batch, -1)')
    return None


def _is_of_keys(own: Attend) -> bool:
    """Whether scales belong to keys of the cache, not to sequences."""
    return own.descale_by_page or own.qv is not None


def result_dtype(q: Tensor, out: Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype:
    if q.dtype != E4M3:
        return q.dtype
    is_half = (out_dtype if out is None else out.dtype) == torch.float16
    return torch.float16 if is_half else torch.bfloat16


def out_problem(q: Tensor, v: Tensor, out: Tensor | None, dtype: torch.dtype) -> tuple | None:
    """The same of a given result."""
    shape = (*q.shape[:-1], v.size(-1))
    if out is None or (out.shape == shape and out.dtype == dtype and out.device == q.device):
        return None
    return (f'out to be {tuple(shape)}, {checks.dtype_name(dtype)} on {q.device}',
            f'{tuple(out.shape)}, {checks.dtype_name(out.dtype)} on {out.device}')


def _check_contents(tensors: Tensors, own: Attend) -> None:
    """Raises RuntimeError for what lists contain, where they can be read, before any work."""
    q, k, v, _ = tensors
    on_gpu = q.is_cuda and not is_compiling() and _library.kernels_serve(q.device)
    if is_compiling() or (on_gpu and not env.CHECK_CONTENTS):
        return
    check = cache.check_cuda_contents if on_gpu else cache.check_attend
    check(tensors, own)
    if _batch_of(q, own) > 1:
        (q, k, v), shared = _of_shared((q, k, v), own)
        check((q, k, v, None), shared)


# ---------------------------------------------------------------------------------------- attention
def attend(attend_cache: Callable, tensors: Tensors, arguments: tuple,
           out_dtype: torch.dtype | None) -> Result:
    """What flash_attn_with_kvcache returns. arguments: from `checked`, for several sequences."""
    q, k, v, out = tensors
    is_half = q.dtype == E4M3 and result_dtype(q, out, out_dtype) == torch.float16
    rest = Attend(*arguments[:_RETURN_LSE], True, *arguments[_RETURN_LSE + 1:], is_half)
    # WHY first: the launch on own keys starts early, that on shared keys does not.
    (rows, shared_k, shared_v), shared = _of_shared((q, k, v), rest)
    shared_out, shared_lse = attend_cache(rows, shared_k, shared_v, *short(shared))
    own_out, own_lse = attend_cache(q, k, v, *short(rest))
    if rest.cu_seqlens_q is not None:
        shared_out, shared_lse = shared_out[0], shared_lse[0]
    if out is None:
        out = torch.empty_like(own_out)
    lse = merging.merge_parts(out, shared_out, shared_lse, own_out, own_lse)
    if not arguments[_RETURN_LSE]:
        return out
    empty = lse.new_empty(0)
    return out, lse, empty, empty


def short(own: Attend) -> tuple:
    """Without the last ones, where they are defaults: PyTorch takes time for each."""
    if is_compiling():
        return own
    for x, default in zip(own[_AFTER_FIRST_SLOT:], _REST):
        if x is not default:
            return own
    return own[:_AFTER_FIRST_SLOT]


def _of_shared(tensors: tuple[Tensor, Tensor, Tensor],
               rest: Attend) -> tuple[tuple[Tensor, Tensor, Tensor], Attend]:
    """The call of all queries on the shared keys, as one sequence."""
    q, k, v = tensors
    q, qv = (_as_one(x, rest) for x in (q, rest.qv))
    scales = dict(k_descale=rest.k_descale, v_descale=rest.v_descale)
    is_by_row = rest.page_table is None and rest.cache_batch_idx is None
    if is_by_row:
        k, v = k[:1], v[:1]
    if is_by_row or not _is_of_keys(rest):
        scales = {name: _first(x) for name, x in scales.items()}
    return (q, k, v), Attend(
        page_table=_first(rest.page_table), cache_length=rest.first_slot,
        cache_batch_idx=_first(rest.cache_batch_idx), softmax_scale=rest.softmax_scale,
        softcap=rest.softcap, return_lse=True, num_splits=rest.num_splits,
        split_size=rest.split_size, pack_gqa=rest.pack_gqa, sm_margin=rest.sm_margin,
        q_descale=_first(rest.q_descale), qv=qv, float16_out=rest.float16_out,
        descale_by_page=rest.descale_by_page, **scales)


def _as_one(q: Tensor | None, rest: Attend) -> Tensor | None:
    """All queries as a batch of one."""
    if q is None or rest.cu_seqlens_q is not None:
        return q if q is None else q.unsqueeze(0)
    batch, count, heads, dim = q.shape
    return q.reshape(1, batch * count, heads, dim)


def _first(x: Tensor | None) -> Tensor | None:
    return None if x is None else x[:1]


def _batch_of(q: Tensor, own: Attend) -> int:
    """0 for shapes that the op is going to reject."""
    if own.cu_seqlens_q is not None:
        return own.cu_seqlens_q.numel() - 1
    return q.size(0) if q.dim() else 0
