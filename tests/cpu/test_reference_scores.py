"""reference.attend: windows, chunks, softcap, sinks, head dims and row maxima, by definition."""
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flash_attn3.cpu import reference
from flash_attn3.cpu.reference import Inputs, Mask, Score

from tests.cpu import by_row
from tests.cpu.drawn import examples

SHAPES = [(5, 5), (3, 8), (1, 4), (8, 3), (6, 1)]    # (seqlen_q, seqlen_k)
VARIANTS = [Score(0.7, softcap=2.0), Score(0.7, mask=Mask(window=(2, 1))),
            Score(0.7, mask=Mask(causal=True, window=(1, 5))), Score(0.7, mask=Mask(chunk=3)),
            Score(1.5, 0.8, Mask(causal=True, window=(4, -1), chunk=4))]
lengths = st.integers(0, 7)


def check_gradients(dout, dlse, inputs, score):
    """Against autograd through the definition."""
    got = reference.attend_backward(dout, dlse, inputs, score)
    for gradient, wanted, x in zip(got, by_row.gradients(dout, dlse, inputs, score), inputs):
        assert (gradient is None) == (x is None)
        if x is not None:
            torch.testing.assert_close(gradient, wanted)
            assert gradient.shape == x.shape and gradient.is_contiguous()


def check_against_definition(inputs, score):
    got = reference.attend(inputs, score, with_row_max=True)
    for value, wanted in zip(got, by_row.attend(inputs, score)):
        torch.testing.assert_close(value, wanted)
        assert value.is_contiguous()
    check_gradients(torch.randn_like(got.out), torch.randn_like(got.lse), inputs, score)


@given(by_row.MASKS, st.integers(0, 20), st.integers(0, 20))
@examples(300, derandomize=True)
def test_masks_are_their_rules(mask, seqlen_q, seqlen_k):
    expected = [[not by_row.sees(mask, row, key, seqlen_q, seqlen_k) for key in range(seqlen_k)]
                for row in range(seqlen_q)]
    hidden = mask.hidden(seqlen_q, seqlen_k, torch.device('cpu'))
    assert hidden.tolist() == expected


@pytest.mark.parametrize('mask, same', [
    (Mask(window=(-1, 0)), Mask(causal=True)),
    (Mask(causal=True, window=(-1, 3)), Mask(causal=True)),
    (Mask(causal=True, window=(3, -1)), Mask(window=(3, 0))),
    (Mask(window=(10, 10)), Mask()),
    (Mask(window=(2 ** 62, 2 ** 62)), Mask()),
    (Mask(chunk=11, window=(2, 3)), Mask(window=(2, 3))),
], ids=str)
def test_masks_that_are_the_same(mask, same):
    device = torch.device('cpu')
    assert torch.equal(mask.hidden(11, 11, device), same.hidden(11, 11, device))


def test_chunks_before_the_first_key_hold_none():
    hidden = Mask(chunk=4).hidden(6, 3, torch.device('cpu'))    # positions -3 to 2
    assert hidden.tolist() == 3 * [[True] * 3] + 3 * [[False] * 3]


@pytest.mark.parametrize('sinks', [False, True])
@pytest.mark.parametrize('score', VARIANTS, ids=str)
@pytest.mark.parametrize('seqlens', SHAPES, ids=str)
def test_variants_are_the_definition(seqlens, score, sinks):
    check_against_definition(by_row.random_inputs((2, seqlens[0], 4, 6), (2, seqlens[1], 2, 6), 5,
                                                  sinks), score)


@given(st.integers(0, 2), lengths, lengths, st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
       st.sampled_from([(8, 8), (12, 4), (4, 16), (1, 1)]), by_row.SCORES, st.booleans(),
       st.integers(0, 1 << 20))
@examples(100, derandomize=True)
def test_combinations_are_the_definition(batch, seqlen_q, seqlen_k, heads, dims, score, sinks,
                                         seed):
    torch.manual_seed(seed)
    inputs = by_row.random_inputs((batch, seqlen_q, heads[0], dims[0]),
                                  (batch, seqlen_k, heads[1], dims[0]), dims[1], sinks)
    check_against_definition(inputs, score)


