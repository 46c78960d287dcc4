"""Messages between the ranks of a group, which overlap with attention.

On CUDA NCCL sends them on its own stream, after earlier launches and concurrently with later ones.
All tensors belong to the current stream, which waits for a message before they are freed. On the
CPU gloo uses threads. If a peer is dead or late, the process group times out, and the error names
the peer.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils.dlpack import to_dlpack

from flash_attn3.ops import checks
from flash_attn3.distributed.tiles import Plan, Step

_HINT = ('a rank failed, or its arguments differ: look at the log of each, and set '
         'FLASH_ATTN3_CHECKS=1 to compare arguments before every call')
_met: set[dist.ProcessGroup] = set()    # groups whose ranks have all communicated


def group_of(name: str) -> dist.ProcessGroup | None:
    """The process group of this name; None for '', a group of this rank alone."""
    return _resolve_process_group(name) if name else None


def named(op: str, group: dist.ProcessGroup | DeviceMesh | None) -> tuple[str, int, int]:
    """The name of a process group, of a mesh of one axis, or of the group of all ranks (None); the
    rank of this process in it, and how many there are.
    """
    if not dist.is_initialized():
        raise RuntimeError(checks.error(op, 'a process group', 'none in this process',
                                        'call torch.distributed.init_process_group first'))
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    return group.group_name, group.rank(), group.size()


def place_of(name: str) -> tuple[int, int]:
    """This rank and the number of ranks of a group, given by its name."""
    group = group_of(name)
    return (0, 1) if group is None else (group.rank(), group.size())


@contextmanager
def peers_named(op: str, peers: Sequence[int] | str) -> Iterator[None]:
    """Adds to an error of the process group with which ranks this one communicated."""
    try:
        yield
    except RuntimeError as error:    # DistBackendError and the other errors of c10d are such
        text = peers if isinstance(peers, str) else f'ranks {sorted(set(peers))} of the group'
        raise RuntimeError(checks.error(op, f'an answer from {text} within the time limit of the '
                                        'process group', f'"{error}"', _HINT)) from error


def _alias(x: Tensor) -> Tensor:
    """A view of x that torch's allocator does not own. TRAP: isend and irecv record NCCL's stream
    on memory of the allocator, which then stays allocated until the GPU has sent it. The host runs
    ahead, so all messages of a call would be alive at once.
    """
    return torch.from_dlpack(to_dlpack(x.detach()))


class Link:
    """Messages of one call of an op in a group. Ranks are numbered as in the group."""

    def __init__(self, op: str, name: str, device: torch.device):
        self._op, self._group = op, group_of(name)
        if device.type == 'cuda' and self._group is not None and self._group not in _met:
            # NCCL needs all ranks in the first communication; under a window only some exchange.
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)
            _met.add(self._group)

    def start(self, sent: Sequence[Tensor], target: int, expected: Sequence[tuple[int, ...]],
              source: int, like: Tensor) -> Message:
        """Sends tensors to target; expects tensors of these shapes, and the dtype of `like`, from
        source.
        """
        sent = [x.contiguous() for x in sent]
        received = [like.new_empty(shape) for shape in expected]
        works = [dist.P2POp(way, _alias(x), group=self._group, group_peer=peer)
                 for way, tensors, peer in ((dist.isend, sent, target),
                                            (dist.irecv, received, source)) for x in tensors]
        with peers_named(self._op, (source, target)):
            works = dist.batch_isend_irecv(works) if works else []
        return Message(self._op, works, sent, received, (source, target))


class Message:
    """Tensors in flight."""

    def __init__(self, op: str, works: list, sent: list[Tensor], received: list[Tensor],
                 peers: tuple[int, int]):
        self._op, self._works, self._peers = op, works, peers
        self._sent, self._received = sent, received

    def wait(self) -> list[Tensor]:
        """The received tensors. The current stream waits for them; on the CPU the caller does."""
        with peers_named(self._op, self._peers):
            for work in self._works:
                work.wait()
        self._works, self._sent = [], []
        return self._received


def rows_of(x: Tensor, rows: tuple[int, int]) -> Tensor:
    """Some rows of a (batch, rows, heads, head_dim)."""
    return x[:, rows[0]:rows[1]]


def travel(link, plan: Plan, tensors: tuple[Tensor, ...]) -> Iterator[
        tuple[Step, list[Tensor]]]:
    """Yields each step with its keys and values, while those of the next step are being sent. The
    caller empties the list once it has launched their readers, so that two steps are alive at most.

    link: from `copies.link_of`. tensors: k and v of this rank. Step s receives those of the rank s
    places before it.
    """
    def start(step: Step) -> Message:
        sent = [] if step.sent is None else [rows_of(x, step.sent) for x in tensors]
        shapes = [] if step.keys is None else [
            (x.size(0), step.keys[1] - step.keys[0], *x.shape[2:]) for x in tensors]
        return link.start(sent, step.target, shapes, step.source, tensors[0])

    first, *others = plan.steps
    pending = start(others[0]) if others else None
    yield first, [] if first.keys is None else [rows_of(x, first.keys) for x in tensors]
    for step, following in zip(others, [*others[1:], None]):
        received = pending.wait()
        pending = None if following is None else start(following)
        yield step, received


def all_gather(op: str, x: Tensor, name: str) -> list[Tensor]:
    """x of all ranks of a group, of the same shape in each."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format)
             for _ in range(place_of(name)[1])]
    with peers_named(op, 'all ranks of the group'):
        dist.all_gather(parts, x.contiguous(), group=group_of(name))
    return parts


def all_to_all(op: str, x: Tensor, name: str) -> Tensor:
    """Sends x[i] to rank i; entry i of the result comes from rank i."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    with peers_named(op, 'all ranks of the group'):
        dist.all_to_all_single(result, x.contiguous(), group=group_of(name))
    return result
