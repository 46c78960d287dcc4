"""The op `bwd_out`: the bits of `bwd`, written to the given tensors and nowhere else; and the
gradient of a packed tensor, which it writes.
"""
from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks import memory
from flash_attn3 import bench, flash_attn_func, flash_attn_qkvpacked_func
from flash_attn3.bench import Shape
from flash_attn3.ops.dense_and_varlen import General, for_backward

from tests.gpu.test_backward import NAMES
from tests.support import compare, layouts
from tests.support.cases import GRADIENT_KINDS, Case
from tests.support.lists import starts

OPS = torch.ops.flash_attn3
KINDS = [kind for kind in GRADIENT_KINDS if kind.head_dim in (64, 96, 128, 256)]
every_kind = pytest.mark.parametrize('kind', KINDS, ids=str)
one_dtype = pytest.mark.parametrize('kind', [kind for kind in KINDS if kind.dtype == 'bf16'],
                                    ids=str)
CASE = Case(130, 203, heads_q=6, heads_k=2)    # no length fills a tile
# Heads of a longer row, from its second element on: TMA takes the strides, not the address.
SHIFTED_HEADS = layouts.Layout('shifted_heads', padding=(0, 0, 1, 0), offset=1)


class Backward:
    """A deterministic call of `bwd` on a case, and what it gave."""

    def __init__(self, case: Case, device: torch.device):
        q, k, v = case.tensors(device)
        generator = torch.Generator(device).manual_seed(case.seed + 1)
        out, lse = flash_attn_func(q, k, v, causal=case.causal, return_attn_probs=True)
        dout, dlse = (torch.randn(x.shape, generator=generator, device=device).to(x.dtype)
                      for x in (out, lse))
        self.tensors = dout, dlse, q, k, v, out, lse
        self.scalars = case.softmax_scale, case.causal, True
        self.expected = OPS.bwd(*self.tensors, *self.scalars)[:3]

    def into(self, *gradients: Tensor) -> None:
        assert OPS.bwd_out(*self.tensors, *gradients, *self.scalars).numel() == 0

    def check(self, gradients: tuple[Tensor, ...]) -> None:
        for name, *values in zip(NAMES, gradients, self.expected):
            compare.check_equal(*values, name)

    def blank(self) -> list[Tensor]:
        """dq, dk and dv, packed and full of NaN."""
        return [torch.full_like(x, math.nan) for x in self.expected]


# ----------------------------------------------------------------------------------------- strides
@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('layout', [*layouts.DIRECT, *layouts.COPIED, SHIFTED_HEADS], ids=str)
def test_layouts(layout, kind, device):
    """Each gradient alone, then all three; the NaN around them stays."""
    backward = Backward(CASE.of(kind), device)
    for indices in ((0,), (1,), (2,), (0, 1, 2)):
        given = [layout.place(x) if i in indices else x for i, x in enumerate(backward.blank())]
        around = {i: layouts.nan_count(given[i]) - given[i].numel() for i in indices}
        backward.into(*given)
        backward.check(given)
        assert {i: layouts.nan_count(given[i]) for i in indices} == around


