"""Runs draws of tests/bits, prints a line for each that fails, and the digest of all results.

    python -m tests.bits --draws 2000 --seed 0       # on a GPU, where there is one
    python -m tests.bits --seed 0 --draw 4711        # one of them

The digest is the sha256 of out and LSE of each prompt, in the order of the draws: a GPU with
the same kernels has the same one. Without a GPU plain PyTorch runs short draws, in float64.
"""
from __future__ import annotations

import argparse
import hashlib
import sys
import time

import torch

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
    return parser.parse_args(arguments)


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
    name = torch.cuda.get_device_name() if options.device == 'cuda' else 'CPU'
    print(f'{len(numbers)} draws, {failed} failed, seed {options.seed}, {name}, '
          f'{time.monotonic() - began:.0f} s, sha256 {total.hexdigest()}')
    return int(failed > 0)


if __name__ == '__main__':
    sys.exit(main())
