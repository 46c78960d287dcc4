"""The op `attend` and the ops that quantise: arguments, checks, CPU implementations, fakes.

On the CPU `attend` computes what `dense_and_varlen.attend` does, and with e4m3 tensors what
`reference_fp8.attend` does in float32. The schemas are in library.py; importing this file
registers the rest. `fwd_quantized` is composed of the others on every device.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flash_attn3 import _plan
from flash_attn3.cpu import quantize, reference_fp8
from flash_attn3.ops import checks, dense_and_varlen, library
from flash_attn3.arguments import OPS, names, tuple_of
from flash_attn3.ops.dense_and_varlen import Execution, General, MaskTensors
from flash_attn3.cpu.quantize import E4M3, KV_BLOCK, PER_HEAD, PER_TENSOR, Q_BLOCK
from flash_attn3.cpu.reference import Outputs, Sequences
from flash_attn3.cpu.reference_fp8 import Scales

Descale = Tensor | float | None    # None: 1; a number: one scale for all heads
WIDE_DTYPES = (torch.bfloat16, torch.float16)    # inputs that are quantised, and outputs
ACCUMULATIONS = ('fast', 'promote')
BACKWARDS = ('given', 'rounded')


class EightBit(tuple_of('EightBit', __name__, 'scales', 'fp8')):
    """The arguments of attention on e4m3 tensors: the last ones of the op `attend`.

    promote: whether the P V of each tile is added in float32. It has no effect on the CPU, where
    all sums are float32.
    """
    __slots__ = ()

    @property
    def scales(self) -> Scales:
        return Scales(*self[:3])

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float16 if self.float16_out else torch.bfloat16

    def is_given(self) -> bool:
        return any(x is not None and x is not False for x in self)


_EXECUTION = len(Execution._fields) - 1
# What follows `Execution` in the schema of `fwd_quantized`. rotation_seed: of the signs; None: no
# rotation. block_scales: a scale for each 64 rows of q and 384 of k and v; or per sequence and KV
# head. rounded_backward: of the rounded tensors (fp8_gradients.py). promote: as in `EightBit`.
Quantization = tuple_of('Quantization', __name__, 'quantization', 'promote')
# What follows q, k and v in the schema of `quantize_qkv_fp8`.
_Qkv = tuple_of('_Qkv', __name__, *OPS['quantize_qkv_fp8'].takes[1:])


# ----------------------------------------------------------------- checks of the public functions
def is_second(op: str, name: str, given: str, choices: tuple[str, str]) -> bool:
    """Whether an argument is the second of its two choices.

    Raises:
        RuntimeError: it is neither.
    """
    if given not in choices:
        raise RuntimeError(checks.error(op, f'{name} to be {" or ".join(map(repr, choices))}',
                                        repr(given)))
    return given == choices[1]


def rotation_seed(op: str, rotate: bool, seed: int) -> int | None:
    """The seed of the ops, for which None is no rotation."""
    if rotate and seed is None:
        raise RuntimeError(checks.error(op, 'seed to be from 0 to 2**32 - 1', 'None'))
    return seed if rotate else None


def is_number(scale: object) -> bool:
    return (isinstance(scale, (int, float, torch.SymInt, torch.SymFloat))
            and not isinstance(scale, bool))


def descale_tensor(op: str, name: str, scale: Descale, shape: Sequence[int],
                   device: torch.device) -> Tensor | None:
    """A descale as the ops take it: a number is one scale for all of its shape."""
    if scale is None or isinstance(scale, Tensor):
        return scale
    if not is_number(scale):
        raise RuntimeError(checks.error(op, f'{name} to be a tensor or a number', repr(scale)))
    scale = float(scale) if isinstance(scale, int) else scale
    return torch.full((), scale, dtype=torch.float32, device=device).expand(tuple(shape))


def head_scales(batch: int, k: Tensor) -> tuple[int, int]:
    """(batch, heads_k): the shape of descales; any for shapes that the op rejects later."""
    return batch, k.size(-2) if k.dim() > 1 else 1


def descales_of(op: str, q: Tensor, k: Tensor, given: Sequence[Descale],
                *starts: Tensor) -> list[Descale]:
    """Descales of attention without a cache; unchanged for a q that is not e4m3. starts:
    cu_seqlens_q of packed queries.
    """
    if q.dtype != E4M3:
        return list(given)
    shape = head_scales(dense_and_varlen.batch_of(q, *starts), k)
    return [descale_tensor(op, name, scale, shape, q.device)
            for name, scale in zip(names('scales'), given)]


def eight_bit_of(op: str, q: Tensor, descales: Sequence[Tensor | None], out: Tensor | None,
           out_dtype: torch.dtype | None, fp8_accum: str) -> EightBit | None:
    """The FP8 arguments of a public function; None for a q that is not e4m3.

    Raises:
        NotImplementedError: a descale for a q that is not e4m3.
        RuntimeError: out_dtype or fp8_accum for such a q; another 8-bit q; a wrong dtype of outputs
            or fp8_accum.
    """
    promote = is_second(op, 'fp8_accum', fp8_accum, ACCUMULATIONS)
    if q.itemsize == 1 and q.dtype != E4M3:
        raise RuntimeError(checks.error(
            op, 'q.dtype to be float16, bfloat16 or float8_e4m3fn',
            checks.dtype_name(q.dtype), 'float8_e4m3fn is the only supported FP8 dtype'))
    if q.dtype != E4M3:
        for name, scale in zip(('q_descale', 'k_descale', 'v_descale'), descales):
            if scale is not None:
                checks.reject_unsupported(op, **{name: scale})
        for name, got, default in (('out_dtype', out_dtype, None),
                                   ('fp8_accum', fp8_accum, 'fast')):
            if got != default:
                raise RuntimeError(checks.error(
                    op, f'{name} to be {default!r} with a q of {checks.dtype_name(q.dtype)}',
                    repr(got), 'it applies to float8_e4m3fn inputs only'))
        return None
    if out_dtype is None:
        out_dtype = torch.bfloat16 if out is None else out.dtype
    if out_dtype not in WIDE_DTYPES or (out is not None and out.dtype != out_dtype):
        name = 'out_dtype' if out is None else 'out.dtype'
        raise RuntimeError(checks.error(
            op, f'{name} to be bfloat16 or float16' + (', and that of out_dtype' if out is not None
                                                       else ''),
            checks.dtype_name(out_dtype if out is None else out.dtype)))
    return EightBit(*descales, out_dtype == torch.float16, promote)


def check_quantizable(op: str, q: Tensor) -> None:
    """Raises RuntimeError for a q that attention does not quantise."""
    if q.dtype not in WIDE_DTYPES:
        raise RuntimeError(checks.error(op, 'q.dtype to be float16 or bfloat16',
                                        checks.dtype_name(q.dtype)))
    if q.dim() > 1 and q.size(-2) == 0:
        raise RuntimeError(checks.error(op, 'at least one head of q to quantise', '0'))


def reject_missing(op: str, q: Tensor) -> None:
    """Raises NotImplementedError on a GPU that the kernels do not serve."""
    if q.is_cuda and not library.kernels_serve(q.device):
        raise NotImplementedError(checks.error(op, 'a CPU tensor, or a Hopper GPU and its kernels',
                                               str(q.device), library.KERNELS_MISSING))


def gradient_text(op: str, **tensors: Tensor | None) -> str:
    """The error text for a gradient of e4m3 tensors."""
    return checks.error(
        op, 'requires_grad=False with float8_e4m3fn', checks.requires_grad_text(**tensors),
        'use flash_attn_fp8_func, which has gradients, or call under torch.no_grad()')


# ------------------------------------------------------------------------------ checks of the ops
def _check_quantize(x: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None, block: int,
                    group: int, seed: int | None) -> None:
    tensors = dict(x=x, cu_seqlens=cu_seqlens, seqused=seqused)
    given = {name: checks.describe(tensor) for name, tensor in tensors.items()
             if tensor is not None}
    if text := _plan.check_quantize(**given, block=block, group=group, seed=seed):
        raise RuntimeError(text)
    if cu_seqlens is None:
        return
    used = [] if seqused is None else seqused.tolist()
    if problem := checks.sequences_problem('x', cu_seqlens.tolist(), used, x.size(0), suffix=''):
        raise RuntimeError(checks.error('quantize_fp8', *problem))


# ---------------------------------------------------------------------------- CPU implementations
def quantize_plainly(x: Tensor, cu_seqlens: Tensor | None = None, seqused: Tensor | None = None,
                     block: int = PER_HEAD, group: int = 1,
                     rotation_seed: int | None = None) -> tuple[Tensor, Tensor]:
    """The op `quantize_fp8` on any device. It waits for lists on a GPU."""
    _check_quantize(x, cu_seqlens, seqused, block, group, rotation_seed)
    sequences = None if cu_seqlens is None else Sequences(cu_seqlens, seqused)
    rotation = None if rotation_seed is None else quantize.Rotation(rotation_seed, group)
    return quantize.quantize(x, rotation, block, group, sequences)


def quantize_qkv_plainly(q: Tensor, k: Tensor, v: Tensor, *arguments) -> tuple[Tensor, ...]:
    """The op `quantize_qkv_fp8` on any device, as `quantize_plainly`."""
    return _each_quantized(quantize_plainly, q, k, v, _Qkv(*arguments))


def _each_quantized(quantize_one: Callable, q: Tensor, k: Tensor, v: Tensor,
                    own: _Qkv) -> tuple[Tensor, ...]:
    of_q, of_k = dense_and_varlen.sequences_of(own)
    group = q.size(-2) // max(1, k.size(-2))
    return (*quantize_one(q, *of_q, own.q_block, group, own.rotation_seed),
            *quantize_one(k, *of_k, own.kv_block, 1, own.rotation_seed),
            *quantize_one(v, *of_k, own.kv_block, 1))


def _attend_cpu(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None,
                *arguments) -> tuple[Tensor, Tensor, Tensor]:
    own, execution, eight_bit, mask = split_attend(arguments)
    tensors = dict(q=q, k=k, v=v, out=out)
    if q.dtype == E4M3 or eight_bit.is_given():
        if out is not None:
            eight_bit = eight_bit._replace(float16_out=out.dtype == torch.float16)
        result, *rows = _forward_fp8(tensors, eight_bit, own, execution, mask)
    else:
        result, *rows = dense_and_varlen.forward(tensors, own, execution, mask)
    return result if out is None else out.copy_(result).new_empty(0), *rows


def _forward_fp8(tensors: dict[str, Tensor | None], eight_bit: EightBit, own: General,
                 execution: Execution, mask: MaskTensors) -> tuple[Tensor, Tensor, Tensor]:
    check_forward(tensors, eight_bit, own, execution, mask)
    q, k, v, _ = tensors.values()
    dense_and_varlen.check_contents(q, k, own)
    result = attend(q, k, v, eight_bit.scales, own, execution.return_max_logits, mask)
    row_max = result.lse.new_empty(0) if result.row_max is None else result.row_max
    return result.out.to(eight_bit.out_dtype), result.lse, row_max


def check_forward(tensors: dict[str, Tensor | None], eight_bit: EightBit, own: General,
                  execution: Execution, mask: MaskTensors = MaskTensors()) -> None:
    """Raises an error if `attend` does not take the tensors. Contents are not read."""
    checks.check_forward(tensors, eight_bit, own, execution, mask, check=_plan.check_fp8)


def attend(q: Tensor, k: Tensor, v: Tensor, scales: Scales, arguments: General,
           return_max_logits: bool, mask: MaskTensors = MaskTensors()) -> Outputs:
    """The forward in float32; nothing is checked."""
    return reference_fp8.attend(dense_and_varlen.inputs_of(q, k, v, arguments), scales,
                                dense_and_varlen.score_of(
                                    q, arguments, dense_and_varlen.visible_of(q, k, arguments,
                                                                              mask)),
                                dense_and_varlen.lengths_of(arguments), torch.float32,
                                return_max_logits)


def split_attend(arguments: tuple) -> tuple[General, Execution, EightBit, MaskTensors]:
    """What follows q, k, v and out in `attend`; trailing defaults may be missing."""
    count = len(General._fields)
    end = count + _EXECUTION
    of_mask = end + len(EightBit._fields)
    return (General(*arguments[:count]), Execution(*arguments[count:end]),
            EightBit(*arguments[end:of_mask]), MaskTensors(*arguments[of_mask:]))


def split(arguments: tuple) -> tuple[General, Execution, Quantization, MaskTensors]:
    """What follows q, k and v in `fwd_quantized`; trailing defaults may be missing."""
    end = len(General._fields) + len(Execution._fields)
    of_mask = end + len(Quantization._fields)
    return (*dense_and_varlen.split(arguments[:end])[:2], Quantization(*arguments[end:of_mask]),
            MaskTensors(*arguments[of_mask:]))


def quantize_inputs(q: Tensor, k: Tensor, v: Tensor, own: General,
                    quantization: Quantization) -> tuple[Tensor, ...]:
    """Values and scales of q, then of k and of v."""
    of_q, of_k = dense_and_varlen.sequences_of(own)
    return _quantize_qkv(q, k, v, *of_q, *of_k, *blocks_of(quantization),
                         quantization.rotation_seed)


def blocks_of(quantization: Quantization) -> tuple[int, int]:
    """Rows of a block of q, and of k and v."""
    return (Q_BLOCK, KV_BLOCK) if quantization.block_scales else (PER_HEAD, PER_HEAD)


def forward_quantized(q: Tensor, k: Tensor, v: Tensor,
                      *arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises q, k and v, and attends. Takes the arguments of the op `fwd_quantized`."""
    own, execution, quantization, mask = split(arguments)
    check_quantizable(dense_and_varlen.function_of(own).replace('_func', '_fp8_func'), q)
    if not (q.is_meta or type(q) is FakeTensor):    # meta and fake tensors have fakes
        checks.check_forward(dict(q=q, k=k, v=v), own, execution)
        if checks.reads_contents(q):
            dense_and_varlen.check_contents(q, k, own)
    parts = quantize_inputs(q, k, v, own, quantization)
    values, scales = parts[::2], parts[1::2]
    return _attend(*values, None, *own, *execution[:-1], *scales, q.dtype == torch.float16,
                   quantization.promote, *mask)


