"""quantize_fp8 beside a copy on the device that moves as many bytes.

    python -m benchmarks.bench_quantize                        # on a Hopper GPU, seconds
    python -m benchmarks.bench_quantize --device cpu --quick   # tries the machinery

Both take turns, as flash_attn3/_measure.py says; a figure is the bytes that have to be read and
written, each once, over time. Scales of more rows than the GPU holds read the input twice, and are
counted once. The JSON file has GB/s and the share of the copy's.
"""
from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from benchmarks import harness
from flash_attn3 import quantize_fp8
from flash_attn3._measure import DTYPES, ROTATED_BYTES, Figure, Timer

TOKENS, WIDTH = 16384, 2048    # WIDTH: heads * head_dim
# Copies are of whole ones: 50,333,024 bytes took 31 us, 50,335,744 bytes 28 (H200, 2026-11-22).
COPY_STEP = 4096
SEQUENCES = 32    # of packed tensors, of two lengths in turns


class Cell(NamedTuple):
    head_dim: int
    block: int | str
    rotate: bool = True
    packed: bool = False
    tokens: int = TOKENS

    def label(self) -> str:
        parts = [f'd{self.head_dim}', f'{self.tokens} tokens', f'block {self.block}',
                 'rotated' if self.rotate else 'plain', *['packed'] * self.packed]
        return ', '.join(parts)


CELLS = (*(Cell(dim, block) for dim in (64, 128, 256) for block in (32, 64)),
         Cell(96, 32), Cell(192, 32), Cell(128, 128),
         *(Cell(dim, 384) for dim in (64, 96, 128, 192, 256)), Cell(128, 384, rotate=False),
         Cell(128, 384, packed=True),
         Cell(128, 32, rotate=False), Cell(128, 32, packed=True), Cell(128, 64, packed=True),
         Cell(128, 32, tokens=65536), Cell(128, 32, tokens=1024),
         *(Cell(dim, 'head') for dim in (64, 128, 256)), Cell(128, 'head', tokens=65536),
         Cell(128, 'head', packed=True), Cell(128, 'tensor'))
QUICK_CELLS = (Cell(128, 32, tokens=256), Cell(128, 'head', packed=True, tokens=256))


def input_of(cell: Cell, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    heads = max(1, WIDTH // cell.head_dim)
    x = torch.randn(cell.tokens, heads, cell.head_dim, device=device, dtype=dtype)
    return x if cell.packed else x[None]


def options_of(cell: Cell, device: torch.device) -> dict:
    options: dict = dict(block=cell.block, rotate=cell.rotate)
    if cell.packed:
        short = cell.tokens // SEQUENCES // 4
        lengths = [short, 2 * cell.tokens // SEQUENCES - short] * (SEQUENCES // 2)
        options['cu_seqlens'] = torch.tensor([0, *itertools.accumulate(lengths)],
                                             dtype=torch.int32, device=device)
    return options


def bytes_of(x: torch.Tensor, options: dict) -> int:
    return x.nbytes + sum(y.nbytes for y in quantize_fp8(x, **options))


def measure(cell: Cell, device: torch.device, rounds: int, target_ms: float, dtype: str) -> dict:
    """Milliseconds, GB/s and spread of both, and the share."""
    options = options_of(cell, device)
    first = input_of(cell, DTYPES[dtype], device)
    size = bytes_of(first, options)
    sets = [first]
    if device.type == 'cuda':
        sets += [torch.randn_like(first) for _ in range(ROTATED_BYTES // size + 1)]
    half = -(-size // 2 // COPY_STEP) * COPY_STEP
    copies = [(torch.empty(half, dtype=torch.uint8, device=device),
               torch.randint(256, (half,), dtype=torch.uint8, device=device)) for _ in sets]
    calls = {'quantize_fp8': in_turn([functools.partial(quantize_fp8, x, **options)
                                      for x in sets]),
             'copy': in_turn([functools.partial(target.copy_, source)
                              for target, source in copies])}
    timer = Timer(device, target_ms)
    ready = {name: (call, *timer.calibrate(call)) for name, call in calls.items()}
    turns = {name: [] for name in calls}
    for _ in range(rounds):
        for name, arguments in ready.items():
            turns[name].append(timer.turn(*arguments))
    figures = {name: Figure.of(found) for name, found in turns.items()}
    results = [dict(name=name, ms=figure.ms, spread=figure.spread, rounds=figure.rounds,
                    gb_per_s=size / figure.ms / 1e6) for name, figure in figures.items()]
    return dict(cell=cell._asdict(), bytes=size, results=results,
                share=figures['copy'].ms / figures['quantize_fp8'].ms)


def in_turn(calls: Sequence[Callable]) -> Callable:
    following = itertools.cycle(calls)
    return lambda: next(following)()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.bench_quantize',
                                     description=__doc__.splitlines()[0])
    harness.add_common_arguments(parser.add_argument)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    device = torch.device(args.device)
    rounds = args.rounds or (3 if args.quick else 5)
    record = harness.new_record('quantize', device, args.commit,
                                dict(rounds=rounds, target_ms=args.target_ms, dtype=args.dtype))
    Timer(device).spin(0.3)
    for cell in QUICK_CELLS if args.quick else CELLS:
        found = measure(cell, device, rounds, args.target_ms, args.dtype)
        record['cells'].append(found)
        own, copy = found['results']
        print(f"{cell.label():45} {own['ms'] * 1e3:7.1f} us {own['gb_per_s']:6.0f} GB/s, copy "
              f"{copy['gb_per_s']:6.0f} GB/s: {found['share']:.0%}"
              f"{' ~' if own['spread'] > harness.NOISY else ''}", flush=True)
    print(harness.save(record, args.out))


if __name__ == '__main__':
    main()
