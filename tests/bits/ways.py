"""Computes a draw in its ways and compares the bits of out and LSE."""
from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import flash_attn3
from flash_attn3 import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

from tests.bits.draw import Draw, Piece, Way
from tests.support.cache_cases import as_bits
from tests.support.cases import DTYPES
from tests.support.lists import ints, starts

# Factors of splitmix64, as signed integers.
_ODD, _FIRST, _SECOND = -0x61c8864680b583eb, -0x40a7b892e31b1a47, -0x6b2fb644ecceee15


def noise(shape: tuple[int, ...], name: str, device: torch.device) -> Tensor:
    """About normal, by arithmetic on integers: the same on each device."""
    x = torch.arange(math.prod(shape), device=device) + (zlib.crc32(name.encode()) << 24)
    x = x * _ODD
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    total = sum((x >> shift) & 0xffff for shift in (0, 16, 32, 48))
    return ((total - 2 * 0xffff).float() / 37837).view(shape)    # 2^16 sqrt(4 / 12)


class Sequence(NamedTuple):
    """Queries and keys, (length, heads, head_dim) each. On a CPU in float64."""
    q: Tensor
    k: Tensor
    v: Tensor


class Computed(NamedTuple):
    """out: (rows, heads, head_dim_v), lse: (heads, rows)."""
    out: Tensor
    lse: Tensor


