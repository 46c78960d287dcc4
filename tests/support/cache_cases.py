"""Calls of flash_attn_with_kvcache: what they look like, with their data and with poison around it.

A CacheCase prints itself as the Python that makes it, and seeds itself by that text: a failure is
repeated by `cache_oracle.check_case(CacheCase(...), 'cuda')`. Every slot that holds no key is NaN,
so is every page that no sequence needs, and page ids that are not needed point nowhere: with shared
keys those of all sequences but the first, too.
"""
from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import flash_attn3
from flash_attn3 import flash_attn_with_kvcache
from flash_attn3.cpu.reference import Mask, Score

from tests.support.cases import DATA, DTYPES, NamedByChanges
from tests.support.general_cases import SINKS
from tests.support.lists import starts
from tests.support.lists import ints

E4M3 = torch.float8_e4m3fn
NOWHERE = (-1, 2 ** 30)     # page ids that must not be followed
SPARE_PAGES = 3             # that no sequence has
LAYOUTS = ('', 'rows_of_both', 'heads_first', 'padded')


def as_bits(x: Tensor) -> Tensor:
    """A view of integers: e4m3 tensors cannot be indexed everywhere, and NaN equals itself."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def pages_of(arguments: dict) -> Tensor:
    """The pages of each sequence, (batch, pages)."""
    table, index = arguments['page_table'].long(), arguments.get('cache_batch_idx')
    return table if index is None else table[index.long()]


class Returned(NamedTuple):
    out: Tensor
    lse: Tensor | None
    max_logits: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in self if x is not None]


@dataclass(frozen=True)
class CacheCase(NamedByChanges):
    lengths: tuple[tuple[int, int], ...]    # queries, and slots in use before the call
    capacity: int = 0                       # slots of a sequence; 0: as many as the longest needs
    page_size: int = 0                      # 0: a dense cache
    head_dim: int = 128
    head_dim_v: int = 0                     # 0: that of q and k
    dtype: str = 'bf16'                     # or fp16, e4m3, fp32, fp64
    heads: tuple[int, int] = (6, 2)         # query heads, KV heads
    is_packed: bool = False                 # queries by cu_seqlens_q
    new: tuple[int, ...] = ()               # tokens that the call appends to each sequence
    new_packed: bool = False                # by cu_seqlens_k_new
    rotary: float = 0.0                     # share of the head dim, as kernels take it
    rotary_columns: int = 0                 # or exactly as many
    interleaved: bool = True
    own_positions: bool = False             # rotary_seqlens
    leftpad: tuple[int, ...] = ()
    shared: int = 0                         # shared_prefix: keys that only the first sequence has
    batch_idx: bool = False                 # twice as many rows, of page_table if there are pages
    length_as: str = 'tensor'               # or int, or none: the whole cache
    layout: str = ''                        # a name in LAYOUTS
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0
    tree: bool = False                      # bits at random over the last keys
    softcap: float = 0.0
    sinks: str = ''                         # a name in SINKS; '': none
    softmax_scale: float | None = None
    latent: bool = False                    # with qv: absorbed MLA
    rope_free: bool = False                 # latent: q and k_cache are None, of zeros in arguments
    kv8: bool = False                       # the cache is e4m3 under q of the dtype; latent: of v
    descales: bool = True                   # e4m3 alone has them, of q or of a cache
    by_page: bool = False                   # kv8: scales by page
    blocks: int = 1                         # latent, kv8: scales of a key
    float16_out: bool = False               # for e4m3
    num_splits: int = 0
    split_size: int = 0
    metadata: bool = False                  # from get_scheduler_metadata
    pack_gqa: bool | None = None
    sm_margin: int = 0
    data: str = 'normal'                    # a name in cases.DATA
    logit_std: float = 1.0
    lse: bool = True
    max_logits: bool = False
    out: bool = False                       # a given output

    @property
    def seed(self) -> int:
        """Equal for cases that differ only in how the work is done."""
        same = dataclasses.replace(self, num_splits=0, split_size=0, metadata=False, pack_gqa=None,
                                   sm_margin=0, lse=True, max_logits=False, out=False)
        return zlib.crc32(str(same).encode())

    @property
    def columns_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def wide(self) -> torch.dtype:
        return E4M3 if self.dtype == 'e4m3' else DTYPES[self.dtype]

    @property
    def kept(self) -> torch.dtype:
        """That of the cache of v."""
        return E4M3 if self.kv8 else self.wide

    @property
    def kept_k(self) -> torch.dtype:
        return self.wide if self.latent else self.kept

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def score(self) -> Score:
        mask = Mask(self.causal, self.window, self.chunk)
        columns = self.head_dim + self.columns_v * self.latent
        return Score(self.softmax_scale or columns ** -0.5, self.softcap, mask)

    @property
    def rotary_dim(self) -> int:
        step = 16 if self.dtype != 'e4m3' else 32
        return self.rotary_columns or int(self.rotary * self.head_dim) // step * step

    @property
    def queries(self) -> list[int]:
        return [one[0] for one in self.lengths]

    @property
    def slots(self) -> int:
        """Slots of a sequence, a multiple of the page size."""
        count = self.capacity or max((end for _, end in self.filled()), default=0) or 1
        step = self.page_size or 1
        return -(-count // step) * step

    def filled(self) -> list[tuple[int, int]]:
        """The slots [first, end) that hold the keys of each sequence after the call."""
        new = self.new or (0,) * self.batch
        pads = self.leftpad or (0,) * self.batch
        return [(pad, one[1] + more) for pad, one, more in zip(pads, self.lengths, new)]

    def positions(self) -> list[int]:
        """The position of the first new token of each sequence, for the rotation."""
        return [one[1] + 3 * (i + 1) * self.own_positions for i, one in enumerate(self.lengths)]

    # ------------------------------------------------------------------------------------- tensors
    def arguments(self, device: str | torch.device) -> dict:
        """All of the call, by name."""
        generator = torch.Generator(device).manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        heads_q, heads_k = self.heads
        slots = self.slots
        q = normal(1, sum(self.queries), heads_q, self.head_dim) * self.logit_std
        k = normal(1, self.batch * slots, heads_k, self.head_dim)
        v = normal(1, self.batch * slots, heads_k, self.columns_v)
        q, k, v = DATA[self.data](q, k, v, generator)
        k, v = (x[0].unflatten(0, (self.batch, slots)) for x in (k, v))
        given = self._cache(k, v, generator) | self._queries(q[0].to(self.wide))
        given |= self._new(k, v) | self._rotary(generator) | self._options(device)
        if self.sinks:
            change, dtype = SINKS[self.sinks]
            given['s_aux'] = change(normal(heads_q)).to(dtype)
        if self.tree:
            given['tree_mask'] = self._tree(generator)
        if self.latent:
            shape = *given['q'].shape[:-1], self.columns_v
            given['qv'] = (normal(*shape) * self.logit_std).to(self.wide)
        if self.rope_free:
            given |= {name: torch.zeros_like(given[name]) for name in ('q', 'k_cache')}
        if self.by_page:
            given |= self._page_scales(given, generator)
        elif self.latent and self.kv8 and self.descales:
            given['v_descale'] = self._key_scales(given['v_cache'], generator)
        elif self.kept == E4M3 and self.descales:
            for name in 'kv' if self.kv8 else 'qkv':
                rows = 1 if self.shared else self.batch
                given[f'{name}_descale'] = (0.5 + torch.rand(
                    rows, heads_k, generator=generator, device=device)).expand(self.batch, -1)
        if self.dtype == 'e4m3' and self.float16_out:
            given['out_dtype'] = torch.float16
        if self.metadata:
            given['scheduler_metadata'] = self._metadata(given)
        if self.out:
            shape = (*given['q'].shape[:-1], self.columns_v)
            given['out'] = torch.full(shape, math.nan, dtype=self.out_dtype, device=device)
        return given

    def _page_scales(self, given: dict, generator: torch.Generator) -> dict:
        """NaN of pages that hold no key before the call and are not filled up, whatever strides."""
        shape = self.heads[1], given['k_cache'].size(0)
        scales = {f'{name}_descale': 0.25 + torch.rand(shape, generator=generator,
                                                       device=generator.device).T for name in 'kv'}
        holds = torch.zeros(shape[1], dtype=torch.bool, device=generator.device)
        for b, (ids, (first, _), (_, before)) in enumerate(zip(
                pages_of(given), self.filled(), self.lengths)):
            first = max(first, self.shared if b else 0)
            holds[ids[first // self.page_size:-(-before // self.page_size)]] = True
        for x in scales.values():
            x[~holds] = math.nan
        return scales | {'descale_by_page': True}

    def _key_scales(self, v: Tensor, generator: torch.Generator) -> Tensor:
        """NaN of slots that hold no key before the call, whatever strides."""
        scale = 0.25 + torch.rand((self.blocks, *v.shape[:2]), generator=generator,
                                  device=v.device).movedim(0, -1)
        return scale.masked_fill(v.float().isnan().all(-1), math.nan)

    @property
    def out_dtype(self) -> torch.dtype:
        if self.dtype != 'e4m3':
            return self.wide
        return torch.float16 if self.float16_out else torch.bfloat16

    def _queries(self, q: Tensor) -> dict:
        """q: (total, heads, head_dim)."""
        if self.is_packed:
            return {'q': q, 'cu_seqlens_q': starts(self.queries, q.device),
                    'max_seqlen_q': max(self.queries, default=0)}
        count = self.queries[0] if self.lengths else 1
        assert set(self.queries) <= {count}
        return {'q': q.unflatten(0, (self.batch, count))}

    def _cache(self, k: Tensor, v: Tensor, generator: torch.Generator) -> dict:
        """k, v: (batch, slots, heads, head_dim), of all slots, also those yet to be filled."""
        device = k.device
        slot = torch.arange(self.slots, device=device)
        pads, before = (torch.tensor(x, dtype=torch.long, device=device)[:, None] for x in (
            self.leftpad or [0] * self.batch, [one[1] for one in self.lengths]))
        holds = (slot >= pads) & (slot < before)
        holds[1:] &= slot[None] >= self.shared
        where, shape = self._where(generator, device)
        caches = []
        for x, kept in ((k, self.kept_k), (v, self.kept)):
            x = x.masked_fill(~holds[..., None, None], math.nan)
            full = torch.full((*shape, *x.shape[2:]), math.nan, device=device)
            row, offset, used = where['row'], where['offset'], where['used']
            full[row[used], offset[used]] = x[used]
            caches.append(full.to(kept))
        lists = {'page_table': where['table']} if self.page_size else {}
        if self.batch_idx:
            lists['cache_batch_idx'] = where['index']
        if self.leftpad:
            lists['cache_leftpad'] = ints(self.leftpad, device)
        lists |= self._lengths_argument(device)
        return dict(zip(('k_cache', 'v_cache'), self._placed(caches)), **lists)

    def _lengths_argument(self, device: torch.device) -> dict:
        before = [one[1] for one in self.lengths]
        if self.length_as == 'none':
            return {}
        return {'cache_seqlens': before[0] if self.length_as == 'int' else ints(before, device)}

    def _where(self, generator: torch.Generator,
               device: torch.device) -> tuple[dict[str, Tensor], tuple[int, int]]:
        """(batch, slots) each: the row or page of a slot, its place in there, and whether it has
        one; the page table and cache_batch_idx; and (rows, slots of a row) of the cache.
        """
        slot = torch.arange(self.slots, device=device).expand(self.batch, -1)
        if not self.page_size:
            rows = self.batch * (2 if self.batch_idx else 1)
            order = torch.arange(self.batch, device=device)
            if self.batch_idx:
                order = torch.randperm(rows, generator=generator, device=device)[:self.batch]
            return dict(row=order[:, None].expand_as(slot), offset=slot, index=order.int(),
                        used=torch.ones_like(slot, dtype=torch.bool)), (rows, self.slots)
        needed = [-(-end // self.page_size) for _, end in self.filled()]
        shared = [(b > 0) * self.shared // self.page_size for b in range(self.batch)]
        pages = sum(needed) + SPARE_PAGES
        order = iter(torch.randperm(pages, generator=generator, device=device).tolist())
        table = [[next(order) if first <= i < count else NOWHERE[i % 2]
                  for i in range(self.slots // self.page_size)]
                 for first, count in zip(shared, needed)]
        table = ints(table, device).view(self.batch, self.slots // self.page_size)
        row = table.long().repeat_interleave(self.page_size, 1)
        firsts, counts = (torch.tensor(x, dtype=torch.long, device=device)[:, None] * self.page_size
                          for x in (shared, needed))
        index = None
        if self.batch_idx:
            table, index = self._scattered(table, generator)
        return dict(row=row, offset=slot % self.page_size, table=table, index=index,
                    used=(slot >= firsts) & (slot < counts)), (pages, self.page_size)

    def _scattered(self, table: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A page table of twice as many rows, and the row of each sequence; other rows point
        nowhere.
        """
        rows = 2 * self.batch
        index = torch.randperm(rows, generator=generator, device=table.device)[:self.batch]
        wider = table.new_full((rows, table.size(1)), NOWHERE[1])
        wider[index] = table
        return wider, index.int()

    def _placed(self, caches: list[Tensor]) -> list[Tensor]:
        """The caches in their layout; what lies between is NaN."""
        k, v = caches
        if self.layout == 'rows_of_both':
            both = torch.cat([x.contiguous().view(torch.uint8) for x in caches], -1)
            bytes_of_k = k.size(-1) * k.itemsize
            return [both[..., :bytes_of_k].view(k.dtype), both[..., bytes_of_k:].view(v.dtype)]
        if self.layout == 'heads_first':
            return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in caches]
        if self.layout == 'padded':
            wider = (torch.full((*x.shape[:2], x.size(2) + 1, x.size(3) + 16), math.nan,
                                device=x.device).to(x.dtype) for x in caches)
            views = [y[:, :, :x.size(2), :x.size(3)] for x, y in zip(caches, wider)]
            for x, view in zip(caches, views):
                as_bits(view).copy_(as_bits(x))
            return views
        return caches

    def _new(self, k: Tensor, v: Tensor) -> dict:
        """The tokens to append, which the slots after each sequence will hold."""
        if not self.new:
            return {}
        rows = [(slice(one[1], one[1] + more)) for one, more in zip(self.lengths, self.new)]
        new = [torch.cat([x[b, rows[b]] for b in range(self.batch)]).to(self.wide) for x in (k, v)]
        if self.new_packed:
            return dict(zip('kv', new), cu_seqlens_k_new=starts(self.new, k.device))
        assert len(set(self.new)) == 1
        return dict(zip('kv', (x.unflatten(0, (self.batch, self.new[0])) for x in new)))

    def _tree(self, generator: torch.Generator) -> Tensor:
        """A query always sees itself. Bits of columns that a sequence does not have are at random
        too.
        """
        device = generator.device
        rows = sum(self.queries)
        visible = torch.rand(rows, 128, generator=generator, device=device) < 0.6
        own = torch.tensor([i for count in self.queries for i in range(count)], device=device)
        visible[torch.arange(rows, device=device), own] = True
        packed = flash_attn3.pack_tree_mask(visible)
        return packed if self.is_packed else packed.unflatten(0, (self.batch, -1))

    def _rotary(self, generator: torch.Generator) -> dict:
        """Tables with angles at random; without a rotation the positions alone."""
        device = generator.device
        positions = {'rotary_seqlens': ints(self.positions(), device)} if self.own_positions else {}
        if not self.rotary_dim:
            return positions
        longest = max([*self.queries, *self.new])
        rows = max([self.slots, *(x + longest for x in self.positions())])
        angle = 2 * math.pi * torch.rand(rows, self.rotary_dim // 2, generator=generator,
                                         device=device)
        return positions | {'rotary_cos': angle.cos().to(self.wide),
                            'rotary_sin': angle.sin().to(self.wide),
                            'rotary_interleaved': self.interleaved}

    def _options(self, device: str | torch.device) -> dict:
        given = {'softmax_scale': self.softmax_scale, 'causal': self.causal,
                 'window_size': self.window, 'attention_chunk': self.chunk,
                 'softcap': self.softcap, 'num_splits': self.num_splits,
                 'pack_gqa': self.pack_gqa, 'sm_margin': self.sm_margin,
                 'return_softmax_lse': self.lse}
        given |= {'return_max_logits': True} if self.max_logits else {}
        given |= {'shared_prefix': self.shared} if self.shared else {}
        return given | ({'split_size': self.split_size} if self.split_size else {})

    def _metadata(self, given: dict) -> Tensor:
        heads_q, heads_k = self.heads
        lists = {name: given[name] for name in ('cu_seqlens_q', 'cu_seqlens_k_new')
                 if name in given}
        return flash_attn3.get_scheduler_metadata(
            self.batch, max(self.queries), self.slots, heads_q, heads_k, self.head_dim,
            ints([one[1] for one in self.lengths], given['q'].device), self.wide, self.columns_v,
            cache_leftpad=given.get('cache_leftpad'), page_size=self.page_size or None,
            max_seqlen_k_new=max(self.new, default=0), causal=self.causal, window_size=self.window,
            attention_chunk=self.chunk, has_softcap=self.softcap > 0, num_splits=self.num_splits,
            pack_gqa=self.pack_gqa, sm_margin=self.sm_margin, **lists)


