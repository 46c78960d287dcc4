"""transformers itself on the kernels: tiny random models in 16 bits, against its eager attention in
float32 by the numeric bar: errors of at most twice those of eager attention in 16 bits. Each test
also proves that our ops computed the result.

Greedy tokens are compared up to ties: a random model has logits that 16 bits cannot tell apart.
"""
from __future__ import annotations

import copy
import functools
import importlib
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from flash_attn3.integrations import _hf_attention
from flash_attn3.integrations import transformers as integration

from tests.support import compare
from tests.support.called_ops import CalledOps

transformers = pytest.importorskip('transformers', reason='the contract is with transformers')
if integration._client_problem():
    pytest.skip(integration._client_problem(), allow_module_level=True)
from transformers import modeling_flash_attention_utils as utilities  # noqa: E402
from transformers.generation.continuous_batching import (  # noqa: E402
    cache as batching_cache, initialization)
from transformers.modeling_utils import AttentionInterface  # noqa: E402

from tests.support.client_models import (  # noqa: E402
    DECODERS, FA3, OWN, count_calls, each_route, enabled, model_of, padding, tokens)

LENGTH, NEW = 90, 12
PADS = 31, 0, 4    # tokens of padding, a sequence each
# Every expert counts: in 16 bits the choice of one may be another. batched_mm: no synchronization.
SIZES = dict(hidden_size=128, intermediate_size=128, head_dim=64, max_position_embeddings=512,
             sliding_window=40, num_experts_per_tok=2, experts_implementation='batched_mm')
DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16}
ROUNDING = 2 * 2 ** -8    # two units of bf16, of the largest of a gradient
FEW = 64
each_side = pytest.mark.parametrize('side', ['none', 'left', 'right'])


class Models(NamedTuple):
    """One model in 16 bits, and the same rounded weights in float32."""
    narrow: transformers.PreTrainedModel
    wide: transformers.PreTrainedModel

    def eager(self, call) -> tuple[Tensor, Tensor]:
        """(ref, pt) of the call."""
        for model in self:
            model.set_attn_implementation('eager')
        return call(self.wide), call(self.narrow)

    def ours(self, name, call):
        """The same with ours; checks that ours ran in each layer."""
        self.narrow.set_attn_implementation(name)
        with CalledOps() as ops:
            got = call(self.narrow)
        forwards = [op for op in ops.names if 'fwd' in op or 'attend' in op]
        assert len(forwards) >= self.narrow.config.num_hidden_layers, ops.names
        return got


@functools.cache
def models_of(kind: str, device: torch.device, dtype: str = 'bf16', layers: int = 2) -> Models:
    narrow = model_of(kind, 8, **SIZES, num_hidden_layers=layers).to(DTYPES[dtype]).to(device)
    return Models(narrow, copy.deepcopy(narrow).float())


@pytest.fixture(scope='module', autouse=True)
def integration_enabled(request):
    with enabled(request):
        yield
        models_of.cache_clear()


