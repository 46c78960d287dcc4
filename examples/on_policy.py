"""Samples from a small GPT and trains it on its samples, and compares sampler and trainer.

    python examples/on_policy.py                      # about three minutes on a Hopper GPU
    python examples/on_policy.py --rounds 2 --requests 16

The sampler has a paged cache and continuous batching: a prompt is one call, each further byte
another, in the company of other requests. The trainer has all texts packed in one call with
gradients. A policy gradient believes that both are the same function. Without
`flash_attn3.invariant()` their attention differs in the last bits, and so do the probabilities;
under it not one bit differs. The rest of the model is made a function of its row alone by GEMMs of
one shape.
"""
from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import flash_attn3

if __name__ == '__main__':    # a script finds the modules next to it, a test those of the checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples import generate, train_gpt

ROWS = 64                    # rows of every GEMM
LEARNING_RATE = 1e-4
WANTED = torch.tensor(list(b'abcdefghijklmnopqrstuvwxyz'))    # bytes that give a reward


# ------------------------------------------------------------------------------------------- model
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear in GEMMs of one shape. cuBLAS chooses a kernel by the shape of a GEMM: with one
    shape, the bits of a row do not depend on how many others there are.
    """
    rows = x.flatten(0, -2)
    padded = F.pad(rows, (0, 0, 0, -len(rows) % ROWS))
    parts = [F.linear(part, weight, bias) for part in padded.split(ROWS)]
    return torch.cat(parts)[:len(rows)].unflatten(0, x.shape[:-1])


class RowsLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def by_rows(model: train_gpt.Gpt) -> train_gpt.Gpt:
    """The model with such GEMMs, in float32, of which autocast makes bfloat16."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = RowsLinear
    return model.float()


def log_probabilities(model: train_gpt.Gpt, rows: Tensor, positions: Tensor,
                      attentions: Sequence[train_gpt.Attention]) -> Tensor:
    """Those of the byte after each of the packed rows, (rows, 256)."""
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
        x = (model.bytes(rows) + model.positions(positions))[None]
        for block, attend in zip(model.blocks, attentions):
            block.attend = attend
            x = block(x)
        return linear(model.norm(x[0]), model.bytes.weight).float().log_softmax(-1)


# ----------------------------------------------------------------------------------------- sampler
@dataclass
class Sample(generate.Request):
    """A text, and what the sampler computed for it."""
    prompt: int = 0                                            # bytes of it
    chosen: list[Tensor] = field(default_factory=list)         # log-probabilities of the others
    seen: list[list[tuple]] = field(default_factory=list)      # (qkv, out) of its rows, by layer


def recorded(attend: train_gpt.Attention, layer: int, samples: Sequence[Sample],
             counts: list[int]) -> train_gpt.Attention:
    """Keeps what goes in and comes out."""
    def attention(qkv: Tensor, heads_q: int) -> Tensor:
        out = attend(qkv, heads_q)
        for one, *rows in zip(samples, qkv[0].split(counts), out[0].split(counts)):
            one.seen[layer].append(tuple(rows))
        return out
    return attention


@torch.no_grad()
def sample(model: train_gpt.Gpt, samples: Sequence[Sample], options: argparse.Namespace) -> None:
    """Continues all texts, each byte by its probability."""
    cache = generate.Cache(model, options)
    if options.device.type == 'cuda':
        cache.storage = cache.storage.bfloat16()
    generator = torch.Generator(options.device).manual_seed(options.seed)
    layers, waiting, running = range(len(model.blocks)), list(samples), []
    for number in itertools.count():
        generate.joined(waiting, running, number, cache, options.running)
        if not running and not waiting:
            return
        if not running:
            continue
        step, rows, positions = generate.step_of(running, options.device, cache.pages_each, True)
        counts = step.starts.diff().tolist()
        found = log_probabilities(model, rows, positions, [
            recorded(cache.attention(layer, step), layer, running, counts) for layer in layers])
        last = found[step.starts[1:].long() - 1]
        chosen = torch.multinomial(last.exp(), 1, generator=generator)
        for one, byte, value in zip(running, chosen[:, 0].tolist(), last.gather(1, chosen)):
            one.cached = len(one.text)
            one.text.append(byte)
            one.chosen.append(value)
        for one in [one for one in running if one.is_done]:
            running.remove(one)
            cache.release(one)


