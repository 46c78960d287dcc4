"""Peak memory of one forward and backward over the length, against SDPA's flash: table, JSON.

    python -m benchmarks.memory                  # on a Hopper GPU, a quarter of a minute
    python -m benchmarks.memory --device cpu     # what is expected, without measuring

A figure is the most memory that PyTorch's allocator holds for the call: the output, the LSE, the
three gradients and the workspace. q, k, v and the output's gradient are allocated before and do not
count. `requested` sums the sizes that were asked for; `allocated` is the allocator's own count
(torch.cuda.max_memory_allocated), which rounds every tensor up, by up to 1 MiB. `expected` is the
sum by the plan of the call. Bytes a token do not change with the length where memory is linear.

Two series a head dim, causal: a fixed number of tokens, and batch 1.
"""
from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import harness, shapes
from flash_attn3 import bench
from flash_attn3.tools import planning
from flash_attn3.bench import Shape

OURS = bench.OURS
TOKENS = 65536
SEQLENS = tuple(2 ** power for power in range(9, 17))
QUICK_SEQLENS = (1024, 8192, 65536)
WORKSPACE = ('lse', 'delta', 'dq', 'flags')    # backward, as its plan names the parts
RELEASED_AFTER = 0.1   # seconds, for autograd's thread
COUNTS = {'requested': 'requested_bytes', 'allocated': 'allocated_bytes'}   # in memory_stats()

Step = Callable[[], object]                       # a forward and backward; returns their results
MakeStep = Callable[[Shape, tuple[torch.Tensor, ...]], Step]


def cells_of(seqlens: Sequence[int]) -> list[Shape]:
    """At a fixed number of tokens, then at batch 1; the longest is the same in both."""
    cells = []
    for dim in shapes.HEAD_DIMS:
        cells += [shapes.square(dim, seqlen, True, tokens=TOKENS) for seqlen in seqlens]
        cells += [shapes.square(dim, seqlen, True, tokens=seqlen) for seqlen in seqlens]
    return list(dict.fromkeys(cells))


def expected_bytes(shape: Shape) -> dict[str, int]:
    """The bytes of each part that exists at the peak, which is in the backward."""
    itemsize = bench.DTYPES[shape.dtype].itemsize
    sizes_q = shape.batch, shape.seqlen_q, shape.heads, shape.head_dim
    sizes_k = shape.batch, shape.seqlen_k, shape.heads_k, shape.head_dim
    facts = planning.plan_backward(sizes_q, sizes_k, causal=shape.causal,
                                   dtype=bench.DTYPES[shape.dtype])
    like_q = shape.batch * shape.seqlen_q * shape.heads * shape.head_dim * itemsize
    like_k = shape.batch * shape.seqlen_k * shape.heads_k * shape.head_dim * itemsize
    return dict(out=like_q, lse=4 * shape.batch * shape.heads * shape.seqlen_q, dq=like_q,
                dk=like_k, dv=like_k,
                workspace=sum(facts[f'{part}_bytes'] for part in WORKSPACE))


def autograd_step(name: str) -> MakeStep:
    """The steps of a contender of flash_attn3.bench, with gradients by autograd."""
    def make(shape: Shape, inputs: tuple[torch.Tensor, ...]) -> Step:
        one = bench.contender(name, shape)
        *tensors, dout = inputs

        def step() -> object:
            leaves = [x.detach().requires_grad_() for x in tensors]
            with one.context():
                out = one.function(*leaves)
            return out, torch.autograd.grad(out, leaves, dout)
        return step
    return make


STEPS: dict[str, MakeStep] = {name: autograd_step(name) for name in (OURS, 'sdpa flash')}


def peak_bytes(step: Step, repeats: int = 3) -> dict[str, int]:
    """By each of COUNTS: the peak of a step beyond what was allocated before, the most of several.

    WHY several: autograd's thread releases the results of a step some time after it; where that
    falls into the next step, this one seems to need less.
    """
    step()    # a library may keep memory for later calls: it does not count
    peaks = [peak_of(step) for _ in range(repeats)]
    return {name: max(peak[name] for peak in peaks) for name in COUNTS}


def peak_of(step: Step) -> dict[str, int]:
    """One step, by each of COUNTS."""
    gc.collect()
    time.sleep(RELEASED_AFTER)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    kept = step()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    del kept
    return {name: after[f'{key}.all.peak'] - before[f'{key}.all.current']
            for name, key in COUNTS.items()}


def measure(shape: Shape, device: torch.device, steps: Mapping[str, MakeStep]) -> list[dict]:
    """One dict a contender: `name`, and the counts or 'na' with the reason. On the CPU none."""
    if device.type != 'cuda':
        return []
    inputs = bench.make_inputs(replace(shape, backward=True), device)[0]
    results = []
    for name, make in steps.items():
        torch.cuda.empty_cache()
        try:
            results.append(dict(name=name, **peak_bytes(make(shape, inputs))))
        except Exception as failure:
            results.append(dict(name=name, na=bench.reason(failure)))
    return results


def counted(cell: dict, name: str, count: str = 'requested') -> int | None:
    return next((r[count] for r in cell['results'] if r['name'] == name and count in r), None)


def summarize(cells: Sequence[dict], names: Sequence[str]) -> dict:
    """By each of COUNTS: the highest ratio over the cells, ours to expected and to each rival."""
    summary: dict = dict(cells=len(cells))
    for count in COUNTS:
        own = [(cell, mine) for cell in cells if (mine := counted(cell, OURS, count))]
        ratios = {'expected': [mine / sum(cell['expected'].values()) for cell, mine in own]}
        for name in names:
            if name != OURS:
                ratios[name] = [mine / theirs for cell, mine in own
                                if (theirs := counted(cell, name, count))]
        summary[count] = {name: max(found) for name, found in ratios.items() if found}
    return summary


def show(record: dict, console: Console) -> None:
    names = record['settings']['contenders']
    table = Table(title=f"Peak of forward + backward without the inputs, MiB, "
                        f"{record['environment']['device']}, commit {record['commit']}")
    for header in ('problem', *names, 'expected', 'bytes a token'):
        table.add_column(header, justify='left' if header == 'problem' else 'right')
    for cell in record['cells']:
        shape, expected = Shape(**cell['shape']), sum(cell['expected'].values())
        shown = counted(cell, OURS) or expected
        table.add_row(shape.label(), *(mib_text(counted(cell, name)) for name in names),
                      mib_text(expected), f'{shown / (shape.batch * shape.seqlen_q):.0f}')
    console.print(table)
    for count in COUNTS:
        highest = record['summary'][count].items()
        if highest:
            console.print(f'highest flash_attn3 / other, {count}: ' + ', '.join(
                f'{name} {ratio:.3f}' for name, ratio in highest), highlight=False)


def mib_text(count: int | None) -> str:
    return '' if count is None else f'{count / 2**20:.1f}'


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.parser_of('benchmarks.memory', __doc__, 'three lengths')
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, steps: Mapping[str, MakeStep] = STEPS) -> int:
    args = parse(argv)
    device, console = torch.device(args.device), harness.console()
    settings = dict(contenders=list(steps))
    record = harness.new_record('memory', device, args.commit, settings)
    for shape in cells_of(QUICK_SEQLENS if args.quick else SEQLENS):
        record['cells'].append(dict(shape=harness.fields_of(shape), expected=expected_bytes(shape),
                                    results=measure(shape, device, steps)))
        record['summary'] = summarize(record['cells'], list(steps))
        path = harness.save(record, args.out)
    show(record, console)
    console.print(f'written: {path}', highlight=False)
    return 0


if __name__ == '__main__':
    sys.exit(main())
