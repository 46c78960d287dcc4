"""Calls with sequences of several lengths, windows, chunks, softcap and sinks: what they look like,
with their data, and what they return.

A GeneralCase prints itself as the Python that makes it, and seeds itself by that text: a failure is
repeated by `general_oracle.check_case(GeneralCase(...), 'cuda')`.
"""
from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn3 import flash_attn_func, flash_attn_varlen_func
from flash_attn3.cpu.reference import Inputs, Mask, Score

from tests.support.cases import DATA, DTYPES, Kind, NamedByChanges
from tests.support.lists import starts

SINKS = {    # what becomes of N(0, 1), and the dtype
    'fp32': (lambda x: x, torch.float32),
    'bf16': (lambda x: x, torch.bfloat16),
    # As large as the logits of a whole row together, and far beyond: the keys count for nothing.
    'large': (lambda x: 8 + x, torch.float32),
    'huge': (lambda x: 1e4 * (1 + x.abs()), torch.float32),
    # Every second head has none.
    '-inf': (lambda x: x.masked_fill(torch.arange(len(x), device=x.device) % 2 == 0, -math.inf),
             torch.float32),
}


class Results(NamedTuple):
    """Results of a call; None for what it did not ask for."""
    out: Tensor
    lse: Tensor
    max_logits: Tensor | None
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    ds_aux: Tensor | None


class Tensors(NamedTuple):
    """The inputs of a case, and the gradients of out and lse."""
    inputs: Inputs
    dout: Tensor
    dlse: Tensor | None
    lists: dict    # the arguments from cu_seqlens_q to seqused_k; empty without packing


