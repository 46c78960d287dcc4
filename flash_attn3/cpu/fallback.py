"""Attention on CUDA devices that our kernels do not serve: PyTorch's SDPA, one warning per device.

interface.py calls it. It has the semantics of the kernels (bottom-right causal, empty rows) and
PyTorch differentiates it. `reference` computes what SDPA lacks (softcap, sinks, LSE, max logits,
packed sequences): it stores the scores, and packed sequences wait for the GPU.
"""
from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from flash_attn3.cpu.reference import Mask, Score
from flash_attn3.ops import checks, library
from flash_attn3.ops.dense_and_varlen import General, attend, is_plain, score_of

_warned_devices: set[torch.device] = set()


def attention(q: Tensor, k: Tensor, v: Tensor, general: General,
              with_rows: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(out, lse, max_logits) with the arguments of the general ops, on any device.

    lse and max_logits may be None unless with_rows: SDPA does not give them.
    """
    warn_once(q.device)
    if with_rows or not is_plain(general) or k.size(1) == 0:
        out, lse, row_max = attend(q, k, v, general, with_rows)
        return out, lse, None if row_max is None else row_max.detach()
    score = score_of(q, general)
    sdpa = _sdpa if score.mask == Mask(score.mask.causal) else _masked_sdpa
    return sdpa(q, k, v, score), None, None


def _masked_sdpa(q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
    hidden = score.mask.hidden(q.size(1), k.size(1), q.device)
    # A row without visible keys would be 0 / 0: it sees all keys here and is cleared afterwards.
    is_empty = hidden.all(dim=1, keepdim=True)
    out = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=~hidden | is_empty, scale=score.scale,
        enable_gqa=q.size(2) != k.size(2))
    return out.masked_fill(is_empty, 0).transpose(1, 2).contiguous()


def _sdpa(q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
    """Without a mask, or causal: no tensor of the size of the scores."""
    causal, seqlen_k = score.mask.causal, k.size(1)
    if q.size(1) == 0:
        return q.new_zeros((*q.shape[:3], v.size(3)))
    empty_rows = max(0, q.size(1) - seqlen_k) if causal else 0
    q, k, v = (x.transpose(1, 2) for x in (q[:, empty_rows:], k, v))    # (b, heads, seqlen, d)
    is_square = q.size(2) == seqlen_k
    mask = causal_lower_right(q.size(2), seqlen_k) if causal and not is_square else None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and is_square,
                                         scale=score.scale, enable_gqa=q.size(1) != k.size(1))
    return F.pad(out.transpose(1, 2), (0, 0, 0, 0, empty_rows, 0)).contiguous()


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

