"""Parts of an AttentionMask (api/masks.py) besides its tensors: the lengths that it is made for,
and documents as packed sequences.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling


class Documents(NamedTuple):
    """Documents of `rows` sequences of `seqlen` tokens as one packed batch. What lies before the
    first and after the last document of a sequence are packed sequences without keys.
    """
    cu_documents: Tensor    # (rows, documents + 1)
    rows: int
    seqlen: int
    cu_seqlens: Tensor    # (rows * runs + 1,)
    seqused_k: Tensor     # (rows * runs,)
    causal: bool

    @staticmethod
    def of(cu_documents: Tensor, seqlen: int, causal: bool) -> Documents:
        rows = cu_documents.size(0)
        begins = F.pad(cu_documents.clamp(0, seqlen).cummax(-1).values, (1, 0))
        used = F.pad(begins[:, 1:].diff(), (1, 1))
        offsets = seqlen * torch.arange(rows, dtype=torch.int32, device=begins.device)
        starts = (begins + offsets[:, None]).flatten()
        end = starts.new_full((1,), rows * seqlen)
        lists = cu_documents, torch.cat([starts, end]), used.flatten()
        cu_documents, starts, used = map(saveable, lists)
        return Documents(cu_documents, rows, seqlen, starts, used, causal)

    def lists_of(self, batch: int) -> tuple[Tensor, Tensor]:
        """cu_seqlens and seqused_k for `batch` sequences that all have these documents."""
        offsets = self.seqlen * torch.arange(batch, dtype=torch.int32, device=self.seqused_k.device)
        starts = (self.cu_seqlens[:-1] + offsets[:, None]).flatten()
        end = starts.new_full((1,), batch * self.seqlen)
        return torch.cat([starts, end]), self.seqused_k.repeat(batch)


class Lengths(NamedTuple):
    """The lengths of a sequence that a mask is made for, both included; high is None: any."""
    low: int = 0
    high: int | None = None

    def __and__(self, other: Lengths) -> Lengths:
        highs = [x.high for x in (self, other) if x.high is not None]
        return Lengths(max(self.low, other.low), min(highs) if highs else None)

    def __str__(self) -> str:
        return str(self.high) if self.low == self.high else f'{self.low} to {self.high}'

    def takes(self, length: int) -> bool:
        return self.low <= length and (self.high is None or length <= self.high)


def exactly(length: int) -> Lengths:
    return Lengths(length, length)


def in_blocks(count: int, size: int) -> Lengths:
    return Lengths(max(0, (count - 1) * size + 1), count * size)


def saveable(x: Tensor | None) -> Tensor | None:
    """x as autograd can save it, which refuses what inference mode made."""
    if is_compiling() or x is None or not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.clone()
