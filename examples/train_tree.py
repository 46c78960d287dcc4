"""Trains a small GPT on trees of completions in one sequence, and compares that with sequences.

    python examples/train_tree.py                  # float64 on a CPU, bfloat16 on a GPU
    python examples/train_tree.py --branches 8 --seqlen 4096 --head-dim 128

A prompt has completions, and these have continuations. A policy gradient gives each leaf an
advantage, and trains on the texts from the prompt to the leaves. With `AttentionMask.tree` the
prompt and what leaves share are in one sequence, and in the computation, once: a byte has the sum
of the advantages of its leaves. Losses and gradients are those of a sequence for each leaf, up to
roundings.
"""
from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flash_attn3 import AttentionMask, flash_attn_func

if __name__ == '__main__':    # a script finds the modules next to it, a test those of the checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples import train_gpt


# -------------------------------------------------------------------------------------------- tree
@dataclass(frozen=True)
class Tree:
    """Segments of text in the order of their sequence: the first is a prompt, and each other
    continues the one that is its parent.
    """
    lengths: list[int]
    parents: list[int]

    def path(self, segment: int) -> list[int]:
        """The segments from the prompt to this one."""
        return [*(self.path(self.parents[segment]) if segment else []), segment]

    def leaves(self) -> list[int]:
        return [one for one in range(len(self.lengths)) if one not in self.parents]

    def rows(self, segments: list[int]) -> Tensor:
        """Where the bytes of segments are in the sequence."""
        places = torch.arange(sum(self.lengths)).split(self.lengths)
        return torch.cat([places[one] for one in segments])

    def previous(self) -> Tensor:
        """Where the byte before each is, whose logits predict it; the first has none: -1."""
        before = torch.arange(sum(self.lengths)) - 1
        for segment, parent in enumerate(self.parents):
            if segment:
                before[self.rows([segment])[0]] = self.rows([parent])[-1]
        return before

    def positions(self) -> Tensor:
        """How many bytes of its text are before each."""
        depths = [self.rows(self.path(one)[:-1]) if one else [] for one in range(len(self.lengths))]
        return torch.cat([torch.arange(length) + len(depth)
                          for length, depth in zip(self.lengths, depths)])


def tree_of(branches: int, segment: int) -> Tree:
    """A prompt with as many completions as branches. The first of them has as many continuations,
    for which a query sees two intervals of keys; the others have one each.
    """
    lengths, parents = [2 * segment, segment], [-1, 0]
    for _ in range(branches):
        lengths, parents = [*lengths, segment], [*parents, 1]
    for _ in range(branches - 1):
        lengths, parents = [*lengths, segment, segment], [*parents, 0, len(parents)]
    return Tree(lengths, parents)


@dataclass
class Batch:
    """The bytes of a tree, (batch, bytes), and the advantages of its leaves, (batch, leaves)."""
    texts: Tensor
    advantages: Tensor


def batches(library: Tensor, tree: Tree, options: argparse.Namespace) -> Iterator[Batch]:
    """Segments are pieces of the library; the same for the same seed."""
    generator = torch.Generator().manual_seed(options.seed)
    longest = max(tree.lengths)
    for _ in range(options.steps):
        starts = torch.randint(len(library) - longest, (options.batch, len(tree.lengths), 1),
                               generator=generator)
        pieces = library[starts + torch.arange(longest)].long().unbind(1)
        texts = torch.cat([x[:, :length] for x, length in zip(pieces, tree.lengths)], 1)
        advantages = torch.randn(options.batch, len(tree.leaves()), generator=generator,
                                 dtype=torch.float64)
        yield Batch(texts.to(options.device), advantages.to(options.device))


# ---------------------------------------------------------------------------------------- training
def tree_attention(qkv: Tensor, heads_q: int, mask: AttentionMask) -> Tensor:
    heads_k = (qkv.size(2) - heads_q) // 2
    return flash_attn_func(*qkv.split((heads_q, heads_k, heads_k), dim=2), mask=mask)


def weighted(logits: Tensor, texts: Tensor, weights: Tensor) -> Tensor:
    """The sum of -log p of bytes, each of which has a weight."""
    found = logits.log_softmax(-1).gather(-1, texts[..., None])[..., 0]
    return -(found * weights).sum()


