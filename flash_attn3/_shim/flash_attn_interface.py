"""Upstream's module name: functions of flash_attn3, and `torch.ops.flash_attn_3`."""
import torch

from flash_attn3.compat import functions, register_ops
from flash_attn3.compat.functions import *  # noqa: F403

__all__ = functions.__all__
register_ops()
flash_attn_3_gpu = torch.ops.flash_attn_3