class _Attend(torch.autograd.Function):
    """`attend` with `attend_backward` as its derivative, for gradcheck."""

    @staticmethod
    def forward(ctx, score, *inputs):
        ctx.score = score
        ctx.save_for_backward(*inputs)
        return reference.attend(Inputs(*inputs), score)[:2]

    @staticmethod
    def backward(ctx, dout, dlse):
        return None, *reference.attend_backward(dout, dlse, Inputs(*ctx.saved_tensors), ctx.score)


@pytest.mark.parametrize('score', VARIANTS, ids=str)
def test_gradients_are_numerical_derivatives(score):
    inputs = by_row.random_inputs((1, 3, 2, 2), (1, 5, 1, 2), 3, sinks=True)
    torch.autograd.gradcheck(lambda *x: _Attend.apply(score, *x),
                             [x.requires_grad_() for x in inputs])


@pytest.mark.parametrize('score', VARIANTS, ids=str)
def test_autograd_goes_through_attend(score):
    inputs = Inputs(*(x.requires_grad_() for x in by_row.random_inputs((2, 5, 4, 6), (2, 7, 2, 6),
                                                                       3, sinks=True)))
    out, lse, _ = reference.attend(inputs, score)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    with torch.no_grad():
        got = reference.attend_backward(dout, dlse, inputs, score)
    for gradient, wanted in zip(got, expected):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize('mask', [Mask(causal=True), Mask(window=(2, 0)), Mask(chunk=4)], ids=str)
def test_rows_without_a_key(mask):
    inputs = by_row.random_inputs((2, 8, 4, 6), (2, 4, 2, 6), 5, sinks=True)    # rows 0 to 3
    plain, score = inputs._replace(s_aux=None), Score(0.7, 1.5, mask)

    out, lse, row_max = reference.attend(plain, score, with_row_max=True)
    assert (out[:, :4] == 0).all() and lse[:, :, :4].isneginf().all()
    assert row_max[:, :, :4].isneginf().all() and row_max[:, :, 4:].isfinite().all()
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    dq, dk, dv, _ = reference.attend_backward(dout, dlse, plain, score)
    assert (dq[:, :4] == 0).all() and dk.isfinite().all() and dv.isfinite().all()

    out, lse, row_max = reference.attend(inputs, score, with_row_max=True)
    assert (out[:, :4] == 0).all() and row_max[:, :, :4].isneginf().all()
    torch.testing.assert_close(lse[:, :, :4], inputs.s_aux[:, None].expand(2, 4, 4))


def test_rows_without_a_key_give_the_sink_their_dlse():
    inputs = by_row.random_inputs((2, 5, 4, 6), (2, 0, 2, 6), 6, sinks=True)
    dlse = torch.randn(2, 4, 5, dtype=torch.float64)
    got = reference.attend_backward(torch.randn_like(inputs.q), dlse, inputs, Score(0.7))
    assert (got.dq == 0).all() and got.dk.numel() == got.dv.numel() == 0
    torch.testing.assert_close(got.ds_aux, dlse.sum((0, 2)))


def test_a_sink_is_a_factor_on_the_output():
    """out * sigmoid(lse - s_aux), and logaddexp(lse, s_aux), of the result without one."""
    inputs = by_row.random_inputs((2, 5, 4, 6), (2, 7, 2, 6), 6, sinks=True)
    plain = reference.attend(inputs._replace(s_aux=None), VARIANTS[-1])
    out, lse, _ = reference.attend(inputs, VARIANTS[-1])
    sinks = inputs.s_aux[:, None]
    torch.testing.assert_close(lse, torch.logaddexp(plain.lse, sinks))
    factor = torch.sigmoid(plain.lse - sinks).transpose(1, 2).unsqueeze(-1)
    torch.testing.assert_close(out, plain.out * factor)


@pytest.mark.parametrize('sink', [-math.inf, -1e5])
def test_a_sink_far_below_changes_nothing(sink):
    plain = by_row.random_inputs((2, 5, 4, 6), (2, 7, 2, 6), 6, sinks=False)
    inputs = plain._replace(s_aux=torch.full((4,), sink, dtype=torch.float64))
    expected = reference.attend(plain, VARIANTS[-1])
    got = reference.attend(inputs, VARIANTS[-1])
    torch.testing.assert_close(got[:2], expected[:2])
    dout, dlse = torch.randn_like(expected.out), torch.randn_like(expected.lse)
    gradients = reference.attend_backward(dout, dlse, inputs, VARIANTS[-1])
    wanted = reference.attend_backward(dout, dlse, plain, VARIANTS[-1])
    torch.testing.assert_close(gradients[:3], wanted[:3])
    assert (gradients.ds_aux == 0).all()


