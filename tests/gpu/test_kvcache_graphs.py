"""flash_attn_with_kvcache in CUDA graphs and on several streams: captured once, replayed with other
lengths, page tables, page ids and data; nothing waits for the GPU.
"""
from __future__ import annotations

import dataclasses
import random
import threading

import pytest
import torch
from torch import Tensor

from flash_attn3 import flash_attn_with_kvcache

from tests.support.cache_cases import CacheCase, Returned, as_bits, call, copied, mixed
from tests.support.cache_oracle import check_same, run
from tests.support.lists import ints

REPLAYS = 100
DELAY_CYCLES = 50_000_000    # about 30 ms
LATENT = dict(heads=(16, 1), head_dim=64, head_dim_v=512, latent=True)
CASES = {
    'dense': CacheCase(mixed(8, 900), 1000, heads=(8, 2)),
    'paged': CacheCase(mixed(8, 900), 1000, page_size=16, heads=(8, 2)),
    'page_1': CacheCase(mixed(8, 900), 1000, page_size=1, heads=(8, 2)),
    'e4m3': CacheCase(mixed(8, 900), 1024, page_size=64, heads=(8, 2), dtype='e4m3'),
    'kv8': CacheCase(mixed(8, 900), 1024, page_size=64, heads=(8, 2), kv8=True),
    'one_part': CacheCase(mixed(8, 900), 1000, page_size=16, num_splits=1),
    'parts': CacheCase(mixed(8, 900), 1000, num_splits=7),
    'fixed': CacheCase(mixed(8, 900), 1000, page_size=16, split_size=128),
    'metadata': CacheCase(mixed(8, 900), 1000, metadata=True),
    'window': CacheCase(mixed(8, 900), 1000, page_size=16, window=(200, 0), sinks='fp32'),
    'leftpad': CacheCase(((1, 900), (1, 33)), 1000, leftpad=(7, 33)),
    'latent': CacheCase(mixed(8, 900), 1024, page_size=64, **LATENT),
    'latent_dense': CacheCase(mixed(8, 900, 3), 1000, causal=True, **LATENT),
}
APPENDS = {
    'append': CacheCase(mixed(8, 900), 1000, heads=(8, 2), new=(1,) * 8),
    'append_paged': CacheCase(mixed(8, 900), 1000, page_size=16, new=(1,) * 8, rotary=1.0),
    'append_many': CacheCase(mixed(8, 900, 5), 1000, page_size=7, new=(5,) * 8, rotary=0.5,
                             causal=True),
    'append_kv8': CacheCase(mixed(8, 900), 1024, page_size=64, kv8=True, new=(1,) * 8, rotary=1.0),
    'append_by_page': CacheCase(mixed(8, 900), 1024, page_size=64, kv8=True, by_page=True,
                                new=(1,) * 8, rotary=1.0),
    'append_latent': CacheCase(mixed(8, 900), 1024, page_size=64, new=(1,) * 8, rotary=1.0,
                               **LATENT),
    'append_e4m3': CacheCase(mixed(8, 900), 1024, page_size=64, dtype='e4m3', new=(1,) * 8),
}
every_case = pytest.mark.parametrize('case', (CASES | APPENDS).values(), ids=CASES | APPENDS)


def with_lengths(case: CacheCase, pick: random.Random) -> CacheCase:
    """The same call for sequences of other lengths: all short, all full, or any. That makes other
    data and pages too.
    """
    new = case.new or (0,) * case.batch
    pads = case.leftpad or (0,) * case.batch
    kind = pick.choice(('short', 'full', 'any', 'any'))
    lengths = []
    for (queries, _), more, pad in zip(case.lengths, new, pads):
        most = case.slots - more
        used = {'short': pick.randint(pad, min(most, pad + 3)), 'full': most,
                'any': pick.randint(pad, most)}[kind]
        lengths.append((queries, used))
    return dataclasses.replace(case, lengths=tuple(lengths))


def of_pages(case: CacheCase) -> tuple[str, ...]:
    """What a call may write into."""
    return ('k_cache', 'v_cache') + ('k_descale', 'v_descale') * case.by_page


