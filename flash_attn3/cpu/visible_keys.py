"""The keys that an AttentionMask shows, as a bool for each query and key: for the plain path."""
from __future__ import annotations

import torch
from torch import Tensor

from flash_attn3.cpu.reference import Lengths

_BLOCK = 64


def visible(rows: Tensor | None, blocks: Tensor | None, seqlen_q: int, seqlen_k: int) -> Tensor:
    """(batch or 1, heads_q or 1, seqlen_q, seqlen_k) bool, of one of both at least.

    rows: (batch or 1, seqlen_q, 4), two intervals of keys each. blocks: (batch or 1, heads_q or 1,
    q blocks, k blocks) bool.
    """
    seen = None
    if rows is not None:
        key = torch.arange(seqlen_k, device=rows.device)
        begin, end = rows[:, None, :, None, 0::2], rows[:, None, :, None, 1::2]
        seen = ((begin <= key[:, None]) & (key[:, None] < end)).any(-1)
    if blocks is not None:
        of_queries, of_keys = (torch.arange(length, device=blocks.device) // _BLOCK
                               for length in (seqlen_q, seqlen_k))
        shown = blocks[:, :, of_queries][..., of_keys]
        seen = shown if seen is None else seen & shown
    return seen


def of_call(rows: Tensor | None, blocks: Tensor | None, seqlens: tuple[int, int],
            lengths: Lengths | None) -> Tensor | list[Tensor] | None:
    """`visible` of the mask of a call; None without one. Of packed sequences one each, with rows
    of (total_q, 4) and blocks of (batch, ...). seqlens: of q and k without lengths.
    """
    if rows is None and blocks is None:
        return None
    if lengths is None:
        return visible(rows, blocks, *seqlens)
    return [visible(None if rows is None else rows[None, own],
                    None if blocks is None else blocks[number, None],
                    own.stop - own.start, keys.stop - keys.start)
            for number, (own, keys) in enumerate(lengths.slices())]
