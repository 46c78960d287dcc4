"""Derivatives that there are not, on the CPU: an error each, and never zeros."""
import pytest
import torch
from torch.autograd import forward_ad

from flash_attn3 import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func

from tests.support import derivative_calls
from tests.support.derivative_calls import (FUNCTIONS, OPS, REVERSE_ONLY, SHAPE, every_forward_mode,
                                            every_function, every_option)
from tests.support.fp8_data import E4M3
from tests.support.lists import starts

CPU = torch.device('cpu')


# ------------------------------------------------------------------------------------ forward mode
@every_forward_mode
@every_option
@every_function
def test_forward_mode_is_refused(name, options, derivative):
    derivative_calls.check_forward_mode_is_refused(
        derivative, lambda x: FUNCTIONS[name](x, **options), CPU)


@every_option
@every_function
def test_what_has_no_tangent_is_served(name, options):
    derivative_calls.check_constants_are_served(lambda x: FUNCTIONS[name](x, **options), CPU)


@pytest.mark.parametrize('argument', ['q', 'k', 'v', 's_aux', 'out'])
def test_the_tangent_of_one_argument(argument):
    tensors = {name: torch.randn(SHAPE) for name in ('q', 'k', 'v', 'out')}
    tensors['s_aux'] = torch.randn(SHAPE[2])
    for given in ({**tensors, 's_aux': None}, tensors):
        if given[argument] is None:
            continue
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(given[argument], torch.ones_like(given[argument]))
            with pytest.raises(NotImplementedError, match=REVERSE_ONLY):
                flash_attn_func(**given | {argument: dual})


@pytest.mark.parametrize('argument', ['q', 'q_descale', 's_aux'])
def test_tangents_of_e4m3(argument):
    given = dict.fromkeys('qkv', torch.randn(SHAPE).to(E4M3))
    given |= {'q_descale': torch.ones(SHAPE[0], SHAPE[2]), 's_aux': torch.zeros(SHAPE[2])}
    with forward_ad.dual_level():
        given[argument] = forward_ad.make_dual(given[argument], torch.zeros_like(given[argument]))
        with pytest.raises(NotImplementedError, match=REVERSE_ONLY):
            flash_attn_func(**given)


@every_forward_mode
@pytest.mark.parametrize('op', ['fwd', 'fwd_general', 'fwd_quantized'])
def test_forward_mode_of_the_ops_is_refused(op, derivative):
    call = getattr(OPS, op)
    derivative_calls.check_forward_mode_is_refused(derivative, lambda x: call(x, x, x)[0], CPU)
    x = torch.randn(SHAPE).bfloat16()
    _, tangent = torch.func.jvp(lambda y: call(x, x, x)[0] * y, (x,), (x,))
    assert torch.equal(tangent, call(x, x, x)[0] * x)


@pytest.mark.parametrize('argument', ['softmax_scale', 'softcap'])
def test_numbers_with_a_tangent(argument):
    x = torch.randn(SHAPE)
    with pytest.raises(NotImplementedError, match=REVERSE_ONLY):
        torch.func.jvp(lambda number: flash_attn_func(x, x, x, **{argument: number}),
                       (torch.tensor(0.5),), (torch.tensor(1.0),))


def test_forward_mode_of_the_gradients_is_refused():
    """Where dO alone has a tangent."""
    x = torch.randn(SHAPE, requires_grad=True)
    for function in FUNCTIONS.values():
        leaf = x.detach().bfloat16().requires_grad_()
        out = function(leaf)
        with forward_ad.dual_level():
            dout = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
            with pytest.raises(NotImplementedError, match='_func: expected first deriv'):
                torch.autograd.grad(out, leaf, dout)


# ----------------------------------------------------------------------------------------- numbers
@every_function
@pytest.mark.parametrize('argument, value', [('softmax_scale', 0.3), ('softcap', 2.0),
                                             ('softcap', 0.0)])
def test_numbers_that_require_grad_are_refused(argument, value, name):
    derivative_calls.check_number_is_refused(name, argument, value, CPU)


def test_parameters_as_numbers_are_refused():
    x = torch.randn(SHAPE)
    scale = torch.nn.Parameter(torch.tensor(0.3))
    with pytest.raises(NotImplementedError, match='requires_grad=True of softmax_scale'):
        flash_attn_func(x, x, x, softmax_scale=scale, pack_gqa=False, return_attn_probs=True)
    compiled = torch.compile(lambda x: flash_attn_func(x, x, x, softmax_scale=scale),
                             backend='eager')
    with pytest.raises(NotImplementedError, match='requires_grad=True of softmax_scale'):
        compiled(x)


# ------------------------------------------------------------------------------- gradients of e4m3
def e4m3_calls() -> dict:
    """Each with a tensor that requires its gradient, and the names of those that do."""
    x, qkv = torch.randn(SHAPE).to(E4M3), torch.randn(2, 5, 3, 2, 64).to(E4M3).requires_grad_()
    q, scale = x.clone().requires_grad_(), torch.ones(2, 2, requires_grad=True)
    rows, lists = x.flatten(0, 1), starts([5, 5], 'cpu')
    return {
        'q': lambda **o: flash_attn_func(q, x, x, **o),
        'v_descale': lambda **o: flash_attn_func(x, x, x, v_descale=scale, window_size=(2, 0), **o),
        's_aux': lambda **o: flash_attn_varlen_func(
            rows, rows, rows, lists, lists, 5, 5, s_aux=torch.zeros(2, requires_grad=True), **o),
        'q, k, v': lambda **o: flash_attn_qkvpacked_func(qkv, **o)}


@pytest.mark.parametrize('names', e4m3_calls())
def test_gradients_of_e4m3_are_refused_by_the_backward(names):
    call = e4m3_calls()[names]
    out, lse, max_logits = call(return_attn_probs=True, return_max_logits=True)
    assert not max_logits.requires_grad
    with torch.no_grad():
        expected = call(return_attn_probs=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    for result in (out, lse):
        with pytest.raises(NotImplementedError) as raised:
            result.sum().backward(retain_graph=True)
        assert ('expected requires_grad=False with float8_e4m3fn, got requires_grad=True of '
                f'{names}; hint: use flash_attn_fp8_func') in str(raised.value)


def test_gradients_of_e4m3_under_compile():
    """The forward breaks the graph."""
    torch._dynamo.reset()
    x = torch.randn(SHAPE).to(E4M3).requires_grad_()
    out = torch.compile(lambda x: flash_attn_func(x, x, x) * 2, backend='aot_eager')(x)
    assert torch.equal(out, flash_attn_func(x, x, x) * 2)
    with pytest.raises(NotImplementedError, match='requires_grad=False with float8_e4m3fn'):
        out.sum().backward()
