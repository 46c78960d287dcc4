"""Trains a small GPT, byte by byte, on the sources of the Python standard library.

    python examples/train_gpt.py                          # with flash_attn3
    python examples/train_gpt.py --compare --steps 300    # and with SDPA, and plain fp32 attention
    python examples/train_gpt.py --attention fp8          # its forward in FP8, its backward not
    python examples/train_gpt.py --compare flash_attn3 fp8
    python examples/train_gpt.py --head-dim 128 --heads-kv 1 --seqlen 8192
    torchrun --nproc-per-node 2 examples/train_gpt.py --context-parallel 2 --seqlen 65536 --batch 1

Products are bfloat16 (autocast), weights and optimiser float32. Model, data and their order depend
on --seed alone: two kinds of attention give losses that differ by its rounding, and by what
training makes of that. Without a GPU the model is smaller. With --context-parallel each process has
a part of every sequence; its losses are those of one. Writes the losses as JSON and a plot.
"""
from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import flash_attn3
from flash_attn3 import distributed

BYTES = 256
LEARNING_RATE, WEIGHT_DECAY, LARGEST_GRADIENT = 1e-3, 0.1, 1.0
UNTIMED_STEPS = 5
SHOW_EVERY = 10     # steps; reading a loss waits for the GPU
SIZES = {'cuda': {'layers': 6, 'd_model': 384, 'seqlen': 1024, 'batch': 16, 'steps': 300},
         'cpu': {'layers': 2, 'd_model': 128, 'seqlen': 128, 'batch': 8, 'steps': 40}}


# -------------------------------------------------------------------------------------- attention
# Each from (batch, seqlen, heads_q + 2 * heads_kv, head_dim) to (batch, seqlen, heads_q, head_dim).
Attention = Callable[[Tensor, int], Tensor]


def flash_attention(qkv: Tensor, heads_q: int) -> Tensor:
    return flash_attn3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=heads_q)


def ring_attention(qkv: Tensor, heads_q: int, seqlen: int) -> Tensor:
    """Attention of the rows of this rank; seqlen is the length of the whole sequence."""
    heads_kv = (qkv.size(2) - heads_q) // 2
    return distributed.ring_attention(*qkv.split((heads_q, heads_kv, heads_kv), dim=2),
                                      causal=True, seqlen=seqlen)


def fp8_attention(qkv: Tensor, heads_q: int) -> Tensor:
    """The forward in FP8; the backward in bfloat16, from q, k and v as they were given."""
    heads_kv = (qkv.size(2) - heads_q) // 2
    return flash_attn3.flash_attn_fp8_func(
        *qkv.split((heads_q, heads_kv, heads_kv), dim=2), causal=True)


def sdpa_attention(qkv: Tensor, heads_q: int) -> Tensor:
    heads_kv = (qkv.size(2) - heads_q) // 2
    q, k, v = qkv.transpose(1, 2).split((heads_q, heads_kv, heads_kv), dim=1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads_kv != heads_q)
    return out.transpose(1, 2)


def math_attention(qkv: Tensor, heads_q: int) -> Tensor:
    """PyTorch's plain attention in float32; its score matrices are made again for the backward."""
    return checkpoint(plain_attention, qkv.float(), heads_q, use_reentrant=False)


def plain_attention(qkv: Tensor, heads_q: int) -> Tensor:
    with torch.autocast(qkv.device.type, enabled=False), sdpa_kernel(SDPBackend.MATH):
        return sdpa_attention(qkv, heads_q)


ATTENTIONS: dict[str, Attention] = {'flash_attn3': flash_attention, 'sdpa': sdpa_attention,
                                    'math': math_attention, 'fp8': fp8_attention}
COMPARED = 'flash_attn3', 'sdpa', 'math'    # unless others are named


