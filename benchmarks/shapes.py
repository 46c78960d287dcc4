"""The problems that are benchmarked: lists of Shape, by name.

`forward` holds the 36 cells that the field reports: 16k tokens at every length, heads * head_dim =
2048, lengths 512 to 16384, three head dims, full and causal. The backward of the same problems is
`backward`, that of another list `backward_<name>`.
"""
from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from flash_attn3.bench import Shape

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
    """Lengths that fill no tile, few queries for many keys, fewer tiles than SMs."""
    return [Shape(4, 1000, 1000, 16, 16, 128, False, dtype),
            Shape(4, 4095, 4097, 16, 16, 128, True, dtype),
            Shape(8, 64, 8192, 32, 8, 128, True, dtype),
            Shape(1, 2048, 2048, 8, 8, 128, True, dtype)]


def mixed_lengths(tokens: int = 2 * TOKENS, shortest: int = 16, longest: int = 8192,
                  median: int = 1000) -> tuple[int, ...]:
    """Log-normal lengths that add up to the tokens, the same on every call."""
    source, lengths = random.Random(0), []
    while (left := tokens - sum(lengths)) > 0:
        length = min(max(int(source.lognormvariate(math.log(median), 1)), shortest), longest)
        lengths.append(length if left - length >= shortest else left)
    return tuple(lengths)


def packed_of(lengths: Sequence[int], head_dim: int, causal: bool, dtype: str) -> Shape:
    longest = max(lengths)
    heads = HIDDEN // head_dim
    return Shape(len(lengths), longest, longest, heads, heads, head_dim, causal, dtype,
                 lengths=tuple(lengths))


def packed(dtype: str = 'bf16') -> list[Shape]:
    """Sequences of mixed lengths, of one length, and thousands of short ones."""
    source = random.Random(1)
    mixed, equal = mixed_lengths(), (2048,) * 8
    short = tuple(source.randint(1, 64) for _ in range(8192))
    cells = [packed_of(lengths, 128, causal, dtype)
             for lengths in (mixed, equal) for causal in (False, True)]
    return [*cells, packed_of(mixed, 64, True, dtype), packed_of(short, 128, True, dtype)]


def windows(dtype: str = 'bf16') -> list[Shape]:
    """Causal sliding windows over long sequences."""
    return [replace(square(head_dim, seqlen, True, dtype=dtype), window_left=left, window_right=0)
            for head_dim in (64, 128) for seqlen in (4096, 16384) for left in (128, 1024)]


def gpt_oss(dtype: str = 'bf16') -> list[Shape]:
    """64 query and 8 KV heads of 64, with sinks: windows, and the layers without one between."""
    return [Shape(TOKENS // seqlen, seqlen, seqlen, 64, 8, 64, True, dtype, window_left=left,
                  window_right=0 if left > 0 else -1, sinks=True)
            for seqlen in (4096, 16384) for left in (128, 1024, -1)]


def mla(dtype: str = 'bf16') -> list[Shape]:
    """Latent attention, expanded: 192 columns of q and k, 128 of v."""
    return [Shape(TOKENS // seqlen, seqlen, seqlen, 16, 16, 192, True, dtype, head_dim_v=128)
            for seqlen in (2048, 8192)]


def backward_of(cells: Sequence[Shape]) -> list[Shape]:
    return [replace(shape, backward=True) for shape in cells]


def tiny() -> list[Shape]:
    """For a CPU, seconds: to try the machinery."""
    return [square(dim, seqlen, causal, tokens=128, hidden=128, dtype='fp32')
            for dim in (64, 128) for causal in (False, True) for seqlen in (64, 128)]


BACKWARD = 'backward'
FORWARD_SUITES = {'forward': forward, 'grouped': grouped, 'odd': odd, 'packed': packed,
                  'window': windows, 'gpt_oss': gpt_oss, 'mla': mla}
BACKWARD_SUITES = {BACKWARD if suite is forward else f'{BACKWARD}_{name}': suite
                   for name, suite in FORWARD_SUITES.items()}
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
