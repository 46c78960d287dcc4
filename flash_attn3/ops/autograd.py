"""Gradients: of eager calls by an autograd.Function, of traced calls by a formula on the ops `fwd`,
`fwd_general` and `fwd_quantized`.

WHY both: a Function takes a quarter of the host time of a registered formula, but torch.compile and
torch.export need the op as one node of the graph. (A Function with its own setup_context would also
serve torch.func, for twice the host time.)
"""
from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from flash_attn3.ops import checks, dense_and_varlen, derivatives, fp8, fp8_gradients, library
from flash_attn3.api.packing import unpack
from flash_attn3.ops.dense_and_varlen import Execution, MaskTensors

_fwd = torch.ops.flash_attn3._fwd.default
_bwd = torch.ops.flash_attn3.bwd.default
_attend = torch.ops.flash_attn3.attend.default
_bwd_out = torch.ops.flash_attn3.bwd_out.default


_FUNCTIONS = {'fwd': 'flash_attn_func', 'fwd_general': 'flash_attn_func',
              'fwd_quantized': 'flash_attn_fp8_func', 'fwd_ring': 'ring_attention',
              'all_to_all': 'ulysses_attention'}


def _function_of(op: str, arguments: tuple) -> str:
    """The public function of a traced op, as errors name it."""
    is_packed = (op in ('fwd_general', 'fwd_quantized') and len(arguments) > 3
                 and arguments[3] is not None)    # cu_seqlens_q
    return _FUNCTIONS[op].replace('attn_', 'attn_varlen_' if is_packed else 'attn_')


class _Formulas(torch.library.Library):
    """The formulas of traced calls. They refuse forward mode, in which PyTorch would skip them."""

    def impl(self, op_name: str, kernel: Callable, *where: str, **options) -> None:
        @functools.wraps(kernel)
        def checked(keyset, *arguments):
            derivatives.reject_tangents(_function_of(op_name.split('::')[-1], arguments), arguments)
            return kernel(keyset, *arguments)
        super().impl(op_name, checked, *where, **options)


FORMULAS = _Formulas('flash_attn3', 'FRAGMENT')


def define(op: str, forward: Callable, setup_context: Callable, backward: Callable) -> Callable:
    """Gives gradients to a traced op by a formula, and to eager calls by a Function, which this
    returns. forward: computes an eager call, from the arguments of the op.
    """
    torch.library.register_autograd(f'flash_attn3::{op}', backward, setup_context=setup_context,
                                    lib=FORMULAS)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            output = forward(*arguments)
            setup_context(ctx, arguments, output)
            return output

    Function.backward = staticmethod(backward)
    return Function.apply


def _keep(ctx, tensors: tuple[Tensor, ...], scale: float | None, causal: bool,
          deterministic: bool) -> None:
    """Keeps inputs, outputs and scalars of the forward for the backward.

    PyTorch's setting of deterministic algorithms is read now, in the forward.
    """
    ctx.save_for_backward(*tensors)
    ctx.scalars = (library.softmax_scale_of(tensors[0], scale), causal,
                   checks.wants_determinism(deterministic))
    ctx.set_materialize_grads(False)


def _gradients(ctx, compute: Callable, dout: Tensor | None, dlse: Tensor | None, *inputs):
    """The gradients that compute returns. dout or dlse is None if only the other was used.

    inputs: the arguments of compute between the gradients and the scalars.
    """
    *_, out, _ = inputs
    if dout is None:
        dout = torch.zeros_like(out)
    return first_derivatives('flash_attn_func', compute, dout, dlse, *inputs,
                             *ctx.scalars)


def first_derivatives(op: str, compute: Callable, *arguments):
    # Grad mode is on here only for create_graph=True: the gradients may be differentiated.
    if torch.is_grad_enabled() or derivatives.is_forward_mode():
        return derivatives.Refusal.apply(derivatives.first_only(op), compute, *arguments)
    return compute(*arguments)


# ------------------------------------------------------------------------------------ q, k and v
def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, scale, causal, _, _, deterministic = inputs
    _keep(ctx, (q, k, v, *output), scale, causal, deterministic)


