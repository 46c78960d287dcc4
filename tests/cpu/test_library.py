"""Loading the library of kernels and what it asks of the driver then, in new processes."""
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flash_attn3
from flash_attn3.ops import library
from flash_attn3.tools import planning

from tests.support import bad_inputs
from tests.support.cases import Case

pytestmark = pytest.mark.slow

PROBE = 'from flash_attn3.ops import library; print(library.KERNELS_MISSING)'


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    result = subprocess.run([sys.executable, '-c', code], env=os.environ | environment, text=True,
                            capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result


def output_of(code: str, **environment: str) -> str:
    return run(code, **environment).stdout.strip()


def test_kernels_can_be_switched_off(tmp_path):
    """Then nothing is asked of the driver."""
    result = run(PROBE, FLASH_ATTN3_DISABLE_KERNELS='1', **with_driver(tmp_path, OLD))
    assert result.stdout.strip() == 'FLASH_ATTN3_DISABLE_KERNELS=1 is set' and result.stderr == ''


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
needs_library = pytest.mark.skipif(bool(library.KERNELS_MISSING), reason=library.KERNELS_MISSING)
OLD, NEW = 11080, 99000    # CUDA versions, older and newer than any that kernels are built with
OLD_DRIVER = re.compile(
    r'flash_attn3\.device: expected an NVIDIA driver for CUDA \d+\.0 or later \(series \d+\), '
    r'got a driver for CUDA 11\.8; hint: update the driver .*')
CAN_USE = '''
import flash_attn3
import torch
x = torch.ones(1, 3, 2, 64, dtype=torch.bfloat16)
assert (flash_attn3.flash_attn_func(x, x, x) == x).all()
assert not torch.cuda.is_initialized()
print(*flash_attn3.can_use(x, x, x)[1], sep='\\n')
'''
ON_THE_CPU = 'flash_attn3.can_use: expected q on a CUDA device, got cpu'


def with_driver(folder: Path, version: int | None) -> dict[str, str]:
    """The environment for a driver that only knows its version; None: it cannot be loaded."""
    source, library = folder / 'driver.cpp', folder / 'libcuda.so.1'
    if version is None:
        library.write_text('not a library')
    else:
        source.write_text('extern "C" int cuDriverGetVersion(int* version) '
                          f'{{ *version = {version}; return 0; }}\n')
        subprocess.run(['g++', '-shared', '-fPIC', source, '-o', library], check=True)
    others = os.environ.get('LD_LIBRARY_PATH')
    return {'LD_LIBRARY_PATH': f'{folder}:{others}' if others else str(folder)}


@needs_library
def test_import_warns_of_an_old_driver(tmp_path):
    result = run(CAN_USE, **with_driver(tmp_path, OLD))
    on_the_cpu, reason = result.stdout.splitlines()
    assert on_the_cpu == ON_THE_CPU and OLD_DRIVER.fullmatch(reason)
    assert result.stderr.splitlines() == [f'<string>:2: UserWarning: {reason}']


@needs_library
@pytest.mark.parametrize('version', [NEW, None])
def test_import_is_silent_with_a_good_driver_and_without_one(version, tmp_path):
    result = run(CAN_USE, **with_driver(tmp_path, version))
    assert result.stdout.splitlines() == [ON_THE_CPU] and result.stderr == ''


GPU = torch.device('cuda', 0)
PROBLEM = 'flash_attn3.device: expected a newer driver, got an old one'


class _OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a CUDA device."""
    is_cuda = True
    device = GPU
    __torch_function__ = torch._C._disabled_torch_function_impl

    def get_device(self) -> int:
        return 0


@pytest.fixture
def gpu(monkeypatch):
    """gpu(driver's problem, capability): a stand-in for a GPU and the library of kernels."""
    def pretend(problem, capability=(9, 0)):
        facts = SimpleNamespace(major=capability[0], minor=capability[1],
                                multi_processor_count=132, L2_cache_size=50 << 20)
        monkeypatch.setattr(library, 'DRIVER_PROBLEM', problem)
        monkeypatch.setattr(library, 'KERNELS_MISSING', '')
        monkeypatch.setattr(library, '_hopper_devices', {})
        monkeypatch.setattr(library, 'SERVED_DEVICES', {-1})
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
        monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device: facts)
    return pretend


def test_an_old_driver_is_named_on_every_call(gpu):
    gpu(PROBLEM)
    q, k, v = (x.as_subclass(_OnGpu) for x in bad_inputs.good_arguments('cpu').values())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f'^{PROBLEM}$'):
            flash_attn3.flash_attn_func(q, k, v)
    assert flash_attn3.can_use(q, k, v) == (False, [PROBLEM])


