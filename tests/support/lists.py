"""Lists of a call as the package takes them: int32 tensors."""
from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor


def ints(values: Iterable, device: str | torch.device = 'cpu') -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def starts(lengths: Iterable[int], device: str | torch.device = 'cpu') -> Tensor:
    """cu_seqlens of these lengths."""
    return ints([0, *itertools.accumulate(lengths)], device)
