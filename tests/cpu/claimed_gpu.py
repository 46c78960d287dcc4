"""transformers and the hook of PyTorch's SDPA on machines without a GPU."""
import contextlib
import importlib
import warnings

import pytest
import torch
from torch.library import Library

from flash_attn3.integrations import sdpa


@contextlib.contextmanager
def transformers_on_cpu():
    """transformers takes flash_attention_3 without a GPU: its question for one says yes."""
    import_utils = importlib.import_module('transformers.utils.import_utils')
    utilities = importlib.import_module('transformers.modeling_flash_attention_utils')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_utils, 'is_torch_cuda_available', lambda: True)
        patch.setitem(utilities.FLASH_ATTENTION_COMPATIBILITY_MATRIX[3], 'supported_devices',
                      ((lambda: True, 'cuda'),))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)    # others wait for each other longer than these models take
        try:
            yield
        finally:
            torch.set_num_threads(threads)
    import_utils.is_flash_attn_3_available.cache_clear()


@contextlib.contextmanager
def sdpa_on_cpu():
    """enable() of sdpa, by which PyTorch's own overrides are registered for CPU tensors and its
    check of the device is skipped. Yields a function that starts to count the calls of our ops.
    """
    hook = importlib.import_module('torch.nn.attention._fa3')
    counts = {'fwd': 0, 'bwd': 0}

    class OnCpu(Library):
        def __init__(self, namespace, kind, _):
            super().__init__(namespace, kind, 'CPU')

        def impl(self, name, function, _):
            super().impl(name, function, 'CPU')

    def counted(name, op):
        def call(*arguments):
            counts[name] += 1
            return op(*arguments)
        return call

    def count():
        assert hook._FA3_CUDA_FWD == torch.ops.flash_attn_3.fwd
        hook._FA3_CUDA_FWD = counted('fwd', hook._FA3_CUDA_FWD)
        hook._FA3_CUDA_BWD = counted('bwd', hook._FA3_CUDA_BWD)
        return counts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hook, 'Library', OnCpu)
        patch.setattr(hook, '_fa3_common_support_error', lambda *_: None)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            sdpa.enable()
        try:
            yield count
        finally:
            sdpa.disable()