# ----------------------------------------------------------------------------------------- trainer
class Batch(NamedTuple):
    """The texts without their last bytes, packed, as the trainer has them."""
    step: generate.Step
    rows: Tensor
    positions: Tensor
    sampled: Tensor              # (rows,) bool: the byte after this row was sampled
    following: Tensor            # (sampled rows,) that byte
    believed: Tensor             # its log-probability, of the sampler
    advantages: Tensor           # the advantage of the whole text


def batch_of(samples: Sequence[Sample], rewards: Tensor, device: torch.device) -> Batch:
    whole = [generate.Request(one.text[:-1], one.wanted, 0) for one in samples]
    step, rows, positions = generate.step_of(whole, device, 0, False)
    ends = torch.tensor([one.prompt - 1 for one in samples], device=device)
    counts = step.starts.diff().long()
    sampled = positions >= ends.repeat_interleave(counts)
    following = [byte for one in samples for byte in one.text[one.prompt:]]
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return Batch(step, rows, positions, sampled, torch.tensor(following, device=device),
                 torch.cat([torch.cat(one.chosen) for one in samples]),
                 advantages.repeat_interleave(counts)[sampled])


def attention_difference(samples: Sequence[Sample], batch: Batch, heads_q: int) -> float:
    """The largest between the attention of sampler and trainer, in any layer, of equal inputs."""
    attend, differences = generate.attend_to_all(batch.step), []
    for layer in range(len(samples[0].seen)):
        qkv, out = (torch.cat([rows[side] for one in samples for rows in one.seen[layer]])
                    for side in (0, 1))
        trained = attend(qkv[None].requires_grad_(), heads_q)[0]
        differences.append((trained.float() - out.float()).abs().max())
    return torch.stack(differences).max().item()


def update(model: train_gpt.Gpt, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """A step of a policy gradient; returns the largest difference of log-probabilities."""
    attentions = [generate.attend_to_all(batch.step)] * len(model.blocks)
    found = log_probabilities(model, batch.rows, batch.positions, attentions)
    now = found[batch.sampled].gather(1, batch.following[:, None])[:, 0]
    difference = now - batch.believed
    (-difference.exp() * batch.advantages).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), train_gpt.LARGEST_GRADIENT)
    optimizer.step()
    optimizer.zero_grad()
    return difference.abs().max().item()


class Round(NamedTuple):
    attention: float             # the largest differences
    log_probability: float
    reward: float                # the mean


def rounds(model: train_gpt.Gpt, library: Tensor, options: argparse.Namespace) -> Iterator[Round]:
    """Samples, compares and trains, again and again."""
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    for _ in range(options.rounds):
        samples = [Sample(**vars(one), prompt=len(one.text), seen=[[] for _ in model.blocks])
                   for one in generate.requests_of(library, options)]
        sample(model, samples, options)
        rewards = torch.stack([torch.isin(torch.tensor(one.text[one.prompt:]), WANTED)
                               .float().mean() for one in samples]).to(options.device)
        batch = batch_of(samples, rewards, options.device)
        difference = attention_difference(samples, batch, model.blocks[0].heads_q)
        yield Round(difference, update(model, optimizer, batch), rewards.mean().item())


# ------------------------------------------------------------------------------------------- main
def parse(argv: list[str] | None = None) -> argparse.Namespace:
    own = argparse.ArgumentParser(description=__doc__.splitlines()[0], add_help=False)
    own.add_argument('--rounds', type=int, default=5, help='of sampling and training: %(default)s')
    if {'-h', '--help'} & set(sys.argv[1:] if argv is None else argv):
        own.print_help()    # then the options of the generation
    mine, rest = own.parse_known_args(argv)
    return argparse.Namespace(**vars(generate.parse(rest)), **vars(mine))


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    torch.set_num_threads(options.threads)
    library = train_gpt.library_text()
    print(f'A GPT of {options.layers} layers of {options.d_model} is trained on its own samples on '
          f'{options.device_name}')
    model = by_rows(generate.trained(library, options))
    table = Table('largest differences of sampler and trainer', 'attention', 'log-probability',
                  'reward, first and last')
    for name, context in (('as it is', contextlib.nullcontext()),
                          ('invariant', flash_attn3.invariant())):
        with context:
            found = list(rounds(copy.deepcopy(model), library, options))
        table.add_row(name, f'{max(one.attention for one in found):.2e}',
                      f'{max(one.log_probability for one in found):.2e}',
                      f'{found[0].reward:.3f} {found[-1].reward:.3f}')
    Console().print(table)


if __name__ == '__main__':
    main()
