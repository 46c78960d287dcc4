"""Code that all benchmarks share: options, the record of a run and its files, the GPU's state.

new_record() holds what was measured on what; save() and plot() write results/<subject>.json and
.png, replacing the record of the run before. Monitor samples the GPU with nvidia-smi. The timing is
flash_attn3/bench.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from rich.console import Console

from flash_attn3.bench import Shape, geometric_mean

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'benchmarks' / 'results'
RAW = 'rounds', 'clock_mhz'    # in results of flash_attn3.bench; no record keeps them
NOISY = 0.05    # spread between rounds above which a figure is marked with ~
COLUMNS = 180   # in a line of a record

# Bits of clocks_event_reasons.active that say why the SM clock is below what it could be.
THROTTLE_REASONS = {
    0x2: 'applications_clocks', 0x4: 'power_cap', 0x8: 'hw_slowdown', 0x10: 'sync_boost',
    0x20: 'sw_thermal', 0x40: 'hw_thermal', 0x80: 'power_brake',
}
QUERY = 'clocks.sm,power.draw,clocks_event_reasons.active'


class Monitor:
    """A context in which a thread samples clock, power and throttle reasons of a GPU ten times a
    second. Without a GPU or nvidia-smi there are no samples."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.samples: list[tuple[float, float, int]] = []
        self.process = None

    def __enter__(self) -> Monitor:
        if self.device.type != 'cuda':
            return self
        uuid = torch.cuda.get_device_properties(self.device).uuid
        command = ['nvidia-smi', '-i', f'GPU-{uuid}', f'--query-gpu={QUERY}',
                   '--format=csv,noheader,nounits', '-lms', '100']
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE,
                                            stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return self
        threading.Thread(target=self._pump, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()

    def _pump(self) -> None:
        for line in self.process.stdout:
            try:
                clock, power, reasons = (part.strip() for part in line.split(','))
                self.samples.append((float(clock), float(power), int(reasons, 16)))
            except ValueError:   # '[N/A]', or an error in words
                continue

    def clear(self) -> None:
        self.samples = []

    def text(self) -> str:
        """Median clock and power, and why the clock was not higher; '' without samples."""
        if not self.samples:
            return ''
        clocks, powers, reasons = zip(*self.samples)
        names = [name for bit, name in THROTTLE_REASONS.items() if any(bit & x for x in reasons)]
        return (f'{statistics.median(clocks):.0f} MHz {statistics.median(powers):.0f} W '
                f'{"+".join(names)}').rstrip()


def commit(folder: pathlib.Path = ROOT) -> str:
    """The checkout's commit, with -dirty when a tracked file differs; 'unknown' outside git."""
    try:
        command = ['git', 'describe', '--always', '--abbrev=10', '--dirty', '--exclude=*']
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 'unknown'
    return run.stdout.strip()


def environment(device: torch.device) -> dict:
    facts = dict(torch=torch.__version__, cuda=torch.version.cuda, python=platform.python_version(),
                 machine=platform.machine(), device='cpu')
    if device.type == 'cuda':
        properties = torch.cuda.get_device_properties(device)
        facts.update(device=properties.name, sms=properties.multi_processor_count,
                     capability=list(torch.cuda.get_device_capability(device)),
                     memory_gib=round(properties.total_memory / 2**30, 1),
                     l2_mib=round(properties.L2_cache_size / 2**20, 1),
                     cudnn=torch.backends.cudnn.version(), driver=driver_version())
    return facts


def driver_version() -> str | None:
    try:
        run = subprocess.run(['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader'],
                             capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.split('\n')[0].strip()


def command_line() -> str:
    """How this process was started, as `python -m ...`, without the folder of the results."""
    spec = sys.modules['__main__'].__spec__
    words = ['python', '-m', spec.name.removesuffix('.__main__')] if spec else ['python']
    arguments = iter(sys.argv[1:])
    for word in arguments:
        if word == '--out':
            next(arguments, None)
        else:
            words.append(word)
    return ' '.join(words)


def new_record(subject: str, device: torch.device, commit_: str | None, settings: dict) -> dict:
    """A run on a CPU has a subject of its own: it never replaces the record of a GPU."""
    suffix = '_cpu' if device.type == 'cpu' else ''
    return dict(subject=subject + suffix, time=time.strftime('%Y-%m-%d %H:%M:%S'),
                commit=commit_ or commit(), environment=environment(device),
                command=command_line(), settings=settings, summary={}, cells=[])


def fields_of(problem: object) -> dict:
    """The fields of a dataclass that differ from their defaults: a record keeps these."""
    return {field.name: value for field in dataclasses.fields(problem)
            if (value := getattr(problem, field.name)) != field.default}


def kept(results: Iterable[dict]) -> list[dict]:
    """Results of flash_attn3.bench without RAW."""
    return [{key: x for key, x in result.items() if key not in RAW} for result in results]


def ratios_summary(ratios: Sequence[float]) -> dict:
    summary: dict = dict(compared=len(ratios))
    if ratios:
        summary.update(geometric_mean=geometric_mean(ratios), worst=min(ratios), best=max(ratios))
    return summary


def text_of(value: object, indent: str = '', name: str = '') -> str:
    """JSON with six digits a figure, after `"name": ` if there is one. What fits into a line stands
    on one; lists of numbers are filled."""
    lead = f'{json.dumps(name)}: ' if name else ''
    text = lead + json.dumps(rounded(value))
    is_list = isinstance(value, (list, tuple))
    if len(indent + text) < COLUMNS or not (is_list or isinstance(value, dict)):
        return text
    inner = indent + ' '
    if is_list and all(isinstance(x, (int, float)) for x in value):
        parts = '\n'.join(textwrap.wrap(text[len(lead) + 1:-1], COLUMNS, initial_indent=inner,
                                        subsequent_indent=inner))
    else:
        texts = [text_of(x, inner) for x in value] if is_list else [
            text_of(x, inner, key) for key, x in value.items()]
        parts = inner + f',\n{inner}'.join(texts)
    first, last = '[]' if is_list else '{}'
    return f'{lead}{first}\n{parts}\n{indent}{last}'


def rounded(value: object) -> object:
    """A copy of a value, in which numbers that are not whole have six significant digits."""
    if isinstance(value, dict):
        return {key: rounded(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(x) for x in value]
    is_whole = not isinstance(value, float) or value.is_integer()
    return value if is_whole else float(f'{value:.6g}')


def save(record: dict, folder: pathlib.Path) -> pathlib.Path:
    """Write the record as <subject>.json, all of it or nothing: a run that is stopped here leaves
    the file as it was."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['subject']}.json"
    part = path.with_name(path.name + '.part')
    part.write_text(text_of(record) + '\n')
    part.replace(path)
    return path


def measured(cell: dict, name: str) -> dict | None:
    """The result of a contender in a cell, None when it did not run or was wrong."""
    for result in cell['results']:
        if result['name'] == name and 'ms' in result and not result['wrong']:
            return result
    return None


def figure_text(result: dict | None) -> str:
    """TFLOP/s or GB/s; '~' when the rounds differ much, '!' when the result was wrong."""
    if result is None:
        return ''
    if 'na' in result:
        return 'n/a'
    marks = ('!' if result['wrong'] else '') + ('~' if result['spread'] > NOISY else '')
    return f"{result.get('tflops', result.get('gb_per_s')):.4g}{marks}"


def panels(record: dict) -> list[tuple[str, list[dict]]]:
    """The cells of each panel of a plot, by title: the problem without its length and batch."""
    groups: dict[str, list[dict]] = {}
    for cell in record['cells']:
        shape = Shape(**cell['shape'])
        dims = f'{shape.head_dim}' + f'x{shape.head_dim_v}' * (shape.head_dim_v > 0)
        title = (f'{shape.dtype}, head dim {dims}, {shape.heads}/{shape.heads_k} heads, '
                 f'{"causal" if shape.causal else "full"}')
        if shape.has_window:
            title += f', window {shape.window_left},{shape.window_right}'
        groups.setdefault(', '.join([title, *shape.features]), []).append(cell)
    return list(groups.items())


def plot(record: dict, path: pathlib.Path, names: Sequence[str]) -> None:
    """TFLOP/s over the length, one panel per head dim and mask, one line per contender."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    groups = panels(record)
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(6 * columns, 3.2 * rows), squeeze=False,
                                layout='constrained')
    for axis, (title, cells) in zip(axes.flat, groups):
        _panel(axis, title, cells, names)
    for axis in axes.flat[len(groups):]:
        axis.set_visible(False)
    axes.flat[0].legend(fontsize=8)
    facts = record['environment']
    figure.suptitle(f"{record['subject']}, {facts['device']}, torch {facts['torch']}, "
                    f"commit {record['commit']}", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axis, title: str, cells: Sequence[dict], names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        points = [(cell['shape']['seqlen_q'], found['tflops']) for cell in cells
                  if (found := measured(cell, name))]
        if points:
            axis.plot(*zip(*sorted(points)), marker='o', markersize=3, label=name,
                      color=f'C{number}')
    axis.set_title(title, fontsize=9)
    lengths = sorted({cell['shape']['seqlen_q'] for cell in cells})
    axis.set_xscale('log', base=2)
    axis.set_xticks(lengths, map(str, lengths))
    axis.set_ylim(bottom=0)
    axis.set_xlabel('seqlen')
    axis.set_ylabel('TFLOP/s')
    axis.grid(alpha=0.3)


def console(columns: int = 160) -> Console:
    """For tables: as wide as the terminal, else of these columns."""
    return Console(width=None if sys.stdout.isatty() else columns)


def parser_of(module: str, text: str, quick: str) -> argparse.ArgumentParser:
    """The options of a script that writes a record. text: its docstring. quick: help of --quick."""
    parser = argparse.ArgumentParser(prog=f'python -m {module}', description=text.splitlines()[0])
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--quick', action='store_true', help=quick)
    add_record_arguments(parser.add_argument)
    return parser


def timing_parser(module: str, text: str) -> argparse.ArgumentParser:
    """The options that every benchmark of times takes."""
    parser = parser_of(module, text, 'few cells, 3 rounds; on a CPU tiny problems')
    parser.add_argument('--rounds', type=int, help='per cell (5; 3 with --quick)')
    parser.add_argument('--target-ms', type=float, default=8.0,
                        help='work in a turn; 2000 shows the speed under sustained load')
    parser.add_argument('--dtype', choices=('bf16', 'fp16'), default='bf16')
    return parser


def add_record_arguments(add: Callable) -> None:
    add('--commit', help='of the build that is measured, where git cannot tell')
    add('--out', type=pathlib.Path, default=RESULTS, help='folder of the JSON and PNG files')


def rounds_of(args: argparse.Namespace) -> int:
    return args.rounds or (3 if args.quick else 5)
