"""FP8 attention over long sequences: its error from 1k to 128k keys, and one key to be found.

    python -m tools.labs.fp8_long                          # on a Hopper GPU, under a minute
    python -m tools.labs.fp8_long --only needle
    python -m tools.labs.fp8_long --device cpu --quick     # an emulation of the kernels' roundings

One head, as many queries as keys: the kernel computes every row, sampled rows are compared. Scales
per head or by blocks, q and k rotated, both ways to accumulate; and the bfloat16 kernel.

Sweep: the error over the number of keys, not causal, for two kinds of data. `outliers`: q, k and v
are those of benchmarks/fp8_accuracy.py; their output shrinks as keys average out. `mean`: v is
1 + N(0, 1) instead, so that sums of P V grow, and with them the rounding errors of the tensor
cores. Three measures, means over seeds: RMSE against attention of the inputs in float64; that RMSE
over the RMS of the exact output; and the relative RMSE against attention of the quantised values,
which is the error of the kernel alone.

Needle: k and v are N(0, 1), one key is the answer. The queries that are compared are a multiple of
that key plus N(0, 1): the least multiple (in steps of 1/4) that gives the key a weight above 0.999
in each query. A needle is found if the output is v of that key to one part in ten: `error` is
|out - v| / |v| with the quantised v, the largest over the queries. With the last key and causal,
only the last query sees it. The exit status is 1 if a needle is not found.

Writes results/fp8_long.json and .png.
"""
from __future__ import annotations

import argparse
import itertools
import math
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import harness
from benchmarks.fp8_accuracy import BF16, contenders, make_inputs, name_of, quantized, rmse
from flash_attn3 import flash_attn_func
from flash_attn3.cpu import reference_fp8
from flash_attn3.cpu.reference import Inputs

GRANULARITIES = 'head', 'block'
DATA = 'outliers', 'mean'
MEASURES = {'rmse': 'RMSE', 'relative': 'RMSE / RMS of the output',
            'kernel': 'the same, of the kernel alone'}
SWEEP_ROWS, NEEDLE_QUERIES = 512, 64
WEIGHT, FOUND = 0.999, 0.1    # a needle: its least exact weight; its largest error
SCORES = 1 << 25              # computed at a time, in float64: a quarter of a GiB
POSITIONS = 'first', 'middle', 'last'

Run = Callable[[], Tensor]


