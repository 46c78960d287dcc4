"""The public functions of FP8: quantisation, and quantisation with attention in one call."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn3.ops import checks, derivatives, dtensors, fp8, invariance, library
from flash_attn3.ops.autograd import quantized_attention
from flash_attn3.ops.fp8 import Quantization
from flash_attn3.ops.dense_and_varlen import Execution, General, general_of
from flash_attn3.api.interface import asked_for
from flash_attn3.cpu.quantize import PER_HEAD, PER_TENSOR

_quantize = torch.ops.flash_attn3.quantize_fp8.default
_fwd_quantized = torch.ops.flash_attn3.fwd_quantized.default
_NAMED_BLOCKS = {'head': PER_HEAD, 'tensor': PER_TENSOR}


def quantize_fp8(x: Tensor, *, rotate: bool = False, block: int | str = 'head', seed: int = 0,
                 group: int = 1, cu_seqlens: Tensor | None = None,
                 seqused: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x as float8_e4m3fn and the scales that give it back: x is about values * scale.

    For the attention functions, whose q, k and v may be float8_e4m3fn, with q_descale, k_descale
    and v_descale for these scales (a number: for all; None: 1). Their output is out_dtype, bfloat16
    (default) or float16. fp8_accum: the tensor cores of Hopper add up with about 14 bits, and cut
    off the rest. 'fast' (default): where values average out, this costs nothing; where they have a
    mean, a row that sees many keys alike loses of it, 1 % over 1024 of them, 10 % over 8192.
    'promote' adds the part of every tile in float32, and takes 1.05 to 1.2 times as long (head dims
    above 128 1.2 to 1.4, but (192, 128) 1.05). On the CPU they are the same. There are no gradients
    (the backward raises), and no return_max_logits on a GPU. On the CPU attention computes in
    float32 with the values that x stands for; CUDA devices other than Hopper have no FP8 attention.

    On a Hopper GPU a kernel quantises, in one pass over x if scales have few enough values (an H200
    takes some 6 million for one: 50000 rows of head dim 128), otherwise in two. Every device gives
    the same bits.

    scale is the largest absolute value of a block / 448. `flash_attn3.cpu.quantize` says every
    rounding. q and k may be rotated, both with the same seed: q k^T stays what it is, while
    outliers are spread over head_dim. Not differentiable.

        q8, q_descale = quantize_fp8(q, rotate=True, block=64, group=heads_q // heads_k)
        k8, k_descale = quantize_fp8(k, rotate=True, block=384)
        v8, v_descale = quantize_fp8(v, block=384)
        out = flash_attn_func(q8, k8, v8, q_descale=q_descale, k_descale=k_descale,
                              v_descale=v_descale)

    Args:
        x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens. bfloat16,
            float16 or float32. NaN and infinities become NaN and count for no scale.
        rotate: multiply each row by random signs and a Hadamard matrix (block-diagonal of powers of
            two where head_dim is none: 96 = 64 + 32). In float16, whatever the range of x: rows are
            scaled first.
        block: rows with a scale of their own, a multiple of 32, from the first row of a sequence
            on: the attention functions take 64 for q, 384 for k and v. Or 'head' (default), one
            scale for a sequence and KV head, or 'tensor', one in all.
        seed: of the signs, 0 to 2^32 - 1.
        group: heads of x for one KV head, which have its signs and, with 'head', its scale.
        cu_seqlens, seqused: as those of q, or of k and v, in `flash_attn_varlen_func`. Rows that do
            not count are not read, and 0.

    Returns:
        values: shape of x, contiguous. scale: float32. With 'head' (batch, heads / group), with
        'tensor' the same with strides of 0; the attention functions take any strides. By blocks
        (batch, heads, ceil(seqlen / block)); with cu_seqlens (1, heads, total // block + batch), of
        which row r of sequence b has number cu_seqlens[b] // block + b + r // block.

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


def flash_attn_fp8_func(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
        *, window_size: Sequence[int] | Tensor = (-1, -1), attention_chunk: int = 0,
        softcap: float = 0.0, pack_gqa: bool | None = None, deterministic: bool = False,
        sm_margin: int = 0, return_attn_probs: bool = False, s_aux: Tensor | None = None,
        return_max_logits: bool = False, rotate: bool = True, block_scales: bool = True,
        seed: int = 0, fp8_accum: str = 'fast',
        fp8_backward: str = 'given') -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_func` that computes in FP8: quantises q, k and v, and attends to the result.

    The gradients are computed in the dtype of q from q, k and v as they were given, and from the
    out and lse of the FP8 forward, as if that had rounded nothing (straight through).

    Args:
        q, k, v: as in `flash_attn_func`, bfloat16 or float16.
        rotate, seed: of q and k, see `quantize_fp8`. Default: rotated.
        block_scales: a scale for every 64 rows of q and 384 of k and v (default), or one for each
            batch entry and KV head.
        fp8_accum: see `quantize_fp8`; without effect on the CPU.
        fp8_backward: 'given' (default), or 'rounded': the gradients at q, k and v as e4m3 has them,
            to which out and lse belong. Slower, and needed where scores are large: docs/fp8.md.
        return_max_logits: as in `flash_attn_func`, on the CPU only.
        softmax_scale, causal, window_size, attention_chunk, softcap, pack_gqa, deterministic,
            sm_margin, return_attn_probs, s_aux: as in `flash_attn_func`.

    Returns:
        out, of the dtype of q, or a tuple, as `flash_attn_func`.

    Raises:
        RuntimeError: as `flash_attn_func`.
        NotImplementedError: CUDA tensors that are not on a Hopper GPU, or whose kernels are
            missing; return_max_logits on a GPU; a derivative that `flash_attn_func` has not either.
    """
    op = 'flash_attn_fp8_func'
    dtensors.reject(op, q)
    derivatives.reject_of_scalars(op, softmax_scale=softmax_scale, softcap=softcap)
    general = general_of(q, s_aux=s_aux, softmax_scale=softmax_scale, causal=causal,
                         window_size=window_size, attention_chunk=attention_chunk, softcap=softcap)
    execution = Execution(pack_gqa, sm_margin, return_max_logits, deterministic=deterministic)
    quantization = _quantization(op, rotate, seed, block_scales, fp8_accum, fp8_backward)
    return _quantized(op, (q, k, v), general, execution, quantization, return_attn_probs)


