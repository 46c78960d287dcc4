"""Calls of flash_attn3.distributed, and the same of the whole sequence in one process.

Used on the CPU in float64 (tests/cpu/test_ring_attention.py) and on GPUs (tests/gpu).
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from flash_attn3 import AttentionMask, distributed, flash_attn_func, flash_attn_varlen_func
from flash_attn3.cpu import reference, visible_keys
from flash_attn3.cpu.reference import Inputs, Mask, Score
from tests.support.lists import lengths_of

DOCUMENTS = (0, 3, 3, 17, 20, 41)


def _rows_of(rows: int) -> Tensor:
    return torch.arange(rows, dtype=torch.int32)


def _documents(rows: int, _) -> AttentionMask:
    ends = [[0, rows // 7, rows // 2, rows], [rows // 5, rows // 5, rows - 3, rows - 1]]
    return AttentionMask.documents(torch.tensor(ends, dtype=torch.int32), rows)


def _window(rows: int, _) -> AttentionMask:
    """Behind attention sinks; the last queries see nothing."""
    row = _rows_of(rows)
    ends = [torch.zeros_like(row), torch.full_like(row, min(2, rows)), row - rows // 8,
            row + rows // 20 + 1]
    intervals = torch.stack(ends, -1).clamp(0, rows).view(-1, 2, 2)
    intervals[rows - rows // 5:] = 0
    return AttentionMask.from_intervals(intervals)


def _scattered(rows: int, _) -> AttentionMask:
    """Two intervals of each query of each sequence, without an order."""
    ends = torch.stack([_rows_of(rows) * step % (rows + 1) for step in (7, 11, 3, 13)], -1)
    intervals = torch.stack([ends, ends.flip(0)]).view(2, rows, 2, 2)
    return AttentionMask.from_intervals(intervals.sort(-1).values.contiguous())


def _blocks_of(heads: int) -> Callable:
    def make(rows: int, _) -> AttentionMask:
        count = -(-rows // 64)
        shown = torch.arange(heads * count * count).view(heads, count, count) % 3 != 1
        return AttentionMask.from_blocks(shown, 64, 64) & _scattered(rows, None)
    return make


MASKS: dict[str, Callable] = {    # from the rows and cu_seqlens of a case
    'prefix': lambda rows, _: AttentionMask.prefix_lm(
        torch.tensor([rows // 3, rows - 2], dtype=torch.int32), rows),
    'packed': lambda rows, starts: AttentionMask.prefix_lm(
        torch.tensor([1, 0, 9, 0, 12], dtype=torch.int32), rows, starts),
    'documents': _documents, 'window': _window, 'scattered': _scattered,
    'query heads': _blocks_of(4), 'KV heads': _blocks_of(2)}


class Case(NamedTuple):
    """A call: ranks of the ring and of ulysses, rows of the whole, and arguments.

    options: of `ring_attention`; s_aux True: drawn ones; mask: a name in MASKS.
    """
    ring: int
    ulysses: int
    rows: int
    options: dict
    heads_k: int = 2

    @property
    def is_packed(self) -> bool:
        return 'cu_seqlens' in self.options

    @property
    def dim(self) -> int:
        """Which dimension has the rows."""
        return 0 if self.is_packed else 1

    def mask_on(self, device: torch.device) -> dict[str, AttentionMask]:
        """The option that is the mask, if there is one, on a device."""
        if 'mask' not in self.options:
            return {}
        starts = self.options.get('cu_seqlens')
        with torch.device(device):
            starts = None if starts is None else torch.tensor(starts, dtype=torch.int32)
            return dict(mask=MASKS[self.options['mask']](self.rows, starts))

    def where(self) -> dict:
        """The options that say which rows a rank has."""
        return {name: self.options[name] for name in ('zigzag', 'order') if name in self.options}

    def larger(self, factor: int) -> Case:
        """With so many times the rows, the windows and the documents."""
        options = dict(self.options)
        if 'window_size' in options:
            options['window_size'] = tuple(side if side == -1 else side * factor
                                           for side in options['window_size'])
        if self.is_packed:
            options['cu_seqlens'] = tuple(start * factor for start in options['cu_seqlens'])
        return self._replace(rows=self.rows * factor, options=options)


CASES = {
    'causal': Case(4, 1, 48, dict(causal=True)),
    'causal, three ranks, padded': Case(3, 1, 29, dict(causal=True, return_max_logits=True)),
    'causal, few rows': Case(4, 1, 5, dict(causal=True)),
    'full, two ranks, padded': Case(2, 1, 13, {}),
    'full, contiguous': Case(3, 1, 30, dict(zigzag=False)),
    'causal, contiguous': Case(4, 1, 30, dict(causal=True, zigzag=False)),
    'one rank': Case(1, 1, 11, dict(causal=True)),
    'window': Case(4, 1, 61, dict(window_size=(9, 3))),
    'causal window': Case(4, 1, 64, dict(causal=True, window_size=(17, -1))),
    'window, contiguous': Case(4, 1, 64, dict(causal=True, window_size=(10, 0), zigzag=False,
                                                return_max_logits=True)),
    'sinks, softcap': Case(4, 1, 45, dict(causal=True, s_aux=True, softcap=3.0,
                                          softmax_scale=0.3, return_max_logits=True)),
    'sinks, window': Case(3, 1, 45, dict(causal=True, s_aux=True, window_size=(5, -1))),
    'packed': Case(4, 1, 41, dict(causal=True, cu_seqlens=DOCUMENTS)),
    'packed, padded after': Case(3, 1, 47, dict(causal=True, cu_seqlens=DOCUMENTS, s_aux=True,
                                                return_max_logits=True)),
    'packed, full': Case(2, 1, 41, dict(cu_seqlens=DOCUMENTS)),
    'causal, order': Case(4, 1, 61, dict(
        causal=True, order=(2, 3, 6, 0, 5, 8, 1, 7, 11, 4, 9, 10))),
    'packed, order': Case(2, 1, 41, dict(causal=True, cu_seqlens=DOCUMENTS,
                                         order=(0, 3, 4, 1, 2, 5))),
    'packed, window': Case(4, 1, 41, dict(cu_seqlens=DOCUMENTS, window_size=(4, 2))),
    'ulysses': Case(1, 4, 21, dict(causal=True), heads_k=4),
    'ulysses, GQA repeated': Case(1, 4, 20, dict(causal=True, s_aux=True,
                                                 return_max_logits=True)),
    'both': Case(2, 2, 27, dict(causal=True, window_size=(11, -1), return_max_logits=True)),
    'both, contiguous': Case(2, 2, 26, dict(zigzag=False)),
    'mask of prefixes': Case(4, 1, 48, dict(mask='prefix')),
    'mask of documents': Case(4, 1, 61, dict(mask='documents')),
    'mask of scattered keys': Case(3, 1, 29, dict(mask='scattered')),
    'mask of a window, sinks, contiguous': Case(3, 1, 30, dict(mask='window', zigzag=False,
                                                               s_aux=True, return_max_logits=True)),
    'mask, order': Case(4, 1, 61, dict(
        mask='documents', order=(0, 5, 7, 3, 4, 9, 1, 6, 11, 2, 8, 10))),
    'mask, order, sinks, two ranks': Case(2, 1, 29, dict(
        mask='window', order=(1, 2, 4, 7, 0, 3, 5, 6), s_aux=True, return_max_logits=True)),
    'packed mask, order': Case(4, 1, 47, dict(mask='packed', cu_seqlens=DOCUMENTS,
                                              order=(3, 5, 0, 6, 2, 7, 1, 4))),
    'mask, few rows': Case(4, 1, 5, dict(mask='scattered')),
    'mask, packed': Case(4, 1, 47, dict(mask='packed', cu_seqlens=DOCUMENTS,
                                        return_max_logits=True)),
    'ulysses, mask of query heads': Case(1, 4, 21, dict(mask='query heads'), heads_k=4),
    'ulysses, mask of KV heads, GQA': Case(1, 4, 20, dict(mask='KV heads', s_aux=True)),
    'ulysses, mask, packed': Case(1, 4, 47, dict(mask='packed', cu_seqlens=DOCUMENTS,
                                                 return_max_logits=True), heads_k=4),
    'both, mask, order': Case(2, 2, 27, dict(mask='scattered', order=(1, 2, 5, 0, 3, 4))),
    'both, mask': Case(2, 2, 27, dict(mask='scattered')),
    'both, packed': Case(2, 2, 41, dict(causal=True, cu_seqlens=DOCUMENTS))}


class Drawn(NamedTuple):
    """Whole tensors, the same on all ranks."""
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    s_aux: Tensor | None


def drawn(case: Case, dtype: torch.dtype, head_dim: int = 16, head_dim_v: int = 8) -> Drawn:
    """4 query heads; on the CPU, from the seed."""
    batch = () if case.is_packed else (2,)
    tensors = [torch.randn(*batch, case.rows, heads, dim).to(dtype)
               for heads, dim in ((4, head_dim), (case.heads_k, head_dim),
                                  (case.heads_k, head_dim_v), (4, head_dim_v))]
    sinks = torch.randn(4, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return Drawn(*tensors, sinks if 's_aux' in case.options else None)


def leaves_of(tensors: Drawn) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in (*tensors[:3], tensors.s_aux)
            if x is not None]


def loss_of(out: Tensor, lse: Tensor, dout: Tensor) -> Tensor:
    """Uses both; rows without a key have an LSE of -inf."""
    return (out * dout).sum() + lse.masked_fill(lse.isinf(), 0).sin().sum()


def whole(case: Case, tensors: Drawn) -> list[Tensor]:
    """out, lse and the gradients of q, k, v and sinks, in this process alone; then max_logits, if
    the case has them.
    """
    options = {name: x for name, x in case.options.items() if name not in case.where()}
    options |= case.mask_on(tensors.q.device)
    leaves = leaves_of(tensors)
    if 's_aux' in options:
        options['s_aux'] = leaves[3]
    if not case.is_packed:
        out, lse, *largest = flash_attn_func(*leaves[:3], return_attn_probs=True, **options)
    else:
        starts = torch.tensor(options.pop('cu_seqlens'), dtype=torch.int32,
                              device=tensors.q.device)
        out, lse, *largest = flash_attn_varlen_func(*leaves[:3], starts, starts, 0, 0,
                                                    return_attn_probs=True, **options)
    return [out, lse, *torch.autograd.grad(loss_of(out, lse, tensors.dout), leaves), *largest]


def _visible(case: Case, tensors: Drawn) -> Tensor | list[Tensor] | None:
    """What the mask of a case shows."""
    if 'mask' not in case.options:
        return None
    mask, (q, k, *_), lists, lengths = case.mask_on('cpu')['mask'], tensors, (), None
    if case.is_packed:
        starts = torch.tensor(case.options['cu_seqlens'], dtype=torch.int32)
        lists, lengths = (starts, starts, 0, 0), lengths_of(starts, starts)
    given = mask.tensors_of('', (q, k), lists, None, lambda: None)
    return visible_keys.of_call(*given[:2], (q.size(1), k.size(1)), lengths)


def plain(case: Case, tensors: Drawn, lse: Tensor) -> list[Tensor]:
    """The same in the dtype of the tensors at every step, without lse; that of `whole` is given."""
    options = case.options
    score = Score(options.get('softmax_scale', tensors.q.size(-1) ** -0.5),
                  options.get('softcap', 0.0),
                  Mask(options.get('causal', False), options.get('window_size', (-1, -1)),
                       visible=_visible(case, tensors)))
    inputs = Inputs(*tensors[:3], tensors.s_aux)
    dlse = lse.cos().masked_fill(lse.isinf(), 0)
    if not case.is_packed:
        out = reference.attend(inputs, score).out
        gradients = reference.attend_backward(tensors.dout, dlse, inputs, score)
    else:
        starts = torch.tensor(options['cu_seqlens'])
        lengths = lengths_of(starts, starts)
        out = reference.attend_packed(inputs, score, lengths).out
        gradients = reference.attend_packed_backward(tensors.dout, dlse, inputs, score, lengths)
    return [out, lse, *(x for x in gradients if x is not None)]


def attention_of(case: Case, device_type: str) -> tuple[Callable, dict, dist.ProcessGroup]:
    """The function that the ranks call, the dimension that they shard, and the group over which
    gradients of sinks add up.
    All ranks ask for it; those that take no part get None instead of the last.
    """
    ranks = case.ring * case.ulysses
    if case.ulysses == 1:
        group = dist.new_group(list(range(ranks)))
        takes_part = dist.get_rank() < ranks
        return (lambda *args, **options: distributed.ring_attention(*args, group=group, **options),
                dict(group=group) | case.where(), group if takes_part else None)
    mesh = init_device_mesh(device_type, (case.ring, case.ulysses), mesh_dim_names=('r', 'u'))
    ring = mesh['r'] if case.ring > 1 else None
    groups = dict(group=mesh['u'], ring_group=ring)
    return (lambda *args, **options: distributed.ulysses_attention(*args, **groups, **options),
            dict(group=ring, ulysses_group=mesh['u']) | case.where(), dist.group.WORLD)


def on_ranks(case: Case, tensors: Drawn, attention: tuple, **others) -> list[Tensor]:
    """As `whole`, by all ranks, from `attention_of`. Padding is NaN."""
    attend, where, group = attention
    where = dict(dim=case.dim) | where
    *inputs, dout = [distributed.shard(x, pad=float('nan'), **where) for x in tensors[:4]]
    leaves = leaves_of(Drawn(*inputs, dout, tensors.s_aux))
    options = case.options | others | case.mask_on(tensors.q.device)
    if tensors.s_aux is not None:
        options['s_aux'] = leaves[3]
    out, *by_row = attend(*leaves[:3], return_attn_probs=True, seqlen=case.rows, **options)
    assert [x.requires_grad for x in by_row] == [True, *[False] * (len(by_row) - 1)]
    gradients = list(torch.autograd.grad(loss_of(out, by_row[0], dout.nan_to_num()), leaves))
    for gradient in gradients[3:]:
        dist.all_reduce(gradient, group=group)
    rows = [distributed.unshard(x, case.rows, **where) for x in (out, *gradients[:3])]
    lse, *largest = (distributed.unshard(x.transpose(-1, -2), case.rows,
                                         **where).transpose(-1, -2) for x in by_row)
    return [rows[0], lse, *rows[1:], *gradients[3:], *largest]
