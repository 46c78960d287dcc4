"""Checks of user input.

The rules and their texts are C++ (csrc/checks, through the module `_plan`), shared by CPU and CUDA
tensors. This file turns tensors into what `_plan` reads. It checks the contents of tensors and the
arguments that never reach an op. Error texts have one form:
`flash_attn3.<op>: expected <thing>, got <value>; hint: <what to do>`.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.compiler import is_compiling

from flash_attn3 import arguments, env

try:
    from flash_attn3 import _plan
except ImportError as missing:
    raise ImportError(
        'flash_attn3: expected the extension module flash_attn3._plan, got a source tree that is '
        'not built; hint: run `pip install .` and import from outside the checkout') from missing

OP_ON_CACHE = 'flash_attn_with_kvcache'
_SINK_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Arguments that are numbers, by their types, but may be given as tensors of one number.
_NUMBERS = {argument.name: argument.type for argument in arguments.ARGUMENTS
            if not argument.type.startswith('Tensor')}
_INTEGERS = Integral, torch.SymInt, Tensor
_REALS = Real, torch.SymInt, torch.SymFloat, torch.SymBool, Tensor

# Arguments that only some calls may have.
_FOR_OTHERS = arguments.names('latent', 'scales')

# The GPU that checks and plans assume without one: H100 and H200 SXM.
HOPPER_SM_COUNT = 132
HOPPER_L2_BYTES = 50 << 20


def error(op: str, expected: str, got: str, hint: str = '') -> str:
    """The text of an error, in the package's one form."""
    return f'flash_attn3.{op}: expected {expected}, got {got}' + (f'; hint: {hint}' if hint else '')


def names_errors(function: Callable) -> Callable:
    """For a public function that calls others: its errors name it, not the one that it calls."""
    @functools.wraps(function)
    def call(*args, **kwargs):
        if is_compiling():    # nothing is raised while a graph is traced
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except RuntimeError as problem:
            start, _, rest = str(problem).partition(': expected ')
            if not start.startswith('flash_attn3.') or start.endswith(f'.{function.__name__}'):
                raise
            text = f'flash_attn3.{function.__name__}: expected {rest}'
            raise type(problem)(text).with_traceback(problem.__traceback__) from None
    return call


def dtype_name(dtype: torch.dtype) -> str:
    """'bfloat16' for torch.bfloat16."""
    return str(dtype).removeprefix('torch.')


def describe(tensor: Tensor, device_type: str | None = None) -> tuple:
    """A tensor as `_plan` reads it: (dtype, device type, device index, sizes, strides, address).

    device_type: replaces the true one.
    """
    device = tensor.device
    return (dtype_name(tensor.dtype), device_type or device.type, device.index or 0,
            tuple(tensor.shape), tensor.stride(), address_of(tensor))


def has_no_data(x: Tensor) -> bool:
    """Whether x is a meta or fake tensor, whose contents cannot be read."""
    return x.is_meta or (type(x) is not Tensor and is_fake(x))


def address_of(tensor: Tensor) -> int:
    """The address of its data; 0 without data: meta and fake tensors, and those of any type that
    AOTAutograd, torch.export and torch.func trace with.
    """
    if isinstance(tensor, FakeTensor):
        return 0    # PyTorch would warn
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def gpu_facts(tensor) -> dict[str, int]:
    """Multiprocessors and L2 of a CUDA tensor's GPU; those of an H100 for everything else."""
    if isinstance(tensor, Tensor) and tensor.is_cuda and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(tensor.device)
        return {'sm_count': properties.multi_processor_count, 'l2_bytes': properties.L2_cache_size}
    return {'sm_count': HOPPER_SM_COUNT, 'l2_bytes': HOPPER_L2_BYTES}


