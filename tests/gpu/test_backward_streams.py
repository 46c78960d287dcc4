"""Gradients on side streams, in CUDA graphs, on a second GPU, past element 2^31, of 16k tokens."""
from __future__ import annotations

import pytest
import torch

from flash_attn3 import flash_attn_func

from tests.gpu.test_backward import check_gradients, gradients
from tests.gpu.test_large import FAR
from tests.support.cases import GRADIENT_KINDS, Case

CASE = Case(300, 500, heads_q=6, heads_k=2)
DELAY_CYCLES = 50_000_000    # about 30 ms
every_kind = pytest.mark.parametrize('kind', GRADIENT_KINDS, ids=str)


def forward_and_backward(inputs, dout, causal):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = flash_attn_func(*leaves, causal=causal)
    return torch.autograd.grad(out, leaves, dout)


@pytest.mark.smoke
@every_kind
def test_side_stream_waits_for_a_slow_producer(kind, cuda):
    """The inputs arrive late on the side stream; the default stream would read NaN."""
    case = CASE.of(kind)
    inputs = case.tensors(cuda)
    dout = torch.randn_like(inputs[0])
    sources = (*inputs, dout)
    late = [torch.full_like(x, float('nan')) for x in sources]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        for x, source in zip(late, sources):
            x.copy_(source)
        got = gradients(tuple(late[:3]), late[3], causal=case.causal)
    stream.synchronize()
    check_gradients(got, inputs, dout, None, case)


@pytest.mark.smoke
@every_kind
def test_forward_and_backward_in_one_graph(kind, cuda):
    """Replayed with other data than it was captured with."""
    case = CASE.of(kind)
    static = [x.clone() for x in case.tensors(cuda)]
    dout = torch.randn_like(static[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward_and_backward(static, dout, case.causal)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward_and_backward(static, dout, case.causal)
    for round_ in range(2):
        for x in (*static, dout):
            x.normal_(generator=torch.Generator(cuda).manual_seed(round_))
        graph.replay()
        check_gradients(got, tuple(static), dout, None, case)


@pytest.mark.smoke
@every_kind
def test_gradients_on_another_gpu_than_the_current_one(kind, second_cuda):
    case = CASE.of(kind)
    inputs = case.tensors(torch.device('cuda', 0))
    dout = torch.randn_like(inputs[0])
    got = gradients(tuple(x.to(second_cuda) for x in inputs), dout.to(second_cuda),
                    causal=case.causal)
    assert torch.cuda.current_device() == 0 and all(x.device == second_cuda for x in got)
    check_gradients(tuple(x.to('cuda:0') for x in got), inputs, dout, None, case)


@pytest.mark.parametrize('head_dim', [128, 256])
@pytest.mark.parametrize('causal', [False, True])
def test_more_elements_than_32_bits_count(causal, head_dim, cuda, needs_memory):
    """The last batch entry lies past element 2^31 of every tensor, and of the accumulator of dQ."""
    needs_memory(60)
    case = Case(512, 512, head_dim=head_dim, heads_q=8, heads_k=8, causal=causal)
    case_elements = 512 * 8 * head_dim
    shape = (FAR // case_elements + 1, 512, 8, head_dim)
    inputs = [torch.randn(shape, dtype=torch.bfloat16, device=cuda) for _ in range(3)]
    dout = torch.randn(shape, dtype=torch.bfloat16, device=cuda)
    got = gradients(tuple(inputs), dout, causal=causal)
    assert inputs[0].numel() > FAR
    for last in (slice(0, 1), slice(-1, None)):
        check_gradients(tuple(x[last] for x in got), tuple(x[last] for x in inputs), dout[last],
                        None, case)


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('head_dim', [64, 128, 256])
def test_sixteen_thousand(head_dim, causal, cuda, needs_memory):
    needs_memory(40)
    case = Case(16384, 16384, head_dim=head_dim, batch=1, heads_q=1, heads_k=1, causal=causal)
    inputs = case.tensors(cuda)
    dout = torch.randn_like(inputs[0])
    check_gradients(gradients(inputs, dout, causal=causal), inputs, dout, None, case)