class Ways:
    """A draw on a device. has_bits: kernels compute it, so that the bits are equal; else plain
    PyTorch does, in float64, and differs by its rounding.
    """

    def __init__(self, draw: Draw, device: torch.device, has_bits: bool):
        self.draw, self.device, self.has_bits = draw, device, has_bits
        self.dtype = DTYPES[draw.dtype] if has_bits else torch.float64
        self.own = self.sequence('own', draw.length, draw.length)
        self.options = dict(draw.options, split_size=draw.split_size)
        if draw.has_sinks:
            self.options['s_aux'] = noise(draw.heads[:1], f'{self.name} sinks', device)

    @property
    def name(self) -> str:
        return f'{self.draw.seed} {self.draw.number}'

    def sequence(self, name: str, queries: int, keys: int) -> Sequence:
        draw, (heads_q, heads_k) = self.draw, self.draw.heads
        shapes = {'q': (queries, heads_q, draw.head_dim), 'k': (keys, heads_k, draw.head_dim),
                  'v': (keys, heads_k, draw.head_dim_v)}
        found = [noise(shape, f'{self.name} {name} {part}', self.device)
                 for part, shape in shapes.items()]
        return Sequence((2 * found[0]).to(self.dtype), *(x.to(self.dtype) for x in found[1:]))

    def others(self, which: str, lengths: tuple[tuple[int, int], ...]) -> list[Sequence]:
        return [self.sequence(f'{which} {i}', *one) for i, one in enumerate(lengths)]

    # --------------------------------------------------------------------------------------- calls
    def prompt(self) -> Computed:
        """The whole prompt alone, in a dense batch."""
        out, lse = flash_attn_func(*(x[None] for x in self.own), return_attn_probs=True,
                                   **self.options)
        return Computed(out[0], lse[0])

    def piece(self, way: Way, piece: Piece) -> Computed:
        begin, end = piece
        keys = self.draw.keys(piece)
        own = Sequence(self.own.q[begin:end], self.own.k[:keys], self.own.v[:keys])
        if way.is_cache:
            return self.on_cache(way, own)
        return self.packed(way, own) if way.layout == 'packed' else self.dense(way, own)

    def execution(self, way: Way) -> dict:
        return self.options | {'pack_gqa': way.pack_gqa, 'sm_margin': way.sm_margin}

    def run(self, way: Way, call: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
        """out and lse of the call, or of a replay of it."""
        if way.execution != 'graph' or self.device.type != 'cuda':
            return call()[:2]
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = call()[:2]
        out.fill_(math.nan), lse.fill_(math.nan)
        graph.replay()
        return out, lse

    def dense(self, way: Way, own: Sequence) -> Computed:
        lengths = own.q.size(0), own.k.size(0)
        before, after = (self.others(name, (lengths,) * len(which)) for name, which in (
            ('before', way.before[:2]), ('after', way.after[:2])))
        inputs = [torch.stack(x) for x in zip(*before, own, *after)]
        inputs = [x.requires_grad_(way.execution == 'gradients') for x in inputs]
        out, lse = self.run(way, lambda: flash_attn_func(
            *inputs, return_attn_probs=True, **self.execution(way)))
        return Computed(out[len(before)].detach(), lse[len(before)].detach())

    def packed(self, way: Way, own: Sequence) -> Computed:
        before, after = self.others('before', way.before), self.others('after', way.after)
        all_of = [*before, own, *after]
        used = [[x.size(0) for x in one] for one in zip(*all_of)]
        spare = [torch.full((way.spare, *x.shape[1:]), math.nan, dtype=x.dtype, device=x.device)
                 for x in own]
        inputs = [torch.cat([y for x in one for y in (x, rest)])
                  for one, rest in zip(zip(*all_of), spare)]
        inputs = [x.requires_grad_(way.execution == 'gradients') for x in inputs]
        lists = {f'cu_seqlens_{name}': starts([x + way.spare for x in count], self.device)
                 for name, count in zip('qk', used)}
        lists |= {f'max_seqlen_{name}': max(count) + way.spare + way.hint
                  for name, count in zip('qk', used)}
        if way.spare:
            lists |= {f'seqused_{name}': ints(count, self.device)
                      for name, count in zip('qk', used)}
        out, lse = self.run(way, lambda: flash_attn_varlen_func(
            *inputs, return_attn_probs=True, **lists, **self.execution(way)))
        first = sum(x + way.spare for x in used[0][:len(before)])
        rows = slice(first, first + own.q.size(0))
        return Computed(out[rows].detach(), lse[:, rows].detach())

    def on_cache(self, way: Way, own: Sequence) -> Computed:
        count = own.q.size(0)
        before, after = (self.others(name, tuple(
            (queries if way.is_packed else count, keys) for queries, keys in which))
            for name, which in (('before', way.before), ('after', way.after)))
        all_of, index = [*before, own, *after], len(before)
        given = self.cache(way, all_of)
        queries = [x.q.size(0) for x in all_of]
        if way.is_packed:
            given |= {'q': torch.cat([x.q for x in all_of]),
                      'cu_seqlens_q': starts(queries, self.device),
                      'max_seqlen_q': max(queries) + way.hint}
        else:
            given['q'] = torch.stack([x.q for x in all_of])
        if way.execution == 'metadata':
            given['scheduler_metadata'] = self.metadata(way, given, max(queries))
        given['num_splits'] = int(way.execution == 'one pass')
        out, lse = self.run(way, lambda: flash_attn_with_kvcache(
            **given, return_softmax_lse=True, **self.execution(way)))
        if not way.is_packed:
            return Computed(out[index], lse[index])
        first = sum(queries[:index])
        return Computed(out[first:first + count], lse[:, first:first + count])

    def cache(self, way: Way, all_of: list[Sequence]) -> dict:
        """Caches with NaN in each slot without a key, and the lists of the call."""
        page_size, lengths = way.page_size, [x.k.size(0) for x in all_of]
        order = torch.arange(len(all_of))
        if way.rows:
            order = torch.arange(2 * len(all_of) - 1, 0, -2)    # rows of a batch of twice as many
        rows = len(all_of) * (2 if way.rows else 1)
        capacity = max(1, max(lengths) + way.spare)
        lists = {'cache_seqlens': ints(lengths, self.device)}
        if way.rows:
            lists['cache_batch_idx'] = ints(order.tolist(), self.device)
        slots = [torch.arange(length, device=self.device) + row * capacity
                 for row, length in zip(order.tolist(), lengths)]
        shape = rows, capacity
        if page_size:
            columns = -(-capacity // page_size)
            pages = [-(-length // page_size) for length in lengths]
            shape = sum(pages) + 3, page_size
            ids = torch.argsort(noise(shape[:1], f'{self.name} pages', self.device))
            table = torch.full((rows, columns), -1, dtype=torch.int32, device=self.device)
            slots = []
            for row, own, length in zip(order.tolist(), ids.split([*pages, 3]), lengths):
                table[row, :own.numel()] = own.int()
                slot = torch.arange(length, device=self.device)
                slots.append(own[slot // page_size] * page_size + slot % page_size)
            lists['page_table'] = table
        caches = []
        for parts in zip(*((x.k, x.v) for x in all_of)):
            flat = torch.full((shape[0] * shape[1], *parts[0].shape[1:]), math.nan,
                              dtype=self.dtype, device=self.device)
            flat[torch.cat(slots)] = torch.cat(parts)
            caches.append(flat.view(*shape, *parts[0].shape[1:]))
        return dict(zip(('k_cache', 'v_cache'), caches), **lists)

    def metadata(self, way: Way, given: dict, most_queries: int) -> Tensor:
        """Made without split_size, as by a server that knows nothing of it."""
        draw, options = self.draw, self.draw.options
        lists = {name: given[name] for name in ('cu_seqlens_q',) if name in given}
        slots = (given['page_table'].size(1) * way.page_size if way.page_size
                 else given['k_cache'].size(1))
        return flash_attn3.get_scheduler_metadata(
            given['cache_seqlens'].numel(), most_queries, slots, *draw.heads,
            draw.head_dim, given['cache_seqlens'], self.dtype, draw.head_dim_v,
            page_size=way.page_size or None, causal=options['causal'],
            window_size=options.get('window_size', (-1, -1)),
            attention_chunk=options.get('attention_chunk', 0),
            has_softcap=options.get('softcap', 0.0) > 0, pack_gqa=way.pack_gqa,
            sm_margin=way.sm_margin, **lists)


def compare(ways: Ways, got: Computed, wanted: Computed) -> None:
    for name, x, y in zip(Computed._fields, got, wanted):
        if ways.has_bits:
            different = as_bits(x) != as_bits(y)
            rows = different.any(-1).any(-1) if name == 'out' else different.any(0)
            at = rows.nonzero().flatten().tolist()
            most = (x.double() - y.double()).abs().max().item()
            assert not at, (f'{name}: {len(at)} of {len(rows)} rows differ, by {most:.2g} at most; '
                            f'the first is {at[0]}')
        else:
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def check(draw: Draw, device: torch.device, has_bits: bool) -> Computed:
    """Gives what the prompt alone has; an AssertionError names the way and the piece."""
    ways = Ways(draw, device, has_bits)
    wanted = ways.prompt()
    for way in draw.ways:
        for begin, end in way.pieces:
            try:
                got = ways.piece(way, (begin, end))
                compare(ways, got, Computed(wanted.out[begin:end], wanted.lse[:, begin:end]))
            except Exception as error:
                raise AssertionError(f'{draw}: rows {begin} to {end} of {way}: {error}') from error
    return wanted


def digest(computed: Computed) -> bytes:
    return b''.join(as_bits(x.contiguous()).cpu().numpy().tobytes() for x in computed)
