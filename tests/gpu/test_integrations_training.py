"""Training by others on the kernels: transformers' Trainer through accelerate, LoRA of peft, a ViT
of timm, a GPT of Lightning. Tiny random models in bfloat16 or its autocast, against the same in
float32: errors of at most twice those of the client's own attention. Each test also proves that
our kernels ran.
"""
from __future__ import annotations

import copy
import importlib.util
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn3.integrations import transformers as integration

from tests.support import compare, sdpa_hook
from tests.support.ran import Ran
from tests.support.sdpa_block import SdpaBlock

NAMES = integration.NAME, 'flash_attention_3'
VOCABULARY, WIDTH, LAYERS, STEPS, ROWS = 48, 128, 2, 20, 4
FEW, ROUNDING = 64, 2 * 2 ** -8    # two units of bf16, of the largest of a gradient
each_name = pytest.mark.parametrize('name', NAMES)


def check_losses(got: torch.Tensor, wide: torch.Tensor, natives: list[torch.Tensor],
                 other: torch.Tensor) -> None:
    """(STEPS,) each: as far from float32 as the client's own attention is in bfloat16.

    other: of a training that is wrong, which differs by more than 4 times what is allowed.
    """
    assert got.shape == wide.shape == (STEPS,) and got.isfinite().all()
    error, apart = ((x - wide).abs().max() for x in (got, other))
    allowed = 2 * max((x - wide).abs().max() for x in natives)
    assert 0 < error <= allowed, f'{error:.3e} > {allowed:.3e}'
    assert apart > 4 * allowed, f'{apart:.3e} <= 4 x {allowed:.3e}'


def check_gradients(got: dict, ref: dict, pt: dict) -> None:
    """Also of what is no gradient: 'out'."""
    assert got.keys() == ref.keys()
    for key, x in got.items():
        floor = 0.0 if key == 'out' else ROUNDING * ref[key].abs().max().item()
        if x.numel() >= FEW:
            compare.check_close(x, ref[key], pt[key], key, floor)


# ------------------------------------------------------------------------------ Trainer, accelerate
@pytest.fixture(scope='module')
def hugging_face(request):
    """transformers with our names; on the CPU its question for a GPU says yes."""
    library = pytest.importorskip('transformers', reason='the contract is with transformers')
    if integration._client_problem():
        pytest.skip(integration._client_problem())
    from tests.support import client_models    # it imports transformers
    on_cpu = request.config.getoption('--device') != 'cuda'
    with client_models.gpu_claimed() if on_cpu else nullcontext():
        integration.enable()
        yield library
        integration.disable()


def llama(library, attention: str, head_dim: int = 64):
    """The same random parameters for each attention, large enough that attention counts."""
    torch.manual_seed(1)
    config = library.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=WIDTH,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, head_dim=head_dim, pad_token_id=0, initializer_range=0.1,
        attn_implementation=attention)
    return library.LlamaForCausalLM(config)


