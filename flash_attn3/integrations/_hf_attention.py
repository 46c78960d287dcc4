"""The attention functions of our attention names in transformers.

One query of each sequence without gradients is decode: `flash_attn_with_kvcache`, which reads
around padding. For more queries, `flash_attn_varlen_func` without the rows of padding,
`flash_attn_func` where there are none, and with an AttentionMask for intervals of keys.
"""
from __future__ import annotations

import os
import weakref
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.weak import WeakTensorKeyDictionary

from flash_attn3 import (AttentionMask, flash_attn_func, flash_attn_varlen_func,
                         flash_attn_with_kvcache)
from flash_attn3.ops import checks, invariance
from flash_attn3.integrations import _base, _hf_masks

_CLIENT = 'transformers'
# Arguments of transformers' other attention functions that the kernels do not support.
_REFUSED = ('position_bias', 'alibi', 'attn_bias', 'attention_bias', 'head_mask')


class Layout(NamedTuple):
    """Sequences stored one after the other.

    Attributes:
        rows_q, rows_k: (rows,) which rows of (batch * seqlen, ...) they have; None: all.
        starts_q, starts_k: (sequences + 1,) int32.
        longest_q, longest_k: at least the rows of the longest.
    """
    rows_q: Tensor | None
    rows_k: Tensor | None
    starts_q: Tensor
    starts_k: Tensor
    longest_q: int | Tensor
    longest_k: int | Tensor


class Spans(NamedTuple):
    """(batch,) int32: the keys of each sequence are those from begins up to ends."""
    begins: Tensor
    ends: Tensor


def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
              attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
              sliding_window: int | None = None, softcap: float | None = None,
              is_causal: bool | None = None, s_aux: Tensor | None = None,
              position_ids: Tensor | None = None, cu_seq_lens_q: Tensor | None = None,
              cu_seq_lens_k: Tensor | None = None, max_length_q: int | Tensor | None = None,
              max_length_k: int | Tensor | None = None, **others: Any) -> tuple[Tensor, None]:
    """What `AttentionInterface` calls. Gradients flow to query, key, value and s_aux.

    Args:
        module: of transformers, with is_causal and config.
        query: (batch, heads_q, seqlen_q, head_dim); float32 ones are cast to what autocast says,
            and on a GPU to the dtype of the module's weights.
        key, value: (batch, heads_k, seqlen_k, head_dim), that of value may be another one.
        attention_mask: of `_hf_masks.mask`. Intervals say all: neither is_causal nor sliding_window
            counts.
        sliding_window: keys up to the query itself that it sees; both ways without is_causal.
        s_aux: (heads_q,) sinks.
        position_ids: (1, seqlen) restarts where a packed sequence begins, without mask.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences, all or none.
        others: not used; refused where they would change the result.

    Returns:
        out, (batch, seqlen_q, heads_q, head_dim_v), 0 in rows of padding; None.

    Raises:
        NotImplementedError: dropout, a mask with values, a bias.
        RuntimeError: what `flash_attn_func` raises.
    """
    _check(module, attention_mask, query.size(2), dropout, sliding_window, others)
    causal = module.is_causal if is_causal is None else is_causal
    q, k, v = _cast(module, *(x.transpose(1, 2) for x in (query, key, value)))
    options = _options(bool(causal), scaling, sliding_window, softcap, s_aux)
    if attention_mask is not None and attention_mask.dim() == 4:
        return _attention_in_intervals((q, k, v), attention_mask, options), None
    lists = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
    if attention_mask is None and None not in lists:
        layout = Layout(None, None, *(x.to(torch.int32) for x in lists[:2]), *lists[2:])
        return _packed_attention((q, k, v), layout, None, options), None
    rows_q = q.size(1)
    # The kernels copy no cache whose rows are not aligned to 16 bytes; flash_attn_func does.
    is_decode = rows_q == 1 and q.size(-1) % 8 == v.size(-1) % 8 == 0 and not checks.needs_grad(
        q, k, v, s_aux)
    if is_decode and attention_mask is None:
        return flash_attn_with_kvcache(q, k, v, **options), None
    layout = None
    if attention_mask is not None or position_ids is not None:
        # With cache_leftpad, bits depend on the padding before a sequence.
        call = Call(q.size(0), rows_q, k.size(1), causal or sliding_window is not None,
                    is_decode and not invariance.OPEN)
        layout = _layout(attention_mask, position_ids, call)
    if layout is None:
        return flash_attn_func(q, k, v, **options, num_splits=0, deterministic=_deterministic()), \
            None
    if isinstance(layout, Spans):
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=layout.ends,
                                       cache_leftpad=layout.begins, **options), None
    return _packed_attention((q, k, v), layout, attention_mask, options), None


