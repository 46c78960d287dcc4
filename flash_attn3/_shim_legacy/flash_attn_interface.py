"""The module of flash_attn3/_shim, with functions that always return (out, lse), as before August
2025. It lies in front of that directory on sys.path.
"""
import torch

from flash_attn3.compat import functions, register_ops
from flash_attn3.compat.functions import *  # noqa: F403

__all__ = functions.__all__
register_ops()
flash_attn_3_gpu = torch.ops.flash_attn_3
flash_attn_func = functions.with_lse(functions.flash_attn_func)
flash_attn_varlen_func = functions.with_lse(functions.flash_attn_varlen_func)
flash_attn_qkvpacked_func = functions.with_lse(functions.flash_attn_qkvpacked_func)
