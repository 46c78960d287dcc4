"""The public functions as functions of one tensor, and the checks of derivatives that they refuse:
for tests/cpu/test_derivatives.py and tests/gpu/test_derivatives.py.
"""
from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn3 import (flash_attn_fp8_func, flash_attn_func, flash_attn_qkvpacked_func,
                         flash_attn_varlen_fp8_func, flash_attn_varlen_func)

from tests.support.lists import starts

OPS = torch.ops.flash_attn3
SHAPE = 2, 5, 2, 64    # batch, seqlen, heads, head_dim
OPTIONS = {'plain': {}, 'window': {'window_size': (2, 1), 'causal': True}}
every_option = pytest.mark.parametrize('options', OPTIONS.values(), ids=OPTIONS)
REVERSE_ONLY = ('expected reverse-mode derivatives only, got a tensor with a '
                'tangent')


def _packed(function: Callable, x: Tensor, **options):
    rows, lists = x.flatten(0, 1), starts([SHAPE[1]] * SHAPE[0], x.device)
    return function(rows, rows, rows, lists, lists, SHAPE[1], SHAPE[1], **options)


def _in_one(x: Tensor, **options):
    return flash_attn_qkvpacked_func(x.unsqueeze(2).expand(-1, -1, 3, -1, -1), **options)


# Each of one tensor, which is q, k and v.
FUNCTIONS = {
    'flash_attn_func': lambda x, **options: flash_attn_func(x, x, x, **options),
    'flash_attn_varlen_func': functools.partial(_packed, flash_attn_varlen_func),
    'flash_attn_qkvpacked_func': _in_one,
    'flash_attn_fp8_func': lambda x, **options: flash_attn_fp8_func(x, x, x, **options),
    'flash_attn_varlen_fp8_func': functools.partial(_packed, flash_attn_varlen_fp8_func)}
every_function = pytest.mark.parametrize('name', FUNCTIONS)


# ------------------------------------------------------------------------------------ forward mode
def _dual(attention: Callable, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(attention(forward_ad.make_dual(x, x))).tangent


def _dual_leaf(attention: Callable, x: Tensor) -> Tensor:
    return _dual(attention, x.detach().requires_grad_())


def _jvp(attention: Callable, x: Tensor) -> Tensor:
    return torch.func.jvp(attention, (x,), (x,))[1]


def _second_jvp(attention: Callable, x: Tensor) -> Tensor:
    """Attention of a tensor with a tangent of the outer level alone."""
    return _jvp(lambda y: _jvp(lambda z: z * attention(y), x), x)


def _compiled_jvp(attention: Callable, x: Tensor) -> Tensor:
    torch._dynamo.reset()
    return torch.compile(functools.partial(_jvp, attention), backend='eager')(x)


FORWARD_MODES = {'dual': _dual, 'dual_leaf': _dual_leaf, 'jvp': _jvp, 'second_jvp': _second_jvp,
                 'jacfwd': lambda attention, x: torch.func.jacfwd(attention)(x),
                 'compiled': _compiled_jvp}
every_forward_mode = pytest.mark.parametrize('derivative', FORWARD_MODES.values(),
                                             ids=FORWARD_MODES)


def check_forward_mode_is_refused(derivative: Callable, attention: Callable,
                                  device: torch.device) -> None:
    x = torch.randn(SHAPE, device=device).bfloat16()
    with pytest.raises(NotImplementedError) as raised:
        derivative(attention, x)
    assert REVERSE_ONLY in str(raised.value)


def check_constants_are_served(attention: Callable, device: torch.device) -> None:
    """Where forward mode is on, but attention has nothing to do with it; also its gradient."""
    x = torch.randn(SHAPE, device=device).bfloat16()
    expected = attention(x).view_as(x)
    value, tangent = torch.func.jvp(lambda y: attention(x).view_as(x) * y, (x,), (x,))
    assert torch.equal(value, expected * x) and torch.equal(tangent, expected * x)
    leaf = x.detach().requires_grad_()
    wanted = torch.autograd.grad(attention(leaf).sum(), leaf)[0]
    with forward_ad.dual_level():
        got = torch.autograd.grad(attention(leaf).sum(), leaf)[0]
    assert torch.equal(got, wanted)


# ----------------------------------------------------------------------------------------- numbers
def check_number_is_refused(name: str, argument: str, value: float, device: torch.device) -> None:
    """As a tensor that asks for its gradient; one that does not is a number."""
    x = torch.randn(SHAPE, device=device).bfloat16()
    for tensor in (x, x.detach().requires_grad_()):
        given = torch.tensor(value, requires_grad=True)
        with pytest.raises(NotImplementedError) as raised:
            FUNCTIONS[name](tensor, **{argument: given})
        assert str(raised.value).startswith(
            f'flash_attn3.{name}: expected {argument} to be a number without a gradient, got '
            f'requires_grad=True of {argument}; hint: ')
        expected = FUNCTIONS[name](tensor, **{argument: value})
        assert torch.equal(FUNCTIONS[name](tensor, **{argument: given.detach()}), expected)
        with torch.no_grad():
            assert torch.equal(FUNCTIONS[name](tensor, **{argument: given}), expected)
