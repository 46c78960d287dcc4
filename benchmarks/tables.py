"""The generated parts of the documents: tables of kernels, features and measured speed.

    python -m benchmarks.tables            # writes them
    python -m benchmarks.tables --check    # says which pages are out of date; exit status 1 if any

A part lies between `<!-- generated: NAME -->` and `<!-- end -->` in a page. What follows from the
code is asked of the planner (flash_attn3._plan), tests/support/support_matrix.py and the
integrations; what was measured comes from benchmarks/results. No GPU needed.
"""
from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Callable, Sequence

from benchmarks import code_tables, harness, plot_peers
from benchmarks.code_tables import table
from benchmarks.harness import ROOT
from flash_attn3.bench import Shape

PART = re.compile(r'(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)', re.DOTALL)
FOLDERS = 'docs', 'csrc', 'tools', 'benchmarks'
SECTION_NAMES = {'fwd': 'forward', 'bwd': 'backward'}


def pages() -> list[pathlib.Path]:
    """README.md and every page in FOLDERS."""
    return [ROOT / 'README.md', *(path for folder in FOLDERS
                                  for path in sorted((ROOT / folder).rglob('*.md')))]


def read_record(subject: str) -> dict:
    return json.loads((harness.RESULTS / f'{subject}.json').read_text())


# --------------------------------------------------------------------------------------- speed
def peers_part(subject: str, section: str) -> str:
    record = read_record(subject)
    points = plot_peers.read_points(record, section)
    return f'{plot_peers.run_text(record)}:\n\n{plot_peers.markdown(points)}'


def other_head_dims_part() -> str:
    """Head dims 96 and 192: lowest and highest ratio over the lengths."""
    rows: dict[plot_peers.Panel, list[str]] = {}
    runs = []
    for section in ('fwd', 'bwd'):
        record = read_record(f'yardstick_{section}_d96_d192')
        runs.append(f'{SECTION_NAMES[section]} {plot_peers.run_text(record)}')
        points = plot_peers.read_points(record, section)
        best = plot_peers.best_peers(points)
        for panel in plot_peers.panels(points):
            ratios = [ratio for (found, _), (ratio, _) in best.items() if found == panel]
            rows.setdefault(panel, []).append(_range(ratios))
    return ('; '.join(runs) + '; 512 to 16384 keys:\n\n'
            + table(['D, mask', *SECTION_NAMES.values()],
                    [[f'{dim}, {mask}', *cells] for (dim, mask), cells in rows.items()]))


def headline() -> str:
    """The sentence on speed in README.md."""
    record = read_record('yardstick')
    forward, fp8, backward = (record['ratios'][section] for section in ('fwd', 'fp8', 'bwd'))
    return (f"Speed as a share of the faster of FlashAttention-3 and cuDNN, geometric mean over "
            f"{forward['compared']} cells each: forward {forward['geometric_mean']:.2f}, FP8 "
            f"forward {fp8['geometric_mean']:.2f}, backward {backward['geometric_mean']:.2f} "
            f"({plot_peers.run_text(record)}).")


def features_part() -> str:
    """Grouped heads, packed sequences, a window: forward and backward against the best peer."""
    record = read_record('yardstick_features')
    problems = {'gqa': '32/8 heads, causal, S = {S}',
                'varlen': '24 packed sequences up to 5361, causal',
                'window': 'window of 1024, S = {S}'}
    rows: dict[str, dict[str, str]] = {}
    for section, problem in problems.items():
        cells: dict[tuple, dict[str, float]] = {}
        for found in record['records']:
            if (found['section'], found['group']) == (section, 'main') and 'rate' in found:
                cells.setdefault(tuple(found['cell'].items()), {})[found['peer']] = found['rate']
        for cell, rates in cells.items():
            own = rates.pop(plot_peers.OURS)
            peer = max(rates, key=rates.get)
            text = (f'{own:.0f} / {rates[peer]:.0f} {plot_peers.short_name(peer)} '
                    f'({own / rates[peer]:.2f})')
            rows.setdefault(problem.format(**dict(cell)), {})[dict(cell)['op']] = text
    return (f'{plot_peers.run_text(record)}, head dim 128, TFLOP/s, ours / best peer (ratio):\n\n'
            + table(['problem', *SECTION_NAMES.values()],
                    [[problem, *(ops[op] for op in SECTION_NAMES)]
                     for problem, ops in rows.items()]))


