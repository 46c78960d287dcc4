"""The ops `fwd_general`, `bwd` and `bwd_out`: their arguments, what they do on CPU tensors, their
fakes.

They compute what `reference.attend` and `reference.attend_packed` do. Their schemas are in
library.py; importing this file registers the rest. Called through torch.ops by interface.py and
autograd.py. fp8.py has the op `attend`, which computes the same.
"""
from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from flash_attn3.cpu import reference, visible_keys
from flash_attn3.ops import checks, library
from flash_attn3.arguments import OPS, select, tuple_of
from flash_attn3.cpu.reference import Inputs, Lengths, Mask, Outputs, Score, Sequences

LAYOUTS = {3: '(total, heads, head_dim)', 4: '(batch, seqlen, heads, head_dim)'}

# The arguments of a forward. cu_seqlens are (batch + 1,) int32, or None for tensors with a
# batch; seqused (batch,) int32, or None for all rows; sinks (heads_q,).
General = tuple_of('General', __name__, 'lengths', 'score')
# The arguments after those in the schema of `fwd_general`. Only that op takes deterministic.
Execution = tuple_of('Execution', __name__, 'execution', 'gradients')
# What an AttentionMask is to the ops; the last arguments of `fwd_general`.
MaskTensors = tuple_of('MaskTensors', __name__, 'mask')
_COUNT = len(General._fields)
_BEFORE_MASK = _COUNT + len(Execution._fields)
# What follows the tensors in the schemas of `bwd` and `bwd_out`: the arguments of `General` in
# another order, and deterministic.
_Backward = tuple_of('_Backward', __name__, *OPS['bwd'].takes[3:])
_of_backward = operator.attrgetter(*General._fields)
_mask_of_backward = operator.attrgetter(*MaskTensors._fields)
_TENSORS = tuple(argument.name for argument in select(*General._fields)
                 if argument.type == 'Tensor?')


def general_of(q: Tensor, *lengths, window_size: Sequence[int] | Tensor = (-1, -1),
               s_aux: Tensor | None = None, op: str = checks.OP_ON_CACHE, **others) -> General:
    """General from the arguments of a public function, some of which have other names. lengths: the
    first fields; op: that function.
    """
    left, right = checks.window_sides(window_size, op)
    return General(*lengths, window_left=left, window_right=right,
                   sinks=checks.sinks_of(s_aux, q, op), **others)


def split(arguments: tuple) -> tuple[General, Execution, MaskTensors]:
    """Splits the arguments after q, k, v. PyTorch omits trailing defaults."""
    return (General(*arguments[:_COUNT]), Execution(*arguments[_COUNT:_BEFORE_MASK]),
            MaskTensors(*arguments[_BEFORE_MASK:]))


def for_backward(general: General, deterministic: bool,
                 mask: MaskTensors = MaskTensors()) -> tuple:
    """What follows the tensors of `bwd` and `bwd_out`."""
    return _Backward(**general._asdict(), **mask._asdict(), deterministic=deterministic)


def from_backward(arguments: tuple) -> General:
    """The inverse of for_backward(); trailing defaults may be missing."""
    return General(*_of_backward(_Backward(*arguments)))


def take_tensors(general: General) -> tuple[tuple[Tensor | None, ...], General]:
    """The tensors among the arguments, and the arguments without them."""
    return (tuple(getattr(general, name) for name in _TENSORS),
            general._replace(**dict.fromkeys(_TENSORS)))


def put_tensors(general: General, tensors: tuple[Tensor | None, ...]) -> General:
    """The inverse of take_tensors()."""
    return general._replace(**dict(zip(_TENSORS, tensors)))


def gradients_of(general: General, dsinks: Tensor) -> General:
    """The gradients of the arguments; only sinks have one."""
    return General(**dict.fromkeys(General._fields)
                   | {'sinks': None if general.sinks is None else dsinks})


def inputs_of(q: Tensor, k: Tensor, v: Tensor, own: tuple) -> Inputs:
    """The tensors that attention with the arguments of an op is a function of."""
    return Inputs(q, k, v, own.sinks)


def score_of(q: Tensor, general: General, visible: Tensor | list[Tensor] | None = None) -> Score:
    """How logits come from q and k. visible: as in `Mask`."""
    mask = Mask(general.causal, (general.window_left, general.window_right),
                general.attention_chunk, visible=visible)
    return Score(library.softmax_scale_of(q, general.softmax_scale), general.softcap, mask)


def visible_of(q: Tensor, k: Tensor, general: General,
               mask: MaskTensors) -> Tensor | list[Tensor] | None:
    """The keys that a mask shows (cpu/visible_keys.py); None without one."""
    return visible_keys.of_call(mask.mask_rows, mask.mask_blocks, (q.size(1), k.size(1)),
                                lengths_of(general))


def sequences_of(own: tuple) -> Lengths:
    """The lists of lengths among the arguments of an op; they may be None."""
    return Lengths(Sequences(own.cu_seqlens_q, own.seqused_q),
                   Sequences(own.cu_seqlens_k, own.seqused_k))


def lengths_of(own: tuple) -> Lengths | None:
    """Where the sequences of packed tensors lie, None for tensors with a batch."""
    return None if own.cu_seqlens_q is None else sequences_of(own)


def rank_of(own: tuple) -> int:
    """The dimensions of q: 3 with packed queries, else 4."""
    return 4 if own.cu_seqlens_q is None else 3


def function_of(own: tuple) -> str:
    """The public function without a cache of a call with these arguments, as C++ names it."""
    return 'flash_attn_func' if own.cu_seqlens_q is None else 'flash_attn_varlen_func'


