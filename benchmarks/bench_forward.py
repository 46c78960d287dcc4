"""The forward of flash_attn3 against the backends of PyTorch's SDPA: table, JSON, PNG.

    python -m benchmarks.bench_forward                        # on a Hopper GPU, about a minute
    python -m benchmarks.bench_forward --all-backends         # also SDPA's slow backends
    python -m benchmarks.bench_forward --suite packed         # also: window, gpt_oss, mla, ...
    python -m benchmarks.bench_backward                       # gradients
    python -m benchmarks.bench_forward --device cpu --quick   # tries the machinery, seconds
    python -m benchmarks.bench_forward --markdown FILE.json   # the table of a record in Markdown

Contenders of a cell take turns; each is checked against fp32 once. See flash_attn3/bench for
what a figure is. The JSON file is written after every cell: an interrupted run keeps what it has.
"""
from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import harness, shapes
from flash_attn3 import bench
from flash_attn3.bench import Shape, Timer

OURS = bench.OURS
CONTENDERS = (OURS, 'sdpa flash', 'sdpa cudnn')
ALL_CONTENDERS = (OURS, *bench.SDPA_BACKENDS)   # the others are many times slower


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.timing_parser('benchmarks.bench_forward', __doc__)
    parser.add_argument('--suite', choices=sorted(shapes.SUITES), default='forward')
    parser.add_argument('--all-backends', action='store_true',
                        help="time 'sdpa efficient' and 'sdpa math' too")
    parser.add_argument('--markdown', type=pathlib.Path, metavar='JSON',
                        help='measure nothing: print the table of a JSON file')
    return parser.parse_args(argv)


def measure(cells: Sequence[Shape], args: argparse.Namespace,
            console: Console) -> tuple[dict, pathlib.Path]:
    """The record and its file, which is whole after every cell."""
    device, rounds = torch.device(args.device), harness.rounds_of(args)
    names = ALL_CONTENDERS if args.all_backends else CONTENDERS
    if any(shape.lengths for shape in cells):
        names = (*names, bench.PADDED)
    settings = dict(rounds=rounds, target_ms=args.target_ms, suite=args.suite,
                    contenders=list(names))
    record = harness.new_record(args.suite, device, args.commit, settings)
    Timer(device).spin(0.3)
    with harness.Monitor(device) as monitor:
        for shape in cells:
            monitor.clear()
            results = bench.measure(shape, device, names, rounds, args.target_ms)
            record['cells'].append(dict(shape=harness.fields_of(shape), flops=shape.flops,
                                        results=harness.kept(results)))
            record['summary'] = summarize(record['cells'])
            path = harness.save(record, args.out)
            figures = '  '.join(f"{r['name']} {harness.figure_text(r)}" for r in results)
            console.print(f'{shape.label()}: {figures}  {monitor.text()}', highlight=False)
    return record, path


def compare(cell: dict) -> tuple[str, float] | None:
    """(best rival, our speed / its speed); None when either side has no valid figure."""
    own = harness.measured(cell, OURS)
    names = [result['name'] for result in cell['results']
             if result['name'] not in (OURS, bench.PADDED)]
    rivals = [found for name in names if (found := harness.measured(cell, name))]
    if own is None or not rivals:
        return None
    best = min(rivals, key=lambda r: r['ms'])
    return best['name'], best['ms'] / own['ms']


def summarize(cells: Sequence[dict]) -> dict:
    compared = [found for cell in cells if (found := compare(cell))]
    missing = [Shape(**cell['shape']).label() for cell in cells if not harness.measured(cell, OURS)]
    return dict(cells=len(cells), ours_missing_or_wrong=missing,
                **harness.ratios_summary([ratio for _, ratio in compared]))


def table_rows(record: dict) -> tuple[list[str], list[list[str]]]:
    names = record['settings']['contenders']
    headers = ['problem', *names, 'of peak', 'best SDPA', 'ratio']
    rows = []
    for cell in record['cells']:
        by_name = {result['name']: result for result in cell['results']}
        own, against = harness.measured(cell, OURS), compare(cell)
        share = own and own['peak_share']
        rows.append([Shape(**cell['shape']).label(),
                     *(harness.figure_text(by_name.get(name)) for name in names),
                     f'{share:.0%}' if share else '', against[0] if against else '',
                     f'{against[1]:.2f}' if against else ''])
    return headers, rows


def summary_line(summary: dict) -> str:
    if not summary['compared']:
        return 'flash_attn3 / best SDPA: n/a'
    text = (f"flash_attn3 / best SDPA: geometric mean {summary['geometric_mean']:.3f} over "
            f"{summary['compared']} of {summary['cells']} cells, worst {summary['worst']:.3f}")
    missing = summary['ours_missing_or_wrong']
    return text + (f"; missing or wrong: {', '.join(missing)}" if missing else '')


def show(record: dict, console: Console) -> None:
    headers, rows = table_rows(record)
    table = Table(title=f"TFLOP/s, {record['environment']['device']}, commit {record['commit']}")
    for header in headers:
        table.add_column(header, justify='left' if header == headers[0] else 'right')
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(summary_line(record['summary']), highlight=False)


def markdown(record: dict) -> str:
    headers, rows = table_rows(record)
    facts = record['environment']
    lines = [f"{facts['device']}, torch {facts['torch']}, {record['time'][:10]}, commit "
             f"{record['commit']}, {record['settings']['rounds']} interleaved rounds, TFLOP/s:", '']
    lines += ['| ' + ' | '.join(row) + ' |' for row in [headers, ['---'] * len(headers), *rows]]
    return '\n'.join([*lines, '', summary_line(record['summary'])])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.markdown:
        print(markdown(json.loads(args.markdown.read_text())))
        return 0
    console = harness.console()
    cells = shapes.select(args.suite, args.quick, args.device == 'cpu', args.dtype)
    record, path = measure(cells, args, console)
    harness.plot(record, path.with_suffix('.png'), record['settings']['contenders'])
    show(record, console)
    console.print(f'written: {path} and .png', highlight=False)
    return 1 if record['summary']['ours_missing_or_wrong'] else 0


if __name__ == '__main__':
    sys.exit(main())
