"""transformers itself on this package: tiny random models in float32 on the CPU, against its eager
attention. Each test also counts our ops, which proves that they computed the result.

transformers refuses flash_attention_3 on machines without a GPU: `gpu_claimed` makes its question
for one say yes, nothing else of transformers is changed.
"""
import importlib.util
import sys

import pytest
import torch

from flash_attn3 import compat
from flash_attn3.integrations import transformers as integration

from tests.cpu.called_ops import CalledOps

transformers = pytest.importorskip('transformers', reason='the contract is with transformers')
if integration._client_problem():
    pytest.skip(integration._client_problem(), allow_module_level=True)
from transformers import masking_utils, modeling_flash_attention_utils as utilities  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402
from transformers.utils import import_utils  # noqa: E402

OWN, FA3 = integration.NAME, 'flash_attention_3'
VOCABULARY, LENGTH, WINDOW = 48, 21, 6
SMALL = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, head_dim=16,
             pad_token_id=0, bos_token_id=1, eos_token_id=None)
DECODERS = {
    'llama': (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SMALL)),
    'qwen2': (transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**SMALL)),
    'mistral': (transformers.MistralForCausalLM,
                transformers.MistralConfig(**SMALL, sliding_window=WINDOW)),
    'gemma2': (transformers.Gemma2ForCausalLM, transformers.Gemma2Config(
        **SMALL, sliding_window=WINDOW, attn_logit_softcapping=0.5, query_pre_attn_scalar=16)),
    'gpt_oss': (transformers.GptOssForCausalLM, transformers.GptOssConfig(
        **SMALL, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1)),
}
# transformers gives gpt-oss another kernel than flash_attention_3.
ROUTES = [(kind, name) for kind in DECODERS for name in (OWN, FA3)
          if (kind, name) != ('gpt_oss', FA3)]
each_route = pytest.mark.parametrize('kind,name', ROUTES)


@pytest.fixture(autouse=True, scope='module')
def gpu_claimed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_utils, 'is_torch_cuda_available', lambda: True)
        patch.setitem(utilities.FLASH_ATTENTION_COMPATIBILITY_MATRIX[3], 'supported_devices',
                      ((lambda: True, 'cuda'),))
        yield
    import_utils.is_flash_attn_3_available.cache_clear()


@pytest.fixture(scope='module')
def enabled(gpu_claimed):
    """enable() asks for all installed packages, which takes a second."""
    integration.enable()
    yield
    integration.disable()


@pytest.fixture(autouse=True)
def _enabled(request):
    """For all tests but those that turn it on and off themselves."""
    if 'off' not in request.fixturenames:
        request.getfixturevalue('enabled')


def model_of(kind: str):
    kind, config = DECODERS[kind]
    torch.manual_seed(1)
    config._attn_implementation = 'eager'
    model = kind(config).eval()
    with torch.no_grad():    # attention of new models is almost uniform, sinks are almost 0
        for parameter_name, x in model.named_parameters():
            if parameter_name.endswith('sinks'):
                x.uniform_(-2, 2)
            elif 'q_proj.w' in parameter_name or 'k_proj.w' in parameter_name:
                x.mul_(20)
    return model


def tokens(batch=3, length=LENGTH):
    return torch.randint(2, VOCABULARY, (batch, length))


def padding(side: str) -> torch.Tensor:
    """(3, LENGTH): 0 for padding; the middle sequence has none."""
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    for row, count in ((0, 9), (2, 4)):
        if side == 'left':
            mask[row, :count] = 0
        elif side == 'right':
            mask[row, LENGTH - count:] = 0
    return mask


def both(model, name, call):
    """What call(model) returns with eager attention, and with ours; checks that ours ran."""
    model.set_attn_implementation('eager')
    expected = call(model)
    model.set_attn_implementation(name)
    with CalledOps() as ops:
        got = call(model)
    forwards = [op for op in ops.names if 'fwd' in op or 'attend_cache' in op]
    assert len(forwards) >= model.config.num_hidden_layers, ops.names
    return got, expected


