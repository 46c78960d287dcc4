"""Calls with an AttentionMask, and what they have to give.

The oracle is attention in float64 with a bool for each query and key, and in the input dtype (the
measure of the bar, tests/support/compare.py). Keys that no query sees hold NaN; values do on a GPU,
where no query sees their whole tile.
"""
from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn3 import AttentionMask, flash_attn_func, flash_attn_varlen_func

from tests.support import compare
from tests.support.cases import DTYPES, NamedByChanges
from tests.support.lists import starts

TILE = 128    # keys of the widest K tile


def _causal(row: Tensor, keys: int) -> list[Tensor]:
    return [torch.zeros_like(row), (row + 1).clamp(max=keys)]


def _window(row: Tensor, keys: int) -> list[Tensor]:
    return [(row - 90).clamp(0, keys), (row + 40).clamp(max=keys)]


def _sinks_and_window(row: Tensor, keys: int) -> list[Tensor]:
    """As StreamingLLM (arXiv 2309.17453)."""
    sinks = torch.full_like(row, min(4, keys))
    return [torch.zeros_like(row), sinks, *_window(row, keys)]


def _prefix(row: Tensor, keys: int) -> list[Tensor]:
    return [torch.zeros_like(row), torch.maximum(row + 1, torch.full_like(row, 200)).clamp(
        max=keys)]


def _documents(row: Tensor, keys: int) -> list[Tensor]:
    begin = row // 70 * 70
    return [begin.clamp(max=keys), (begin + 70).clamp(max=keys)]


def _tree(row: Tensor, keys: int) -> list[Tensor]:
    """Completions of 50 tokens after a prompt of 100."""
    own = torch.where(row < 100, 0, 100 + (row - 100).div(50, rounding_mode='floor') * 50)
    prompt = torch.where(row < 100, 0, 100)
    return [torch.zeros_like(row), prompt.clamp(max=keys), own.clamp(max=keys),
            torch.maximum(own, row + 1).clamp(max=keys)]


def _blind(row: Tensor, keys: int) -> list[Tensor]:
    """Whole tiles of queries see nothing, and some rows of others."""
    sees = (row % 300 >= 130) & (row % 7 != 3)
    return [torch.zeros_like(row), torch.where(sees, keys, 0)]


INTERVALS: dict[str, Callable[[Tensor, int], list[Tensor]]] = {
    'causal': _causal, 'window': _window, 'sinks': _sinks_and_window, 'prefix': _prefix,
    'documents': _documents, 'tree': _tree, 'blind': _blind,
    'all': lambda row, keys: [torch.zeros_like(row), torch.full_like(row, keys)],
}


class Blocks(NamedTuple):
    """Blocks of which a share is visible. heads: 'one', 'k' or 'q'. by_batch: of each sequence."""
    block_q: int = 128
    block_k: int = 128
    share: float = 0.5
    heads: str = 'one'
    by_batch: bool = False


@dataclass(frozen=True)
class MaskCase(NamedByChanges):
    """intervals: a name in INTERVALS, 'one' or 'two' random ones of each query, or '': none."""
    lengths: tuple[tuple[int, int], ...] = ((300, 300), (300, 300))
    intervals: str = ''
    blocks: Blocks | None = None
    by_batch: bool = False    # intervals of each sequence of a batch
    head_dim: int = 64
    head_dim_v: int = 0
    dtype: str = 'bf16'
    heads: tuple[int, int] = (4, 2)
    is_packed: bool = False
    behind: int = 0    # rows of q and k after the last sequence
    softcap: float = 0.0
    s_aux: bool = False
    max_logits: bool = False
    lse: bool = True
    pack_gqa: bool | None = None
    sm_margin: int = 0
    out: bool = False

    @property
    def columns_v(self) -> int:
        return self.head_dim_v or self.head_dim

    def rows(self, i: int) -> list[slice]:
        """Of each sequence in packed q (0) or k (1)."""
        ends = starts(one[i] for one in self.lengths).tolist()
        return [slice(*pair) for pair in zip(ends, ends[1:])]