def rows_of_tokens() -> list[torch.Tensor]:
    """Each repeats its first half."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 50, (STEPS * ROWS,), generator=generator).tolist()
    halves = [torch.randint(1, VOCABULARY, (n,), generator=generator) for n in lengths]
    return [torch.cat([x, x]) for x in halves]


def padded(rows: list) -> dict:
    """A batch padded on the right; labels count where there are tokens."""
    rows = [torch.as_tensor(x['input_ids']) for x in rows]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in rows], batch_first=True)
    return dict(input_ids=ids, attention_mask=mask, labels=ids.where(mask.bool(), -100))


@pytest.fixture(scope='module')
def train(request, hugging_face, tmp_path_factory):
    """Gives train(attention, device, ...), which trains llama() and returns its losses, parameters
    and what ran. Trainings are remembered.
    """
    pytest.importorskip('accelerate', reason='transformers.Trainer needs accelerate')
    data = [dict(input_ids=x.tolist()) for x in rows_of_tokens()]
    results = {}

    def train(attention, device, collator=padded, frozen=(), **options):
        model = llama(hugging_face, attention)
        for name, x in model.named_parameters():
            x.requires_grad_(not any(word in name for word in frozen))
        arguments = hugging_face.TrainingArguments(
            output_dir=str(tmp_path_factory.getbasetemp()), use_cpu=device.type == 'cpu',
            max_steps=STEPS, logging_steps=1, seed=7, per_device_train_batch_size=ROWS,
            optim='sgd', learning_rate=0.2, lr_scheduler_type='constant', report_to=[],
            save_strategy='no', disable_tqdm=True, remove_unused_columns=False,
            dataloader_pin_memory=False, **options)
        arguments._n_gpu = min(arguments.n_gpu, 1)    # no DataParallel on other GPUs
        trainer = hugging_face.Trainer(model, arguments, collator, train_dataset=data)
        with Ran(device) as ran:
            trainer.train()
        losses = torch.tensor([x['loss'] for x in trainer.state.log_history if 'loss' in x])
        return SimpleNamespace(losses=losses, parameters=dict(model.named_parameters()), ran=ran)

    def remembered(attention, device, **options):
        key = attention, *sorted(options)
        if key not in results:
            results[key] = train(attention, device, **options)
        return results[key]
    train.remembered = remembered
    return train


def check_training(train, got: SimpleNamespace, device: torch.device) -> None:
    wide = train.remembered('eager', device)
    other = train.remembered('eager', device, frozen=('q_proj', 'k_proj'))
    natives = [train.remembered(x, device, bf16=True) for x in ('eager', 'sdpa')]
    assert not wide.ran.names and not natives[1].ran.names
    assert got.ran.forwards >= LAYERS * STEPS and got.ran.backwards >= LAYERS * STEPS
    check_losses(got.losses, wide.losses, [x.losses for x in natives], other.losses)


@each_name
def test_trainer(train, name, device):
    """Padded batches, autocast to bfloat16."""
    check_training(train, train(name, device, bf16=True), device)


@pytest.mark.parametrize('lengths', [False, True], ids=['positions', 'cu_seqlens'])
@each_name
def test_trainer_with_packed_batches(hugging_face, train, name, lengths, device):
    """DataCollatorWithFlattening, with positions that restart and with cu_seqlens: the losses of
    padded batches.
    """
    collator = hugging_face.DataCollatorWithFlattening(return_flash_attn_kwargs=lengths)
    check_training(train, train(name, device, collator, bf16=True), device)


@each_name
def test_deterministic_training_repeats(hugging_face, train, name, device, monkeypatch):
    """The same bits of losses and parameters. The embeddings, whose gradient is PyTorch's, rest."""
    monkeypatch.setenv('FLASH_ATTENTION_DETERMINISTIC', '1')
    collator = hugging_face.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    first, second = (train(name, device, collator, ('embed_tokens',), bf16=True)
                     for _ in range(2))
    assert first.ran.backwards >= LAYERS * STEPS
    compare.check_equal(first.losses, second.losses, 'losses')
    for key, x in first.parameters.items():
        compare.check_equal(x.detach(), second.parameters[key].detach(), key)


# --------------------------------------------------------------------------------------------- peft
@pytest.mark.parametrize('checkpointing', [False, True], ids=['', 'checkpointing'])
@pytest.mark.parametrize('head_dim', [64, 128])
@each_name
def test_lora(hugging_face, name, head_dim, checkpointing, device):
    """Logits, and the gradients of the adapters, which alone have them. The model is in bfloat16,
    peft keeps adapters in float32.
    """
    peft = pytest.importorskip('peft', reason='the contract is with peft')
    config = peft.LoraConfig(
        r=4, target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj'], lora_dropout=0.0,
        init_lora_weights=False, task_type='CAUSAL_LM')
    batch = {key: x.to(device) for key, x in padded(
        [dict(input_ids=x) for x in rows_of_tokens()[:ROWS]]).items()}
    mask = batch['attention_mask'].bool()

    def results(attention, dtype):
        torch.manual_seed(5)
        model = peft.get_peft_model(llama(hugging_face, attention, head_dim).bfloat16(), config)
        model = (model.float() if dtype == torch.float32 else model).to(device).train()
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable()
        with Ran(device) as ran:
            out = model(**batch)
            out.loss.backward()
        gradients = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
        return dict(out=out.logits[mask].detach()) | gradients, ran
    (got, ran), (pt, _) = (results(x, torch.bfloat16) for x in (name, 'eager'))
    ref, none = results('eager', torch.float32)
    assert ran.forwards >= LAYERS * (1 + checkpointing) and ran.backwards >= LAYERS
    assert not none.names and len(got) == 1 + 2 * 4 * LAYERS
    assert all('lora_' in key and bool(x.any()) for key, x in ref.items() if key != 'out')
    check_gradients(got, ref, pt)


# --------------------------------------------------------------------------------- timm, Lightning
@pytest.fixture
def sdpa_served(device, monkeypatch):
    """Gives a context with integrations.sdpa on, in which 'fwd' and 'bwd' are appended to the list
    that it returns; F.sdpa is the op that it calls for CUDA tensors.
    """
    pytest.importorskip('torch.nn.attention._fa3', reason='PyTorch has the hook from 2.11 on')
    calls = sdpa_hook.count_calls(monkeypatch)
    undo = ExitStack()

    def serve() -> list[str]:
        if device.type == 'cpu':
            sdpa_hook.serve_cpu(monkeypatch)
            monkeypatch.setattr(F, 'scaled_dot_product_attention', sdpa_hook.flash_sdpa)
        undo.enter_context(sdpa_hook.enabled())
        return calls
    with undo:
        yield serve


