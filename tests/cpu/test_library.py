"""Loading the library of kernels, and what importing the package must not do. In new processes."""
import os
import subprocess
import sys

import pytest

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


def test_public_names():
    code = 'import flash_attn3; print(sorted(flash_attn3.__all__), flash_attn3.__version__)'
    names, version = output_of(code).rsplit(' ', 1)
    assert names == "['built_variants', 'can_use', 'explain', 'flash_attn_func']"
    assert version.count('.') == 2
