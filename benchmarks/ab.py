"""Two builds of flash_attn3 against each other: a process each, taking turns on one GPU.

    python -m benchmarks.ab --a ../before --b . [--suite forward] [--quick]

A and B are folders that hold a built flash_attn3 folder (a checkout, or the target of
`pip install --target`), or files: builds of the kernel library alone, used under this package's
Python through FLASH_ATTN3_LIBRARY. In each round both sides time the same problem once, A first in
even rounds, B first in odd ones, so that clock and temperature are alike. The ratio of a cell is
the median over the rounds of A's time / B's time: above 1, B is faster. `--a X --b X` shows the
noise.
The suite `quantize` is quantize_fp8; a cell is wrong where the builds' results differ in a bit.
"""
from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import bench_quantize, harness, shapes
from benchmarks.quantize_cells import Cell
from flash_attn3 import bench
from flash_attn3.bench import Shape

SIDES = ('a', 'b')
QUANTIZE = 'quantize'
LIBRARY = 'FLASH_ATTN3_LIBRARY'
BENCH = pathlib.Path(bench.__file__).resolve().parent


@dataclass(frozen=True)
class Build:
    """name: for tables and results. folder: flash_attn3 is imported from it. variables: what the
    environment of its process has in addition."""
    name: str
    folder: pathlib.Path
    variables: dict[str, str]


class Worker:
    """The process of one build, and the pipe to it."""

    def __init__(self, build: Build, device: str, target_ms: float) -> None:
        script = pathlib.Path(__file__).with_name('ab_worker.py')
        command = [sys.executable, str(script), str(BENCH), str(build.folder), device,
                   str(target_ms)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env={**os.environ, **build.variables})
        self.name = build.name

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f'benchmarks.ab: the process of {self.name} ended with '
                               f'{self.process.wait()}; its last lines are above')
        return json.loads(line)

    def ask(self, **command) -> dict:
        self.process.stdin.write(json.dumps(command) + '\n')
        self.process.stdin.flush()
        return self.read()

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def find_build(path: pathlib.Path) -> Build:
    """The build at a path. Records hold its name, so that has no path of the machine."""
    path = path.resolve()
    if path.is_file():
        return Build(f'{path.parent.name}/{path.name}', BENCH.parents[1], {LIBRARY: str(path)})
    for folder in (path, path.parent):
        if (folder / 'flash_attn3' / '__init__.py').is_file():
            return Build(f'{folder.name} ({harness.commit(folder)})', folder, {})
    raise SystemExit('benchmarks.ab: expected a folder that holds flash_attn3/__init__.py or a '
                     f'kernel library, got {path}')


def sides_in_turn(rounds: int) -> Iterator[tuple[str, str]]:
    """A B, B A, A B, ...: each side goes first in every other round."""
    for number in range(rounds):
        yield SIDES if number % 2 == 0 else SIDES[::-1]


def compare(shape: Shape | Cell, workers: dict[str, Worker], rounds: int) -> dict:
    """One cell: the results of both sides, and the median over the rounds of their ratio."""
    is_attention = isinstance(shape, Shape)
    cell = dict(label=shape.label(),
                shape=harness.fields_of(shape) if is_attention else shape.as_dict())
    if is_attention:
        cell['flops'] = shape.flops
    verb = 'prepare' if is_attention else 'prepare_quantize'
    prepared = {side: worker.ask(**{verb: shape.as_dict()}) for side, worker in workers.items()}
    failed = {side: answer['na'] for side, answer in prepared.items() if 'na' in answer}
    if failed:
        return dict(cell, na=failed)
    settings = [min(answer['count'] for answer in prepared.values()),
                max(answer['ahead_s'] for answer in prepared.values())]
    turns: dict[str, list[dict]] = {side: [] for side in SIDES}
    for order in sides_in_turn(rounds):
        for side in order:
            answer = workers[side].ask(turn=settings)
            if 'na' in answer:
                return dict(cell, na={side: answer['na']})
            turns[side].append(answer)
    results = [side_result(shape, side, turns[side], prepared) for side in SIDES]
    ratio = statistics.median(a['ms'] / b['ms'] for a, b in zip(turns['a'], turns['b']))
    return dict(cell, results=results, ratio=ratio)


