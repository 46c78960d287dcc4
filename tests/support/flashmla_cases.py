"""Calls of FlashMLA's interface for keys chosen by the query, and what they have to give: the keys
of each query are gathered by plain indexing. Rows that nobody has chosen hold NaN.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support import compare
from tests.support.fp8_data import E4M3

LATENTS, ROTARY = 512, 64


@dataclass(frozen=True)
class FlashMlaCase:
    """tokens: (total_q,) of a prompt, or (batch, seqlen_q) on a cache of bytes. wild: of indices
    outside some are beyond the last row, as prompts may have them.
    """
    tokens: tuple[int, ...] = (9,)
    count: int = 128
    rows: int = 320
    heads: int = 16
    rotary: int = ROTARY
    counts: bool = False
    sink: bool = False
    wild: bool = False
    page_size: int = 64
    seed: int = 0

    @property
    def columns(self) -> int:
        return LATENTS + self.rotary

    def data(self, device: torch.device) -> FlashMlaData:
        generator = torch.Generator(device).manual_seed(self.seed)
        options = dict(generator=generator, device=device)
        indices = torch.randint(self.rows, (*self.tokens, self.count), **options).int()
        indices[torch.rand(indices.shape, **options) < 0.2] = -1
        indices.flatten(0, -2)[1] = -1    # a query without keys
        if self.wild:
            indices.flatten(0, -2)[1, ::2] = self.rows + 7
        counts = torch.randint(1, self.count, self.tokens[:1], **options).int()
        q = torch.randn(*self.tokens, self.heads, self.columns, **options).bfloat16()
        sink = torch.randn(self.heads, **options) * 3
        sink[:2] = torch.tensor([math.inf, -math.inf])
        latents = torch.randn(self.rows, LATENTS, **options)
        rotary = torch.randn(self.rows, self.rotary, **options).bfloat16()
        scale = 0.25 + torch.rand(self.rows, 4, **options)
        return FlashMlaData(self, q, indices, counts if self.counts else None,
                            sink if self.sink else None, latents, scale, rotary)


@dataclass
class FlashMlaData:
    case: FlashMlaCase
    q: Tensor
    indices: Tensor
    counts: Tensor | None
    sink: Tensor | None
    latents: Tensor
    scale: Tensor
    rotary: Tensor
    softmax_scale: float = 192 ** -0.5    # with the head dim before the absorption

    def exists(self) -> Tensor:
        """(queries, n): which indices name a key."""
        indices = self.indices.flatten(0, -2)
        exists = (indices >= 0) & (indices < self.case.rows)
        if self.counts is not None:
            counts = self.counts.repeat_interleave(len(indices) // len(self.counts))
            exists &= torch.arange(self.case.count, device=indices.device) < counts[:, None]
        return exists

    def poisoned(self, rows: Tensor) -> Tensor:
        """Rows whose keys nobody has chosen are NaN."""
        chosen = self.indices.flatten(0, -2)[self.exists()].long()
        is_chosen = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        is_chosen[chosen] = True
        return rows.masked_fill(~is_chosen[:, None], math.nan)

    def prompt_rows(self) -> Tensor:
        """(rows, 1, columns) in bfloat16."""
        rows = torch.cat([self.latents.bfloat16(), self.rotary], -1)
        return self.poisoned(rows)[:, None]

    def cache(self) -> Tensor:
        """(pages, page_size, 1, bytes): e4m3, four scales, bfloat16."""
        parts = (self.poisoned(self.latents).to(E4M3), self.poisoned(self.scale), self.rotary)
        rows = torch.cat([x.contiguous().view(torch.uint8) for x in parts], -1)
        return rows.view(-1, self.case.page_size, 1, rows.size(-1))

    def exact(self) -> Tensor:
        """(rows, columns) in float64."""
        latents = self.latents.bfloat16().double()
        if len(self.case.tokens) == 2:
            scale = self.scale.double().repeat_interleave(LATENTS // 4, -1)
            latents = self.latents.to(E4M3).double() * scale
        return torch.cat([latents, self.rotary.double()], -1)

    def check(self, out: Tensor, lse: Tensor, largest: Tensor | None = None) -> None:
        """lse, and the largest scores: (queries, heads), natural."""
        exists, rows = self.exists(), self.indices.flatten(0, -2).long()
        keys = self.exact()[rows.masked_fill(~exists, 0)].masked_fill(~exists[..., None], 0)
        q = self.q.flatten(0, -3)
        ref, ref_lse, ref_largest = self._attend(q.double(), keys, exists)
        pt, *_ = self._attend(q, keys.bfloat16(), exists)
        assert out.shape == (*self.q.shape[:-1], LATENTS) and out.dtype == torch.bfloat16
        assert (ref_lse == math.inf).any() and lse.dtype == torch.float32
        compare.check_close(out.flatten(0, -3), ref, pt, 'out')
        compare.check_lse(lse, ref_lse)
        if largest is not None:
            compare.check_lse(largest, ref_largest, 'max_logits')

    def _attend(self, q: Tensor, keys: Tensor, exists: Tensor) -> tuple[Tensor, ...]:
        logits = torch.einsum('thd,tnd->thn', q, keys) * self.softmax_scale
        logits = logits.masked_fill(~exists[:, None], -math.inf)
        lse = logits.double().logsumexp(-1)
        p = logits.softmax(-1).nan_to_num(nan=0.0)
        out = torch.einsum('thn,tnd->thd', p, keys[..., :LATENTS])
        if self.sink is not None:
            share = torch.sigmoid(lse - self.sink.double()).nan_to_num(nan=0.0)
            out = out * share[..., None].to(out.dtype)
        return out, lse.masked_fill(lse == -math.inf, math.inf), logits.amax(-1)
