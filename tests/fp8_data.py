"""Quantised inputs of the FP8 tests, and the bar of their results.

`check_fp8` is the bar: max |out - ref| <= 4 max |emulation - ref| and mean <= 3 mean, both plus
what rounding to the output's dtype costs; ref: the values of the e4m3 inputs in float64, emulation:
`reference_fp8.emulate` of the same inputs, rounded.

`check_fp8_lse` allows what the sums of e4m3 products lose on Hopper, whose tensor cores keep about
13 bits behind the first of the largest addend: a score is wrong by up to 2^-11 of |q| |k|, and so
is an LSE.
"""
from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.fp8_accuracy import BLOCKS
from flash_attn3 import quantize_fp8, reference_fp8
from flash_attn3.reference import Inputs, Lengths, Score
from flash_attn3.reference_fp8 import Scales

from tests import compare

E4M3 = torch.float8_e4m3fn


def quantize_all(q: Tensor, k: Tensor, v: Tensor, granularity: str, is_rotated: bool,
                 seed: int = 0, lists: tuple = ((None, None), (None, None)),
                 ) -> tuple[tuple[Tensor, Tensor, Tensor], Scales]:
    """e4m3 of all three, and their scales. lists: cu_seqlens and seqused of q, of k and v."""
    block_q, block_kv = BLOCKS[granularity]
    of_q, of_k = (dict(zip(('cu_seqlens', 'seqused'), one)) for one in lists)
    rotation = {'rotate': is_rotated, 'seed': seed}
    group = q.size(-2) // k.size(-2)
    values, scales = zip(quantize_fp8(q, block=block_q, group=group, **rotation, **of_q),
                         quantize_fp8(k, block=block_kv, **rotation, **of_k),
                         quantize_fp8(v, block=block_kv, **of_k))
    return values, Scales(*scales)


def descales(scales: Scales) -> dict[str, Tensor | None]:
    return dict(zip(('q_descale', 'k_descale', 'v_descale'), scales))


def check_fp8_lse(lse: Tensor, inputs: Inputs, scales: Scales, score: Score,
                  lengths: Lengths | None = None) -> None:
    """|lse - ref| <= 2^-11 scale max |q| max |k| + 1e-5 max(1, |ref|) + 1e-4; -inf exactly
    where ref has it.
    """
    ref = reference_fp8.attend(inputs, scales, score, lengths).lse
    compare.check_nonfinite(lse, ref, 'lse')
    if not ref.numel():
        return
    q, k, _, _ = reference_fp8.dequantize(inputs, scales, lengths, torch.float64)
    longest_q, longest_k = (x.norm(dim=-1).nan_to_num(nan=0.0).flatten() for x in (q, k))
    most = longest_q.max() * (longest_k.max() if longest_k.numel() else 0.0)
    limit = 2.0 ** -11 * score.scale * most + 1e-5 * ref.abs().clamp_min(1) + 1e-4
    error = (lse.double() - ref).abs().nan_to_num(nan=0.0, posinf=0.0)
    bad = ref.isfinite() & (error > limit)
    assert not bad.any(), f'lse: max error {error.max():.3e}, {bad.sum()} of {bad.numel()} too far'


def check_fp8(out: Tensor, inputs: Inputs, scales: Scales, score: Score,
              lengths: Lengths | None = None) -> None:
    """Holds an output of e4m3 attention to the bar."""
    ref = reference_fp8.attend(inputs, scales, score, lengths).out
    emulation = reference_fp8.emulate(inputs, scales, score, lengths).to(out.dtype)
    compare.check_nonfinite(out, ref, 'out')
    assert out.shape == ref.shape
    if not ref.numel():
        return
    error, own, rounding = ((x.double() - ref).abs().nan_to_num(nan=0.0, posinf=0.0)
                            for x in (out, emulation, ref.to(out.dtype)))
    for name, factor, measure in (('max', 4, torch.max), ('mean', 3, torch.mean)):
        limit = factor * measure(own) + measure(rounding)
        assert measure(error) <= limit, (
            f'out: {name} error {measure(error):.3e} > {limit:.3e} = {factor} x '
            f'{measure(own):.3e} (emulation) + {measure(rounding):.3e}')
