"""Checks of user input.

The rules and their words are C++ (csrc/dispatch/checks.cpp, through the module `_plan`), the same
for CPU and CUDA tensors. This file turns tensors into what `_plan` reads, and holds the checks of
arguments that never reach an op. Error texts have one form:
`flash_attn3.<op>: expected <thing>, got <value>; hint: <what to do>`.
"""
from __future__ import annotations

import torch
from torch import Tensor

try:
    from flash_attn3 import _plan
except ImportError as missing:
    raise ImportError(
        'flash_attn3: expected the extension module flash_attn3._plan, got a source tree that is '
        'not built; hint: run `pip install .` and import from outside the checkout') from missing

# Numbers of core/problem.h, PackGqa.
PACK_GQA = {False: 0, True: 1, None: 2}

# The GPU that checks and plans assume where there is none: H100 and H200 SXM.
HOPPER_SM_COUNT = 132
HOPPER_L2_BYTES = 50 << 20


def error(op: str, expected: str, got: str, hint: str = '') -> str:
    """The text of an error, in the package's one form."""
    return f'flash_attn3.{op}: expected {expected}, got {got}' + (f'; hint: {hint}' if hint else '')


def dtype_name(dtype: torch.dtype) -> str:
    """'bfloat16' for torch.bfloat16."""
    return str(dtype).removeprefix('torch.')


def describe(tensor: Tensor, device_type: str | None = None) -> tuple:
    """A tensor as `_plan` reads it: (dtype, device type, device index, sizes, strides, address).

    device_type: say so instead of the true one.
    """
    device = tensor.device
    address = 0 if device.type == 'meta' else tensor.data_ptr()
    return (dtype_name(tensor.dtype), device_type or device.type, device.index or 0,
            tuple(tensor.shape), tensor.stride(), address)


def gpu_facts(tensor) -> dict[str, int]:
    """Multiprocessors and L2 of a CUDA tensor's GPU; those of an H100 for everything else."""
    if isinstance(tensor, Tensor) and tensor.is_cuda and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(tensor.device)
        return {'sm_count': properties.multi_processor_count, 'l2_bytes': properties.L2_cache_size}
    return {'sm_count': HOPPER_SM_COUNT, 'l2_bytes': HOPPER_L2_BYTES}


def problem_text(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, softmax_scale: float,
                 sm_margin: int, rules_of: str | None = None) -> str:
    """What is wrong with a call of the forward, or ''.

    rules_of: 'cpu' or 'cuda': the device type whose rules hold, if all tensors are on one device;
        default: that of the tensors.
    """
    tensors = (q, k, v, out)
    one_device = all(x is None or x.device == q.device for x in tensors)
    device_type = rules_of if one_device else None
    described = (None if x is None else describe(x, device_type) for x in tensors)
    return _plan.check_forward(*described, softmax_scale, sm_margin, PACK_GQA[None],
                               gpu_facts(q)['sm_count'])


def check_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, softmax_scale: float,
                  sm_margin: int, rules_of: str | None = None) -> None:
    """Raises RuntimeError, as the CUDA op does, if the forward cannot serve these arguments."""
    if text := problem_text(q, k, v, out, softmax_scale, sm_margin, rules_of):
        raise RuntimeError(text)


def check_backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
                   lse: Tensor, softmax_scale: float, gradients: tuple[Tensor, ...] = ()) -> None:
    """Raises RuntimeError, as the CUDA op does, if the backward cannot serve these arguments.

    gradients: (dq, dk, dv) of a call of `bwd_out`; without them it is one of `bwd`.
    """
    described = (None if x is None else describe(x) for x in (dout, dlse, q, k, v, out, lse))
    if text := _plan.check_backward(*described, softmax_scale, *map(describe, gradients)):
        raise RuntimeError(text)


def default_softmax_scale(q: Tensor) -> float:
    """head_dim ** -0.5; 1 for shapes that the op is going to reject."""
    shape = q.shape
    return shape[-1] ** -0.5 if shape and shape[-1] else 1.0


def wants_determinism(deterministic: bool) -> bool:
    """Whether the gradients of a call have to repeat: by its argument or PyTorch's setting."""
    return deterministic or torch.are_deterministic_algorithms_enabled()


def unsupported(op: str = 'flash_attn_func', *, qv=None, q_descale=None, k_descale=None,
                v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
                num_splits=1) -> list[str]:
    """One error text for each argument that asks for something this version does not have."""
    asked = {
        'qv': ('None', qv, qv is not None),
        'q_descale': ('None', q_descale, q_descale is not None),
        'k_descale': ('None', k_descale, k_descale is not None),
        'v_descale': ('None', v_descale, v_descale is not None),
        'window_size': ('(-1, -1)', window_size, tuple(window_size) != (-1, -1)),
        'attention_chunk': ('0', attention_chunk, attention_chunk != 0),
        'softcap': ('0.0', softcap, softcap != 0.0),
        'num_splits': ('0 or 1', num_splits, num_splits not in (0, 1)),
    }
    return [error(op, f'{name} to be {expected}',
                  'a tensor' if isinstance(got, Tensor) else repr(got),
                  'this version has nothing else')
            for name, (expected, got, is_asked) in asked.items() if is_asked]


def reject_unsupported(op: str, **arguments) -> None:
    """Raises NotImplementedError for the first unsupported argument, if there is one."""
    for text in unsupported(op, **arguments):
        raise NotImplementedError(text)


def gradient_with_out_text(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> str:
    """The error text, which names the tensors that require grad."""
    tensors = {'q': q, 'k': k, 'v': v, 'out': out}
    names = ', '.join(name for name, x in tensors.items() if x.requires_grad)
    return error('flash_attn_func', 'no gradient together with out=',
                 f'requires_grad=True of {names}',
                 'leave out= away, or call under torch.no_grad()')


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd asks for the gradient of one of them."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
