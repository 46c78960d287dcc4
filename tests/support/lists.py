"""Lists of a call as the package takes them: int32 tensors."""
from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from flash_attn3.cpu.reference import Lengths, Sequences


def ints(values: Iterable, device: str | torch.device = 'cpu') -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def starts(lengths: Iterable[int], device: str | torch.device = 'cpu') -> Tensor:
    """cu_seqlens of these lengths."""
    return ints([0, *itertools.accumulate(lengths)], device)


def lengths_of(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_q: Tensor | None = None,
               seqused_k: Tensor | None = None) -> Lengths:
    return Lengths(Sequences(cu_seqlens_q, seqused_q), Sequences(cu_seqlens_k, seqused_k))
