"""Some kernels on this CPU: a selection of tests/gpu under the emulator, which checks every access
to memory and draws who runs when. `make test-emulated` runs more of them.
"""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from build_tools import toolchain

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = 'FwdE4m3D64Full,FwdE4m3D256Causal,FwdBf16D64Causal*,BwdBf16D64Causal*'
FILES = [f'tests/gpu/test_{name}.py' for name in ('quantize_fp8', 'fp8', 'forward', 'backward')]
SELECTED = ' or '.join([
    'test_signs_of_zeros', 'test_heads_of_clusters', 'test_packed_blocks_of_384_rows',
    '(test_heads_in_turns and 20-64-64)',
    '(test_fp8 and (test_head_dims or test_every_key) and 64-full)',
    '(test_fp8 and test_blocks_of_keys and 256-causal and not window)',    # V in halves
    '(test_forward and (test_batch_entries or test_group_sizes) and d64-bf16-causal)',
    '(test_backward and (test_every_remainder or test_strides) and d64-bf16-causal)'])
FEWEST_PASSED = 66


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, '-m', *arguments], cwd=ROOT, text=True,
                          capture_output=True, stdin=subprocess.DEVNULL)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    return output


def test_kernels_of_each_kind():
    try:
        toolchain.find_cuda()
    except toolchain.BuildError as error:
        pytest.skip(str(error))
    run('tests.emulator.build', VARIANTS)
    output = run('pytest', '-q', '--device', 'emulated', '-k', SELECTED, *FILES)
    passed = re.search(r'(\d+) passed', output)
    assert passed and int(passed[1]) >= FEWEST_PASSED, output[-4000:]
