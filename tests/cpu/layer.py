"""A layer of a transformer, for the tests of what surrounds attention in a training run."""
from __future__ import annotations

from torch import Tensor, nn

from flash_attn3 import flash_attn_qkvpacked_func


class Layer(nn.Module):
    """Projections around attention, as in a transformer."""

    def __init__(self):
        super().__init__()
        self.project_in = nn.Linear(24, 8 * 16)
        self.project_out = nn.Linear(4 * 16, 24)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.project_in(x).unflatten(-1, (8, 16))
        out = flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4)
        return self.project_out(out.flatten(2))