def problem_text(tensors: Mapping[str, Tensor | None], *groups, rules_of: str | None = None,
                 check: Callable = _plan.check_forward) -> str:
    """What is wrong with a call, or ''.

    tensors: by the names of csrc/call/attention_call.h: q, k, v, out, ...
    groups: the call's arguments, a named tuple or a mapping each.
    rules_of: 'cpu' or 'cuda': the device type whose rules apply, if all tensors are on one device.
        Default: that of the tensors.
    check: one of `_plan`: check_forward, check_fp8, check_backward, check_cache, check_append.
    """
    call = dict(tensors)
    for group in groups:
        call |= group if isinstance(group, Mapping) else group._asdict()
    given = {name: x for name, x in call.items() if isinstance(x, Tensor) and name not in _NUMBERS}
    one_device = len({x.device for x in given.values()}) == 1
    described = {name: describe(x, rules_of if one_device else None) for name, x in given.items()}
    try:
        return check(**{'sm_count': gpu_facts(call.get('q'))['sm_count']} | call | described)
    except TypeError:
        if not (text := _type_text(call)):
            raise
        return {'reason': text} if check.__name__.startswith('plan') else text


def _type_text(call: Mapping) -> str:
    """Which argument of a call has a wrong type, or ''. A call on a cache has cache_length."""
    is_packed = call.get('cu_seqlens_q') is not None
    op = (OP_ON_CACHE if 'cache_length' in call else
          'flash_attn_varlen_func' if is_packed else 'flash_attn_func')
    for name in ('q', 'k', 'v'):
        if not isinstance(call.get(name), (Tensor, tuple)):    # tuple: described
            suffix = '_cache' if 'cache_length' in call and name != 'q' else ''
            return error(op, f'{name}{suffix} to be a tensor', type(call.get(name)).__name__)
    return number_text(op, call)


def check_forward(tensors: Mapping[str, Tensor | None], *groups, **options) -> None:
    """Raises RuntimeError, as the CUDA op does, if the op cannot serve these arguments."""
    if text := problem_text(tensors, *groups, **options):
        raise RuntimeError(text)


def check_backward(tensors: Mapping[str, Tensor | None], *groups) -> None:
    """Raises RuntimeError if `bwd` cannot serve these arguments; with dq, dk and dv, `bwd_out`."""
    check_forward(tensors, *groups, check=_plan.check_backward)


def check_rank(op: str, name: str, x: Tensor, layout: str, rank: int) -> None:
    """For fakes, which rely on it: raises an error, as the op does, if x has another rank."""
    torch._check(x.dim() == rank, lambda: error(op, f'{name} to have the shape {layout}',
                                                str(tuple(x.shape))))


def reads_contents(x: Tensor) -> bool:
    """Whether a call on x checks the contents of its lists. On a GPU the host waits for them, which
    is impossible while a CUDA graph is captured.
    """
    return not x.is_cuda or (env.CHECK_CONTENTS
                             and not torch.cuda.is_current_stream_capturing())


def sequences_problem(name: str, starts: list[int], used: list[int], rows: int,
                      suffix: str | None = None) -> tuple[str, str] | None:
    """What was expected of the lists of a tensor with these rows, and what they are instead.

    suffix: that of the lists' names. Default: `_` and the name of the tensor.
    """
    suffix = f'_{name}' if suffix is None else suffix
    if starts[0] != 0:
        return f'cu_seqlens{suffix}[0] to be 0', str(starts[0])
    for sequence, (start, end) in enumerate(zip(starts, starts[1:])):
        if not start <= end <= rows:
            return (f'cu_seqlens{suffix}[{sequence + 1}], the end of sequence {sequence}, to be '
                    f'from {start}, its start, to {rows}, the rows of {name}', str(end))
    for sequence, (start, end, count) in enumerate(zip(starts, starts[1:], used)):
        if not 0 <= count <= end - start:
            return (f'seqused{suffix}[{sequence}] to be from 0 to {end - start}, the rows of '
                    f'sequence {sequence}', str(count))
    return None


# --------------------------------------------------------------------------- types of arguments
def number_text(op: str, numbers: NamedTuple | Mapping) -> str:
    """What is wrong with an argument that is no number, or ''. numbers: by the names of
    arguments.py, among others that are tensors.
    """
    known = numbers if isinstance(numbers, Mapping) else numbers._asdict()
    for name, x in known.items():
        is_integer = 'int' in _NUMBERS.get(name, '').lower()
        if name in _NUMBERS and not (x is None or isinstance(
                x, _INTEGERS if is_integer else _REALS)):
            public, = arguments.public_names(name)
            return error(op, f'{public} to be {"an integer" if is_integer else "a number"}',
                         repr(x))
    return ''


