"""The contract test of each client in flash_attn3.integrations, of which docs/integrations.md has a
table. A test checks that they exist and that the modules say the same.
"""
REAL, EMULATED = 'the client itself', 'its calls, emulated'
_CLIENTS, _PRIVATE = (f'tests/cpu/test_integrations_{name}.py' for name in ('clients', 'private'))
EVIDENCE = {    # client: (how, file, test)
    'sdpa': (REAL, 'tests/cpu/test_integrations_sdpa.py', 'test_values_and_gradients_of_sdpa'),
    'transformers': (REAL, 'tests/cpu/test_integrations_transformers.py', 'test_logits'),
    'diffusers': (REAL, _CLIENTS, 'test_client'),
    'xformers': (REAL, _CLIENTS, 'test_client'),
    'megatron': (REAL, _CLIENTS, 'test_client'),
    'transformer_engine': (EMULATED, _CLIENTS, 'test_client'),
    'torchtitan': (EMULATED, _CLIENTS, 'test_torchtitan'),
    'vllm': (EMULATED, _PRIVATE, 'test_vllm_mixed_batch'),
    'sglang': (EMULATED, _PRIVATE, 'test_sglang'),
}
