"""tests/client_versions.py: which skipped tests fail a run with other versions."""
import subprocess
import sys

import pytest

from tests.client_versions import unexpected_skips

MODULE = '''
import pytest
pytest.importorskip('torch.nothing', reason='PyTorch has the hook from 2.11 on')
'''
TESTS = '''
import pytest

def test_runs():
    pass

def test_of_another_version():
    pytest.skip('transformers wants another version of kernels')

def test_of_a_client_that_is_not_there():
    pytest.importorskip('nothing', reason='the contract is with nothinging')
'''


@pytest.mark.slow
def test_skips_without_a_version_are_unexpected(tmp_path):
    """In reports of pytest itself: of a module, of a test."""
    (tmp_path / 'test_module.py').write_text(MODULE)
    (tmp_path / 'test_some.py').write_text(TESTS)
    report = tmp_path / 'report'
    subprocess.run([sys.executable, '-m', 'pytest', '--quiet', '-p', 'no:cacheprovider',
                    f'--junitxml={report}', tmp_path], cwd=tmp_path, check=True,
                   capture_output=True)
    found, = unexpected_skips(report)
    assert 'test_of_a_client_that_is_not_there' in found and 'the contract is with nothing' in found
