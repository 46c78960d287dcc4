"""The messages of exchange.py between GPUs of one host, moved by their copy engines.

A send of NCCL is a kernel. It takes multiprocessors from the attention next to which it runs: 7 %
of the forward of 32k tokens on two H100 (2026-11-26). Here a rank writes what it sends straight
into a buffer of the other, in symmetric memory of torch, and a barrier of all ranks, a small kernel
between two calls of attention, says that it is there.

INVARIANT: all ranks of the group start and await the same messages in the same order, also those
that send nothing. A buffer is written again after the barrier that follows its last reader: there
are two of each kind, keys and gradients, which take turns.
"""
from __future__ import annotations

import datetime
import math
import socket
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn3 import env
from flash_attn3.distributed import exchange

KEYS, GRADIENTS = 0, 1
_ALIGNMENT = 256    # bytes, of each tensor in a buffer
_BOOT_ID = Path('/proc/sys/kernel/random/boot_id')
_memories: dict[dist.ProcessGroup, _Memory] = {}


class _Memory:
    """Symmetric memory of a group: `size` bytes of each rank, which all of them reach."""

    def __init__(self, group: dist.ProcessGroup, size: int, device: torch.device):
        import torch.distributed._symmetric_memory as symmetric
        self.size = size
        self._own = symmetric.empty(size, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self._own, group)
        self._timeout_ms = _timeout_ms(group, device)
        self.get_buffer = self._handle.get_buffer

    def barrier(self) -> None:
        """On the current stream. After the time limit of the group it ends the process with an
        error of CUDA, and the log says which rank is missing.
        """
        self._handle.barrier(0, self._timeout_ms)


def _timeout_ms(group: dist.ProcessGroup, device: torch.device) -> int:
    try:
        limit = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        limit = dist.default_pg_timeout
    return int(limit / datetime.timedelta(milliseconds=1))


@cache
def _serves(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the ranks of a group are on one host and have symmetric memory: all ranks ask."""
    host = socket.gethostname(), _BOOT_ID.read_text() if _BOOT_ID.exists() else ''
    hosts: list = [None] * group.size()
    dist.all_gather_object(hosts, host, group=group)
    if len(set(hosts)) > 1:
        return False
    try:
        _memories[group] = _Memory(group, _ALIGNMENT, device)
        is_served = True
    except Exception:    # no peer access, a driver without it, an older torch
        is_served = False
    told = torch.tensor(int(is_served), device=device)
    dist.all_reduce(told, dist.ReduceOp.MIN, group=group)
    return bool(told.item())


def link_of(op: str, name: str, tensors: Sequence[Tensor], kinds: int) -> exchange.Link | CopyLink:
    """What carries the messages of a call. kinds: 1, or 2 with gradients of keys. tensors: keys and
    values of this rank: no message is larger.
    """
    device, group = tensors[0].device, exchange.group_of(name)
    if (group is None or group.size() == 1 or device.type != 'cuda' or not env.COPY_ENGINES
            or not _serves(group, device)):
        return exchange.Link(op, name, device)
    slot = buffer_bytes([x.shape for x in tensors], tensors[0].itemsize)
    count = min(2, group.size() - 1)
    if _memories[group].size < kinds * count * slot:
        torch.cuda.synchronize(device)    # nobody reads or writes the old one
        dist.barrier(group)
        _memories[group] = _Memory(group, kinds * count * slot, device)
    return CopyLink(_memories[group], group.rank(), slot, count, device)


def buffer_bytes(shapes: Sequence[Sequence[int]], itemsize: int) -> int:
    """For tensors of these shapes behind one another."""
    return sum(-(-math.prod(shape) * itemsize // _ALIGNMENT) * _ALIGNMENT for shape in shapes)


class CopyLink:
    """`exchange.Link` by copies. memory: a `_Memory`; its buffers have `slot` bytes, and there are
    `count` of each kind.
    """

    def __init__(self, memory: _Memory, rank: int, slot: int, count: int, device: torch.device):
        self._memory, self._rank, self._slot, self._count = memory, rank, slot, count
        self._stream = exchange.side_stream(device) if device.type == 'cuda' else None
        self._device, self._started = device, [0, 0]
        memory.barrier()    # all ranks have read what the call before brought

    def start(self, kind: int, sent: Sequence[Tensor], target: int,
              expected: Sequence[tuple[int, ...]], source: int, like: Tensor) -> CopiedMessage:
        """As `exchange.Link.start`."""
        offset = (kind * self._count + self._started[kind] % self._count) * self._slot
        self._started[kind] += 1
        sent = [x.contiguous() for x in sent]
        places = self._places(target, offset, [x.shape for x in sent], like)
        done = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for place, x in zip(places, sent):
                place.copy_(x)
                if x.is_cuda:
                    x.record_stream(self._stream)
            if self._stream is not None:
                done = self._stream.record_event()
        return CopiedMessage(self._memory, done, self._places(self._rank, offset, expected, like))

    def _places(self, rank: int, offset: int, shapes: Sequence[Sequence[int]],
                like: Tensor) -> list[Tensor]:
        """Tensors of these shapes in the memory of a rank, from a byte on."""
        places = []
        for shape in shapes:
            places.append(self._memory.get_buffer(rank, tuple(shape), like.dtype,
                                                  offset // like.itemsize))
            offset += buffer_bytes([shape], like.itemsize)
        return places


class CopiedMessage:
    """Tensors that are being copied."""

    def __init__(self, memory: _Memory, done: torch.cuda.Event | None, received: list[Tensor]):
        self._memory, self._done, self._received = memory, done, received

    def wait(self) -> list[Tensor]:
        """The tensors that came; the current stream waits for those of all ranks."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        self._memory.barrier()
        return self._received
