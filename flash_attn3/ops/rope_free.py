"""Absorbed MLA without rotary columns: qv and v_cache alone, with neither q nor k_cache.

A call becomes one with a q of zeros, so k changes nothing as long as it is finite. WHY k is a view
of v: it takes no memory, and its bytes have just been read. A latent that is not finite gives NaN
with any k.
"""
from __future__ import annotations

import torch
from torch import Tensor

from flash_attn3.cpu.quantize import E4M3
from flash_attn3.ops import checks
from flash_attn3.ops.chosen_keys import KVCACHE, Function

_COLUMNS = 64    # rotary columns that the kernel for latents always reads
# The arguments of of_cache(): tensors and the scale, then what must be None.
OF_CACHE = 'q', 'k_cache', 'v_cache', 'qv', 'softmax_scale', 'k', 'v'


def of_cache(*arguments) -> tuple[Tensor, Tensor, float]:
    """tensors_of() of a call on a cache."""
    return tensors_of(KVCACHE, dict(zip(OF_CACHE, arguments)))


def tensors_of(function: Function, call: dict) -> tuple[Tensor, Tensor, float]:
    """(q, k, softmax_scale) of a call without q and k.

    call: q, k and v under the function's names, qv, softmax_scale, and what must be None without q
    and k.

    Raises:
        RuntimeError: one of q and k is given, qv is not, or the others do not fit.
    """
    q, k, v, latent_q, scale = (call.pop(name) for name in (
        'q', function.k, function.v, 'qv', 'softmax_scale'))
    if problem := _problem((q, k, v, latent_q), function, call):
        raise RuntimeError(checks.error(function.name, *problem))
    k = v[..., :_COLUMNS]
    if v.dtype == E4M3:    # two finite e4m3 are a finite bfloat16, not always a float16
        k = v[..., :2 * _COLUMNS].view(latent_q.dtype)
    zeros = latent_q.new_zeros((*latent_q.shape[:-1], k.size(-1)))
    return zeros, k, latent_q.size(-1) ** -0.5 if scale is None else scale


def _problem(tensors: tuple, function: Function, others: dict) -> tuple[str, str] | None:
    """(what was expected, what it is instead), or None. tensors: q, k, v and qv."""
    q, k, v, latent_q = tensors
    if latent_q is None or q is not None or k is not None:
        given = [name for name, x in (('q', q), (function.k, k), ('qv', latent_q))
                 if x is not None]
        return f'q and {function.k}, or qv without both', ' and '.join(given) or 'none of them'
    for name, x in others.items():
        if x is not None:
            return f'{name} to be None without q and {function.k}', 'a value'
    is_e4m3 = v.dtype == E4M3
    if is_e4m3 and latent_q.dtype != torch.bfloat16:
        return (f'qv of bfloat16 with {function.v} of float8_e4m3fn and no q',
                checks.dtype_name(latent_q.dtype))
    for name, x, least in (('qv', latent_q, 1), (function.v, v, _COLUMNS << is_e4m3)):
        if x.dim() == 0 or x.size(-1) < least:
            return f'{name} of {least} columns or more without q', f'the shape {tuple(x.shape)}'
    return None
