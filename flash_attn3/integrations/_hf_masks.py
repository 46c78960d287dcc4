"""The mask function of our attention names in transformers: which masks the kernels can compute.

transformers describes a mask by a function of indices, made of a few functions of its own. Here
they are recognised by name. What reaches attention is None, the padding of the keys as a bool
tensor, or the numbers of packed sequences as an integer tensor.

Other masks, such as those of images that Gemma 3 and PaliGemma see both ways, are read as
transformers makes them for SDPA, some queries at a time. Attention gets the intervals of keys that
each query sees, if these are two at most. Four dimensions keep transformers from making another.
"""
from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flash_attn3.integrations import _base, _intervals

_MASKS = 'transformers.masking_utils'
# Windows are also an argument of attention; the module tells the rest.
_SERVED = ('causal_mask_function', 'bidirectional_mask_function',
           'sliding_window_overlay.<locals>.inner_mask',
           'sliding_window_bidirectional_overlay.<locals>.inner_mask')
_AND, _PACKED, _REMAPPED, _CHUNKED = (f'{name}.<locals>.{inner}' for name, inner in (
    ('and_masks', 'and_mask'), ('packed_sequence_mask_function', 'inner_mask'),
    ('remap_positions_for_packed_sequence', 'inner_mask'), ('chunked_overlay', 'inner_mask')))


@torch.compiler.disable(reason='flash_attn3.integrations.transformers: expected no fullgraph=True '
                        'with a name of its own; hint: it reads mask functions once a forward; '
                        'flash_attention_3 has no such break')
def mask(batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0,
         kv_offset: int = 0, mask_function: Callable | None = None,
         attention_mask: Tensor | None = None, device: torch.device | None = None,
         **others: Any) -> Tensor | None:
    """What `AttentionMaskInterface` calls: the tensor that `_hf_attention.attention` is given.

    Args:
        mask_function: of transformers, or any. Default: causal.
        attention_mask: (batch, keys so far) bool, False for padding.
        others: as transformers gives them to each mask function.

    Returns:
        None: all keys count. (batch, keys) bool: which count; later keys are not in use yet.
        (batch, seqlen) integer: packed sequences, the number of each token's. Each with what the
        module and its window say: causal, bidirectional, a window of either.
        (batch, seqlen_q, 2, 2) int32: the keys that each query sees, see `are_intervals`.

    Raises:
        NotImplementedError: a mask of more intervals.
    """
    parts = [] if mask_function is None else list(_parts(mask_function))
    names = [name for name, _ in parts]
    is_read = any(name == '' or (name == _CHUNKED and kv_length + kv_offset >
                                 variables['chunk_size']) for name, variables in parts)
    if is_read or (_PACKED in names and attention_mask is not None):
        return _read(mask_function, batch_size, (q_length, kv_length), q_offset, device=device,
                     kv_offset=kv_offset, attention_mask=attention_mask, **others)
    if _PACKED in names:
        return dict(parts)[_PACKED]['packed_sequence_mask']
    if attention_mask is None:
        in_use = kv_length
        if 'bidirectional_mask_function' not in names:    # a static cache has room at its end
            in_use = min(kv_length, int(q_offset) + q_length - kv_offset)
        return None if in_use == kv_length else torch.ones(
            batch_size, in_use, dtype=torch.bool, device=device)
    attention_mask = attention_mask[:, -kv_length:]
    if attention_mask.size(1) == kv_length and attention_mask.all():
        return None
    return attention_mask


def are_intervals(mask: Tensor, queries: int) -> bool:
    """Whether a mask is intervals [begin, end) of keys."""
    return mask.dtype == torch.int32 and mask.shape[1:] == (queries, _intervals.MOST, 2)


def _parts(function: Callable) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, variables) of each function whose conjunction this is; no name: one of others."""
    name = getattr(function, '__qualname__', '')
    if getattr(function, '__module__', '') != _MASKS:
        yield '', {}
        return
    variables = dict(inspect.getclosurevars(function).nonlocals)
    if name == _AND:
        for part in variables['mask_functions']:
            yield from _parts(part)
    elif name == _REMAPPED:    # positions in a packed sequence, by which the kernels count too
        yield from _parts(variables['mask_function'])
    elif name in (*_SERVED, _PACKED, _CHUNKED):
        yield name, variables
    else:
        yield '', {}


def _read(mask_function: Callable, batch: int, lengths: tuple[int, int], q_offset: int | Tensor,
          **given: Any) -> Tensor:
    """The intervals of any mask function, from the mask that transformers makes for SDPA."""
    make = importlib.import_module(_MASKS).sdpa_mask
    queries, keys = lengths
    given |= dict(mask_function=mask_function, allow_is_causal_skip=False,
                  allow_is_bidirectional_skip=False)
    found = _intervals.joined([
        _intervals.of(make(batch_size=batch, q_length=count, kv_length=keys,
                           q_offset=q_offset + first, **given)[:, 0])
        for first, count in _intervals.steps(queries, batch * keys)])
    if not found.fit:
        raise NotImplementedError(_base.error(
            'transformers', 'a mask by which a query sees two intervals of keys at most',
            f'more, by {getattr(mask_function, "__qualname__", mask_function)}',
            "use attn_implementation='sdpa' or 'eager'"))
    return found.ends
