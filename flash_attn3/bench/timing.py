"""How calls are timed.

The contenders of a problem take turns in rounds; a turn times each of its calls with CUDA events;
a figure is the median over the rounds of the median of a turn. Before a turn the GPU sleeps while
the host queues all calls, so that host time is not in it. L2 is not flushed between calls: each
call takes the next of several sets of inputs, together larger than L2. A backward is timed alone:
its forward ran once, before the first turn.
"""
from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from .problem import WITH_DOUT, Result

CYCLES_PER_SECOND = 1.9e9      # about what torch.cuda._sleep counts
PROBE_CYCLES = 200_000
SM90_FLOPS_PER_CYCLE = 4096    # dense 16-bit wgmma, per SM: 989 TFLOP/s at 132 SMs and 1830 MHz


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass
class Contender:
    """Something to time. function(q, k, v) gives (batch, seqlen_q, heads, head_dim), with gradients
    where a backward is timed. The context is what it runs in; it is no part of the host time.

    The function may want its tensors in another arrangement than they come in: arrange() makes it,
    before the clock runs, and restore() undoes it, of an output or a gradient."""
    name: str
    function: Callable[..., torch.Tensor]
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    arrange: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
    restore: Callable[[torch.Tensor], torch.Tensor] = _as_it_is

    def prepare(self, inputs: tuple[torch.Tensor, ...]) -> Callable[[], Result]:
        """The call on one set of inputs. With dout among them it gives dq, dk and dv; its forward
        runs here."""
        inputs = tuple(map(self.arrange, inputs))
        if len(inputs) != WITH_DOUT:
            return functools.partial(self.function, *inputs)
        *tensors, dout = inputs
        leaves = [x.detach().requires_grad_() for x in tensors]
        with torch.enable_grad(), self.context():
            out = self.function(*leaves)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def restored(self, result: Result) -> Result:
        """The result with its dimensions in the order of the inputs."""
        return (tuple(map(self.restore, result)) if isinstance(result, tuple)
                else self.restore(result))

    def rotating(self, sets: Sequence[tuple[torch.Tensor, ...]]) -> Callable[[], Result]:
        """A call without arguments that takes the next set of inputs each time."""
        following = itertools.cycle([self.prepare(inputs) for inputs in sets])
        return lambda: next(following)()


@dataclass
class Turn:
    """One turn of one contender. The SM clock is read right after its last call."""
    ms: float
    clock_mhz: float | None = None


@dataclass
class Figure:
    """The summary of one contender; spread is (largest - smallest round) / median."""
    ms: float
    spread: float
    rounds: list[float] = field(default_factory=list)
    clock_mhz: float | None = None

    @staticmethod
    def of(turns: Sequence[Turn]) -> Figure:
        rounds = [turn.ms for turn in turns]
        middle = statistics.median(rounds)
        clocks = [turn.clock_mhz for turn in turns if turn.clock_mhz is not None]
        return Figure(middle, (max(rounds) - min(rounds)) / middle, rounds,
                      statistics.median(clocks) if clocks else None)


