"""vLLM: sparse MLA, for which it calls FlashMLA's ops `torch.ops._flashmla_C`.

    flash_attn3.integrations.vllm_flashmla.enable()    # in each worker

It is a plugin as `flash_attn3.integrations.vllm` is. `sparse_prefill_fwd` and `sparse_decode_fwd`
are replaced, dense decoding is not. A second cache and rows of other than 656 bytes (DeepSeek-V4)
raise an error. With VLLM_BATCH_INVARIANT=1, enable() is also `flash_attn3.invariant()`. The tests
run the interface file of vLLM 0.33 on ops of its schema; it was not run inside vLLM.
"""
from flash_attn3.integrations._flashmla import OPS
from flash_attn3.integrations._private_ops import PrivateOps

_client = PrivateOps('vllm_flashmla', '_flashmla_C',
                     'vllm.third_party.flashmla.flash_mla_interface', 'vllm',
                     'VLLM_BATCH_INVARIANT', OPS)
enable, disable = _client.enable, _client.disable
is_enabled, problem = _client.is_enabled, _client.problem
