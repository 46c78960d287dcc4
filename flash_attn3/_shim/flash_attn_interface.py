"""Upstream's module name: the functions of flash_attn3, and `torch.ops.flash_attn_3`."""
import torch

from flash_attn3.compat import register_ops
from flash_attn3.compat.functions import (_flash_attn_backward, _flash_attn_forward,
                                          flash_attn_combine, flash_attn_func,
                                          flash_attn_qkvpacked_func, flash_attn_varlen_func,
                                          flash_attn_with_kvcache, get_scheduler_metadata)

register_ops()
flash_attn_3_gpu = torch.ops.flash_attn_3

__all__ = ['_flash_attn_backward', '_flash_attn_forward', 'flash_attn_3_gpu', 'flash_attn_combine',
           'flash_attn_func', 'flash_attn_qkvpacked_func', 'flash_attn_varlen_func',
           'flash_attn_with_kvcache', 'get_scheduler_metadata']
