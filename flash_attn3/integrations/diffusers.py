"""Hugging Face diffusers: its attention backends `_flash_3` and `_flash_varlen_3`.

    flash_attn3.integrations.diffusers.enable()    # before diffusers is imported
    pipeline.transformer.set_attention_backend('_flash_3')

`_flash_3_hub` and `_flash_3_varlen_hub` download upstream's kernels and are not served. `_flash_3`
has no gradient in diffusers.
"""
from flash_attn3.integrations import _base

_client = _base.ShimClient('diffusers', 'diffusers', (0, 42),
                           'diffusers.models.attention_dispatch', '_CAN_USE_FLASH_ATTN_3')
enable, disable = _client.enable, _client.disable
is_enabled, problem = _client.is_enabled, _client.problem
