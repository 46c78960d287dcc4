"""mask= under torch.compile and under activation checkpointing on the GPU, beside eager calls. On
the CPU: tests/cpu/test_compiled_masks.py.
"""
import pytest
import torch

from flash_attn3 import AttentionMask, flash_attn_func

from tests.gpu.common import check_same
from tests.support.compiled_masks import MASKS, check_checkpointed, check_compiled, check_inductor
from tests.support.lists import ints


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.parametrize('name', MASKS)
def test_compiled(name, device):
    check_compiled(name, device, torch.bfloat16, 64, backend='aot_eager')


@pytest.mark.parametrize('name', MASKS)
def test_inductor(name, device):
    check_inductor(name, device, torch.bfloat16, 64)


def test_wide_heads(device):
    check_compiled('both', device, torch.bfloat16, 192, backend='aot_eager')


@pytest.mark.parametrize('use_reentrant', [False, True])
@pytest.mark.parametrize('name', MASKS)
def test_checkpointed(name, use_reentrant, device):
    check_checkpointed(use_reentrant, name, device, torch.bfloat16, 64)


def test_cuda_graphs_of_the_compiler(cuda):
    """A replay after other work, with lists of the graph and with kept ones, and another mask."""
    def two_layers(q, mask):
        return flash_attn_func(flash_attn_func(q, q, q, mask=mask), q, q, mask=mask)

    compiled = torch.compile(two_layers, mode='reduce-overhead', fullgraph=True)
    with torch.no_grad():
        for prefix in (30, 200):
            mask = AttentionMask.prefix_lm(ints([prefix], cuda), 300)
            for step in range(6):
                q = torch.randn(1, 300, 2, 64, device=cuda, dtype=torch.bfloat16)
                out = compiled(q, mask).clone()
                fresh = AttentionMask.prefix_lm(ints([prefix], cuda), 300)
                wanted = two_layers(q, mask if step == 3 else fresh)
                check_same((out, out), (wanted, wanted))
