"""Context parallelism on the GPUs of a host: time and memory of a rank against one GPU, a plain
ring and torch's context_parallel.

    python -m benchmarks.bench_ring                           # on two Hopper GPUs or more
    python -m benchmarks.bench_ring --device cpu --quick      # tries the machinery with gloo

Causal, bf16, batch 1, head dim 128, 16 heads; a cell is a length of the whole sequence. Contenders:
`one GPU`, flash_attn_func on the whole; `ring` and `ulysses`, flash_attn3.distributed; `ring,
NCCL`, without the DMA copy engines; `plain ring`, a zigzag ring of public functions, which waits
for each message and merges after each step; `torch`, context_parallel with the backend of
scaled_dot_product_attention that PyTorch picks; `torch, ours`, with this package as its flash
backend. They take turns; a figure is the median over the rounds of the slowest rank's time, forward
alone and forward with backward. Peak memory is that of benchmarks.memory and symmetric memory,
forward with backward, without the inputs, the largest of all ranks.
"""
from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import harness, memory
from flash_attn3 import distributed, env, flash_attn_func, merge_states
from flash_attn3.bench import reason
from flash_attn3.distributed import copies
from flash_attn3.integrations import sdpa

HEADS, HEAD_DIM = 16, 128
SEQLENS, QUICK_SEQLENS = (32768, 131072, 524288), (64, 128)
ONE, OURS = 'one GPU', 'ring'
LEAST_MS = 100    # a turn takes, for which short calls are repeated
PASSES = {'forward': False, 'both': True}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


# -------------------------------------------------------------------------------------- contenders
class _Shift(torch.autograd.Function):
    """The tensor of the rank before; its gradient goes back to that rank. Waits for the message."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return _shifted(x, 1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return _shifted(gradient, -1)


def _shifted(x: Tensor, by: int) -> Tensor:
    rank, ranks, result = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
    for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, x.contiguous(), (rank + by) % ranks),
            dist.P2POp(dist.irecv, result, (rank - by) % ranks)]):
        work.wait()
    return result


def plain_ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A ring written with flash_attn_func and merge_states alone, differentiated by autograd."""
    rank, half = dist.get_rank(), q.size(1) // 2
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    for step in range(1, dist.get_world_size()):
        k, v = _Shift.apply(k), _Shift.apply(v)
        if step <= rank:    # keys before all queries of this rank, else after their first half
            part = flash_attn_func(q, k[:, :half], v[:, :half], return_attn_probs=True)
            out, lse = merge_states((out, part[0]), (lse, part[1]))
            continue
        part = flash_attn_func(q[:, half:], k, v, return_attn_probs=True)
        second = merge_states((out[:, half:], part[0]), (lse[..., half:], part[1]))
        out = torch.cat((out[:, :half], second[0]), 1)
        lse = torch.cat((lse[..., :half], second[1]), -1)
    return out


def torchs(device: torch.device, seqlen: int, undo: ExitStack) -> Attend:
    """torch's context_parallel, which ends with undo."""
    from torch.distributed.tensor.experimental import context_parallel
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    buffer = torch.arange(seqlen, device=device)[None]
    undo.enter_context(context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]))
    return lambda q, k, v: F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def torch_with_ours(device: torch.device, seqlen: int, undo: ExitStack) -> Attend:
    sdpa.enable()
    undo.callback(sdpa.disable)
    return torchs(device, seqlen, undo)


def by_nccl(device: torch.device, seqlen: int, undo: ExitStack) -> Attend:
    """Our ring without the DMA copy engines."""
    undo.callback(setattr, env, 'COPY_ENGINES', env.COPY_ENGINES)
    env.COPY_ENGINES = False
    return CONTENDERS[OURS](device, seqlen, undo)


def _ours(function: Callable) -> Callable:
    return lambda *_: lambda q, k, v: function(q, k, v, causal=True)


CONTENDERS: dict[str, Callable[[torch.device, int, ExitStack], Attend]] = {
    ONE: _ours(flash_attn_func), OURS: _ours(distributed.ring_attention), 'ring, NCCL': by_nccl,
    'ulysses': _ours(distributed.ulysses_attention), 'plain ring': lambda *_: plain_ring,
    'torch': torchs, 'torch, ours': torch_with_ours}


# ----------------------------------------------------------------------------------------- a rank
def step_of(attend: Attend, tensors: Sequence[Tensor], has_backward: bool) -> Callable:
    """One pass or both; the step returns what it keeps in memory."""
    *inputs, dout = tensors

    def step() -> object:
        if not has_backward:
            with torch.no_grad():
                return attend(*inputs)
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = attend(*leaves)
        return out, torch.autograd.grad(out, leaves, dout)
    return step


def turn_ms(step: Callable, device: torch.device, repeats: int) -> float:
    """Milliseconds of a step on the slowest rank, from a moment at which all ranks are idle."""
    dist.barrier()
    wait = torch.cuda.synchronize if device.type == 'cuda' else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    wait()
    return largest((time.perf_counter() - start) / repeats * 1e3, device)


def largest(number: float, device: torch.device) -> float:
    """The largest of the ranks' numbers."""
    x = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.item()