class Timer:
    """Times calls on one device."""

    def __init__(self, device: torch.device, target_ms: float = 8.0) -> None:
        self.cuda = device.type == 'cuda'
        self.target_ms = target_ms   # milliseconds of work in a turn

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def spin(self, seconds: float) -> None:
        """Keeps the GPU busy until its clocks are up."""
        if self.cuda:
            a = torch.randn(4096, 4096, device='cuda', dtype=torch.bfloat16)
            stop = time.time() + seconds
            while time.time() < stop:
                a @ a
                torch.cuda.synchronize()

    def calibrate(self, call: Callable, warmup_ms: float = 15.0) -> tuple[int, float]:
        """Warms a call up. Returns how many calls make a turn, and how many seconds the host needs
        to queue them."""
        self.synchronize()
        start = time.perf_counter()
        if not self.cuda:
            call()
            return self.calls_per_turn((time.perf_counter() - start) * 1e3), 0.0
        first, last = _event(), _event()
        first.record()
        call()
        call()
        last.record()
        host_s = (time.perf_counter() - start) / 2
        torch.cuda.synchronize()
        ms = max(first.elapsed_time(last) / 2, 1e-3)
        for _ in range(max(1, min(200, int(warmup_ms / ms)))):
            call()
        torch.cuda.synchronize()
        count = self.calls_per_turn(ms)
        return count, min(0.020, count * (host_s * 1.3 + 15e-6) + 3e-4)

    def calls_per_turn(self, ms: float) -> int:
        most = 20 if self.target_ms < 100 else 1000   # a long turn is asked for to heat the chip up
        return max(5, min(most, int(self.target_ms / max(ms, 1e-6))))

    def turn(self, call: Callable, count: int, ahead_s: float) -> Turn:
        """Times this many calls, after one that is not timed. The GPU sleeps for ahead_s first."""
        if not self.cuda:
            return Turn(statistics.median(_host_times(call, count)))
        pairs = [(_event(), _event()) for _ in range(count)]
        torch.cuda._sleep(int(ahead_s * CYCLES_PER_SECOND))
        call()
        for start, stop in pairs:
            start.record()
            call()
            stop.record()
        clock = _ClockProbe()
        torch.cuda.synchronize()
        return Turn(statistics.median(a.elapsed_time(b) for a, b in pairs), clock.mhz())

    def host_us(self, call: Callable, count: int = 50) -> float | None:
        """Host microseconds per call, on a GPU only: a loop too short to fill the launch queue, so
        that it does not wait."""
        if not self.cuda:
            return None
        call()
        self.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        elapsed = time.perf_counter() - start
        self.synchronize()
        return elapsed / count * 1e6


class _ClockProbe:
    """The SM clock, from two sleeps counted in cycles. Their difference excludes the launch."""

    def __init__(self) -> None:
        self.events = [_event() for _ in range(3)]
        self.events[0].record()
        for cycles, event in zip((PROBE_CYCLES, 3 * PROBE_CYCLES), self.events[1:]):
            torch.cuda._sleep(cycles)
            event.record()

    def mhz(self) -> float:
        start, middle, end = self.events
        return 2 * PROBE_CYCLES / (middle.elapsed_time(end) - start.elapsed_time(middle)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _host_times(call: Callable, count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def turn_order(names: Sequence[str], rounds: int) -> Iterator[str]:
    """The rounds: each has every name once, in an order rotated by one from round to round."""
    for number in range(rounds):
        shift = number % max(1, len(names))
        yield from [*names[shift:], *names[:shift]]


def interleaved(calls: dict[str, Callable], timer: Timer, rounds: int,
                on_error: Callable[[str, Exception], None]) -> dict[str, Figure]:
    """Times several calls against each other. A call that raises is skipped, after
    on_error(name, exception)."""
    ready, ahead_s = {}, 0.0
    for name, call in calls.items():
        try:
            ready[name], needed_s = timer.calibrate(call)
        except Exception as error:
            on_error(name, error)
            continue
        # The GPU idles equally long before each call, so that none has a cooler chip.
        ahead_s = max(ahead_s, needed_s)
    turns: dict[str, list[Turn]] = {name: [] for name in ready}
    for name in turn_order(list(ready), rounds):
        if name not in turns:
            continue
        try:
            turns[name].append(timer.turn(calls[name], ready[name], ahead_s))
        except Exception as error:
            del turns[name]
            on_error(name, error)
    return {name: Figure.of(done) for name, done in turns.items() if done}


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def peak_share(tflops: float, clock_mhz: float | None, device: torch.device) -> float | None:
    """The share of the peak of an sm_90 at the clock of the run; None on other devices."""
    if clock_mhz is None or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return tflops * 1e12 / (sms * SM90_FLOPS_PER_CYCLE * clock_mhz * 1e6)
