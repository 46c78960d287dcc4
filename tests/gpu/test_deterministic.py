"""Deterministic mode of the backward: right, and the same bits on every call, also with other
work on the GPU. (tests/cpu/test_deterministic.py simulates its order.)
"""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_attn3 import flash_attn_func, flash_attn_qkvpacked_func

from tests.gpu.test_backward import NAMES, check_gradients, gradients
from tests.support import compare
from tests.support.cases import GRADIENT_KINDS, Case

PARTS = 2    # tests.record runs so many processes

every_kind = pytest.mark.parametrize('kind', GRADIENT_KINDS, ids=str)
one_dtype = pytest.mark.parametrize('kind', [x for x in GRADIENT_KINDS if x.dtype == 'bf16'],
                                    ids=str)
SHAPES = [(1, 1), (64, 128), (239, 1), (799, 3), (113, 203), (1023, 1024), (1024, 1023), (129, 127),
          (65, 321), (300, 10), (10, 300), (513, 512), (1, 2000), (2000, 1)]
# More tiles than fit on the GPU at once, few long heads, many short ones, GQA.
REPEATED = [Case(1000, 1100, batch=4, heads_q=16, heads_k=4), Case(700, 900, heads_q=6, heads_k=2),
            Case(4000, 4100, batch=1, heads_q=8, heads_k=8), Case(200, 200, batch=16, heads_q=8),
            Case(300, 2500, batch=1, heads_q=4, heads_k=1), Case(2500, 300, heads_q=8, heads_k=8)]


def inputs_of(case: Case, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor]:
    """(q, k, v) and dO."""
    inputs = case.tensors(device)
    generator = torch.Generator(device).manual_seed(case.seed + 1)
    dout = torch.randn(inputs[0].shape, generator=generator, device=device).to(inputs[0].dtype)
    return inputs, dout


def check_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for name, *values in zip(NAMES, got, expected):
        compare.check_equal(*values, name)


class Backward:
    """The op `bwd` on a case, deterministic, and how often it gave other bits than at first."""

    def __init__(self, case: Case, device: torch.device):
        (q, k, v), dout = inputs_of(case, device)
        out, lse = flash_attn_func(q, k, v, causal=case.causal, return_attn_probs=True)
        self.arguments = (dout, None, q, k, v, out, lse, case.softmax_scale, case.causal, True)
        self.differing = torch.zeros((), dtype=torch.int64, device=device)
        self.first = self.bits()

    def bits(self) -> list[Tensor]:
        return [x.view(torch.int16) for x in torch.ops.flash_attn3.bwd(*self.arguments)[:3]]

    def repeat(self) -> None:
        """Counts on the device: nothing waits for it."""
        self.differing += torch.stack([(a != b).any() for a, b in
                                       zip(self.bits(), self.first)]).any()


# ------------------------------------------------------------------------------------ right values
@every_kind
@pytest.mark.parametrize('heads', [(4, 4), (6, 2)], ids=str)
@pytest.mark.parametrize('seqlens', SHAPES, ids=str)
def test_shapes(seqlens, heads, kind, device):
    case = Case(*seqlens, heads_q=heads[0], heads_k=heads[1]).of(kind)
    inputs, dout = inputs_of(case, device)
    got = gradients(inputs, dout, causal=case.causal, deterministic=True)
    check_gradients(got, inputs, dout, None, case)


@every_kind
@pytest.mark.parametrize('seqlens', [(1, 8192), (4096, 64), (2000, 4096)], ids=str)
def test_long(seqlens, kind, device):
    case = Case(*seqlens, batch=1, heads_q=4, heads_k=2).of(kind)
    inputs, dout = inputs_of(case, device)
    got = gradients(inputs, dout, causal=case.causal, deterministic=True)
    check_gradients(got, inputs, dout, None, case)


@every_kind
@pytest.mark.parametrize('seqlens', [(0, 7), (7, 0), (0, 0)], ids=str)
def test_empty(seqlens, kind, device):
    case = Case(*seqlens).of(kind)
    inputs, dout = inputs_of(case, device)
    got = gradients(inputs, dout, causal=case.causal, deterministic=True)
    check_gradients(got, inputs, dout, None, case)


