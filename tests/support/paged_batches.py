"""Batches as servers have them: prefill and decode of several sequences on pages of a cache."""
from __future__ import annotations

import torch
from torch import Tensor

from flash_attn3.cpu import reference
from flash_attn3.cpu.reference_fp8 import Scales

from tests.support import compare, fp8_data
from tests.support.fp8_data import E4M3

MIXED = (37, 5, 64, 300, 0), (1, 3, 20, 1, 2)    # keys and queries of each sequence


class Batch:
    """q, k, v, table, used, starts.

    layout: how keys and values lie. 'rows': (pages, heads, page_size, 2 * head_dim), as vLLM 0.33
    has them; 'pages': (pages, 2, page_size, heads, head_dim), as earlier ones; 'apart': SGLang's,
    (slots, heads, head_dim) each.
    """

    def __init__(self, device, page_size, layout='rows', dtype=torch.bfloat16,
                 lengths=MIXED[0], queries=MIXED[1], heads=(4, 2), head_dim=64):
        self.device, self.page_size, self.heads = device, page_size, heads
        self.scale, self.queries = head_dim ** -0.5, queries
        pages = [-(-n // page_size) for n in lengths]
        self.k, self.v = _cache(device, sum(pages), page_size, layout, dtype, heads[1], head_dim)
        self.table = torch.full((len(lengths), max(pages) + 2), -1, dtype=torch.int32)
        numbers = torch.randperm(sum(pages), dtype=torch.int32)
        for row, part in zip(self.table, numbers.split(pages)):
            row[:len(part)] = part
        self.table = self.table.to(device)
        self.q = torch.randn(sum(queries), heads[0], head_dim, device=device).to(dtype)
        self.starts = _sums(queries, device)
        self.set_lengths(lengths)

    def set_lengths(self, lengths):
        """Keys of each sequence: in place after the first time."""
        self.lengths = lengths
        if hasattr(self, 'used'):
            self.used.copy_(torch.tensor(lengths))
        else:
            self.used = torch.tensor(lengths, dtype=torch.int32, device=self.device)

    @property
    def key_starts(self) -> Tensor:
        return _sums(self.lengths, self.device)

    def keys(self, row: int) -> list[Tensor]:
        """Keys and values of a sequence, (1, length, heads, head_dim)."""
        count = self.lengths[row]
        pages = self.table[row][:-(-count // self.page_size)].long()
        return [x[pages].flatten(0, 1)[None, :count] for x in (self.k, self.v)]

    def of_rank(self, world: int, rank: int) -> Batch:
        """The cache of one rank, with the keys at positions rank, rank + world, ... of each
        sequence, on pages of its own.
        """
        lengths = [len(range(rank, length, world)) for length in self.lengths]
        heads = self.heads[0] if isinstance(self, LatentBatch) else self.heads
        own = type(self)(self.device, self.page_size, heads=heads, lengths=lengths,
                         queries=self.queries)
        for row, length in enumerate(lengths):
            pages = own.table[row][:-(-length // own.page_size)].long()
            for x, keys in zip((own.k, own.v), self.keys(row)):
                held = x[pages].flatten(0, 1)
                held[:length] = keys[0, rank::world]
                x[pages] = held.unflatten(0, (len(pages), own.page_size))
        return own

    def inputs(self, where: slice, row: int, sinks: Tensor | None) -> reference.Inputs:
        """Tensors of a sequence, the queries of which are rows `where`."""
        return reference.Inputs(self.q[None, where], *self.keys(row), sinks)

    def check(self, out: Tensor, lse: Tensor | None = None, window=(-1, -1), causal=True,
              sinks=None, softcap=0.0, scales=Scales(None, None, None)) -> None:
        """Each sequence against the reference in float64, or fp8_data's bar. scales: (batch,
        heads_k) of e4m3.
        """
        score = reference.Score(self.scale, softcap, reference.Mask(causal, window))
        starts = self.starts.tolist()
        for row, where in enumerate(slice(*x) for x in zip(starts, starts[1:])):
            inputs = self.inputs(where, row, sinks)
            if self.q.dtype == E4M3:
                own = Scales(*(None if x is None else x[row:row + 1] for x in scales))
                fp8_data.check_fp8(out[None, where], inputs, own, score)
                if lse is not None:
                    fp8_data.check_fp8_lse(lse[None, :, where], inputs, own, score)
                continue
            wide = reference.attend(inputs.to(torch.float64), score)
            plain = reference.attend(inputs, score)
            compare.check_close(out[None, where], wide.out, plain.out, f'out of {row}')
            if lse is not None:
                compare.check_lse(lse[None, :, where], wide.lse)


class LatentBatch(Batch):
    """Absorbed MLA with qv. k and v are columns of one tensor, those of v first."""

    def __init__(self, device, page_size, heads=16, dtype=torch.bfloat16, **options):
        super().__init__(device, page_size, 'apart', dtype, heads=(heads, 1), head_dim=64,
                         **options)
        both = torch.randn(*self.k.shape[:3], 576, device=device).to(dtype)
        self.v, self.k = both.split((512, 64), -1)
        self.qv = torch.randn(self.q.size(0), heads, 512, device=device).to(dtype)
        self.scale = 192 ** -0.5    # with the head dim before the absorption

    def inputs(self, where: slice, row: int, sinks: Tensor | None) -> reference.Inputs:
        k, v = self.keys(row)
        q = torch.cat([self.q[None, where], self.qv[None, where]], -1)
        return reference.Inputs(q, torch.cat([k, v], -1), v, sinks)


def _cache(device, pages, page_size, layout, dtype, heads, head_dim) -> tuple[Tensor, Tensor]:
    """(pages, page_size, heads, head_dim) each."""
    def randn(*shape):
        return torch.randn(shape, device=device).to(dtype)
    if layout == 'rows':
        both = randn(pages, heads, page_size, 2 * head_dim)
        return both.transpose(1, 2).split(head_dim, -1)
    if layout == 'pages':
        return randn(pages, 2, page_size, heads, head_dim).unbind(1)
    return tuple(randn(pages * page_size, heads, head_dim).view(-1, page_size, heads, head_dim)
                 for _ in range(2))


def _sums(lengths, device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
