"""transformers under flash_attn3.invariant(): what attention gives while a small Llama generates,
with a cache and in continuous batching, is bit for bit what it gives in a training forward of the
same queries, keys and values. On the CPU it is so within roundings.
"""
from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn3 import invariant
from flash_attn3.integrations import _hf_attention
from flash_attn3.integrations import transformers as integration

transformers = pytest.importorskip('transformers', reason='the contract is with transformers')
if integration._client_problem():
    pytest.skip(integration._client_problem(), allow_module_level=True)
from transformers.generation.continuous_batching import cache as batching_cache  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402

from tests.support.client_models import OWN, enabled, model_of, padding, tokens  # noqa: E402

LENGTH, NEW = 150, 12
PADS = 31, 0, 4    # tokens of padding, a sequence each
SIZES = dict(hidden_size=128, intermediate_size=128, head_dim=64, max_position_embeddings=512)
SPLIT = 128        # several parts a sequence


@pytest.fixture(scope='module', autouse=True)
def integration_enabled(request):
    with enabled(request):
        yield


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
    """Queries of a sequence in one call, after `first` others, and all its keys so far."""
    first: int
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


class Sampled(NamedTuple):
    """What attention of a layer had and gave for a sequence: (rows, heads, head_dim)."""
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


def whole(calls: list[Rows]) -> Sampled:
    calls = sorted(calls, key=lambda rows: rows.first)
    q, out = (torch.cat([getattr(rows, name) for rows in calls]) for name in ('q', 'out'))
    assert len(q) == len(calls[-1].k) and len(calls) >= NEW
    return Sampled(q, calls[-1].k, calls[-1].v, out)


def sampled_in_batches(model, prompts: list[list[int]],
                       monkeypatch) -> tuple[list[list[int]], list[list[Sampled]]]:
    """Texts of `generate_batch`, short ones first, and for each layer what attention had and gave
    for each of them.
    """
    layers, sequences = [], {}    # by layer and first keys: each prompt begins with another token
    function = _hf_attention.flash_attn_varlen_func

    def entered(module, *inputs, **options):
        layers.append(module.layer_idx)
        return _hf_attention.paged_attention(module, *inputs, **options)

    def recorded(q, k, v, starts_q, starts_k, *lengths, **options):
        out = function(q, k, v, starts_q, starts_k, *lengths, **options)
        of_q, of_k = (torch.stack([x[:-1], x[1:]], 1).tolist() for x in (starts_q, starts_k))
        for (begin, end), (first, last) in zip(of_q, of_k):
            if end > begin:
                keys, values = k[first:last].clone(), v[first:last].clone()
                name = layers[-1], tuple(keys[0].flatten().tolist())
                sequences.setdefault(name, []).append(Rows(
                    last - first - (end - begin), q[begin:end].clone(), keys, values,
                    out[begin:end].clone()))
        return out
    options = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    config = transformers.ContinuousBatchingConfig(
        block_size=16, num_blocks=128, max_batch_tokens=64, max_blocks_per_request=32,
        use_cuda_graph=False, use_async_batching=False)
    with monkeypatch.context() as patch:
        patch.setattr(_hf_attention, 'flash_attn_varlen_func', recorded)
        patch.setitem(AttentionInterface._global_mapping, f'paged|{OWN}', entered)
        model.set_attn_implementation(f'paged|{OWN}')
        results = model.generate_batch(prompts, options, config).values()
    assert len(results) == len(prompts) and not any(x.error for x in results)
    texts = sorted(([*x.prompt_ids, *x.generated_tokens[:-1]] for x in results), key=len)
    found = [[] for _ in range(model.config.num_hidden_layers)]
    for (layer, _), calls in sequences.items():
        found[layer].append(whole(calls))
    for each in found:
        each.sort(key=lambda one: len(one.q))
        assert [len(one.q) for one in each] == list(map(len, texts))
    return texts, found


@pytest.fixture
def batching(device, monkeypatch):
    if f'paged|{OWN}' not in AttentionInterface._global_mapping:
        pytest.skip('this transformers has no names of others in continuous batching')
    if device.type == 'cpu':    # psutil is asked for the memory
        memory = torch.device('cpu'), 1 << 30, 0, 0
        monkeypatch.setattr(batching_cache, 'get_device_and_memory_breakdown', lambda: memory)


class Replaced(torch.autograd.Function):
    """Other values, with the gradient of `own`."""
    @staticmethod
    def forward(ctx, own: Tensor, others: Tensor) -> Tensor:
        return others.view_as(others)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def training_batch(texts: list[list[int]], layout: str,
                   device: torch.device) -> tuple[Tensor, dict, Tensor]:
    """ids, what the model gets besides, and which of the ids are tokens of the texts, in order."""
    lengths = list(map(len, texts))
    flat = torch.tensor([token for text in texts for token in text], device=device)
    if layout == 'packed':
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])
        return flat[None], {'position_ids': positions[None]}, torch.ones_like(flat).bool()[None]
    mask = padding(layout, lengths[-1], tuple(lengths[-1] - n for n in lengths)).to(device)
    ids = torch.zeros_like(mask).masked_scatter(mask.bool(), flat)
    return ids, {'attention_mask': mask}, mask.bool()


@pytest.mark.parametrize('layout', ['packed', 'left', 'right'])
def test_continuous_batching(layout, model, device, batching, monkeypatch):
    """Prompts in chunks next to steps of others, as `generate_batch` packs them, in its thread.
    Then a training step of the model with these texts in one batch. Its GEMMs have other bits, so
    that attention of each layer is given the queries, keys and values of the sampler.
    """
    prompts = [[2 + i, *tokens(1, n)[0].tolist()] for i, n in enumerate((150, 5, 33, 140))]
    checked = []

    def replayed(module, query, key, value, attention_mask, **options):
        q, k, v, wanted = map(torch.cat, zip(*sampled[module.layer_idx]))
        inputs = []
        for own, rows in zip((query, key, value), (q, k, v)):
            others = own.detach().transpose(1, 2).clone()
            others[is_token] = rows
            inputs.append(Replaced.apply(own, others.transpose(1, 2)))
        out, _ = _hf_attention.attention(module, *inputs, attention_mask, **options)
        check(out[is_token], wanted)
        checked.append(module.layer_idx)
        return out, None
    with invariant(SPLIT):
        texts, sampled = sampled_in_batches(model, prompts, monkeypatch)
        ids, options, is_token = training_batch(texts, layout, device)
        monkeypatch.setitem(AttentionInterface._global_mapping, OWN, replayed)
        model.set_attn_implementation(OWN)
        model.train()(ids, labels=ids, use_cache=False, **options).loss.backward()
    assert checked == list(range(model.config.num_hidden_layers))
    assert all(x.grad.isfinite().all() for x in model.parameters())
