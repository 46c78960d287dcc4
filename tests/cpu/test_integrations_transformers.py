"""transformers itself on this package: tiny random models in float32 on the CPU, against its eager
attention. Each test also counts our ops, which proves that they computed the result.
"""
import functools
import importlib
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F

from flash_attn3 import compat
from flash_attn3.integrations import _base, _hf_attention, _hf_masks
from flash_attn3.integrations import transformers as integration

from tests.support.called_ops import CalledOps

transformers = pytest.importorskip('transformers', reason='the contract is with transformers')
if integration._client_problem():
    pytest.skip(integration._client_problem(), allow_module_level=True)
from transformers import masking_utils, modeling_flash_attention_utils as utilities  # noqa: E402
from transformers.generation.continuous_batching import (  # noqa: E402
    cache as batching_cache, initialization)
from transformers.modeling_utils import AttentionInterface  # noqa: E402
from transformers.utils import import_utils  # noqa: E402

from tests.support import client_models  # noqa: E402
from tests.support.client_models import (  # noqa: E402
    DECODERS, FA3, OWN, VOCABULARY, count_calls, each_route, model_of)

LENGTH = 21
tokens = functools.partial(client_models.tokens, batch=3, length=LENGTH)
# The middle sequence has no padding.
padding = functools.partial(client_models.padding, length=LENGTH, counts=(9, 0, 4))


@pytest.fixture(autouse=True, scope='module')
def gpu_claimed():
    with client_models.gpu_claimed():
        threads = torch.get_num_threads()
        torch.set_num_threads(1)    # others wait for each other longer than these models take
        yield
        torch.set_num_threads(threads)


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


def both(model, name, call):
    """What call(model) returns with eager attention, and with ours; checks that ours ran."""
    model.set_attn_implementation('eager')
    expected = call(model)
    model.set_attn_implementation(name)
    with CalledOps() as ops:
        got = call(model)
    forwards = [op for op in ops.names if 'fwd' in op or 'attend' in op]
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


@pytest.mark.parametrize('inference', [False, True])
def test_a_mask_that_is_written_in_place(inference):
    """The layout of its sequences is kept for the layers of a forward, not for the next one."""
    module = model_of('llama').model.layers[0].self_attn
    q, k, v = (torch.randn(1, heads, 8, 16) for heads in (4, 2, 2))
    with torch.inference_mode(inference):
        mask = torch.ones(1, 8, dtype=torch.bool)
        for padding in (2, 5):
            mask[:, :padding] = False
            for _ in range(2):
                out, _ = _hf_attention.attention(module, q, k, v, mask)
            expected = F.scaled_dot_product_attention(
                *(x[:, :, padding:] for x in (q, k, v)), is_causal=True, enable_gqa=True)
            close(out[:, padding:], expected.transpose(1, 2))
            assert not out[:, :padding].any()


@pytest.mark.parametrize('use_cache', [False, True])
@each_route
def test_packed_sequences(kind, name, use_cache):
    """position_ids that restart, against each sequence alone with eager attention."""
    model, ids, lengths = model_of(kind), tokens(batch=1), (9, 3, 9)
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
    model, ids, lengths = model_of('llama'), tokens(batch=1), (9, 3, 9)
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
    """All parameters have them, the sinks of gpt-oss too."""
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


@pytest.mark.parametrize('kind,name,fullgraph', [('mistral', FA3, True), ('gpt_oss', OWN, False)])
def test_compiled(kind, name, fullgraph):
    """The same bits; transformers' own route as one graph, ours with a break at the mask."""
    model, ids = model_of(kind).bfloat16(), tokens()
    model.set_attn_implementation(name)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(model, backend='aot_eager', fullgraph=fullgraph)
        assert torch.equal(compiled(ids, use_cache=False).logits, expected)


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


@pytest.fixture
def batching(monkeypatch):
    """generate_batch on the CPU: transformers asks psutil for the memory; the answer is here."""
    memory = torch.device('cpu'), 1 << 30, 0, 0
    monkeypatch.setattr(batching_cache, 'get_device_and_memory_breakdown', lambda: memory)
    options = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1)
    config = transformers.ContinuousBatchingConfig(
        block_size=4, num_blocks=64, max_batch_tokens=64, max_blocks_per_request=16,
        use_cuda_graph=False, use_async_batching=False)

    def check(model, name):
        """The tokens of generate_batch against those of generate with eager attention."""
        prompts = [x[:n].tolist() for x, n in zip(tokens(), (21, 5, 12))]
        expected = [model.generate(torch.tensor([x]), generation_config=options)[0, len(x):]
                    .tolist() for x in prompts]
        model.set_attn_implementation(name)
        results = model.generate_batch(prompts, options, config)
        got = {tuple(x.prompt_ids): x.generated_tokens for x in results.values()}
        assert [got[tuple(x)] for x in prompts] == expected
    return check


