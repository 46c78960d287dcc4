"""The ops of the package: schemas, CPU implementations, fakes; loads the CUDA implementations.

Imported before anything that calls an op. In the namespace `flash_attn3`:
- `fwd`: attention and its LSE, with autograd (autograd.py). What torch.compile and export see. Its
  deterministic is for the gradients.
- `_fwd`: the same without autograd, for eager calls: a formula in Python costs microseconds.
- `_fwd_no_lse`: the output alone, also for eager calls: no memory for an LSE that nobody reads.
- `fwd_out`, `fwd_out_no_lse`: write into a given output; the first returns the LSE. No autograd.
- `bwd`: the gradients of `fwd`; `bwd_out`: into given tensors. No autograd.
- `fwd_general`, `_fwd_general`, `fwd_general_out`, `bwd_general`, `bwd_general_out`: the same with
  more arguments (arguments.py): windows, chunks, softcap, sinks, packed sequences, max logits.
  What they do on the CPU and on fakes is in dense_and_varlen.py. A call without these arguments
  takes the others: each argument costs host time.

Ops without autograd have no derivative, and do not refuse one: the public functions do that.

- `attend_cache`, `attend_cache_out`, `append_and_attend`: attention on a KV cache; the last one
  writes new keys into it first. In attend_cache.py.
- `combine`, `merge_parts`: results over parts of the keys become one. In merging.py.
- `fwd_completions`: attention of completions that share a prompt, with autograd. In completions.py.
- `quantize_fp8`, `quantize_qkv_fp8`; `fwd_fp8`, `fwd_fp8_out`: attention on float8_e4m3fn;
  `fwd_quantized`: both, with autograd. In fp8.py.

INVARIANT: the schemas are defined before the library of kernels is loaded; it only adds
implementations to them.
"""
from __future__ import annotations

import ctypes
import warnings
from pathlib import Path

import torch
from torch import Tensor

from flash_attn3 import env
from flash_attn3.cpu import reference
from flash_attn3.ops import checks
from flash_attn3.arguments import schema
from flash_attn3.cpu.reference import Inputs, Mask, Outputs, Score

_SCALARS = schema('softmax_scale', 'causal', 'pack_gqa', 'sm_margin')    # hot dense ops have these
_GENERAL = schema('lengths', 'score')
_EXECUTION = schema('execution')
_GRADIENTS = schema('gradients')
_BACKWARD = 'Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse'
_INTO = 'Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv'
_CACHE = schema('cache', 'score', 'splits', 'prefix', 'lengths', 'pack_gqa', 'sm_margin',
                'scales', 'tree', 'by_page', 'latent')
