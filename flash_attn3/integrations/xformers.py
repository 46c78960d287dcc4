"""xFormers: its operators `fmha.flash3`, gradients and paged caches included.

    flash_attn3.integrations.xformers.enable()    # before xformers is imported
    xformers.ops.memory_efficient_attention(q, k, v, op=(fmha.flash3.FwOp, fmha.flash3.BwOp))
"""
from flash_attn3.integrations import _base

_client = _base.ShimClient('xformers', 'xformers', (0, 0, 35), 'xformers.ops.fmha.flash3',
                           '_C_flashattention3')
enable, disable = _client.enable, _client.disable
is_enabled, problem = _client.is_enabled, _client.problem
