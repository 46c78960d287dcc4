"""Refusals of derivatives that this package does not support, where PyTorch would return zeros.

Called by the public functions and by autograd.py.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn3.ops import checks


def first_only(op: str) -> str:
    """The error text for a derivative of the gradients of a public function."""
    return checks.error(op, 'first derivatives only', 'a derivative of the gradient')


def _reverse_only(op: str) -> str:
    return checks.error(
        op, 'reverse-mode derivatives only', 'a tensor with a tangent, from torch.func.jvp, jacfwd '
        'or torch.autograd.forward_ad', 'torch.autograd.grad and backward() give the gradients')


class Refusal(torch.autograd.Function):
    """compute(*arguments), any derivative of which raises an error with this text.

    A forward without ctx and the rule for vmap let torch.func transform it.
    """
    generate_vmap_rule = True

    @staticmethod
    def forward(text: str, compute: Callable, *arguments):
        return compute(*arguments)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output) -> None:
        ctx.text = inputs[0]

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(ctx.text)

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(ctx.text)


def is_forward_mode() -> bool:
    """Whether tensors can have tangents now. torch.func enters such a level too."""
    return forward_ad._current_level >= 0


def reject_forward_mode(*tensors: Tensor | None, op: str = checks.OP_ON_CACHE) -> None:
    """Raises NotImplementedError if a tensor has a tangent, at any level of torch.func."""
    if is_forward_mode():
        Refusal.apply(_reverse_only(op), _nothing, *tensors)


def _nothing(first: Tensor, *_: Tensor | None) -> Tensor:
    return first.new_empty(0)


def reject_tangents(op: str, arguments: tuple) -> None:
    """reject_forward_mode() for an autograd kernel, which runs once per level of torch.func."""
    if is_forward_mode() and any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent
                                 is not None for x in arguments):
        raise NotImplementedError(_reverse_only(op))


def reject_of_scalars(op: str, **scalars: float | Tensor | None) -> None:
    """Raises NotImplementedError for a tensor in place of a number, if it needs a derivative.

    PyTorch converts tensors that need none.
    """
    for name, x in scalars.items():
        if x is None or type(x) is float or not isinstance(x, Tensor):
            continue
        reject_forward_mode(x, op=op)
        if checks.needs_grad(x):
            raise NotImplementedError(checks.error(
                op, f'{name} to be a number without a gradient', f'requires_grad=True of {name}',
                f'pass {name}.item(), or multiply q by the learned factor'))
