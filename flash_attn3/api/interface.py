"""The public attention functions: names, defaults and documentation.

No policy lives here: the ops check their inputs and choose the kernel. Parameters have the order of
upstream's `flash_attn_interface`; our own arguments follow, keyword-only. The arguments that the
functions share are documented at `flash_attn_func`.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from flash_attn3.cpu import fallback
from flash_attn3.ops import (checks, dense_and_varlen, derivatives, dtensors, fp8, invariance,
                             library, masked, splits)
from flash_attn3.ops.autograd import PackedAttention, attention, general_attention
from flash_attn3.ops.fp8 import Descale
from flash_attn3.ops.dense_and_varlen import Execution, General, general_of
from flash_attn3.api.masks import AttentionMask
from flash_attn3.api.packing import unpack
from flash_attn3.ops.splits import Call

_fwd = library.bare(torch.ops.flash_attn3._fwd.default)    # eager: no autograd formula in the way
_fwd_no_lse = library.bare(torch.ops.flash_attn3._fwd_no_lse.default)
_fwd_traced = torch.ops.flash_attn3.fwd.default    # under torch.compile and torch.export
# These take the fields of General; `attend` also takes out and the fields of fp8.EightBit.
_fwd_general_traced = torch.ops.flash_attn3.fwd_general.default
_attend = torch.ops.flash_attn3.attend.default
_attend_eager = library.bare(_attend)
_INVARIANT = invariance.OPEN    # not empty under invariant()


def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
        qv: Tensor | None = None, q_descale: Descale = None, k_descale: Descale = None,
        v_descale: Descale = None, window_size: Sequence[int] | Tensor = (-1, -1),
        attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
        pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
        return_attn_probs: bool = False, *, out: Tensor | None = None, s_aux: Tensor | None = None,
        return_max_logits: bool = False, out_dtype: torch.dtype | None = None,
        fp8_accum: str = 'fast', split_size: int = 0,
        mask: AttentionMask | None = None) -> Tensor | tuple[Tensor, ...]:
    """Exact attention, out = softmax(softmax_scale * q k^T) v, for each batch entry and head.

    A Hopper GPU runs our kernels; other CUDA devices run PyTorch's SDPA, with one warning. Query
    head h uses KV head h // (heads_q / heads_k). Sums are float32 (float64 for float64) and repeat.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim). On Hopper: float16, bfloat16 or float8_e4m3fn, a
            head_dim of `flash_attn3.built_variants()`, last stride 1. On the CPU: any floating.
        k, v: (batch, seqlen_k, heads_k, head_dim), dtype and device of q; v may have its own
            head_dim_v; heads_k divides heads_q. DTensors: all sharded alike, by batch or by heads.
        softmax_scale: default head_dim ** -0.5. Scores may reach 1e9, 1e8 for float16.
        causal: query i sees keys up to p = i + seqlen_k - seqlen_q. A query that sees no key gives
            out = 0, lse = -inf (its sink with s_aux) and no gradient. Default: no mask.
        window_size: (left, right), or a CPU tensor of both; query i sees keys p - left to
            p + right; -1 (default): no limit. causal replaces right by 0.
        attention_chunk: keys in a chunk, counted from key 0; query i sees the chunk of p. 0: none.
        softcap: scores are softcap * tanh(softmax_scale * q k^T / softcap). Default 0: no softcap.
        pack_gqa: the query heads of a KV head share tiles. Default: where that saves 2 % or more.
        deterministic: makes the gradient of q repeatable too; slower. Default: PyTorch's setting.
        sm_margin: multiprocessors that the forward leaves to other kernels, 0 (default) or more.
        return_attn_probs: also return lse (upstream's name; no probabilities). Default False.
        out: where the result is written; last stride 1. Not differentiable. Default: a new tensor.
        s_aux: sinks, (heads_q,) float32, bfloat16 or float16: an extra score per head, of value 0.
        return_max_logits: append max_logits; out's last bits may differ. qv: None.
        q_descale, k_descale, v_descale, out_dtype, fp8_accum: for FP8, see `quantize_fp8`.
        num_splits: parts of the keys, up to 256; 0: by plan, 1 for gradients. Default 1.
        split_size: keys in a part (docs/invariance.md). Default: 0, or that of `invariant`.
        mask: which keys a query sees, in place of causal, windows and chunks (docs/masks.md).

    Returns:
        out, or a tuple of it and what was asked for: out, (batch, seqlen_q, heads_q, head_dim_v),
        dtype of q; lse, (batch, heads_q, seqlen_q), float32 (float64 for float64): the natural log
        of the softmax's denominator; max_logits, as lse: the largest score, without s_aux.

    Raises:
        RuntimeError: names the wrong rank, shape, dtype, device, stride, number, or an old driver.
        NotImplementedError: qv; derivatives in forward mode, of gradients, FP8 tensors, scalars.
    """
    if (q.itemsize == 1 or qv is not None or q_descale is not None or k_descale is not None
            or v_descale is not None or window_size != (-1, -1) or attention_chunk != 0
            or (softcap != 0.0) is not False    # a tensor of 0 too
            or (num_splits != 1 and not splits.has_few_keys(num_splits, k)) or s_aux is not None
            or return_max_logits or out_dtype is not None or fp8_accum != 'fast'
            or split_size != 0 or _INVARIANT or mask is not None):
        num_splits, split_size = invariance.in_parts(num_splits, split_size)
        call = _call('flash_attn_func', (q, k, v, out),
                     (s_aux, softmax_scale, causal, window_size, attention_chunk, softcap),
                     Execution(pack_gqa, sm_margin, return_max_logits, split_size, deterministic),
                     qv, (q_descale, k_descale, v_descale), out_dtype, fp8_accum, mask=mask)
        num_splits = splits.splits_of(num_splits, call)
        if (num_splits != 1 or call.eight_bit is not None or split_size != 0 or mask is not None
                or dense_and_varlen.is_general(call.general, return_max_logits)):
            return _general(call, return_attn_probs, num_splits)
    # Most eager calls take this path: as little Python and as few op arguments as possible.
    if (not is_compiling() and q.get_device() in library.SERVED_DEVICES
            and type(q) is Tensor and forward_ad._current_level < 0 and not (
                is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad
                                       or (out is not None and out.requires_grad)))):
        if out is None:
            op = _fwd if return_attn_probs else _fwd_no_lse
            if softmax_scale is None and pack_gqa is None and sm_margin == 0:
                return op(q, k, v, None, causal) if causal else op(q, k, v)
            if softmax_scale is None or type(softmax_scale) is float:
                return op(q, k, v, softmax_scale, causal, pack_gqa, sm_margin)
        elif not return_attn_probs and (softmax_scale is None or type(softmax_scale) is float):
            _fwd_no_lse(q, k, v, softmax_scale, causal, pack_gqa, sm_margin, out)
            return out
    both = _attention((q, k, v, softmax_scale, causal, pack_gqa, sm_margin), deterministic, out,
                      return_attn_probs)
    return both if return_attn_probs else both[0]


def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor, seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
        qv: Tensor | None = None, q_descale: Descale = None, k_descale: Descale = None,
        v_descale: Descale = None, window_size: Sequence[int] | Tensor = (-1, -1),
        attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
        pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
        return_attn_probs: bool = False, *, out: Tensor | None = None, s_aux: Tensor | None = None,
        return_max_logits: bool = False, out_dtype: torch.dtype | None = None,
        fp8_accum: str = 'fast', split_size: int = 0,
        mask: AttentionMask | None = None) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_func` for packed sequences, stored one after another in one tensor.

    Sequence b has rows cu_seqlens_q[b] up to cu_seqlens_q[b + 1] of q; k and v likewise. Only its
    first seqused_q[b] and seqused_k[b] rows count, or all: these are the seqlen_q and seqlen_k of
    causal, window_size and attention_chunk, and may be 0. Other rows are never read. There, and
    after the last sequence, out is 0, lse and max_logits are -inf, and gradients are 0. The host
    never waits for a Hopper GPU.

    Args:
        q: (total_q, heads_q, head_dim); dtype and strides of q, k and v as in `flash_attn_func`.
        k, v: (total_k, heads_k, head_dim); v may have its own head_dim_v; heads_k divides heads_q.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, contiguous, on the device of q: they begin
            with 0, never decrease, and end at most at total_q and total_k. Their values are checked
            on the CPU, and on CUDA devices with the environment variable FLASH_ATTN3_CHECKS=1.
        max_seqlen_q, max_seqlen_k: length of the longest sequence, a number or a tensor with one,
            which is not read from a GPU. It is a hint for the planner: a wrong one changes only
            speed and rounding.
        seqused_q, seqused_k: (batch,) int32: how many rows of each sequence count, from its first.
            Default: all.
        out: shaped like the result, otherwise as in `flash_attn_func`.
        softmax_scale, causal, window_size, attention_chunk, softcap, pack_gqa, deterministic,
            sm_margin, return_attn_probs, s_aux, return_max_logits: as in `flash_attn_func`.
        q_descale, k_descale, v_descale, out_dtype, fp8_accum: with q, k and v of float8_e4m3fn;
            see `quantize_fp8`.
        qv, num_splits, split_size, mask: as in `flash_attn_func`. With a mask max_seqlen_k is no
            hint: no sequence may be longer; 0: unknown.

    Returns:
        out, or a tuple of it and what was asked for, in this order. out: (total_q, heads_q,
        head_dim_v), dtype of q. lse, max_logits: (heads_q, total_q), float32 (float64 for float64).
        As in `flash_attn_func`.

    Raises:
        RuntimeError, NotImplementedError: as in `flash_attn_func`.

    Example:
        >>> q, k, v = (torch.randn(3 + 5, 16, 128, device='cuda').bfloat16() for _ in range(3))
        >>> starts = torch.tensor([0, 3, 3 + 5], dtype=torch.int32, device='cuda')
        >>> out = flash_attn3.flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, causal=True)
    """
    op = 'flash_attn_varlen_func'
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
               checks.length_bound('max_seqlen_q', max_seqlen_q, q, op),
               checks.length_bound('max_seqlen_k', max_seqlen_k, k, op))
    num_splits, split_size = invariance.in_parts(num_splits, split_size)
    call = _call(op, (q, k, v, out),
                 (s_aux, softmax_scale, causal, window_size, attention_chunk, softcap),
                 Execution(pack_gqa, sm_margin, return_max_logits, split_size, deterministic), qv,
                 (q_descale, k_descale, v_descale), out_dtype, fp8_accum, lengths, mask)
    return _general(call, return_attn_probs, splits.splits_of(num_splits, call))


