"""Loading the library of kernels, in new processes; what is asked of a driver on the first call."""
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import flash_attn3
from flash_attn3 import _library, planning

from tests import bad_inputs
from tests.cases import Case

PROBE = 'from flash_attn3 import _library; print(_library.KERNELS_MISSING)'


def output_of(code: str, **environment: str) -> str:
    result = subprocess.run([sys.executable, '-c', code], env=os.environ | environment, text=True,
                            capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_kernels_can_be_switched_off():
    reason = output_of(PROBE, FLASH_ATTN3_DISABLE_KERNELS='1')
    assert reason == 'FLASH_ATTN3_DISABLE_KERNELS=1 is set'


@pytest.mark.parametrize('content, reason', [
    (None, 'does not exist (flash_attn3 was installed without kernels)'),
    ('not a library', 'could not be loaded: '),
])
def test_a_library_that_does_not_load_leaves_the_cpu_path(content, reason, tmp_path):
    path = tmp_path / 'kernels.so'
    if content is not None:
        path.write_text(content)
    code = PROBE + '; import torch, flash_attn3; x = torch.ones(1, 3, 2, 8); ' \
                   'print((flash_attn3.flash_attn_func(x, x, x) == x).all().item())'
    missing, is_right = output_of(code, FLASH_ATTN3_LIBRARY=str(path)).splitlines()[-2:]
    assert is_right == 'True'
    assert 'CPU build' in missing or (str(path) in missing and reason in missing)


def test_import_does_not_initialise_cuda():
    code = 'import torch, flash_attn3; print(torch.cuda.is_initialized())'
    assert output_of(code) == 'False'


# ----------------------------------------------------------------------------------------- driver
GPU = torch.device('cuda', 0)
OLD_DRIVER = 'flash_attn3.device: expected a newer driver, got an old one'


class _OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a CUDA device."""
    is_cuda = True
    device = GPU
    __torch_function__ = torch._C._disabled_torch_function_impl

    def get_device(self) -> int:
        return 0


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """gpu(driver's problem, capability): a stand-in for a GPU, its driver and the kernel library.

    Gives the list of the library's answers so far.
    """
    def pretend(problem, capability=(9, 0)):
        source, library = tmp_path / 'library.cpp', tmp_path / 'library.so'
        source.write_text('extern "C" char const* flash_attn3_driver_problem() '
                          f'{{ return "{problem}"; }}\n')
        subprocess.run(['g++', '-shared', '-fPIC', source, '-o', library], check=True)
        facts = SimpleNamespace(major=capability[0], minor=capability[1],
                                multi_processor_count=132, L2_cache_size=50 << 20)
        answers, ask = [], _library._driver_problem
        monkeypatch.setattr(_library, '_driver_problem',
                            lambda: answers.append(ask()) or answers[-1])
        monkeypatch.setattr(_library, '_LIBRARY_PATH', library)
        monkeypatch.setattr(_library, 'KERNELS_MISSING', '')
        monkeypatch.setattr(_library, '_hopper_devices', {})
        monkeypatch.setattr(_library, 'SERVED_DEVICES', {-1})
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
        monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device: facts)
        return answers
    return pretend


def test_an_old_driver_is_named_on_every_call(gpu):
    answers = gpu(OLD_DRIVER)
    q, k, v = (x.as_subclass(_OnGpu) for x in bad_inputs.good_arguments('cpu').values())
    for calls in (1, 2):
        with pytest.raises(RuntimeError, match=f'^{OLD_DRIVER}$'):
            flash_attn3.flash_attn_func(q, k, v)
        assert answers == calls * [OLD_DRIVER]
    assert flash_attn3.can_use(q, k, v) == (False, [OLD_DRIVER])


def test_the_driver_is_asked_once_a_device(gpu):
    answers = gpu('')
    for index in (0, 1, 0, 1, 0):
        assert _library.kernels_serve(torch.device('cuda', index))
    assert answers == ['', '']


def test_the_driver_does_not_matter_where_no_kernel_runs(gpu):
    answers = gpu(OLD_DRIVER, capability=(8, 0))
    assert not _library.kernels_serve(GPU)
    assert not answers


def test_can_use_asks_for_the_kernel_that_the_call_takes(gpu, monkeypatch):
    """Packing changes how many rows a tile wastes, and with that the tile."""
    gpu('')
    monkeypatch.setattr(planning, 'built_variants', lambda: ['FwdBf16D64Causal'])
    case = Case(113, 203, heads_q=6, heads_k=2, head_dim=64)
    tensors = [x.as_subclass(_OnGpu) for x in case.tensors('cpu')]
    assert flash_attn3.can_use(*tensors, causal=True) == (True, [])
    assert flash_attn3.can_use(*tensors, causal=True, pack_gqa=False) == (
        False, ['flash_attn3.can_use: expected the kernel FwdBf16D64CausalShort, '
                'got a build without it'])


@pytest.mark.skipif(bool(_library.KERNELS_MISSING), reason=_library.KERNELS_MISSING)
def test_the_library_knows_its_driver():
    problem = _library._driver_problem()
    is_fine = problem == '' or problem.startswith('flash_attn3.device: expected an NVIDIA driver')
    assert is_fine and not torch.cuda.is_initialized()


def test_public_names():
    code = 'import flash_attn3; print(sorted(flash_attn3.__all__), flash_attn3.__version__)'
    names, version = output_of(code).rsplit(' ', 1)
    assert names == "['built_variants', 'can_use', 'explain', 'flash_attn_func']"
    assert version.count('.') == 2