def batch_of(q: Tensor, cu_seqlens_q: Tensor | None = None) -> int:
    """The number of sequences; any number for shapes that the op rejects later."""
    if cu_seqlens_q is None:
        return q.size(0) if q.dim() else 0
    return max(cu_seqlens_q.numel() - 1, 0)


def is_general(general: General, return_max_logits: bool) -> bool:
    """Whether a call without cu_seqlens needs the general ops."""
    window = general.window_left, general.window_right
    return (window != (-1, -1) or general.attention_chunk != 0 or general.softcap != 0.0
            or general.sinks is not None or return_max_logits)


def is_plain(general: General) -> bool:
    """Whether a call is dense attention with masked scores, without sinks and softcap."""
    return rank_of(general) == 4 and general.sinks is None and not general.softcap


# ----------------------------------------------------------------------------------------- contents
def check_contents(q: Tensor, k: Tensor, own: tuple) -> None:
    """Raises RuntimeError for sequences that leave their tensors, or rows that leave a sequence.

    Reads the lists, for which it waits for their device. Their shapes are right already.
    """
    for name, x, side in zip('qk', (q, k), lengths_of(own) or ()):
        used = [] if side.seqused is None else side.seqused.tolist()
        if text := checks.sequences_problem(name, side.cu_seqlens.tolist(), used, x.size(0)):
            raise RuntimeError(checks.error(function_of(own), *text))


def check_cuda_contents(q: Tensor, k: Tensor, own: tuple) -> None:
    """`check_contents` of CUDA tensors, if their lists are read (`checks.reads_contents`)."""
    if q.is_cuda and checks.reads_contents(q):
        check_contents(q, k, own)


# ------------------------------------------------------------------------------ on any real tensors
def attend(q: Tensor, k: Tensor, v: Tensor, general: General, with_maxima: bool,
           mask: MaskTensors = MaskTensors()) -> reference.Outputs:
    """The forward in plain PyTorch, which PyTorch can differentiate; nothing is checked."""
    return reference.attend(inputs_of(q, k, v, general),
                            score_of(q, general, visible_of(q, k, general, mask)),
                            reference.wide_dtype(q.dtype), with_maxima, lengths_of(general))


# ---------------------------------------------------------------------------- CPU implementations
def _fwd_cpu(q: Tensor, k: Tensor, v: Tensor, *arguments) -> tuple[Tensor, Tensor, Tensor]:
    return forward(dict(q=q, k=k, v=v), *split(arguments))


def forward(tensors: dict[str, Tensor | None], general: General, execution: Execution,
            mask: MaskTensors = MaskTensors()) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logits) of q, k and v. A given out is checked, and not written."""
    checks.check_forward(tensors, general, execution, mask)
    q, k, v, *_ = tensors.values()
    check_contents(q, k, general)
    result, lse, row_max = attend(q, k, v, general, execution.return_max_logits, mask)
    return result, lse, lse.new_empty(0) if row_max is None else row_max


def _bwd_cpu(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
             lse: Tensor, *arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bitwise repeatable with any value of deterministic."""
    return _gradients_cpu(dict(dout=dout, dlse=dlse, q=q, k=k, v=v, out=out, lse=lse), arguments)


def _bwd_out_cpu(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
                 lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, *arguments) -> Tensor:
    *results, dsinks = _gradients_cpu(dict(dout=dout, dlse=dlse, q=q, k=k, v=v, out=out, lse=lse,
                                           dq=dq, dk=dk, dv=dv), arguments)
    for gradient, result in zip((dq, dk, dv), results):
        gradient.copy_(result)
    return dsinks


def _gradients_cpu(tensors: dict[str, Tensor | None],
                   arguments: tuple) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    general = from_backward(arguments)
    mask = MaskTensors(*_mask_of_backward(_Backward(*arguments)))
    checks.check_backward(tensors, general, mask)
    dout, dlse, q, k, v, out, lse, *_ = tensors.values()
    check_contents(q, k, general)
    visible = visible_of(q, k, general, mask)
    *gradients, dsinks = reference.attend_backward(
        dout, dlse, inputs_of(q, k, v, general), score_of(q, general, visible),
        reference.wide_dtype(q.dtype), Outputs(out, lse), lengths_of(general))
    return *gradients, lse.new_empty(0) if dsinks is None else dsinks


# ------------------------------------------------------------------------------------------ fakes
# Fakes check only what they rely on; the ops check the rest on real tensors.
def forward_fake(q: Tensor, k: Tensor, v: Tensor, *arguments) -> tuple[Tensor, Tensor, Tensor]:
    general, execution, _ = split(arguments)
    rank, op = rank_of(general), function_of(general)
    for name, x in zip('qkv', (q, k, v)):
        checks.check_rank(op, name, x, LAYOUTS[rank], rank)
    *batch, rows, heads, _ = q.shape
    lse = q.new_empty((*batch, heads, rows), dtype=reference.lse_dtype(q.dtype))
    max_logits = torch.empty_like(lse) if execution.return_max_logits else lse.new_empty(0)
    return q.new_empty((*batch, rows, heads, v.shape[-1])), lse, max_logits


def _bwd_fake(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
              lse: Tensor, *arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sinks = _Backward(*arguments).sinks
    dsinks = lse.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _bwd_out_fake(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
                  lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, *arguments) -> Tensor:
    return _bwd_fake(dout, dlse, q, k, v, out, lse, *arguments)[3]


library.register('fwd_general', _fwd_cpu, forward_fake)
library.register('bwd', _bwd_cpu, _bwd_fake)
library.register('bwd_out', _bwd_out_cpu, _bwd_out_fake)
