"""The problems of quantize_fp8 that are timed. It imports torch alone: ab_worker.py loads this file
by its path, so that two builds get the same inputs."""
from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

TOKENS, WIDTH = 16384, 2048    # WIDTH: heads * head_dim
MOST_SETS = 64


class Cell(NamedTuple):
    """lengths: of packed sequences, instead of `tokens`; empty: a dense tensor."""
    head_dim: int
    block: int | str
    rotate: bool = True
    lengths: tuple[int, ...] = ()
    tokens: int = TOKENS
    dtype: str = 'bfloat16'

    @property
    def rows(self) -> int:
        return sum(self.lengths) or self.tokens

    def label(self) -> str:
        parts = [f'd{self.head_dim}', f'{self.rows} tokens', f'block {self.block}',
                 'rotated' if self.rotate else 'plain']
        if self.lengths:
            parts.append(f'{len(self.lengths)} of {min(self.lengths)}-{max(self.lengths)}')
        return ', '.join(parts)

    def as_dict(self) -> dict:
        return self._asdict()


def options_of(cell: Cell, device: torch.device) -> dict:
    """The keyword arguments of quantize_fp8."""
    options: dict = dict(block=cell.block, rotate=cell.rotate)
    if cell.lengths:
        options['cu_seqlens'] = torch.tensor([0, *itertools.accumulate(cell.lengths)],
                                             dtype=torch.int32, device=device)
    return options


def make_inputs(cell: Cell, device: torch.device, rotated_bytes: int) -> list[torch.Tensor]:
    """Inputs to rotate over: on a GPU several, together larger than its L2."""
    shape = (cell.rows, max(1, WIDTH // cell.head_dim), cell.head_dim)
    shape = shape if cell.lengths else (1, *shape)
    dtype = getattr(torch, cell.dtype)
    generator = torch.Generator(device).manual_seed(0)
    first = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    count = 1
    if device.type == 'cuda':
        count = min(MOST_SETS, rotated_bytes // first.nbytes + 2)
    return [first, *(torch.randn(shape, generator=generator, device=device, dtype=dtype)
                     for _ in range(count - 1))]


def bytes_of(x: torch.Tensor, results: tuple[torch.Tensor, ...]) -> int:
    """The bytes that must be read and written, each once."""
    return x.nbytes + sum(y.nbytes for y in results)


def digest_of(results: tuple[torch.Tensor, ...]) -> str:
    found = hashlib.sha256()
    for y in results:
        found.update(y.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def in_turn(calls: list[Callable]) -> Callable:
    """A call that makes the next of the calls each time."""
    following = itertools.cycle(calls)
    return lambda: next(following)()