def paged_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
                    attention_mask: Tensor | None, cache: Any, cu_seq_lens_q: Tensor,
                    cu_seq_lens_k: Tensor | dict[str, Tensor], max_seqlen_q: int,
                    max_seqlen_k: int | dict[str, int], read_index: list[Tensor],
                    write_index: list[Tensor], dropout: float = 0.0, scaling: float | None = None,
                    sliding_window: int | None = None, softcap: float | None = None,
                    s_aux: Tensor | None = None, **others: Any) -> tuple[Tensor, None]:
    """Attention in continuous batching: `generate_batch` calls it for the name after `paged|`.

    Args:
        query, key, value: (1, heads, tokens, head_dim), of all sequences one after the other.
        cache: of transformers, from which the keys of each sequence are gathered.
        cu_seq_lens_k, max_seqlen_k: of each kind of layer, or of the one that there is.
        others: as in `attention`.

    Returns:
        out, (tokens, heads_q, head_dim_v); None.
    """
    _check(module, attention_mask, 0, dropout, sliding_window, others)
    if isinstance(cu_seq_lens_k, dict):
        kind = 'full_attention' if sliding_window is None else 'sliding_attention'
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
    k, v = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx,
                        read_index=read_index, write_index=write_index)
    q, k, v = _cast(module, query.transpose(1, 2).squeeze(0), k, v)
    starts = (x.to(torch.int32) for x in (cu_seq_lens_q, cu_seq_lens_k))
    return flash_attn_varlen_func(
        q, k, v, *starts, max_seqlen_q, max_seqlen_k, num_splits=0,
        **_options(True, scaling, sliding_window, softcap, s_aux)), None


def _options(causal: bool, scaling: float | None, sliding_window: int | None,
             softcap: float | None, s_aux: Tensor | None) -> dict[str, Any]:
    """The arguments that the public functions share."""
    window = (-1, -1)
    if sliding_window is not None:
        window = sliding_window - 1, 0 if causal else sliding_window - 1
    return dict(softmax_scale=scaling, causal=causal, window_size=window, softcap=softcap or 0.0,
                s_aux=s_aux)


def _deterministic() -> bool:
    """What transformers' own attention functions read."""
    return os.environ.get('FLASH_ATTENTION_DETERMINISTIC', '0') == '1'


