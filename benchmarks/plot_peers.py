"""flash_attn3 beside the other Hopper kernels: plots and tables of side-by-side runs.

    python -m benchmarks.plot_peers benchmarks/results/<date>_<commit>_yardstick*.json

Reads the sections `fwd` and `bwd` of each file (its keys: benchmarks/results/README.md). For each
it writes a PNG beside the file and prints what the README shows: a marker that names section and
file, and the markdown table of our speed / that of the best peer. Peers that cannot share a process
run in groups, each with flash_attn3 in it: a peer is compared with the figure of ours that took
turns with it, and the plot shows ours as a band from its lowest to its highest figure.
"""
from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from flash_attn3._measure import geometric_mean

OURS = 'ours'
SECTIONS = {'fwd': 'Forward', 'bwd': 'Backward'}
NAMES = {OURS: 'flash_attn3', 'fa3': 'FA3', 'fa3_13': 'FA3 cu13', 'cudnn': 'cuDNN',
         'cudnn_fe': 'cuDNN fe', 'fa2': 'FA2', 'triton': 'Triton'}
Panel = tuple[int, str]   # head dim, mask


@dataclass(frozen=True)
class Point:
    """One measured figure, in TFLOP/s."""
    panel: Panel
    seqlen: int
    group: str
    peer: str
    rate: float


def read_points(record: dict, section: str) -> list[Point]:
    """The valid figures of a section: what did not run or was wrong is left out."""
    return [Point((r['cell']['D'], r['cell']['mask']), r['cell']['S'], r['group'], r['peer'],
                  r['rate'])
            for r in record['records']
            if r['section'] == section and 'rate' in r and not r['wrong']]


def best_peers(points: Sequence[Point]) -> dict[tuple[Panel, int], tuple[float, str]]:
    """(our speed / that of the best peer, its name) of every cell that has both."""
    own = {(p.panel, p.seqlen, p.group): p.rate for p in points if p.peer == OURS}
    best: dict[tuple[Panel, int], tuple[float, str]] = {}
    for p in points:
        rate = own.get((p.panel, p.seqlen, p.group))
        if p.peer != OURS and rate is not None:
            found, cell = (rate / p.rate, p.peer), (p.panel, p.seqlen)
            best[cell] = min(found, best.get(cell, found))
    return best


def panels(points: Sequence[Point]) -> list[Panel]:
    """Head dims ascending, in each full before causal."""
    return sorted({p.panel for p in points}, key=lambda panel: (panel[0], panel[1] != 'full'))


def marker(section: str, name: str) -> str:
    """The line of the README above a table; it says what the table is held to."""
    return f'<!-- table: {section} of {name} -->'


def markdown(points: Sequence[Point]) -> str:
    """One row a panel, one column a length, and the summary."""
    best, lengths = best_peers(points), sorted({p.seqlen for p in points})
    lines = ['| D, mask | ' + ' | '.join(f'S = {length}' for length in lengths) + ' |',
             '|---' * (1 + len(lengths)) + '|']
    for panel in panels(points):
        cells = [best.get((panel, length)) for length in lengths]
        texts = [f'{cell[0]:.3f} {NAMES.get(cell[1], cell[1])}' if cell else 'n/a'
                 for cell in cells]
        lines.append(f'| {panel[0]}, {panel[1]} | ' + ' | '.join(texts) + ' |')
    if best:
        (panel, length), (worst, peer) = min(best.items(), key=lambda item: item[1])
        lines += ['', f'Geometric mean {geometric_mean([r for r, _ in best.values()]):.3f} over '
                      f'{len(best)} cells, worst {worst:.3f} (D = {panel[0]}, {panel[1]}, '
                      f'S = {length}, {NAMES.get(peer, peer)}).']
    return '\n'.join(lines)


def plot(points: Sequence[Point], title: str, path: pathlib.Path) -> None:
    """Full in the upper row, causal in the lower one; a column a head dim."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    dims, masks = sorted({p.panel[0] for p in points}), ('full', 'causal')
    figure, axes = plt.subplots(len(masks), len(dims), squeeze=False, sharex=True, sharey='col',
                                figsize=(4.2 * len(dims), 6.6), layout='constrained')
    for row, mask in zip(axes, masks):
        for axis, dim in zip(row, dims):
            _panel(axis, [p for p in points if p.panel == (dim, mask)])
            axis.set_title(f'head dim {dim}, {mask}', fontsize=10)
        row[0].set_ylabel('TFLOP/s')
    for axis in axes[-1]:
        axis.set_xlabel('sequence length')
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside lower center', ncols=len(labels), fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axis, points: Sequence[Point]) -> None:
    lengths = sorted({p.seqlen for p in points})
    for number, (peer, name) in enumerate(NAMES.items()):
        rates = {length: [p.rate for p in points if (p.peer, p.seqlen) == (peer, length)]
                 for length in lengths}
        rates = {length: found for length, found in rates.items() if found}
        if not rates:
            continue
        style = dict(linewidth=2.2, zorder=3) if peer == OURS else dict(linewidth=1.1)
        axis.plot(list(rates), [statistics.fmean(found) for found in rates.values()], marker='o',
                  markersize=3, label=name, color=f'C{number}', **style)
        axis.fill_between(list(rates), [min(found) for found in rates.values()],
                          [max(found) for found in rates.values()], color=f'C{number}', alpha=0.25)
    axis.set_xscale('log', base=2)
    axis.set_xticks(lengths, map(str, lengths), fontsize=8)
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.plot_peers',
                                     description=__doc__.splitlines()[0])
    parser.add_argument('json', type=pathlib.Path, nargs='+', help='<date>_<commit>_yardstick.json')
    parser.add_argument('--device', default='H200', help='for the title; the file does not say')
    return parser.parse_args(argv)


def present(path: pathlib.Path, device: str) -> bool:
    """Plots and prints a file; the plot of its first section has the name of the file. False if it
    has no figures."""
    record = json.loads(path.read_text())
    found = {section: points for section in SECTIONS if (points := read_points(record, section))}
    day, commit = path.stem.split('_')[:2]
    for number, (section, points) in enumerate(found.items()):
        plot(points, f'{SECTIONS[section]}, bf16, {device}, {day}, commit {commit}',
             path.with_name(f'{path.stem}_{section}.png') if number else path.with_suffix('.png'))
        print(marker(section, path.name), markdown(points), '', sep='\n')
    return bool(found)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    empty = [path.name for path in args.json if not present(path, args.device)]
    if empty:
        print('benchmarks.plot_peers: expected a section fwd or bwd with figures in '
              f'{", ".join(empty)}, got none', file=sys.stderr)
    return 1 if empty else 0


if __name__ == '__main__':
    sys.exit(main())
