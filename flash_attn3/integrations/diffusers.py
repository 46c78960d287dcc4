"""Hugging Face diffusers: its attention backends `_flash_3` and `_flash_varlen_3`, and `flex`.

    flash_attn3.integrations.diffusers.enable()    # before diffusers is imported
    pipeline.transformer.set_attention_backend('_flash_3')

`_flash_3_hub` and `_flash_3_varlen_hub` download upstream's kernels and are not served. `_flash_3`
has no gradient in diffusers.

    flash_attn3.integrations.diffusers.enable_flex()    # at any time
    pipeline.transformer.set_attention_backend('flex')

`flex` is what models with a BlockMask call: Kandinsky 5 and 6 (NABLA), Qwen-Image 2.1, AnyFlow. It
takes an AttentionMask as attn_mask too. Other masks and calls of several GPUs stay with diffusers.
"""
from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flash_attn3.api.interface import flash_attn_func
from flash_attn3.api.masks import AttentionMask
from flash_attn3.integrations import _base, flex

_NAME, _OLDEST, _MODULE = 'diffusers', (0, 42), 'diffusers.models.attention_dispatch'
_client = _base.ShimClient(_NAME, _NAME, _OLDEST, _MODULE, '_CAN_USE_FLASH_ATTN_3')
enable, disable = _client.enable, _client.disable
is_enabled, problem = _client.is_enabled, _client.problem
_flex_switch = _base.Switch(_NAME)


def enable_flex() -> None:
    """The backend `flex` runs our kernels. Imports diffusers.

    Raises:
        RuntimeError: no diffusers, an older one, or one without the backend.
    """
    _flex_switch.on(_base.client_problem(_NAME, _NAME, _OLDEST, _NAME), _replace_flex)


def disable_flex() -> None:
    """Gives the backend `flex` back to PyTorch's kernels."""
    _flex_switch.off()


def _replace_flex(undo: ExitStack) -> None:
    dispatch = importlib.import_module(_MODULE)
    name = getattr(dispatch.AttentionBackendName, 'FLEX', None)
    backends = dispatch._AttentionBackendRegistry._backends
    if name not in backends:
        raise RuntimeError(_base.error(_NAME, 'a diffusers with the attention backend flex',
                                       ', '.join(sorted(x.value for x in backends))))
    own = functools.partial(_flex_attention, backends[name])
    _base.set_item(undo, backends, name, own)


def _flex_attention(theirs: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor,
                    attn_mask: Any = None, is_causal: bool = False, scale: float | None = None,
                    enable_gqa: bool = False, **others: Any) -> Tensor:
    """diffusers' `flex` on (batch, seqlen, heads, head_dim). theirs: the backend's own function.
    others: of calls that stay with it.
    """
    is_block_mask = isinstance(attn_mask, (BlockMask, AttentionMask))
    is_square = query.size(1) == key.size(1)    # diffusers' causal mask begins at the first key
    if any(others.values()) or not (is_block_mask or attn_mask is None) or (
            is_causal and (is_block_mask or not is_square)):
        return theirs(query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale,
                      enable_gqa=enable_gqa, **others)
    if is_causal:
        return flash_attn_func(query, key, value, softmax_scale=scale, causal=True)
    out = flex.flex_attention(*(x.transpose(1, 2) for x in (query, key, value)), scale=scale,
                              block_mask=attn_mask, enable_gqa=enable_gqa)
    return out.transpose(1, 2)
