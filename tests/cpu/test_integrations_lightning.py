"""A GPT trained by Lightning, whose attention is scaled_dot_product_attention with
`integrations.sdpa`: the losses, and that our ops computed them. `make test-clients` has Lightning.
"""
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import sdpa_hook
from tests.support.sdpa_block import SdpaBlock

pytest.importorskip('torch.nn.attention._fa3', reason='PyTorch has the hook from 2.11 on')
lightning = pytest.importorskip('lightning', reason='the contract is with Lightning')

VOCABULARY, LENGTH, ROWS, WIDTH, HEADS, LAYERS, STEPS = 16, 24, 8, 64, 2, 2, 20


@pytest.fixture(autouse=True)
def _one_thread():
    """Others wait for each other longer than this model takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Gpt(lightning.LightningModule):
    def __init__(self, is_causal):
        super().__init__()
        self.is_causal, self.losses = is_causal, []
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(SdpaBlock(WIDTH, HEADS, 4) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, ids):
        x = self.tokens(ids) + self.places.weight
        for block in self.blocks:
            x = block(x, self.is_causal)
        logits = self.head(x)[:, :-1].float()
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def losses(folder, precision: str, is_causal: bool = True) -> torch.Tensor:
    """(STEPS,) of training on the same random sequences, each of which repeats its first half."""
    torch.manual_seed(1)
    model = Gpt(is_causal)
    half = torch.randint(VOCABULARY, (STEPS * ROWS, LENGTH // 2))
    batches = torch.utils.data.DataLoader(torch.cat([half, half], 1), batch_size=ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')    # workers, loggers
        trainer = lightning.Trainer(
            accelerator='cpu', devices=1, precision=precision, max_steps=STEPS, logger=False,
            default_root_dir=folder, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False)
        trainer.fit(model, batches)
    assert len(model.losses) == STEPS
    return torch.tensor(model.losses)


def test_gpt(tmp_path, monkeypatch):
    """Autocast to bfloat16: as far from float32 as PyTorch's attention is in bfloat16. F.sdpa takes
    the aten op of the hook for CUDA tensors; here it is called for what the model passes to F.sdpa.
    """
    wide, plain = losses(tmp_path, '32-true'), losses(tmp_path, 'bf16-mixed')
    other = losses(tmp_path, 'bf16-mixed', is_causal=False)
    sdpa_hook.serve_cpu(monkeypatch)
    calls = sdpa_hook.count_calls(monkeypatch)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', sdpa_hook.flash_sdpa)
    with sdpa_hook.enabled():
        got = losses(tmp_path, 'bf16-mixed')
    assert calls.count('fwd') == calls.count('bwd') == LAYERS * STEPS
    allowed = 2 * (plain - wide).abs().max()
    assert 0 < (got - wide).abs().max() <= allowed
    assert (other - wide).abs().max() > 10 * allowed    # another mask is told apart
