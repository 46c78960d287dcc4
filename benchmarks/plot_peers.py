"""flash_attn3 against the other Hopper kernels: the plots and tables of side-by-side runs.

    python -m benchmarks.plot_peers benchmarks/results/yardstick.json

Reads the sections `fwd`, `bwd` and `fp8` of each file (its keys: docs/benchmarking.md). A section
becomes <file>_<section>.png, and a file with forward and backward one plot of both, <file>.png, for
the README. benchmarks/tables.py makes the tables. Peers that cannot share a process run in groups,
each with flash_attn3 in it: a peer is compared with the figure of ours that took turns with it, and
a plot shows ours as a band from its lowest to its highest figure.
"""
from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import harness
from flash_attn3.bench import geometric_mean

OURS = 'ours'
SECTIONS = {'fwd': 'Forward, bf16', 'bwd': 'Backward, bf16',
            'fp8': 'Forward, e4m3'}
NAMES = {OURS: 'flash_attn3', 'fa3': 'FA3', 'fa3_13': 'FA3 cu13', 'cudnn': 'cuDNN',
         'cudnn_fe': 'cuDNN fe', 'fa2': 'FA2', 'triton': 'Triton'}
# The plot of the README takes the best build or API of a library.
LIBRARIES = {OURS: 'flash_attn3', 'fa3': 'FlashAttention-3', 'fa3_13': 'FlashAttention-3',
             'cudnn': 'cuDNN', 'cudnn_fe': 'cuDNN', 'fa2': 'FlashAttention-2'}
Panel = tuple[int, str]   # head dim, mask
# The keys that benchmarks/results keeps: in a file, and in each of its records.
FACTS = 'subject', 'time', 'commit', 'environment', 'command', 'ratios'
FIELDS = 'section', 'group', 'cell', 'peer', 'unit', 'rate', 'wrong', 'na'


@dataclass(frozen=True)
class Point:
    """One measured figure, in TFLOP/s."""
    panel: Panel
    seqlen: int
    group: str
    peer: str
    rate: float


def read_points(record: dict, section: str) -> list[Point]:
    """The valid figures of a section, without peers that did not run or were wrong."""
    return [Point((r['cell']['D'], r['cell']['mask']), r['cell']['S'], r['group'], r['peer'],
                  r['rate'])
            for r in record['records']
            if r['section'] == section and 'rate' in r and not r['wrong']
            and r['cell'].get('op', 'fwd') == 'fwd']


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


def short_name(peer: str) -> str:
    """The library without its build or API: FA3, cuDNN."""
    return NAMES.get(peer, peer).split(' ')[0]


def _ratio_text(ratio: float, peer: str) -> str:
    """The ratio, and the peer's name unless it is FA3."""
    name = short_name(peer)
    return f'{ratio:.3f}' + f' {name}' * (name != NAMES['fa3'])


def markdown(points: Sequence[Point]) -> str:
    """One row a panel, one column a length, and the summary."""
    best, lengths = best_peers(points), sorted({p.seqlen for p in points})
    lines = ['| D, mask | ' + ' | '.join(map(str, lengths)) + ' |',
             '|---' * (1 + len(lengths)) + '|']
    for panel in panels(points):
        cells = [best.get((panel, length)) for length in lengths]
        texts = [_ratio_text(*cell) if cell else 'n/a' for cell in cells]
        lines.append(f'| {panel[0]}, {panel[1]} | ' + ' | '.join(texts) + ' |')
    if best:
        (panel, length), (worst, peer) = min(best.items(), key=lambda item: item[1])
        lines += ['', f'Geometric mean {geometric_mean([r for r, _ in best.values()]):.3f} over '
                      f'{len(best)} cells, worst {worst:.3f} (D = {panel[0]}, {panel[1]}, '
                      f'S = {length}, {short_name(peer)}).']
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
    _lengths_axis(axis, lengths)


