"""Quantised inputs of the FP8 tests, and the bar of their results.

`check_fp8` is the bar: max |out - ref| <= 4 max |emulation - ref| and mean <= 3 mean, both plus
what rounding to the output's dtype costs; ref: the values of the e4m3 inputs in float64, emulation:
`fp8_rounding.emulate` of the same inputs, rounded.

The emulation does not cut sums off as the tensor cores do, in S too. So the largest error has no
proof: with 933 keys of outliers and scales per head one of 2400 rows was wrong by 0.19 where the
bar had 0.13, with the same bits in two builds of the kernel. The tests' data keep to it.

`check_fp8_lse` allows what the sums of e4m3 products lose on Hopper. A k-step of the tensor cores
adds 32 products and the running sum, all cut off 13 bits after the first bit of the largest of
them, M: each loses less than 2^-13 M. With q_t and k_t the 32 columns of step t, of n steps:
- The products of step t are at most |q_t| |k_t|, and the sums before and after it at most the sum
  of these up to t, as cutting off makes nothing larger. So is M, for all 33 addends.
- Summed over the steps, |q_t| |k_t| counts n - t times, t from 0 on: a score is wrong by less than
  33 * 2^-13 sum_t (n - t) |q_t| |k_t|. 34 for 33: steps of zeros, to which a kernel fills up the
  head dim, cut the sum off once more.
- By Cauchy-Schwarz that sum is at most |q|' |k|', of the squared norms sum_t (n - t) |x_t|^2. An
  LSE is wrong by no more than the worst of its scores. (A sum of a step's products alone is not
  enough: after a large first step, all addends of the later ones are cut off by its size.)
That is a bound for a row whose errors all have one sign. Most cancel: the mean over the rows has
one by experience, 2^-11 of |q| |k|, which is what finds wrong kernels.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.fp8_accuracy import BLOCKS
from flash_attn3 import quantize_fp8
from flash_attn3.cpu import reference_fp8
from flash_attn3.cpu.reference import Inputs, Lengths, Score
from flash_attn3.cpu.reference_fp8 import Scales

from tests.support import compare
from tests.support.fp8_rounding import emulate

E4M3 = torch.float8_e4m3fn
STEP_COLUMNS = 32    # in a k-step of e4m3


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
                  lengths: Lengths | None = None, name: str = 'lse') -> None:
    """name: 'lse' or 'row_max', the largest score. Each row: |lse - ref| <= 34 * 2^-13 scale |q|'
    max |k|' + r, where |x|' are the norms above and r is 1e-5 max(1, |ref|) + 1e-4; of the mean
    over the rows 2^-11 scale mean |q| max |k| + mean r; -inf exactly where ref has it.
    """
    ref = getattr(reference_fp8.attend(inputs, scales, score, lengths, with_row_max=True), name)
    compare.check_nonfinite(lse, ref, name)
    counts = ref.isfinite()
    if not counts.any():
        return
    q, k, _, _ = reference_fp8.dequantize(inputs, scales, lengths, torch.float64)
    column = torch.arange(q.size(-1), device=q.device)
    steps_from = -(-q.size(-1) // STEP_COLUMNS) - column // STEP_COLUMNS
    rounding = 1e-5 * ref.abs().clamp_min(1) + 1e-4
    of_rows = 34 * 2.0 ** -13 * score.scale * _longest_products(q, k, steps_from) + rounding
    of_mean = 2.0 ** -11 * score.scale * _longest_products(q, k, torch.ones_like(column)) + rounding
    error = (lse.double() - ref).abs()[counts]
    bad = error > of_rows[counts]
    assert not bad.any(), (f'{name}: max error {error.max():.3e}, {bad.sum()} of {bad.numel()} '
                           'too far')
    most = of_mean[counts].mean()
    assert error.mean() <= most, f'{name}: mean error {error.mean():.3e} > {most:.3e}'


def _longest_products(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """|q| max |k| of every row, shaped like its LSE; |x|^2 is the sum of x^2 weights. Rows that are
    not finite are 0.
    """
    of_q, of_k = ((x * x * weights).sum(-1).sqrt().nan_to_num(0.0, 0.0) for x in (q, k))
    # Norms of a KV head; there may be no keys.
    longest = torch.nn.functional.pad(of_k, (0, 0, 0, 1)).amax(-2, keepdim=True)
    return (of_q * longest.repeat_interleave(q.size(-2) // k.size(-2), -1)).transpose(-1, -2)


def check_fp8(out: Tensor, inputs: Inputs, scales: Scales, score: Score,
              lengths: Lengths | None = None) -> None:
    """Holds an output of e4m3 attention to the bar."""
    ref = reference_fp8.attend(inputs, scales, score, lengths).out
    emulation = emulate(inputs, scales, score, lengths).to(out.dtype)
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


def given_gradients(inputs: Inputs, score: Score, results: tuple[Tensor, Tensor],
                    weights: tuple[Tensor, Tensor | float]) -> tuple[Tensor, ...]:
    """Those of the inputs, in float64, with P = exp(S - lse) and delta = rowsum(dO * out), by
    PyTorch's autograd from sum P * (dO V^T - delta + dLSE), in which only S and V are variables.

    results: out and lse, of rounded inputs. weights: dO and dLSE.
    """
    leaves = [x.detach().double().requires_grad_() for x in inputs if x is not None]
    wide = Inputs(*leaves)
    logits, _ = score.logits(wide.q, wide.k)                        # (b, h_k, group, sq, sk)
    heads = logits.shape[1:3]
    out, lse, dout, dlse = (torch.as_tensor(x).detach().double() for x in (*results, *weights))
    shift = (dlse - (dout * out).sum(-1).mT).unflatten(1, heads).unsqueeze(-1)
    lse = lse.masked_fill(lse == -math.inf, math.inf).unflatten(1, heads).unsqueeze(-1)
    of_keys = torch.einsum('bqhgd,bkhd->bhgqk', dout.unflatten(2, heads), wide.v) + shift
    total = ((logits - lse).exp() * of_keys).sum()
    if wide.s_aux is not None:
        sinks = wide.s_aux.unflatten(0, heads)[..., None, None]
        total = total + ((sinks - lse).exp() * shift).sum()
    return torch.autograd.grad(total, leaves)


def check_gradients(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Computed in float32, and rounded once."""
    for one, other in zip(got, wanted, strict=True):
        roundoff = torch.finfo(one.dtype).eps / 2
        torch.testing.assert_close(one.double(), other, rtol=roundoff + 1e-5,
                                   atol=1e-4 * other.abs().max().item())