def test_a_large_sink_does_not_overflow():
    inputs = by_row.random_inputs((1, 3, 2, 4), (1, 3, 2, 4), 4, sinks=False)
    inputs = inputs._replace(s_aux=torch.tensor([1e4, 2e4], dtype=torch.float64))
    out, lse, _ = reference.attend(inputs, Score(1.0))
    assert (out == 0).all() and torch.equal(lse, inputs.s_aux[:, None].expand(1, 2, 3))


def test_softcap_bounds_the_logits_and_keeps_small_ones():
    torch.manual_seed(0)
    inputs = by_row.random_inputs((1, 4, 2, 4), (1, 4, 2, 4), 4, sinks=False)
    steep = inputs._replace(q=inputs.q * 1e6)
    assert reference.attend(steep, Score(1.0, 3.0), with_row_max=True).row_max.abs().max() <= 3
    dq, dk, _, _ = reference.attend_backward(inputs.v, None, steep, Score(1.0, 3.0))
    assert (dq == 0).all() and (dk == 0).all()    # tanh is flat there
    for wide, narrow in zip(reference.attend(inputs, Score(1.0, 1e8))[:2],
                            reference.attend(inputs, Score(1.0))[:2]):
        torch.testing.assert_close(wide, narrow)


def test_row_max_is_on_request_and_without_the_sink():
    inputs = by_row.random_inputs((1, 4, 2, 4), (1, 6, 1, 4), 4, sinks=True)
    assert reference.attend(inputs, Score(0.5)).row_max is None
    high = inputs._replace(s_aux=inputs.s_aux + 100)
    row_max = reference.attend(high, Score(0.5), with_row_max=True).row_max
    expected = torch.einsum('bqhd,bkd->bhqk', inputs.q, inputs.k[:, :, 0]).amax(-1) * 0.5
    torch.testing.assert_close(row_max, expected)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_compute_dtype_rounds_once(dtype):
    torch.manual_seed(0)
    inputs = by_row.random_inputs((2, 33, 4, 8), (2, 65, 2, 8), 8, sinks=True).to(dtype)
    inputs = inputs._replace(s_aux=inputs.s_aux.float())
    exact = Inputs(*(x.double() for x in inputs))
    score = Score(0.35, 5.0, Mask(causal=True, window=(20, -1), chunk=32))
    got = reference.attend(inputs, score, torch.float32, with_row_max=True)
    wanted = reference.attend(exact, score, with_row_max=True)
    assert got.out.dtype == dtype and got.lse.dtype == got.row_max.dtype == torch.float32
    torch.testing.assert_close(got.lse.double(), wanted.lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.row_max.double(), wanted.row_max, rtol=1e-6, atol=1e-6)
    assert (got.out != wanted.out.to(dtype)).double().mean() < 0.01

    dout, dlse = torch.randn_like(got.out), torch.randn_like(got.lse)
    gradients = reference.attend_backward(dout, dlse, inputs, score, torch.float32)
    exact_gradients = reference.attend_backward(dout.double(), dlse.double(), exact, score)
    for gradient, wanted, x in zip(gradients[:3], exact_gradients, inputs):
        assert gradient.dtype == x.dtype
        assert (gradient != wanted.to(dtype)).double().mean() < 0.01
    assert gradients.ds_aux.dtype == torch.float32
    torch.testing.assert_close(gradients.ds_aux.double(), exact_gradients.ds_aux, rtol=1e-5,
                               atol=1e-5)


def test_autocast_does_not_reach_the_products():
    inputs = by_row.random_inputs((1, 9, 2, 8), (1, 9, 1, 8), 8, sinks=True).to(torch.float32)
    expected = reference.attend(inputs, VARIANTS[-1])
    gradients = reference.attend_backward(expected.out, expected.lse, inputs, VARIANTS[-1])
    with torch.autocast('cpu', dtype=torch.bfloat16):
        got = reference.attend(inputs, VARIANTS[-1])
        got_gradients = reference.attend_backward(expected.out, expected.lse, inputs, VARIANTS[-1])
    for value, wanted in zip((*got[:2], *got_gradients), (*expected[:2], *gradients)):
        assert torch.equal(value, wanted)
