"""The FP8 forward against our own 16-bit forward.

    python -m benchmarks.bench_fp8                        # on a Hopper GPU, half a minute
    python -m benchmarks.bench_fp8 --device cpu --quick   # tries the machinery, seconds

Contenders of a cell take turns; see flash_attn3/bench for what a figure is. Those named e4m3
take tensors that were quantised before the clock runs; fp8_func takes the 16-bit ones, and rotates
and quantises them in its time. Each is checked against fp32 attention of the 16-bit tensors once.
The share of the peak is of the FP8 peak but for the first contender. The JSON file is written after
every cell; a ratio in it is the time of the 16-bit forward over that of another contender.
"""
from __future__ import annotations

import argparse
import functools
import pathlib
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

import flash_attn3
from benchmarks import harness, shapes
from benchmarks.fp8_accuracy import BLOCKS
from benchmarks.quantize_cells import in_turn
from flash_attn3 import (bench, flash_attn_fp8_func, flash_attn_varlen_fp8_func,
                         quantize_fp8)
from flash_attn3.bench import DTYPES, Shape, Timer

BY_HEAD, BY_BLOCK, PROMOTE, QUANTIZED = 'e4m3', 'e4m3 by block', 'e4m3 promote', 'fp8_func'
FP8 = (BY_HEAD, BY_BLOCK, PROMOTE, QUANTIZED)    # and the 16-bit forward, named by its dtype
WRONG = 0.15        # relative error of FP8 that no rounding explains; normal data gives 0.05
HOST_CALLS = 20
SEQUENCES, SHORTEST, LONGEST = 24, 64, 5361    # in packed tensors

Inputs = tuple[Tensor, Tensor, Tensor]    # q, k and v


def ragged_lengths(count: int = SEQUENCES, shortest: int = SHORTEST,
                   longest: int = LONGEST) -> tuple[int, ...]:
    """Random lengths from shortest to longest, the same on every call; one is `longest`."""
    source = random.Random(0)
    lengths = [longest, *(source.randint(shortest, longest) for _ in range(count - 1))]
    source.shuffle(lengths)
    return tuple(lengths)


