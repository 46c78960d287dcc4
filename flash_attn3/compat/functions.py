"""What upstream's `flash_attn_interface` has: names, orders of arguments, results.

Most are functions of this package. Clients with their own autograd (ring attention, Transformer
Engine, Megatron) call `_flash_attn_forward` and `_flash_attn_backward`; the ops of ops.py use them.
"""
from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn3.ops import checks, library
from flash_attn3.ops.dense_and_varlen import General, for_backward
from flash_attn3.api.interface import (flash_attn_func, flash_attn_qkvpacked_func,
                                       flash_attn_varlen_func)
from flash_attn3.api.kvcache import (flash_attn_combine, flash_attn_with_kvcache,
                                     get_scheduler_metadata)

__all__ = ['_flash_attn_backward', '_flash_attn_forward', 'flash_attn_combine', 'flash_attn_func',
           'flash_attn_qkvpacked_func', 'flash_attn_varlen_func', 'flash_attn_with_kvcache',
           'get_scheduler_metadata']    # what upstream has

_bwd_out = torch.ops.flash_attn3.bwd_out.default


def with_lse(function: Callable) -> Callable:
    """A function that always returns (out, lse), as upstream's did before August 2025."""
    @functools.wraps(function)
    def legacy(*arguments, **named):
        return function(*arguments, **named | {'return_attn_probs': True})
    return legacy


