"""The mask function of our attention names in transformers: which masks the kernels can compute.

transformers describes a mask by a function of indices, made of a few functions of its own. Here
they are recognised by name; what is made of others is refused. What reaches attention is None, the
padding of the keys as a bool tensor, or the numbers of packed sequences as an integer tensor.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flash_attn3.integrations import _base

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
         **_: Any) -> Tensor | None:
    """What `AttentionMaskInterface` calls: the tensor that `_hf_attention.attention` is given.

    Args:
        mask_function: of transformers: causal, bidirectional or a sliding window of either, and
            packed sequences; chunks as long as the keys are in one. Default: causal.
        attention_mask: (batch, keys so far) bool, False for padding.
        others: as transformers gives them to each mask function.

    Returns:
        None: all keys count. (batch, keys) bool: which count; later keys are not in use yet.
        (batch, seqlen) integer: packed sequences, the number of each token's.

    Raises:
        NotImplementedError: any other mask.
    """
    parts = [] if mask_function is None else list(_parts(mask_function))
    names = [name for name, _ in parts]
    for name, variables in parts:
        if name == _CHUNKED and kv_length + kv_offset > variables['chunk_size']:
            _refuse(f'chunks of {variables["chunk_size"]} keys with '
                    f'{kv_length + kv_offset} keys')
        if name == _PACKED and attention_mask is not None:
            _refuse('packed sequences with padding')
        if name == _PACKED:
            return variables['packed_sequence_mask']
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


def _parts(function: Callable) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, variables) of each function whose conjunction this is."""
    name = getattr(function, '__qualname__', repr(function))
    variables = dict(inspect.getclosurevars(function).nonlocals)
    if getattr(function, '__module__', '') != _MASKS:
        _refuse(f'the mask function {name}')
    if name == _AND:
        for part in variables['mask_functions']:
            yield from _parts(part)
    elif name == _REMAPPED:    # positions in a packed sequence, by which the kernels count too
        yield from _parts(variables['mask_function'])
    elif name in (*_SERVED, _PACKED, _CHUNKED):
        yield name, variables
    else:
        _refuse(f'the mask function {name}')


def _refuse(got: str) -> None:
    raise NotImplementedError(_base.error(
        'transformers', 'a causal or bidirectional mask, with a sliding window, with padding or '
        'packed sequences', got, "use attn_implementation='sdpa' or 'eager'"))
