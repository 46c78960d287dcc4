"""The contract tests of clients, and the tests of the ops, with other versions:

    python -m tests.client_versions 'torch==2.10.*' 'transformers==5.17.*'
    python -m tests.client_versions torch transformers    # the newest of the package index

To be called with the Python of .venv-clients, whose other packages they see. pip installs them into
an environment that is removed at the end: 5 GB, since PyTorch brings its CUDA packages. A test that
is skipped for any other reason than a version is a failure.
"""
from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from tests.support.checkout import ROOT, new_environment, run, site_packages

TESTS = ('test_integrations*.py', 'test_compat*.py', 'test_doctor.py', 'test_*op.py',
         'test_interface.py', 'test_autograd.py', 'test_compile.py', 'test_parallel.py')
BY_VERSION = ('PyTorch has the hook from 2.11 on', 'varlen_attn of this PyTorch has no pages',
              'transformers wants another version of kernels',
              'this transformers has no names of others in continuous batching')
VERSIONS = 'import torch, transformers; print(torch.__version__, transformers.__version__)'


def environment(folder: Path, requirements: list[str]) -> Path:
    """Its Python. What it has itself comes before the packages of the running environment."""
    python = new_environment(folder)
    own = site_packages(python)
    folders = [path for path in sys.path if path.endswith('site-packages')]
    (own / 'others.pth').write_text('\n'.join(folders))
    # torchvision is compiled for one version of torch.
    install = [python, '-m', 'pip', 'install', '--quiet', '--upgrade']
    run([*install, *requirements, 'torchvision'], ROOT)
    return python


def unexpected_skips(report: Path) -> list[str]:
    """'name: reason' of each test that could have run."""
    return [f'{case.get("classname")}.{case.get("name")}: {skip.text or skip.get("message")}'
            for case in ElementTree.parse(report).iter('testcase') for skip in case.iter('skipped')
            if not any(reason in (skip.text or '') + skip.get('message', '')
                       for reason in BY_VERSION)]


def main(requirements: list[str]) -> int:
    files = [path for pattern in TESTS for path in sorted((ROOT / 'tests/cpu').glob(pattern))]
    with tempfile.TemporaryDirectory() as folder:
        python, report = environment(Path(folder) / 'env', requirements), Path(folder) / 'report'
        print(run([python, '-c', VERSIONS], ROOT).splitlines()[-1], flush=True)
        done = subprocess.run(
            [python, '-m', 'pytest', *files, '--numprocesses', 'auto', '--maxprocesses', '8',
             '--dist', 'loadfile', '--disable-warnings', f'--junitxml={report}'], cwd=ROOT)
        skipped = unexpected_skips(report) if report.exists() else []
    for line in skipped:
        print('skipped, though no version asks for it:', line)
    return done.returncode or bool(skipped)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