def attend_rows(inputs: Inputs, rows: Tensor, causal: bool, key: int = 0) -> tuple[Tensor, Tensor]:
    """Attention in float64 of some queries of one head: (rows, head_dim), and the weights of a key.
    """
    q, k, v = (x[0, :, 0].double() for x in inputs[:3])
    numbers = torch.arange(k.size(0), device=k.device)
    outs, weights = [], []
    for part in rows.split(max(1, SCORES // k.size(0))):
        s = q[part] @ k.T * k.size(1) ** -0.5
        if causal:
            s = s.masked_fill(numbers > part[:, None], -math.inf)
        p = s.softmax(-1)
        outs.append(p @ v)
        weights.append(p[:, key])
    return torch.cat(outs), torch.cat(weights)


def sample(first: int, seqlen: int, count: int, seed: int) -> Tensor:
    """`count` different rows from first to seqlen, in order; all rows if there are fewer."""
    generator = torch.Generator().manual_seed(seed)
    return (first + torch.randperm(seqlen - first, generator=generator)[:count]).sort()[0]


def shape_of(seqlen: int, head_dim: int, causal: bool) -> dict:
    return dict(batch=1, seqlen=seqlen, heads=1, heads_k=1, head_dim=head_dim, causal=causal)


def methods(inputs: tuple[Tensor, ...], shape: dict, seed: int) -> dict[str, tuple[Run, Inputs]]:
    """By name: a function that computes the whole output, and the inputs in float64."""
    plain = Inputs(*(x.double() for x in inputs))
    found: dict[str, tuple[Run, Inputs]] = {
        BF16: (lambda: flash_attn_func(*inputs, causal=shape['causal']), plain)}
    for granularity in GRANULARITIES:
        values, scales = quantized(inputs, granularity, True, seed)
        wide = reference_fp8.dequantize(Inputs(*values), scales, None, torch.float64)
        for name, attend in contenders(shape, inputs[0].device).items():
            found[f'{name_of(granularity, True)} ({name})'] = (
                lambda attend=attend, values=values, scales=scales: attend(values, scales), wide)
    return found


# ------------------------------------------------------------------------------------------ sweep
def data_of(data: str, shape: dict, seed: int, device: torch.device) -> tuple[Tensor, ...]:
    q, k, v = make_inputs(shape, seed, device)
    if data == 'mean':
        generator = torch.Generator(device).manual_seed(seed + 1000)
        v = (1 + torch.randn(v.shape, generator=generator, device=device)).bfloat16()
    return q, k, v


def errors_of_seed(data: str, shape: dict, seed: int, device: torch.device) -> dict[str, dict]:
    """By method: a figure for each of MEASURES, and `rms`, the RMS of the exact output."""
    inputs = data_of(data, shape, seed, device)
    rows = sample(0, shape['seqlen'], SWEEP_ROWS, seed).to(device)
    expected, _ = attend_rows(Inputs(*inputs), rows, shape['causal'])
    rms = expected.square().mean().sqrt().item()
    found = {}
    for name, (run, wide) in methods(inputs, shape, seed).items():
        out = run()[0, rows, 0]
        own = expected if name == BF16 else attend_rows(wide, rows, shape['causal'])[0]
        error = rmse(out, expected)
        found[name] = dict(rmse=error, relative=error / rms, kernel=rmse(out, own) / rms, rms=rms)
    return found


def sweep_cell(data: str, shape: dict, seeds: int, device: torch.device) -> dict:
    found = [errors_of_seed(data, shape, seed, device) for seed in range(seeds)]
    results = [dict(name=name, **{measure: statistics.fmean(errors[name][measure]
                                                            for errors in found)
                                  for measure in MEASURES}) for name in found[0]]
    rms = statistics.fmean(errors[BF16]['rms'] for errors in found)
    return dict(kind='sweep', data=data, shape=shape, rms=rms, results=results)


def sweep_cells(record: dict, data: str) -> list[dict]:
    return [cell for cell in record['cells'] if cell['kind'] == 'sweep' and cell['data'] == data]


def growth(record: dict) -> dict[str, dict[str, float]]:
    """By data and method: the relative error at the most keys over that at the fewest."""
    found: dict[str, dict[str, float]] = {}
    for data in DATA:
        cells = sweep_cells(record, data)
        found[data] = {last['name']: last['relative'] / first['relative'] for first, last in zip(
            cells[0]['results'], cells[-1]['results'])} if cells else {}
    return found


def show_sweep(record: dict, console: Console) -> None:
    for data in DATA:
        cells = sweep_cells(record, data)
        if not cells:
            continue
        table = Table(title=f'{data}, {title_of(record)}: ' + '; '.join(MEASURES.values()))
        for column in ('keys', 'RMS', *(result['name'] for result in cells[0]['results'])):
            table.add_column(column, justify='right')
        for cell in cells:
            figures = ['  '.join(f'{result[measure]:.2e}' for measure in MEASURES)
                       for result in cell['results']]
            table.add_row(str(cell['shape']['seqlen']), f"{cell['rms']:.2e}", *figures)
        console.print(table)


def plot(record: dict, path: pathlib.Path) -> None:
    """A row of panels for each kind of data, a panel for each measure, a line for each method."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(len(DATA), len(MEASURES), figsize=(13, 7), layout='constrained')
    for line, data in zip(axes, DATA):
        cells = sweep_cells(record, data)
        lengths = [cell['shape']['seqlen'] for cell in cells]
        for axis, (measure, text) in zip(line, MEASURES.items()):
            for number, result in enumerate(cells[0]['results']):
                # Dashes show both lines where accumulation makes no difference.
                axis.plot(lengths, [cell['results'][number][measure] for cell in cells],
                          marker='o', markersize=3, label=result['name'],
                          linestyle='--' if '(promote)' in result['name'] else '-')
            axis.set_title(f'{data}: {text}', fontsize=9)
            axis.set_xscale('log', base=2)
            axis.set_xticks(lengths, map(short, lengths))
            axis.set_yscale('log')
            axis.set_xlabel('keys')
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    figure.suptitle(title_of(record), fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def short(length: int) -> str:
    return f'{length // 1024}k' if length % 1024 == 0 else str(length)


# ----------------------------------------------------------------------------------------- needle
def needle_inputs(shape: dict, key: int, rows: Tensor, seed: int,
                  device: torch.device) -> tuple[tuple[Tensor, ...], dict]:
    """q, k and v; the factor of the key in the queries, and the needle's least exact weight."""
    generator = torch.Generator(device).manual_seed(seed)
    noise, k, v = (torch.randn(1, shape['seqlen'], 1, shape['head_dim'], generator=generator,
                               device=device).bfloat16() for _ in range(3))
    for quarters in range(2, 65):
        q = noise.clone()
        q[:, rows] = (quarters / 4 * k[:, key:key + 1].float() + noise[:, rows].float()).bfloat16()
        _, weights = attend_rows(Inputs(q, k, v), rows, shape['causal'], key)
        if (least := weights.min().item()) > WEIGHT:
            return (q, k, v), dict(factor=quarters / 4, weight=least)
    raise RuntimeError(f"expected a head dim in which one of {shape['seqlen']} keys can stand out, "
                       f"got {shape['head_dim']}; hint: --head-dim 128")


def needle_cell(shape: dict, position: str, seed: int, device: torch.device) -> dict:
    """A result for each method: `error` (see the top), the number of queries that found the needle,
    and the relative RMSE against attention of the inputs.
    """
    seqlen = shape['seqlen']
    key = {'first': 0, 'middle': seqlen // 2, 'last': seqlen - 1}[position]
    rows = sample(key if shape['causal'] else 0, seqlen, NEEDLE_QUERIES, seed).to(device)
    inputs, facts = needle_inputs(shape, key, rows, seed, device)
    expected, _ = attend_rows(Inputs(*inputs), rows, shape['causal'])
    results = []
    for name, (run, wide) in methods(inputs, shape, seed).items():
        out, value = run()[0, rows, 0].double(), wide.v[0, key, 0]
        errors = (out - value).norm(dim=-1) / value.norm()
        results.append(dict(name=name, error=errors.max().item(),
                            found=(errors < FOUND).sum().item(),
                            relative=rmse(out, expected) / expected.square().mean().sqrt().item()))
    return dict(kind='needle', position=position, key=key, shape=shape, queries=rows.numel(),
                **facts, results=results)


def needle_cells(record: dict) -> list[dict]:
    return [cell for cell in record['cells'] if cell['kind'] == 'needle']


def needle_summary(cells: Sequence[dict]) -> dict[str, dict]:
    """By method, over all cells: the largest error, and the numbers of queries that found their
    needle and of all queries."""
    queries = sum(cell['queries'] for cell in cells)
    found: dict[str, dict] = {}
    for cell in cells:
        for result in cell['results']:
            total = found.setdefault(result['name'], dict(error=0.0, found=0, queries=queries))
            total['error'] = max(total['error'], result['error'])
            total['found'] += result['found']
    return found


def show_needles(record: dict, console: Console) -> None:
    cells = needle_cells(record)
    if not cells:
        return
    table = Table(title=f'needle, {title_of(record)}: the largest |out - v| / |v|, and how many '
                        f'queries found it')
    for column in ('keys', 'mask', 'needle', 'queries', 'weight >=',
                   *(result['name'] for result in cells[0]['results'])):
        table.add_column(column, justify='right')
    for cell in cells:
        figures = [f"{result['error']:.2e}  {result['found']}" for result in cell['results']]
        table.add_row(str(cell['shape']['seqlen']),
                      'causal' if cell['shape']['causal'] else 'full', cell['position'],
                      str(cell['queries']), f"{cell['weight']:.5f}", *figures)
    console.print(table)


# ------------------------------------------------------------------------------------------- both
def title_of(record: dict) -> str:
    return (f"head dim {record['settings']['head_dim']}, {record['environment']['device']}, commit "
            f"{record['commit']}")


def measure(args: argparse.Namespace, device: torch.device, record: dict) -> pathlib.Path | None:
    """Fills the record and saves it after every cell."""
    shapes = {'sweep': [(data, shape_of(seqlen, args.head_dim, False))
                        for data in DATA for seqlen in args.lengths],
              'needle': [(position, shape_of(seqlen, args.head_dim, causal))
                         for seqlen, causal, position in itertools.product(
                             args.needle_lengths, (False, True), POSITIONS)]}
    make = {'sweep': lambda data, shape: sweep_cell(data, shape, args.seeds, device),
            'needle': lambda position, shape: needle_cell(shape, position, 0, device)}
    path = None
    for kind in [args.only] if args.only else shapes:
        for which, shape in shapes[kind]:
            record['cells'].append(make[kind](which, shape))
            record['summary'] = dict(growth=growth(record),
                                     needle=needle_summary(needle_cells(record)))
            path = harness.save(record, args.out)
    return path


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m tools.labs.fp8_long', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    is_gpu = torch.cuda.is_available()
    parser.add_argument('--device', default='cuda' if is_gpu else 'cpu')
    parser.add_argument('--quick', action='store_true',
                        help='256 to 1024 keys, 2 seeds, a needle in 2048, head dim 64')
    parser.add_argument('--only', choices=('sweep', 'needle'), help='default: both')
    parser.add_argument('--head-dim', type=int, default=128, choices=(64, 96, 128, 192, 256))
    parser.add_argument('--lengths', type=int, nargs='+', help='1k to 128k; on a CPU to 4k')
    parser.add_argument('--needle-lengths', type=int, nargs='+', help='16k and 128k; on a CPU 4k')
    parser.add_argument('--seeds', type=int, default=3)
    harness.add_record_arguments(parser.add_argument)
    args = parser.parse_args(argv)
    is_gpu = torch.device(args.device).type == 'cuda'
    lengths = [1024 << power for power in range(8 if is_gpu else 3)]
    needle_lengths = [16384, 131072] if is_gpu else [4096]
    if args.quick:
        args.head_dim, args.seeds = 64, 2
        lengths, needle_lengths = [256, 512, 1024], [2048]
    args.lengths = args.lengths or lengths
    args.needle_lengths = args.needle_lengths or needle_lengths
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    console = harness.console(200)
    settings = dict(head_dim=args.head_dim, seeds=args.seeds, sweep_rows=SWEEP_ROWS,
                    needle_queries=NEEDLE_QUERIES, least_weight=WEIGHT, found=FOUND)
    record = harness.new_record('fp8_long', device, args.commit, settings)
    path = measure(args, device, record)
    if all(sweep_cells(record, data) for data in DATA):
        plot(record, path.with_suffix('.png'))
    show_sweep(record, console)
    show_needles(record, console)
    console.print(f'written: {path}', highlight=False)
    missed = {name: total for name, total in record['summary']['needle'].items()
              if total['found'] < total['queries']}
    for name, total in missed.items():
        console.print(f"{name}: found {total['found']} of {total['queries']}", highlight=False)
    return 1 if missed else 0


if __name__ == '__main__':
    sys.exit(main())
