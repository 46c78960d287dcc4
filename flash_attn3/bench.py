"""One attention problem: flash_attn_func beside each backend of PyTorch's SDPA.

    python -m flash_attn3.bench --batch 2 --seqlen 4096 --heads 16 --heads-k 4 --causal
    python -m flash_attn3.bench --seqlen 8192 --causal --pass both

The forward, the backward alone, or a table of each. measure() is what benchmarks/bench_forward.py
calls too.
"""
from __future__ import annotations

import argparse
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from flash_attn3 import _measure
from flash_attn3._measure import Contender, Figure, Shape, Timer

OURS = 'flash_attn3'
CPU = torch.device('cpu')
SDPA_BACKENDS = {
    'sdpa flash': SDPBackend.FLASH_ATTENTION,
    'sdpa cudnn': SDPBackend.CUDNN_ATTENTION,
    'sdpa efficient': SDPBackend.EFFICIENT_ATTENTION,
    'sdpa math': SDPBackend.MATH,
}
PADDED = f'{OURS} padded'                # packed sequences as a dense batch
NAMES = (OURS, 'sdpa', *SDPA_BACKENDS)   # 'sdpa': the backend that PyTorch picks
MATH_BYTES = 1 << 30                     # of scores; above, 'sdpa math' is left out
PASSES = {'forward': (False,), 'backward': (True,), 'both': (False, True)}   # values of backward


def ours(shape: Shape, device: torch.device = CPU) -> Contender:
    import flash_attn3
    return Contender(OURS, _measure.function_of(flash_attn3, shape, device))


def padded(one: Contender, shape: Shape, device: torch.device) -> Contender:
    """Packed sequences as a batch of the longest length, which one of dense tensors takes.

    Under a causal mask no query sees the rows that fill a sequence up."""
    if not shape.causal:
        raise RuntimeError('would need a mask of the lengths')
    lengths = torch.tensor(shape.lengths, device=device)
    is_row = torch.arange(max(shape.lengths), device=device) < lengths[:, None]

    def arrange(x: torch.Tensor) -> torch.Tensor:
        filled = x.new_zeros((*is_row.shape, *x.shape[1:]))
        filled[is_row] = x
        return filled

    return replace(one, arrange=arrange, restore=lambda x: x[is_row])


def _lower_right(shape: Shape) -> bool:
    """SDPA's is_causal is aligned top-left, ours bottom-right: here they differ."""
    return shape.causal and shape.seqlen_q not in (1, shape.seqlen_k)


def sdpa(name: str, shape: Shape, device: torch.device = CPU) -> Contender:
    """SDPA on the same (batch, seqlen, heads, head_dim) tensors, as transposed views."""
    options: dict = dict(enable_gqa=shape.heads != shape.heads_k)
    if shape.has_window:
        rows = torch.arange(shape.seqlen_q, device=device)
        hidden = _measure.rules_of(shape, device).hidden(rows, shape.seqlen_q, shape.seqlen_k)
        options['attn_mask'] = ~hidden
    elif _lower_right(shape):
        options['attn_mask'] = causal_lower_right(shape.seqlen_q, shape.seqlen_k)
    elif shape.seqlen_q > 1:
        options['is_causal'] = shape.causal

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    if name == 'sdpa':
        return Contender(name, call)
    return Contender(name, call, functools.partial(sdpa_kernel, [SDPA_BACKENDS[name]]))


def contender(name: str, shape: Shape, device: torch.device = CPU) -> Contender:
    """Raises RuntimeError where a contender is left out on purpose."""
    if name == OURS:
        return ours(shape, device)
    if name == PADDED:
        dense = ours(replace(shape, lengths=()), device)
        return padded(replace(dense, name=PADDED), shape, device)
    if shape.sinks:
        raise RuntimeError('has no sinks')
    if _lower_right(shape) and not shape.has_window and name == 'sdpa cudnn':
        raise RuntimeError('has no bottom-right causal mask in PyTorch')
    if name == 'sdpa math':
        score_bytes = 4 * shape.batch * shape.heads * shape.seqlen_q * shape.seqlen_k
        if score_bytes > MATH_BYTES:
            raise RuntimeError(f'its score matrix takes {score_bytes / 2**30:.1f} GiB')
    one = sdpa(name, shape, device)
    return padded(one, shape, device) if shape.lengths else one


def reason(error: Exception) -> str:
    """One line, for a table."""
    if isinstance(error, torch.OutOfMemoryError):
        return 'out of memory'
    if 'No viable backend' in str(error):
        return 'does not take this problem'
    lines = str(error).strip().splitlines() or ['']
    kind = '' if type(error) is RuntimeError else f'{type(error).__name__}: '
    return (kind + lines[0])[:120]


def measure(shape: Shape, device: torch.device, names: Sequence[str] = NAMES, rounds: int = 5,
            target_ms: float = 8.0) -> list[dict]:
    """Time the contenders of a problem against each other. One dict each: the keys of result(), or
    where one does not run, 'na' with the reason."""
    timer = Timer(device, target_ms)
    left_out: dict[str, str] = {}
    calls: dict[str, Callable] = {}
    checks: dict[str, tuple[float, float | None]] = {}
    with torch.no_grad():
        sets = _measure.make_inputs(shape, device)
        for name in names:
            try:
                calls[name], checks[name] = _prepare(name, shape, sets, timer)
            except Exception as failure:
                left_out[name] = reason(failure)
        figures = _measure.interleaved(
            calls, timer, rounds, lambda name, error: left_out.update({name: reason(error)}))
    del sets, calls
    if device.type == 'cuda':
        torch.cuda.empty_cache()
    return [dict(name=name, na=left_out[name]) if name in left_out
            else result(shape, device, name, figures[name], *checks[name])
            for name in names]


def _prepare(name: str, shape: Shape, sets: Sequence[tuple[torch.Tensor, ...]],
             timer: Timer) -> tuple[Callable, tuple[float, float | None]]:
    """The call to time, its error and its host time."""
    one = contender(name, shape, sets[0][0].device)
    with one.context():
        result = one.restored(one.prepare(sets[0])())
        error = _measure.error_of(shape, result, sets[0])
        call = one.rotating(sets)
        host_us = timer.host_us(call)

    def in_context() -> _measure.Result:
        with one.context():
            return call()
    return in_context, (error, host_us)


def result(shape: Shape, device: torch.device, name: str, figure: Figure, error: float,
           host_us: float | None) -> dict:
    tflops = shape.flops / figure.ms / 1e9
    return dict(name=name, ms=figure.ms, spread=figure.spread, rounds=figure.rounds, tflops=tflops,
                clock_mhz=figure.clock_mhz,
                peak_share=_measure.peak_share(tflops, figure.clock_mhz, device), host_us=host_us,
                error=error, wrong=not error < _measure.WRONG)


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
        description='Time flash_attn3 beside the backends of PyTorch SDPA on one shape.')
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
    parser.add_argument('--dtype', choices=sorted(_measure.DTYPES), default='bf16')
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