@checks.names_errors
def flash_attn_qkvpacked_func(
        qkv: Tensor, softmax_scale: float | None = None, causal: bool = False,
        q_descale: Descale = None, k_descale: Descale = None,
        v_descale: Descale = None, window_size: Sequence[int] | Tensor = (-1, -1),
        attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False,
        num_heads_q: int | None = None, sm_margin: int = 0, return_attn_probs: bool = False, *,
        pack_gqa: bool | None = None, out: Tensor | None = None, s_aux: Tensor | None = None,
        return_max_logits: bool = False, out_dtype: torch.dtype | None = None,
        fp8_accum: str = 'fast') -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_func` on one tensor that holds q, k and v, such as a projection's output.

    Nothing is copied: q, k and v are views. In eager mode, without window_size, attention_chunk,
    softcap, s_aux and return_max_logits, the kernels write the gradient as one tensor of the shape
    of qkv. For slices of qkv passed to `flash_attn_func`, autograd would pad three gradients with
    zeros to that shape and add them.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim): q, k and v. Or, with num_heads_q,
            (batch, seqlen, heads_q + 2 * heads_k, head_dim): the heads of q, then those of k, then
            those of v; heads_k divides heads_q. dtype, head_dim and strides as in
            `flash_attn_func`.
        num_heads_q: heads_q. Needed with four dimensions; with five None (default) or heads.
        softmax_scale, causal, window_size, attention_chunk, softcap, deterministic, sm_margin,
            return_attn_probs, pack_gqa, out, s_aux, return_max_logits: as in `flash_attn_func`.
        q_descale, k_descale, v_descale, out_dtype, fp8_accum: with a qkv of float8_e4m3fn; see
            `quantize_fp8`.

    Returns:
        out, (batch, seqlen, heads_q, head_dim), dtype of qkv, or a tuple of it and what was asked
        for: lse and max_logits, (batch, heads_q, seqlen). As in `flash_attn_func`.

    Raises:
        RuntimeError: another shape, a num_heads_q that does not fit it or is missing; errors of
            `flash_attn_func` for the views q, k and v.
        NotImplementedError: as in `flash_attn_func`.

    Example:
        >>> qkv = torch.randn(2, 1024, 16 + 2 * 4, 128, dtype=torch.bfloat16, device='cuda')
        >>> out = flash_attn3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=16)
    """
    descales = q_descale, k_descale, v_descale
    numbers = [None if qkv.dtype == fp8.E4M3 and fp8.is_number(x) else x for x in descales]
    op = 'flash_attn_qkvpacked_func'
    eight_bit = fp8.eight_bit_of(op, qkv, numbers, out, out_dtype, fp8_accum)
    derivatives.reject_of_scalars(op, softmax_scale=softmax_scale, softcap=softcap)
    general = general_of(qkv, window_size=window_size, s_aux=s_aux, op=op,
                         attention_chunk=attention_chunk, softcap=softcap)
    window = general.window_left, general.window_right
    is_plain = eight_bit is None and not dense_and_varlen.is_general(general, return_max_logits)
    if (is_plain and out is None and is_grad_enabled() and qkv.requires_grad and not is_compiling()
            and not _INVARIANT and type(qkv) is Tensor and _is_served(qkv)
            and not derivatives.is_forward_mode()):
        result, lse = PackedAttention.apply(qkv, num_heads_q, softmax_scale, causal, pack_gqa,
                                            sm_margin, deterministic)
        return (result, lse) if return_attn_probs else result
    dtensors.reject_shards_of_packed_heads(qkv)
    q, k, v = unpack(qkv, num_heads_q)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, *descales, window, attention_chunk, softcap,
        pack_gqa=pack_gqa, deterministic=deterministic, sm_margin=sm_margin,
        return_attn_probs=return_attn_probs, out=out, s_aux=s_aux,
        return_max_logits=return_max_logits, out_dtype=out_dtype, fp8_accum=fp8_accum)


def _call(op: str, tensors: tuple[Tensor, Tensor, Tensor, Tensor | None], score: tuple,
          execution: Execution, qv: Tensor | None, descales: tuple[Descale, Descale, Descale],
          out_dtype: torch.dtype | None, fp8_accum: str, lengths: tuple = (),
          mask: AttentionMask | None = None) -> Call:
    """The arguments of a public function as the ops take them.

    lengths, then score, are the fields of General in its order; score begins with s_aux.
    """
    q, k, _, out = tensors
    s_aux, softmax_scale, causal, window_size, attention_chunk, softcap = score
    derivatives.reject_of_scalars(op, softmax_scale=softmax_scale, softcap=softcap)
    if qv is not None:
        checks.reject_unsupported(op, qv=qv)
    scales = fp8.descales_of(op, q, k, descales, *lengths[:1])
    eight_bit = fp8.eight_bit_of(op, q, scales, out, out_dtype, fp8_accum)
    general = general_of(q, *lengths, window_size=window_size, s_aux=s_aux, op=op,
                         softmax_scale=softmax_scale, causal=causal,
                         attention_chunk=attention_chunk, softcap=softcap)
    return Call(op, tensors, general, execution, eight_bit, mask)


def _is_served(x: Tensor) -> bool:
    """Whether our ops serve the device of x: the CPU, Hopper, or no data at all."""
    return not x.is_cuda or library.kernels_serve(x.device)


def _attention(arguments: tuple, deterministic: bool, out: Tensor | None,
               return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """(out, lse), by the shortest path. arguments: those of the op `_fwd`.

    lse may be None unless it is asked for.
    """
    q, k, v, softmax_scale, *others = arguments
    derivatives.reject_of_scalars('flash_attn_func', softmax_scale=softmax_scale)
    softmax_scale = library.softmax_scale_of(q, softmax_scale)
    arguments = q, k, v, softmax_scale, *others
    if dtensors.is_dtensor(q):
        call = Call('flash_attn_func', (q, k, v, out), General(), Execution(), None)
        return dtensors.on_shards(call, lambda shard: _attention(
            (*shard.tensors[:3], softmax_scale, *others), deterministic, None, return_lse))
    causal, pack_gqa, sm_margin = others
    needs_grad = checks.needs_grad(q, k, v, out)
    if needs_grad and out is not None:
        raise RuntimeError(checks.gradient_with_out_text(q=q, k=k, v=v, out=out))
    if not _is_served(q):
        checks.check_forward(dict(q=q, k=k, v=v, out=out), dict(softmax_scale=softmax_scale,
                             sm_margin=sm_margin), rules_of='cpu')
        general = General(softmax_scale=softmax_scale, causal=causal)
        result, lse, _ = fallback.attention(q, k, v, general, return_lse)
        return (result if out is None else out.copy_(result)), lse
    if out is not None:
        derivatives.reject_forward_mode(q, k, v, out, op='flash_attn_func')
        return out, _attend(q, k, v, out, softmax_scale=softmax_scale, causal=causal,
                            pack_gqa=pack_gqa, sm_margin=sm_margin)[1]
    if is_compiling() or derivatives.is_forward_mode():
        return _fwd_traced(*arguments, deterministic)
    if needs_grad:
        return attention(*arguments, deterministic)
    return _fwd(*arguments)


def _general(call: Call, return_lse: bool, num_splits: int) -> Tensor | tuple[Tensor, ...]:
    """What a public function returns. num_splits: 1, or of `attend_cache`; with a mask as given."""
    op, tensors, general, execution, eight_bit, mask = call
    if mask is not None:
        masked.refuse(call, num_splits)
    if dtensors.is_dtensor(tensors[0]):
        return dtensors.on_shards(call, lambda shard: _general(shard, return_lse, num_splits))
    if mask is not None:
        if (packed := masked.packed_call(call)) is None:
            results = masked.attention(call)
        else:
            results = masked.by_batch(_general_attention(
                packed.tensors, packed.general, execution, return_lse), tensors)
        return asked_for(results, return_lse, execution.return_max_logits)
    *_, out = tensors
    if out is not None and call.needs_grad():
        raise RuntimeError(checks.gradient_with_out_text(op, **call.named()))
    if num_splits != 1:
        results = splits.attention(call, num_splits, return_lse)
    elif eight_bit is None:
        own, *others = splits.calls_of(execution)
        results = _general_attention(tensors, general, own, return_lse)
        if others:
            results = *results[:2], _maxima(call, *others)
    else:
        results = _fp8_attention(call)
    return asked_for(results, return_lse, execution.return_max_logits)


def _maxima(call: Call, execution: Execution) -> Tensor:
    """max_logits by a call of its own, which needs no gradients."""
    with torch.no_grad():
        return _general_attention((*call.tensors[:3], None), call.general, execution, False)[2]


def asked_for(results: tuple[Tensor, Tensor | None, Tensor | None], return_lse: bool,
              return_max_logits: bool) -> Tensor | tuple[Tensor, ...]:
    """out, or a tuple of it and, where they were asked for, lse and max_logits."""
    result, lse, max_logits = results
    if not return_max_logits:
        return (result, lse) if return_lse else result
    return (result, lse, max_logits) if return_lse else (result, max_logits)


def _fp8_attention(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logits) of e4m3 tensors; their backward raises an error."""
    op, (q, k, v, out), general, execution, eight_bit, _ = call
    fp8.reject_missing(op, q)
    call.reject_forward_mode()
    if not is_compiling():
        dense_and_varlen.check_cuda_contents(q, k, general)
    arguments = q, k, v, out, *general, *execution[:-1], *eight_bit
    if out is not None:
        return out, *_attend(*arguments)[1:]
    if not call.needs_grad():
        return _attend(*arguments)
    text = fp8.gradient_text(op, **call.named())
    result, lse, max_logits = derivatives.Refusal.apply(text, _attend, *arguments)
    return result, lse, max_logits.detach()


def _general_attention(tensors: tuple[Tensor, Tensor, Tensor, Tensor | None], general: General,
                       execution: Execution,
                       return_lse: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(out, lse, max_logits) by the shortest path.

    lse and max_logits are undefined unless they were asked for.
    """
    q, k, v, out = tensors
    inputs = dense_and_varlen.inputs_of(q, k, v, general)
    if not _is_served(q):
        checks.check_forward(dict(q=q, k=k, v=v, out=out), general, execution, rules_of='cpu')
        dense_and_varlen.check_cuda_contents(q, k, general)
        result, *others = fallback.attention(q, k, v, general,
                                             return_lse or execution.return_max_logits)
        return (result if out is None else out.copy_(result)), *others
    if not is_compiling():
        dense_and_varlen.check_cuda_contents(q, k, general)
    if out is not None:
        derivatives.reject_forward_mode(out, *inputs, op=dense_and_varlen.function_of(general))
        return out, *_attend(q, k, v, out, *general, *execution[:-1])[1:]
    if is_compiling() or derivatives.is_forward_mode():
        return _fwd_general_traced(q, k, v, *general, *execution)
    if checks.needs_grad(*inputs):
        return general_attention(q, k, v, *general, *execution)
    return _attend_eager(q, k, v, None, *general, *execution[:-1])