def reject_non_tensors(op: str, **given) -> None:
    """Raises RuntimeError for the first of these that is no tensor. Only q and caches must be."""
    for name, x in given.items():
        is_needed = x is not None or name == 'q' or name.endswith('_cache')
        if is_needed and not isinstance(x, Tensor):
            raise RuntimeError(error(op, f'{name} to be a tensor', type(x).__name__))


# ------------------------------------------------------------ arguments that never reach an op
# op: the function on a cache, unless another one is named.
def window_sides(window_size: Sequence[int] | Tensor, op: str = OP_ON_CACHE) -> tuple[int, int]:
    """The two numbers of a window. The ops check their values."""
    if isinstance(window_size, Tensor):
        if window_size.device.type != 'cpu':
            raise RuntimeError(error(
                op, 'window_size to be two ints (left, right), or a CPU tensor of them',
                f'a tensor on {window_size.device}',
                'pass window_size.tolist(), which waits for the device'))
        window_size = window_size.tolist()
    sides = tuple(window_size) if isinstance(window_size, (tuple, list)) else ()
    if len(sides) != 2 or not all(isinstance(side, (int, torch.SymInt)) for side in sides):
        raise RuntimeError(error(op, 'window_size to be two ints (left, right)',
                                 repr(window_size), '-1 means no limit'))
    return sides


def sinks_of(s_aux: Tensor | None, q: Tensor, op: str = OP_ON_CACHE) -> Tensor | None:
    """s_aux as the ops take it, differentiably."""
    if s_aux is None:
        return None
    reject_non_tensors(op, s_aux=s_aux)
    if s_aux.dtype not in _SINK_DTYPES or (s_aux.is_cuda and s_aux.dtype == torch.float64):
        raise RuntimeError(error(op, 's_aux.dtype to be float32, bfloat16 or float16',
                                 dtype_name(s_aux.dtype)))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return s_aux.to(wide).contiguous()


def length_bound(name: str, max_seqlen: int | Tensor, x: Tensor, op: str = OP_ON_CACHE) -> int:
    """max_seqlen, a hint for the planner, as a number. Where reading it would wait for a GPU or
    break a graph, this is the number of rows of x, the packed tensor.
    """
    if isinstance(max_seqlen, Tensor):
        if max_seqlen.device.type != 'cpu' or is_compiling():
            return x.size(0) if x.dim() else 0
        max_seqlen = max_seqlen.item()
    if is_compiling():
        return max_seqlen
    if not isinstance(max_seqlen, (int, torch.SymInt)) or max_seqlen < 0:
        raise RuntimeError(error(op, f'{name} to be an int of 0 or more', repr(max_seqlen)))
    return max_seqlen


def wants_determinism(is_asked: bool) -> bool:
    """Whether the argument or PyTorch's setting asks for repeatable gradients."""
    return is_asked or torch.are_deterministic_algorithms_enabled()


def unsupported(op: str = 'flash_attn_func', **given) -> list[str]:
    """One error text for each argument whose value this version does not support."""
    if unknown := set(given) - {*_FOR_OTHERS}:
        raise TypeError(f'unexpected argument {min(unknown)!r}')
    return [error(op, f'{name} to be None', 'a tensor' if isinstance(got, Tensor) else repr(got),
                  'it applies to float8_e4m3fn inputs only' if name.endswith('_descale') else
                  'only flash_attn_with_kvcache supports it, for absorbed MLA')
            for name, got in given.items() if got is not None]


def reject_unsupported(op: str, **arguments) -> None:
    """Raises NotImplementedError for the first unsupported argument, if there is one."""
    for text in unsupported(op, **arguments):
        raise NotImplementedError(text)


def gradient_with_out_text(op: str = 'flash_attn_func', **tensors: Tensor | None) -> str:
    """The error text, which names the tensors that require grad."""
    return error(op, 'requires_grad=False together with out=', requires_grad_text(**tensors),
                 'omit out=, or call under torch.no_grad()')


def requires_grad_text(**tensors: Tensor | None) -> str:
    """Which tensors require grad."""
    names = ', '.join(name for name, x in tensors.items() if x is not None and x.requires_grad)
    return f'requires_grad=True of {names}'


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd needs the gradient of one of these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
