"""Clients on the kernels that are not PyTorch's attention and not transformers alone: diffusers,
xFormers and Megatron in processes of their own; encoders in sentence-transformers; gpt-oss with
the package `kernels`. Tiny random models in bfloat16, by the numeric bar: errors of at most twice
those of the client's own attention in bfloat16. The profiler proves that our kernels ran.
"""
from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from flash_attn3.cpu import reference
from flash_attn3.integrations import transformers as integration

from tests.support import compare
from tests.support.checkout import ROOT
from tests.support.lists import lengths_of
from tests.support.ran import Ran

transformers = pytest.importorskip('transformers', reason='the contract is with transformers')
if integration._client_problem():
    pytest.skip(integration._client_problem(), allow_module_level=True)
from transformers import modeling_flash_attention_utils as utilities  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402
from transformers.utils import import_utils  # noqa: E402

from tests.support import client_models  # noqa: E402

LAYERS, LENGTH, PADS = 3, 90, (31, 0, 4)
FEW, ROUNDING = 64, 2 * 2 ** -8    # two units of bf16, of the largest of a gradient
SIZES = dict(vocab_size=client_models.VOCABULARY, hidden_size=128, intermediate_size=128,
             num_hidden_layers=LAYERS, num_attention_heads=2, max_position_embeddings=128)
ENCODERS = {    # its heads have 64 columns
    'bert': lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    'modernbert': lambda: transformers.ModernBertModel(transformers.ModernBertConfig(
        **SIZES, global_attn_every_n_layers=3, local_attention=16, pad_token_id=0, bos_token_id=2,
        eos_token_id=3, cls_token_id=2, sep_token_id=3)),
}
SHARPENED = ('query.weight', 'key.weight', 'value.weight', 'attention.output.dense.weight',
             'Wqkv.weight', 'attn.Wo.weight')
each_name = pytest.mark.parametrize('name', [client_models.OWN, client_models.FA3])


# ------------------------------------------------------------------------- processes of their own
@pytest.mark.slow
@pytest.mark.parametrize('name,package', [('diffusers', 'diffusers'), ('xformers', 'xformers'),
                                          ('megatron', 'megatron.core')])
def test_client(name, package, device):
    """tests.gpu.client_runs: the client's own code from its import on."""
    if not is_installed(package):
        pytest.skip(f'the contract is with {name}')
    done = subprocess.run([sys.executable, '-m', 'tests.gpu.client_runs', name,
                           '--device', device.type], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith('served\n'), done.stderr[-4000:]


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:    # not even its parent
        return False


# --------------------------------------------------------------------------- sentence-transformers
@pytest.fixture
def enabled(device):
    """transformers with our names; on the CPU its question for a GPU says yes."""
    with client_models.gpu_claimed() if device.type == 'cpu' else nullcontext():
        integration.enable()
        yield
        integration.disable()


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """Gives a folder with a random encoder, in weights that bfloat16 has, and a tokenizer of words
    of one letter.
    """
    def save(which: str) -> str:
        folder = tmp_path_factory.mktemp(which)
        words = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *'abcdefghijklmnopqrstuvwxyz']
        (folder / 'vocab.txt').write_text('\n'.join(words))
        transformers.BertTokenizer(
            vocab=str(folder / 'vocab.txt'), model_max_length=128,
            model_input_names=['input_ids', 'attention_mask']).save_pretrained(folder)
        torch.manual_seed(2)
        model = ENCODERS[which]()
        with torch.no_grad():    # attention of new models is almost uniform, and counts little
            for name, x in model.named_parameters():
                x.mul_(8 if name.endswith(SHARPENED) else 1)
        model.bfloat16().float().save_pretrained(folder)
        return str(folder)
    return save


