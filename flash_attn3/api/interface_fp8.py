"""The public functions of FP8: quantisation, and quantisation with attention in one call."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn3.ops import checks, derivatives, dtensors, fp8, invariance, library, masked
from flash_attn3.ops.autograd import quantized_attention
from flash_attn3.ops.fp8 import Quantization
from flash_attn3.ops.dense_and_varlen import Execution, general_of
from flash_attn3.ops.splits import Call
from flash_attn3.api.interface import asked_for
from flash_attn3.api.masks import AttentionMask
from flash_attn3.cpu.quantize import PER_HEAD, PER_TENSOR

_quantize = torch.ops.flash_attn3.quantize_fp8.default
_fwd_quantized = torch.ops.flash_attn3.fwd_quantized.default
_NAMED_BLOCKS = {'head': PER_HEAD, 'tensor': PER_TENSOR}


def quantize_fp8(x: Tensor, *, rotate: bool = False, block: int | str = 'head', seed: int = 0,
                 group: int = 1, cu_seqlens: Tensor | None = None,
                 seqused: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantises x to float8_e4m3fn with scales: x is approximately values * scale.

    The attention functions take such q, k and v, and these scales as q_descale, k_descale and
    v_descale (a number: one scale for all; None: 1). Their output is out_dtype, bfloat16 (default)
    or float16. fp8_accum: Hopper's tensor cores accumulate with about 14 bits and truncate. 'fast'
    (default) uses them alone. This is harmless when the values have zero mean; otherwise a row with
    nearly uniform probabilities loses accuracy, 1 % over 1024 keys, 10 % over 8192. 'promote' adds
    the sum of each tile in float32 and takes 1.05 to 1.2 times as long (1.2 to 1.4 for head dims
    above 128, but 1.05 for (192, 128)). On the CPU both compute in float32 on the dequantised
    values. There are no gradients (the backward raises an error), and no FP8 attention on other
    CUDA devices than Hopper.

    A Hopper GPU quantises in one kernel. It reads x once if a scale covers few enough values (on an
    H200 some 6 million: 50000 rows of head dim 128), otherwise twice. Every device gives the same
    bits.

    scale is the largest absolute value of a block, divided by 448. `flash_attn3.cpu.quantize`
    defines each rounding. Rotating q and k with the same seed leaves q k^T as it is and spreads
    outliers over head_dim. Not differentiable.

        q8, q_descale = quantize_fp8(q, rotate=True, block=64, group=heads_q // heads_k)
        k8, k_descale = quantize_fp8(k, rotate=True, block=384)
        v8, v_descale = quantize_fp8(v, block=384)
        out = flash_attn_func(q8, k8, v8, q_descale=q_descale, k_descale=k_descale,
                              v_descale=v_descale)

    Args:
        x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens. bfloat16,
            float16 or float32. NaN and infinities become NaN and do not affect scales.
        rotate: multiply each row by random signs and a Hadamard matrix, block-diagonal if head_dim
            is no power of two (96 = 64 + 32). This is computed in float16, after rows are scaled:
            x may have any range.
        block: rows that share a scale, a multiple of 32, counted from the first row of a sequence:
            the attention functions take 64 for q, 384 for k and v. Or 'head' (default), one scale
            for each sequence and KV head, or 'tensor', one for all.
        seed: selects the signs, 0 to 2^32 - 1.
        group: heads of x per KV head; they share its signs and, with 'head', its scale.
        cu_seqlens, seqused: as for q, or for k and v, in `flash_attn_varlen_func`. Rows that do not
            count are not read; their values are 0.

    Returns:
        values: shape of x, contiguous. scale: float32. With 'head' (batch, heads / group); with
        'tensor' likewise, with strides of 0, as the attention functions take any strides. By blocks
        (batch, heads, ceil(seqlen / block)); with cu_seqlens (1, heads, total // block + batch),
        where row r of sequence b has index cu_seqlens[b] // block + b + r // block.

    Raises:
        RuntimeError: a wrong shape, dtype or number; on a Hopper GPU also a head_dim that is no
            multiple of 8 from 8 to 256.
    """
    if block not in _NAMED_BLOCKS if isinstance(block, str) else block < 1:
        raise RuntimeError(checks.error('quantize_fp8', "block to be a number of rows, 'head' or "
                                        "'tensor'", repr(block)))
    rows = _NAMED_BLOCKS.get(block, block)
    is_served = not x.is_cuda or library.kernels_serve(x.device)
    values, scale = (_quantize if is_served else fp8.quantize_plainly)(
        x.detach(), cu_seqlens, seqused, rows, group,
        fp8.rotation_seed('quantize_fp8', rotate, seed))
    if rows == PER_TENSOR:
        batch = x.size(0) if cu_seqlens is None else cu_seqlens.size(0) - 1
        scale = scale.expand(batch, x.size(-2) // group)
    return values, scale


@checks.names_errors
def flash_attn_fp8_func(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
        *, window_size: Sequence[int] | Tensor = (-1, -1), attention_chunk: int = 0,
        softcap: float = 0.0, pack_gqa: bool | None = None, deterministic: bool = False,
        sm_margin: int = 0, return_attn_probs: bool = False, s_aux: Tensor | None = None,
        return_max_logits: bool = False, rotate: bool = True, block_scales: bool = True,
        seed: int = 0, fp8_accum: str = 'fast',
        fp8_backward: str = 'given',
        mask: AttentionMask | None = None) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_func` in FP8: quantises q, k and v, then attends.

    The gradients are computed in the dtype of q, from the given q, k and v and from the out and lse
    of the FP8 forward: a straight-through estimator, which ignores the rounding to FP8.

    Args:
        q, k, v: as in `flash_attn_func`, bfloat16 or float16.
        rotate, seed: whether and how q and k are rotated, see `quantize_fp8`. Default: rotated.
        block_scales: a scale for every 64 rows of q and 384 of k and v (default), or one for each
            batch entry and KV head.
        fp8_accum: see `quantize_fp8`; without effect on the CPU.
        fp8_backward: 'given' (default), or 'rounded': gradients at the rounded q, k and v, from
            which out and lse were computed. Slower; large scores need it: docs/fp8.md.
        mask: as in `flash_attn_func`; on a GPU without softcap and fp8_accum='promote'.
        softmax_scale, causal, window_size, attention_chunk, softcap, pack_gqa, deterministic,
            sm_margin, return_attn_probs, s_aux, return_max_logits: as in `flash_attn_func`.

    Returns:
        out, of the dtype of q, or a tuple, as `flash_attn_func`.

    Raises:
        RuntimeError: as `flash_attn_func`.
        NotImplementedError: CUDA tensors that are not on a Hopper GPU, or whose kernels are
            missing; derivatives that `flash_attn_func` lacks too.
    """
    return _quantized(
        'flash_attn_fp8_func', (q, k, v), (),
        dict(s_aux=s_aux, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
             attention_chunk=attention_chunk, softcap=softcap),
        Execution(pack_gqa, sm_margin, return_max_logits, deterministic=deterministic),
        (rotate, seed, block_scales, fp8_accum, fp8_backward), return_attn_probs, mask)


@checks.names_errors
def flash_attn_varlen_fp8_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor, seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
        *, window_size: Sequence[int] | Tensor = (-1, -1), attention_chunk: int = 0,
        softcap: float = 0.0, pack_gqa: bool | None = None, deterministic: bool = False,
        sm_margin: int = 0, return_attn_probs: bool = False, s_aux: Tensor | None = None,
        return_max_logits: bool = False, rotate: bool = True, block_scales: bool = True,
        seed: int = 0, fp8_accum: str = 'fast',
        fp8_backward: str = 'given',
        mask: AttentionMask | None = None) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_varlen_func` in FP8, as `flash_attn_fp8_func` computes.

    Each sequence begins a new block, with its own scales.

    Args:
        rotate, block_scales, seed, fp8_accum, fp8_backward, mask: as in `flash_attn_fp8_func`.
        all others: as in `flash_attn_varlen_func`; q, k and v are bfloat16 or float16.

    Returns:
        As `flash_attn_varlen_func`.

    Raises:
        RuntimeError, NotImplementedError: as `flash_attn_fp8_func`.
    """
    return _quantized(
        'flash_attn_varlen_fp8_func', (q, k, v),
        (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
         checks.length_bound('max_seqlen_q', max_seqlen_q, q, 'flash_attn_varlen_fp8_func'),
         checks.length_bound('max_seqlen_k', max_seqlen_k, k, 'flash_attn_varlen_fp8_func')),
        dict(s_aux=s_aux, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
             attention_chunk=attention_chunk, softcap=softcap),
        Execution(pack_gqa, sm_margin, return_max_logits, deterministic=deterministic),
        (rotate, seed, block_scales, fp8_accum, fp8_backward), return_attn_probs, mask)


def _quantized(op: str, tensors: tuple[Tensor, Tensor, Tensor], lengths: tuple, score: dict,
               execution: Execution, quantization: tuple, return_lse: bool,
               mask: AttentionMask | None) -> Tensor | tuple[Tensor, ...]:
    """What a public function returns.

    tensors: q, k and v. lengths, score: the arguments of `general_of`. quantization: rotate to
    fp8_backward, as the public functions take them.
    """
    q, *_ = tensors
    dtensors.reject(op, q)
    derivatives.reject_of_scalars(op, softmax_scale=score['softmax_scale'],
                                  softcap=score['softcap'])
    general = general_of(q, *lengths, **score, op=op)
    rotate, seed, block_scales, fp8_accum, fp8_backward = quantization
    quantization = Quantization(
        fp8.rotation_seed(op, rotate, seed), block_scales,
        fp8.is_second(op, 'fp8_backward', fp8_backward, fp8.BACKWARDS),
        fp8.is_second(op, 'fp8_accum', fp8_accum, fp8.ACCUMULATIONS))
    invariance.reject(op, 'quantising')
    fp8.reject_missing(op, q)
    arguments = *tensors, *general, *execution, *quantization
    if mask is not None:
        call = Call(op, (*tensors, None), general, execution, None, mask)
        arguments = *arguments, *masked.quantized(call, quantization.promote)
    if is_compiling() or derivatives.is_forward_mode():
        results = _fwd_quantized(*arguments)
    elif checks.needs_grad(*tensors, score['s_aux']):
        results = quantized_attention(*arguments)
    else:
        results = fp8.forward_quantized(*arguments)
    return asked_for(results, return_lse, execution.return_max_logits)
