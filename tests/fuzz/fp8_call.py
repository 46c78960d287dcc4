"""A call of attention on float8_e4m3fn; there are no gradients."""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn3.cpu.reference import Inputs

from tests.fuzz.call import counted, placed
from tests.gpu.fp8_calls import call_of
from tests.support import layouts
from tests.support.cases import DTYPES
from tests.support.general_cases import GeneralCase


@dataclass(frozen=True)
class Fp8Call:
    case: GeneralCase
    granularity: str              # one of benchmarks.fp8_accuracy.BLOCKS, for the scales
    is_rotated: bool
    accumulation: str             # fast or promote
    out_dtype: str
    layouts: tuple[str, ...]      # q, k and v have these, by name; '': contiguous
    out: str = ''                 # the layout of out=, or '' without it

    def check(self, device: str | torch.device) -> None:
        """Runs it and holds output and LSE to the bar of tests/support/fp8_data.py."""
        call = call_of(self.case, torch.device(device), self.granularity, self.is_rotated)
        exact, options = call.inputs, {'fp8_accum': self.accumulation}
        call.inputs = Inputs(*(placed(x, name) for x, name in zip(
            self._poisoned(exact), self.layouts)), exact.s_aux)
        dtype, out, around = DTYPES[self.out_dtype], None, 0
        if self.out:
            shape = (*exact.q.shape[:-1], exact.v.size(-1))
            out = placed(torch.full(shape, math.nan, dtype=dtype, device=exact.q.device), self.out)
            around = layouts.nan_count(out) - out.numel()
            options['out'] = out
        else:
            options['out_dtype'] = dtype
        got, lse = call.run(**options)
        assert got.dtype == dtype
        if out is not None:
            assert got is out, 'out: another tensor was returned'
            assert layouts.nan_count(out) == around, 'out: written outside of it'
        call.inputs = exact
        call.check((got, lse))

    def _poisoned(self, inputs: Inputs) -> list[Tensor]:
        rows = list(inputs[:3])
        if self.case.is_packed:
            of_q, of_k = counted(self.case, inputs.q.device)
            for x, counts in zip(rows, (of_q, of_k, of_k)):
                x.view(torch.uint8)[~counts] = 0x7f    # NaN
        return rows
