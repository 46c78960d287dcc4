"""reference.py, the oracle, against PyTorch's own attention and numerical derivatives."""
import math

import pytest
import torch
import torch.nn.functional as F

from flash_attn3.cpu import reference
from flash_attn3.cpu.reference import Inputs, Mask, Score

from tests.support import plain

SHAPES = [(5, 5), (3, 8), (1, 4), (8, 3), (9, 1)]    # (seqlen_q, seqlen_k)


def inputs(seqlen_q, seqlen_k, heads_q=4, heads_k=2, head_dim=8, head_dim_v=8, dtype=torch.float64):
    q = torch.randn(2, seqlen_q, heads_q, head_dim, dtype=dtype)
    k = torch.randn(2, seqlen_k, heads_k, head_dim, dtype=dtype)
    v = torch.randn(2, seqlen_k, heads_k, head_dim_v, dtype=dtype)
    return q, k, v


def visible(seqlen_q, seqlen_k, causal):
    """(seqlen_q, seqlen_k): may query i see key j? Written out, as the definition says."""
    return torch.tensor([[not causal or j <= i + seqlen_k - seqlen_q for j in range(seqlen_k)]
                         for i in range(seqlen_q)])


def row_by_row(q, k, v, scale, causal):
    """The definition for each batch entry, head and row alone."""
    batch, seqlen_q, heads_q, _ = q.shape
    seen = visible(seqlen_q, k.size(1), causal)
    out = torch.zeros(batch, seqlen_q, heads_q, v.size(3), dtype=q.dtype)
    lse = torch.full((batch, heads_q, seqlen_q), -math.inf, dtype=q.dtype)
    for b, i, h in torch.cartesian_prod(*map(torch.arange, (batch, seqlen_q, heads_q))).tolist():
        kv_head = h // (heads_q // k.size(2))
        keys, values = (x[b, seen[i], kv_head] for x in (k, v))
        if len(keys):
            weights = torch.exp(keys @ q[b, i, h] * scale)
            out[b, i, h] = weights @ values / weights.sum()
            lse[b, h, i] = weights.sum().log()
    return out, lse


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('seqlens', SHAPES, ids=str)
@pytest.mark.parametrize('heads_k', [1, 2, 4])
def test_forward_is_the_definition(seqlens, heads_k, causal):
    q, k, v = inputs(*seqlens, heads_k=heads_k, head_dim_v=6)
    out, lse = plain.forward(q, k, v, 0.3, causal)
    expected_out, expected_lse = row_by_row(q, k, v, 0.3, causal)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)
    assert out.is_contiguous() and lse.is_contiguous()


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('seqlens', SHAPES, ids=str)
def test_forward_is_sdpa(seqlens, causal):
    q, k, v = inputs(*seqlens)
    out, _ = plain.forward(q, k, v, 8 ** -0.5, causal)
    mask = visible(*seqlens, causal)
    sdpa = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask,
                                          enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, sdpa.nan_to_num(0.0))    # a row without a key


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('seqlens', SHAPES, ids=str)
def test_backward_is_the_derivative(seqlens, causal):
    """Against autograd through `forward`, for both outputs at once."""
    tensors = [x.requires_grad_() for x in inputs(*seqlens, head_dim_v=6)]
    out, lse = plain.forward(*tensors, 0.3, causal)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    seen = lse.isfinite()
    expected = torch.autograd.grad((out, lse[seen]), tensors, (dout, dlse[seen]))
    with torch.no_grad():
        got = plain.backward(dout, dlse, *tensors, 0.3, causal)
    for gradient, wanted in zip(got, expected):
        torch.testing.assert_close(gradient, wanted.nan_to_num(0.0))
        assert gradient.is_contiguous()


def test_backward_without_dlse_is_that_of_zero():
    q, k, v = inputs(5, 7)
    dout = torch.randn_like(q)
    zero = torch.zeros(2, 4, 5, dtype=q.dtype)
    for a, b in zip(plain.backward(dout, None, q, k, v, 0.3, True),
                    plain.backward(dout, zero, q, k, v, 0.3, True)):
        assert torch.equal(a, b)


def test_rows_without_a_key():
    q, k, v = inputs(9, 4)
    out, lse = plain.forward(q, k, v, 0.3, causal=True)
    assert (out[:, :5] == 0).all() and lse[:, :, :5].isneginf().all()
    assert lse[:, :, 5:].isfinite().all()
    dq, dk, dv = plain.backward(torch.randn_like(out), torch.ones_like(lse), q, k, v, 0.3, True)
    assert (dq[:, :5] == 0).all()
    assert dk.isfinite().all() and dv.isfinite().all()


@pytest.mark.parametrize('shape', [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)], ids=str)
def test_empty_tensors(shape):
    batch, seqlen_q, seqlen_k = shape
    q, k, v = (torch.randn(batch, s, 2, 8) for s in (seqlen_q, seqlen_k, seqlen_k))
    out, lse = plain.forward(q, k, v, 0.3, causal=False)
    assert out.shape == q.shape and (out == 0).all()
    assert lse.shape == (batch, 2, seqlen_q) and lse.isneginf().all()
    for gradient, x in zip(plain.backward(out, lse, q, k, v, 0.3, False), (q, k, v)):
        assert gradient.shape == x.shape and (gradient == 0).all()


@pytest.mark.parametrize('s_aux', [None, torch.zeros(2, dtype=torch.float64)],
                         ids=['plain', 'sinks'])
def test_rows_without_a_key_are_zero_whatever_the_values_are(s_aux):
    q, k, v = (torch.randn(1, rows, 2, 4, dtype=torch.float64) for rows in (5, 3, 3))
    v = torch.full_like(v, math.nan)
    out = reference.attend(Inputs(q, k, v, s_aux), Score(0.5, mask=Mask(causal=True))).out
    assert torch.equal(out[:, :2], torch.zeros(1, 2, 2, 4, dtype=torch.float64))
    assert out[:, 2:].isnan().all()


def test_nan_reaches_its_row_and_no_other():
    q, k, v = inputs(6, 6)
    clean, clean_lse = plain.forward(q, k, v, 0.3, causal=False)
    q[1, 2, 3, 4] = math.nan
    out, lse = plain.forward(q, k, v, 0.3, causal=False)
    assert out[1, 2, 3].isnan().all() and lse[1, 3, 2].isnan()
    out[1, 2, 3], lse[1, 3, 2] = clean[1, 2, 3], clean_lse[1, 3, 2]
    assert torch.equal(out, clean) and torch.equal(lse, clean_lse)


def test_large_logits_do_not_overflow():
    q, k, v = inputs(16, 16)
    out, lse = plain.forward(q * 1e4, k, v, 0.3, causal=True)
    assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_compute_dtype_rounds_once(dtype):
    q, k, v = inputs(33, 65, dtype=dtype)
    out, lse = plain.forward(q, k, v, 0.3, True, compute_dtype=torch.float32)
    exact, exact_lse = plain.forward(q.double(), k.double(), v.double(), 0.3, True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    off_by_one_rounding = (out != exact.to(dtype)).double().mean()
    assert off_by_one_rounding < 0.01    # float32 and float64 seldom round to different neighbours
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)