def host_part() -> str:
    record = read_record('yardstick_launch')
    rates = {(r['cell']['mask'], r['peer']): r['rate'] for r in record['records']
             if r['section'] == 'launch'}
    peers = {'ours': 'flash_attn3', 'fa3': 'FA3', 'sdpa': 'SDPA'}
    texts = [f'{mask} ' + ', '.join(f'{name} {rates[mask, peer]:.1f}'
                                    for peer, name in peers.items()) for mask in ('full', 'causal')]
    return (f'Host time of a call in microseconds (batch 1, 64 tokens, 8 heads, head dim 128; '
            f'{plot_peers.run_text(record)}): {"; ".join(texts)}.')


# --------------------------------------------------------------------------------------- FP8
def _range(values: Sequence[float]) -> str:
    low, high = f'{min(values):.2f}', f'{max(values):.2f}'
    return low if low == high else f'{low}-{high}'


def _problem(cell: dict) -> str:
    """A cell's head dims, mask and other features, without its length."""
    shape = Shape(**cell['shape'])
    dims = f'({shape.head_dim}, {shape.head_dim_v})' if shape.head_dim_v else str(shape.head_dim)
    kinds = {'packed': shape.lengths, 'window': shape.has_window,
             f'{shape.heads}/{shape.heads_k} heads': shape.heads != shape.heads_k}
    kind = next((f'{name}, ' for name, is_it in kinds.items() if is_it), '')
    return f'{dims}, {kind}{"causal" if shape.causal else "full"}'


def fp8_part() -> str:
    """e4m3 against our bf16, by kind of problem."""
    record = read_record('fp8')
    groups: dict[str, list[dict]] = {}
    for cell in record['cells']:
        groups.setdefault(_problem(cell), []).append(cell)
    names = {'e4m3': 'by head', 'e4m3 by block': 'by block', 'e4m3 promote': "`'promote'`",
             'fp8_func': '`flash_attn_fp8_func`'}
    rows = []
    for group, cells in groups.items():
        lengths = sorted({cell['shape']['seqlen_q'] for cell in cells})
        seqlens = f'{lengths[0]}' + f'-{lengths[-1]}' * (len(lengths) > 1)
        rows.append([f'{group}, {seqlens}',
                     *(_range([cell['ratios'][name] for cell in cells]) for name in names)])
    means = ['mean', *(f"{record['summary'][name]['geometric_mean']:.2f}" for name in names)]
    return (f'{plot_peers.run_text(record)}:\n\n'
            + table(['head dim, mask, S', *names.values()], [*rows, means]))


def quantize_part() -> str:
    """Share of a copy's bandwidth: rotated q in blocks of 64 rows, k and v in blocks of 384."""
    record = read_record('quantize')
    kinds = {'q': (64, True), 'k': (384, True), 'v': (384, False)}
    shares: dict[tuple, float] = {}
    for cell in record['cells']:
        facts = cell['cell']
        is_packed = len(facts['lengths']) == 24
        if facts['tokens'] == 16384 and not facts['lengths'] or is_packed:
            shares[facts['head_dim'], is_packed, facts['block'], facts['rotate']] = cell['share']
    dims = sorted({key[0] for key in shares if all((key[0], False, *kind) in shares
                                                   for kind in kinds.values())})
    rows = []
    for dim in dims:
        found = [[shares.get((dim, is_packed, *kind)) for kind in kinds.values()]
                 for is_packed in (False, True)]
        rows.append([dim, *('/'.join('' if share is None else f'{100 * share:.0f}'
                                     for share in one) for one in found)])
    return f'{plot_peers.run_text(record)}, %:\n\n' + table(
        ['head dim', '/'.join(kinds), 'packed'], rows)


