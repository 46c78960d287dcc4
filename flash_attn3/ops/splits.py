"""num_splits of `flash_attn_func` and `flash_attn_varlen_func`: the op `attend_cache` attends to
parts of the keys and takes k and v as a full cache or as packed keys.

Called by interface.py and planning.py. Gradients are those of the general op, from out and lse.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn3.arguments import names
from flash_attn3.cpu.reference_fp8 import Scales
from flash_attn3.ops import (attend_cache, checks, dense_and_varlen, derivatives, fp8, invariance,
                             library)
from flash_attn3.ops.autograd import SplitAttention
from flash_attn3.ops.attend_cache import OP, Attend
from flash_attn3.ops.fp8 import EightBit
from flash_attn3.ops.dense_and_varlen import Execution, General

MOST_SPLITS = 256
# With num_splits=0, keys are split from this many on, if query tiles fill fewer than half the SMs.
_LEAST_KEYS = 2048
_TILE_ROWS = 64
_TMA_BYTES = 16

_attend = torch.ops.flash_attn3.attend_cache.default


class Call(NamedTuple):
    """Attention as the public functions know it. tensors: q, k, v and out. mask: an AttentionMask.
    """
    op: str
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None]
    general: General
    execution: Execution
    eight_bit: EightBit | None
    mask: object = None

    def scales(self) -> Scales:
        return Scales() if self.eight_bit is None else self.eight_bit.scales

    def named(self) -> dict[str, Tensor | None]:
        """The tensors that may require grad, by their public names."""
        *inputs, out = self.tensors
        inputs = dense_and_varlen.inputs_of(*inputs, self.general)
        return {**dict(zip(('q', 'k', 'v', 's_aux'), inputs)), 'out': out,
                **dict(zip(names('scales'), self.scales()))}

    def needs_grad(self) -> bool:
        return checks.needs_grad(*self.named().values())

    def reject_forward_mode(self) -> None:
        """Raises NotImplementedError if one of the tensors has a tangent."""
        derivatives.reject_forward_mode(*self.named().values(), op=self.op)


# ------------------------------------------------------------------------------------ what is asked
def problem_text(op: str, num_splits: int, call: Call | None = None) -> str:
    """What is wrong with num_splits, or ''. With call, also in combination with other arguments."""
    is_number = isinstance(num_splits, (int, torch.SymInt))
    if not is_number or not 0 <= num_splits <= MOST_SPLITS:
        return checks.error(op, f'num_splits to be from 0 (by plan) to {MOST_SPLITS}',
                            repr(num_splits))
    if call is None:
        return ''
    if call.execution.split_size != 0:
        return _problem_of_size(op, num_splits, call)
    if num_splits > 1 and call.eight_bit is not None and call.eight_bit.promote:
        return checks.error(op, "num_splits of 0 or 1 with fp8_accum='promote'", str(num_splits))
    return ''


def asked_for_parts(call: Call, num_splits: int) -> str:
    """The name of the argument that asks for parts of the keys, or ''."""
    if call.execution.split_size != 0:
        return 'split_size'
    return 'num_splits' if num_splits > 1 else ''


def _problem_of_size(op: str, num_splits: int, call: Call) -> str:
    q, *_ = call.tensors
    size = call.execution.split_size
    if not isinstance(size, (int, torch.SymInt)) or size < 0:
        return checks.error(op, 'split_size to be 0 (none) or more', repr(size))
    asked = {f'num_splits={num_splits}': num_splits > 1,
             'float8_e4m3fn': call.eight_bit is not None,
             'a GPU without our kernels': q.is_cuda and not library.kernels_serve(q.device)}
    for name, is_asked in asked.items():
        if is_asked:
            return checks.error(op, f'split_size of 0 with {name}', str(size),
                                invariance.HINT if invariance.OPEN else '')
    return ''


def splits_of(num_splits: int, call: Call) -> int:
    """num_splits for the op `attend_cache`; 1: another op serves the call.

    Raises:
        RuntimeError: a wrong number, or one that the other arguments exclude.
    """
    if call.mask is not None:
        return num_splits    # masked.py refuses what does not go with it
    if text := problem_text(call.op, num_splits, call):
        raise RuntimeError(text)
    q, *_ = call.tensors
    is_served = not q.is_cuda or library.kernels_serve(q.device)
    if num_splits == 1 or call.execution.split_size != 0 or not is_served:
        return 1
    return planned(num_splits, call)


def has_few_keys(num_splits: int, k: Tensor) -> bool:
    """Whether the planner never splits so few keys of a batch. False under torch.compile, which
    would make another graph for more keys.
    """
    return num_splits == 0 and not is_compiling() and k.dim() == 4 and k.size(1) < _LEAST_KEYS


def planned(num_splits: int, call: Call) -> int:
    """num_splits of the op on a device that our kernels or the CPU path serve."""
    return 1 if num_splits == 0 and not _gains(call) else num_splits


def calls_of(execution: Execution) -> list[Execution]:
    """The calls of an op for one without FP8 and num_splits: one, or that of out and LSE, then that
    of max_logits. WHY two: kernels round otherwise where they know the exact maxima, and the bits
    with split_size are one set.
    """
    if not (execution.split_size and execution.return_max_logits):
        return [execution]
    return [execution._replace(return_max_logits=False), execution._replace(split_size=0)]


def _gains(call: Call) -> bool:
    """Whether splitting the keys saves time and the call allows it."""
    q, k, *_ = call.tensors
    general, eight_bit = call.general, call.eight_bit
    rank = dense_and_varlen.rank_of(general)
    if (q.dim() != rank or k.dim() != rank
            or (eight_bit is not None and eight_bit.promote)
            or any(scale is not None and scale.dim() != 2 for scale in call.scales())
            or call.needs_grad()
            or derivatives.is_forward_mode()):
        return False
    rows = q.size(0) if rank == 3 else q.size(0) * q.size(1)
    keys = general.max_seqlen_k if rank == 3 else k.size(1)
    most = checks.gpu_facts(q)['sm_count'] // 2
    return keys >= _LEAST_KEYS and rows * q.size(-2) < most * _TILE_ROWS


# ---------------------------------------------------------------------------------------- attention
def attention(call: Call, num_splits: int, return_lse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logits) by `attend_cache`; the last two are empty unless asked for.

    Raises:
        RuntimeError: the op refuses the call. The text says k and v, not k_cache and v_cache.
    """
    try:
        return _attention(call, num_splits, return_lse)
    except RuntimeError as problem:
        text = str(problem)
        if OP not in text:
            raise
        for name, public in (('k_cache', 'k'), ('v_cache', 'v'), (OP, call.op)):
            text = text.replace(name, public)
        raise RuntimeError(text) from None


