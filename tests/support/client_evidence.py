"""The contract test of each client in flash_attn3.integrations, of which docs/integrations.md has a
table. A test checks that they exist and that the modules say the same.
"""
REAL, EMULATED = 'the client itself', 'its calls, emulated'
ITS_FILE = 'its interface file'    # from its wheel; the rest of the client is not there
_CLIENTS = 'tests/cpu/test_integrations_clients.py'
EVIDENCE = {    # client: (how, file, test)
    'sdpa': (REAL, 'tests/cpu/test_integrations_sdpa.py', 'test_values_and_gradients_of_sdpa'),
    'transformers': (REAL, 'tests/cpu/test_integrations_transformers.py', 'test_logits'),
    'diffusers': (REAL, _CLIENTS, 'test_client'),
    'xformers': (REAL, _CLIENTS, 'test_client'),
    'megatron': (REAL, _CLIENTS, 'test_client'),
    'transformer_engine': (EMULATED, _CLIENTS, 'test_client'),
    'torchtitan': (EMULATED, _CLIENTS, 'test_torchtitan'),
    'vllm': (ITS_FILE, 'tests/gpu/test_integrations_vllm.py', 'test_mixed_batch'),
    'vllm_flashmla': (ITS_FILE, 'tests/gpu/test_integrations_flashmla.py', 'test_step'),
    'sglang_flashmla': (ITS_FILE, 'tests/gpu/test_integrations_flashmla.py', 'test_step'),
    'sglang': (ITS_FILE, 'tests/gpu/test_integrations_sglang.py', 'test_sglang_batch'),
}
