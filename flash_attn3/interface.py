"""The public attention functions: names, defaults and documentation.

No policy lives here: the ops check their inputs and choose the kernel. The parameter order is that
of upstream's `flash_attn_interface`; what is ours comes behind it, keyword-only.
"""
from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from flash_attn3 import _library, checks, fallback
from flash_attn3.autograd import Attention, PackedAttention
from flash_attn3.packing import unpack


def _bare(op: torch._ops.OpOverload):
    """What the op calls, where PyTorch has it: its own layer of Python costs 0.2 us a call."""
    return getattr(op, '_op', op)


_fwd = _bare(torch.ops.flash_attn3._fwd.default)    # eager: no autograd formula in the way
_fwd_no_lse = _bare(torch.ops.flash_attn3._fwd_no_lse.default)
_fwd_traced = torch.ops.flash_attn3.fwd.default    # under torch.compile and torch.export
_fwd_out = torch.ops.flash_attn3.fwd_out.default
_fwd_out_no_lse = torch.ops.flash_attn3.fwd_out_no_lse.default


def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
        qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
        v_descale: Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
        pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
        return_attn_probs: bool = False, *,
        out: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, out = softmax(softmax_scale * q k^T) v, for each batch entry and head.

    On a Hopper GPU (compute capability 9.0) it runs the kernel of arXiv 2407.08608, section 3; on
    the CPU a plain PyTorch implementation (`flash_attn3.reference`); on other CUDA devices
    PyTorch's SDPA, with one warning. Query head h uses KV head h // (heads_q / heads_k). Products
    are summed, and the softmax is taken, in float32 (float64 for float64 on the CPU). The same
    inputs give bitwise the same result on every call; for their gradients see `deterministic`.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim). On Hopper: float16 or bfloat16, a head_dim with a
            kernel (`flash_attn3.built_variants()`), last stride 1; other strides are free (a
            tensor whose strides or address are not multiples of 16 bytes is copied first). On the
            CPU: any floating dtype, head_dim and strides.
        k: (batch, seqlen_k, heads_k, head_dim), dtype and device of q; heads_k divides heads_q.
        v: (batch, seqlen_k, heads_k, head_dim), dtype and device of q.
        softmax_scale: factor on q k^T, finite and positive. Default: head_dim ** -0.5.
        causal: query i sees keys up to i + seqlen_k - seqlen_q (aligned bottom-right). A query
            that sees no key gives out = 0 and lse = -inf, and no gradient. Default: all see all.
        pack_gqa: put the query heads of a KV head into the rows of one tile, which fills the tiles
            of short queries: True, False, or None (default) for where it gives over 10 % more
            useful rows. It never changes what is computed.
        deterministic: the gradients are bitwise the same on every call too. On a Hopper GPU the
            gradient of q is otherwise summed in no fixed order (those of k and v repeat anyway);
            the fixed one costs time in the backward. On the CPU everything repeats; on other CUDA
            devices this has no effect. `torch.use_deterministic_algorithms(True)`, set at the time
            of this call, does the same (and sets SDPA). Default False.
        sm_margin: streaming multiprocessors that the forward leaves to other kernels, at least 0
            and less than the GPU has. The backward takes all of them, a tile at a time: kernels of
            other streams get in between. Default 0.
        return_attn_probs: also return lse (upstream's name; no probabilities). Default False.
        out: the result goes there, and it is returned itself: (batch, seqlen_q, heads_q,
            head_dim), dtype and device of q, last stride 1, other strides free. Not
            differentiable. Default: a new, contiguous tensor.
        qv, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap, num_splits:
            places of upstream's parameters, for their defaults only (num_splits: 0 or 1).

    Returns:
        out, (batch, seqlen_q, heads_q, head_dim), dtype of q; with return_attn_probs=True
        (out, lse): lse is (batch, heads_q, seqlen_q), float32 (float64 for float64), the natural
        logarithm of the softmax's denominator. Gradients flow through both.

    Raises:
        RuntimeError: a wrong rank, shape, dtype, device, stride or number; the text names it and
            says what it had to be. Also a driver that is too old for the kernels.
        NotImplementedError: a feature listed last above.

    Example:
        >>> q = torch.randn(2, 1024, 16, 128, dtype=torch.bfloat16, device='cuda')
        >>> k = torch.randn(2, 1024, 4, 128, dtype=torch.bfloat16, device='cuda')
        >>> out, lse = flash_attn3.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    """
    if (qv is not None or q_descale is not None or k_descale is not None or v_descale is not None
            or window_size != (-1, -1) or attention_chunk != 0 or softcap != 0.0
            or num_splits != 1):
        checks.reject_unsupported(
            'flash_attn_func', qv=qv, q_descale=q_descale, k_descale=k_descale,
            v_descale=v_descale, window_size=window_size, attention_chunk=attention_chunk,
            softcap=softcap, num_splits=num_splits)
    # The way of most eager calls, with as little Python and as few arguments as there can be.
    if (out is None and not is_compiling() and q.get_device() in _library.SERVED_DEVICES
            and not (is_grad_enabled()
                     and (q.requires_grad or k.requires_grad or v.requires_grad))):
        op = _fwd if return_attn_probs else _fwd_no_lse
        if softmax_scale is None and pack_gqa is None and sm_margin == 0:
            return op(q, k, v, None, causal) if causal else op(q, k, v)
        return op(q, k, v, softmax_scale, causal, pack_gqa, sm_margin)
    if softmax_scale is None:
        softmax_scale = checks.default_softmax_scale(q)
    arguments = (q, k, v, softmax_scale, causal, pack_gqa, sm_margin)
    result, lse = _attention(arguments, deterministic, out, return_attn_probs)
    return (result, lse) if return_attn_probs else result


def flash_attn_qkvpacked_func(
        qkv: Tensor, softmax_scale: float | None = None, causal: bool = False,
        q_descale: Tensor | None = None, k_descale: Tensor | None = None,
        v_descale: Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False,
        num_heads_q: int | None = None, sm_margin: int = 0, return_attn_probs: bool = False, *,
        pack_gqa: bool | None = None,
        out: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_func` on one tensor that holds q, k and v, such as a projection's output.

    Nothing is copied: q, k and v are views. In eager mode the gradient is one tensor of the shape
    of qkv, into which the kernels write; for slices of qkv given to `flash_attn_func`, autograd
    would fill up each of three gradients with zeros to that shape, and add.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim): q, k and v. Or, with num_heads_q,
            (batch, seqlen, heads_q + 2 * heads_k, head_dim): the heads of q, then those of k, then
            those of v; heads_k divides heads_q. dtype, head_dim and strides as in
            `flash_attn_func`.
        num_heads_q: heads_q. Needed with four dimensions; with five None (default) or heads.
        softmax_scale, causal, deterministic, sm_margin, return_attn_probs, pack_gqa, out: as in
            `flash_attn_func`.
        q_descale, k_descale, v_descale, window_size, attention_chunk, softcap: places of
            upstream's parameters, for their defaults only.

    Returns:
        out, (batch, seqlen, heads_q, head_dim), dtype of qkv; with return_attn_probs=True
        (out, lse): lse is (batch, heads_q, seqlen), as in `flash_attn_func`.

    Raises:
        RuntimeError: a shape that is neither of the two, a num_heads_q that does not fit it or is
            missing; what `flash_attn_func` raises, which speaks of the views as q, k and v.
        NotImplementedError: as in `flash_attn_func`.

    Example:
        >>> qkv = torch.randn(2, 1024, 16 + 2 * 4, 128, dtype=torch.bfloat16, device='cuda')
        >>> out = flash_attn3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=16)
    """
    checks.reject_unsupported(
        'flash_attn_qkvpacked_func', q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, window_size=window_size, attention_chunk=attention_chunk,
        softcap=softcap)
    if (out is None and is_grad_enabled() and qkv.requires_grad and not is_compiling()
            and _is_served(qkv)):
        result, lse = PackedAttention.apply(qkv, num_heads_q, softmax_scale, causal, pack_gqa,
                                            sm_margin, deterministic)
        return (result, lse) if return_attn_probs else result
    q, k, v = unpack(qkv, num_heads_q)
    return flash_attn_func(q, k, v, softmax_scale, causal, pack_gqa=pack_gqa,
                           deterministic=deterministic, sm_margin=sm_margin,
                           return_attn_probs=return_attn_probs, out=out)


def _is_served(x: Tensor) -> bool:
    """Whether an op of ours serves its device: the CPU, Hopper, and those without data."""
    return not x.is_cuda or _library.kernels_serve(x.device)


def _attention(arguments: tuple, deterministic: bool, out: Tensor | None,
               return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """(out, lse), by the way that fits: arguments are those of the op `_fwd`.

    lse may be None unless it is asked for.
    """
    q, k, v, softmax_scale, causal, pack_gqa, sm_margin = arguments
    needs_grad = checks.needs_grad(q, k, v, out)
    if needs_grad and out is not None:
        raise RuntimeError(checks.gradient_with_out_text(q, k, v, out))
    if not _is_served(q):
        checks.check_forward(q, k, v, out, softmax_scale, sm_margin, rules_of='cpu')
        result, lse = fallback.attention(q, k, v, softmax_scale, causal, return_lse)
        return (result if out is None else out.copy_(result)), lse
    if out is not None:
        op = _fwd_out if return_lse else _fwd_out_no_lse
        return out, op(q, k, v, out, softmax_scale, causal, pack_gqa, sm_margin)
    if is_compiling():
        return _fwd_traced(*arguments, deterministic)
    if needs_grad:
        return Attention.apply(*arguments, deterministic)
    return _fwd(*arguments)