def _backward(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    """Gradients for the eight inputs of `fwd`."""
    dq, dk, dv, _ = _gradients(ctx, _bwd, dout, dlse, *ctx.saved_tensors)
    return dq, dk, dv, None, None, None, None, None


# Takes the arguments of the op `fwd`: those of `_fwd`, then deterministic.
attention = define('fwd', lambda *arguments: _fwd(*arguments[:-1]), _setup_context, _backward)


# -------------------------------------------------------------------------- q, k and v in a tensor
class PackedAttention(torch.autograd.Function):
    """The op `_fwd` on views of a packed tensor; its gradient is packed in the same way.

    Takes the tensor and num_heads_q, as `unpack`, then the scalars of the op `fwd`.
    """

    @staticmethod
    def forward(ctx, qkv, num_heads_q, *scalars):
        scale, causal, _, _, deterministic = scalars
        output = _fwd(*unpack(qkv, num_heads_q), *scalars[:-1])
        _keep(ctx, (qkv, *output), scale, causal, deterministic)
        ctx.num_heads_q = num_heads_q
        return output

    @staticmethod
    def backward(ctx, dout, dlse):
        qkv, *output = ctx.saved_tensors
        dqkv = _gradients(ctx, _bwd_packed, dout, dlse, qkv, ctx.num_heads_q, *output)
        return dqkv, None, None, None, None, None, None


def _bwd_packed(dout: Tensor, dlse: Tensor | None, qkv: Tensor, num_heads_q: int | None,
                out: Tensor, lse: Tensor, *scalars) -> Tensor:
    """The op `bwd_out`, which writes the gradients of q, k and v into one packed tensor."""
    dqkv = torch.empty_like(qkv)
    if dqkv.stride(-1) != qkv.stride(-1):    # the elements of qkv overlap
        dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    _bwd_out(dout, dlse, *unpack(qkv, num_heads_q), out, lse, *unpack(dqkv, num_heads_q), *scalars)
    return dqkv


# --------------------------------------------------------------- q, k, v and sinks, the general op
def _setup_general_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, *others = inputs
    out, lse, max_logits = output
    arguments, execution, mask = dense_and_varlen.split(others)
    tensors, ctx.general = dense_and_varlen.take_tensors(arguments)
    ctx.mark_non_differentiable(max_logits)
    ctx.save_for_backward(q, k, v, out, lse, *mask, *tensors)
    ctx.deterministic = checks.wants_determinism(execution.deterministic)
    ctx.set_materialize_grads(False)


def _general_backward(ctx, dout: Tensor | None, dlse: Tensor | None, _,
                      compute: Callable = _bwd) -> tuple:
    """Gradients for the inputs of `fwd_general`: q, k, v and sinks have one."""
    q, k, v, out, lse, *others = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    count = len(MaskTensors._fields)
    arguments = dense_and_varlen.put_tensors(ctx.general, others[count:])
    of_backward = dense_and_varlen.for_backward(arguments, ctx.deterministic,
                                                MaskTensors(*others[:count]))
    dq, dk, dv, dsinks = first_derivatives(dense_and_varlen.function_of(arguments), compute, dout,
                                           dlse, q, k, v, out, lse, *of_backward)
    return (dq, dk, dv, *dense_and_varlen.gradients_of(arguments, dsinks),
            *[None] * len((*Execution._fields, *MaskTensors._fields)))


def _forward_general(q: Tensor, k: Tensor, v: Tensor, *arguments) -> tuple[Tensor, ...]:
    general, execution, mask = dense_and_varlen.split(arguments)
    rest = (*fp8.EightBit(), *mask) if any(x is not None for x in mask) else ()
    return _attend(q, k, v, None, *general, *execution[:-1], *rest)    # without deterministic


general_attention = define('fwd_general', _forward_general, _setup_general_context,
                           _general_backward)


class SplitAttention(torch.autograd.Function):
    """Attention by a function of q, k and v that returns (out, lse), with the gradients of
    `general_attention`. Takes that function, then the arguments of `fwd_general`.
    """

    @staticmethod
    def forward(ctx, compute, *arguments):
        out, lse = compute(*arguments[:3])
        _setup_general_context(ctx, arguments, (out, lse, lse.new_empty(0)))
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        return None, *_general_backward(ctx, dout, dlse, None)


# ------------------------------------------------- q, k, v and sinks, quantised on the way forward
# A straight-through estimator: `bwd` computes the gradients at the given or the rounded q, k and v.
def _setup_quantized_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, *others = inputs
    own, execution, ctx.quantization, mask = fp8.split(tuple(others))
    _setup_general_context(ctx, (q, k, v, *own, *execution, *mask), output)


def _quantized_backward(ctx, *gradients: Tensor | None) -> tuple:
    """Gradients for the inputs of `fwd_quantized`, and further Nones, which PyTorch drops."""
    compute = (functools.partial(fp8_gradients.of_rounded, ctx.quantization)
               if ctx.quantization.rounded_backward else _bwd)
    return (*_general_backward(ctx, *gradients, compute), *(None for _ in fp8.Quantization._fields))


quantized_attention = define('fwd_quantized', fp8.forward_quantized, _setup_quantized_context,
                             _quantized_backward)
