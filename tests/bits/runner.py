"""Runs draws in worker processes. A spawned process imports this module by its name, as it cannot
`__main__`.
"""
from __future__ import annotations

import functools
import hashlib
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from tests.bits.draw import LONGEST, draw_of
from tests.bits.ways import check, digest

LONGEST_ON_CPU = 100


def run(seed: int, device: str, number: int) -> tuple[bytes, str]:
    """A digest of the draw, and what is wrong with it."""
    on_gpu = device == 'cuda'
    draw = draw_of(seed, number, LONGEST if on_gpu else LONGEST_ON_CPU)
    try:
        computed = check(draw, torch.device(device), has_bits=on_gpu)
    except AssertionError as error:
        return b'', str(error)
    return hashlib.sha256(digest(computed)).digest(), ''


def results(seed: int, device: str, numbers: Sequence[int],
            jobs: int) -> Iterator[tuple[bytes, str]]:
    """What `run` gives for each number, in their order."""
    one = functools.partial(run, seed, device)
    if jobs == 1:
        yield from map(one, numbers)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context('spawn')) as processes:
        yield from processes.map(one, numbers, chunksize=8)
