"""Checks of user input.

The rules and their words are C++ (csrc/dispatch/checks*.cpp, through the module `_plan`), the same
for CPU and CUDA tensors. This file turns tensors into what `_plan` reads, and holds the checks of
arguments that never reach an op and of what tensors contain. Error texts have one form:
`flash_attn3.<op>: expected <thing>, got <value>; hint: <what to do>`.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_attn3 import env

try:
    from flash_attn3 import _plan
except ImportError as missing:
    raise ImportError(
        'flash_attn3: expected the extension module flash_attn3._plan, got a source tree that is '
        'not built; hint: run `pip install .` and import from outside the checkout') from missing

# Numbers of core/problem.h, PackGqa.
PACK_GQA = {False: 0, True: 1, None: 2}

_SINK_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

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


def _describe_all(tensors: Sequence[Tensor | None], rules_of: str | None) -> list[tuple | None]:
    """Each described, as on a device of this type if all are on one."""
    one_device = len({x.device for x in tensors if x is not None}) == 1
    return [None if x is None else describe(x, rules_of if one_device else None) for x in tensors]


def problem_text(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, softmax_scale: float,
                 sm_margin: int, rules_of: str | None = None) -> str:
    """What is wrong with a call of the forward, or ''.

    rules_of: 'cpu' or 'cuda': the device type whose rules hold, if all tensors are on one device;
        default: that of the tensors.
    """
    described = _describe_all((q, k, v, out), rules_of)
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


# ------------------------------------------------------------------------------- of the general ops
# `general` is a general.General: the arguments that these ops have beyond q, k and v.
def _general_facts(q: Tensor, general) -> tuple:
    """From softmax_scale to softcap, as `_plan` reads them."""
    scale = general.softmax_scale
    scale = default_softmax_scale(q) if scale is None else scale
    return (scale, general.causal, general.window_left, general.window_right,
            general.attention_chunk, general.softcap)


def general_problem_text(tensors: Sequence[Tensor | None], general, sm_margin: int,
                         rules_of: str | None = None) -> str:
    """What is wrong with a call of the general forward, or ''.

    tensors: q, k, v and out, which may be None.
    rules_of: as in `problem_text`.
    """
    described = _describe_all((*tensors, *general[:4], general.sinks), rules_of)
    return _plan.check_general(*described, *_general_facts(tensors[0], general), sm_margin,
                               gpu_facts(tensors[0])['sm_count'])


def check_general(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, general, sm_margin: int,
                  rules_of: str | None = None) -> None:
    """Raises RuntimeError, as the CUDA op does, if the forward cannot serve these arguments."""
    if text := general_problem_text((q, k, v, out), general, sm_margin, rules_of):
        raise RuntimeError(text)


def fp8_problem_text(tensors: Sequence[Tensor | None], fp8, general, execution,
                     rules_of: str | None = None) -> str:
    """`general_problem_text` of float8_e4m3fn tensors. fp8: a fp8.Fp8, execution: a
    general.Execution.
    """
    described = _describe_all((*tensors, *fp8.scales, *general[:4], general.sinks), rules_of)
    return _plan.check_fp8(
        *described[:7], dtype_name(fp8.out_dtype), execution.return_max_logits,
        *described[7:], *_general_facts(tensors[0], general), execution.sm_margin,
        gpu_facts(tensors[0])['sm_count'])


def check_general_backward(tensors: Sequence[Tensor | None], general) -> None:
    """Raises RuntimeError, as the CUDA op `bwd_general` does, if it cannot serve these arguments.

    tensors: dout, dlse (or None), q, k, v, out, lse.
    """
    described = _describe_all((*tensors, *general[:4], general.sinks), None)
    if text := _plan.check_general_backward(*described, *_general_facts(tensors[2], general)):
        raise RuntimeError(text)


def check_contents(op: str, q: Tensor, k: Tensor, general) -> None:
    """Raises RuntimeError for sequences that leave their tensors, or rows that leave a sequence.

    Reads the lists, for which it waits for their device. Their shapes are right already.
    """
    if general.cu_seqlens_q is None:
        return
    for name, cu_seqlens, seqused, x in (
            ('q', general.cu_seqlens_q, general.seqused_q, q),
            ('k', general.cu_seqlens_k, general.seqused_k, k)):
        used = [] if seqused is None else seqused.tolist()
        if text := sequences_problem(name, cu_seqlens.tolist(), used, x.size(0)):
            raise RuntimeError(error(op, *text))


def check_cuda_contents(q: Tensor, k: Tensor, general) -> None:
    """`check_contents` of CUDA tensors, where it is asked for; a CUDA graph cannot wait for it."""
    if env.CHECK_CONTENTS and q.is_cuda and not torch.cuda.is_current_stream_capturing():
        check_contents('fwd', q, k, general)


def sequences_problem(name: str, starts: list[int], used: list[int],
                      rows: int) -> tuple[str, str] | None:
    """What was expected of the lists of a tensor with these rows, and what they are instead."""
    return _starts_problem(name, starts, rows) or _used_problem(name, starts, used)


def _starts_problem(name: str, starts: list[int], rows: int) -> tuple[str, str] | None:
    """What was expected of cu_seqlens, and what it is instead."""
    if starts[0] != 0:
        return f'cu_seqlens_{name}[0] to be 0', str(starts[0])
    for sequence, (start, end) in enumerate(zip(starts, starts[1:])):
        if not start <= end <= rows:
            return (f'cu_seqlens_{name}[{sequence + 1}], the end of sequence {sequence}, to be '
                    f'from {start}, its start, to {rows}, the rows of {name}', str(end))
    return None


def _used_problem(name: str, starts: list[int], used: list[int]) -> tuple[str, str] | None:
    """The same of seqused."""
    for sequence, (start, end, rows) in enumerate(zip(starts, starts[1:], used)):
        if not 0 <= rows <= end - start:
            return (f'seqused_{name}[{sequence}] to be from 0 to {end - start}, the rows of '
                    f'sequence {sequence}', str(rows))
    return None


# -------------------------------------------------------------------- of what never reaches an op
def window_sides(window_size: Sequence[int] | Tensor) -> tuple[int, int]:
    """The two numbers of a window; which ones, the ops check."""
    if isinstance(window_size, Tensor):
        if window_size.device.type != 'cpu':
            raise RuntimeError(error(
                'fwd', 'window_size to be two ints (left, right), or a CPU tensor of them',
                f'a tensor on {window_size.device}', 'window_size.tolist() waits for its device'))
        window_size = window_size.tolist()
    sides = tuple(window_size) if isinstance(window_size, (tuple, list)) else ()
    if len(sides) != 2 or not all(isinstance(side, (int, torch.SymInt)) for side in sides):
        raise RuntimeError(error('fwd', 'window_size to be two ints (left, right)',
                                 repr(window_size), '-1 is no limit'))
    return sides


def sinks_of(s_aux: Tensor | None, q: Tensor) -> Tensor | None:
    """s_aux as the ops take it, differentiably."""
    if s_aux is None:
        return None
    if s_aux.dtype not in _SINK_DTYPES or (s_aux.is_cuda and s_aux.dtype == torch.float64):
        raise RuntimeError(error('fwd', 's_aux.dtype to be float32, bfloat16 or float16',
                                 dtype_name(s_aux.dtype)))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return s_aux.to(wide).contiguous()


def length_bound(name: str, max_seqlen: int | Tensor, x: Tensor) -> int:
    """max_seqlen as a number. Where reading it would wait for a GPU or break a graph, the rows of
    x, the packed tensor, stand for it: it is a hint for the planner.
    """
    if isinstance(max_seqlen, Tensor):
        if max_seqlen.device.type != 'cpu' or torch.compiler.is_compiling():
            return x.size(0) if x.dim() else 0
        max_seqlen = max_seqlen.item()
    if torch.compiler.is_compiling():
        return max_seqlen
    if not isinstance(max_seqlen, (int, torch.SymInt)) or max_seqlen < 0:
        raise RuntimeError(error('fwd', f'{name} to be an int of 0 or more', repr(max_seqlen)))
    return max_seqlen


def default_softmax_scale(q: Tensor) -> float:
    """head_dim ** -0.5; 1 for shapes that the op is going to reject."""
    shape = q.shape
    return shape[-1] ** -0.5 if shape and shape[-1] else 1.0


def wants_determinism(deterministic: bool) -> bool:
    """Whether the gradients of a call have to repeat: by its argument or PyTorch's setting."""
    return deterministic or torch.are_deterministic_algorithms_enabled()