def side_result(shape: Shape | Cell, side: str, turns: Sequence[dict],
                prepared: dict[str, dict]) -> dict:
    figure = bench.Figure.of([bench.Turn(**turn) for turn in turns])
    if isinstance(shape, Shape):
        error = prepared[side]['error']
        rate = dict(tflops=shape.flops / figure.ms / 1e9, error=error,
                    wrong=not error < bench.WRONG)
    else:
        rate = dict(gb_per_s=prepared[side]['bytes'] / figure.ms / 1e6,
                    wrong=prepared['a']['digest'] != prepared['b']['digest'])
    return dict(name=side, ms=figure.ms, spread=figure.spread, **rate)


def select(suite: str, quick: bool, cpu: bool, dtype: str) -> list[Shape] | list[Cell]:
    if suite == QUANTIZE:
        return bench_quantize.select(quick, cpu, dtype)
    return shapes.select(suite, quick, cpu, dtype)


def summarize(cells: Sequence[dict]) -> dict:
    ratios = [cell['ratio'] for cell in cells
              if 'ratio' in cell and not any(result['wrong'] for result in cell['results'])]
    return dict(cells=len(cells), **harness.ratios_summary(ratios))


def show(record: dict, console: Console) -> None:
    settings = record['settings']
    table = Table(title=f"A {settings['a']}, B {settings['b']}, {record['environment']['device']}")
    unit = 'GB/s' if settings['suite'] == QUANTIZE else 'TFLOP/s'
    table.add_column('problem')
    for column in ('A us', 'B us', f'A {unit}', f'B {unit}', 'B / A'):
        table.add_column(column, justify='right')
    for cell in record['cells']:
        label = cell['label']
        if 'na' in cell:
            table.add_row(label, *('n/a' if side in cell['na'] else '' for side in SIDES))
            continue
        sides = cell['results']
        table.add_row(label, *(f"{r['ms'] * 1e3:.1f}" for r in sides),
                      *map(harness.figure_text, sides), f"{cell['ratio']:.3f}")
    console.print(table)
    summary = record['summary']
    if summary['compared']:
        console.print(f"speed of B / speed of A: geometric mean {summary['geometric_mean']:.4f} "
                      f"over {summary['compared']} of {summary['cells']} cells, from "
                      f"{summary['worst']:.3f} to {summary['best']:.3f}", highlight=False)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.timing_parser('benchmarks.ab', __doc__)
    parser.add_argument('--a', type=pathlib.Path, required=True,
                        help='folder or kernel library of the build to compare with')
    parser.add_argument('--b', type=pathlib.Path, required=True, help='the other build')
    parser.add_argument('--suite', choices=sorted([*shapes.SUITES, QUANTIZE]),
                        default='forward')
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    console = harness.console()
    device, rounds = torch.device(args.device), args.rounds or (3 if args.quick else 9)
    builds = {'a': find_build(args.a), 'b': find_build(args.b)}
    settings = dict(rounds=rounds, target_ms=args.target_ms, suite=args.suite,
                    **{side: builds[side].name for side in SIDES})
    record = harness.new_record(f'ab_{args.suite}', device, args.commit, settings)
    with harness.Monitor(device) as monitor, ExitStack() as undo:
        workers = {}
        for side, build in builds.items():
            workers[side] = Worker(build, args.device, args.target_ms)
            undo.callback(workers[side].stop)
        for worker in workers.values():
            worker.read()
        for shape in select(args.suite, args.quick, device.type == 'cpu', args.dtype):
            monitor.clear()
            cell = compare(shape, workers, rounds)
            record['cells'].append(cell)
            console.print(f"{shape.label()}: {cell.get('ratio', cell.get('na'))}  "
                          f'{monitor.text()}', highlight=False)
    record['summary'] = summarize(record['cells'])
    path = harness.save(record, args.out)
    show(record, console)
    console.print(f'written: {path}', highlight=False)
    return 0 if record['summary']['compared'] == len(record['cells']) else 1


if __name__ == '__main__':
    sys.exit(main())
