"""The calls that bench_kvcache.py times, their inputs and contenders."""
from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import fields_of
from flash_attn3 import flash_attn_with_kvcache
from flash_attn3.bench import DTYPES, OURS, ROTATED_BYTES
from flash_attn3.bench.problem import MAX_SETS

SDPA = 'sdpa'
UNSHARED, WIDE = f'{OURS} unshared', f'{OURS} 16 bits'    # no shared_prefix; no e4m3
E4M3 = torch.float8_e4m3fn
LATENT = 64, 512    # head dims of k, and of v
E4M3_ROW = 656      # bytes of latents of e4m3, four scales and 16-bit rotary columns
MIXED_LENGTHS = (16384, 700, 4096, 64, 2100, 9000, 1, 333)
KINDS = 'dense', 'paged', 'mixed', 'append', 'prefix', 'fp8', 'latent'
OWN_KEYS = 128, 512    # least and most keys of a sequence after a shared prefix


@dataclass(frozen=True)
class Cell:
    """One call: a step of decoding, or with several queries of speculative decoding."""
    batch: int
    keys: int                 # in the cache; with is_mixed in the longest sequence
    heads: int = 32
    heads_k: int = 8
    head_dim: int = 128
    queries: int = 1
    page_size: int = 0        # 0: a dense cache
    is_mixed: bool = False    # lengths in MIXED_LENGTHS, in turn
    appends: bool = False     # the new keys and values are written too, rotated
    prefix: int = 0           # keys that all sequences share, in the same pages
    scales: str = ''          # an e4m3 cache, one scale for each of: 'heads', 'pages', 'keys'
    is_latent: bool = False   # absorbed MLA: one KV head with LATENT columns
    dtype: str = 'bf16'

    @property
    def kind(self) -> str:
        if self.is_latent or self.scales:
            return 'latent' if self.is_latent else 'fp8'
        if self.prefix or self.appends:
            return 'prefix' if self.prefix else 'append'
        return 'mixed' if self.is_mixed else 'paged' if self.page_size else 'dense'

    @property
    def lengths(self) -> list[int]:
        if self.prefix:
            pick, own = random.Random(2), self.keys - self.prefix
            least = min(OWN_KEYS[0], own)
            return [self.prefix + pick.randint(least, own) for _ in range(self.batch)]
        if not self.is_mixed:
            return [self.keys] * self.batch
        return [min(self.keys, length) for length, _ in zip(itertools.cycle(MIXED_LENGTHS),
                                                            range(self.batch))]

    @property
    def bytes(self) -> int:
        """The bytes that must be read and written, each once."""
        size, new = DTYPES[self.dtype].itemsize, self.queries if self.appends else 0
        shared = self.prefix * (self.batch - 1)
        rows = sum(self.lengths) - shared + 3 * new * self.batch    # new: read, written, read
        queries = self.batch * self.queries * self.heads
        if self.is_latent:    # q, qv and out
            key_bytes = E4M3_ROW if self.scales else size * sum(LATENT)
            return key_bytes * rows + size * (sum(LATENT) + LATENT[1]) * queries
        key_bytes = 2 * self.head_dim * (1 if self.scales else size)
        return key_bytes * rows * self.heads_k + 2 * size * self.head_dim * queries

    def label(self) -> str:
        parts = [self.kind, f'batch {self.batch}', f'{self.keys} keys',
                 f'{self.heads}/{self.heads_k} heads of {self.head_dim}', self.dtype]
        parts += [f'{self.queries} queries'] * (self.queries > 1)
        parts += [f'pages of {self.page_size}'] * (self.page_size > 0)
        parts += [f'{self.prefix} shared'] * (self.prefix > 0)
        parts += [f'scales of {self.scales}'] * bool(self.scales)
        return ', '.join(parts)

    def facts(self) -> dict:
        """The fields of a record: the kind, and those that differ from their defaults."""
        return {'kind': self.kind} | fields_of(self)

    @staticmethod
    def read(facts: dict) -> Cell:
        return Cell(**{name: x for name, x in facts.items() if name != 'kind'})


