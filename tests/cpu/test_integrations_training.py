"""Trainers and models of others on this package, where they are installed: transformers' Trainer
through accelerate, LoRA of peft, a ViT of timm. Tiny random models on the CPU; each test also
proves that our ops computed the result. `make test-clients` has all three.
"""
import copy
import importlib

import pytest
import torch
import torch.nn.functional as F

from flash_attn3.integrations import transformers as integration

from tests.support import compare, sdpa_hook
from tests.support.called_ops import CalledOps

NAMES = integration.NAME, 'flash_attention_3'
VOCABULARY, LAYERS, STEPS, ROWS = 48, 2, 12, 4
LOSSES = 1e-6    # the tolerance of losses near 4, absolute and relative
each_name = pytest.mark.parametrize('name', NAMES)


@pytest.fixture(scope='module')
def transformers():
    """transformers with our names, on the CPU."""
    transformers = pytest.importorskip('transformers', reason='the contract is with transformers')
    if integration._client_problem():
        pytest.skip(integration._client_problem())
    from tests.support import client_models    # it imports transformers
    threads = torch.get_num_threads()
    torch.set_num_threads(1)    # others wait for each other longer than these models take
    with client_models.gpu_claimed():
        integration.enable()
        yield transformers
        integration.disable()
    torch.set_num_threads(threads)


def llama(transformers, attention: str):
    """The same random parameters for each attention. Weights of q and k are 8 times those of new
    models, whose attention is almost uniform. With 20 times, training is chaotic: SDPA on
    parameters that differ by 1e-7 gives other losses.
    """
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, head_dim=16,
        pad_token_id=0, attn_implementation=attention)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(8)
            layer.self_attn.k_proj.weight.mul_(8)
    return model


def rows_of_tokens() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 24, (STEPS * ROWS,), generator=generator).tolist()
    return [torch.randint(1, VOCABULARY, (n,), generator=generator) for n in lengths]


def padded(rows: list) -> dict:
    """A batch padded on the right; labels count where there are tokens."""
    rows = [torch.as_tensor(x['input_ids']) for x in rows]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in rows], batch_first=True)
    return dict(input_ids=ids, attention_mask=mask, labels=ids.where(mask.bool(), -100))


def count(ops: list, word: str) -> int:
    return sum(word in name for name in ops)


# ------------------------------------------------------------------------------ Trainer, accelerate
class Trained:
    """What training came to: the losses, the parameters, and which of our ops it called."""

    def __init__(self, trainer):
        with CalledOps() as ops:
            trainer.train()
        self.losses = torch.tensor([x['loss'] for x in trainer.state.log_history if 'loss' in x])
        assert self.losses.shape == (STEPS,) and self.losses.isfinite().all()
        self.parameters = dict(trainer.model.named_parameters())
        self.forwards, self.backwards = count(ops.names, 'fwd'), count(ops.names, 'bwd')

    def check(self, expected: 'Trained') -> None:
        """The same training but for rounding, and by our ops in every layer of every step."""
        close(self.losses, expected.losses, LOSSES)
        for name, x in expected.parameters.items():
            close(self.parameters[name], x, 2e-5)
        assert self.forwards >= LAYERS * STEPS and self.backwards == LAYERS * STEPS
        assert not expected.forwards and not expected.backwards


def close(got, expected, tolerance=2e-5):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope='module')
def train(transformers, tmp_path_factory):
    """Gives train(attention, collator, frozen, ...), which trains llama() for 12 steps."""
    pytest.importorskip('accelerate', reason='transformers.Trainer needs accelerate')
    data = [dict(input_ids=x.tolist()) for x in rows_of_tokens()]

    def train(attention, collator=padded, frozen=(), **options) -> Trained:
        model = llama(transformers, attention)
        for name, x in model.named_parameters():
            x.requires_grad_(not any(word in name for word in frozen))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path_factory.getbasetemp()), use_cpu=True, max_steps=STEPS,
            logging_steps=1, seed=7, per_device_train_batch_size=ROWS, optim='sgd',
            learning_rate=0.5, lr_scheduler_type='constant', report_to=[], save_strategy='no',
            disable_tqdm=True, remove_unused_columns=False, dataloader_pin_memory=False, **options)
        return Trained(transformers.Trainer(model, arguments, collator, train_dataset=data))
    return train


@pytest.fixture(scope='module')
def sdpa(train) -> Trained:
    """Padded batches with PyTorch's attention."""
    return train('sdpa')


@each_name
def test_trainer(train, sdpa, name):
    """Losses and parameters after padded batches are those of SDPA."""
    train(name).check(sdpa)


def test_losses_tell_trainings_apart(train, sdpa):
    """Without the gradients of q and k they differ by 50 times what the other tests allow."""
    other = train('sdpa', frozen=('q_proj', 'k_proj')).losses
    assert (other - sdpa.losses).abs().max() > 50 * LOSSES * (1 + sdpa.losses.max())


@pytest.mark.parametrize('lengths', [False, True], ids=['positions', 'cu_seqlens'])
@each_name
def test_trainer_with_packed_batches(transformers, train, sdpa, name, lengths):
    """DataCollatorWithFlattening, with positions that restart and with cu_seqlens: the losses of
    padded batches.
    """
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=lengths)
    train(name, collator).check(sdpa)


