"""Runs the cases of the fuzzer, in one process or in several that share the device."""
from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch

from tests.fuzz.draw import case_of

BLOCK = 25    # cases that a process takes at a time


class Outcome(NamedTuple):
    number: int
    kind: str     # dense, varlen, cache, ...
    error: str    # '' if it passed

    @property
    def is_last(self) -> bool:
        """After an error of a kernel a process can use its GPU no more."""
        return 'CUDA error' in self.error or 'AcceleratorError' in self.error


def run_case(seed: int, number: int, device: str, kind: str = '') -> Outcome:
    torch.manual_seed(0)
    case = case_of(seed, number, kind)
    kind = getattr(case, 'function', 'fp8')
    try:
        case.check(device)
    except Exception as error:
        lines = str(error).strip().splitlines() or ['']
        return Outcome(number, kind, f'{case}: {type(error).__name__}: {lines[0]}')
    return Outcome(number, kind, '')


def run_block(seed: int, device: str, kind: str, numbers: range) -> list[Outcome]:
    done: list[Outcome] = []
    for number in numbers:
        done.append(run_case(seed, number, device, kind))
        if done[-1].is_last:
            break
    return done


def outcomes(seed: int, device: str, numbers: range, jobs: int,
             kind: str = '') -> Iterator[Outcome]:
    """Results of all cases in their order; none after one that is the last. All calls have kind."""
    blocks = [numbers[i:i + BLOCK] for i in range(0, len(numbers), BLOCK)]
    run = functools.partial(run_block, seed, device, kind)
    if jobs == 1:
        done = map(run, blocks)
        yield from _until_last(done)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context('spawn'), torch.set_num_threads,
                             (1,)) as processes:
        yield from _until_last(processes.map(run, blocks))
        processes.shutdown(wait=False, cancel_futures=True)


def _until_last(blocks: Iterator[list[Outcome]]) -> Iterator[Outcome]:
    for block in blocks:
        yield from block
        if block[-1].is_last:
            return