_SCHEMAS = (
    f'fwd(Tensor q, Tensor k, Tensor v, {_SCALARS}, {_GRADIENTS}) -> (Tensor, Tensor)',
    f'_fwd(Tensor q, Tensor k, Tensor v, {_SCALARS}) -> (Tensor, Tensor)',
    f'_fwd_no_lse(Tensor q, Tensor k, Tensor v, {_SCALARS}) -> Tensor',
    f'fwd_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, {_SCALARS}) -> Tensor',
    f'fwd_out_no_lse(Tensor q, Tensor k, Tensor v, Tensor(a!) out, {_SCALARS}) -> ()',
    f'bwd({_BACKWARD}, float softmax_scale, bool causal, {_GRADIENTS}) -> (Tensor, Tensor, Tensor)',
    # (out, lse, max_logits), where max_logits is empty unless asked for.
    f'fwd_general(Tensor q, Tensor k, Tensor v, {_GENERAL}, {_EXECUTION}, {_GRADIENTS}) '
    '-> (Tensor, Tensor, Tensor)',
    f'_fwd_general(Tensor q, Tensor k, Tensor v, {_GENERAL}, {_EXECUTION}) '
    '-> (Tensor, Tensor, Tensor)',
    f'fwd_general_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, {_GENERAL}, {_EXECUTION}) '
    '-> (Tensor, Tensor)',
    # The last result is the gradient of the sinks, empty without them.
    f'bwd_general({_BACKWARD}, {_GENERAL}, {_GRADIENTS}) -> (Tensor, Tensor, Tensor, Tensor)',
    f'bwd_general_out({_BACKWARD}, {_INTO}, {_GENERAL}, {_GRADIENTS}) -> Tensor',
    f'bwd_out({_BACKWARD}, {_INTO}, float softmax_scale, bool causal, {_GRADIENTS}) -> ()',
    # block: rows, or quantize.PER_HEAD or PER_TENSOR. Returns e4m3 and scales.
    'quantize_fp8(Tensor x, Tensor? cu_seqlens=None, Tensor? seqused=None, int block=0, '
    'int group=1, int? rotation_seed=None) -> (Tensor, Tensor)',
    # For q, k and v as attention takes them: q and k rotated alike, v not.
    'quantize_qkv_fp8(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q=None, '
    'Tensor? seqused_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_k=None, int q_block=64, '
    'int kv_block=384, int? rotation_seed=None) '
    '-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)',
    f'fwd_fp8(Tensor q, Tensor k, Tensor v, {schema("scales", "fp8")}, {_GENERAL}, {_EXECUTION}) '
    '-> (Tensor, Tensor, Tensor)',
    f'fwd_fp8_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, {schema("scales", "promote")}, '
    f'{_GENERAL}, {_EXECUTION}) -> (Tensor, Tensor)',
    'combine(Tensor out_partial, Tensor lse_partial, Tensor(a!) out) -> Tensor',
    # Merges two to four results and LSEs, laid out as attention returns them.
    'merge_parts(Tensor(a!) out, Tensor out_0, Tensor lse_0, Tensor out_1, Tensor lse_1, '
    'Tensor? out_2=None, Tensor? lse_2=None, Tensor? out_3=None, Tensor? lse_3=None) -> Tensor',
    # Composed of other ops on every device. max_seqlen is a hint: the longest segment.
    'fwd_completions(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor cu_trees, '
    f'SymInt max_seqlen=0, {schema("softmax_scale", "softcap", "pack_gqa", "sm_margin")}, '
    f'{_GRADIENTS}) -> (Tensor, Tensor)',
    f'fwd_quantized(Tensor q, Tensor k, Tensor v, {_GENERAL}, {_EXECUTION}, {_GRADIENTS}, '
    f'{schema("quantization", "promote")}) -> (Tensor, Tensor, Tensor)',
    # k and v: a dense cache, the pages of one, or packed with cu_seqlens_k. The LSE is empty unless
    # asked for.
    f'attend_cache(Tensor q, Tensor k, Tensor v, {_CACHE}, {schema("float16_out")}) '
    '-> (Tensor, Tensor)',
    f'attend_cache_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, {_CACHE}) -> Tensor',
    # Writes k and v after the sequences of the cache, then attends to it; k and q are rotated
    # first. Rows that the cache has no room for are not written, and nothing of a call that is
    # refused. k_scales, v_scales: descales that the append sets: those of pages, where a page
    # begins with new rows, or v_scales alone, those of latents. Returns out (empty if it was
    # given), the LSE, and q rotated or an empty tensor.
    'append_and_attend(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k, Tensor? v, '
    f'Tensor(c!)? out, Tensor(d!)? k_scales, Tensor(e!)? v_scales, {schema("rotary")}, {_CACHE}, '
    f'{schema("float16_out")}) -> (Tensor, Tensor, Tensor)',
)

LIBRARY = torch.library.Library('flash_attn3', 'DEF')
for _schema in _SCHEMAS:
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def bare(op: torch._ops.OpOverload):
    """The C++ function behind an op if PyTorch exposes it: the Python layer costs 0.2 us a call."""
    return getattr(op, '_op', op)


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
    except OSError as error:
        return f'{_LIBRARY_PATH} could not be loaded: {error}'
    return ''


def _ask_driver() -> str:
    """What is wrong with the NVIDIA driver for the library, or ''; warns of it.

    Asks the driver for no more than its version, which leaves CUDA uninitialised: a data loader may
    still fork.
    """
    if KERNELS_MISSING:
        return ''
    question = ctypes.CDLL(str(_LIBRARY_PATH)).flash_attn3_driver_problem
    question.restype = ctypes.c_char_p
    problem = question().decode()
    if problem:
        warnings.warn(problem, stacklevel=5)    # where flash_attn3 is imported
    return problem


# Why no kernel can run in this process; '' if the library is loaded.
KERNELS_MISSING = _load_kernels()
# Why the driver cannot run those of the library; '' if it can, and without a driver or a library.
DRIVER_PROBLEM = _ask_driver()
_hopper_devices: dict[int, bool] = {}
# Where the op can be called at once, as Tensor.get_device() names it: the CPU (-1) and the GPUs for
# which kernels_serve() has said yes.
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
# The defaults of the schemas again: PyTorch does not pass on trailing arguments that equal them.
def _forward_cpu(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None,
                 softmax_scale: float | None = None, causal: bool = False,
                 pack_gqa: bool | None = None, sm_margin: int = 0) -> tuple[Tensor, Tensor]:
    softmax_scale = softmax_scale_of(q, softmax_scale)
    checks.check_forward(dict(q=q, k=k, v=v, out=out),
                         dict(softmax_scale=softmax_scale, sm_margin=sm_margin))
    result, lse = reference.forward(q, k, v, softmax_scale, causal, reference.wide_dtype(q.dtype))
    return result if out is None else out.copy_(result), lse