class Captured:
    """A graph of one call, whose inputs are exchanged in place."""

    def __init__(self, case: CacheCase, device: torch.device) -> None:
        self.case = case
        full = dataclasses.replace(case, lengths=tuple(
            (one[0], case.slots - more) for one, more in zip(
                case.lengths, case.new or (0,) * case.batch)))
        self.arguments = full.arguments(device)    # as many pages as there may ever be
        self.graph = torch.cuda.CUDAGraph()
        call(case, copied(self.arguments))
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.results = call(case, self.arguments)

    def load(self, given: dict) -> None:
        """New values of all tensors; a smaller cache goes to the front of the pages."""
        for name, own in self.arguments.items():
            if not isinstance(own, Tensor) or name == 'scheduler_metadata':
                continue
            x = given[name]
            if name in of_pages(self.case):
                as_bits(own).fill_(torch.tensor(torch.nan).to(own.dtype).view(
                    as_bits(own).dtype).item())
                as_bits(own)[:x.size(0)] = as_bits(x)
            else:
                as_bits(own).copy_(as_bits(x))

    def replay(self) -> Returned:
        for x in self.results.tensors:
            x.fill_(torch.nan)
        self.graph.replay()
        return self.results


@every_case
def test_a_hundred_replays(case, cuda):
    """Captured with full caches, replayed with shorter and longer ones, other tables and page ids:
    the number of parts must not depend on the lengths at capture, nor a counter be left set.
    """
    pick = random.Random(str(case))
    graph = Captured(case, cuda)
    for _ in range(REPLAYS):
        other = with_lengths(case, pick)
        given = other.arguments(cuda)
        graph.load(given)
        wanted, after = run(other, given, **{name: graph.arguments[name] for name in (
            'scheduler_metadata',) if name in given})
        check_same(graph.replay(), wanted)
        for name in of_pages(case):
            count = after[name].size(0)
            assert torch.equal(as_bits(graph.arguments[name])[:count], as_bits(after[name]))


@pytest.mark.smoke
@every_case
def test_the_same_replay_again(case, cuda):
    """The same bits each time."""
    graph = Captured(case, cuda)
    given = case.arguments(cuda)
    graph.load(given)
    wanted, _ = run(case, given)
    for _ in range(10):
        check_same(graph.replay(), wanted)


def test_a_graph_that_decodes(cuda):
    """Each replay appends a token and moves the lengths on, all on the device."""
    case = CacheCase(((1, 0), (1, 37), (1, 130)), 200, page_size=16, new=(1,) * 3, rotary=1.0,
                     causal=True, split_size=64)
    full = dataclasses.replace(case, lengths=((1, 199),) * 3)
    table = full.arguments(cuda)['page_table']
    arguments = full.arguments(cuda) | {'cache_seqlens': ints([0, 37, 130], cuda)}
    for name in ('k_cache', 'v_cache'):
        arguments[name].normal_()
    eager = copied(arguments) | {'cache_seqlens': arguments['cache_seqlens'].clone()}
    graph = torch.cuda.CUDAGraph()
    call(case, copied(arguments))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = call(case, arguments)
        arguments['cache_seqlens'] += 1
    for _ in range(60):
        wanted = call(case, eager)
        eager['cache_seqlens'] += 1
        graph.replay()
        check_same(results, wanted)
    assert torch.equal(arguments['page_table'], table)
    assert torch.equal(as_bits(arguments['k_cache']), as_bits(eager['k_cache']))


# ----------------------------------------------------------------------------------------- streams
@pytest.mark.smoke
@every_case
def test_nothing_waits_for_the_gpu(case, cuda):
    """The call returns while the stream is still busy before it."""
    arguments = case.arguments(cuda)
    call(case, copied(arguments))
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY_CYCLES)
    call(case, arguments)
    assert not torch.cuda.current_stream().query()


