"""PyTorch's hook for FA3 in tests: on CPU tensors, counted, and held to the bar."""
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn3.cpu import reference
from flash_attn3.compat import functions
from flash_attn3.integrations import sdpa

from tests.support import compare


def serve_cpu(patch: pytest.MonkeyPatch) -> None:
    """PyTorch overrides aten kernels for CUDA tensors alone. From here on its own overrides are
    registered for CPU tensors instead, and its check of the device is skipped; all else is
    PyTorch's.
    """
    from torch.nn.attention import _fa3 as hook

    class OnCpu(Library):
        def __init__(self, namespace, kind, _):
            super().__init__(namespace, kind, 'CPU')

        def impl(self, name, function, _):
            super().impl(name, function, 'CPU')
    patch.setattr(hook, 'Library', OnCpu)
    patch.setattr(hook, '_fa3_common_support_error', lambda *_: None)


@contextmanager
def enabled() -> Iterator[None]:
    """sdpa.enable(), and disable() at the end."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')    # PyTorch's own, of an override
        sdpa.enable()
    try:
        yield
    finally:
        sdpa.disable()


def count_calls(patch: pytest.MonkeyPatch) -> list[str]:
    """'fwd' and 'bwd' as `torch.ops.flash_attn_3` runs, in any thread; filled from here on."""
    calls = []
    for name, short in (('forward', 'fwd'), ('_flash_attn_backward', 'bwd')):
        def counted(*arguments, short=short, function=getattr(functions, name)):
            calls.append(short)
            return function(*arguments)
        patch.setattr(functions, name, counted)
    return calls


def check(got: Sequence[Tensor], inputs: Sequence[Tensor], dout: Tensor,
          score: reference.Score) -> None:
    """out and gradients of dense (batch, seqlen, heads, head_dim) inputs, by the project's bar."""
    inputs = reference.Inputs(*(x.detach() for x in inputs))

    def computed(dtype):
        cast = inputs.to(dtype)
        return (reference.attend(cast, score).out,
                *reference.attend_backward(dout.to(dtype), None, cast, score)[:3])
    floors = compare.cancellation_floors(inputs[:3], dout, score.scale)
    for name, x, wide, plain in zip(('out', 'dq', 'dk', 'dv'), got, computed(torch.float64),
                                    computed(dout.dtype)):
        compare.check_close(x, wide, plain, name, floors.get(name, 0.0))


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """scaled_dot_product_attention; on the CPU the op that it calls for CUDA tensors."""
    if q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal,
                                              enable_gqa=q.size(1) != k.size(1))
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[0]


def flash_sdpa(query: Tensor, key: Tensor, value: Tensor, attn_mask: None = None,
               dropout_p: float = 0.0, is_causal: bool = False,
               scale: float | None = None) -> Tensor:
    """In place of scaled_dot_product_attention for clients on the CPU: the same op."""
    assert attn_mask is None
    return torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, scale=scale)[0]


def with_gradients(inputs: list[Tensor], dout: Tensor, function: Callable) -> tuple[Tensor, ...]:
    """out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))


def by_math(inputs: list[Tensor], dout: Tensor, causal: bool,
            dtype: torch.dtype) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of PyTorch's math backend in dtype; by default it casts 16 bits up."""
    old = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            return with_gradients([x.to(dtype) for x in inputs], dout, lambda q, k, v: (
                F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)))
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(old)