def unsupported(op: str = 'flash_attn_func', *, qv=None, q_descale=None, k_descale=None,
                v_descale=None, num_splits=1) -> list[str]:
    """One error text for each argument that asks for something this version does not have."""
    asked = {
        'qv': ('None', qv, qv is not None),
        'q_descale': ('None', q_descale, q_descale is not None),
        'k_descale': ('None', k_descale, k_descale is not None),
        'v_descale': ('None', v_descale, v_descale is not None),
        'num_splits': ('0 or 1', num_splits, num_splits not in (0, 1)),
    }
    return [error(op, f'{name} to be {expected}',
                  'a tensor' if isinstance(got, Tensor) else repr(got),
                  'it is for q, k and v of float8_e4m3fn' if name.endswith('_descale') else
                  'this version has nothing else')
            for name, (expected, got, is_asked) in asked.items() if is_asked]


def reject_unsupported(op: str, **arguments) -> None:
    """Raises NotImplementedError for the first unsupported argument, if there is one."""
    for text in unsupported(op, **arguments):
        raise NotImplementedError(text)


def gradient_with_out_text(op: str = 'flash_attn_func', **tensors: Tensor | None) -> str:
    """The error text, which names the tensors that require grad."""
    return error(op, 'no gradient together with out=', requires_grad_text(**tensors),
                 'leave out= away, or call under torch.no_grad()')


def requires_grad_text(**tensors: Tensor | None) -> str:
    """Which tensors require grad."""
    names = ', '.join(name for name, x in tensors.items() if x is not None and x.requires_grad)
    return f'requires_grad=True of {names}'


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd asks for the gradient of one of them."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