def cells(dtype: str) -> list[Cell]:
    dense = [Cell(batch, keys) for batch in (1, 8, 64) for keys in (1024, 4096, 16384)]
    groups = [Cell(1, 4096, heads, heads_k) for heads, heads_k in ((8, 1), (64, 8), (16, 16))]
    dims = [Cell(8, 4096, head_dim=head_dim) for head_dim in (64, 256)]
    paged = [Cell(8, 4096, page_size=size) for size in (1, 16, 64, 256)]
    more = [Cell(8, 4096, queries=4), Cell(8, 4096, page_size=16, queries=4)]
    mixed = [Cell(32, 16384, is_mixed=True), Cell(32, 16384, is_mixed=True, page_size=16)]
    append = [Cell(8, keys, page_size=size, appends=True) for keys in (1024, 4096)
              for size in (0, 16)]
    prefix = [Cell(64, shared + OWN_KEYS[1], heads, heads_k, page_size=size, prefix=shared)
              for heads, heads_k, size, shared in (
                  (32, 8, 64, 8192), (32, 8, 64, 32768), (32, 8, 16, 8192), (64, 8, 64, 32768),
                  (8, 1, 64, 8192), (8, 1, 64, 32768))]
    fp8 = [Cell(batch, 4096, page_size=size, scales=scales) for scales in ('heads', 'pages')
           for batch, size in ((16, 64), (64, 64), (64, 16), (64, 1))]
    latent = [latent_cell(batch, keys, heads, queries) for heads, queries, batch, keys in (
        (16, 1, 1, 16384), (16, 1, 64, 4096), (128, 1, 1, 16384), (128, 1, 64, 4096),
        (128, 2, 16, 4096))]
    latent += [replace(latent_cell(64, 4096, heads), scales='keys') for heads in (16, 128)]
    return [replace(cell, dtype=dtype) for cell in (
        *dense, *groups, *dims, *paged, *more, *mixed, *append, *prefix, *fp8, *latent)]


def latent_cell(batch: int, keys: int, heads: int, queries: int = 1) -> Cell:
    return Cell(batch, keys, heads, 1, sum(LATENT), queries, page_size=64, is_latent=True)


def quick_cells(dtype: str, cpu: bool) -> list[Cell]:
    keys = 96 if cpu else 4096
    small = dict(heads=4, heads_k=2, head_dim=64) if cpu else {}
    one = Cell(2, keys, dtype=dtype, **small)
    return [one, replace(one, page_size=16), replace(one, is_mixed=True),
            replace(one, page_size=16, appends=True),
            replace(one, page_size=16, batch=4, prefix=keys - 32),
            replace(one, page_size=16, scales='pages'),
            *(replace(latent_cell(2, keys, 4), dtype=dtype, scales=x) for x in ('', 'keys'))]