def softmax_scale_of(q: Tensor, softmax_scale: float | None) -> float:
    """The scale that an op was given, or its default."""
    return checks.default_softmax_scale(q) if softmax_scale is None else softmax_scale


def _fwd_cpu(q: Tensor, k: Tensor, v: Tensor, *scalars) -> tuple[Tensor, Tensor]:
    return _forward_cpu(q, k, v, None, *scalars)


def _fwd_traced_cpu(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None,
                    causal: bool = False, pack_gqa: bool | None = None, sm_margin: int = 0,
                    deterministic: bool = False) -> tuple[Tensor, Tensor]:
    return _forward_cpu(q, k, v, None, softmax_scale, causal, pack_gqa, sm_margin)


def _fwd_no_lse_cpu(q: Tensor, k: Tensor, v: Tensor, *scalars) -> Tensor:
    return _forward_cpu(q, k, v, None, *scalars)[0]


def _fwd_out_cpu(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *scalars) -> Tensor:
    return _forward_cpu(q, k, v, out, *scalars)[1]


def _fwd_out_no_lse_cpu(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *scalars) -> None:
    _forward_cpu(q, k, v, out, *scalars)


def _bwd_cpu(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
             lse: Tensor, softmax_scale: float, causal: bool,
             deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Bitwise repeatable with any value of deterministic."""
    checks.check_backward(dict(dout=dout, dlse=dlse, q=q, k=k, v=v, out=out, lse=lse),
                          dict(softmax_scale=softmax_scale))
    return _gradients_cpu(dout, dlse, Inputs(q, k, v), Outputs(out, lse), softmax_scale, causal)


def _gradients_cpu(dout: Tensor, dlse: Tensor | None, inputs: Inputs, outputs: Outputs,
                   softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    score = Score(softmax_scale, mask=Mask(causal))
    dtype = reference.wide_dtype(inputs.q.dtype)
    return reference.attend_backward(dout, dlse, inputs, score, dtype, outputs)[:3]


def _bwd_out_cpu(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
                 lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, softmax_scale: float,
                 causal: bool, deterministic: bool = False) -> None:
    gradients = dict(dq=dq, dk=dk, dv=dv)
    checks.check_backward(dict(dout=dout, dlse=dlse, q=q, k=k, v=v, out=out, lse=lse, **gradients),
                          dict(softmax_scale=softmax_scale))
    results = _gradients_cpu(dout, dlse, Inputs(q, k, v), Outputs(out, lse), softmax_scale, causal)
    for gradient, result in zip(gradients.values(), results):
        gradient.copy_(result)


# ------------------------------------------------------------------------------------------ fakes
# Fakes check only what they rely on; the rest is checked when real tensors arrive.
def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *_) -> tuple[Tensor, Tensor]:
    for name, x in (('q', q), ('k', k), ('v', v)):
        torch._check(x.dim() == 4, lambda name=name, x=x: checks.error(
            'fwd', f'{name} to have 4 dimensions (batch, seqlen, heads, head_dim)', str(x.dim())))
    batch, seqlen_q, heads_q, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads_q, v.shape[3]))
    return out, q.new_empty((batch, heads_q, seqlen_q), dtype=reference.lse_dtype(q.dtype))


def _fwd_no_lse_fake(q: Tensor, k: Tensor, v: Tensor, *_) -> Tensor:
    return _fwd_fake(q, k, v)[0]


def _fwd_out_fake(q: Tensor, k: Tensor, v: Tensor, *_) -> Tensor:
    return _fwd_fake(q, k, v)[1]


def _fwd_out_no_lse_fake(q: Tensor, k: Tensor, v: Tensor, *_) -> None:
    _fwd_fake(q, k, v)


def _bwd_fake(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
              lse: Tensor, softmax_scale: float, causal: bool,
              deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _bwd_out_fake(*_) -> None:
    """Returns nothing."""


for _name, _on_cpu, _fake in (
        ('fwd', _fwd_traced_cpu, _fwd_fake), ('_fwd', _fwd_cpu, _fwd_fake),
        ('_fwd_no_lse', _fwd_no_lse_cpu, _fwd_no_lse_fake),
        ('fwd_out', _fwd_out_cpu, _fwd_out_fake),
        ('fwd_out_no_lse', _fwd_out_no_lse_cpu, _fwd_out_no_lse_fake),
        ('bwd', _bwd_cpu, _bwd_fake), ('bwd_out', _bwd_out_cpu, _bwd_out_fake)):
    LIBRARY.impl(_name, _on_cpu, 'CPU')
    torch.library.register_fake(f'flash_attn3::{_name}', _fake, lib=LIBRARY)
