"""flash_attn_func and flash_attn_qkvpacked_func with windows, chunks, softcap, sinks and max
logits: on CPU tensors, against attention written out row by row.
"""
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from flash_attn3 import flash_attn_func, flash_attn_qkvpacked_func
from flash_attn3.cpu import reference
from flash_attn3.cpu.reference import Inputs, Mask, Score

from tests.cpu import by_row
from tests.cpu.drawn import examples
from tests.support import compare, derivative_calls

FEATURES = {
    'causal': {'causal': True, 'softcap': 1.0},
    'window': {'window_size': (2, 1)},
    'left': {'window_size': (3, -1)},
    'right': {'window_size': (-1, 1)},
    'causal_window': {'causal': True, 'window_size': (2, 5)},
    'diagonal': {'window_size': [0, 0]},
    'chunk': {'attention_chunk': 3},
    'causal_chunk': {'causal': True, 'attention_chunk': 2},
    'softcap_1': {'softcap': 1.0},
    'softcap_15': {'softcap': 15.0, 'softmax_scale': 20.0},
    'softcap_50': {'softcap': 50, 'softmax_scale': 60.0},
    'sinks': {'s_aux': True},
    'all': {'causal': True, 'window_size': (4, -1), 'attention_chunk': 5, 'softcap': 2.0,
            'softmax_scale': 1.5, 's_aux': True},
}
EVERY_FEATURE = pytest.mark.parametrize('options', FEATURES.values(), ids=FEATURES)
SEQLENS = pytest.mark.parametrize('seqlens', [(5, 5), (3, 8), (8, 3), (1, 6), (4, 0), (0, 4)],
                                  ids=str)


def score_of(options: dict, head_dim: int) -> Score:
    """What reference.py calls these arguments."""
    mask = Mask(options.get('causal', False), tuple(options.get('window_size', (-1, -1))),
                options.get('attention_chunk', 0))
    scale = options.get('softmax_scale', head_dim ** -0.5)
    return Score(scale, options.get('softcap', 0.0), mask)


def arguments_of(score: Score) -> dict:
    """And the other way round."""
    return {'softmax_scale': score.scale, 'causal': score.mask.causal,
            'window_size': score.mask.window, 'attention_chunk': score.mask.chunk,
            'softcap': score.softcap}


def call(function, inputs: Inputs, options: dict, *others):
    """(out, lse, max_logits)."""
    options = {name: value for name, value in options.items() if name != 's_aux'}
    return function(*inputs[:3], *others, **options, s_aux=inputs.s_aux, return_attn_probs=True,
                    return_max_logits=True)


def check_against_rows(inputs: Inputs, options: dict) -> None:
    """Results and gradients of flash_attn_func."""
    score = score_of(options, inputs.q.size(-1))
    wanted = by_row.attend(inputs, score)
    leaves = Inputs(*(None if x is None else x.requires_grad_() for x in inputs))
    got = call(flash_attn_func, leaves, options)
    for value, expected in zip(got, wanted):
        torch.testing.assert_close(value.detach(), expected)
    out, lse, max_logits = got
    assert not max_logits.requires_grad

    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    named = [x for x in leaves if x is not None]
    gradients = torch.autograd.grad((out, lse), named, (dout, dlse))
    expected = [x for x in by_row.gradients(dout, dlse, inputs, score) if x is not None]
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


def random_inputs(seqlens, options, head_dim_v=5):
    return by_row.random_inputs((2, seqlens[0], 4, 6), (2, seqlens[1], 2, 6), head_dim_v,
                                's_aux' in options)


# --------------------------------------------------------------------------- results and gradients
@EVERY_FEATURE
@SEQLENS
def test_every_feature(seqlens, options):
    check_against_rows(random_inputs(seqlens, options), options)


@given(st.integers(0, 2), st.integers(0, 7), st.integers(0, 7),
       st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]), by_row.SCORES, st.booleans(),
       st.integers(0, 1 << 20))
@examples(40, derandomize=True)
def test_combinations(batch, seqlen_q, seqlen_k, heads, score, sinks, seed):
    torch.manual_seed(seed)
    inputs = by_row.random_inputs((batch, seqlen_q, heads[0], 4), (batch, seqlen_k, heads[1], 4), 3,
                                  sinks)
    check_against_rows(inputs, arguments_of(score))


@EVERY_FEATURE
def test_gradcheck(options):
    """Both outputs, against numerical derivatives in float64; GQA, v of another head dim."""
    inputs = by_row.random_inputs((1, 3, 2, 2), (1, 5, 1, 2), 3, 's_aux' in options)
    leaves = [x.requires_grad_() for x in inputs if x is not None]
    assert gradcheck(lambda *x: call(flash_attn_func, Inputs(*x), options)[:2], leaves)


@pytest.mark.parametrize('window_size, same', [
    ((-1, 0), {'causal': True}), ((4, 4), {}), ((2 ** 40, 2 ** 40), {}), ((4, -1), {}),
    ((-1, -1), {}), ((3, 2), {'window_size': [3, 2]}),
    ((0, 0), {'window_size': (0, 0), 'attention_chunk': 2})], ids=str)
