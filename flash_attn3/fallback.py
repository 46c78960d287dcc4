"""Attention on CUDA devices that our kernels do not serve: PyTorch's SDPA, one warning per device.

Called by interface.py. Same semantics as the kernels (bottom-right causal, empty rows),
differentiable by PyTorch.
"""
from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from flash_attn3 import _library, checks, reference

_warned_devices: set[torch.device] = set()


def attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool,
              return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """(out, lse) as flash_attn_func defines them, on any device.

    lse is None unless asked for: SDPA does not give it, it takes a second, plain computation.
    """
    if not torch.compiler.is_compiling():
        _warn_once(q.device)
    out = _sdpa(q, k, v, softmax_scale, causal)
    if not return_lse:
        return out, None
    wide = reference.lse_dtype(q.dtype)
    scores = reference.masked_scores(q.to(wide), k.to(wide), softmax_scale, causal)
    return out, torch.logsumexp(scores, dim=-1).flatten(1, 2)    # (b, h_k, group, sq) -> (b, h, sq)


def _warn_once(device: torch.device) -> None:
    if device in _warned_devices:
        return
    _warned_devices.add(device)
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else 'no GPU'
    warnings.warn(
        checks.error('flash_attn_func', 'a Hopper GPU and its kernels', f'{device} ({name})',
                     _library.KERNELS_MISSING or 'the kernels are for compute capability 9.0')
        + '; torch.nn.functional.scaled_dot_product_attention is used instead', stacklevel=5)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> Tensor:
    seqlen_q, seqlen_k = q.size(1), k.size(1)
    empty_rows = max(0, seqlen_q - seqlen_k) if causal else 0
    if seqlen_k == 0 or seqlen_q == 0:
        return q.new_zeros((*q.shape[:3], v.size(3)))
    q, k, v = (x.transpose(1, 2) for x in (q[:, empty_rows:], k, v))    # (b, heads, seqlen, d)
    is_square = q.size(2) == seqlen_k
    mask = causal_lower_right(q.size(2), seqlen_k) if causal and not is_square else None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and is_square,
                                         scale=softmax_scale, enable_gqa=q.size(1) != k.size(1))
    return F.pad(out.transpose(1, 2), (0, 0, 0, 0, empty_rows, 0)).contiguous()
