"""Builds candidate tiles of the forward kernel and times them against each other and the package.

    python -m benchmarks.search_tiles benchmarks/tiles.txt [--seqlens 512,4096] [--build-only]

Each line of the file is a candidate: a name and fields of FwdConfig. Every candidate becomes a
library of its own (benchmarks/candidates.py). The results are compared with fp32, the figures are
taken as in bench_forward.py. Winners go to csrc/config/fwd_tiles.h with reason and date.
"""
from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

import flash_attn3
from benchmarks import harness, shapes
from benchmarks.candidates import DTYPES, Candidate, attention_of, build, compare
from flash_attn3 import bench

BASELINE = 'flash_attn3'


def read_candidates(text: str) -> list[Candidate]:
    candidates = []
    for number, line in enumerate(text.splitlines(), 1):
        name, *words = line.partition('#')[0].split() or ['']
        if not name:
            continue
        pairs = tuple(tuple(word.split('=', 1)) for word in words)
        if not name.isidentifier() or any(len(pair) != 2 for pair in pairs):
            raise SystemExit(f'search_tiles: expected "name field=value ...", got line {number}: '
                             f'{line!r}')
        if not {'head_dim', 'tile_n'} <= dict(pairs).keys():
            raise SystemExit(f'search_tiles: expected head_dim and tile_n, got line {number}: '
                             f'{line!r}')
        fields = dict(pairs)
        head_dim = int(fields.pop('head_dim'))
        candidates.append(Candidate(name, head_dim, tuple(fields.items())))
    return candidates


def measure(shape: bench.Shape, libraries: dict[str, pathlib.Path],
            args: argparse.Namespace) -> dict[str, float]:
    """TFLOP/s of the package and of each candidate that runs and is right."""
    device = torch.device('cuda')
    functions = {BASELINE: lambda q, k, v: flash_attn3.flash_attn_func(q, k, v,
                                                                       causal=shape.causal)}
    functions |= {name: attention_of(path, shape.causal) for name, path in libraries.items()}
    timer = bench.Timer(device, args.target_ms)
    results = compare(shape, functions, timer, args.rounds, device)
    for result in results:
        if 'na' in result:
            print(f"{shape.label()}: {result['name']}: {result['na']}", file=sys.stderr)
    return {result['name']: result['tflops'] for result in results if 'na' not in result}


def show(cells: Sequence[dict], console: Console) -> None:
    """A table for each head dim and mask: candidates by lengths, and the mean over the package."""
    for head_dim, causal in dict.fromkeys((c['head_dim'], c['causal']) for c in cells):
        mine = [c for c in cells if (c['head_dim'], c['causal']) == (head_dim, causal)]
        table = Table(title=f'd{head_dim} {"causal" if causal else "full"}, TFLOP/s')
        for header in ('tile', *(str(c['seqlen']) for c in mine), f'/ {BASELINE}'):
            table.add_column(header, justify='left' if header == 'tile' else 'right')
        for name in dict.fromkeys(name for c in mine for name in c['tflops']):
            rates = [c['tflops'].get(name) for c in mine]
            ratios = [rate / c['tflops'][BASELINE] for rate, c in zip(rates, mine) if rate]
            table.add_row(name, *(f'{rate:.0f}' if rate else 'n/a' for rate in rates),
                          f'{bench.geometric_mean(ratios):.3f}')
        console.print(table)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('tiles', type=pathlib.Path, help='a file of candidates')
    parser.add_argument('--seqlens', default='512,1024,4096,16384')
    parser.add_argument('--dtype', choices=tuple(DTYPES), default='bf16')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--target-ms', type=float, default=5.0, help='work in a turn')
    parser.add_argument('--build-only', action='store_true', help='no GPU needed')
    parser.add_argument('--commit', help='of the sources, where git cannot tell')
    parser.add_argument('--out', type=pathlib.Path, default=harness.RESULTS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    candidates = read_candidates(args.tiles.read_text())
    libraries = build(candidates, args.dtype)
    if args.build_only:
        return 0
    record = harness.new_record('tiles', torch.device('cuda'), args.commit,
                                dict(rounds=args.rounds, target_ms=args.target_ms))
    for head_dim in dict.fromkeys(candidate.head_dim for candidate in candidates):
        here = {c.name: libraries[c.name] for c in candidates if c.head_dim == head_dim}
        for causal in (False, True):
            for seqlen in map(int, args.seqlens.split(',')):
                shape = shapes.square(head_dim, seqlen, causal, dtype=args.dtype)
                record['cells'].append(dict(head_dim=head_dim, causal=causal, seqlen=seqlen,
                                            tflops=measure(shape, here, args)))
    show(record['cells'], Console(width=120))
    print(harness.save(record, args.out))
    return 0


if __name__ == '__main__':
    sys.exit(main())
