"""Who has which counters (csrc/schedule/counters.cu), on a CUDA runtime without a GPU. Needs g++
and the headers of CUDA.
"""
from __future__ import annotations

import ctypes
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from build_tools import toolchain
from build_tools.native import CSRC

SOURCE = Path(__file__).with_name('counters_runtime.cpp')
COUNTERS = 2048    # kLaunchCounters
USERS_OF_SLAB = 256
PER_THREAD = 2     # cudaStreamPerThread
STREAMS = 256, 512, 768
TIMEOUT_S = 20


@pytest.fixture(scope='module')
def compiled(tmp_path_factory) -> Path:
    try:
        include = toolchain.find_cuda().include
    except toolchain.BuildError as error:
        pytest.skip(str(error))
    library = tmp_path_factory.mktemp('counters') / 'counters.so'
    subprocess.run([toolchain.find_cxx(), '-std=c++20', '-shared', '-fPIC', '-pthread',
                    '-Wl,-Bsymbolic',    # PyTorch has a CUDA runtime too
                    f'-I{CSRC}', '-isystem', str(include), str(SOURCE), '-o', str(library)],
                   check=True, stdin=subprocess.DEVNULL)
    return library


@pytest.fixture
def cuda(compiled, tmp_path) -> ctypes.CDLL:
    """A copy for each test: the counters are those of the process."""
    own = tmp_path / 'counters.so'
    own.write_bytes(compiled.read_bytes())
    library = ctypes.CDLL(str(own))
    for name, result, arguments in (
            ('counters', ctypes.c_void_p, (ctypes.c_void_p,)),
            ('error_text', ctypes.c_char_p, ()), ('begin', ctypes.c_void_p, (ctypes.c_void_p,)),
            ('pair', ctypes.c_int, (ctypes.c_void_p, ctypes.c_int)),
            ('join', None, (ctypes.c_void_p,) * 2), ('end', None, (ctypes.c_void_p,)),
            ('destroy', None, (ctypes.c_void_p,))):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def values(address: int) -> ctypes.Array:
    return (ctypes.c_int * (COUNTERS + 2)).from_address(address)


def capture(cuda: ctypes.CDLL, *streams: int) -> tuple[int, list[int]]:
    """A graph of launches on streams that join its capture, and their counters."""
    graph = cuda.begin(streams[0])
    for stream in streams[1:]:
        cuda.join(stream, graph)
    found = [cuda.counters(stream) for stream in streams]
    assert found == [cuda.counters(stream) for stream in streams]
    cuda.end(graph)
    return graph, found


def test_streams_and_captures_do_not_share(cuda):
    eager = [cuda.counters(stream) for stream in (0, *STREAMS)]
    assert eager == [cuda.counters(stream) for stream in (0, *STREAMS)]
    captured = [address for _ in range(3) for address in capture(cuda, *STREAMS)[1]]
    everything = sorted([*eager, *captured])
    assert all(b - a >= 4 * (COUNTERS + 2) for a, b in zip(everything, everything[1:]))
    for address in everything:
        assert not any(values(address))


def test_default_streams_of_threads(cuda):
    """Their handle is the same."""
    own = cuda.counters(PER_THREAD)
    with ThreadPoolExecutor(1) as pool:
        others = [pool.submit(cuda.counters, PER_THREAD).result() for _ in range(2)]
    assert others[0] == others[1] != own == cuda.counters(PER_THREAD)


def test_what_graphs_give_back_is_cleared(cuda):
    """No new memory for many graphs one after the other, whatever they left in their counters."""
    kept, of_kept = capture(cuda, STREAMS[0])
    for _ in range(2 * USERS_OF_SLAB):
        graph, (address,) = capture(cuda, STREAMS[0])
        assert not any(values(address)) and address != of_kept[0]
        for i in range(COUNTERS + 2):
            values(address)[i] = i + 1
        cuda.destroy(graph)
    assert cuda.allocations() == 1
    cuda.destroy(kept)


def test_an_aborted_capture_gives_back(cuda):
    for _ in range(2 * USERS_OF_SLAB):
        graph = cuda.begin(STREAMS[0])
        assert cuda.counters(STREAMS[0])
        cuda.destroy(graph)
    assert cuda.allocations() == 1


def test_a_refused_allocation(cuda):
    cuda.refuse_allocations(1)
    assert not cuda.counters(0)
    assert cuda.error_text() == b'flash_attn3: could not allocate counters: out of memory'
    assert not any(values(cuda.counters(0)))


def test_a_graph_is_destroyed_during_an_allocation(cuda):
    """By a thread of CUDA, which must not wait for the one that allocates."""
    graphs = [capture(cuda, STREAMS[0])[0] for _ in range(USERS_OF_SLAB)]
    done = []

    @ctypes.CFUNCTYPE(None)
    def destroy_one() -> None:
        thread = threading.Thread(target=cuda.destroy, args=(graphs[0],), daemon=True)
        thread.start()
        thread.join(TIMEOUT_S)
        done.append(not thread.is_alive())
    cuda.call_during_allocation(destroy_one)
    assert cuda.counters(0)
    assert done == [True]


def test_threads_on_one_stream(cuda):
    """First calls at once."""
    start = threading.Barrier(8)

    def first(_) -> int:
        start.wait()
        return cuda.counters(STREAMS[0])
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(first, range(8)))) == 1


def test_pairs(cuda):
    """A second launch that is refused leaves no counter set, nor do pairs of threads mix."""
    assert cuda.pair(STREAMS[0], 0) == 0
    assert cuda.pair(STREAMS[0], 1) == 0
    assert not any(values(cuda.counters(STREAMS[0])))
    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(lambda i: cuda.pair(STREAMS[0], i % 2), range(400)))
