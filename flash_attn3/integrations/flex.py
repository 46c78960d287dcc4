"""FlexAttention: PyTorch's `flex_attention` by another import, for masks without a score_mod.

    from flash_attn3.integrations.flex import flex_attention

The mask of a `BlockMask` becomes an AttentionMask in its first call, which reads it from the
device, and is kept as long as the BlockMask: layers and steps share it. Full blocks are taken as
they are. Partial ones are read by the mask_mod, as create_block_mask() does: the keys that a query
sees in blocks that are not full must be two intervals at most.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from flash_attn3.api.interface import flash_attn_func
from flash_attn3.api.masks import AttentionMask
from flash_attn3.integrations import _base, _intervals
from flash_attn3.integrations._intervals import Intervals

_CLIENT = 'flex'
_BLOCKS = 64, 128
_eager = torch.compiler.disable(
    reason='flash_attn3.integrations.flex: expected no fullgraph=True with a BlockMask, which is '
    'read from the device; hint: pass an AttentionMask')
_kept: weakref.WeakKeyDictionary[Any, AttentionMask] = weakref.WeakKeyDictionary()


def flex_attention(query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None,
                   block_mask: Any = None, scale: float | None = None, enable_gqa: bool = False,
                   return_lse: bool = False, kernel_options: dict | None = None, *,
                   return_aux: Any = None) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention` on the kernels of this package.

    Args:
        query: (batch, heads_q, seqlen_q, head_dim).
        key, value: (batch, heads_k, seqlen_k, head_dim), that of value may be another one.
        score_mod: None.
        block_mask: a BlockMask, which must not change, an AttentionMask, or None: all keys.
        scale: default head_dim ** -0.5.
        enable_gqa: heads_k may divide heads_q.
        return_lse: also return the LSE.
        kernel_options: not used: they tune PyTorch's kernels.
        return_aux: of PyTorch's AuxRequest: which of lse and max_scores to return.

    Returns:
        out, (batch, heads_q, seqlen_q, head_dim_v); with return_lse (out, lse), with return_aux
        (out, AuxOutput). Both numbers of a query are float32 (batch, heads_q, seqlen_q), lse is a
        natural logarithm with gradients, max_scores has none.

    Raises:
        NotImplementedError: a score_mod; a mask that is not two intervals.
        RuntimeError: heads without enable_gqa; what `flash_attn_func` raises.
    """
    _check(query, key, value, score_mod, enable_gqa)
    if return_lse and return_aux is not None:
        raise RuntimeError(_base.error(_CLIENT, 'one of return_lse and return_aux', 'both'))
    mask = block_mask
    if mask is not None and not isinstance(mask, AttentionMask):
        mask = mask_of(block_mask, query.size(2), key.size(2))
    rows = return_aux is not None and return_aux.max_scores
    out, lse, *most = flash_attn_func(
        *(x.transpose(1, 2) for x in (query, key, value)), softmax_scale=scale, mask=mask,
        return_attn_probs=True, return_max_logits=rows)
    out = out.transpose(1, 2)
    if return_aux is not None:
        return out, flex.AuxOutput(lse if return_aux.lse else None, most[0] if rows else None)
    return (out, lse) if return_lse else out


def _check(query: Tensor, key: Tensor, value: Tensor, score_mod: Any, enable_gqa: bool) -> None:
    if score_mod is not None:
        raise NotImplementedError(_base.error(
            _CLIENT, 'no score_mod', getattr(score_mod, '__name__', repr(score_mod)),
            'flash_attn_func has softcap= and s_aux=, together with mask='))
    for name, x in (('query', query), ('key', key), ('value', value)):
        if x.dim() != 4:
            raise RuntimeError(_base.error(_CLIENT, f'{name} of 4 dimensions', str(x.dim())))
    if not enable_gqa and query.size(1) != key.size(1):
        raise RuntimeError(_base.error(
            _CLIENT, f'{query.size(1)} heads in key, as in query, or enable_gqa=True',
            str(key.size(1))))


@_eager
def mask_of(block_mask: Any, queries: int, keys: int) -> AttentionMask:
    """The AttentionMask that is kept for a BlockMask, of a call with so many queries and keys."""
    if tuple(block_mask.seq_lengths) != (queries, keys):
        raise RuntimeError(_base.error(_CLIENT, f'block_mask for {queries} queries and {keys} keys',
                                       str(block_mask.seq_lengths)))
    if (mask := _kept.get(block_mask)) is None:
        mask = _kept[block_mask] = _made(block_mask)
    return mask


def _made(block_mask: Any) -> AttentionMask:
    has_blocks = all(size in _BLOCKS for size in block_mask.BLOCK_SIZE)
    if has_blocks and not (block_mask.kv_num_blocks > 0).any():
        return AttentionMask.from_block_mask(block_mask)
    whole, within = (_intervals.joined(list(parts)) for parts in zip(*_read(block_mask)))
    if whole.fit:
        return AttentionMask.from_intervals(whole.ends)
    if has_blocks and within.fit:
        return AttentionMask.from_block_mask(block_mask,
                                             AttentionMask.from_intervals(within.ends))
    raise NotImplementedError(_base.error(
        _CLIENT, 'a block_mask by which a query sees two intervals of keys at most'
        + ' within blocks that are not full, of all heads the same' * has_blocks, 'another',
        '' if has_blocks else 'with a BLOCK_SIZE of 64 or 128 full blocks may be any'))


def _read(block_mask: Any) -> Iterator[tuple[Intervals, Intervals]]:
    """For some queries at a time, intervals of the keys that they see: alone, and where blocks
    hide the others.
    """
    queries, keys = block_mask.seq_lengths
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    device = block_mask.kv_num_blocks.device
    block_q, block_k = block_mask.BLOCK_SIZE
    column = torch.arange(keys, device=device) // block_k
    blocks, full_blocks = block_mask.to_dense().bool(), None
    if block_mask.full_kv_num_blocks is not None:
        full_blocks = block_mask.from_kv_blocks(
            block_mask.full_kv_num_blocks, block_mask.full_kv_indices,
            BLOCK_SIZE=block_mask.BLOCK_SIZE).to_dense().bool()
    for first, count in _intervals.steps(queries, batch * heads * keys):
        row = torch.arange(first, first + count, device=device) // block_q
        shown = flex.create_mask(_from(block_mask.mask_mod, first), batch, heads, count, keys,
                                 device)
        if full_blocks is not None:
            shown = shown | full_blocks[:, :, row][..., column]
        in_blocks = blocks[:, :, row][..., column]
        shown = shown & in_blocks
        yield tuple(_of_heads(shown, hidden) for hidden in (~shown, in_blocks & ~shown))


def _from(mask_mod: Callable[..., Tensor], first: int) -> Callable[..., Tensor]:
    """The mask of the queries from the first on."""
    def moved(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b, h, q_idx + first, kv_idx)
    return moved


def _of_heads(shown: Tensor, hidden: Tensor) -> Intervals:
    """Intervals with all keys that are shown and none that is hidden. Both are bool
    (batch, heads, queries, keys); a key that is neither may be in an interval.
    """
    shown, hidden = shown.any(1), hidden.any(1)
    place = torch.arange(shown.size(-1), dtype=torch.int32, device=shown.device)
    last = place.where(shown | hidden, -1).cummax(-1)[0]    # the last key that is one of both
    inside = (last >= 0) & shown.gather(-1, last.clamp(min=0).long())
    ends, fit = _intervals.of(inside)
    return Intervals(ends, fit & ~(shown & hidden).any())
