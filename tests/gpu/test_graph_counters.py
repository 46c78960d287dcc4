"""The counters of launches (csrc/schedule/counters.h) in CUDA graphs, on streams and in threads:
branches, child graphs, several instances, failed captures, streams that end while they work.

Each kind of work uses other counters: tickets of tiles, parts that are complete, and those between
the two kernels of a latent cache. It leaves most multiprocessors to others, so that launches
overlap.
"""
from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from flash_attn3 import flash_attn_func

from tests.support import compare
from tests.support.cache_cases import CacheCase, as_bits, call, mixed
from tests.support.cases import Case

MARGIN = 116            # multiprocessors that a launch does not use
MORE_THAN_A_SLAB = 300  # users of counters
DELAY_CYCLES = 2_000_000    # about 1 ms
TICKETS = Case(700, 700, causal=True, sm_margin=MARGIN)
CACHES = {
    'parts': CacheCase(mixed(8, 900), 1000, page_size=16, heads=(8, 2), sm_margin=MARGIN),
    'pair': CacheCase(mixed(8, 900), 1024, page_size=64, heads=(16, 1), head_dim=64,
                      head_dim_v=512, latent=True, sm_margin=MARGIN),
}
NAMES = ('tickets', *CACHES)
each_name = pytest.mark.parametrize('name', NAMES)


class Work:
    """A call that can be made again and again, and the bits that it must give."""

    def __init__(self, name: str, device: torch.device) -> None:
        if name == 'tickets':
            tensors = TICKETS.tensors(device)
            self.run: Callable[[], Sequence[Tensor]] = lambda: flash_attn_func(
                *tensors, **TICKETS.arguments(), return_attn_probs=True)
        else:
            given = CACHES[name].arguments(device)
            self.run = lambda: call(CACHES[name], given).tensors
        self.expected = self.run()
        torch.cuda.synchronize()

    def check(self, results: Sequence[Tensor]) -> None:
        for got, expected in zip(results, self.expected, strict=True):
            assert torch.equal(as_bits(got), as_bits(expected))

    def captured(self, keep_graph: bool = False) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]:
        graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
        with torch.cuda.graph(graph):
            results = self.run()
        return graph, results


