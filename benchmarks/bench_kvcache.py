"""Attention on a KV cache next to SDPA and to a copy on the device: table, JSON, PNG.

    python -m benchmarks.bench_kvcache                        # on a Hopper GPU, about a minute
    python -m benchmarks.bench_kvcache --only paged,append
    python -m benchmarks.bench_kvcache --host                 # host time of an eager call
    python -m benchmarks.bench_kvcache --device cpu --quick   # tries the machinery

A figure is the bytes that have to be read and written, each once, over time; `copy` moves as many
bytes. Contenders take turns, as flash_attn3/bench says, each on inputs that are not in L2. `graph`
is our call replayed from a CUDA graph; `unshared` has no shared_prefix, `16 bits` a cache of q's
dtype. Results are checked against float32 once.
"""
from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks import cache_cells, harness
from benchmarks.cache_cells import SDPA, UNSHARED, WIDE, Cell
from benchmarks.quantize_cells import in_turn
from flash_attn3 import bench
from flash_attn3.bench import OURS, WRONG, Timer, interleaved

COPY = 'copy'
GRAPHS = {name: f'{name} graph' for name in (OURS, UNSHARED, WIDE)}
NAMES = OURS, GRAPHS[OURS], UNSHARED, GRAPHS[UNSHARED], WIDE, GRAPHS[WIDE], SDPA, COPY
HOST_CALLS, HOST_ROUNDS = 200, 7


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.timing_parser('benchmarks.bench_kvcache', __doc__)
    parser.add_argument('--only', help=f'comma separated, of: {", ".join(cache_cells.KINDS)}')
    parser.add_argument('--host', action='store_true',
                        help='host time of an eager call: batch 1, 64 keys')
    return parser.parse_args(argv)


def copies(cell: Cell, device: torch.device, count: int) -> list[Callable]:
    """Each reads half of the cell's bytes and writes the other half."""
    half = cell.bytes // 2
    return [functools.partial(torch.empty(half, dtype=torch.uint8, device=device).copy_,
                              torch.zeros(half, dtype=torch.uint8, device=device))
            for _ in range(count)]


def captured(call: Callable[[], Tensor]) -> Callable:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def prepared(cell: Cell, device: torch.device) -> tuple[dict[str, Callable], dict, dict]:
    """By contender: the calls, their relative errors, and the reasons of those that do not run."""
    sets = cache_cells.input_sets(cell, device)
    calls, errors, missing = {}, {}, {}
    for name, make in cache_cells.contenders(cell).items():
        try:
            own = [make(given, cell) for given in sets]
            result = own[0]()
            ref = cache_cells.in_float32(sets[0], cell)
            errors[name] = ((result.float() - ref).norm() / ref.norm()).item()
            calls[name] = in_turn(own)
            if name in GRAPHS and device.type == 'cuda':
                calls[GRAPHS[name]] = in_turn([captured(call) for call in own])
                errors[GRAPHS[name]] = errors[name]
        except Exception as failure:
            missing[name] = bench.reason(failure)
    calls[COPY], errors[COPY] = in_turn(copies(cell, device, len(sets))), 0.0
    return calls, errors, missing


def measure(cell: Cell, device: torch.device, rounds: int, target_ms: float) -> dict:
    with torch.no_grad():
        calls, errors, missing = prepared(cell, device)
        figures = interleaved(calls, Timer(device, target_ms), rounds, lambda name, error:
                              missing.update({name: bench.reason(error)}))
    results = [dict(name=name, ms=figure.ms, spread=figure.spread,
                    gb_per_s=cell.bytes / figure.ms / 1e6, error=errors[name],
                    wrong=not errors[name] < WRONG) for name, figure in figures.items()]
    results += [dict(name=name, na=text) for name, text in missing.items()]
    return dict(cell=cell.facts(), bytes=cell.bytes, results=results)


def ratio(cell: dict, name: str, to: str) -> float | None:
    """The speed of a contender over that of another."""
    one, other = (harness.measured(cell, x) for x in (name, to))
    return other['ms'] / one['ms'] if one and other else None


def summarize(cells: Sequence[dict]) -> dict:
    summary: dict = dict(cells=len(cells), ours_missing_or_wrong=[
        Cell.read(cell['cell']).label() for cell in cells if not harness.measured(cell, OURS)])
    for one, name in ((OURS, SDPA), (OURS, COPY), (OURS, UNSHARED), (OURS, WIDE),
                      (GRAPHS[OURS], GRAPHS[UNSHARED]), (GRAPHS[OURS], GRAPHS[WIDE])):
        ratios = [found for cell in cells if (found := ratio(cell, one, name))]
        if ratios:
            summary[f'to {name}'] = harness.ratios_summary(ratios)
    return summary


