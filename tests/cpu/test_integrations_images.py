"""Masks of images in transformers, whose tokens see each other both ways: tiny random Gemma 3 and
PaliGemma against eager attention, and any mask that is two intervals of keys for each query.
"""
from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn3.integrations import _hf_attention, _hf_masks, _intervals
from flash_attn3.integrations import transformers as integration

transformers = pytest.importorskip('transformers', reason='the contract is with transformers')
if integration._client_problem():
    pytest.skip(integration._client_problem(), allow_module_level=True)
from transformers import masking_utils  # noqa: E402

from tests.support import client_models  # noqa: E402
from tests.support.client_models import (  # noqa: E402
    OWN, SMALL, VOCABULARY, WINDOW, count_calls, padding, tokens)

LENGTH = 21
PADS = 4, 0, 7
TEXT = SMALL | dict(num_hidden_layers=4)
SLIDING = dict(sliding_window=WINDOW, query_pre_attn_scalar=16,
               layer_types=['full_attention', 'sliding_attention'] * 2)
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
              image_size=8, patch_size=4)
KINDS = ('gemma3', 'paligemma', 'paligemma2')
each_kind = pytest.mark.parametrize('kind', KINDS)


def config_of(kind: str) -> transformers.PreTrainedConfig:
    if kind == 'gemma3':
        return transformers.Gemma3Config(
            text_config=TEXT | SLIDING, vision_config=VISION, mm_tokens_per_image=4,
            image_token_index=VOCABULARY - 1)
    text = TEXT | dict(model_type='gemma')
    if kind == 'paligemma2':
        text |= SLIDING | dict(model_type='gemma2', attn_logit_softcapping=0.5)
    return transformers.PaliGemmaConfig(
        vision_config=VISION | dict(model_type='siglip_vision_model', projection_dim=32,
                                    vision_use_head=False),
        text_config=text, image_token_index=VOCABULARY - 1, projection_dim=32, hidden_size=32)


def model_of(kind: str) -> transformers.PreTrainedModel:
    model_class = (transformers.Gemma3ForConditionalGeneration if kind == 'gemma3' else
                   transformers.PaliGemmaForConditionalGeneration)
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(1)
        model = model_class._from_config(config_of(kind), attn_implementation='eager').eval()
        for name, x in model.named_parameters():
            if 'q_proj.w' in name or 'k_proj.w' in name:    # not almost uniform
                x.mul_(20)
    return model


def inputs_of(kind: str, side: str) -> dict[str, Tensor]:
    """The second sequence has two images, and the others one; PaliGemma's are prefixes."""
    mask = padding(side, LENGTH, PADS)
    types = torch.zeros(3, LENGTH, dtype=torch.long)
    if kind == 'gemma3':
        types[:, 8:13] = types[1, 2:5] = types[1, 15:] = 1
    else:
        types[:, 12:] = 1    # what follows the prefix
    types = types.masked_fill(mask == 0, 0)
    ids = tokens(3, LENGTH).clamp(max=VOCABULARY - 2)    # no image is read
    return dict(input_ids=ids * mask, attention_mask=mask, token_type_ids=types)