class IntoGiven:
    """Tickets alone, without an allocation: also where memory of the graph is gone."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.tensors = TICKETS.tensors(device)
        self.outs = [torch.full_like(self.tensors[0], torch.nan) for _ in range(count)]
        self.expected = flash_attn_func(*self.tensors, **TICKETS.arguments())
        torch.cuda.synchronize()

    def run(self, index: int) -> None:
        flash_attn_func(*self.tensors, **TICKETS.arguments(), out=self.outs[index])

    def captured(self, index: int, keep_graph: bool = False) -> torch.cuda.CUDAGraph:
        """Without the wait for the GPU of torch.cuda.graph."""
        graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            self.run(index)
            graph.capture_end()
        return graph

    def check(self) -> None:
        torch.cuda.synchronize()
        for out in self.outs:
            compare.check_equal(out, self.expected, 'out')


def spoil(results: Sequence[Tensor]) -> None:
    for x in results:
        x.fill_(torch.nan)


@pytest.fixture
def cudart(cuda) -> Callable:
    """cudart(name, ...): a function of the CUDA runtime, without its error."""
    runtime = pytest.importorskip('cuda.bindings.runtime',
                                  reason='what PyTorch has no call for needs cuda-bindings')

    def function(name: str, *arguments):
        error, *results = getattr(runtime, name)(*arguments)
        assert error == runtime.cudaError_t.cudaSuccess, (name, error)
        return results[0] if results else None
    return function


def streams(count: int) -> list[torch.cuda.Stream]:
    found = [torch.cuda.Stream() for _ in range(count)]
    for stream in found:
        stream.wait_stream(torch.cuda.current_stream())
    return found


# ---------------------------------------------------------------------------------------- branches
@pytest.mark.smoke
def test_branches_of_one_capture(cuda):
    """Several launches on each branch, all branches at once."""
    works = [Work(name, cuda) for name in NAMES * 2]
    branches = [torch.cuda.Stream() for _ in works]
    results = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        trunk = torch.cuda.current_stream()
        for work, branch in zip(works, branches):
            branch.wait_stream(trunk)
            with torch.cuda.stream(branch):
                results.append([work.run() for _ in range(3)])
        results.append([works[0].run()])
        for branch in branches:
            trunk.wait_stream(branch)
    for _ in range(30):
        for one in itertools.chain.from_iterable(results):
            spoil(one)
        graph.replay()
        for work, own in zip([*works, works[0]], results):
            for one in own:
                work.check(one)


# ---------------------------------------------------------------------------------- several graphs
@each_name
def test_graphs_of_one_call_at_once(name, cuda):
    works = [Work(name, cuda) for _ in range(3)]
    graphs = [work.captured() for work in works]
    own_streams = streams(len(works))
    for _ in range(10):
        for _, results in graphs:
            spoil(results)
        torch.cuda.synchronize()
        for stream, (graph, _) in [*zip(own_streams, graphs)] * 10:
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for work, (_, results) in zip(works, graphs):
            work.check(results)


@pytest.mark.smoke
@each_name
def test_one_graph_twice_in_another(name, cudart, cuda):
    """Child graphs one after the other, and the captured graph itself."""
    work = Work(name, cuda)
    graph, results = work.captured(keep_graph=True)
    parent = cudart('cudaGraphCreate', 0)
    first = cudart('cudaGraphAddChildGraphNode', parent, None, 0, graph.raw_cuda_graph())
    cudart('cudaGraphAddChildGraphNode', parent, [first], 1, graph.raw_cuda_graph())
    whole = cudart('cudaGraphInstantiate', parent, 0)
    stream = torch.cuda.current_stream()
    for _ in range(20):
        spoil(results)
        cudart('cudaGraphLaunch', whole, stream.cuda_stream)
        work.check(results)
        spoil(results)
        graph.replay()
        work.check(results)
    torch.cuda.synchronize()
    cudart('cudaGraphExecDestroy', whole)
    cudart('cudaGraphDestroy', parent)


@each_name
def test_two_instances_in_turn(name, cudart, cuda):
    """On two streams, of which each waits for the other."""
    work = Work(name, cuda)
    graph, results = work.captured(keep_graph=True)
    instances = [cudart('cudaGraphInstantiate', graph.raw_cuda_graph(), 0) for _ in range(2)]
    first, second = own_streams = streams(2)
    for _ in range(20):
        with torch.cuda.stream(first):
            spoil(results)
        for stream, instance in zip(own_streams, instances):
            cudart('cudaGraphLaunch', instance, stream.cuda_stream)
            second.wait_stream(first)
        first.wait_stream(second)
        torch.cuda.synchronize()
        work.check(results)
    for instance in instances:
        cudart('cudaGraphExecDestroy', instance)


def test_counters_after_instances_that_ran_at_once(cudart, cuda):
    """That is not allowed, and its results are anything; but later graphs have other counters."""
    work = IntoGiven(cuda, 1)
    graph = work.captured(0, keep_graph=True)
    instances = [cudart('cudaGraphInstantiate', graph.raw_cuda_graph(), 0) for _ in range(2)]
    own_streams = streams(2)
    for _ in range(50):
        for stream, instance in zip(own_streams, instances):
            cudart('cudaGraphLaunch', instance, stream.cuda_stream)
    torch.cuda.synchronize()
    for instance in instances:
        cudart('cudaGraphExecDestroy', instance)
    graph.reset()
    later = [work.captured(0) for _ in range(MORE_THAN_A_SLAB)]
    for graph in later:
        spoil(work.outs)
        graph.replay()
        work.check()


# --------------------------------------------------------------------------------- ends of a graph
def test_a_copy_outlives_its_graph(cudart, cuda):
    """Its counters do not become those of a later graph."""
    work = IntoGiven(cuda, 2)
    graph = work.captured(0, keep_graph=True)
    parent = cudart('cudaGraphCreate', 0)
    cudart('cudaGraphAddChildGraphNode', parent, None, 0, graph.raw_cuda_graph())
    copy = cudart('cudaGraphInstantiate', parent, 0)
    cudart('cudaGraphDestroy', parent)
    graph.reset()
    others = [work.captured(1) for _ in range(MORE_THAN_A_SLAB)]
    first, second = streams(2)
    for other in others:
        spoil(work.outs)
        torch.cuda.synchronize()
        for _ in range(4):
            cudart('cudaGraphLaunch', copy, first.cuda_stream)
            with torch.cuda.stream(second):
                other.replay()
        work.check()
    cudart('cudaGraphExecDestroy', copy)


def test_graphs_are_destroyed_while_they_run(cuda):
    """Their counters go to later graphs only when they have ended."""
    work = IntoGiven(cuda, MORE_THAN_A_SLAB)
    for i, stream in zip(range(MORE_THAN_A_SLAB), itertools.cycle(streams(4))):
        graph = work.captured(i)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY_CYCLES // 10)
            graph.replay()
        graph.reset()
    work.check()


class _Interrupted(Exception):
    pass


@pytest.mark.smoke
@each_name
def test_a_capture_that_is_given_up(name, cuda):
    work = Work(name, cuda)
    for _ in range(5):
        with pytest.raises(_Interrupted), torch.cuda.graph(torch.cuda.CUDAGraph()):
            work.run()
            raise _Interrupted
        work.check(work.run())
        graph, results = work.captured()
        for _ in range(3):
            spoil(results)
            graph.replay()
            work.check(results)


def test_a_capture_that_the_driver_gives_up(cudart, cuda):
    """The call is refused: the launches before and after it are right."""
    work, stream = IntoGiven(cuda, 1), streams(1)[0]
    with torch.cuda.stream(stream):
        for _ in range(5):
            cudart('cudaStreamBeginCapture', stream.cuda_stream, _mode('Relaxed'))
            work.run(0)
            with pytest.raises(AssertionError, match='cudaStreamSynchronize'):
                cudart('cudaStreamSynchronize', stream.cuda_stream)
            with pytest.raises(RuntimeError, match='flash_attn3: '):
                work.run(0)
            with pytest.raises(AssertionError, match='cudaStreamEndCapture'):
                cudart('cudaStreamEndCapture', stream.cuda_stream)
            spoil(work.outs)
            work.run(0)
            work.check()


def _mode(name: str):
    from cuda.bindings import runtime
    return getattr(runtime.cudaStreamCaptureMode, f'cudaStreamCaptureMode{name}')


# ----------------------------------------------------------------------------- streams and threads
@pytest.mark.smoke
def test_threads_on_one_stream(cuda):
    """Launches of the others come between the two kernels of a latent cache."""
    works = [Work(name, cuda) for name in ('pair', 'pair', *NAMES)]
    kept = [[] for _ in works]
    start = threading.Barrier(len(works))

    def repeat(work: Work, own: list) -> None:
        start.wait()
        for _ in range(300):
            own.append(work.run())

    threads = [threading.Thread(target=repeat, args=one) for one in zip(works, kept)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for work, own in zip(works, kept):
        assert len(own) == 300
        for results in own:
            work.check(results)


def test_default_streams_of_threads(cuda):
    """cudaStreamPerThread: one handle, a stream for each thread."""
    work = IntoGiven(cuda, 400)

    def half(first: int) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(2)):
            for i in range(first, len(work.outs), 2):
                work.run(i)
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=half, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work.check()
