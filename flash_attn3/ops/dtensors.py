"""Attention of DTensors, sharded by batch or by heads: each process computes its own shard, and the
forward communicates nothing.

interface.py calls on_shards() when q is a DTensor. PyTorch's parallel plans pass DTensors to
attention only with use_local_output=False; plain tensors do not need this file.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn3 import arguments
from flash_attn3.ops import checks
from flash_attn3.ops.dense_and_varlen import rank_of

BATCH, HEADS, WHOLE = 'batch', 'heads', 'whole'


class _Dims(NamedTuple):
    """The dimensions of a tensor that are its batch and its heads; None if it has no such one."""
    batch: int | None
    heads: int | None


_INPUTS = {False: _Dims(0, 2), True: _Dims(None, 1)}    # q, k, v and out; True: packed
_OTHER_RESULTS = {False: _Dims(0, 1), True: _Dims(None, 0)}    # lse, max_logits
_SINKS = _Dims(None, 0)
_SCALES = {False: _Dims(0, 1), True: _Dims(None, 1)}
_SCALE_NAMES = arguments.names('scales')
_LISTS = [x.name for x in arguments.select('lengths') if x.type == 'Tensor?']


def is_dtensor(x: Tensor) -> bool:
    """Whether x is a DTensor. Fast paths test its type first, which takes less time."""
    return hasattr(x, 'device_mesh')


def reject(op: str, x: Tensor) -> None:
    """Raises NotImplementedError for a DTensor, in a function that takes none."""
    if is_dtensor(x):
        raise NotImplementedError(checks.error(
            op, 'plain tensors', 'a DTensor', 'call it on the to_local() of each tensor, or '
            'through torch.distributed.tensor.experimental.local_map'))


def reject_shards_of_packed_heads(qkv: Tensor) -> None:
    """Raises RuntimeError for a DTensor that is sharded along a dimension with the heads of q, k
    and v: taking views of them would gather it.
    """
    if is_dtensor(qkv) and qkv.dim() == 4 and any(
            placement.is_shard(2) for placement in qkv.placements):
        raise RuntimeError(checks.error(
            'flash_attn_qkvpacked_func', 'qkv of 4 dimensions sharded by batch, or replicated',
            str(qkv.placements), 'shard q, k and v by heads separately and call flash_attn_func'))


def on_shards(call, compute: Callable) -> Tensor | tuple[Tensor | None, ...]:
    """What compute returns for a call on DTensors: one result or several, as DTensors.

    call: a `splits.Call` whose q is a DTensor. compute: takes such a call on plain tensors; its
    results are out, then others by heads and rows, or None.

    Raises:
        RuntimeError: another mesh or placement than that of q, a plain tensor, heads that the
            shards do not divide.
        NotImplementedError: out is given.
    """
    q, *_, out = call.tensors
    if out is not None:
        raise NotImplementedError(checks.error(call.op, 'out to be None with DTensors', 'a tensor'))
    is_packed = rank_of(call.general) == 3
    dims = {**dict.fromkeys('qkv', _INPUTS[is_packed]), 's_aux': _SINKS,
            **dict.fromkeys(_SCALE_NAMES, _SCALES[is_packed])}
    tensors = {name: x for name, x in call.named().items() if x is not None}
    _check_tensors(call.op, tensors)
    parts = [_part(call.op, tensors, dims, axis) for axis in range(q.device_mesh.ndim)]
    _check_heads(call.op, tensors, dims, parts)
    local = {name: _shard(x, dims[name], parts) for name, x in tensors.items()}
    lists = {name: _whole_list(call.op, name, getattr(call.general, name)) for name in _LISTS}
    eight_bit = call.eight_bit and call.eight_bit._replace(
        **{name: local.get(name) for name in _SCALE_NAMES})
    if call.mask is not None:
        call = call._replace(mask=_mask_of_shard(call, lists, parts))
    results = compute(call._replace(
        tensors=(local['q'], local['k'], local['v'], None), eight_bit=eight_bit,
        general=call.general._replace(sinks=local.get('s_aux'), **lists)))
    if isinstance(results, Tensor):
        return _joined(results, _INPUTS[is_packed], q, parts)
    return tuple(_joined(x, (_OTHER_RESULTS if number else _INPUTS)[is_packed], q, parts)
                 for number, x in enumerate(results))


def _check_tensors(op: str, tensors: Mapping[str, Tensor]) -> None:
    mesh = tensors['q'].device_mesh
    for name, x in tensors.items():
        if not is_dtensor(x):
            raise RuntimeError(checks.error(
                op, f'{name} to be a DTensor like q', 'a plain tensor',
                'wrap it with torch.distributed.tensor.DTensor.from_local'))
        if x.device_mesh != mesh:
            raise RuntimeError(checks.error(op, f'{name} to be on the mesh of q, {mesh}',
                                            str(x.device_mesh)))


def _part(op: str, tensors: Mapping[str, Tensor], dims: Mapping[str, _Dims], axis: int) -> str:
    """What the processes along an axis of the mesh divide: BATCH, HEADS or nothing (WHOLE).

    Other tensors must be replicated, because splitting those needs no communication.
    """
    parts = {}
    for name, x in tensors.items():
        placement = x.placements[axis]
        if placement.is_replicate():
            continue
        by_dim = {dim: part for part, dim in zip((BATCH, HEADS), dims[name]) if dim is not None}
        part = by_dim.get(placement.dim) if placement.is_shard() else None
        if part is None or len({*parts.values(), part}) > 1:
            raise RuntimeError(checks.error(
                op, f'{name} sharded by {" or ".join(by_dim.values())} like the other tensors, or '
                'replicated', f'{placement} along axis {axis} of the mesh',
                f'{name}.redistribute(...) before the call; for queries or keys in shards, merge '
                'partial results with flash_attn3.merge_states'))
        parts[name] = part
    return next(iter(parts.values()), WHOLE)


def _check_heads(op: str, tensors: Mapping[str, Tensor], dims: Mapping[str, _Dims],
                 parts: Sequence[str]) -> None:
    """Raises RuntimeError if the shards do not divide query and KV heads alike."""
    shards = _shards_of_heads(tensors['q'], parts)
    for name, x in tensors.items():
        heads = x.size(dims[name].heads)
        if heads % shards != 0:
            raise RuntimeError(checks.error(
                op, f'the heads of {name} to be divisible by {shards}, their shards', str(heads),
                'repeat the heads of k and v, or use fewer shards'))


def _shards_of_heads(q: Tensor, parts: Sequence[str]) -> int:
    # A list, because torch.compile does not support math.prod of a generator.
    return math.prod([q.device_mesh.size(axis) for axis, part in enumerate(parts) if part == HEADS])


def _shard(x: Tensor, dims: _Dims, parts: Sequence[str]) -> Tensor:
    """The shard of this process. Gradients of replicated tensors are partial sums."""
    from torch.distributed.tensor import Partial
    placements = [_placement(dims, part) for part in parts]
    gradients = [Partial() if part != WHOLE and placement.is_replicate() else placement
                 for part, placement in zip(parts, placements)]
    return x.redistribute(placements=placements).to_local(grad_placements=gradients)


def _mask_of_shard(call, lists: Mapping[str, Tensor | None], parts: Sequence[str]):
    """The mask, which all processes have whole, for the sequences and heads of this one."""
    from torch.distributed.tensor import DTensor, Replicate
    q, k, *_ = call.tensors
    general, mesh = call.general, q.device_mesh
    starts = [lists[name] for name in _LISTS[:2]]
    call.mask.check_fits(call.op, q, k, () if starts[0] is None else (
        *starts, general.max_seqlen_q, general.max_seqlen_k))

    def cut(x: Tensor, sequences: int | None, heads: int | None) -> Tensor:
        whole = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        placements = [_placement(_Dims(sequences, heads), part) for part in parts]
        return whole.redistribute(placements=placements).to_local()
    return call.mask.part((mesh, *parts), cut)


def _placement(dims: _Dims, part: str):
    from torch.distributed.tensor import Replicate, Shard
    dim = {BATCH: dims.batch, HEADS: dims.heads, WHOLE: None}[part]
    return Replicate() if dim is None else Shard(dim)


def _whole_list(op: str, name: str, x: Tensor | None) -> Tensor | None:
    """A list of lengths, which is the same in all processes."""
    if x is None or not is_dtensor(x):
        return x
    if not all(placement.is_replicate() for placement in x.placements):
        raise RuntimeError(checks.error(op, f'{name} to be a plain tensor or replicated',
                                        str(x.placements)))
    return x.to_local()


def _joined(local: Tensor | None, dims: _Dims, q: Tensor, parts: Sequence[str]) -> Tensor | None:
    """A result of this process as its shard of the whole."""
    from torch.distributed.tensor import DTensor
    if local is None:
        return None
    shape = list(local.shape)
    if BATCH in parts:    # batch shards may differ in size
        shape[dims.batch] = q.size(dims.batch)
    shape[dims.heads] *= _shards_of_heads(q, parts)
    stride = tuple(math.prod(shape[dim + 1:]) for dim in range(len(shape)))
    return DTensor.from_local(local, q.device_mesh, [_placement(dims, part) for part in parts],
                              run_check=False, shape=torch.Size(shape), stride=stride)
