"""What every benchmark records in addition to its figures, and the files it writes.

Monitor samples the GPU with nvidia-smi; environment() says what was measured on what; save() and
plot() write results/<subject>.json and .png, replacing the record of the run before. The timing
is flash_attn3/bench.
"""
from __future__ import annotations

import json
import pathlib
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'benchmarks' / 'results'
SCHEMA = 1
NOISY = 0.05   # spread between rounds above which a figure is marked with ~

# Bits of clocks_event_reasons.active that say why the SM clock is below what it could be.
THROTTLE_REASONS = {
    0x2: 'applications_clocks', 0x4: 'power_cap', 0x8: 'hw_slowdown', 0x10: 'sync_boost',
    0x20: 'sw_thermal', 0x40: 'hw_thermal', 0x80: 'power_brake',
}
QUERY = 'clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active'


def throttle_names(bits: int) -> list[str]:
    return [name for bit, name in THROTTLE_REASONS.items() if bits & bit]


class Monitor:
    """Samples clock, power, temperature and throttle reasons ten times a second, in a thread. Where
    there is no GPU or no nvidia-smi, it has no samples."""

    def __init__(self, device: torch.device, command: Sequence[str] | None = None) -> None:
        self.samples: list[tuple[float, float, float, int]] = []
        self.process = None
        if command is None:
            if device.type != 'cuda':
                return
            uuid = torch.cuda.get_device_properties(device).uuid
            command = ['nvidia-smi', '-i', f'GPU-{uuid}', f'--query-gpu={QUERY}',
                       '--format=csv,noheader,nounits', '-lms', '100']
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE,
                                            stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return
        self.thread = threading.Thread(target=self._pump, daemon=True)
        self.thread.start()

    def _pump(self) -> None:
        for line in self.process.stdout:
            try:
                clock, power, heat, reasons = (part.strip() for part in line.split(','))
                self.samples.append((float(clock), float(power), float(heat), int(reasons, 16)))
            except ValueError:   # '[N/A]', or an error in words
                continue

    def take(self) -> dict | None:
        """What was seen since the last call: [lowest, median, highest] of clock and power."""
        samples, self.samples = self.samples, []
        if not samples:
            return None
        clock, power, heat = (sorted(values) for values in list(zip(*samples))[:3])
        reasons = sorted({name for sample in samples for name in throttle_names(sample[3])})
        return dict(samples=len(samples), clock_mhz=[clock[0], clock[len(clock) // 2], clock[-1]],
                    power_w=[power[0], power[len(power) // 2], power[-1]], temperature_c=heat[-1],
                    throttle_reasons=reasons)

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()


def gpu_text(gpu: dict | None) -> str:
    """A cell of a table: median clock and power, and why the clock was not higher."""
    if gpu is None:
        return ''
    reasons = ' ' + '+'.join(gpu['throttle_reasons']) if gpu['throttle_reasons'] else ''
    return f"{gpu['clock_mhz'][1]:.0f} MHz {gpu['power_w'][1]:.0f} W{reasons}"


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
    words = ['python', '-m', spec.name] if spec else ['python']
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
    return dict(schema=SCHEMA, subject=subject + suffix, time=time.strftime('%Y-%m-%d %H:%M:%S'),
                commit=commit_ or commit(), environment=environment(device),
                command=command_line(), settings=settings, cells=[], summary={})


def save(record: dict, folder: pathlib.Path) -> pathlib.Path:
    """Write the record as <subject>.json, all of it or nothing: a run that is stopped here leaves
    the file as it was."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['subject']}.json"
    part = path.with_name(path.name + '.part')
    part.write_text(json.dumps(record, indent=1) + '\n')
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
    """The cells grouped for a plot: all but the length and the batch is the panel's title."""
    groups: dict[str, list[dict]] = {}
    for cell in record['cells']:
        shape = cell['shape']
        mask = 'causal' if shape['causal'] else 'full'
        heads = f"{shape['heads']}/{shape['heads_k']} heads"
        dims = f"{shape['head_dim']}"
        if shape.get('head_dim_v'):    # results from before there were others lack it, as the rest
            dims += f"x{shape['head_dim_v']}"
        title = f"{shape['dtype']}, head dim {dims}, {heads}, {mask}"
        if max(sides := [shape.get(f'window_{side}', -1) for side in ('left', 'right')]) >= 0:
            title += f', window {sides[0]},{sides[1]}'
        names = {'sinks': 'sinks', 'lengths': 'packed', 'backward': 'backward'}
        title += ''.join(f', {text}' for name, text in names.items() if shape.get(name))
        groups.setdefault(title, []).append(cell)
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


def add_common_arguments(add: Callable) -> None:
    """The options that every benchmark takes; add is parser.add_argument."""
    add('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    add('--quick', action='store_true', help='few cells, 3 rounds; on a CPU tiny problems')
    add('--rounds', type=int, help='per cell (5; 3 with --quick)')
    add('--target-ms', type=float, default=8.0,
        help='work in a turn; 2000 shows the speed under sustained load')
    add('--dtype', choices=('bf16', 'fp16'), default='bf16')
    add('--commit', help='of the build that is measured, where git cannot tell')
    add('--out', type=pathlib.Path, default=RESULTS, help='folder of the JSON and PNG files')
