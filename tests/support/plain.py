"""Dense attention in plain PyTorch: `reference` without softcap, windows and sinks."""
from __future__ import annotations

import torch
from torch import Tensor

from flash_attn3.cpu import reference
from flash_attn3.cpu.reference import Inputs, Mask, Score


def forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool,
            compute_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """out and lse."""
    score = Score(softmax_scale, mask=Mask(causal))
    return reference.attend(Inputs(q, k, v), score, compute_dtype)[:2]


def backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
             softmax_scale: float, causal: bool, compute_dtype: torch.dtype | None = None,
             ) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv."""
    score = Score(softmax_scale, mask=Mask(causal))
    return reference.attend_backward(dout, dlse, Inputs(q, k, v), score, compute_dtype)[:3]
