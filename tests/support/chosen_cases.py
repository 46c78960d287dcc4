"""Calls whose queries choose their keys, and what they have to give.

The keys of each query and KV head are gathered by plain indexing, and attended to in float64 (what
is meant) and in the input dtype (the measure of the bar, tests/support/compare.py). Slots that
nobody has chosen hold NaN.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn3 import flash_attn_sparse_func, flash_attn_with_kvcache

from tests.support import compare
from tests.support.cache_cases import E4M3, Returned, as_bits
from tests.support.lists import starts

DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32}
LATENT = dict(heads=(16, 1), head_dim=64, head_dim_v=512, latent=True)
OUTSIDE = -1, -7, -2 ** 31, 2 ** 31 - 1    # and the number of blocks


@dataclass(frozen=True)
class ChosenCase:
    """tokens: (batch, seqlen_q) or (total_q,). kv8: a cache of e4m3; with latent rows of 656 bytes
    if the head dims are 64 and 512. wild: indices outside are not all -1, and counts not all in
    their range. sparse: flash_attn_sparse_func. data: 'normal' or 'alike', where all indices of a
    list are one.
    """
    tokens: tuple[int, ...] = (3, 1)
    count: int = 130
    pages: int = 9
    page_size: int = 64
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: str = 'bf16'
    block: int = 1
    by_head: bool = False
    heads_first: bool = False
    counts: bool = False
    sinks: bool = False
    latent: bool = False
    kv8: bool = False
    wild: bool = False
    sparse: bool = False
    alike: bool = False
    softmax_scale: float | None = None
    softcap: float = 0.0
    num_splits: int = 0
    split_size: int = 0
    sm_margin: int = 0
    lse: bool = True
    max_logits: bool = False
    out: bool = False
    seed: int = 0

    @property
    def slots(self) -> int:
        return self.pages * self.page_size

    @property
    def scale(self) -> float:
        columns = self.head_dim + (self.head_dim_v if self.latent else 0)
        return columns ** -0.5 if self.softmax_scale is None else self.softmax_scale

    # ------------------------------------------------------------------------------- arguments
    def arguments(self, device: str | torch.device) -> dict:
        generator = torch.Generator(device).manual_seed(self.seed)
        heads_q, heads_k = self.heads
        wide = DTYPES[self.dtype]

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        given = self._lists(generator)
        given['q'] = normal(*self.tokens, heads_q, self.head_dim).to(wide)
        if self.latent:
            given['qv'] = normal(*self.tokens, heads_q, self.head_dim_v).to(wide)
        if self.sinks:
            given['s_aux'] = normal(heads_q)
        shape = self.pages, self.page_size, heads_k
        k, v = (normal(*shape, dim) for dim in (self.head_dim, self.head_dim_v))
        hidden = ~self._holds(given).view(shape)
        given['k_cache'], given['v_cache'] = (
            x.masked_fill(hidden[..., None], math.nan).to(dtype) for x, dtype in (
                (k, E4M3 if self.kv8 and not self.latent else wide),
                (v, E4M3 if self.kv8 else wide)))
        if self.kv8:
            given |= self._descales(given, hidden, generator)
        if self.heads_first:    # of the memory of a page
            for name in ('k_cache', 'v_cache'):
                x = as_bits(given[name]).transpose(1, 2).contiguous().transpose(1, 2)
                given[name] = x.view(given[name].dtype)
        if self.out:
            given['out'] = torch.full((*self.tokens, heads_q, self.head_dim_v), math.nan,
                                      dtype=wide, device=device)
        return given | self._options()

    def _lists(self, generator: torch.Generator) -> dict:
        device = generator.device
        lists = *self.tokens, *self.heads[1:] * self.by_head, self.count
        blocks = self.slots // self.block
        indices = torch.randint(0, max(1, blocks), lists, generator=generator, device=device)
        if self.alike:
            indices = indices[..., :1].expand(lists).clone()
        drawn = torch.rand(lists, generator=generator, device=device)
        indices[(drawn < 0.2) | (blocks == 0)] = -1
        rows = indices.flatten(0, -2)
        if len(rows) > 2:    # a query without keys
            rows[1] = -1
        is_wild = self.wild and device.type != 'cpu'    # the CPU path refuses that
        if is_wild:
            for i, value in enumerate((*OUTSIDE, blocks)):
                indices[(indices == -1) & (drawn * 1000 % 5 >= i)] = value
        given = {'indices': indices.int()}
        if self.counts:
            counts = torch.randint(0, self.count + 1, self.tokens, generator=generator,
                                   device=device)
            counts.view(-1)[-1:] = self.count + 9 if is_wild else self.count
            counts.view(-1)[2:3] = -3 if is_wild else 0
            given['index_counts'] = counts.int()
        return given | ({'index_block': self.block} if self.block > 1 else {})

    def _holds(self, given: dict) -> Tensor:
        """(slots, heads_k): whether some query has chosen it."""
        slots, exists = self.chosen(given)
        holds = torch.zeros(self.slots * self.heads[1] + 1, dtype=torch.bool, device=slots.device)
        head = torch.arange(self.heads[1], device=slots.device)[:, None]
        holds[torch.where(exists, slots * self.heads[1] + head, len(holds) - 1)] = True
        return holds[:-1].view(-1, self.heads[1])

    def chosen(self, given: dict) -> tuple[Tensor, Tensor]:
        """(queries, heads_k, keys): the slots, and whether the key exists."""
        indices = given['indices'].long().flatten(0, len(self.tokens) - 1)
        if not self.by_head:
            indices = indices[:, None].expand(-1, self.heads[1], -1)
        exists = (indices >= 0) & (indices < self.slots // self.block)
        if self.counts:
            counts = given['index_counts'].flatten()[:, None, None]
            exists &= torch.arange(self.count, device=indices.device) < counts
        block = torch.arange(self.block, device=indices.device)
        slots = (indices.masked_fill(~exists, 0)[..., None] * self.block + block).flatten(2)
        return slots, exists.repeat_interleave(self.block, -1)

    def _descales(self, given: dict, hidden: Tensor, generator: torch.Generator) -> dict:
        device = generator.device
        if not self.latent:
            batch = self.tokens[0]
            return {f'{name}_descale': 0.5 + torch.rand(
                batch, self.heads[1], generator=generator, device=device) for name in 'kv'}
        scale = 0.25 + torch.rand(*hidden.shape[:2], 4, generator=generator, device=device)
        scale = scale.masked_fill(hidden, math.nan)
        if (self.head_dim, self.head_dim_v) != (64, 512):
            return {'v_descale': scale}
        k, v = given['k_cache'], given['v_cache']
        rows = torch.cat([x.contiguous().view(torch.uint8) for x in (v, scale[:, :, None], k)], -1)
        assert rows.size(-1) == 656
        return {'v_cache': rows[..., :512].view(E4M3), 'k_cache': rows[..., 528:].view(k.dtype),
                'v_descale': rows[..., 512:528].view(torch.float32)[:, :, 0]}

    def _options(self) -> dict:
        options = {'softmax_scale': self.softmax_scale, 'return_softmax_lse': self.lse,
                   **({'return_max_logits': True} if self.max_logits else {})}
        if self.sparse:
            return options
        options |= dict(softcap=self.softcap, num_splits=self.num_splits,
                        split_size=self.split_size, sm_margin=self.sm_margin)
        if len(self.tokens) == 1:    # the last rows belong to no sequence if descales do not care
            options['cu_seqlens_q'] = starts([1] * self.tokens[0], 'cpu')
        return options

    # ------------------------------------------------------------------------------- the result
    def expected(self, given: dict) -> tuple[Returned, Returned, Tensor]:
        """(ref, pt, floor of the LSE): out (queries, heads_q, head_dim_v), LSE (heads_q,
        queries).
        """
        slots, exists = self.chosen(given)
        head = torch.arange(self.heads[1], device=slots.device)[:, None]
        exact = [torch.cat([as_bits(x).flatten(0, 1), as_bits(x.new_zeros(1, *x.shape[2:]))])[
            slots, head].view(x.dtype).double().masked_fill(~exists[..., None], 0)
                 for x in (given['k_cache'], given['v_cache'])]
        for i, name in enumerate(('k_descale', 'v_descale')):
            if (scale := given.get(name)) is None:
                continue
            if self.latent:
                scale = scale.flatten(0, 1)[slots[:, 0]].repeat_interleave(
                    self.head_dim_v // scale.size(-1), -1)[:, None].masked_fill(
                        ~exists[..., None], 0)
            else:
                scale = scale.repeat_interleave(len(slots) // len(scale), 0)[..., None, None]
            exact[i] = exact[i] * scale.double()
        wide = DTYPES[self.dtype]
        q = given['q'].flatten(0, len(self.tokens) - 1)
        qv = given['qv'].flatten(0, len(self.tokens) - 1) if self.latent else None
        narrow = [x.to(wide) for x in exact]
        ref, pt, rounded = (self._attend(x, qv, k, v, exists, given.get('s_aux')) for x, k, v in (
            (q.double(), *exact), (q, *narrow), (q.double(), *(x.double() for x in narrow))))
        floor = ((x - y).abs().nan_to_num(nan=0.0) for x, y in zip(rounded[1:], ref[1:]))
        return ref, pt, torch.maximum(*floor)

    def _attend(self, q: Tensor, qv: Tensor | None, k: Tensor, v: Tensor, exists: Tensor,
                s_aux: Tensor | None) -> Returned:
        if qv is not None:
            q, k = torch.cat([q, qv.to(q.dtype)], -1), torch.cat([k, v], -1)
        heads_k = self.heads[1]
        logits = torch.einsum('thgd,thnd->thgn', q.unflatten(1, (heads_k, -1)), k) * self.scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        logits = logits.masked_fill(~exists[:, :, None], -math.inf)
        largest = logits.amax(-1) if logits.size(-1) else logits.new_full(logits.shape[:-1],
                                                                          -math.inf)
        if s_aux is not None:
            sinks = s_aux.view(heads_k, -1, 1).to(logits.dtype)
            logits = torch.cat([logits, sinks.expand(len(q), -1, -1, 1)], -1)
        lse = logits.to(torch.float64).logsumexp(-1) if logits.size(-1) else logits.new_full(
            logits.shape[:-1], -math.inf)
        p = logits.softmax(-1)[..., :k.size(2)].nan_to_num(nan=0.0)
        out = torch.einsum('thgn,thnd->thgd', p, v)
        return Returned(out.flatten(1, 2), *(x.flatten(1, 2).T.double() for x in (lse, largest)))


def named(case: ChosenCase, given: dict) -> tuple[Callable, dict]:
    """The function of the case and its arguments."""
    if not case.sparse:
        if 'cu_seqlens_q' in given:
            given = given | {'cu_seqlens_q': given['cu_seqlens_q'].to(given['v_cache'].device)}
        return flash_attn_with_kvcache, given
    caches = {name: given[f'{name}_cache'].flatten(0, 1) for name in 'kv'}
    return flash_attn_sparse_func, {
        name: x for name, x in given.items() if not name.endswith('_cache')} | caches


def call(case: ChosenCase, given: dict, **changes) -> Returned:
    function, given = named(case, given | changes)
    result = function(**given)
    out, *others = (result,) if isinstance(result, Tensor) else result
    return Returned(out, others[0] if case.lse else None, others[-1] if case.max_logits else None)


def check_case(case: ChosenCase, device: str | torch.device) -> Returned:
    """Runs it, and holds output and LSE to the bar."""
    with compare.naming(case):
        given = case.arguments(device)
        got = call(case, given)
        assert case.out is (got.out is given.get('out'))
        check(case, given, got)
    return got


def check(case: ChosenCase, given: dict, got: Returned) -> None:
    ref, pt, floor = case.expected(given)
    assert got.out.shape == (*case.tokens, case.heads[0], case.head_dim_v)
    assert got.out.dtype == given['q'].dtype and (got.out is given.get('out') or
                                                  got.out.is_contiguous())
    compare.check_close(got.out.flatten(0, len(case.tokens) - 1), ref.out, pt.out, 'out')
    assert (got.lse is not None) == case.lse and (got.max_logits is not None) == case.max_logits
    for name, wanted, rows in zip(got._fields[1:], ref[1:], got[1:]):
        if rows is None:
            continue
        own = rows if len(case.tokens) == 1 else rows.transpose(0, 1).flatten(1)
        assert own.shape == wanted.shape and rows.is_contiguous()
        toward = (wanted - own).clamp(-floor, floor)    # K that is rounded to 16 bits
        compare.check_lse(own + toward.nan_to_num(nan=0.0), wanted, name)