def test_a_good_driver_serves_every_device(gpu):
    gpu('')
    for index in (0, 1, 0):
        assert library.kernels_serve(torch.device('cuda', index))
    assert library.SERVED_DEVICES == {-1, 0, 1}


def test_the_driver_does_not_matter_where_no_kernel_runs(gpu):
    gpu(PROBLEM, capability=(8, 0))
    assert not library.kernels_serve(GPU)
    assert library.SERVED_DEVICES == {-1}


def test_can_use_asks_for_the_kernel_that_the_call_takes(gpu, monkeypatch):
    """Packing changes how many rows a tile wastes, and with that the tile."""
    gpu('')
    monkeypatch.setattr(planning, 'built_variants', lambda: ['FwdBf16D64CausalShort'])
    case = Case(33, 203, heads_q=132, heads_k=33, head_dim=64)
    tensors = [x.as_subclass(_OnGpu) for x in case.tensors('cpu')]
    assert flash_attn3.can_use(*tensors, causal=True) == (True, [])
    assert flash_attn3.can_use(*tensors, causal=True, pack_gqa=False) == (
        False, ['flash_attn3.can_use: expected the kernel FwdBf16D64CausalSmall, '
                'got a build without it'])


@pytest.mark.parametrize('options, head_dim_v, name', [
    ({'window_size': (8, 0)}, 64, 'FwdBf16D64GeneralTiny'),
    ({'softcap': 3.0}, 64, 'FwdBf16D64Softcap'),
    ({'return_max_logits': True}, 64, 'FwdBf16D64GeneralTiny'),
    ({}, 128, 'FwdBf16D64x128General'),
    ({'causal': True, 'attention_chunk': 16}, 128, 'FwdBf16D64x128General')])
def test_can_use_asks_for_the_kernel_of_every_feature(options, head_dim_v, name, gpu, monkeypatch):
    gpu('')
    q, k, v = Case(33, 203, head_dim=64).tensors('cpu')
    q, k, v = (x.as_subclass(_OnGpu) for x in (q, k, v.repeat(1, 1, 1, head_dim_v // 64)))
    monkeypatch.setattr(planning, 'built_variants', lambda: [name])
    assert flash_attn3.can_use(q, k, v, **options) == (True, [])
    monkeypatch.setattr(planning, 'built_variants', list)
    assert flash_attn3.can_use(q, k, v, **options) == (
        False, [f'flash_attn3.can_use: expected the kernel {name}, got a build without it'])


def test_can_use_asks_for_the_kernel_of_the_gradients(gpu, monkeypatch):
    gpu('')
    tensors = [x.as_subclass(_OnGpu) for x in Case(33, 203, head_dim=64).tensors('cpu')]
    names = ['FwdBf16D64FullSmall', 'BwdBf16D64Full']
    monkeypatch.setattr(planning, 'built_variants', lambda: names)
    assert flash_attn3.can_use(*tensors) == (True, [])
    tensors[1].requires_grad_()
    assert flash_attn3.can_use(*tensors) == (True, [])
    names.remove('BwdBf16D64Full')
    assert flash_attn3.can_use(*tensors) == (
        False, ['flash_attn3.can_use: expected the kernel BwdBf16D64Full, got a build without it'])
    with torch.no_grad():
        assert flash_attn3.can_use(*tensors) == (True, [])


def test_public_names():
    code = 'import flash_attn3; print(sorted(flash_attn3.__all__), flash_attn3.__version__)'
    names, version = output_of(code).rsplit(' ', 1)
    assert names == ("['AttentionMask', 'PrefixLevel', 'built_variants', 'can_use', 'explain', "
                     "'flash_attn_combine', 'flash_attn_completions_func', "
                     "'flash_attn_fp8_func', 'flash_attn_func', 'flash_attn_qkvpacked_func', "
                     "'flash_attn_sparse_func', 'flash_attn_varlen_fp8_func', "
                     "'flash_attn_varlen_func', "
                     "'flash_attn_with_kvcache', 'get_scheduler_metadata', 'invariant', "
                     "'merge_states', 'pack_tree_mask', 'quantize_fp8', 'shared_prefix_attn']")
    assert version.count('.') == 2
