"""The ops of the package: schemas, CPU implementations, fakes; loads the CUDA implementations.

Imported before anything that calls an op. In the namespace `flash_attn3`:
- `fwd`: attention and its LSE, with autograd (autograd.py). What torch.compile and export see.
- `_fwd`: the same without autograd, for eager calls: a formula in Python costs microseconds.
- `fwd_out`: writes into a given output, returns the LSE; no autograd.
- `bwd`: the gradients of `fwd`.

INVARIANT: the schemas are defined before the library of kernels is loaded; it only adds
implementations to them.
"""
from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from flash_attn3 import checks, env, reference

_SCALARS = 'float softmax_scale, bool causal, bool? pack_gqa, int sm_margin'
_SCHEMAS = (
    f'fwd(Tensor q, Tensor k, Tensor v, {_SCALARS}) -> (Tensor, Tensor)',
    f'_fwd(Tensor q, Tensor k, Tensor v, {_SCALARS}) -> (Tensor, Tensor)',
    f'fwd_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, {_SCALARS}) -> Tensor',
    'bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, '
    'float softmax_scale, bool causal) -> (Tensor, Tensor, Tensor)',
)

LIBRARY = torch.library.Library('flash_attn3', 'DEF')
for _schema in _SCHEMAS:
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


# --------------------------------------------------------------------------- CUDA implementations
_LIBRARY_PATH = Path(env.LIBRARY_PATH or Path(__file__).with_name('_C.abi3.so'))


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
    except OSError as error:
        return f'{_LIBRARY_PATH} could not be loaded: {error}'
    return ''


# Why no kernel can run in this process; '' if the library is loaded.
KERNELS_MISSING = _load_kernels()
_hopper_devices: dict[int, bool] = {}
# Where the op can be called at once, as Tensor.get_device() names it: the CPU (-1) and the GPUs for
# which kernels_serve() has said yes.
SERVED_DEVICES: set[int] = {-1}


def _is_hopper(device: torch.device) -> bool:
    if not torch.cuda.is_available():  # then it is the device of a fake tensor
        return True
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor) == (9, 0)


def _driver_problem() -> str:
    """What is wrong with the NVIDIA driver for the loaded library, or ''."""
    question = ctypes.CDLL(str(_LIBRARY_PATH)).flash_attn3_driver_problem
    question.restype = ctypes.c_char_p
    return question().decode()


def kernels_serve(device: torch.device) -> bool:
    """Whether our kernels serve a CUDA device: the library is loaded and the GPU is sm_90.

    Raises:
        RuntimeError: they would, but the driver is too old for them. Asked on the first call for a
            device, never at import: a data loader may fork after it.
    """
    if KERNELS_MISSING:
        return False
    if torch.compiler.is_compiling():
        return _is_hopper(device)
    if device.index not in _hopper_devices:
        is_hopper = _is_hopper(device)
        if is_hopper and torch.cuda.is_available() and (problem := _driver_problem()):
            raise RuntimeError(problem)
        _hopper_devices[device.index] = is_hopper
        if is_hopper:
            SERVED_DEVICES.add(device.index)
    return _hopper_devices[device.index]


def _bwd_cuda(dout: Tensor, dlse: Tensor | None, q: Tensor, *_) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError(checks.error(
        'bwd', 'q on the CPU', str(q.device), 'this version has no backward kernel; use '
        'torch.nn.functional.scaled_dot_product_attention where gradients are needed'))


# ---------------------------------------------------------------------------- CPU implementations
def _fwd_cpu(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool,
             pack_gqa: bool | None, sm_margin: int) -> tuple[Tensor, Tensor]:
    checks.check_forward(q, k, v, None, softmax_scale, sm_margin)
    return reference.forward(q, k, v, softmax_scale, causal, reference.wide_dtype(q.dtype))


def _fwd_out_cpu(q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_scale: float, causal: bool,
                 pack_gqa: bool | None, sm_margin: int) -> Tensor:
    checks.check_forward(q, k, v, out, softmax_scale, sm_margin)
    result, lse = reference.forward(q, k, v, softmax_scale, causal, reference.wide_dtype(q.dtype))
    out.copy_(result)
    return lse


def _bwd_cpu(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
             lse: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    checks.check_forward(q, k, v, None, softmax_scale, sm_margin=0)
    return reference.backward(dout, dlse, q, k, v, softmax_scale, causal,
                              reference.wide_dtype(q.dtype))


# ------------------------------------------------------------------------------------------ fakes
# They check only what they rely on themselves; the rest is checked when real tensors arrive.
def _empty_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for name, x in (('q', q), ('k', k), ('v', v)):
        torch._check(x.dim() == 4, lambda name=name, x=x: checks.error(
            'fwd', f'{name} to have 4 dimensions (batch, seqlen, heads, head_dim)', str(x.dim())))
    batch, seqlen_q, heads_q, _ = q.shape
    return q.new_empty((batch, heads_q, seqlen_q), dtype=reference.lse_dtype(q.dtype))


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool,
              pack_gqa: bool | None, sm_margin: int) -> tuple[Tensor, Tensor]:
    lse = _empty_lse(q, k, v)
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


def _fwd_out_fake(q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_scale: float, causal: bool,
                  pack_gqa: bool | None, sm_margin: int) -> Tensor:
    return _empty_lse(q, k, v)


def _bwd_fake(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
              lse: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


LIBRARY.impl('fwd', _fwd_cpu, 'CPU')
LIBRARY.impl('_fwd', _fwd_cpu, 'CPU')
LIBRARY.impl('fwd_out', _fwd_out_cpu, 'CPU')
LIBRARY.impl('bwd', _bwd_cpu, 'CPU')
LIBRARY.impl('bwd', _bwd_cuda, 'CUDA')
for _name, _fake in (('fwd', _fwd_fake), ('_fwd', _fwd_fake), ('fwd_out', _fwd_out_fake),
                     ('bwd', _bwd_fake)):
    torch.library.register_fake(f'flash_attn3::{_name}', _fake, lib=LIBRARY)