def _packed_attention(tensors: tuple[Tensor, Tensor, Tensor], layout: Layout,
                      attention_mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    q, k, v = tensors
    batch, seqlen = q.shape[:2]
    if attention_mask is not None:    # a static cache has room at its end
        k, v = k[:, :attention_mask.size(1)], v[:, :attention_mask.size(1)]
    rows = layout.rows_q, layout.rows_k, layout.rows_k
    packed = [x.flatten(0, 1) if row is None else x.flatten(0, 1).index_select(0, row)
              for x, row in zip((q, k, v), rows)]
    out = flash_attn_varlen_func(*packed, *layout[2:], **options, num_splits=0,
                                 deterministic=_deterministic())
    if layout.rows_q is not None:
        out = out.new_zeros(batch * seqlen, *out.shape[1:]).index_copy(0, layout.rows_q, out)
    return out.unflatten(0, (batch, seqlen))


@torch.compiler.disable(reason='flash_attn3.integrations.transformers: expected no fullgraph=True '
                        'with a mask of intervals; hint: it is for eager calls')
def _attention_in_intervals(tensors: tuple[Tensor, Tensor, Tensor], attention_mask: Tensor,
                            options: dict[str, Any]) -> Tensor:
    """attention_mask: (batch, seqlen_q, 2, 2) int32."""
    if (mask := _masks.get(attention_mask)) is None:    # a value must not keep its key
        mask = _masks[attention_mask] = AttentionMask.from_intervals(attention_mask.clone())
    return flash_attn_func(*tensors, **options | dict(causal=False, window_size=(-1, -1)),
                           mask=mask, deterministic=_deterministic())


def _check(module: nn.Module, attention_mask: Tensor | None, rows_q: int, dropout: float,
           sliding_window: int | None, others: dict[str, Any]) -> None:
    """Raises an error for what the kernels do not support."""
    if dropout:
        _refuse('no dropout', str(dropout), 'set attention_dropout=0 in the config')
    if attention_mask is not None and attention_mask.dim() != 2 and not _hf_masks.are_intervals(
            attention_mask, rows_q):
        _refuse('an attention_mask of 2 dimensions (batch, keys)',
                f'{attention_mask.dim()} dimensions', "attn_implementation='sdpa' takes others")
    for name in _REFUSED:
        if others.get(name) is not None:
            _refuse(f'no {name}', 'one', "attn_implementation='sdpa' or 'eager' may have it")
    if others.get('output_attentions'):
        _base.warn_once(_base.error(_CLIENT, 'no output_attentions', 'True', 'the probabilities '
                                    "are never stored, so they are None; 'eager' has them"))
    kinds = getattr(module.config, 'layer_types', None)
    index = getattr(module, 'layer_idx', None)
    if sliding_window is None and kinds and index is not None and index < len(kinds) and \
            kinds[index] == 'sliding_attention':
        _refuse(f'sliding_window for layer {index}, a sliding_attention', 'None',
                "attn_implementation='sdpa' takes the window from the mask")


def _refuse(expected: str, got: str, hint: str) -> None:
    raise NotImplementedError(_base.error(_CLIENT, expected, got, hint))


def _cast(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Layers that are kept in float32 give a float32 q to a module of 16 bits."""
    if q.dtype != torch.float32:
        return q, k, v
    dtype = torch.float32
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
    elif q.is_cuda:
        weights = (x.weight.dtype for x in module.modules() if isinstance(x, nn.Linear))
        dtype = next((x for x in weights if x.is_floating_point), module.config.dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype)


# ----------------------------------------------------------------------------------------- layouts
class Call(NamedTuple):
    """What a layout depends on besides the mask.

    Attributes:
        batch, rows_q, rows_k: of q and k.
        is_aligned: which keys a query sees depends on its place in the sequence.
        is_decode: one query of each sequence, without gradients.
    """
    batch: int
    rows_q: int
    rows_k: int
    is_aligned: bool
    is_decode: bool


# All layers of a forward share a mask. Its layout took a GPU synchronisation, so it is kept.
_kept: tuple[weakref.ref, tuple, Layout | Spans | None] | None = None


def _layout(attention_mask: Tensor | None, position_ids: Tensor | None,
            call: Call) -> Layout | Spans | None:
    """Where the sequences lie, None for tensors without padding."""
    global _kept
    source = attention_mask
    if source is None:
        if (position_ids.dim() != 2 or call.batch != 1 or call.rows_q == 1
                or call.rows_q != call.rows_k or position_ids.size(1) != call.rows_q):
            return None
        source = position_ids
    if is_compiling() or source.is_inference():    # inference tensors have no version counter
        return _make(attention_mask, source, call)
    kept, of = _kept, (source._version, call)    # each thread keeps its own
    if kept is None or kept[0]() is not source or kept[1] != of:
        kept = weakref.ref(source), of, _make(attention_mask, source, call)
        _kept = kept
    return kept[2]


# Masks of intervals, which the layers of a forward share; Gemma 3 has one for each kind of layer.
_masks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def forget() -> None:
    """Forgets the layout and the masks that are kept, and their memory."""
    global _kept
    _kept = None
    _masks.clear()


def _make(attention_mask: Tensor | None, source: Tensor, call: Call) -> Layout | Spans | None:
    if attention_mask is None:
        jumps = source.diff(dim=1) != 1
        return _of_jumps(jumps, call) if jumps.any() else None
    if attention_mask.dtype != torch.bool:
        return _of_jumps(attention_mask.diff(dim=1) != 0, call)
    spans = _spans(attention_mask) if call.is_decode else None
    return _of_padding(attention_mask, call) if spans is None else spans


def _spans(mask: Tensor) -> Spans | None:
    """The spans of the keys, or None if some keys in between are masked. mask: (batch, keys)."""
    begins = (mask.cumsum(1) == 0).sum(1, dtype=torch.int32)
    ends = begins + mask.sum(1, dtype=torch.int32)
    places = torch.arange(mask.size(1), device=mask.device)
    whole = (places >= begins[:, None]) & (places < ends[:, None])
    return Spans(begins, ends) if torch.equal(mask, whole) else None


def _of_jumps(jumps: Tensor, call: Call) -> Layout:
    """jumps: (batch, seqlen - 1), True where the next token begins a sequence."""
    rows = call.rows_q, call.rows_k
    if rows != (jumps.size(1) + 1,) * 2:
        _refuse(f'packed sequences of {jumps.size(1) + 1} tokens in q and k', str(rows),
                'packed sequences have no cache')
    starts = F.pad(jumps, (1, 0), value=True).flatten().nonzero().flatten()
    starts = F.pad(starts, (0, 1), value=jumps.size(0) * rows[0]).to(torch.int32)
    return Layout(None, None, starts, starts, *rows)


def _of_padding(mask: Tensor, call: Call) -> Layout:
    """mask: (batch, keys), whose last columns are those of the queries."""
    batch, rows_q, keys = call.batch, call.rows_q, mask.size(1)
    rows_k, starts_k = _rows(mask)
    if call.is_aligned and 1 < rows_q < keys:
        rows, starts = _rows(mask[:, keys - rows_q:])
    elif call.is_aligned and rows_q == keys:
        rows, starts = rows_k, starts_k
    else:    # every query counts
        rows = None
        starts = torch.arange(0, batch * rows_q + 1, rows_q, dtype=torch.int32, device=mask.device)
    return Layout(rows, rows_k, starts, starts_k, rows_q, keys)


def _rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that count, and where each sequence begins among them."""
    lengths = mask.sum(1, dtype=torch.int32)
    return (mask.flatten().nonzero().flatten(),
            F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)))
