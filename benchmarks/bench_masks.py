"""Time of calls with an AttentionMask over the share of pairs that it shows: table, JSON, PNG.

    python -m benchmarks.bench_masks                        # on a Hopper GPU, about a minute
    python -m benchmarks.bench_masks --device cpu --quick   # tries the machinery

Blocks of 128 and of 64, random for each head and as many in each row, and intervals, each query's
as long. The forward, and the backward alone. `full` is attention without a mask: a mask that costs
nothing takes its time multiplied by the density. TFLOP/s and ratios count visible pairs; a ratio is
the speed of a mask over that of `full`. Contenders take turns, as flash_attn3/bench says. The first
rows of the first head of out and dq are compared with those in float32.
"""
from __future__ import annotations

import argparse
import functools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import harness
from flash_attn3 import AttentionMask, flash_attn_func
from flash_attn3.bench import WRONG, Contender, Shape, Timer, interleaved, make_inputs

FULL = 'full'
KINDS = {'blocks of 128': 128, 'blocks of 64': 64, 'intervals': 0}
DENSITIES = 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0
CHECKED_ROWS = 256
HEADS, HEAD_DIM = 16, 128


class Shown(NamedTuple):
    """A mask, the share of pairs that it shows, and the keys that the first rows of head 0 see."""
    mask: AttentionMask
    density: float
    visible: Tensor    # (rows, seqlen) bool


def shown_blocks(size: int, density: float, shape: Shape, device: torch.device) -> Shown:
    count = -(-shape.seqlen_q // size)
    most = max(1, round(density * count))
    generator = torch.Generator(device).manual_seed(0)
    drawn = torch.rand(shape.heads, count, count, generator=generator, device=device)
    blocks = drawn.argsort(-1).argsort(-1) < most
    row, key = (torch.arange(x, device=device) // size for x in (
        min(CHECKED_ROWS, shape.seqlen_q), shape.seqlen_k))
    return Shown(AttentionMask.from_blocks(blocks, size, size), most / count,
                 blocks[0, row][:, key])


