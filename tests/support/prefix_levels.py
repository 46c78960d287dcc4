"""Calls of shared_prefix_attn: sequences that share keys in groups on several levels, their pages
in random order, and what the calls must give.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from flash_attn3 import PrefixLevel, shared_prefix_attn
from flash_attn3.cpu import reference
from flash_attn3.cpu.reference import Inputs, Lengths, Mask, Score
from flash_attn3.cpu.reference_fp8 import Scales

from tests.support import compare, fp8_data
from tests.support.cache_cases import E4M3, NOWHERE, as_bits
from tests.support.cases import DTYPES
from tests.support.lists import ints, lengths_of, starts


@dataclass
class LevelCase:
    """groups: on each level before the last, the sequences of each group; shared: its keys."""
    groups: tuple[tuple[int, ...], ...]
    shared: tuple[tuple[int, ...], ...]
    lengths: tuple[tuple[int, int], ...]    # queries and own keys of each sequence
    page_size: int = 16
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 64
    dtype: str = 'bf16'                     # or fp16, e4m3, fp32, fp64
    is_packed: bool = False
    causal: bool = False
    softcap: float = 0.0
    sinks: bool = False
    int_lengths: bool = False               # one number for the groups of a level
    options: tuple[tuple[str, object], ...] = ()
    seed: int = 0

    def build(self, device: str | torch.device) -> LevelCase:
        """Draws everything. Sets arguments, and the packed keys of all levels of each sequence."""
        generator = torch.Generator().manual_seed(self.seed)
        heads_q, heads_k = self.heads
        dtype = E4M3 if self.dtype == 'e4m3' else DTYPES[self.dtype]

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

        self.queries = [one[0] for one in self.lengths]
        counts = [*self.shared, tuple(one[1] for one in self.lengths)]
        pieces = [[(normal(count, heads_k, self.head_dim), normal(count, heads_k, self.head_dim))
                   for count in level] for level in counts]
        q = normal(sum(self.queries), heads_q, self.head_dim)
        self.rows = q
        k_cache, v_cache, tables = self._paged(pieces, counts, dtype, generator, device)
        levels = [self._level(number, table, counts[number], device)
                  for number, table in enumerate(tables)]
        self.arguments = dict(q=q if self.is_packed else q.unflatten(0, (len(self.lengths), -1)),
                              k_cache=k_cache, v_cache=v_cache, levels=levels, causal=self.causal,
                              softcap=self.softcap, **dict(self.options))
        if self.sinks:
            self.arguments['s_aux'] = torch.randn(heads_q, generator=generator).to(device)
        if dtype == E4M3:
            for name in 'qkv':
                self.arguments[f'{name}_descale'] = (0.5 + torch.rand(
                    1, heads_k, generator=generator)).to(device)
        self.keys = [self._keys_of(pieces, sequence) for sequence in range(len(self.lengths))]
        return self

    def _paged(self, pieces: list, counts: list, dtype: torch.dtype, generator: torch.Generator,
               device: str | torch.device) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The caches, NaN where no key is, and the tables of each level."""
        size = self.page_size
        needed = [[-(-count // size) for count in level] for level in counts]
        pages = sum(map(sum, needed)) + 2
        shape = pages, size, self.heads[1], self.head_dim
        caches = [torch.full(shape, math.nan, device=device).to(dtype) for _ in 'kv']
        order = iter(torch.randperm(pages, generator=generator).tolist())
        tables = []
        for level, need in zip(pieces, needed):
            width = max([*need, 1])
            own = [[next(order) if i < count else NOWHERE[i % 2] for i in range(width)]
                   for count in need]
            for ids, piece in zip(own, level):
                slot = torch.arange(len(piece[0]), device=device)
                page = torch.tensor(ids, device=device)[slot // size]
                for cache, x in zip(caches, piece):
                    as_bits(cache)[page, slot % size] = as_bits(x)
            tables.append(ints(own, device))
        return *caches, tables

    def _level(self, number: int, table: Tensor, counts: tuple[int, ...],
               device: str | torch.device) -> PrefixLevel:
        lengths = counts[0] if self.int_lengths and len(set(counts)) == 1 else ints(counts, device)
        if number == len(self.groups):
            return PrefixLevel(table, lengths, starts(self.queries, device) if self.is_packed
                               else None)
        ends = [0, *accumulate(self.groups[number])]
        rows = [sum(self.queries[a:b]) for a, b in zip(ends, ends[1:])]
        return PrefixLevel(table, lengths, starts(rows, device), max(rows))

    def _keys_of(self, pieces: list, sequence: int) -> tuple[Tensor, Tensor]:
        found = []
        for level, groups in zip(pieces, self.groups):
            ends = list(accumulate(groups))
            found.append(level[next(i for i, end in enumerate(ends) if sequence < end)])
        found.append(pieces[-1][sequence])
        bits = (torch.cat([as_bits(one[i]) for one in found]) for i in (0, 1))
        return tuple(x.view(self.rows.dtype) for x in bits)

    def expected(self) -> tuple[Inputs, Lengths, Score]:
        """The keys of all levels of each sequence, one level after another."""
        device = self.rows.device
        lengths = lengths_of(starts(self.queries, device),
                             starts([len(k) for k, _ in self.keys], device))
        k, v = (torch.cat([as_bits(one[i]) for one in self.keys]).view(self.rows.dtype)
                for i in (0, 1))
        score = Score(self.head_dim ** -0.5, self.softcap, Mask(self.causal))
        return Inputs(self.rows, k, v, self.arguments.get('s_aux')), lengths, score


def packed(case: LevelCase, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return (out, lse) if case.is_packed else (out.flatten(0, 1), lse.transpose(0, 1).flatten(1))


def check_levels(case: LevelCase, device: str | torch.device) -> tuple[Tensor, Tensor]:
    """Runs it and holds out and LSE to the bar."""
    given = case.build(device).arguments
    out, lse = shared_prefix_attn(**given, return_softmax_lse=True)
    q = given['q']
    assert out.shape == q.shape and lse.shape == (*q.shape[:-3], q.size(-2), q.size(-3))
    inputs, lengths, score = case.expected()
    own_out, own_lse = packed(case, out, lse)
    if case.dtype == 'e4m3':
        batch = len(case.lengths)
        scales = Scales(*(given[f'{name}_descale'].expand(batch, -1) for name in 'qkv'))
        fp8_data.check_fp8(own_out, inputs, scales, score, lengths)
        fp8_data.check_fp8_lse(own_lse, inputs, scales, score, lengths)
        return out, lse
    ref = reference.attend_packed(inputs.to(torch.float64), score, lengths)
    if case.dtype in ('fp32', 'fp64'):
        bound = 1e-5 if case.dtype == 'fp32' else 1e-12
        torch.testing.assert_close(own_out.double(), ref.out, rtol=bound, atol=bound)
        torch.testing.assert_close(own_lse.double(), ref.lse, rtol=bound, atol=bound)
        return out, lse
    pt = reference.attend_packed(inputs, score, lengths)
    compare.check_close(own_out, ref.out, pt.out, 'out')
    compare.check_lse(own_lse, ref.lse)
    return out, lse