# ------------------------------------------------------------------------------------------ fakes
# Fakes check only what they rely on; the ops check the rest on real tensors.
def _quantize_fake(x: Tensor, cu_seqlens: Tensor | None = None, seqused: Tensor | None = None,
                   block: int = PER_HEAD, group: int = 1,
                   rotation_seed: int | None = None) -> tuple[Tensor, Tensor]:
    rank = 4 if cu_seqlens is None else 3
    checks.check_rank('quantize_fp8', 'x', x, dense_and_varlen.LAYOUTS[rank], rank)
    *dense_batch, rows, heads, _ = x.shape
    batch = dense_batch[0] if dense_batch else cu_seqlens.size(0) - 1
    if block == PER_TENSOR:
        shape = (1, 1)
    elif block == PER_HEAD:
        shape = (batch, heads // group)
    elif dense_batch:
        shape = (batch, heads, quantize.blocks_of(rows, block))
    else:
        shape = (1, heads, rows // block + batch)
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty(shape, dtype=torch.float32)


def _quantize_qkv_fake(q: Tensor, k: Tensor, v: Tensor, *arguments) -> tuple[Tensor, ...]:
    return _each_quantized(_quantize_fake, q, k, v, _Qkv(*arguments))


def _attend_fake(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None,
                 *arguments) -> tuple[Tensor, Tensor, Tensor]:
    own, execution, eight_bit, _ = split_attend(arguments)
    result, *rows = dense_and_varlen.forward_fake(q, k, v, *own, *execution)
    if out is not None:
        return out.new_empty(0), *rows
    dtype = eight_bit.out_dtype if q.dtype == E4M3 else q.dtype
    return result.new_empty(result.shape, dtype=dtype), *rows


def _quantized_fake(q: Tensor, k: Tensor, v: Tensor,
                    *arguments) -> tuple[Tensor, Tensor, Tensor]:
    own, execution, *_ = split(arguments)
    return dense_and_varlen.forward_fake(q, k, v, *own, *execution)


library.register('quantize_fp8', quantize_plainly, _quantize_fake)
library.register('quantize_qkv_fp8', quantize_qkv_plainly, _quantize_qkv_fake)
library.register('attend', _attend_cpu, _attend_fake)
library.register('fwd_quantized', forward_quantized, _quantized_fake)
library.LIBRARY.impl('fwd_quantized', forward_quantized, 'CUDA')
library.register_vmap_by_loop('attend')

_quantize_qkv = torch.ops.flash_attn3.quantize_qkv_fp8.default
_attend = torch.ops.flash_attn3.attend.default