def flash_attn_varlen_fp8_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor, seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
        *, window_size: Sequence[int] | Tensor = (-1, -1), attention_chunk: int = 0,
        softcap: float = 0.0, pack_gqa: bool | None = None, deterministic: bool = False,
        sm_margin: int = 0, return_attn_probs: bool = False, s_aux: Tensor | None = None,
        return_max_logits: bool = False, rotate: bool = True, block_scales: bool = True,
        seed: int = 0, fp8_accum: str = 'fast',
        fp8_backward: str = 'given') -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_varlen_func` that computes in FP8, as `flash_attn_fp8_func` does.

    Blocks and scales begin anew at each sequence.

    Args:
        rotate, block_scales, seed, fp8_accum, fp8_backward: as in `flash_attn_fp8_func`.
        all others: as in `flash_attn_varlen_func`; q, k and v are bfloat16 or float16.

    Returns:
        As `flash_attn_varlen_func`.

    Raises:
        RuntimeError, NotImplementedError: as `flash_attn_fp8_func`.
    """
    op = 'flash_attn_varlen_fp8_func'
    dtensors.reject(op, q)
    derivatives.reject_of_scalars(op, softmax_scale=softmax_scale, softcap=softcap)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
               checks.length_bound('max_seqlen_q', max_seqlen_q, q),
               checks.length_bound('max_seqlen_k', max_seqlen_k, k))
    general = general_of(q, *lengths, s_aux=s_aux, softmax_scale=softmax_scale, causal=causal,
                         window_size=window_size, attention_chunk=attention_chunk, softcap=softcap)
    execution = Execution(pack_gqa, sm_margin, return_max_logits, deterministic=deterministic)
    quantization = _quantization(op, rotate, seed, block_scales, fp8_accum, fp8_backward)
    return _quantized(op, (q, k, v), general, execution, quantization, return_attn_probs)


def _quantization(op: str, rotate: bool, seed: int, block_scales: bool,
                  fp8_accum: str, fp8_backward: str) -> Quantization:
    return Quantization(fp8.rotation_seed(op, rotate, seed), block_scales,
                        fp8.rounds_backward(op, fp8_backward), fp8.promotes(op, fp8_accum))


def _quantized(op: str, tensors: tuple[Tensor, Tensor, Tensor], general: General,
               execution: Execution, quantization: Quantization,
               return_lse: bool) -> Tensor | tuple[Tensor, ...]:
    """What a public function returns. tensors: q, k and v."""
    invariance.reject(op, 'quantising')
    fp8.reject_missing(op, tensors[0], execution.return_max_logits)
    arguments = *tensors, *general, *execution, *quantization
    if is_compiling() or derivatives.is_forward_mode():
        results = _fwd_quantized(*arguments)
    elif checks.needs_grad(*tensors, general.sinks):
        results = quantized_attention(*arguments)
    else:
        results = fp8.forward_quantized(*arguments)
    return asked_for(results, return_lse, execution.return_max_logits)
