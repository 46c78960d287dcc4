"""What all tests share: the device to run on, and the reasons to skip.

tests/gpu runs on CUDA; `pytest tests/gpu --device cpu` runs the same tests on the CPU path, to try
the tests themselves on a machine without a GPU; `--device emulated` runs the kernels there
(tools/ptx_emulator).
"""
from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from flash_attn3.ops import library

from tools.ptx_emulator.library import LIBRARY, Emulator

MOST_KEPT_BYTES = 1 << 30    # by an allocator between tests; other processes share the GPU
EMULATOR = pytest.StashKey[Emulator]()
# A fifth and 20 times of what tests ask for: tests/cpu/drawn.py.
hypothesis.settings.register_profile('fast', max_examples=20)
hypothesis.settings.register_profile('long', max_examples=2000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--device', choices=('cuda', 'cpu', 'emulated'), default='cuda',
                     help='where tests/gpu runs; default: cuda')
    parser.addoption('--part', default='1/1', metavar='I/N',
                     help='the I-th of N stretches of the tests; default: all')


def pytest_configure(config: pytest.Config) -> None:
    if workers := os.environ.get('PYTEST_XDIST_WORKER_COUNT'):
        # Threads of several processes would wait for each other's cores.
        threads = max(1, (os.cpu_count() or 1) // int(workers))
        os.environ['OMP_NUM_THREADS'] = str(threads)    # for processes that tests start
        torch.set_num_threads(threads)
    if config.getoption('--device') == 'emulated':
        if not LIBRARY.exists():
            raise pytest.UsageError(f'--device emulated: expected {LIBRARY.name}; hint: '
                                    'python -m tools.ptx_emulator.build, with some variants')
        config.stash[EMULATOR] = Emulator(LIBRARY)


def stretch(count: int, part: str) -> tuple[int, int]:
    """Where part 'i/n' of so many tests begins and ends."""
    index, parts = map(int, part.split('/'))
    return count * (index - 1) // parts, count * index // parts


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    begin, end = stretch(len(items), config.getoption('--part'))
    config.hook.pytest_deselected(items=items[:begin] + items[end:])
    items[:] = items[begin:end]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A selection of the emulator's of which all was skipped is an error."""
    reporter = session.config.pluginmanager.get_plugin('terminalreporter')
    if EMULATOR in session.config.stash and reporter and not reporter.stats.get('passed'):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def missing_hopper() -> str:
    """Why kernels cannot run on GPU 0, or ''."""
    if not torch.cuda.is_available():
        return 'needs a GPU of compute capability 9.0; this machine has no GPU'
    if torch.cuda.get_device_capability(0) != (9, 0):
        return f'needs a GPU of compute capability 9.0; got {torch.cuda.get_device_name(0)}'
    return ''


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of tests/gpu: the current GPU, or what --device says."""
    if request.config.getoption('--device') != 'cuda':
        return torch.device('cpu')
    if reason := missing_hopper():
        pytest.skip(reason)
    assert not library.KERNELS_MISSING, f'a Hopper GPU, but {library.KERNELS_MISSING}'
    return torch.device('cuda', torch.cuda.current_device())


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """A Hopper GPU, for tests of what only CUDA has: streams, graphs, launches."""
    if device.type != 'cuda':
        pytest.skip('needs a GPU of compute capability 9.0; --device cpu was given')
    return device


@pytest.fixture
def kernels(device: torch.device, request: pytest.FixtureRequest) -> torch.device:
    """Where nobody sees bad lengths: a GPU, or the emulator."""
    if request.config.getoption('--device') == 'cpu':
        pytest.skip('the CPU path refuses such lengths')
    return device


@pytest.fixture
def second_cuda(cuda: torch.device) -> torch.device:
    """A second Hopper GPU; the first stays the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip('needs a second GPU; this machine has one')
    if torch.cuda.get_device_capability(1) != (9, 0):
        pytest.skip(f'needs a second GPU of compute capability 9.0; '
                    f'got {torch.cuda.get_device_name(1)}')
    return torch.device('cuda', 1)


@pytest.fixture
def needs_memory(cuda: torch.device):
    """needs_memory(gigabytes): skips the test when the GPU has less free."""
    def check(gigabytes: float) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(cuda)[0] / 1e9
        if free < gigabytes:
            pytest.skip(f'needs {gigabytes:g} GB of GPU memory; {free:.0f} GB are free')
    yield check
    torch.cuda.empty_cache()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile as in a new process."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _memory_goes_back() -> Iterator[None]:
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > MOST_KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _kind_is_built(request: pytest.FixtureRequest) -> None:
    """Skips a test of a kind of which FLASH_ATTN3_VARIANTS left a kernel out of this build."""
    parameters = request.node.callspec.params if hasattr(request.node, 'callspec') else {}
    kind = parameters.get('kind')
    if not hasattr(kind, 'missing_variants') or 'device' not in request.fixturenames:
        return
    if emulator := request.config.stash.get(EMULATOR, None):
        names = [facts['name'] for facts in kind.variants()]
        missing = [name for name in names if not emulator.has_variant(name)]
    else:
        missing = [] if missing_hopper() else kind.missing_variants()
    if missing:
        pytest.skip(f'{", ".join(missing)} not in this build')


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """Skips what the emulator was built without: it seldom has all variants."""
    try:
        return (yield)
    except (RuntimeError, AssertionError) as error:
        if EMULATOR in item.config.stash and 'got a build without it' in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    if emulator := request.config.stash.get(EMULATOR, None):
        emulator.seed(0)
