"""Transformer Engine: `DotProductAttention` with flash attention on Hopper, also with context
parallelism.

    flash_attn3.integrations.transformer_engine.enable()    # before it is imported

It reads the version of the distribution flash-attn-3 and takes five functions. Only emulated: the
tests make its calls, from its source of August 2026; it was not run.
"""
from flash_attn3.integrations import _base

_client = _base.ShimClient(
    'transformer_engine', 'transformer_engine', (2, 0),
    'transformer_engine.pytorch.attention.dot_product_attention.backends',
    'fa_utils.v3_is_installed')
enable, disable = _client.enable, _client.disable
is_enabled, problem = _client.is_enabled, _client.problem
