"""FlashAttention-3 for Hopper GPUs (arXiv 2407.08608), and the same call on every other device.

    out = flash_attn3.flash_attn_func(q, k, v, causal=True)

Importing does not initialise CUDA.
"""
from flash_attn3.ops import aliases  # noqa: F401
from flash_attn3.api.prefix_levels import PrefixLevel, shared_prefix_attn
from flash_attn3.api.completions import flash_attn_completions_func
from flash_attn3.api.interface import (flash_attn_func, flash_attn_qkvpacked_func,
                                       flash_attn_varlen_func)
from flash_attn3.api.interface_fp8 import (flash_attn_fp8_func, flash_attn_varlen_fp8_func,
                                           quantize_fp8)
from flash_attn3.api.kvcache import (flash_attn_combine, flash_attn_sparse_func,
                                     flash_attn_with_kvcache, get_scheduler_metadata, merge_states)
from flash_attn3.api.masks import AttentionMask
from flash_attn3.ops.invariance import invariant
from flash_attn3.tools.planning import built_variants, can_use, explain
from flash_attn3.api.trees import pack_tree_mask

__version__ = '0.1.0'

__all__ = ['AttentionMask', 'PrefixLevel', 'built_variants', 'can_use', 'explain',
           'flash_attn_combine', 'flash_attn_completions_func', 'flash_attn_fp8_func',
           'flash_attn_func', 'flash_attn_qkvpacked_func', 'flash_attn_sparse_func',
           'flash_attn_varlen_fp8_func', 'flash_attn_varlen_func', 'flash_attn_with_kvcache',
           'get_scheduler_metadata', 'invariant', 'merge_states', 'pack_tree_mask', 'quantize_fp8',
           'shared_prefix_attn']