# ----------------------------------------------------------------------------------- sustained load
def sustained_part() -> str:
    """TFLOP/s and pJ/FLOP over the lengths, by head dim and mask; share of short turns' speed."""
    record = read_record('sustained')
    rows: dict[str, dict[str, list[dict]]] = {}
    for cell in record['cells']:
        for result in cell['results']:
            kinds = rows.setdefault(_problem(cell), {})
            kinds.setdefault(result['name'], []).append(result)
    lengths = dict.fromkeys(cell['shape']['seqlen_q'] for cell in record['cells'])
    shares = [one['turn_ms'] / one['ms'] for cell in record['cells'] for one in cell['results']]

    def cell_text(results: list[dict]) -> str:
        return ', '.join('/'.join(f'{one[name]:.{digits}f}' for one in results)
                         for name, digits in (('tflops', 0), ('pj_per_flop', 2)))

    return (f'{plot_peers.run_text(record)}, S = {"/".join(map(str, lengths))}, TFLOP/s, pJ/FLOP; '
            f'{_range(shares)} of the speed of short turns:\n\n'
            + table(['D, mask', *record['settings']['contenders']],
                    [[group, *map(cell_text, kinds.values())] for group, kinds in rows.items()]))


# --------------------------------------------------------------------------------------- records
def records_part() -> str:
    """The index of benchmarks/results: the subjects of each build and day, newest first."""
    runs: dict[tuple[str, ...], list[str]] = {}
    for path in sorted(harness.RESULTS.glob('*.json')):
        record = json.loads(path.read_text())
        run = record['time'][:10], record['commit'], record['environment']['device'].split()[1]
        runs.setdefault(run, []).append(f'`{path.stem}`')
    return table(['date', 'commit', 'NVIDIA', 'subjects'],
                 [[*run, ', '.join(runs[run])] for run in sorted(runs, reverse=True)])


PARTS: dict[str, Callable[[], str]] = {
    'headline': headline,
    'support': code_tables.support_part,
    'features': code_tables.features_part,
    'cache-features': code_tables.cache_features_part,
    'forward-kernels': code_tables.forward_part,
    'fp8-kernels': code_tables.fp8_part,
    'backward-kernels': code_tables.backward_part,
    'speed-forward': lambda: peers_part('yardstick', 'fwd'),
    'speed-backward': lambda: peers_part('yardstick', 'bwd'),
    'speed-fp8': lambda: peers_part('yardstick', 'fp8'),
    'speed-d96-d192': other_head_dims_part,
    'speed-features': features_part,
    'speed-host': host_part,
    'speed-sustained': sustained_part,
    'fp8-of-bf16': fp8_part,
    'quantize-share': quantize_part,
    'records': records_part,
    'clients': code_tables.clients_part,
}


def generated(text: str) -> tuple[str, list[str]]:
    """The page with new generated parts, and their names."""
    names = []

    def part(match: re.Match) -> str:
        names.append(match[2])
        return match[1] + PARTS[match[2]]() + '\n' + match[3]
    return PART.sub(part, text), names


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.tables',
                                     description=__doc__.splitlines()[0])
    parser.add_argument('--check', action='store_true', help='write nothing')
    is_check = parser.parse_args(argv).check
    stale, used = [], set()
    for path in pages():
        text = path.read_text()
        now, names = generated(text)
        used |= set(names)
        if now != text:
            stale.append(path.relative_to(ROOT))
            if not is_check:
                path.write_text(now)
    if unused := set(PARTS) - used:
        print(f'benchmarks.tables: expected a page with each part, got none with '
              f'{", ".join(sorted(unused))}', file=sys.stderr)
    print(*(f'{"out of date" if is_check else "written"}: {path}' for path in stale), sep='\n')
    if stale and is_check:
        print('benchmarks.tables: expected the parts as the code and the records have them; '
              'hint: python -m benchmarks.tables', file=sys.stderr)
    return 1 if unused or (stale and is_check) else 0


if __name__ == '__main__':
    sys.exit(main())