# ---------------------------------------------------------------------------------------- host time
def host_us(call: Callable, timer: Timer) -> float:
    """Host microseconds of a call, the median over rounds."""
    call()
    rounds = []
    for _ in range(HOST_ROUNDS):
        timer.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        rounds.append((time.perf_counter() - start) / HOST_CALLS * 1e6)
        timer.synchronize()
    return statistics.median(rounds)


def host_cells(dtype: str) -> list[Cell]:
    one = Cell(1, 64, dtype=dtype)
    return [one, Cell(1, 64, page_size=16, dtype=dtype), Cell(1, 64, appends=True, dtype=dtype)]


def measure_host(device: torch.device, dtype: str) -> list[dict]:
    """Host time of our call, and of SDPA's on a dense cache. These are so short on a GPU that the
    host never waits for it."""
    timer, found = Timer(device), []
    with torch.no_grad():
        for cell in host_cells(dtype):
            given = cache_cells.inputs_of(cell, device, 0)
            calls = {OURS: cache_cells.ours(given)}
            if cell.kind == 'dense':
                calls[SDPA] = cache_cells.sdpa(given, cell)
            found.append(dict(cell=cell.facts(), results=[
                dict(name=name, host_us=host_us(call, timer)) for name, call in calls.items()]))
    return found


# ------------------------------------------------------------------------------------------ output
def line_of(cell: Cell, found: dict) -> str:
    figures = '  '.join(f"{one['name']} {harness.figure_text(one)}"
                        + (f" ({one['ms'] * 1e3:.1f} us)" if 'ms' in one else '')
                        for one in found['results'])
    return f'{cell.label()}: {figures} GB/s'


def plot(record: dict, path: pathlib.Path) -> None:
    """A panel for each kind: GB/s of the contenders, cell by cell."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    kinds = list(dict.fromkeys(cell['cell']['kind'] for cell in record['cells']))
    figure, axes = plt.subplots(len(kinds), 1, figsize=(9, 3 * len(kinds)), squeeze=False,
                                layout='constrained')
    for axis, kind in zip(axes[:, 0], kinds):
        cells = [cell for cell in record['cells'] if cell['cell']['kind'] == kind]
        _panel(axis, kind, cells)
    axes[0, 0].legend(fontsize=8)
    facts = record['environment']
    figure.suptitle(f"KV cache, {facts['device']}, torch {facts['torch']}, commit "
                    f"{record['commit']}", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axis, kind: str, cells: Sequence[dict]) -> None:
    width = 0.8 / len(NAMES)
    for number, name in enumerate(NAMES):
        points = [(index + number * width, found['gb_per_s'])
                  for index, cell in enumerate(cells) if (found := harness.measured(cell, name))]
        if points:
            axis.bar(*zip(*points), width=width, label=name, color=f'C{number}')
    texts = [_tick(Cell.read(cell['cell'])) for cell in cells]
    axis.set_xticks([index + 0.4 - width / 2 for index in range(len(cells))], texts, fontsize=7)
    axis.set_title(kind, fontsize=9)
    axis.set_ylabel('GB/s')
    axis.grid(alpha=0.3, axis='y')


def _tick(cell: Cell) -> str:
    lines = [f'{cell.batch} x {cell.keys}', f'{cell.heads}/{cell.heads_k} heads',
             f'head dim {cell.head_dim}', *[f'{cell.queries} queries'] * (cell.queries > 1)]
    return '\n'.join(lines + [f'pages of {cell.page_size}'] * (cell.page_size > 0))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device, rounds = torch.device(args.device), harness.rounds_of(args)
    settings = dict(rounds=rounds, target_ms=args.target_ms, dtype=args.dtype)
    if args.host:
        record = harness.new_record('kvcache_host', device, args.commit, settings)
        record['cells'] = measure_host(device, args.dtype)
        for found in record['cells']:
            print(found['cell']['kind'], *(f"{one['name']} {one['host_us']:.1f} us"
                                           for one in found['results']))
        print(harness.save(record, args.out))
        return 0
    cells = (cache_cells.quick_cells(args.dtype, device.type == 'cpu') if args.quick
             else cache_cells.cells(args.dtype))
    kinds = args.only.split(',') if args.only else cache_cells.KINDS
    record = harness.new_record('kvcache', device, args.commit, settings)
    Timer(device).spin(0.3)
    for cell in [cell for cell in cells if cell.kind in kinds]:
        record['cells'].append(measure(cell, device, rounds, args.target_ms))
        record['summary'] = summarize(record['cells'])
        path = harness.save(record, args.out)
        print(line_of(cell, record['cells'][-1]), flush=True)
    plot(record, path.with_suffix('.png'))
    print(record['summary'], f'written: {path} and .png', sep='\n')
    return 1 if record['summary']['ours_missing_or_wrong'] else 0


if __name__ == '__main__':
    raise SystemExit(main())