@pytest.mark.parametrize('reentrant', [False, True], ids=['', 'reentrant'])
@each_name
def test_trainer_with_gradient_checkpointing(train, name, reentrant):
    """The same bits as without, from twice the forwards."""
    plain = train(name)
    saved = train(name, gradient_checkpointing=True,
                  gradient_checkpointing_kwargs=dict(use_reentrant=reentrant))
    assert torch.equal(saved.losses, plain.losses)
    assert all(torch.equal(x, plain.parameters[key]) for key, x in saved.parameters.items())
    assert (saved.forwards, saved.backwards) == (2 * plain.forwards, plain.backwards)


@each_name
def test_trainer_in_bfloat16(train, sdpa, name):
    """Autocast of accelerate: as far from float32 as SDPA is in bfloat16."""
    plain, got = train('sdpa', bf16=True), train(name, bf16=True)
    assert got.backwards == LAYERS * STEPS and not plain.backwards
    allowed = 2 * (plain.losses - sdpa.losses).abs().max()
    assert 0 < (got.losses - sdpa.losses).abs().max() <= allowed < 0.05


# --------------------------------------------------------------------------------------------- peft
@pytest.mark.parametrize('checkpointing', [False, True], ids=['', 'checkpointing'])
@pytest.mark.parametrize('targets', [('q_proj', 'k_proj', 'v_proj', 'o_proj'), ('q_proj',),
                                     ('v_proj',)], ids='-'.join)
@each_name
def test_lora(transformers, name, targets, checkpointing):
    """Logits, and the gradients of the adapters, which alone have them: with some targets q, k or v
    of the first layer have none.
    """
    peft = pytest.importorskip('peft', reason='the contract is with peft')
    config = peft.LoraConfig(r=4, target_modules=list(targets), lora_dropout=0.0,
                             init_lora_weights=False, task_type='CAUSAL_LM')
    batch = padded([dict(input_ids=x) for x in rows_of_tokens()[:ROWS]])
    mask = batch['attention_mask'].bool()

    def results(attention):
        torch.manual_seed(5)
        model = peft.get_peft_model(llama(transformers, attention), config).train()
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable()
        with CalledOps() as ops:
            out = model(**batch)
            out.loss.backward()
        gradients = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
        return out.logits[mask], gradients, [count(ops.names, word) for word in ('fwd', 'bwd')]
    (got, gradients, calls), (expected, wanted, none) = results(name), results('eager')
    assert calls == [LAYERS * (1 + checkpointing), LAYERS] and none == [0, 0]
    close(got, expected)
    assert gradients.keys() == wanted.keys() and len(wanted) == 2 * LAYERS * len(targets)
    for key, x in wanted.items():
        assert 'lora_' in key and x.abs().max() > 1e-5, key
        close(gradients[key], x, 1e-5 * x.abs().max().item())


# --------------------------------------------------------------------------------------------- timm
@pytest.mark.parametrize('options', [dict(), dict(qk_norm=True, global_pool='map')],
                         ids=['class-token', 'attention-pool'])
def test_vit(options, monkeypatch):
    """Logits and gradients of a ViT in bfloat16, by the project's bar. F.sdpa takes the aten op of
    the hook for CUDA tensors; here it is called for what timm passes to F.sdpa.
    """
    pytest.importorskip('torch.nn.attention._fa3', reason='PyTorch has the hook from 2.11 on')
    pytest.importorskip('timm', reason='the contract is with timm', exc_type=ImportError)
    module = importlib.import_module('timm.models.vision_transformer')
    torch.manual_seed(2)
    model = module.VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=LAYERS,
                                     num_heads=2, num_classes=10, **options).bfloat16()
    assert all(block.attn.fused_attn for block in model.blocks)
    with torch.no_grad():
        for block in model.blocks:    # attention of new models is almost uniform
            block.attn.qkv.weight[:128].mul_(8)
    images = torch.randn(3, 3, 32, 32).bfloat16()
    weights = torch.randn(3, 10).bfloat16()

    def results(model):
        model.zero_grad()
        out = model(images.to(next(model.parameters()).dtype))
        (out * weights).sum().backward()
        return dict(out=out.detach()) | {key: x.grad.clone()
                                         for key, x in model.named_parameters()}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain, wide = results(model), results(copy.deepcopy(model).double())
    sdpa_hook.serve_cpu(monkeypatch)
    calls = sdpa_hook.count_calls(monkeypatch)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', sdpa_hook.flash_sdpa)
    with sdpa_hook.enabled():
        got = results(model)
    attentions = LAYERS + ('global_pool' in options)
    assert calls.count('fwd') == calls.count('bwd') == attentions
    for key, x in got.items():
        floor = 0.0
        if key.endswith('k_norm.bias'):    # all keys have it: its gradient is zero but for rounding
            floor = 2 ** -8 * wide[key.replace('bias', 'weight')].abs().max().item()
        compare.check_close(x, wide[key], plain[key], key, floor)