@contextmanager
def plain_attention(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers packs sequences as for us, and gets the results of plain PyTorch."""
    shim = importlib.import_module('flash_attn_interface')

    @functools.wraps(shim.flash_attn_varlen_func)    # transformers reads the signature
    def plain(q, k, v, cu_seqlens_q, cu_seqlens_k, *_, softmax_scale=None, causal=False,
              window_size=(-1, -1), **_others):
        mask = reference.Mask(causal, tuple(window_size))
        score = reference.Score(softmax_scale or q.size(-1) ** -0.5, mask=mask)
        lengths = lengths_of(cu_seqlens_q, cu_seqlens_k)
        return reference.attend_packed(reference.Inputs(q, k, v), score, lengths).out

    with patch.context() as inner:
        inner.setattr(shim, 'flash_attn_varlen_func', plain)
        inner.setattr(utilities, '_loaded_implementation', None)
        yield
    utilities._loaded_implementation = None


@pytest.mark.parametrize('which', ENCODERS)
@each_name
def test_sentence_transformers(saved, enabled, name, which, device, monkeypatch):
    """Embeddings, the mean over the words of each sentence: of padded batches, and packed with
    flash_attention_3, which alone has three times the errors of padded ones in 16 bits: there the
    bar is plain attention, packed too. ModernBERT has windows both ways in two of three layers.
    """
    library = pytest.importorskip('sentence_transformers',
                                  reason='the contract is with sentence-transformers')
    letters, folder = 'abcdefghijklmnopqrstuvwxyz', saved(which)
    sentences = [' '.join(letters[(i * i + j * (i + 2)) % 26] for j in range(count))
                 for i, count in enumerate((40, 1, 7, 100, 66, 13))]

    def embeddings(attention: str, dtype: torch.dtype):
        model = library.SentenceTransformer(
            folder, device=str(device), local_files_only=True,
            model_kwargs=dict(attn_implementation=attention, dtype=dtype))
        with Ran(device) as ran:
            return model.encode(sentences, batch_size=3, convert_to_tensor=True), ran
    (ref, none), (pt, _) = (embeddings('eager', x) for x in (torch.float32, torch.bfloat16))
    if name == client_models.FA3:
        with plain_attention(monkeypatch):
            pt, _ = embeddings(name, torch.bfloat16)
    got, ran = embeddings(name, torch.bfloat16)
    assert ran.forwards >= 2 * LAYERS and not none.names, ran.names
    assert ref.shape == (6, 128) and torch.pdist(ref).min() > 0.1
    compare.check_close(got, ref, pt, 'embeddings')


# ------------------------------------------------------------------------------------------ kernels
@pytest.fixture
def gpt_oss(device, monkeypatch):
    """In bfloat16, and the same weights in float32; what transformers registers for the kernel is
    gone after the test.
    """
    pytest.importorskip('kernels', reason='the contract is with kernels')
    if not import_utils.is_kernels_available():
        pytest.skip('transformers wants another version of kernels')
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setattr(interface, '_global_mapping', dict(interface._global_mapping))
    monkeypatch.setattr(client_models.utilities, '_loaded_implementation', None)
    monkeypatch.setenv('LOCAL_KERNELS', f'{integration.KERNEL}={integration.local_kernel_dir()}')
    with client_models.gpu_claimed() if device.type == 'cpu' else nullcontext():
        narrow = client_models.model_of(
            'gpt_oss', 8, hidden_size=128, intermediate_size=128, head_dim=64, sliding_window=40,
            max_position_embeddings=512, num_experts_per_tok=2,
            experts_implementation='batched_mm').bfloat16().to(device)
        yield narrow, copy.deepcopy(narrow).float()


@pytest.mark.parametrize('side', ['none', 'left', 'right'])
@pytest.mark.parametrize('name', [integration.KERNEL, client_models.FA3])
def test_local_kernels(gpt_oss, name, side, device):
    """Logits and gradients, sinks and windows included; no enable()."""
    narrow, wide = gpt_oss
    ids = client_models.tokens(3, LENGTH).to(device)
    mask = client_models.padding(side, LENGTH, PADS).to(device)

    def results(model):
        model.zero_grad()
        logits = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()].float()
        logits.log_softmax(-1)[:, 3].sum().neg().backward()
        return dict(logits=logits.detach()) | {
            key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None}
    ref, pt = results(wide), results(narrow)
    narrow.set_attn_implementation(name)
    assert narrow.config._attn_implementation == integration.KERNEL
    with Ran(device) as ran:
        got = results(narrow)
    layers = narrow.config.num_hidden_layers
    assert ran.forwards >= layers and ran.backwards >= layers, ran.names
    assert got.keys() == ref.keys()
    assert sum(key.endswith('sinks') and bool((x != 0).all()) for key, x in got.items()) == layers
    for key, x in got.items():
        floor = 0.0 if key == 'logits' else ROUNDING * ref[key].abs().max().item()
        if x.numel() >= FEW:
            compare.check_close(x, ref[key], pt[key], key, floor)
