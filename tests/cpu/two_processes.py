"""Two processes on a mesh, or more, for the tests of parallel training: started once."""
from __future__ import annotations

import datetime
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

COUNT = 2
_TIMEOUT_S = 60


def _serve(rank: int, count: int, backend: str, rendezvous: str,
           connection: Connection) -> None:
    """Runs what it is sent, until that is None; answers with a traceback, or ''."""
    torch.set_num_threads(1)
    if backend == 'nccl':
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f'file://{rendezvous}', rank=rank,
                            world_size=count,
                            timeout=datetime.timedelta(seconds=_TIMEOUT_S // 2))
    while (work := connection.recv()) is not None:
        function, arguments = work
        try:
            torch.manual_seed(0)
            function(rank, *arguments)
            connection.send('')
        except BaseException:
            connection.send(traceback.format_exc())
    # After FSDP2 with gloo, torch 2.11 aborts one process in ten while the interpreter ends.
    os._exit(0)


class Pair:
    """Two such processes or another number, with gloo on the CPU or with NCCL on a GPU each. After
    a failure the next call starts new ones.
    """

    def __init__(self, backend: str = 'gloo', count: int = COUNT):
        self._backend, self._count = backend, count
        self._processes: list = []
        self._connections: list[Connection] = []

    def run(self, function: Callable, *arguments) -> None:
        """function(rank, *arguments) in all, with the same seed; fails with their tracebacks."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, arguments))
        failures = [connection.recv() if connection.poll(_TIMEOUT_S) else 'no answer'
                    for connection in self._connections]
        if any(failures):
            self._end()
            raise AssertionError('\n'.join(failures))

    def close(self) -> None:
        for connection in self._connections:
            connection.send(None)
        for process in self._processes:
            process.join(_TIMEOUT_S)
        self._end()

    def _start(self) -> None:
        context = multiprocessing.get_context('spawn')
        folder = Path(tempfile.mkdtemp())
        for rank in range(self._count):
            mine, theirs = context.Pipe()
            arguments = rank, self._count, self._backend, str(folder / 'meet'), theirs
            process = context.Process(target=_serve, args=arguments)
            process.start()
            self._processes.append(process)
            self._connections.append(mine)

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []


def pair_on(device: str, most: int = COUNT) -> Iterator[Pair]:
    """For a fixture: two processes with a GPU each (NCCL), or as many up to `most` as there are
    GPUs; two on the CPU (gloo).
    """
    is_gpu = device == 'cuda'
    if is_gpu and torch.cuda.device_count() < COUNT:
        pytest.skip('needs a second GPU')
    pair = Pair('nccl', min(most, torch.cuda.device_count())) if is_gpu else Pair()
    yield pair
    pair.close()


def own_device(rank: int) -> torch.device:
    """In such a process."""
    return torch.device('cuda', rank) if dist.get_backend() == 'nccl' else torch.device('cpu')