# ------------------------------------------------------------------------------------------ model
class Block(nn.Module):
    """Attention, then two layers of perceptron, each on the normalised sum of what came before."""

    def __init__(self, options: argparse.Namespace, attend: Attention):
        super().__init__()
        d_model, self.head_dim = options.d_model, options.head_dim
        self.heads_q = d_model // self.head_dim
        heads = self.heads_q + 2 * (options.heads_kv or self.heads_q)
        self.attend = attend
        self.attention_norm, self.mlp_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.project_in = nn.Linear(d_model, heads * self.head_dim, bias=False)
        self.project_out = nn.Linear(d_model, d_model, bias=False)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(),
                                 nn.Linear(4 * d_model, d_model))

    def forward(self, x: Tensor) -> Tensor:                         # (batch, seqlen, d_model)
        qkv = self.project_in(self.attention_norm(x)).unflatten(-1, (-1, self.head_dim))
        x = x + self.project_out(self.attend(qkv, self.heads_q).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):
    """(batch, seqlen) bytes -> (batch, seqlen, 256), logits of the byte after each.

    positions: where the bytes stand, (seqlen,); default: from 0 on.
    """

    def __init__(self, options: argparse.Namespace, attend: Attention):
        super().__init__()
        self.bytes = nn.Embedding(BYTES, options.d_model)
        self.positions = nn.Embedding(options.seqlen, options.d_model)
        self.blocks = nn.Sequential(*(Block(options, attend) for _ in range(options.layers)))
        self.norm = nn.LayerNorm(options.d_model)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, text: Tensor, positions: Tensor | None = None) -> Tensor:
        weight = self.positions.weight
        x = self.bytes(text) + (weight[:text.size(1)] if positions is None else weight[positions])
        return F.linear(self.norm(self.blocks(x)), self.bytes.weight)


# --------------------------------------------------------------------------------------- training
def library_text() -> Tensor:
    """The modules of the standard library, one after the other, as bytes: some megabytes."""
    modules = sorted(Path(sysconfig.get_path('stdlib')).glob('*.py'))
    return torch.frombuffer(bytearray(b''.join(path.read_bytes() for path in modules)),
                            dtype=torch.uint8)


def batches(text: Tensor, options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of text and the byte after each of theirs; the same for the same seed."""
    generator = torch.Generator().manual_seed(options.seed)
    starts = torch.randint(len(text) - options.seqlen, (options.steps, options.batch, 1),
                           generator=generator).to(options.device)
    text, window = (x.to(options.device) for x in (text, torch.arange(options.seqlen + 1)))
    for start in starts:
        pieces = text[start + window].long()
        yield pieces[:, :-1], pieces[:, 1:]


@dataclass
class Run:
    """The result of a training."""
    losses: list[float]
    tokens_per_second: float


def new_model(attend: Attention, options: argparse.Namespace) -> Gpt:
    torch.manual_seed(options.seed)
    return Gpt(options, attend).to(options.device)


def training(attend: Attention, text: Tensor, options: argparse.Namespace) -> Iterator[Tensor]:
    """Trains a new model, and gives the loss of each step; nothing waits for the device."""
    yield from steps(new_model(attend, options), text, options)


def steps(model: Gpt, text: Tensor, options: argparse.Namespace) -> Iterator[Tensor]:
    """Trains a model, and gives the loss of each step.

    AdamW, a linear warmup of the rate, then a cosine.
    """
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95),
                                  weight_decay=WEIGHT_DECAY, fused=True)
    warmup = max(1, options.steps // 10)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(
        (step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / options.steps)))
    for inputs, targets in batches(text, options):
        loss = loss_of(model, inputs, targets, options)
        loss.backward()
        if options.context_parallel > 1:
            for x in (loss.detach(), *(p.grad for p in model.parameters())):
                dist.all_reduce(x)
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        yield loss.detach()


def loss_of(model: Gpt, inputs: Tensor, targets: Tensor, options: argparse.Namespace) -> Tensor:
    """The mean over the bytes; with --context-parallel the part of it of this process's bytes."""
    positions = None
    if options.context_parallel > 1:
        part = distributed.shard_batch({'inputs': inputs, 'labels': targets})
        inputs, targets, positions = part['inputs'], part['labels'], part['position_ids']
    with torch.autocast(options.device.type, torch.bfloat16):
        logits = model(inputs, positions)
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction='sum')
    return losses / (options.batch * options.seqlen)