@dataclass
class Run:
    """The turns of a contender so far. times and repeats: by pass. reason: why it does not run."""
    name: str
    times: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in PASSES})
    repeats: dict[str, int] = field(default_factory=dict)
    peak_bytes: float | None = None
    reason: str = ''

    def result(self) -> dict:
        if self.reason:
            return dict(name=self.name, na=self.reason)
        found = {f'{kind}_ms': statistics.median(times) for kind, times in self.times.items()}
        peak = {} if self.peak_bytes is None else {'peak_bytes': self.peak_bytes}
        return {'name': self.name} | found | peak


def take_turn(run: Run, seqlen: int, tensors: Sequence[Tensor], turn: int) -> None:
    with ExitStack() as undo:
        try:
            attend = CONTENDERS[run.name](tensors[0].device, seqlen, undo)
            time_passes(run, attend, tensors, turn)
        except Exception as failure:
            run.reason = reason(failure)


def time_passes(run: Run, attend: Attend, tensors: Sequence[Tensor], turn: int) -> None:
    """The first turn is not timed: it finds how often to repeat, and the peak of memory."""
    device = tensors[0].device
    for kind, has_backward in PASSES.items():
        step = step_of(attend, tensors, has_backward)
        if turn > 0:
            run.times[kind].append(turn_ms(step, device, run.repeats[kind]))
            continue
        first = min(turn_ms(step, device, 1) for _ in range(1 if has_backward else 2))
        run.repeats[kind] = max(1, round(LEAST_MS / first))
    if turn == 0 and device.type == 'cuda':
        held = copies.held_bytes() if run.name == OURS else 0
        run.peak_bytes = largest(memory.peak_of(step)['requested'] + held, device)


def measure(seqlen: int, device: torch.device, args: argparse.Namespace) -> list[dict]:
    """One dict a contender: name, ms of each pass, peak bytes; or name and 'na', the reason."""
    dtype = torch.bfloat16 if device.type == 'cuda' else torch.float32
    whole = [torch.randn(1, seqlen, HEADS, HEAD_DIM, device=device, dtype=dtype) for _ in range(4)]
    part = [distributed.shard(x) for x in whole]
    runs = {name: Run(name) for name in args.contenders}
    for turn in range(args.rounds + 1):
        # In another order each round: a GPU at its power limit is slower after a long call.
        for name, run in random.Random(turn).sample(sorted(runs.items()), len(runs)):
            if not run.reason:
                take_turn(run, seqlen, whole if name == ONE else part, turn)
    return [run.result() for run in runs.values()]


def work(rank: int, args: argparse.Namespace, rendezvous: str) -> None:
    """A process of each rank; the first writes the record."""
    device = torch.device(args.device, rank if args.device == 'cuda' else None)
    if device.type == 'cuda':
        torch.cuda.set_device(device)
    dist.init_process_group('nccl' if device.type == 'cuda' else 'gloo', rank=rank,
                            world_size=args.ranks, init_method=f'file://{rendezvous}',
                            device_id=device if device.type == 'cuda' else None)
    record = harness.new_record('ring', device, args.commit, dict(
        contenders=list(args.contenders), ranks=args.ranks, rounds=args.rounds, heads=HEADS,
        head_dim=HEAD_DIM))
    for seqlen in args.seqlens:
        torch.manual_seed(0)
        cell = dict(seqlen=seqlen, results=measure(seqlen, device, args))
        record['cells'].append(cell)
        if rank == 0:
            path = harness.save(record, args.out)
            show(cell)
    if rank == 0:
        print(f'written: {path}')
    dist.barrier()
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------------- results
def show(cell: dict) -> None:
    one = next((r for r in cell['results'] if r['name'] == ONE), {})
    table = Table('contender', 'forward ms', 'of one GPU', 'both ms', 'of one GPU', 'peak MiB',
                  title=f"{cell['seqlen']} tokens")
    for result in cell['results']:
        row = [result['name']]
        for kind in PASSES:
            ms = result.get(f'{kind}_ms')
            share = ms / one[f'{kind}_ms'] if ms and f'{kind}_ms' in one else None
            row += ['' if ms is None else f'{ms:.3f}', '' if share is None else f'{share:.3f}']
        row.append(f"{result['peak_bytes'] / 2**20:.0f}" if 'peak_bytes' in result else
                   result.get('na', '')[:60])
        table.add_row(*row)
    harness.console(120).print(table)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.parser_of('benchmarks.bench_ring', __doc__, 'short sequences')
    parser.add_argument('--seqlens', type=int, nargs='+')
    parser.add_argument('--ranks', type=int, help='default: all GPUs; 2 on the CPU')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--contenders', nargs='+', choices=CONTENDERS, default=tuple(CONTENDERS))
    args = parser.parse_args(argv)
    args.seqlens = args.seqlens or (QUICK_SEQLENS if args.quick else SEQLENS)
    args.ranks = args.ranks or (torch.cuda.device_count() if args.device == 'cuda' else 2)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (args, os.path.join(folder, 'meet')), nprocs=args.ranks)
    return 0


if __name__ == '__main__':
    sys.exit(main())
