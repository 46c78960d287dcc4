"""SGLang: its attention backend for FlashAttention-3, which calls `torch.ops.sgl_kernel.fwd`.

    flash_attn3.integrations.sglang.enable()    # in each worker

There is no `q_v` (MLA): these calls raise an error. Only emulated: the tests make the calls of
SGLang 0.5.10 on an op of its schema; it was not run inside SGLang.
"""
from flash_attn3.integrations._private_ops import PrivateOps

_client = PrivateOps('sglang', 'sgl_kernel', 'sgl_kernel.flash_attn', 'sglang-kernel')
enable, disable = _client.enable, _client.disable
is_enabled, problem = _client.is_enabled, _client.problem
