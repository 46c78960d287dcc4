"""Gradients: of eager calls by an autograd.Function, of traced calls by a formula on the op `fwd`.

Two ways because they cost differently: the Function takes a quarter of the host time of a
registered formula, but torch.compile and torch.export need the op as one node of the graph. (A
Function with its own setup_context would also serve torch.func, for twice the host time.)
"""
from __future__ import annotations

import torch
from torch import Tensor

from flash_attn3 import _library, checks

_fwd = torch.ops.flash_attn3._fwd.default
_bwd = torch.ops.flash_attn3.bwd.default


def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, softmax_scale, causal, _, _ = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.softmax_scale = _library.softmax_scale_of(q, softmax_scale)
    ctx.causal = causal
    ctx.set_materialize_grads(False)


def _backward(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    """Gradients for the seven inputs of `fwd`; dout or dlse is None if only the other was used."""
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    # Grad mode is on here only for create_graph=True: the gradients may be differentiated.
    bwd = _Gradients.apply if torch.is_grad_enabled() else _bwd
    dq, dk, dv = bwd(dout, dlse, q, k, v, out, lse, ctx.softmax_scale, ctx.causal)
    return dq, dk, dv, None, None, None, None


class Attention(torch.autograd.Function):
    """The op `_fwd` with gradients for q, k and v, from both outputs; takes the op's arguments."""

    @staticmethod
    def forward(ctx, *arguments):
        output = _fwd(*arguments)
        _setup_context(ctx, arguments, output)
        return output

    backward = staticmethod(_backward)


class _Gradients(torch.autograd.Function):
    """The op `bwd`. To differentiate its results is an error; without this it would give zero."""

    @staticmethod
    def forward(ctx, *arguments):
        return _bwd(*arguments)

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(checks.error(
            'bwd', 'first derivatives only', 'a derivative of the gradient'))


torch.library.register_autograd('flash_attn3::fwd', _backward, setup_context=_setup_context,
                                lib=_library.LIBRARY)
