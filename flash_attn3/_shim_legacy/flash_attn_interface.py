"""The module of flash_attn3/_shim, with functions that always return (out, lse), as before August
2025. On sys.path in front of that directory.
"""
import torch

from flash_attn3.compat import functions, register_ops
from flash_attn3.compat.functions import (_flash_attn_backward, _flash_attn_forward,
                                          flash_attn_combine, flash_attn_with_kvcache,
                                          get_scheduler_metadata)

register_ops()
flash_attn_3_gpu = torch.ops.flash_attn_3
flash_attn_func = functions.with_lse(functions.flash_attn_func)
flash_attn_varlen_func = functions.with_lse(functions.flash_attn_varlen_func)
flash_attn_qkvpacked_func = functions.with_lse(functions.flash_attn_qkvpacked_func)

__all__ = ['_flash_attn_backward', '_flash_attn_forward', 'flash_attn_3_gpu', 'flash_attn_combine',
           'flash_attn_func', 'flash_attn_qkvpacked_func', 'flash_attn_varlen_func',
           'flash_attn_with_kvcache', 'get_scheduler_metadata']
