"""Tiny random models of transformers, for the tests on the CPU and on a GPU. Nothing is downloaded.

Importing this file needs transformers; tests ask pytest.importorskip for it first.
"""
from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType

import pytest
import torch
import transformers
from torch import Tensor
from transformers import modeling_flash_attention_utils as utilities
from transformers.utils import import_utils

from flash_attn3.integrations import transformers as integration

OWN, FA3 = integration.NAME, 'flash_attention_3'
VOCABULARY, WINDOW = 48, 6
SMALL = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, head_dim=16,
             pad_token_id=0, bos_token_id=1, eos_token_id=None)
DECODERS = {
    'llama': (transformers.LlamaForCausalLM, transformers.LlamaConfig, {}),
    'qwen2': (transformers.Qwen2ForCausalLM, transformers.Qwen2Config, dict(
        use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)),
    'mistral': (transformers.MistralForCausalLM, transformers.MistralConfig,
                dict(sliding_window=WINDOW)),
    'gemma2': (transformers.Gemma2ForCausalLM, transformers.Gemma2Config, dict(
        sliding_window=WINDOW, attn_logit_softcapping=0.5, query_pre_attn_scalar=16)),
    'gpt_oss': (transformers.GptOssForCausalLM, transformers.GptOssConfig, dict(
        sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1,
        experts_implementation=None)),
}
# transformers gives gpt-oss another kernel than flash_attention_3.
ROUTES = [(kind, name) for kind in DECODERS for name in (OWN, FA3)
          if (kind, name) != ('gpt_oss', FA3)]
each_route = pytest.mark.parametrize('kind,name', ROUTES)


def model_of(kind: str, sharpness: float = 20, **changes):
    """A model in float32 on the CPU with eager attention, whose weights are always the same.

    sharpness: attention of new models is almost uniform: the factor of their q_proj and k_proj.
    changes: to the sizes, and to the settings that the kind has.
    """
    model_class, config_class, settings = DECODERS[kind]
    settings = SMALL | settings
    config = config_class(**settings | {key: x for key, x in changes.items() if key in settings})
    config._attn_implementation = 'eager'
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(1)
        model = model_class(config).eval()
        for parameter_name, x in model.named_parameters():
            if parameter_name.endswith('sinks'):    # new models have almost 0
                x.uniform_(-2, 2)
            elif 'q_proj.w' in parameter_name or 'k_proj.w' in parameter_name:
                x.mul_(sharpness)
    return model


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(2, VOCABULARY, (batch, length))


def padding(side: str, length: int, counts: tuple[int, ...]) -> Tensor:
    """(len(counts), length): 0 for padding, counts[i] of row i; side: left, right or none."""
    mask = torch.ones(len(counts), length, dtype=torch.long)
    for row, count in enumerate(counts):
        if side == 'left':
            mask[row, :count] = 0
        elif side == 'right':
            mask[row, length - count:] = 0
    return mask


@contextmanager
def gpu_claimed() -> Iterator[None]:
    """transformers refuses flash_attention_3 on machines without a GPU: its question for one says
    yes here, nothing else of transformers is changed.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_utils, 'is_torch_cuda_available', lambda: True)
        patch.setitem(utilities.FLASH_ATTENTION_COMPATIBILITY_MATRIX[3], 'supported_devices',
                      ((lambda: True, 'cuda'),))
        yield
    import_utils.is_flash_attn_3_available.cache_clear()


@contextmanager
def enabled(request: pytest.FixtureRequest) -> Iterator[None]:
    """The integration is enabled, for a whole file: enable() takes a second, as it asks for all
    installed packages.
    """
    on_cpu = request.config.getoption('--device') != 'cuda'
    with gpu_claimed() if on_cpu else nullcontext():
        integration.enable()
        yield
        integration.disable()


def count_calls(patch: pytest.MonkeyPatch, module: ModuleType, name: str,
                calls: list[str]) -> None:
    """Appends the name at each call: generate_batch runs the model in a thread of its own, where no
    mode of the dispatcher is on.
    """
    function = getattr(module, name)

    @functools.wraps(function)    # transformers reads the signature
    def counted(*arguments, **named):
        calls.append(name)
        return function(*arguments, **named)
    patch.setattr(module, name, counted)
