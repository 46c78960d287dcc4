"""integrations.flex on the GPU: the bits of a call with the same AttentionMask, and no waiting
after the first call. Against PyTorch's own function: tests/cpu/test_integrations_flex.py.
"""
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from flash_attn3 import AttentionMask, flash_attn_func
from flash_attn3.integrations.flex import flex_attention

LENGTH = 1000


def causal(b, h, q, k):
    return k <= q


def whole_blocks(b, h, q, k):
    return (q // 128 + k // 128 + h) % 3 > 0


def mask_of(function, device):
    if function is causal:
        return AttentionMask.prefix_lm(torch.zeros(1, dtype=torch.int32, device=device), LENGTH)
    head, row, column = (torch.arange(n, device=device) for n in (4, 8, 8))
    return AttentionMask.from_blocks((row[:, None] + column + head[:, None, None]) % 3 > 0)


@pytest.mark.smoke
@pytest.mark.parametrize('function', [causal, whole_blocks])
def test_bits_and_no_waiting(function, device):
    shapes = (2, 4, LENGTH, 128), (2, 2, LENGTH, 128), (2, 2, LENGTH, 128)
    inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
              for shape in shapes]
    block_mask = create_block_mask(function, None, 4, LENGTH, LENGTH, device)
    dout = torch.randn(shapes[0], device=device, dtype=torch.bfloat16)
    wanted = flash_attn_func(*(x.transpose(1, 2) for x in inputs), mask=mask_of(function, device),
                             deterministic=True).transpose(1, 2)
    gradients = torch.autograd.grad(wanted, inputs, dout)
    for mode in ('default', 'error'):    # the second call does not wait for the GPU
        torch.cuda.set_sync_debug_mode(mode)
        try:
            out, lse = flex_attention(*inputs, block_mask=block_mask, enable_gqa=True,
                                      return_lse=True)
            got = torch.autograd.grad(out, inputs, dout)
        finally:
            torch.cuda.set_sync_debug_mode('default')
        assert torch.equal(out, wanted) and lse.shape == shapes[0][:3]
        for one, other in zip(got, gradients):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
