"""The ops of the package: schemas, CPU implementations, fakes; loads the CUDA implementations.

Imported before anything that calls an op. arguments.OPS lists what each takes, returns and writes.
In the namespace `flash_attn3`:
- `fwd`: attention and its LSE, with autograd (autograd.py). torch.compile and export see this op.
  Its argument deterministic is for the gradients.
- `_fwd`: `fwd` without autograd, for eager calls: a formula in Python costs microseconds.
- `_fwd_no_lse`: only the output, for eager calls that read no LSE. It may write into a given out.
- `fwd_general`: `fwd` with windows, chunks, softcap, sinks, packed sequences, masks, max logits.
- `attend`: `fwd_general` without autograd, and attention on float8_e4m3fn; it may write into a
  given out. In fp8.py. Calls without these arguments use the ops above, because each argument costs
  host time.
- `bwd`: the gradients of both, and of sinks (empty without them); `bwd_out`: into given tensors.

An op without autograd has no derivative and refuses none: the public functions do. A result that is
not asked for is empty, and so is out if it was given.

- `attend_cache`, `append_and_attend`: attention on a KV cache; the second writes new keys into it
  first, unless it refuses the call, and skips rows that the cache has no room for. In
  attend_cache.py.
- `combine`: merges results over parts of the keys. In merging.py.
- `bwd_chosen`: the gradients of keys that each query chooses. In chosen_gradients.py.
- `mask_lists`: the lists of tiles of an AttentionMask. In mask_lists.py.
- `quantize_fp8`, `quantize_qkv_fp8`; `fwd_quantized`: quantises, then attends, with autograd. In
  fp8.py.

Names of earlier versions are defined in aliases.py.

INVARIANT: the schemas are defined before the library of kernels is loaded; it only adds
implementations to them.
"""
from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from flash_attn3 import env
from flash_attn3.cpu import reference
from flash_attn3.ops import checks
from flash_attn3.arguments import ALIASES, OPS, schema, schemas, tuple_of
from flash_attn3.cpu.reference import Inputs, Mask, Score

LIBRARY = torch.library.Library('flash_attn3', 'DEF')
for _name in (*OPS, *ALIASES):
    LIBRARY.define(schema(_name), tags=(torch.Tag.pt2_compliant_tag,))


def bare(op: torch._ops.OpOverload):
    """The C++ function behind an op if PyTorch exposes it: the Python layer costs 0.2 us a call."""
    return getattr(op, '_op', op)


def register(name: str, on_cpu: Callable, fake: Callable) -> None:
    """Registers what an op does on CPU tensors, and on tensors without data."""
    LIBRARY.impl(name, on_cpu, 'CPU')
    torch.library.register_fake(f'flash_attn3::{name}', fake, lib=LIBRARY)


def register_vmap_by_loop(name: str) -> None:
    """Lets vmap call an op in a loop, which PyTorch does itself only for ops that write no tensor.

    Raises:
        RuntimeError: in a call, if the batch is empty or its entries share a written tensor.
    """
    op = getattr(torch.ops.flash_attn3, name).default
    written = [x.name for x in op._schema.arguments if x.alias_info and x.alias_info.is_write]
    listed = [x.name for x in op._schema.arguments]

    def rule(info, in_dims: tuple[int | None, ...], *arguments):
        shared = [key for key, x, dim in zip(listed, arguments, in_dims)
                  if key in written and x is not None and dim is None]
        if info.batch_size == 0 or shared:
            raise RuntimeError(checks.error(
                name, f'{shared[0]} with the batch of vmap' if shared else 'a batch of vmap',
                'one tensor for all' if shared else '0 entries'))
        results = [op(*(x if dim is None else x.select(dim, i)
                        for x, dim in zip(arguments, in_dims))) for i in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results))), (0,) * len(results[0])

    torch.library.register_vmap(f'flash_attn3::{name}', rule, lib=LIBRARY)


# --------------------------------------------------------------------------- CUDA implementations
_LIBRARY_PATH = Path(env.LIBRARY_PATH or Path(__file__).parents[1] / '_C.abi3.so')


def _load_kernels() -> str:
    """Loads the CUDA implementations. Returns why that was not possible, or ''."""
    if env.DISABLE_KERNELS:
        return 'FLASH_ATTN3_DISABLE_KERNELS=1 is set'
    if torch.version.cuda is None:
        return f'PyTorch {torch.__version__} is a CPU build'
    if not _LIBRARY_PATH.exists():
        return f'{_LIBRARY_PATH} does not exist (flash_attn3 was installed without kernels)'
    try:
        torch.ops.load_library(_LIBRARY_PATH)
        accepts = ctypes.CDLL(str(_LIBRARY_PATH)).flash_attn3_accept_schemas
    except (OSError, AttributeError) as error:
        return f'{_LIBRARY_PATH} could not be loaded: {error}'
    # The readers in C++ follow the lists of arguments and ops that the library was built with.
    accepts.restype, accepts.argtypes = ctypes.c_bool, [ctypes.c_char_p]
    return '' if accepts(schemas().encode()) else (
        f'{_LIBRARY_PATH} was built for other schemas than those of the Python files: reinstall')


