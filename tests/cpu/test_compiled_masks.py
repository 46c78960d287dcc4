"""mask= under torch.compile and under activation checkpointing, on the CPU: one graph, whose
results and gradients are those of eager calls. On a GPU: tests/gpu/test_compiled_masks.py.
"""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from flash_attn3 import AttentionMask, flash_attn_func
from flash_attn3.ops import library, masked
from flash_attn3.ops.mask_lists import Tiles

from tests.support import plain_lists
from tests.support.called_ops import compilations
from tests.support.compiled_masks import (MASKS, attend, check_checkpointed, check_compiled,
                                          inputs)
from tests.support.lists import ints, starts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('fresh_compiler')]
OPS = torch.ops.flash_attn3


@pytest.mark.parametrize('dynamic', [False, True])
@pytest.mark.parametrize('name', MASKS)
def test_compiled(name, dynamic):
    check_compiled(name, 'cpu', torch.float64, 8, backend='aot_eager', dynamic=dynamic)


@pytest.mark.parametrize('name', MASKS)
def test_traced_for_a_gpu(name, monkeypatch):
    """One graph of tensors without data on a GPU, with the lists of its kernels."""
    monkeypatch.setattr(library, 'kernels_serve', lambda device: True)
    graphs = []

    def keep(graph: torch.fx.GraphModule, _) -> Callable:
        graphs.append(graph)
        return graph.forward

    with FakeTensorMode(allow_non_fake_inputs=True):
        *leaves, cu_seqlens = inputs(name, 'cuda', torch.bfloat16, 64)
        out, _ = torch.compile(attend, fullgraph=True, backend=keep)(
            *leaves, MASKS[name]('cuda'), cu_seqlens)
    assert out.shape == leaves[0].shape and len(graphs) == 1
    calls = [str(node.target) for node in graphs[0].graph.nodes]
    assert any('mask_lists' in call for call in calls) == (name != 'documents')


def test_the_default_backend():
    check_compiled('both', 'cpu', torch.float32, 8)


@pytest.mark.parametrize('use_reentrant', [False, True])
def test_checkpointed(use_reentrant):
    for name in MASKS:
        check_checkpointed(use_reentrant, name, 'cpu', torch.float64, 8)


def test_a_compiled_checkpoint():
    def layer(q: Tensor, mask: AttentionMask) -> Tensor:
        return flash_attn_func(q, q, q, mask=mask).sin()

    def model(q: Tensor, mask: AttentionMask) -> Tensor:
        for _ in range(2):
            q = torch.utils.checkpoint.checkpoint(layer, q, mask, use_reentrant=False)
        return q

    q = torch.randn(2, 100, 2, 8, dtype=torch.float64, requires_grad=True)
    mask = MASKS['both']('cpu')
    found = [torch.autograd.grad(function(q, mask).sum(), q) for function in (
        model, torch.compile(model, backend='aot_eager', fullgraph=True))]
    torch.testing.assert_close(*found)


def test_masks_made_in_the_graph():
    def function(q: Tensor, prefix: Tensor, ends: Tensor) -> Tensor:
        rows = q.size(1)
        mask = AttentionMask.prefix_lm(prefix, rows)
        masks = (mask, AttentionMask.documents(ends, rows), AttentionMask.tree([rows, 0], [-1, 0]),
                 mask & AttentionMask.documents(ends, rows, causal=False),
                 mask & AttentionMask.from_blocks(torch.ones(1, 2, 2, dtype=torch.bool), 64, 64))
        return sum(flash_attn_func(q, q, q, mask=mask) for mask in masks)

    q = torch.randn(2, 100, 2, 8, requires_grad=True)
    given = q, ints([3, 50]), ints([0, 40, 100])
    found = []
    for each in (function, torch.compile(function, backend='aot_eager', fullgraph=True)):
        out = each(*given)
        found.append([out, *torch.autograd.grad(out.square().sum(), q)])
    torch.testing.assert_close(*found)


def three_layers(q: Tensor, mask: AttentionMask) -> Tensor:
    for _ in range(3):
        q = flash_attn_func(q, q, q, mask=mask)
    return q


@pytest.mark.parametrize('head_dim, count', [(16, 1), (136, 2)])
def test_lists_are_made_once(head_dim, count, monkeypatch):
    """By a graph for all its layers, and by eager calls for later graphs. The lists are those of
    kernels, which the CPU does not read.
    """
    made = []
    key_lists = plain_lists.key_lists
    monkeypatch.setattr(masked, 'tiles_of', lambda q, v, general, *options: Tiles.of(
        q.size(-1), False, *options))
    monkeypatch.setattr(plain_lists, 'key_lists',
                        lambda *given: made.append(1) or key_lists(*given))
    q = torch.randn(1, 200, 2, head_dim, requires_grad=True)
    compiled = torch.compile(three_layers, backend='aot_eager', fullgraph=True)
    mask = AttentionMask.prefix_lm(ints([5]), 200)
    for calls in (count, 2 * count):
        compiled(q, mask).sum().backward()
        assert len(made) == calls
    wanted = three_layers(q, mask)
    assert len(made) == 3 * count
    torch.testing.assert_close(compiled(q, mask), wanted)
    assert len(made) == 3 * count and len(mask._kept) == 1


def test_one_graph_for_many_lengths():
    counter = CompileCounterWithBackend('aot_eager')
    compiled = torch.compile(lambda q, k, mask: flash_attn_func(q, k, k, mask=mask),
                             backend=counter, fullgraph=True, dynamic=True)
    shown = torch.ones(1, 2, 3).tril().bool()
    for length in (100, 110, 128):
        q, k = torch.randn(2, length, 2, 8), torch.randn(2, length + 30, 2, 8)
        wanted = flash_attn_func(q, k, k, mask=AttentionMask.from_blocks(shown, 64, 64))
        torch.testing.assert_close(compiled(q, k, AttentionMask.from_blocks(shown, 64, 64)), wanted)
    assert compilations(counter) == 1


def test_errors_of_traced_calls():
    compiled = torch.compile(attend, backend='eager')
    q = torch.randn(2, 90, 4, 8)
    with pytest.raises(RuntimeError, match='mask for a seqlen_q of 90, got one for 100'):
        compiled(q, q, q, torch.zeros(4), MASKS['intervals']('cpu'), None)


@pytest.mark.parametrize('packed', [False, True])
def test_opcheck(packed):
    shape = (100,) if packed else (1, 100)
    q = torch.randn(*shape, 2, 8, requires_grad=True)
    lists = (starts([60, 40]),) * 2 if packed else ()
    rows = ints([0, 20, 30, 50]).expand(*shape, 4).contiguous()
    blocks = torch.ones(2 if packed else 1, 1, 2, 2, dtype=torch.bool)
    opcheck(OPS.fwd_general.default, (q, q, q, *lists), dict(mask_rows=rows, mask_blocks=blocks))
    intervals = rows.unflatten(-1, (2, 2))
    opcheck(OPS.mask_lists.default, (intervals, blocks, *(lists or (None, None)), 2, 100, 100,
                                     100 * packed, 128, 128, 64))
