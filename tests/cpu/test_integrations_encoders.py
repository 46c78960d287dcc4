"""Encoders of transformers, alone and in sentence-transformers, with our attention: tiny random
models in float32 on the CPU against eager attention. Each test also counts our ops. `make
test-clients` has sentence-transformers.
"""
import pytest
import torch

from flash_attn3.integrations import transformers as integration

from tests.support.called_ops import CalledOps

transformers = pytest.importorskip('transformers', reason='the contract is with transformers')
if integration._client_problem():
    pytest.skip(integration._client_problem(), allow_module_level=True)

from tests.support import client_models  # noqa: E402

LENGTH, LAYERS = 21, 3
SIZES = dict(vocab_size=client_models.VOCABULARY, hidden_size=32, intermediate_size=32,
             num_hidden_layers=LAYERS, num_attention_heads=2, max_position_embeddings=64)
each_name = pytest.mark.parametrize('name', [client_models.OWN, client_models.FA3])


@pytest.fixture(autouse=True, scope='module')
def enabled():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)    # others wait for each other longer than these models take
    with client_models.gpu_claimed():
        integration.enable()
        yield
        integration.disable()
    torch.set_num_threads(threads)


def sharp(model):
    """Attention of new models is almost uniform."""
    with torch.no_grad():
        for name, x in model.named_parameters():
            if any(word in name for word in ('query.weight', 'key.weight', 'Wqkv.weight')):
                x.mul_(20)
    return model.eval()


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize('side', ['none', 'left', 'right'])
@each_name
def test_modern_bert(name, side):
    """Windows both ways in two of three layers; hidden states and gradients of all parameters."""
    config = transformers.ModernBertConfig(
        **SIZES, global_attn_every_n_layers=3, local_attention=8, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, cls_token_id=1, sep_token_id=2)
    torch.manual_seed(1)
    model = sharp(transformers.ModernBertModel(config))
    ids = client_models.tokens(3, LENGTH)
    mask = client_models.padding(side, LENGTH, (9, 0, 4))
    counts, weights = mask.bool(), torch.randn(3, LENGTH, 32)

    def results():
        model.zero_grad()
        out = model(ids, attention_mask=mask).last_hidden_state[counts]
        (out * weights[counts]).sum().backward()
        return dict(out=out.detach()) | {key: x.grad.clone()
                                         for key, x in model.named_parameters()}
    model.set_attn_implementation('eager')
    expected = results()
    model.set_attn_implementation(name)
    with CalledOps() as ops:
        got = results()
    is_forward = [name.startswith(('fwd', '_fwd', 'attend')) for name in ops.names]
    assert (sum(is_forward), sum('bwd' in name for name in ops.names)) == (LAYERS, LAYERS)
    for key, x in got.items():
        scale = max(1.0, expected[key].abs().max().item())
        close(x / scale, expected[key] / scale)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """A folder with a random BERT and a tokenizer of words of one letter."""
    folder = tmp_path_factory.mktemp('bert')
    words = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *'abcdefghijklmnopqrstuvwxyz']
    (folder / 'vocab.txt').write_text('\n'.join(words))
    transformers.BertTokenizer(vocab=str(folder / 'vocab.txt')).save_pretrained(folder)
    torch.manual_seed(2)
    sharp(transformers.BertModel(transformers.BertConfig(**SIZES))).save_pretrained(folder)
    return str(folder)


@each_name
def test_sentence_transformers(saved, name):
    """Embeddings, the mean over the words of each sentence, of batches that are padded; sorted by
    length they are padded otherwise.
    """
    library = pytest.importorskip('sentence_transformers',
                                  reason='the contract is with sentence-transformers')
    sentences = ['a b c d e f g', 'h', 'i j k', 'l m n o p q r s t u v w x y z', 'a c e g', 'b d']

    def embeddings(attention):
        model = library.SentenceTransformer(
            saved, device='cpu', local_files_only=True,
            model_kwargs=dict(attn_implementation=attention, dtype=torch.float32))
        with CalledOps() as ops:
            return model.encode(sentences, batch_size=2, convert_to_tensor=True), ops.names
    (got, ops), (expected, none) = embeddings(name), embeddings('eager')
    assert len(ops) == 3 * LAYERS and all('fwd' in op for op in ops) and not none
    assert expected.shape == (6, 32) and torch.pdist(expected).min() > 0.1
    close(got, expected)
