"""PyTorch: scaled_dot_product_attention, varlen_attn, and what calls them (timm, Lightning, ...).

    flash_attn3.integrations.sdpa.enable()

PyTorch has a hook for FlashAttention-3, under the name 'FA3': its overrides of six aten kernels
call the ops `flash_attn_3::fwd` and `flash_attn_3::bwd`. Here they are given ours. 'flash_attn3' is
another name for the same. torch.compile sees the aten ops as before.

What reaches the kernels: CUDA tensors of float16 and bfloat16 (float8_e4m3fn in the forward),
without attn_mask and dropout, for which SDPA takes its flash backend. For the rest PyTorch takes
another one, as without this module.
"""
from __future__ import annotations

import importlib
from contextlib import ExitStack

import torch

from flash_attn3 import compat
from flash_attn3.integrations import _base

NAMES = 'FA3', 'flash_attn3'
_CLIENT = 'sdpa'
_HOOK, _VARLEN = 'torch.nn.attention._fa3', 'torch.nn.attention.varlen'
_CUDNN = _base.error(
    _CLIENT, 'disable_cudnn=True', 'False',
    'on Hopper GPUs scaled_dot_product_attention prefers cuDNN: call it under '
    'torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION), or it keeps using cuDNN')
_switch = _base.Switch(_CLIENT)


def enable(disable_cudnn: bool = True) -> None:
    """Makes this package the flash backend of PyTorch's attention, in this process.

    Args:
        disable_cudnn: also `torch.backends.cuda.enable_cudnn_sdp(False)`, and no cuDNN in
            varlen_attn. PyTorch prefers cuDNN to its flash backend on Hopper GPUs, so that without
            it calls reach the kernels only under `sdpa_kernel(SDPBackend.FLASH_ATTENTION)`; a
            warning says so. Default True.

    Raises:
        RuntimeError: what `problem()` says.
    """
    _switch.on(problem(), lambda undo: _activate(undo, disable_cudnn))
    if not disable_cudnn and torch.backends.cuda.cudnn_sdp_enabled():
        _base.warn_once(_CUDNN)


def disable() -> None:
    """Restores the kernels, the names, the setting of cuDNN and what was active before."""
    _switch.off()


def is_enabled() -> bool:
    """Whether PyTorch's flash backend is this package, as enable() made it."""
    return _switch.is_on and torch.nn.attention.current_flash_attention_impl() in NAMES


def problem() -> str:
    """Why PyTorch cannot be served here and what to do, or ''. It is '' on a machine without GPU:
    there is nothing that would change.
    """
    try:
        importlib.import_module(_HOOK)
        torch.nn.attention.register_flash_attention_impl    # noqa: B018
    except (ImportError, AttributeError):
        return _base.error(_CLIENT, 'a PyTorch with torch.nn.attention.'
                           'register_flash_attention_impl', torch.__version__,
                           'pip install --upgrade torch: it came with 2.11')
    return _base.ops_problem(_CLIENT) or _base.gpu_problem(_CLIENT)


def _register():
    """What PyTorch calls to activate the names."""
    compat.register_ops()
    hook = importlib.import_module(_HOOK)
    with _base.quiet_override():
        try:
            return hook.register_flash_attention_fa3(module_path=__name__)
        except BaseException:
            torch._C._set_sdp_use_fa3(False)
            raise


def _activate(undo: ExitStack, disable_cudnn: bool) -> None:
    hook = importlib.import_module(_HOOK)
    attention, registry = torch.nn.attention, hook._registry
    for name in ('_FA3_CUDA_FWD', '_FA3_CUDA_BWD'):
        _base.set_attribute(undo, hook, name, getattr(hook, name))
    if disable_cudnn:
        undo.callback(torch.backends.cuda.enable_cudnn_sdp,
                      torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(False)
        varlen = importlib.import_module(_VARLEN)
        # Newer versions obey the setting, and sdpa_kernel() can still select cuDNN.
        if hasattr(varlen, '_should_use_cudnn') and not hasattr(varlen, '_select_backend'):
            _base.set_attribute(undo, varlen, '_should_use_cudnn', lambda *_, **__: False)
    previous = attention.current_flash_attention_impl()
    undo.callback(_reactivate, previous)    # runs after the old names are restored
    for name in NAMES:
        _base.set_item(undo, registry._FLASH_ATTENTION_IMPLS, name, _register)
    undo.callback(_deactivate)
    attention.activate_flash_attention_impl(NAMES[0])


def _deactivate() -> None:
    if torch.nn.attention.current_flash_attention_impl() in NAMES:
        torch.nn.attention.restore_flash_attention_impl()


def _reactivate(previous: str | None) -> None:
    """Activates what was active before enable(), unless the user has chosen another since."""
    if previous is not None and torch.nn.attention.current_flash_attention_impl() is None:
        torch.nn.attention.activate_flash_attention_impl(previous)
