"""SGLang: sparse MLA, for which it calls FlashMLA's ops `torch.ops.flash_mla_legacy`.

    flash_attn3.integrations.sglang_flashmla.enable()    # in each worker

`sparse_prefill_fwd` and `sparse_decode_fwd` are replaced, dense decoding is not. A second cache and
the rows of DeepSeek-V4 raise an error. In the workers of a server with
--enable-deterministic-inference, enable() is also `flash_attn3.invariant()`. The tests run the
interface files of SGLang 0.5.23 and sgl-flash-mla 1.0.0 on ops of its schema; it was not run inside
SGLang.
"""
from flash_attn3.integrations._flashmla import OPS
from flash_attn3.integrations._private_ops import PrivateOps

_client = PrivateOps('sglang_flashmla', 'flash_mla_legacy', 'flash_mla', 'sgl-flash-mla',
                     'SGLANG_ENABLE_DETERMINISTIC_INFERENCE', OPS)
enable, disable = _client.enable, _client.disable
is_enabled, problem = _client.is_enabled, _client.problem
