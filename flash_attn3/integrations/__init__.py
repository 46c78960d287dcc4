"""One module for each client: what makes it run on this package, and takes that back again.

    import flash_attn3.integrations.sdpa
    flash_attn3.integrations.sdpa.enable()

Each has `enable()`, `disable()`, `is_enabled()` and `problem()`, which returns '' if the client can
be served here, else why not and what to do. Importing this package or a module of it changes
nothing: no foreign name is registered, nothing is patched, sys.path stays as it is. `flex` has none
of these: its function takes the place of PyTorch's by an import.
"""

CLIENTS = ('sdpa', 'transformers', 'diffusers', 'xformers', 'transformer_engine', 'megatron',
           'torchtitan', 'vllm', 'vllm_flashmla', 'sglang', 'sglang_flashmla')
