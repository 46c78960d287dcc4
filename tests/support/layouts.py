"""Ways to lie in memory for one and the same (batch, seqlen, heads, head_dim) tensor.

Everything around the tensor is NaN: what a kernel reads beyond it shows in the result, what it
writes beyond it is missing from the NaN afterwards.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    name: str
    order: tuple[int, ...] = (0, 1, 2, 3)      # dimensions, slowest first
    padding: tuple[int, ...] = (0, 0, 0, 0)    # entries after each dimension
    offset: int = 0                            # elements in front of the first one

    def __str__(self) -> str:
        return self.name

    def place(self, x: Tensor) -> Tensor:
        """A view with the values of x."""
        padded = [size + extra for size, extra in zip(x.shape, self.padding)]
        count = math.prod(padded)
        buffer = torch.full((self.offset + count + 64,), math.nan, dtype=x.dtype, device=x.device)
        stored = buffer[self.offset:self.offset + count].view([padded[dim] for dim in self.order])
        view = stored.permute([self.order.index(dim) for dim in range(4)])
        for dim, size in enumerate(x.shape):
            view = view.narrow(dim, 0, size)
        return view.copy_(x)


def nan_count(view: Tensor) -> int:
    """NaN in the whole buffer that a placed tensor is part of."""
    return int(view._base.isnan().sum())


# TMA reads these as they are.
DIRECT = [
    Layout('padded', padding=(1, 5, 1, 8)),
    Layout('bhsd', order=(0, 2, 1, 3), padding=(0, 7, 0, 0)),
    Layout('sbhd', order=(1, 0, 2, 3)),
    Layout('hsbd', order=(2, 1, 0, 3), padding=(0, 3, 0, 0)),
    Layout('aligned_offset', offset=8),
]

# Addresses or strides that are not multiples of 16 bytes: TMA cannot.
COPIED = [
    Layout('offset_2_bytes', offset=1),
    Layout('offset_8_bytes', offset=4),
    Layout('odd_rows', padding=(0, 0, 0, 1)),
    Layout('rows_of_8_bytes', padding=(0, 0, 0, 4)),
    Layout('odd_everything', order=(2, 0, 1, 3), padding=(1, 1, 1, 3), offset=3),
]


def with_odd_size_1_strides(x: Tensor, stride: int) -> Tensor:
    """x with `stride` where a dimension has size 1, which may be any number."""
    strides = [stride if size == 1 else old for size, old in zip(x.shape, x.stride())]
    return x.as_strided(x.shape, strides)
