"""Keys and values between GPUs of one host, moved by their copy engines.

An NCCL send is a kernel and takes multiprocessors from the attention that it overlaps with: the
forward of 32k tokens takes 1.09 times as long on two H100, 1.27 times on four (2026-11-26). Here a
rank copies what it sends into a buffer of the receiver, in torch's symmetric memory. NCCL sends the
gradients of keys.

INVARIANT: all ranks of a group begin the same calls, and start and await the same messages in the
same order, also those that send nothing. Message m of a call is written into buffer m % 2 after the
barrier of message m - 1, which comes after the reader of message m - 2; message 0 after the barrier
at the beginning of the call, which comes after all readers of the call before.
"""
from __future__ import annotations

import math
import socket
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

from flash_attn3 import env
from flash_attn3.distributed import exchange

_ALIGNMENT = 256    # bytes; alignment of each tensor in a buffer
_LONGEST_MS = 600_000    # how long a rank waits for the others: NCCL's default
_BOOT_ID = Path('/proc/sys/kernel/random/boot_id')
_links: WeakKeyDictionary[dist.ProcessGroup, CopyLink | None] = WeakKeyDictionary()
_openings = 0    # rendezvous of this process


def link_of(op: str, name: str, tensors: Sequence[Tensor]) -> exchange.Link | CopyLink:
    """The link for keys and values of a call. tensors: those of this rank; no message is larger."""
    device, group = tensors[0].device, exchange.group_of(name)
    if (group is None or group.size() == 1 or device.type != 'cuda' or not env.COPY_ENGINES
            or torch.cuda.is_current_stream_capturing()):    # a graph would keep its buffers
        return exchange.Link(op, name, device)
    size = buffer_bytes([x.shape for x in tensors], tensors[0].itemsize)
    link = _links.get(group)
    if group not in _links or link is not None and link.size < size:
        torch.cuda.synchronize(device)
        dist.barrier(group)    # the previous buffers are unused by now
        link = _links[group] = None
        link = _links[group] = _opened(op, name, size, device)
    if link is None:
        return exchange.Link(op, name, device)
    link.begin_call()
    return link


def held_bytes() -> int:
    """Symmetric memory of this rank, which torch's allocator does not count."""
    return sum(link.buffers * link.size for link in _links.values() if link)


def buffer_bytes(shapes: Sequence[Sequence[int]], itemsize: int) -> int:
    """Bytes of a buffer that holds tensors of these shapes."""
    return sum(-(-math.prod(shape) * itemsize // _ALIGNMENT) * _ALIGNMENT for shape in shapes)


def buffers_of(ranks: int) -> int:
    """The number of buffers: a call has ranks - 1 messages, at most two in flight."""
    return min(2, ranks - 1)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of the copies."""
    return torch.cuda.Stream(device)


def _opened(op: str, name: str, size: int, device: torch.device) -> CopyLink | None:
    """A new link, which all ranks open together. None if they are on several hosts, or if one
    cannot reach the memory of all.

    A torch rendezvous hangs if ranks took part in different numbers of them before
    (github.com/pytorch/pytorch/issues/196082): such ranks get None.
    """
    global _openings
    group = exchange.group_of(name)
    facts = (socket.gethostname(), _BOOT_ID.read_text() if _BOOT_ID.exists() else '', _openings)
    facts_by_rank: list = [None] * group.size()
    dist.all_gather_object(facts_by_rank, facts, group=group)
    if len(set(facts_by_rank)) > 1:
        return None
    _openings += 1
    own = _on_all(group, device, lambda: symmetric.empty(
        buffers_of(group.size()) * size, dtype=torch.uint8, device=device))
    memory = None if own is None else _on_all(group, device,
                                              lambda: symmetric.rendezvous(own, group))
    return None if memory is None else CopyLink(op, name, memory, size, device)


def _on_all(group: dist.ProcessGroup, device: torch.device, make: Callable) -> object | None:
    """What `make` returns, or None if it fails on any rank: no peer access, out of memory, ..."""
    try:
        made = make()
    except Exception:
        made = None
    told = torch.tensor(int(made is not None), device=device)
    dist.all_reduce(told, dist.ReduceOp.MIN, group=group)
    return made if told.item() else None


class CopyLink:
    """An `exchange.Link` by copies, for the keys and values of all calls in a group.

    memory: its get_buffer(rank, shape, dtype, offset) returns a tensor in the memory of a rank,
    which has `buffers` of `size` bytes; its barrier(channel, milliseconds) synchronises all ranks.
    """

    def __init__(self, op: str, name: str, memory, size: int, device: torch.device):
        self._op, self._name, self._memory, self._device = op, name, memory, device
        self._rank, ranks = exchange.place_of(name)
        self.size, self.buffers = size, buffers_of(ranks)
        self._stream = _side_stream(device) if device.type == 'cuda' else None
        self._flag = torch.zeros(1, device=device)
        self._messages, self._readers = 0, None

    def begin_call(self) -> None:
        """Makes the current stream wait until all ranks arrive here, after the readers of the
        previous call, which may have used another stream. NCCL's watchdog reports a missing rank;
        the barriers of symmetric memory are faster.
        """
        if self._stream is not None:
            stream = torch.cuda.current_stream(self._device)
            if self._readers is not None and self._readers != stream:
                stream.wait_stream(self._readers)
            self._readers = stream
        self._messages = 0
        with exchange.peers_named(self._op, 'all ranks of the group'):
            dist.all_reduce(self._flag, group=exchange.group_of(self._name))

    def start(self, sent: Sequence[Tensor], target: int, expected: Sequence[tuple[int, ...]],
              source: int, like: Tensor) -> CopiedMessage:
        """As `exchange.Link.start`."""
        first = self._messages % self.buffers * self.size
        self._messages += 1
        sent = [x.contiguous() for x in sent]
        places = self._places(target, first, [x.shape for x in sent], like)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))    # and its barriers
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for place, x in zip(places, sent):
                place.copy_(x)
        return CopiedMessage(self, sent, self._places(self._rank, first, expected, like))

    def meet(self) -> None:
        """Makes the current stream wait for the copies of all ranks."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._memory.barrier(0, _LONGEST_MS)

    def _places(self, rank: int, offset: int, shapes: Sequence[Sequence[int]],
                like: Tensor) -> list[Tensor]:
        """Tensors of these shapes in the memory of a rank, from this byte offset on."""
        places = []
        for shape in shapes:
            places.append(self._memory.get_buffer(rank, tuple(shape), like.dtype,
                                                  offset // like.itemsize))
            offset += buffer_bytes([shape], like.itemsize)
        return places


class CopiedMessage:
    """Tensors that are being copied. It keeps `sent` alive until then."""

    def __init__(self, link: CopyLink, sent: list[Tensor], received: list[Tensor]):
        self._link, self._sent, self._received = link, sent, received

    def wait(self) -> list[Tensor]:
        """The received tensors. Read them before waiting for the next message."""
        self._link.meet()
        self._sent = []
        return self._received
