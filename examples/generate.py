"""Trains a small GPT on the Python library, then writes with it: on a paged cache, and without.

    python examples/generate.py                       # about two minutes on a Hopper GPU
    python examples/generate.py --requests 64 --running 32 --page-size 64

Requests come and go: a step takes the next byte of every running one, and the whole prompt of each
that joins, in one call of `flash_attn_with_kvcache`. A request takes pages from a list of free
ones, and gives them back at its end. Without a cache the same steps compute the whole text of each
running request again. The next byte is the likeliest, so both write the same, but where rounding
decides between two bytes: such a place is checked to be one.
"""
from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from flash_attn3 import flash_attn_varlen_func, flash_attn_with_kvcache

if __name__ == '__main__':    # a script finds the modules next to it, a test those of the checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples import train_gpt

# What of the range of a row's logits rounding may move; the CPU path computes in float32.
ROUNDING = {torch.bfloat16: 2.0 ** -5, torch.float32: 2.0 ** -16}
COLUMNS = ('{task.description:14}', BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


# --------------------------------------------------------------------------------------- requests
@dataclass
class Request:
    """A text that is to be continued, and what there is of it."""
    text: list[int]
    wanted: int                  # bytes in the end, prompt and all
    arrives: int                 # at this step
    cached: int = 0              # its first bytes, of which the cache has keys and values
    pages: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.text) >= self.wanted


