"""Runs cases and prints a line for each that fails, by which it can be run again.

    python -m tests.fuzz --cases 10000 --seed 1             # on a GPU, where there is one
    python -m tests.fuzz --cases 10000 --kind cache         # calls of one kind
    python -m tests.fuzz --seed 1 --case 4711               # one of them
"""
from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter

import torch

from tests.fuzz.draw import NAMES, case_of
from tests.fuzz.runner import outcomes


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    jobs = min(8, max(1, (os.cpu_count() or 1) // 2)) if device == 'cuda' else 1
    parser = argparse.ArgumentParser(prog='python -m tests.fuzz', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--cases', type=int, default=1000)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--first', type=int, default=0, help='the number of the first case')
    parser.add_argument('--case', type=int, help='run this one alone, with its traceback')
    parser.add_argument('--kind', choices=NAMES, default='', help='default: all')
    parser.add_argument('--device', choices=('cpu', 'cuda'), default=device)
    parser.add_argument('--jobs', type=int, default=jobs, help='processes')
    return parser.parse_args(arguments)


def run_one(options: argparse.Namespace) -> int:
    case = case_of(options.seed, options.case, options.kind)
    print(case)
    try:
        case.check(options.device)
    except Exception:
        traceback.print_exc()
        return 1
    print('passed')
    return 0


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.case is not None:
        return run_one(options)
    numbers = range(options.first, options.first + options.cases)
    of_kind = f' --kind {options.kind}' * (options.kind != '')
    began, kinds, failed = time.monotonic(), Counter(), 0
    for outcome in outcomes(options.seed, options.device, numbers, options.jobs,
                            options.kind):
        kinds[outcome.kind] += 1
        if outcome.error:
            failed += 1
            print(f'FAILED --seed {options.seed}{of_kind} --case {outcome.number}: {outcome.error}',
                  flush=True)
    of_kinds = ', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))
    print(f'{kinds.total()} of {options.cases} cases ({of_kinds}), {failed} failed, seed '
          f'{options.seed}, {options.device}, {time.monotonic() - began:.0f} s')
    return int(failed > 0 or kinds.total() < options.cases)


if __name__ == '__main__':
    sys.exit(main())