def inputs_of(side: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids, mask) of three sequences."""
    return tokens(3, LENGTH).to(device), padding(side, LENGTH, PADS).to(device)


def check_greedy(models: Models, sequences: Tensor, mask: Tensor, count: int) -> None:
    """The last `count` tokens are those that eager attention in float32 finds most probable, or
    ones whose logits are as near as errors of twice those of eager attention in 16 bits leave
    open. Most are the same.
    """
    with torch.no_grad():
        ref, pt = models.eager(lambda m: m(sequences, attention_mask=mask).logits[
            :, -count - 1:-1].double())
    chosen = sequences[:, -count:]
    error = 2 * (pt - ref).abs().max() + (ref.to(torch.bfloat16) - ref).abs().max()
    behind = ref.amax(-1) - ref.gather(-1, chosen[..., None])[..., 0]
    assert behind.max() <= 2 * error, f'{behind.max():.3e} > 2 x {error:.3e}'
    assert (ref.argmax(-1) == chosen).double().mean() >= 0.75


# ------------------------------------------------------------------------------------------ forward
@pytest.mark.smoke
@pytest.mark.parametrize('dtype', DTYPES)
@each_side
@each_route
def test_logits(kind, name, side, dtype, device):
    models, (ids, mask) = models_of(kind, device, dtype), inputs_of(side, device)
    with torch.no_grad():
        def call(m):
            return m(ids, attention_mask=mask).logits[mask.bool()]
        compare.check_close(models.ours(name, call), *models.eager(call), 'logits')


@each_route
def test_packed_sequences(kind, name, device):
    """position_ids that restart: transformers passes lengths as tensors of the GPU. Against each
    sequence alone.
    """
    models, ids, lengths = models_of(kind, device), tokens(1, LENGTH).to(device), (40, 3, 47)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    with torch.no_grad():
        wanted = models.eager(lambda m: torch.cat([m(x).logits for x in ids.split(lengths, 1)], 1))
        got = models.ours(name, lambda m: m(ids, position_ids=positions, use_cache=False).logits)
    compare.check_close(got, *wanted, 'logits')


# ---------------------------------------------------------------------------------------- gradients
def log_probabilities(model, ids: Tensor, mask: Tensor) -> Tensor:
    """(tokens, vocabulary), in float32, without padding."""
    return model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()].float().log_softmax(
        -1)


@each_side
@each_route
def test_gradients(kind, name, side, device):
    """All parameters have them. The errors of a few numbers are luck: those have another test."""
    models, (ids, mask) = models_of(kind, device), inputs_of(side, device)

    def gradients(m):
        m.zero_grad()
        log_probabilities(m, ids, mask)[:, 3].sum().neg().backward()
        return {key: x.grad.clone() for key, x in m.named_parameters() if x.grad is not None}
    got, (ref, pt) = models.ours(name, gradients), models.eager(gradients)
    assert got.keys() == ref.keys()
    for key, x in got.items():
        if x.numel() >= FEW:
            compare.check_close(x, ref[key], pt[key], key, ROUNDING * ref[key].abs().max().item())


@each_side
def test_gradients_of_sinks(side, device):
    """Those of gpt-oss, of both layers and several losses together."""
    models, (ids, mask) = models_of('gpt_oss', device), inputs_of(side, device)

    def gradients(m):
        sinks = [x for key, x in m.named_parameters() if key.endswith('sinks')]
        losses = log_probabilities(m, ids, mask).sum(0)[:16]
        return torch.stack([torch.cat(torch.autograd.grad(loss, sinks, retain_graph=True))
                            for loss in losses])
    got, wanted = models.ours(OWN, gradients), models.eager(gradients)
    assert got.shape == (16, 8) and (wanted[0] != 0).all()
    compare.check_close(got, *wanted, 'sinks')


# ----------------------------------------------------------------------------------------- compiled
def test_compiled_with_graphs(device):
    """Llama as one graph of torch.compile without breaks, replayed in CUDA graphs on new tokens."""
    models = models_of('llama', device, layers=1)
    models.narrow.set_attn_implementation(FA3)
    how = dict(mode='reduce-overhead') if device.type == 'cuda' else dict(backend='aot_eager')
    torch.compiler.reset()
    compiled = torch.compile(models.narrow, fullgraph=True, **how)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        inputs = [tokens(3, LENGTH).to(device) for _ in range(4)]
        got = [compiled(ids, use_cache=False).logits.clone() for ids in inputs]
        if device.type == 'cuda':
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                compiled(inputs[-1], use_cache=False)
                torch.cuda.synchronize()
            kernels = [event.name for event in profiler.events()]
            assert any('fa3' in name for name in kernels), kernels
        for ids, logits in zip(inputs, got):
            wanted = models.eager(lambda m, ids=ids: m(ids, use_cache=False).logits)
            compare.check_close(logits, *wanted, 'logits')
    torch.compiler.reset()


# ----------------------------------------------------------------------------------------- generate
@pytest.mark.parametrize('side', ['none', 'left'])
@pytest.mark.parametrize('cache', [None, 'static'])
@each_route
def test_generate(kind, name, cache, side, device):
    """Greedy, past the window, with a cache that grows and with one that has room behind."""
    models, (ids, mask) = models_of(kind, device), inputs_of(side, device)
    options = dict(attention_mask=mask, max_new_tokens=NEW, do_sample=False, disable_compile=True,
                   cache_implementation=cache)
    sequences = models.ours(name, lambda m: m.generate(ids * mask, **options))
    assert sequences.shape == (3, LENGTH + NEW)
    check_greedy(models, sequences, torch.cat([mask, mask.new_ones(3, NEW)], 1), NEW)


# ---------------------------------------------------------------------------- continuous batching
@pytest.fixture
def batching(device, monkeypatch):
    """Tokens of generate_batch, for prompts that share batches and are split into chunks."""
    if device.type == 'cpu':    # psutil is asked for the memory
        memory = torch.device('cpu'), 1 << 30, 0, 0
        monkeypatch.setattr(batching_cache, 'get_device_and_memory_breakdown', lambda: memory)
    options = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1)

    def check(models, name, block_size, graphs):
        if graphs and device.type == 'cpu':
            pytest.skip('graphs need a GPU')
        config = transformers.ContinuousBatchingConfig(
            block_size=block_size, num_blocks=2048 // block_size, max_batch_tokens=64,
            max_blocks_per_request=512 // block_size, use_cuda_graph=graphs,
            use_async_batching=False)
        prompts = [tokens(1, n)[0].tolist() for n in (90, 5, 33, 47)]
        models.narrow.set_attn_implementation(name)
        results = models.narrow.generate_batch(prompts, options, config)
        assert len(results) == len(prompts)
        for x in results.values():
            assert not x.error and len(x.generated_tokens) == NEW, x.error
            whole = torch.tensor([[*x.prompt_ids, *x.generated_tokens]], device=device)
            check_greedy(models, whole, torch.ones_like(whole), NEW)
        assert {tuple(x.prompt_ids) for x in results.values()} == {tuple(x) for x in prompts}
    return check


@pytest.mark.parametrize('graphs', [False, True])
@pytest.mark.parametrize('block_size', [16, 256])
@pytest.mark.parametrize('kind', ['llama', 'qwen2'])
def test_continuous_batching(kind, block_size, graphs, batching, device, monkeypatch):
    """varlen in the prefill, flash_attn_with_kvcache after it, where no layer has a window.
    (transformers 5.17 loses the window of Mistral and the softcap of Gemma 2 there, whatever
    computes attention.)
    """
    calls, models = [], models_of(kind, device)
    if device.type == 'cpu':
        monkeypatch.setattr(initialization, 'ensure_decode_fast_path_is_available', lambda *_: None)
    shim = importlib.import_module('flash_attn_interface')
    for name in ('flash_attn_varlen_func', 'flash_attn_with_kvcache'):
        count_calls(monkeypatch, shim, name, calls)
    monkeypatch.setattr(utilities, '_loaded_implementation', None)    # names taken once
    batching(models, FA3, block_size, graphs)
    monkeypatch.setattr(utilities, '_loaded_implementation', None)
    assert set(calls) == {'flash_attn_varlen_func'} | (
        {'flash_attn_with_kvcache'} if kind == 'llama' else set()), calls


@pytest.mark.parametrize('kind,graphs', [
    *((kind, False) for kind in DECODERS), ('llama', True), ('gpt_oss', True)])
def test_continuous_batching_with_our_own_name(kind, graphs, batching, device, monkeypatch):
    """Every model, sinks, windows and softcap included."""
    if f'paged|{OWN}' not in AttentionInterface._global_mapping:
        pytest.skip('this transformers has no names of others in continuous batching')
    calls, models = [], models_of(kind, device)
    count_calls(monkeypatch, _hf_attention, 'flash_attn_varlen_func', calls)
    batching(models, f'paged|{OWN}', 16, graphs)
    assert len(calls) >= 2
