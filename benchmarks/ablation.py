"""How much each part of the forward kernel gains: table 2 of the FlashAttention-3 paper.

    python -m benchmarks.ablation [--dtype fp16] [--head-dim 64] [--build-only]

Each row is a shipped tile of the head dim with some parts removed, built as a library of its own
(benchmarks/candidates.py) and checked against fp32; all rows take turns, as in bench_forward.py. At
head dim 128 that is the tile of two warpgroups, as in the paper; the tile of three, which the
planner takes for long sequences, has one row, complete. The problem is the paper's, full attention
with batch 4, seqlen 8448, 16 heads; its figures are for fp16 and head dim 128 on an H100 SXM, and
stand next to ours where the problem is the same, in either dtype. Rows that are equal for a tile
(no ping-pong with three warpgroups) are skipped.

"Tile overlap" (tile_overlap) is not in the paper; it needs the overlap in a warpgroup and goes
with it.
"""
from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import candidates, harness
from benchmarks.candidates import Candidate
from csrc.plan.variants import FORWARD
from flash_attn3 import _plan
from flash_attn3.bench import Shape, Timer

PAPER = Shape(4, 8448, 8448, 16, 16, 128, causal=False, dtype='fp16')
FULL = 'full'
NO_PING_PONG = ('ping_pong', 'false')
NO_OVERLAP = ('overlap', 'OverlapKind::kSerial')
NO_TILE_OVERLAP = ('tile_overlap', 'false')


@dataclass(frozen=True)
class Row:
    name: str
    fields: tuple[tuple[str, str], ...]   # those that differ from the shipped tile
    paper_tflops: int | None = None
    tile: str | None = None               # another shipped tile than that of TILES


# The tile of each head dim with the most parts to remove.
TILES = {64: 'FwdTileD64', 128: 'FwdTileD128Short', 256: 'FwdTileD256'}
ROWS = (
    Row(FULL, (), 661),
    Row('three warpgroups', (), tile='FwdTileD128'),
    Row('without tile overlap', (NO_TILE_OVERLAP,)),
    Row('without intra-warpgroup overlap', (NO_OVERLAP, NO_TILE_OVERLAP), 582),
    Row('without ping-pong', (NO_PING_PONG,)),
    Row('without ping-pong, tile overlap', (NO_PING_PONG, NO_TILE_OVERLAP)),
    Row('without ping-pong, any overlap', (NO_PING_PONG, NO_OVERLAP, NO_TILE_OVERLAP)),
)


def facts_of(tile: str) -> dict:
    name = next(variant.name for variant in FORWARD if variant.tile == tile)
    return next(facts for facts in _plan.variants() if facts['name'] == name)


def rows_of(head_dim: int) -> list[Row]:
    """Those of ROWS that differ for this head dim."""
    facts = facts_of(TILES[head_dim])
    rows = {}
    for row in ROWS:
        if row.tile and facts_of(row.tile)['head_dim'] != head_dim:
            continue
        parts = (facts['ping_pong'] and NO_PING_PONG not in row.fields,
                 facts['intra_overlap'] and NO_OVERLAP not in row.fields,
                 facts['tile_overlap'] and NO_TILE_OVERLAP not in row.fields)
        rows.setdefault((*parts, row.tile), row)
    return list(rows.values())


def candidate(row: Row, head_dim: int) -> Candidate:
    tile = row.tile or TILES[head_dim]
    name = f'd{head_dim}_{row.name}'.replace(',', '').replace(' ', '_').replace('-', '_')
    return Candidate(name, head_dim, row.fields, f'k{tile}', 'config/fwd_tiles.h')


def libraries_of(rows: Sequence[Row], args: argparse.Namespace) -> dict[str, pathlib.Path]:
    """The library of each row, built now or (--no-build) before."""
    wanted = {row.name: candidate(row, args.head_dim) for row in rows}
    paths = {name: one.library(args.dtype) for name, one in wanted.items()}
    if not args.no_build:
        candidates.build(list(wanted.values()), args.dtype)
    if missing := [path for path in paths.values() if not path.exists()]:
        raise SystemExit(f'flash_attn3.ablation: expected {missing[0]}, found none; hint: '
                         f'--build-only makes it, with the same --head-dim and --dtype')
    return paths


