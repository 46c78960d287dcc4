"""Divides a batch among the ranks of a ring, of ulysses or of both, and joins it again.

`ring_attention` and `ulysses_attention` take the rows that it gives a rank. Any number of ranks and
any length will do: rows are padded at the end until they divide.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flash_attn3.distributed import exchange, orders
from flash_attn3.distributed.tiles import Layout, layout_of

Group = dist.ProcessGroup | DeviceMesh | None


def _places(op: str, group: Group, ulysses_group: Group) -> list[tuple[str, int, int]]:
    """Name, rank and ranks of the ring and of ulysses; ('', 0, 1) without one."""
    has_ring = group is not None or ulysses_group is None
    return [exchange.named(op, group) if has_ring else ('', 0, 1),
            ('', 0, 1) if ulysses_group is None else exchange.named(op, ulysses_group)]


def positions(seqlen: int, *, group: Group = None, ulysses_group: Group = None,
              zigzag: bool = True, order: Sequence[int] | None = None,
              cu_seqlens: Sequence[int] | Tensor | None = None,
              device: torch.device | str = 'cpu') -> Tensor:
    """Positions of the rows of this rank in the whole sequence, as rotary embeddings need them.

    Args:
        seqlen: rows of the whole sequence.
        group: the ring. Default: all ranks; with ulysses_group: no ring.
        ulysses_group: whose ranks divide the rows of a rank of the ring. Default: none.
        zigzag, order: as in `ring_attention`. Default: True, None.
        cu_seqlens: of a packed stream: positions then count from the start of each sequence.
        device: of the result. Default: the CPU.

    Returns:
        (rows,) int64; 0 for padding.
    """
    rows, is_padding = _rows('positions', seqlen, group, ulysses_group, zigzag, order)
    if cu_seqlens is not None:
        starts = torch.as_tensor(cu_seqlens, dtype=torch.int64, device='cpu')
        sequence = torch.searchsorted(starts, rows, right=True) - 1
        rows = rows - starts[sequence]
    return rows.masked_fill(is_padding, 0).to(device)


def _rows(op: str, seqlen: int, group: Group, ulysses_group: Group, zigzag: bool,
          order: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """The rows of this rank as indices of the whole sequence, and which of them are padding."""
    (_, rank, ranks), (_, part, parts) = _places(op, group, ulysses_group)
    layout = layout_of(seqlen, ranks, orders.checked(op, ranks, zigzag, order), parts)
    rows = _positions(layout, rank).tensor_split(parts)[part]
    return rows, rows >= seqlen


def _positions(layout: Layout, rank: int) -> Tensor:
    size = layout.chunk_rows
    return torch.cat([torch.arange(start, start + size) for _, start in layout.chunks(rank)])


def shard(x: Tensor, *, dim: int = 1, group: Group = None, ulysses_group: Group = None,
          zigzag: bool = True, order: Sequence[int] | None = None, pad: float = 0) -> Tensor:
    """This rank's part of a tensor that every rank has whole. Differentiable.

    Args:
        x: any shape and dtype, such as tokens (batch, seqlen).
        dim: which dimension has the rows. Default 1; packed tensors have it at 0.
        group, ulysses_group, zigzag, order: as in `positions`.
        pad: what padding contains. Default 0; labels want the index that the loss ignores.

    Returns:
        x with rows of this rank: as many on all ranks.
    """
    rows, is_padding = _rows('shard', x.size(dim), group, ulysses_group, zigzag, order)
    if x.size(dim) == 0:
        return x
    part = x.index_select(dim, rows.clamp(max=x.size(dim) - 1).to(x.device))
    if not is_padding.any():
        return part
    shape = [1] * x.dim()
    shape[dim] = -1
    return part.masked_fill(is_padding.to(x.device).view(shape), pad)


def shard_batch(batch: Mapping[str, Tensor], *, dim: int = 1, group: Group = None,
                ulysses_group: Group = None, zigzag: bool = True,
                order: Sequence[int] | None = None,
                pad: Mapping[str, float] | None = None) -> dict[str, Tensor]:
    """`shard` of each tensor of a batch, and `position_ids`, (rows,) int64, unless it has some.

    pad: by name, what padding contains. Default: -100 for `labels`, 0 for the rest.
    """
    pad = {'labels': -100} if pad is None else pad
    where = dict(group=group, ulysses_group=ulysses_group, zigzag=zigzag, order=order)
    parts = {name: shard(x, dim=dim, pad=pad.get(name, 0), **where) for name, x in batch.items()}
    first = next(iter(batch.values()))
    return {'position_ids': positions(first.size(dim), device=first.device, **where)} | parts


@torch.no_grad()
def unshard(x: Tensor, seqlen: int, *, dim: int = 1, group: Group = None,
            ulysses_group: Group = None, zigzag: bool = True,
            order: Sequence[int] | None = None) -> Tensor:
    """Joins on every rank the parts that `shard` gave each. No gradients.

    Args:
        x: the part of this rank.
        seqlen: rows of the whole.
        dim, group, ulysses_group, zigzag, order: as in `shard`.
    """
    (name, _, ranks), (part_name, *_) = _places('unshard', group, ulysses_group)
    chunks = orders.checked('unshard', ranks, zigzag, order)
    if part_name:
        x = torch.cat(exchange.all_gather('unshard', x, part_name), dim)
    if name:
        x = torch.cat(exchange.all_gather('unshard', x, name), dim)
    layout = Layout(ranks, x.size(dim) // ranks, seqlen, chunks)
    rows = torch.cat([_positions(layout, rank) for rank in range(ranks)])
    return x.index_select(dim, rows.argsort()[:seqlen].to(x.device))