def test_windows_that_are_the_same(window_size, same):
    q, k, v, _ = random_inputs((5, 5), {})
    torch.testing.assert_close(flash_attn_func(q, k, v, window_size=window_size),
                               flash_attn_func(q, k, v, **same))


def test_one_key_before_the_window_is_not_seen():
    """Values are one-hot in their position: what a row saw stands in its output."""
    q = torch.zeros(1, 6, 1, 6, dtype=torch.float64)
    v = torch.eye(6, dtype=torch.float64)[None, :, None]
    out = flash_attn_func(q, q, v, window_size=(2, 1))[0, :, 0]
    assert [row.nonzero().flatten().tolist() for row in out] == [
        [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5]]
    chunks = flash_attn_func(q, q, v, causal=True, attention_chunk=4)[0, :, 0]
    assert [row.nonzero().flatten().tolist() for row in chunks] == [
        [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [4], [4, 5]]


@EVERY_FEATURE
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision(dtype, options):
    """Held to the errors of plain PyTorch in that dtype; LSE and max logits to float32."""
    exact = by_row.random_inputs((2, 33, 4, 16), (2, 47, 2, 16), 16, 's_aux' in options)
    inputs = exact.to(dtype)
    score = score_of(options, 16)
    ref = reference.attend(Inputs(*(None if x is None else x.double() for x in inputs)), score,
                           with_row_max=True)
    pt = reference.attend(inputs, score)
    out, lse, max_logits = call(flash_attn_func, inputs, options)
    assert out.dtype == dtype and lse.dtype == max_logits.dtype == torch.float32
    compare.check_close(out, ref.out, pt.out, 'out')
    compare.check_lse(lse, ref.lse)
    compare.check_lse(max_logits, ref.row_max)


# ------------------------------------------------------------------------------------------ sinks
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_sinks_of_every_dtype(dtype):
    """The gradient has their dtype; in between they are float32, strided or not."""
    q, k, v, s_aux = (x.float() for x in random_inputs((5, 7), {'s_aux': True}))
    s_aux = s_aux.to(dtype)
    strided = torch.stack([s_aux, s_aux], dim=1)[:, 0].requires_grad_()
    out, lse = flash_attn_func(q, k, v, s_aux=strided, return_attn_probs=True)
    wanted = by_row.attend(Inputs(*(x.double() for x in (q, k, v, s_aux))), Score(6 ** -0.5))
    torch.testing.assert_close(out.detach().double(), wanted.out, rtol=1e-5, atol=1e-5)
    gradient = torch.autograd.grad(lse.sum(), strided)[0]
    assert gradient.dtype == dtype
    share = (s_aux.double()[:, None] - wanted.lse).exp().sum((0, 2))
    torch.testing.assert_close(gradient, share.to(dtype))


def test_sinks_alone_may_need_a_gradient():
    q, k, v, s_aux = random_inputs((5, 7), {'s_aux': True})
    out = flash_attn_func(q, k, v, s_aux=s_aux.requires_grad_())
    expected = by_row.gradients(torch.ones_like(out), torch.zeros(2, 4, 5, dtype=torch.float64),
                                Inputs(q, k, v, s_aux), Score(6 ** -0.5))
    torch.testing.assert_close(torch.autograd.grad(out.sum(), s_aux)[0], expected.ds_aux)


def test_max_logits_come_after_the_softcap_and_without_the_sink():
    q, k, v, s_aux = random_inputs((5, 7), {'s_aux': True})
    _, max_logits = flash_attn_func(100 * q, k, v, softcap=3.0, s_aux=s_aux + 50,
                                    return_max_logits=True)
    scores = torch.einsum('bqhd,bkhd->bhqk', 100 * q, k.repeat_interleave(2, 2)) * 6 ** -0.5
    torch.testing.assert_close(max_logits, (3 * torch.tanh(scores / 3)).amax(-1))


# ------------------------------------------------------------------------- what a call gives back
@EVERY_FEATURE
def test_results_in_their_order(options):
    inputs = random_inputs((5, 7), options)
    out, lse, max_logits = call(flash_attn_func, inputs, options)
    options = options | {'s_aux': inputs.s_aux}
    alone = flash_attn_func(*inputs[:3], **options)
    with_lse = flash_attn_func(*inputs[:3], **options, return_attn_probs=True)
    with_max = flash_attn_func(*inputs[:3], **options, return_max_logits=True)
    assert isinstance(alone, torch.Tensor) and len(with_lse) == len(with_max) == 2
    for got, wanted in zip((alone, *with_lse, *with_max), (out, out, lse, out, max_logits)):
        assert torch.equal(got, wanted) and got.is_contiguous()


@EVERY_FEATURE
def test_out_is_written_and_returned(options):
    inputs = random_inputs((5, 7), options)
    out, lse, max_logits = call(flash_attn_func, inputs, options)
    target = torch.full((2, 4, 5, 5), math.nan, dtype=torch.float64).transpose(1, 2)
    got = call(flash_attn_func, inputs, options | {'out': target})
    assert got[0] is target
    for value, wanted in zip(got, (out, lse, max_logits)):
        assert torch.equal(value, wanted)
    with pytest.raises(RuntimeError, match='^flash_attn3.flash_attn_func: expected requires_grad='
                       'False '
                                           'together with out=, got requires_grad=True of s_aux'):
        flash_attn_func(*inputs[:3], out=target,
                        s_aux=torch.zeros(4, dtype=torch.float64, requires_grad=True))


@EVERY_FEATURE
def test_meta_tensors(options):
    inputs = Inputs(*(None if x is None else x.to('meta')
                      for x in random_inputs((5, 7), options)))
    out, lse, max_logits = call(flash_attn_func, inputs, options)
    assert out.shape == (2, 5, 4, 5) and lse.shape == max_logits.shape == (2, 4, 5) and out.is_meta


# ------------------------------------------------------------------------------------- one tensor
@EVERY_FEATURE
@pytest.mark.parametrize('heads', [(4, 4), (4, 2)], ids=str)
def test_packed_qkv_is_its_slices(heads, options):
    heads_q, heads_k = heads
    form = (3, heads_q) if heads_q == heads_k else (heads_q + 2 * heads_k,)
    given = {} if heads_q == heads_k else {'num_heads_q': heads_q}
    qkv = torch.randn(2, 7, *form, 6, dtype=torch.float64, requires_grad=True)
    slices = qkv.unbind(2) if heads_q == heads_k else qkv.split((heads_q, heads_k, heads_k), 2)
    sinks = torch.randn(heads_q, dtype=torch.float64) if 's_aux' in options else None
    options = options | {'s_aux': sinks, 'return_attn_probs': True, 'return_max_logits': True}
    got = flash_attn_qkvpacked_func(qkv, **options, **given)
    wanted = flash_attn_func(*slices, **options)
    for value, expected in zip(got, wanted, strict=True):
        assert torch.equal(value, expected)
    weights = [torch.randn_like(x) for x in got[:2]]
    torch.testing.assert_close(*(torch.autograd.grad(x[:2], qkv, weights) for x in (got, wanted)))


@pytest.mark.parametrize('name', derivative_calls.FUNCTIONS)
@pytest.mark.parametrize('window', [(-1, -1), (1, 0), (0, 2)], ids=str)
def test_forms_of_a_window(window, name):
    """A list and a CPU tensor of integers are as good as a tuple."""
    x, function = torch.randn(derivative_calls.SHAPE).bfloat16(), derivative_calls.FUNCTIONS[name]
    expected = function(x, window_size=window)
    for form in (list(window), torch.tensor(window), torch.tensor(window, dtype=torch.int32)):
        assert torch.equal(function(x, window_size=form), expected)


# ------------------------------------------------------------------------------------- derivatives
def test_gradient_of_one_output_only():
    inputs = Inputs(*(x.requires_grad_() for x in random_inputs((5, 7), {'s_aux': True})))
    options = {'softcap': 2.0, 'window_size': (3, 1)}
    out, lse, _ = call(flash_attn_func, inputs, options)
    score = score_of(options, 6)
    for result, dout, dlse in ((out, torch.ones_like(out), torch.zeros_like(lse)),
                               (lse, torch.zeros_like(out), torch.ones_like(lse))):
        got = torch.autograd.grad(result.sum(), inputs, retain_graph=True)
        for gradient, wanted in zip(got, by_row.gradients(dout, dlse, inputs, score)):
            torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize('way', ['eager', 'traced'])
def test_second_derivatives_are_refused(way):
    q, k, v, _ = (None if x is None else x.requires_grad_() for x in random_inputs((5, 7), {}))
    out = (flash_attn_func(q, k, v, softcap=2.0) if way == 'eager'
           else torch.ops.flash_attn3.fwd_general(q, k, v, softcap=2.0)[0])
    gradient = torch.autograd.grad(out.sum(), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match='flash_attn_func: expected first derivatives'):
        gradient.sum().backward()


@pytest.mark.parametrize('name', ['q', 'k', 'v', 's_aux', 'out'])
def test_changed_tensors_are_refused(name):
    tensors = {name: x.requires_grad_() * 1 for name, x in zip(
        ('q', 'k', 'v', 's_aux'), random_inputs((5, 7), {'s_aux': True}))}
    tensors['out'] = flash_attn_func(**tensors)
    loss = tensors['out'].sum()
    with torch.no_grad():
        tensors[name].mul_(2)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        loss.backward()


def test_autocast_changes_nothing():
    inputs = random_inputs((5, 7), {'s_aux': True}).to(torch.float32)
    expected = call(flash_attn_func, inputs, {'softcap': 2.0})
    with torch.autocast('cpu', torch.bfloat16):
        got = call(flash_attn_func, inputs, {'softcap': 2.0})
    assert all(torch.equal(a, b) for a, b in zip(got, expected))