@one_dtype
@pytest.mark.parametrize('is_packed', [False, True], ids=['dense', 'packed'])
def test_more_arguments(is_packed, kind, device):
    """`bwd_out` gives the bits of `bwd`, sinks too; the NaN around them stays."""
    lengths = {'cu_seqlens_q': starts((70, 0, 60), device), 'max_seqlen_q': 70,
               'cu_seqlens_k': starts((90, 30, 83), device)} if is_packed else {}
    sinks = torch.linspace(-1, 1, CASE.heads_q, device=device)
    general = General(**lengths, sinks=sinks, causal=kind.causal, window_left=50, softcap=20.0)
    tensors = [x[0] if is_packed else x for x in CASE.of(kind).tensors(device)]
    out, lse, _ = OPS.attend(*tensors, None, *general)
    given = torch.randn_like(out), None, *tensors, out, lse
    wanted = OPS.bwd(*given, *for_backward(general, True))
    around = [torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan, dtype=x.dtype, device=device)
              for x in tensors]
    gradients = [x[..., :x.shape[-1] // 2] for x in around]
    dsinks = OPS.bwd_out(*given, *gradients, *for_backward(general, True))
    for name, *values in zip((*NAMES, 'dsinks'), (*gradients, dsinks), wanted):
        compare.check_equal(*values, name)
    assert all(x[..., x.shape[-1] // 2:].isnan().all() for x in around)


@every_kind
@pytest.mark.parametrize('heads', [(4, 4), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize('offset', [0, 8, 1], ids=['packed', 'shifted', 'unaligned'])
def test_views_of_one_tensor(offset, heads, kind, device):
    """Views of (batch, seqlen, heads_q + 2 * heads_k, head_dim), also followed by more heads."""
    heads_q, heads_k = heads
    backward = Backward(Case(150, 150, heads_q=heads_q, heads_k=heads_k).of(kind), device)
    dq = backward.expected[0]
    shape = 2, 150, heads_q + 2 * heads_k + 1, kind.head_dim
    buffer = torch.full((offset + math.prod(shape),), math.nan, dtype=dq.dtype, device=device)
    packed = buffer[offset:].view(shape)
    *given, after = packed.split((heads_q, heads_k, heads_k, 1), dim=2)
    backward.into(*given)
    backward.check(given)
    assert after.isnan().all() and buffer[:offset].isnan().all()


@every_kind
def test_places_of_five_dimensions(kind, device):
    backward = Backward(Case(150, 150).of(kind), device)
    dq = backward.expected[0]
    packed = torch.full((2, 150, 4, 4, kind.head_dim), math.nan, dtype=dq.dtype, device=device)
    *given, after = packed.unbind(2)
    backward.into(*given)
    backward.check(given)
    assert after.isnan().all()


@one_dtype
@pytest.mark.parametrize('stride', [0, 1, 7, 2 ** 45 + 1])
def test_strides_of_size_1_dimensions_mean_nothing(stride, kind, device):
    for case in (Case(100, 90, batch=1, heads_q=1, heads_k=1), Case(1, 1, heads_q=3, heads_k=1)):
        backward = Backward(case.of(kind), device)
        given = [layouts.with_odd_size_1_strides(x, stride) for x in backward.blank()]
        backward.into(*given)
        backward.check(given)


@one_dtype
def test_a_head_dim_that_does_not_fill_its_kernel(kind, device):
    """The columns after it are those of the next row."""
    case = replace(CASE.of(kind), head_dim=kind.head_dim - 8)
    backward = Backward(case, device)
    given = [layouts.DIRECT[1].place(x) for x in backward.blank()]
    around = [layouts.nan_count(x) - x.numel() for x in given]
    backward.into(*given)
    backward.check(given)
    assert [layouts.nan_count(x) for x in given] == around


@every_kind
@pytest.mark.parametrize('seqlens', [(0, 7), (7, 0), (0, 0)], ids=str)
@pytest.mark.parametrize('layout', [layouts.DIRECT[0], layouts.COPIED[0]], ids=str)
def test_empty(layout, seqlens, kind, device):
    """Zeros where there are elements."""
    case = Case(*seqlens, heads_q=6, heads_k=2).of(kind)
    backward = Backward(case, device)
    given = [layout.place(x) for x in backward.blank()]
    around = [layouts.nan_count(x) - x.numel() for x in given]
    backward.into(*given)
    assert all((x == 0).all() for x in given)
    backward.check(given)
    assert [layouts.nan_count(x) for x in given] == around


@one_dtype
def test_no_batch(kind, device):
    backward = Backward(Case(5, 7, batch=0).of(kind), device)
    given = backward.blank()
    backward.into(*given)
    backward.check(given)


# ----------------------------------------------------------------------------------------- errors
BAD = [    # name, change, error
    ('dq', lambda x: x.mT.contiguous().mT, 'dq.stride(3) to be 1, got '),
    ('dk', lambda x: x[:1].expand_as(x), 'dk.stride(0) not to be 0, got 0'),
    ('dv', lambda x: x[:, 1:], 'dv to have the shape (2, 203, 2, 64), got (2, 202, 2, 64)'),
    ('dv', Tensor.float, 'dv.dtype to be that of q, bfloat16, got float32'),
    ('dk', Tensor.cpu, 'dk on the device of q, cuda:0, got cpu')]


@pytest.mark.smoke
@pytest.mark.parametrize('name, change, text', BAD, ids=[row[2].split(',')[0] for row in BAD])
def test_an_error_writes_nothing(name, change, text, cuda):
    backward = Backward(replace(CASE, head_dim=64), cuda)
    blank = backward.blank()
    given = [change(x) if name == each else x for each, x in zip(NAMES, blank)]
    with pytest.raises(RuntimeError) as error:
        backward.into(*given)
    assert f'flash_attn3.flash_attn_func: expected {text}' in str(error.value)
    assert all(x.isnan().all() for x in blank)


@pytest.mark.smoke
def test_gradients_in_the_memory_of_other_tensors_are_refused(cuda):
    backward = Backward(replace(CASE, head_dim=64), cuda)
    dq, dk, dv = backward.blank()
    q = backward.tensors[2]
    for given, text in (((q, dk, dv), 'dq with memory of its own, got the memory of q'),
                        ((dq, dk, dk), 'dk with memory of its own, got the memory of dv')):
        with pytest.raises(RuntimeError, match=f'flash_attn3.flash_attn_func: expected {text}'):
            backward.into(*given)


# ---------------------------------------------------------------------------------------- streams
@one_dtype
@pytest.mark.parametrize('layout', [layouts.DIRECT[0], layouts.COPIED[0]], ids=str)
def test_a_graph_replays_the_eager_bits(layout, kind, cuda):
    """Also with the copies that unaligned gradients take."""
    backward = Backward(CASE.of(kind), cuda)
    given = [layout.place(x) for x in backward.blank()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward.into(*given)
    for _ in range(2):
        for x in given:
            x.fill_(math.nan)
        graph.replay()
        backward.check(given)


# -------------------------------------------------------------------------- the gradient of a qkv
def packed_gradient(backward: Backward, qkv: Tensor, num_heads_q: int | None) -> Tensor:
    """From both outputs, with those gradients that the case has."""
    dout, dlse, *_ = backward.tensors
    qkv = qkv.detach().requires_grad_()
    outputs = flash_attn_qkvpacked_func(qkv, causal=backward.scalars[1], num_heads_q=num_heads_q,
                                        deterministic=True, return_attn_probs=True)
    return torch.autograd.grad(outputs, qkv, (dout, dlse))[0]


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('heads', [(4, 4), (6, 2)], ids=str)
def test_packed_gradients(heads, kind, device):
    """With five dimensions and with four; also where the tensor has another order in memory."""
    heads_q, heads_k = heads
    backward = Backward(Case(150, 150, heads_q=heads_q, heads_k=heads_k).of(kind), device)
    inputs, sizes = backward.tensors[2:5], (heads_q, heads_k, heads_k)
    flat = torch.cat(inputs, dim=2)
    for qkv in (flat, flat.transpose(0, 1).contiguous().transpose(0, 1),
                flat.transpose(1, 2).contiguous().transpose(1, 2)):
        gradient = packed_gradient(backward, qkv, heads_q)
        backward.check(gradient.split(sizes, dim=2))
        assert gradient.stride() == qkv.stride()
    if heads_q == heads_k:
        backward.check(packed_gradient(backward, torch.stack(inputs, dim=2), None).unbind(2))


@pytest.mark.parametrize('shape', [
    Shape(2, 1024, 1024, 4, 4, 64, causal=True), Shape(1, 1000, 1000, 8, 2, 128),
    Shape(1, 2048, 2048, 2, 1, 256)], ids=Shape.label)
def test_peak_memory_of_a_packed_backward(shape, cuda):
    """Memory beyond qkv, out, LSE and dout: the gradient and the workspace.

    With three gradients of their own, copied into the fourth, it would be qkv.nbytes more.
    """
    q, k, v, dout = bench.make_inputs(replace(shape, backward=True), cuda)[0]
    qkv = torch.cat((q, k, v), dim=2).requires_grad_()
    out = flash_attn_qkvpacked_func(qkv, causal=shape.causal, num_heads_q=shape.heads)
    peak = memory.peak_bytes(lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True))
    workspace = memory.expected_bytes(shape)['workspace']
    assert peak['requested'] == qkv.nbytes + workspace
