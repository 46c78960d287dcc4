"""Calls of attention on float8_e4m3fn: made of a case, run, and held to the bar of
tests/support/fp8_data.py.
"""
from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from flash_attn3 import flash_attn_func, flash_attn_varlen_func
from flash_attn3.cpu.reference import Inputs, Lengths
from flash_attn3.cpu.reference_fp8 import Scales

from tests.support import compare
from tests.support.fp8_data import check_fp8, check_fp8_lse, descales, quantize_all
from tests.support.general_cases import GeneralCase
from tests.support.lists import lengths_of


@dataclasses.dataclass
class Call:
    """A case as the functions take it."""
    case: GeneralCase
    inputs: Inputs      # all e4m3
    scales: Scales
    lists: dict

    def run(self, **changes) -> tuple[Tensor, ...]:
        """(out, lse), and max_logits if the case asks for it."""
        function = flash_attn_varlen_func if self.case.is_packed else flash_attn_func
        options = self.case.options() | descales(self.scales) | changes
        return function(*self.inputs[:3], **self.lists, **options, s_aux=self.inputs.s_aux)

    @property
    def lengths(self) -> Lengths | None:
        names = 'cu_seqlens_q', 'cu_seqlens_k', 'seqused_q', 'seqused_k'
        return lengths_of(*map(self.lists.get, names)) if self.lists else None

    def check(self, results: tuple[Tensor, ...]) -> None:
        own = self.inputs, self.scales, self.case.score, self.lengths
        check_fp8(results[0], *own)
        for name, rows in zip(('lse', 'row_max'), results[1:], strict=False):
            check_fp8_lse(rows, *own, name=name)


def plain_call_of(case: GeneralCase, device: torch.device, granularity: str,
                  is_rotated: bool = True) -> Call:
    q, k, v, s_aux = (tensors := case.tensors(device)).inputs
    lists = tensors.lists
    pairs = tuple((lists.get(f'cu_seqlens_{name}'), lists.get(f'seqused_{name}')) for name in 'qk')
    values, scales = quantize_all(q, k, v, granularity, is_rotated, lists=pairs)
    return Call(case, Inputs(*values, s_aux), scales, lists)


def call_of(case: GeneralCase, device: torch.device, granularity: str = 'block',
            is_rotated: bool = True) -> Call:
    """With blocks of k and v that differ more than those of the data: by a factor of up to 2."""
    call = plain_call_of(case, device, granularity, is_rotated)
    if granularity == 'block':
        generator = torch.Generator(device).manual_seed(case.seed)
        factors = {name: 0.5 + 0.5 * torch.rand(getattr(call.scales, name).shape,
                                                generator=generator, device=device)
                   for name in 'kv'}
        call.scales = call.scales._replace(**{
            name: getattr(call.scales, name) * factor for name, factor in factors.items()})
    return call


def check_case(case: GeneralCase, device: torch.device, granularity: str = 'block',
               is_rotated: bool = True, **changes) -> None:
    call = call_of(case, device, granularity, is_rotated)
    call.check(call.run(**changes))


def check_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Bit for bit."""
    for name, one, other in zip(('out', 'lse'), got, expected, strict=True):
        compare.check_equal(one, other, name)