def attention_of(name: str, options: argparse.Namespace) -> Attention:
    if options.context_parallel > 1:
        return functools.partial(ring_attention, seqlen=options.seqlen)
    return ATTENTIONS[name]


def train(attention: str, text: Tensor, options: argparse.Namespace, progress: Progress) -> Run:
    """One training, with a line of progress."""
    losses, bar = [], progress.add_task(attention, total=options.steps, loss=math.nan)
    untimed, start = min(UNTIMED_STEPS, options.steps - 1), now(options.device)
    for step, loss in enumerate(training(attention_of(attention, options), text, options)):
        losses.append(loss)
        if step + 1 == untimed:
            start = now(options.device)
        if step % SHOW_EVERY == 0 or step == options.steps - 1:
            progress.update(bar, completed=step + 1, loss=loss.item())
    seconds = now(options.device) - start
    tokens = (options.steps - untimed) * options.batch * options.seqlen
    return Run(torch.stack(losses).tolist(), tokens / seconds)


def now(device: torch.device) -> float:
    """Seconds, with the work of the device done."""
    if device.type == 'cuda':
        torch.cuda.synchronize()
    return time.perf_counter()


# ---------------------------------------------------------------------------------------- results
def baseline_of(runs: dict[str, Run]) -> str:
    """What the others are compared with: plain fp32 attention, or else the first."""
    return 'math' if 'math' in runs else next(iter(runs))


def differences(runs: dict[str, Run], name: str) -> list[float]:
    """|loss - that of the baseline|, step by step."""
    return [abs(a - b) for a, b in zip(runs[name].losses, runs[baseline_of(runs)].losses)]


def print_table(runs: dict[str, Run]) -> None:
    is_comparison = len(runs) > 1
    table = Table('attention', 'last loss', 'tokens/s',
                  *([f'max |loss - loss of {baseline_of(runs)}|'] if is_comparison else []))
    for name, run in runs.items():
        largest = [f'{max(differences(runs, name)):.2e}'] if is_comparison else []
        table.add_row(name, f'{run.losses[-1]:.4f}', f'{run.tokens_per_second:,.0f}', *largest)
    Console().print(table)
    if all(name in runs for name in COMPARED):
        ours, sdpas = (max(differences(runs, name)) for name in ('flash_attn3', 'sdpa'))
        print(f'difference of flash_attn3 / that of sdpa: {ours / sdpas:.2f}' if sdpas else
              'sdpa gives the losses of math')


def plot(runs: dict[str, Run], title: str, path: Path) -> None:
    """The losses; next to them, where there are several, their distance from the baseline's."""
    is_comparison, baseline = len(runs) > 1, baseline_of(runs)
    figure = Figure(figsize=(11 if is_comparison else 6, 4), layout='constrained')
    axes = figure.subplots(1, 1 + is_comparison, squeeze=False)[0]
    for name, run in runs.items():
        axes[0].plot(run.losses, label=name, linewidth=1)
        if name != baseline:
            axes[1].semilogy(differences(runs, name), label=name, linewidth=1)
    for axis, label in zip(axes, ('loss', f'|loss - loss of {baseline}|')):
        axis.set(xlabel='step', ylabel=label)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def write(runs: dict[str, Run], options: argparse.Namespace) -> None:
    """The JSON and the plot."""
    record = {'torch': torch.__version__, 'flash_attn3': flash_attn3.__version__,
              'settings': vars(options), 'runs': {name: asdict(run) for name, run in runs.items()}}
    json_path, png_path = (Path(f'{options.output}.{ending}') for ending in ('json', 'png'))
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(record, indent=1, default=str) + '\n')
    plot(runs, f'{options.layers} layers of {options.d_model}, head dim {options.head_dim}, '
               f'{options.batch} x {options.seqlen} bytes, {options.device_name}', png_path)
    print(f'losses: {json_path}, plot: {png_path}')


