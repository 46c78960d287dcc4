"""One attention problem: flash_attn_func next to each backend of PyTorch's SDPA.

    python -m flash_attn3.bench --batch 2 --seqlen 4096 --heads 16 --heads-k 4 --causal
    python -m flash_attn3.bench --seqlen 8192 --causal --pass both

The forward, the backward alone, or a table of each.
"""
from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

import torch

from .contenders import NAMES, OURS, measure
from .problem import DTYPES, Shape
from .timing import Timer

PASSES = {'forward': (False,), 'backward': (True,), 'both': (False, True)}   # values of backward


def table(results: Sequence[dict]) -> str:
    """The results of measure() as text. 'speed': that of flash_attn3 over that of the row."""
    rows = [['', 'us', 'TFLOP/s', 'of peak', 'spread', 'MHz', 'host us', 'error', 'speed']]
    own = next((r for r in results if r['name'] == OURS and 'ms' in r), None)
    for r in results:
        if 'na' in r:
            rows.append([r['name'], 'n/a', r['na']])
            continue
        error = f"{r['error']:.1e}{'!' if r['wrong'] else ''}"
        rows.append([r['name'], f"{r['ms'] * 1e3:.1f}", f"{r['tflops']:.4g}",
                     _text(r['peak_share'], '.0%'), f"{r['spread']:.1%}",
                     _text(r['clock_mhz'], '.0f'), _text(r['host_us'], '.1f'), error,
                     _text(own and r['ms'] / own['ms'], '.2f')])
    return _aligned(rows)


def _text(value: float | None, spec: str) -> str:
    return '' if value is None else format(value, spec)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side; a row of three cells is a name, n/a and a reason of any length."""
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[i]) for row in full) for i in range(len(rows[0]))]
    widths[0] = max(len(row[0]) for row in rows)
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append('  '.join(cells[:2] + [row[2]] if len(row) == 3 else cells).rstrip())
    return '\n'.join(lines)


def device_line(device: torch.device) -> str:
    where = torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'
    return f'{where}, torch {torch.__version__}, CUDA {torch.version.cuda or "none"}'


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='python -m flash_attn3.bench',
        description='Time flash_attn3 and the backends of PyTorch SDPA on one shape.')
    parser.add_argument('--batch', type=int, default=1)
    parser.add_argument('--seqlen', '--seqlen-q', type=int, default=4096, help='of the queries')
    parser.add_argument('--seqlen-k', type=int, help='of the keys (default: as --seqlen)')
    parser.add_argument('--heads', type=int, default=16)
    parser.add_argument('--heads-k', type=int, help='KV heads (default: as --heads)')
    parser.add_argument('--head-dim', type=int, default=128)
    parser.add_argument('--head-dim-v', type=int, default=0, help='of the values (default: as q)')
    parser.add_argument('--causal', action='store_true')
    parser.add_argument('--window', type=int, nargs=2, default=(-1, -1), metavar=('LEFT', 'RIGHT'),
                        help='-1: no limit')
    parser.add_argument('--sinks', action='store_true')
    parser.add_argument('--dtype', choices=sorted(DTYPES), default='bf16')
    parser.add_argument('--pass', choices=tuple(PASSES), default='forward', dest='passes',
                        help='backward: the gradients alone; both: a table of each')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--target-ms', type=float, default=8.0,
                        help='work in a turn; 2000 shows the speed under sustained load')
    parser.add_argument('--only', help=f'comma separated, of: {", ".join(NAMES)}')
    parser.add_argument('--json', type=pathlib.Path, help='also write the results there')
    return parser.parse_args(argv)


def shape_of(args: argparse.Namespace, backward: bool = False) -> Shape:
    return Shape(args.batch, args.seqlen, args.seqlen_k or args.seqlen, args.heads,
                 args.heads_k or args.heads, args.head_dim, args.causal, args.dtype, backward,
                 args.head_dim_v, *args.window, args.sinks)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device, records = torch.device(args.device), []
    names = args.only.split(',') if args.only else NAMES
    if unknown := [name for name in names if name not in NAMES]:
        print(f'flash_attn3.bench: expected --only from {", ".join(NAMES)}, '
              f'got {", ".join(unknown)}', file=sys.stderr)
        return 2
    print(device_line(device))
    Timer(device).spin(0.3)
    for backward in PASSES[args.passes]:
        shape = shape_of(args, backward)
        print(f'{shape.label()}: {shape.flops / 1e9:.2f} GFLOP, '
              f'inputs {shape.input_bytes / 1e6:.1f} MB')
        results = measure(shape, device, names, args.rounds, args.target_ms)
        print(table(results))
        records.append(dict(device=device_line(device), shape=shape.as_dict(), flops=shape.flops,
                            results=results))
    if args.json:
        record = records if len(records) > 1 else records[0]
        args.json.write_text(json.dumps(record, indent=1, default=float))
    failed = [r for record in records for r in record['results']
              if r['name'] == OURS and ('na' in r or r['wrong'])]
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
