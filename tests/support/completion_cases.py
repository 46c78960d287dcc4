"""Calls of flash_attn_completions_func: trees of a prompt and its completions with their data, and
what the calls have to give.

The oracle is dense attention of all rows on all rows, with the mask written out. A TreeCase prints
itself as the Python that makes it, and seeds itself by that text.
"""
from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn3 import flash_attn_completions_func
from flash_attn3.cpu import reference
from flash_attn3.cpu.reference import Inputs, Mask, Score

from tests.support import compare
from tests.support.cases import DATA, DTYPES, NamedByChanges
from tests.support.lists import starts


class Tensors(NamedTuple):
    """The inputs of a case, and the gradients of out and lse."""
    q: Tensor
    k: Tensor
    v: Tensor
    lists: tuple[Tensor, Tensor]    # cu_seqlens and cu_trees
    dout: Tensor
    dlse: Tensor


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class TreeCase(NamedByChanges):
    trees: tuple[tuple[int, ...], ...]    # rows of each prompt and of its completions
    head_dim: int = 64
    head_dim_v: int = 0                   # 0: that of q and k
    dtype: str = 'bf16'
    heads: tuple[int, int] = (4, 2)       # query heads, KV heads
    behind: int = 0                       # rows after the last segment
    softcap: float = 0.0
    softmax_scale: float | None = None
    pack_gqa: bool | None = None
    deterministic: bool = False
    max_seqlen: int = 0
    data: str = 'normal'                  # a name in cases.DATA
    logit_std: float = 1.0                # standard deviation of the scaled scores

    @property
    def lengths(self) -> list[int]:
        """Rows of each segment."""
        return list(itertools.chain(*self.trees))

    @property
    def rows(self) -> int:
        return sum(self.lengths) + self.behind

    @property
    def scale(self) -> float:
        return self.softmax_scale or self.head_dim ** -0.5

    def lists(self, device: str | torch.device) -> tuple[Tensor, Tensor]:
        return starts(self.lengths, device), starts([len(tree) for tree in self.trees], device)

    def visible(self, device: str | torch.device) -> Tensor:
        """(rows, rows) bool: which rows see which, by the tree and the segment of each."""
        numbers = [(tree, segment) for tree, lengths in enumerate(self.trees)
                   for segment, rows in enumerate(lengths) for _ in range(rows)]
        numbers += [(-1, -1)] * self.behind
        tree, segment = torch.tensor(numbers, device=device).view(-1, 2).T.unsqueeze(1)
        row = torch.arange(self.rows, device=device)
        is_own = (tree.T == tree) & (segment.T == segment) & (row[:, None] >= row)
        of_prompt = (tree.T == tree) & (segment == 0) & (segment.T > 0)
        return (is_own | of_prompt) & (tree >= 0)

    def tensors(self, device: str | torch.device) -> Tensors:
        generator = torch.Generator(device).manual_seed(zlib.crc32(str(self).encode()))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        heads_q, heads_k = self.heads
        columns, rows = self.head_dim_v or self.head_dim, self.rows
        inputs = DATA[self.data](normal(1, rows, heads_q, self.head_dim) * self.logit_std,
                                 normal(1, rows, heads_k, self.head_dim),
                                 normal(1, rows, heads_k, columns), generator)
        dtype = DTYPES[self.dtype]
        q, k, v = (x[0].to(dtype) for x in inputs)
        return Tensors(q, k, v, self.lists(device), normal(rows, heads_q, columns).to(dtype),
                       normal(heads_q, rows).to(reference.lse_dtype(dtype)))

    def options(self) -> dict:
        names = 'softcap', 'softmax_scale', 'pack_gqa', 'deterministic', 'max_seqlen'
        return {name: getattr(self, name) for name in names}


def run(case: TreeCase, tensors: Tensors, function=flash_attn_completions_func,
        **changes) -> Results:
    """Results of the call and gradients; function: that or a compiled one."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out, lse = function(*leaves, *tensors.lists, return_attn_probs=True, **case.options() | changes)
    gradients = torch.autograd.grad((out, lse), leaves, (tensors.dout, tensors.dlse))
    return Results(out.detach(), lse.detach(), *gradients)


def expected(case: TreeCase, tensors: Tensors, dtype: torch.dtype) -> Results:
    """In dtype, by `reference.attend` and its gradients with the whole mask."""
    inputs = Inputs(*(x[None].to(dtype) for x in tensors[:3]))
    score = Score(case.scale, case.softcap, Mask(tree=case.visible(tensors.q.device)))
    out, lse, _ = reference.attend(inputs, score)
    gradients = reference.attend_backward(tensors.dout[None].to(dtype), tensors.dlse[None], inputs,
                                          score)
    return Results(*(x[0] for x in (out, lse, *gradients[:3])))


def check(case: TreeCase, tensors: Tensors, got: Results) -> None:
    """Holds results and gradients to the bar of tests/support/compare.py."""
    ref = expected(case, tensors, torch.float64)
    pt = expected(case, tensors, tensors.q.dtype)
    for name, x, wanted in zip(Results._fields, got, ref):
        assert x.shape == wanted.shape and x.is_contiguous(), name
        assert x.dtype == (reference.lse_dtype(tensors.q.dtype) if name == 'lse' else
                           tensors.q.dtype), name
    compare.check_lse(got.lse, ref.lse)
    inputs = tuple(x[None] for x in tensors[:3])
    floors = compare.cancellation_floors(inputs, tensors.dout[None], case.scale)
    for name in ('out', 'dq', 'dk', 'dv'):
        compare.check_close(*(getattr(x, name) for x in (got, ref, pt)), name,
                            floors.get(name, 0.0))
    blind = ref.lse[0] == -torch.inf    # rows of no segment
    for name in ('out', 'dq', 'dk', 'dv'):
        assert (getattr(got, name)[blind] == 0).all(), f'{name} of rows after the last segment'


def check_case(case: TreeCase, device: str | torch.device) -> None:
    """Runs a case and holds it to the bar; an error says how to repeat it."""
    tensors = case.tensors(device)
    with compare.naming(case):
        check(case, tensors, run(case, tensors))


def check_same(got: Results, wanted: Results) -> None:
    """Bit for bit."""
    for name, *values in zip(Results._fields, got, wanted):
        compare.check_equal(*values, name)