def _warn_importer(text: str) -> None:
    """Warns at the line that imports the package."""
    package = str(Path(__file__).parents[1])
    frame = sys._getframe()
    while frame.f_back is not None and (frame.f_code.co_filename.startswith(package)
                                        or 'importlib' in frame.f_code.co_filename):
        frame = frame.f_back
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)


def _ask_driver() -> str:
    """Why the NVIDIA driver cannot run the library, or ''; warns of it.

    Reads only the version of the driver, which leaves CUDA uninitialised: a data loader may still
    fork.
    """
    if KERNELS_MISSING:
        return ''
    question = ctypes.CDLL(str(_LIBRARY_PATH)).flash_attn3_driver_problem
    question.restype = ctypes.c_char_p
    problem = question().decode()
    if problem:
        _warn_importer(problem)
    return problem


# Why no kernel can run in this process; '' if the library is loaded.
KERNELS_MISSING = _load_kernels()
# Why the driver cannot run those of the library; '' if it can, and without a driver or a library.
DRIVER_PROBLEM = _ask_driver()
_hopper_devices: dict[int, bool] = {}
# Devices whose ops can be called at once, as Tensor.get_device() numbers them: the CPU (-1), and
# GPUs for which kernels_serve() has returned True.
SERVED_DEVICES: set[int] = {-1}


def _is_hopper(device: torch.device) -> bool:
    if not torch.cuda.is_available():  # the device of a fake tensor
        return True
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor) == (9, 0)


def kernels_serve(device: torch.device) -> bool:
    """Whether our kernels serve a CUDA device: the library is loaded and the GPU is sm_90.

    Raises:
        RuntimeError: they would, but the driver is too old for them.
    """
    if KERNELS_MISSING:
        return False
    if torch.compiler.is_compiling():
        return _is_hopper(device)
    if device.index not in _hopper_devices:
        is_hopper = _is_hopper(device)
        if is_hopper and DRIVER_PROBLEM and torch.cuda.is_available():
            raise RuntimeError(DRIVER_PROBLEM)
        _hopper_devices[device.index] = is_hopper
        if is_hopper:
            SERVED_DEVICES.add(device.index)
    return _hopper_devices[device.index]


# ---------------------------------------------------------------------------- CPU implementations
# What follows q, k and v. PyTorch does not pass on trailing arguments that equal their defaults.
_Fwd = tuple_of('_Fwd', __name__, *OPS['fwd'].takes[1:])
_NoLse = tuple_of('_NoLse', __name__, *OPS['_fwd_no_lse'].takes[1:])


def softmax_scale_of(q: Tensor, softmax_scale: float | None) -> float:
    """The scale that an op was given, or head_dim ** -0.5; 1 for shapes that the op rejects."""
    if softmax_scale is not None:
        return softmax_scale
    return q.size(-1) ** -0.5 if q.dim() and q.size(-1) else 1.0


def _forward(q: Tensor, k: Tensor, v: Tensor, own: _Fwd | _NoLse) -> tuple[Tensor, Tensor]:
    checks.check_forward(dict(q=q, k=k, v=v), own)
    score = Score(softmax_scale_of(q, own.softmax_scale), mask=Mask(own.causal))
    return reference.attend(Inputs(q, k, v), score, reference.wide_dtype(q.dtype))[:2]


def _fwd_cpu(q: Tensor, k: Tensor, v: Tensor, *arguments) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, _Fwd(*arguments))


def _fwd_no_lse_cpu(q: Tensor, k: Tensor, v: Tensor, *arguments) -> Tensor:
    own = _NoLse(*arguments)
    result, _ = _forward(q, k, v, own)
    return result if own.out is None else own.out.copy_(result).new_empty(0)


# ------------------------------------------------------------------------------------------ fakes
# Fakes check only what they rely on; the ops check the rest on real tensors.
def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *_) -> tuple[Tensor, Tensor]:
    for name, x in zip('qkv', (q, k, v)):
        checks.check_rank('flash_attn_func', name, x, '(batch, seqlen, heads, head_dim)', 4)
    batch, seqlen_q, heads_q, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads_q, v.shape[3]))
    return out, q.new_empty((batch, heads_q, seqlen_q), dtype=reference.lse_dtype(q.dtype))


def _fwd_no_lse_fake(q: Tensor, k: Tensor, v: Tensor, *arguments) -> Tensor:
    out = _NoLse(*arguments).out
    return _fwd_fake(q, k, v)[0] if out is None else out.new_empty(0)


register('fwd', _fwd_cpu, _fwd_fake)
register('_fwd', _fwd_cpu, _fwd_fake)
register('_fwd_no_lse', _fwd_no_lse_cpu, _fwd_no_lse_fake)
register_vmap_by_loop('_fwd_no_lse')
