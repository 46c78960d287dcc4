"""torchtitan: `varlen_attn` and scaled_dot_product_attention of PyTorch.

    flash_attn3.integrations.torchtitan.enable()

On Hopper GPUs it activates PyTorch's implementation 'FA3' itself, which `integrations.sdpa` has
made this package's. Only emulated: a test activates as it does; torchtitan itself was not run.
"""
from __future__ import annotations

from contextlib import ExitStack

from flash_attn3.integrations import _base, sdpa

OLDEST = (0, 3)
_CLIENT = 'torchtitan'
_switch = _base.Switch(_CLIENT)


def enable(disable_cudnn: bool = True) -> None:
    """`flash_attn3.integrations.sdpa.enable`.

    Args:
        disable_cudnn: as there. Default True.

    Raises:
        RuntimeError: what `problem()` says.
    """
    def change(undo: ExitStack) -> None:
        if not sdpa.is_enabled():
            undo.callback(sdpa.disable)
            sdpa.enable(disable_cudnn)
    _switch.on(problem(), change)


def disable() -> None:
    """`flash_attn3.integrations.sdpa.disable`, unless that was enabled before this."""
    _switch.off()


def is_enabled() -> bool:
    """Whether enable() was called, and PyTorch's 'FA3' is this package's."""
    return _switch.is_on and sdpa.is_enabled()


def problem() -> str:
    """Why torchtitan cannot be served here and what to do, or ''."""
    return _base.client_problem(_CLIENT, _CLIENT, OLDEST, _CLIENT) or sdpa.problem()