@pytest.mark.smoke
@every_case
def test_side_stream_waits_for_a_slow_producer(case, cuda):
    """Cache, tables and lengths arrive late on the side stream."""
    arguments = case.arguments(cuda)
    wanted, _ = run(case, arguments)
    late = {name: torch.zeros_like(x) if isinstance(x, Tensor) else x
            for name, x in arguments.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        for name, x in arguments.items():
            if isinstance(x, Tensor):
                as_bits(late[name]).copy_(as_bits(x))
        got = call(case, late)
    stream.synchronize()
    check_same(got, wanted)


def test_launches_that_depend_on_each_other(cuda):
    """An append, attention on it, and the next append, launched before the ones in front are done:
    each must wait for what it reads and for who still reads what it writes.
    """
    case = CacheCase(((1, 100),) * 4, 400, page_size=16, new=(1,) * 4, rotary=1.0, causal=True)
    full = dataclasses.replace(case, lengths=((1, 399),) * 4)
    arguments = full.arguments(cuda) | {'cache_seqlens': ints([100] * 4, cuda)}
    for name in ('k_cache', 'v_cache'):
        arguments[name].normal_()

    def decode(own: dict, after_each=lambda: None) -> Tensor:
        lengths = own['cache_seqlens'].clone()
        q = own['q']
        for _ in range(100):
            q, *_ = flash_attn_with_kvcache(**own | {'q': q, 'k': q[:, :, :2], 'v': q[:, :, 2:4],
                                                     'cache_seqlens': lengths})
            after_each()
            lengths += 1
            after_each()
        return q

    slow, fast = copied(arguments), copied(arguments)
    wanted, got = decode(slow, torch.cuda.synchronize), decode(fast)
    assert torch.equal(as_bits(got), as_bits(wanted))
    assert torch.equal(as_bits(fast['k_cache']), as_bits(slow['k_cache']))


@every_case
def test_two_streams_at_once(case, cuda):
    """No workspace or counter is shared between them."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    cases = [case, dataclasses.replace(case, logit_std=2.0)]
    given = [one.arguments(cuda) for one in cases]
    wanted = [run(*pair)[0] for pair in zip(cases, given)]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(30):
        for stream, one, arguments, kept in zip(streams, cases, given, results):
            with torch.cuda.stream(stream):
                kept.append(call(one, arguments))
    torch.cuda.synchronize()
    for kept, one in zip(results, wanted):
        for got in kept:
            check_same(got, one)


def test_four_threads(cuda):
    """Streams of their own, first calls at once."""
    cases = [dataclasses.replace(case, heads=(8, 1 if case.latent else 2))
             for case in CASES.values()]
    given = [case.arguments(cuda) for case in cases]
    torch.cuda.synchronize()
    results: list[Returned | None] = [None] * len(cases)

    def work(first: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(first, len(cases), 4):
                results[i] = call(cases[i], given[i])
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for case, arguments, got in zip(cases, given, results):
        check_same(got, run(case, arguments)[0])


def test_metadata_may_be_freed_after_the_call(cuda):
    """Their memory is given to others of the same stream at once."""
    case = dataclasses.replace(CASES['metadata'], metadata=False)
    arguments = case.arguments(cuda)
    wanted, _ = run(case, arguments)
    metadata = case._metadata(arguments)
    size = metadata.numel()
    torch.cuda._sleep(DELAY_CYCLES)
    got = call(case, arguments | {'scheduler_metadata': metadata})
    del metadata
    spoiled = [torch.full((size,), -1, dtype=torch.int32, device=cuda) for _ in range(4)]
    check_same(got, wanted)
    assert all((x == -1).all() for x in spoiled)


@pytest.mark.smoke
@every_case
def test_tensors_on_another_gpu_than_the_current_one(case, second_cuda):
    arguments = case.arguments(torch.device('cuda', 0))
    wanted, _ = run(case, arguments)
    there = {name: x.to(second_cuda) if isinstance(x, Tensor) else x
             for name, x in arguments.items()}
    got = call(case, there)
    assert got.out.device == second_cuda and torch.cuda.current_device() == 0
    check_same(Returned(*(x.to('cuda:0') for x in got)), wanted)


def test_no_allocation_grows_with_the_lengths(cuda):
    """What a call asks for is the same for short and for full caches."""
    asked = []
    for used in (1, 900):
        case = CacheCase(((1, used),) * 8, 1000, page_size=16)
        arguments = case.arguments(cuda)
        call(case, arguments)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats(cuda)['requested_bytes.all.current']
        torch.cuda.reset_peak_memory_stats(cuda)
        results = call(case, arguments)
        asked.append(torch.cuda.memory_stats(cuda)['requested_bytes.all.peak'] - before)
        del results
    assert asked[0] == asked[1]
