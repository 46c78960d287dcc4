"""Megatron-LM (megatron-core): attention on its KV cache in inference.

    flash_attn3.integrations.megatron.enable()    # before megatron.core is imported

Its training goes through Transformer Engine: flash_attn3.integrations.transformer_engine.
"""
from flash_attn3.integrations import _base

_client = _base.ShimClient('megatron', 'megatron-core', (0, 16),
                           'megatron.core.transformer.attention', 'HAVE_FA3')
enable, disable = _client.enable, _client.disable
is_enabled, problem = _client.is_enabled, _client.problem