# ---------------------------------------------------------------------------------------- inputs
def inputs_of(cell: Cell, device: torch.device, seed: int) -> dict:
    """The arguments of flash_attn_with_kvcache."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[cell.dtype])

    new, page = cell.queries if cell.appends else 0, cell.page_size or 1
    capacity = -(-(cell.keys + new) // page) * page
    lengths = torch.tensor(cell.lengths, dtype=torch.int32, device=device)
    shape = (cell.batch, capacity, cell.heads_k, cell.head_dim)
    given = {'q': normal(cell.batch, cell.queries, cell.heads, cell.head_dim),
             'cache_seqlens': lengths, 'causal': True}
    if cell.page_size:
        shared = cell.prefix // page
        own = capacity // page - shared
        pages = shared + cell.batch * own
        shape = (pages, page, cell.heads_k, cell.head_dim)
        order = torch.randperm(pages, generator=generator, device=device).int()
        given['page_table'] = torch.cat([order[:shared].expand(cell.batch, -1),
                                         order[shared:].view(cell.batch, own)], 1)
    given |= {'shared_prefix': cell.prefix} if cell.prefix else {}
    given |= {'k_cache': normal(*shape), 'v_cache': normal(*shape)}
    if cell.scales and not cell.is_latent:
        given |= {name: given[name].to(E4M3) for name in ('k_cache', 'v_cache')}
        rows = cell.batch if cell.scales == 'heads' else shape[0]
        given |= {f'{name}_descale': torch.rand(
            rows, cell.heads_k, generator=generator, device=device) + 0.5 for name in 'kv'}
        given['descale_by_page'] = cell.scales == 'pages'
    if cell.is_latent:    # one tensor, latent columns first
        given['v_cache'], given['k_cache'] = given['k_cache'].split(LATENT[::-1], -1)
        given['qv'], given['q'] = given['q'].split(LATENT[::-1], -1)
        if cell.scales:
            given |= latents_of_e4m3(given['k_cache'], given['v_cache'])
    if cell.appends:
        rows = (cell.batch, new, cell.heads_k, cell.head_dim)
        angle = torch.arange(capacity, device=device)[:, None] / 10_000 ** torch.linspace(
            0, 1, cell.head_dim // 2, device=device)
        given |= {'k': normal(*rows), 'v': normal(*rows),
                  'rotary_cos': angle.cos().to(given['q'].dtype),
                  'rotary_sin': angle.sin().to(given['q'].dtype)}
    return given


def latents_of_e4m3(k: Tensor, v: Tensor) -> dict:
    """The latents in rows of E4M3_ROW bytes, with random scales for each 128 columns."""
    rows = torch.empty(*v.shape[:3], E4M3_ROW, dtype=torch.uint8, device=v.device)
    given = {'v_cache': rows[..., :512].view(E4M3), 'k_cache': rows[..., 528:].view(k.dtype),
             'v_descale': rows[..., 512:528].view(torch.float32)[:, :, 0]}
    given['v_descale'].uniform_(0.5, 1.5)
    given['v_cache'].copy_(v)
    given['k_cache'].copy_(k)
    return given


def input_sets(cell: Cell, device: torch.device) -> list[dict]:
    """Enough sets of inputs that together they exceed L2."""
    budget = ROTATED_BYTES if device.type == 'cuda' else 1
    count = max(1, min(MAX_SETS, -(-budget // cell.bytes)))
    return [inputs_of(cell, device, seed) for seed in range(count)]


# ------------------------------------------------------------------------------------- contenders
def ours(given: dict) -> Callable[[], Tensor]:
    return lambda: flash_attn_with_kvcache(**given)


def sdpa(given: dict, cell: Cell) -> Callable[[], Tensor]:
    """SDPA on a dense cache, with a mask where lengths differ or there are several queries."""
    if cell.page_size or cell.appends:
        raise RuntimeError('has no pages and does not append')
    q, k, v = (given[name].transpose(1, 2) for name in ('q', 'k_cache', 'v_cache'))
    options: dict = dict(enable_gqa=cell.heads != cell.heads_k)
    if cell.is_mixed or cell.queries > 1:
        options['attn_mask'] = visible(given, k.size(2))[:, None]
    return lambda: F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def visible(given: dict, capacity: int) -> Tensor:
    """(batch, queries, capacity): whether a query sees a slot."""
    q, lengths = given['q'], given['cache_seqlens']
    row = torch.arange(q.size(1), device=q.device)
    last = lengths[:, None] - q.size(1) + row
    return torch.arange(capacity, device=q.device) <= last[..., None]


def contenders(cell: Cell) -> dict[str, Callable[[dict, Cell], Callable[[], Tensor]]]:
    found = {OURS: lambda given, cell: ours(given), SDPA: sdpa}
    if cell.prefix:
        found[UNSHARED] = lambda given, cell: ours(given | {'shared_prefix': 0})
    if cell.scales:
        found[WIDE] = lambda given, cell: ours(widened(given))
    return found


def widened(given: dict) -> dict:
    """The arguments with a cache in the dtype of q: its elements times their scales."""
    wide = {key: x for key, x in given.items() if 'descale' not in key}
    if 'qv' in given:
        blocks = given['v_cache'].float().unflatten(-1, (4, -1))
        latents = (blocks * given['v_descale'][:, :, None, :, None]).flatten(-2)
        joint = torch.cat([latents.to(given['q'].dtype), given['k_cache']], -1)
        return wide | dict(zip(('v_cache', 'k_cache'), joint.split(LATENT[::-1], -1)))
    for name in 'kv':
        scale, cache = given[f'{name}_descale'], given[f'{name}_cache'].float()
        if not given['descale_by_page']:    # a page takes the scale of its sequence
            own, table = torch.ones_like(cache[:, 0, :, 0]), given['page_table'].long()
            scale = own.index_copy(0, table.flatten(), scale.repeat_interleave(table.size(1), 0))
        wide[f'{name}_cache'] = (cache * scale[:, None, :, None]).to(given['q'].dtype)
    return wide


def in_float32(given: dict, cell: Cell) -> Tensor:
    """The result of a call that has appended its keys, by SDPA on the gathered keys in float32."""
    if cell.scales:
        return in_float32(widened(given), replace(cell, scales=''))
    if cell.is_latent:
        joint = torch.cat([given['v_cache'], given['k_cache']], -1)
        return in_float32({key: x for key, x in given.items() if key != 'qv'} | {
            'q': torch.cat([given['qv'], given['q']], -1), 'k_cache': joint, 'v_cache': joint},
            replace(cell, is_latent=False))[..., :LATENT[1]]
    if cell.batch > 1:    # one entry at a time: gathered keys are large
        lists = ('q', 'k', 'v', 'cache_seqlens', 'page_table') if cell.page_size else (
            'q', 'k', 'v', 'cache_seqlens', 'k_cache', 'v_cache')
        return torch.cat([in_float32(given | {
            name: given[name][b:b + 1] for name in lists if name in given}, replace(cell, batch=1))
            for b in range(cell.batch)])
    new = cell.queries if cell.appends else 0
    k, v = given['k_cache'], given['v_cache']
    if cell.page_size:
        table = given['page_table'].long()
        k, v = (x[table].flatten(1, 2) for x in (k, v))
    later = given | {'cache_seqlens': given['cache_seqlens'] + new}
    q = given['q'] if not cell.appends else rotated(given)
    mask = visible(later, k.size(1))[:, None]
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def rotated(given: dict) -> Tensor:
    """The queries of a call that appends, rotated in float32 in pairs (2i, 2i + 1)."""
    q = given['q'].float()
    positions = given['cache_seqlens'].long()[:, None] + torch.arange(q.size(1), device=q.device)
    cos, sin = (given[f'rotary_{name}'].float()[positions][:, :, None] for name in ('cos', 'sin'))
    a, b = q[..., 0::2], q[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