# ------------------------------------------------------------------------------------------- main
def missing_gradients(options: argparse.Namespace) -> str:
    """Why flash_attn3 has no gradients for this model, or ''."""
    shape = 1, options.seqlen, options.d_model // options.head_dim, options.head_dim
    qkv = torch.empty((3, *shape), dtype=torch.bfloat16, device=options.device, requires_grad=True)
    with torch.no_grad():
        is_kernel, _ = flash_attn3.can_use(*qkv, causal=True)
    if not is_kernel:
        return ''    # what runs instead of our kernels has gradients
    return ''.join(flash_attn3.can_use(*qkv, causal=True)[1])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--attention', choices=ATTENTIONS, default='flash_attn3')
    parser.add_argument('--compare', nargs='*', choices=ATTENTIONS, metavar='ATTENTION',
                        help=f'train with each of these: {" ".join(COMPARED)} if none is named')
    for name, text in (('steps', 'of training'), ('seqlen', 'bytes in a sequence'),
                       ('batch', 'sequences in a step'), ('layers', 'of the model'),
                       ('d-model', 'width of the model')):
        small, large = (SIZES[kind][name.replace('-', '_')] for kind in ('cpu', 'cuda'))
        parser.add_argument(f'--{name}', type=int, help=f'{text}: {small} on a CPU, else {large}')
    parser.add_argument('--head-dim', type=int, default=64, help='64; 128 is usual too')
    parser.add_argument('--heads-kv', type=int, help='default: as many as query heads')
    parser.add_argument('--context-parallel', type=int, default=1, metavar='N',
                        help='N processes, started by torchrun, divide each sequence')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--threads', type=int, default=1,
                        help='of a CPU: 1, more are of use to larger models only')
    parser.add_argument('--device', type=torch.device, default=torch.device(
        'cuda' if torch.cuda.is_available() else 'cpu'))
    parser.add_argument('--output', type=Path, default=Path('build/train_gpt'),
                        help='the files are this with .json and .png appended: %(default)s')
    parser.add_argument('--where-possible', action='store_true',
                        help='where flash_attn3 has no gradients, say so and stop without an error')
    options = parser.parse_args(argv)
    for name, value in SIZES[options.device.type].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.d_model % options.head_dim:
        parser.error(f'expected --d-model {options.d_model} to be a multiple of --head-dim')
    if options.compare is not None:
        options.compare = options.compare or COMPARED
    if options.context_parallel > 1:
        if options.compare is not None or options.attention != 'flash_attn3':
            parser.error('expected --attention flash_attn3 alone with --context-parallel')
        join(parser, options)
    options.device_name = (
        torch.cuda.get_device_name(options.device) if options.device.type == 'cuda' else 'a CPU')
    return options


def join(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Meets the other processes of torchrun."""
    found = os.environ.get('WORLD_SIZE', '1')
    if found != str(options.context_parallel):
        parser.error(f'expected torchrun --nproc-per-node {options.context_parallel}, got {found} '
                     'process(es)')
    if options.device.type == 'cuda':
        options.device = torch.device('cuda', int(os.environ['LOCAL_RANK']))
        torch.cuda.set_device(options.device)
    dist.init_process_group('nccl' if options.device.type == 'cuda' else 'gloo')


def main() -> None:
    options = parse()
    if options.where_possible and (reason := missing_gradients(options)):
        print(f'No training here: {reason}')
        return
    torch.set_num_threads(options.threads)
    text = library_text()
    is_first = options.context_parallel == 1 or dist.get_rank() == 0
    if is_first:
        print(f'A GPT of {options.layers} layers of {options.d_model} reads {len(text) / 1e6:.1f} '
              f'MB of Python on {options.device_name}')
    columns = ('{task.description:12}', BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
               TextColumn('loss {task.fields[loss]:.3f}'))
    with Progress(*columns, disable=not is_first) as progress:
        runs = {name: train(name, text, options, progress)
                for name in options.compare or [options.attention]}
    if is_first:
        print_table(runs)
        write(runs, options)
    if options.context_parallel > 1:
        dist.destroy_process_group()


if __name__ == '__main__':
    main()
