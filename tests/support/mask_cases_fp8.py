"""The calls of mask_cases.py on float8_e4m3fn, held to the bar of fp8_data.py, and the same in one
call with the gradients of 16 bits.
"""
from __future__ import annotations

import torch
from torch import Tensor

from flash_attn3 import (flash_attn_fp8_func, flash_attn_func, flash_attn_varlen_fp8_func,
                         flash_attn_varlen_func)
from flash_attn3.cpu.reference import Inputs, Mask, Score

from tests.support import compare
from tests.support.cases import DTYPES
from tests.support.fp8_data import (E4M3, check_fp8, check_fp8_lse, check_gradients, descales,
                                    given_gradients, quantize_all)
from tests.support.lists import lengths_of
from tests.support.mask_cases import Given, Maker, MaskCase, made, sequences


def options_of(case: MaskCase, given: Given) -> dict:
    return dict(mask=given.mask, s_aux=given.s_aux, sm_margin=case.sm_margin,
                return_attn_probs=True)


def run(case: MaskCase, device: str | torch.device, granularity: str = 'block',
        maker: Maker | None = None, **options) -> tuple[tuple[Tensor, Tensor], tuple]:
    """(out, lse), and what the checks take beside them. maker: as for `mask_cases.made`."""
    given = made(case, device, maker)
    tensors, lists = sequences(case, given)
    ends = [lists.get(f'cu_seqlens_{name}') for name in 'qk']
    if case.is_packed:
        function, visible = flash_attn_varlen_func, [one[None] for one in given.visible]
        lengths = lengths_of(*ends, None, None)
    else:
        function, visible, lengths = flash_attn_func, torch.stack(given.visible), None
    values, scales = quantize_all(*tensors, granularity, True, lists=[(x, None) for x in ends])
    results = function(*values, **lists, **descales(scales), **options_of(case, given), **options)
    shown = values[2].float().nan_to_num(nan=0.0).to(E4M3)    # no query sees the others
    score = Score(case.head_dim ** -0.5, 0.0, Mask(visible=visible))
    return results, (Inputs(*values[:2], shown, given.s_aux), scales, score, lengths)


def check_case(case: MaskCase, device: str | torch.device, granularity: str = 'block',
               maker: Maker | None = None) -> None:
    (out, *rows), own = run(case, device, granularity, maker)
    if case.behind:    # rows of no sequence are unspecified
        inputs = Inputs(*(x[:len(x) - case.behind] for x in own[0][:3]), own[0].s_aux)
        out, own = out[:-case.behind], (inputs, *own[1:])
        rows = [x[:, :-case.behind] for x in rows]
    check_fp8(out, *own)
    for name, x in zip(('lse', 'row_max'), rows, strict=False):
        check_fp8_lse(x, *own, name=name)


def check_in_one_call(case: MaskCase, device: str | torch.device, granularity: str = 'block',
                      maker: Maker | None = None) -> None:
    """Quantising on the way gives the bits of the steps."""
    wanted, _ = run(case, device, granularity, maker, out_dtype=DTYPES[case.dtype])
    given = made(case, device, maker)
    tensors, lists = sequences(case, given)
    function = flash_attn_varlen_fp8_func if case.is_packed else flash_attn_fp8_func
    got = function(*tensors, **lists, **options_of(case, given),
                   block_scales=granularity == 'block')
    if case.behind:    # rows of no sequence are unspecified
        got, wanted = ((out[:-case.behind], lse[:, :-case.behind]) for out, lse in (got, wanted))
    for name, one, other in zip(('out', 'lse'), got, wanted):
        compare.check_equal(one, other, name)


def check_straight_through(case: MaskCase, device: str | torch.device, fp8_backward: str) -> None:
    """Gradients beside those of 16 bits with the same mask; on the CPU beside those in float64 with
    the given out and lse.
    """
    given = made(case, device)
    tensors, lists = sequences(case, given)
    functions = ((flash_attn_varlen_fp8_func, flash_attn_varlen_func) if case.is_packed else
                 (flash_attn_fp8_func, flash_attn_func))
    options = options_of(case, given)
    leaves = [x.detach().nan_to_num(nan=0.5).requires_grad_() for x in tensors]
    if given.s_aux is not None:
        leaves.append(given.s_aux.requires_grad_())
    results = [function(*leaves[:3], **lists, **options, **own) for function, own in zip(
        functions, (dict(fp8_backward=fp8_backward), {}))]
    dout = torch.randn(results[0][0].shape, device=device).to(DTYPES[case.dtype])
    got, wide = (torch.autograd.grad(found[0], leaves, dout, retain_graph=True)
                 for found in results)
    assert all(x.isfinite().all() for x in got)
    for one, other in zip(got[:3], wide):    # those of sinks nearly cancel
        distance = (one.float() - other.float()).norm() / other.float().norm()
        assert distance < 0.15, distance
    if fp8_backward == 'given' and not case.is_packed and got[0].device.type == 'cpu':
        score = Score(case.head_dim ** -0.5, 0.0, Mask(visible=torch.stack(given.visible)))
        check_gradients(got, given_gradients(Inputs(*leaves), score, results[0], (dout, 0.0)))
