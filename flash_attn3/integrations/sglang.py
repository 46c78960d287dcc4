"""SGLang: its attention backend for FlashAttention-3, which calls `torch.ops.sgl_kernel.fwd`.

    flash_attn3.integrations.sglang.enable()    # in each worker

Calls with `sparse_mask_fine` raise an error. In the workers of a
server with --enable-deterministic-inference, which sets SGLANG_ENABLE_DETERMINISTIC_INFERENCE,
enable() is also `flash_attn3.invariant()`. The tests run the interface files of SGLang 0.5.23 and
sglang-kernel 0.4.10 on ops of its schema, and make the calls of sglang-kernel 0.4.1; it was not run
inside SGLang.
"""
from flash_attn3.integrations._private_ops import PrivateOps

_client = PrivateOps('sglang', 'sgl_kernel', 'sgl_kernel.flash_attn', 'sglang-kernel',
                     'SGLANG_ENABLE_DETERMINISTIC_INFERENCE')
enable, disable = _client.enable, _client.disable
is_enabled, problem = _client.is_enabled, _client.problem