@pytest.mark.parametrize('options', [dict(), dict(qk_norm=True, global_pool='map')],
                         ids=['class-token', 'attention-pool'])
@pytest.mark.parametrize('head_dim', [64, 128])
def test_vit(options, head_dim, device, sdpa_served):
    """A training step: logits and gradients, all of it in bfloat16."""
    pytest.importorskip('timm', reason='the contract is with timm', exc_type=ImportError)
    module = importlib.import_module('timm.models.vision_transformer')
    torch.manual_seed(2)
    model = module.VisionTransformer(
        img_size=80, patch_size=8, embed_dim=2 * head_dim, depth=LAYERS, num_heads=2,
        num_classes=32, **options).bfloat16().to(device)
    assert all(block.attn.fused_attn for block in model.blocks)
    with torch.no_grad():
        for block in model.blocks:    # attention of new models is almost uniform
            block.attn.qkv.weight[:4 * head_dim].mul_(8)
    images, weights = torch.randn(3, 3, 80, 80).bfloat16(), torch.randn(3, 32)
    images, weights = images.to(device), weights.to(device)

    def results(model):
        model.zero_grad()
        out = model(images.to(next(model.parameters()).dtype))
        (out * weights).sum().backward()
        return dict(out=out.detach()) | {key: x.grad.clone()
                                         for key, x in model.named_parameters()}
    with sdpa_kernel(SDPBackend.MATH):
        plain, wide = results(model), results(copy.deepcopy(model).double())
    calls = sdpa_served()
    with Ran(device) as ran:
        got = results(model)
    attentions = LAYERS + ('global_pool' in options)
    assert calls.count('fwd') == calls.count('bwd') == attentions
    assert ran.forwards >= attentions and ran.backwards >= attentions, ran.names
    for key in [key for key in got if key.endswith('k_norm.bias')]:
        for gradients in (got, wide, plain):    # all keys have it: zero but for rounding
            gradients.pop(key)
    check_gradients(got, wide, plain)


def gpt_class(lightning):
    """A GPT whose attention is scaled_dot_product_attention; `losses` has those of its steps."""
    heads, length = 2, 96

    class Gpt(lightning.LightningModule):
        def __init__(self, is_causal):
            super().__init__()
            self.losses, self.is_causal = [], is_causal
            self.tokens, self.places = nn.Embedding(16, WIDTH), nn.Embedding(length, WIDTH)
            self.blocks = nn.ModuleList(SdpaBlock(WIDTH, heads, 3) for _ in range(LAYERS))
            self.head = nn.Linear(WIDTH, 16)
            self.data = torch.randint(16, (STEPS * ROWS, length // 2)).repeat(1, 2)

        def training_step(self, ids):
            x = self.tokens(ids) + self.places.weight
            for block in self.blocks:
                x = block(x, self.is_causal)
            logits = self.head(x)[:, :-1].float()
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.2)
    return Gpt


@pytest.mark.filterwarnings('ignore')    # its own: workers, loggers
def test_gpt(tmp_path, device, sdpa_served):
    """20 steps of Lightning's trainer, autocast to bfloat16."""
    found = [name for name in ('lightning', 'pytorch_lightning') if importlib.util.find_spec(name)]
    if not found:
        pytest.skip('the contract is with Lightning')
    lightning = importlib.import_module(found[0])

    def losses(precision: str, is_causal: bool = True) -> torch.Tensor:
        torch.manual_seed(1)
        model = gpt_class(lightning)(is_causal)
        trainer = lightning.Trainer(
            accelerator='gpu' if device.type == 'cuda' else 'cpu', devices=1, precision=precision,
            max_steps=STEPS, logger=False, default_root_dir=tmp_path, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(model, torch.utils.data.DataLoader(model.data, batch_size=ROWS))
        return torch.tensor(model.losses)
    with sdpa_kernel(SDPBackend.MATH):
        wide, other, math = losses('32-true'), losses('32-true', False), losses('bf16-mixed')
    natives = [math, losses('bf16-mixed')]
    calls = sdpa_served()
    with Ran(device) as ran:
        got = losses('bf16-mixed')
    assert calls.count('fwd') == calls.count('bwd') == LAYERS * STEPS
    assert ran.forwards >= LAYERS * STEPS and ran.backwards >= LAYERS * STEPS
    check_losses(got, wide, natives, other)
