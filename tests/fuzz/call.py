"""A call of the 16-bit functions: how its tensors lie in memory, its result and gradients."""
from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn3 import flash_attn_qkvpacked_func
from flash_attn3.cpu.reference import Inputs

from tests.support import general_cases, general_oracle, layouts
from tests.support.general_cases import GeneralCase, Results, Tensors

LAYOUTS = {str(one): one for one in layouts.DIRECT + layouts.COPIED}


def counted(case: GeneralCase, device: torch.device) -> tuple[Tensor, Tensor]:
    """Whether rows of q and of k, packed, count."""
    masks = tuple(torch.zeros(rows, dtype=torch.bool, device=device) for rows in case.rows())
    for first, count in case.sequences():
        for mask, begin, rows in zip(masks, first, count):
            mask[begin:begin + rows] = True
    return masks


def poisoned(x: Tensor, counts: Tensor, rows_dim: int = 0) -> Tensor:
    """NaN in the rows that do not count."""
    shape = [1] * x.dim()
    shape[rows_dim] = -1
    return torch.where(counts.view(shape), x, torch.full_like(x, math.nan))


def placed(x: Tensor, name: str) -> Tensor:
    """x in a layout of its own; packed sequences lie as a batch of one."""
    if not name:
        return x
    if x.dim() == 3:
        return LAYOUTS[name].place(x[None])[0]
    return LAYOUTS[name].place(x)


def interleaved(tensors: list[Tensor], name: str) -> list[Tensor]:
    """Tensors of one shape, each head of one next to the same head of the others."""
    joint = torch.stack(tensors, -2)
    return list(placed(joint.flatten(-3, -2), name).unflatten(-2, joint.shape[-3:-1]).unbind(-2))


@dataclass(frozen=True)
class Call:
    case: GeneralCase
    function: str                 # dense, varlen or qkvpacked
    layouts: tuple[str, ...]      # q, k and v have these, by name; '': contiguous
    interleaved: str = ''         # which of them lie in one tensor: kv, qkv or none
    out: str = ''                 # the layout of out=, 'packed', or '' without it
    sm_margin: int = 0

    def check(self, device: str | torch.device) -> None:
        """Runs it and holds everything that it returns to the bar."""
        tensors = self.case.tensors(device)
        called = self._poisoned(tensors)
        out = self._out(tensors)
        options = {'sm_margin': self.sm_margin, **({} if out is None else {'out': out})}
        around = 0 if out is None else layouts.nan_count(out) - out.numel()
        if self.function == 'qkvpacked':
            got = self._run_qkvpacked(called, options)
        else:
            got = general_cases.run(self.case, called._replace(inputs=self._placed(called.inputs)),
                                    **options)
        if out is not None:
            assert got.out is out, 'out: another tensor was returned'
            assert layouts.nan_count(out) == around, 'out: written outside of it'
        general_oracle.check(self.case, tensors, got)

    def _poisoned(self, tensors: Tensors) -> Tensors:
        if not self.case.is_packed:
            return tensors
        of_q, of_k = counted(self.case, tensors.dout.device)
        q, k, v, s_aux = tensors.inputs
        inputs = Inputs(poisoned(q, of_q), poisoned(k, of_k), poisoned(v, of_k), s_aux)
        dlse = tensors.dlse
        return tensors._replace(inputs=inputs, dout=poisoned(tensors.dout, of_q),
                                dlse=None if dlse is None else poisoned(dlse, of_q, 1))

    def _placed(self, inputs: Inputs) -> Inputs:
        rows = list(inputs[:3])
        first = {'qkv': 0, 'kv': 1}.get(self.interleaved, 3)
        rows = [placed(x, name) for x, name in zip(rows[:first], self.layouts)] + (
            interleaved(rows[first:], self.layouts[-1]) if first < 3 else [])
        return Inputs(*rows, inputs.s_aux)

    def _out(self, tensors: Tensors) -> Tensor | None:
        if not self.out:
            return None
        empty = torch.full_like(tensors.dout, math.nan)
        name = '' if self.out == 'packed' else self.out
        if name:
            return placed(empty, name)
        return layouts.Layout('plain').place(empty if empty.dim() == 4 else empty[None]).view(
            empty.shape)

    def _run_qkvpacked(self, tensors: Tensors, options: dict) -> Results:
        """Heads of q, k and v behind each other, or three where there are as many of each."""
        q, k, v, s_aux = tensors.inputs
        heads = [x.size(2) for x in (q, k, v)]
        qkv = placed(torch.cat([q, k, v], 2), self.layouts[0])
        is_5d = heads[0] == heads[1] and self.layouts[1] == ''
        options = self.case.options() | options | {'num_heads_q': None if is_5d else heads[0]}
        leaves = [x.detach().requires_grad_(self.case.has_gradients)
                  for x in (qkv.unflatten(2, (3, heads[0])) if is_5d else qkv, s_aux)
                  if x is not None]
        returned = general_cases.named(self.case, flash_attn_qkvpacked_func(
            leaves[0], s_aux=leaves[1] if len(leaves) > 1 else None, **options))
        if not self.case.has_gradients:
            return Results(*returned, *[None] * 4)
        dqkv, *ds_aux = general_cases.gradients_of(returned, leaves, tensors)
        assert dqkv.shape == leaves[0].shape
        gradients = (dqkv.flatten(2, 3) if is_5d else dqkv).split(heads, 2)
        return Results(*(x if x is None else x.detach() for x in returned), *gradients,
                       *ds_aux or [None])

    def __str__(self) -> str:
        changed = [f'{field.name}={getattr(self, field.name)!r}'
                   for field in dataclasses.fields(self)[1:]]
        return f'Call({self.case}, {", ".join(changed)})'
