"""quantize_fp8 against a copy of the same number of bytes on the device.

    python -m benchmarks.bench_quantize                        # on a Hopper GPU, seconds
    python -m benchmarks.bench_quantize --device cpu --quick   # tries the machinery

Both take turns, as flash_attn3/bench says; a figure is the bytes that have to be read and written,
each once, over time. With scales by head or tensor the input is read twice, which counts once. The
JSON file has GB/s and the share of the copy's.
"""
from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import torch

from benchmarks import harness, shapes
from benchmarks.quantize_cells import Cell, bytes_of, in_turn, make_inputs, options_of
from flash_attn3 import quantize_fp8
from flash_attn3.bench import DTYPES, ROTATED_BYTES, Figure, Timer

# Copies have a multiple of these bytes: 50,333,024 bytes took 31 us, 50,335,744 (a multiple) 28 us
# (H200, 2026-11-22).
COPY_STEP = 4096
MIXED = shapes.mixed_lengths()
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
ROLES = ((64, True), (384, True), (384, False))    # block and rotation of q, k and v of attention

CELLS = (*(Cell(dim, *role, lengths) for lengths in ((), MIXED)
           for dim in HEAD_DIMS for role in ROLES),
         Cell(128, 384, lengths=(64,) * 256), Cell(128, 384, tokens=65536), Cell(128, 2048),
         Cell(128, 'head'), Cell(128, 'tensor'))
QUICK_CELLS = (Cell(128, 384), Cell(128, 384, lengths=MIXED))
TINY_CELLS = (Cell(128, 32, tokens=256), Cell(128, 'head', lengths=(8, 120, 128)))


def select(quick: bool, cpu: bool, dtype: str) -> list[Cell]:
    """The cells of a run."""
    cells = CELLS if not quick else TINY_CELLS if cpu else QUICK_CELLS
    name = str(DTYPES[dtype]).removeprefix('torch.')
    return [cell._replace(dtype=name) for cell in cells]


def measure(cell: Cell, device: torch.device, rounds: int, target_ms: float) -> dict:
    """The results of quantize_fp8 and the copy, and the share of the copy's speed."""
    options = options_of(cell, device)
    sets = make_inputs(cell, device, ROTATED_BYTES)
    size = bytes_of(sets[0], quantize_fp8(sets[0], **options))
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
    results = [dict(name=name, ms=figure.ms, spread=figure.spread,
                    gb_per_s=size / figure.ms / 1e6) for name, figure in figures.items()]
    return dict(cell=cell.as_dict(), bytes=size, results=results,
                share=figures['copy'].ms / figures['quantize_fp8'].ms)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.timing_parser('benchmarks.bench_quantize', __doc__)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    device, rounds = torch.device(args.device), harness.rounds_of(args)
    record = harness.new_record('quantize', device, args.commit,
                                dict(rounds=rounds, target_ms=args.target_ms, dtype=args.dtype))
    Timer(device).spin(0.3)
    for cell in select(args.quick, device.type == 'cpu', args.dtype):
        found = measure(cell, device, rounds, args.target_ms)
        record['cells'].append(found)
        own, copy = found['results']
        print(f"{cell.label():58} {own['ms'] * 1e3:7.1f} us {own['gb_per_s']:6.0f} GB/s, copy "
              f"{copy['gb_per_s']:6.0f} GB/s: {found['share']:.0%}"
              f"{' ~' if own['spread'] > harness.NOISY else ''}", flush=True)
    print(harness.save(record, args.out))


if __name__ == '__main__':
    main()