class Given(NamedTuple):
    """A case's tensors, all packed, and its mask. visible: of each sequence (heads_q, seqlen_q,
    seqlen_k) bool.
    """
    q: Tensor
    k: Tensor
    v: Tensor
    s_aux: Tensor | None
    mask: AttentionMask
    visible: list[Tensor]


def _intervals_of(case: MaskCase, number: int, generator: torch.Generator) -> Tensor:
    """(seqlen_q, n, 2) int32."""
    rows, keys = case.lengths[number]
    row = torch.arange(rows, device=generator.device)
    if case.intervals in INTERVALS:
        ends = torch.stack(INTERVALS[case.intervals](row, keys), -1)
    else:
        count = {'one': 1, 'two': 2}[case.intervals]
        ends = torch.randint(0, keys + 1, (rows, count, 2), generator=generator,
                             device=row.device).sort(-1)[0]
        ends[row % 11 == 5] = 0
    return ends.reshape(rows, ends.shape[1:].numel() // 2, 2).int()


def _blocks_of(case: MaskCase, generator: torch.Generator) -> Tensor:
    own = case.blocks
    heads = {'one': 1, 'q': case.heads[0], 'k': case.heads[1]}[own.heads]
    counts = [-(-max(one[i] for one in case.lengths) // size)
              for i, size in enumerate((own.block_q, own.block_k))]
    batch = len(case.lengths) if own.by_batch else 1
    return torch.rand(batch, heads, *counts, generator=generator,
                      device=generator.device) < own.share


# Makes a mask, and whether the queries of each sequence see its keys, (seqlen_q, seqlen_k) bool.
Maker = Callable[[MaskCase, torch.Generator], tuple[AttentionMask, list[Tensor]]]


def made(case: MaskCase, device: str | torch.device, maker: Maker | None = None) -> Given:
    """maker: of a mask that is another one than the intervals of the case; it has none then."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(str(case).encode()))
    mask, visible = None, [torch.ones(case.heads[0], *one, dtype=torch.bool, device=device)
                           for one in case.lengths]
    if maker is not None:
        mask, of_sequences = maker(case, generator)
        for shown, one in zip(visible, of_sequences):
            shown &= one
    if case.intervals:
        many = case.is_packed or case.by_batch
        drawn = [_intervals_of(case, number, generator) for number in range(
            len(case.lengths) if many else 1)]
        for number, shown in enumerate(visible):
            own = drawn[number if many else 0]
            key = torch.arange(shown.size(-1), device=device)
            shown &= ((own[..., :1] <= key) & (key < own[..., 1:])).any(1)
        if case.is_packed:
            behind = drawn[0].new_full((case.behind, *drawn[0].shape[1:]), 7)
            mask = AttentionMask.from_intervals(
                torch.cat([*drawn, behind]), starts((one[0] for one in case.lengths), device))
        else:
            mask = AttentionMask.from_intervals(torch.stack(drawn) if case.by_batch else drawn[0])
    if case.blocks:
        blocks = _blocks_of(case, generator)
        for number, shown in enumerate(visible):
            own = blocks[number if case.blocks.by_batch else 0]
            own = own.repeat_interleave(case.heads[0] // own.size(0), 0)
            places = [torch.arange(size, device=device) // block for size, block in zip(
                shown.shape[1:], case.blocks)]
            shown &= own[:, places[0]][..., places[1]]
        of_blocks = AttentionMask.from_blocks(blocks, *case.blocks[:2])
        mask = of_blocks if mask is None else mask & of_blocks
    return Given(*_tensors(case, visible, generator), mask, visible)


def _tensors(case: MaskCase, visible: list[Tensor], generator: torch.Generator) -> tuple:
    device = generator.device
    heads_q, heads_k = case.heads

    def normal(rows: list[slice], heads: int, columns: int) -> Tensor:
        shape = (rows[-1].stop if rows else 0) + case.behind, heads, columns
        return torch.randn(shape, generator=generator, device=device).to(DTYPES[case.dtype])

    q = normal(case.rows(0), heads_q, case.head_dim)
    k, v = (normal(case.rows(1), heads_k, dim) for dim in (case.head_dim, case.columns_v))
    for x in (q, k, v):
        x[len(x) - case.behind:] = math.nan
    for keys, shown in zip(case.rows(1), visible):
        is_hidden = ~shown.unflatten(0, (heads_k, -1)).any(2).any(1).T    # (seqlen_k, heads_k)
        k[keys] = k[keys].masked_fill(is_hidden[..., None], math.nan)
        if device.type == 'cuda':
            for first in range(0, len(is_hidden), TILE):
                tile = slice(keys.start + first, min(keys.start + first + TILE, keys.stop))
                v[tile, is_hidden[first:first + TILE].all(0)] = math.nan
    s_aux = torch.randn(heads_q, generator=generator, device=device) if case.s_aux else None
    return q, k, v, s_aux


def moved(given: Given, device: str) -> Given:
    """On another device; so is the mask, which has no lists there."""
    mask = copy.copy(given.mask)
    mask._kept = {}
    for name in ('_intervals', '_blocks', '_cu_seqlens'):
        x = getattr(mask, name)
        setattr(mask, name, None if x is None else x.to(device))
    tensors = (None if x is None else x.to(device) for x in given[:4])
    return Given(*tensors, mask, given.visible)


def sequences(case: MaskCase, given: Given) -> tuple[tuple[Tensor, ...], dict]:
    """q, k and v as a call takes them, and the lists of packed sequences by their names."""
    tensors, batch = given[:3], len(case.lengths)
    if not case.is_packed:
        return tuple(x.unflatten(0, (batch, len(x) // batch)) for x in tensors), {}
    lengths = {name: [one[i] for one in case.lengths] for i, name in enumerate('qk')}
    lists = {f'cu_seqlens_{name}': starts(one, given.q.device) for name, one in lengths.items()}
    return tensors, lists | {f'max_seqlen_{name}': max(one, default=0)
                             for name, one in lengths.items()}


def call(case: MaskCase, given: Given, **changes) -> list[Tensor | None]:
    """[out, lse, max_logits], packed; None for what is not asked for."""
    tensors, lists = sequences(case, given)
    options = dict(mask=given.mask, s_aux=given.s_aux, softcap=case.softcap,
                   return_attn_probs=case.lse, return_max_logits=case.max_logits,
                   pack_gqa=case.pack_gqa, sm_margin=case.sm_margin) | lists | changes
    function = flash_attn_varlen_func if case.is_packed else flash_attn_func
    if case.out:
        options['out'] = tensors[0].new_full((*tensors[0].shape[:-1], case.columns_v), math.nan)
    results = function(*tensors, **options)
    results = list(results) if isinstance(results, tuple) else [results]
    assert not case.out or results[0] is options['out']
    if not case.is_packed:
        results = [results[0].flatten(0, 1), *(x.transpose(0, 1).flatten(1) for x in results[1:])]
    if not case.lse:
        results.insert(1, None)
    return results + [None] * (3 - len(results))


def expected(case: MaskCase, given: Given, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logits) of packed tensors in a dtype."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    heads_k = case.heads[1]
    out = given.q.new_zeros(len(given.q), case.heads[0], case.columns_v, dtype=dtype)
    lse = given.q.new_full((case.heads[0], len(given.q)), -math.inf, dtype=wide)
    most = lse.clone()
    for rows, keys, shown in zip(case.rows(0), case.rows(1), given.visible):
        q = given.q[rows].to(dtype).unflatten(1, (heads_k, -1))
        k, v = (x[keys].to(dtype).nan_to_num(nan=0.0) for x in (given.k, given.v))
        scores = torch.einsum('qhgd,khd->hgqk', q, k).flatten(0, 1) * case.head_dim ** -0.5
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        scores = scores.masked_fill(~shown, -math.inf)
        if scores.size(-1):
            most[:, rows] = scores.amax(-1).to(wide)
        if given.s_aux is not None:
            sinks = given.s_aux.to(dtype)[:, None, None].expand(-1, scores.size(1), 1)
            scores = torch.cat([scores, sinks], -1)
        lse[:, rows] = scores.to(wide).logsumexp(-1)
        p = scores.softmax(-1).nan_to_num(nan=0.0)[..., :len(k)]
        out[rows] = torch.einsum('hgqk,khd->qhgd', p.unflatten(0, (heads_k, -1)), v).flatten(1, 2)
    return out, lse, most


def check(case: MaskCase, given: Given, results: list[Tensor | None]) -> None:
    """Holds results to the bar; queries that see no key are 0 to the bit."""
    out, lse, max_logits = results
    ref, pt = (expected(case, given, dtype) for dtype in (torch.float64, DTYPES[case.dtype]))
    assert out.shape == ref[0].shape and out.dtype == given.q.dtype
    compare.check_close(out, ref[0], pt[0], 'out')
    assert (lse is not None) == case.lse and (max_logits is not None) == case.max_logits
    for name, got, wanted in (('lse', lse, ref[1]), ('max_logits', max_logits, ref[2])):
        if got is not None:
            compare.check_lse(got, wanted, name)
    is_blind = (ref[2] == -math.inf).T
    assert (out[is_blind] == 0).all()


def check_case(case: MaskCase, device: str | torch.device) -> None:
    """Runs a case and holds it to the bar; an error says how to repeat it."""
    with compare.naming(case):
        given = made(case, device)
        check(case, given, call(case, given))


def check_documents(device: str, dtype: torch.dtype, head_dim: int, has_rows: bool = True,
                    causal: bool = True, by_batch: bool = False, s_aux: bool = False,
                    softcap: float = 0.0, out: bool = False, deterministic: bool = False) -> None:
    """Results and gradients with documents, which are attended as packed sequences, beside those
    with the same intervals. has_rows: each sequence is rows of memory; else the batch is inside.
    """
    ends = torch.tensor([[3, 40, 40, 257, 290], [0, 130, 131, 200, 300]], dtype=torch.int32)
    mask = AttentionMask.documents((ends if by_batch else ends[0]).to(device), 300, causal=causal)
    shape = (2, 300) if has_rows else (300, 2)
    tensors = [torch.randn(*shape, heads, head_dim, device=device, dtype=dtype)
               for heads in (4, 2, 2, 4)]
    sinks = torch.randn(4, device=device) if s_aux else None
    given: list[list[Tensor]] = []
    for each in (mask, AttentionMask.from_intervals(mask._intervals)):
        q, k, v = (x.detach().requires_grad_(not out) for x in tensors[:3])
        logits = None if sinks is None else sinks.detach().requires_grad_()
        own = [x if has_rows else x.transpose(0, 1) for x in (q, k, v, tensors[3])]
        place = torch.full_like(own[0], math.nan, requires_grad=False) if out else None
        results = flash_attn_func(*own[:3], softcap=softcap, s_aux=None if out else logits,
                                  mask=each, return_attn_probs=True, out=place,
                                  deterministic=deterministic)
        given.append(list(results))
        if not out:
            inputs = [x for x in (q, k, v, logits) if x is not None]
            lse = results[1].masked_fill(results[1] == -math.inf, 0)
            given[-1] += torch.autograd.grad([results[0], lse], inputs,
                                             [own[3], lse.detach().cos()])
    tolerance = 1e-6 if dtype == torch.float64 else 0.02
    for got, wanted in zip(*given, strict=True):
        got, wanted = got.detach().double(), wanted.detach().double()
        largest = float(wanted.nan_to_num(neginf=0).abs().max())
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * max(1, largest))
