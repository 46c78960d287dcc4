"""The ops `mask_lists`, `attend` and `bwd` one after the other, on a GPU or the emulator, beside
float64: outliers among lists, blocks of 64, rows after the last packed sequence.
"""
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flash_attn3.cpu import visible_keys
from flash_attn3.ops.dense_and_varlen import Execution, General, MaskTensors, for_backward
from flash_attn3.ops.fp8 import EightBit
from flash_attn3.ops.mask_lists import Layout, Tiles, clean_rows

from tests.gpu.common import spoil_allocator
from tests.support import plain_lists  # noqa: F401 - the op, on CPU tensors
from tests.support.lists import starts

OPS = torch.ops.flash_attn3
HEADS, HEAD_DIM = (2, 1), 64
NAMES = 'out', 'dq', 'dk', 'dv'


def lists_of(rows: Tensor | None, blocks: Tensor | None, layout: Layout, tiles: Tiles,
             device: torch.device) -> MaskTensors:
    given = [None if x is None else x.to(device) for x in (rows, blocks, *layout[2:4])]
    made = [OPS.mask_lists(*given, HEADS[0], layout.queries, layout.keys, layout.all_keys, *sizes)
            for sizes in tiles.of_calls()]
    return MaskTensors(None if rows is None else made[0][0], None, made[0][1], made[-1][2])


def reference(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, visible: Tensor,
              softcap: float = 0.0) -> list[Tensor]:
    """out, dq, dk and dv of tensors with a batch, float64 on the CPU."""
    q, k, v = (x.cpu().double().requires_grad_() for x in (q, k, v))
    group = q.size(2) // k.size(2)
    scores = torch.einsum('bqhd,bkhd->bhqk', q, k.repeat_interleave(group, 2)) * q.size(3) ** -0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    weights = weights.masked_fill(~visible.any(-1, keepdim=True), 0)
    out = torch.einsum('bhqk,bkhd->bqhd', weights, v.repeat_interleave(group, 2))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.cpu().double())]


def computed(tensors: list[Tensor], general: General, deterministic: bool,
             mask: MaskTensors) -> tuple[Tensor, ...]:
    """out, dq, dk and dv. tensors: q, k, v and dout."""
    q, k, v, dout = tensors
    out, lse, _ = OPS.attend(q, k, v, None, *general, *Execution()[:-1], *EightBit(), *mask)
    return out, *OPS.bwd(dout, None, q, k, v, out, lse,
                         *for_backward(general, deterministic, mask))[:3]


def check(results: tuple[Tensor, ...], wanted: list[Tensor]) -> None:
    for name, own, ref in zip(NAMES, results, wanted, strict=True):
        error = (own.cpu().double() - ref).norm() / ref.norm()
        assert error < 0.01, f'{name}: relative error {error}'


def drawn(queries: tuple[int, ...], keys: tuple[int, ...], device: torch.device,
          head_dim: int = HEAD_DIM) -> list[Tensor]:
    """q, k, v and dout."""
    return [torch.randn(*rows, heads, head_dim, device=device).bfloat16()
            for rows, heads in zip((queries, keys, keys, queries), (*HEADS, HEADS[1], HEADS[0]))]


@pytest.mark.smoke
@pytest.mark.parametrize('deterministic', [False, True])
@pytest.mark.parametrize('kind', ['causal', 'sinks', 'blocks', 'both'])
def test_dense_sequences(kind, deterministic, device):
    torch.manual_seed(0)
    queries, keys = (1500, 1500) if kind == 'sinks' else (330, 460)
    end = torch.arange(1, queries + 1, dtype=torch.int32)
    sinks = torch.stack([end * 0, end.clamp(max=20)], -1)
    window = torch.stack([(end - 40).clamp(min=20).minimum(end), end], -1)
    causal = torch.stack([end * 0, end], -1)[None, :, None]
    rows = {'causal': causal, 'blocks': None}.get(kind, torch.stack([sinks, window], 1)[None])
    blocks = None
    if kind in ('blocks', 'both'):
        blocks = torch.rand(1, HEADS[0], -(-queries // 64), -(-keys // 64)) < 0.3
    layout, tiles = Layout(queries, keys), Tiles.of(HEAD_DIM, False, True)
    mask = lists_of(rows, blocks, layout, tiles.of_blocks() if kind == 'blocks' else tiles, device)
    if kind == 'sinks':
        assert mask.query_lists[0, 0, 0, 3] == 1    # the tile of keys that all queries see
    tensors = drawn((1, queries), (1, keys), device)
    visible = visible_keys.visible(None if rows is None else clean_rows(rows, layout), blocks,
                                   queries, keys).expand(1, HEADS[0], -1, -1)
    general = General(softmax_scale=HEAD_DIM ** -0.5)
    check(computed(tensors, general, deterministic, mask), reference(*tensors, visible))


@pytest.mark.smoke
@pytest.mark.parametrize('deterministic', [False, True])
@pytest.mark.parametrize('head_dim', [64, 128, 192, 256])
def test_softcap(head_dim, deterministic, device):
    """Steep slopes, hidden blocks, and rows whose two intervals leave tiles free and masked."""
    torch.manual_seed(2)
    queries, keys, softcap = 330, 460, 0.7
    end = torch.arange(1, queries + 1, dtype=torch.int32)
    rows = torch.stack([end * 0, end.clamp(max=20), (end - 40).clamp(min=20).minimum(end), end], -1)
    rows[:70] = torch.tensor([0, 300, 300, 460])
    rows, blocks = rows.view(1, queries, 2, 2), torch.rand(1, HEADS[0], 6, 8) < 0.6
    layout = Layout(queries, keys)
    mask = lists_of(rows, blocks, layout, Tiles.of(head_dim, True, True), device)
    tensors = drawn((1, queries), (1, keys), device, head_dim)
    visible = visible_keys.visible(clean_rows(rows, layout), blocks, queries, keys)
    general = General(softmax_scale=head_dim ** -0.5, softcap=softcap)
    check(computed(tensors, general, deterministic, mask),
          reference(*tensors, visible, softcap))


@pytest.mark.smoke
def test_rows_after_the_last_sequence(device):
    """They begin a list of their own: the number of lists before them is the largest possible."""
    torch.manual_seed(1)
    spoil_allocator(device)
    lengths, after = ((30, 5), (226, 123)), 100
    begins = [starts(own) for own in zip(*lengths)]
    queries, keys = (int(begin[-1]) + after for begin in begins)
    intervals = torch.randint(0, 124, (queries, 2, 2), dtype=torch.int32).sort(-1).values
    layout = Layout(queries, 123, *begins, keys)
    mask = lists_of(intervals, None, layout, Tiles.of(HEAD_DIM, False, True), device)
    tensors = drawn((queries,), (keys,), device)
    general = General(*(x.to(device) for x in begins), max_seqlen_q=226, max_seqlen_k=123,
                      softmax_scale=HEAD_DIM ** -0.5)
    out, dq, dk, dv = computed(tensors, general, False, mask)
    q, k, v, dout = tensors
    clean = clean_rows(intervals, layout)
    for (rows, columns), i, j in zip(lengths, *(x.tolist() for x in begins)):
        own, its = slice(i, i + rows), slice(j, j + columns)
        visible = visible_keys.visible(clean[None, own], None, rows, columns)
        wanted = reference(q[None, own], k[None, its], v[None, its], dout[None, own],
                           visible.expand(1, HEADS[0], -1, -1))
        check((out[None, own], dq[None, own], dk[None, its], dv[None, its]), wanted)
    for x in (out, dq, dk, dv):
        assert not x[-after:].any()
