"""Single files of clients' wheels, read from the package index without the rest of the wheel.

    python -m tests.support.client_files [DISTRIBUTION ...]    # default: all; prints their folder

They are kept in .venv-clients/files, which git ignores; a machine without a network finds them
there when the folder was copied to it.
"""
from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.checkout import ROOT

FOLDER = ROOT / '.venv-clients' / 'files'
_OPS = 'sglang/kernels/ops/attention'
WHEELS = {    # distribution: (version, its files)
    'vllm': ('0.33.0', ('vllm/vllm_flash_attn/__init__.py',
                        'vllm/vllm_flash_attn/flash_attn_interface.py',
                        'vllm/third_party/flashmla/flash_mla_interface.py')),
    'sglang': ('0.5.23', (f'{_OPS}/flash_attention.py', f'{_OPS}/flash_attention_v3.py',
                          f'{_OPS}/flash_mla_interface.py')),
    'sgl-flash-mla': ('1.0.0', tuple(f'flash_mla/{name}' for name in (
        '__init__.py', 'VERSION', 'flash_mla_interface.py', 'fused_norm_rope_attn_rope_cast.py'))),
    'sglang-kernel': ('0.4.10', ('sgl_kernel/flash_attn.py', 'sgl_kernel/debug_utils.py')),
}
NOT_FOUND = 3    # the exit code


def files_of(distribution: str) -> dict[str, bytes]:
    """{path in the wheel: content} of WHEELS. Skips the test where the index cannot be reached."""
    if not _are_here(distribution):
        done = subprocess.run([sys.executable, '-m', 'tests.support.client_files', distribution],
                              capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode == NOT_FOUND:
            pytest.skip(done.stderr.strip().splitlines()[-1])
        assert done.returncode == 0, done.stderr
    folder = _folder(distribution)
    return {name: (folder / name).read_bytes() for name in WHEELS[distribution][1]}


def _folder(distribution: str) -> Path:
    return FOLDER / f'{distribution}-{WHEELS[distribution][0]}'


def _are_here(distribution: str) -> bool:
    return all((_folder(distribution) / name).exists() for name in WHEELS[distribution][1])


def fetch(distribution: str) -> None:
    """Reads the end of the wheel and these files by HTTP ranges, with pip's settings and index.

    Raises:
        OSError: the index has no wheel of the version for this Python, or was not reached.
    """
    # pip has no public interface; this runs in a process of its own.
    from pip._internal.commands.download import DownloadCommand
    from pip._internal.exceptions import PipError
    from pip._internal.network.lazy_wheel import (
        HTTPRangeRequestUnsupported, LazyZipOverHTTP)
    from pip._vendor.packaging.specifiers import SpecifierSet
    version, names = WHEELS[distribution]
    command = DownloadCommand('download', '')
    with command.main_context():
        options, _ = command.parse_args(['--no-deps', '--retries=1', '--timeout=10', distribution])
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)
        found = finder.find_best_candidate(distribution, SpecifierSet(f'=={version}'))
        if found.best_candidate is None:
            raise OSError('the package index was not reached, or has no wheel for this Python')
        try:
            remote = LazyZipOverHTTP(found.best_candidate.link.url_without_fragment, session)
        except (HTTPRangeRequestUnsupported, PipError) as error:
            raise OSError(repr(error)) from error
        with zipfile.ZipFile(remote) as wheel:
            for name in names:
                _write(_folder(distribution) / name, wheel.read(name))


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: several processes may do it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f'{path.name}.{os.getpid()}')
    partial.write_bytes(content)
    partial.replace(path)


def main(distributions: list[str]) -> int:
    for distribution in distributions or WHEELS:
        try:
            if not _are_here(distribution):
                fetch(distribution)
        except OSError as error:
            print(f'needs files of {distribution} {WHEELS[distribution][0]}: {error}',
                  file=sys.stderr)
            return NOT_FOUND
    print(FOLDER)
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