def close(got, expected, tolerance=2e-5):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------ forward
@pytest.mark.parametrize('side', ['none', 'left', 'right'])
@each_route
def test_logits(kind, name, side):
    model, ids, mask = model_of(kind), tokens(), padding(side)
    with torch.no_grad():
        got, expected = both(model, name, lambda m: m(ids, attention_mask=mask).logits)
    close(got[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize('side', ['none', 'left', 'right'])
@pytest.mark.parametrize('name', [OWN, FA3])
def test_bidirectional_encoder(name, side):
    """BERT, whose padded queries see the other keys with our own name, as with eager."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, attention_probs_dropout_prob=0.0)
    model, ids, mask = transformers.BertModel(config).eval(), tokens(), padding(side)
    with torch.no_grad():
        got, expected = both(model, name, lambda m: m(ids, attention_mask=mask).last_hidden_state)
    rows = torch.ones_like(mask) if name == OWN else mask
    close(got[rows.bool()], expected[rows.bool()])


@pytest.mark.parametrize('use_cache', [False, True])
@each_route
def test_packed_sequences(kind, name, use_cache):
    """position_ids that restart, against each sequence alone with eager attention."""
    model, ids, lengths = model_of(kind), tokens(1), (9, 3, 9)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        expected = torch.cat([model(part).logits for part in ids.split(lengths, 1)], 1)
        model.set_attn_implementation(name)
        with CalledOps() as ops:
            got = model(ids, position_ids=positions, use_cache=use_cache).logits
    assert len(ops.names) >= 2
    close(got, expected)


def test_packed_sequences_by_cu_seqlens():
    """What DataCollatorWithFlattening(return_flash_attn_kwargs=True) gives."""
    model, ids, lengths = model_of('llama'), tokens(1), (9, 3, 9)
    starts = torch.tensor([0, 9, 12, 21], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        expected = torch.cat([model(part).logits for part in ids.split(lengths, 1)], 1)
        model.set_attn_implementation(OWN)
        got = model(ids, position_ids=positions, cu_seq_lens_q=starts, cu_seq_lens_k=starts,
                    max_length_q=9, max_length_k=9).logits
    close(got, expected)


# ---------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize('side', ['none', 'left', 'right'])
@each_route
def test_gradients(kind, name, side):
    """Of every parameter, the sinks of gpt-oss among them."""
    model, ids, mask = model_of(kind).train(), tokens(), padding(side)

    def gradients(m):
        m.zero_grad()
        logits = m(ids, attention_mask=mask).logits
        logits[mask.bool()].log_softmax(-1)[:, 3].mean().neg().backward()
        return {key: x.grad.clone() for key, x in m.named_parameters() if x.grad is not None}
    got, expected = both(model, name, gradients)
    assert got.keys() == expected.keys()
    if kind == 'gpt_oss':
        sinks = [x for key, x in got.items() if key.endswith('sinks')]
        assert len(sinks) == 2 and all((x != 0).all() for x in sinks)
    for key, x in got.items():
        close(x, expected[key])


def test_own_name_in_16_bits_under_autocast():
    """Layers in float32, attention in what autocast says."""
    model, ids = model_of('gpt_oss'), tokens()
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        got, _ = both(model, OWN, lambda m: m(ids).logits)
    model.set_attn_implementation('eager')
    with torch.no_grad():
        expected = model(ids).logits
    assert (got.float() - expected).abs().mean() < 0.02 * expected.abs().mean() + 1e-3


# ----------------------------------------------------------------------------------------- generate
@pytest.mark.parametrize('cache', [None, 'static'])
@each_route
def test_generate(kind, name, cache):
    """Greedy, a batch padded on the left, past the window: the same tokens."""
    model, ids, mask = model_of(kind), tokens(), padding('left')
    options = dict(attention_mask=mask, max_new_tokens=10, do_sample=False, disable_compile=True,
                   cache_implementation=cache)
    got, expected = both(model, name, lambda m: m.generate(ids * mask, **options))
    assert got.shape == (3, LENGTH + 10) and torch.equal(got, expected)


@pytest.mark.parametrize('kind', ['llama', 'mistral'])
def test_continuous_batching(kind):
    """generate_batch on the paged cache: varlen in the prefill, flash_attn_with_kvcache after it."""
    model, prompts = model_of(kind), [x[:n].tolist() for x, n in zip(tokens(), (21, 5, 12))]
    config = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0,
                                           eos_token_id=-1)
    expected = [model.generate(torch.tensor([x]), generation_config=config)[0, len(x):].tolist()
                for x in prompts]
    model.set_attn_implementation(FA3)
    with CalledOps() as ops:
        results = model.generate_batch(prompts, generation_config=config, progress_bar=False)
    assert [x.generated_tokens for x in results.values()] == expected
    assert any('attend_cache' in op for op in ops.names) and any('fwd' in op for op in ops.names)
