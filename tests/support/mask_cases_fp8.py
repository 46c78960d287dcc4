"""The calls of mask_cases.py on float8_e4m3fn, held to the bar of fp8_data.py."""
from __future__ import annotations

import torch
from torch import Tensor

from flash_attn3 import flash_attn_func, flash_attn_varlen_func
from flash_attn3.cpu.reference import Inputs, Mask, Score

from tests.support.fp8_data import E4M3, check_fp8, check_fp8_lse, descales, quantize_all
from tests.support.lists import lengths_of, starts
from tests.support.mask_cases import Maker, MaskCase, made


def run(case: MaskCase, device: str | torch.device, granularity: str = 'block',
        maker: Maker | None = None) -> tuple[tuple[Tensor, Tensor], tuple]:
    """(out, lse), and what the checks take beside them. maker: as for `mask_cases.made`."""
    given = made(case, device, maker)
    batch, function, lists, lengths = len(case.lengths), flash_attn_func, {}, None
    tensors = given[:3]
    if case.is_packed:
        function, visible = flash_attn_varlen_func, [one[None] for one in given.visible]
        ends = [[one[i] for one in case.lengths] for i in range(2)]
        lists = {f'cu_seqlens_{name}': starts(own, device) for name, own in zip('qk', ends)}
        lengths = lengths_of(*lists.values(), None, None)
        pairs = tuple((one, None) for one in lists.values())
        lists |= {f'max_seqlen_{name}': max(own) for name, own in zip('qk', ends)}
    else:
        tensors, visible = ([x.unflatten(0, (batch, len(x) // batch)) for x in tensors],
                            torch.stack(given.visible))
        pairs = ((None, None),) * 2
    values, scales = quantize_all(*tensors, granularity, True, lists=pairs)
    results = function(*values, **lists, **descales(scales), mask=given.mask, s_aux=given.s_aux,
                       sm_margin=case.sm_margin, return_attn_probs=True)
    shown = values[2].float().nan_to_num(nan=0.0).to(E4M3)    # no query sees the others
    score = Score(case.head_dim ** -0.5, 0.0, Mask(visible=visible))
    return results, (Inputs(*values[:2], shown, given.s_aux), scales, score, lengths)


def check_case(case: MaskCase, device: str | torch.device, granularity: str = 'block',
               maker: Maker | None = None) -> None:
    (out, lse), own = run(case, device, granularity, maker)
    if case.behind:    # rows of no sequence are unspecified
        inputs = Inputs(*(x[:len(x) - case.behind] for x in own[0][:3]), own[0].s_aux)
        out, lse, own = out[:-case.behind], lse[:, :-case.behind], (inputs, *own[1:])
    check_fp8(out, *own)
    check_fp8_lse(lse, *own)