# ---------------------------------------------------------------------------------------- same bits
@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('case', REPEATED, ids=Case.sizes)
def test_fifty_repeats(case, kind, cuda):
    backward = Backward(case.of(kind), cuda)
    for _ in range(50):
        backward.repeat()
    assert int(backward.differing) == 0


@one_dtype
def test_a_thousand_repeats_with_other_work(kind, cuda):
    """Another stream multiplies matrices all the while: CTAs start late, and wait longer."""
    backward = Backward(REPEATED[0].of(kind), cuda)
    left, right = (torch.randn(2048, 2048, dtype=torch.bfloat16, device=cuda) for _ in range(2))
    product = torch.empty_like(left)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(1000):
        with torch.cuda.stream(stream):
            for _ in range(3):
                torch.mm(left, right, out=product)
        backward.repeat()
    assert int(backward.differing) == 0
    torch.cuda.synchronize()


@one_dtype
def test_two_at_once(kind, cuda):
    """On two streams: the CTAs of both share the multiprocessors, and each waits for its own."""
    cases = [REPEATED[0].of(kind), REPEATED[2].of(kind)]
    both = [Backward(case, cuda) for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in both]
    for _ in range(50):
        for backward, stream in zip(both, streams):
            with torch.cuda.stream(stream):
                backward.repeat()
    torch.cuda.synchronize()
    assert [int(backward.differing) for backward in both] == [0, 0]


@every_kind
def test_equal_entries_of_a_batch_have_equal_gradients(kind, cuda):
    """And those of a batch of one: other CTAs, the same order."""
    one = Case(700, 900, batch=1, heads_q=6, heads_k=2).of(kind)
    inputs, dout = inputs_of(one, cuda)
    options = {'causal': kind.causal, 'deterministic': True}
    expected = gradients(inputs, dout, **options)
    got = gradients(tuple(torch.cat([x, x]) for x in inputs), torch.cat([dout, dout]), **options)
    for half in range(2):
        check_same([x[half:half + 1] for x in got], expected)


# ------------------------------------------------------------------------------------- ways to ask
@pytest.fixture
def _setting():
    yield
    torch.use_deterministic_algorithms(False)


@every_kind
def test_by_the_setting_of_pytorch(kind, cuda, _setting):
    """Memory that PyTorch allocates is full of NaN then."""
    case = REPEATED[1].of(kind)
    inputs, dout = inputs_of(case, cuda)
    expected = gradients(inputs, dout, causal=case.causal, deterministic=True)
    torch.use_deterministic_algorithms(True)
    for _ in range(10):
        check_same(gradients(inputs, dout, causal=case.causal), expected)


@one_dtype
def test_packed(kind, cuda):
    case = Case(700, 700, heads_q=4, heads_k=4).of(kind)
    inputs, dout = inputs_of(case, cuda)
    expected = gradients(inputs, dout, causal=case.causal, deterministic=True)
    qkv = torch.stack(inputs, dim=2).requires_grad_()
    for _ in range(10):
        out = flash_attn_qkvpacked_func(qkv, causal=case.causal, deterministic=True)
        check_same(torch.autograd.grad(out, qkv, dout)[0].unbind(2), expected)


@one_dtype
def test_under_compile(kind, cuda):
    case = REPEATED[1].of(kind)
    inputs, dout = inputs_of(case, cuda)
    options = {'causal': case.causal, 'deterministic': True}
    expected = gradients(inputs, dout, **options)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: flash_attn_func(q, k, v, **options),
                             backend='aot_eager', fullgraph=True)
    leaves = [x.clone().requires_grad_() for x in inputs]
    for _ in range(10):
        check_same(torch.autograd.grad(compiled(*leaves), leaves, dout), expected)
    torch._dynamo.reset()


@every_kind
def test_a_graph_replays_the_eager_bits(kind, cuda):
    """The flags and the ticket are zeroed by every replay."""
    case = REPEATED[0].of(kind)
    backward = Backward(case, cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.ops.flash_attn3.bwd(*backward.arguments)[:3]
    for _ in range(2):
        for x in got:
            x.fill_(float('nan'))
        graph.replay()
        for x, expected, name in zip(got, backward.first, NAMES):
            compare.check_equal(x.view(torch.int16), expected, name)
