"""Runs draws of tests/bits, prints a line for each that fails, and the digest of all results.

    python -m tests.bits --draws 2000 --seed 0       # on a GPU, where there is one
    python -m tests.bits --seed 0 --draw 4711        # one of them
    python -m tests.bits --out benchmarks/results    # the committed record of this card

The digest is the sha256 of out and LSE of each prompt, in the order of the draws: a GPU with
the same kernels has the same one. Without a GPU plain PyTorch runs short draws, in float64.
"""
from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path

import torch

from benchmarks import harness
from tests.bits.runner import results


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    parser = argparse.ArgumentParser(prog='python -m tests.bits', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--draws', type=int, default=2000)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--draw', type=int, help='run this one alone')
    parser.add_argument('--device', choices=('cpu', 'cuda'), default=device)
    parser.add_argument('--jobs', type=int, default=4 if device == 'cuda' else 1, help='processes')
    parser.add_argument('--commit', default=harness.commit(), help='default: that of the checkout')
    parser.add_argument('--out', type=Path, help='the folder of the record; default: none written')
    return parser.parse_args(arguments)


def record_of(options: argparse.Namespace, result: dict) -> dict:
    """A card has a record of its own, such as bits_h100."""
    environment = harness.environment(torch.device(options.device))
    card = environment['device'].removeprefix('NVIDIA ').split()[0].lower()
    return dict(subject=f'bits_{card}', time=time.strftime('%Y-%m-%d'), commit=options.commit,
                environment=environment, command=harness.command_line(), results=[result])


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    numbers = range(options.draws) if options.draw is None else [options.draw]
    began, failed, total = time.monotonic(), 0, hashlib.sha256()
    found = results(options.seed, options.device, numbers, options.jobs)
    for number, (own, error) in zip(numbers, found):
        total.update(own)
        if error:
            failed += 1
            print(f'FAILED --seed {options.seed} --draw {number}: {error}', flush=True)
    result = dict(draws=len(numbers), failed=failed, seed=options.seed,
                  seconds=round(time.monotonic() - began), sha256=total.hexdigest())
    print(result)
    if options.out:
        print(f'written: {harness.save(record_of(options, result), options.out)}')
    return int(failed > 0)


if __name__ == '__main__':
    sys.exit(main())