# ----------------------------------------------------------------------------------------- forward
def _flash_attn_forward(
        q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
        qv: Tensor | None = None, out_: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
        seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
        page_table: Tensor | None = None, kv_batch_idx: Tensor | None = None,
        leftpad_k: Tensor | None = None, rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None, seqlens_rotary: Tensor | None = None,
        q_descale: Tensor | None = None, k_descale: Tensor | None = None,
        v_descale: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
        window_size_left: int = -1, window_size_right: int = -1, attention_chunk: int = 0,
        softcap: float = 0.0, rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None, num_splits: int = 1,
        pack_gqa: bool | None = None, sm_margin: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every forward under one name, as upstream has it.

    Args:
        q, k, v: a batch, as in `flash_attn_func`; with cu_seqlens_k packed, as in
            `flash_attn_varlen_func`, where q may still be a batch; with any of k_new, cu_seqlens_q
            alone, seqused_k, page_table, kv_batch_idx, leftpad_k or qv, k and v are the cache of
            `flash_attn_with_kvcache`, in which seqused_k, kv_batch_idx, leftpad_k and
            seqlens_rotary are called cache_seqlens, cache_batch_idx, cache_leftpad and
            rotary_seqlens.
        out_: where the result is written. Default: a new tensor.
        softmax_scale: default head_dim ** -0.5, with qv too.
        others: as in those three. num_splits below 0: 0. max_seqlen: hints; default: unknown.
            seqlens_rotary is used with rotary_cos alone.

    Returns:
        out, which is out_ if that is given; lse; two empty tensors, upstream's parts of splits, the
        same in every call.
        Gradients flow where those of the three functions do.

    Raises:
        RuntimeError, NotImplementedError: as those three; what does not go with cu_seqlens_k, and
            seqused_q without it.
    """
    out, lse = forward(
        q, k, v, k_new, v_new, qv, out_, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q,
        seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos,
        rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, causal,
        window_size_left, window_size_right, attention_chunk, softcap, rotary_interleaved,
        scheduler_metadata, num_splits, pack_gqa, sm_margin)
    parts = (lse.new_empty(0), lse.new_empty(0)) if type(lse) is not Tensor or is_compiling() else \
        _empty_parts(lse.device)
    return out, lse, *parts


@functools.cache
def _empty_parts(device: torch.device) -> tuple[Tensor, Tensor]:
    """Two tensors that all calls share: making one costs as much as the rest of
    `_flash_attn_forward`. They are two because results of a client's op must be different tensors.
    """
    with torch.inference_mode(False):
        return torch.empty(0, device=device), torch.empty(0, device=device)


def forward(
        q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
        qv: Tensor | None = None, out: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
        seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
        page_table: Tensor | None = None, kv_batch_idx: Tensor | None = None,
        leftpad_k: Tensor | None = None, rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None, seqlens_rotary: Tensor | None = None,
        q_descale: Tensor | None = None, k_descale: Tensor | None = None,
        v_descale: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
        left: int = -1, right: int = -1, attention_chunk: int = 0, softcap: float = 0.0,
        rotary_interleaved: bool = False, scheduler_metadata: Tensor | None = None,
        num_splits: int = 0, pack_gqa: bool | None = None,
        sm_margin: int = 0) -> tuple[Tensor, Tensor]:
    """(out, lse) of `_flash_attn_forward`, with the defaults of the op `fwd`.

    Clients pay the host time of this Python in every step, so a dense call takes a short path.
    """
    window = -1, -1
    if left != -1 or right != -1:
        causal, window = _mask(causal, left, right)
    if num_splits < 0:
        num_splits = 0
    if (cu_seqlens_k is None and seqused_k is None and page_table is None and k_new is None
            and qv is None and cu_seqlens_q is None and kv_batch_idx is None
            and leftpad_k is None and v_new is None and seqused_q is None and rotary_cos is None
            and rotary_sin is None):
        if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
            q, k, v = _rows_contiguous(q, k, v)
        return flash_attn_func(
            q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window,
            attention_chunk, softcap, num_splits, pack_gqa, False, sm_margin, True, out=out)
    if qv is not None and softmax_scale is None:
        softmax_scale = q.size(-1) ** -0.5    # upstream's public functions count qv too
    shared = dict(
        softmax_scale=softmax_scale, causal=causal, qv=qv, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, window_size=window,
        attention_chunk=attention_chunk, softcap=softcap, num_splits=num_splits,
        pack_gqa=pack_gqa, sm_margin=sm_margin, out=out)
    rotary = dict(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    if cu_seqlens_k is not None:
        _reject('with', k_new=k_new, v_new=v_new, page_table=page_table, kv_batch_idx=kv_batch_idx,
                leftpad_k=leftpad_k, **rotary)
        lists = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
        return _packed(q, k, v, lists, shared)
    _reject('without', seqused_q=seqused_q)
    return flash_attn_with_kvcache(
        *_rows_contiguous(q), k, v, k_new, v_new, **rotary, cache_seqlens=seqused_k,
        cache_batch_idx=kv_batch_idx, cache_leftpad=leftpad_k, page_table=page_table,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q,
        rotary_seqlens=seqlens_rotary, rotary_interleaved=rotary_interleaved,
        scheduler_metadata=scheduler_metadata, return_softmax_lse=True, **shared)[:2]


def _packed(q: Tensor, k: Tensor, v: Tensor, lists: tuple,
            shared: dict) -> tuple[Tensor, Tensor]:
    """(out, lse) of packed keys. lists: cu_seqlens, max_seqlen and seqused, of q and k each."""
    starts_q, starts_k, longest_q, longest_k, *used = lists
    longest = [0 if x is None else x for x in (longest_q, longest_k)]
    q, k, v = _rows_contiguous(q, k, v)
    if starts_q is not None or q.dim() != 4:
        return flash_attn_varlen_func(q, k, v, starts_q, starts_k, *longest, *used, **shared,
                                      return_attn_probs=True)
    # A batch of queries of equal length, on packed keys.
    batch, rows = q.shape[:2]
    out = shared.pop('out')
    starts_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * rows
    result, lse = flash_attn_varlen_func(
        q.flatten(0, 1), k, v, starts_q, starts_k, rows, longest[1], *used, **shared,
        return_attn_probs=True)
    result = result.unflatten(0, (batch, rows))
    lse = lse.unflatten(1, (batch, rows)).transpose(0, 1).contiguous()
    return result if out is None else out.copy_(result), lse


# ---------------------------------------------------------------------------------------- backward
def _flash_attn_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
        sequed_q: Tensor | None = None, sequed_k: Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dq: Tensor | None = None,
        dk: Tensor | None = None, dv: Tensor | None = None, softmax_scale: float | None = None,
        is_causal: bool = False, window_size_left: int = -1, window_size_right: int = -1,
        softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0, *,
        window_size: Sequence[int] | Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
    """Writes the gradients of q, k and v into dq, dk and dv, which it overwrites.

    out and softmax_lse are taken as given: if they cover more keys than k and v (ring attention),
    the gradients are the part of these keys.

    Args:
        dout, q, k, v, out: as the forward has them: a batch, or packed with both cu_seqlens.
        softmax_lse: (batch, heads_q, seqlen_q), or (heads_q, total_q), also with a batch of 1.
        dq, dk, dv: like q, k and v, any strides. A gradient of None is not written.
        sequed_q, sequed_k: the seqused of `flash_attn_varlen_func`.
        deterministic: as in `flash_attn_func`.
        sm_margin: the backward takes every multiprocessor: a number above 0 warns once.
        window_size: (left, right) in place of window_size_left and window_size_right, as older
            versions of upstream have it and its tests call it. Default: those two.
        others: as in the forward.

    Returns:
        An empty tensor, for upstream's rowsum(dout * out), which is not kept; with window_size
        (dq, dk, dv, empty), as those versions do.

    Raises:
        RuntimeError: a wrong shape, dtype, device or number; two different windows.
    """
    has_window = window_size is not None
    if has_window:
        window_size_left, window_size_right = _one_window(window_size, window_size_left,
                                                          window_size_right)
    if sm_margin:
        _warn_of_margin()
    q, k, v, out = _rows_contiguous(q, k, v, out)
    lse = softmax_lse.contiguous()
    if cu_seqlens_q is not None and lse.dim() == 3 and lse.size(0) == 1:
        lse = lse.squeeze(0)
    causal, (left, right) = _mask(is_causal, window_size_left, window_size_right)
    longest = [0 if x is None else checks.length_bound(name, x, of, 'compat.bwd')
               for name, x, of in (('max_seqlen_q', max_seqlen_q, q),
                                   ('max_seqlen_k', max_seqlen_k, k))]
    scale = library.softmax_scale_of(q, softmax_scale)
    lists = cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k
    general = General(*lists, *longest, softmax_scale=scale, causal=causal, window_left=left,
                      window_right=right, softcap=softcap)
    is_plain = (left, right) == (-1, -1) and softcap == 0.0 and all(x is None for x in lists)
    deterministic = checks.wants_determinism(deterministic)
    given = dq, dk, dv
    written = [_place(*pair) for pair in zip(given, (q, k, v))]
    tensors = dout, None, q, k, v, out, lse, *written
    if is_plain:
        _bwd_out(*tensors, scale, causal, deterministic)
    else:
        _bwd_out(*tensors, *for_backward(general, deterministic))
    for gradient, result in zip(given, written):
        if gradient is not None and gradient is not result:
            gradient.copy_(result)
    if not has_window:
        return lse.new_empty(0)
    return *(y if x is None else x for x, y in zip(given, written)), lse.new_empty(0)


def _one_window(window_size: Sequence[int] | Tensor, left: int, right: int) -> tuple[int, int]:
    """The sides of window_size, which left and right may repeat."""
    sides = checks.window_sides(window_size, 'compat.bwd')
    if left not in (-1, sides[0]) or right not in (-1, sides[1]):
        raise RuntimeError(checks.error(
            'compat.bwd', 'window_size, or window_size_left and window_size_right',
            f'{sides} and {(left, right)}'))
    return sides


def _place(gradient: Tensor | None, x: Tensor) -> Tensor:
    """Where the gradient of x is written: the given tensor, or one that the kernels can write."""
    if gradient is None or gradient.dim() == 0 or gradient.stride(-1) != 1:
        return torch.empty_like(x if gradient is None else gradient,
                                memory_format=torch.contiguous_format)
    return gradient


@functools.cache
def _warn_of_margin() -> None:
    warnings.warn(checks.error('compat.bwd', 'sm_margin to be 0', 'more',
                               'the backward uses every multiprocessor'), stacklevel=3)


# -------------------------------------------------------------------------------------------- both
def _mask(causal: bool, left: int, right: int) -> tuple[bool, tuple[int, int]]:
    """causal and the window, without the right side that causal implies."""
    causal = causal or (left == -1 and right == 0)
    return causal, (left, -1 if causal else right)


def _rows_contiguous(*tensors: Tensor) -> list[Tensor]:
    """Copies where the last stride is not 1, as upstream does."""
    return [x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _reject(preposition: str, **arguments: Tensor | None) -> None:
    """Raises RuntimeError for an argument that does not go with or without cu_seqlens_k."""
    for name, x in arguments.items():
        if x is not None:
            raise RuntimeError(checks.error(
                'compat.fwd', f'{name} to be None {preposition} cu_seqlens_k', 'a tensor'))
