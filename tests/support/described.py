"""Tensors as the module `_plan` reads them, given only their sizes."""
from __future__ import annotations

from collections.abc import Sequence


def describe_sizes(sizes: Sequence[int], dtype: str) -> tuple:
    """Describes a contiguous CUDA tensor given only its sizes."""
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * max(1, size))
    return dtype, 'cuda', 0, tuple(sizes), tuple(strides), 0
