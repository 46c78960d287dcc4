"""The numeric bar of all tests: errors measured against PyTorch's own in the same dtype.

    max |out - ref| <= 2 max |pt - ref| + floor      mean |out - ref| <= 1.5 mean |pt - ref| + floor

ref: the same inputs in float64; pt: plain PyTorch in the input's dtype; floor: what rounding ref to
that dtype costs, and in gradients what is left in float32 where two sums cancel. NaN and infinities
must be at the same places. The LSE is held to an absolute bound. Nothing here depends on the shape
or the data of a case.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flash_attn3 import flash_attn_func

from tests.support import plain
from tests.support.cases import Case


@contextmanager
def naming(case: object) -> Iterator[None]:
    """An error in it says which case failed, and so how to repeat it."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f'{case}: {error}') from error


def expected_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool,
                     softmax_scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(ref, lse, pt): output and LSE in float64, output of plain PyTorch in the input dtype."""
    scale = q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale
    ref, lse = plain.forward(q.double(), k.double(), v.double(), scale, causal)
    pt, _ = plain.forward(q, k, v, scale, causal)
    return ref, lse, pt


def check_case(case: Case, device: str | torch.device) -> None:
    """Runs a case and holds output and LSE to the bar."""
    q, k, v = case.tensors(device)
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True, **case.arguments())
    check_forward(out, lse, (q, k, v), case.causal)


def check_forward(out: Tensor, lse: Tensor | None, inputs: tuple[Tensor, Tensor, Tensor],
                  causal: bool, softmax_scale: float | None = None) -> None:
    """Holds a result of flash_attn_func(*inputs) to the bar."""
    ref, ref_lse, pt = expected_forward(*inputs, causal, softmax_scale)
    assert out.shape == ref.shape and out.dtype == inputs[0].dtype
    check_close(out, ref, pt, 'out')
    if lse is not None:
        assert lse.shape == ref_lse.shape
        check_lse(lse, ref_lse)


# Half a unit in the last place, relative; and half of the smallest subnormal, absolute.
_ROUNDOFF = {torch.float16: (2 ** -11, 2 ** -25), torch.bfloat16: (2 ** -8, 2 ** -134)}


def check_rounding_bound(case: Case, device: str | torch.device) -> None:
    """Holds a case to the error that rounding P and the output once can have.

    With scores and sums in float32, |out - ref| <= 2 u sum_j p_j |v_j| for roundoff u, plus what is
    lost where P is subnormal. 3 u leaves room for the float32 arithmetic. For sharp rows this is
    far below the error of plain PyTorch, which rounds the scores too.
    """
    q, k, v = (x.double() for x in case.tensors(device))
    out = flash_attn_func(*case.tensors(device), **case.arguments())
    ref, _ = plain.forward(q, k, v, case.softmax_scale, case.causal)
    weighted, _ = plain.forward(q, k, v.abs(), case.softmax_scale, case.causal)
    roundoff, subnormal = _ROUNDOFF[out.dtype]
    limit = 3 * roundoff * weighted + 2 * subnormal * case.seqlen_k * v.abs().max()
    bad = (out.double() - ref).abs() > limit
    assert not bad.any(), f'out: beyond the rounding bound; {_first(bad, out, ref)}'


def cancellation_floors(inputs: tuple[Tensor, Tensor, Tensor], dout: Tensor,
                        softmax_scale: float) -> dict[str, float]:
    """The rounding error of float32 in a gradient that is exactly zero.

    dS = P (dP - delta) is the difference of two float32 sums of head_dim products, which plain
    PyTorch takes of the same rounded values: for a single key it finds zero. Each sum is known to
    2^-23 of its products' magnitude, at most |dO| |V| by Cauchy-Schwarz. Over the queries of dK
    the errors add up as random ones do.
    """
    q, k, v = (x.double() for x in inputs)
    norms = [x.norm(dim=-1).max().item() if x.numel() else 0.0 for x in (dout.double(), v)]
    noise = 2 ** -22 * softmax_scale * norms[0] * norms[1]
    queries = q.size(1) * q.size(2) // max(1, k.size(2))
    largest = [x.abs().max().item() if x.numel() else 0.0 for x in (k, q)]
    return {'dq': noise * largest[0], 'dk': noise * largest[1] * queries ** 0.5, 'dv': 0.0}


def sink_floor(out: Tensor, lse: Tensor, dout: Tensor, sinks: Tensor, dtype: torch.dtype) -> float:
    """What rounding the output once leaves of the gradients of the sinks: a few numbers, whose
    errors may all be small in plain PyTorch by luck.

    Such a gradient is the sum of -P dO.O over all rows, where O was rounded to dtype: by up to
    u |O| in each column, of which a half is typical. Over columns and rows the errors add up as
    random ones do.

    Args:
        out, dout: (rows, heads, head_dim_v). lse: (heads, rows). Exact ones in float64.
    """
    p = (sinks.double()[:, None] - lse).exp().nan_to_num(nan=0.0)
    errors = p * (out * dout.double()).norm(dim=-1).T
    return 2 * _ROUNDOFF[dtype][0] * errors.norm(dim=1).max().item() if errors.numel() else 0.0


def check_close(got: Tensor, ref: Tensor, pt: Tensor, name: str, floor: float = 0.0) -> None:
    """Holds `got` to twice the largest and 1.5 times the mean error of `pt`, plus the floor: that
    of rounding, and one from elsewhere.
    """
    check_nonfinite(got, ref, name)
    if ref.numel() == 0:
        return
    error, pt_error, rounding = (_error(x, ref) for x in (got, pt, ref.to(got.dtype)))
    limit = 2 * pt_error.max() + rounding.max() + floor
    bad = error > limit
    assert not bad.any(), (
        f'{name}: max error {error.max():.3e} > {limit:.3e} = 2 x {pt_error.max():.3e} (PyTorch) '
        f'+ {rounding.max():.3e}; {_first(bad, got, ref)}')
    mean_limit = 1.5 * pt_error.mean() + rounding.mean() + floor
    assert error.mean() <= mean_limit, (
        f'{name}: mean error {error.mean():.3e} > {mean_limit:.3e} = 1.5 x {pt_error.mean():.3e} '
        f'(PyTorch) + {rounding.mean():.3e}; {_first(error == error.max(), got, ref)}')


def check_lse(got: Tensor, ref: Tensor, name: str = 'lse') -> None:
    """|got - ref| <= 1e-5 max(1, |ref|) + 1e-4; -inf and NaN exactly where ref has them.

    Also for what is made of the same scores: the largest of them.
    """
    check_nonfinite(got, ref, name)
    bad = ref.isfinite() & ((got.double() - ref).abs() > 1e-5 * ref.abs().clamp_min(1) + 1e-4)
    assert not bad.any(), f'{name}: {_first(bad, got, ref)}'


def check_nonfinite(got: Tensor, ref: Tensor, name: str) -> None:
    """NaN, inf and -inf at the same places."""
    for kind, where in (('NaN', torch.isnan), ('inf', torch.isposinf), ('-inf', torch.isneginf)):
        bad = where(got) != where(ref)
        assert not bad.any(), f'{name}: {kind} at other places; {_first(bad, got, ref)}'


def check_equal(got: Tensor, expected: Tensor, name: str) -> None:
    """Checks that two tensors have the same bits, NaN included."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    bad = got.contiguous().view(as_int) != expected.contiguous().view(as_int)
    assert not bad.any(), f'{name}: bits differ; {_first(bad, got, expected)}'


def _error(x: Tensor, ref: Tensor) -> Tensor:
    """|x - ref| in float64; 0 where either is not finite (check_nonfinite compares those)."""
    return (x.double() - ref).abs().nan_to_num(nan=0.0, posinf=0.0)


def _first(bad: Tensor, got: Tensor, ref: Tensor) -> str:
    """How many elements are bad, and the first of them."""
    where = tuple(bad.nonzero()[0].tolist())
    return (f'{bad.sum()} of {bad.numel()} elements, first at {where}: '
            f'got {got[where].item():.6g}, expected {ref[where].item():.6g}')
