"""Streams, CUDA graphs, threads and a second GPU."""
import threading

import pytest
import torch

from flash_attn3 import flash_attn_func

from tests.gpu.common import check_same, every_kind, run
from tests.support import compare, layouts
from tests.support.cases import KINDS, Case

CASE = Case(300, 500, heads_q=6, heads_k=2)
DELAY_CYCLES = 50_000_000    # about 30 ms


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('layout', [layouts.DIRECT[0], layouts.COPIED[0]], ids=str)
def test_side_stream_waits_for_a_slow_producer(layout, kind, cuda):
    """The inputs arrive late on the side stream; the default stream would read NaN."""
    case = CASE.of(kind)
    tensors = case.tensors(cuda)
    expected = run(tensors, case)
    late = [layout.place(torch.full_like(x, float('nan'))) for x in tensors]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        for x, source in zip(late, tensors):
            x.copy_(source)
        got = run(late, case)
    stream.synchronize()
    check_same(got, expected)


@pytest.mark.smoke
@every_kind
def test_launches_that_depend_on_each_other(kind, cuda):
    """A kernel is launched while the one before still runs: it must wait before it reads what that
    one writes, and before it writes what that one reads.
    """
    case = Case(500, 500, heads_q=6, heads_k=6).of(kind)
    first, k, v = case.tensors(cuda)

    def chain(after_each=lambda: None):
        """Two alternating outputs: each becomes the next queries, and is then written again."""
        buffers = [torch.full_like(first, float('nan')) for _ in range(2)]
        x = first
        for i in range(20):
            x = flash_attn_func(x, k, v, causal=case.causal, out=buffers[i % 2])
            after_each()
        return buffers

    expected = chain(torch.cuda.synchronize)
    for got, wanted in zip(chain(), expected):
        compare.check_equal(got, wanted, 'out')
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(3):
        graph.replay()
    for got, wanted in zip(captured, expected):
        compare.check_equal(got, wanted, 'out')


@pytest.mark.smoke
@every_kind
def test_nothing_waits_for_the_gpu(kind, cuda):
    """The call returns while the stream is still busy before it."""
    case = CASE.of(kind)
    tensors = case.tensors(cuda)
    run(tensors, case)
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY_CYCLES)
    run(tensors, case)
    assert not torch.cuda.current_stream().query()


@every_kind
def test_two_streams_at_once(kind, cuda):
    streams = [torch.cuda.Stream() for _ in range(2)]
    cases = [Case(300, 500).of(kind), Case(257, 129, heads_q=8, heads_k=1).of(kind)]
    inputs = [case.tensors(cuda) for case in cases]
    expected = [run(tensors, case) for tensors, case in zip(inputs, cases)]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(50):
        for stream, tensors, case, kept in zip(streams, inputs, cases, results):
            with torch.cuda.stream(stream):
                kept.append(run(tensors, case))
    torch.cuda.synchronize()
    for kept, wanted in zip(results, expected):
        for got in kept:
            check_same(got, wanted)


def test_four_threads(cuda):
    """First calls of kernels of every kind at once, from threads with streams of their own."""
    cases = [Case(100 + 40 * i, 300 + i).of(kind) for i, kind in enumerate(KINDS)
             if not kind.missing_variants()]
    inputs = [case.tensors(cuda) for case in cases]
    torch.cuda.synchronize()
    results = [None] * len(cases)

    def work(first):
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(first, len(cases), 4):
                results[i] = run(inputs[i], cases[i])
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for case, tensors, (out, lse) in zip(cases, inputs, results):
        compare.check_forward(out, lse, tensors, case.causal)


# ----------------------------------------------------------------------------------------- graphs
@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('pack_gqa', [False, True])
@pytest.mark.parametrize('layout', [layouts.DIRECT[0], layouts.COPIED[0]], ids=str)
def test_graph_replays_with_new_data(layout, pack_gqa, kind, cuda):
    """Captured once, also with the copies that unaligned inputs and outputs take."""
    case = CASE.of(kind)
    tensors = [layout.place(x) for x in case.tensors(cuda)]
    given_out = layout.place(torch.zeros_like(tensors[0]))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(tensors, case, pack_gqa=pack_gqa)
        _, given_lse = run(tensors, case, pack_gqa=pack_gqa, out=given_out)
        alone = flash_attn_func(*tensors, causal=case.causal, pack_gqa=pack_gqa)
    for seed in range(3):
        torch.manual_seed(seed)
        for x in tensors:
            x.normal_()
        expected = run(tensors, case, pack_gqa=pack_gqa)
        for result in (out, lse, given_out, given_lse, alone):
            result.fill_(float('nan'))
        graph.replay()
        check_same((out, lse), expected)
        check_same((given_out, given_lse), expected)
        compare.check_equal(alone, expected[0], 'out')


def test_a_graph_replays_a_hundred_times(cuda):
    case = Case(1000, 1000, causal=True)
    tensors = case.tensors(cuda)
    expected = run(tensors, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(tensors, case)
    for _ in range(100):
        got[0].fill_(float('nan'))
        graph.replay()
        check_same(got, expected)


def test_empty_tensors_in_a_graph(cuda):
    q = torch.randn(2, 5, 4, 128, dtype=torch.bfloat16, device=cuda)
    k = q[:, :0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_attn_func(q, k, k, return_attn_probs=True)
        alone = flash_attn_func(q, k, k)
        empty = flash_attn_func(k, q, q)
    for result in (out, lse, alone):
        result.fill_(float('nan'))
    graph.replay()
    assert (out == 0).all() and lse.isneginf().all() and (alone == 0).all()
    assert empty.shape == (2, 0, 4, 128)


# ------------------------------------------------------------------------------------- second GPU
@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('layout', [layouts.DIRECT[0], layouts.COPIED[0]], ids=str)
def test_tensors_on_another_gpu_than_the_current_one(layout, kind, second_cuda):
    case = CASE.of(kind)
    tensors = case.tensors(torch.device('cuda', 0))
    expected = run(tensors, case)
    assert torch.cuda.current_device() == 0
    there = [layout.place(x.to(second_cuda)) for x in tensors]
    out, lse = run(there, case)
    assert out.device == lse.device == second_cuda and torch.cuda.current_device() == 0
    check_same((out.to('cuda:0'), lse.to('cuda:0')), expected)


def test_inputs_on_two_gpus_are_refused(second_cuda):
    q, k, v = Case(8, 8).tensors(torch.device('cuda', 0))
    text = 'flash_attn3.flash_attn_func: expected k on the device of q, cuda:0, got cuda:1'
    with pytest.raises(RuntimeError, match=text):
        flash_attn_func(q, k.to(second_cuda), v)
