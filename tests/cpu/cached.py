"""Calls of flash_attn_with_kvcache for the CPU tests, and what they must give.

A problem is drawn as the keys of each sequence, slot by slot, and laid out as a cache: dense or in
shuffled pages, with NaN wherever nothing may be read and -1 for page ids past the need. The result
is computed in float64, query by query, from the drawn keys and not from the cache.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.support.lists import ints, starts

DTYPES = {'fp64': torch.float64, 'fp32': torch.float32, 'fp16': torch.float16,
          'bf16': torch.bfloat16, 'e4m3': torch.float8_e4m3fn}
BOUNDS = {'fp64': 1e-12, 'fp32': 1e-5, 'fp16': 2e-3, 'bf16': 1.6e-2, 'e4m3': 1.6e-2}


@dataclass
class Problem:
    """lengths: the caches' before the append; queries, new: those of each sequence; new None: none.

    page_size 0: dense. rotary: columns, 0: none. idx: rows of a cache of twice the batch. shared:
    keys that all sequences have, in the cache for the first one only.
    """
    lengths: tuple[int, ...] = (5, 0, 17)
    queries: tuple[int, ...] = (1, 1, 1)
    new: tuple[int, ...] | None = None
    capacity: int = 24
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    dtype: str = 'fp32'
    page_size: int = 0
    idx: bool = False
    leftpad: tuple[int, ...] | None = None
    packed: bool = False
    rotary: int = 0
    interleaved: bool = True
    shared: int = 0
    rotary_seqlens: tuple[int, ...] | None = None
    int_length: bool = False
    sinks: bool = False
    scales: bool = False
    kv8: bool = False    # the cache (latent: of v) is e4m3 under q; new keys are exact in e4m3
    by_page: bool = False    # kv8: scales by page, NaN of those without keys
    latent: bool = False    # with qv
    options: dict = field(default_factory=dict)
    seed: int = 0

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(
            DTYPES[self.dtype])

    def draw_keys(self, *shape: int) -> Tensor:
        return self.draw(*shape).to(self.kept)

    @property
    def kept(self) -> torch.dtype:
        return DTYPES['e4m3' if self.kv8 else self.dtype]

    def build(self) -> Problem:
        """Draws everything; sets arguments, and keys and values of each sequence by slot."""
        self.generator = torch.Generator().manual_seed(self.seed)
        self.batch = len(self.lengths)
        heads_q, heads_k = self.heads
        dim, dim_v = self.dims
        self.q = [self.draw(count, heads_q, dim) for count in self.queries]
        draw_k = self.draw if self.latent else self.draw_keys
        self.k = [draw_k(length, heads_k, dim) for length in self.lengths]
        self.v = [self.draw_keys(length, heads_k, dim_v) for length in self.lengths]
        for own in (self.k, self.v):
            for x in own[1:]:
                as_bits(x)[:self.shared] = as_bits(own[0])[:self.shared]
        new, dtype = self.new or (0,) * self.batch, DTYPES[self.dtype]
        self.k_new = [self.draw_keys(count, heads_k, dim).to(dtype) for count in new]
        self.v_new = [self.draw_keys(count, heads_k, dim_v).to(dtype) for count in new]
        self.place = self._places()
        arguments = dict(q=torch.cat(self.q) if self.packed else torch.stack(self.q),
                         k_cache=self._laid_out(self.k, dim), v_cache=self._laid_out(self.v, dim_v),
                         cache_seqlens=self.lengths[0] if self.int_length else ints(self.lengths))
        arguments |= self._lists() | self._tensors(new) | self.options
        if self.latent:
            self.qv = [self.draw(count, heads_q, dim_v) for count in self.queries]
            arguments['qv'] = torch.cat(self.qv) if self.packed else torch.stack(self.qv)
        self.arguments = arguments
        return self

    def _places(self) -> Tensor:
        """(batch, capacity): slot of the cache, rows or pages one after the other."""
        if not self.page_size:
            rows = torch.arange(self.batch)
            if self.idx:
                rows = torch.randperm(2 * self.batch, generator=self.generator)[:self.batch]
            self.rows = rows
            return rows[:, None] * self.capacity + torch.arange(self.capacity)
        count = self.batch * self.capacity // self.page_size
        pages = torch.randperm(count + 2, generator=self.generator)[:count].view(self.batch, -1)
        self.pages = pages
        return (pages[:, :, None] * self.page_size + torch.arange(self.page_size)).flatten(1)

    def _laid_out(self, keys: list[Tensor], dim: int) -> Tensor:
        heads = self.heads[1]
        if self.page_size:
            shape = self.batch * self.capacity // self.page_size + 2, self.page_size, heads, dim
        else:
            shape = (2 if self.idx else 1) * self.batch, self.capacity, heads, dim
        dtype = DTYPES[self.dtype] if self.latent and keys is self.k else self.kept
        cache = torch.full(shape, math.nan, dtype=torch.float64).to(dtype)
        flat = as_bits(cache).view(-1, heads, dim)
        pads = self.leftpad or (0, *[self.shared] * (self.batch - 1))
        for place, own, pad in zip(self.place, keys, pads):
            flat[place[pad:len(own)]] = as_bits(own[pad:])
        return cache

    def _lists(self) -> dict:
        given = {}
        if self.page_size:
            table = self.pages.clone().int()
            new = self.new or (0,) * self.batch
            for b in range(self.batch):
                table[b, -(-(self.lengths[b] + new[b]) // self.page_size):] = -1
                table[b, :(b > 0) * self.shared // self.page_size] = -1
            given['page_table'] = table
        if self.idx:
            given['cache_batch_idx'] = self.rows.int()
        if self.leftpad:
            given['cache_leftpad'] = ints(self.leftpad)
        if self.packed:
            given |= dict(cu_seqlens_q=starts(self.queries), max_seqlen_q=max(self.queries))
        if self.rotary_seqlens:
            given['rotary_seqlens'] = ints(self.rotary_seqlens)
        return given

    def _tensors(self, new: tuple[int, ...]) -> dict:
        given = {}
        if self.new is not None and self.packed:
            given |= dict(k=torch.cat(self.k_new), v=torch.cat(self.v_new),
                          cu_seqlens_k_new=starts(new))
        elif self.new is not None:
            given |= dict(k=torch.stack(self.k_new), v=torch.stack(self.v_new))
        if self.rotary:
            angles = torch.rand(2 * self.capacity, self.rotary // 2, generator=self.generator,
                                dtype=torch.float64) * 6
            given |= dict(rotary_cos=angles.cos().to(DTYPES[self.dtype]),
                          rotary_sin=angles.sin().to(DTYPES[self.dtype]),
                          rotary_interleaved=self.interleaved)
        if self.sinks:
            given['s_aux'] = torch.randn(self.heads[0], generator=self.generator)
        if self.scales:
            rows = 1 if self.shared else self.batch
            given |= {f'{x}_descale': torch.rand(rows, self.heads[1], generator=self.generator).add(
                0.5).expand(self.batch, -1) for x in 'qkv'}
        if self.by_page:
            shape = self.batch * self.capacity // self.page_size + 2, self.heads[1]
            used = torch.zeros(shape[0], 1, dtype=torch.bool)
            for pages, length in zip(self.pages, self.lengths):
                used[pages[:-(-length // self.page_size)]] = True
            given |= {f'{x}_descale': torch.rand(shape, generator=self.generator).add(
                0.5).masked_fill(~used, math.nan) for x in 'kv'} | {'descale_by_page': True}
        return given


def as_bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.itemsize == 1 else x


def rotated_row(x: Tensor, position: int, given: dict) -> Tensor:
    """(heads, head_dim) at a position, pair by pair."""
    cos, sin = given['rotary_cos'][position].double(), given['rotary_sin'][position].double()
    half = len(cos)
    result = x.double().clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if given['rotary_interleaved'] else (i, i + half)
        result[:, a] = x[:, a].double() * cos[i] - x[:, b].double() * sin[i]
        result[:, b] = x[:, a].double() * sin[i] + x[:, b].double() * cos[i]
    return result.to(x.dtype)


def rotated(problem: Problem) -> tuple[list[Tensor], list[Tensor]]:
    """q and new k of each sequence, as they enter attention and the cache."""
    given = problem.arguments
    if not problem.rotary:
        return problem.q, problem.k_new
    begins = problem.rotary_seqlens or problem.lengths
    moves = given.get('causal', False) or given.get('window_size', (-1, -1)) != (-1, -1)

    def rows(x: Tensor, begin: int, step: int) -> Tensor:
        return torch.stack([rotated_row(row, begin + i * step, given)
                            for i, row in enumerate(x)]) if len(x) else x

    return ([rows(x, begin, int(moves)) for x, begin in zip(problem.q, begins)],
            [rows(x, begin, 1) for x, begin in zip(problem.k_new, begins)])


def sees(i: int, j: int, counts: tuple[int, int], given: dict) -> bool:
    """Whether query i sees key j; counts: queries and keys."""
    position = i + counts[1] - counts[0]
    left, right = given.get('window_size', (-1, -1))
    if given.get('causal', False):
        right = 0
    chunk = given.get('attention_chunk', 0)
    return ((left < 0 or j >= position - left) and (right < 0 or j <= position + right)
            and (not chunk or j // chunk == position // chunk))


def attend_row(q: Tensor, keys: tuple[Tensor, Tensor], sink: float | None, given: dict,
               qv: Tensor | None = None) -> tuple[Tensor, float]:
    """One query of one head, (head_dim), on the keys that it sees: out and LSE."""
    k, v = keys
    scores, columns = k @ q, len(q)
    if qv is not None:
        scores, columns = scores + v @ qv, columns + len(qv)
    scores = scores * given.get('softmax_scale', columns ** -0.5)
    if given.get('softcap', 0.0):
        scores = given['softcap'] * torch.tanh(scores / given['softcap'])
    weights = scores.exp()
    total = weights.sum().item() + (0 if sink is None else math.exp(sink))
    if total == 0:
        return v.new_zeros(v.size(1)), -math.inf
    return (weights[:, None] * v).sum(0) / total, math.log(total)


def expected(problem: Problem) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """out (queries, heads, head_dim_v) and LSE (queries, heads) of each sequence; new k, as they
    must be in the cache.
    """
    given = problem.arguments
    qs, new = rotated(problem)
    group = problem.heads[0] // problem.heads[1]
    outs, lses = [], []
    for b in range(problem.batch):
        pad = problem.leftpad[b] if problem.leftpad else 0
        k = torch.cat([problem.k[b].double(), new[b].double()])[pad:]
        v = torch.cat([problem.v[b].double(), problem.v_new[b].double()])[pad:]
        q = qs[b].double()
        if problem.scales:
            q, k, v = (x * given[f'{name}_descale'][b].double().repeat_interleave(times)[:, None]
                       for x, name, times in ((q, 'q', group), (k, 'k', 1), (v, 'v', 1)))
        if problem.by_page:
            pages = problem.place[b, pad:pad + len(k)] // problem.page_size
            k, v = (x * given[f'{name}_descale'][pages].double()[..., None]
                    for x, name in ((k, 'k'), (v, 'v')))
        out = q.new_zeros(len(q), problem.heads[0], problem.dims[1])
        lse = q.new_zeros(len(q), problem.heads[0])
        for i in range(len(q)):
            visible = [j for j in range(len(k)) if sees(i, j, (len(q), len(k)), given)]
            for head in range(problem.heads[0]):
                sink = given['s_aux'][head].item() if problem.sinks else None
                keys = k[visible, head // group], v[visible, head // group]
                qv = problem.qv[b][i, head].double() if problem.latent else None
                out[i, head], lse[i, head] = attend_row(q[i, head], keys, sink, given, qv)
        outs.append(out)
        lses.append(lse)
    return outs, lses, new