def others(dtype: str) -> list[Shape]:
    """Grouped heads, packed sequences, a window, latent attention; all causal."""
    grouped = [Shape(shapes.TOKENS // seqlen, seqlen, seqlen, 32, 8, 128, True, dtype)
               for seqlen in (2048, 8192)]
    window = replace(shapes.square(128, 16384, True, dtype=dtype), window_left=1024, window_right=0)
    latent = Shape(2, 8192, 8192, 16, 16, 192, True, dtype, head_dim_v=128)
    return [*grouped, shapes.packed_of(ragged_lengths(), 128, True, dtype), window, latent]


def tiny(dtype: str) -> list[Shape]:
    return [Shape(1, 128, 128, 4, 2, 64, True, dtype),
            Shape(1, 96, 96, 2, 2, 48, True, dtype, head_dim_v=32),
            replace(shapes.square(64, 128, True, 128, 128, dtype), window_left=32, window_right=0),
            Shape(3, 100, 100, 2, 2, 64, True, dtype, lengths=ragged_lengths(3, 8, 100))]


def select(quick: bool, cpu: bool, dtype: str) -> list[Shape]:
    """The shapes of a run. --quick keeps three lengths at one head dim; on a CPU it is `tiny`."""
    if quick:
        return tiny(dtype) if cpu else shapes.forward((128,), (1024, 4096, 16384), dtype)
    return [*shapes.forward((64,), (1024, 4096, 16384), dtype),
            *shapes.forward((128,), shapes.SEQLENS, dtype),
            *shapes.forward((256,), (1024, 4096, 16384), dtype), *others(dtype)]


def make_sets(shape: Shape, device: torch.device) -> list[Inputs]:
    """Twice as many sets as for 16 bits: the e4m3 tensors, half as large, must exceed L2 too."""
    return [inputs for seed in range(2) for inputs in bench.make_inputs(shape, device, seed)]


def quantized(inputs: Inputs, granularity: str, lists: dict[str, Tensor]) -> tuple[Inputs, dict]:
    """q, k and v in e4m3, and the descale arguments of attention."""
    q, k, v = inputs
    block_q, block_kv = BLOCKS[granularity]
    pairs = [quantize_fp8(q, block=block_q, group=q.size(-2) // k.size(-2), **lists),
             *(quantize_fp8(x, block=block_kv, **lists) for x in (k, v))]
    values, scales = zip(*pairs)
    return values, dict(zip(('q_descale', 'k_descale', 'v_descale'), scales))


def make_calls(shape: Shape, sets: Sequence[Inputs]) -> dict[str, list[Callable[[], Tensor]]]:
    """By contender: a call for each set of inputs."""
    attention = bench.function_of(flash_attn3, shape, sets[0][0].device)
    options = attention.keywords
    lists = {'cu_seqlens': options['cu_seqlens_q']} if shape.lengths else {}
    fp8_func = flash_attn_varlen_fp8_func if shape.lengths else flash_attn_fp8_func
    names = (shape.dtype, *FP8)
    calls: dict[str, list[Callable[[], Tensor]]] = {name: [] for name in names}
    for inputs in sets:
        by_head, head_scales = quantized(inputs, 'head', lists)
        by_block, block_scales = quantized(inputs, 'block', lists)
        on_e4m3 = functools.partial(attention, out_dtype=DTYPES[shape.dtype])
        timed = (functools.partial(attention, *inputs),
                 functools.partial(on_e4m3, *by_head, **head_scales),
                 functools.partial(on_e4m3, *by_block, **block_scales),
                 functools.partial(on_e4m3, *by_head, **head_scales, fp8_accum='promote'),
                 functools.partial(fp8_func, *inputs, **options))
        for name, call in zip(names, timed):
            calls[name].append(call)
    return calls


@torch.no_grad()
def measure(shape: Shape, device: torch.device, rounds: int, target_ms: float) -> list[dict]:
    """One result a contender, the 16-bit forward first; the keys are those of bench.measure."""
    timer, sets = Timer(device, target_ms), make_sets(shape, device)
    ready: dict[str, Callable[[], Tensor]] = {}
    reasons: dict[str, str] = {}
    checks: dict[str, tuple[float, float | None]] = {}
    names = (shape.dtype, *FP8)
    for name, calls in make_calls(shape, sets).items():
        try:
            error = bench.error_of(shape, calls[0](), sets[0])
            ready[name] = in_turn(calls)
            checks[name] = error, timer.host_us(ready[name], HOST_CALLS)
        except Exception as failure:
            ready.pop(name, None)
            reasons[name] = bench.reason(failure)
    figures = bench.interleaved(
        ready, timer, rounds, lambda name, error: reasons.update({name: bench.reason(error)}))
    return [dict(name=name, na=reasons[name]) if name in reasons
            else result_of(bench.result(shape, device, name, figures[name], *checks[name]))
            for name in names]


def result_of(result: dict) -> dict:
    """The result with the peak of FP8, which is twice as high, and the error that FP8 may have."""
    if result['name'] not in FP8:
        return result
    share = result['peak_share']
    return result | dict(wrong=not result['error'] < WRONG,
                         peak_share=None if share is None else share / 2)


def ratios_of(cell: dict) -> dict[str, float]:
    """Speed of each FP8 contender over that of the 16-bit forward, where both are right."""
    base = harness.measured(cell, Shape(**cell['shape']).dtype)
    found = {name: harness.measured(cell, name) for name in FP8}
    return {name: base['ms'] / result['ms'] for name, result in found.items() if base and result}


def summarize(cells: Sequence[dict]) -> dict:
    """By contender: the number of its ratios, their mean, worst and best."""
    return {name: harness.ratios_summary([cell['ratios'][name] for cell in cells
                                          if name in cell['ratios']]) for name in FP8}


def failures(cells: Sequence[dict]) -> list[str]:
    return [f"{Shape(**cell['shape']).label()}: {result['name']}: {result.get('na', 'wrong')}"
            for cell in cells for result in cell['results'] if result.get('wrong', True)]


def line_of(cell: dict) -> str:
    """The shape, and for each contender TFLOP/s and in brackets the ratio."""
    parts = [f"{Shape(**cell['shape']).label():40}"]
    for result in cell['results']:
        ratio = cell['ratios'].get(result['name'])
        parts.append(f"{result['name']} {harness.figure_text(result)}"
                     + (f' ({ratio:.2f})' if ratio else ''))
    return '  '.join(parts)


def run(cells: Sequence[Shape], args: argparse.Namespace) -> tuple[dict, pathlib.Path]:
    """The record and its file, which is whole after every cell."""
    device, rounds = torch.device(args.device), harness.rounds_of(args)
    settings = dict(rounds=rounds, target_ms=args.target_ms, contenders=[args.dtype, *FP8])
    record = harness.new_record('fp8', device, args.commit, settings)
    Timer(device).spin(0.3)
    with harness.Monitor(device) as monitor:
        for shape in cells:
            monitor.clear()
            cell = dict(shape=harness.fields_of(shape), flops=shape.flops,
                        results=harness.kept(measure(shape, device, rounds, args.target_ms)))
            cell['ratios'] = ratios_of(cell)
            record['cells'].append(cell)
            record['summary'] = summarize(record['cells'])
            path = harness.save(record, args.out)
            print(line_of(cell), monitor.text(), sep='  ', flush=True)
    return record, path


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.timing_parser('benchmarks.bench_fp8', __doc__)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    record, path = run(select(args.quick, args.device == 'cpu', args.dtype), args)
    for name, found in record['summary'].items():
        if found['compared']:
            print(f"{name} / {args.dtype}: geometric mean {found['geometric_mean']:.3f} over "
                  f"{found['compared']} cells, {found['worst']:.3f} to {found['best']:.3f}")
    failed = failures(record['cells'])
    for text in failed:
        print(text, file=sys.stderr)
    print(path)
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