def shown_intervals(density: float, shape: Shape, device: torch.device) -> Shown:
    row = torch.arange(shape.seqlen_q, dtype=torch.int32, device=device)
    width = max(1, round(density * shape.seqlen_k))
    begin = (row - width // 2).clamp(0, shape.seqlen_k - width)
    intervals = torch.stack([begin, begin + width], -1)[:, None]
    key, ends = torch.arange(shape.seqlen_k, device=device), intervals[:CHECKED_ROWS]
    return Shown(AttentionMask.from_intervals(intervals), width / shape.seqlen_k,
                 (ends[:, :, 0] <= key) & (key < ends[:, :, 1]))


def error_of(shown: Shown, result: Tensor | tuple[Tensor, ...], inputs: Sequence[Tensor]) -> float:
    """The relative error of the first rows of out, or of dq."""
    q, k, v, *dout = (x[0, :, 0].float() for x in inputs)
    rows = slice(len(shown.visible))
    scores = (q[rows] @ k.T * q.size(-1) ** -0.5).masked_fill(~shown.visible, -torch.inf)
    p = scores.softmax(-1)
    wanted, got = p @ v, result
    if dout:
        own = dout[0][rows]
        delta = (own * wanted).sum(-1, keepdim=True)
        wanted, got = (own @ v.T - delta) * p @ k * q.size(-1) ** -0.5, result[0]
    return ((got[0, rows, 0].float() - wanted).norm() / wanted.norm()).item()


def measure(shape: Shape, density: float, device: torch.device, rounds: int,
            target_ms: float) -> dict:
    """The results of all kinds with about this density, and of `full`."""
    shown = {name: shown_blocks(size, density, shape, device) if size else
             shown_intervals(density, shape, device) for name, size in KINDS.items()}
    everything = torch.ones(1, shape.seqlen_k, dtype=torch.bool, device=device)
    shown[FULL] = Shown(None, 1.0, everything)
    sets = make_inputs(shape, device)
    contenders = {name: Contender(name, functools.partial(flash_attn_func, mask=one.mask))
                  for name, one in shown.items()}
    errors = {name: error_of(shown[name], one.prepare(sets[0])(), sets[0])
              for name, one in contenders.items()}
    calls = {name: one.rotating(sets) for name, one in contenders.items()}
    missing: dict[str, str] = {}
    figures = interleaved(calls, Timer(device, target_ms), rounds,
                          lambda name, error: missing.update({name: str(error)}))
    results = [dict(name=name, na=missing[name]) if name in missing else
               dict(name=name, density=one.density, ms=figures[name].ms,
                    spread=figures[name].spread,
                    tflops=shape.flops * one.density / figures[name].ms / 1e9,
                    error=errors[name], wrong=not errors[name] < WRONG)
               for name, one in shown.items()]
    ratios = {name: figures[FULL].ms * shown[name].density / figures[name].ms for name in KINDS
              if name in figures and FULL in figures}
    return dict(cell=dict(backward=shape.backward, density=density),
                results=results, ratios=ratios)


def plot(record: dict, path: pathlib.Path) -> None:
    """Time over density: the forward on the left, the backward on the right."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout='constrained')
    for axis, backward in zip(axes, (False, True)):
        cells = [cell for cell in record['cells'] if cell['cell']['backward'] == backward]
        for name in KINDS:
            points = [(one['density'], one['ms']) for cell in cells
                      if (one := harness.measured(cell, name))]
            axis.plot(*zip(*sorted(points)), marker='o', markersize=3, label=name)
        full = [one['ms'] for cell in cells if (one := harness.measured(cell, FULL))]
        axis.plot((0, 1), (0, sum(full) / len(full)), '--', color='grey',
                  label='full attention x density')
        axis.set(title='backward' if backward else 'forward', xlabel='visible pairs / all pairs',
                 ylabel='ms', xlim=(0, None), ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    sizes = record['settings']
    figure.suptitle(f"{sizes['seqlen']} tokens, {sizes['heads']} heads of {sizes['head_dim']}, "
                    f"{record['environment']['device']}, commit {record['commit']}", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.timing_parser('benchmarks.bench_masks', __doc__)
    parser.add_argument('--seqlen', type=int, help='default: 32768, with --quick 8192')
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device, rounds = torch.device(args.device), harness.rounds_of(args)
    is_tiny = device.type == 'cpu'
    heads, head_dim = (2, 16) if is_tiny else (HEADS, HEAD_DIM)
    seqlen = args.seqlen or (200 if is_tiny else 8192 if args.quick else 32768)
    record = harness.new_record('masks', device, args.commit,
                                dict(rounds=rounds, target_ms=args.target_ms, dtype=args.dtype,
                                     seqlen=seqlen, heads=heads, head_dim=head_dim))
    Timer(device).spin(0.3)
    for backward in (False, True):
        shape = Shape(1, seqlen, seqlen, heads, heads, head_dim, dtype=args.dtype,
                      backward=backward)
        for density in DENSITIES[2::3] if args.quick else DENSITIES:
            found = measure(shape, density, device, rounds, args.target_ms)
            record['cells'].append(found)
            print('backward' if backward else 'forward', f'{density:.1%}:',
                  *(f"{one['name']} {harness.figure_text(one)}," for one in found['results']),
                  *(f'{ratio:.2f} x' for ratio in found['ratios'].values()), flush=True)
    for backward, name in ((False, 'forward'), (True, 'backward')):
        for kind in KINDS:
            ratios = [cell['ratios'][kind] for cell in record['cells']
                      if cell['cell']['backward'] == backward and kind in cell['ratios']]
            record['summary'][f'{name}, {kind}'] = harness.ratios_summary(ratios)
    path = harness.save(record, args.out)
    plot(record, path.with_suffix('.png'))
    print(record['summary'], path, sep='\n')
    return int(any(not harness.measured(cell, name) for cell in record['cells'] for name in KINDS))


if __name__ == '__main__':
    raise SystemExit(main())
