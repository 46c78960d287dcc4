"""Forward and backward of flash_attn_completions_func against attention on copies of the prompt.

    python -m benchmarks.bench_completions                        # on a Hopper GPU, about a minute
    python -m benchmarks.bench_completions --device cpu --quick   # tries the machinery

`copies`: flash_attn_varlen_func on sequences of a copy of the prompt and one completion; the copies
are made before the clock runs. `copied keys`: flash_attn_varlen_func on the prompt and on each
completion, whose keys and values come after a copy of the prompt's; autograd makes these copies and
sums their gradients, on the clock. `mask`: flash_attn_func with AttentionMask.completions, which
all layers and steps share; `new mask`: the mask is made on the clock. TFLOP/s count the pairs of a
query and a key that our call sees. Contenders take turns, as flash_attn3/bench says. Results are
compared with those of `copied keys`.
"""
from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import harness
from flash_attn3 import (AttentionMask, flash_attn_completions_func, flash_attn_func,
                         flash_attn_varlen_func)
from flash_attn3.bench import DTYPES, OURS, WRONG, Timer, interleaved

COPIES, COPIED_KEYS, MASK, NEW_MASK = 'copies', 'copied keys', 'mask', 'new mask'
FORWARD_AND_BACKWARD = 3.5    # times the FLOPs of the forward


class Cell(NamedTuple):
    """A prompt and completions of one length."""
    prompt: int
    completions: int
    completion: int
    heads: int = 16
    heads_k: int = 16
    head_dim: int = 128

    @property
    def lengths(self) -> list[int]:
        return [self.prompt, *[self.completion] * self.completions]

    @property
    def flops(self) -> float:
        causal = sum(rows * (rows + 1) / 2 for rows in self.lengths)
        pairs = causal + self.completions * self.completion * self.prompt
        return FORWARD_AND_BACKWARD * 4 * self.heads * self.head_dim * pairs

    def label(self) -> str:
        return (f'prompt {self.prompt}, {self.completions} completions of {self.completion}, '
                f'{self.heads}/{self.heads_k} heads of {self.head_dim}')


CELLS = (*(Cell(*sizes) for sizes in itertools.product((2048, 8192), (8, 16), (512, 1024))),
         *(Cell(4096, 8, 1000, 16, 4, head_dim) for head_dim in (64, 96, 128, 192, 256)))
QUICK_CELLS = (Cell(2048, 8, 512), Cell(8192, 16, 1024))
TINY_CELLS = (Cell(24, 3, 8, 4, 2, 16), Cell(16, 2, 5, 2, 2, 8))


class Contender(NamedTuple):
    """tensors: q, k and v, which need gradients, and dout. rows: the rows of out that are compared
    with those of `copied keys`, in their order.
    """
    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    rows: Tensor

    def __call__(self) -> tuple[Tensor, ...]:
        *leaves, dout = self.tensors
        out = self.function(*leaves)
        return out, *torch.autograd.grad(out, leaves, dout)


def starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def contenders(cell: Cell, device: torch.device, dtype: torch.dtype) -> dict[str, Contender]:
    generator = torch.Generator(device).manual_seed(0)
    tokens, longest = sum(cell.lengths), max(cell.lengths)
    tensors = [torch.randn(tokens, heads, cell.head_dim, generator=generator, device=device).to(
        dtype) for heads in (cell.heads, cell.heads_k, cell.heads_k, cell.heads)]
    every = torch.arange(tokens, device=device)
    prompt, *completions = every.split(cell.lengths)
    copied = torch.cat([torch.cat((prompt, one)) for one in completions])
    both = cell.prompt + cell.completion
    segments, tree = starts(cell.lengths, device), starts([len(cell.lengths)], device)
    copy_starts = starts([both] * cell.completions, device)
    key_starts = starts([cell.prompt, *[both] * cell.completions], device)
    keys = torch.cat((prompt, copied))
    at = torch.arange(len(copied), device=device).view(-1, both)
    rows = torch.cat((at[0, :cell.prompt], at[:, cell.prompt:].flatten()))

    def leaves(index: Tensor) -> tuple[Tensor, ...]:
        *inputs, dout = (x[index] for x in tensors)
        return *(x.requires_grad_() for x in inputs), dout

    def with_copied_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.index_select(0, keys) for x in (k, v))
        return flash_attn_varlen_func(q, k, v, segments, key_starts, longest, both, causal=True)

    def with_mask(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return flash_attn_func(q[None], k[None], v[None], mask=mask)[0]

    def new_mask() -> AttentionMask:
        return AttentionMask.completions(segments, tree, tokens)

    mask = new_mask()
    return {
        MASK: Contender(lambda *x: with_mask(*x, mask), leaves(every), every),
        NEW_MASK: Contender(lambda *x: with_mask(*x, new_mask()), leaves(every), every),
        OURS: Contender(lambda q, k, v: flash_attn_completions_func(
            q, k, v, segments, tree, longest), leaves(every), every),
        COPIES: Contender(lambda q, k, v: flash_attn_varlen_func(
            q, k, v, copy_starts, copy_starts, both, both, causal=True), leaves(copied), rows),
        COPIED_KEYS: Contender(with_copied_keys, leaves(every), every)}


def distance(x: Tensor, y: Tensor) -> float:
    return ((x.float() - y.float()).norm() / y.float().norm()).item()


def errors_of(calls: dict[str, Contender]) -> dict[str, float]:
    """Relative difference of out from that of `copied keys`; without copies the largest of out and
    the gradients."""
    results = {name: call() for name, call in calls.items()}
    wanted = results[COPIED_KEYS]
    return {name: distance(found[0][calls[name].rows], wanted[0]) if name == COPIES else
            max(map(distance, found, wanted)) for name, found in results.items()}


def measure(cell: Cell, device: torch.device, dtype: torch.dtype, rounds: int,
            target_ms: float) -> dict:
    """The result of each contender, and its time over ours."""
    calls, missing = contenders(cell, device, dtype), {}
    errors = errors_of(calls)
    figures = interleaved(calls, Timer(device, target_ms), rounds,
                          lambda name, error: missing.update({name: str(error)}))
    results = [dict(name=name, na=missing[name]) if name in missing else
               dict(name=name, ms=figures[name].ms, spread=figures[name].spread,
                    tflops=cell.flops / figures[name].ms / 1e9,
                    error=errors[name], wrong=errors[name] > WRONG) for name in calls]
    ratios = {name: figures[name].ms / figures[OURS].ms for name in calls
              if name != OURS and name in figures and OURS in figures}
    return dict(cell=cell._asdict(), flops=cell.flops, results=results, ratios=ratios)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.bench_completions',
                                     description=__doc__.splitlines()[0])
    harness.add_common_arguments(parser.add_argument)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device, rounds = torch.device(args.device), harness.rounds_of(args)
    cells = CELLS if not args.quick else TINY_CELLS if device.type == 'cpu' else QUICK_CELLS
    record = harness.new_record('completions', device, args.commit,
                                dict(rounds=rounds, target_ms=args.target_ms, dtype=args.dtype))
    Timer(device).spin(0.3)
    for cell in cells:
        found = measure(cell, device, DTYPES[args.dtype], rounds, args.target_ms)
        record['cells'].append(found)
        print(f'{cell.label()}:', *(f"{one['name']} {harness.figure_text(one)}"
                                    for one in found['results']), 'TFLOP/s;',
              *(f'{ratio:.2f} x {name}' for name, ratio in found['ratios'].items()), flush=True)
    for name in (MASK, NEW_MASK, COPIES, COPIED_KEYS):
        ratios = [found['ratios'][name] for found in record['cells'] if name in found['ratios']]
        if ratios:
            record['summary'][f'to {name}'] = harness.ratios_summary(ratios)
    print(record['summary'], harness.save(record, args.out), sep='\n')
    return int(any(not harness.measured(found, OURS) for found in record['cells']))


if __name__ == '__main__':
    raise SystemExit(main())