def _attention(call: Call, num_splits: int, return_lse: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out = call.tensors
    general, eight_bit = call.general, call.eight_bit
    call.reject_forward_mode()
    if eight_bit is not None:
        fp8.reject_missing(call.op, q)
    if not is_compiling():
        dense_and_varlen.check_cuda_contents(q, k, general)
    needs_grad = call.needs_grad()
    own = attend_arguments(call, num_splits, return_lse or needs_grad)
    largest = q.new_empty(0) if own.max_logits_out is None else own.max_logits_out
    k, v = _aligned(k), _aligned(v)
    if out is not None:
        _, lse = _attend(q, k, v, out, *own._replace(float16_out=False))    # out says its dtype
        return *_cleared(out, lse, general), largest
    if not needs_grad:
        return *_cleared(*_attend(q, k, v, None, *own), general), largest
    if eight_bit is not None:
        results = derivatives.Refusal.apply(fp8.gradient_text(call.op, **call.named()), _attend,
                                            q, k, v, None, *own)
        return *_cleared(*results, general), largest
    if is_compiling():
        raise NotImplementedError(checks.error(
            call.op, 'num_splits of 0 or 1 for gradients under torch.compile', str(num_splits)))
    forward = _Forward(own, general)
    return *SplitAttention.apply(forward, q, k, v, *general, *call.execution), largest


class _Forward(NamedTuple):
    """The forward that `SplitAttention` calls with q, k and v."""
    own: Attend
    general: General

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _cleared(*_attend(q, k, v, None, *self.own), self.general)


def attend_arguments(call: Call, num_splits: int, return_lse: bool) -> Attend:
    """The arguments of `attend_cache` after the tensors."""
    eight_bit = call.eight_bit or EightBit()
    q, *_ = call.tensors
    largest = attend_cache.empty_rows(q.detach()) if call.execution.return_max_logits else None
    return Attend(**call.general._asdict(), return_lse=return_lse, num_splits=num_splits,
                  pack_gqa=call.execution.pack_gqa, sm_margin=call.execution.sm_margin,
                  **dict(zip(names('scales'), eight_bit)), float16_out=eight_bit.float16_out,
                  max_logits_out=largest)


def _aligned(x: Tensor) -> Tensor:
    """k or v, copied if its rows are not aligned: the op copies no cache on a GPU."""
    if not x.is_cuda or x.dim() == 0 or x.stride(-1) != 1:
        return x
    apart = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1]) if size > 1]
    address = 0 if is_compiling() else checks.address_of(x)
    is_fine = address % _TMA_BYTES == 0 and all(
        stride > 0 and stride * x.itemsize % _TMA_BYTES == 0 for stride in apart)
    return x if is_fine else x.clone(memory_format=torch.contiguous_format)


def _cleared(out: Tensor, lse: Tensor, general: General) -> tuple[Tensor, Tensor]:
    """out and lse with 0 and -inf in rows of no sequence, which the kernel skips."""
    starts, used = dense_and_varlen.sequences_of(general).q
    if starts is None or not out.is_cuda:
        return out, lse
    rows = torch.arange(out.size(0), device=out.device, dtype=torch.int32)
    after = torch.searchsorted(starts, rows, right=True)    # starts at or before the row
    batch = starts.numel() - 1
    unused = after > batch
    if used is not None and batch > 0:
        sequence = (after - 1).clamp(max=batch - 1)
        unused |= rows - starts[sequence] >= used[sequence]
    out.masked_fill_(unused[:, None, None], 0)
    return out, lse.masked_fill_(unused, -torch.inf) if lse.numel() else lse
