"""transformers under flash_attn3.invariant(): what attention gives while a small Llama generates,
with a cache and in continuous batching, is bit for bit what it gives in a training forward of the
same queries, keys and values. On the CPU it is so within roundings.
"""
from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn3 import flash_attn_func, invariant
from flash_attn3.integrations import _hf_attention
from flash_attn3.integrations import transformers as integration

transformers = pytest.importorskip('transformers', reason='the contract is with transformers')
if integration._client_problem():
    pytest.skip(integration._client_problem(), allow_module_level=True)
from transformers.generation.continuous_batching import cache as batching_cache  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402

from tests.support.client_models import OWN, gpu_claimed, model_of, padding, tokens  # noqa: E402

LENGTH, NEW = 150, 12
PADS = 31, 0, 4    # tokens of padding, a sequence each
SIZES = dict(hidden_size=128, intermediate_size=128, head_dim=64, max_position_embeddings=512)
SPLIT = 128        # several parts a sequence


@pytest.fixture(scope='module', autouse=True)
def enabled(request):
    on_cpu = request.config.getoption('--device') != 'cuda'
    with gpu_claimed() if on_cpu else nullcontext():
        integration.enable()
        yield
        integration.disable()


@pytest.fixture
def model(device):
    return model_of('llama', 8, **SIZES).bfloat16().to(device)


def check(trained: Tensor, generated: Tensor) -> None:
    assert trained.requires_grad and trained.shape == generated.shape
    if trained.is_cuda:
        assert torch.equal(trained, generated)
    else:
        torch.testing.assert_close(trained, generated, atol=2 ** -7, rtol=2 ** -7)


def trainable(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


@pytest.mark.parametrize('side', ['none', 'left'])
def test_generate(side, model, device, monkeypatch):
    """A prompt, then steps on a cache; without padding these are flash_attn_with_kvcache."""
    calls = {}

    def recorded(module, query, key, value, attention_mask, **options):
        out, _ = _hf_attention.attention(module, query, key, value, attention_mask, **options)
        calls.setdefault(module, []).append(((query, key, value, attention_mask), options, out))
        return out, None
    monkeypatch.setitem(AttentionInterface._global_mapping, OWN, recorded)
    model.set_attn_implementation(OWN)
    ids, mask = tokens(3, LENGTH).to(device), padding(side, LENGTH, PADS).to(device)
    with invariant(SPLIT):
        model.generate(ids * mask, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
        assert len(calls) == model.config.num_hidden_layers
        for module, steps in calls.items():
            assert len(steps) == NEW
            (_, key, value, last_mask), options, _ = steps[-1]
            query = torch.cat([inputs[0] for inputs, *_ in steps], 2)
            options = {name: options[name] for name in ('scaling', 'dropout')}
            out, _ = _hf_attention.attention(module, *trainable(query, key, value), last_mask,
                                             **options)
            check(out, torch.cat([out for *_, out in steps], 1))


class Rows(NamedTuple):
    """Queries of a sequence in one call, after `first` others."""
    first: int
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


def test_continuous_batching(model, device, monkeypatch):
    """Prompts in chunks next to steps of others, as `generate_batch` packs them, in its thread."""
    if f'paged|{OWN}' not in AttentionInterface._global_mapping:
        pytest.skip('this transformers has no names of others in continuous batching')
    if device.type == 'cpu':    # psutil is asked for the memory
        memory = torch.device('cpu'), 1 << 30, 0, 0
        monkeypatch.setattr(batching_cache, 'get_device_and_memory_breakdown', lambda: memory)
    sequences = {}    # by their first keys: each prompt begins with another token
    function = _hf_attention.flash_attn_varlen_func

    def recorded(q, k, v, starts_q, starts_k, *lengths, **options):
        out = function(q, k, v, starts_q, starts_k, *lengths, **options)
        of_q, of_k = (torch.stack([x[:-1], x[1:]], 1).tolist() for x in (starts_q, starts_k))
        for (begin, end), (first, last) in zip(of_q, of_k):
            if end > begin:
                keys, values = k[first:last].clone(), v[first:last].clone()
                sequences.setdefault(tuple(keys[0].flatten().tolist()), []).append(Rows(
                    last - first - (end - begin), q[begin:end].clone(), keys, values,
                    out[begin:end].clone()))
        scales.add(options['softmax_scale'])
        return out
    scales = set()
    monkeypatch.setattr(_hf_attention, 'flash_attn_varlen_func', recorded)
    model.set_attn_implementation(f'paged|{OWN}')
    prompts = [[2 + i, *tokens(1, n)[0].tolist()] for i, n in enumerate((150, 5, 33, 140))]
    options = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    config = transformers.ContinuousBatchingConfig(
        block_size=16, num_blocks=128, max_batch_tokens=64, max_blocks_per_request=32,
        use_cuda_graph=False, use_async_batching=False)
    with invariant(SPLIT):
        results = model.generate_batch(prompts, options, config)
        assert len(results) == 4 and not any(x.error for x in results.values())
        assert len(sequences) == 4 * model.config.num_hidden_layers
        scale, = scales
        for calls in sequences.values():
            calls = sorted(calls, key=lambda rows: rows.first)
            q, out = (torch.cat([getattr(rows, name) for rows in calls]) for name in ('q', 'out'))
            *_, k, v, _ = calls[-1]
            assert len(q) == len(k) and len(calls) >= NEW
            trained = flash_attn_func(*(x[None] for x in trainable(q, k, v)), scale, True)
            check(trained[0], out)