@pytest.fixture(autouse=True, scope='module')
def enabled():
    integration.enable(shim=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    integration.disable()


@pytest.fixture
def both(monkeypatch):
    """What call(model) returns with ours and with eager attention; checks that masks were ours."""
    calls = []
    count_calls(monkeypatch, _hf_attention, '_attention_in_intervals', calls)

    def run(model, call):
        model.set_attn_implementation({'text_config': 'eager'})
        expected = call(model)
        model.set_attn_implementation({'text_config': OWN})
        got = call(model)
        assert len(calls) >= TEXT['num_hidden_layers']
        return got, expected
    return run


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize('side', ['none', 'left', 'right'])
@each_kind
def test_logits(both, kind, side):
    model, inputs = model_of(kind), inputs_of(kind, side)
    rows = inputs['attention_mask'].bool()
    with torch.no_grad():
        got, expected = both(model, lambda m: m(**inputs).logits)
        causal = model(**inputs | dict(token_type_ids=1 - (kind == 'gemma3') + torch.zeros_like(
            inputs['token_type_ids']))).logits
    close(got[rows], expected[rows])
    assert (causal - got)[rows].abs().max() > 1e-2    # the images count


@each_kind
def test_gradients(both, kind):
    model, inputs = model_of(kind), inputs_of(kind, 'left')
    rows = inputs['attention_mask'].bool()

    def gradients(m):
        m.zero_grad()
        m(**inputs).logits[rows].log_softmax(-1)[:, 3].mean().neg().backward()
        return {key: x.grad.clone() for key, x in m.named_parameters() if x.grad is not None}
    got, expected = both(model, gradients)
    assert got.keys() == expected.keys()
    for key, x in got.items():
        close(x, expected[key])


@pytest.mark.parametrize('kind,cache', [
    ('gemma3', None), ('gemma3', 'static'), ('paligemma', None), ('paligemma', 'static'),
    ('paligemma2', None)])
def test_generate(both, kind, cache):
    """Greedy, past the window. transformers 5.17 has no static cache for the second PaliGemma."""
    model, inputs = model_of(kind), inputs_of(kind, 'left')
    options = dict(max_new_tokens=10, do_sample=False, disable_compile=True,
                   cache_implementation=cache)
    got, expected = both(model, lambda m: m.generate(**inputs, **options))
    assert got.shape == (3, LENGTH + 10) and torch.equal(got, expected)


def test_masks_are_kept_for_the_layers_of_a_forward(both, monkeypatch):
    """One of each kind of layer, and none after it."""
    made, make = [], _hf_attention.AttentionMask.from_intervals
    monkeypatch.setattr(_hf_attention.AttentionMask, 'from_intervals',
                        lambda intervals: made.append(len(intervals)) or make(intervals))
    model = model_of('gemma3')
    with torch.no_grad():
        both(model, lambda m: m(**inputs_of('gemma3', 'left')).logits)
    gc.collect()
    assert made == [3, 3] and not _hf_attention._masks


# ---------------------------------------------------------------------------------------- any masks
causal = masking_utils.causal_mask_function
numbers = torch.tensor([[0] * 5 + [1] * 9 + [2] * 7, [0] * 21, [0] + [1] * 20])
ANY = {
    'blocks': masking_utils.or_masks(causal, masking_utils.blockwise_overlay(numbers)),
    'packed': masking_utils.and_masks(causal, masking_utils.packed_sequence_mask_function(numbers)),
    'chunks': masking_utils.chunked_causal_mask_function(4, torch.tensor([4, 0, 0])),
    'custom': masking_utils.or_masks(causal, lambda b, h, q, k: k == 20),
}


@pytest.mark.parametrize('use_vmap', [False, True])
@pytest.mark.parametrize('pairs', [1, 1 << 20])
@pytest.mark.parametrize('name', ANY)
def test_any_mask(name, pairs, use_vmap, monkeypatch):
    """With padding, and keys that a cache has before the queries."""
    monkeypatch.setattr(_intervals, '_PAIRS', pairs)
    module = client_models.model_of('llama').model.layers[0].self_attn
    q, k, v = (torch.randn(3, heads, length, 16) for heads, length in (
        (4, 15), (2, LENGTH), (2, LENGTH)))
    given = dict(batch_size=3, q_length=15, kv_length=LENGTH, q_offset=6, mask_function=ANY[name],
                 attention_mask=padding('left', LENGTH, PADS).bool(), device='cpu',
                 use_vmap=use_vmap)
    mask = _hf_masks.mask(**given)
    assert _hf_masks.are_intervals(mask, 15)
    shown = masking_utils.sdpa_mask(**given, allow_is_causal_skip=False)
    got, _ = _hf_attention.attention(module, q, k, v, mask, sliding_window=2)
    expected = F.scaled_dot_product_attention(q, k, v, shown, enable_gqa=True).nan_to_num()
    close(got, expected.transpose(1, 2).masked_fill(~shown.any(-1).transpose(1, 2)[..., None], 0))


def test_masks_of_more_intervals_are_refused():
    for function in (lambda b, h, q, k: k % 3 == 0, masking_utils.or_masks(
            causal, lambda b, h, q, k: k % 8 == 7)):
        with pytest.raises(NotImplementedError, match='^flash_attn3.integrations.transformers: '
                           'expected a mask by which a query sees two intervals of keys at most, '
                           'got more, by .*; hint: use attn_implementation='):
            _hf_masks.mask(batch_size=1, q_length=LENGTH, kv_length=LENGTH, device='cpu',
                           mask_function=function)
