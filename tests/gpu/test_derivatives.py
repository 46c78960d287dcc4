"""Derivatives that are not supported: an error each, and never zeros."""
import pytest
import torch

from flash_attn3 import flash_attn_func

from tests.support import derivative_calls
from tests.support.derivative_calls import (FUNCTIONS, OPS, SHAPE, every_forward_mode,
                                            every_function, every_option)
from tests.support.fp8_data import E4M3


@pytest.mark.smoke
@every_forward_mode
@every_option
@every_function
def test_forward_mode_is_refused(name, options, derivative, device):
    derivative_calls.check_forward_mode_is_refused(
        derivative, lambda x: FUNCTIONS[name](x, **options), device)


@every_option
@every_function
def test_what_has_no_tangent_is_served(name, options, device):
    derivative_calls.check_constants_are_served(
        lambda x: FUNCTIONS[name](x, **options, deterministic=True), device)


@every_forward_mode
@pytest.mark.parametrize('op', ['fwd', 'fwd_general', 'fwd_quantized'])
def test_forward_mode_of_the_ops_is_refused(op, derivative, device):
    derivative_calls.check_forward_mode_is_refused(
        derivative, lambda x: getattr(OPS, op)(x, x, x)[0], device)


@every_function
@pytest.mark.parametrize('argument, value', [('softmax_scale', 0.3), ('softcap', 2.0)])
def test_numbers_that_require_grad_are_refused(argument, value, name, device):
    derivative_calls.check_number_is_refused(name, argument, value, device)


def test_gradients_of_e4m3_are_refused_by_the_backward(device):
    x = torch.randn(SHAPE, device=device).to(E4M3).requires_grad_()
    out = flash_attn_func(x, x, x, causal=True)
    assert torch.equal(out, flash_attn_func(x.detach(), x.detach(), x.detach(), causal=True))
    with pytest.raises(NotImplementedError, match='expected requires_grad=False with float8_e4m3fn'
                                                  ', got requires_grad=True of q, k, v; hint: '):
        out.sum().backward()
