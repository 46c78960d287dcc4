"""vLLM: its attention backend for FlashAttention-3, which calls `torch.ops._vllm_fa3_C`.

    flash_attn3.integrations.vllm.enable()    # in each worker

Workers call it as a plugin: a distribution of yours with the entry point
`flash_attn3.integrations.vllm:enable` in the group vllm.general_plugins. Under decode context
parallelism (`cp_world_size` above 1) several queries of a sequence read their keys one by one;
windows, chunks and appends raise an error. Scales of a cache that is not e4m3 have no effect: vLLM
gives some of 1. With VLLM_BATCH_INVARIANT=1, enable() is also `flash_attn3.invariant()`. The tests
run the interface file of vLLM 0.33 on ops of its schema; it was not run inside vLLM.
"""
from flash_attn3.integrations._private_ops import PrivateOps

_client = PrivateOps('vllm', '_vllm_fa3_C', 'vllm.vllm_flash_attn.flash_attn_interface', 'vllm',
                     'VLLM_BATCH_INVARIANT')
enable, disable = _client.enable, _client.disable
is_enabled, problem = _client.is_enabled, _client.problem