def measure(shape: Shape, functions: dict[str, Callable[..., torch.Tensor]],
            device: torch.device, args: argparse.Namespace) -> dict:
    """The record, with one cell, of a function(q, k, v) for each row."""
    settings = dict(rounds=args.rounds, target_ms=args.target_ms, contenders=list(functions),
                    tile=TILES[shape.head_dim],
                    fields={row.name: dict(row.fields) for row in ROWS if row.name in functions})
    record = harness.new_record(f'ablation_d{shape.head_dim}_{shape.dtype}', device, args.commit,
                                settings)
    timer = Timer(device, args.target_ms)
    monitor = harness.Monitor(device)
    try:
        timer.spin(0.3)
        monitor.take()
        results = candidates.compare(shape, functions, timer, args.rounds, device)
        record['cells'].append(dict(shape=shape.as_dict(), flops=shape.flops, gpu=monitor.take(),
                                    results=results))
    finally:
        monitor.stop()
    record['summary'] = summarize(record['cells'][0])
    return record


def ratios_to_full(rates: dict[str, float]) -> dict[str, float]:
    return {name: rate / rates[FULL] for name, rate in rates.items()} if FULL in rates else {}


def is_of_paper(shape: dict) -> bool:
    """The paper's problem, in either dtype."""
    return Shape(**dict(shape, dtype=PAPER.dtype)) == PAPER


def summarize(cell: dict) -> dict:
    """Speed of each row / speed of "full", here and in the paper."""
    rates = {result['name']: result['tflops'] for result in cell['results'] if 'na' not in result}
    paper = {row.name: row.paper_tflops for row in ROWS if row.paper_tflops}
    summary = dict(ratios=ratios_to_full(rates),
                   missing_or_wrong=[r['name'] for r in cell['results'] if 'na' in r])
    if is_of_paper(cell['shape']):
        summary.update(paper_tflops=paper, paper_ratios=ratios_to_full(paper))
    return summary


def table_rows(record: dict) -> tuple[list[str], list[list[str]]]:
    cell, = record['cells']
    summary = record['summary']
    headers = ['kernel', 'ms', 'TFLOP/s', '/ full', 'of peak', 'MHz', 'paper', 'paper / full']
    rows = []
    for result in cell['results']:
        name = result['name']
        row = [name, '', harness.figure_text(result), '', '', '']
        if 'na' not in result:
            share, clock = result['peak_share'], result['clock_mhz']
            row[1], row[3] = f"{result['ms']:.3f}", ratio_text(summary['ratios'], name)
            row[4:6] = f'{share:.0%}' if share else '', f'{clock:.0f}' if clock else ''
        paper = summary.get('paper_tflops', {}).get(name)
        rows.append([*row, str(paper or ''), ratio_text(summary.get('paper_ratios', {}), name)])
    return headers, rows


def ratio_text(ratios: dict[str, float], name: str) -> str:
    return f'{ratios[name]:.3f}' if name in ratios else ''


def show(record: dict, console: Console) -> None:
    headers, rows = table_rows(record)
    cell, = record['cells']
    table = Table(title=f"{Shape(**cell['shape']).label()}, {record['settings']['tile']}, "
                        f"{record['environment']['device']}, commit {record['commit']}",
                  caption=harness.gpu_text(cell['gpu']))
    for header in headers:
        table.add_column(header, justify='left' if header == headers[0] else 'right')
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for result in cell['results']:
        if 'na' in result:
            console.print(f"{result['name']}: {result['na']}", highlight=False)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.ablation', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--batch', type=int, default=PAPER.batch)
    parser.add_argument('--seqlen', type=int, default=PAPER.seqlen_q)
    parser.add_argument('--heads', type=int, default=PAPER.heads)
    parser.add_argument('--head-dim', type=int, choices=(64, 128, 256), default=PAPER.head_dim)
    parser.add_argument('--dtype', choices=tuple(candidates.DTYPES), default='bf16')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--target-ms', type=float, default=8.0,
                        help='work in a turn; 2000 shows the speed under sustained load')
    builds = parser.add_mutually_exclusive_group()
    builds.add_argument('--build-only', action='store_true', help='no GPU needed')
    builds.add_argument('--no-build', action='store_true',
                        help='take the libraries that --build-only left under build/')
    parser.add_argument('--commit', help='of the sources, where git cannot tell')
    parser.add_argument('--out', type=pathlib.Path, default=harness.RESULTS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    libraries = libraries_of(rows_of(args.head_dim), args)
    if args.build_only:
        return 0
    if not torch.cuda.is_available():
        raise SystemExit('flash_attn3.ablation: expected a Hopper GPU, got none; hint: '
                         '--build-only needs none')
    shape = Shape(args.batch, args.seqlen, args.seqlen, args.heads, args.heads, args.head_dim,
                  dtype=args.dtype)
    functions = {name: candidates.attention_of(path, shape.causal)
                 for name, path in libraries.items()}
    record = measure(shape, functions, torch.device('cuda'), args)
    path = harness.save(record, args.out)
    show(record, Console(width=None if sys.stdout.isatty() else 160))
    print(f'written: {path}')
    return 1 if record['summary']['missing_or_wrong'] else 0


if __name__ == '__main__':
    sys.exit(main())
