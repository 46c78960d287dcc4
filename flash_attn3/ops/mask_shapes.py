"""Parts of an AttentionMask (api/masks.py) besides its tensors: the lengths that it is made for,
documents as packed sequences, completions as intervals, and checks of what its constructors take.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn3.ops import checks

OP = 'AttentionMask'


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


def described(x) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    return f'{tuple(x.shape)}, {checks.dtype_name(x.dtype)}'


def check_ints(method: str, name: str, x: Tensor, ranks: tuple[int, ...],
                least: int = 1) -> None:
    is_one = isinstance(x, Tensor) and x.dtype == torch.int32 and x.dim() in ranks
    if not is_one or x.size(-1) < least:
        raise RuntimeError(checks.error(
            f'{OP}.{method}', f'{name} to be int32 of {" or ".join(map(str, ranks))} dimensions',
            described(x)))


def check_starts(method: str, name: str, x: Tensor, device: torch.device,
                  count: int | None = None) -> None:
    """Checks cu_seqlens. count: how many numbers it must have; None: any."""
    check_ints(method, name, x, (1,))
    if x.device != device or (count is not None and count != x.size(0)):
        raise RuntimeError(checks.error(
            f'{OP}.{method}', f'{name} on {device}' + f' of {count} numbers' * (count is not None),
            f'{x.size(0)} on {x.device}'))


def completion_intervals(cu_seqlens: Tensor, cu_trees: Tensor, seqlen: int) -> Tensor:
    """(seqlen, n, 2) int32: what each query sees, by what AttentionMask.completions takes."""
    check_ints('completions', 'cu_seqlens', cu_seqlens, (1,))
    check_starts('completions', 'cu_trees', cu_trees, cu_seqlens.device)
    if not is_compiling() and checks.reads_contents(cu_seqlens) and not (
            checks.has_no_data(cu_seqlens)):
        _check_trees(cu_seqlens.tolist(), cu_trees.tolist(), seqlen)
    begins, ends = cu_seqlens[:-1], cu_seqlens[1:]
    row = torch.arange(seqlen, dtype=torch.int32, device=cu_seqlens.device)
    if not (segments := begins.size(0)):
        return row.new_zeros(seqlen, 1, 2)
    segment = torch.arange(segments, dtype=torch.int32, device=row.device)
    tree = torch.searchsorted(cu_trees.contiguous(), segment, right=True) - 1
    prompt = cu_trees[tree.clamp(min=0)].clamp(0, segments - 1)
    of_prompt = torch.stack([begins[prompt], ends[prompt]], -1)
    of_prompt = of_prompt.masked_fill((prompt == segment)[:, None], 0)
    number = torch.searchsorted(ends.contiguous(), row, right=True)
    own = number.clamp(max=segments - 1)
    intervals = torch.stack([of_prompt[own], torch.stack([begins[own], row + 1], -1)], 1)
    return intervals.masked_fill((number == segments)[:, None, None], 0)


def _check_trees(starts: list[int], trees: list[int], seqlen: int) -> None:
    """Checks what completions() is given."""
    segments = len(starts) - 1
    problem = checks.sequences_problem('a sequence', starts, [], seqlen, suffix='')
    if trees[0] != 0:
        problem = problem or ('cu_trees[0] to be 0', str(trees[0]))
    for tree, (first, end) in enumerate(zip(trees, trees[1:])):
        if not first <= end <= segments:
            problem = problem or (
                f'cu_trees[{tree + 1}], the end of tree {tree}, to be from {first}, its prompt, to '
                f'{segments}, the segments', str(end))
    if trees[-1] != segments:
        problem = problem or (f'cu_trees to end at {segments}, the segments', str(trees[-1]))
    if problem:
        raise RuntimeError(checks.error(f'{OP}.completions', *problem))