def overview(record: dict, title: str, path: pathlib.Path) -> None:
    """Forward in the upper row, backward in the lower one, causal; a column a head dim."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    rows = {name: [p for p in read_points(record, section) if p.panel[1] == 'causal']
            for section, name in (('fwd', 'Forward'), ('bwd', 'Backward'))}
    dims = sorted({p.panel[0] for points in rows.values() for p in points})
    figure, axes = plt.subplots(len(rows), len(dims), squeeze=False, sharex=True,
                                figsize=(3.6 * len(dims), 5.4), layout='constrained')
    for row, (name, points) in zip(axes, rows.items()):
        for axis, dim in zip(row, dims):
            _best_lines(axis, [p for p in points if p.panel[0] == dim])
            axis.set_title(f'{name}, head dim {dim}', fontsize=10)
        row[0].set_ylabel('TFLOP/s')
    for axis in axes[-1]:
        axis.set_xlabel('sequence length')
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside lower center', ncols=len(labels), fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _best_lines(axis, points: Sequence[Point]) -> None:
    """One line a library: ours by the mean of its processes, a peer by the best at each length."""
    for number, library in enumerate(dict.fromkeys(LIBRARIES.values())):
        rates: dict[int, list[float]] = {}
        for p in points:
            if LIBRARIES.get(p.peer) == library:
                rates.setdefault(p.seqlen, []).append(p.rate)
        is_ours = library == NAMES[OURS]
        pick = statistics.fmean if is_ours else max
        line = sorted((length, pick(found)) for length, found in rates.items())
        axis.plot(*zip(*line), marker='o', markersize=3, label=library, color=f'C{number}',
                  linewidth=2.4 if is_ours else 1.3, zorder=3 if is_ours else 2)
    _lengths_axis(axis, sorted({p.seqlen for p in points}))


def _lengths_axis(axis, lengths: Sequence[int]) -> None:
    axis.set_xscale('log', base=2)
    axis.set_xticks(lengths, [f'{length // 1024}k' if length >= 1024 else str(length)
                              for length in lengths], fontsize=8)
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def run_text(record: dict) -> str:
    """Device, day and build: NVIDIA H200, 2026-11-25, commit 30a76a329d."""
    return (f"{record['environment']['device']}, {record['time'][:10]}, "
            f"commit {record['commit']}")


def compact(record: dict) -> dict:
    """A file without raw rounds, times and clocks, and without records that hold no figure."""
    records = [{name: found[name] for name in FIELDS if name in found}
               for found in record['records'] if 'rate' in found or 'na' in found]
    return {name: record[name] for name in FACTS} | {'records': records}


def present(path: pathlib.Path) -> list[pathlib.Path]:
    """Draws a file: the plots that were written, none where it has no figures."""
    record = json.loads(path.read_text())
    found = {section: points for section in SECTIONS if (points := read_points(record, section))}
    written = []
    for section, points in found.items():
        stem = path.stem.removesuffix(f'_{section}')
        written.append(path.with_name(f'{stem}_{section}.png'))
        plot(points, f'{SECTIONS[section]}, {run_text(record)}', written[-1])
    if {'fwd', 'bwd'} <= set(found):
        written.append(path.with_suffix('.png'))
        overview(record, f'bf16, causal, 16k tokens, {run_text(record)}', written[-1])
    return written


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.plot_peers',
                                     description=__doc__.splitlines()[0])
    parser.add_argument('json', type=pathlib.Path, nargs='+', help='yardstick.json')
    parser.add_argument('--compact', action='store_true',
                        help='only rewrite the files, as benchmarks/results keeps them')
    args = parser.parse_args(argv)
    if args.compact:
        for path in args.json:
            path.write_text(harness.text_of(compact(json.loads(path.read_text()))) + '\n')
        return 0
    written = {path.name: present(path) for path in args.json}
    for paths in written.values():
        print(*paths, sep='\n')
    if empty := [name for name, paths in written.items() if not paths]:
        print('benchmarks.plot_peers: expected a section fwd, bwd or fp8 with figures in '
              f'{", ".join(empty)}, got none', file=sys.stderr)
    return 1 if empty else 0


if __name__ == '__main__':
    sys.exit(main())
