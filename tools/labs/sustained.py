"""Attention under sustained load: speed and energy of calls that run for seconds, next to turns of
milliseconds.

    python -m tools.labs.sustained                         # on a Hopper GPU, about two minutes
    python -m tools.labs.sustained --device cpu --quick    # tries the machinery, seconds

Forward and backward in 16 bits, and the forward on e4m3 tensors with scales by head, run alone, one
after the other: short turns as in the other benchmarks, then --seconds without a pause, whose first
quarter heats the chip up and does not count. Energy is that of the whole board, by its own counter
(NVML). The JSON file is written after every cell.
"""
from __future__ import annotations

import argparse
import ctypes
import functools
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

import flash_attn3
from benchmarks import bench_fp8, harness, shapes
from benchmarks.quantize_cells import in_turn
from flash_attn3 import bench
from flash_attn3.bench import DTYPES, Figure, Shape, Timer

HEAD_DIMS, SEQLENS = (64, 128, 256), (4096, 16384)
FORWARD, BACKWARD, FP8 = KINDS = ('forward', 'backward', 'FP8 forward')
BATCH_MS = 20.0       # work that is queued at once
WARMUP = 0.25         # the share of the seconds that does not count


# ----------------------------------------------------------------------------------------- energy
class EnergyCounter:
    """The energy that a GPU has used since its driver was loaded; None without NVML or a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.handle = None
        if device.type == 'cuda':
            with suppress(OSError, AttributeError):
                self._open(f'GPU-{torch.cuda.get_device_properties(device).uuid}')

    def _open(self, uuid: str) -> None:
        self.nvml, handle = ctypes.CDLL('libnvidia-ml.so.1'), ctypes.c_void_p()
        failed = self.nvml.nvmlInit_v2() or self.nvml.nvmlDeviceGetHandleByUUID(
            uuid.encode(), ctypes.byref(handle))
        self.handle = None if failed else handle

    def joules(self) -> float | None:
        millijoules = ctypes.c_ulonglong()
        if self.handle is None or self.nvml.nvmlDeviceGetTotalEnergyConsumption(
                self.handle, ctypes.byref(millijoules)):
            return None
        return millijoules.value / 1e3


def watts_of(samples: Sequence[tuple[float, float | None]]) -> float | None:
    """Mean power, from (seconds, joules). The counter moves about ten times a second: only a sample
    at which it has just moved gives the energy of its own moment."""
    moves = [now for before, now in zip(samples, samples[1:]) if now[1] != before[1]]
    if len(moves) < 2:
        return None
    (start, first), (stop, last) = moves[0], moves[-1]
    return (last - first) / (stop - start)


# ----------------------------------------------------------------------------------------- timing
class Mark:
    """A moment in the stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device.type == 'cuda' else None
        self.time = time.perf_counter()
        if self.event:
            self.event.record()

    def wait(self) -> None:
        if self.event:
            self.event.synchronize()

    def ms_since(self, other: Mark) -> float:
        return other.event.elapsed_time(self.event) if self.event else (
            self.time - other.time) * 1e3


def sustain(call: Callable, device: torch.device, seconds: float) -> tuple[float, float | None]:
    """Milliseconds of a call, and watts. While a batch of calls runs, the next one is queued."""
    count, _ = Timer(device, BATCH_MS).calibrate(call)
    counter, previous = EnergyCounter(device), Mark(device)
    marks: list[Mark] = []
    samples: list[tuple[float, float | None]] = []
    start = time.perf_counter()
    while time.perf_counter() < start + seconds or len(marks) < 2:
        for _ in range(count):
            call()
        mark = Mark(device)
        previous.wait()
        previous = mark
        if time.perf_counter() >= start + WARMUP * seconds:
            marks.append(mark)
            samples.append((time.perf_counter(), counter.joules()))
    previous.wait()
    return marks[-1].ms_since(marks[0]) / (count * (len(marks) - 1)), watts_of(samples)


# ---------------------------------------------------------------------------------------- records
def call_of(kind: str, shape: Shape, device: torch.device) -> tuple[Callable, float]:
    """A call that takes the next inputs each time, and the relative error of its result."""
    sets = bench.make_inputs(shape, device)
    if kind == FP8:
        attention = functools.partial(bench.function_of(flash_attn3, shape, device),
                                      out_dtype=DTYPES[shape.dtype])
        pairs = [bench_fp8.quantized(inputs, 'head', {}) for inputs in sets]
        calls = [functools.partial(attention, *values, **scales) for values, scales in pairs]
        return in_turn(calls), bench.error_of(shape, calls[0](), sets[0])
    one = bench.ours(shape, device)
    return one.rotating(sets), bench.error_of(shape, one.prepare(sets[0])(), sets[0])


@torch.no_grad()
def measure(kind: str, shape: Shape, device: torch.device, args: argparse.Namespace) -> dict:
    """The result of a kind in a cell, with the milliseconds of short turns and the energy."""
    call, error = call_of(kind, shape, device)
    timer = Timer(device, args.target_ms)
    count, ahead_s = timer.calibrate(call)
    turns = Figure.of([timer.turn(call, count, ahead_s) for _ in range(args.rounds or 3)])
    ms, watts = sustain(call, device, args.seconds)
    joules = watts and watts * ms / 1e3
    return dict(name=kind, flops=shape.flops, ms=ms, tflops=shape.flops / ms / 1e9,
                turn_ms=turns.ms, spread=turns.spread, watts=watts, joules=joules,
                pj_per_flop=joules and joules / shape.flops * 1e12, error=error,
                 wrong=not error < (bench_fp8.WRONG if kind == FP8 else bench.WRONG))


def text_of(result: dict) -> str:
    """TFLOP/s, the share of the speed of short turns, energy per FLOP."""
    energy = '' if result['pj_per_flop'] is None else f", {result['pj_per_flop']:.2f} pJ/FLOP"
    wrong = '!' * result['wrong']
    return f"{result['tflops']:.4g}{wrong} ({result['turn_ms'] / result['ms']:.2f}){energy}"


def select(args: argparse.Namespace) -> list[Shape]:
    if args.quick:
        return bench_fp8.tiny(args.dtype)[:2] if args.device == 'cpu' else shapes.forward(
            (128,), (4096,), args.dtype)
    return shapes.forward(HEAD_DIMS, SEQLENS, args.dtype)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.timing_parser('tools.labs.sustained', __doc__)
    parser.add_argument('--seconds', type=float, default=2.0, help='for each kind of a cell')
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    record = harness.new_record('sustained', device, args.commit, dict(
        seconds=args.seconds, warmup=WARMUP, target_ms=args.target_ms, contenders=KINDS))
    with harness.Monitor(device) as monitor:
        for shape in select(args):
            monitor.clear()
            results = [measure(kind, replace(shape, backward=kind == BACKWARD), device, args)
                       for kind in KINDS]
            record['cells'].append(dict(shape=harness.fields_of(shape), results=results))
            path = harness.save(record, args.out)
            print(shape.label(), *(f"{one['name']} {text_of(one)}" for one in results),
                  monitor.text(), sep='  ', flush=True)
    print(path)
    return int(any(one['wrong'] for cell in record['cells'] for one in cell['results']))


if __name__ == '__main__':
    sys.exit(main())