@pytest.mark.parametrize('kind', ['llama', 'qwen2'])
def test_continuous_batching(kind, batching, monkeypatch):
    """varlen in the prefill, flash_attn_with_kvcache after it, where no layer has a window.
    (transformers 5.17 loses the window of Mistral and the softcap of Gemma 2 there, whatever
    computes attention.) Without a GPU it would not take the second: the question is patched away.
    """
    monkeypatch.setattr(initialization, 'ensure_decode_fast_path_is_available', lambda *_: None)
    calls, model = [], model_of(kind)
    shim = importlib.import_module('flash_attn_interface')
    for name in ('flash_attn_varlen_func', 'flash_attn_with_kvcache'):
        count_calls(monkeypatch, shim, name, calls)
    monkeypatch.setattr(utilities, '_loaded_implementation', None)
    batching(model, FA3)
    monkeypatch.setattr(utilities, '_loaded_implementation', None)
    assert set(calls) == {'flash_attn_varlen_func'} | (
        {'flash_attn_with_kvcache'} if kind == 'llama' else set()), calls


@pytest.mark.parametrize('kind', DECODERS)
def test_continuous_batching_with_our_own_name(kind, batching, monkeypatch):
    """Every model, sinks, windows and softcap included."""
    if f'paged|{OWN}' not in AttentionInterface._global_mapping:
        pytest.skip('this transformers has no names of others in continuous batching')
    calls, model = [], model_of(kind)
    count_calls(monkeypatch, _hf_attention, 'flash_attn_varlen_func', calls)
    batching(model, f'paged|{OWN}')
    assert len(calls) > 2


# ----------------------------------------------------------------------------------------- refusals
def mask_of(mask_function, **changes):
    return _hf_masks.mask(**dict(batch_size=1, q_length=8, kv_length=8,
                                 mask_function=mask_function) | changes)


def test_masks_that_need_no_intervals():
    """Others: test_integrations_images.py."""
    chunks = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int))
    assert mask_of(chunks, q_length=4, kv_length=4) is None
    assert mask_of(masking_utils.sliding_window_bidirectional_mask_function(4)) is None


@pytest.mark.parametrize('changes,got', [
    (dict(dropout=0.1), 'no dropout, got 0.1'),
    (dict(attention_mask=torch.zeros(1, 1, 8, 8)), 'an attention_mask of 2 dimensions .* got 4'),
    (dict(position_bias=torch.zeros(1, 2, 8, 8)), 'no position_bias, got one')])
def test_arguments_that_the_kernels_do_not_have_are_refused(changes, got):
    module = model_of('llama').model.layers[0].self_attn
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(NotImplementedError, match=f'^flash_attn3.integrations.transformers: '
                                                  f'expected {got}.*; hint: '):
        _hf_attention.attention(module, q, q, q, **dict(attention_mask=None) | changes)


def test_a_window_that_attention_is_not_told_is_refused():
    module = model_of('gpt_oss').model.layers[0].self_attn
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(NotImplementedError, match='expected sliding_window for layer 0'):
        _hf_attention.attention(module, q, q, q, None)


# --------------------------------------------------------------------------------------- on and off
@pytest.fixture
def off(enabled):
    integration.disable()
    before = state()
    yield before
    integration.disable()
    assert state() == before
    integration.enable()    # as the other tests have it


def state() -> tuple:
    return (list(sys.path), dict(AttentionInterface._global_mapping), compat.is_installed(),
            dict(masking_utils.AttentionMaskInterface._global_mapping),
            'flash_attn_interface' in sys.modules, import_utils.is_flash_attn_3_available())


def test_disable_takes_everything_back(off):
    assert not off[-1]
    integration.enable()
    assert integration.is_enabled() and import_utils.is_flash_attn_3_available()
    integration.enable(name='another')
    assert OWN not in AttentionInterface._global_mapping
    integration.disable()
    assert state() == off and not integration.is_enabled()


def test_without_the_shim(off):
    """For a process that has upstream's package, and wants the name for sinks."""
    integration.enable(shim=False)
    assert not compat.is_installed() and OWN in AttentionInterface._global_mapping


@pytest.mark.parametrize('name,word', [('my_flash', 'flash'), ('a/b', '/'), ('sdpa_3', 'sdpa')])
def test_names_that_transformers_reads_are_refused(off, name, word):
    with pytest.raises(RuntimeError, match=f"expected a name without '{word}', got '{name}'"):
        integration.enable(name=name)


def test_a_name_that_is_taken_is_refused_and_nothing_stays(off):
    AttentionInterface.register('taken', print)
    with pytest.raises(RuntimeError, match="expected an unused name, got 'taken'"):
        integration.enable(name='taken')
    assert not compat.is_installed() and AttentionInterface._global_mapping.pop('taken') is print


def test_an_installed_upstream_wins_unless_forced(off, tmp_path, monkeypatch):
    (tmp_path / 'flash_attn_interface.py').write_text('')
    path = list(sys.path)
    sys.path.insert(0, str(tmp_path))
    try:
        assert 'expected no other flash_attn_interface' in integration.problem()
        with pytest.raises(RuntimeError, match='hint: uninstall flash-attn-3, or call '):
            integration.enable()
        integration.enable(force=True)
        assert compat.is_installed() and integration.problem() == ''
        integration.disable()
    finally:
        sys.path[:] = path


@pytest.mark.parametrize('version', ['5.2.0', '4.57.1'])
def test_old_clients_are_refused(off, monkeypatch, version):
    monkeypatch.setattr(_base, 'version_of', lambda _: version)
    assert integration.problem() == (
        f'flash_attn3.integrations.transformers: expected transformers 5.17 or later, got {version}'
        '; hint: pip install --upgrade transformers')
