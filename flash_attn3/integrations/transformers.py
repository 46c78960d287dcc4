"""Hugging Face transformers: `flash_attention_3`, and a name for models with attention sinks.

    flash_attn3.integrations.transformers.enable()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation='flash_attention_3')
    model = AutoModelForCausalLM.from_pretrained('openai/gpt-oss-20b',
                                                 attn_implementation='fa3_hopper')

    LOCAL_KERNELS=$(python -m flash_attn3.integrations.transformers) python script.py

`flash_attention_3` is transformers' own code on the functions of the shim. Continuous batching with
it calls flash_attn_with_kvcache on the paged cache.

transformers gives gpt-oss a kernel of its hub instead, for which it needs the package `kernels`:
LOCAL_KERNELS puts this package into that one's place, without enable().

`fa3_hopper` is attention and mask functions of ours, with sinks and their gradient, for any model
that takes attention functions, and with masks of images (Gemma 3, PaliGemma); `generate` of a few
sequences splits their keys with it. For continuous batching it is called `paged|fa3_hopper`, in
full: transformers takes `flash_attention_3` otherwise. It gathers the keys first, and keeps the
window and the softcap of every model: transformers 5.17 loses those of Mistral and Gemma 2 there.
Newer ones, which have no names with `paged|`, allow only their own in continuous batching.
"""
from __future__ import annotations

import importlib
from contextlib import ExitStack
from pathlib import Path

from flash_attn3.integrations import _base, _hf_attention, _hf_masks

NAME = 'fa3_hopper'
KERNEL = 'kernels-community/vllm-flash-attn3'    # transformers' fallback for FlashAttention-3
OLDEST = (5, 17)
_CLIENT = 'transformers'
# transformers treats names that contain these words specially.
_RESERVED = ('flash', 'sdpa', 'flex_attention', 'eager', 'paged', '/', ':', '|', '@')
_switch = _base.Switch(_CLIENT)


def enable(name: str = NAME, shim: bool = True, force: bool = False) -> None:
    """Makes transformers find `flash_attention_3`, and registers a name for our own functions.

    Imports transformers. It may have been imported before; models may exist.

    Args:
        name: attn_implementation that is registered. Must not contain 'flash', 'sdpa' and other
            words that transformers looks for.
        shim: `compat.install()`, for `flash_attention_3`. Default True.
        force: the shim takes the place of an installed flash-attn-3. Default False.

    Raises:
        RuntimeError: what `problem()` says; a name that cannot be used.
    """
    text = _client_problem() or _name_problem(name)
    if shim and not force:
        text = text or _base.shim_problem(_CLIENT) or _base.ops_problem(_CLIENT)
    _switch.on(text, lambda undo: _change(undo, name, shim, force))


def disable() -> None:
    """Takes back the names, the shim if nobody else uses it, and what transformers had cached.

    Models that use them raise an error of transformers until `model.set_attn_implementation`.
    """
    _switch.off()


def is_enabled() -> bool:
    """Whether enable() was called, and disable() was not."""
    return _switch.is_on


def problem() -> str:
    """Why transformers cannot be served here and what to do, or ''. It is '' on a machine without
    GPU, where the name works on the CPU and transformers itself refuses `flash_attention_3`.
    """
    return _client_problem() or ('' if _switch.is_on else
                                 _base.shim_problem(_CLIENT) or _base.ops_problem(_CLIENT))


def local_kernel_dir() -> str:
    """The directory that the package `kernels` loads in place of a kernel of its hub: it has
    upstream's functions. `python -m flash_attn3.integrations.transformers` prints a value of
    LOCAL_KERNELS with it; elsewhere `os.environ['LOCAL_KERNELS'] = f'{KERNEL}={directory}'`.

    Raises:
        RuntimeError: `kernels` cannot be told a path with ':', which separates entries.
    """
    folder = str(Path(__file__).resolve().parents[1] / '_kernel')
    if ':' in folder:
        raise RuntimeError(_base.error(_CLIENT, "a path without ':'", folder,
                                       'LOCAL_KERNELS uses it as the separator of its entries'))
    return folder


def _client_problem() -> str:
    return _base.client_problem(_CLIENT, _CLIENT, OLDEST, _CLIENT)


def _name_problem(name: str) -> str:
    words = [word for word in _RESERVED if word in name]
    if not words:
        return ''
    return _base.error(_CLIENT, f'a name without {words[0]!r}', repr(name),
                       f'transformers would take it for one of its own; the default is {NAME!r}')


def _change(undo: ExitStack, name: str, shim: bool, force: bool) -> None:
    if shim:
        _base.install_shim(undo, _CLIENT, force)
    undo.callback(_hf_attention.forget)
    attention = importlib.import_module('transformers.modeling_utils').AttentionInterface
    masks = importlib.import_module('transformers.masking_utils').AttentionMaskInterface
    registered = [(attention, name, _hf_attention.attention), (masks, name, _hf_masks.mask)]
    if 'paged|sdpa' in attention._global_mapping:
        registered.append((attention, f'paged|{name}', _hf_attention.paged_attention))
    for interface, key, function in registered:
        if key in interface._global_mapping:
            raise RuntimeError(_base.error(_CLIENT, 'an unused name', repr(key),
                                           'choose another with enable(name=...)'))
        undo.callback(interface._global_mapping.pop, key, None)
        interface.register(key, function)


if __name__ == '__main__':
    print(f'{KERNEL}={local_kernel_dir()}')
