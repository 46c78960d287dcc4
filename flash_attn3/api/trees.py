"""Masks of bits over the last tokens of a sequence: trees of speculative tokens.

`flash_attn_with_kvcache` takes them as `tree_mask`: the queries of a sequence are its last keys,
and each has a row of 128 bits: bit j says whether the query sees the j-th of them. All queries see
the earlier keys.
"""
from __future__ import annotations

import torch
from torch import Tensor

from flash_attn3.ops import checks

COLUMNS, _WORD = 128, 32
WORDS = COLUMNS // _WORD


def pack_tree_mask(visible: Tensor) -> Tensor:
    """The `tree_mask` of `flash_attn_with_kvcache`, on the device of visible; nothing waits.

    Args:
        visible: (batch, seqlen_q, tokens) or (total_q, tokens) bool, with at most 128 tokens: True
            where a query sees the j-th of the last seqlen_q keys of its sequence. For a tree: its
            ancestors and itself.

    Returns:
        (batch, seqlen_q, 4) or (total_q, 4) int32, bit j % 32 of word j // 32.

    Raises:
        RuntimeError: another dtype, or more tokens.
    """
    if visible.dtype != torch.bool or visible.dim() not in (2, 3) or visible.size(-1) > COLUMNS:
        raise RuntimeError(checks.error(
            'pack_tree_mask', 'visible to be (batch, seqlen_q, tokens) or (total_q, tokens) bool '
            f'with at most {COLUMNS} tokens',
            f'{tuple(visible.shape)}, {checks.dtype_name(visible.dtype)}'))
    wide = torch.nn.functional.pad(visible, (0, COLUMNS - visible.size(-1)))
    weights = torch.ones((), dtype=torch.int64, device=visible.device) << torch.arange(
        _WORD, device=visible.device)
    words = (wide.unflatten(-1, (WORDS, _WORD)) * weights).sum(-1)
    return torch.where(words >= 1 << (_WORD - 1), words - (1 << _WORD), words).to(torch.int32)


def unpacked(rows: Tensor) -> Tensor:
    """(queries, queries) bool of one sequence. rows: (queries, 4) int32."""
    bits = rows[..., None] >> torch.arange(_WORD, dtype=torch.int32, device=rows.device) & 1
    visible = bits.flatten(-2).bool()
    count = rows.size(0)
    return torch.nn.functional.pad(visible, (0, max(0, count - COLUMNS)))[:, :count]