@dataclass(frozen=True)
class GeneralCase(NamedByChanges):
    lengths: tuple[tuple[int, int], ...]    # (seqlen_q, seqlen_k) of each sequence
    head_dim: int = 64
    head_dim_v: int = 0                     # 0: that of q and k
    dtype: str = 'bf16'
    heads: tuple[int, int] = (4, 2)         # query heads, KV heads
    is_packed: bool = True                  # or a batch, of equal lengths
    used: tuple[tuple[int, int], ...] | None = None    # how many rows of each sequence count
    behind: tuple[int, int] = (0, 0)        # rows of q and k after the last sequence
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0
    softcap: float = 0.0
    sinks: str = ''                         # a name in SINKS; '': none
    max_logits: bool = False
    softmax_scale: float | None = None
    pack_gqa: bool | None = None
    deterministic: bool = False
    data: str = 'normal'                    # a name in cases.DATA
    logit_std: float = 1.0                  # standard deviation of the scaled scores
    dlse: bool = True                       # whether a gradient comes back to the LSE
    lse: bool = True                        # whether the LSE is asked for
    gradients: bool = True                  # and gradients

    @property
    def seed(self) -> int:
        return zlib.crc32(str(self).encode())

    @property
    def columns_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def has_gradients(self) -> bool:
        return self.gradients

    @property
    def score(self) -> Score:
        """The mask and scores of the case in the types of reference.py."""
        mask = Mask(self.causal, self.window, self.chunk)
        return Score(self.softmax_scale or self.head_dim ** -0.5, self.softcap, mask)

    def of(self, kind: Kind, **changes) -> GeneralCase:
        """This case for a kind of kernel."""
        return dataclasses.replace(self, dtype=kind.dtype, head_dim=kind.head_dim,
                                   causal=kind.causal, **changes)

    def rows(self) -> tuple[int, int]:
        """Rows of q and k as packed tensors."""
        return tuple(sum(one[i] for one in self.lengths) + self.behind[i] for i in (0, 1))

    def sequences(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """For each sequence the first rows in q and k, and how many count."""
        firsts = [[0, *itertools.accumulate(one[i] for one in self.lengths)] for i in (0, 1)]
        return list(zip(zip(*firsts), self.used or self.lengths))

    def tensors(self, device: str | torch.device) -> Tensors:
        generator = torch.Generator(device).manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        heads_q, heads_k = self.heads
        rows_q, rows_k = self.rows()
        q, k = normal(1, rows_q, heads_q, self.head_dim), normal(1, rows_k, heads_k, self.head_dim)
        v = normal(1, rows_k, heads_k, self.columns_v)
        q, k, v = DATA[self.data](q * self.logit_std, k, v, generator)
        dout, dlse = normal(1, rows_q, heads_q, self.columns_v), normal(1, rows_q, heads_q)
        wide = DTYPES[self.dtype]
        rows = [self._batched(x) for x in (*(x.to(wide) for x in (q, k, v, dout)), dlse)]
        s_aux = None
        if self.sinks:
            change, dtype = SINKS[self.sinks]
            s_aux = change(normal(heads_q)).to(dtype)
        return Tensors(Inputs(*rows[:3], s_aux), rows[3],
                       rows[4].transpose(-1, -2).contiguous()
                       if self.dlse and self.lse else None,
                       self.lists(device))

    def _batched(self, rows: Tensor) -> Tensor:
        if self.is_packed:
            return rows[0]
        batch = len(self.lengths)
        return rows[0].unflatten(0, (batch, rows.size(1) // batch))

    def lists(self, device: str | torch.device) -> dict:
        if not self.is_packed:
            return {}
        lists = {}
        for i, name in enumerate('qk'):
            lengths = [one[i] for one in self.lengths]
            lists[f'cu_seqlens_{name}'] = starts(lengths, device)
            lists[f'max_seqlen_{name}'] = max(lengths, default=0)
            if self.used is not None:
                used = [one[i] for one in self.used]
                lists[f'seqused_{name}'] = torch.tensor(used, dtype=torch.int32, device=device)
        return lists

    def options(self) -> dict:
        """The keyword arguments of both functions."""
        return {'softmax_scale': self.softmax_scale, 'causal': self.causal,
                'window_size': self.window, 'attention_chunk': self.chunk, 'softcap': self.softcap,
                'pack_gqa': self.pack_gqa, 'deterministic': self.deterministic,
                'return_attn_probs': self.lse, 'return_max_logits': self.max_logits}


def forward(case: GeneralCase, tensors: Tensors, **changes) -> tuple[Tensor, ...]:
    """(out, lse), and max_logits if the case asks for it; changes: to the arguments of the call."""
    function = flash_attn_varlen_func if case.is_packed else flash_attn_func
    return function(*tensors.inputs[:3], **tensors.lists | case.options()
                    | {'s_aux': tensors.inputs.s_aux} | changes)


def named(case: GeneralCase,
          returned: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(out, lse, max_logits) of what a function returned; None for what was not asked for."""
    out, *others = returned if isinstance(returned, tuple) else (returned,)
    assert len(others) == case.lse + case.max_logits
    lse = others.pop(0) if case.lse else None
    return out, lse, others[0] if others else None


def run(case: GeneralCase, tensors: Tensors, **changes) -> Results:
    """Results of the call and, where there are any, gradients."""
    if not case.has_gradients:
        return Results(*named(case, forward(case, tensors, **changes)), *[None] * 4)
    leaves = Inputs(*(None if x is None else x.detach().requires_grad_() for x in tensors.inputs))
    returned = named(case, forward(case, tensors._replace(inputs=leaves), **changes))
    wanted = [x for x in leaves if x is not None]
    gradients = gradients_of(returned, wanted, tensors)
    return Results(*(x if x is None else x.detach() for x in returned),
                   *gradients, *[None] * (4 - len(gradients)))


def gradients_of(returned: tuple[Tensor, Tensor | None, Tensor | None], wanted: list[Tensor],
                 tensors: Tensors) -> tuple[Tensor, ...]:
    """Results of what named() gave, by the gradients in tensors."""
    out, lse, max_logits = returned
    assert max_logits is None or not max_logits.requires_grad
    if lse is None or tensors.dlse is None:
        return torch.autograd.grad(out, wanted, tensors.dout)
    return torch.autograd.grad((out, lse), wanted, (tensors.dout, tensors.dlse))
