"""core/softmax_math.h: the online softmax, tile by tile as the kernels do it, against a two-pass
softmax in float64.
"""
import math

from hypothesis import given
from hypothesis import strategies as st
import pytest
import torch

from tests.cpu.drawn import examples
from tests.host import _host

LOG2_E = math.log2(math.e)
INF = math.inf


def online_row(scores, values, scale, tile):
    """(output, LSE) of one row: running maximum of the raw scores, float32 sums, base 2."""
    row_max, row_sum, output = -INF, torch.tensor(0.0), torch.zeros(values.shape[1])
    for begin in range(0, len(scores), tile):
        part = scores[begin:begin + tile]
        new_max = max(row_max, part.max().item())
        used = _host.finite_max(new_max) * scale * LOG2_E
        rescale = 2.0 ** ((row_max - _host.finite_max(new_max)) * scale * LOG2_E)
        weights = torch.exp2(part * (scale * LOG2_E) - used)
        row_sum = row_sum * rescale + weights.sum()
        output = output * rescale + weights @ values[begin:begin + tile]
        row_max = new_max
    total = row_sum.item()
    return output * _host.inverse_sum(total), _host.log_sum_exp(row_max, total, scale)


def two_pass_row(scores, values, scale):
    scaled = scores.double() * scale
    return torch.softmax(scaled, 0) @ values.double(), torch.logsumexp(scaled, 0).item()


@given(st.integers(0, 2**31), st.integers(1, 300), st.sampled_from([16, 80, 128]),
       st.sampled_from([0.05, 0.125, 1.0]), st.sampled_from([0.1, 1.0, 30.0]))
@examples(100)
def test_online_equals_two_pass(seed, length, tile, scale, spread):
    generator = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(length, generator=generator)
    values = torch.randn(length, 4, generator=generator)
    output, lse = online_row(scores, values, scale, tile)
    expected, expected_lse = two_pass_row(scores, values, scale)
    assert torch.allclose(output.double(), expected, rtol=0, atol=2e-5 * max(1.0, spread * scale))
    assert abs(lse - expected_lse) <= 1e-5 * max(1, abs(expected_lse))


@pytest.mark.parametrize('hidden', [slice(0, 64), slice(64, 128), slice(0, 100)])
def test_tiles_without_a_visible_key_change_nothing(hidden):
    scores, values = torch.randn(128), torch.randn(128, 4)
    scores[hidden] = -INF
    output, lse = online_row(scores, values, 0.125, 32)
    expected, expected_lse = two_pass_row(scores, values, 0.125)
    assert torch.allclose(output.double(), expected, rtol=0, atol=1e-6)
    assert lse == pytest.approx(expected_lse, abs=1e-5)


def test_a_row_without_a_visible_key_is_zero():
    output, lse = online_row(torch.full((64,), -INF), torch.randn(64, 4), 0.125, 16)
    assert torch.equal(output, torch.zeros(4)) and lse == -INF


def test_nan_stays():
    assert math.isnan(_host.log_sum_exp(0.0, math.nan, 1.0))
    assert math.isnan(_host.inverse_sum(math.nan))
    assert math.isnan(_host.finite_max(math.nan))


def test_finite_max():
    assert [_host.finite_max(x) for x in (-INF, -3.0, 0.0, 7.0, INF)] == [0.0, -3.0, 0.0, 7.0, INF]


def test_inverse_sum():
    assert [_host.inverse_sum(x) for x in (0.0, 0.5, 4.0)] == [0.0, 2.0, 0.25]


@given(st.floats(-100, 100), st.floats(-100, 100))
def test_lse_with_a_sink(lse, sink):
    expected = torch.logaddexp(*torch.tensor([[lse], [sink]], dtype=torch.float64)).item()
    assert _host.with_sink(lse, sink) == pytest.approx(expected, rel=2e-7, abs=2e-7)


@pytest.mark.parametrize('lse, sink, expected', [
    (3.25, -INF, 3.25), (-INF, -INF, -INF), (-INF, 2.5, 2.5), (3.25, 12345.678, 12345.678),
    (3.25, -12345.678, 3.25), (3.25, INF, INF)])
def test_a_sink_that_is_nothing_or_everything(lse, sink, expected):
    assert _host.with_sink(lse, sink) == torch.tensor(expected).float().item()


def test_nan_stays_nan_beside_a_sink():
    assert math.isnan(_host.with_sink(math.nan, 1.0)) and math.isnan(_host.with_sink(1.0, math.nan))
