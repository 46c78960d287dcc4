"""The environment variables that the package reads, all at import. Those of the build: setup.py."""
from __future__ import annotations

import os


def _is_on(name: str, default: str = '0') -> bool:
    """Raises RuntimeError for a value that would say nothing."""
    value = os.environ.get(name, '') or default
    if value not in ('0', '1'):
        raise RuntimeError(f'flash_attn3: expected {name} to be 0 or 1, got {value!r}')
    return value == '1'


# '1': behave as an install without kernels; CUDA tensors are served by PyTorch's SDPA.
DISABLE_KERNELS = _is_on('FLASH_ATTN3_DISABLE_KERNELS')

# Path of another build of the kernel library to load instead of the package's own.
LIBRARY_PATH = os.environ.get('FLASH_ATTN3_LIBRARY', '')

# '1': read what cu_seqlens, seqused and the lists and tables of a KV cache contain on CUDA devices
# too, and raise an error for what leaves the tensors. Every call with them then waits for the GPU.
# Ranks of flash_attn3.distributed compare their arguments.
CHECK_CONTENTS = _is_on('FLASH_ATTN3_CHECKS')

# '1': every call is one under flash_attn3.invariant().
INVARIANT = _is_on('FLASH_ATTN3_INVARIANT')

# '0': flash_attn3.distributed sends keys between the GPUs of a host with NCCL, not with their DMA
# copy engines.
COPY_ENGINES = _is_on('FLASH_ATTN3_COPY_ENGINES', '1')