def loss_in_one_sequence(model: train_gpt.Gpt, tree: Tree, batch: Batch) -> Tensor:
    weights = batch.advantages.new_zeros(batch.texts.shape)
    for number, leaf in enumerate(tree.leaves()):
        weights[:, tree.rows(tree.path(leaf))] += batch.advantages[:, number, None]
    completions = slice(tree.lengths[0], None)    # the prompt is given
    device = batch.texts.device
    logits = model(batch.texts, tree.positions().to(device))
    logits = logits[:, tree.previous()[completions].to(device)]
    return weighted(logits, batch.texts[:, completions], weights[:, completions])


def loss_in_sequences(model: train_gpt.Gpt, tree: Tree, batch: Batch) -> Tensor:
    losses, prompt = [], tree.lengths[0]
    for number, leaf in enumerate(tree.leaves()):
        texts = batch.texts[:, tree.rows(tree.path(leaf)).to(batch.texts.device)]
        logits = model(texts)[:, prompt - 1:-1]
        losses.append(weighted(logits, texts[:, prompt:], batch.advantages[:, number, None]))
    return torch.stack(losses).sum()


class Training:
    """A model and its optimizer; `step` gives loss and gradients."""

    def __init__(self, attend: train_gpt.Attention, loss_of: Callable[..., Tensor],
                 options: argparse.Namespace):
        self.is_cuda = options.device.type == 'cuda'
        self.model = train_gpt.new_model(attend, options)
        if not self.is_cuda:
            self.model.double()
        self.loss_of = loss_of
        self.optimizer = torch.optim.AdamW(self.model.parameters(), train_gpt.LEARNING_RATE)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, tree: Tree, batch: Batch) -> list[Tensor]:
        device, count = batch.texts.device, len(tree.leaves()) * batch.texts.numel()
        began = train_gpt.now(device)
        self.optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=self.is_cuda):
            loss = self.loss_of(self.model, tree, batch) / count
        loss.backward()
        gradients = [x.grad.clone() for x in self.model.parameters()]
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(train_gpt.now(device) - began)
        return gradients


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The norm of what two gradients differ by, as a share of the second's."""
    one, other = (torch.cat([x.flatten() for x in tensors]) for tensors in (ours, theirs))
    return ((one - other).norm() / other.norm()).item()


# -------------------------------------------------------------------------------------------- main
def parse(argv: list[str] | None = None) -> argparse.Namespace:
    own = argparse.ArgumentParser(description=__doc__.splitlines()[0], add_help=False)
    own.add_argument('--branches', type=int, default=4, help='completions: %(default)s')
    if {'-h', '--help'} & set(sys.argv[1:] if argv is None else argv):
        own.print_help()    # then the options of the training; --seqlen is that of a leaf's text
    mine, rest = own.parse_known_args(argv)
    return argparse.Namespace(**vars(train_gpt.parse(['--steps', '5', *rest])), **vars(mine))


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    torch.set_num_threads(options.threads)
    tree = tree_of(options.branches, options.seqlen // 4)
    leaves = tree.leaves()
    mask = AttentionMask.tree(tree.lengths, tree.parents, device=options.device)
    runs = {'one sequence': Training(functools.partial(tree_attention, mask=mask),
                                     loss_in_one_sequence, options),
            f'{len(leaves)} sequences': Training(train_gpt.flash_attention, loss_in_sequences,
                                                 options)}
    counts = sum(tree.lengths), sum(len(tree.rows(tree.path(leaf))) for leaf in leaves)
    differences = []
    for batch in batches(train_gpt.library_text(), tree, options):
        differences.append(difference(*(run.step(tree, batch) for run in runs.values())))
    table = Table(f'a tree of {len(leaves)} leaves', 'bytes', 'first loss', 'last loss',
                  'ms a step')
    for (name, run), count in zip(runs.items(), counts):
        table.add_row(name, str(count), f'{run.losses[0]:.9f}', f'{run.losses[-1]:.9f}',
                      f'{1000 * min(run.seconds):.0f}')
    Console().print(table)
    print(f'difference of the gradients, {options.device_name}: {differences[0]:.1e} of their norm '
          f'in the first step, {differences[-1]:.1e} in the last')


if __name__ == '__main__':
    main()