def call(case: CacheCase, arguments: dict, **changes) -> Returned:
    """Runs it; changes: to the arguments."""
    if case.rope_free:
        changes |= dict(q=None, k_cache=None, softmax_scale=case.score.scale)
    result = flash_attn_with_kvcache(**arguments | changes)
    out, *others = (result,) if isinstance(result, Tensor) else result
    assert len(others) == 3 * case.lse + case.max_logits
    largest = others.pop() if case.max_logits else None
    assert all(x.numel() == 0 for x in others[1:])
    return Returned(out, others[0] if case.lse else None, largest)


def copied(arguments: dict) -> dict:
    """With caches, and scales of pages and keys, of their own: a call may write into them."""
    own = {}
    for name in ('k_cache', 'v_cache', 'k_descale', 'v_descale'):
        x = arguments.get(name)
        if isinstance(x, Tensor) and 0 not in x.stride():
            own[name] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            as_bits(own[name]).copy_(as_bits(x))
    return arguments | own


def mixed(count: int, most: int, queries: int = 1) -> tuple[tuple[int, int], ...]:
    """Sequences of up to `most` slots, one of them empty, in no order."""
    steps = itertools.cycle((most, 0, 1, most // 3, most // 2 + 1, 65, most - 1))
    return tuple((queries, min(most, next(steps))) for _ in range(count))


def small(lengths: Sequence[int] = (5, 0, 17), queries: int | Sequence[int] = 1,
          **fields) -> CacheCase:
    """A case for loops over rows. lengths: slots in use; queries: of each sequence, or one number
    for all.
    """
    counts = [queries] * len(lengths) if isinstance(queries, int) else queries
    return CacheCase(tuple(zip(counts, lengths, strict=True)), **dict(
        capacity=24, head_dim=16, heads=(4, 2), dtype='fp32') | fields)


def alone(case: CacheCase, arguments: dict, b: int, is_packed: bool = False
          ) -> tuple[CacheCase, dict]:
    """A case with sequence b of another one alone, on the same cache; is_packed: its queries come
    by cu_seqlens_q. A page table has no more columns than that sequence needs.
    """
    assert not case.new and not case.tree
    first, count = sum(case.queries[:b]), case.queries[b]
    own = {name: x for name, x in arguments.items() if name not in ('cu_seqlens_q', 'max_seqlen_q')}
    for name in ('q', 'qv'):
        if name in own:
            rows = own[name] if case.is_packed else own[name].flatten(0, 1)
            own[name] = rows[first:first + count].view(*(1,) * (not is_packed), count,
                                                       *rows.shape[1:])
    if is_packed:
        own |= {'cu_seqlens_q': starts([count], own['q'].device), 'max_seqlen_q': count}
    by_sequence = ['cache_seqlens', 'page_table', 'cache_leftpad', 'cache_batch_idx']
    if not case.by_page and not case.latent:
        by_sequence += ['q_descale', 'k_descale', 'v_descale']
    for name in by_sequence:
        if isinstance(own.get(name), Tensor):
            own[name] = own[name][b:b + 1]
    if not case.page_size and not case.batch_idx:
        own['cache_batch_idx'] = ints([b], own['q'].device)
    if case.page_size and case.length_as == 'tensor':
        own['page_table'] = own['page_table'][:, :max(1, -(-case.lengths[b][1] // case.page_size))]
    return dataclasses.replace(case, lengths=case.lengths[b:b + 1], is_packed=is_packed,
                               leftpad=case.leftpad[b:b + 1]), own
