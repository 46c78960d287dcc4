"""Attention on CUDA devices that our kernels do not serve: PyTorch's SDPA, one warning per device.

Called by interface.py and completions.py. Same semantics as the kernels (bottom-right causal, empty
rows), differentiable by PyTorch. What SDPA does not have (softcap, sinks, max logits, packed
sequences) is `reference`, with the memory of the scores; for packed sequences it waits for the GPU.
"""
from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from flash_attn3.cpu import reference
from flash_attn3.ops import checks, library
from flash_attn3.ops.dense_and_varlen import General, attend, lengths_of, score_of
from flash_attn3.cpu.reference import Score

_warned_devices: set[torch.device] = set()


def attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool,
              return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """(out, lse) as flash_attn_func defines them, on any device.

    lse is None unless asked for: SDPA does not give it, it takes a second, plain computation.
    """
    warn_once(q.device)
    out = _sdpa(q, k, v, softmax_scale, causal)
    if not return_lse:
        return out, None
    wide = reference.lse_dtype(q.dtype)
    scores = reference.masked_scores(q.to(wide), k.to(wide), softmax_scale, causal)
    return out, torch.logsumexp(scores, dim=-1).flatten(1, 2)    # (b, h_k, group, sq) -> (b, h, sq)


def general_attention(q: Tensor, k: Tensor, v: Tensor, general: General, return_lse: bool,
                      return_max_logits: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(out, lse, max_logits) with the arguments of the general ops, on any device.

    lse and max_logits may be None unless asked for.
    """
    warn_once(q.device)
    score = score_of(q, general)
    is_sdpas = (lengths_of(general) is None and general.sinks is None and not score.softcap
                and k.size(1) > 0)
    if return_lse or return_max_logits or not is_sdpas:
        out, lse, row_max = attend(q, k, v, general, return_max_logits)
        return out, lse, None if row_max is None else row_max.detach()
    return _masked_sdpa(q, k, v, score), None, None


def _masked_sdpa(q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
    hidden = score.mask.hidden(q.size(1), k.size(1), q.device)
    # A row without visible keys would be 0 / 0: it sees all keys here and is cleared afterwards.
    is_empty = hidden.all(dim=1, keepdim=True)
    out = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=~hidden | is_empty, scale=score.scale,
        enable_gqa=q.size(2) != k.size(2))
    return out.masked_fill(is_empty, 0).transpose(1, 2).contiguous()


def warn_once(device: torch.device, op: str = 'flash_attn_func', depth: int = 5) -> None:
    """Warns once per device that the kernels do not serve it. depth: frames up to the user."""
    if torch.compiler.is_compiling() or device in _warned_devices:
        return
    _warned_devices.add(device)
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else 'no GPU'
    warnings.warn(
        checks.error(op, 'a Hopper GPU and its kernels', f'{device} ({name})',
                     library.KERNELS_MISSING or 'the kernels are for compute capability 9.0')
        + '; torch.nn.functional.scaled_dot_product_attention is used instead, and plain PyTorch '
        'for what it lacks', stacklevel=depth)


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
