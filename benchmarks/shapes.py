"""The problems that are benchmarked: names for lists of Shape.

`forward` holds the 36 cells that the field reports: 16k tokens whatever the length,
heads * head_dim = 2048, lengths 512 to 16384, three head dims, full and causal. Each list has one
of the backward of the same problems: `backward`, `backward_grouped`, `backward_odd`.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flash_attn3._measure import Shape

TOKENS = 16384
HIDDEN = 2048
HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)


def forward(head_dims: Sequence[int] = HEAD_DIMS, seqlens: Sequence[int] = SEQLENS,
            dtype: str = 'bf16') -> list[Shape]:
    return [square(dim, seqlen, causal, dtype=dtype)
            for dim in head_dims for causal in (False, True) for seqlen in seqlens]


def square(head_dim: int, seqlen: int, causal: bool, tokens: int = TOKENS, hidden: int = HIDDEN,
           dtype: str = 'bf16') -> Shape:
    heads = hidden // head_dim
    return Shape(tokens // seqlen, seqlen, seqlen, heads, heads, head_dim, causal, dtype)


def grouped(dtype: str = 'bf16') -> list[Shape]:
    """Grouped heads, as in current models: 32 query and 8 KV heads, and one KV head."""
    return [Shape(TOKENS // seqlen, seqlen, seqlen, 32, heads_k, 128, causal, dtype)
            for heads_k in (8, 1) for causal in (False, True) for seqlen in (2048, 8192)]


def odd(dtype: str = 'bf16') -> list[Shape]:
    """Lengths that fill no tile, few queries over many keys, few tiles for many SMs."""
    return [Shape(4, 1000, 1000, 16, 16, 128, False, dtype),
            Shape(4, 4095, 4097, 16, 16, 128, True, dtype),
            Shape(8, 64, 8192, 32, 8, 128, True, dtype),
            Shape(1, 2048, 2048, 8, 8, 128, True, dtype)]


def backward_of(cells: Sequence[Shape]) -> list[Shape]:
    return [replace(shape, backward=True) for shape in cells]


def tiny() -> list[Shape]:
    """Seconds on a CPU: for trying the machinery."""
    return [square(dim, seqlen, causal, tokens=128, hidden=128, dtype='fp32')
            for dim in (64, 128) for causal in (False, True) for seqlen in (64, 128)]


BACKWARD = 'backward'
FORWARD_SUITES = {'forward': forward, 'grouped': grouped, 'odd': odd}
BACKWARD_SUITES = {BACKWARD: forward, f'{BACKWARD}_grouped': grouped, f'{BACKWARD}_odd': odd}
SUITES = FORWARD_SUITES | BACKWARD_SUITES


def select(suite: str, quick: bool, cpu: bool, dtype: str) -> list[Shape]:
    """The shapes of a run. --quick keeps three lengths of the 36 cells; on a CPU it is `tiny`."""
    if cpu and quick:
        cells = tiny()
    elif quick and SUITES[suite] is forward:
        cells = forward(seqlens=(1024, 4096, 16384), dtype=dtype)
    else:
        cells = SUITES[suite](dtype=dtype)
    return backward_of(cells) if suite in BACKWARD_SUITES else cells