def requests_of(library: Tensor, options: argparse.Namespace) -> list[Request]:
    """Lines of the library as prompts, of several lengths; a new one every few steps."""
    pick = random.Random(options.seed)
    found = []
    for number in range(options.requests):
        prompt = pick.randint(4, options.seqlen // 3)
        first = pick.randrange(len(library) - prompt)
        more = pick.randint(options.seqlen // 8, options.seqlen // 2)
        found.append(Request(library[first:first + prompt].tolist(), prompt + more,
                             number * options.every))
    return found


# ------------------------------------------------------------------------------------------- model
@dataclass
class Step:
    """What the layers of one step share: packed rows, and where each sequence lies."""
    starts: Tensor               # (sequences + 1,) int32: rows of each
    longest: int
    lengths: Tensor              # (sequences,) int32: keys in the cache before the step
    table: Tensor                # (sequences, pages) int32


class Cache:
    """Pages of keys and values for every layer, and the list of free ones."""

    def __init__(self, model: train_gpt.Gpt, options: argparse.Namespace) -> None:
        block = model.blocks[0]
        heads = options.heads_kv or block.heads_q
        self.page_size = options.page_size
        self.pages_each = -(-options.seqlen // options.page_size)
        # For half of what so many of the longest need: most are shorter, and some may have to wait.
        pages = -(-options.running // 2) * self.pages_each
        self.page_count = pages
        shape = (len(model.blocks), 2, pages, options.page_size, heads, block.head_dim)
        weight = next(model.parameters())
        self.storage = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self.free = list(range(pages))

    def admit(self, request: Request) -> bool:
        """Gives a request the pages that it will need, if there are as many."""
        count = -(-request.wanted // self.page_size)
        if count > len(self.free):
            return False
        request.pages = [self.free.pop() for _ in range(count)]
        return True

    def release(self, request: Request) -> None:
        self.free += request.pages
        request.pages = []

    def attention(self, layer: int, step: Step) -> train_gpt.Attention:
        k_cache, v_cache = self.storage[layer]

        def attend(qkv: Tensor, heads_q: int) -> Tensor:
            """Appends the new keys and values, and attends to all of the sequence."""
            q, k, v = split_heads(qkv, heads_q)
            return flash_attn_with_kvcache(
                q, k_cache, v_cache, k, v, cache_seqlens=step.lengths, page_table=step.table,
                cu_seqlens_q=step.starts, cu_seqlens_k_new=step.starts,
                max_seqlen_q=step.longest, causal=True)[None]
        return attend


def split_heads(qkv: Tensor, heads_q: int) -> Sequence[Tensor]:
    """(1, rows, all heads, head_dim) to q, k and v, packed."""
    heads_kv = (qkv.size(2) - heads_q) // 2
    return qkv[0].split((heads_q, heads_kv, heads_kv), dim=1)


def attend_to_all(step: Step) -> train_gpt.Attention:
    """Attention to the rows of the step alone."""
    def attend(qkv: Tensor, heads_q: int) -> Tensor:
        return flash_attn_varlen_func(*split_heads(qkv, heads_q), step.starts, step.starts,
                                      step.longest, step.longest, causal=True)[None]
    return attend


def logits_of(model: train_gpt.Gpt, rows: Tensor, positions: Tensor, last: Tensor,
              attention: Callable[[int], train_gpt.Attention]) -> Tensor:
    """Logits of the byte after each row in `last`. rows, positions: packed."""
    x = (model.bytes(rows) + model.positions(positions))[None]
    for layer, block in enumerate(model.blocks):
        block.attend = attention(layer)
        x = block(x)
    return F.linear(model.norm(x[0, last]).float(), model.bytes.weight.float())


def step_of(requests: Sequence[Request], device: torch.device, pages_each: int,
            is_cached: bool) -> tuple[Step, Tensor, Tensor]:
    """The step, its bytes and their positions: what is not cached, or all."""
    firsts = [one.cached if is_cached else 0 for one in requests]
    counts = [len(one.text) - first for one, first in zip(requests, firsts)]
    rows = [byte for one, first in zip(requests, firsts) for byte in one.text[first:]]
    positions = [place for first, count in zip(firsts, counts)
                 for place in range(first, first + count)]
    table = [one.pages + [-1] * (pages_each - len(one.pages)) for one in requests]

    def to(values: Sequence, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    step = Step(to([0, *itertools.accumulate(counts)]), max(counts), to(firsts), to(table))
    return step, to(rows, torch.long), to(positions, torch.long)


# -------------------------------------------------------------------------------------- generation
def joined(waiting: list[Request], running: list[Request], number: int, cache: Cache | None,
           most: int) -> None:
    """Requests that have arrived join, while there are places and pages."""
    while waiting and waiting[0].arrives <= number and len(running) < most:
        if cache is not None and not cache.admit(waiting[0]):
            return
        running.append(waiting.pop(0))


@torch.no_grad()
def generate(model: train_gpt.Gpt, requests: Sequence[Request], cache: Cache | None,
             options: argparse.Namespace) -> Iterator[int]:
    """Continues all requests; gives the number of bytes of each step. cache: None for none."""
    waiting, running = list(requests), []
    for number in itertools.count():
        joined(waiting, running, number, cache, options.running)
        if not running:
            if not waiting:
                return
            continue
        step, rows, positions = step_of(running, options.device,
                                        cache.pages_each if cache else 0, cache is not None)
        attention = ((lambda layer, step=step: cache.attention(layer, step)) if cache
                     else (lambda layer, step=step: attend_to_all(step)))
        logits = logits_of(model, rows, positions, step.starts[1:].long() - 1, attention)
        for one, byte in zip(running, logits.argmax(-1).tolist()):
            one.cached = len(one.text)
            one.text.append(byte)
        yield len(running)
        for one in [one for one in running if one.is_done]:
            running.remove(one)
            if cache:
                cache.release(one)


def timed(name: str, model: train_gpt.Gpt, requests: Sequence[Request], cache: Cache | None,
          options: argparse.Namespace) -> float:
    """Bytes a second, with a line of progress."""
    total = sum(one.wanted - len(one.text) for one in requests)
    with Progress(*COLUMNS) as progress:
        bar = progress.add_task(name, total=total)
        start = train_gpt.now(options.device)
        for count in generate(model, requests, cache, options):
            progress.advance(bar, count)
        return total / (train_gpt.now(options.device) - start)


# ----------------------------------------------------------------------------------------- checks
@torch.no_grad()
def margins(model: train_gpt.Gpt, request: Request, prompt: int,
            options: argparse.Namespace) -> Tensor:
    """How far each written byte is from the likeliest, of the range of the logits at its place, by
    one pass over the whole text.
    """
    step, rows, positions = step_of([request], options.device, 0, False)
    last = torch.arange(prompt - 1, len(request.text) - 1, device=options.device)
    logits = logits_of(model, rows, positions, last, lambda layer: attend_to_all(step))
    written = torch.tensor(request.text[prompt:], device=options.device)
    chosen = logits.gather(1, written[:, None])[:, 0]
    return (logits.amax(-1) - chosen) / (logits.amax(-1) - logits.amin(-1))


def check(model: train_gpt.Gpt, prompts: Sequence[int], runs: dict[str, Sequence[Request]],
          options: argparse.Namespace) -> tuple[int, int]:
    """(texts that are the same in both runs, all). Raises SystemExit if a byte of either is not the
    likeliest, by more than rounding.
    """
    limit = ROUNDING[next(model.parameters()).dtype]
    for name, requests in runs.items():
        for number, (one, prompt) in enumerate(zip(requests, prompts)):
            worst = margins(model, one, prompt, options).max().item()
            if not worst <= limit:
                sys.exit(f'{name}: request {number} has a byte that is not the likeliest: '
                         f'{worst:.2e} of the range of the logits, beyond {limit:.2e}')
    pairs = list(zip(*runs.values()))
    return sum(a.text == b.text for a, b in pairs), len(pairs)


# ------------------------------------------------------------------------------------------- main
def parse(argv: list[str] | None = None) -> argparse.Namespace:
    own = argparse.ArgumentParser(description=__doc__.splitlines()[0], add_help=False)
    for name, value, text in (('requests', 48, 'texts to continue'),
                              ('running', 16, 'requests at a time'),
                              ('every', 4, 'steps from one arrival to the next'),
                              ('page-size', 16, 'tokens of a page')):
        own.add_argument(f'--{name}', type=int, default=value, help=f'{text}: %(default)s')
    if {'-h', '--help'} & set(sys.argv[1:] if argv is None else argv):
        own.print_help()    # then the options of the training
    mine, rest = own.parse_known_args(argv)
    options = train_gpt.parse(rest)
    return argparse.Namespace(**{**vars(options), **vars(mine)})


def trained(library: Tensor, options: argparse.Namespace) -> train_gpt.Gpt:
    """The model after its training, in the dtype of the attention."""
    model = train_gpt.new_model(train_gpt.ATTENTIONS['flash_attn3'], options)
    columns = (*COLUMNS, TextColumn('loss {task.fields[loss]:.3f}'))
    with Progress(*columns) as progress:
        bar = progress.add_task('training', total=options.steps, loss=float('nan'))
        for number, loss in enumerate(train_gpt.steps(model, library, options), 1):
            if number % train_gpt.SHOW_EVERY == 0 or number == options.steps:
                progress.update(bar, completed=number, loss=loss.item())
    is_cuda = options.device.type == 'cuda'
    return model.to(torch.bfloat16 if is_cuda else torch.float32).eval()


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    torch.set_num_threads(options.threads)
    library = train_gpt.library_text()
    print(f'A GPT of {options.layers} layers of {options.d_model} learns {len(library) / 1e6:.1f} '
          f'MB of Python on {options.device_name}')
    model = trained(library, options)
    runs, speeds = {}, {}
    prompts = [len(one.text) for one in requests_of(library, options)]
    for name in ('paged cache', 'without a cache'):
        requests = requests_of(library, options)
        cache = Cache(model, options) if name == 'paged cache' else None
        speeds[name] = timed(name, model, requests, cache, options)
        assert cache is None or len(set(cache.free)) == cache.page_count
        runs[name] = requests
    same, total = check(model, prompts, runs, options)
    table = Table('', 'tokens/s')
    for name, speed in speeds.items():
        table.add_row(name, f'{speed:,.0f}')
    Console().print(table)
    print(f'{same} of {total} texts are the same; every byte of both is the likeliest, within '
          'rounding. One of them:')
    print(bytes(runs['paged cache'][0].text).decode('utf-8', 'replace'))


if __name__ == '__main__':
    main()
