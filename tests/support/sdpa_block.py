"""A transformer block on PyTorch's scaled_dot_product_attention, for training in clients."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SdpaBlock(nn.Module):
    """sharpness: the factor of the projections to q and k. Attention of new models is almost
    uniform.
    """

    def __init__(self, width: int, heads: int, sharpness: float):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        with torch.no_grad():
            self.qkv.weight[:2 * width].mul_(sharpness)

    def forward(self, x: Tensor, is_causal: bool) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))
