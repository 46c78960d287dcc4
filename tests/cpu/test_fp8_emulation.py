"""The emulated FP8 backward: exact without roundings, each rounding where it says, and the errors
for which no kernel exists.
"""
import pytest
import torch
import torch.nn.functional as F

from benchmarks import fp8_backward
from benchmarks.fp8_backward import GRADIENTS, INPUTS, REACHING, Method, alone, predicted
from benchmarks.fp8_emulation import (BACKWARD, E4M3, E5M2, FORWARD, HEAD, KEYS, ROWS, TENSOR, TILE,
                                      Rounding, attention, rounded)
from flash_attn3 import quantize_fp8
from flash_attn3.cpu import quantize

BAR = 0.06    # of the error of dq, dk and dv
METHODS = fp8_backward.methods()
CPU = torch.device('cpu')


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def plain(q, k, v, is_causal):
    """Attention of (batch, heads, rows, head_dim)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def derivatives(function, inputs, dout):
    inputs = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*inputs), inputs, dout)


# -------------------------------------------------------------------------------------- roundings
@pytest.mark.parametrize('is_causal', [False, True])
def test_no_rounding(is_causal):
    inputs = [normal(2, 3, 70, 32, seed=seed, dtype=torch.float64) for seed in range(4)]
    got = fp8_backward.gradients(inputs, is_causal, Method({}, {}))
    *qkv, dout = inputs
    expected = derivatives(lambda *x: plain(*x, is_causal), qkv, dout)
    for one, other in zip(got, expected):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_autograd_without_rounding(dtype):
    """Fewer KV heads; under autocast too."""
    q, dout = (normal(2, 70, 4, 32, seed=seed).to(dtype) for seed in (0, 1))
    k, v = (normal(2, 70, 2, 32, seed=seed).to(dtype) for seed in (2, 3))
    with torch.autocast('cpu', torch.bfloat16):
        got = derivatives(lambda *x: attention(*x, True, {}, {}), (q, k, v), dout)
    expected = derivatives(lambda *x: plain(*(y.transpose(1, 2) for y in x), True).transpose(1, 2),
                           [x.float() for x in (q, k, v)], dout.float())
    for one, other in zip(got, expected):
        assert one.dtype == dtype
        assert (one - other).norm() <= 4 * torch.finfo(dtype).eps * other.norm()


@pytest.mark.parametrize('rows, block, name', [
    (150, ROWS, 64), (400, KEYS, 384), (150, HEAD, 'head'), (150, TENSOR, 'tensor')])
def test_values_are_those_of_quantize_fp8(rows, block, name):
    x = normal(2, rows, 3, 48).bfloat16()
    values, scale = quantize_fp8(x, block=name)
    by_row = quantize.row_scales(scale, values, block[0] if isinstance(name, int) else 0, None)
    expected = (values.float() * by_row.unsqueeze(-1)).transpose(1, 2)
    got = rounded(x.float().transpose(1, 2), Rounding(E4M3, block))
    assert (got != expected).float().mean() < 1e-3    # one divides by scales, one multiplies
    assert (got - expected).norm() < 3e-3 * expected.norm()


def test_rotation_spreads_outliers():
    """Without rotation, values far below the largest of their block become 0."""
    x = torch.ones(1, 1, 64, 64)
    x[..., 0] = 2.0 ** 20
    assert rounded(x, Rounding(E4M3, ROWS))[..., 1:].abs().max() == 0
    error = (rounded(x, Rounding(E4M3, ROWS, is_rotated=True)) - x).norm() / x.norm()
    assert 0 < error < 0.07


def test_a_tile_has_a_scale_of_its_own():
    """Also the last ones, which are not whole."""
    x = normal(1, 2, 150, 300)
    x[0, 1, 128:, 256:] = 2.0 ** 30
    got, without = rounded(x, Rounding(E4M3, TILE)), rounded(x[:, :1], Rounding(E4M3, TILE))
    assert torch.equal(got[:, :1], without) and torch.equal(got[0, 1, :128], rounded(
        x[:, 1:, :128], Rounding(E4M3, TILE))[0, 0])
    assert torch.equal(got[0, 1, 128:, 256:], x[0, 1, 128:, 256:])
    assert rounded(x, Rounding(E4M3, HEAD))[0, 1, :128].abs().max() == 0


@pytest.mark.parametrize('dtype, bits', [(E4M3, 4), (E5M2, 3)])
def test_bits(dtype, bits):
    x = normal(1, 1, 64, 64)
    error = (rounded(x, Rounding(dtype)) - x).abs()
    assert 0.8 * 2.0 ** -bits < (error / x.abs()).where(x.abs() > 0.1, 0).max() <= 2.0 ** -bits


# ----------------------------------------------------------------------------------------- errors
@pytest.fixture(scope='module', params=INPUTS)
def errors(request) -> tuple[str, dict[str, dict[str, float]]]:
    """Which inputs, and the errors by method and gradient."""
    shape = dict(heads=1, seqlen=512, head_dim=64, causal=False)
    return request.param, {result['name']: result for result in fp8_backward.measure(
        shape, request.param, range(2), CPU)}


def test_a_rounding_reaches_what_reads_it(errors):
    kind, found = errors
    for name in set(BACKWARD) - {'delta.do'}:
        for gradient in GRADIENTS:
            error = found[f'{name} alone'][gradient]
            assert (error > 5e-3) == (name in REACHING[gradient]) and error < 0.09, (name, gradient)


def test_roundings_add_up_as_squares(errors):
    """On N(0, 1), where every rounding is independent of all others."""
    kind, found = errors
    for name, method in METHODS.items() if kind == 'normal' else ():
        if 'FP8 forward' not in name:
            measured = [found[name][gradient] for gradient in GRADIENTS]
            expected = [predicted(method)[gradient] for gradient in GRADIENTS]
            assert measured == pytest.approx(expected, rel=0.12, abs=1e-5), name


def test_all_gemms_in_fp8_miss_the_bar(errors):
    """Six roundings reach dq and dk. Neither scales nor rotation reduce what one costs."""
    kind, found = errors
    for name, result in found.items():
        if name.startswith('all,'):
            assert min(result['dq'], result['dk']) > BAR, name
    assert kind == 'outliers' or found['all, by block, rotated']['dv'] < BAR


@pytest.mark.parametrize('name, limit', [('all but S', BAR), ('dV, dK and dQ', 0.04)])
def test_fewer_gemms_in_fp8_meet_it(errors, name, limit):
    _, found = errors
    assert max(found[name][gradient] for gradient in GRADIENTS) < limit


def test_delta_must_see_the_rounded_dout(errors):
    """Where one key dominates, dP - delta is small, and so must be its error."""
    kind, found = errors
    given, same = (found[f'all, {name}']['dk'] for name in ('delta of the given dO',
                                                            'by block, rotated'))
    assert same < (1.01 if kind == 'normal' else 0.95) * given


def test_forward_and_backward_share_scores():
    for name, method in METHODS.items():
        if 'forward' not in name and 'backward' not in name:
            assert all(method.forward.get(operand) == method.backward.get(operand)
                       for operand in FORWARD if operand.startswith('s.')), name
    assert alone('s.q').forward.keys() == {'s.q'}
