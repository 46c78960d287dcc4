"""Data and yardsticks of the FP8 tests and of benchmarks/fp8_accuracy.py.

`check_fp8` is the bar: max |out - ref| <= 4 max |emulation - ref| and mean <= 3 mean, both plus
what rounding to the output's dtype costs; ref: the values of the e4m3 inputs in float64, emulation:
`reference_fp8.emulate` of the same inputs, rounded.
"""
from __future__ import annotations

import torch
from torch import Tensor

from flash_attn3 import quantize_fp8, reference, reference_fp8
from flash_attn3.reference import Inputs, Lengths, Score
from flash_attn3.reference_fp8 import Scales

from tests import compare

E4M3 = torch.float8_e4m3fn
# By name: block of q, of k and v, as `quantize_fp8` takes them.
GRANULARITIES = {'tensor': ('tensor', 'tensor'), 'head': ('head', 'head'), 'block': (64, 32)}


def outliers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """N(0, 1) + N(0, 100) in one value of 1000, float32 (arXiv 2407.08608, section 4.3)."""
    device = generator.device
    normal, large = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
    return normal + 10 * large * (torch.rand(shape, generator=generator, device=device) < 0.001)


def quantize_all(q: Tensor, k: Tensor, v: Tensor, granularity: str, is_rotated: bool,
                 seed: int = 0, lists: tuple = ((None, None), (None, None)),
                 ) -> tuple[tuple[Tensor, Tensor, Tensor], Scales]:
    """e4m3 of all three, and their scales. lists: cu_seqlens and seqused of q, of k and v."""
    block_q, block_kv = GRANULARITIES[granularity]
    of_q, of_k = (dict(zip(('cu_seqlens', 'seqused'), one)) for one in lists)
    rotation = {'rotate': is_rotated, 'seed': seed}
    group = q.size(-2) // k.size(-2)
    values, scales = zip(quantize_fp8(q, block=block_q, group=group, **rotation, **of_q),
                         quantize_fp8(k, block=block_kv, **rotation, **of_k),
                         quantize_fp8(v, block=block_kv, **of_k))
    return values, Scales(*scales)


def descales(scales: Scales) -> dict[str, Tensor | None]:
    return dict(zip(('q_descale', 'k_descale', 'v_descale'), scales))


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


def rmse(out: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> float:
    """Of out beside attention of q, k and v in float64."""
    ref, _ = reference.forward(q.double(), k.double(), v.double(), q.size(-1) ** -0.5, causal)
    return (out.double() - ref).square().mean().sqrt().item()
